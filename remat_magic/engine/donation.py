"""Donating what a training step gives back anew: which arguments, how that is written, and a step that does it."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax, libraries
from remat_magic.engine.gradients import half_of
from remat_magic.engine.signature import Bound, function_name
from remat_magic.engine.steps import Step
from remat_magic.jaxprs.straight_line import StraightLines
from remat_magic.jaxprs.walk import LiveEquations
from remat_magic.parsing import parse_expression, parse_source

_LEAST = 0.01  # of all that comes back: what is less, as a key or a counter, is not worth that the caller loses it
_JITS = ("jit", "filter_jit", "pjit")  # what they are called, in whatever module


@dataclass(frozen=True, slots=True)
class Donation:
    """Arguments of a training step to donate besides those that it donates as it is written.

    Attributes:
        names: what the step calls them.
        positions: the numbers that all that is donated then has in a call of what is jitted.
        keywords: the names of what cannot be passed by position.
        before: those that are donated as it is written.
        where: the file and the line that define the step.
        option: for what equinox jits, which knows all arguments, or all but the first, the value of ``donate``.
        code: what to write.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    keywords: tuple[str, ...]
    before: tuple[str, ...] = ()
    where: tuple[str, int] = ("", 0)
    option: str = ""
    code: str = ""

    def written(self, jit: ast.expr | None) -> tuple[str, str]:
        """The option that donates them for an expression that jits, and the text of its value, others included."""
        if self.option:
            return "donate", f'"{self.option}"'
        kinds = {(keyword.arg or "").partition("_")[2] for keyword in getattr(jit, "keywords", ())}
        named = bool(self.keywords) or ("argnames" in kinds and "argnums" not in kinds)
        name = "donate_argnames" if named else "donate_argnums"
        texts = [f'"{name}"' for name in (*self.before, *self.names)] if named else [*map(str, self.positions)]
        return name, f"({', '.join(texts)}{',' * (len(texts) == 1)})"

    def around(self, step: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
        """A step jitted as another one is, which donates them."""
        own = {"donate": self.option, "donate_argnums": self.positions, "donate_argnames": self.keywords}
        chosen = {name: value for name, value in own.items() if value and bool(self.option) == (name == "donate")}
        return libraries.jit_like(like)(step, **chosen)


def donation(step: Step, bound: Bound) -> Donation | None:
    """What of a step's arguments comes back among its results, leaf by leaf, and is not donated; None where nothing.

    Arguments that come back as they were are left out, and so is an array that the gradient only reads: it is of the
    batch, and its type is a result's by chance.

    ``bound`` has the arguments that the step holds by itself, so that its caller does not give them.
    """
    fun, leaves = step.given.fun, step.given.signature.arrays
    bound_places = {*range(len(bound.args)), *bound.kwargs}
    arguments: dict[str, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if (leaf.argument if leaf.position is None else leaf.position) not in bound_places:
            arguments.setdefault(leaf.argument, []).append(number)
    donated = {name for name, numbers in arguments.items() if all(step.donated[number] for number in numbers)}
    back = _coming_back(step, arguments)
    sizes = {name: sum(_jax.nbytes(leaves[number].value) for number in arguments[name]) for name in back}
    names = [name for name in back if name not in donated and sizes[name] >= _LEAST * sum(sizes.values())]
    if not names:
        return None
    option, first = "", next(iter(arguments))
    if libraries.is_jitted_by_equinox(fun):
        option = "all" if first in names else "all-except-first"
        names = [name for name in arguments if name != first or option == "all"]
    parameters = inspect.signature(fun).parameters.values()
    order = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    # What is to be jitted holds what is bound; what is jitted is given it.
    shift = len(bound.args) if libraries.unjitted(fun) is fun else 0
    places = {name: leaves[numbers[0]].position for name, numbers in arguments.items()}
    places |= {name: order.index(name) for name, place in places.items() if place is None and name in order}
    wanted = [name for name in arguments if name in donated or name in names]
    positions = sorted(place - shift for name in wanted if (place := places[name]) is not None)
    keywords = [name for name in wanted if places[name] is None]
    before = tuple(name for name in arguments if name in donated)
    own = getattr(inspect.unwrap(fun), "__code__", None)
    where = ("", 0) if own is None else (own.co_filename, own.co_firstlineno)
    found = Donation(tuple(names), tuple(positions), tuple(keywords), before, where, option)
    code = _code(found, function_name(fun))
    return replace(found, code=code) if code else None


def _coming_back(step: Step, arguments: Mapping[str, Sequence[int]]) -> list[str]:
    """The arguments whose arrays follow one another among the results, in their order, and not as they were."""
    flat = StraightLines(LiveEquations(_jax.open_jaxpr(step.closed)), lambda eqn: half_of(eqn) is not None)(step.closed)
    # The settings of a module come back as constants, between its arrays.
    places = [place for place, out in enumerate(step.closed.jaxpr.outvars) if not _jax.is_literal(out)]
    inputs, made, back = {*flat.inputs}, [flat.outputs[place] for place in places], list[str]()
    left: list[Any] = [_kind(step.closed.out_avals[place]) for place in places]

    def is_read_only(numbers: Sequence[int]) -> bool:
        return all(step.roles[number] == "batch" for number in numbers)

    for name, numbers in sorted(arguments.items(), key=lambda item: (is_read_only(item[1]), -len(item[1]))):
        kinds = [_kind(step.given.types[number]) for number in numbers]
        own = [flat.inputs[number] for number in numbers]
        if len(own) == 1 and is_read_only(numbers):
            continue
        for start in range(len(left) - len(own) + 1):
            there = slice(start, start + len(own))
            others = (new for new, old in zip(made[there], own, strict=True) if new != old)
            if left[there] == kinds and own != made[there] and inputs.isdisjoint(others):
                left[there] = [None] * len(own)
                back.append(name)
                break
    return [name for name in arguments if name in back]


def _kind(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype


# ---------------------------------------------------------------------------------------------------- how it is written


def jits(tree: ast.AST, name: str, line: int = 0) -> list[ast.expr]:
    """The expressions of a text that jit a function of a name, or what a function around it returns.

    Each is a call of a ``jit``, of ``partial`` with one, or of what makes one with options; or the bare name of one.
    Where the function that begins on a line has them as decorators, no others are meant.
    """
    made_by, found = {name}, list[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(getattr(inner, "name", None) == name for inner in ast.walk(node)):
                made_by.add(node.name)
            if node.name == name:
                own = [decorator for decorator in node.decorator_list if is_jit(decorator)]
                if own and line == min(decorator.lineno for decorator in node.decorator_list):
                    return own
                found += own
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and is_jit(node.func) and _called(node.args[0]) in made_by:
            found.append(node.func if isinstance(node.func, ast.Call) else node)
    return found


def is_jit(node: ast.expr) -> bool:
    """Whether an expression is a ``jit``, by its name, or one with options."""
    if isinstance(node, ast.Call):
        return is_jit(node.args[0]) if _last(node.func) == "partial" and node.args else is_jit(node.func)
    return _last(node) in _JITS


def _last(node: ast.expr) -> str:
    """What a name, or an attribute, or a lambda is called."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
        case _:
            return "<lambda>" if isinstance(node, ast.Lambda) else ""


def _called(node: ast.expr) -> str:
    """The name of the function that an expression is, is made by, or is a method or a ``partial`` of."""
    while isinstance(node, ast.Call):
        node = node.args[0] if _last(node.func) == "partial" and node.args else node.func
    return _last(node)


def _code(donated: Donation, name: str) -> str:
    """What to write, as the step is jitted in its own file or cell; empty where that has it already.

    It has it where the step was traced without its jit. Where its jit is not seen, the code is a new one.
    """
    file, line = donated.where
    tree = parse_source("".join(linecache.getlines(file)))
    found = [] if tree is None else jits(tree, name, line)
    jit = found[0] if len(found) == 1 else None
    option, value = donated.written(jit)
    after = f"donates {', '.join(donated.names)}"
    if jit is None:
        name = name if name.isidentifier() else "step"
        return f"{name} = {'eqx.filter_jit' if donated.option else 'jax.jit'}({name}, {option}={value})  # {after}"
    donate = ast.keyword(option, parse_expression(value))
    func, args, options = (jit.func, jit.args, jit.keywords) if isinstance(jit, ast.Call) else (jit, [], [])
    if ast.dump(donate) in map(ast.dump, options):
        return ""
    call = ast.Call(func, args, [donate, *(other for other in options if other.arg != option)])
    decorators = [part for node in ast.walk(tree) for part in getattr(node, "decorator_list", ())] if tree else []
    at, on = ("@", f"on {name}; ") if jit in decorators else ("", "")
    return f"{at}{ast.unparse(call)}  # {on}{after}"
