// @ts-check
/** @import { View, Widget } from "./types.js" */
import { keyOf } from "./types.js";
import { quantity } from "./units.js";

/** What is seen first: the headline, what is alive at the estimated peak, and whether there is room for it. @param {Widget} widget */
export function firstScreen(widget) {
  const { one, part, root, store } = widget;
  const bar = part("peak");
  /** The bytes of each device. @type {Record<string, number>} */
  const sizes = JSON.parse(bar.dataset.memory ?? "{}");

  /** The devices on which the estimated peak is another than here. @type {Set<string>} */
  const apart = new Set(JSON.parse(bar.dataset.apart ?? "[]"));
  const asked = new Set();
  const device = () => one('[data-control="device"]')?.value ?? "";
  /** The device that the kernel was told of, for the copy that is kept. @type {string | undefined} */
  let told;

  /** @param {View} view @returns {Record<string, string> | undefined} */
  function estimated(view) {
    const { policy, at } = view;
    const of = device();
    if (!view.complete || !apart.has(of)) return view.parts;
    const key = `${of}\n${keyOf(policy, at)}`;
    const known = store.peaks.get(key);
    if (!known && !asked.has(key)) {
      asked.add(key);
      widget.send({ type: "peak", policy, at, device: of });
    }
    return known;
  }

  widget.estimated = estimated;

  /** The headline and the bar; until the peak is known the last one stays, dimmed. @param {View} view */
  function fill(view) {
    if (told !== device()) widget.send({ type: "device", device: (told = device()) });
    const parts = estimated(view);
    part("totals").innerHTML = (parts ?? view.parts).totals;
    part("notes").innerHTML = (parts ?? view.parts).notes;
    for (const name of ["totals", "notes", "peak"]) part(name).classList.toggle("remat-stale", !parts);
    if (!view.complete) bar.classList.add("remat-stale");
    if (!view.complete || !parts) return;
    bar.innerHTML = parts.peak;
    rank();
    scale();
  }

  /** Tells the style sheet which is the largest, for where there is no room for all. */
  function rank() {
    const [pieces, items] = [".remat-held > .remat-role", ".remat-roles > li:not(.remat-label)"].map((found) => [...bar.querySelectorAll(found)]);
    const widths = pieces.map((piece) => parseFloat(piece.style.width));
    items.forEach((item, index) => {
      item.style.setProperty("--rank", String(widths.filter((width) => width > widths[index]).length));
    });
  }

  /** Says what is left of the device that is chosen, or by how much the peak is too big for it. */
  function scale() {
    for (const extra of bar.querySelectorAll(".remat-of-device")) extra.remove();
    const held = bar.querySelector(".remat-held");
    if (!held) return;
    held.style.width = "";
    const memory = sizes[device()];
    if (!memory) return;
    const left = memory - Number(held.dataset.value);
    const [low, high] = [Number(held.dataset.low), Number(held.dataset.high)];
    const about = low < high ? "about " : "";
    const [mark, said] = [document.createElement("i"), document.createElement("li")];
    mark.className = `remat-of-device ${left < 0 ? "remat-limit" : "remat-role remat-role-left"}`;
    said.className = `remat-of-device ${left < 0 ? "remat-too-much" : ""}`;
    said.title = `Of the memory of ${device()} a program can have ${memory.toLocaleString("en-US")} bytes`;
    if (left < 0) {
      mark.style.left = `${(100 * memory) / (memory - left)}%`;
      said.textContent = `${about}${quantity(-left, "bytes")} too much for ${device()}, ${quantity(memory, "bytes")}, by estimate`;
    } else {
      held.style.width = `${100 - (100 * left) / memory}%`;
      said.textContent = `${about}${quantity(left, "bytes")} left of ${device()}, ${quantity(memory, "bytes")}`;
    }
    if (low <= memory && memory < high) {
      said.classList.remove("remat-too-much");
      said.textContent = `may fit: ${quantity(low, "bytes")} to ${quantity(high, "bytes")} of ${device()}, ${quantity(memory, "bytes")}`;
    }
    held.parentElement.append(mark);
    bar.querySelector(".remat-roles").append(said);
  }

  root.addEventListener("change", ({ target }) => {
    if (/** @type {HTMLElement} */ (target).dataset.control !== "device" || !widget.shown) return;
    fill(widget.shown);
    widget.pinning.contrast();
  });

  return {
    show: fill,
    messages: {
      /** @param {{policy: string, at: string, device: string, error?: string} & Record<string, string>} message */
      peak({ policy, at, device: of, totals, peak, notes, error }) {
        const key = `${of}\n${keyOf(policy, at)}`;
        asked.delete(key);
        if (totals === undefined || peak === undefined) return widget.say(error ?? "", true);
        store.peaks.set(key, { totals, peak, notes });
        const { shown } = widget;
        if (shown && `${device()}\n${keyOf(shown.policy, shown.at)}` === key) fill(shown);
        widget.pinning.contrast();
      },
    },
  };
}
