// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { element, keyOf } from "./shared.js";

/** The name of the chosen device; empty for this machine. @param {Widget} widget @returns {string} */
export const deviceOf = (widget) => widget.one('[data-control="device"]').value;

/** What an answer is stored under. @param {string} key of the panel @param {Record<string, string>} request */
export const answerKey = (key, { policy, at, device }) => [key, keyOf(policy, at), device].join("\n");

/**
 * What shows one policy's HTML, as on the chosen device, which is requested when its tab is opened.
 * @param {Widget} widget
 * @param {string} key of the part, and of the message
 * @param {() => void} [placed] what is done when the answer is there
 * @returns {Panel}
 */
export function onDemand(widget, key, placed = () => {}) {
  const { store } = widget;
  let requested = "";
  let there = "";

  /** @param {string} what @param {string} html */
  function place(what, html) {
    there = what;
    widget.place(key, html);
    placed();
  }

  /** What the panel is to show now. @returns {Record<string, string> | null} */
  function wanted() {
    const { shown } = widget;
    return shown && { policy: shown.policy, at: shown.at, device: deviceOf(widget) };
  }

  return {
    fill() {
      const request = wanted();
      if (!request) return;
      const what = answerKey(key, request);
      const cached = store.answers.get(what);
      if (cached !== undefined) {
        if (there !== what) place(what, cached);
        else widget.part(key).classList.remove("remat-stale");
      } else if (requested !== what) {
        const part = widget.part(key);
        if (part.childElementCount) part.classList.add("remat-stale");
        else part.append(element("p", "remat-empty", "Working it out…"));
        widget.send({ type: key, ...request });
      }
      requested = cached === undefined ? what : "";
    },
    messages: {
      /** @param {any} message */
      [key]({ type: _, html, error, ...request }) {
        const what = answerKey(key, request);
        if (requested === what) requested = "";
        if (html !== undefined) store.answers.set(what, html);
        const now = wanted();
        if (!now || answerKey(key, now) !== what) return;
        place(what, html ?? "");
        if (error) widget.say(error, true);
      },
    },
  };
}

/** Notes come with every view; what takes longer to find out is requested when they are read. @param {Widget} widget @returns {Panel} */
export const panel = (widget) => onDemand(widget, "advice");
