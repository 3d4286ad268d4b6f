// @ts-check
/**
 * The tables of residuals and of recomputed operations: sorted, searched, narrowed to a line of the source, and compared
 * with another policy's.
 *
 * @typedef {object} TableState how the reader wants a table
 * @property {string} find
 * @property {{column: number, descending: boolean} | null} sort
 * @property {Set<string>} unfolded labels of what is folded at first, and is not
 */
import { standsOn } from "./linking.js";
import { count, element, foldRow, link, parsed, quantity, rowAcross } from "./shared.js";

// So many rows, the biggest, are seen at first.
const FIRST = 5;
// What is alive anyway, or dropped when compiled, and adds nothing to what is saved.
const APART = ".remat-argument, .remat-constant, .remat-literal, .remat-dropped";

/** @returns {TableState} */
export const tableState = () => ({ find: "", sort: null, unfolded: new Set() });

/** @param {Element} element @param {string} selector */
const textOf = (element, selector) => element.querySelector(selector)?.textContent?.trim() ?? "";

/** @param {HTMLElement} row */
const number = (row) => Number(row.dataset.n ?? 1);

/** Bytes or FLOPs of a row. @param {HTMLElement} row @returns {number | null} */
const value = (row) => (row.dataset.value === undefined ? null : Number(row.dataset.value));

/** @param {HTMLElement[]} rows */
const total = (rows) => rows.reduce((sum, row) => sum + (value(row) ?? 0), 0);

/** The rows of a table's HTML. @param {string} html @returns {HTMLTableRowElement[]} */
const rowsOf = (html) => [...parsed(html).querySelectorAll("tr")].filter((row) => row.classList.contains("remat-row"));

/** Makes the heads buttons that sort. @param {HTMLTableElement} table @param {(column: number) => void} onSort */
function dressHeads(table, onSort) {
  [...table.tHead?.rows[0]?.cells ?? []].forEach((head, column) => {
    if (head.querySelector("button")) return;
    const button = link("", head.textContent ?? "", () => onSort(column));
    button.dataset.order = "";
    button.title = "Sort by this; click again to reverse";
    head.replaceChildren(button);
  });
}

/** By what a row is sorted in a column. @param {HTMLTableRowElement} row @param {number} column */
function sortKey(row, column) {
  const cell = row.cells[column];
  if (cell?.classList.contains("remat-share")) return value(row);
  return cell?.classList.contains("remat-num") ? value(row) : (cell?.textContent?.trim() ?? "");
}

/** @param {HTMLTableRowElement[]} rows @param {number} column @param {boolean} descending */
function sorted(rows, column, descending) {
  const keyed = rows.map((row) => ({ row, key: sortKey(row, column) }));
  keyed.sort((a, b) => {
    if (a.key === null || b.key === null) return Number(a.key === null) - Number(b.key === null);
    const order =
      typeof a.key === "number" && typeof b.key === "number"
        ? a.key - b.key
        : String(a.key).localeCompare(String(b.key), undefined, { numeric: true });
    return descending ? -order : order;
  });
  return keyed.map(({ row }) => row);
}

/**
 * Marks the rows that another policy has not, and brings in those that only it has.
 * @param {HTMLTableRowElement[]} rows
 * @param {string} html the other policy's table
 */
function compared(rows, html) {
  const others = new Map(rowsOf(html).map((row) => [row.dataset.k, row]));
  for (const row of rows) {
    const other = others.get(row.dataset.k);
    others.delete(row.dataset.k);
    if (!other) mark(row, "B", "only under B, the policy that is shown");
    else if (number(other) !== number(row)) {
      mark(row, `${number(other)}→${number(row)}`, `${number(other)} under A, ${number(row)} under B`);
    }
  }
  const missing = [...others.values()];
  for (const row of missing) {
    row.classList.add("remat-extra", "remat-missing");
    mark(row, "A", "only under A, the pinned policy");
  }
  return missing;
}

/** @param {HTMLElement} row @param {string} text @param {string} title */
function mark(row, text, title) {
  const letter = element("i", "remat-letter remat-side", text);
  letter.title = title;
  row.querySelector("td.remat-made")?.prepend(letter, " ");
}

/**
 * Arranges a part's table as the reader wants it.
 * @param {HTMLElement} part
 * @param {TableState} state
 * @param {object} context
 * @param {string} context.line the line of the source that the rows are narrowed to, or ""
 * @param {string | undefined} context.other the other policy's table
 * @param {string} context.noun what the rows count
 * @param {string} context.unit what the rows add up to
 * @param {() => void} context.again arranges anew
 * @returns {string} the totals of what is shown
 */
export function arrange(part, state, { line, other, noun, unit, again }) {
  for (const extra of part.querySelectorAll(".remat-extra, .remat-side")) extra.remove();
  const table = part.querySelector("table");
  const body = table?.tBodies[0];
  // Nothing is saved, yet the other policy's rows belong here; the summary counts them.
  if (!table || !body) return other ? count(rowsOf(other).length, "row") + " only under A" : "";
  dressHeads(table, (column) => {
    // Numbers begin with the largest.
    const first = table.tHead?.rows[0].cells[column]?.matches(".remat-num, .remat-share") ?? false;
    state.sort = { column, descending: state.sort?.column === column ? !state.sort.descending : first };
    again();
  });
  const own = [...body.rows];
  own.forEach((row, index) => (row.dataset.index ??= String(index)));
  own.sort((a, b) => Number(a.dataset.index) - Number(b.dataset.index));
  const missing = other === undefined ? [] : compared(own, other);
  let rows = [...own, ...missing];
  const find = state.find.trim().toLowerCase();
  for (const row of rows) {
    const here = !line || standsOn(row, line);
    row.hidden = !here || !(row.textContent ?? "").toLowerCase().includes(find);
    delete row.dataset.later;
  }
  const heads = [...table.tHead?.rows[0].cells ?? []];
  heads.forEach((head, column) => {
    head.ariaSort = state.sort?.column !== column ? null : state.sort.descending ? "descending" : "ascending";
  });
  if (state.sort) rows = sorted(rows, state.sort.column, state.sort.descending);
  const changed = find || line || state.sort || other !== undefined;
  body.append(...(changed ? rows : firstScreen(rows, state, { columns: heads.length, noun, unit, again })));
  const shown = own.filter((row) => !row.hidden || row.dataset.later);
  const nothing = find ? `No row has “${state.find.trim()}”.` : line ? "No row is of that line." : "";
  if (nothing && !shown.length) body.append(extra(rowAcross(nothing, heads.length)));
  return summary(own, shown, noun, unit) + differences(own, missing);
}

/** @param {HTMLElement[]} all @param {HTMLElement[]} shown @param {string} noun @param {string} unit */
function summary(all, shown, noun, unit) {
  const values = (/** @type {HTMLElement[]} */ rows) => rows.reduce((sum, row) => sum + number(row), 0);
  const saved = all.filter((row) => !row.matches(APART));
  if (all.length === shown.length) return `${count(values(saved), noun)}, ${quantity(total(saved), unit)}`;
  return `${values(shown)} of ${count(values(all), noun)}, ${quantity(total(shown), unit)} of ${quantity(total(all), unit)}`;
}

/** How many rows differ between two policies. @param {HTMLElement[]} own @param {HTMLElement[]} missing */
function differences(own, missing) {
  const marks = own.filter((row) => row.querySelector(".remat-side"));
  const only = marks.filter((row) => textOf(row, ".remat-side") === "B").length;
  const changed = marks.length - only;
  const parts = [only && `${only} rows only in B`, missing.length && `${missing.length} only in A`, changed && `${changed} changed`];
  return parts.some(Boolean) ? `; ${parts.filter(Boolean).join(", ")}` : "";
}

/** A row that is here until the table is arranged anew. @param {HTMLTableRowElement} row */
function extra(row) {
  row.classList.add("remat-extra");
  return row;
}

/**
 * The biggest rows, and what else there is in a line each that unfolds.
 * @param {HTMLTableRowElement[]} rows
 * @param {TableState} state
 * @param {{columns: number, noun: string, unit: string, again: () => void}} words
 */
function firstScreen(rows, state, { columns, noun, unit, again }) {
  const [saved, values, constants] = [[], [], []].map(() => /** @type {HTMLTableRowElement[]} */ ([]));
  for (const row of rows) {
    const argument = row.classList.contains("remat-argument");
    const constant = row.matches(".remat-constant, .remat-literal");
    (argument ? values : constant ? constants : saved).push(row);
  }
  /** @param {HTMLTableRowElement[]} later @param {string} what */
  const folded = (later, what) => {
    if (!later.length) return [];
    const label = `${count(later.reduce((sum, row) => sum + number(row), 0), what)}, ${quantity(total(later), unit)}`;
    const open = state.unfolded.has(what);
    for (const row of later) {
      row.hidden = !open;
      row.dataset.later = "yes";
    }
    const head = extra(foldRow(label, open, columns, () => {
      const table = head.closest("table");
      if (!state.unfolded.delete(what)) state.unfolded.add(what);
      again();
      // This very button was made anew.
      const buttons = /** @type {HTMLElement[]} */ ([...(table?.querySelectorAll(".remat-twist") ?? [])]);
      buttons.find((other) => other.textContent === label)?.focus();
    }));
    head.cells[0].scope = "rowgroup";
    return [head, ...later];
  };
  const first = saved.length > FIRST + 1 ? FIRST : saved.length; // one more takes no more room than its fold
  return [
    ...saved.slice(0, first),
    ...folded(saved.slice(first), `more ${noun}`),
    ...folded(values, "argument"),
    ...folded(constants, "constant"),
  ];
}
