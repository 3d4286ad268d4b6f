"""One inspection: from a callee and its arguments to what is shown."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from IPython.core.error import UsageError

from remat_magic.notebook.line import NameKind, Options
from remat_magic.parsing import parse_expression
from remat_magic.records import RematError
from remat_magic.wording import one_line, printable, text_of

if TYPE_CHECKING:
    from remat_magic.notebook.apply import Rebinding
    from remat_magic.notebook.callee import Callee
    from remat_magic.notebook.session import Session

__all__ = ["Inspection"]

# What rm.trace has parameters of, so that a function's own of these names are given to it beforehand.
_TAKEN = ("wrt", "has_aux")


class Inspection:
    """What a line asks for, waiting for the function.

    The three methods are the three ways to name one. Each returns the widget (None with ``--text``, where all is
    printed), and raises UsageError of one sentence for what the user can mend. An exception of the inspected function
    itself is raised as it is, with the frames of the user's own code.
    """

    def __init__(self, session: Session, options: Options) -> None:
        self.session = session
        self.options = options

    def call(self, fun: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Inspect what the call ``fun(*args, **kwargs)`` differentiates or computes."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import makes_a_function, recognise

        if makes_a_function(fun):
            return self.function(fun(*args, **kwargs))
        try:
            callee = recognise(fun, args, kwargs)
        except RematError as error:
            raise UsageError(printable(str(error))) from None
        return self._inspect(callee)

    def function(self, fun: Any, /) -> Any:
        """Inspect a function with the arguments that ``--args`` or the namespace gives."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import recognise
        from remat_magic.notebook.target import arguments_from_namespace, arguments_from_text

        namespace = self.session.namespace
        note = ""
        try:
            if self.options.args is not None:
                args, kwargs = arguments_from_text(self.options.args, namespace)
            elif callable(fun):
                args, kwargs, used = arguments_from_namespace(fun, self.session.variables)
                note = f"Arguments: your variable{'s' * (len(used) > 1)} {', '.join(used)}." if used else ""
            else:
                raise RematError(f"`{self.options.expression}` is a {type(fun).__name__}: name a function or a call.")
            callee = recognise(fun, args, kwargs)
        except RematError as error:
            raise UsageError(printable(str(error))) from None
        return self._inspect(replace(callee, notes=(note, *callee.notes) if note else callee.notes))

    def defined(self, defined: list[str], assigned: list[str]) -> Any:
        """Inspect the function that the cell defines."""
        __tracebackhide__ = True
        from remat_magic.notebook.target import choose

        try:
            fun = choose(self.session.namespace, defined, assigned)
        except RematError as error:
            raise UsageError(printable(str(error))) from None
        return self.function(fun)

    def _inspect(self, callee: Callee) -> Any:
        __tracebackhide__ = True
        from remat_magic import policies

        session, at = self.session, self.options.at
        try:
            rebinding = self._rebinding(callee)
            trace = self._trace(callee)
            session.remember(trace)
            policy = policies.resolve(self._policy(trace), trace.names, session.namespace, trace.function_name)
            trace.preview(policy, at)  # what is wrong with the choice is said here, and not by the widget
            notes = " ".join(callee.notes)
            return session.present(trace, policy.key, self.options, rebinding, notes, _with_values(callee))
        except RematError as error:
            raise UsageError(printable(str(error))) from None
        except KeyboardInterrupt as interrupt:
            # IPython keeps the last error and with it these frames, which hold a model, and JAX's settings in force
            # where the interrupt came between two steps of a `with`.
            traceback.clear_frames(interrupt.__traceback__)
            raise UsageError("tracing was interrupted, and nothing was inspected: run the cell again.") from None

    def _trace(self, callee: Callee) -> Any:
        __tracebackhide__ = True
        from remat_magic.api import trace

        fun, kwargs = callee.fun, dict(callee.kwargs)
        taken = {name: kwargs.pop(name) for name in _TAKEN if name in kwargs}
        if taken:  # rm.trace has parameters of these names itself
            fun = functools.partial(fun, **taken)
        wrt = self._wrt(callee)
        try:
            return trace(fun, *callee.args, wrt=wrt, has_aux=callee.has_aux, **kwargs)
        except RematError:
            raise
        except Exception as error:  # noqa: BLE001  (any exception of the user's function)
            raised = error
        own = _own_frames(raised.__traceback__)
        if own is None:  # raised before the function began: the call does not fit it
            raise RematError(_misfit(callee, raised))
        raised.add_note(_while_tracing(callee, raised))
        cause = raised.__cause__
        # A cause within JAX, which it hides where it raises one itself, would stand before the user's own line.
        raise raised.with_traceback(own) from cause if cause and _own_frames(cause.__traceback__) else None

    def _wrt(self, callee: Callee) -> int | tuple[int | str, ...] | None:
        if self.options.wrt is None:
            return callee.wrt
        written = len(callee.args) - callee.bound  # those are what the user counts

        def position(number: int) -> int:
            if not -written <= number < written:
                raise RematError(f"--wrt {number} asks for an argument that the call does not have: it has {written}.")
            return callee.bound + number % written

        return tuple(one if isinstance(one, str) else position(one) for one in self.options.wrt)

    def _policy(self, trace: Any) -> str:
        """The policy's key as ``--policy`` or ``--names`` writes it."""
        from remat_magic import policies

        wanted = dict(self.options.names)
        if not wanted:
            return self.options.policy or "as_written"

        def matching(kind: NameKind) -> list[str]:
            return _matching(wanted.get(kind, ()), trace)

        save, offload, recompute = matching("save"), matching("offload"), matching("recompute")
        if not save and not offload:
            save = list(trace.names)
        return policies.by_name(*([name for name in kept if name not in recompute] for kept in (save, offload)))

    def _rebinding(self, callee: Callee) -> Rebinding | None:
        """Where Apply binds its function, or None where the function has no plain name and none is asked for."""
        from remat_magic.notebook.apply import Rebinding
        from remat_magic.notebook.callee import chain

        try:
            return Rebinding(self.session.namespace, list(chain(callee.fun)))
        except RematError:
            if self.options.apply:
                raise
            return None


def _matching(patterns: tuple[str, ...], trace: Any) -> list[str]:
    """The function's names that the patterns stand for; policies knows globs, and what is wrong with a name."""
    from remat_magic import policies

    if not patterns:
        return []
    asked = f"save_only_these_names({', '.join(map(repr, patterns))})"
    found = parse_expression(policies.resolve(asked, trace.names, function=trace.function_name).key)
    return [ast.literal_eval(name) for name in cast("ast.Call", found).args]


def _name(callee: Callee) -> str:
    return printable(str(getattr(callee.fun, "__name__", type(callee.fun).__name__)))


def _misfit(callee: Callee, raised: BaseException) -> str:
    text = one_line(text_of(raised))
    if "static argument" in text:  # of jax.jit, given a float: a float is traced unless wrt says otherwise
        return (
            f"`{_name(callee)}` is jitted with a static argument that is a float here, and floats are differentiated: "
            "say what is, such as --wrt x."
        )
    return f"`{_name(callee)}` cannot be called so: {text.removesuffix('.')}."


def _while_tracing(callee: Callee, raised: BaseException) -> str:
    """The sentence under the traceback of the user's function."""
    import jax

    try:
        arguments = inspect.signature(callee.fun).bind(*callee.args, **callee.kwargs).arguments
    except (TypeError, ValueError):
        arguments = dict(callee.kwargs)
    odd = [
        f"`{name}` is a {type(leaf).__name__}"
        for name, argument in arguments.items()
        for leaf in jax.tree.leaves(argument)
        if not (callable(leaf) or hasattr(leaf, "shape") or isinstance(leaf, complex | float | int))
    ]
    hint = f" Where an array is needed, pass one: {', '.join(odd)}." if odd else ""
    return f"%remat: `{_name(callee)}` raised this {type(raised).__name__} while it was traced abstractly.{hint}"


def _with_values(callee: Callee) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments, if all their arrays have values to run on."""
    import jax

    leaves = jax.tree.leaves((callee.args, dict(callee.kwargs)))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return None
    return tuple(callee.args), {key: value for key, value in callee.kwargs.items() if key not in _TAKEN}


def _own_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of JAX and of this package."""
    import jax

    folders = {Path(jax.__file__).parent, Path(__file__).parents[1]}
    files = {Path(contextlib.__file__), Path(functools.__file__)}  # JAX's calls go through these
    frames: list[types.TracebackType] = []
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if folders.isdisjoint(file.parents) and file not in files:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: types.TracebackType | None = None
    for frame in reversed(frames):
        kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
