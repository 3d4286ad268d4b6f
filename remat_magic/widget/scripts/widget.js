// @ts-check
/** @import { Model, Panel, Store, View, Widget } from "./shared.js" */
import { checkpointNames, choiceList } from "./choosing.js";
import { firstScreen, folding } from "./first_screen.js";
import { linking } from "./linking.js";
import { listen, placing, staticCopy } from "./page.js";
import { pinning } from "./pinning.js";
import { keyOf } from "./shared.js";

/*
 * The core: places the HTML that the kernel renders, and hands the reader's actions to whom they concern. Everything
 * escaped was escaped in Python; nothing here makes HTML out of text.
 */

const TRACING = "Tracing…";
/** How long, in ms, a kernel may take to answer, before the reader sees that it may not be there. */
const PATIENCE = 4_000;
const LATE = "No answer from the kernel yet. If it was restarted or has died, run this cell again; what was shown stays readable.";

/** @type {WeakMap<object, Store>} */
const stores = new WeakMap();

/** @param {Model} model @returns {Store} */
function storeOf(model) {
  let store = stores.get(model);
  if (!store) stores.set(model, (store = { views: new Map(), answers: new Map(), screens: new Map(), figures: new Map(), clock: 0 }));
  return store;
}

/**
 * Draws the widget, and draws it anew when it shows another function, or other figures of the same one: nothing of what was
 * drawn holds for that.
 *
 * @param {{model: Model, el: HTMLElement}} context
 * @param {Record<string, (widget: Widget, key: string) => Panel>} makers of the panels, by their tabs
 */
export function render(context, makers) {
  const { model } = context;
  let stop = draw(context, makers);
  const redraw = () => {
    if (!model.get("_frame")) return; // it is closed
    stop();
    stores.delete(model);
    stop = draw(context, makers);
  };
  model.on("change:_frame", redraw);
  return () => {
    model.off("change:_frame", redraw);
    stop();
  };
}

/** @param {{model: Model, el: HTMLElement}} context @param {Record<string, (widget: Widget, key: string) => Panel>} makers */
function draw({ model, el }, makers) {
  const store = storeOf(model);
  // Random, since anywidget gives each widget a module of its own: a counter would begin anew in every one.
  const id = `remat-${Math.random().toString(36).slice(2)}-`;
  const root = document.createElement("div");
  root.className = "remat remat-widget";
  root.hidden = true;
  root.innerHTML = model.get("_frame").replaceAll("__remat__", id);
  el.append(root);

  /** @param {string} selector @returns {any} */
  const one = (selector) => root.querySelector(selector);
  /** @param {string} selector @returns {any[]} */
  const all = (selector) => [...root.querySelectorAll(selector)];
  /** @param {string} name */
  const part = (name) => one(`[data-part="${name}"]`);
  /** @param {string} name */
  const panel = (name) => one(`[data-panel="${name}"]`);

  const status = () => part("status").textContent ?? "";
  let waiting = 0;
  let late = 0;
  const tabs = all('[role="tab"]').map((button) => button.dataset.tab);
  const contents = placing(part);
  const shared = { root, model, store, one, all, part, panel, send, ask, choose, say, status, place: contents.place, copy, open, chosenAt };
  const widget = /** @type {Widget} */ (/** @type {any} */ ({ ...shared, shown: null, tab: tabs[0], panels: {} }));
  widget.linking = linking(widget);
  widget.pinning = pinning(widget);
  const names = checkpointNames(widget);
  const copied = staticCopy(el, model.get("_copy_id"));
  widget.panels.first = firstScreen(widget); // before those that may ask a kernel that is gone
  for (const [key, make] of Object.entries(makers)) widget.panels[key] = make(widget, key);
  Object.assign(widget.panels, { policy: choiceList(widget, "policy"), at: choiceList(widget, "at"), folding: folding(widget) });
  const panels = Object.values(widget.panels);
  /** @type {NonNullable<Panel["controls"]>} */
  const controls = {
    policy: chooseControls,
    at: chooseControls,
    gradient({ value }) {
      send({ type: "gradient", key: value });
      say(TRACING);
    },
    against: ({ value }) => widget.pinning.pin(value ? { policy: value, at: chosenAt() } : null),
    beside: ({ checked }) => root.classList.toggle("remat-beside", checked),
  };
  /** @type {NonNullable<Panel["actions"]>} */
  const actions = {
    apply({ dataset }) {
      // Of the edit that is shown; else of the choice.
      if (dataset.diffOf !== undefined) choose(dataset.diffOf, dataset.at);
      send({ type: "apply", serial: store.clock });
    },
    "one-device"() {
      send({ type: "one-device" });
      say("XLA is asked…");
    },
    unpick() {
      widget.linking.pick(widget.linking.picked);
      one(`[data-tab="${widget.tab}"]`).focus();
    },
    copy: ({ dataset }) => copy(dataset.text ?? widget.shown?.code ?? ""),
  };
  /** @type {NonNullable<Panel["messages"]>} */
  const messages = {
    hello({ newest = {} }) {
      // Only now is there a kernel behind the widget: until then the static copy is what can be read.
      root.hidden = false;
      copied.hide();
      // What was sent before has come by now, unless nobody heard it.
      const view = model.get("_view");
      if (Object.entries(newest).some(([name, value]) => view[name] !== value)) model.send({ type: "lost" });
    },
    view({ view }) {
      const key = keyOf(view.policy, view.at);
      if (!store.views.get(key)?.complete) store.views.set(key, view);
      widget.pinning.peeked(key);
    },
    peek({ error }) {
      // Only where it failed; else the view itself has come.
      widget.pinning.failed();
      say(error, true);
    },
    say: saidByKernel,
  };
  for (const panel of panels) {
    Object.assign(controls, panel.controls);
    Object.assign(actions, panel.actions);
    Object.assign(messages, panel.messages);
  }

  /** @param {object} content */
  function send(content) {
    clearTimeout(late);
    // A kernel that dies, or is restarted from elsewhere, tells no widget.
    late = window.setTimeout(() => say(LATE, true), PATIENCE);
    model.send(content);
  }

  /** @param {string} text @param {boolean} [error] */
  function say(text, error = false) {
    clearTimeout(waiting);
    part("status").textContent = text;
    part("status").className = `remat-status${error ? " remat-error" : ""}`;
  }

  function chosenAt() {
    return one('[data-control="at"]')?.value ?? widget.shown?.at ?? "function";
  }

  /** @param {string} text */
  function copy(text) {
    copyText(text).then(
      () => say("Copied."),
      (error) => say(`Not copied: ${error.message}.`, true),
    );
  }

  // What is shown.

  /** Shows the selection in the controls. @param {View} view */
  function select(view) {
    for (const name of /** @type {("policy" | "at")[]} */ (["policy", "at"])) {
      /** @type {HTMLSelectElement | null} */
      const control = one(`[data-control="${name}"]`);
      if (!control) continue;
      // A policy by names, or of the user's own, is in no table.
      const known = [...control.options].some((option) => option.value === view[name]);
      if (!known) control.add(new Option(name === "policy" ? view.label : view.at, view[name]));
      control.value = view[name];
      // A plan is made for its place, and takes it along.
      if (name === "policy" && view.planned) control.selectedOptions[0].dataset.at = view.at;
    }
    one(".remat-meaning").textContent = view.meaning;
    // The names of a half report would say "recompute" of nothing.
    if (view.complete) names.select(view);
  }

  /** @param {View} view */
  function show(view) {
    if (widget.shown === view) return;
    widget.shown = view;
    select(view);
    part("code").textContent = view.code || view.unpasted;
    part("code").classList.toggle("remat-empty", !view.code);
    one('[data-action="copy"]').disabled = !view.code;
    contents.show(view);
    for (const panel of panels) panel.show?.(view);
    for (const [name, number] of Object.entries(view.counts)) {
      one(`[data-count="${name}"]`).textContent = number === null ? "…" : String(number);
    }
    root.setAttribute("aria-busy", String(!view.complete));
    widget.pinning.contrast();
    if (view.complete) widget.panels[widget.tab]?.fill?.();
  }

  /** @param {string} name @param {boolean} [focus] */
  function open(name, focus = false) {
    widget.tab = name;
    for (const button of all('[role="tab"]')) {
      const chosen = button.dataset.tab === name;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) button.focus();
      panel(button.dataset.tab).classList.toggle("remat-open", chosen);
      for (const content of panel(button.dataset.tab).querySelectorAll("[data-part]")) content.style.minHeight = "";
    }
    widget.panels[name]?.open?.();
    if (widget.shown) widget.panels[name]?.fill?.();
  }

  // What is chosen.

  /** @param {Record<string, any>} request @param {View} [cached] */
  function ask(request, cached) {
    store.clock += 1;
    if (cached) show(cached);
    say("");
    if (!cached?.complete) {
      waiting = window.setTimeout(() => say(TRACING), 200);
      root.setAttribute("aria-busy", "true");
    }
    send({ ...request, serial: store.clock });
  }

  /** @param {string} policy @param {string} [place] */
  function choose(policy, place) {
    const at = place || (widget.shown?.at ?? "function");
    ask({ type: "choose", policy, at }, store.views.get(keyOf(policy, at)));
  }

  function chooseControls() {
    const { value, selectedOptions } = one('[data-control="policy"]');
    choose(value, selectedOptions[0]?.dataset.at ?? chosenAt());
  }

  // What the kernel sends.

  /** @param {View} view */
  function receive(view) {
    if (!view?.parts) return;
    const key = keyOf(view.policy, view.at);
    const before = store.views.get(key);
    // The jaxprs were sent once; later copies of the same view come without, and without their frame.
    if (before?.bodies && !view.bodies) [view.bodies, view.jaxprs] = [before.bodies, before.jaxprs];
    if (view.complete || !before?.complete) store.views.set(key, view);
    if (view.serial < store.clock) return widget.pinning.contrast();
    store.clock = view.serial;
    if (view.complete) {
      clearTimeout(waiting);
      if ([TRACING, LATE].includes(status())) say("");
    }
    show(store.views.get(key) ?? view);
  }

  const onView = () => {
    clearTimeout(late);
    receive({ ...model.get("_view") });
  };

  /** @param {any} message */
  function onMessage(message) {
    clearTimeout(late);
    if (status() === LATE) say("");
    messages[message.type]?.(message);
  }

  /** @param {{text: string, error: boolean, serial: number}} message */
  function saidByKernel({ text, error, serial }) {
    if (serial < store.clock) return;
    say(text, error);
    part("status").classList.add("remat-long");
    const { shown } = widget;
    if (!error || !shown) return;
    root.setAttribute("aria-busy", "false");
    const good = model.get("_view");
    const last = store.views.get(keyOf(good.policy, good.at));
    if (last && last !== shown) show(last);
    else select(shown);
  }

  // What the reader does.

  root.addEventListener("change", (event) => {
    const target = /** @type {HTMLInputElement} */ (event.target);
    controls[target.dataset.control ?? ""]?.(target);
    if (target.dataset.name !== undefined) names.ask();
  });

  root.addEventListener("click", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const policy = /** @type {HTMLElement | null} */ (target.closest("[data-policy]"));
    if (policy?.dataset.policy !== undefined) return choose(policy.dataset.policy, policy.dataset.at);
    const button = target.closest("button");
    if (!button) return;
    const { tab, pick, action } = button.dataset;
    if (tab) open(tab);
    else if (pick) widget.linking.pick(pick);
    else if (action) actions[action]?.(button);
  });

  one('[role="tablist"]').addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const here = tabs.indexOf(widget.tab);
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    open(tabs[(moves[event.key] + tabs.length) % tabs.length], true);
  });

  root.addEventListener("mouseover", (event) => widget.linking.point(/** @type {Element} */ (event.target)));

  model.on("change:_view", onView);
  model.on("msg:custom", onMessage);
  open(widget.tab);
  onView();
  listen(model, () => model.send({ type: "hello" }));

  return () => {
    for (const panel of panels) panel.stop?.();
    clearTimeout(waiting);
    clearTimeout(late);
    model.off("change:_view", onView);
    model.off("msg:custom", onMessage);
    copied.show();
    root.remove();
  };
}

/** @param {string} text @returns {Promise<void>} */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not a secure context, as with JupyterLab over plain http from another machine.
    const area = document.createElement("textarea");
    area.value = text;
    area.style.cssText = "position:fixed;opacity:0";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) throw new Error("the browser refused");
  }
}
