"""Taking hold of the gradients that a program takes while it is traced.

``jax.vjp``, and with it ``jax.grad`` and what flax, equinox and optax make of it, calls a function of JAX's,
``ad.linearize`` (0.10.2, 0.11.2, 0.12.0.1). While a trace looks for gradients, another stands there, for the thread of
that trace alone. What ``jax.linearize`` returns can be mapped and differentiated, which no call can that stands for a
gradient: it is left as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from remat_magic._jax.private import Replaced, courtesy

Hold = Callable[[Callable[..., Any], tuple[Any, ...], bool], Callable[..., Any]]
"""Is given a function that is about to be differentiated, its arguments, and whether it returns a pair of output and
auxiliary data; returns the function to differentiate instead."""

_EFFECT = "the gradient that a training step takes inside is not seen"
_in_thread = threading.local()  # .hold: that of this thread, if its trace takes hold of gradients
_everywhere: Hold | None = None  # that of all threads that have none of their own


@contextlib.contextmanager
def holding(hold: Hold, everywhere: bool = False) -> Iterator[None]:
    """Have this thread's gradients taken of what ``hold`` gives back; an interrupt between any two steps undoes it.

    Where one holds already, it is given what ``hold`` gives back. ``everywhere``: all threads ask it instead that have
    none of their own, and wherever a gradient is taken.
    """
    global _everywhere
    before: Hold | None = getattr(_in_thread, "hold", None)
    holds = hold if before is None else _one_after_the_other(hold, before)
    with _place.taken():
        try:
            if everywhere:
                _everywhere = hold
            else:
                _in_thread.hold = holds
            yield
        finally:
            if everywhere:
                _everywhere = None
            else:
                _in_thread.hold = before


def _one_after_the_other(first: Hold, second: Hold) -> Hold:
    def both(traceable: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> Callable[..., Any]:
        holds = _in_thread.hold
        try:
            _in_thread.hold = first  # gradients inside this one are not the second's
            instead = first(traceable, args, has_aux)
        finally:
            _in_thread.hold = holds
        return second(instead, args, has_aux)

    return both


def _stand_in(traceable: Any, primals: Any, *args: Any, has_aux: bool = False, **kwargs: Any) -> Any:
    """In the place of JAX's own: differentiates what the thread's hold gives instead of ``traceable``."""
    own: Hold | None = getattr(_in_thread, "hold", None)
    hold = own or _everywhere
    if hold is None or sys._getframe(1).f_code.co_name == "linearize" or _within_backward_pass():
        return _place.found(traceable, primals, *args, has_aux=has_aux, **kwargs)
    instead = hold(traceable, primals.unflatten(), has_aux)
    try:
        # What is linearised in there belongs to this gradient: the rules of custom derivatives, and JAX's own.
        _in_thread.hold = None
        return _place.found(instead, primals, *args, has_aux=has_aux, **kwargs)
    finally:
        _in_thread.hold = own


_place = Replaced("jax._src.interpreters.ad.linearize", _EFFECT, _stand_in)
_AD = os.path.join("jax", "_src", "interpreters", "ad.py")


def _within_backward_pass() -> bool:
    """Whether JAX is transposing: a gradient that a rule takes then belongs to the gradient that is being taken."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith("backward_pass") and code.co_filename.endswith(_AD):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def holding_alone(hold: Hold | None) -> Iterator[Hold | None]:
    """As ``holding``, but that what holds already is not asked: the ``with`` block is given it. None: as JAX does."""
    before: Hold | None = getattr(_in_thread, "hold", None)
    with _place.taken() if hold else contextlib.nullcontext():
        try:
            _in_thread.hold = hold
            yield before
        finally:
            _in_thread.hold = before


def not_holding() -> contextlib.AbstractContextManager[Hold | None]:
    """Differentiate as JAX does, also where something takes hold of this thread's gradients: this is none of those."""
    return holding_alone(None)


def is_holding() -> bool:
    """Whether something takes hold of this thread's gradients."""
    return getattr(_in_thread, "hold", None) is not None


def of_one_trace(value: Any, other: Any) -> bool:
    """Whether two values are tracers of one trace."""
    both = isinstance(value, Tracer) and isinstance(other, Tracer)
    return both and getattr(value, "_trace", value) is getattr(other, "_trace", other)


def is_staged(value: Any) -> bool:
    """Whether a value is one of a jaxpr that is being made, or of no trace at all; ``vmap`` may be around it."""
    while type(value).__name__ == _BATCHED:
        value = value.val
    return not isinstance(value, Tracer) or type(value).__name__ == "DynamicJaxprTracer"


def manual_axes() -> dict[str, int]:
    """The axes of the devices' mesh that a ``shard_map`` or ``pmap`` around maps, and how many devices they have."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ())}


_BATCHED = "BatchTracer"
_trace_now: Any = courtesy("jax._src.core.trace_ctx", "a gradient under vmap is shown for one example")
_unnamed = courtesy("jax._src.core.no_axis_name", "a gradient under vmap is shown for one example")


class _Axis(NamedTuple):
    """What JAX calls the data of a mapped axis."""

    name: str | None
    size: int
    spmd_name: str | None


def _added_axes(shape: tuple[int, ...], whole: tuple[int, ...]) -> list[int] | None:
    """Which axes a shape has got, leading ones where several could be; None where it is another shape."""
    own, added = list(shape), list[int]()
    for axis in reversed(range(len(whole))):
        if own[-1:] == [whole[axis]]:
            own.pop()
        else:
            added.insert(0, axis)
    return None if own else added


class Vmaps:
    """The ``jax.vmap`` calls that this thread is tracing in, and how they map some values.

    ``sizes`` has how many there are along each mapped axis, of the outermost ``vmap`` first, and ``types`` those of the
    values with all their axes.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        batching = list[Any]()
        stage: Any = getattr(_trace_now, "trace", None)
        while type(stage).__name__ == "BatchTrace":
            batching.append(stage)
            stage = stage.parent_trace
        self._around = [batch.axis_data for batch in batching]  # the innermost first
        unmapped = [_unmapped(value, batching) for value in values]
        self.types = tuple(jax.typeof(whole) for whole, _ in unmapped)
        self._axes = [axes for _, axes in unmapped]
        env = getattr(getattr(_trace_now, "axis_env", None), "axis_sizes", {})
        self._names = {name: size for name, size in env.items() if name not in {data.name for data in self._around}}
        self.sizes = tuple(data.size for data in reversed(self._around))

    def __bool__(self) -> bool:
        return bool(self._around)

    def inside(self, types: Sequence[Any]) -> Vmaps | None:
        """Inside of more ``vmap`` calls, told apart by their sizes, by the types of the values outside of them."""
        added = [_added_axes(one.shape, whole.shape) for one, whole in zip(self.types, types, strict=True)]
        if None in added:
            return None
        sizes = [Counter(whole.shape[axis] for axis in axes or ()) for axes, whole in zip(added, types, strict=True)]
        wider = copy.copy(self)
        wider.types, wider._around, wider._axes = tuple(types), [*self._around], [*self._axes]
        names = {size: name for name, size in self._names.items()}
        for size in functools.reduce(Counter.__or__, sizes, Counter[int]()).elements():
            wider._around.append(_Axis(names.get(size), size, None))
            for number, (axes, whole) in enumerate(zip(added, types, strict=True)):
                axis = next((axis for axis in axes or () if whole.shape[axis] == size), None)
                if axes and axis is not None:
                    axes.remove(axis)
                    axis -= sum(outer < axis for outer in axes)
                wider._axes[number] = (*wider._axes[number], axis)
        wider.sizes = tuple(data.size for data in reversed(wider._around))
        return wider

    def over(self, function: Callable[..., Sequence[Any]], axes: Sequence[Any] | None = None) -> _Mapped:
        """A flat function mapped in the same way, as what takes a gradient is when JAX traces it there.

        It takes one value for each of the values; ``axes`` are those of its inputs, by default those of the values.
        """
        return _Mapped(function, self._around, self._axes if axes is None else axes)


class _Mapped:
    """A flat function under ``vmap`` that gives its results with their mapped axes wherever these are.

    ``axes`` tells, after a call, where: one tuple for each result, None in it for a ``vmap`` that does not map it.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], around: Sequence[Any], axes: Sequence[Any]) -> None:
        self._function, self._around, self._inputs = function, around, axes
        self.axes: list[tuple[int | None, ...]] = []

    def __call__(self, *values: Any) -> list[Any]:
        results: list[Any] = []

        def flat(*values: Any) -> tuple[()]:
            traces, trace = list[Any](), _trace_now.trace
            for _ in self._around:
                traces.append(trace)
                trace = trace.parent_trace
            unmapped = [_unmapped(value, traces) for value in self._function(*values)]
            results[:] = [whole for whole, _ in unmapped]
            self.axes = [axes for _, axes in unmapped]
            return ()  # the results are values of the trace outside: `out_axes` would move or repeat them

        mapped: Callable[..., Any] = flat
        for level, data in enumerate(self._around):
            mapped = jax.vmap(
                mapped,
                in_axes=tuple(axes[level] for axes in self._inputs),
                axis_name=None if data.name is _unnamed else data.name,
                axis_size=data.size,
                spmd_axis_name=data.spmd_name,
            )
        mapped(*values)
        return results


def _unmapped(value: Any, traces: Sequence[Any]) -> tuple[Any, tuple[int | None, ...]]:
    """A value with all its axes, and which of them each ``vmap`` maps, the innermost first."""
    axes: list[int | None] = []
    for trace in traces:
        mapped = type(value).__name__ == _BATCHED and value._trace.tag is trace.tag
        axes.append(value.batch_dim if mapped else None)
        value = value.val if mapped else value
    return value, tuple(axes)
