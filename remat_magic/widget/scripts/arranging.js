// @ts-check
/**
 * The tables of residuals and of recomputed operations: sorted, searched, grouped, narrowed to a line of the source,
 * and compared with another policy's.
 *
 * @typedef {object} Arrangement how the reader wants a table
 * @property {string} find
 * @property {string} group
 * @property {{column: number, descending: boolean} | null} sort
 * @property {Set<string>} folded labels of the groups that are folded
 * @property {Set<string>} unfolded labels of what is folded at first, and is not
 */
import { standsOn } from "./linking.js";
import { count, quantity } from "./units.js";

// So many rows, the biggest, are seen at first.
const FIRST = 5;
// What is alive anyway, or dropped when compiled, and adds nothing to what is saved.
const APART = ".remat-argument, .remat-constant, .remat-literal, .remat-dropped";

/** @returns {Arrangement} */
export const arrangement = () => ({ find: "", group: "", sort: null, folded: new Set(), unfolded: new Set() });

/** What a row is grouped by, the text as it is shown. @type {Record<string, (row: HTMLElement) => string>} */
const GROUPS = {
  line: (row) => textOf(row, ".remat-place") || "no line of yours",
  name: (row) => textOf(row, ".remat-name-of code") || "unnamed",
  operation: (row) => textOf(row, ".remat-what code") || "other",
  path: (row) => textOf(row, ".remat-path") || "outside of loops and calls",
};

/** @param {Element} element @param {string} selector */
const textOf = (element, selector) => element.querySelector(selector)?.textContent?.trim() ?? "";

/** @param {HTMLElement} row */
const number = (row) => Number(row.dataset.n ?? 1);

/** Bytes or FLOPs of a row. @param {HTMLElement} row @returns {number | null} */
const value = (row) => (row.dataset.value === undefined ? null : Number(row.dataset.value));

/** @param {HTMLElement[]} rows */
const total = (rows) => rows.reduce((sum, row) => sum + (value(row) ?? 0), 0);

/** The rows of a table's HTML. @param {string} html @returns {HTMLTableRowElement[]} */
function rowsOf(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return [...template.content.querySelectorAll("tr")].filter((row) => row.classList.contains("remat-row"));
}

/** Makes the heads buttons that sort. @param {HTMLTableElement} table @param {(column: number) => void} onSort */
function dressHeads(table, onSort) {
  [...table.tHead?.rows[0]?.cells ?? []].forEach((head, column) => {
    if (head.querySelector("button")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "remat-link";
    button.dataset.order = "";
    button.dataset.lmSuppressShortcuts = "true";
    button.textContent = head.textContent;
    button.title = "Sort by this; once more turns it round";
    button.addEventListener("click", () => onSort(column));
    head.replaceChildren(button);
  });
}

/** By what a row is sorted in a column. @param {HTMLTableRowElement} row @param {number} column */
function sortKey(row, column) {
  const cell = row.cells[column];
  if (cell?.classList.contains("remat-share")) return value(row);
  if (!cell?.classList.contains("remat-num")) return cell?.textContent?.trim() ?? "";
  if (column === 0) return value(row);
  const parsed = Number((cell.textContent ?? "").replace(/,/g, ""));
  return Number.isNaN(parsed) ? null : parsed;
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
  const letter = document.createElement("i");
  letter.className = "remat-letter remat-side";
  letter.textContent = text;
  letter.title = title;
  row.querySelector("td.remat-made")?.prepend(letter, " ");
}

/**
 * Arranges a part's table as the reader wants it.
 * @param {HTMLElement} part
 * @param {Arrangement} state
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
  // Nothing is saved, yet the other policy's rows belong here; they are told of in the summary.
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
    if (state.sort?.column === column) {
      head.setAttribute("aria-sort", state.sort.descending ? "descending" : "ascending");
    } else head.removeAttribute("aria-sort");
  });
  if (state.sort) rows = sorted(rows, state.sort.column, state.sort.descending);
  const words = { columns: heads.length, noun, unit, again };
  const asked = find || line || state.sort || other !== undefined;
  if (state.group) body.append(...grouped(rows, state, words));
  else if (asked || !table.classList.contains("remat-shares")) body.append(...rows);
  else body.append(...firstScreen(rows, state, words));
  const shown = own.filter((row) => !row.hidden || row.dataset.later);
  if (find && !shown.length) body.append(textRow(`No row has “${state.find.trim()}”.`, heads.length));
  else if (line && !shown.length) body.append(textRow("No row is of that line.", heads.length));
  return summary(own, shown, noun, unit) + aside(own, missing);
}

/** @param {HTMLElement[]} all @param {HTMLElement[]} shown @param {string} noun @param {string} unit */
function summary(all, shown, noun, unit) {
  const values = (/** @type {HTMLElement[]} */ rows) => rows.reduce((sum, row) => sum + number(row), 0);
  const saved = all.filter((row) => !row.matches(APART));
  if (all.length === shown.length) return `${count(values(saved), noun)}, ${quantity(total(saved), unit)}`;
  return `${values(shown)} of ${count(values(all), noun)}, ${quantity(total(shown), unit)} of ${quantity(total(all), unit)}`;
}

/** @param {HTMLElement[]} own @param {HTMLElement[]} missing */
function aside(own, missing) {
  const marks = own.filter((row) => row.querySelector(".remat-side"));
  const only = marks.filter((row) => textOf(row, ".remat-side") === "B").length;
  const changed = marks.length - only;
  const parts = [only && `${only} rows only in B`, missing.length && `${missing.length} only in A`, changed && `${changed} changed`];
  const differences = parts.filter(Boolean).join(", ");
  return differences && `; ${differences}`;
}

/**
 * A row across the table.
 * @param {string | Node} content
 * @param {number} columns
 */
function textRow(content, columns) {
  const row = document.createElement("tr");
  row.className = "remat-extra remat-grouprow";
  const cell = document.createElement("th");
  cell.colSpan = columns;
  cell.append(content);
  row.append(cell);
  return row;
}

/** What the heads of folds need. @typedef {{columns: number, noun: string, unit: string, again: () => void}} Words */

/**
 * A row across the table with a button that folds what follows.
 * @param {string} label
 * @param {boolean} open
 * @param {() => void} turn
 * @param {Words} words
 */
function foldRow(label, open, turn, { columns, again }) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "remat-link remat-twist";
  button.setAttribute("aria-expanded", String(open));
  button.dataset.lmSuppressShortcuts = "true";
  button.dataset.label = label;
  button.textContent = label;
  button.addEventListener("click", () => {
    const table = button.closest("table");
    turn();
    again();
    // This very button was made anew.
    const buttons = /** @type {HTMLElement[]} */ ([...(table?.querySelectorAll(".remat-twist") ?? [])]);
    buttons.find((other) => other.dataset.label === label)?.focus();
  });
  const row = textRow(button, columns);
  row.cells[0].scope = "rowgroup";
  return row;
}

/**
 * The biggest rows, and what else there is in a line each that unfolds.
 * @param {HTMLTableRowElement[]} rows
 * @param {Arrangement} state
 * @param {Words} words
 */
function firstScreen(rows, state, words) {
  const [kept, values, constants] = [[], [], []].map(() => /** @type {HTMLTableRowElement[]} */ ([]));
  for (const row of rows) {
    const argument = row.classList.contains("remat-argument");
    const constant = row.matches(".remat-constant, .remat-literal");
    (argument ? values : constant ? constants : kept).push(row);
  }
  /** @param {HTMLTableRowElement[]} later @param {string} key @param {string} label */
  const folded = (later, key, label) => {
    if (!later.length) return [];
    const open = state.unfolded.has(key);
    for (const row of later) {
      row.hidden = !open;
      row.dataset.later = "yes";
    }
    const turn = () => void (state.unfolded.delete(key) || state.unfolded.add(key));
    return [foldRow(label, open, turn, words), ...later];
  };
  const first = kept.length > FIRST + 1 ? FIRST : kept.length; // one more takes no more room than its fold
  const told = (/** @type {HTMLTableRowElement[]} */ all, /** @type {string} */ noun) =>
    `${count(all.reduce((sum, row) => sum + number(row), 0), noun)}, ${quantity(total(all), words.unit)}`;
  return [
    ...kept.slice(0, first),
    ...folded(kept.slice(first), "kept", told(kept.slice(first), `more ${words.noun}`)),
    ...folded(values, "arguments", told(values, "argument")),
    ...folded(constants, "constants", told(constants, "constant")),
  ];
}

/**
 * The rows under the heads of their groups, the largest group first.
 * @param {HTMLTableRowElement[]} rows
 * @param {Arrangement} state
 * @param {Words} words
 */
function grouped(rows, state, words) {
  /** @type {Map<string, HTMLTableRowElement[]>} */
  const groups = new Map();
  for (const row of rows) {
    const label = GROUPS[state.group](row);
    groups.set(label, [...(groups.get(label) ?? []), row]);
  }
  const visible = (/** @type {HTMLElement[]} */ group) => group.filter((row) => !row.hidden);
  // Another policy's rows count in no total, and so in no order.
  const ownOf = (/** @type {HTMLElement[]} */ group) =>
    visible(group).filter((row) => !row.classList.contains("remat-missing"));
  const ordered = [...groups].sort((a, b) => total(ownOf(b[1])) - total(ownOf(a[1])));
  return ordered.flatMap(([label, members]) => {
    if (!visible(members).length) return members;
    const key = `${state.group}\n${label}`;
    const folded = state.folded.has(key);
    const turn = () => void (state.folded.delete(key) || state.folded.add(key));
    const head = foldRow(label, !folded, turn, words);
    const own = ownOf(members);
    const totals = document.createElement("small");
    totals.textContent = ` ${summary(own, own, words.noun, words.unit)}`;
    head.cells[0].append(totals);
    if (folded) for (const row of members) row.hidden = true;
    return [head, ...members];
  });
}
