// @ts-check
/** @import { Panel, Widget } from "./shared.js" */

/** Whether the first expression that an element belongs to is on a line. @param {HTMLElement} element @param {string} line the key of one */
export const standsOn = (element, line) => (element.dataset.e ?? "").startsWith(`${line}.`);

/** The line of the first expression of what an element shows; none for what no line makes. @param {HTMLElement} element */
export const lineOf = (element) => /^[0-9a-f]+\.\d+/.exec(element.dataset.e ?? "")?.[0] ?? "";

/**
 * One residual, one operation, one expression, one line of the source, wherever it stands.
 * @param {Widget} widget
 */
export function linking(widget) {
  const { one, all } = widget;
  let lit = "";
  /** The line of the source that is marked everywhere, and that tables are narrowed to unless it is that of a row. */
  let picked = "";
  /** The row of a table that it was chosen by. */
  let chosen = "";

  /** Marks what is on the picked line. */
  function mark() {
    for (const marked of all(".remat-picked")) marked.classList.remove("remat-picked");
    for (const button of all("[data-pick]")) {
      const chosen = button.dataset.pick === picked;
      button.setAttribute("aria-pressed", String(chosen));
      button.closest("[data-line]")?.classList.toggle("remat-picked", chosen);
    }
    if (picked) for (const line of all(".remat-l[data-e]")) if (standsOn(line, picked)) line.classList.add("remat-picked");
  }

  /**
   * Narrows the tables to a line and marks it everywhere, or by a row of a table, which stays as it is, marks its line; the
   * same again takes it back.
   * @param {string} line @param {string} [row] the key of one
   */
  function pick(line, row = "") {
    const again = picked === line && (!row || row === chosen);
    [picked, chosen] = again ? ["", ""] : [line, row];
    for (const panel of Object.values(widget.panels)) panel.arrange?.();
    mark();
    for (const panel of Object.values(widget.panels)) panel.picked?.();
    const chip = one('[data-action="unpick"]');
    // A table may have no row of the line, and a jaxpr no equation.
    const label = one(`[data-pick="${picked}"]`)?.dataset.place ?? "one line";
    const [said, back] = chosen ? [`Chosen: ${label}`, "take it back"] : [`Only ${label}`, "show all again"];
    chip.textContent = picked ? `${said} ×` : "";
    chip.setAttribute("aria-label", picked ? `${said}: ${back}` : "");
    chip.hidden = !picked;
  }

  /** Marks everything that belongs to what is pointed at. @param {Element} target */
  function point(target) {
    const residual = target.closest("[data-r]")?.getAttribute("data-r") ?? "";
    const linked = /** @type {HTMLElement | null} */ (target.closest("[data-e], [data-o]"));
    const { e: expressions = "", o: operation = "" } = linked?.dataset ?? {};
    const key = [residual, operation, expressions].join("\n");
    if (lit === key) return;
    lit = key;
    for (const marked of all(".remat-lit, .remat-same")) marked.classList.remove("remat-lit", "remat-same");
    if (residual) for (const same of all(`[data-r="${residual}"]`)) same.classList.add("remat-lit");
    const same = selectorsOf(expressions.split(" ").filter(Boolean), operation);
    if (same.length) for (const element of all(same.join())) element.classList.add("remat-same");
  }

  return {
    mark,
    pick,
    point,
    get picked() {
      return picked;
    },
    get chosen() {
      return chosen;
    },
  };
}

/** What finds the same expressions, or the same operation of them. @param {string[]} keys @param {string} operation */
function selectorsOf(keys, operation) {
  // What a library's expression makes is marked from there; from elsewhere that expression alone is, and not all else
  // that it makes.
  const whole = keys.length === 1 ? keys : keys.filter((expression) => !expression.startsWith("~"));
  const selectors = whole.map((expression) => `[data-e~="${expression}"]:not([data-o])`);
  // An operation of one layer is marked apart from the same expression of another.
  if (operation) selectors.push(`[data-o="${operation}"]`);
  else selectors.push(...selectors.map((selector) => selector.replace(":not([data-o])", "[data-o]")));
  const rest = keys.filter((expression) => !whole.includes(expression));
  return [...selectors, ...rest.map((expression) => `[data-e="${expression}"]:not([data-o])`)];
}

// How far down a panel a line is brought into sight, as a share of it.
const DOWN = 0.3;

/** The source, in which the chosen line is brought into sight. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const part = widget.part(key);
  /** The line that was brought into sight: once, what is scrolled to from there stays. */
  let revealed = "";

  function reveal() {
    const { picked } = widget.linking;
    if (!part.clientHeight || picked === revealed) return;
    revealed = picked;
    const line = /** @type {HTMLElement | null} */ (part.querySelector("tr.remat-picked"));
    if (!line) return;
    const fold = line.closest("details");
    if (fold) fold.open = true;
    const [outer, inner] = [part.getBoundingClientRect(), line.getBoundingClientRect()];
    const isSeen = outer.top <= inner.top && inner.bottom <= outer.bottom;
    if (!isSeen) part.scrollTop += inner.top - outer.top - DOWN * outer.height; // not the page
  }

  return { open: reveal, picked: reveal, show: () => widget.linking.mark() };
}
