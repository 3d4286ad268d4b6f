// @ts-check
/** @import { View, Widget } from "./types.js" */

/** ``attn_*`` as it is meant; text without a star as a part of the name. @param {string} text */
function glob(text) {
  const quoted = text.trim().replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(/[*?]/.test(text) ? `^${quoted}$` : quoted, "i");
}

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
    /** @param {string} text */
    find(text) {
      const pattern = glob(text);
      for (const name of all(".remat-name")) name.hidden = !pattern.test(name.querySelector("code").textContent);
    },
    /** Sets all that are visible to one state. @param {string} state */
    setAll(state) {
      for (const name of all(".remat-name")) {
        if (!name.hidden) name.querySelector(`[value="${state}"]`).checked = true;
      }
      ask();
    },
  };
}
