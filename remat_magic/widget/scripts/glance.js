// @ts-check
/** @import { View, Widget } from "./types.js" */
import { quantity } from "./units.js";

const REMEMBERED = "remat_magic-more";

/** What is seen first: the headline, what is alive at the estimated peak, and what is folded. @param {Widget} widget */
export function firstScreen(widget) {
  const { one, part, root } = widget;
  const bar = part("peak");
  /** The bytes of each device. @type {Record<string, number>} */
  const sizes = JSON.parse(bar.dataset.memory ?? "{}");

  /** Says what is left of the device that is chosen, or by how much the peak is too big for it. */
  function scale() {
    for (const extra of bar.querySelectorAll(".remat-of-device")) extra.remove();
    const held = bar.querySelector(".remat-held");
    if (!held) return;
    held.style.width = "";
    const device = one('[data-control="device"]')?.value ?? "";
    const memory = sizes[device];
    if (!memory) return;
    const left = memory - Number(held.dataset.value);
    const [mark, said] = [document.createElement("i"), document.createElement("li")];
    mark.className = `remat-of-device ${left < 0 ? "remat-limit" : "remat-role remat-role-left"}`;
    said.className = `remat-of-device ${left < 0 ? "remat-too-much" : ""}`;
    said.title = `${device} has ${memory.toLocaleString("en-US")} bytes, by its data sheet`;
    if (left < 0) {
      mark.style.left = `${(100 * memory) / (memory - left)}%`;
      said.textContent = `${quantity(-left, "bytes")} too much for ${device}, ${quantity(memory, "bytes")}`;
    } else {
      held.style.width = `${100 - (100 * left) / memory}%`;
      said.textContent = `${quantity(left, "bytes")} left of ${device}, ${quantity(memory, "bytes")}`;
    }
    held.parentElement.append(mark);
    bar.querySelector(".remat-roles").append(said);
  }

  root.addEventListener("change", ({ target }) => {
    if (/** @type {HTMLElement} */ (target).dataset.control === "device") scale();
  });

  const more = one('[data-action="more"]');

  /** Shows what a first look does not need. @param {boolean} open */
  function unfold(open) {
    more.setAttribute("aria-expanded", String(open));
    root.classList.toggle("remat-unfolded", open);
  }

  more.addEventListener("click", () => {
    const open = more.getAttribute("aria-expanded") !== "true";
    unfold(open);
    try {
      localStorage.setItem(REMEMBERED, open ? "yes" : "");
    } catch {}
  });
  // What was unfolded stays so. There may be no storage.
  try {
    unfold(localStorage.getItem(REMEMBERED) === "yes");
  } catch {}

  return {
    /** @param {View} view */
    show(view) {
      part("totals").innerHTML = view.parts.totals;
      part("notes").innerHTML = view.parts.notes;
      // Until the backward half is there, what is held is not known: the last choice's stays, dimmed.
      bar.classList.toggle("remat-stale", !view.complete);
      if (!view.complete) return;
      bar.innerHTML = view.parts.peak;
      scale();
    },
  };
}
