// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { element, keyOf } from "./shared.js";

/** The name of the chosen device; empty for this machine. @param {Widget} widget @returns {string} */
export const deviceOf = (widget) => widget.one('[data-control="device"]').value;

/**
 * What shows one policy's HTML, as on the chosen device, which is requested when its tab is opened.
 * @param {Widget} widget
 * @param {string} key of the part, and of the message
 * @param {() => void} [placed] what is done when the answer is there
 * @returns {Panel & {fill: () => void, forget: (request: Record<string, string>) => void}}
 */
export function onDemand(widget, key, placed = () => {}) {
  const { store } = widget;
  let requested = "";
  let there = "";

  /** @param {Record<string, string>} request */
  const nameOf = ({ policy, at, device }) => [key, keyOf(policy, at), device].join("\n");

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
      const what = nameOf(request);
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
    /** There is another answer now. */
    forget(request) {
      store.answers.delete(nameOf(request));
      requested = "";
    },
    messages: {
      /** @param {any} message */
      [key]({ type: _, html, error, ...request }) {
        const what = nameOf(request);
        if (requested === what) requested = "";
        if (html !== undefined) store.answers.set(what, html);
        const now = wanted();
        if (!now || nameOf(now) !== what) return;
        place(what, html ?? "");
        if (error) widget.say(error, true);
      },
    },
  };
}

/** Notes come with every view; what takes longer to find out is requested when they are read. @param {Widget} widget @returns {Panel} */
export const panel = (widget) => onDemand(widget, "advice");
