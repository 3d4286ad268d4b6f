// @ts-check

/** From here on what belongs to a picture stands beside it; see remat_magic/views/static/report.css. */
const BESIDE = 1350;

/** The pixels that a picture of a panel has across, which Python draws it for. @param {HTMLElement} panel */
export function roomFor(panel) {
  const width = panel.clientWidth;
  return width && width < BESIDE ? width : 680;
}
