"""A program with some lines of a function under a checkpoint of their own: what that saves, by a retrace."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from typing import Any

from remat_magic import _jax
from remat_magic.engine.calls import calls_scoped_modules, frames
from remat_magic.engine.checkpoint_writer import Checkpoint
from remat_magic.engine.engine import Engine
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.walk import last_reads
from remat_magic.parsing import parse_source
from remat_magic.records import RematError, Report, SourceSpan


def lines_of_part(file: str, first: int, last: int) -> tuple[int, int] | None:
    """The lines of the whole statements there; None where these cannot be put in a function of their own.

    They can where they follow one another in one block, and do no more than assign to variables or return.
    """
    module = parse_source("".join(linecache.getlines(file)))
    for node in ast.walk(module) if module else ():
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            part = [it for it in block if it.lineno <= last and first <= it.end_lineno] if type(block) is list else []
            if not part or first < part[0].lineno or part[-1].end_lineno < last:
                continue
            if all(isinstance(it, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return) for it in part) and not any(
                isinstance(getattr(within, "ctx", None), ast.Store) and not isinstance(within, ast.Name | ast.Tuple)
                for it in part
                for within in ast.walk(it)
            ):
                return part[0].lineno, part[-1].end_lineno
    return None


def under_checkpoint(facts: Facts, of: SourceSpan, first: int, last: int) -> tuple[Report, Report]:
    """The report of a program as it is, and with some lines of the function ``of`` under a checkpoint at each run.

    RematError where the lines call modules of linen or haiku.
    """
    closed, anew, checkpoint = facts.engine.primal.provenances.closed, Rewriter(), Checkpoint(function="part")

    def rewritten(jaxpr: Any) -> Any:
        return anew(jaxpr, written)

    def inside(eqns: Iterable[Any]) -> Iterator[Any]:
        return (eqn if _jax.is_custom_rule(eqn) else _jax.map_jaxprs(eqn, rewritten) for eqn in eqns)

    def written(jaxpr: Any, _: Renamed) -> Iterator[Any]:
        last_read, number = last_reads(jaxpr.eqns, jaxpr.outvars), 0
        for begin, end in _runs(jaxpr, of, first, last):
            yield from inside(jaxpr.eqns[number:begin])
            eqns, number = jaxpr.eqns[begin:end], end
            later = [var for eqn in eqns for var in eqn.outvars if last_read.get(var, -1) >= end]
            yield from [checkpoint.around(jaxpr, eqns, later)] if later else eqns
        yield from inside(jaxpr.eqns[number:])

    return _report(facts.engine, closed), _report(facts.engine, rewritten(closed))


def _runs(jaxpr: Any, of: SourceSpan, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The equations of a jaxpr that the lines make, each time that they are run by themselves."""
    begin, begun = None, None
    for number, eqn in enumerate(jaxpr.eqns):
        stack = frames(eqn)
        within = [
            code.co_filename == of.file
            and code.co_name == of.function
            and first <= ([*code.co_positions()][instruction // 2][0] or 0) <= last
            for code, instruction in stack
        ]
        here = any(within)
        if here and calls_scoped_modules(stack[: within.index(True)]):
            raise RematError("a module that keeps its parameters in a scope of its own leaks them from a checkpoint.")
        if begin is not None and (not here or stack == begun):
            yield begin, number
            begin = None
        if here and begin is None:
            begin, begun = number, stack
    if begin is not None:
        yield begin, len(jaxpr.eqns)


def _report(engine: Engine, closed: Any) -> Report:
    leaves = engine.primal.signature.arrays
    wrt = tuple(number for number, leaf in enumerate(leaves) if leaf.differentiated)
    with _jax.tracing(_jax.Generation(), engine.primal.remat3, _jax.x64()):
        other = Engine(_jax.as_function(closed), tuple(leaf.value for leaf in leaves), {}, wrt, False)
        return Facts(other).under().report()
