// @ts-check
/** @import { Model, Panel, Widget } from "./types.js" */
import { draw, forget } from "./widget.js";

/** What a reader has set that holds for other figures of the same function too. */
const KEPT = ["device", "against", "inputs", "of", "panes", "beside", "together"];

/**
 * Draws the widget, and draws it anew when it turns to another function, or to other figures of the same one: nothing of
 * what was drawn holds for that.
 *
 * @param {{model: Model, el: HTMLElement}} context
 * @param {Record<string, (widget: Widget, key: string) => Panel>} makers of the panels, by their tabs
 */
export function render(context, makers) {
  const { model, el } = context;
  let stop = draw(context, makers);
  const again = () => {
    stop();
    forget(model);
    stop = draw(context, makers);
  };
  const anew = () => {
    if (model.get("_frame")) again(); // else it is closed
  };
  /** @param {{type: string}} message */
  const figuresAnew = ({ type }) => {
    if (type !== "anew") return;
    const set = settings(el);
    again();
    set();
  };
  model.on("change:_frame", anew);
  model.on("msg:custom", figuresAnew);
  return () => {
    model.off("change:_frame", anew);
    model.off("msg:custom", figuresAnew);
    stop();
  };
}

/** The open tab, and what is set. @param {HTMLElement} el @returns {() => void} what sets the same again */
function settings(el) {
  const open = tabOf(el);
  const before = KEPT.map((name) => controlOf(el, name)).map((control) => control && { ...stateOf(control) });
  return () => {
    KEPT.forEach((name, index) => {
      const [control, was] = [controlOf(el, name), before[index]];
      if (!control || !was || Object.entries(was).every(([key, value]) => control[key] === value)) return;
      if (control.options && ![...control.options].some((option) => option.value === was.value)) return;
      Object.assign(control, was);
      control.dispatchEvent(new Event("change", { bubbles: true }));
    });
    /** @type {HTMLElement | null} */
    const tab = el.querySelector(`[data-tab="${open}"]`);
    tab?.click();
  };
}

/** @param {HTMLElement} el */
function tabOf(el) {
  /** @type {HTMLElement | null} */
  const tab = el.querySelector('[role="tab"][aria-selected="true"]');
  return tab?.dataset.tab ?? "";
}

/** @param {HTMLElement} el @param {string} name @returns {any} */
const controlOf = (el, name) => el.querySelector(`[data-control="${name}"]`);

/** @param {any} control */
const stateOf = (control) => (control.type === "checkbox" ? { checked: control.checked } : { value: control.value });
