"""Which expressions to name so that just the wanted values are named, and what to call them.

Names compute nothing. Leave them out, and a program whose values a plan names, one whose expressions are named for a
probe, and the program itself are the same operations in the same order: a value is known by the number of the operation
that makes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_magic import _jax
from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.editing.probes import Nameable, is_probe, number_of

__all__ = ["ChosenNames", "NameOption", "Skeleton", "choose", "grouped", "name_options", "suggested", "used_names"]

Value = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Skeleton:
    """A program without names.

    Attributes:
        operations: of each the primitive and the types of its outputs.
        names: for each name the values that it is given to, in the order of the program, and whether one of the
            checkpoints that were asked about is around them there.
        types: of each named value, as JAX writes it.
    """

    operations: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    names: dict[str, dict[Value, bool]] = field(default_factory=dict)
    types: dict[Value, str] = field(default_factory=dict)

    @staticmethod
    def of(closed: Any, within: Callable[[Any], bool] | None, is_added: Callable[[str], bool]) -> Skeleton:
        """Number the operations of a program, and find what its names are given to.

        Args:
            closed: a closed jaxpr.
            within: tells the checkpoint equations that are asked about; None where it is the whole program.
            is_added: tells the names that do not belong to the program itself.
        """
        skeleton = Skeleton()
        jaxpr = _jax.open_jaxpr(closed)
        arguments: list[Value] = [("argument", i) for i, _ in enumerate(jaxpr.invars)]
        skeleton._add(jaxpr, arguments, within is None, within or (lambda _: False), is_added)
        return skeleton

    def _add(
        self,
        jaxpr: Any,
        inputs: Sequence[Value],
        inside: bool,
        within: Callable[[Any], bool],
        is_added: Callable[[str], bool],
    ) -> list[Value]:
        """Add the operations of a jaxpr whose inputs are these; its outputs."""
        number = len(self.operations)
        values: dict[Any, Value] = {var: ("constant", number, i) for i, var in enumerate(jaxpr.constvars)}
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def of(atom: Any) -> Value:
            return ("literal",) if _jax.is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            name = _jax.checkpoint_name_of(eqn)
            operands = [of(atom) for atom in eqn.invars]
            if name is not None:
                (value,) = operands
                values[eqn.outvars[0]] = value
                self.types[value] = _jax.type_text(eqn.outvars[0].aval)
                named = self.names.setdefault(name, {})
                named[value] = named.get(value, False) or inside
                if is_added(name):
                    continue
            number = len(self.operations)
            types = tuple(_jax.type_text(var.aval) for var in eqn.outvars)
            self.operations.append((_jax.primitive_name(eqn), types))
            results: list[Value] = [("operation", number, i) for i, _ in enumerate(eqn.outvars)]
            deeper = inside or (_jax.is_checkpoint(eqn) and within(eqn))
            for which, body in enumerate(_jax.bodies(eqn)):
                # A loop's inputs are other values in each iteration; those of a call are what it is called with.
                entering: list[Value] = [
                    ("input", number, which, i) if body.kind == "loop" or operand is None else operands[operand]
                    for i, operand in enumerate(body.operands)
                ]
                leaving = self._add(body.jaxpr, entering, deeper, within, is_added)
                if body.kind == "call":
                    for i, result in enumerate(body.results):
                        results[i] = results[i] if result is None else leaving[result]
            if name is None:
                values.update(zip(eqn.outvars, results, strict=True))
        return [of(atom) for atom in jaxpr.outvars]


# ------------------------------------------------------------------------------------------------------ what is named


@dataclass(frozen=True, slots=True, eq=False)
class NameOption:
    """One way to name values: a ``name`` that is there already, or a place that can be given one.

    ``values`` are all that it names; of those that a policy at the chosen place is asked about ``values`` has True.
    ``rank`` orders options that name the same values: the one next to the operation first.
    """

    name: str
    nameable: Nameable | None
    values: dict[Value, bool]
    rank: tuple[int, int]

    @property
    def asked(self) -> set[Value]:
        """The values that a policy at the chosen place is asked about."""
        return {value for value, asked in self.values.items() if asked}


@dataclass(eq=False, slots=True)
class ChosenNames:
    """The options chosen, the values that none names, and those that an option names besides."""

    options: list[NameOption] = field(default_factory=list)
    missing: list[Value] = field(default_factory=list)
    besides: dict[NameOption, set[Value]] = field(default_factory=dict)


def name_options(program: Skeleton, places: Sequence[Nameable]) -> list[NameOption]:
    """What names values in a program that was traced with probes at these places."""
    options: list[NameOption] = []
    for number, (name, values) in enumerate(program.names.items()):
        if is_probe(name):
            place = places[number_of(name)]
            options.append(NameOption("", place, values, (place.rank, number)))
        else:
            options.append(NameOption(name, None, values, (0, number)))
    return options


def choose(wanted: Iterable[Value], options: Iterable[NameOption]) -> ChosenNames:
    """Options that together name all wanted values, and as few others as possible.

    Args:
        wanted: the values, in the order of the program.
        options: what to choose from.
    """
    wanted = dict.fromkeys(wanted)
    by_value: dict[Value, list[NameOption]] = {}
    for option in options:
        for value in option.values.keys() & wanted.keys():
            by_value.setdefault(value, []).append(option)
    chosen = ChosenNames()
    covered: set[Value] = set()

    def cost(option: NameOption) -> tuple[int, tuple[int, int], int]:
        return len(option.asked - wanted.keys()), option.rank, len(option.values.keys() - wanted.keys())

    for value in wanted:
        if value in covered:
            continue
        if value not in by_value:
            chosen.missing.append(value)
            continue
        option = min(by_value[value], key=cost)
        chosen.options.append(option)
        covered.update(option.values)
        if besides := option.asked - wanted.keys():
            chosen.besides[option] = besides
    return chosen


def grouped(program: Skeleton, keys: Iterable[str], options: Sequence[NameOption]) -> dict[str, NameOption]:
    """For each value that an option names, by its name in a plan, that option.

    An option that names few values is preferred, and no two name one value.

    Args:
        program: the program with all its values named.
        keys: these names, in the order of the program.
        options: what names values in the source.
    """
    best: dict[Value, str] = {}
    for key in keys:
        for value in program.names.get(key, {}):
            before = best.get(value)
            if before is None or len(program.names[key]) <= len(program.names[before]):
                best[value] = key
    groups: dict[str, NameOption] = {}
    for option in sorted(options, key=lambda option: (len(option.asked), option.rank)):
        asked = option.asked
        members = {best[value] for value in asked if value in best}
        if (
            asked
            and asked <= best.keys()
            and members.isdisjoint(groups)
            and all(program.names[key].keys() <= asked for key in members)
        ):
            groups.update(dict.fromkeys(members, option))
    return groups


# ----------------------------------------------------------------------------------------------------- readable names

_OPERATIONS = {"matmult": "dot", "mult": "mul", "usub": "neg", "uadd": "pos", "invert": "not"}


def suggested(nameable: Nameable, used: set[str]) -> str:
    """A readable name for an expression or variable that is not among ``used``; it is added to them."""
    base = re.sub(r"[\W_]+", "_", nameable.variable or _described(nameable.text, nameable.node)).strip("_") or "value"
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    return name


def _described(text: ParsedText, node: ast.AST) -> str:
    """What an expression is assigned to; else its operation, with what that is given to or stands in."""
    parents = text.parents
    if target := _target(parents.get(id(node)), node):
        return target
    operation = _operation(node)
    below, above = node, parents.get(id(node))
    while above is not None and not isinstance(above, Function):
        is_argument = isinstance(above, ast.Call) and below is not above.func
        if around := _operation(above) if is_argument else _target(above, below):
            return f"{around}_{operation}"
        below, above = above, parents.get(id(above))
    function = text.enclosing(node)
    while isinstance(function, ast.Lambda):
        function = text.enclosing(function)
    return f"{'lambda' if function is None else function.name}_{operation}"


def _target(parent: ast.AST | None, value: ast.AST) -> str:
    """What a value is assigned to, if it is."""
    match parent:
        case ast.Assign([target], assigned) | ast.AnnAssign(target, _, assigned) | ast.NamedExpr(target, assigned) if (
            assigned is value
        ):
            return _text(target)
        case ast.AugAssign(target, _, assigned) if assigned is value:
            return f"{_text(target)}_{_operation(value)}"
        case ast.keyword(str() as name):
            return name
        case ast.Dict(keys, values):
            key = next((key for key, item in zip(keys, values, strict=True) if item is value), None)
            return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        case _:
            return ""


def _text(target: ast.AST) -> str:
    match target:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case ast.Subscript(_, ast.Constant(str() as key)):
            return key
        case ast.Tuple(items) | ast.List(items) if len(items) <= 4 and {*map(type, items)} == {ast.Name}:
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
            name = type(operator).__name__.lower().removeprefix("bit")
            return _OPERATIONS.get(name, name)
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


def used_names(text: ParsedText) -> set[str]:
    """The strings that a text uses as checkpoint names, as far as they are written out."""
    names: set[str] = set()
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Call) and "name" in _called(node.func):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            values = (getattr(part, "value", None) for argument in arguments for part in ast.walk(argument))
            names |= {value for value in values if isinstance(value, str)}
    return names
