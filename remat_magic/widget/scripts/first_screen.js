// @ts-check
/** @import { Panel, View, Widget } from "./shared.js" */
import { answerKey } from "./on_demand.js";
import { keyOf } from "./shared.js";

/** What of the first screen is of the shown choice. */
const PARTS = ["verdict", "bar", "takes", "totals", "rarer", "saved-less"];
/** What the list of devices has for so many bytes, which are typed. */
const OTHER = "?";

/**
 * What is seen first: whether the shown choice fits the chosen device, and what to change; where none is chosen, what is
 * saved.
 * @param {Widget} widget @returns {Panel}
 */
export function firstScreen(widget) {
  const { one, all, part, root, store } = widget;
  const requested = new Set();
  /** The HTML of each part, as it came: what comes again disturbs nobody. @type {Map<string, string>} */
  const there = new Map();
  /** @type {HTMLSelectElement} */
  const select = one('[data-control="device"]');
  /** @type {HTMLInputElement} */
  const size = one('[data-control="size"]');
  const canApply = one(".remat-fitting").dataset.canApply !== undefined;
  let device = select.value;
  /** The device that the kernel was sent. @type {string | undefined} */
  let sent;
  /** The choice whose edit is shown. */
  let edited = "";

  /** @param {View} view @returns {Record<string, string> | undefined} */
  function estimated(view) {
    if (!device) return view.parts;
    const known = store.screens.get(screenOf(view));
    if (!known && view.complete && !requested.has(screenOf(view))) look(view);
    return known;
  }

  /** The key of a choice on the device. @param {{policy: string, at: string}} choice */
  const screenOf = ({ policy, at }) => `${device}\n${keyOf(policy, at)}`;

  /** @param {View} view */
  function look(view) {
    requested.add(screenOf(view));
    widget.send({ type: "screen", policy: view.policy, at: view.at, device });
  }

  widget.estimated = estimated;
  widget.mark = mark;

  /** Until a number is known that is of this choice on this device, there is none. @param {View} view */
  function fill(view) {
    if (sent !== device) widget.send({ type: "device", device: (sent = device) });
    root.classList.toggle("remat-for-device", Boolean(device));
    const parts = estimated(view);
    for (const name of PARTS) {
      part(name).classList.toggle("remat-waiting", !parts);
      const html = parts ? (parts[name] ?? "") : ["verdict", "totals"].includes(name) ? "…" : (there.get(name) ?? "");
      if (html !== there.get(name)) part(name).innerHTML = html;
      there.set(name, html);
    }
    part("wrong").innerHTML = view.parts.wrong;
    mark();
  }

  /** Marks the rows and the point of the choice that is shown, and the button of the edit that is. */
  function mark() {
    const { policy, at } = widget.shown ?? {};
    for (const each of all("tr[data-row], [data-choice]")) {
      const { row, policy: own, at: place } = each.dataset;
      const chosen = (row ?? own) === policy && (place === at || policy === "as_written");
      each.setAttribute(each.tagName === "TR" ? "aria-current" : "aria-pressed", String(chosen));
    }
    for (const button of all("button[data-diff]")) {
      button.setAttribute("aria-expanded", String(keyOf(button.dataset.diff, button.dataset.at) === edited));
    }
  }

  /** @param {string} chosen */
  function chooseDevice(chosen) {
    device = chosen;
    if (![...select.options].some((option) => option.value === chosen)) {
      select.add(new Option(chosen, chosen), select.options[select.options.length - 1]);
    }
    select.value = chosen;
    size.hidden = true;
    part("changes").innerHTML = "";
    closeDiff();
    store.figures.clear();
    if (widget.shown) fill(widget.shown);
    widget.pinning.contrast();
    for (const panel of Object.values(widget.panels)) panel.figured?.();
    if (widget.shown) widget.panels[widget.tab]?.fill?.();
  }

  function closeDiff() {
    edited = "";
    part("diff").innerHTML = "";
    mark();
  }

  root.addEventListener("click", ({ target }) => {
    const button = /** @type {HTMLElement} */ (target).closest("button");
    const { diff, at } = button?.dataset ?? {};
    if (diff === undefined || at === undefined) return;
    if (edited === keyOf(diff, at)) return closeDiff();
    edited = keyOf(diff, at);
    mark();
    part("diff").textContent = "Working out the edit…";
    widget.send({ type: "diff", policy: diff, at, can_apply: canApply });
  });

  size.addEventListener("keydown", ({ key }) => {
    // JupyterLab keeps a field in an output from telling of its change.
    if (key === "Enter" && size.value.trim()) widget.send({ type: "device", device: size.value.trim() });
    if (key !== "Escape") return;
    size.hidden = true;
    select.focus();
  });

  return {
    show: fill,
    controls: {
      device({ value }) {
        if (value !== OTHER) return chooseDevice(value);
        select.value = device;
        size.hidden = false;
        size.focus();
      },
    },
    actions: {
      ask() {
        const { shown } = widget;
        if (!shown) return;
        widget.say(`Compiling for ${device}…`);
        widget.send({ type: "ask", policy: shown.policy, at: shown.at, device });
      },
      "close-diff": closeDiff,
      "all-choices": () => widget.open("choices", true),
    },
    messages: {
      /** @param {{policy: string, at: string, device: string, error?: string} & Record<string, string>} message */
      screen({ policy, at, device: of, error, ...parts }) {
        const key = `${of}\n${keyOf(policy, at)}`;
        requested.delete(key);
        if (error !== undefined) return widget.say(error, true);
        const isNews = parts.compiled && !store.screens.get(key)?.compiled;
        store.screens.set(key, parts);
        // The picture of memory has XLA's curve now.
        if (isNews && store.answers.delete(answerKey("memory", { policy, at, device: of }))) widget.panels[widget.tab]?.fill?.();
        const { shown } = widget;
        if (shown && screenOf(shown) === key) fill(shown);
        widget.pinning.contrast();
      },
      /** What the kernel has taken for the device. @param {{device: string}} message */
      device({ device: of }) {
        if (of !== device) chooseDevice((sent = of));
      },
      /** @param {{device: string, html: string, figures: import("./shared.js").FitFigures[], error?: string}} message */
      fit({ device: of, html, figures, error }) {
        if (of !== device) return;
        if (error !== undefined) return widget.say(error, true);
        store.figures.clear();
        for (const figure of figures) store.figures.set(keyOf(figure.policy, figure.at), figure);
        // What was compiled meanwhile has another number now; what is shown keeps its own until that is known.
        const { shown } = widget;
        for (const key of [...store.screens.keys()]) if (!shown || key !== screenOf(shown)) store.screens.delete(key);
        if (shown?.complete) look(shown);
        for (const panel of Object.values(widget.panels)) panel.figured?.();
        widget.place("changes", html);
        mark();
      },
      /** @param {{error?: string}} message */
      ask: ({ error }) => widget.say(error ?? "", Boolean(error)),
      /** @param {{policy: string, at: string, html?: string, error?: string}} message */
      diff({ policy, at, html, error }) {
        if (edited !== keyOf(policy, at)) return;
        widget.place("diff", html ?? "");
        if (error) widget.say(error, true);
        if (error) closeDiff();
      },
    },
  };
}

const PREFIX = "remat_magic-";
/** The class of the widget while a button's content is unfolded, by its action. @type {Record<string, string>} */
const UNFOLDED = { more: "remat-unfolded", arrange: "remat-arranging" };

/**
 * What a first look does not need is folded, and stays as the reader left it, in whichever widget: rarer controls, and what
 * tables are arranged by.
 * @param {Widget} widget @returns {Panel}
 */
export function folding({ root, one, all }) {
  /** @param {string} action @param {boolean} open */
  function unfold(action, open) {
    for (const button of all(`[data-action="${action}"]`)) button.setAttribute("aria-expanded", String(open));
    root.classList.toggle(UNFOLDED[action], open);
  }

  /** @param {HTMLElement} button */
  function toggle({ dataset: { action = "" }, ariaExpanded }) {
    const open = ariaExpanded !== "true";
    try {
      localStorage.setItem(PREFIX + action, open ? "yes" : "");
    } catch {} // a page without storage
    unfold(action, open);
    if (open && action === "arrange") one("[data-find]").focus();
  }

  for (const action of Object.keys(UNFOLDED)) {
    try {
      unfold(action, localStorage.getItem(PREFIX + action) === "yes");
    } catch {} // as above
  }
  return { actions: { more: toggle, arrange: toggle } };
}
