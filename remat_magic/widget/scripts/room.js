// @ts-check

/** From here on what belongs to a picture may stand beside it; see remat_magic/views/static/widget.css. */
const BESIDE = 1350;
const [GUESS, LEAST, MOST] = [680, 520, 2000]; // pixels; see remat_magic/widget/panel.py
const REST = 250; // milliseconds without another size, after which pictures are drawn anew
const NEAR = 8; // pixels that a picture may be too narrow or too wide

/** What a picture stands in. @param {HTMLElement} part @returns {HTMLElement} */
const around = (part) => part.querySelector(".remat-picture") ?? part;

/**
 * The pixels that a picture has across, which Python draws it for: a guess where it is not to be seen yet.
 * @param {HTMLElement} body what the panels stand in @param {HTMLElement} part what the picture is of
 */
export function roomFor(body, part) {
  const cell = around(part);
  if (cell.clientWidth && cell.querySelector("svg")) return cell.clientWidth;
  const width = body.clientWidth;
  return width && width < BESIDE ? width : GUESS;
}

/**
 * Tells when a picture should be drawn for other room than it was, once that is at rest; what is returned ends it.
 * @param {HTMLElement} part @param {() => void} tell
 */
export function onRoom(part, tell) {
  let waiting = 0;
  function look() {
    const cell = around(part);
    const drawn = cell.querySelector("svg")?.viewBox.baseVal.width;
    if (!cell.clientWidth || !drawn) return; // it cannot be seen, or there is none
    if (Math.abs(Math.min(Math.max(cell.clientWidth, LEAST), MOST) - drawn) > NEAR) tell();
  }
  function later() {
    clearTimeout(waiting);
    waiting = window.setTimeout(look, REST);
  }
  const sizes = new ResizeObserver(later);
  const changes = new MutationObserver(later); // the table beside it may have come
  sizes.observe(part);
  changes.observe(part, { childList: true });
  return () => {
    clearTimeout(waiting);
    sizes.disconnect();
    changes.disconnect();
  };
}
