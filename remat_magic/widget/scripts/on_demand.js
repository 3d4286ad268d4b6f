// @ts-check
/** @import { Panel, Widget } from "./types.js" */
import { keyOf } from "./types.js";

/** Any panel that shows one policy's HTML, which is asked for when it is opened. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { store } = widget;
  let asked = "";

  return {
    fill() {
      const { shown } = widget;
      if (!shown) return;
      const { policy, at } = shown;
      const what = `${key}\n${keyOf(policy, at)}`;
      const cached = store.answers.get(what);
      if (cached !== undefined) widget.place(key, cached);
      else if (asked !== what) {
        widget.part(key).classList.add("remat-stale");
        widget.send({ type: key, policy, at });
      }
      asked = cached === undefined ? what : "";
    },
    messages: {
      [key]({ policy, at, html, error }) {
        const { shown } = widget;
        const what = `${key}\n${keyOf(policy, at)}`;
        if (asked === what) asked = "";
        if (html !== undefined) store.answers.set(what, html);
        if (!shown || `${key}\n${keyOf(shown.policy, shown.at)}` !== what) return;
        widget.place(key, html ?? "");
        if (error) widget.say(error, true);
      },
    },
  };
}
