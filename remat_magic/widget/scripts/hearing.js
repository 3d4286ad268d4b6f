// @ts-check
/** @import { Model } from "./types.js" */

/** How long, in ms, a page may take to find a model that it has. */
const FOUND = 1_000;

/**
 * Hears the kernel also where anywidget has given the widget up.
 *
 * anywidget 0.11 gives a widget's script two seconds to load. One that was later, on a page that was busy with thirty
 * others, is drawn all the same, but no message of the kernel comes through to it any more. A script that runs has loaded:
 * its messages are then taken as ipywidgets takes them, without asking for that.
 *
 * @param {Model} model
 * @param {() => void} then what to do once the kernel is heard
 */
export function hearing(model, then) {
  const late = new Promise((resolve) => window.setTimeout(resolve, FOUND));
  Promise.race([hear(model), late]).then(then, then);
}

/**
 * Raises where a page has models of another kind, which give nothing up.
 *
 * @param {Model} model
 */
async function hear(model) {
  const own = await model.widget_manager.get_model(model.get("_twin"));
  const nothing = { content: { data: {} } };
  if (await own._handle_comm_msg(nothing).then(() => true, () => false)) return;
  let handle = null; // of the most general kind of model
  for (let kind = own; kind; kind = Object.getPrototypeOf(kind)) {
    if (Object.hasOwn(kind, "_handle_comm_msg")) handle = kind._handle_comm_msg;
  }
  own.comm.on_msg((/** @type {any} */ message) => handle.call(own, message));
}
