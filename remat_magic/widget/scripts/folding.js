// @ts-check
/** @import { Panel, Widget } from "./types.js" */

const PREFIX = "remat_magic-";

/** What was unfolded or folded on this page, for where there is no storage. @type {Map<string, boolean>} */
const here = new Map();

/** Whether the reader left something unfolded, in whichever widget. @param {string} what */
function isUnfolded(what) {
  try {
    return here.get(what) ?? localStorage.getItem(PREFIX + what) === "yes";
  } catch {
    return false;
  }
}

/** @param {string} what @param {boolean} open */
function remember(what, open) {
  here.set(what, open);
  try {
    localStorage.setItem(PREFIX + what, open ? "yes" : "");
  } catch {}
}

/**
 * What a first look does not need is folded until it is asked for, and stays as the reader left it: rarer controls, what
 * tables are arranged by, and what is longer than a line.
 * @param {Widget} widget @returns {Panel}
 */
export function folding(widget) {
  const { root, one, all } = widget;

  /** @param {string} action of the buttons @param {string} name of the class @param {boolean} open */
  function unfold(action, name, open) {
    for (const button of all(`[data-action="${action}"]`)) button.setAttribute("aria-expanded", String(open));
    root.classList.toggle(name, open);
  }

  /** @param {HTMLElement} button */
  const isOpen = (button) => button.getAttribute("aria-expanded") === "true";

  /** Lays out every line that may be cut off: its button is there where it has something to show. */
  function cut() {
    const lines = [...all(".remat-whole")].map((button) => {
      const before = /** @type {HTMLElement} */ (button.previousElementSibling);
      const line = before.matches(".remat-brief") ? before : (before.querySelector(".remat-brief") ?? before);
      return { button, line, open: isUnfolded(button.dataset.whole) };
    });
    // All is written before anything is read, and read before anything is written: the page is laid out once.
    for (const { line } of lines) line.classList.remove("remat-entire", "remat-cut");
    const isCut = lines.map(({ line }) => line.scrollWidth > line.clientWidth + 1 || line.scrollHeight > line.clientHeight + 4);
    lines.forEach(({ button, line, open }, index) => {
      button.hidden = !isCut[index];
      button.setAttribute("aria-expanded", String(open));
      line.classList.toggle("remat-entire", open);
      line.classList.toggle("remat-cut", isCut[index] && !open);
    });
  }

  unfold("more", "remat-unfolded", isUnfolded("more"));
  unfold("arrange", "remat-arranging", isUnfolded("arrange"));
  const changes = new MutationObserver(cut);
  for (const lines of all(".remat-briefly")) changes.observe(lines, { childList: true, subtree: true, characterData: true });
  changes.observe(widget.part("notes"), { childList: true });
  const sizes = new ResizeObserver(cut);
  sizes.observe(root);

  return {
    actions: {
      more(button) {
        remember("more", !isOpen(button));
        unfold("more", "remat-unfolded", !isOpen(button));
      },
      arrange(button) {
        remember("arrange", !isOpen(button));
        unfold("arrange", "remat-arranging", !isOpen(button));
        if (isOpen(button)) one("[data-find]").focus();
      },
      whole(button) {
        remember(button.dataset.whole ?? "", !isOpen(button));
        cut();
      },
    },
    stop() {
      changes.disconnect();
      sizes.disconnect();
    },
  };
}
