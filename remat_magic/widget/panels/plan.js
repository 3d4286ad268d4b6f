// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */
import { deviceOf } from "../scripts/on_demand.js";
import { onRoom, roomFor } from "../scripts/room.js";
import { quantity } from "../scripts/units.js";

/** Plans within a budget, and what could be done otherwise. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, part, say } = widget;
  const slot = one('[data-slot="budget"]');
  const slider = one('[data-control="budget"]');
  /** The budgets of the slider at the place that is shown. @type {{budget: number, text: string, beyond: string}[]} */
  let stops = [];
  let asked = "";
  /** The peaks that the slider moves between where the budget is of the peak. @type {[number, number] | null} */
  let peaks = null;
  /** Whether the slider is held, so that no answer moves it. */
  let moving = false;

  /** The width of the picture, which is there from Compare too. */
  const room = () => roomFor(one(".remat-body"), part("frontier"));
  let marked = -1; // the stop that is marked in it

  const device = () => one('[data-control="device"]')?.value ?? "";

  /** What the pictures are of. @param {string} at @param {{device?: string}} [message] */
  const whatOf = (at, message) => `${message ? (message.device ?? "") : device()}\n${at}`;

  /** What the budget is of. */
  const of = () => one('[data-control="of"]').value;
  /** Whether the slider moves over peaks. */
  const ofPeak = () => of() === "peak" && peaks !== null;

  /** The slider, the picture and the sentence below it, of one plan where one is chosen. @param {any} message */
  function placeAll({ picture, stops: budgets, peaks: ends, place, peak_place: peakPlace, text }) {
    if (!picture) return;
    [stops, peaks] = [budgets, ends];
    slider.disabled = !stops.length;
    slider.max = String(Math.max(0, stops.length - 1));
    slider.value = String((ofPeak() ? peakPlace : place) ?? Math.floor(stops.length / 2));
    widget.place("frontier", picture);
    if (text) tell(text, -1);
    else tellStop();
  }

  /** @param {string} text @param {number} number of the stop to mark */
  function tell(text, number) {
    part("stop").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    mark(number);
  }

  /** @param {number} number of the stop to mark */
  function mark(number) {
    marked = number;
    for (const mark of part("frontier").querySelectorAll("[data-stop]")) {
      mark.classList.toggle("remat-at", Number(mark.dataset.stop) === number);
    }
    // The dot of a plan is of what is chosen, not of where the slider is moved to.
    for (const dot of part("frontier").querySelectorAll("[data-plan]")) dot.style.display = number < 0 ? "" : "none";
  }

  /** What the slider moves over. */
  function fill() {
    const { shown } = widget;
    if (!shown) return;
    const what = whatOf(shown.at);
    if (asked === what) return;
    asked = what;
    slider.disabled = true;
    part("stop").textContent = "Working out the frontier…";
    ask(shown);
  }

  /** @param {import("../scripts/types.js").View} shown @param {{redraw?: boolean}} [more] */
  function ask({ at, policy }, more) {
    widget.send({ type: "frontier", at, policy, device: device(), width: room(), ...more });
  }

  /** Draws the picture for the room that there is now. */
  function redraw() {
    const { shown, tab } = widget;
    if (tab === key && shown) ask(shown, { redraw: true });
  }

  const stopRoom = onRoom(part("frontier"), redraw);

  /** The bytes that the slider is at: between two stops in proportion. */
  function budgetAt() {
    const place = Number(slider.value);
    if (ofPeak() && peaks) return Math.round(peaks[0] + ((peaks[1] - peaks[0]) * place) / Number(slider.max || 1));
    const [below, above] = [stops[Math.floor(place)], stops[Math.ceil(place)]];
    return below ? Math.round(below.budget + (above.budget - below.budget) * (place % 1)) : 0;
  }

  /** What can be had where the slider is, at once: a stop's own plan, or between two what they bound. */
  function tellStop() {
    if (ofPeak()) return tell(`within ${quantity(budgetAt(), "bytes")} of peak`, -1);
    const place = Number(slider.value);
    const number = Math.floor(place);
    const stop = stops[number];
    const text = !stop ? "" : place === number ? stop.text : `${quantity(budgetAt(), "bytes")}: ${stop.beyond}`;
    tell(text, number);
  }

  /** @param {number | string} budget */
  function plan(budget) {
    const kind = typeof budget === "number" && !ofPeak() ? "saved" : of();
    const wish = { type: "plan", budget, of: kind, device: device(), at: widget.shown?.at, width: room() };
    widget.ask(wish);
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

  slider.addEventListener("input", () => {
    moving = true;
    tellStop();
  });
  widget.panel(key).addEventListener("click", ({ target }) => {
    const button = /** @type {HTMLElement} */ (target).closest("button");
    const flip = button?.dataset.flip;
    if (flip !== undefined) widget.ask({ type: "flip", flip, at: widget.shown?.at });
  });

  return {
    open() {
      // One slider, above the pictures of both this tab and Compare.
      widget.panel(key).querySelector(".remat-tools")?.prepend(slot);
    },
    fill,
    stop: stopRoom,
    show({ at, planned }) {
      one('[data-action="to-edit"]').hidden = !planned;
      slider.disabled = !stops.length || asked !== whatOf(at);
    },
    messages: {
      frontier(message) {
        if (asked !== whatOf(message.at, message)) return;
        if (message.redraw && message.html) {
          widget.place("frontier", message.html);
          return mark(marked);
        }
        placeAll({ ...message, picture: message.html });
        if (message.error) {
          asked = "";
          say(message.error, true);
        }
      },
      plan(message) {
        if (message.serial < widget.store.clock) return; // of an older wish, which is not shown
        part("planned").classList.remove("remat-stale");
        if (message.html) widget.place("planned", message.html);
        if (!moving && asked === whatOf(message.at, message)) placeAll(message);
        showFailure(message);
      },
      flip: showFailure,
      "what-if": showAlternatives,
      edit: showAlternatives,
    },
    controls: {
      budget() {
        moving = false;
        plan(budgetAt());
      },
      of: () => tellStop(),
    },
    actions: {
      plan: () => plan(one('[data-control="typed"]').value.trim() || budgetAt()),
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
