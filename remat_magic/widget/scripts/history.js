// @ts-check
/** @import { Choice, Sweep, Widget } from "./types.js" */
import { keyOf } from "./types.js";

// So many choices can be taken back.
const MOST = 100;

/** What was chosen, oldest first, and which of it is shown. @param {Widget} widget */
export function choiceHistory(widget) {
  /** @type {Choice[]} */
  let choices = [];
  let current = -1;

  /** @param {Choice | undefined} one @param {Choice} other */
  const same = (one, other) => one !== undefined && keyOf(one.policy, one.at) === keyOf(other.policy, other.at);

  /** @param {Choice} choice @param {Sweep | null} [sweep] that it is of, and of which one entry is left */
  function remember({ policy, at }, sweep) {
    const made = { policy, at };
    if (!same(choices[current], made)) {
      const before = choices.slice(0, current + (sweep?.entry && sweep.entry === choices[current] ? 0 : 1));
      const back = same(before.at(-1), made);
      choices = back ? before : [...before, made].slice(-MOST);
      current = choices.length - 1;
      if (sweep) sweep.entry = back ? null : made;
    }
    widget.one('[data-action="undo"]').disabled = current < 1;
    widget.one('[data-action="redo"]').disabled = current >= choices.length - 1;
  }

  return {
    remember,
    /** Drops what was asked for and failed. */
    forget() {
      const { shown } = widget;
      const key = shown && keyOf(shown.policy, shown.at);
      while (current > 0 && keyOf(choices[current].policy, choices[current].at) !== key) choices.splice(current--, 1);
      if (shown) remember(shown);
    },
    /** @param {number} step -1 or 1 */
    travel(step) {
      const choice = choices[current + step];
      if (!choice) return;
      current += step;
      const { policy, at } = choice;
      widget.ask({ type: "choose", policy, at }, widget.store.views.get(keyOf(policy, at)));
      remember(choice);
    },
  };
}
