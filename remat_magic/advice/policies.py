"""Advice on what a policy does, and does not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line
from remat_magic.records import Advice, RematError, Report

__all__ = ["batched_matmuls", "changes_nothing", "last_stage", "only_costs"]


# What is smaller than this part of the whole is not worth a sentence.
_PART = 0.1


def changes_nothing(case: Case) -> Iterator[Advice]:
    """A policy that does what is done without it."""
    mine = case.report
    if not case.built or mine.backward_error:
        return
    for key, text in (("none", "no checkpoint at all"), ("as_written", "the program as written")):
        other = case.other(key)
        if other is None or (key == "as_written" and mine.at == "function" and not case.facts.engine.sites):
            continue
        if _essence(mine) == _essence(other):
            yield Advice(
                "changes-nothing",
                f"{mine.policy} at {mine.at} saves the same {units.nbytes(mine.saved_bytes)} and recomputes the same "
                f"as {text}.",
                "Leave it off, or choose a policy that saves less.",
                mine.saved_bytes,
                "bytes",
            )
            return


def _essence(report: Report) -> Any:
    saved = sorted((row.type, row.kind, row.nbytes) for row in report.residuals if row.kind != "literal")
    return saved, report.recomputed_flops, len(report.recomputed)


def only_costs(case: Case) -> Iterator[Advice]:
    """A checkpoint around the whole function that hardly lowers the peak."""
    mine = case.report
    if mine.at != "function" or not case.built or mine.saved_bytes or not mine.recomputed_flops:
        return
    other = case.other("none")
    peaks = None if other is None else _hardly_lower(mine, other)
    if peaks is None:
        return
    yield Advice(
        "only-costs",
        f"{mine.policy} around the whole of {mine.function} saves nothing and recomputes everything, and the estimated "
        f"peak is hardly lower: {peaks[0]}, without it {peaks[1]}.",
        "Checkpoint its parts, such as each layer: what one part recomputes is freed before the next.",
        mine.recomputed_flops,
        "FLOPs",
    )


def _hardly_lower(mine: Report, other: Report) -> tuple[str, str] | None:
    """Both estimated peaks as text, where the one is not clearly below the other; None where it is, or is unknown."""
    if mine.peak_bytes is None or other.peak_bytes is None or mine.peak_bytes < (1 - _PART) * other.peak_bytes:
        return None
    return units.nbytes(mine.peak_bytes), units.nbytes(other.peak_bytes)


def last_stage(case: Case) -> Iterator[Advice]:
    """A checkpoint on what runs last, which the backward pass needs first."""
    mine, key = case.report, _last_site(case)
    site = next((site for site in case.facts.engine.sites if site.key == key), None)
    if site is None or site.times != 1 or not mine.recomputed_flops or mine.policy in ("none", "mixed"):
        return
    if mine.at == "function" and case.facts.engine.default_at != "function":
        return  # the checkpoint around the function overrules it
    rest = {each.key: mine.policy for each in case.facts.engine.sites if mine.at in ("sites", each.key)}
    try:
        other = case.facts.report(at={**(rest if case.built else {}), site.key: "none"}, namespace=case.namespace)
    except RematError:  # a policy that no key tells
        return
    spared = mine.recomputed_flops - other.recomputed_flops
    peaks = _hardly_lower(mine, other)
    if peaks is None or spared < _PART * mine.recomputed_flops:
        return
    yield Advice(
        "last-stage",
        f"{site.key}{at_line(site.source)} runs last, so that the backward pass computes it again at once, and the "
        f"estimated peak is hardly lower: {peaks[0]}, without its checkpoint {peaks[1]}.",
        f"Take jax.checkpoint off {site.function}.",
        spared,
        "FLOPs",
        site.source,
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
    flops = sum(e.flops or 0 for e in missed)
    if not missed or flops < _PART * case.report.recomputed_flops:
        return
    most = max(missed, key=lambda e: e.flops or 0)
    yield Advice(
        "batched-matmuls",
        f"dots_with_no_batch_dims_saveable saves no matmul that has batch dimensions: {len(missed)} run again"
        f"{at_line(most.source, ', the largest at ')}.",
        "Use dots_saveable, or name the product and add it: dots_with_no_batch_dims_saveable | "
        "save_only_these_names(...).",
        flops,
        "FLOPs",
        most.source,
    )
