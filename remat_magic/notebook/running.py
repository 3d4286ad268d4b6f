"""A cell that runs until its training step is called, or the call at its end: neither runs, and one is inspected."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from remat_magic.errors import printable
from remat_magic.notebook.line import Options, one_sentence
from remat_magic.notebook.session import Session
from remat_magic.records import RematError

if TYPE_CHECKING:
    from remat_magic.api import Caught, Trace
    from remat_magic.notebook.callee import Callee
    from remat_magic.notebook.rebinding import Rebinding


class Found(NamedTuple):
    """What is to be shown; ``rebinding`` says why not where Apply cannot bind the function."""

    callee: Callee
    trace: Trace
    rebinding: Rebinding | RematError


class Running(contextlib.AbstractContextManager["Running", bool]):
    """The context that one cell runs in; ``trace`` gives the ``Found`` of a call, such as of ``loss(params, x)``.

    Where the cell ``imports`` something, JAX perhaps, that is not imported before. Where it ends in a loop or another
    block (``loops``), which may train, it is not begun unwatched.
    """

    def __init__(
        self, session: Session, options: Options, trace: Callable[[Callee], Found], imports: bool, loops: bool
    ) -> None:
        self._session, self._options, self._imports, self._loops = session, options, imports, loops
        self._trace = trace
        self._functions = list[Any]()  # of the call that is being evaluated, those around it first
        self._watch: Caught | None = None
        self._lack: RematError | None = None
        self._refused: Exception | None = None
        self._ran = list[Any]()  # at the end of the cell, since it was not to be inspected
        self._ended_so = False
        self._is_step = self._says_where = True  # of what it was stopped at

    # -------------------------------------------------------------------------------------------------- around the cell

    def __enter__(self) -> Running:
        self.begin()
        return self

    def begin(self) -> None:
        """Watch, from here on, for a step; the cell says where it may have imported JAX."""
        if self._watch is not None or (self._imports and "jax" not in sys.modules):
            return
        from remat_magic._jax.transforms import is_backward_pass
        from remat_magic.api import Caught

        is_backward_pass(None)  # which takes a gradient once, of its own, to know one
        self._watch = Caught(self._take, self._options.step)
        try:
            self._watch.__enter__()
        except RematError as error:
            self._lack = error
            if self._loops:
                with one_sentence():
                    raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> bool:
        self._functions.clear()
        if self._watch is not None and self._lack is None:
            self._watch.__exit__(kind, error, tb)
        return _is_from_stop(error)

    # ------------------------------------------------------------------------------------- the calls at the end

    def function(
        self, fun: Any, depth: int, last: bool, whole: bool, showing: Callable[[], tuple[Any, ...]] | tuple[()] | None
    ) -> Any:
        """What is called in place of a function at the end of the cell: itself, where it is not the one to inspect.

        Its call is an operand of ``depth`` calls; it stands in an expression with which the cell ends (``last``), or is
        all of that (``whole``). ``showing`` gives what is called after the statement, where that only uses its result;
        it is empty where nothing follows, None where more is done.
        """
        outside = self._functions[:depth]
        self._functions[depth:] = [fun]
        if "jax" not in sys.modules or not callable(fun):
            return fun
        from remat_magic.notebook import callee

        self.begin()
        if self._watch is None or self._watch.stopped_at is not None:  # a `finally` runs
            return fun
        if callee.makes_a_function(fun):
            return functools.partial(self._made, fun) if whole else fun
        if any(fun is one for one in self._ran) or not self._is_meant(fun, outside, last, showing):
            return fun
        return functools.partial(self._called, fun, last, whole)

    def _is_meant(self, fun: Any, outside: list[Any], last: bool, showing: Any) -> bool:
        from remat_magic.notebook import callee

        step = self._options.step
        if step not in (None, callee.name_of(fun)) and self._session.namespace.get(step) is not fun:
            return False
        if callee.consumes(fun) or callee.is_compiled(fun):
            return False
        if callee.prepares(fun):  # a library's, which is meant where it stands for itself
            return last and not outside
        if not all(map(callee.prepares, outside)):
            return False
        if callee.takes_a_gradient(fun):
            return True
        try:
            return showing is not None and all(map(callee.prepares, showing() if showing else ()))
        except Exception:  # noqa: BLE001  (not known yet: what it is shows when the cell comes to it)
            return False

    def _made(self, maker: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Inspect ``jax.grad(f)`` alone: its arguments are the user's variables."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import with_arguments

        fun = maker(*args, **kwargs)
        with one_sentence():
            self._stop(with_arguments(fun, None, self._session.namespace, self._session.variables), True)

    def _called(self, fun: Any, last: bool, whole: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Inspect a call. What cannot be differentiated, or trains, runs until its step."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import (
            Trains,
            called,
            cannot_be_traced,
            has_shapes,
            may_be_inspected,
            unless_it_trains,
        )

        options = self._options
        try:
            callee = called(fun, args, kwargs)
            if may_be_inspected(callee, last) or options.wrt or options.gradient:
                with contextlib.suppress(Trains), unless_it_trains(None if self._lack else fun):
                    self._stop(callee, whole)
            elif self._lack is not None:
                raise self._lack
        except Exception as error:  # said here, or if no step comes
            self._refused = error
            asks_more = options.wrt or options.gradient or options.mesh
            if self._lack or asks_more or has_shapes(args, kwargs) or not cannot_be_traced(error):
                with one_sentence():
                    raise
        self._ran.append(fun)
        self._ended_so = self._ended_so or last
        return fun(*args, **kwargs)

    def _stop(self, callee: Callee, whole: bool) -> None:
        """End the cell at a call that takes no gradient; where it stands is not said of ``whole`` expressions."""
        __tracebackhide__ = True
        assert self._watch is not None
        found = self._trace(callee)
        self._is_step, self._says_where = False, not whole and self._options.expression is None
        call = callee.gradient or callee
        self._watch.stop(call.fun, call.args, call.kwargs, found)

    # ------------------------------------------------------------------------------------------------ what is shown

    def _take(self, call: Any) -> Found:
        """As ``Watch`` asks, of the step that it has come to."""
        from remat_magic.notebook.callee import called

        return self._trace(called(call.function, call.args, call.kwargs))

    def answer(self, functions: Sequence[tuple[str, bool, tuple[str, ...]]]) -> Found | None:
        """What the cell came to; None where it only defines some of the ``functions``.

        Where there is nothing to inspect, RematError is raised, or what the function to inspect raised.
        """
        watch = self._watch
        if watch is not None and watch.stopped_at is not None:
            return self._saying(watch, watch.answer())
        if self._refused is not None:
            raise self._refused
        if self._options.step is not None and watch is not None and self._lack is None:
            watch.answer()  # which tells of the gradients that came
        namespace = self._session.namespace
        if not self._ended_so and any(
            all(namespace.get(name) is not one for one in self._ran) for name, *_ in functions
        ):
            return None
        names = dict.fromkeys(printable(str(getattr(fun, "__name__", type(fun).__name__))) for fun in self._ran)
        ran = f" {' and '.join(names)} ran, and took no gradient." if names else ""
        raise RematError(
            "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, or "
            f"define one function in the cell.{ran}{f' {self._lack}' if self._lack else ''}"
        )

    def _saying(self, watch: Caught, found: Found) -> Found:
        """With where it was stopped, the gradients taken before, and how to name the step where this is none."""
        where = f"{watch.head}. {watch.note}" if self._says_where else ""
        came = dict.fromkeys(str(met) for met in watch.gradients if not met.taken)
        before = f"Gradients were taken before it by {'; '.join(came)}." if came else ""
        is_loss = self._is_step and found.trace.gradient is None
        other = "If that is not the training step, name it: %%remat --step NAME." if is_loss else ""
        notes = filter(None, (where, *found.callee.notes, before, other))
        return found._replace(callee=replace(found.callee, notes=tuple(notes)))


def _is_from_stop(error: BaseException | None) -> bool:
    """Whether it is the stop, or an error that this led to on its way out; what others raise meanwhile is theirs."""
    jax_side = sys.modules.get("remat_magic._jax")
    while error is not None and jax_side is not None:
        if isinstance(error, jax_side.Stopped):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(map(_is_from_stop, error.exceptions))
        error = error.__context__ if isinstance(error, Exception) else None
    return False
