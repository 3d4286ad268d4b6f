// @ts-check
/** @import { Panel, Widget } from "./types.js" */
import { onDemand } from "./on_demand.js";

/** Notes come with every view; what takes longer to find out is asked for when they are read. @param {Widget} widget @returns {Panel} */
export const panel = (widget) => onDemand(widget, "advice");
