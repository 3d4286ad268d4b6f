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


_PARTS = 8  # that a loss is computed in, for example


def softmax_of_logits(case: Case) -> Iterator[Advice]:
    """Logits that take a large part of the memory."""
    report = case.report
    for logits, saved, alive in case.logits:
        takes: list[str] = []
        if saved:
            of = units.percent(saved, report.saved_bytes)
            takes.append(f"{units.nbytes(saved)} of the {units.nbytes(report.saved_bytes)} saved ({of})")
        if alive:
            peak = report.peak_bytes or 0
            takes.append(
                f"with its gradients {units.nbytes(alive)} of the {units.nbytes(peak)} at the estimated peak "
                f"({units.percent(alive, peak)})"
            )
        part = max(saved, alive) // _PARTS
        if logits.looped and saved:
            mend = "Put jax.checkpoint around the body of the loop that computes it: it then holds that of one turn."
        elif logits.looped:
            mend = "It is that of one turn of a loop: smaller parts, in more turns, hold less of it at a time."
        else:
            half = ", or with logits that are kept in bf16 and the rest of the loss under jax.checkpoint"
            mend = (
                f"Compute the loss in parts: jax.lax.map over {_PARTS} parts of the rows, with the product and the "
                f"loss of each under jax.checkpoint, holds {units.nbytes(part)} of it at a time, and repeats that "
                "product. Less is saved, but the peak is no lower, with a jax.custom_vjp rule of the loss that keeps "
                f"its inputs only{half if logits.wide else ''}."
            )
        yield Advice(
            "softmax-of-logits",
            f"The softmax of the logits {logits.type}{at_line(logits.source)} takes {', and '.join(takes)}.",
            mend,
            max(saved, alive),
            "bytes",
            logits.source,
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
    # Of logits the rule above speaks.
    wide = [row for row in kept if row.dtype in ("f32", "f64") and not any(of.saved([row]) for of, *_ in case.logits)]
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
    keys: set[str] = set()

    for scope, eqn in walk(case.facts.engine.provenances.closed):
        around = next((outer for outer in scope.around() if _jax.is_scan(outer) or _jax.is_checkpoint(outer)), None)
        in_scan = around is not None and _jax.is_scan(around)
        if not (in_scan and _jax.is_checkpoint(eqn) and _jax.prevents_cse(eqn)):
            continue
        key = case.facts.engine.site_of(eqn)
        if key in keys:
            continue
        keys.add(key)
        source = next((site.source for site in case.facts.engine.sites if site.key == key), None)
        yield Advice(
            "prevent-cse",
            f"{key}{at_line(source)} is checkpointed inside a scan with prevent_cse=True: the loop already "
            "keeps the two passes apart, and the barriers only hinder XLA.",
            f"jax.checkpoint({key.split(':')[0]}, prevent_cse=False).",
            source=source,
        )


def stale(case: Case) -> Iterator[Advice]:
    """Functions redefined since JAX traced them."""
    for name in case.facts.engine.stale:
        yield Advice(
            "stale-trace",
            f"JAX still holds an older trace of {name}, from before it or what it calls was redefined: jit and grad "
            "may run that one.",
            "Call jax.clear_caches().",
            stake=case.report.peak_bytes or case.report.saved_bytes,  # all that is said here is in doubt
        )


RULES = (softmax_of_logits, constants, too_wide, prevent_cse)
