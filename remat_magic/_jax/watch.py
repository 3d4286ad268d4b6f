"""Being asked before code that runs takes a gradient: at each call of a jitted function, and at each gradient outside.

Of JAX 0.10.2, 0.11 and 0.12.0.1 alike:

- A setting that is part of jit's own key and of no trace's sends the next call of every jitted function through
  ``pjit._infer_params``, which gives its jaxpr. Nothing is traced or compiled again, for it or after it. Operations and
  loops outside of jit go this way too: JAX runs each as a jitted function of its own.
- What is new is traced there, and the first gradient that it takes breaks that off. What was traced before has in its
  jaxpr what a gradient leaves there: equations of a backward pass.
- ``pjit._get_fastpath_data`` says with what the next call of the same may go without Python. A call that takes a
  gradient shall not: it is to be asked about in the next watch too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import jax
from jax.stages import Compiled

from remat_magic._jax.gradients import holding
from remat_magic._jax.jaxprs import is_jaxpr, name_stack, open_jaxpr
from remat_magic._jax.primitives import exported_by, high_params
from remat_magic._jax.private import courtesy, do_without
from remat_magic._jax.settings import is_inspecting
from remat_magic.errors import RematError

_EFFECT = "only a last line that is a call is inspected, and no code is stopped at its training step"
_PATHS = (
    "pjit._infer_params",
    "pjit._get_fastpath_data",
    "pjit._cpp_pjit",
    "core.trace_ctx",
    "config.config_ext",
    "interpreters.ad.linearize",
)
_infer, _keep, _jitted, _trace_now, _config, _ = _asked_for = [courtesy(f"jax._src.{path}", _EFFECT) for path in _PATHS]
_call_compiled = Compiled.__call__

_NOT_STOPPED, _STOPPED = object(), object()  # constant: each further object would be a further entry in JAX's caches


def _made_key() -> Any:
    with contextlib.suppress(AttributeError, TypeError):
        return _config.Config("remat_magic_watch", None, include_in_jit_key=True, include_in_trace_context=False)
    do_without("jax._src.config.config_ext.Config as it was", _EFFECT)
    return None


_key = _made_key()


class Stopped(BaseException):
    """Ends the code that is watched. ``except Exception`` lets it pass, and no handler of Ctrl-C takes it for that."""

    def _render_traceback_(self) -> list[str]:
        """As IPython asks for where it shows what ends the code that ``%run`` runs."""
        return ["Stopped before the training step ran."]


class _Gradient(BaseException):
    """From a gradient in a trace to the call of what is traced."""


class Jitted(NamedTuple):
    """A call of a jitted function that takes a gradient: what was called; the name of what was compiled before it."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiled: str = ""


class Watcher(Protocol):
    """What is asked."""

    def is_here(self) -> bool:
        """Whether this thread is watched."""
        ...

    def meets(self, call: Jitted | None) -> None:
        """A gradient is about to be taken, in a call of a jitted function or outside of one.

        Raises:
            Stopped: it is not to be taken, nor what comes after it.
        """
        ...

    def passes(self, fun: Any) -> None:
        """A jitted function that takes no gradient is about to run."""
        ...


class _Thread(threading.local):
    """What a thread is at: a trace that a gradient breaks off, with whether one did; a call that may take gradients."""

    tracing = passing = met = False
    unkept = False


_here = _Thread()


class _State:
    """One watch."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.stopped = watcher, False
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity, of jaxprs and of what was compiled

    def knows(self, thing: Any, ask: Callable[[Any], Any]) -> Any:
        """``ask(thing)``, asked once."""
        known = self._known.get(id(thing))
        if known is None:
            known = self._known[id(thing)] = (thing, ask(thing))
        return known[1]

    def meets(self, call: Jitted | None) -> None:
        """Ask the watcher; whoever swallows its answer is told again at the next call."""
        self.goes_on()
        if self.stopped:
            return
        try:
            self.watcher.meets(call)
        except Stopped:
            self.stopped = True
            _key.set_global(_STOPPED)
            raise

    def goes_on(self) -> None:
        """Let nothing run after the stop but what cleans up."""
        if self.stopped and not _cleans_up():
            raise Stopped


_state: _State | None = None
_lock = threading.Lock()


def _cleans_up() -> bool:
    """Whether the code that runs is a ``finally``, ``except`` or ``__exit__`` that the stop passes through.

    A generator is closed by an error of its own.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, (Stopped, GeneratorExit)):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Have a watcher asked about what its threads run; an interrupt between any two steps undoes it."""
    global _state
    lacking = [
        path
        for path, value in zip((*_PATHS, "config.config_ext.Config"), (*_asked_for, _key), strict=True)
        if value is None
    ]
    if lacking:
        raise RematError(
            f"jax {jax.__version__} has no jax._src.{lacking[0]}, so that code cannot be stopped at its training step: "
            "end the cell with the call of the step, or give that to rm.trace."
        )
    state, ends = _State(watcher), threading.excepthook

    def thread_ends(args: Any) -> None:
        if args.exc_type is not Stopped:
            ends(args)

    try:
        with _lock:
            if _state is not None:
                raise RematError("code is watched already: one step is caught at a time.")
            _state = state
        for module, name, stand_in, _ in _PLACES:
            setattr(module, name, stand_in)
        threading.excepthook = thread_ends
        _key.set_global(_NOT_STOPPED)
        with holding(_hold, everywhere=True):
            yield
    finally:
        if _state is state:
            for module, name, _, own in _PLACES:
                setattr(module, name, own)
            threading.excepthook = ends
            _key.set_global(None)
            _state = None


def _asked() -> _State | None:
    """The watch that is to be asked about what this thread is about to run."""
    state = _state
    if state is None or _here.passing or is_inspecting() or not state.watcher.is_here():
        return None
    return state


def _infer_watched(fun: Any, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the place of JAX's own, which traces a jitted function that is called, or finds its trace."""
    state = _asked()
    if state is None or _here.tracing or not _trace_now.is_top_level():
        return _infer(fun, info, args, kwargs)
    _here.unkept = state.stopped
    state.goes_on()
    found = None
    try:
        _here.tracing, _here.met = True, False
        found = _infer(fun, info, args, kwargs)
    except _Gradient:
        pass
    finally:
        _here.tracing = False
    if found is not None and _here.met:  # a bare `except` went on without the gradient, and that was traced
        jax.clear_caches()
        found = None
    backward = "" if found is None else state.knows(found[0].params["jaxpr"], _backward_pass)
    if backward is None:
        state.watcher.passes(fun)
        return found
    state.meets(Jitted(_object_of(fun, info), args, kwargs, backward))
    _here.unkept = True
    try:
        _here.passing = True
        return _infer(fun, info, args, kwargs)
    finally:
        _here.passing = False


def _keep_watched(*args: Any, **kwargs: Any) -> Any:
    return None if _state is not None and _here.unkept else _keep(*args, **kwargs)


def _hold(traceable: Any, *_: Any) -> Any:
    """What to differentiate: the function itself, if it comes to that."""
    state = _asked()
    if state is not None:
        if _here.tracing:
            _here.met = True
            raise _Gradient
        state.meets(None)
    return traceable


def _call_watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """In the place of the call of what was compiled ahead of time, of which there is no Python that could be traced."""
    state = _asked()
    if state is not None and not _here.tracing:
        state.goes_on()
        if state.knows(self, lambda compiled: _BACKWARD in (compiled.as_text() or "")):
            name = re.match(r"HloModule (?:jit_)?([^\s,]*)", self.as_text() or "")
            state.meets(Jitted(self, args, kwargs, name[1] if name else "a step"))
    return _call_compiled(self, *args, **kwargs)


_PLACES: list[tuple[Any, str, Any, Any]] = [
    (Compiled, "__call__", _call_watched, _call_compiled),
    *(
        (importlib.import_module("jax._src.pjit"), name, stand_in, own)
        for name, stand_in, own in (
            ("_infer_params", _infer_watched, _infer),
            ("_get_fastpath_data", _keep_watched, _keep),
        )
        if own is not None
    ),
]

_BACKWARD = "transpose(jvp"  # in the name stack of what a backward pass does, also where XLA has compiled it


def _backward_pass(jaxpr: Any) -> str | None:
    """Empty for one that JAX traced, its name for one of ``jax.export``; None where there is none."""
    jaxprs, seen, compiled = [jaxpr], set[int](), None
    for one in jaxprs:  # which grows
        for eqn in open_jaxpr(one).eqns:
            if _BACKWARD in name_stack(eqn):
                return ""
            exported = exported_by(eqn)
            if exported is not None and _BACKWARD.encode() in exported.mlir_module_serialized:
                compiled = exported.fun_name
            for value in high_params(eqn).values():
                inner = [part for part in (value if isinstance(value, (tuple, list)) else [value]) if is_jaxpr(part)]
                jaxprs += [part for part in inner if id(part) not in seen]
                seen |= {*map(id, inner)}
    return compiled


def _object_of(fun: Any, info: Any) -> Any:
    """What the user called: the object that ``jax.jit`` made of a function, or one that does just the same."""
    found = find(fun, lambda one: type(one) is _KIND and getattr(one, "_jit_info", None) is info)
    return _jitted(fun, info) if found is None else found


_KIND = type(jax.jit(_object_of))


def find(source: Any, is_it: Callable[[Any], bool]) -> Any:
    """The object that is meant, among what the code that runs can name, else among what refers to ``source``; or None.

    The collector knows of what refers to it, but not where ``gc.freeze`` has set that aside.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for space in (frame.f_locals, frame.f_globals):
            if (found := next(filter(is_it, [*space.values()]), None)) is not None:
                return found
        frame = frame.f_back
    return next(filter(is_it, gc.get_referrers(source)), None)
