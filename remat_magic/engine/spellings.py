"""How the user's source writes the calls of a function, as the tracebacks of a program's equations tell."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, Literal

from remat_magic import _jax
from remat_magic.engine import signature
from remat_magic.libraries import calls_linen, is_of_haiku, transforms_by_haiku, uses_haiku
from remat_magic.parsing import parse_python
from remat_magic.user_files import STAND_IN, is_user_file

__all__ = [
    "Given",
    "Spelling",
    "called_from",
    "default_texts",
    "frames",
    "spellings",
    "within_library",
]

_Position = tuple[int | None, ...]  # first and last line, first and last column in bytes
Given = Literal["position", "keyword", "bound", "default", "unknown"]
"""How a call gives a parameter something: ``bound`` by a ``functools.partial`` before, ``default`` not at all."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A call as the source writes it.

    Attributes:
        function: what is called, or what a loop of JAX's is given; empty where that is not seen to be the function.
        positional: the texts of the positional arguments.
        keywords: the names and texts of the others.
        bound: how many arguments a ``functools.partial`` has given before, by position.
        bound_names: the names of what it has given by keyword.
        is_open: whether there is a ``*``, and the text does not tell what is given.
    """

    function: str
    positional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    bound: int = 0
    bound_names: frozenset[str] = frozenset()
    is_open: bool = False

    def given(self, position: int | None, name: str, has_default: bool) -> Given:
        """How a parameter is given something.

        Args:
            position: its number, that of the object of a method left out; None where it has none.
            name: its name.
            has_default: whether it has a default.
        """
        if name in dict(self.keywords):
            return "keyword"
        if name in self.bound_names or (position is not None and position < self.bound):
            return "bound"
        if self.is_open:
            return "unknown"
        if position is not None and position < self.bound + len(self.positional):
            return "position"
        if has_default:
            return "default"
        return "position" if position is not None and not self.function else "unknown"  # as other code mostly gives it

    def by_position(self, names: Sequence[str], defaults: Mapping[str, str]) -> str:
        """The call with what the first parameters, which are these, are given by position; empty where that cannot be.

        Args:
            names: of these parameters.
            defaults: the texts of their defaults.
        """
        texts, keywords = [*self.positional], dict(self.keywords)
        others = names[self.bound + len(texts) :]
        texts += [keywords.pop(name, "") or defaults.get(name, "") for name in others]
        if self.is_open or not self.function or "" in texts:
            return ""
        return f"{self.function}({', '.join([*texts, *(f'{name}={text}' for name, text in keywords.items())])})"


def frames(eqn: Any) -> list[tuple[CodeType, int]]:
    """The code that made an equation and the instruction in each, innermost first."""
    traceback = _jax.traceback_of(eqn)
    return [] if traceback is None else [*zip(*traceback.raw_frames(), strict=True)]


def called_from(eqn: Any, who: tuple[str, str, int]) -> tuple[CodeType, int] | None:
    """The code of the user's that called a function of which an equation is, or which it calls, and the instruction."""
    outside = frames(eqn)
    inside = [(code.co_filename, code.co_firstlineno) == who[1:] for code, _ in outside]
    # What JAX traces apart from its caller, as a checkpoint's body, has frames of its own alone.
    is_call = _jax.is_checkpoint(eqn) or _jax.is_jit(eqn)
    if not (is_call and any(_jax.function_name(body.jaxpr)[1:] == who[1:] for body in _jax.bodies(eqn))):
        outside = outside[inside.index(True) + 1 :] if True in inside else []
    return _first_of_user(outside)


def within_library(eqns: Iterable[Any], who: tuple[str, str, int]) -> tuple[Literal["", "within", "transformed"], bool]:
    """What the equations of a call tell of the function: ``CalledFunction.in_haiku`` and ``in_linen``."""
    if "haiku" not in sys.modules and "flax.linen" not in sys.modules:
        return "", False
    for eqn in eqns:
        codes = [code for code, _ in frames(eqn)]
        own = next((n for n, code in enumerate(codes) if (code.co_filename, code.co_firstlineno) == who[1:]), None)
        if own is None:
            continue
        inside, outside = codes[: own + 1], codes[own + 1 :]
        of_haiku, of_linen = transforms_by_haiku(outside), calls_linen(outside)
        if not of_haiku and not of_linen:  # nor is any other equation of this call within one
            break
        if of_haiku and uses_haiku(inside):
            caller = next(code for code in outside if is_user_file(code.co_filename) or is_of_haiku(code))
            return "transformed" if transforms_by_haiku([caller]) else "within", False
        if of_linen and calls_linen(inside):
            return "", True
    return "", False


def _first_of_user(outside: Iterable[tuple[CodeType, int]]) -> tuple[CodeType, int] | None:
    """The first of some frames of the user's code; what stands in for it while an edit is traced is none."""
    traced = itertools.takewhile(lambda frame: frame[0].co_filename != signature.__file__, outside)
    own = (frame for frame in traced if is_user_file(frame[0].co_filename))
    return next((frame for frame in own if STAND_IN not in frame[0].co_varnames), None)


def spellings(who: tuple[str, str, int], equations: Iterable[tuple[Any, Any]]) -> tuple[Spelling, ...]:
    """How the calls of a function are written; those that cannot be read are left out.

    Args:
        who: the function.
        equations: of some of its calls one each, with that in whose body it is, or None.
    """
    calls: dict[tuple[str, _Position], Spelling] = {}
    for eqn, around in equations:
        caller, by_loop = called_from(eqn, who), False
        if caller is None and around is not None:  # a body is traced apart from its caller
            caller = _first_of_user(frames(around))
            by_loop = _jax.is_scan(around) or _jax.is_while(around) or _jax.is_cond(around)
        if caller is None:
            continue
        code, instruction = caller
        position = [*code.co_positions()][instruction // 2]
        if (code.co_filename, position) not in calls:
            text = _Text.of(code.co_filename)
            call = text.calls.get(position)
            if call is not None:
                name = who[0].rpartition(".")[2]
                by_callee = by_loop or _hands_over(call, name, who[2])  # by code that is not the user's
                calls[code.co_filename, position] = text.spelling(call, name, by_callee)
    return tuple(dict.fromkeys(calls.values()))


def default_texts(who: tuple[str, str, int]) -> dict[str, str]:
    """The parameters of a function that have a default, with its text."""
    name, file, line = who
    defaults: dict[str, str] = {}
    for node in _Text.of(file).functions.get(line, ()):
        if name.rpartition(".")[2] in (getattr(node, "name", "<lambda>"),):
            by_position = [*node.args.posonlyargs, *node.args.args]
            last = zip(reversed(by_position), reversed(node.args.defaults), strict=False)
            pairs = [*last, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
            defaults.update((parameter.arg, ast.unparse(text)) for parameter, text in pairs if text is not None)
    return defaults


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    """A text.

    Attributes:
        calls: by their position.
        functions: by their first line.
        assigned: what its variables are assigned.
    """

    calls: Mapping[_Position, ast.Call]
    functions: Mapping[int, list[_Function]]
    assigned: Mapping[str, list[ast.expr]]

    @staticmethod
    def of(file: str) -> _Text:
        return _parsed("".join(linecache.getlines(file)))

    def spelling(self, call: ast.Call, name: str, by_callee: bool) -> Spelling:
        """That of a call of a function of that name, or of a call that is given it ``by_callee``, which calls it."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        function, partial = self._partial(arguments if by_callee else [call.func], name) or (call.func, None)
        bound = [] if partial is None else partial.args[1:]
        bound_names = [] if partial is None else [keyword.arg for keyword in partial.keywords]
        args, keywords = ([], []) if by_callee else (call.args, call.keywords)
        starred = any(isinstance(argument, ast.Starred) for argument in (*bound, *args))
        return Spelling(
            "" if by_callee and partial is None else ast.unparse(function if by_callee else call.func),
            tuple(map(ast.unparse, args)),
            tuple((keyword.arg or "", ast.unparse(keyword.value)) for keyword in keywords),
            len(bound),
            frozenset(filter(None, bound_names)),
            starred or None in (*bound_names, *(keyword.arg for keyword in keywords)),
        )

    def _partial(self, expressions: Iterable[ast.expr], name: str) -> tuple[ast.expr, ast.Call] | None:
        """The ``functools.partial`` of a function, and the expression, part of others, that is it or its variable."""
        for node in itertools.chain.from_iterable(map(ast.walk, expressions)):
            if not isinstance(node, ast.expr):
                continue
            for value in self.assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]:
                match value:
                    case ast.Call(func, [of, *_]) if (_name(func), _name(of)) == ("partial", name):
                        return node, value
                    case _:
                        pass
        return None


def _hands_over(call: ast.Call, name: str, line: int) -> bool:
    """Whether a call gives a function of that name and line to what it calls, as ``functools.reduce(layer, ws, x)``."""
    if _name(call.func) == name:
        return False
    nodes: list[ast.AST] = [*call.args, *call.keywords]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Lambda):
            if name == "<lambda>" and node.lineno == line:
                return True
        elif isinstance(node, ast.expr) and _name(node) == name:
            return True
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(node, ast.Call) or child != node.func]
    return False


def _name(expression: ast.expr) -> str:
    """The last part of a dotted name; empty for what is none."""
    match expression:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


@lru_cache(maxsize=16)
def _parsed(text: str) -> _Text:
    calls, functions, assigned = dict[_Position, ast.Call](), dict[int, list[_Function]](), dict[str, list[ast.expr]]()
    try:
        nodes = [*ast.walk(parse_python(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        nodes = []
    for node in nodes:
        match node:
            case ast.Call():
                calls[node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] = node
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                decorators = getattr(node, "decorator_list", [])
                line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
                functions.setdefault(line, []).append(node)
            case ast.Assign([ast.Name(name)], value):
                assigned.setdefault(name, []).append(value)
            case _:
                pass
    return _Text(calls, functions, assigned)
