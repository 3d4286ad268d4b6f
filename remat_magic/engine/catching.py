"""Running code as it is until its training step is called: what is called there, and with what, before it runs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn, Self

import jax
from jax.core import Tracer

from remat_magic import _jax, libraries
from remat_magic.engine.signature import function_name
from remat_magic.errors import one_line, printable, text_of
from remat_magic.jaxprs.provenance import Spans
from remat_magic.records import RematError, SourceSpan
from remat_magic.user_files import is_user_file

# Between a call of the user's and what it calls of JAX, these add no function of the user's.
_WRAPPING = ("jax", "equinox", "flax", "haiku", "chex", "jaxtyping", "beartype", "functools", "contextlib")


class Call(NamedTuple):
    """A function, and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Met(NamedTuple):
    """A gradient that code was about to take: the function that takes it, and where that is called.

    ``taken`` tells the one that the code was stopped at, ``compiled`` what was compiled ahead of time or exported,
    ``cleans_up`` whether the user's code around it has a ``try`` or a ``with``.
    """

    name: str
    where: str
    caller: SourceSpan | None
    taken: bool
    compiled: bool = False
    cleans_up: bool = False

    def __str__(self) -> str:
        return f"{self.name}{self.where}"


class Watch(contextlib.AbstractContextManager["Watch", bool]):
    """Runs the code of a ``with`` block until it is about to take a gradient, and ends the block there.

    A step is called, and does not run. ``finally`` and ``__exit__`` run, and what they ask of JAX. ``take`` is given
    what is called, at the call itself, with all that is in force there; raises what speaks against it, which makes it
    be asked about the next best thing to inspect. ``step`` is the name of the step, where gradients are taken before
    it: others run. ``also_threads``: those are watched too that there were before the block.

    ``call`` is what was taken (None as long as nothing was), ``result`` what ``take`` gave, ``gradients`` are those
    that came, the one that was taken last, and ``ran`` names the jitted functions without a gradient that ran before.
    """

    def __init__(self, take: Callable[[Call], Any], step: str | None = None, also_threads: bool = False) -> None:
        self._take, self._step = take, step
        self._others = weakref.WeakSet[threading.Thread](() if also_threads else threading.enumerate())
        self.call: Call | None = None
        self.result: Any = None
        self.gradients: list[Met] = []
        self.ran: dict[str, None] = {}
        self._refused: Exception | None = None
        self._eager = False
        self._spans = Spans()
        self._watching = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._others.discard(threading.current_thread())
        self._watching.enter_context(_jax.watching(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        self._watching.close()
        return isinstance(error, _jax.Stopped)

    @property
    def stopped_at(self) -> Met | None:
        """What the code was stopped at; None where it ran on."""
        return next((met for met in self.gradients if met.taken), None)

    @property
    def head(self) -> str:
        """What was caught and where: ``train_step, called in main(), line 214``; empty where nothing was."""
        return str(self.stopped_at or "")

    @property
    def note(self) -> str:
        """What ran and what did not, in one line; empty where the code ran on."""
        if self.stopped_at is None:
            return ""
        ran = f" {_listed(self.ran)} ran before." if self.ran else ""
        eager = " It is not jitted: the figures do not include the rest of the step." if self._eager else ""
        clean = " `finally` and `with` around it did run." if self.stopped_at.cleans_up else ""
        return f"Stopped at {self.stopped_at.name}, before it ran.{ran}{clean}{eager}"

    def answer(self) -> Any:
        """What ``take`` gave."""
        if self.call is not None:
            return self.result
        met = self.stopped_at
        if met is None and self.gradients:
            came = "; ".join(dict.fromkeys(map(str, self.gradients)))
            raise RematError(f"no step named {self._step} was called. Gradients were taken by {came}.")
        if met is None:
            ran = f": {_listed(self.ran)} ran" if self.ran else ""
            raise RematError(f"no training step was found: nothing took a gradient{ran}.")
        if met.compiled:
            raise RematError(
                f"{met}, was compiled ahead of time or exported, and cannot be traced; it did not run. Inspect the "
                "code that lowers it instead."
            )
        raise RematError(
            f"{met}, did not run, and was not inspected: {one_line(text_of(self._refused)).removesuffix('.')}."
        ) from self._refused

    def stop(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> NoReturn:
        """Stop at a call that takes no gradient, as at one that does; ``result`` is what ``take`` would give."""
        self.call, self.result = Call(fun, args, kwargs), result
        self._met([self.call], list(_frames(sys._getframe(1))))  # noqa: SLF001
        raise _jax.Stopped

    # ------------------------------------------------------------------------------------------- what JAX is asked for

    def is_here(self) -> bool:
        """As ``_jax.Watcher``."""
        return threading.current_thread() not in self._others

    def passes(self, fun: Any) -> None:
        """As ``_jax.Watcher``."""
        if self.stopped_at is None and not _is_of_jax(fun):  # what cleans up ran after
            candidates, _ = _candidates(list(_frames(sys._getframe(1))), _jax.Jitted(fun, (), {}))  # noqa: SLF001
            self.ran[function_name(candidates[0].function)] = None

    def meets(self, call: _jax.Jitted | None) -> None:
        """As ``_jax.Watcher``."""
        frames = list(_frames(sys._getframe(1)))  # noqa: SLF001 - those of who asks
        candidates, outside = _candidates(frames, call)
        met = self._met(candidates, outside, "" if call is None else call.compiled)
        if not met.taken:
            return
        self._eager = call is None and bool(candidates) and libraries.is_gradient(candidates[0].function)
        for candidate in () if met.compiled else candidates:
            try:
                self.result = self._take(candidate)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next is tried, or the user is told
                self._refused = self._refused or error
                if isinstance(error.__context__, KeyboardInterrupt):  # who has waited long enough for this one
                    break
            else:
                self.call = candidate
                break
        raise _jax.Stopped

    def _met(self, candidates: Sequence[Call], frames: Sequence[FrameType], compiled: str = "") -> Met:
        """Note what was met: what may be called there, from which frames, and the name of what was compiled before."""
        names = [compiled] if compiled else [function_name(candidate.function) for candidate in candidates]
        own = [frame for frame in frames if is_user_file(frame.f_code.co_filename)]
        caller = self._spans.at(own[0]) if own else None
        cell = next((number for number, frame in enumerate(own) if frame.f_code.co_name == "<module>"), len(own))
        cleans_up = any(map(_cleans_up, own[: cell + 1]))
        is_gradient = bool(candidates) and libraries.is_gradient(candidates[0].function)
        where = _where(caller, "differentiated" if is_gradient else "called")
        wanted = self._step is None or self._is_step(self._step, names, candidates, frames)
        name = names[0] if names else "a gradient"
        self.gradients.append(Met(name, where, caller, wanted, bool(compiled), cleans_up))
        return self.gradients[-1]

    @staticmethod
    def _is_step(step: str, names: Sequence[str], candidates: Sequence[Call], frames: Sequence[FrameType]) -> bool:
        """Whether a name is that of what is called, of what calls it, or of a variable there that holds it."""
        called = [frame.f_code.co_name for frame in frames if not _is_wrapping(frame)]
        values = [space.get(step) for frame in frames for space in (frame.f_locals, frame.f_globals)]
        return step in (*names, *called) or any(one.function is other for one in candidates for other in values)


def _listed(names: Iterable[str]) -> str:
    *first, last = map(printable, names)
    return f"{', '.join(first)} and {last}" if first else last


def _where(caller: SourceSpan | None, verb: str) -> str:
    """``, called in main(), line 214``; of another file than the one that runs its name too."""
    if caller is None:
        return ""
    of_main = caller.file == getattr(sys.modules.get("__main__"), "__file__", None)
    place = f"line {caller.line}" if of_main or not caller.place else caller.place
    inside = f"at {place}" if caller.function.startswith("<") else f"in {caller.function}(), {place}"
    return f", {verb} {inside}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames around one, the innermost first, without this package's."""
    while frame is not None:
        if _module(frame) != __name__.partition(".")[0]:
            yield frame
        frame = frame.f_back


def _cleans_up(frame: FrameType) -> bool:
    """Whether the source of a frame has a ``try`` or a ``with``, as far as is known."""
    try:
        lines, _ = inspect.getsourcelines(frame)
    except (OSError, TypeError):
        return True
    return any(line.lstrip().startswith(("try:", "with ", "async with ")) for line in lines)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_of_jax(function: Any) -> bool:
    return str(getattr(function, "__module__", None)).startswith("jax.")


def _is_wrapping(frame: FrameType) -> bool:
    return _module(frame) in _WRAPPING


def _candidates(frames: Sequence[FrameType], call: _jax.Jitted | None) -> tuple[list[Call], Sequence[FrameType]]:
    """What may be called at a gradient, the best to inspect first, and the frames that are around the first.

    That is what the user called, and then what that calls.
    Of a gradient outside of jit, and of a loop there, that is the outermost function of JAX's that is at work: what it
    is given is traced by JAX too, and no other code of the user's is run a second time.
    """
    if call is not None and not _is_of_jax(call.function):
        called = [Call(call.function, call.args, call.kwargs)]
    else:
        api = [number for number, frame in enumerate(frames) if _jax.is_boundary(frame.f_code)]
        within = (_wrapper_called(frames[number]) for number in reversed(api))
        called = [made for made in within if made and function_name(made.function) != "cache_miss"]
        if call is not None and not called:
            called = [Call(call.function, call.args, call.kwargs)]
        frames = frames[api[-1] + 1 :] if api else frames
    around = (frame for frame in itertools.takewhile(_is_wrapping, frames) if not _jax.is_boundary(frame.f_code))
    return [*[made for frame in around if (made := _wrapper_called(frame))][-1:], *called], frames


def _wrapper_called(frame: FrameType) -> Call | None:
    """The function or object that a frame is the call of, if that stands for another and hands all arguments on."""
    values = inspect.getargvalues(frame)
    if not (values.varargs and values.keywords) or len(values.args) > 1:
        return None
    function = values.locals.get(values.args[0]) if values.args else _function_of(frame)
    if not callable(function) or not hasattr(function, "__wrapped__"):
        function = _jax.behind_boundary(frame)
    if function is None:
        return None
    return Call(function, _types(values.locals[values.varargs]), _types(values.locals[values.keywords]))


def _function_of(frame: FrameType) -> Callable[..., Any] | None:
    """The function that a frame runs: of those with its code the one with its closure."""
    code, local = frame.f_code, frame.f_locals

    def runs(one: Any) -> bool:
        if type(one) is not FunctionType or one.__code__ is not code:
            return False
        for name, cell in zip(code.co_freevars, one.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in the cell yet
                if name in local and cell.cell_contents is not local[name]:
                    return False
        return True

    return _jax.find(code, runs)


def _types(arguments: Any) -> Any:
    """Arguments with types in the place of tracers, which are values of a trace that is broken off."""

    def stand_in(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Tracer) else leaf

    return jax.tree.map(stand_in, arguments)
