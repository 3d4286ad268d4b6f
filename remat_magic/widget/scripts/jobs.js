// @ts-check
/** @import { Widget } from "./types.js" */

/**
 * @typedef {object} Step how far a job is, as the kernel tells it
 * @property {string} job the action of the button that begins it
 * @property {string} device that it is for; "" for this machine
 * @property {number} done
 * @property {number} total
 * @property {string} current
 * @property {boolean} finished
 * @property {boolean} cancelled
 * @property {string} doing
 * @property {string} did
 */

const BUTTONS = ["measure", "places"];

/**
 * What takes long: a bar, and a button that cancels. Of several jobs both are of the one that was begun last.
 * @param {Widget} widget
 * @param {() => string} device the one that is chosen
 */
export function longJobs(widget, device) {
  const { one, part, say } = widget;
  /** The jobs that run, in the order in which they were begun. @type {Map<string, Step>} */
  const running = new Map();
  const newest = () => [...running.values()].at(-1);

  /** @param {string} changed the job of which something new is known */
  function lay(changed) {
    const now = newest();
    const [bar, cancel] = [part("progress"), one('[data-action="cancel"]')];
    const wasOnCancel = document.activeElement === cancel;
    bar.hidden = cancel.hidden = !now;
    if (now) [bar.max, bar.value] = [now.total, now.done];
    for (const action of BUTTONS) {
      const button = one(`[data-action="${action}"]`);
      const focused = document.activeElement === button;
      // Gone, it would let the others slide under the pointer.
      button.disabled = running.has(action);
      if (focused && button.disabled) cancel.focus();
    }
    if (wasOnCancel && !now) one(`[data-action="${changed}"]`).focus();
  }

  /** @param {Step} step */
  function tell({ job, device: of, done, total, current, finished, cancelled, doing, did }) {
    const where = of === device() ? "" : of ? ` for ${of}` : " for this machine";
    // Of a search that another one took the place of nothing is said.
    if (cancelled && job === "places" && where) return;
    if (cancelled) say(`Cancelled${where}; ${done} of ${total} ${did}.`);
    else if (finished) say(`${done} of ${total} ${did}${where}.`);
    else if (job === newest()?.job) say(`${doing} ${current}${where}, ${done + 1} of ${total}…`);
  }

  return {
    /** @param {Step} step */
    show(step) {
      if (step.finished) running.delete(step.job);
      else running.set(step.job, step);
      lay(step.job);
      tell(step);
    },
    /** Something has failed, and nothing more is told of it. @param {string} job */
    end(job) {
      if (running.delete(job)) lay(job);
    },
    /** @param {string} job */
    runs: (job) => running.has(job),
    newest: () => newest()?.job,
  };
}
