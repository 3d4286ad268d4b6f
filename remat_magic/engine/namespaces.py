"""Functions that do something else for a while in one thread, such as to read names as they were when they were traced.

A function is traced anew for another batch, for a part or for an edit, often after a later cell has given ``loss_fn``
or ``B`` to something else. Whoever uses a function holds it: a model's class, a wrapper of a library, a closure, JAX.
So none is made again: it gets other code, which looks in which thread it is called, and the namespace itself stays.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from remat_magic.libraries import attribute, layers
from remat_magic.user_files import STAND_IN, is_user_file

one_at_a_time = threading.RLock()
_MOST = 1000  # leaves of a value that is remembered: more is data
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    np.dtype,
    FunctionType,
    MethodType,
    functools.partial,
    type,
    ModuleType,
)


class Namespace:
    """The names that the user's function finds in its module or notebook, as they are now.

    Functions, classes, modules, numbers and settings are remembered; arrays are not, which would be kept alive.

    Args:
        fun: the function, in whatever wraps it.
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


def _is_remembered(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | set) and len(value) > _MOST:
        return False
    try:
        return not _holds_itself(value) and all(_is_plain(leaf) for leaf in jax.tree_util.tree_leaves(value))
    except Exception:  # noqa: BLE001 - whatever the user's own pytree raises
        return False


def _holds_itself(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether a container is within itself, as ``globals()`` may be: JAX goes on until Python has no stack any more.

    Nor does JAX (0.10.2) give the stack back then: what is called next has none.
    """
    if not isinstance(value, list | tuple | dict):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return id(value) in around or any(_holds_itself(inner, (*around, id(value))) for inner in inside)


def _is_plain(leaf: Any) -> bool:
    # JAX's and equinox's jitted functions have what they wrap; a module of linen is a dataclass, and holds no arrays.
    return isinstance(leaf, _PLAIN) or hasattr(leaf, "__wrapped__") or hasattr(leaf, "__dataclass_fields__")


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
