// @ts-check
/**
 * What the scripts of the widget hand to one another.
 *
 * @typedef {{policy: string, at: string}} Choice
 * @typedef {{forward: string[], backward: string[]}} Bodies
 *
 * @typedef {object} View what one policy looks like
 * @property {string} policy
 * @property {string} label the policy as people read it
 * @property {string} at
 * @property {number} serial the newest request of ours that the kernel had seen
 * @property {boolean} complete
 * @property {string} meaning what the policy does, one line
 * @property {string} code
 * @property {string} unpasted what to say where there is no code
 * @property {boolean} planned whether it is for its place alone, as a plan is
 * @property {Record<string, string>} parts HTML by the name of the part
 * @property {Record<string, number | null>} counts by the name of the tab
 * @property {Record<string, string>} names
 * @property {string} jaxprs the frame of the two jaxprs
 * @property {Bodies | null} bodies the jaxprs' chunks; null where they are sent on request
 *
 * @typedef {{policy: string, at: string, what: string, needed: string, time: string, fits: string, error: string}} FitFigures
 *
 * @typedef {object} Store what all views of one widget share
 * @property {Map<string, View>} views
 * @property {Map<string, string>} answers the HTML of the panels that is requested when they are opened
 * @property {Map<string, Record<string, string>>} screens the parts of the first screen that are of a choice on a device
 * @property {Map<string, FitFigures>} figures of the choices that were tried for the chosen device
 * @property {number} clock the serial of the newest request
 *
 * @typedef {object} Model anywidget's
 * @property {(name: string) => any} get
 * @property {(name: string, callback: Function) => void} on
 * @property {(name: string, callback: Function) => void} off
 * @property {(content: object) => void} send
 * @property {any} widget_manager of the page
 *
 * @typedef {object} Panel what one tab does besides showing the HTML that comes with every view; nothing is required
 * @property {() => void} [open] its tab was opened
 * @property {() => void} [fill] its tab is open, and was not before or showed something else
 * @property {(view: View) => void} [show] another view is shown, whether the tab is open or not
 * @property {() => void} [arrange] another line is picked, or another choice compared with
 * @property {() => void} [picked] another line is picked, and marked everywhere
 * @property {Record<string, (message: any) => void>} [messages] of the kernel, by their type
 * @property {Record<string, (button: HTMLElement) => void>} [actions] of buttons, by their `data-action`
 * @property {Record<string, (control: HTMLInputElement) => void>} [controls] changed, by their `data-control`
 * @property {() => void} [figured] another device is chosen, or more is known of what was tried for it
 * @property {() => void} [stop] the view of the widget is removed
 *
 * @typedef {object} Widget what the panels and the parts of the core share
 * @property {HTMLElement} root
 * @property {Model} model
 * @property {Store} store
 * @property {View | null} shown
 * @property {string} tab the one that is open
 * @property {Record<string, Panel>} panels by their tabs, and the lists of policies and places
 * @property {{picked: string, chosen: string, pick: (line: string, row?: string) => void, point: (target: Element) => void, mark: () => void}} linking
 * @property {{view: () => View | undefined, contrast: () => void, pin: (choice: Choice | null) => void,
 *   peeked: (key: string) => void, failed: () => void}} pinning
 * @property {(view: View) => Record<string, string> | undefined} estimated a view's parts that tell the peak, as on the
 *   device that is chosen; undefined until the kernel has sent them
 * @property {() => void} mark marks what is of the shown choice, among those that are offered
 * @property {(selector: string) => any} one the first element
 * @property {(selector: string) => any[]} all all elements
 * @property {(name: string) => any} part the element that follows the policy
 * @property {(name: string) => HTMLElement} panel a tab's panel, its tools included
 * @property {(content: object) => void} send a message to the kernel
 * @property {(request: Record<string, any>, cached?: View) => void} ask for a policy; what is at hand is shown at once
 * @property {(policy: string, at?: string) => void} choose a policy, at the place that is shown if at no other
 * @property {(text: string, error?: boolean) => void} say a sentence in the status line
 * @property {() => string} status the sentence in the status line
 * @property {(name: string, html: string) => void} place a part's content
 * @property {(text: string) => void} copy to the clipboard, and say so
 * @property {(name: string, focus?: boolean) => void} open a tab
 * @property {() => string} chosenAt the place that is chosen, which may be on its way still
 */

/** The key of a policy at a place. @param {string} policy @param {string} at */
export const keyOf = (policy, at) => `${at}\n${policy}`;

/** An element of a class, with what is in it. @param {string} tag @param {string} kind @param {...(string | Node)} content */
export function element(tag, kind, ...content) {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...content);
  return made;
}

/** What HTML of the kernel has in it, before it is placed. @param {string} html */
export function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

/** A button that looks like text, whose keys are not JupyterLab's. @param {string} kind @param {string} text @param {() => void} pressed */
export function link(kind, text, pressed) {
  const button = /** @type {HTMLButtonElement} */ (element("button", `remat-link ${kind}`, text));
  button.type = "button";
  button.dataset.lmSuppressShortcuts = "true";
  button.addEventListener("click", pressed);
  return button;
}

/** A row across a table with a button that folds what follows. @param {string} text @param {boolean} open @param {number} columns @param {() => void} toggle */
export function foldRow(text, open, columns, toggle) {
  const button = link("remat-twist", text, toggle);
  button.setAttribute("aria-expanded", String(open));
  return rowAcross(button, columns);
}

/** A row across a table. @param {string | Node} content @param {number} columns */
export function rowAcross(content, columns) {
  const head = /** @type {HTMLTableCellElement} */ (element("th", "", content));
  head.colSpan = columns;
  return /** @type {HTMLTableRowElement} */ (element("tr", "remat-grouprow", head));
}

// Numbers as people read them: the same text as remat_magic/units.py makes, which a test compares.

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** With so many decimals, ties to the even digit as Python rounds them. @param {number} value @param {number} digits */
function fixed(value, digits) {
  // All of its digits: 2.675 is a little less, and no tie.
  if (!new RegExp(`\\.\\d{${digits}}50*$`).test(value.toFixed(20))) return value.toFixed(digits);
  const down = Math.floor(value * 10 ** digits);
  return ((down % 2 === 0 ? down : down + 1) / 10 ** digits).toFixed(digits);
}

/** ``48 B``, ``12.6 MB``, ``1.17 TFLOPs``. @param {number} number @param {string} unit "bytes" or "FLOPs" */
export function quantity(number, unit) {
  const short = unit === "bytes" ? "B" : unit;
  if (Math.abs(number) < 1000) return `${number} ${short}`;
  let value = number;
  let prefix = 0;
  for (; Math.abs(value) >= 999.5; prefix += 1) value /= 1000;
  const texts = [2, 1, 0].map((digits) => fixed(value, digits));
  return `${texts.find((text) => text.replace(/\D/g, "").length <= 3)} ${PREFIXES[prefix]}${short}`;
}

/** A difference with its sign, ``±0`` for none. @param {number} difference @param {string} unit */
export function change(difference, unit) {
  const text = quantity(difference, unit);
  return difference > 0 ? `+${text}` : difference < 0 ? text : "±0";
}

/** ``1 value``, ``3 values``. @param {number} number @param {string} noun */
export function count(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}
