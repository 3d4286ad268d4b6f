// @ts-check
/** @import { Panel, Widget } from "./types.js" */

/**
 * The list that a policy is chosen from by what it does, in the place of the dropdown's own. The dropdown itself stays:
 * closed, it does what any does, and where the browser cannot show the list, open as well.
 *
 * @typedef {object} Figures what policies do that do the same, as text
 * @property {string[]} keys
 * @property {string} [saved]
 * @property {string} [repeated]
 * @property {string} [peak]
 * @property {boolean} [front]
 * @property {string} [note]
 * @property {string} [error]
 *
 * @typedef {object} Entry a line of the list
 * @property {string[]} keys
 * @property {string[]} labels
 * @property {Figures | undefined} figures
 * @property {string} meaning
 */

const WAITING = "not worked out yet";
const COLUMNS = /** @type {const} */ (["saved", "repeated", "peak"]);

/** @param {string} tag @param {string} kind @param {...(string | Node)} content */
function element(tag, kind, ...content) {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...content);
  return made;
}

/** @param {Widget} widget @returns {Panel} */
export function policyList(widget) {
  const { one, root } = widget;
  /** @type {HTMLSelectElement} */
  const select = one('[data-control="policy"]');
  const id = `${select.id}-list`;
  /** @type {Record<string, string>} */
  const meanings = JSON.parse(one("[data-meanings]").dataset.meanings);
  /** By place and device what the kernel has told. @type {Map<string, {rows: Figures[], done: boolean}>} */
  const told = new Map();
  /** @type {HTMLElement | null} */
  let popup = null;
  /** @type {HTMLInputElement} */
  let field;
  /** The first key of the line that the arrows have come to. */
  let active = "";

  const device = () => one('[data-control="device"]')?.value ?? "";
  const here = () => `${device()}\n${widget.chosenAt()}`;

  /** What is listed, those that do the same in a line. @returns {Entry[]} */
  function entries() {
    const { rows = [], done = false } = told.get(here()) ?? {};
    const labels = new Map([...select.options].map((option) => [option.value, option.text]));
    const taken = new Set();
    const found = [];
    for (const key of labels.keys()) {
      if (taken.has(key)) continue;
      const figures = rows.find((row) => row.keys.includes(key));
      const keys = [key, ...(figures?.keys ?? []).filter((other) => other !== key && labels.has(other))];
      for (const one of keys) taken.add(one);
      const view = widget.store.views.get(`${widget.chosenAt()}\n${key}`);
      found.push({
        keys,
        labels: keys.map((one) => labels.get(one) ?? one),
        figures: figures ?? (done ? { keys, error: "not compared at this place" } : undefined),
        meaning: meanings[key] ?? view?.meaning ?? "",
      });
    }
    return found;
  }

  /** @param {Entry} entry */
  const found = ({ labels, keys, meaning }) =>
    [...labels, ...keys, meaning].join("\n").toLowerCase().includes(field.value.trim().toLowerCase());

  /** What choosing a line chooses: of several the one that is chosen already, or that was searched. @param {Entry} entry */
  function keyOf({ keys, labels }) {
    const text = field.value.trim().toLowerCase();
    if (!text && keys.includes(select.value)) return select.value;
    const named = labels.findIndex((label) => label.toLowerCase().includes(text));
    return keys[Math.max(0, named)];
  }

  /** @param {Entry} entry @param {number} number */
  function line(entry, number) {
    const { labels, figures, meaning, keys } = entry;
    const option = element("li", "remat-entry");
    option.role = "option";
    option.id = `${id}-${number}`;
    option.dataset.key = keyOf(entry);
    option.setAttribute("aria-selected", String(keys.includes(select.value)));
    const name = element("span", "remat-entry-name", ...labels.flatMap((label, at) => [at ? " = " : "", element("code", "", label)]));
    name.title = labels.join(" = ");
    const front = element("span", "remat-entry-front", figures?.front ? "◆" : "");
    if (figures?.front) front.append(element("span", "remat-hidden", " on the front: "));
    option.append(front, name);
    if (figures && !figures.error) {
      for (const column of COLUMNS) {
        const label = element("span", "remat-entry-label", `${column} `);
        option.append(element("span", "remat-entry-number", label, figures[column] ?? "", element("span", "remat-hidden", "; ")));
      }
    } else option.append(element("span", "remat-entry-waiting", figures?.error ? "" : WAITING));
    const sentence = [meaning, figures?.error ?? ""].filter(Boolean).join(" ");
    option.append(element("span", "remat-entry-sentence", sentence));
    return option;
  }

  /** Draws the lines anew, with the place and the active line as they were. */
  function fill() {
    if (!popup) return;
    const list = /** @type {HTMLElement} */ (popup.querySelector('[role="listbox"]'));
    const shown = entries().filter(found);
    if (!shown.some(({ keys }) => keys.includes(active))) active = shown[0]?.keys[0] ?? "";
    const { scrollTop } = list;
    list.replaceChildren(...shown.map(line));
    list.scrollTop = scrollTop;
    list.hidden = !shown.length;
    const text = shown.length ? `${shown.length} of ${entries().length}` : `No policy has “${field.value.trim()}”.`;
    const status = /** @type {HTMLElement} */ (popup.querySelector('[role="status"]'));
    status.textContent = field.value.trim() ? text : "";
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
      type: "search", role: "combobox", "aria-label": "Search policies", "aria-expanded": "true", "aria-controls": id,
      "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false", placeholder: "Type to search",
      "data-lm-suppress-shortcuts": "true",
    })) field.setAttribute(name, value);
    const heads = element("div", "remat-entry remat-entry-heads", ...COLUMNS.map((column) => element("span", "remat-entry-number", column)));
    heads.ariaHidden = "true";
    const list = element("ul", "");
    list.id = id;
    list.role = "listbox";
    list.ariaLabel = "Policies";
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
    const policies = [...select.options].map((option) => option.value);
    widget.send({ type: "choices", policy: select.value, at: widget.chosenAt(), device: device(), policies });
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
    if (key === undefined) return;
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
      const asked = ["Enter", " ", "F4"].includes(event.key) || (event.altKey && /^Arrow(Up|Down)$/.test(event.key));
      if (!asked || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      open();
    });
  }

  return {
    messages: {
      /** @param {{at: string, device: string, rows?: Figures[], done?: boolean, error?: string}} message */
      choices({ at, device, rows, done = false, error }) {
        if (error) widget.say(error, true);
        if (rows) told.set(`${device}\n${at}`, { rows, done });
        fill();
      },
    },
    stop: close,
  };
}
