// @ts-check
/** @import { Panel, Widget } from "./types.js" */

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
