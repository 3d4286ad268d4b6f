// @ts-check
// Where scripts run, the kept output's folded policies become the options of a dropdown. A notebook runs this once for
// each output, without telling which, so it looks for those that have none yet.
for (const root of document.querySelectorAll(".remat-static:not(.remat-scripted)")) {
  root.classList.add("remat-scripted");
  const reports = [...root.querySelectorAll(":scope > .remat-report, :scope > .remat-other")];
  // Choices that are the same share a report; those that are as the first stand in a sentence.
  const choices = [...root.querySelectorAll(".remat-choice")];
  if (choices.length < 2) continue;
  const alike = root.querySelector(":scope > .remat-alike");
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.className = "remat-field";
  // Or its options would be part of its name.
  select.setAttribute("aria-label", "Policy");
  // JupyterLab would take "dd" typed here as its own and delete the cell.
  select.setAttribute("data-lm-suppress-shortcuts", "true");
  label.append("Policy ", select);
  for (const report of reports) {
    // As the first is shown, and no longer to be folded by itself.
    report.classList.replace("remat-other", "remat-report");
    report.querySelector(":scope > summary")?.setAttribute("tabindex", "-1");
  }
  for (const choice of choices) select.add(new Option(choice.textContent ?? ""));
  const show = () => {
    const chosen = choices[select.selectedIndex].closest(".remat-report, .remat-alike");
    const shown = chosen === alike ? reports[0] : chosen;
    alike?.classList.toggle("remat-replaced", chosen !== alike);
    for (const report of reports) {
      report.classList.toggle("remat-replaced", report !== shown);
      if (report instanceof HTMLDetailsElement) report.open = report === shown;
    }
  };
  select.addEventListener("change", show);
  reports[0].before(label);
  root.querySelector(":scope > h4")?.remove();
  show();
}
