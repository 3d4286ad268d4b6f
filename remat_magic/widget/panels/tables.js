// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */
import { arrange, arrangement } from "../scripts/arranging.js";

/** What the rows of the tables count and add up to. @type {Record<string, {noun: string, unit: string}>} */
const TABLES = {
  residuals: { noun: "value", unit: "bytes" },
  recomputed: { noun: "operation", unit: "FLOPs" },
};

/** A table that the reader arranges: of residuals, or of recomputed operations. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const state = arrangement();

  function again() {
    const { shown, pinning, linking } = widget;
    const pinned = pinning.view;
    const other = pinned?.complete && pinned !== shown && shown?.complete ? pinned.parts[key] : undefined;
    const context = { line: linking.picked, other, ...TABLES[key], again };
    const summary = widget.one(`[data-summary="${key}"]`);
    summary.textContent = arrange(widget.part(key), state, context);
    // What is folded and in use stays in sight, and what is shown then is told.
    for (const [control, used] of [["find", state.find], ["group", state.group]]) {
      own.querySelector(`[data-${control}]`)?.closest(".remat-field")?.classList.toggle("remat-used", used !== "");
    }
    const asked = state.find || state.group || context.line || other !== undefined;
    summary.parentElement.classList.toggle("remat-asked", Boolean(asked));
  }

  const own = widget.panel(key);
  own.addEventListener("change", ({ target }) => {
    const control = /** @type {HTMLInputElement} */ (target);
    if (control.dataset.group === undefined) return;
    state.group = control.value;
    again();
  });
  own.addEventListener("input", ({ target }) => {
    const control = /** @type {HTMLInputElement} */ (target);
    if (control.dataset.find === undefined) return;
    state.find = control.value;
    again();
  });
  own.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || target.matches("input, select")) return;
    event.preventDefault();
    const button = /** @type {HTMLElement} */ (own.querySelector('[data-action="arrange"]'));
    if (button.getAttribute("aria-expanded") === "true") /** @type {HTMLElement} */ (own.querySelector("[data-find]")).focus();
    else button.click();
  });
  return { arrange: again };
}
