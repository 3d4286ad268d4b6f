// @ts-check
/** @import { Choice, Widget } from "./types.js" */
import { keyOf } from "./types.js";

// So many choices can be taken back.
const MOST = 100;

/** What was chosen, oldest first, and which of it is shown. @param {Widget} widget */
export function choiceHistory(widget) {
  /** @type {Choice[]} */
  let choices = [];
  let current = -1;

  /** @param {Choice} choice */
  function remember({ policy, at }) {
    const now = choices[current];
    if (!now || now.policy !== policy || now.at !== at) {
      choices = [...choices.slice(0, current + 1), { policy, at }].slice(-MOST);
      current = choices.length - 1;
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
