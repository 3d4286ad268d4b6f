"""A called function in parts: ``head in 4`` is a map over fourths of its examples, each part under a checkpoint.

The program is traced for a part of the batch too, and the equations of a call are walked there and here together: by
``_jax.followed`` it is known what the call makes of the examples, and where it is not, it is refused. The map is of
the call's equations in the smaller program.
"""

from __future__ import annotations

import ast
import linecache
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp

from remat_magic import _jax
from remat_magic.engine.calls import Interval, called_from
from remat_magic.jaxprs.provenance import Spans
from remat_magic.parsing import parse_source


def place_of(refused: _jax.Refused) -> str:
    """Where what was not followed stands, to be put behind what is said of it; empty where that is not known."""
    spans = (Spans().of(_jax.traceback_of(eqn)) for eqn in refused.eqns)
    span = next(filter(None, spans), None)
    return f" ({span.place}: `{span.expression}`)" if span else ""


def wide(aval: Any) -> Any:
    """The type that values are added up in: floating-point numbers of fewer bits in float32."""
    return jnp.promote_types(aval.dtype, jnp.float32) if _jax.is_inexact(aval) else aval.dtype


def together(value: Any, share: _jax.Share | None, aval: Any) -> Any:
    """A value of the whole, from those of all parts one after another along a first axis, or from their sum."""
    stacked = value.shape != aval.shape
    if share is None:
        return value[-1] if stacked else value
    if share.kind == "axis":
        value = _jax.joined(value, share.axis)
    elif stacked:
        value = jnp.sum(value, 0, dtype=wide(value))
    return (value if share.weight == 1.0 else value * share.weight).astype(aval.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class PartedCall:
    """A call that is known to be what is made of its parts, of which there are ``parts``.

    ``interval`` is the call in the program for a part of the batch, where more is known of it. ``whole`` are the call's
    equations in the program itself, as an open jaxpr of their own; ``given`` is what the inputs of that are to those of
    a part, ``made`` what its outputs are. ``names`` are the parameters that the inputs were given to, empty for those
    that the function reads otherwise. ``as_told``: it returns just these outputs, and what it reads is the same
    constant in both programs.
    """

    interval: Interval
    whole: Any
    given: Sequence[_jax.Share | None]
    made: Sequence[_jax.Share | None]
    parts: int
    names: Sequence[str]
    as_told: bool

    @classmethod
    def of(cls, interval: Interval, whole: Any, part: Any, parts: int, *, same: bool) -> PartedCall:
        """That of the equations of a call, by those of the same call in the program for a part of the batch.

        It is refused where it is not known what the call makes of the examples. ``same``: it reads equal constants.
        """
        pairs = [(one.aval, other.aval) for one, other in zip(whole.invars, part.invars, strict=False)]
        axes = [_jax.differing(*pair) for pair in pairs]
        if len(whole.invars) != len(part.invars) or all(axis is None for axis in axes):
            raise _jax.Refused("nothing that it takes has the batch's size", *whole.eqns)
        if any(n is not None and a.shape[n] != parts * b.shape[n] for n, (a, b) in zip(axes, pairs, strict=True)):
            raise _jax.Refused("what it takes is no multiple of what it takes for a part of the batch", *whole.eqns)
        given = [None if axis is None else _jax.Share("axis", axis) for axis in axes]
        made = _jax.followed(_jax.closed(whole), _jax.closed(part), given, parts)
        if any(share is not None and share.kind not in ("sum", "axis", "zero") for share in made):
            raise _jax.Refused("what it returns depends on how many examples there are", *whole.eqns)
        made = [None if share is not None and share.kind == "zero" else share for share in made]
        if not any(made):
            raise _jax.Refused("nothing that it returns is made of the examples", *whole.eqns)
        names = [interval.given.get(var, "") for var in part.invars]
        returned = interval.is_known and {*interval.returned} == {*part.outvars}
        return cls(interval, whole, given, made, parts, names, same and returned)

    def mapped(self, body: Any) -> list[Any]:
        """The equations of a map of an open jaxpr of a part over all of the inputs."""
        evaluate = _jax.as_function(_jax.closed(body))

        def cast(value: Any, dtype: Any) -> Any:
            return value if value.dtype == dtype else value.astype(dtype)

        def whole(*values: Any) -> list[Any]:
            pairs = [*zip(values, self.given, strict=True)]
            cut = [_jax.cut(value, share.axis, self.parts) for value, share in pairs if share is not None]
            # Of what all parts read a map adds up the gradients, in its own type.
            held = [cast(value, wide(value)) if share is None else None for value, share in pairs]

            def part(mine: Sequence[Any]) -> list[Any]:
                examples, rows = iter(mine), zip(held, body.invars, strict=True)
                return evaluate(*(next(examples) if it is None else cast(it, var.aval.dtype) for it, var in rows))

            rows = zip(jax.lax.map(part, cut), self.made, self.whole.outvars, strict=True)
            return [together(value, share, var.aval) for value, share, var in rows]

        eqns, results = _jax.rearranged(self.whole.eqns[0], whole, self.whole.invars)
        outputs = dict(zip(results, self.whole.outvars, strict=True))
        return [eqn.replace(outvars=[outputs.get(var, var) for var in eqn.outvars]) for eqn in eqns]

    def code(self, option: str | None) -> str:
        """What to write in the place of the call; empty where that is not known.

        ``option`` are the further arguments of the checkpoint on a part; None: there is none.
        """
        rows = [*zip(self.names, self.given, (var.aval for var in self.whole.invars), strict=True)]
        cut = dict.fromkeys(name for name, share, _ in rows if share is not None)
        summed = dict.fromkeys(name for name, share, aval in rows if share is None and wide(aval) != aval.dtype)
        alike = {share for name, share, _ in rows if name in cut}
        call = self._call() if self.as_told else None
        if call is None or len(alike) != 1 or len({*self.made}) != 1 or not {*cut, *summed} <= call[2].keys():
            return ""
        if {*cut} & {*summed} or not all(_jax.is_inexact(aval) for name, _, aval in rows if name in summed):
            return ""
        given, made, (module, called, texts, count) = alike.pop(), self.made[0], call
        assert given is not None
        assert made is not None
        k, axis = self.parts, given.axis
        x, w, m, sums = (unused(name, (module, called, *texts.values())) for name in ("x", "w", "m", "wide"))
        xs, ws = (_tuple([texts[name] for name in names]) for names in (cut, summed))
        for names, of in ((cut, x), (summed, w)):
            for n, name in enumerate(names):
                texts[name] = of if len(names) == 1 else f"{of}[{n}]"
        once = ""  # what is computed for an argument that is not cut
        for name, text in texts.items():
            if name not in {*cut, *summed} and not _PLAIN.fullmatch(text):
                texts[name] = unused(name, (module, called, x, w, m, *texts.values()))
                once += f", {texts[name]}={text}"
        inner = ", ".join(text if n < count else f"{name}={text}" for n, (name, text) in enumerate(texts.items()))
        checkpoint, mapped, arguments = _MAPS.get(self.interval.callee.module, _MAPS[""])
        taken, call = f"{x}{f', {w}' * bool(summed)}{once}", f"{m * bool(module)}{called}({inner})"
        part = arguments.format(x=taken, m=m, module=module, call=call)
        part = part if option is None else f"{checkpoint}({part}{option})"
        if summed:  # what is added up of them is in more bits
            part = f"lambda {x}: ({part})({x}, jax.tree.map(lambda a, b: a.astype(b.dtype), {sums}, {ws}))"
        apart = f"a.reshape({k}, -1, *a.shape[1:])" if not axis else f"jax.numpy.stack(jax.numpy.split(a, {k}, {axis}))"
        if made.kind == "axis":
            joined = "a.reshape(-1, *a.shape[2:])" if not made.axis else f"jax.numpy.concatenate(a, {made.axis})"
        else:
            joined = "a.mean(0)" if math.isclose(made.weight * k, 1.0) else "a.sum(0)"
        if made.weight != 1.0 and joined != "a.mean(0)":
            joined += f" * {made.weight!r}"
        mapped = mapped.format(part=part, module=module, xs=f"jax.tree.map(lambda a: {apart}, {xs})")
        code = f"jax.tree.map(lambda a: {joined}, {mapped})"
        if summed:
            of = f'jax.tree.map(lambda a: a.astype(jax.numpy.promote_types(a.dtype, "float32")), {ws})'
            code = f"(lambda {sums}: {code})({of})"
        return code

    def _call(self) -> tuple[str, str, dict[str, str], int] | None:
        """A call as text: the module, what is called of it, arguments by parameter, how many are by position.

        The module is empty for what can be called in a map as it is. None where it is no plain call of the function by
        its name.
        """
        callee, eqn = self.interval.callee, self.whole.eqns[0]
        called, bound = called_from(eqn, callee.who), callee.module in _MAPS and bool(callee.module)
        if called is None or callee.within or all("vmap(" in _jax.name_stack(it) for it in self.whole.eqns):
            return None
        source, call, _ = call_at(*called)
        if not isinstance(call, ast.Call) or not isinstance(
            call.func, (ast.Name, ast.Attribute, ast.Call)[: 2 + bound]
        ):
            return None
        own, name = callee.who[0].rpartition(".")[2], getattr(call.func, "attr", getattr(call.func, "id", ""))
        positions = callee.parameters[callee.parameters[:1] == ("self",) :]
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        given = {**dict(zip(positions, call.args, strict=False)), **by_name}
        starred = None in by_name or any(isinstance(arg, ast.Starred) for arg in call.args)
        if own not in (name, "__call__") or starred or len(given) < len(call.args) + len(call.keywords):
            return None

        def text(node: ast.expr) -> str:
            return ast.get_source_segment(source, node) or ast.unparse(node)

        texts = {str(name): text(node) for name, node in given.items()}
        if not bound:
            return "", text(call.func), texts, len(call.args)
        if isinstance(call.func, ast.Attribute) and own == name:
            return text(call.func.value), f".{own}", texts, len(call.args)
        return text(call.func), "", texts, len(call.args)


_PLAIN = re.compile(r"[\w.\[\]'\"]+")  # a name, a number, an attribute, an item: what takes no work to have again
# By the library of a module: its checkpoint, how a function is mapped, and the function that is.
_MAPS = {
    "": ("jax.checkpoint", "jax.lax.map({part}, {xs})", "lambda {x}: {call}"),
    "haiku": ("hk.remat", "hk.map({part}, {xs})", "lambda {x}, {m}={module}: {call}"),
    "flax.linen": (
        "nn.remat",
        'nn.scan({part}, variable_broadcast=True, split_rngs={{"params": False}})({module}, None, {xs})[1]',
        "lambda {m}, _, {x}: (None, {call})",
    ),
}


def _tuple(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def unused(name: str, texts: Sequence[str]) -> str:
    """A name that no text has."""
    while any(re.search(rf"\b{name}\b", text) for text in texts):
        name += "_"
    return name


def call_at(code: CodeType, instruction: int) -> tuple[str, ast.Call | None, ast.stmt | None]:
    """The text that an instruction is of, the call that it is, and the innermost statement that this is in."""
    source, found = "".join(linecache.getlines(code.co_filename)), None
    position, module = [*code.co_positions()][instruction // 2], parse_source(source)
    for node in ast.walk(module) if module else ():
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt) and part.lineno <= (position[0] or 0) <= (part.end_lineno or 0):
                found = part
    for node in ast.walk(found) if found else ():
        where = [getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset")]
        if isinstance(node, ast.Call) and where == [*position]:
            return source, node, found
    return source, None, found
