"""Advice on what a policy does, and does not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remat_magic import units
from remat_magic.model import Advice, Report
from remat_magic.tuning.advice.case import Case, at_line

__all__ = ["batched_matmuls", "changes_nothing", "only_costs", "remat3"]


# What is smaller than this part of the whole is not worth a sentence.
_PART = 0.1


def changes_nothing(case: Case) -> Iterator[Advice]:
    """A policy that does what is done without it."""
    mine = case.report
    if not case.built or mine.backward_error:
        return
    for key, text in (("none", "no checkpoint at all"), ("as_written", "the program as written")):
        other = case.other(key)
        if other is None or (key == "as_written" and mine.at == "function" and not case.trace.sites):
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
    if other is None or mine.peak_bytes is None or other.peak_bytes is None:
        return
    if mine.peak_bytes < (1 - _PART) * other.peak_bytes:
        return
    yield Advice(
        "only-costs",
        f"{mine.policy} around the whole of {mine.function} saves nothing and recomputes everything, and the estimated "
        f"peak is hardly lower: {units.nbytes(mine.peak_bytes)}, without it {units.nbytes(other.peak_bytes)}.",
        "Checkpoint its parts, such as each layer: what one part recomputes is freed before the next.",
        mine.recomputed_flops,
        "FLOPs",
    )


def batched_matmuls(case: Case) -> Iterator[Advice]:
    """Matmuls with batch dimensions under a policy that leaves these out."""
    if not any("dots_with_no_batch_dims" in policy for policy in case.asked.values()):
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


def remat3(case: Case) -> Iterator[Advice]:
    """What jax_remat3 does otherwise."""
    if not case.trace.remat3:
        return
    for note in case.report.notes:
        if note.startswith("jax_remat3 asks"):
            yield Advice("remat3", note, "Name the values that it should save, and use save_only_these_names.")
    if "" in case.asked and case.trace.sites:
        keys = ", ".join(site.key for site in case.trace.sites)
        yield Advice(
            "remat3",
            f"Under jax_remat3 the checkpoints inside stay in force: what {keys} recomputes is said by its own policy, "
            f"whatever {case.report.policy} around the function says.",
            "Set the policy at='sites', or take the inner checkpoints off.",
        )
