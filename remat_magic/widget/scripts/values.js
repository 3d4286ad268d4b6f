// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { arrange, tableState } from "./arranging.js";
import { lineOf } from "./linking.js";

/** What the rows of the tables count and add up to. @type {Record<string, {noun: string, unit: string}>} */
const TABLES = {
  residuals: { noun: "value", unit: "bytes" },
  recomputed: { noun: "operation", unit: "FLOPs" },
};

/** What is saved, and what is computed again: two tables that the reader arranges alike. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const own = widget.panel(key);
  const tables = Object.entries(TABLES).map(([part, words]) => ({ part, words, state: tableState() }));
  /** @type {HTMLInputElement} */
  const find = widget.one("[data-find]");
  /** The row that the keyboard comes to, of those that can be chosen. @type {HTMLElement | undefined} */
  let current;

  /** @returns {HTMLElement[]} */
  const choosable = () => [...own.querySelectorAll("tr[data-e]")];
  const isSeen = (/** @type {HTMLElement} */ row) => !row.hidden;

  function again() {
    const { shown, pinning, linking } = widget;
    const pinned = pinning.view();
    const line = linking.chosen ? "" : linking.picked;
    const focused = document.activeElement;
    for (const { part, words, state } of tables) {
      state.find = find.value;
      const other = pinned?.complete && pinned !== shown && shown?.complete ? pinned.parts[part] : undefined;
      const totals = arrange(widget.part(part), state, { line, other, ...words, again });
      const summary = widget.part(part).querySelector("[data-summary]");
      if (summary) summary.textContent = totals;
    }
    // What is folded and in use stays in sight.
    find.closest(".remat-field")?.classList.toggle("remat-used", find.value !== "");
    for (const row of choosable()) {
      row.setAttribute("aria-selected", String(linking.chosen === row.dataset.k));
      row.dataset.lmSuppressShortcuts = "true";
      row.title ||= "Mark its line in the source and its equations in the jaxprs (also Enter); again to undo";
    }
    reach(choosable().find((row) => row === focused));
    // A row that is moved loses the focus.
    if (focused instanceof HTMLElement && own.contains(focused)) focused.focus({ preventScroll: true });
  }

  /** Lets Tab come to one row: from there the arrows lead on. @param {HTMLElement} [to] */
  function reach(to) {
    const rows = choosable();
    const seen = rows.filter(isSeen);
    const selected = seen.find((row) => row.ariaSelected === "true");
    current = to ?? selected ?? (current && seen.includes(current) ? current : seen[0]);
    for (const row of rows) row.tabIndex = row === current ? 0 : -1;
  }

  /** @param {HTMLElement} row */
  const choose = (row) => widget.linking.pick(lineOf(row), row.dataset.k);

  own.addEventListener("click", ({ target }) => {
    const element = /** @type {HTMLElement} */ (target);
    const row = /** @type {HTMLElement | null} */ (element.closest("tr[data-e]"));
    // A click ends the marking of text too, which is no choice.
    if (row && !element.closest("button, summary") && document.getSelection()?.isCollapsed) choose(row);
  });

  /** What a key does on a row. @param {HTMLElement} row @param {string} pressed */
  function press(row, pressed) {
    if (pressed === "Enter" || pressed === " ") return choose(row);
    const seen = choosable().filter(isSeen);
    const next = seen[seen.indexOf(row) + (pressed === "ArrowDown" ? 1 : -1)];
    if (!next) return;
    reach(next);
    next.focus();
  }

  find.addEventListener("input", again);
  own.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select")) return;
    if (target.matches("tr[data-e]") && ["Enter", " ", "ArrowDown", "ArrowUp"].includes(event.key)) {
      event.preventDefault();
      return press(target, event.key);
    }
    if (event.key !== "/") return;
    event.preventDefault();
    const button = /** @type {HTMLElement} */ (own.querySelector('[data-action="arrange"]'));
    if (button.getAttribute("aria-expanded") === "true") find.focus();
    else button.click();
  });
  return { arrange: again };
}
