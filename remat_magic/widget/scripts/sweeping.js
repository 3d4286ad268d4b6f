// @ts-check
/** @import { Sweep } from "./types.js" */

/** A slider that is moved on and on: of what it passes only the last stays in the list of policies. */
export function sweeper() {
  /** @type {Sweep | null} */
  let current = null;

  return {
    /** @returns {Sweep | null} */
    get current() {
      return current;
    },
    /** Goes on with a slider, or ends what one began. @param {boolean} sweeping */
    go(sweeping) {
      current = sweeping ? (current ?? { entry: null, option: null }) : null;
    },
    /** Chooses in a list; what is not in it comes into it. @param {HTMLSelectElement} list @param {string} value @param {string} label */
    choose(list, value, label) {
      // A policy by names, or of the user's own, is in no table.
      const known = [...list.options].some((option) => option.value === value);
      const option = known ? null : new Option(label, value);
      if (option) list.add(option);
      list.value = value;
      if (!current || list.dataset.control !== "policy" || current.option?.value === value) return;
      current.option?.remove();
      current.option = option;
    },
  };
}
