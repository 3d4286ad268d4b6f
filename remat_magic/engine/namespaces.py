"""Functions that do something else for a while in one thread, such as to read names as they were when they were traced.

A function is traced anew for another batch, for a part or for an edit, often after a later cell has given ``loss_fn``
or ``B`` to something else. Whoever uses a function holds it: a model's class, a wrapper of a library, a closure, JAX.
So the function object stays, and its namespace: it gets other code, which looks in which thread it is called.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import functools
import inspect
import itertools
import linecache
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from jax.tree_util import tree_leaves

from remat_magic import _jax
from remat_magic.jaxprs.provenance import Provenances, as_typed, codes_of
from remat_magic.jaxprs.walk import walk
from remat_magic.libraries import attribute, layers
from remat_magic.parsing import parse_source
from remat_magic.records import SourceSpan, SourceText
from remat_magic.user_files import STAND_IN, is_user_file

one_at_a_time = threading.RLock()
_MOST = 1000  # items of a container that is remembered: more is data
_PLAIN = int, float, complex, str, bytes, np.dtype, FunctionType, MethodType, functools.partial, type, ModuleType


class Namespace:
    """The names that the user's function finds in its module or notebook, as they are now.

    Functions, classes, modules, numbers and settings are remembered; arrays are not, which would be kept alive.
    """

    def __init__(self, fun: Any = None) -> None:
        functions = [layer for layer in layers(getattr(fun, "__func__", fun)) if isinstance(layer, FunctionType)]
        users = [function for function in functions if is_user_file(function.__code__.co_filename)]
        self._fun = fun
        self._live: dict[str, Any] = users[-1].__globals__ if users else {}
        self._then = {name: value for name, value in [*self._live.items()] if _is_remembered(value)}

    def of(self, namespace: dict[str, Any]) -> Mapping[str, Any]:
        """What the names of a function's globals stood for."""
        return {**namespace, **self._then} if namespace is self._live and self._is_other() else namespace

    def _is_other(self) -> bool:
        return any(self._live.get(name) is not value for name, value in self._then.items())

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """While this lasts, the functions read in this thread what their names stood for."""
        if not self._is_other():
            yield
            return
        with one_at_a_time:
            then, functions = dict(self.of(self._live)), functions_in([self._fun, *self._then.values()], self._live)
            with standing_in([(function, copy_of(function, namespace=then)) for function in functions]):
                yield


def _is_remembered(value: Any, depth: int = 5) -> bool:
    """Whether a value is small and holds no arrays; not far within containers, as ``globals()`` holds itself."""
    if isinstance(value, list | tuple | dict):
        inside = value.values() if isinstance(value, dict) else value
        return len(value) <= _MOST and depth > 0 and all(_is_remembered(it, depth - 1) for it in [*inside])
    try:
        leaves = tree_leaves(value, is_leaf=lambda it: it is not value)
    except Exception:  # noqa: BLE001 - whatever the user's own pytree raises
        return False
    if len(leaves) != 1 or leaves[0] is not value:  # a pytree of the user's, or None
        return depth > 0 and all(_is_remembered(it, depth - 1) for it in leaves)
    # JAX's and equinox's jitted functions have what they wrap; a module of linen is a dataclass, and no pytree.
    return isinstance(value, _PLAIN) or any(
        attribute(value, it) is not None for it in ("__wrapped__", "__dataclass_fields__")
    )


def functions_in(values: Iterable[Any], namespace: Mapping[str, Any]) -> Iterator[FunctionType]:
    """The functions and methods of a module among values, those within their decorators and closures included."""
    todo: list[Any] = list(values)
    visited: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, type) and value.__module__ == namespace.get("__name__"):
            todo += vars(value).values()
        elif isinstance(value, property):
            todo += [value.fget, value.fset]
        elif not isinstance(value, type) and callable(value):
            todo += [attribute(value, name) for name in ("__func__", "__wrapped__", "func")]
        if isinstance(value, FunctionType) and value.__globals__ is namespace:
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not yet bound
                    todo.append(cell.cell_contents)
            yield value


# --------------------------------------------------------------------------------------------------------- stand-ins


@contextlib.contextmanager
def standing_in(instead: Sequence[tuple[FunctionType, Callable[..., Any]]]) -> Iterator[None]:
    """While this lasts, each function does in this thread what the other of its pair does.

    Other threads do not notice, and afterwards nothing is left of it.
    """
    before = [(function, function.__code__, "__signature__" in vars(function)) for function, _ in instead]
    thread = [threading.get_ident()]
    try:
        for function, new in instead:
            signature = _signature(function)
            function.__code__ = _dispatcher(function, new, thread)
            if signature is not None:
                vars(function)["__signature__"] = signature  # that of its code is another now
        yield
    finally:
        thread.clear()  # they do at once what they did, also where the rest is interrupted
        for function, own, had_signature in before:
            function.__code__ = own
            if not had_signature:
                vars(function).pop("__signature__", None)


def copy_of(
    function: FunctionType,
    code: CodeType | None = None,
    namespace: dict[str, Any] | None = None,
    closure: tuple[CellType, ...] | None = None,
) -> FunctionType:
    """A function like another one, with other code in another namespace."""
    new = FunctionType(
        code or function.__code__,
        function.__globals__ if namespace is None else namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__ if closure is None else closure,
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(vars(function))
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    return new


def _dispatcher(function: FunctionType, new: Callable[..., Any], thread: Sequence[int]) -> CodeType:
    """Code for a function that calls ``new`` in a thread, if there is one, and does what it did in others.

    It says that it stands where the function stands, since JAX tells functions apart by that.
    """
    code, own = function.__code__, copy_of(function)

    def choose() -> Callable[..., Any]:
        return new if threading.get_ident() in thread else own

    template = _stand_in(len(code.co_freevars))
    return template.replace(
        co_consts=tuple(choose if constant == STAND_IN else constant for constant in template.co_consts),
        co_freevars=code.co_freevars,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


@functools.cache
def _stand_in(free: int) -> CodeType:
    """Code that calls what is chosen, with so many free variables.

    It is compiled with them: a function's code begins with filling their places, and who reads the variables of a frame
    where that was not done (debuggers, and what watches a trace) crashes Python 3.11 and 3.12.
    """
    names = ", ".join(f"free_{number}" for number in range(free))
    text = f"""
def around({names}):
    def stand_in(*args, **kwargs):
        {STAND_IN} = {STAND_IN!r}
        return {STAND_IN}()(*args, **kwargs)
        {names}
"""
    code = compile(text, "<stand-in>", "exec", dont_inherit=True)
    for _ in ("around", "stand_in"):
        code = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return code


def _signature(function: FunctionType) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    """A function, or a statement outside of all functions: its first and last line, and its dotted name or ""."""

    first: int
    last: int
    name: str


def source_texts(provenances: Provenances, fun: Callable[..., Any]) -> tuple[SourceText, ...]:
    """The code that a program's operations come from: of a notebook whole cells, of a file only the functions.

    Cells come first, in the order of their numbers, then the functions of files. The cell that defines the traced
    function comes before all other cells, or its file before all other files.
    """
    spans: dict[tuple[int | None, str], dict[SourceSpan, None]] = {}
    for _, eqn in walk(provenances.closed, once=True):  # a body that many calls share has the same frames each time
        source, _ = provenances.spans.frames(_jax.traceback_of(eqn))
        if source is not None:
            spans.setdefault((source.cell, source.file), {})[source] = None
    home = _defining_file(fun)

    def order(key: tuple[int | None, str]) -> tuple[bool, bool, int]:
        cell, file = key
        return (not _is_cell(cell, file), file != home, sys.maxsize if cell is None else cell)

    return tuple(text for key in sorted(spans, key=order) for text in _texts(*key, tuple(spans[key])))


def _is_cell(cell: int | None, file: str) -> bool:
    """Whether the text was typed in: it is shown whole, also where its number is not known."""
    return cell is not None or file.startswith("<") or "ipykernel_" in file


def _defining_file(fun: Any) -> str:
    """The file of the innermost Python function under partials, methods, ``jit`` and the like; "" if there is none."""
    *_, innermost = itertools.islice(layers(fun), 100)
    fun = getattr(innermost, "__func__", innermost)
    call = fun if hasattr(fun, "__code__") else vars(type(fun)).get("__call__")  # a module of flax or equinox
    code = getattr(call, "__code__", None)
    return getattr(code, "co_filename", "")


def _texts(cell: int | None, file: str, spans: Sequence[SourceSpan]) -> Iterator[SourceText]:
    lines = [line.rstrip("\n") for line in linecache.getlines(file)]
    if not all(span.line <= len(lines) and lines[span.line - 1] == span.text for span in spans):
        # The file has changed since it was traced, or cannot be read: what the spans have kept is certain.
        yield from _own_lines(cell, file, spans)
        return
    if _is_cell(cell, file):
        written, shift = as_typed(cell, "\n".join(lines))
        lines = written.split("\n")[shift:]
        while lines and not lines[-1].strip():
            lines.pop()
        if lines:
            yield SourceText(file, cell, "", 1, "\n".join(lines))
        return
    tree = parse_source("\n".join(lines))
    if tree is None:
        yield from _own_lines(cell, file, spans)
        return
    parts = [*_outermost(tree, "")]
    for part in _merged(_around(parts, span) for span in spans):
        yield SourceText(file, cell, part.name, part.first, "\n".join(lines[part.first - 1 : part.last]))


def _own_lines(cell: int | None, file: str, spans: Iterable[SourceSpan]) -> Iterator[SourceText]:
    """The first lines of the spans, those that follow one another as one text."""
    by_line = {span.line: span for span in spans if span.text.strip()}
    for part in _merged((_Part(line, line, by_line[line].function) for line in by_line), apart=2):
        text = "\n".join(by_line[line].text for line in range(part.first, part.last + 1))
        yield SourceText(file, cell, "" if part.name.startswith("<") else part.name, part.first, text)


def _merged(parts: Iterable[_Part], apart: int = 1) -> list[_Part]:
    """The parts in their order, those that share a line (or are less than ``apart`` apart) as one."""
    merged: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.first, -part.last)):
        if merged and part.first < merged[-1].last + apart:
            before = merged[-1]
            merged[-1] = _Part(before.first, max(before.last, part.last), before.name)
        else:
            merged.append(part)
    return merged


def _around(parts: Sequence[_Part], span: SourceSpan) -> _Part:
    """The part that a span stands in; its own lines where it stands between parts."""
    number = bisect.bisect(parts, span.line, key=lambda part: part.first) - 1
    inside = number >= 0 and span.line <= parts[number].last
    return parts[number] if inside else _Part(span.line, max(span.line, span.end_line), "")


def _outermost(around: ast.AST, inside: str) -> Iterator[_Part]:
    """The outermost functions and methods of a module, and its statements outside of them."""
    for node in ast.iter_child_nodes(around):
        if isinstance(node, ast.expr | ast.pattern | ast.withitem):
            continue
        last = getattr(node, "end_lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield _Part(first, last, inside + node.name)
        elif any(hasattr(node, block) for block in ("body", "handlers", "cases")):
            yield from _outermost(node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside)
        elif isinstance(node, ast.stmt):
            match node:
                case ast.Assign([ast.Name(name)], ast.Lambda()):
                    yield _Part(node.lineno, last, inside + name)
                case _:
                    yield _Part(node.lineno, last, inside)


def restore_lines() -> None:
    """Let functions that autoreload changed have the code that their file compiles to.

    It compiles a changed function from its text alone, so that the lines count from there, and names the file of a
    decorator where there is one; functions below it keep their old lines. Only code that does the same is exchanged.
    """
    if "IPython.extensions.deduperreload.deduperreload" not in sys.modules:
        return
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and is_user_file(name):
            linecache.checkcache(name)
            codes = _compiled(name, tuple(linecache.getlines(name)))
            for function in functions_in(vars(module).values(), vars(module)):
                _restore(function, name, codes)


@functools.cache  # every trace asks for all files of the user's, which change seldom
def _compiled(name: str, lines: tuple[str, ...]) -> frozenset[CodeType]:
    return frozenset(codes_of(name, lines))


def _restore(function: FunctionType, name: str, codes: frozenset[CodeType]) -> None:
    own = function.__code__
    if own in codes and own.co_filename == name:
        return
    same = [code for code in codes if code.co_name == own.co_name and _content(code) == _content(own)]
    if same:
        named = (code for code in same if code.co_qualname == function.__qualname__)
        function.__code__ = next(named, min(same, key=lambda code: code.co_firstlineno))


def _content(code: CodeType) -> tuple[Any, ...]:
    """What code does, wherever it stands."""
    constants = tuple(
        _content(value) if isinstance(value, CodeType) else (type(value), repr(value)) for value in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code, names, code.co_argcount, code.co_kwonlyargcount, constants
