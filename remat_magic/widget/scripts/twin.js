// @ts-check
/** The static output that is kept with the notebook, and that the widget replaces while there is a kernel. */

/**
 * The widget's own: in JupyterLab and Notebook in the same output area, since a cell can have several views; elsewhere in the
 * same document or shadow root, which may be of one cell (Colab) or hold the outputs of all (VS Code).
 * @param {HTMLElement} el
 * @param {string} id
 * @returns {HTMLElement | null}
 */
function twinOf(el, id) {
  const around = el.closest(".jp-OutputArea") ?? /** @type {Document | ShadowRoot} */ (el.getRootNode());
  return around.querySelector(`.remat-static[data-twin="${CSS.escape(id)}"]`);
}

/** @param {HTMLElement} el what the widget stands in @param {string} id of what is kept for it */
export function staticTwin(el, id) {
  /** @type {HTMLElement | null} */
  let hidden = null;
  // The kernel replaces the static output's content, style sheet and all, within what stays.
  const renewed = new MutationObserver(hide);

  /** @param {HTMLElement} twin @param {boolean} on */
  function applyStyle(twin, on) {
    for (const style of twin.querySelectorAll("style")) style.disabled = !on;
  }

  function hide() {
    const twin = twinOf(el, id);
    if (!twin) return;
    // In Jupyter the whole output, with its margin.
    hidden = twin.closest(".jp-OutputArea-child") ?? twin;
    hidden.classList.add("remat-replaced");
    applyStyle(twin, false);
    const stays = hidden === twin ? twin.parentElement : hidden;
    if (stays) renewed.observe(stays, { childList: true, subtree: true });
  }

  return {
    /** Hides it, with its style sheet: of fifty, each would be matched against the whole page. */
    replace: hide,
    restore() {
      renewed.disconnect();
      if (!hidden) return;
      applyStyle(hidden, true);
      hidden.classList.remove("remat-replaced");
    },
  };
}
