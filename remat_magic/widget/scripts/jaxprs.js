// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { lineOf } from "./linking.js";
import { jaxprPanes } from "./panes.js";
import { keyOf, parsed } from "./shared.js";

/** The forward and the backward jaxpr. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, part, say } = widget;
  const panes = jaxprPanes(part(key), { onLine: tellLine, onFilled, onPick: pickLineOf });
  let filled = "";
  /** The line of the source that was brought into sight. */
  let revealed = "";

  function onFilled() {
    const whole = /** @type {HTMLInputElement} */ (one('[data-control="whole"]'));
    const isCut = [...part(key).querySelectorAll("pre")].some((pane) => pane.scrollHeight > pane.clientHeight + 1);
    /** @type {HTMLElement} */ (whole.closest("label")).hidden = !isCut && !whole.checked;
    widget.linking.mark();
    reveal();
  }

  /** Brings the equations of the picked line into sight, once: what is scrolled to from there stays. */
  function reveal() {
    const { picked } = widget.linking;
    if (widget.tab !== key || picked === revealed) return;
    revealed = picked;
    if (picked) panes.reveal(".remat-picked");
  }

  function fill() {
    const view = widget.shown;
    if (!view?.complete) return;
    if (!view.bodies) {
      part(key).setAttribute("aria-busy", "true");
      widget.send({ type: "jaxprs", policy: view.policy, at: view.at });
      return;
    }
    const what = keyOf(view.policy, view.at);
    if (filled === what) return;
    filled = what;
    const { forward, backward } = view.bodies;
    const content = parsed(view.jaxprs);
    const [left, right] = content.querySelectorAll("section");
    const before = [...content.children].slice(0, -1);
    panes.show([{ frame: left, chunks: forward }, { frame: right, chunks: backward }], before);
    part(key).removeAttribute("aria-busy");
    part(key).classList.remove("remat-stale");
  }

  /** @param {HTMLElement} line */
  function pickLineOf(line) {
    const picked = lineOf(line);
    if (!picked) return say("No line of your source makes this.");
    if (widget.linking.picked !== picked) widget.linking.pick(picked);
    widget.open("listing");
    one(`[data-pick="${picked}"]`)?.focus();
  }

  /** @param {HTMLElement} line */
  function tellLine(line) {
    widget.linking.point(line);
    say(line.title.split("\n")[0]);
  }

  return {
    open: reveal,
    fill,
    picked: reveal,
    show(view) {
      const stale = !view.complete || filled !== keyOf(view.policy, view.at);
      part(key).classList.toggle("remat-stale", stale);
    },
    messages: {
      jaxprs({ policy, at, bodies, frame, error }) {
        const view = widget.store.views.get(keyOf(policy, at));
        if (error) say(error, true);
        if (!view || error) return;
        [view.bodies, view.jaxprs] = [bodies, frame];
        if (widget.tab === key) fill();
      },
    },
    controls: {
      whole: ({ checked }) => void part(key).classList.toggle("remat-whole", checked),
    },
    stop: panes.stop,
  };
}
