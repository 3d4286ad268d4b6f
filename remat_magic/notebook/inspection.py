"""From a callee to its trace, and from what a line asks for to the policy that is shown first."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from remat_magic import api, devices, policies, units
from remat_magic.errors import one_line, printable, text_of
from remat_magic.meshes import mesh
from remat_magic.notebook.callee import Callee
from remat_magic.notebook.line import Options, one_sentence
from remat_magic.records import RematError

# What rm.trace has parameters of, so that a function's own of these names are given to it beforehand.
_TAKEN = ("wrt", "has_aux", "gradient")


@dataclass(frozen=True, slots=True)
class Inspection:
    """A traced function under the policy that a line asks for.

    ``device`` is the name of the accelerator that was chosen, empty for this machine, None where none was.
    ``loss`` is what the call differentiates, if the trace is of the call as it is.
    """

    trace: api.Trace
    policy: str
    at: str | None
    title: str
    loss: Any = None
    device: str | None = None


def traced(
    callee: Callee, wrt: tuple[int | str, ...] | None, gradient: str | None = None, axes: str | None = None
) -> api.Trace:
    """The trace of a callee, as ``--wrt``, ``--gradient`` and ``--mesh`` say.

    An exception of the inspected function itself is raised as it is, with the frames of the user's own code.
    """
    __tracebackhide__ = True
    around = contextlib.nullcontext() if axes is None else jax.set_mesh(mesh(axes))
    fun, kwargs = callee.fun, dict(callee.kwargs)
    own_keywords = {name: kwargs.pop(name) for name in _TAKEN if name in kwargs}
    if own_keywords:
        fun = functools.partial(fun, **own_keywords)
    positions = callee.wrt if wrt is None else _positions(callee, wrt)
    try:
        with around:
            return api.trace(fun, *callee.args, wrt=positions, has_aux=callee.has_aux, gradient=gradient, **kwargs)
    except RematError:
        raise
    except Exception as error:  # noqa: BLE001  (any exception of the user's function)
        raised = error
    own = _own_frames(raised.__traceback__)
    if own is None:  # raised before the function began: the call does not fit it
        with one_sentence():
            raise RematError(_misfit(callee, raised))
    raised.add_note(_while_tracing(callee, raised))
    cause = raised.__cause__
    # A cause within JAX, which it hides where it raises one itself, would stand before the user's own line.
    raise raised.with_traceback(own) from cause if cause and _own_frames(cause.__traceback__) else None


def inspected(callee: Callee, trace: api.Trace, options: Options, namespace: Mapping[str, Any]) -> Inspection:
    """The trace under the policy and at the place of a line; what is wrong with these is raised here, by RematError."""
    policy = policies.resolve(options.policy or "as_written", trace.names, namespace, trace.function_name)
    device = named_device(options.device)
    if device and not units.is_bytes(device):
        devices.get(device).check_mesh(trace.mesh_devices)
    trace.preview(policy.key, options.at, namespace)
    return Inspection(trace, policy.key, options.at, " ".join(callee.notes), callee.loss, device)


def named_device(name: str | None) -> str | None:
    """The name of the accelerator of a line, or so many bytes; empty for the machine itself, None for nothing."""
    if name is None:
        return None
    return "" if name.strip().casefold() == devices.THIS_CPU.casefold() else devices.named(name)


def _positions(callee: Callee, wrt: tuple[int | str, ...]) -> tuple[int | str, ...]:
    written = len(callee.args) - callee.bound  # those are what the user counts

    def position(number: int) -> int:
        if not -written <= number < written:
            raise RematError(f"--wrt {number} asks for an argument that the call does not have: it has {written}.")
        return callee.bound + number % written

    return tuple(argument if isinstance(argument, str) else position(argument) for argument in wrt)


def _misfit(callee: Callee, raised: BaseException) -> str:
    text = one_line(text_of(raised))
    if "static argument" in text:  # of jax.jit, given a float: a float is traced unless wrt says otherwise
        return (
            f"`{callee.name}` is jitted with a static argument that is a float here, and floats are differentiated: "
            "say what is, such as --wrt x."
        )
    if not callee.args and not callee.kwargs:
        return f"{callee.name} was called without arguments: nothing to differentiate."
    return f"`{callee.name}` cannot be called so: {text.removesuffix('.')}."


def _while_tracing(callee: Callee, raised: BaseException) -> str:
    """The sentence under the traceback of the user's function."""
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
    name = printable(callee.name)
    return f"%remat: `{name}` raised this {type(raised).__name__} while it was traced abstractly.{hint}"


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of JAX and of this package."""
    folders = {Path(jax.__file__).parent, Path(__file__).parents[1]}
    files = {Path(contextlib.__file__), Path(functools.__file__)}  # JAX's calls go through these
    frames: list[TracebackType] = []
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if folders.isdisjoint(file.parents) and file not in files:
            frames.append(traceback)
        traceback = traceback.tb_next
    own: TracebackType | None = None
    for frame in reversed(frames):
        own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return own
