// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */

/** Every policy side by side, as estimated and as measured. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  const { one, all, part, say } = widget;
  const asked = { table: "", beside: "" };
  /** @type {{column: string, descending: boolean} | null} */
  let sorted = null;

  /** @param {string} name */
  const control = (name) => one(`[data-control="${name}"]`).value;

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
      widget.send({ type: "compare", policy, at, device });
    }
    asked.table = what;
    asked.beside = policy;
    if (!part("comparison").classList.contains("remat-stale")) widget.panels.plan?.fill?.();
  }

  /** Whether a row or a point of the comparison is of a policy. @param {HTMLElement} entry @param {string} [policy] */
  const stands = (entry, policy) => (entry.dataset.same ?? "").split("\n").includes(policy ?? "");

  /** What stands for the shown policy. */
  function markChosen() {
    for (const entry of all('[data-part="comparison"] [data-same]')) {
      const chosen = String(stands(entry, widget.shown?.policy));
      entry.setAttribute(entry.tagName === "TR" ? "aria-current" : "aria-pressed", chosen);
    }
  }

  /** Rows without a value come last. @param {string} column @param {boolean} descending */
  function sort(column, descending) {
    sorted = { column, descending };
    const button = one(`[data-sort="${column}"]`);
    const table = button?.closest("table");
    if (!table) return;
    for (const head of table.querySelectorAll("[aria-sort]")) head.removeAttribute("aria-sort");
    button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
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
    if (column !== undefined) sort(column, sorted?.column === column ? !sorted.descending : false);
  });

  /** @param {{done: number, total: number, current: string, finished: boolean, cancelled: boolean}} now */
  function showProgress(now) {
    const bar = part("progress");
    bar.max = now.total;
    bar.value = now.done;
    bar.hidden = one('[data-action="cancel"]').hidden = now.finished;
    one('[data-action="measure"]').hidden = !now.finished;
    if (now.cancelled) say(`Cancelled; ${now.done} of ${now.total} measured.`);
    else if (now.finished) say(`${now.done} of ${now.total} measured.`);
    else say(`Measuring ${now.current}, ${now.done + 1} of ${now.total}…`);
  }

  /** @param {string} type */
  function request(type) {
    const { shown } = widget;
    widget.send({ type, policy: shown?.policy, at: shown?.at, device: control("device"), inputs: control("inputs") });
  }

  /** @param {{html?: string, error?: string}} message */
  function showGradients({ html, error }) {
    if (html) widget.place("gradients", html);
    part("gradients").scrollIntoView({ block: "nearest" });
    say(error ?? "", Boolean(error));
  }

  return {
    open() {
      // One slider, above the pictures of both: its plans are points of either.
      widget.panel(key).querySelector(".remat-tools")?.append(one('[data-slot="budget"]'));
    },
    fill,
    show: markChosen,
    messages: {
      compare({ device, at, html, error }) {
        if (asked.table !== `${device}\n${at}`) return;
        if (html) {
          widget.place("comparison", html);
          if (sorted) sort(sorted.column, sorted.descending);
          markChosen();
          if (widget.status().startsWith("Tracing every")) say("");
          if (widget.tab === key) widget.panels.plan?.fill?.(); // only now: both at once would take twice as long
        } else {
          asked.table = ""; // so that it is asked for again
          part("comparison").classList.remove("remat-stale");
          say(error, true);
        }
      },
      gradients: showGradients,
      measure: showGradients,
      progress: showProgress,
    },
    controls: { device: fill },
    actions: {
      measure() {
        say("Measuring…");
        request("measure");
      },
      gradients() {
        say("Comparing gradients…");
        request("gradients");
      },
      cancel: () => request("cancel"),
    },
  };
}
