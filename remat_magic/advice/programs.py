"""Advice on the program, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterator

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line
from remat_magic.jaxprs.walk import walk
from remat_magic.records import Advice, Residual

__all__ = ["RULES", "stale"]


# From so many bytes a constant is worth a sentence, and from this part of all that is saved what is wider.
_LARGE_CONSTANT = 2**20
_WIDE_PART = 0.25


def constants(case: Case) -> Iterator[Advice]:
    """Large arrays that the function captures."""
    for row in case.report.residuals:
        if row.kind == "constant" and row.nbytes >= _LARGE_CONSTANT:
            yield Advice(
                "large-constant",
                f"{row.type} ({units.nbytes(row.nbytes)}) is captured from outside the function: it becomes part of "
                "every compiled program, and lives as long.",
                "Pass it as an argument.",
                row.nbytes,
                "bytes",
                row.source,
            )


_HALF = frozenset({"bf16", "f16"})


def too_wide(case: Case) -> Iterator[Advice]:
    """Wide residuals in a program of narrow weights."""
    sizes: dict[str, int] = {}
    for leaf in case.facts.engine.arguments:
        kind = _jax.short_dtype(leaf.value)
        sizes[kind] = sizes.get(kind, 0) + leaf.value.size * leaf.value.dtype.itemsize
    halves = sum(size for kind, size in sizes.items() if kind in _HALF)
    if not halves or 2 * halves < sum(sizes.values()):
        return
    kept = [row for row in case.report.residuals if row.kind == "intermediate" and row.kept]
    wide = [row for row in kept if row.dtype in ("f32", "f64")]
    total = sum(row.nbytes for row in wide)
    if not wide or total < _WIDE_PART * case.report.saved_bytes:
        return
    largest: Residual = max(wide, key=lambda row: row.nbytes)
    kind = max(_HALF & sizes.keys(), key=lambda kind: sizes[kind])
    maker = largest.primitive or "an argument"
    yield Advice(
        "wide-residuals",
        f"The arguments are {kind}, and {units.nbytes(total)} of the {units.nbytes(case.report.saved_bytes)} saved are "
        f"wider: the largest is {largest.type}, of {maker}{at_line(largest.source)}.",
        f"Checkpoint the part that computes in {largest.dtype}, so that its {kind} input is saved instead.",
        total,
        "bytes",
        largest.source,
    )


def prevent_cse(case: Case) -> Iterator[Advice]:
    """Barriers inside a scan."""
    seen: set[str] = set()

    for scope, eqn in walk(case.facts.engine.provenances.closed):
        around = next((outer for outer in scope.around() if _jax.is_scan(outer) or _jax.is_checkpoint(outer)), None)
        in_scan = around is not None and _jax.is_scan(around)
        if not (in_scan and _jax.is_checkpoint(eqn) and _jax.prevents_cse(eqn)):
            continue
        key = case.facts.engine.site_of(eqn)
        if key in seen:
            continue
        seen.add(key)
        source = next((site.source for site in case.facts.engine.sites if site.key == key), None)
        yield Advice(
            "prevent-cse",
            f"{key}{at_line(source)} is checkpointed inside a scan with prevent_cse=True: the loop already "
            "keeps the two passes apart, and the barriers only hinder XLA.",
            f"jax.checkpoint({key.split(':')[0]}, prevent_cse=False).",
            source=source,
        )


def bare_scan(case: Case) -> Iterator[Advice]:
    """A scan that saves several values of every iteration, without a checkpoint."""
    total = case.report.saved_bytes
    by_loop: dict[str, list[Residual]] = {}
    for row in case.report.residuals:
        if row.kind == "intermediate" and row.times != 1:
            label = next((label for label in row.path if label.startswith("scan x")), "")
            by_loop.setdefault(label, []).append(row)
    checkpointed = bool(case.facts.engine.sites) or case.built
    for label, rows in by_loop.items():
        held = sum(row.nbytes for row in rows)
        if not label or checkpointed or 2 * held < total or len(rows) < 2:
            continue
        largest = max(rows, key=lambda row: row.nbytes)
        yield Advice(
            "bare-scan",
            f"{units.nbytes(held)} of the {units.nbytes(total)} saved are {len(rows)} values of every iteration of "
            f"{label}, the largest{at_line(largest.source)}.",
            "Put jax.checkpoint(..., prevent_cse=False) around the scan's body: it then saves its carry alone.",
            held,
            "bytes",
            largest.source,
        )


def stale(case: Case) -> Iterator[Advice]:
    """Functions redefined since JAX traced them."""
    for name in case.facts.engine.stale:
        yield Advice(
            "stale-trace",
            f"JAX still holds an older trace of {name}, from before it or what it calls was redefined: jit and grad "
            "may run that one.",
            "Call jax.clear_caches().",
        )


RULES = (constants, too_wide, bare_scan, prevent_cse)
