// @ts-check
/**
 * The two panes of jaxprs: filled bit by bit, folded, moved through by keys, a variable's definition and
 * uses marked.
 *
 * @typedef {object} Side one jaxpr to show
 * @property {Element} frame the section with its heading and its pane, without lines
 * @property {string[]} chunks its lines as HTML, in pieces
 */
import { element } from "./shared.js";

// More than a pane shows at first.
const FIRST_CHUNKS = 1;
// So that the reader's own scrolling and typing have most of a frame's 16 ms.
const MILLISECONDS_A_FRAME = 6;
// The height in a pane, as a share of it, at which a line is brought into sight.
const HEIGHT = 0.4;
// Where a word of the text can be a variable; see remat_magic/views/values.py.
const VARIABLE = /(?<![\w.'"])[a-z]+(?![\w[=.'"])/g;

/** @typedef {{pane: HTMLElement, next: number, side: Side}} Job */

/** The line before or after. @param {Element} line @param {boolean} down @returns {HTMLElement | null} */
function neighbour(line, down) {
  const next = down ? line.nextElementSibling : line.previousElementSibling;
  const chunk = down ? line.parentElement?.nextElementSibling : line.parentElement?.previousElementSibling;
  return /** @type {HTMLElement | null} */ (next ?? (down ? chunk?.firstElementChild : chunk?.lastElementChild) ?? null);
}

/** Whether a box is within another from above to below. @param {DOMRect} outer @param {DOMRect} inner */
const isWithin = (outer, inner) => outer.top <= inner.top && inner.bottom <= outer.bottom;

/**
 * @param {HTMLElement} part what the panes stand in
 * @param {{onLine: (line: HTMLElement) => void, onFilled: () => void, onPick: (line: HTMLElement) => void}} hooks
 */
export function jaxprPanes(part, { onLine, onFilled, onPick }) {
  /** @type {Job[]} */
  let jobs = [];
  let frame = 0;
  /** @type {HTMLElement | null} */
  let here = null;
  // Firefox before 140 has none. They are shared by all widgets of the page: a variable marked here is so nowhere else.
  const canHighlight = "highlights" in CSS;

  /** @param {Job} job @param {number} upTo */
  function advance(job, upTo) {
    const { pane, side } = job;
    for (; job.next < Math.min(upTo, side.chunks.length); job.next += 1) {
      const chunk = element("div", "remat-chunk");
      chunk.innerHTML = side.chunks[job.next];
      pane.append(chunk);
    }
  }

  const done = () => jobs.every(({ next, side }) => next >= side.chunks.length);

  /** @param {Side[]} sides @param {Element[]} before what stands above the panes */
  function show(sides, before) {
    cancelAnimationFrame(frame);
    const scroll = [...part.querySelectorAll("pre")].map((pane) => [pane.scrollTop, pane.scrollLeft]);
    part.style.minHeight = `${part.offsetHeight}px`;
    const panes = element("div", "remat-panes", ...sides.map(({ frame: section }) => section.cloneNode(true)));
    part.replaceChildren(...before.map((element) => element.cloneNode(true)), panes);
    here = null;
    jobs = [...part.querySelectorAll("pre")].map((pane, index) => ({ pane, next: 0, side: sides[index] }));
    for (const job of jobs) advance(job, FIRST_CHUNKS);
    // Asked for in vain, it would have all be laid out at once.
    const restore = () =>
      jobs.forEach(({ pane }, index) => scroll[index]?.some(Boolean) && pane.scrollTo(scroll[index][1], scroll[index][0]));
    restore();
    const step = () => {
      const start = performance.now();
      do for (const job of jobs) advance(job, job.next + 1);
      while (!done() && performance.now() - start < MILLISECONDS_A_FRAME);
      if (!done()) frame = requestAnimationFrame(step);
      else {
        restore();
        part.style.minHeight = "";
        onFilled();
      }
    };
    // The first frame shows what is there already.
    frame = requestAnimationFrame(() => (frame = requestAnimationFrame(step)));
  }

  /** @param {HTMLElement} button @param {boolean} [open] */
  function twist(button, open = button.getAttribute("aria-expanded") !== "true") {
    button.setAttribute("aria-expanded", String(open));
    const inside = /** @type {HTMLElement | null} */ (button.nextElementSibling);
    if (inside) inside.hidden = !open;
  }

  /** @param {HTMLElement} line @param {string} [name] the variable to mark; else the one that the line defines */
  function goTo(line, name) {
    here?.classList.remove("remat-here");
    here = line;
    line.classList.add("remat-here");
    const pane = line.closest("pre");
    if (pane) markVariable(pane, name ?? definedBy(line));
    onLine(line);
  }

  /** @param {HTMLElement} line */
  function definedBy(line) {
    const text = line.firstElementChild?.tagName === "I" ? (line.textContent ?? "").slice(1) : (line.textContent ?? "");
    return /^\s*([a-z]+):/.exec(text)?.[1] ?? "";
  }

  /** @param {HTMLElement} pane @param {string} name */
  function markVariable(pane, name) {
    if (!canHighlight) return;
    const [definition, uses] = [new Highlight(), new Highlight()];
    const walker = document.createTreeWalker(pane, NodeFilter.SHOW_TEXT);
    for (let node = name ? walker.nextNode() : null; node; node = walker.nextNode()) {
      const text = node.nodeValue ?? "";
      if (!text.includes(name)) continue;
      for (const match of text.matchAll(VARIABLE)) {
        if (match[0] !== name) continue;
        const [startOffset, endOffset] = [match.index, match.index + name.length];
        const range = new StaticRange({ startContainer: node, startOffset, endContainer: node, endOffset });
        const last = endOffset === text.length;
        const after = last ? (node.nextSibling ?? node.parentElement?.nextSibling) : null;
        (after?.textContent?.startsWith(":") ? definition : uses).add(range);
      }
    }
    CSS.highlights.set("remat-definition", definition);
    CSS.highlights.set("remat-use", uses);
  }

  /** The variable at a point of the page. @param {number} x @param {number} y */
  function wordAt(x, y) {
    const at = /** @type {any} */ (document).caretPositionFromPoint?.(x, y);
    const range = at ? null : /** @type {any} */ (document).caretRangeFromPoint?.(x, y);
    const node = at?.offsetNode ?? range?.startContainer;
    const offset = at?.offset ?? range?.startOffset ?? 0;
    if (node?.nodeType !== Node.TEXT_NODE) return undefined;
    for (const match of node.nodeValue.matchAll(VARIABLE)) {
      if (match.index <= offset && offset <= match.index + match[0].length) return match[0];
    }
    return undefined;
  }

  part.addEventListener("click", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const fold = /** @type {HTMLElement | null} */ (target.closest(".remat-fold"));
    if (fold) return twist(fold);
    const line = /** @type {HTMLElement | null} */ (target.closest(".remat-l"));
    // A click ends the marking of text too, which is no wish to go anywhere.
    if (line && document.getSelection()?.isCollapsed) goTo(line, wordAt(event.clientX, event.clientY));
  });

  part.addEventListener("keydown", (event) => {
    const pane = /** @type {HTMLElement} */ (event.target).closest("pre");
    if (!pane || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const current = here && pane.contains(here) ? here : null;
    const fold = /** @type {HTMLElement | null | undefined} */ (current?.querySelector(".remat-fold"));
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const first = /** @type {HTMLElement | null} */ (pane.querySelector(".remat-l"));
      const next = current ? neighbour(current, event.key === "ArrowDown") : first;
      if (next) {
        goTo(next);
        next.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
    } else if (fold && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      twist(fold, event.key === "ArrowRight");
    } else if (current && event.key === "Enter") onPick(current);
    else return;
    event.preventDefault();
  });

  /** Brings lines into sight, in each pane that shows none of them; where it can be, the same operation in both. @param {string} selector */
  function reveal(selector) {
    /** @type {string | undefined} */
    let operation;
    for (const { pane } of jobs) {
      const lines = /** @type {HTMLElement[]} */ ([...pane.querySelectorAll(selector)]);
      const box = pane.getBoundingClientRect();
      const seen = lines.find((line) => isWithin(box, line.getBoundingClientRect()));
      const line = seen ?? lines.find((line) => line.dataset.o === operation) ?? lines[0];
      if (!line) continue;
      operation ??= line.dataset.o;
      if (!seen) pane.scrollTop += line.getBoundingClientRect().top - box.top - HEIGHT * box.height; // not the page
    }
  }

  return { show, reveal, stop: () => cancelAnimationFrame(frame) };
}
