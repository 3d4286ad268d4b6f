"""JAX's errors during a retrace, told as sentences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from remat_magic.records import RematError
from remat_magic.wording import one_line, text_of

__all__ = ["failures", "is_passing"]


@contextlib.contextmanager
def failures(function: str, policy: str) -> Iterator[None]:
    """Tell what JAX raises during a retrace in one sentence that names the mend."""
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        raise RematError(_sentence(function, policy, error)) from error


def is_passing(error: Exception) -> bool:
    """Whether a failure says nothing about the program, and asking again may succeed: no memory, or no stack."""
    return isinstance(error.__cause__, (MemoryError, RecursionError))


def _sentence(function: str, policy: str, error: Exception) -> str:
    text = one_line(text_of(error), 4000)
    if "reduce_precision does not accept dtype complex" in text:
        return (
            f"JAX cannot save a complex value under a policy, and {policy} saves one of {function}: choose one that "
            "saves none, such as 'nothing_saveable', or name the real and the imaginary part and save these by name."
        )
    if "Effects not supported" in text:
        effects = text.rsplit(":", 1)[-1].strip()
        return (
            f"{function} has side effects that jax.checkpoint forbids ({effects}): take io_callback and the like out "
            "of the checkpointed part, or choose the policy 'none'."
        )
    if "while_loop" in text and "Reverse-mode" in text:
        return (
            f"{function} has no backward pass: JAX cannot differentiate a while_loop (or a fori_loop of unknown "
            "length) in reverse; give fori_loop static bounds, or use lax.scan."
        )
    if "ifferentiation rule" in text or "ranspose rule" in text or "jvp_method" in text:
        return f"{function} cannot be differentiated: {text[:300].rstrip('.')}; give that part a jax.custom_vjp."
    first = text.split(". ")[0].rstrip(".")
    return f"JAX cannot trace {function} under {policy}: {type(error).__name__}: {first[:400]}."
