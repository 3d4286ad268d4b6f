"""What in the user's text can be given a name, which of that names just the wanted values, and what to call it.

No traceback says which value an expression has: a call of a library makes many values at one place. So
the function is traced with a probe around each expression, and after each statement that binds variables; a probe gives
the arrays that pass through it names of its own. Names compute nothing. Leave them out, and a program whose values a
plan names, one with probes, and the program itself are the same operations in the same order: a value is known by the
number of the operation that makes it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray, Tracer

from remat_magic import _jax
from remat_magic.editing.source import Function, ParsedText, functions_of
from remat_magic.editing.user_code import UserCode

PROBE = "__remat_magic_probe__"  # the probe's name in the copied namespace
_PREFIX = "remat_magic/probe "


@dataclass(frozen=True, slots=True, eq=False)
class Nameable:
    """An expression or variable that can be given a name.

    An expression is wrapped. A ``variable`` is bound anew: after the statement ``node``, or where the body of the
    function ``node`` starts.
    """

    text: ParsedText
    node: ast.expr | ast.stmt
    variable: str = ""

    @property
    def rank(self) -> int:
        """Orders those that have the same values: the one next to the operation first."""
        return 1 if not self.variable else 3 if isinstance(self.node, Function) else 2


def probe(value: Any, number: int) -> Any:
    """The value, its arrays named by the number of the place; whatever holds no array that is traced is left alone."""
    if isinstance(value, Tracer):
        return checkpoint_name(value, f"{_PREFIX}{number}") if _is_array(value) else value
    if type(value) in (tuple, list, dict) and any(map(_is_array, jax.tree.leaves(value))):
        return jax.tree.map(lambda leaf: probe(leaf, number), value)
    return value


def _is_array(value: Any) -> bool:
    # References to mutable arrays are traced as well, and are no values.
    return isinstance(value, Tracer) and type(jax.typeof(value)) is ShapedArray


def is_probe(name: str) -> bool:
    """Whether a name is one that a probe gave."""
    return name.startswith(_PREFIX)


def probed(code: UserCode) -> tuple[dict[str, ast.Module], list[Nameable]]:
    """The trees of the texts with a probe at all that can be named in the functions that ran, and what these are."""
    trees: dict[str, ast.Module] = {}
    places: list[Nameable] = []
    for file, text in code.texts.items():
        trees[file] = copy.deepcopy(text.tree)
        prober = _Prober(text, trees[file], places)
        functions = functions_of(trees[file])
        for number in sorted({number for (where, _), number in code.codes.items() if where == file}):
            prober.into(functions[number])
        ast.fix_missing_locations(trees[file])
    return trees, places


_VALUES = ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare | ast.Subscript | ast.Attribute | ast.IfExp
# What is inside these is run elsewhere, no expression, or (formatted text) of no use.
_LEFT_OUT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.JoinedStr, ast.pattern)


class _Prober(ast.NodeTransformer):
    """Puts probes into a copy of a text's tree, and adds to ``places`` what they are at."""

    def __init__(self, text: ParsedText, tree: ast.Module, places: list[Nameable]) -> None:
        self._text, self._places = text, places
        self._originals = dict(zip(map(id, ast.walk(tree)), ast.walk(text.tree), strict=True))

    def into(self, function: Any) -> None:
        """Probe what a function does itself, and its parameters."""
        if isinstance(function, ast.Lambda):
            function.body = self.visit(function.body)
            return
        arguments = function.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        start = [self._bind(function, name) for name in names if name not in ("self", "cls")]
        visited = [self.visit(statement) for statement in function.body]
        body = [after for new in visited for after in (new if isinstance(new, list) else [new])]
        at = body_start(function)
        function.body = [*body[:at], *start, *body[at:]]

    def visit(self, node: ast.AST) -> Any:
        """The node with what it holds probed, and itself; several where variables are bound after a statement."""
        if isinstance(node, _LEFT_OUT):
            return node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # the method itself is no value
            node.func.value = self.visit(node.func.value)
            node.args, node.keywords = [*map(self.visit, node.args)], [*map(self.visit, node.keywords)]
        else:
            self.generic_visit(node)
        if isinstance(node, _VALUES) and isinstance(getattr(node, "ctx", None), ast.Load | None):
            return self._call(node, Nameable(self._text, self._original(node)))
        binds = _bound(self._original(node)) if isinstance(node, ast.stmt) else []
        after = [self._bind(node, name) for name in binds]
        return [node, *after] if after else node

    def _original(self, node: ast.AST) -> Any:
        return self._originals[id(node)]

    def _call(self, value: ast.expr, place: Nameable) -> ast.expr:
        self._places.append(place)
        call = ast.Call(ast.Name(PROBE, ast.Load()), [value, ast.Constant(len(self._places) - 1)], [])
        return ast.copy_location(call, value)

    def _bind(self, node: Any, name: str) -> ast.stmt:
        where: Any = node.body[0] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else node
        value = ast.copy_location(ast.Name(name, ast.Load()), where)
        call = self._call(value, Nameable(self._text, self._original(node), name))
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), where)


def body_start(node: Any) -> int:
    """The index of a body's first statement after its docstring."""
    match node.body[0]:
        case ast.Expr(ast.Constant(str())):
            return 1
        case _:
            return 0


def _bound(statement: ast.stmt) -> list[str]:
    """The variables to be named after a statement that binds them; not where naming what it assigns does the same."""
    match statement:
        case ast.Assign([ast.Name()], value) | ast.AnnAssign(_, _, value) if value is None or isinstance(
            value, _VALUES
        ):
            return []
        case ast.Assign(targets):
            pass
        case ast.AnnAssign(target) | ast.AugAssign(target):
            targets = [target]
        case _:
            return []
    nodes = [node for target in targets for node in ast.walk(target)]
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [*dict.fromkeys(stored)]


# ----------------------------------------------------------------------------------------- which values a program names

Value = tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Skeleton:
    """A program without names.

    Attributes:
        operations: of each the primitive and the types of its outputs.
        names: for each name the values that it is given to, in the order of the program, and whether one of the
            place's checkpoints is around them there.
        types: of each named value, as JAX writes it.
    """

    operations: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    names: dict[str, dict[Value, bool]] = field(default_factory=dict)
    types: dict[Value, str] = field(default_factory=dict)

    @staticmethod
    def of(closed: Any, within: Callable[[Any], bool] | None, is_added: Callable[[str], bool]) -> Skeleton:
        """Number the operations of a program, and find what its names are given to.

        ``within`` says which checkpoint equations are those of the place, None where that is the whole program;
        ``is_added`` which names do not belong to the program itself.
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
            outputs: list[Value] = [("operation", number, i) for i, _ in enumerate(eqn.outvars)]
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
                        outputs[i] = outputs[i] if result is None else leaving[result]
            if name is None:
                values.update(zip(eqn.outvars, outputs, strict=True))
        return [of(atom) for atom in jaxpr.outvars]


# ------------------------------------------------------------------------------------------------------ what is named


@dataclass(frozen=True, slots=True, eq=False)
class NameOption:
    """One way to name values: a ``name`` that is there already, or a place that can be given one.

    ``values`` are all that it names; of those that a policy at the chosen place decides about ``values`` has True.
    ``rank`` orders options that name the same values: the one next to the operation first.
    """

    name: str
    nameable: Nameable | None
    values: dict[Value, bool]
    rank: tuple[int, int]

    @property
    def at_place(self) -> set[Value]:
        """The values among these that a policy at the chosen place decides about."""
        return {value for value, within in self.values.items() if within}


def name_options(program: Skeleton, places: Sequence[Nameable]) -> list[NameOption]:
    """What names values in a program that was traced with probes at these places."""
    options: list[NameOption] = []
    for number, (name, values) in enumerate(program.names.items()):
        if is_probe(name):
            place = places[int(name.removeprefix(_PREFIX))]
            options.append(NameOption("", place, values, (place.rank, number)))
        else:
            options.append(NameOption(name, None, values, (0, number)))
    return options


def choose(wanted: Iterable[Value], options: Iterable[NameOption]) -> tuple[list[NameOption], set[Value]]:
    """Options that together name all wanted values, given in program order, and few others; and what none names."""
    wanted = dict.fromkeys(wanted)
    by_value: dict[Value, list[NameOption]] = {}
    for option in options:
        for value in option.values.keys() & wanted.keys():
            by_value.setdefault(value, []).append(option)
    chosen, covered = list[NameOption](), set[Value]()

    def cost(option: NameOption) -> tuple[int, tuple[int, int], int]:
        return len(option.at_place - wanted.keys()), option.rank, len(option.values.keys() - wanted.keys())

    for value in wanted:
        if value not in covered and value in by_value:
            chosen.append(min(by_value[value], key=cost))
            covered.update(chosen[-1].values)
    return chosen, wanted.keys() - covered


def grouped(program: Skeleton, order: Iterable[str], options: Sequence[NameOption]) -> dict[str, NameOption]:
    """For each value that an option names in the source, by its name in a plan, that option.

    An option that names few values is preferred, and no two name one value. ``program`` has all its values named, in
    this ``order``.
    """
    best: dict[Value, str] = {}
    for key in order:
        for value in program.names.get(key, {}):
            before = best.get(value)
            if before is None or len(program.names[key]) <= len(program.names[before]):
                best[value] = key
    groups: dict[str, NameOption] = {}
    for option in sorted(options, key=lambda option: (len(option.at_place), option.rank)):
        values = option.at_place
        keys = {best[value] for value in values if value in best}
        whole = all(program.names[key].keys() <= values for key in keys)
        if values and values <= best.keys() and keys.isdisjoint(groups) and whole:
            groups.update(dict.fromkeys(keys, option))
    return groups


# ----------------------------------------------------------------------------------------------------- readable names


def suggested(nameable: Nameable, used: set[str]) -> str:
    """A name for an expression or variable that is not among ``used``; it is added to them.

    It is the variable's, that of what the expression is assigned to, or that of the function that it stands in.
    """
    text, node, base = nameable.text, nameable.node, nameable.variable
    match text.parents.get(id(node)):
        case ast.Assign([ast.Name(target)]) | ast.NamedExpr(ast.Name(target)) if not base:
            base = target
        case _:
            around = text.enclosing(node)
            while isinstance(around, ast.Lambda):
                around = text.enclosing(around)
            base = base or getattr(around, "name", "value").strip("_") or "value"
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    return name
