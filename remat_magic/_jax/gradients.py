"""Taking hold of the gradients that a program takes while it is traced.

``jax.vjp`` and ``jax.linearize``, and with them ``jax.grad`` and what flax, equinox and optax make of it, all call one
function of JAX's, ``ad.linearize`` (0.10.2, 0.11.2, 0.12.0.1). While a trace looks for gradients, another stands there,
for the thread of that trace alone.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax.core import Tracer

from remat_magic._jax.private import courtesy

__all__ = ["Hold", "holding", "is_holding", "is_staged"]

Hold = Callable[[Callable[..., Any], tuple[Any, ...], bool], Callable[..., Any]]
"""Is given a function that is about to be differentiated, its arguments, and whether it returns a pair of output and
auxiliary data; returns the function to differentiate instead."""

_EFFECT = "the gradient that a training step takes inside is not seen"
_own = courtesy("jax._src.interpreters.ad.linearize", _EFFECT)
_ad: Any = None if _own is None else importlib.import_module("jax._src.interpreters.ad")
_in_thread = threading.local()  # .hold: that of this thread, if its trace takes hold of gradients
_lock = threading.Lock()
_holding_now: set[object] = set()
_replaced: Any = None  # what stood in the place of _stand_in


@contextlib.contextmanager
def holding(hold: Hold) -> Iterator[None]:
    """Have this thread's gradients taken of what ``hold`` gives back; an interrupt between any two steps undoes it.

    Where one holds already, it is given what ``hold`` gives back.
    """
    if _own is None:
        yield
        return
    global _replaced
    before: Hold | None = getattr(_in_thread, "hold", None)
    holds = hold if before is None else _one_after_the_other(hold, before)
    this = object()
    try:
        with _lock:
            _holding_now.add(this)
            if _ad.linearize is not _stand_in:
                _replaced, _ad.linearize = _ad.linearize, _stand_in
        _in_thread.hold = holds
        yield
    finally:
        _in_thread.hold = before
        with _lock:
            _holding_now.discard(this)
            if not _holding_now and _ad.linearize is _stand_in:
                _ad.linearize = _replaced


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


def _stand_in(traceable: Any, primals: Any, *args: Any, has_aux: bool = False, **options: Any) -> Any:
    """In the place of JAX's own: differentiates what the thread's hold gives instead of ``traceable``."""
    hold: Hold | None = getattr(_in_thread, "hold", None)
    if hold is None or _within_backward_pass():
        return _replaced(traceable, primals, *args, has_aux=has_aux, **options)
    instead = hold(traceable, primals.unflatten(), has_aux)
    try:
        # What is linearised in there belongs to this gradient: the rules of custom derivatives, and JAX's own.
        _in_thread.hold = None
        return _replaced(instead, primals, *args, has_aux=has_aux, **options)
    finally:
        _in_thread.hold = hold


def _within_backward_pass() -> bool:
    """Whether JAX is transposing: a gradient that a rule takes then belongs to the gradient that is being taken."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith("backward_pass") and code.co_filename == _ad.__file__:
            return True
        frame = frame.f_back
    return False


def is_holding() -> bool:
    """Whether something takes hold of this thread's gradients."""
    return getattr(_in_thread, "hold", None) is not None


def of_one_trace(value: Any, other: Any) -> bool:
    """Whether two values are tracers of one trace."""
    both = isinstance(value, Tracer) and isinstance(other, Tracer)
    return both and getattr(value, "_trace", value) is getattr(other, "_trace", other)


def is_staged(value: Any) -> bool:
    """Whether a value is one of a jaxpr that is being made, or of no trace at all; under ``vmap`` and the like not."""
    return not isinstance(value, Tracer) or type(value).__name__ == "DynamicJaxprTracer"
