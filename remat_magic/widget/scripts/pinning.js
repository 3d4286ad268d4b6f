// @ts-check
/** @import { Choice, View, Widget } from "./shared.js" */
import { change, element, keyOf, parsed } from "./shared.js";

/** Another choice, "A", that the one which is shown, "B", is compared with. @param {Widget} widget */
export function pinning(widget) {
  const { one, all, part, store } = widget;
  /** @type {Choice | null} */
  let pinned = null;
  let requested = "";

  /** The pinned choice's view, where it is at hand. @returns {View | undefined} */
  const view = () => (pinned ? store.views.get(keyOf(pinned.policy, pinned.at)) : undefined);

  /** Shows the difference from the pinned choice wherever there is a number or a row. */
  function contrast() {
    const { shown } = widget;
    const a = view();
    if (pinned && !a?.complete && requested !== keyOf(pinned.policy, pinned.at)) {
      requested = keyOf(pinned.policy, pinned.at);
      widget.send({ type: "peek", ...pinned });
    }
    for (const extra of all(".remat-against-it")) extra.remove();
    const parts = a?.complete && shown && widget.estimated(a);
    if (parts) showChanges(parts);
    for (const panel of Object.values(widget.panels)) panel.arrange?.();
  }

  /** @param {Record<string, string>} a */
  function showChanges(a) {
    const totals = parsed(a.totals + a.rarer);
    for (const total of all(".remat-total")) {
      const before = totals.querySelector(`[data-total="${total.dataset.total}"]`);
      const [now, then] = [total.dataset.value, before?.getAttribute("data-value")];
      const text = now === undefined || !then ? "unknown" : change(Number(now) - Number(then), total.dataset.unit);
      total.append(element("small", "remat-against-it", `${text} vs A`));
    }
  }

  /** @param {Choice | null} choice */
  function pin(choice) {
    pinned = choice;
    const control = one('[data-control="against"]');
    if (choice && ![...control.options].some((option) => option.value === choice.policy)) {
      control.add(new Option(view()?.label ?? choice.policy, choice.policy));
    }
    control.value = choice?.policy ?? "";
    const named = control.selectedOptions[0]?.text ?? "";
    part("against").textContent = choice ? `A, compared with: ${named} at ${choice.at}. B: what is shown.` : "";
    contrast();
  }

  return {
    contrast,
    pin,
    view,
    /** A view has come that nobody chose. @param {string} key */
    peeked(key) {
      if (pinned && key === keyOf(pinned.policy, pinned.at)) contrast();
    },
    failed() {
      requested = "";
      pin(null);
    },
  };
}
