// @ts-check
/** @import { Model, View } from "./shared.js" */

/** What tells an element from the others of its kind, so that it is found again. @param {HTMLElement} element */
const markOf = ({ tagName, dataset: { k, policy, diff, at } }) => [tagName, k, policy, diff, at].join("\n");

/** Replaces content, with the keyboard left where it was. @param {HTMLElement} target @param {string} html */
function replace(target, html) {
  const focused = target.contains(document.activeElement) ? document.activeElement?.closest("tr[data-k], button") : null;
  target.innerHTML = html;
  if (!(focused instanceof HTMLElement)) return;
  const { k, policy, diff } = focused.dataset;
  if ((k ?? policy ?? diff) === undefined) return;
  const alike = /** @type {HTMLElement[]} */ ([...target.querySelectorAll(focused.tagName)]);
  const same = alike.find((other) => markOf(other) === markOf(focused));
  if (same?.tagName === "TR") same.tabIndex = 0;
  same?.focus({ preventScroll: true });
}

/** What the kernel renders, put in its places. @param {(name: string) => HTMLElement} part */
export function placing(part) {
  /** What stands in each of them, as it came. @type {Map<string, string>} */
  const placed = new Map();

  /** Replaces a part's content. @param {string} name @param {string} html */
  function place(name, html) {
    const target = part(name);
    const height = target.offsetHeight;
    if (height) target.style.minHeight = `${height}px`;
    replace(target, html);
    target.style.minHeight = "";
    target.classList.remove("remat-stale");
  }

  /** Shows what comes with every view. @param {View} view */
  function show(view) {
    // All is read before anything is written: a page is laid out anew for each that is read in between.
    const before = Object.keys(view.parts).map((name) => ({ name, target: part(name), height: part(name).offsetHeight }));
    for (const { name, target, height } of before) {
      if (!target.closest("[data-panel]")) continue; // of the first screen
      // Until the backward half is there, the panels that need it keep the last policy's content, dimmed.
      const stale = !view.complete && target.dataset.early === undefined && target.childElementCount > 0;
      target.classList.toggle("remat-stale", stale);
      // The kernel sends what was at hand already once more: the reader may have gone on from it.
      if (stale || placed.get(name) === view.parts[name]) continue;
      // Never shorter than it was while it is open: what is below would jump at each toggle.
      if (height) target.style.minHeight = `${height}px`;
      replace(target, view.parts[name]);
      placed.set(name, view.parts[name]);
    }
  }

  return { place, show };
}

// The static output that is saved with the notebook, and that the widget replaces while there is a kernel.

/**
 * The widget's own: in JupyterLab and Notebook in the same output area, since a cell can have several views; elsewhere in the
 * same document or shadow root, which may be of one cell (Colab) or hold the outputs of all (VS Code).
 * @param {HTMLElement} el
 * @param {string} id
 * @returns {HTMLElement | null}
 */
function copyOf(el, id) {
  const around = el.closest(".jp-OutputArea") ?? /** @type {Document | ShadowRoot} */ (el.getRootNode());
  return around.querySelector(`.remat-static[data-copy="${CSS.escape(id)}"]`);
}

/** @param {HTMLElement} el what the widget stands in @param {string} id of its copy that is saved */
export function staticCopy(el, id) {
  /** @type {HTMLElement | null} */
  let hidden = null;
  // The kernel replaces the static output's content, style sheet and all, within what stays.
  const replaced = new MutationObserver(hide);

  /** With its style sheet: of fifty, each would be matched against the whole page. @param {HTMLElement} copy @param {boolean} on */
  function toggle(copy, on) {
    copy.classList.toggle("remat-replaced", !on);
    for (const style of copy.querySelectorAll("style")) style.disabled = !on;
  }

  function hide() {
    const copy = copyOf(el, id);
    if (!copy) return;
    // In Jupyter the whole output, with its margin.
    hidden = copy.closest(".jp-OutputArea-child") ?? copy;
    toggle(hidden, false);
    const stays = hidden === copy ? copy.parentElement : hidden;
    if (stays) replaced.observe(stays, { childList: true, subtree: true });
  }

  function show() {
    replaced.disconnect();
    if (hidden) toggle(hidden, true);
  }

  return { hide, show };
}

/** How long, in ms, a page may take to find a model that it has. */
const FOUND = 1_000;

/**
 * Listens to the kernel also where anywidget has given the widget up.
 *
 * anywidget 0.11 gives a widget's script two seconds to load. One that was later, on a page that was busy with thirty
 * others, is drawn all the same, but no message of the kernel comes through to it any more. A script that runs has loaded:
 * its messages are then taken as ipywidgets takes them, without asking for that.
 *
 * @param {Model} model
 * @param {() => void} then what to do once the kernel's messages come through
 */
export function listen(model, then) {
  const late = new Promise((resolve) => window.setTimeout(resolve, FOUND));
  Promise.race([subscribe(model), late]).then(then, then);
}

/** Raises where a page has models of another kind, which give nothing up. @param {Model} model */
async function subscribe(model) {
  const own = await model.widget_manager.get_model(model.get("_copy_id"));
  const nothing = { content: { data: {} } };
  if (await own._handle_comm_msg(nothing).then(() => true, () => false)) return;
  let handle = null; // of the most general kind of model
  for (let kind = own; kind; kind = Object.getPrototypeOf(kind)) {
    if (Object.hasOwn(kind, "_handle_comm_msg")) handle = kind._handle_comm_msg;
  }
  own.comm.on_msg((/** @type {any} */ message) => handle.call(own, message));
}
