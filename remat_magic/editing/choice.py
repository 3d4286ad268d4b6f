"""Which expressions to name so that just the wanted values are named, and what to call them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from remat_magic.editing.probe import Candidate, is_probe, number_of
from remat_magic.editing.source import Function, Source
from remat_magic.editing.values import Skeleton, Value

__all__ = ["Naming", "Place", "choose", "names_in", "places", "suggested"]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Something that names values: an existing name, or a candidate.

    ``values`` are all that it names; of those that a policy at the chosen place is asked about ``asked`` is true.
    ``rank`` orders places that name the same values: the one next to the operation first.
    """

    name: str
    candidate: Candidate | None
    values: Mapping[Value, bool]
    rank: int


@dataclass(eq=False, slots=True)
class Naming:
    """The places chosen, the values that no place names, and those that are named besides."""

    places: list[Place] = field(default_factory=list)
    missing: list[Value] = field(default_factory=list)
    besides: list[tuple[Place, list[Value]]] = field(default_factory=list)


def places(probed: Skeleton, candidates: Mapping[int, Candidate]) -> list[Place]:
    """What names values in a program that was traced with probes."""
    found: list[Place] = []
    order = {"expression": 1, "argument": 2, "variable": 2, "parameter": 3}
    for rank, (name, values) in enumerate(probed.names.items()):
        if not is_probe(name):
            found.append(Place(name, None, values, rank))
        elif (candidate := candidates.get(number_of(name))) is not None:
            found.append(Place("", candidate, values, rank + 10**6 * order[candidate.kind]))
    return found


def choose(wanted: Iterable[Value], offered: Iterable[Place]) -> Naming:
    """Places that together name all wanted values, and as few others as possible.

    Args:
        wanted: the values, in the order of the program.
        offered: the places to choose from.
    """
    todo = dict.fromkeys(wanted)
    every = set(todo)
    by_value: dict[Value, list[Place]] = {}
    for place in offered:
        for value in place.values:
            if value in todo:
                by_value.setdefault(value, []).append(place)
    chosen = Naming()
    covered: set[Value] = set()

    def cost(place: Place) -> tuple[int, int, int]:
        more = [asked for value, asked in place.values.items() if value not in every]
        return sum(more), place.rank, len(more)

    for value in todo:
        if value in covered:
            continue
        if value not in by_value:
            chosen.missing.append(value)
            continue
        place = min(by_value[value], key=cost)
        chosen.places.append(place)
        covered.update(place.values)
        more = [each for each, asked in place.values.items() if asked and each not in every]
        if more:
            chosen.besides.append((place, more))
    return chosen


# ----------------------------------------------------------------------------------------------------- readable names

_OPERATORS: dict[type[ast.AST], str] = {
    ast.MatMult: "dot",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.LShift: "shift",
    ast.RShift: "shift",
    ast.USub: "neg",
    ast.UAdd: "pos",
    ast.Invert: "not",
    ast.Not: "not",
}


def suggested(candidate: Candidate, used: set[str]) -> str:
    """A readable name for a place that is not among ``used``; it is added to them."""
    base = re.sub(r"[\W_]+", "_", _plain(candidate)).strip("_") or "value"
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    return name


def _plain(candidate: Candidate) -> str:
    if candidate.name:
        return candidate.name
    source, node = candidate.source, candidate.node
    own = _target(source.parents.get(id(node)), node)
    if own:
        return own
    operation = _operation(node)
    above: ast.AST | None = source.parents.get(id(node))
    below: ast.AST = node
    while above is not None and not isinstance(above, Function):
        if isinstance(above, ast.Call) and below is not above.func:
            return f"{_called(above.func)}_{operation}"
        around = _target(above, below)
        if around:
            return f"{around}_{operation}"
        above, below = source.parents.get(id(above)), above
    return f"{_function_name(source, node)}_{operation}"


def _target(parent: ast.AST | None, value: ast.AST) -> str:
    """What a value is assigned to, if it is."""
    match parent:
        case ast.Assign([target], assigned) if assigned is value:
            return _text(target)
        case ast.AnnAssign(target, _, assigned) if assigned is value:
            return _text(target)
        case ast.NamedExpr(target, assigned) if assigned is value:
            return target.id
        case ast.AugAssign(target, _, assigned) if assigned is value:
            return f"{_text(target)}_{_operation(value)}"
        case ast.keyword(str() as name):
            return name
        case ast.Dict(keys, values):
            for key, each in zip(keys, values, strict=True):
                if each is value and isinstance(key, ast.Constant) and isinstance(key.value, str):
                    return key.value
            return ""
        case _:
            return ""


def _text(target: ast.AST) -> str:
    match target:
        case ast.Name(name):
            return name
        case ast.Attribute(_, name):
            return name
        case ast.Subscript(_, ast.Constant(str() as key)):
            return key
        case ast.Tuple(items) | ast.List(items) if len(items) <= 4 and all(isinstance(e, ast.Name) for e in items):
            return "_".join(map(_text, items))
        case _:
            return ""


def _called(callee: ast.AST) -> str:
    match callee:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case ast.Call(inner):
            return _called(inner)
        case _:
            return "call"


def _operation(node: ast.AST) -> str:
    match node:
        case ast.BinOp(_, operator) | ast.UnaryOp(operator):
            return _OPERATORS.get(type(operator), "value")
        case ast.Call(callee):
            return _called(callee)
        case ast.Attribute(_, name):
            return "transpose" if name in ("T", "mT") else name
        case ast.Compare():
            return "compare"
        case ast.Subscript():
            return "item"
        case _:
            return "value"


def _function_name(source: Source, node: ast.AST) -> str:
    around = source.enclosing(node)
    while isinstance(around, ast.Lambda):
        around = source.enclosing(around)
    return around.name if around is not None else "lambda"


def names_in(source: Source) -> set[str]:
    """The strings that a source uses as checkpoint names, as far as they are written out."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ("name" in _called(node.func)):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            inside = (each for argument in arguments for each in ast.walk(argument))
            found |= {each.value for each in inside if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found
