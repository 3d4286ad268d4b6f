"""The uses of flax's own scans in the source: which may be the loop that an equation is."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from remat_magic import _jax
from remat_magic._jax.primitives import is_random
from remat_magic.editing.parsed_text import ParsedText
from remat_magic.editing.user_code import UserCode, referent
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import scan_in

__all__ = ["LiftedLoop", "lifted_loops"]


@dataclass(frozen=True, slots=True, eq=False)
class LiftedLoop:
    """A use of flax's ``nn.scan`` or ``nnx.scan`` in a text.

    Attributes:
        text: the text.
        library: whose, by its module.
        named: the expression that names it.
        given: the names of the parameters that it is given there, in their order; of what it is applied to, too.
        positional: how many of these are given by position.
        is_applied: whether it is given what it is applied to, and not only returns what takes that.
        axes: of nnx, what each argument is, and each result: "carry", "scan", or "" for neither; None for the results:
            there is one, the carry.
        of_function: of linen, whether it is applied to a function and no class.
        length: how many steps it was traced with.
        is_reversed: whether it begins at the end.
        draws: whether its steps draw random numbers.
        collections: of linen, the variables that it scans over, where the text has their names; None where it has not.
    """

    text: ParsedText
    library: str
    named: ast.expr
    given: tuple[str, ...]
    positional: int
    is_applied: bool
    axes: tuple[tuple[str, ...], tuple[str, ...] | None]
    of_function: bool
    length: int
    is_reversed: bool
    draws: bool
    collections: frozenset[str] | None

    @property
    def where(self) -> str:
        """What to call it in a sentence."""
        return f"the loop at line {self.named.lineno} of {self.text.place}"


def lifted_loops(code: UserCode, eqn: Any, frames: Sequence[CodeType]) -> list[LiftedLoop]:
    """The uses of flax's scans in the source of which an equation can be; those in the function that calls it first.

    Args:
        code: what ran.
        eqn: the equation of a scan.
        frames: the code that made it, innermost first.
    """
    library = scan_in(*(frame.co_filename for frame in frames))
    loops = [*_in_texts(code, library, eqn)] if library else []
    caller = next((frame for frame in frames if frame.co_filename in code.texts), None)
    return sorted(loops, key=lambda loop: caller is None or not _is_in(loop, caller))


def _is_in(loop: LiftedLoop, caller: CodeType) -> bool:
    around = loop.text.enclosing(loop.named)
    return caller.co_filename == loop.text.file and getattr(around, "name", "") == caller.co_name


def _in_texts(code: UserCode, library: str, eqn: Any) -> Iterator[LiftedLoop]:
    scan = sys.modules[library].scan
    parameters = tuple(inspect.signature(scan).parameters)
    for text in code.texts.values():
        scope = code.scope(text.file)
        for named in ast.walk(text.tree):
            if not isinstance(named, ast.Name | ast.Attribute) or referent(named, scope) is not scan:
                continue
            args, keywords, target, axes = list[ast.expr](), list[ast.keyword](), None, None
            is_applied = True
            if isinstance(call := text.parents.get(id(named)), ast.Call):
                args, keywords = call.args if call.func is named else call.args[1:], call.keywords
                target, is_applied = next(iter(args), None), bool(args) or call.func is not named
                above = text.parents.get(id(call))
                if target is None and isinstance(above, ast.Call) and above.func is call:
                    target = next(iter(above.args), None)
                elif target is None and is_applied and call not in getattr(above, "decorator_list", []):
                    continue  # what is given to it later is not seen
            axes = _axes(keywords, sys.modules[library]) if library == "flax.nnx" else ((), None)
            given = (*parameters[: len(args)], *(keyword.arg or "" for keyword in keywords))
            of_function = isinstance(target, ast.Lambda) or _is_function(text, target)
            length, is_reversed = _jax.scan_length(eqn), _jax.is_reversed(eqn)
            if axes is not None and "" not in given:
                yield LiftedLoop(
                    text,
                    library,
                    named,
                    given,
                    len(args),
                    is_applied,
                    axes,
                    of_function,
                    length,
                    is_reversed,
                    any(is_random(inner) for body in _jax.bodies(eqn) for _, inner in walk(body.jaxpr)),
                    _collections(keywords),
                )


def _collections(keywords: Sequence[ast.keyword]) -> frozenset[str] | None:
    axes = next((keyword.value for keyword in keywords if keyword.arg == "variable_axes"), ast.Dict([], []))
    keys = axes.keys if isinstance(axes, ast.Dict) else [None]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return frozenset(names) if len(names) == len(keys) else None


def _is_function(text: ParsedText, target: ast.expr | None) -> bool:
    names = {getattr(function, "name", "") for function in text.functions}
    return isinstance(target, ast.Name) and target.id in names


def _axes(keywords: Sequence[ast.keyword], nnx: Any) -> tuple[tuple[str, ...], tuple[str, ...] | None] | None:
    """``LiftedLoop.axes`` of nnx; None where something is scanned over otherwise than along its first axis."""
    given = {keyword.arg: keyword.value for keyword in keywords}

    def kind(axis: ast.expr) -> str | None:
        match axis:
            case ast.Constant(0):
                return "scan"
            case ast.Constant(None):
                return ""
            case ast.Attribute(attr=name) | ast.Name(name) if name == nnx.Carry.__name__:
                return "carry"
            case _:
                return None

    def kinds(axes: ast.expr | None) -> tuple[str | None, ...]:
        if axes is None:  # as nnx has it
            return "carry", "scan"
        return tuple(map(kind, axes.elts)) if isinstance(axes, ast.Tuple) else (kind(axes),)

    into, out = (kinds(given.get(name)) for name in ("in_axes", "out_axes"))
    alone = [not isinstance(given.get(name), ast.Tuple | None) for name in ("in_axes", "out_axes")]
    if None in (*into, *out) or alone[0] or (alone[1] and out != ("carry",)):
        return None
    return tuple(map(str, into)), None if alone[1] else tuple(map(str, out))
