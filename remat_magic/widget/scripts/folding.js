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
 * What a first look does not need is folded until it is asked for, and stays as the reader left it: rarer controls, and
 * what tables are arranged by.
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

  unfold("more", "remat-unfolded", isUnfolded("more"));
  unfold("arrange", "remat-arranging", isUnfolded("arrange"));

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
    },
  };
}
