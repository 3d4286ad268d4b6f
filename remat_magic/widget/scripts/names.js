// @ts-check
/** @import { View, Widget } from "./types.js" */

/** The checkpoint names, each with three states, which together are a policy. @param {Widget} widget */
export function checkpointNames(widget) {
  const { all } = widget;

  function ask() {
    /** @type {Record<string, string>} */
    const names = {};
    for (const radio of all('input[type="radio"]:checked')) names[radio.dataset.name] = radio.value;
    widget.ask({ type: "names", names, at: widget.chosenAt() });
  }

  return {
    ask,
    /** @param {View} view */
    select(view) {
      for (const radio of all('input[type="radio"]')) {
        const state = view.names[radio.dataset.name];
        radio.checked = state === radio.value;
        // Neither saved nor recomputed: no radio can say that.
        radio.closest(".remat-name").querySelector("small").hidden = Boolean(state);
      }
    },
  };
}
