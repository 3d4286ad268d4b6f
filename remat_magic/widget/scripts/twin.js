// @ts-check
/** The static output that is kept with the notebook, and that the widget replaces while there is a kernel. */

/**
 * The nearest earlier one in the same output area.
 * @param {HTMLElement} el
 * @returns {HTMLElement | null}
 */
function twinOf(el) {
  let child = el.closest(".jp-OutputArea-child");
  while ((child = child?.previousElementSibling ?? null)) {
    if (child.querySelector(".remat-static")) return /** @type {HTMLElement} */ (child);
    if (child.querySelector(".remat-widget")) return null;
  }
  return null;
}

/** @param {HTMLElement} el what the widget stands in */
export function staticTwin(el) {
  /** @type {HTMLElement | null} */
  let twin = null;
  // The kernel replaces the static output's content, style sheet and all, within what is hidden.
  const renewed = new MutationObserver(() => applyStyle(false));

  /** @param {boolean} on */
  function applyStyle(on) {
    for (const style of twin?.querySelectorAll(".remat-static > style") ?? []) {
      /** @type {HTMLStyleElement} */ (style).disabled = !on;
    }
  }

  return {
    /** Hides it, with its style sheet: of fifty, each would be matched against the whole page. */
    replace() {
      twin ??= twinOf(el);
      if (!twin) return;
      twin.classList.add("remat-replaced");
      applyStyle(false);
      renewed.observe(twin, { childList: true, subtree: true });
    },
    restore() {
      renewed.disconnect();
      applyStyle(true);
      twin?.classList.remove("remat-replaced");
    },
  };
}
