// @ts-check
/**
 * Places the HTML that the kernel renders, and handles the reader's actions. Everything escaped was escaped in Python;
 * nothing here makes HTML out of text.
 *
 * @typedef {{forward: string[], backward: string[]}} Bodies
 * @typedef {object} View what one policy looks like
 * @property {string} policy
 * @property {string} at
 * @property {number} serial the newest request of ours that the kernel had seen
 * @property {boolean} complete
 * @property {string} meaning what the policy does, one line
 * @property {string} code
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

const FIRST_CHUNKS = 2;
const TRACING = "Tracing…";

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

  /** @type {View | null} */
  let shown = null;
  let tab = "residuals";
  let filled = "";
  let idle = 0;
  let waiting = 0;
  let lit = "";
  const asked = { aside: "", compare: "", beside: "", difference: "" };
  /** @type {{column: string, descending: boolean} | null} */
  let sorted = null;
  /** @type {HTMLElement | null} */
  let twin = null;

  /** @param {string} text @param {boolean} [error] */
  function say(text, error = false) {
    clearTimeout(waiting);
    part("status").textContent = text;
    part("status").classList.toggle("remat-error", error);
  }

  /** @param {HTMLElement} pane @param {string[]} chunks */
  function fill(pane, chunks) {
    pane.replaceChildren();
    let next = 0;
    const more = (/** @type {number} */ upTo) => {
      for (; next < Math.min(upTo, chunks.length); next++) {
        const chunk = document.createElement("div");
        chunk.className = "remat-chunk";
        chunk.innerHTML = chunks[next];
        pane.append(chunk);
      }
    };
    more(FIRST_CHUNKS);
    return { more: () => more(next + 10), done: () => next >= chunks.length };
  }

  /** @param {View} view */
  function fillPrograms(view) {
    const key = keyOf(view.policy, view.at);
    if (filled === key || !view.complete) return;
    const panel = part("jaxprs");
    if (!view.bodies) {
      panel.setAttribute("aria-busy", "true");
      model.send({ type: "jaxprs", policy: view.policy, at: view.at });
      return;
    }
    cancelAnimationFrame(idle);
    const scroll = [...panel.querySelectorAll("pre")].map((pane) => [pane.scrollTop, pane.scrollLeft]);
    const height = panel.offsetHeight;
    panel.style.minHeight = `${height}px`;
    panel.innerHTML = view.jaxprs;
    panel.removeAttribute("aria-busy");
    panel.classList.remove("remat-stale");
    const panes = [...panel.querySelectorAll("pre")];
    const jobs = [fill(panes[0], view.bodies.forward), fill(panes[1], view.bodies.backward)];
    const restore = () => panes.forEach((pane, i) => scroll[i] && pane.scrollTo(scroll[i][1], scroll[i][0]));
    const step = () => {
      jobs.forEach((job) => job.more());
      if (!jobs.every((job) => job.done())) idle = requestAnimationFrame(step);
      else restore();
    };
    restore();
    if (!jobs.every((job) => job.done())) idle = requestAnimationFrame(step);
    filled = key;
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
        model.send({ type: tab, policy, at });
      }
      asked.aside = known === undefined ? key : "";
    } else if (tab === "compare") {
      const device = one('[data-control="device"]').value;
      const key = `${device}\n${at}`;
      const listed = all('[data-part="comparison"] [data-same]').some((one) => stands(one, policy));
      if (asked.compare !== key || !(listed || asked.beside === policy)) {
        if (!part("comparison").childElementCount) say("Tracing every policy…");
        part("comparison").classList.add("remat-stale");
        model.send({ type: "compare", policy, at, device });
      }
      asked.compare = key;
      asked.beside = policy;
      const against = one('[data-control="against"]').value;
      const difference = against && `${keyOf(policy, at)}\n${against}`;
      if (asked.difference !== difference) {
        if (against) {
          part("difference").classList.add("remat-stale");
          model.send({ type: "difference", policy, at, against });
        } else part("difference").replaceChildren();
      }
      asked.difference = difference;
    }
  }

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
        control.add(new Option(view[name], view[name]));
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
    const same = shown && keyOf(shown.policy, shown.at) === keyOf(view.policy, view.at);
    if (!same) filled = "";
    shown = view;
    select(view);
    part("totals").innerHTML = view.parts.totals;
    part("notes").innerHTML = view.parts.notes;
    part("code").textContent = view.code || "as it is written: nothing to paste";
    part("code").classList.toggle("remat-empty", !view.code);
    one('[data-action="copy"]').disabled = !view.code;
    for (const name of ["residuals", "recomputed", "lines"]) {
      const panel = part(name);
      // Until the backward half is there, the panels that need it keep the last policy's content, dimmed.
      const stale = !view.complete && name !== "residuals" && panel.childElementCount > 0;
      panel.classList.toggle("remat-stale", stale);
      if (stale) continue;
      const { scrollTop, scrollLeft, offsetHeight } = panel;
      // Never shorter than it was while it is open: what is below would jump at each toggle.
      if (offsetHeight) panel.style.minHeight = `${offsetHeight}px`;
      panel.innerHTML = view.parts[name];
      panel.scrollTo(scrollLeft, scrollTop);
    }
    part("jaxprs").classList.toggle("remat-stale", filled !== keyOf(view.policy, view.at));
    for (const [name, number] of Object.entries(view.counts)) {
      one(`[data-count="${name}"]`).textContent = number === null ? "…" : String(number);
    }
    root.setAttribute("aria-busy", String(!view.complete));
    if (tab === "jaxprs") fillPrograms(view);
    if (view.complete) fillPanels();
    markChosen();
  }

  /** @param {string} name @param {boolean} [focus] */
  function open(name, focus = false) {
    tab = name;
    for (const button of all('[role="tab"]')) {
      const chosen = button.dataset.tab === name;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) button.focus();
      part(button.dataset.tab).hidden = !chosen;
      part(button.dataset.tab).style.minHeight = "";
    }
    if (name === "jaxprs" && shown) fillPrograms(shown);
    fillPanels();
  }

  /** Asks for a policy; what is at hand is shown at once. @param {object} request @param {View} [known] */
  function ask(request, known) {
    store.clock += 1;
    if (known) show(known);
    say("");
    if (!known?.complete) {
      waiting = window.setTimeout(() => say(TRACING), 200);
      root.setAttribute("aria-busy", "true");
    }
    model.send({ ...request, serial: store.clock });
  }

  /** @param {View} view */
  function receive(view) {
    if (!view?.parts) return;
    const key = keyOf(view.policy, view.at);
    const before = store.views.get(key);
    // The jaxprs were sent once; later copies of the same view come without.
    if (before?.bodies && !view.bodies) view.bodies = before.bodies;
    if (view.complete || !before?.complete) store.views.set(key, view);
    if (view.serial < store.clock) return;
    store.clock = view.serial;
    if (view.complete) {
      clearTimeout(waiting);
      if (part("status").textContent === TRACING) say("");
    }
    show(store.views.get(key) ?? view);
  }

  const onView = () => receive({ ...model.get("_view") });

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

  /** @param {any} message */
  function onMessage(message) {
    if (message.type === "hello") {
      // Only now is there a kernel behind the widget: until then the static twin is what can be read.
      root.hidden = false;
      twin ??= twinOf(el);
      twin?.classList.add("remat-replaced");
    } else if (message.type === "view") {
      const key = keyOf(message.view.policy, message.view.at);
      if (!store.views.get(key)?.complete) store.views.set(key, message.view);
    } else if (message.type === "jaxprs") {
      const view = store.views.get(keyOf(message.policy, message.at));
      if (!view) return;
      view.bodies = message.bodies;
      view.jaxprs = message.frame;
      if (view === shown && tab === "jaxprs") fillPrograms(view);
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
      } else {
        asked.compare = ""; // so that it is asked for again
        part("comparison").classList.remove("remat-stale");
        say(message.error, true);
      }
    } else if (message.type === "difference") {
      if (asked.difference !== `${keyOf(message.policy, message.at)}\n${message.against}`) return;
      place("difference", message.html ?? "");
      if (message.error) say(message.error, true);
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
    if (target.dataset.control === "device" || target.dataset.control === "against") {
      fillPanels();
    } else if (target.dataset.control === "inputs") {
      // Read when something is measured.
    } else if (target.dataset.control) {
      const policy = one('[data-control="policy"]').value;
      ask({ type: "choose", policy, at }, store.views.get(keyOf(policy, at)));
    } else if (target.dataset.name !== undefined) {
      /** @type {Record<string, string>} */
      const names = {};
      for (const radio of all('input[type="radio"]:checked')) names[radio.dataset.name] = radio.value;
      ask({ type: "names", names, at });
    }
  });

  root.addEventListener("click", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const policy = /** @type {HTMLElement | null} */ (target.closest("[data-policy]"));
    if (policy?.dataset.policy !== undefined) return choose(policy.dataset.policy);
    const button = target.closest("button");
    if (!button) return;
    if (button.dataset.tab) open(button.dataset.tab);
    else if (button.dataset.sort !== undefined) {
      const again = sorted?.column === button.dataset.sort;
      sort(button.dataset.sort, again ? !sorted?.descending : false);
    } else if (["measure", "gradients", "cancel"].includes(button.dataset.action ?? "")) {
      const [device, inputs] = ["device", "inputs"].map((name) => one(`[data-control="${name}"]`).value);
      if (button.dataset.action === "gradients") say("Comparing gradients…");
      if (button.dataset.action === "measure") say("Measuring…");
      model.send({ type: button.dataset.action, policy: shown?.policy, at: shown?.at, device, inputs });
    } else if (button.dataset.action === "apply") model.send({ type: "apply", serial: store.clock });
    else if (button.dataset.action === "copy") {
      copy(shown?.code ?? "").then(
        () => say("Copied."),
        (error) => say(`Not copied: ${error.message}.`, true),
      );
    }
  });

  one('[role="tablist"]').addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const names = all('[role="tab"]').map((button) => button.dataset.tab);
    const here = names.indexOf(tab);
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: names.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    open(names[(moves[event.key] + names.length) % names.length], true);
  });

  // The points of the picture are buttons, which HTML's own would be without this.
  root.addEventListener("keydown", (event) => {
    const target = /** @type {any} */ (event.target);
    if (target.getAttribute?.("role") !== "button" || ![" ", "Enter"].includes(event.key)) return;
    event.preventDefault();
    choose(target.dataset.policy);
  });

  // One residual, wherever it stands in both programs.
  root.addEventListener("mouseover", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const variable = target.closest("[data-r]");
    if (lit === (variable?.getAttribute("data-r") ?? "")) return;
    lit = variable?.getAttribute("data-r") ?? "";
    for (const marked of all(".remat-lit")) marked.classList.remove("remat-lit");
    if (lit) for (const same of all(`[data-r="${lit}"]`)) same.classList.add("remat-lit");
  });

  model.on("change:_view", onView);
  model.on("msg:custom", onMessage);
  open(tab);
  onView();
  model.send({ type: "hello" });

  return () => {
    cancelAnimationFrame(idle);
    clearTimeout(waiting);
    model.off("change:_view", onView);
    model.off("msg:custom", onMessage);
    twin?.classList.remove("remat-replaced");
  };
}

export default { render };
