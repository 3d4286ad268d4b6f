"""A cell that runs until its training step is called, or the call at its end: neither runs, and one is inspected."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError

from remat_magic.jaxprs.provenance import cell_number
from remat_magic.notebook.line import Options, one_sentence
from remat_magic.notebook.session import Session
from remat_magic.records import RematError
from remat_magic.wording import printable

if TYPE_CHECKING:
    from types import FrameType

    from remat_magic.api import Caught, Trace
    from remat_magic.notebook.callee import Callee
    from remat_magic.notebook.rebinding import Rebinding


class Found(NamedTuple):
    """What is to be shown; ``rebinding`` says why not where Apply cannot bind the function."""

    callee: Callee
    trace: Trace
    rebinding: Rebinding | RematError


class Running(contextlib.AbstractContextManager["Running", bool]):
    """What one cell runs in.

    Args:
        session: the shell's.
        options: what the line says.
        trace: makes of a call what is to be shown.
        imports: whether the cell imports something, JAX perhaps: that is then not imported before.
        loops: whether the cell ends in a loop or another block, which may train and is not begun unwatched.
    """

    def __init__(
        self, session: Session, options: Options, trace: Callable[[Callee], Found], imports: bool, loops: bool
    ) -> None:
        self._session, self._options, self._imports, self._loops = session, options, imports, loops
        self._trace = trace
        self._functions: dict[int, Any] = {}
        self._watch: Caught | None = None
        self._lack: RematError | None = None
        self._found: Found | None = None
        self._refused: Exception | None = None
        self._ran = list[Any]()  # at the end of the cell, since it was not to be inspected
        self._ended_so = False

    # -------------------------------------------------------------------------------------------------- around the cell

    def __enter__(self) -> Running:
        if not self._imports or "jax" in sys.modules:
            self.begin()
        return self

    def begin(self) -> None:
        """Watch, from here on, for a step; the cell says where it may have imported JAX."""
        if self._watch is not None or (self._imports and "jax" not in sys.modules):
            return
        from remat_magic._jax.wrappers import is_backward_pass
        from remat_magic.api import Caught

        named = self._may_be_step

        class OfCell(Caught):
            """Which knows a step by the name of a variable too."""

            def meets(self, call: Any) -> None:
                if call is not None and self._step is not None and named("", call.function):
                    self._step = None
                super().meets(call)

        is_backward_pass(None)  # which takes a gradient once, of its own, to know one
        self._watch = OfCell(self._take, self._options.step)
        try:
            self._watch.__enter__()
        except RematError as error:
            self._lack = error
            if self._loops:
                with one_sentence():
                    raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: Any) -> bool:
        self._functions.clear()
        if self._watch is None or error is None:
            return self._watch is not None and self._lack is None and self._watch.__exit__(kind, error, tb)
        if self._lack is None:
            self._watch.__exit__(kind, error, tb)
        return _is_from_stop(error)

    # ------------------------------------------------------------------------------------- the calls at the end

    def function(
        self,
        fun: Any,
        number: int,
        around: tuple[int, ...],
        steps: tuple[str, ...],
        last: tuple[bool, ...],
        showing: Callable[[], tuple[Any, ...]] | tuple[()] | None,
    ) -> Any:
        """What is called in place of a function at the end of the cell: itself, where it is not the one to inspect.

        Args:
            fun: the function.
            number: that of the call in its statement.
            around: the numbers of the calls that it is an operand of.
            steps: what is done to its result: names of attributes, ``"[]"`` and ``"()"``.
            last: empty, unless it stands in an expression with which the cell ends: whether it is all of that.
            showing: gives what is called after the statement, where that only uses its result; empty where nothing
                follows, None where more is done.
        """
        self._functions[number] = fun
        ended = self._watch is not None and self._watch.stopped_at is not None  # a `finally` runs
        if "jax" not in sys.modules or not callable(fun) or ended:
            return fun
        from remat_magic.notebook import functions

        outside = [self._functions[outer] for outer in around]
        if functions.makes_a_function(fun):
            return functools.partial(self._made, fun) if any(last) else fun
        if any(fun is one for one in self._ran) or not self._is_meant(fun, outside, steps, bool(last), showing):
            return fun
        return functools.partial(self._called, fun, last)

    def _is_meant(self, fun: Any, outside: list[Any], steps: tuple[str, ...], last: bool, showing: Any) -> bool:
        from remat_magic.notebook import functions

        if not self._may_be_step(functions.name_of(fun), fun):
            return False
        if functions.consumes(fun) or (steps and not functions.gives_result(fun, steps)):
            return False
        if functions.prepares(fun):  # a library's, which is meant where it stands for itself
            return last and not outside
        if not all(map(functions.prepares, outside)):
            return False
        if functions.takes_a_gradient(fun):
            return True
        try:
            return showing is not None and all(map(functions.prepares, showing() if showing else ()))
        except Exception:  # noqa: BLE001  (not known yet: what it is shows when the cell comes to it)
            return False

    def _may_be_step(self, name: str, fun: Any) -> bool:
        """Whether a function has the name that ``--step`` asks for, its own or that of a variable."""
        step = self._options.step
        return step is None or name == step or self._session.namespace.get(step) is fun

    def _made(self, maker: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Inspect ``jax.grad(f)`` alone: its arguments are the user's variables."""
        __tracebackhide__ = True
        from remat_magic.notebook.defined import with_arguments

        fun = maker(*args, **kwargs)
        with one_sentence():
            self._find(with_arguments(fun, None, self._session.namespace, self._session.variables))

    def _called(self, fun: Any, last: tuple[bool, ...], /, *args: Any, **kwargs: Any) -> Any:
        """Inspect a call. What cannot be differentiated, or trains, runs until its step."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import called, cannot_be_traced, has_shapes, may_be_inspected
        from remat_magic.notebook.training import Trains, unless_it_trains

        options = self._options
        try:
            callee = called(fun, args, kwargs)
            if may_be_inspected(callee, bool(last)) or options.wrt or options.gradient:
                if not any(last):
                    callee = callee.saying(self._note(callee.name, sys._getframe(1)))  # noqa: SLF001
                with contextlib.suppress(Trains), unless_it_trains(None if self._lack else fun):
                    self._find(callee)
            elif self._lack is not None:
                raise self._lack
        except Exception as error:  # said here, or if no step comes
            self._refused = error
            asks_more = options.wrt or options.gradient or options.mesh
            if self._lack or asks_more or has_shapes(args, kwargs) or not cannot_be_traced(error):
                with one_sentence():
                    raise
        self._ran.append(fun)
        self._ended_so = self._ended_so or bool(last)
        return fun(*args, **kwargs)

    def _find(self, callee: Callee) -> None:
        """Keep what is to be shown, and end the cell."""
        __tracebackhide__ = True
        from remat_magic import _jax

        self._found = self._found or self._trace(callee)
        raise _jax.Stopped

    # ------------------------------------------------------------------------------------------------ what is shown

    def _take(self, call: Any) -> Found:
        """As ``Watch`` asks, of the step that it has come to."""
        from remat_magic.notebook.callee import called

        try:
            return self._trace(called(call.function, call.args, call.kwargs))
        except (RematError, UsageError) as error:
            self._refused = error
            raise

    def _note(self, name: str, frame: FrameType) -> str:
        """What is said of a call that the cell was stopped at, as ``Caught`` says it of a step."""
        cell = cell_number(frame.f_code.co_filename)
        place = f", called at In[{cell}]:{frame.f_lineno}" if cell else ""
        ran = [*self._watch.ran] if self._watch else []
        before = f" {' and '.join(map(printable, ran))} ran before." if ran else ""
        return f"{name}{place}. Stopped at {name}, before it ran.{before}"

    def _saying(self, found: Found, note: str = "") -> Found:
        """With a note, with the gradients that were taken before, and with how to name the step where it is none."""
        came = [] if self._watch is None else [str(met) for met in self._watch.gradients if not met.taken]
        before = f"Gradients were taken before it by {'; '.join(dict.fromkeys(came))}." if came else ""
        other = (
            "If that is not the training step, name it: %%remat --step NAME." if found.trace.gradient is None else ""
        )
        callee = found.callee.saying(note)
        notes = filter(None, (*callee.notes, before, note and other))
        return found._replace(callee=replace(callee, notes=tuple(notes)))

    def answer(self, functions: Sequence[tuple[str, bool, tuple[str, ...]]]) -> Found | None:
        """What the cell came to; None where it only defines some of the ``functions``.

        Raises:
            Exception: there is nothing to inspect: RematError of one sentence, or what the function to inspect raised.
        """
        if self._found is not None:
            return self._saying(self._found)
        watch, refused = self._watch, self._refused
        if watch is not None and watch.stopped_at is not None and (watch.call is not None or refused is None):
            found: Found = watch.answer()
            return self._saying(found, f"{watch.head}. {watch.note}")
        if refused is not None:
            raise refused
        if self._options.step is not None and watch is not None and self._lack is None:
            watch.answer()  # which tells of the gradients that came
        namespace = self._session.namespace
        if not self._ended_so and any(
            all(namespace.get(name) is not one for one in self._ran) for name, *_ in functions
        ):
            return None
        ran = f" {' and '.join(dict.fromkeys(map(_name, self._ran)))} ran, and took no gradient." if self._ran else ""
        raise RematError(
            "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, or "
            f"define one function in the cell.{ran}{f' {self._lack}' if self._lack else ''}"
        )


def _name(fun: Any) -> str:
    return printable(str(getattr(fun, "__name__", type(fun).__name__)))


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
