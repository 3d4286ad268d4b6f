// @ts-check
/** @import { Panel, View, Widget } from "../scripts/types.js" */
import { lineOf } from "../scripts/linking.js";
import { differences, jaxprPanes, jaxprText } from "../scripts/panes.js";
import { keyOf } from "../scripts/types.js";

/** The forward and the backward jaxpr, or one of them under two policies. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, part, say } = widget;
  const panes = jaxprPanes(part(key), { onLine: tellLine, onFilled, onPick: pickLineOf });
  let filled = "";
  /** The line of the source that was brought into sight. */
  let revealed = "";

  function onFilled() {
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

  /** The policy's view, and for a comparison the pinned one's. @returns {[View, View | undefined] | null} */
  function views() {
    const { shown, pinning } = widget;
    if (!shown) return null;
    const pinned = pinning.view;
    return [shown, pinned?.complete && pinned !== shown ? pinned : undefined];
  }

  /** @param {View | undefined} a */
  const modeOf = (a) => (a ? one('[data-control="panes"]').value : "halves");

  function fill() {
    const needed = views();
    if (!needed?.[0].complete) return;
    const [b, a] = needed;
    const missing = [b, a].filter((view) => view && !view.bodies);
    if (missing.length) {
      part(key).setAttribute("aria-busy", "true");
      for (const view of missing) widget.send({ type: "jaxprs", policy: view?.policy, at: view?.at });
      return;
    }
    const mode = modeOf(a);
    const what = [mode, ...[b, a].map((view) => view && keyOf(view.policy, view.at))].join("\n");
    if (filled === what) return;
    filled = what;
    const before = [...framed(b).children].slice(0, -1);
    panes.show(sidesOf(mode, b, a), before);
    part(key).removeAttribute("aria-busy");
    part(key).classList.remove("remat-stale");
    summarize(b, a);
  }

  /** @param {View} view */
  function framed(view) {
    const template = document.createElement("template");
    template.innerHTML = view.jaxprs;
    return template.content;
  }

  /** @param {string} mode @param {View} b @param {View | undefined} a */
  function sidesOf(mode, b, a) {
    /** @param {View} view @param {"forward" | "backward"} half @param {View | undefined} against @param {string} title */
    const side = (view, half, against, title) => ({
      title,
      frame: framed(view).querySelectorAll("section")[half === "forward" ? 0 : 1],
      chunks: view.bodies?.[half] ?? [],
      against: against?.bodies?.[half],
    });
    if (mode === "halves" || !a) return [side(b, "forward", a, ""), side(b, "backward", a, "")];
    const half = mode === "forward" ? "forward" : "backward";
    return [side(a, half, b, `A, ${a.policy}:`), side(b, half, a, `B, ${b.policy}:`)];
  }

  /** What the jaxprs have more and less than the pinned policy's. @param {View} b @param {View | undefined} a */
  function summarize(b, a) {
    const counts = a && (/** @type {const} */ (["forward", "backward"])).map((half) => {
      const { more, fewer } = differences(b.bodies?.[half] ?? [], a.bodies?.[half] ?? []);
      return `${half} +${more} −${fewer}`;
    });
    const text = counts ? `● equations that the other has not; B against A: ${counts.join(", ")}` : "";
    one(`[data-summary="${key}"]`).textContent = text;
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
    pinned: fill,
    picked: reveal,
    show(view) {
      const stale = !view.complete || !filled.includes(keyOf(view.policy, view.at));
      part(key).classList.toggle("remat-stale", stale);
    },
    arrange() {
      const { shown, pinning } = widget;
      const { choice, view } = pinning;
      const same = choice?.policy === shown?.policy && choice?.at === shown?.at;
      one('[data-control="panes"]').closest(".remat-field").hidden = !(view?.complete && shown) || same;
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
      panes: fill,
      together: ({ checked }) => panes.setTogether(checked),
    },
    actions: {
      "copy-jaxpr"({ dataset }) {
        const shown = views();
        if (!shown?.[0].bodies) return say("The jaxprs are not here yet.");
        const [b, a] = shown;
        widget.copy(jaxprText(sidesOf(modeOf(a), b, a)[Number(dataset.pane)].chunks));
      },
    },
    stop: panes.stop,
  };
}
