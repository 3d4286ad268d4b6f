// @ts-check
/** @import { Panel, View, Widget } from "./shared.js" */
import { element, keyOf } from "./shared.js";

/**
 * The lists that a policy and its place are chosen from by what they do, in the place of the dropdowns' own. A dropdown
 * itself stays: closed, it does what any does, and where the browser cannot show the list, open as well.
 *
 * @typedef {object} Figures what policies do that do the same, as text
 * @property {string[]} keys
 * @property {string} [saved]
 * @property {string} [repeated]
 * @property {string} [peak]
 * @property {boolean} [front]
 * @property {string} [error]
 *
 * @typedef {object} Entry a line of the list
 * @property {string[]} keys
 * @property {string[]} labels
 * @property {string[] | undefined} figures a text for each column
 * @property {boolean} front
 * @property {string} sentence
 * @property {string} error why it cannot be chosen
 */

const WAITING = "not worked out yet";
const [FITTING, LEARNING] = [["needed", "time", "fits"], ["saved", "repeated", "peak"]];
const NOUNS = /** @type {Record<string, [string, string]>} */ ({ policy: ["policy", "policies"], at: ["place", "places"] });

/** @param {Widget} widget @param {"policy" | "at"} which @returns {Panel} */
export function choiceList(widget, which) {
  const { one, root, store } = widget;
  /** @type {HTMLSelectElement | null} */
  const found = one(`[data-control="${which}"]`);
  if (!found) return {}; // there is but one place
  const select = found;
  const id = `${select.id}-list`;
  const [noun, nouns] = NOUNS[which];
  /** @type {Record<string, string>} */
  const meanings = JSON.parse(one("[data-meanings]").dataset.meanings);
  /** By place and device what the kernel has sent. @type {Map<string, {rows: Figures[], done: boolean}>} */
  const known = new Map();
  /** @type {HTMLElement | null} */
  let popup = null;
  /** @type {HTMLInputElement} */
  let field;
  /** The first key of the line that the arrows have come to. */
  let active = "";

  const device = () => one('[data-control="device"]').value;
  const columns = () => (device() ? FITTING : which === "policy" ? LEARNING : []);

  /** Policies, those that do the same in a line. @returns {Entry[]} */
  function policies() {
    const at = widget.chosenAt();
    const { rows = [], done = false } = known.get(`${device()}\n${at}`) ?? {};
    const options = [...select.options];
    const labels = new Map(options.map((option) => [option.value, option.text]));
    const taken = new Set();
    const listed = [];
    for (const option of options) {
      const key = option.value;
      if (taken.has(key)) continue;
      const row = rows.find((one) => one.keys.includes(key));
      const keys = [key, ...(row?.keys ?? []).filter((other) => other !== key && labels.has(other))];
      for (const one of keys) taken.add(one);
      const own = option.dataset.at ?? at; // a plan's
      const tried = keys.map((one) => store.figures.get(keyOf(one, own))).find(Boolean);
      const error = tried?.error || row?.error || (done && !row && own === at ? "It was not compared at this place." : "");
      const known = /** @type {Record<string, string> | undefined} */ (tried ?? /** @type {any} */ (row));
      const meaning = meanings[key] ?? store.views.get(keyOf(key, own))?.meaning ?? "";
      listed.push({
        keys,
        labels: keys.map((one) => labels.get(one) ?? one),
        figures: error || !known ? undefined : columns().map((column) => known[column] ?? ""),
        front: Boolean(row?.front),
        sentence: [own === at ? "" : `At ${own}.`, meaning].filter(Boolean).join(" "),
        error,
      });
    }
    return listed;
  }

  /** Places, with the best that was tried at each. @returns {Entry[]} */
  function places() {
    const planned = one('[data-control="policy"]').selectedOptions[0]?.dataset.at;
    const tried = [...store.figures.values()];
    return [...select.options].map(({ value, text }) => {
      const best = tried.find((figures) => figures.at === value && figures.policy !== "as_written" && !figures.error);
      const error = planned && planned !== value ? `What is chosen is made for ${planned}: choose another policy first.` : "";
      return {
        keys: [value],
        labels: [text],
        figures: error || !columns().length ? undefined : best && [best.needed, best.time, best.fits],
        front: false,
        sentence: best && !error ? `Best there: ${best.what}.` : "",
        error,
      };
    });
  }

  /** @param {Entry} entry */
  const matches = ({ labels, keys, sentence }) =>
    [...labels, ...keys, sentence].join("\n").toLowerCase().includes(field.value.trim().toLowerCase());

  /** What choosing a line chooses: of several the one that is chosen already, or that was searched. @param {Entry} entry */
  function keyIn({ keys, labels }) {
    const text = field.value.trim().toLowerCase();
    if (!text && keys.includes(select.value)) return select.value;
    const named = labels.findIndex((label) => label.toLowerCase().includes(text));
    return keys[Math.max(0, named)];
  }

  /** @param {Entry} entry @param {number} number */
  function line(entry, number) {
    const { labels, figures, front, sentence, error, keys } = entry;
    const option = element("li", "remat-entry");
    option.role = "option";
    option.id = `${id}-${number}`;
    option.dataset.key = keyIn(entry);
    option.setAttribute("aria-selected", String(keys.includes(select.value)));
    if (error) option.ariaDisabled = "true";
    const words = labels.flatMap((label, at) => [at ? " = " : "", which === "at" ? label : element("code", "", label)]);
    const name = element("span", "remat-entry-name", ...words);
    name.title = labels.join(" = ");
    const mark = element("span", "remat-entry-front", front ? "◆" : "");
    if (front) mark.append(element("span", "remat-hidden", " on the front: "));
    option.append(mark, name);
    if (figures) {
      columns().forEach((column, at) => {
        const label = element("span", "remat-hidden remat-entry-label", `${column} `);
        option.append(element("span", "remat-entry-number", label, figures[at], element("span", "remat-hidden", "; ")));
      });
    } else if (columns().length) option.append(element("span", "remat-entry-waiting", error ? "" : WAITING));
    option.append(element("span", "remat-entry-sentence", [error, sentence].filter(Boolean).join(" ")));
    return option;
  }

  /** Draws the lines anew, with the place and the active line as they were. */
  function fill() {
    if (!popup) return;
    const list = /** @type {HTMLElement} */ (popup.querySelector('[role="listbox"]'));
    const all = which === "policy" ? policies() : places();
    const shown = all.filter(matches);
    if (!shown.some(({ keys }) => keys.includes(active))) active = shown[0]?.keys[0] ?? "";
    const { scrollTop } = list;
    list.replaceChildren(...shown.map(line));
    list.scrollTop = scrollTop;
    list.hidden = !shown.length;
    const text = shown.length ? `${shown.length} of ${all.length}` : `No ${noun} has “${field.value.trim()}”.`;
    const status = /** @type {HTMLElement} */ (popup.querySelector('[role="status"]'));
    status.textContent = field.value.trim() ? text : "";
    const front = /** @type {HTMLElement} */ (popup.querySelector(".remat-empty"));
    front.hidden = !shown.some((entry) => entry.front);
    const number = shown.findIndex(({ keys }) => keys.includes(active));
    mark(list.children[number]);
  }

  /** @param {Element | undefined} option */
  function mark(option) {
    for (const other of popup?.querySelectorAll(".remat-active") ?? []) other.classList.remove("remat-active");
    field.removeAttribute("aria-activedescendant");
    if (!(option instanceof HTMLElement)) return;
    option.classList.add("remat-active");
    field.setAttribute("aria-activedescendant", option.id);
    active = option.dataset.key ?? "";
    option.scrollIntoView({ block: "nearest" });
  }

  function place() {
    if (!popup) return;
    const { top, bottom, left } = select.getBoundingClientRect();
    const [above, below] = [top - 8, innerHeight - bottom - 8];
    const width = Math.min(760, Math.max(440, root.clientWidth), innerWidth - 16);
    popup.style.width = `${width}px`;
    popup.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    const up = below < 260 && above > below;
    popup.style.maxHeight = `${Math.min(520, up ? above : below)}px`;
    popup.style.top = up ? "auto" : `${bottom + 2}px`;
    popup.style.bottom = up ? `${innerHeight - top + 2}px` : "auto";
  }

  /** @param {Event} event */
  const pressedElsewhere = ({ target }) => {
    if (!popup?.contains(/** @type {Node} */ (target)) && target !== select) close();
  };

  function open() {
    if (popup) return close(true);
    popup = element("div", "remat-list");
    popup.popover = "manual";
    field = document.createElement("input");
    for (const [name, value] of Object.entries({
      type: "search", role: "combobox", "aria-label": `Search ${nouns}`, "aria-expanded": "true", "aria-controls": id,
      "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false", placeholder: "Type to search",
      "data-lm-suppress-shortcuts": "true",
    })) field.setAttribute(name, value);
    const heads = element("div", "remat-entry remat-entry-heads", ...columns().map((column) => element("span", "remat-entry-number", column)));
    heads.ariaHidden = "true";
    heads.hidden = !columns().length;
    const list = element("ul", "");
    list.id = id;
    list.role = "listbox";
    list.ariaLabel = nouns;
    const status = element("span", "");
    status.role = "status";
    const front = element("p", "remat-empty", "◆ on the front: none is better in both peak and time.");
    popup.append(element("div", "remat-list-search", field, status), heads, list, front);
    select.after(popup);
    popup.showPopover();
    active = select.value;
    place();
    fill();
    field.focus();
    field.addEventListener("input", fill);
    field.addEventListener("keydown", pressed);
    popup.addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget instanceof Node && !popup?.contains(relatedTarget)) close();
    });
    list.addEventListener("mousedown", (event) => event.preventDefault()); // the field keeps the focus
    list.addEventListener("click", ({ target }) => choose(/** @type {Element} */ (target).closest("li")));
    document.addEventListener("pointerdown", pressedElsewhere, true);
    addEventListener("scroll", place, true);
    addEventListener("resize", place);
    if (which === "at") return;
    const keys = [...select.options].filter(({ dataset }) => (dataset.at ?? widget.chosenAt()) === widget.chosenAt());
    widget.send({
      type: "choices", policy: select.value, at: widget.chosenAt(), device: device(), policies: keys.map(({ value }) => value),
    });
  }

  /** @param {boolean} [back] whether the dropdown takes the focus */
  function close(back = false) {
    document.removeEventListener("pointerdown", pressedElsewhere, true);
    removeEventListener("scroll", place, true);
    removeEventListener("resize", place);
    const closing = popup;
    popup = null; // first, since what is removed loses the focus
    closing?.remove();
    if (back) select.focus();
  }

  /** @param {HTMLElement | null | undefined} option */
  function choose(option) {
    const key = option?.dataset.key;
    if (key === undefined || option?.ariaDisabled === "true") return;
    close(true);
    if (select.value === key) return;
    select.value = key;
    select.dispatchEvent(new Event("change", { bubbles: true }));
  }

  /** @param {KeyboardEvent} event */
  function pressed(event) {
    const options = /** @type {HTMLElement[]} */ ([...(popup?.querySelectorAll("li") ?? [])]);
    const now = options.findIndex((option) => option.classList.contains("remat-active"));
    const last = options.length - 1;
    /** @type {Record<string, number>} */
    const moves = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: last, PageDown: now + 5, PageUp: now - 5 };
    if (event.key in moves) mark(options[Math.max(0, Math.min(last, moves[event.key]))]);
    else if (event.key === "Enter") choose(options[now]);
    else if (event.key === "Escape") close(true);
    else if (event.key === "Tab") return close(true); // and on from the dropdown
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  if ("showPopover" in select) {
    select.addEventListener("mousedown", (event) => {
      if (event.button || select.disabled) return;
      event.preventDefault();
      open();
    });
    select.addEventListener("keydown", (event) => {
      const pressed = ["Enter", " ", "F4"].includes(event.key) || (event.altKey && /^Arrow(Up|Down)$/.test(event.key));
      if (!pressed || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      open();
    });
  }

  /** @param {{at: string, device: string, rows?: Figures[], done?: boolean, error?: string}} message */
  function tell({ at, device: of, rows, done = false, error }) {
    if (error) widget.say(error, true);
    if (rows) known.set(`${of}\n${at}`, { rows, done });
    fill();
  }

  return {
    show() {
      // What a plan's place is not cannot be chosen by the arrows either.
      if (which === "at") for (const { error, keys } of places()) one(`[data-control="at"] option[value="${CSS.escape(keys[0])}"]`).disabled = Boolean(error);
      fill();
    },
    messages: which === "policy" ? { choices: tell } : {},
    figured: fill,
    stop: close,
  };
}

/** The checkpoint names, each with three states, which together are a policy. @param {Widget} widget */
export function checkpointNames(widget) {
  const { all } = widget;

  function ask() {
    /** @type {Record<string, string>} */
    const names = {};
    for (const radio of all('input[type="radio"]:checked')) names[radio.dataset.name] = radio.value;
    widget.ask({ type: "names", names, at: widget.chosenAt() });
  }

  return {
    ask,
    /** @param {View} view */
    select(view) {
      for (const radio of all('input[type="radio"]')) {
        const state = view.names[radio.dataset.name];
        radio.checked = state === radio.value;
        // Neither saved nor recomputed: no radio can say that.
        radio.closest(".remat-name").querySelector("small").hidden = Boolean(state);
      }
    },
  };
}
