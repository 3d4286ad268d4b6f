"""JAX's errors during a retrace, told as sentences."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from remat_magic import _jax
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.provenance import Spans
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file

COMPLEX = "reduce_precision does not accept dtype complex"
"""What JAX says of a policy that would save a complex value."""


@contextlib.contextmanager
def failures(
    function: str, policy: str, written: Mapping[str, str] = MappingProxyType({}), closed: Any = None
) -> Iterator[None]:
    """Tell what JAX raises during a retrace in one sentence that names the mend.

    ``written`` are the policies by site that the source sets and the choice leaves as they are, ``closed`` the program.
    """
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        raise RematError(_sentence(function, policy, error, written, closed)) from error


@contextlib.contextmanager
def differentiating(function: str) -> Iterator[None]:
    """Tell in the same way what JAX cannot differentiate where a function takes gradients itself."""
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        text = text_of(error)
        # A failed assertion without a text may be the user's own.
        if COMPLEX in text or (text and _undifferentiable(function, error, text, None)):
            raise RematError(_sentence(function, "its own policies", error, {})) from error
        raise


def is_passing(error: Exception) -> bool:
    """Whether a failure says nothing about the program, and asking again may succeed: no memory, or no stack."""
    return isinstance(error.__cause__, (MemoryError, RecursionError))


def _sentence(function: str, policy: str, error: Exception, written: Mapping[str, str], closed: Any = None) -> str:
    text = one_line(text_of(error), 4000)
    if COMPLEX in text:
        who, sites = f"{function} would under {policy}", " at 'sites'" if written else ""
        if written and policy in ("as_written", "nothing_saveable"):
            who = " and ".join(f"{site} may under {own}, as is written" for site, own in written.items())
        return (
            f"JAX cannot save a complex value under a policy, as {who}: choose one that saves none, such as "
            f"'nothing_saveable'{sites}, or name the real and the imaginary part and save these by name."
        )
    if "Effects not supported" in text:
        effects = text.rsplit(":", 1)[-1].strip()
        return (
            f"{function} has side effects that jax.checkpoint forbids ({effects}): take io_callback and the like out "
            "of the checkpointed part, or choose the policy 'none'."
        )
    first = text.split(". ")[0].rstrip(".")
    sentence = f"JAX cannot trace {function} under {policy}: {type(error).__name__}: {first[:400]}{_place(error)}."
    return _undifferentiable(function, error, text, closed) or sentence


_NO_DERIVATIVE = "{0} cannot be differentiated: {1}{2} has no derivative; give it one by jax.custom_vjp."
_WITHOUT_RULE = "{0} cannot be differentiated: {3}{2}; give that part a jax.custom_vjp."
_AS_JAX_SAYS = "{0} cannot be differentiated: {3}{2}."
# By what JAX says: of a kernel of Pallas that linearization failed, or nothing at all.
_SENTENCES = {
    "Reverse-mode differentiation does not work for lax.while_loop": (
        "{0} has no backward pass: JAX cannot differentiate a while_loop (or a fori_loop of unknown length){2} in "
        "reverse; give fori_loop static bounds, or use lax.scan."
    ),
    "callbacks do not support JVP": _NO_DERIVATIVE,
    "custom_lin'|forward-mode autodiff": (
        "{0} cannot be differentiated: a jax.custom_vjp function{2} is met in forward mode (jax.jvp, jax.jacfwd, a "
        "Hessian-vector product), where it has no rule; make it a jax.custom_jvp."
    ),
    "using defvjp|vmap_method|grad requires|Gradient only defined": _AS_JAX_SAYS,
    "ifferentiation rule|ranspose rule|jvp_method|VP defined|VP not implemented|Linearization failed|^$"
    "|cannot be differentiated|gradients are only implemented|Derivatives of": _WITHOUT_RULE,
}


def _undifferentiable(function: str, error: Exception, text: str, closed: Any) -> str:
    """What cannot be traced or differentiated, by name and place; empty for an error of another kind."""
    if type(error).__name__ == "TraceContextError":
        return (
            f"{function} changes a module of flax nnx that is not among its arguments, or is outside of a transform of "
            "JAX's: pass model, optimizer and rngs as arguments, and take nnx.grad, nnx.jit, nnx.scan and the like."
        )
    if not (text or isinstance(error, AssertionError)):  # no memory, as a rule
        return ""
    place = _place(error) or _called_from(error, text, closed)
    _, unhashable, what = text.rpartition("unhashable type: ")
    if unhashable and "Tracer" not in what and not _raised_by_user(error):
        return (
            f"{function} cannot be traced: jax.jit or the like{place} is given an object that holds arrays and has no "
            f"hash ({one_line(what, 80)}): pass it as an argument that is not static, or take eqx.filter_jit."
        )
    sentence = next((sentence for words, sentence in _SENTENCES.items() if re.search(words, text)), "")
    kind = "a pure_callback" if text.startswith("Pure") else "an io_callback"
    what = one_line(text, 300).rstrip(".") or "JAX cannot differentiate the operation"
    return sentence.format(function, kind, place, what)


def _called_from(error: Exception, text: str, closed: Any) -> str:
    """The user's line that calls what has no line of the user's itself: a library's loop, a callback under vmap.

    That is of the only such call in the program, or of the gradient that is taken.
    """
    spans, found = Spans(), set[str]()
    for scope, eqn in walk(closed, once=True) if closed is not None else ():
        inner, outer, called = eqn, scope, None
        while inner is not None and called is None and _jax.is_refused(eqn, text):
            called = spans.frames(_jax.traceback_of(inner)).source
            inner, outer = outer and outer.eqn, outer and outer.parent
        found |= {called.place} if called is not None else set()
    raised = spans.raised(error.__traceback__)
    found = found or ({raised.place} if raised is not None else set())
    return f" called from {found.pop()}" if len(found) == 1 else ""


def _raised_by_user(error: Exception) -> bool:
    """Whether the user's own code raised an error, and is no ``__hash__``, which JAX asks."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_name != "__hash__" and is_user_file(frame.f_code.co_filename)


def _place(error: Exception) -> str:
    """Where the operation stands that JAX was at, as it says by an exception before this one."""
    before: BaseException | None = error
    while before is not None and type(before).__name__ != "JaxStackTraceBeforeTransformation":
        before = before.__cause__
    span = Spans().raised(before.__traceback__) if before is not None else None
    return f" at {span.place}" if span is not None and span.place else ""
