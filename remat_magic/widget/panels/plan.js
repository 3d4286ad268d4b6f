// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */
import { deviceOf } from "../scripts/on_demand.js";

/** Plans within a budget, and what could be done otherwise. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, part, say } = widget;
  const slot = one('[data-slot="budget"]');
  const slider = one('[data-control="budget"]');

  /** The share that the slider is at, of what there is without a checkpoint. */
  const share = () => `${slider.value}%`;

  function tell() {
    part("stop").textContent = share();
    slider.setAttribute("aria-valuetext", share());
  }

  /** @param {string} budget */
  function plan(budget) {
    const [of, device] = [one('[data-control="of"]').value, one('[data-control="device"]')?.value ?? ""];
    widget.ask({ type: "plan", budget, of, device, at: widget.shown?.at });
    part("planned").classList.add("remat-stale");
  }

  /** @param {string} type */
  function workOut(type) {
    say("Working it out…");
    part("alternatives").classList.add("remat-stale");
    // What is chosen, which may be on its way still.
    const policy = one('[data-control="policy"]').value;
    widget.send({ type, policy, at: widget.chosenAt(), device: deviceOf(widget) });
  }

  /** @param {{html?: string, error?: string}} message */
  function showAlternatives({ html, error }) {
    part("alternatives").classList.remove("remat-stale");
    if (html) {
      widget.place("alternatives", html);
      part("alternatives").scrollIntoView({ block: "nearest" });
    }
    say(error ?? "", Boolean(error));
  }

  /** What was wished for is not to be had. @param {{error?: string, serial: number}} message */
  function showFailure({ error, serial }) {
    if (!error || serial < widget.store.clock) return;
    widget.root.setAttribute("aria-busy", "false");
    say(error, true);
  }

  slider.addEventListener("input", tell);
  widget.panel(key).addEventListener("click", ({ target }) => {
    const button = /** @type {HTMLElement} */ (target).closest("button");
    const flip = button?.dataset.flip;
    if (flip !== undefined) widget.ask({ type: "flip", flip, at: widget.shown?.at });
  });

  return {
    open() {
      // One slider, here and above the picture of Compare.
      widget.panel(key).querySelector(".remat-tools")?.prepend(slot);
    },
    show({ planned }) {
      one('[data-action="to-edit"]').hidden = !planned;
    },
    messages: {
      plan(message) {
        if (message.serial < widget.store.clock) return; // of an older wish, which is not shown
        part("planned").classList.remove("remat-stale");
        if (message.html) widget.place("planned", message.html);
        showFailure(message);
      },
      flip: showFailure,
      "what-if": showAlternatives,
      edit: showAlternatives,
    },
    controls: {
      budget: () => plan(share()),
    },
    actions: {
      plan: () => plan(one('[data-control="typed"]').value.trim() || share()),
      "what-if": () => workOut("what-if"),
      edit: () => workOut("edit"),
      "to-edit"() {
        widget.open(key, true);
        workOut("edit");
      },
      "copy-diff"() {
        const diff = part("alternatives").querySelector(".remat-diff")?.cloneNode(true);
        if (!(diff instanceof Element)) return;
        for (const fold of diff.querySelectorAll("details")) fold.remove();
        widget.copy(diff.textContent ?? "");
      },
    },
  };
}
