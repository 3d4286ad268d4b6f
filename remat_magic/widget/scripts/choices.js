// @ts-check
/** @import { Panel, Widget } from "./shared.js" */
import { deviceOf } from "./on_demand.js";
import { element, foldRow, keyOf, quantity } from "./shared.js";

const WORDS = ["fits", "may fit", "too big"];

/**
 * @typedef {{row: HTMLTableRowElement, needed: number, cost: number, rank: number, beaten: boolean,
 *   low: number, unusable: boolean, donates: boolean, hand: boolean, compiled: boolean}} Choice
 */

/**
 * All choices, sorted by what fits where the line is: the line is the device, until the reader moves it.
 * @param {Widget} widget @param {string} key @returns {Panel}
 */
export function panel(widget, key) {
  const { one, part, root, say } = widget;
  const own = widget.panel(key);
  const edit = part("edit");
  const canApply = one(".remat-fitting").dataset.canApply !== undefined;
  /** What is shown, and what was requested: the device, and without one the place. */
  let there = "";
  let requested = "";
  /** Where the reader has moved the line; null is where the device ends. @type {number | null} */
  let line = null;
  /** The choice whose edit is shown or requested. */
  let edited = "";
  /** Whether the choices that others beat are shown too. */
  let unfolded = false;

  const slider = () => /** @type {HTMLInputElement | null} */ (own.querySelector(".remat-slide"));
  /** The bytes at both ends of the picture. */
  const ends = () => {
    const { least, most } = /** @type {HTMLElement} */ (own.querySelector(".remat-plane")).dataset;
    return [Number(least), Number(most)];
  };
  const wanted = () => deviceOf(widget) || `\n${widget.shown?.at ?? ""}`;

  /** @param {HTMLTableRowElement} row @param {number} budget @returns {Choice} */
  function read(row, budget) {
    const number = (/** @type {string} */ name) => Number(row.dataset[name] ?? Infinity);
    const [needed, low, high, cost] = ["needed", "low", "high", "cost"].map(number);
    const rank = line === null ? number("rank") : high <= budget ? 0 : low <= budget ? 1 : 2;
    const [unusable, donates, hand, compiled] = ["unusable", "donates", "hand", "compiled"].map(
      (name) => row.dataset[name] !== undefined,
    );
    const beaten = Boolean(slider()) && (row.dataset.beaten !== undefined || unusable);
    return { row, needed, low, cost, rank, beaten, unusable, donates, hand, compiled };
  }

  /** As records/fit.py has it, for the memory where the line is moved to. @param {Choice} a @param {Choice} b */
  function order(a, b) {
    if (a.unusable !== b.unusable) return Number(a.unusable) - Number(b.unusable);
    if (a.rank !== b.rank) return a.rank - b.rank;
    const [needed, cost] = [a.needed - b.needed, a.cost - b.cost];
    const [first, second] = a.rank === 2 ? [needed, cost] : [cost, needed];
    return first || Number(a.donates) - Number(b.donates) || second || 0;
  }

  /** @param {Choice} one @param {Choice} other */
  function beats(one, other) {
    if (one === other || one.unusable || (one.donates && !other.rank && !other.donates)) return false;
    if (one.hand && !other.hand) return false;
    const needed = one.compiled && !other.compiled ? other.low : other.needed;
    const pairs = [[one.rank, other.rank], [one.needed, needed], [one.cost, other.cost]];
    return pairs.every(([a, b]) => a <= b) && pairs.some(([a, b]) => a < b);
  }

  /** Sorts the rows by what fits where the line is, and numbers them and the points alike. */
  function arrange() {
    const body = /** @type {HTMLTableElement | null} */ (own.querySelector("table.remat-tried"))?.tBodies[0];
    if (!body) return;
    const budget = line ?? Number(slider()?.dataset.capacity ?? Infinity);
    const rows = /** @type {HTMLTableRowElement[]} */ ([...body.querySelectorAll("tr[data-choice]")]);
    const choices = rows.map((row) => read(row, budget));
    // Until the line is moved they are as trace.fit has them; where there is nothing to fit all are of interest.
    if (line === null) choices.sort((a, b) => Number(a.row.dataset.choice) - Number(b.row.dataset.choice));
    else choices.sort(order);
    if (line !== null) {
      const rankOf = new Map(choices.map(({ row, rank }) => [row.dataset.choice, rank]));
      // What hardly differs from a simpler one, where both fit or neither does.
      const apart = choices.filter((it) => it.rank !== rankOf.get(it.row.dataset.alike));
      for (const it of choices)
        it.beaten = it.unusable || !apart.includes(it) || apart.some((other) => beats(other, it));
    }
    const [front, rest] = [choices.filter(({ beaten }) => !beaten), choices.filter(({ beaten }) => beaten)];
    body.querySelector(".remat-rest")?.remove();
    [...front, ...rest].forEach(({ row, beaten }, index) => number(row, beaten ? "" : String(index + 1)));
    for (const { row, rank, unusable } of choices) {
      const cell = /** @type {HTMLElement | null} */ (row.querySelector(".remat-fits"));
      if (cell && slider()) [cell.textContent, cell.dataset.rank] = unusable ? ["", ""] : [WORDS[rank], String(rank)];
      row.hidden = false;
    }
    body.append(...front.map(({ row }) => row));
    widget.mark();
    if (rest.length) body.append(fold(rest.length), ...rest.map(({ row }) => row));
    for (const { row } of rest) row.hidden = !unfolded && row.ariaCurrent !== "true";
    if (slider()) {
      const [least, most] = ends();
      const mark = /** @type {HTMLElement} */ (own.querySelector(".remat-budget"));
      mark.style.setProperty("--remat-at", `${(100 * (budget - least)) / (most - least)}%`);
      const label = /** @type {HTMLElement} */ (mark.firstElementChild);
      label.dataset.device ??= label.textContent ?? "";
      label.textContent = line === null ? label.dataset.device : quantity(line, "bytes");
      slider()?.setAttribute("aria-valuetext", label.textContent);
    }
    showEdit();
  }

  /** @param {HTMLTableRowElement} row @param {string} text */
  function number(row, text) {
    row.cells[0].textContent = text;
    const dot = own.querySelector(`.remat-dot[data-choice="${row.dataset.choice}"]`);
    if (!dot) return;
    dot.textContent = text;
    dot.classList.toggle("remat-beaten", !text);
  }

  /** A row that folds those that others beat. @param {number} count */
  function fold(count) {
    const row = foldRow(`${count} more that another beats in both, or that cannot be used`, unfolded, 6, () => {
      unfolded = !unfolded;
      arrange();
      /** @type {HTMLElement | null} */ (own.querySelector(".remat-rest button"))?.focus();
    });
    row.classList.add("remat-rest");
    return row;
  }

  /** The edit of the shown choice stands below its row. */
  function showEdit() {
    const { shown } = widget;
    const row = own.querySelector('tr[data-choice][aria-current="true"]');
    own.querySelector(".remat-edit-row")?.remove();
    if (!shown || shown.policy === "as_written" || widget.tab !== key) {
      edit.replaceChildren();
      edited = "";
      return;
    }
    if (row) {
      const cell = /** @type {HTMLTableCellElement} */ (element("td", "", edit));
      cell.colSpan = 6;
      row.after(element("tr", "remat-edit-row", cell));
    } else own.querySelector(".remat-panel")?.append(edit);
    if (edited === keyOf(shown.policy, shown.at) || !shown.complete) return;
    edited = keyOf(shown.policy, shown.at);
    edit.textContent = "Working out the edit of your source…";
    widget.send({ type: "edit", policy: shown.policy, at: shown.at, can_apply: canApply });
  }

  /** @param {string} name @param {string} html */
  function place(name, html) {
    own.querySelector(".remat-panel")?.append(edit); // what is replaced would take it along
    widget.place(name, html);
    arrange();
  }

  function fill() {
    if (!widget.shown) return;
    const what = wanted();
    if (requested !== what) {
      if (!part("tried").childElementCount) part("tried").textContent = "Working it out…";
      part("tried").classList.toggle("remat-stale", there !== what);
      widget.send({ type: "tried", device: deviceOf(widget), at: widget.shown.at });
      requested = what;
    }
    arrange();
  }

  root.addEventListener("input", ({ target }) => {
    const moved = slider();
    if (target !== moved || !moved) return;
    const [least, most] = ends();
    line = least + (Number(moved.value) / Number(moved.max)) * (most - least);
    arrange();
  });

  own.addEventListener("click", ({ target }) => {
    const flip = /** @type {HTMLElement} */ (target).closest("button")?.dataset.flip;
    if (flip !== undefined) widget.ask({ type: "flip", flip, at: widget.shown?.at });
  });

  /** Requests all choices again, now or when the tab is opened. */
  function figured() {
    requested = "";
    if (widget.tab === key) fill();
  }

  return {
    fill,
    open: () => arrange(),
    figured,
    show({ planned }) {
      one('[data-action="to-edit"]').hidden = !planned;
      if (!deviceOf(widget)) one(`[data-count="${key}"]`).textContent = String(one('[data-control="policy"]').options.length);
      if (widget.tab === key) fill();
    },
    messages: {
      /** @param {{device: string, at: string, html?: string, count?: number | null, error?: string}} message */
      tried({ device, at, html, count, error }) {
        const what = device || `\n${at}`;
        if (what !== wanted()) return;
        if (error) {
          requested = "";
          say(error, true);
        }
        if (html === undefined) return;
        if (there !== what) line = null;
        there = what;
        const at_ = slider()?.value;
        place("tried", html);
        const moved = slider();
        if (line !== null && moved && at_ !== undefined) moved.value = at_;
        if (count) one(`[data-count="${key}"]`).textContent = String(count);
      },
      /** @param {{said?: string, error?: string}} message */
      plan({ said, error }) {
        say(error ?? said ?? "", Boolean(error));
        figured();
      },
      /** @param {{error?: string, serial: number}} message */
      flip({ error, serial }) {
        if (!error || serial < widget.store.clock) return;
        root.setAttribute("aria-busy", "false");
        say(error, true);
      },
      /** @param {{policy: string, at: string, html?: string, error?: string}} message */
      edit({ policy, at, html, error }) {
        if (edited !== keyOf(policy, at)) return;
        widget.place("edit", html ?? "");
        if (error) edit.textContent = error;
      },
      /** @param {{html?: string, error?: string}} message */
      "what-if"({ html, error }) {
        if (html) widget.place("what-if", html);
        say(error ?? "", Boolean(error));
      },
    },
    controls: {
      budget() {
        if (line === null) return;
        say(`A plan for ${quantity(Math.round(line), "bytes")} is being worked out…`);
        widget.send({ type: "plan", budget: Math.round(line) });
      },
    },
    actions: {
      "what-if"() {
        say("Working it out…");
        const { policy, at } = widget.shown ?? {};
        widget.send({ type: "what-if", policy, at, device: deviceOf(widget) });
      },
      "to-edit": () => widget.open(key, true),
    },
  };
}
