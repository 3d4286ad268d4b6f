// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { onDemand } from "./on_demand.js";
import { quantity } from "./shared.js";

/**
 * What remat_magic/views/memory.py tells of the columns of the picture; of each layer by pairs of a column and the bytes from it on.
 *
 * @typedef {{columns: number, said: string[], live: [number, number][][], peak: number, atPeak: string}} Data
 */

/** The estimated memory over time: the pointer and the arrow keys tell what is live at another moment. @param {Widget} widget @param {string} key @returns {Panel} */
export const panel = (widget, key) => onDemand(widget, key, () => follow(widget.part(key)));

/** The bytes in a column. @param {[number, number][]} changes @param {number} column */
const at = (changes, column) => changes.filter(([from]) => from <= column).at(-1)?.[1] ?? 0;

/** A share as Python writes it. @param {number} share */
const percent = (share) => `${share < 9.95 ? share.toFixed(1) : Math.round(share)}%`;

/** @param {HTMLElement} part */
function follow(part) {
  const root = /** @type {HTMLElement | null} */ (part.querySelector("[data-time]"));
  if (!root) return;
  /** @type {Data} */
  const data = JSON.parse(root.dataset.time ?? "");
  const one = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (root.querySelector(selector));
  const [plot, area, cursor, said] = [".remat-plot", ".remat-area", ".remat-cursor", "[data-said]"].map(one);
  const rows = /** @type {HTMLTableRowElement[]} */ ([...root.querySelectorAll("tr[data-layer]")]);
  /** Whether what is shown stays where the pointer goes on. */
  let pinned = false;
  /** The column that is shown; null is the peak. @type {number | null} */
  let here = null;

  /** @param {number | null} column */
  function show(column) {
    here = column;
    const shown = column ?? data.peak;
    const sizes = data.live.map((changes) => at(changes, shown));
    const whole = sizes.reduce((sum, size) => sum + size, 0);
    const note = pinned ? " (kept by your click; Escape undoes)" : "";
    said.textContent = column === null ? data.atPeak : `${data.said[shown]}: ${quantity(whole, "bytes")} by estimate${note}`;
    plot.setAttribute("aria-valuenow", String(shown + 1));
    plot.setAttribute("aria-valuetext", said.textContent);
    cursor.hidden = column === null;
    cursor.style.left = `${(100 * (shown + 0.5)) / data.columns}%`;
    for (const row of rows) {
      const size = sizes[Number(row.dataset.layer)];
      const [bytes, share] = row.cells;
      bytes.textContent = size ? quantity(size, "bytes") : "";
      bytes.title = `${size.toLocaleString("en-US")} bytes`;
      share.textContent = size ? percent((100 * size) / whole) : "";
      row.classList.toggle("remat-gone", !size);
    }
  }

  /** @param {{clientX: number}} event */
  function columnAt({ clientX }) {
    const { left, width } = area.getBoundingClientRect();
    const column = Math.floor((data.columns * (clientX - left)) / width);
    return column >= 0 && column < data.columns ? column : null;
  }

  /** Marks a layer, here and in the table. @param {string | undefined} layer */
  function mark(layer) {
    for (const other of root?.querySelectorAll("[data-layer]") ?? []) {
      other.classList.toggle("remat-same", layer !== undefined && /** @type {HTMLElement} */ (other).dataset.layer === layer);
    }
  }

  root.addEventListener("pointerover", ({ target }) => mark(/** @type {HTMLElement} */ (/** @type {Element} */ (target).closest("[data-layer]"))?.dataset.layer));
  area.addEventListener("pointermove", (event) => {
    if (!pinned) show(columnAt(event));
  });
  area.addEventListener("click", (event) => {
    const column = columnAt(event);
    pinned = !(pinned && column === here);
    show(column);
  });
  area.addEventListener("pointerleave", () => pinned || document.activeElement === plot || show(null));
  plot.addEventListener("blur", () => pinned || show(null));
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const column = here ?? data.peak;
    const last = data.columns - 1;
    const step = event.shiftKey ? 20 : 1;
    /** @type {Record<string, number>} */
    const moves = { PageUp: column + 40, PageDown: column - 40, Home: 0, End: last };
    moves.ArrowRight = moves.ArrowUp = column + step;
    moves.ArrowLeft = moves.ArrowDown = column - step;
    if (event.key in moves) {
      pinned = false;
      show(Math.max(0, Math.min(last, moves[event.key])));
    } else if (event.key === "Escape" && here !== null) {
      pinned = false;
      show(null);
    } else return;
    event.preventDefault();
  });
  show(null);
}
