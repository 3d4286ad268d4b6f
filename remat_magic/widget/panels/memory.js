// @ts-check
/** @import { Panel, Widget } from "../scripts/types.js" */
/** @import { Told, Value } from "../scripts/moments.js" */
import { aliveAt, numberAt, outlines, placeOf, roundNumbers, totalAt } from "../scripts/moments.js";
import { deviceOf, onDemand } from "../scripts/on_demand.js";
import { count, quantity } from "../scripts/units.js";

const LEAST = 520; // pixels: a narrower picture has no room for its legend, and is shrunk
const HALF_DIGIT = 3.3; // pixels
const KINDS = ["arguments", "residuals", "temporaries"];

/** Memory over time: what is held under the pointer. @param {Widget} widget @param {string} key @returns {Panel} */
export function panel(widget, key) {
  /** @type {ReturnType<typeof picture> | null} */
  let drawn = null;
  const sizes = new ResizeObserver(() => drawn?.lay());

  const demand = onDemand(widget, key, {
    besides: () => ({ device: deviceOf(widget) }),
    placed() {
      sizes.disconnect();
      const root = /** @type {HTMLElement | null} */ (widget.part(key).querySelector(".remat-time"));
      drawn = root && picture(widget, root);
      if (root) sizes.observe(root);
    },
  });

  return {
    ...demand,
    stop: () => sizes.disconnect(),
  };
}

/**
 * The picture that Python has drawn, drawn anew for the width there is.
 *
 * @param {Widget} widget
 * @param {HTMLElement} root of the picture and the table of what is held
 */
function picture(widget, root) {
  /** @type {Told} */
  const told = JSON.parse(root.dataset.time ?? "");
  delete root.dataset.time; // it is long, and is read once
  const frame = /** @type {HTMLElement} */ (root.querySelector(".remat-time-picture"));
  const svg = /** @type {SVGSVGElement} */ (frame.querySelector("svg"));
  const table = /** @type {HTMLTableElement} */ (root.querySelector("table"));
  const atPeak = table.caption?.textContent ?? "";
  const { width: drawnWidth, height } = svg.viewBox.baseVal;
  const margin = drawnWidth - told.right;
  let right = told.right;
  /** The number of what is told of the moment in the table; null for the peak. @type {number | null} */
  let here = null;
  let held = false; // by a click: it stays when the pointer leaves

  /** An element of the picture. @param {string} name @param {Record<string, string | number>} attributes */
  function drawing(name, attributes) {
    const made = /** @type {SVGElement} */ (document.createElementNS(svg.namespaceURI, name));
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
    return made;
  }

  const line = drawing("line", { class: "remat-cursor" });
  svg.append(line);
  frame.tabIndex = 0;
  frame.dataset.lmSuppressShortcuts = "true";
  const says = { role: "slider", "aria-label": "Moment of the memory picture", "aria-valuemin": 1, "aria-valuemax": told.moments };
  for (const [name, value] of Object.entries(says)) frame.setAttribute(name, String(value));
  frame.setAttribute("aria-describedby", svg.querySelector("desc")?.id ?? "");

  /** @param {number} place */
  const x = (place) => told.left + ((right - told.left) * place) / told.moments;
  /** @param {number} bytes */
  const y = (bytes) => told.bottom - ((told.bottom - told.above) * bytes) / told.most;
  /** @param {number} place as Python drew it */
  const drawnAt = (place) => told.left + ((told.right - told.left) * place) / told.moments;

  /** Draws it in the width there is. */
  function lay() {
    const width = Math.max(LEAST, Math.floor(frame.clientWidth));
    if (!frame.clientWidth) return;
    right = width - margin;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", String(width));
    svg.querySelector(".remat-plot")?.setAttribute("width", String(right - told.left));
    for (const across of svg.querySelectorAll(".remat-grid, line.remat-base[x1='" + told.left + "']")) {
      if (!across.closest(".remat-ticks")) across.setAttribute("x2", String(right));
    }
    const paths = outlines(told, x, y);
    KINDS.forEach((kind, index) => svg.querySelector(`[data-area="${kind}"]`)?.setAttribute("d", paths[index]));
    const scale = (right - told.left) / (told.right - told.left);
    for (const curve of svg.querySelectorAll("[data-stretch]")) {
      curve.setAttribute("transform", `translate(${told.left * (1 - scale)} 0) scale(${scale} 1)`);
    }
    for (const mark of /** @type {NodeListOf<SVGElement>} */ (svg.querySelectorAll("[data-place]"))) {
      const place = Number(mark.dataset.place);
      mark.setAttribute("transform", `translate(${x(place) - drawnAt(place)} 0)`);
    }
    layWords();
    layTicks();
    layCursor();
  }

  function layWords() {
    for (const word of /** @type {NodeListOf<SVGElement>} */ (svg.querySelectorAll("[data-first]"))) {
      const [first, end] = [Number(word.dataset.first), Number(word.dataset.end)];
      word.setAttribute("x", String(x((first + end) / 2)));
      word.style.display = x(end) - x(first) < 60 ? "none" : "";
    }
    for (const label of /** @type {NodeListOf<SVGElement>} */ (svg.querySelectorAll("[data-label]"))) {
      const { label: place, least, wide } = label.dataset;
      const at = x(Number(place));
      label.setAttribute("x", String(Math.min(Math.max(at - Number(wide) / 2, Number(least)), right - Number(wide))));
    }
  }

  function layTicks() {
    const marks = roundNumbers(told.moments, Math.max(2, Math.floor((right - told.left) / 110)));
    const parts = marks.flatMap((mark) => {
      const at = x(mark);
      const tick = drawing("line", { class: "remat-base", x1: at, x2: at, y1: told.bottom, y2: told.bottom + 4 });
      const label = drawing("text", { class: "remat-tick", x: at, y: told.bottom + 15, "text-anchor": "middle" });
      label.textContent = mark.toLocaleString("en-US");
      // The last one is not cut off.
      label.setAttribute("x", String(Math.min(at, right + margin - HALF_DIGIT * label.textContent.length)));
      return [tick, label];
    });
    svg.querySelector(".remat-ticks")?.replaceChildren(...parts);
  }

  function layCursor() {
    const number = here ?? told.peak;
    const at = x(placeOf(told, number) + 0.5);
    const ends = { x1: at, x2: at, y1: told.above - 8, y2: told.bottom };
    for (const [name, value] of Object.entries(ends)) line.setAttribute(name, String(value));
    line.style.display = here === null ? "none" : "";
    line.classList.toggle("remat-pinned", held);
  }

  /** Shows what is held at a moment, or at the peak. @param {number | null} number */
  function show(number) {
    const shown = number ?? told.peak;
    here = number;
    frame.setAttribute("aria-valuenow", String(placeOf(told, shown) + 1));
    frame.setAttribute("aria-valuetext", sentence(shown));
    if (table.caption) table.caption.textContent = number === null ? atPeak : `Held ${sentence(shown)}`;
    const { entries, rest } = aliveAt(told, shown);
    const rows = entries.map(row);
    if (rest.count) rows.push(restRow(rest));
    // Never shorter than it was: what is below would jump with the pointer.
    root.style.minHeight = `${root.offsetHeight}px`;
    table.tBodies[0].replaceChildren(...rows);
    layCursor();
  }

  /** @param {number} number */
  function sentence(number) {
    const bytes = quantity(totalAt(told, number), "bytes");
    const place = (placeOf(told, number) + 1).toLocaleString("en-US");
    const which = `at moment ${place} of ${told.moments.toLocaleString("en-US")}`;
    return `${which}, ${told.said[told.runs[number]]}: ${bytes} by estimate${held ? " (kept by your click; Escape lets go)" : ""}`;
  }

  /** @param {{value: Value, count: number, bytes: number}} entry */
  function row({ value, count: times, bytes }) {
    const place = document.createElement(value.line ? "button" : "span");
    place.textContent = value.place;
    place.className = value.line ? "remat-link remat-place" : "remat-place";
    if (place instanceof HTMLButtonElement) {
      place.type = "button";
      place.dataset.lmSuppressShortcuts = "true";
      place.title = value.kind === "residual" ? "To its row among the values" : "To its line in the source";
      place.addEventListener("click", () => lead(value));
    }
    const size = cell("num", quantity(bytes, "bytes"));
    size.title = `${bytes.toLocaleString("en-US")} bytes`;
    const type = cell("type", code(value.type));
    if (times > 1) {
      const said = document.createElement("span");
      said.className = "remat-times";
      said.textContent = `x${times}`;
      type.append(" ", said);
    }
    const expression = code(value.code);
    expression.title = value.code;
    const source = value.place ? cell("source", place, " ", expression) : cell("source");
    const tr = document.createElement("tr");
    tr.className = "remat-row";
    if (value.expression) tr.dataset.e = value.expression;
    tr.append(size, type, cell("kind", value.kind), cell("what", code(value.what)), source);
    return tr;
  }

  /** @param {{count: number, bytes: number}} rest */
  function restRow({ count: values, bytes }) {
    const words = document.createElement("td");
    words.colSpan = 4;
    words.textContent = `in ${count(values, "more value")}`;
    const size = cell("num", quantity(bytes, "bytes"));
    size.title = `${bytes.toLocaleString("en-US")} bytes`;
    const tr = document.createElement("tr");
    tr.className = "remat-row";
    tr.append(size, words);
    return tr;
  }

  /** Leads to the row of a value that is saved, and to the line of any other. @param {Value} value */
  function lead({ line: picked, kind, expression, type }) {
    if (widget.linking.picked !== picked) widget.linking.pick(picked);
    const tab = kind === "residual" ? "values" : "listing";
    widget.open(tab, true);
    const rows = /** @type {HTMLElement[]} */ ([...widget.part("residuals").querySelectorAll(`tr[data-e~="${expression}"]`)]);
    const own = rows.find((one) => !one.hidden && one.textContent?.includes(type)) ?? rows.find((one) => !one.hidden);
    const target = tab === "values" ? own : widget.one(`[data-pick="${picked}"]`);
    target?.scrollIntoView({ block: "nearest" });
    if (target) widget.linking.point(target);
  }

  /** The moment at a point of the page. @param {{clientX: number}} event */
  function placeAt({ clientX }) {
    const box = svg.getBoundingClientRect();
    const at = ((clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    return (told.moments * (at - told.left)) / (right - told.left);
  }

  const isInside = (/** @type {number} */ place) => place >= 0 && place < told.moments;

  frame.addEventListener("pointermove", (event) => {
    const place = placeAt(event);
    if (held || !isInside(place)) return;
    const number = numberAt(told, place);
    if (number !== here) show(number);
  });
  frame.addEventListener("click", (event) => {
    const place = placeAt(event);
    if (!isInside(place)) return;
    const number = numberAt(told, place);
    held = !(held && number === here);
    show(number);
  });
  root.addEventListener("pointerleave", () => !held && !root.contains(document.activeElement) && show(null));
  root.addEventListener("focusout", (event) => {
    if (!held && !root.contains(/** @type {Node | null} */ (event.relatedTarget)) && here !== null) show(null);
  });
  frame.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = told.counts.length - 1;
    const number = here ?? told.peak;
    const page = Math.max(1, Math.round(last / 10));
    /** @type {Record<string, number>} */
    const moves = {
      ArrowRight: number + (event.shiftKey ? page : 1),
      ArrowLeft: number - (event.shiftKey ? page : 1),
      ArrowUp: number + 1,
      ArrowDown: number - 1,
      PageUp: number + page,
      PageDown: number - page,
      Home: 0,
      End: last,
    };
    if (event.key in moves) {
      held = false;
      show(Math.max(0, Math.min(last, moves[event.key])));
    } else if (event.key === "Escape" && here !== null) {
      held = false;
      show(null);
    } else return;
    event.preventDefault();
  });

  lay();
  show(null);
  return { lay };
}

/** @param {string} kind @param {(Node | string)[]} content */
function cell(kind, ...content) {
  const td = document.createElement("td");
  td.className = `remat-${kind}`;
  td.append(...content);
  return td;
}

/** @param {string} text */
function code(text) {
  const element = document.createElement("code");
  element.textContent = text;
  return element;
}
