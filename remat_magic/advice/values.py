"""Advice on single values: what is cheap to keep and dear to recompute, the reverse, and what is dear to offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line, name_for, with_name, without_names
from remat_magic.advice.ground import Ground, Group
from remat_magic.planning.reckoned import Outcome
from remat_magic.records import Advice, Equation, SourceSpan, dearest

__all__ = ["RULES"]

# A chain of elementwise operations takes few FLOPs for each byte of its result, and recomputing it about as long as
# reading the result; a matmul over a hundred channels and more takes a hundred FLOPs for each byte, near what
# accelerators do while they move one (devices/data_sheets.py: 150 to 560 in bfloat16). In between neither is clear.
_CHEAP = 10.0
_DEAR = 100.0
# And clearly better than what the policy as a whole exchanges bytes and FLOPs for.
_BETTER = 1.5
# What is smaller than this part of all that is saved, or recomputed, is not worth a sentence.
_PART = 0.05
_MOST = 3
# So many expressions are tried, of one retrace's graph: some milliseconds each in the largest programs.
_TRIED = 100
# A host's link is reckoned as if nothing else ran, and so is what is recomputed: the difference must be clear.
_LONGER = 1.5
_OFFLOADED_TRIED = 30


def cheap_to_keep(case: Case) -> Iterator[Advice]:
    """Recomputed values that take few bytes for the FLOPs that they spare."""
    ground, report = case.ground, case.report
    if ground is None or not ground.exact or not report.recomputed_flops or report.offloaded_bytes:
        return
    base, spare, work = ground.outcomes.base, ground.planner.most - report.saved_bytes, report.recomputed_flops
    usual = work / spare if spare > 0 else 0.0

    def worth(before: Outcome, after: Outcome) -> float:
        """FLOPs spared for each byte, 0 where that is not clear."""
        spared, added_bytes = before.recomputed_flops - after.recomputed_flops, after.saved_bytes - before.saved_bytes
        price = spared / max(added_bytes, 1)
        return price if spared >= _PART * work and price >= max(_DEAR, _BETTER * usual) else 0.0

    groups = ground.nameable(ground.outcomes.recomputed)
    tried = sorted(groups, key=lambda group: (group.first.primitive not in _jax.MATMULS, -group.nbytes))[:_TRIED]
    sampled = f" (of {len(groups)} expressions {len(tried)} were tried)" if len(tried) < len(groups) else ""
    used_names = list(case.facts.engine.names)
    for chosen, after in _best(ground, tried, worth):
        spared, takes = base.recomputed_flops - after.recomputed_flops, after.saved_bytes - base.saved_bytes
        value = chosen.first
        name = chosen.name or name_for(value, used_names)
        used_names.append(name)
        size = f"{units.nbytes(takes)} more" if takes > 0 else "no more bytes"
        code = with_name(case.policy_in_force, name)
        yield Advice(
            "cheap-to-keep",
            f"{chosen.text}{_what(chosen)} would take {size} to keep, and spare {units.flops(spared)} of what is "
            f"recomputed, {units.percent(spared, work)} of it{_time(case, ground, chosen)}"
            f"{sampled}.",
            f"{_naming(chosen, name)}{code}.",
            spared,
            "FLOPs",
            value.source,
            stake=max(takes, 0),
            code=code,
        )


def cheap_to_recompute(case: Case) -> Iterator[Advice]:
    """Kept values that take many bytes for the FLOPs that they spare."""
    ground, report = case.ground, case.report
    saved, work = report.saved_bytes, report.recomputed_flops
    if ground is None or not saved or report.offloaded_bytes:
        return
    # Without a checkpoint autodiff keeps other values than a policy can: then it is compared with what JAX reports.
    exact, graph = ground.exact, ground.planner.graph
    least, all_again = graph.predict(())
    spare = saved - least
    usual = (all_again - work) / spare if spare > 0 else 0.0

    def worth(before: Outcome, after: Outcome) -> float:
        """Bytes freed for each FLOP, 0 where that is not clear."""
        freed, again = before.saved_bytes - after.saved_bytes, after.recomputed_flops - before.recomputed_flops
        freed_of_report, again_of_report = saved - after.saved_bytes, after.recomputed_flops - work
        least = min(freed, freed if exact else freed_of_report)
        most = max(again, again if exact else again_of_report)
        clear = least >= _PART * saved and most <= min(_CHEAP, usual / _BETTER) * least
        return least / max(most, 1) if clear else 0.0

    base = ground.outcomes.base
    of_logits = {source for logits, *_ in case.logits for source in logits.sources}  # another rule speaks of these
    groups = [g for g in ground.by_name_or_line(base.used) if g.nbytes >= _PART * saved]
    groups = [g for g in groups if g.name or g.first.source not in of_logits]
    for chosen, after in _best(ground, groups, worth):
        before = base if exact else report
        freed, again = before.saved_bytes - after.saved_bytes, max(0, after.recomputed_flops - before.recomputed_flops)
        mend, code = _again(case, chosen)
        yield Advice(
            "cheap-to-recompute",
            f"{chosen.text}{_what(chosen)} keeps {units.nbytes(freed)}, {units.percent(freed, saved)} of "
            f"what is saved, that would take {units.flops(again)} to compute again{_time(case, ground, chosen)}.",
            mend,
            freed,
            "bytes",
            chosen.first.source,
            code=code,
        )


def _best(
    ground: Ground, groups: Sequence[Group], worth: Callable[[Outcome, Outcome], float]
) -> Iterator[tuple[Group, Outcome]]:
    """The few groups that are worth most, each also where those before it are decided the other way already."""
    base = ground.outcomes.base
    alone = {group: ground.change([group]) for group in groups}
    candidates = sorted((g for g in groups if worth(base, alone[g])), key=lambda g: -worth(base, alone[g]))
    chosen: list[Group] = []
    before = base
    while candidates and len(chosen) < _MOST:
        group = candidates.pop(0)
        after = ground.change([*chosen, group])
        if worth(before, after):
            chosen.append(group)
            before = after
            yield group, alone[group]


def _what(group: Group) -> str:
    value = group.first
    where = "" if group.name and not value.source else at_line(value.source)
    return f"{where} ({value.primitive}{f', {group.times:,} times' if group.times > 1 else ''})"


def _time(case: Case, ground: Ground, group: Group) -> str:
    """The estimated time of the recomputation, as a part of a sentence; empty where no device is known."""
    if case.device is None:
        return ""
    return f", {units.seconds(abs(ground.seconds([group], case.device)))} on {case.device.name} by estimate"


def _naming(group: Group, name: str) -> str:
    """How to give a value a name, before the policy that saves it."""
    return _named(group.first.source, group.name, name)


def _named(source: SourceSpan | None, given: str | None, name: str) -> str:
    if given or source is None:
        return ""
    if source.end_line != source.line:
        return f"Give its value the name {name!r} with checkpoint_name, and use "
    return f"`checkpoint_name({source.expression}, {name!r})`, and "


def _again(case: Case, group: Group) -> tuple[str, str]:
    """How to have values computed again that are kept, and what of that is code to paste."""
    if group.name:
        code = without_names(case.policy_in_force, [group.name])
        if code:
            return f"{code}.", code
    if case.built or case.facts.engine.sites:
        return (
            f"trace.what_if({case.report.policy!r}, {case.report.at!r}) has the plan that computes it again, and "
            "trace.edit(plan) the names that do so in the source."
        ), ""
    readers = dict.fromkeys(
        reader.source.place
        for row in case.report.residuals
        if row.source == group.first.source
        for reader in row.needed_by
        if reader.source
    )
    where = f", {' and '.join(readers)}," if readers else ""
    return (
        f"Put it and what reads it{where} in a function of their own: jax.checkpoint(part)(...) keeps its inputs "
        "instead."
    ), ""


def dearer_than_recomputing(case: Case) -> Iterator[Advice]:
    """Values that are sooner computed again than fetched from the host."""
    ground = case.ground
    if not case.report.offloaded_bytes or ground is None or not ground.exact:
        return
    device = case.device
    if device is None or not device.host_bandwidth:
        return
    groups = sorted(ground.by_name_or_line(ground.moved), key=lambda group: -group.nbytes)[:_OFFLOADED_TRIED]
    lost: list[tuple[Group, int, float, float]] = []
    so_far = 0.0
    for group in groups:
        before = [group for group, *_ in lost]
        moved = _offloaded(ground, before) - _offloaded(ground, [*before, group])
        # There and back, as Times.offload has it.
        transfer, recomputing = 2 * moved / device.host_bandwidth, ground.seconds([*before, group], device)
        if transfer > _LONGER * (recomputing - so_far):
            lost.append((group, moved, transfer, recomputing - so_far))
            so_far = recomputing
    mend, code = _not_offloading(case, ground, [group for group, *_ in lost], device.name)
    for group, moved, transfer, again in sorted(lost, key=lambda loss: loss[3] - loss[2])[:_MOST]:
        yield Advice(
            "dear-offload",
            f"{group.text}{at_line(group.first.source)} is offloaded: {units.nbytes(moved)} to the host and back take "
            f"{units.seconds(transfer)} on {device.name}, and recomputing them {units.seconds(again)}, both by "
            "estimate.",
            mend,
            moved,
            "bytes",
            group.first.source,
            code=code,
        )


def _offloaded(ground: Ground, without: Sequence[Group]) -> int:
    keys = frozenset(key for group in without for key in group.keys)
    moved = ground.moved - keys
    return ground.planner.graph.figures(ground.kept | moved, moved).offloaded_bytes


def _not_offloading(case: Case, ground: Ground, groups: Sequence[Group], device: str) -> tuple[str, str]:
    """What to do instead of offloading values, and what of that is code to paste."""
    names = [group.name for group in groups if group.name]
    code = without_names(case.policy_in_force, names) if len(names) == len(groups) else ""
    if not code and not _offloaded(ground, groups) and not ground.kept:
        code = "policy=jax.checkpoint_policies.nothing_saveable"
    if code:
        return f"Recompute {'it' if len(groups) == 1 else 'them'}: {code}.", code
    code = f"trace.plan({case.report.saved_bytes}, {case.report.at!r}, device={device!r}, offload=True)"
    return f"Let a plan choose what is worth it: {code}.", code


def gathered_again(case: Case) -> Iterator[Advice]:
    """Sharded arguments that the backward pass gathers once more, since what was gathered is not kept."""
    report, used_names = case.report, list(case.facts.engine.names)
    by_place: dict[tuple[SourceSpan | None, tuple[str, ...]], list[Equation]] = {}
    for equation in dearest(report.recomputed):
        if equation.repeated and equation.of_argument:
            by_place.setdefault((equation.source, equation.over), []).append(equation)
    for (source, over), gathers in by_place.items():
        size = sum(gather.communicated_bytes for gather in gathers)
        if size < _PART * report.repeated_communicated_bytes:
            continue
        arguments = [*dict.fromkeys(gather.of_argument for gather in gathers)]
        other_arguments = f" and {len(arguments) - 1} more" if len(arguments) > 1 else ""
        name = gathers[0].name or name_for(gathers[0], used_names)
        used_names.append(name)
        code = with_name(case.policy_in_force, name)
        yield Advice(
            "gathered-again",
            f"{gathers[0].primitive}{at_line(source)} gathers {arguments[0]}{other_arguments} over "
            f"{' and '.join(over)} again in the backward pass, {units.nbytes(size)} on each "
            f"device{_on_links(case, gathers)}: to keep what was gathered, or to gather it twice, is the choice that "
            "FSDP leaves.",
            f"Where memory allows {units.nbytes(size)} more, {_named(source, gathers[0].name, name)}{code}.",
            size,
            "bytes",
            source,
            code=code,
        )


def _on_links(case: Case, gathers: Sequence[Equation]) -> str:
    """How long a device's links take for some collectives, as a part of a sentence; empty where that is not known."""
    if case.device is None or not case.device.interconnect:
        return ""
    least = sum(gather.sent_bytes for gather in gathers) / case.device.interconnect
    return f", at least {units.seconds(least)} on {case.device.name}"


RULES = (dearer_than_recomputing, cheap_to_keep, cheap_to_recompute, gathered_again)
