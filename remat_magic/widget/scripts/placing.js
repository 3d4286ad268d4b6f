// @ts-check
/** @import { View } from "./types.js" */

/**
 * What the kernel renders, put in its places, with the keyboard left where it was.
 *
 * @param {(name: string) => HTMLElement} part
 */
export function placing(part) {
  /** What stands in each of them, as it came. @type {Map<string, string>} */
  const placed = new Map();

  /** Replaces a part's content. @param {string} name @param {string} html */
  function place(name, html) {
    const target = part(name);
    const focused = /** @type {HTMLElement} */ (target.contains(document.activeElement) ? document.activeElement : null);
    const again = focused && ["policy", "diff"].find((key) => focused.dataset[key] !== undefined);
    const height = target.offsetHeight;
    if (height) target.style.minHeight = `${height}px`;
    target.innerHTML = html;
    target.style.minHeight = "";
    target.classList.remove("remat-stale");
    if (again) {
      const same = [...target.querySelectorAll(focused.tagName.toLowerCase())].find(
        (/** @type {any} */ { dataset }) => dataset[again] === focused.dataset[again] && dataset.at === focused.dataset.at,
      );
      /** @type {HTMLElement | undefined} */ (same)?.focus();
    }
  }

  /** Shows what comes with every view. @param {View} view */
  function show(view) {
    // All is read before anything is written: a page is laid out anew for each that is asked for in between.
    const before = Object.keys(view.parts).map((name) => ({ name, target: part(name), height: part(name).offsetHeight }));
    for (const { name, target, height } of before) {
      if (!target.closest("[data-panel]")) continue; // of the first screen
      // Until the backward half is there, the panels that need it keep the last policy's content, dimmed.
      const stale = !view.complete && target.dataset.early === undefined && target.childElementCount > 0;
      target.classList.toggle("remat-stale", stale);
      // The kernel sends what was at hand already once more: the reader may have gone on from it.
      if (stale || placed.get(name) === view.parts[name]) continue;
      // Never shorter than it was while it is open: what is below would jump at each toggle.
      if (height) target.style.minHeight = `${height}px`;
      const focused = target.contains(document.activeElement) ? document.activeElement?.closest("tr") : null;
      target.innerHTML = view.parts[name];
      placed.set(name, view.parts[name]);
      if (focused?.dataset.k !== undefined) focusRow(target, focused.dataset.k);
    }
  }

  return { place, show };
}

/** Lets the keyboard go on from the same row. @param {HTMLElement} target @param {string} key */
function focusRow(target, key) {
  const row = [...target.querySelectorAll("tr")].find(({ dataset }) => dataset.k === key);
  if (!row) return;
  row.tabIndex = 0;
  row.focus({ preventScroll: true });
}
