// @ts-check

/** From here on what belongs to a picture stands beside it; see remat_magic/views/static/report.css. */
const BESIDE = 1350;
const REST = 250; // milliseconds without another size, after which pictures are drawn anew

/** The pixels that a picture of a panel has across, which Python draws it for. @param {HTMLElement} panel */
export function roomFor(panel) {
  const width = panel.clientWidth;
  return width && width < BESIDE ? width : 680;
}

/**
 * Tells when pictures have other room than before, once that is at rest; what is returned ends it.
 * @param {HTMLElement} panel @param {() => void} tell
 */
export function onRoom(panel, tell) {
  let last = 0;
  let waiting = 0;
  const sizes = new ResizeObserver(() => {
    clearTimeout(waiting);
    if (!panel.clientWidth) return; // it cannot be seen
    waiting = window.setTimeout(() => {
      const changed = last && last !== roomFor(panel);
      last = roomFor(panel);
      if (changed) tell();
    }, REST);
  });
  sizes.observe(panel);
  return () => {
    clearTimeout(waiting);
    sizes.disconnect();
  };
}
