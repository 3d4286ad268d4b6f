"""The first screen as HTML: does it fit, what takes the memory, what to change; or what is saved, where none asks."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from remat_magic.records import Edit, Fit, FitChoice, LiveValue, Measurement, Report, Timeline
from remat_magic.records.fit import microbatches_in
from remat_magic.views import answer
from remat_magic.views import format as fmt
from remat_magic.views.format import escape
from remat_magic.views.headline import totals
from remat_magic.views.memory import compiled_bar_html, peak_bar_html, role_of
from remat_magic.views.plans import budget_sentence, diffs_html, findings, unnamed_sentences
from remat_magic.views.tables import KEYS, Cell, Part, Row, Table, cell, size, table_html

# So many lines of the source, and so many choices, are seen at first.
TAKEN, CHANGES = 4, 4
_KINDS = {True: "remat-yes", False: "remat-no", None: "remat-perhaps"}
_CODE = re.compile(
    r"@[\w.]+|\b\w+_saveable\b|\boffload_\w+|(?<=\bon |\bof |\bat )(?!(?:every|each|the|all)\b)[\w.<>\[\]:-]+"
)


def saves_html(report: Report) -> str:
    """The verdict where nothing is to fit: what is saved for the backward pass."""
    figures = {total.key: total for total in totals(report)}
    saved = f"Saves {figures['saved'].value}"
    if "offloaded" in figures:
        saved += f", offloads {figures['offloaded'].value}"
    values = sum(row.kind in ("intermediate", "offloaded") and not row.dropped for row in report.residuals)
    arguments = sum(row.kind == "argument" for row in report.residuals)
    said = [f"<span>{fmt.count(values, 'value')} for the backward pass</span>"]
    if arguments:
        are = "are" if arguments > 1 else "is"
        said.append(_mute(f"{fmt.count(arguments, 'argument')} {are} alive anyway"))
    if report.peak_bytes is not None:
        exact = f"estimated, as on this machine's CPU: {fmt.exact(report.peak_bytes, 'bytes')}"
        said.append(_mute(f"peak about {fmt.nbytes(report.peak_bytes)}", exact))
    if report.of_devices:
        said.append(_mute(f"figures {report.of_devices}"))
    return f'<strong title="{figures["saved"].exact}">{saved}</strong> {" ".join(said)}'


def answer_html(fit: Fit, live: Sequence[LiveValue] = ()) -> str:
    """All of it without a script; ``fit`` is of what is shown, ``live`` what is live at the peak of XLA's program."""
    bar, takes = live_html(fit.as_written, fit.report, fit.timeline, live, fit.device, fit.capacity_bytes)
    return (
        f'<div class="remat-verdict">{verdict_html(fit.as_written, fit, fit.capacity_bytes)}</div>{bar}<div '
        f'class="remat-two"><section>{takes}</section><section>{changes_html(fit, live=False)}</section></div>'
    )


def fit_html(fit: Fit) -> str:
    """The same under its heading, with the code of the best choice."""
    name, of = answer.heading(fit)
    rows = answer.offered(fit)
    code = f"<p>{escape(rows[0].choice.what)}:</p><pre>{escape(rows[0].choice.code)}</pre>" if rows else ""
    more = _mute(", ".join(filter(None, [of, answer.memory(fit)])))
    head = f'<div class="remat-signature"><b>{escape(name)}</b> {more}</div>'
    return f"{head}{answer_html(fit)}{code if rows and rows[0].choice.code else ''}"


def verdict_html(choice: FitChoice, fit: Fit | None, capacity: int, how: str = "") -> str:
    """Whether a choice fits; ``fit`` is of the program as written, ``how`` HTML that says how to ask the compiler."""
    word, rest = answer.verdict(choice, capacity)
    if choice.needed_bytes is None:
        return f'<strong class="remat-perhaps">{word}</strong> <span>{escape(rest)}</span>'
    about = "" if choice.compiled else "about "
    exact = fmt.exact(choice.needed_bytes, "bytes")
    said = f'<b title="{exact}">{about}{fmt.nbytes(choice.needed_bytes)}</b> {rest}'
    source = "compiled" if choice.compiled else "estimate"
    if not choice.compiled and choice.needed_low != choice.needed_high:
        source += f", {fmt.between(choice.needed_low or 0, choice.needed_high or 0)}"
    parts = [f'<strong class="{_KINDS[choice.fits]}">{word}</strong>', f"<span>{said}</span>", _mute(source), how]
    if fit is not None and choice.key == "as_written":
        nothing = fit.fits and fit.progress.finished and not answer.offered(fit)
        sentences = [answer.what_to_do(fit) if nothing else "", answer.batch(fit)]
        parts += [_mute(sentence) for sentence in sentences if sentence]
    return " ".join(filter(None, parts))


def back_html(fit: Fit) -> str:
    """The way back to the program as it is written, with what that needs."""
    written, needed = fit.as_written, fit.needed_bytes
    needs = "" if needed is None else f" needs {fmt.nbytes(needed)}"
    return (
        f'<button type="button" class="remat-link" data-policy="as_written" data-at="{html.escape(written.at)}" '
        f'title="Show it as written" {KEYS}>as written{needs}</button>'
    )


def live_html(
    choice: FitChoice,
    report: Report | None,
    timeline: Timeline | None,
    live: Sequence[LiveValue],
    device: str,
    capacity: int,
) -> tuple[str, str]:
    """The bar of what is live at the peak, as compiled where XLA says so, and what takes it by line of source.

    That is an estimate: XLA calls all that a loop stacks by the loop. Where it fits, nobody asks for it.
    """
    memory = (device or "limit", capacity)
    if report is None or timeline is None:
        return "", ""
    if live and choice.compiled and choice.needed_bytes is not None:
        bar = compiled_bar_html(live, choice.needed_bytes, memory)
    else:
        bar = peak_bar_html(report, memory, estimate=choice.compiled)
    return bar, "" if choice.fits else takes_html(timeline, report, estimate=choice.compiled)


def takes_html(timeline: Timeline, report: Report, estimate: bool = False) -> str:
    """What takes the memory at the peak, by line of source; ``estimate`` where it is to be said that this is one."""
    lines = answer.taken(timeline, report)
    how = " <small>(by estimate)</small>" if estimate else ""
    return f"<h4>What takes it{how}</h4>{table_html(taken_table(lines), heads=False)}" if lines else ""


def taken_table(lines: Sequence[answer.Taken]) -> Table:
    """The lines of the source that hold most, and the others in one row."""
    rows = list[Row]()
    for line in lines[:TAKEN]:
        expression, share = line.source.expression, 100 * line.nbytes / lines[0].nbytes
        bar = f'<i class="remat-role remat-role-{role_of(line.kind)}" style="width:{share:.0f}%"></i>'
        clipped = (
            f'<div class="remat-clip" title="{escape(f"{expression} {line.where}")}"><code>{escape(expression)}</code> '
            f"{_mute(line.where)}</div>"
        )
        nbytes = _bold(fmt.nbytes(line.nbytes), fmt.exact(line.nbytes, "bytes"))
        rows.append(
            Row((nbytes, cell(Part("", html=bar)), cell(Part(f"{expression}  {line.where}".strip(), html=clipped))))
        )
    if rest := lines[TAKEN:]:
        nbytes = size(sum(line.nbytes for line in rest))
        rows.append(Row((nbytes, cell(), cell(fmt.count(len(rest), "more line"))), kinds="remat-rest"))
    return Table("What takes the memory", (("", "num"), ("", "mini"), ("", "made")), rows, "takes")


def _bold(text: str, hover: str) -> Cell:
    return cell(Part(text, html=f"<b>{text}</b>"), hover=hover)


def changes_html(fit: Fit, *, live: bool = True, all_of: int = 0) -> str:
    """What to change: the best choices, a row each, with buttons that try it and show its edit if ``live``.

    ``all_of`` is how many choices there are to be seen elsewhere.
    """
    rows = answer.offered(fit)
    if not fit.tried or (fit.fits and not rows):
        return ""
    head = answer.what_to_do(fit).rstrip(".") if fit.fits else "What to change"
    of = {"time": "percentages are of the step's time", "FLOPs": "percentages are of the step's FLOPs"}
    text = f" <small>({of[answer.cost_head(rows)]})</small>" if rows else ""
    shown = answer.shortlist(rows)[:CHANGES]
    table = table_html(changes_table(shown, "", live), heads=False) if rows else ""
    nothing_fits = not rows or all(row.choice.fits is False for row in rows)
    said = answer.what_to_do(fit) if nothing_fits and not fit.fits and fit.progress.finished else ""
    said = f"{said.rstrip('.')}." if said else ""
    sentence = " ".join(filter(None, [said, answer.unfinished(fit)]))
    below = _mute(sentence) if sentence else ""
    if live and (all_of or len(rows)) > len(shown):
        below += (
            f' <button type="button" class="remat-link" data-action="all-choices" {KEYS}>'
            f"all {fmt.count(all_of or len(rows), 'choice')}</button>"
        )
    elif len(rows) > len(shown):
        below += f" {_mute(f'and {len(rows) - len(shown)} more')}"
    return f"<h4>{head}{text}</h4>{table}<div>{below}</div>"


def changes_table(rows: Sequence[answer.Offered], heading: str, live: bool = False) -> Table:
    """What could be changed; where a script is at hand, with buttons."""
    body = list[Row]()
    for row in rows:
        choice = row.choice
        key, at, what = html.escape(choice.key), html.escape(choice.at), html.escape(choice.what)
        edit = "Code" if choice.by_hand else "Diff"
        fits = {True: "yes", False: "no", None: "mute"}[choice.fits]
        buttons = (
            f'<button type="button" data-policy="{key}" data-at="{at}" aria-label="Try {what}" {KEYS}>Try</button> '
            f'<button type="button" data-diff="{key}" data-at="{at}" aria-expanded="false" '
            f'aria-label="{edit} of {what}" {KEYS}>{edit}</button>'
        )
        cells = (
            cell(Part(choice.what, html=with_code(words_of(choice)))),
            _bold(row.needed, _exactly(choice)),
            cell(Part(row.fits, fits)),
            cell(row.cost),
            *([cell(Part("", html=buttons))] if live else []),
        )
        body.append(Row(cells, f' data-row="{key}" data-at="{at}"'))
    cost = (f"Extra {answer.cost_head(rows)}", "num")
    heads = [(heading, "policy"), ("Needed", "num"), ("", "fit"), cost, *([("", "buttons")] if live else [])]
    return Table("What to change", heads, body, "change")


def words_of(choice: FitChoice) -> str:
    """What a choice is, with what it donates at its end: that is the same for many."""
    donated = f"donate {', '.join(choice.donate)}"
    other = choice.what.removeprefix(f"{donated} and ") if choice.donate else choice.what
    return other if other == choice.what else f"{other}; {donated}"


def _exactly(choice: FitChoice) -> str:
    if choice.needed_bytes is None:
        return ""
    text = fmt.exact(choice.needed_bytes, "bytes")
    if not choice.compiled and choice.needed_low != choice.needed_high:
        text += f", {fmt.between(choice.needed_low or 0, choice.needed_high or 0)}"
    return text


def with_code(text: str) -> str:
    """A line in which what is code looks like code."""
    cuts, at = list[str](), 0
    for match in _CODE.finditer(text):
        cuts += [escape(text[at : match.start()]), f"<code>{escape(match.group())}</code>"]
        at = match.end()
    return "".join([*cuts, escape(text[at:])])


def saved_less_html(report: Report, timeline: Timeline, device: str) -> str:
    """Why the device keeps less than autodiff saves, by the timeline's estimate; empty where it does not."""
    kept = timeline.saved_bytes
    if kept >= report.saved_bytes:
        return ""
    saved, device = fmt.nbytes(report.saved_bytes), escape(device)
    if kept:
        why = "its compiler computes cheap values again, and frees some before others are made"
        text = f"{device} holds at most {fmt.nbytes(kept)} of it at a time, by estimate: {why}."
    else:
        text = f"{device} keeps none of it, by estimate: its compiler computes cheap values again."
    return f'<p class="remat-empty">Autodiff saves {saved}; {text}</p>'


def diff_html(choice: FitChoice, edit: Edit, memory: str, *, can_apply: bool, closes: bool = True) -> str:
    """The edit of the user's source that does a choice, at full height; ``memory`` is what it is to fit."""
    said = ""
    if choice.needed_bytes is not None:
        how = f"compiled for {memory}" if choice.compiled else f"by estimate on {memory}"
        fits = f"it {answer.WORDS[choice.fits].lower()}"
        said = f'<span class="{_KINDS[choice.fits]}">{escape(how)}: {fmt.nbytes(choice.needed_bytes)}, {fits}</span>'
    verified = _mute("verified by tracing it") if edit.best.verified else ""
    apply = ""
    if can_apply and not choice.donate:  # which is up to whoever compiles it
        of = f'data-diff-of="{html.escape(choice.key)}" data-at="{html.escape(choice.at)}"'
        apply = f'<button type="button" data-action="apply" {of} {KEYS}>Apply</button> '
    close = f'<button type="button" data-action="close-diff" {KEYS}>Close</button>' if closes else ""
    remarks = findings([choice.caution, _nearest(edit), budget_sentence(edit.best), *edit.best.differences])
    if reasons := unnamed_sentences(edit):
        values = fmt.count(len(edit.unnamed), "value")
        remarks += f"<details><summary {KEYS}>{values} that no edit names</summary>{findings(reasons)}</details>"
    if choice.by_hand:
        copied = f'data-action="copy" data-text="{html.escape(choice.code)}" title="Copies the code" {KEYS}'
        copy = f'<button type="button" {copied}>Copy</button>'
        where = "to be written by hand"
        where += ", in place of the statement that takes the gradient" * (microbatches_in(choice.at) > 1)
        head = f'<div class="remat-diff-file"><b>{where}</b> {copy}</div>'
        remarks = findings([choice.caution])
        diffs = f'{head}<div class="remat-diff"><pre>{escape(choice.code)}</pre></div>'
    else:
        diffs = diffs_html(edit) or f'<p class="remat-empty">{"There is nothing to edit." if edit.verified else ""}</p>'
    return (
        f'<div class="remat-diff-head"><b>{with_code(words_of(choice))}</b> {said} {verified}'
        f'<span class="remat-buttons">{apply}{close}</span></div>'
        f"{remarks}{diffs}"
    )


def _nearest(edit: Edit) -> str:
    """How far the nearest edit is from what is chosen, where none does just that."""
    best = edit.best
    if best is edit:
        return ""
    shown = "No edit of the source does exactly this. The nearest one is shown"
    if best.saved_bytes is None or best.recomputed_flops is None:
        return f"{shown}."
    saves = f"saves {fmt.nbytes(best.saved_bytes)}, not {fmt.nbytes(edit.planned_bytes)}"
    return f"{shown}: it {saves}, and repeats {fmt.flops(best.recomputed_flops)}, not {fmt.flops(edit.planned_flops)}."


def compilers_remarks(measured: Measurement) -> str:
    """Remarks on a compiled program, such as that XLA computes 3 instructions again by itself."""
    again = measured.rematerialized or 0
    itself = f"XLA computes {fmt.count(again, 'instruction')} again by itself." if again else ""
    alone = measured.devices_there > 1 and measured.devices == 1
    idle = "The program is on no mesh, and leaves the other devices idle." if alone else ""
    return " ".join(filter(None, [measured.mend, *measured.findings, itself, idle]))


def figures(choices: Sequence[FitChoice]) -> list[dict[str, str]]:
    """What the lists of places and policies tell of choices."""
    rows = list[dict[str, str]]()
    for choice in choices:
        known = choice.needed_bytes is not None and not choice.unusable
        rows.append(
            {
                "policy": choice.key,
                "at": choice.at,
                "what": words_of(choice),
                "needed": fmt.nbytes(choice.needed_bytes or 0) if known else "",
                "time": answer.cost(choice) if known else "",
                "fits": answer.fits(choice) if known else "",
                "error": choice.unusable,
            }
        )
    return rows


def _mute(text: str, title: str = "") -> str:
    hover = f' title="{escape(title)}"' if title else ""
    return f'<span class="remat-mute"{hover}>{escape(text)}</span>'
