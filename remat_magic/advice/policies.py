"""Advice on what a policy does and does not do, and what it does otherwise under ``jax_remat3``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line, name_for
from remat_magic.advice.ground import Group
from remat_magic.policies import Key, resolve
from remat_magic.records import Advice, RematError, Report, dearest

__all__ = ["RULES"]

# What is smaller than this part of the whole is not worth a sentence.
_PART = 0.1
_LISTED = 3  # names to give


def changes_nothing(case: Case) -> Iterator[Advice]:
    """A policy that does what is done without it."""
    report = case.report
    if not case.built or report.backward_error:
        return
    for key, text in (("none", "no checkpoint at all"), ("as_written", "the program as written")):
        other = case.other(key)
        if other is None or (key == "as_written" and report.at == "function" and not case.facts.engine.sites):
            continue
        if _essence(report) == _essence(other):
            yield Advice(
                "changes-nothing",
                f"{report.policy} at {report.at} saves the same {units.nbytes(report.saved_bytes)} and recomputes the "
                f"same as {text}.",
                "Leave it off, or choose a policy that saves less.",
                report.saved_bytes,
                "bytes",
            )
            return


def _essence(report: Report) -> Any:
    saved = sorted((row.type, row.kind, row.nbytes) for row in report.residuals if row.kind != "literal")
    return saved, report.recomputed_flops, len(report.recomputed)


def only_costs(case: Case) -> Iterator[Advice]:
    """A checkpoint around the whole function that hardly lowers the peak."""
    report = case.report
    if report.at != "function" or not case.built or report.saved_bytes or not report.recomputed_flops:
        return
    other = case.other("none")
    peaks = None if other is None else _hardly_lower(report, other)
    if peaks is None:
        return
    yield Advice(
        "only-costs",
        f"{report.policy} around the whole of {report.function} saves nothing and recomputes everything, and the "
        f"estimated peak is hardly lower: {peaks[0]}, without it {peaks[1]}.",
        "Checkpoint its parts, such as each layer: what one part recomputes is freed before the next.",
        report.recomputed_flops,
        "FLOPs",
        stake=other.saved_bytes if other is not None else None,
    )


def _hardly_lower(report: Report, other: Report) -> tuple[str, str] | None:
    """Both estimated peaks as text, where the one is not clearly below the other; None where it is, or is unknown."""
    if report.peak_bytes is None or other.peak_bytes is None or report.peak_bytes < (1 - _PART) * other.peak_bytes:
        return None
    return units.nbytes(report.peak_bytes), units.nbytes(other.peak_bytes)


def last_stage(case: Case) -> Iterator[Advice]:
    """A checkpoint on what runs last, which the backward pass needs first."""
    report, key = case.report, _last_site(case)
    site = next((site for site in case.facts.engine.sites if site.key == key), None)
    if site is None or site.times != 1 or not report.recomputed_flops or report.policy in ("none", "mixed"):
        return
    if report.at == "function" and case.facts.engine.default_at != "function":
        return  # the checkpoint around the function overrules it
    rest = {site.key: report.policy for site in case.facts.engine.sites if report.at in ("sites", site.key)}
    try:
        other = case.facts.report(at={**(rest if case.built else {}), site.key: "none"}, namespace=case.namespace)
    except RematError:  # a policy that no key tells
        return
    spared = report.recomputed_flops - other.recomputed_flops
    peaks = _hardly_lower(report, other)
    if peaks is None or spared < _PART * report.recomputed_flops:
        return
    yield Advice(
        "last-stage",
        f"{site.key}{at_line(site.source)} runs last, so that the backward pass computes it again at once, and the "
        f"estimated peak is hardly lower: {peaks[0]}, without its checkpoint {peaks[1]}.",
        f"Take jax.checkpoint off {site.function}.",
        spared,
        "FLOPs",
        site.source,
        stake=max(0, other.saved_bytes - report.saved_bytes),
    )


def _last_site(case: Case) -> str | None:
    """The site that no costly operation and no other checkpoint of the function comes after."""
    eqns = _jax.open_jaxpr(case.facts.engine.provenances.closed).eqns
    for eqn in reversed(eqns):
        if _jax.is_checkpoint(eqn):
            return case.facts.engine.site_of(eqn)
        if _jax.bodies(eqn) or _jax.is_matmul(eqn):
            return None
    return None


def batched_matmuls(case: Case) -> Iterator[Advice]:
    """Matmuls with batch dimensions under a policy that leaves these out."""
    if not any(policy.has("dots_with_no_batch_dims_saveable") for policy in case.asked.values()):
        return
    missed = [e for e in case.report.recomputed if e.primitive == "dot_general" and e.repeated and e.flops]
    flops = sum(e.flops or 0 for e in dearest(missed))
    if not missed or flops < _PART * case.report.recomputed_flops:
        return
    most = max(missed, key=lambda e: e.flops or 0)
    with_them = case.other("dots_saveable")
    yield Advice(
        "batched-matmuls",
        f"dots_with_no_batch_dims_saveable saves no matmul that has batch dimensions: {len(missed)} run again"
        f"{at_line(most.source, ', the largest at ')}.",
        "Use dots_saveable, or name the product and add it: dots_with_no_batch_dims_saveable | "
        "save_only_these_names(...).",
        flops,
        "FLOPs",
        most.source,
        stake=None if with_them is None else max(0, with_them.saved_bytes - case.report.saved_bytes),
    )


def asks_little(case: Case) -> Iterator[Advice]:
    """A policy of the user's own that saves what jax_remat3 does not ask it about."""
    own = {policy for policy in case.asked.values() if not _resolves(policy, case.facts.engine.names)}
    ground = case.ground if len(own) == len(set(case.asked.values())) == 1 else None
    if ground is None:
        return
    used = ground.outcomes.base.used & ground.kept
    unasked = [value for value in ground.values(used) if value.name is None and value.primitive not in _jax.MATMULS]
    if not unasked:
        return
    (policy,) = own
    total = sum(value.nbytes for value in unasked)
    largest = max(unasked, key=lambda value: value.nbytes)
    when = "does not save" if case.facts.engine.remat3 else "would not save, though it does now"
    yield Advice(
        "remat3",
        f"jax_remat3 asks a policy about matmuls, convolutions and named values only: with it {policy} {when}, "
        f"{units.nbytes(total)}, the largest of {largest.primitive}{at_line(largest.source)}.",
        _by_name(case, ground.nameable(used)),
        total,
        "bytes",
        largest.source,
    )


def _resolves(policy: Key, names: Sequence[str]) -> bool:
    """Whether a key says by itself which policy it is, and not by a name in the user's program."""
    try:
        resolve(policy, names)
    except RematError:
        return False
    return True


def _by_name(case: Case, groups: list[Group]) -> str:
    """The equivalent by names of a policy that saves some values."""
    used_names, calls = list(case.facts.engine.names), list[str]()
    names = [group.name for group in groups if group.name]
    for group in groups:
        source = group.first.source
        if group.name or source is None:
            continue
        used_names.append(name_for(group.first, used_names))
        names.append(used_names[-1])
        where = source.expression if source.end_line == source.line else f"... # {source.place}"
        calls.append(f"`checkpoint_name({where}, {used_names[-1]!r})`")
    if not calls:
        return "Name the values that it should save, and use save_only_these_names."
    not_listed = f" (and {len(calls) - _LISTED} more)" if len(calls) > _LISTED else ""
    policy = f"policy=jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, names))})"
    return f"By name it works with both: {', '.join(calls[:_LISTED])}{not_listed}, and {policy}."


def keeps_inner_checkpoints(case: Case) -> Iterator[Advice]:
    """A policy around a function whose parts have checkpoints of their own."""
    if "" not in case.asked or not case.facts.engine.sites:
        return
    keys = ", ".join(site.key for site in case.facts.engine.sites)
    stay, say = ("stay", "is") if case.facts.engine.remat3 else ("would stay", "would be")
    yield Advice(
        "remat3",
        f"With jax_remat3 the checkpoints inside {stay} in force: what {keys} recomputes {say} said by its own policy, "
        f"whatever {case.report.policy} around the function says.",
        "Set the policy at='sites', or take the inner checkpoints off.",
    )


RULES = (only_costs, last_stage, changes_nothing, batched_matmuls, asks_little, keeps_inner_checkpoints)
