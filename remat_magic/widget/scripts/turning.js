// @ts-check
/** @import { Model, Panel, Widget } from "./types.js" */
import { draw, forget } from "./widget.js";

/**
 * Draws the widget, and draws it anew when it turns to another function, or to other figures of the same one: nothing of
 * what was drawn holds for that.
 *
 * @param {{model: Model, el: HTMLElement}} context
 * @param {Record<string, (widget: Widget, key: string) => Panel>} makers of the panels, by their tabs
 */
export function render(context, makers) {
  const { model } = context;
  let stop = draw(context, makers);
  const anew = () => {
    if (!model.get("_frame")) return; // it is closed
    stop();
    forget(model);
    stop = draw(context, makers);
  };
  model.on("change:_frame", anew);
  return () => {
    model.off("change:_frame", anew);
    stop();
  };
}
