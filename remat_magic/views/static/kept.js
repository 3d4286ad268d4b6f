// @ts-check
// Where scripts run, the kept output's folded policies become the options of a dropdown. A notebook runs this once for
// each output, without telling which, so it looks for those that have none yet.
for (const root of document.querySelectorAll(".remat-static:not(.remat-scripted)")) {
  root.classList.add("remat-scripted");
  const reports = [...root.querySelectorAll(":scope > .remat-report, :scope > .remat-other")];
  if (reports.length < 2) continue;
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.className = "remat-field";
  select.setAttribute("aria-label", "Policy"); // or its options would be part of its name
  // JupyterLab would take "dd" typed here as its own and delete the cell.
  select.setAttribute("data-lm-suppress-shortcuts", "true");
  label.append("Policy ", select);
  for (const report of reports) {
    // As the first is shown, and no longer to be folded by itself.
    report.classList.replace("remat-other", "remat-report");
    report.querySelector(":scope > summary")?.setAttribute("tabindex", "-1");
    const names = [...(report.querySelector(".remat-choice")?.querySelectorAll("code") ?? [])];
    select.add(new Option(names.map((name) => name.textContent).join(" at ")));
  }
  const show = () => {
    reports.forEach((report, index) => {
      report.classList.toggle("remat-replaced", index !== select.selectedIndex);
      if (report instanceof HTMLDetailsElement) report.open = index === select.selectedIndex;
    });
  };
  select.addEventListener("change", show);
  reports[0].before(label);
  root.querySelector(":scope > h4")?.remove();
  show();
}
