"""What nesting the steps of a scan under checkpoints saves and recomputes, by tracing the function so changed.

A scan saves the carry and the residuals of every step. With segments of about the square root of its length, each under
a checkpoint, it saves the carries between segments, and one segment's residuals at a time while it is differentiated,
for one more run of the steps (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). By halves, again and
again, it saves two carries a level, for one more run a level.
"""

# What users paste is the source of the functions at the end, without annotations, as users write such functions.
# ruff: noqa: ANN001, ANN201, ANN202
# pyright: reportMissingParameterType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_magic import _jax
from remat_magic.engine.engine import Engine
from remat_magic.engine.segments import SHORTEST, Checkpoint, alone, in_segments, segment_of
from remat_magic.engine.sites import PolicyWriter
from remat_magic.facts.facts import Facts
from remat_magic.facts.residuals import locate
from remat_magic.jaxprs.walk import Scope, walk
from remat_magic.policies import AS_WRITTEN
from remat_magic.records import Listed, Loop, Nesting, RematError, Report

__all__ = ["loops", "scan_by_halves", "scan_in_segments"]

_FEW = 3  # steps that are not halved any more, as in ``scan_by_halves``
_Change = Callable[[Any], list[Any]]  # from a scan's equation to those in its place


def loops(facts: Facts, *, shortest: int = SHORTEST) -> Listed[Loop]:
    """``Trace.loops``: of scans at any depth, in the order of the program."""
    report = facts.report("as_written")
    if report.backward_error:
        raise RematError(report.backward_error)
    rows: dict[int, Loop] = {}
    for scope, eqn in walk(facts.engine.provenances.closed, _within_reach):
        if _jax.is_scan(eqn) and id(eqn) not in rows and _jax.scan_length(eqn) >= max(shortest, SHORTEST):
            rows[id(eqn)] = _Rewritten(facts, scope, eqn, report).loop()
    return Listed(rows.values())


def _within_reach(eqn: Any) -> bool:
    return not _jax.is_custom_rule(eqn)  # what the rules of custom derivatives do is Python


def _in_halves(eqn: Any) -> list[Any]:
    """The equations of a scan as ``scan_by_halves`` runs it."""
    length = _jax.scan_length(eqn)
    return [eqn] if length <= _FEW else in_segments(eqn, length // 2, Checkpoint(), _in_halves)


class _Rewritten:
    """One scan, and the function with it run in other ways."""

    def __init__(self, facts: Facts, scope: Scope, eqn: Any, report: Report) -> None:
        self._facts, self._scope, self._eqn, self._report = facts, scope, eqn, report
        self._consts, self._carries, _ = _jax.scan_split(eqn)
        self._length = _jax.scan_length(eqn)
        self._place = locate(facts.engine.provenances, scope, eqn)
        name, _, _ = _jax.function_name(_jax.scan_body(eqn))
        self._name = name if name.isidentifier() else "body"

    def loop(self) -> Loop:
        """What there is to tell of it."""
        carry = sum(_jax.nbytes(atom.aval) for atom in self._eqn.invars[self._consts : self._consts + self._carries])
        place, report = self._place, self._report
        plain = Nesting(
            "as_written",
            self._length,
            1,
            report.saved_bytes,
            0,
            0,
            report.recomputed_flops,
            report.peak_bytes,
        )
        nested: tuple[Nesting, ...] = ()
        error = ""
        try:
            nested = (self._segments(), self._halves())
        except RematError as failed:
            error = str(failed)
        return Loop(self._name, self._length, carry, place.source, place.path, place.times, plain, nested, error)

    def _segments(self) -> Nesting:
        segment = segment_of(self._length)
        working = self._saved(lambda eqn: [eqn], segment)
        code = self._code("scan_in_segments", f"length={self._length}, segment={segment}", scan_in_segments)

        def change(eqn: Any) -> list[Any]:
            return in_segments(eqn, segment, Checkpoint())

        return self._nesting("segments", segment, 2, change, working, code)

    def _halves(self) -> Nesting:
        lengths = [self._length]
        while lengths[-1] > _FEW:
            lengths.append(lengths[-1] // 2)
        working = sum(self._saved(_in_halves, length) for length in lengths[1:])
        both = (scan_in_segments, scan_by_halves)
        code = self._code("scan_by_halves", f"length={self._length}", *both)
        return self._nesting("halves", lengths[-1], len(lengths), _in_halves, working, code)

    def _nesting(self, kind: Any, segment: int, levels: int, change: _Change, working: int, code: str) -> Nesting:
        def rewritten(closed: Any) -> Any:
            return PolicyWriter(lambda _: AS_WRITTEN, lambda eqn: change if eqn is self._eqn else None)(closed)

        report = self._facts.of(self._facts.engine.variant(rewritten)).report("as_written")
        if report.backward_error:
            raise RematError(report.backward_error)
        return Nesting(
            kind,
            segment,
            levels,
            report.saved_bytes,
            self._views(report, self._length),
            working,
            report.recomputed_flops,
            report.peak_bytes,
            code,
        )

    def _saved(self, change: _Change, length: int) -> int:
        """What so many steps save when they are differentiated by themselves, views of their inputs left out."""
        eqn = alone(self._eqn, length)
        steps = _jax.part(_jax.scan_body(eqn), change(eqn), eqn.invars, eqn.outvars, self._name, "scan")
        types = tuple(_jax.shape_of(var.aval) for var in eqn.invars)
        function = _jax.as_function(_jax.closed(steps))
        report = Facts(Engine(function, types, {}, None, False)).preview("none", "function")
        return report.saved_bytes - self._views(report, length)

    def _views(self, report: Report, length: int) -> int:
        """The bytes of scanned inputs saved in another shape, which are views where no steps are left over."""
        inputs = self._eqn.invars[self._consts + self._carries :]
        rows = {(_jax.short_dtype(atom.aval), tuple(atom.aval.shape[1:])) for atom in inputs}
        return sum(
            residual.nbytes
            for residual in report.residuals
            if residual.kind == "intermediate"
            and residual.primitive == "reshape"
            and len(residual.shape) > 1
            and residual.shape[0] * residual.shape[1] == length
            and (residual.dtype, residual.shape[2:]) in rows
        )

    def _code(self, call: str, options: str, *functions: Callable[..., Any]) -> str:
        where = f" at {self._place.source.place}" if self._place.source else ""
        reverse = ", reverse=True" if _jax.is_reversed(self._eqn) else ""
        return "\n\n\n".join(
            [
                "import jax\nimport jax.numpy as jnp",
                *(inspect.getsource(function).rstrip() for function in functions),
                f"# instead of jax.lax.scan({self._name}, init, xs){where}\n"
                f"carry, ys = {call}({self._name}, init, xs, {options}{reverse})",
            ]
        )


# ----------------------------------------------------------------------------------------------------- what users paste


def scan_in_segments(f, init, xs, *, length, segment, reverse=False, inner=jax.lax.scan):
    """``jax.lax.scan``, with the carry saved once a segment, and each segment's steps computed again when needed."""
    whole = length // segment * segment  # what is left over is one shorter segment at the end

    def steps(carry, part, count=segment):
        return inner(f, carry, part, length=count, reverse=reverse)

    def segments(carry):
        parts = xs if whole == length else jax.tree.map(lambda x: x[:whole], xs)
        parts = jax.tree.map(lambda x: x.reshape(whole // segment, segment, *x.shape[1:]), parts)
        step = jax.checkpoint(steps, prevent_cse=False)
        carry, ys = jax.lax.scan(step, carry, parts, length=whole // segment, reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)

    def rest(carry):
        part = jax.tree.map(lambda x: x[whole:], xs)
        return jax.checkpoint(lambda carry, part: steps(carry, part, length - whole))(carry, part)

    if whole == length:
        return segments(init)
    if reverse:
        carry, last = rest(init)
        carry, first = segments(carry)
    else:
        carry, first = segments(init)
        carry, last = rest(carry)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, last)


def scan_by_halves(f, init, xs, *, length, reverse=False):
    """``jax.lax.scan`` as two halves, each under ``jax.checkpoint`` and again two halves: a carry or two a level."""
    if length <= 3:
        return jax.lax.scan(f, init, xs, length=length, reverse=reverse)
    return scan_in_segments(f, init, xs, length=length, segment=length // 2, reverse=reverse, inner=scan_by_halves)
