// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */
import { longJobs } from "../scripts/jobs.js";
import { onRoom, roomFor } from "../scripts/room.js";

/** Every policy side by side, as estimated and as measured. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, all, part, say } = widget;
  const asked = { table: "", beside: "" };
  /** @type {{column: string, descending: boolean} | null} */
  let sorted = null;

  /** @param {string} name */
  const room = (name) => roomFor(one(".remat-body"), part(name));
  /** @param {string} name */
  const control = (name) => one(`[data-control="${name}"]`).value;

  const jobs = longJobs(widget, () => control("device"));

  function fill() {
    const { shown } = widget;
    if (!shown) return;
    const { policy, at } = shown;
    const device = control("device");
    const what = `${device}\n${at}`;
    const listed = all('[data-part="comparison"] [data-same]').some((entry) => stands(entry, policy));
    if (asked.table !== what || !(listed || asked.beside === policy)) {
      if (!part("comparison").childElementCount) say("Tracing every policy…");
      part("comparison").classList.add("remat-stale");
      widget.send({ type: "compare", policy, at, device, width: room("comparison") });
    }
    asked.table = what;
    asked.beside = policy;
  }

  /** Whether a row or a point of the comparison is of a policy. @param {HTMLElement} entry @param {string} [policy] */
  const stands = (entry, policy) => (entry.dataset.same ?? "").split("\n").includes(policy ?? "");

  /** What stands for the shown policy, and among places for the policy at its own. */
  function markChosen() {
    const { policy, at } = widget.shown ?? {};
    const placed = policy === "mixed" ? at : `${policy} at ${at}`;
    for (const entry of all(":is([data-part=comparison], [data-part=places]) [data-same]")) {
      const chosen = String(stands(entry, entry.closest("[data-part=places]") ? placed : policy));
      entry.setAttribute(entry.tagName === "TR" ? "aria-current" : "aria-pressed", chosen);
    }
  }

  /** Rows without a value come last. @param {HTMLElement | null} button of the column @param {boolean} descending */
  function sort(button, descending) {
    const column = button?.dataset.sort;
    const table = button?.closest("table");
    if (!button || !table) return;
    for (const head of table.querySelectorAll("[aria-sort]")) head.removeAttribute("aria-sort");
    button.closest("th")?.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    /** @param {HTMLTableRowElement} row */
    const value = (row) => {
      const text = row.querySelectorAll("td.remat-num")[Number(column)]?.getAttribute("data-value");
      return text === null || text === undefined ? null : Number(text);
    };
    const rows = [...body.rows];
    rows.sort((a, b) => {
      const [first, second] = [value(a), value(b)];
      if (first === null || second === null) return Number(first === null) - Number(second === null);
      return descending ? second - first : first - second;
    });
    body.append(...rows);
  }

  widget.panel(key).addEventListener("click", ({ target }) => {
    const button = /** @type {HTMLElement} */ (target).closest("button");
    const column = button?.dataset.sort;
    if (!button || column === undefined) return;
    const descending = button.closest("th")?.getAttribute("aria-sort") === "ascending";
    if (button.closest("[data-part=comparison]")) sorted = { column, descending };
    sort(button, descending);
  });

  // Pictures are drawn for the room that there is now.
  const stops = [
    onRoom(part("comparison"), () => request("compare")),
    onRoom(part("places"), () => jobs.runs("places") || request("places", { redraw: true })),
  ];

  /** @param {string} type @param {Record<string, string | boolean | undefined>} [more] */
  function request(type, more) {
    const { shown } = widget;
    const of = { policy: shown?.policy, at: shown?.at, device: control("device"), inputs: control("inputs") };
    widget.send({ type, ...of, width: room(type === "places" ? type : "comparison"), ...more });
  }

  /** @param {{html?: string, error?: string}} message */
  function showGradients({ html, error }) {
    if (html) widget.place("gradients", html);
    part("gradients").scrollIntoView({ block: "nearest" });
    say(error ?? "", Boolean(error));
  }

  return {
    open() {
      // One slider, here and in the tab Plan: its plans are points of the picture.
      one('[data-action="cancel"]').before(one('[data-slot="budget"]'));
    },
    fill,
    show: markChosen,
    stop() {
      for (const stop of stops) stop();
    },
    messages: {
      compare({ device, at, html, error }) {
        if (asked.table !== `${device}\n${at}`) return;
        if (html) {
          widget.place("comparison", html);
          if (sorted) sort(one(`[data-part=comparison] [data-sort="${sorted.column}"]`), sorted.descending);
          markChosen();
          if (widget.status().startsWith("Tracing every")) say("");
        } else {
          asked.table = ""; // so that it is asked for again
          part("comparison").classList.remove("remat-stale");
          say(error, true);
        }
      },
      gradients: showGradients,
      measure(message) {
        jobs.end("measure");
        showGradients(message);
      },
      places({ device, html, error }) {
        if (error) jobs.end("places");
        if (device !== control("device")) return;
        if (html) widget.place("places", html);
        if (error) say(error, true);
        markChosen();
      },
      progress: jobs.show,
    },
    controls: {
      device() {
        if (widget.tab === key) fill();
        // Times are of the device.
        if (part("places").childElementCount || jobs.runs("places")) request("places");
      },
    },
    actions: {
      measure() {
        say("Measuring…");
        request("measure");
      },
      places() {
        say("Trying…");
        request("places");
      },
      gradients() {
        say("Comparing gradients…");
        request("gradients");
      },
      cancel: () => request("cancel", { job: jobs.newest() }),
    },
  };
}
