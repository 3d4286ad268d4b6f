// @ts-check
import { differences, programs, programText } from "./jaxprs.js";
import { arrange, arrangement, standsOn, tableText } from "./tables.js";
import { change, quantity } from "./units.js";

/**
 * Places the HTML that the kernel renders, and handles the reader's actions. Everything escaped was escaped in Python;
 * nothing here makes HTML out of text.
 *
 * @typedef {{forward: string[], backward: string[]}} Bodies
 * @typedef {object} View what one policy looks like
 * @property {string} policy
 * @property {string} label the policy as people read it
 * @property {string} at
 * @property {number} serial the newest request of ours that the kernel had seen
 * @property {boolean} complete
 * @property {string} meaning what the policy does, one line
 * @property {string} code
 * @property {string} unpasted what to say where there is no code
 * @property {Record<string, string>} parts HTML by the name of the part
 * @property {string} jaxprs the frame of the two programs
 * @property {Bodies | null} bodies the programs' chunks; null where they are sent on request
 * @property {Record<string, number | null>} counts
 * @property {Record<string, string>} names
 * @typedef {object} Store what all views of one widget share
 * @property {Map<string, View>} views
 * @property {Map<string, string>} asides the HTML of the Memory and Advice panels
 * @property {number} clock
 * @typedef {{get(name: string): any, on(name: string, callback: Function): void, off(name: string, callback: Function): void,
 *   send(content: object): void}} Model
 */

const TRACING = "Tracing…";
/** How long, in ms, a kernel may take to say that it has heard, before the reader is told that it may not be there. */
const PATIENCE = 10_000;
const LATE = "No answer from the kernel yet. If it was restarted or has died, run this cell again; what was looked at can still be read.";

/** @type {WeakMap<object, Store>} */
const stores = new WeakMap();

/** @param {Model} model @returns {Store} */
function storeOf(model) {
  let store = stores.get(model);
  if (!store) stores.set(model, (store = { views: new Map(), asides: new Map(), clock: 0 }));
  return store;
}

/** @param {string} policy @param {string} at */
const keyOf = (policy, at) => `${at}\n${policy}`;

/** The tables that the reader arranges, with what their rows count and add up to. */
const TABLES = {
  residuals: { noun: "value", unit: "bytes" },
  recomputed: { noun: "operation", unit: "FLOPs" },
};

/** ``attn_*`` as it is meant; text without a star as a part of the name. @param {string} text */
function glob(text) {
  const quoted = text.trim().replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(/[*?]/.test(text) ? `^${quoted}$` : quoted, "i");
}

/** @param {string} text @returns {Promise<void>} */
async function copy(text) {
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

/**
 * The static output that this widget replaces: the nearest earlier one in the same output area.
 * @param {HTMLElement} el
 * @returns {HTMLElement | null}
 */
function twinOf(el) {
  let child = el.closest(".jp-OutputArea-child");
  while ((child = child?.previousElementSibling ?? null)) {
    if (child.querySelector(".remat-static")) return /** @type {HTMLElement} */ (child);
    if (child.querySelector(".remat-widget")) return null;
  }
  return null;
}

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
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

  /** @type {View | null} */
  let shown = null;
  let tab = "residuals";
  let filled = "";
  let waiting = 0;
  let late = 0;
  let lit = "";
  /** The line of the source that everything is narrowed to. */
  let picked = "";
  /** The choice that others are compared with. @type {{policy: string, at: string} | null} */
  let pinned = null;
  /** What was chosen, oldest first, and which of it is shown. @type {{policy: string, at: string}[]} */
  let history = [];
  let moment = -1;
  /** The budgets of the slider at the place that is shown. @type {{budget: number, text: string, beyond: string}[]} */
  let stops = [];
  const asked = { aside: "", compare: "", beside: "", peek: "", frontier: "" };
  const arrangements = { residuals: arrangement(), recomputed: arrangement() };
  const panes = programs(part("jaxprs"), { onLine: tellLine, onFilled: markPicked, onPick: pickLineOf });
  /** @type {{column: string, descending: boolean} | null} */
  let sorted = null;
  /** @type {HTMLElement | null} */
  let twin = null;

  /** @param {object} content */
  function send(content) {
    clearTimeout(late);
    // Of a kernel that dies, or is restarted from elsewhere, no widget is told.
    late = window.setTimeout(() => say(LATE, true), PATIENCE);
    model.send(content);
  }

  /** @param {string} text @param {boolean} [error] */
  function say(text, error = false) {
    clearTimeout(waiting);
    part("status").textContent = text;
    part("status").classList.toggle("remat-error", error);
  }

  /** The pinned choice's view, where it is at hand. */
  const other = () => (pinned ? store.views.get(keyOf(pinned.policy, pinned.at)) : undefined);

  /** The views whose programs are to be seen: that of the policy, and for a comparison the pinned one's. */
  function fillPrograms() {
    if (!shown?.complete) return;
    const a = other();
    const mode = a?.complete && a !== shown ? one('[data-control="panes"]').value : "halves";
    const needed = a?.complete && a !== shown ? [shown, a] : [shown];
    const missing = needed.filter((view) => !view.bodies);
    if (missing.length) {
      part("jaxprs").setAttribute("aria-busy", "true");
      for (const view of missing) send({ type: "jaxprs", policy: view.policy, at: view.at });
      return;
    }
    const key = [mode, ...needed.map((view) => keyOf(view.policy, view.at))].join("\n");
    if (filled === key) return;
    filled = key;
    const [bView, aView] = needed;
    const before = [...framed(bView).children].slice(0, -1);
    panes.show(sidesOf(mode, bView, aView), before);
    part("jaxprs").removeAttribute("aria-busy");
    part("jaxprs").classList.remove("remat-stale");
    summarize(bView, aView);
  }

  /** @param {View} view */
  function framed(view) {
    const template = document.createElement("template");
    template.innerHTML = view.jaxprs;
    return template.content;
  }

  /** @param {string} mode @param {View} b @param {View | undefined} a */
  function sidesOf(mode, b, a) {
    /** @param {View} view @param {"forward" | "backward"} half @param {View | undefined} against @param {string} title */
    const side = (view, half, against, title) => ({
      title,
      frame: framed(view).querySelectorAll("section")[half === "forward" ? 0 : 1],
      chunks: view.bodies?.[half] ?? [],
      against: against?.bodies?.[half],
    });
    if (mode === "halves" || !a) return [side(b, "forward", a, ""), side(b, "backward", a, "")];
    const half = mode === "forward" ? "forward" : "backward";
    return [side(a, half, b, `A, ${a.policy}:`), side(b, half, a, `B, ${b.policy}:`)];
  }

  /** What the programs have more and less than the pinned policy's. @param {View} b @param {View | undefined} a */
  function summarize(b, a) {
    const told = a && (/** @type {const} */ (["forward", "backward"])).map((half) => {
      const { more, fewer } = differences(b.bodies?.[half] ?? [], a.bodies?.[half] ?? []);
      return `${half} +${more} −${fewer}`;
    });
    one('[data-summary="jaxprs"]').textContent = told ? `● equations that the other has not; B against A: ${told.join(", ")}` : "";
  }

  /** The Memory and Advice panels follow the policy, the Compare panel the place, the device and what is in it. */
  function fillPanels() {
    if (!shown) return;
    const { policy, at } = shown;
    if (tab === "memory" || tab === "advice") {
      const key = `${tab}\n${keyOf(policy, at)}`;
      const known = store.asides.get(key);
      if (known !== undefined) place(tab, known);
      else if (asked.aside !== key) {
        part(tab).classList.add("remat-stale");
        send({ type: tab, policy, at });
      }
      asked.aside = known === undefined ? key : "";
    } else if (tab === "compare") {
      const device = one('[data-control="device"]').value;
      const key = `${device}\n${at}`;
      const listed = all('[data-part="comparison"] [data-same]').some((one) => stands(one, policy));
      if (asked.compare !== key || !(listed || asked.beside === policy)) {
        if (!part("comparison").childElementCount) say("Tracing every policy…");
        part("comparison").classList.add("remat-stale");
        send({ type: "compare", policy, at, device });
      }
      asked.compare = key;
      asked.beside = policy;
      if (asked.frontier !== keyOf(layers(), at)) one('[data-control="budget"]').disabled = true;
      if (!part("comparison").classList.contains("remat-stale")) fillStops(at);
    } else if (tab === "plan") fillStops(at);
  }

  /** What the slider moves over. @param {string} at */
  function fillStops(at) {
    const key = keyOf(layers(), at);
    if (asked.frontier === key) return;
    asked.frontier = key;
    one('[data-control="budget"]').disabled = true;
    part("stop").textContent = "Working out the frontier…";
    send({ type: "frontier", at, layers: layers() });
  }

  /** How equal layers are decided: "together", "separately", or as the program shares them. */
  const layers = () => one('[data-control="layers"]').value;

  /** Replaces a part's content and leaves the keyboard where it was. @param {string} name @param {string} html */
  function place(name, html) {
    const target = part(name);
    const focused = /** @type {HTMLElement} */ (target.contains(document.activeElement) ? document.activeElement : null);
    const again = focused && ["policy", "sort"].find((key) => focused.dataset[key] !== undefined);
    const height = target.offsetHeight;
    if (height) target.style.minHeight = `${height}px`;
    target.innerHTML = html;
    target.style.minHeight = "";
    target.classList.remove("remat-stale");
    if (again) {
      const same = [...target.querySelectorAll(focused.tagName.toLowerCase())].find(
        (/** @type {any} */ one) => one.dataset[again] === focused.dataset[again],
      );
      /** @type {HTMLElement | undefined} */ (same)?.focus();
    }
    if (name === "comparison") {
      if (sorted) sort(sorted.column, sorted.descending);
      markChosen();
    }
  }

  /** Whether a row or a point of the comparison is of a policy. @param {HTMLElement} entry @param {string} [policy] */
  const stands = (entry, policy) => (entry.dataset.same ?? "").split("\n").includes(policy ?? "");

  /** In the comparison, what stands for the shown policy. */
  function markChosen() {
    for (const entry of all('[data-part="comparison"] [data-same]')) {
      const chosen = String(stands(entry, shown?.policy));
      entry.setAttribute(entry.tagName === "TR" ? "aria-current" : "aria-pressed", chosen);
    }
  }

  /** Sorts the comparison; rows without a value come last. @param {string} column @param {boolean} descending */
  function sort(column, descending) {
    sorted = { column, descending };
    const button = one(`[data-sort="${column}"]`);
    const table = button?.closest("table");
    if (!table) return;
    for (const head of table.querySelectorAll("[aria-sort]")) head.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    /** @param {HTMLTableRowElement} row */
    const value = (row) => {
      const text = row.querySelectorAll("td.remat-num")[Number(column)]?.getAttribute("data-value");
      return text === null || text === undefined ? null : Number(text);
    };
    const rows = [...body.rows];
    rows.sort((a, b) => {
      const [first, second] = [value(a), value(b)];
      if (first === null || second === null) return Number(first === null) - Number(second === null);
      return descending ? second - first : first - second;
    });
    body.append(...rows);
  }

  /** Shows the selection in the controls. @param {View} view */
  function select(view) {
    for (const name of /** @type {("policy" | "at")[]} */ (["policy", "at"])) {
      /** @type {HTMLSelectElement | null} */
      const control = one(`[data-control="${name}"]`);
      if (!control) continue;
      // A policy by names, or of the user's own, is in no table.
      if (![...control.options].some((option) => option.value === view[name])) {
        control.add(new Option(name === "policy" ? view.label : view.at, view[name]));
      }
      control.value = view[name];
    }
    one(".remat-meaning").textContent = view.meaning;
    // The names of a half report would say "recompute" of nothing.
    if (!view.complete) return;
    for (const radio of all('input[type="radio"]')) radio.checked = view.names[radio.dataset.name] === radio.value;
  }

  /** @param {View} view */
  function show(view) {
    if (shown === view) return;
    shown = view;
    remember(view);
    select(view);
    part("totals").innerHTML = view.parts.totals;
    part("notes").innerHTML = view.parts.notes;
    part("code").textContent = view.code || view.unpasted;
    part("code").classList.toggle("remat-empty", !view.code);
    one('[data-action="copy"]').disabled = !view.code;
    // All is read before anything is written: a page is laid out anew for each that is asked for in between.
    const were = ["residuals", "recomputed", "lines"].map((name) => {
      const { scrollTop, scrollLeft, offsetHeight } = part(name);
      return { name, target: part(name), scrollTop, scrollLeft, offsetHeight };
    });
    for (const { name, target, scrollTop, scrollLeft, offsetHeight } of were) {
      // Until the backward half is there, the panels that need it keep the last policy's content, dimmed.
      const stale = !view.complete && name !== "residuals" && target.childElementCount > 0;
      target.classList.toggle("remat-stale", stale);
      if (stale) continue;
      // Never shorter than it was while it is open: what is below would jump at each toggle.
      if (offsetHeight) target.style.minHeight = `${offsetHeight}px`;
      target.innerHTML = view.parts[name];
      if (scrollLeft || scrollTop) target.scrollTo(scrollLeft, scrollTop);
    }
    part("jaxprs").classList.toggle("remat-stale", !view.complete || !filled.includes(keyOf(view.policy, view.at)));
    for (const [name, number] of Object.entries(view.counts)) {
      one(`[data-count="${name}"]`).textContent = number === null ? "…" : String(number);
    }
    root.setAttribute("aria-busy", String(!view.complete));
    contrast();
    if (tab === "jaxprs") fillPrograms();
    if (view.complete) fillPanels();
    markChosen();
  }

  /** The bytes that the slider is at: between two stops in proportion. */
  function budgetAt() {
    const place = Number(one('[data-control="budget"]').value);
    const [below, above] = [stops[Math.floor(place)], stops[Math.ceil(place)]];
    return below ? Math.round(below.budget + (above.budget - below.budget) * (place % 1)) : 0;
  }

  /** What can be had where the slider is, at once: a stop's own plan, or between two what they bound. */
  function tellStop() {
    const place = Number(one('[data-control="budget"]').value);
    const number = Math.floor(place);
    const stop = stops[number];
    const told = !stop ? "" : place === number ? stop.text : `${quantity(budgetAt(), "bytes")}: ${stop.beyond}`;
    part("stop").textContent = told;
    one('[data-control="budget"]').setAttribute("aria-valuetext", told);
    for (const stop of part("frontier").querySelectorAll("[data-stop]")) {
      stop.classList.toggle("remat-at", Number(stop.dataset.stop) === number);
    }
  }

  /** @param {number | string} budget */
  function plan(budget) {
    const of = typeof budget === "number" ? "saved" : one('[data-control="of"]').value;
    ask({ type: "plan", budget, of, layers: layers(), at: shown?.at });
    part("planned").classList.add("remat-stale");
  }

  // One line of the source.

  /** Narrows the tables to a line and marks it everywhere; the same line again takes it back. @param {string} key */
  function pick(key) {
    picked = picked === key ? "" : key;
    arrangeTables();
    markPicked();
    const chip = one('[data-action="unpick"]');
    // A table may have no row of the line, and a program no equation.
    const label = one(`[data-pick="${picked}"]`)?.dataset.place ?? "one line";
    chip.textContent = picked ? `Only ${label} ×` : "";
    chip.setAttribute("aria-label", picked ? `Only ${label}: show all again` : "");
    chip.hidden = !picked;
  }

  function markPicked() {
    for (const marked of all(".remat-picked")) marked.classList.remove("remat-picked");
    for (const button of all("[data-pick]")) {
      const chosen = button.dataset.pick === picked;
      button.setAttribute("aria-pressed", String(chosen));
      button.closest("[data-line]")?.classList.toggle("remat-picked", chosen);
    }
    if (picked) for (const line of all(".remat-l[data-e]")) if (standsOn(line, picked)) line.classList.add("remat-picked");
  }

  /** @param {HTMLElement} line of a program */
  function pickLineOf(line) {
    const key = /^~?[0-9a-f]+\.\d+/.exec(line.dataset.e ?? "")?.[0];
    if (!key) return say("No line of your source makes this.");
    if (picked !== key) pick(key);
    open("lines");
    one(`[data-pick="${key}"]`)?.focus();
  }

  /** @param {HTMLElement} line of a program */
  function tellLine(line) {
    link(line);
    say(line.title.split("\n")[0]);
  }

  // Tables.

  function arrangeTables() {
    const a = other();
    for (const [name, { noun, unit }] of Object.entries(TABLES)) {
      const state = arrangements[/** @type {keyof typeof TABLES} */ (name)];
      const against = a?.complete && a !== shown && shown?.complete ? a.parts[name] : undefined;
      const again = () => arrangeTables();
      const told = arrange(part(name), state, { line: picked, other: against, noun, unit, again });
      one(`[data-summary="${name}"]`).textContent = told;
    }
  }

  // Another choice to compare with.

  /** Shows the difference from the pinned choice wherever there is a number or a row. */
  function contrast() {
    const a = other();
    const ready = Boolean(pinned && a?.complete && shown);
    const same = Boolean(pinned && shown && pinned.policy === shown.policy && pinned.at === shown.at);
    one('[data-action="pin"]').setAttribute("aria-pressed", String(same));
    const panesOf = one('[data-control="panes"]');
    panesOf.closest(".remat-field").hidden = !ready || same;
    if (pinned && !a?.complete && asked.peek !== keyOf(pinned.policy, pinned.at)) {
      asked.peek = keyOf(pinned.policy, pinned.at);
      send({ type: "peek", ...pinned });
    }
    for (const extra of part("totals").querySelectorAll(".remat-change")) extra.remove();
    if (ready && a) {
      const template = document.createElement("template");
      template.innerHTML = a.parts.totals;
      for (const total of part("totals").querySelectorAll(".remat-total")) {
        const before = template.content.querySelector(`[data-total="${total.dataset.total}"]`);
        const [now, then] = [total.dataset.value, before?.getAttribute("data-value")];
        const told = document.createElement("small");
        told.className = "remat-change";
        told.textContent = `${now === undefined || !then ? "unknown" : change(Number(now) - Number(then), total.dataset.unit)} vs A`;
        total.append(told);
      }
    }
    arrangeTables();
  }

  /** @param {{policy: string, at: string} | null} choice */
  function pin(choice) {
    pinned = choice;
    const control = one('[data-control="against"]');
    if (choice && ![...control.options].some((option) => option.value === choice.policy)) {
      control.add(new Option(store.views.get(keyOf(choice.policy, choice.at))?.label ?? choice.policy, choice.policy));
    }
    control.value = choice?.policy ?? "";
    control.title = choice ? `A: ${choice.policy} at ${choice.at}` : "";
    contrast();
    if (tab === "jaxprs") fillPrograms();
  }

  // What was chosen before.

  /** @param {{policy: string, at: string}} choice */
  function remember({ policy, at }) {
    const now = history[moment];
    if (!now || now.policy !== policy || now.at !== at) {
      history = [...history.slice(0, moment + 1), { policy, at }].slice(-100);
      moment = history.length - 1;
    }
    one('[data-action="undo"]').disabled = moment < 1;
    one('[data-action="redo"]').disabled = moment >= history.length - 1;
  }

  /** Drops what was asked for and failed. */
  function forget() {
    const key = shown && keyOf(shown.policy, shown.at);
    while (moment > 0 && keyOf(history[moment].policy, history[moment].at) !== key) history.splice(moment--, 1);
    if (shown) remember(shown);
  }

  /** @param {number} step -1 or 1 */
  function travel(step) {
    const choice = history[moment + step];
    if (!choice) return;
    moment += step;
    const { policy, at } = choice;
    ask({ type: "choose", policy, at }, store.views.get(keyOf(policy, at)));
    remember(choice);
  }

  /** @param {string} name @param {boolean} [focus] */
  function open(name, focus = false) {
    tab = name;
    for (const button of all('[role="tab"]')) {
      const chosen = button.dataset.tab === name;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) button.focus();
      panel(button.dataset.tab).classList.toggle("remat-open", chosen);
      one(`.remat-panel-${button.dataset.tab}`).style.minHeight = "";
    }
    // One slider, above the pictures of both: its plans are points of either.
    if (name === "plan") panel(name).querySelector(".remat-tools").prepend(one('[data-slot="budget"]'));
    if (name === "compare") panel(name).querySelector(".remat-tools").append(one('[data-slot="budget"]'));
    if (name === "jaxprs") fillPrograms();
    fillPanels();
  }

  /**
   * Asks for a policy; what is at hand is shown at once.
   * @param {Record<string, any>} request
   * @param {View} [known]
   */
  function ask(request, known) {
    store.clock += 1;
    // What was chosen in between and never shown can be gone back to as well.
    if (request.type === "choose") remember({ policy: request.policy, at: request.at });
    if (known) show(known);
    say("");
    if (!known?.complete) {
      waiting = window.setTimeout(() => say(TRACING), 200);
      root.setAttribute("aria-busy", "true");
    }
    send({ ...request, serial: store.clock });
  }

  /** @param {View} view */
  function receive(view) {
    if (!view?.parts) return;
    const key = keyOf(view.policy, view.at);
    const before = store.views.get(key);
    // The jaxprs were sent once; later copies of the same view come without, and without their frame.
    if (before?.bodies && !view.bodies) [view.bodies, view.jaxprs] = [before.bodies, before.jaxprs];
    if (view.complete || !before?.complete) store.views.set(key, view);
    if (view.serial < store.clock) return contrast();
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


  const status = () => part("status").textContent ?? "";

  /** @param {{done: number, total: number, current: string, finished: boolean, cancelled: boolean}} now */
  function onProgress(now) {
    const bar = part("progress");
    bar.max = now.total;
    bar.value = now.done;
    bar.hidden = one('[data-action="cancel"]').hidden = now.finished;
    one('[data-action="measure"]').hidden = !now.finished;
    if (now.cancelled) say(`Cancelled; ${now.done} of ${now.total} measured.`);
    else if (now.finished) say(`${now.done} of ${now.total} measured.`);
    else say(`Measuring ${now.current}, ${now.done + 1} of ${now.total}…`);
  }

  /** Chooses a policy that is shown elsewhere than in the dropdown. @param {string} policy */
  function choose(policy) {
    const at = shown?.at ?? "function";
    ask({ type: "choose", policy, at }, store.views.get(keyOf(policy, at)));
  }

  // The kernel replaces the static output's content, style sheet and all, within what is hidden.
  const renewed = new MutationObserver(() => styleTwin(false));

  /** Hides the static output, with its style sheet: of fifty, each would be matched against the whole page. */
  function replaceTwin() {
    twin ??= twinOf(el);
    if (!twin) return;
    twin.classList.add("remat-replaced");
    styleTwin(false);
    renewed.observe(twin, { childList: true, subtree: true });
  }

  /** @param {boolean} on */
  function styleTwin(on) {
    for (const style of twin?.querySelectorAll(".remat-static > style") ?? []) {
      /** @type {HTMLStyleElement} */ (style).disabled = !on;
    }
  }

  /** @param {any} message */
  function onMessage(message) {
    clearTimeout(late);
    if (status() === LATE) say("");
    if (message.type === "hello") {
      // Only now is there a kernel behind the widget: until then the static twin is what can be read.
      root.hidden = false;
      replaceTwin();
    } else if (message.type === "view") {
      const key = keyOf(message.view.policy, message.view.at);
      if (!store.views.get(key)?.complete) store.views.set(key, message.view);
      if (pinned && key === keyOf(pinned.policy, pinned.at)) {
        contrast();
        if (tab === "jaxprs") fillPrograms();
      }
    } else if (message.type === "jaxprs") {
      const view = store.views.get(keyOf(message.policy, message.at));
      if (!view) return;
      view.bodies = message.bodies;
      view.jaxprs = message.frame;
      if (tab === "jaxprs") fillPrograms();
    } else if (message.type === "memory" || message.type === "advice") {
      const key = `${message.type}\n${keyOf(message.policy, message.at)}`;
      if (asked.aside === key) asked.aside = "";
      if (message.html !== undefined) store.asides.set(key, message.html);
      if (!shown || `${message.type}\n${keyOf(shown.policy, shown.at)}` !== key) return;
      place(message.type, message.html ?? "");
      if (message.error) say(message.error, true);
    } else if (message.type === "compare") {
      if (asked.compare !== `${message.device}\n${message.at}`) return;
      if (message.html) {
        place("comparison", message.html);
        if (status().startsWith("Tracing every")) say("");
        if (tab === "compare" && shown) fillStops(shown.at); // only now: both at once would take twice as long
      } else {
        asked.compare = ""; // so that it is asked for again
        part("comparison").classList.remove("remat-stale");
        say(message.error, true);
      }
    } else if (message.type === "frontier") {
      if (asked.frontier !== keyOf(message.layers, message.at)) return;
      stops = message.stops ?? [];
      const slider = one('[data-control="budget"]');
      slider.disabled = !stops.length;
      slider.max = String(Math.max(0, stops.length - 1));
      slider.value = String(Math.floor(stops.length / 2));
      place("frontier", message.html ?? "");
      tellStop();
      if (message.error) {
        asked.frontier = "";
        say(message.error, true);
      }
    } else if (message.type === "plan") {
      part("planned").classList.remove("remat-stale");
      if (message.html) place("planned", message.html);
      if (message.error && message.serial >= store.clock) {
        root.setAttribute("aria-busy", "false");
        say(message.error, true);
      }
    } else if (["flip", "what-if", "loops", "edit"].includes(message.type)) {
      part("found").classList.remove("remat-stale");
      if (message.html) {
        place("found", message.html);
        part("found").scrollIntoView({ block: "nearest" });
      }
      say(message.error ?? "", Boolean(message.error));
    } else if (message.type === "peek") {
      // Only where it failed; else the view itself has come.
      asked.peek = "";
      pin(null);
      say(message.error, true);
    } else if (message.type === "gradients" || message.type === "measure") {
      if (message.html) place("gradients", message.html);
      part("gradients").scrollIntoView({ block: "nearest" });
      say(message.error ?? "", Boolean(message.error));
    } else if (message.type === "progress") {
      onProgress(message);
    } else if (message.type === "say") {
      if (message.serial < store.clock) return;
      say(message.text, message.error);
      if (message.error && shown) {
        forget();
        root.setAttribute("aria-busy", "false");
        const good = model.get("_view");
        const last = store.views.get(keyOf(good.policy, good.at));
        if (last && last !== shown) show(last);
        else select(shown);
      }
    }
  }

  root.addEventListener("change", (event) => {
    const target = /** @type {HTMLInputElement} */ (event.target);
    const at = one('[data-control="at"]')?.value ?? shown?.at ?? "function";
    if (target.dataset.group) {
      arrangements[/** @type {keyof typeof TABLES} */ (target.dataset.group)].group = target.value;
      arrangeTables();
    } else if (target.dataset.control === "device") {
      fillPanels();
    } else if (target.dataset.control === "against") {
      pin(target.value ? { policy: target.value, at } : null);
    } else if (target.dataset.control === "panes") {
      fillPrograms();
    } else if (target.dataset.control === "together") {
      panes.setTogether(target.checked);
    } else if (target.dataset.control === "beside") {
      root.classList.toggle("remat-beside", target.checked);
    } else if (target.dataset.control === "budget") {
      plan(budgetAt());
    } else if (target.dataset.control === "layers") {
      if (shown) fillStops(shown.at);
    } else if (["inputs", "of", "typed"].includes(target.dataset.control ?? "")) {
      // Read when something is measured or planned.
    } else if (target.dataset.control) {
      const policy = one('[data-control="policy"]').value;
      ask({ type: "choose", policy, at }, store.views.get(keyOf(policy, at)));
    } else if (target.dataset.name !== undefined) askNames();
  });

  function askNames() {
    /** @type {Record<string, string>} */
    const names = {};
    for (const radio of all('input[type="radio"]:checked')) names[radio.dataset.name] = radio.value;
    ask({ type: "names", names, at: one('[data-control="at"]')?.value ?? shown?.at ?? "function" });
  }

  root.addEventListener("input", (event) => {
    const target = /** @type {HTMLInputElement} */ (event.target);
    if (target.dataset.control === "budget") tellStop();
    else if (target.dataset.find === "names") {
      const pattern = glob(target.value);
      for (const name of all(".remat-name")) name.hidden = !pattern.test(name.querySelector("code").textContent);
    } else if (target.dataset.find) {
      arrangements[/** @type {keyof typeof TABLES} */ (target.dataset.find)].find = target.value;
      arrangeTables();
    }
  });

  root.addEventListener("click", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const policy = /** @type {HTMLElement | null} */ (target.closest("[data-policy]"));
    if (policy?.dataset.policy !== undefined) return choose(policy.dataset.policy);
    const button = target.closest("button");
    if (!button) return;
    const { tab: name, pick: line, sort: column, flip, action } = button.dataset;
    if (name) open(name);
    else if (flip !== undefined) ask({ type: "flip", flip: Number(flip), at: shown?.at });
    else if (line) pick(line);
    else if (column !== undefined) sort(column, sorted?.column === column ? !sorted?.descending : false);
    else if (action) act(action, button);
  });

  /** @param {string} action @param {HTMLElement} button */
  function act(action, button) {
    const [device, inputs] = ["device", "inputs"].map((name) => one(`[data-control="${name}"]`).value);
    switch (action) {
      case "measure":
      case "gradients":
      case "cancel":
        if (action === "gradients") say("Comparing gradients…");
        if (action === "measure") say("Measuring…");
        return send({ type: action, policy: shown?.policy, at: shown?.at, device, inputs });
      case "apply":
        return send({ type: "apply", serial: store.clock });
      case "pin":
        return pin(button.getAttribute("aria-pressed") === "true" || !shown ? null : { policy: shown.policy, at: shown.at });
      case "plan": {
        const typed = one('[data-control="typed"]').value.trim();
        return plan(typed || budgetAt());
      }
      case "what-if":
      case "loops":
      case "edit":
        say("Working it out…");
        part("found").classList.add("remat-stale");
        // What is chosen, which may be on its way still.
        return send({
          type: action,
          policy: one('[data-control="policy"]').value,
          at: one('[data-control="at"]')?.value ?? shown?.at,
          layers: layers(),
        });
      case "copy-diff":
        return copied(part("found").querySelector(".remat-diff")?.textContent ?? "");
      case "undo":
        return travel(-1);
      case "redo":
        return travel(1);
      case "unpick":
        pick(picked);
        return one(`[data-tab="${tab}"]`).focus();
      case "all-names":
        for (const name of all(".remat-name")) {
          if (!name.hidden) name.querySelector(`[value="${button.dataset.state}"]`).checked = true;
        }
        return askNames();
      case "copy":
        return copied(shown?.code ?? "");
      case "copy-table": {
        const table = part(button.dataset.table ?? "").querySelector("table");
        return table ? copied(tableText(table, button.dataset.as ?? "tsv")) : say("There is no table to copy.");
      }
      case "copy-program": {
        if (!shown?.bodies) return say("The programs are not here yet.");
        const a = other();
        const sides = sidesOf(a ? one('[data-control="panes"]').value : "halves", shown, a !== shown ? a : undefined);
        return copied(programText(sides[Number(button.dataset.pane)].chunks));
      }
    }
  }

  /** @param {string} text */
  function copied(text) {
    copy(text).then(
      () => say("Copied."),
      (error) => say(`Not copied: ${error.message}.`, true),
    );
  }

  one('[role="tablist"]').addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const names = all('[role="tab"]').map((button) => button.dataset.tab);
    const here = names.indexOf(tab);
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: names.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    open(names[(moves[event.key] + names.length) % names.length], true);
  });

  root.addEventListener("keydown", (event) => {
    const target = /** @type {any} */ (event.target);
    // In a field of text the keys undo what was typed.
    if ((event.ctrlKey || event.metaKey) && /^[zy]$/i.test(event.key) && target.type !== "search") {
      event.preventDefault();
      return travel(event.key.toLowerCase() === "y" || event.shiftKey ? 1 : -1);
    }
    // The points of the picture are buttons, which HTML's own would be without this.
    if (target.getAttribute?.("role") !== "button" || ![" ", "Enter"].includes(event.key)) return;
    event.preventDefault();
    choose(target.dataset.policy);
  });

  // One residual, one operation, one expression, wherever it stands.
  root.addEventListener("mouseover", (event) => link(/** @type {HTMLElement} */ (event.target)));

  /** Marks everything that belongs to what is pointed at. @param {HTMLElement} target */
  function link(target) {
    const residual = target.closest("[data-r]")?.getAttribute("data-r") ?? "";
    const linked = /** @type {HTMLElement | null} */ (target.closest("[data-e], [data-o]"));
    const { e: expressions = "", o: operation = "" } = linked?.dataset ?? {};
    const key = [residual, operation, expressions].join("\n");
    if (lit === key) return;
    lit = key;
    for (const marked of all(".remat-lit, .remat-same")) marked.classList.remove("remat-lit", "remat-same");
    if (residual) for (const same of all(`[data-r="${residual}"]`)) same.classList.add("remat-lit");
    const keys = expressions.split(" ").filter(Boolean);
    // What a library's expression makes is marked from there; from elsewhere that expression alone is, and not all else
    // that it makes.
    const whole = keys.length === 1 ? keys : keys.filter((expression) => !expression.startsWith("~"));
    const same = whole.map((expression) => `[data-e~="${expression}"]:not([data-o])`);
    // An operation of one layer is told apart from the same expression of another.
    if (operation) same.push(`[data-o="${operation}"]`);
    else same.push(...same.map((selector) => selector.replace(":not([data-o])", "[data-o]")));
    for (const expression of keys) if (!whole.includes(expression)) same.push(`[data-e="${expression}"]:not([data-o])`);
    if (same.length) for (const one of all(same.join())) one.classList.add("remat-same");
  }

  model.on("change:_view", onView);
  model.on("msg:custom", onMessage);
  open(tab);
  onView();
  model.send({ type: "hello" });

  return () => {
    panes.stop();
    clearTimeout(waiting);
    model.off("change:_view", onView);
    model.off("msg:custom", onMessage);
    clearTimeout(late);
    renewed.disconnect();
    styleTwin(true);
    twin?.classList.remove("remat-replaced");
  };
}

export default { render };
