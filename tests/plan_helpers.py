"""What tests of plans share: models, places, and where a reckoning is not to be exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat_magic as rm
from remat_magic import _jax
from tests.benchmarks import named_models
from tests.programs import CHECKPOINTED, PROGRAMS, f32

# JAX before 0.12 (and 0.12 without jax_remat3) cannot save complex values under a checkpoint.
BUILT_IN = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "none")
PLACES = [*((name, "function") for name in PROGRAMS), *((name, "sites") for name in CHECKPOINTED)]


def traced(name: str) -> rm.Trace:
    """The trace of a program or a model, the same for all tests: what one asks of it another need not work out."""
    return _traced(name, _jax.remat3())


@functools.cache
def _traced(name: str, remat3: bool) -> rm.Trace:
    fun, args = PROGRAMS[name] if name in PROGRAMS else MODELS[name]()
    return rm.trace(fun, *args)


def recurrent(length: int = 24, width: int = 8) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A gated recurrence, scanned over time."""

    def loss(params, xs):
        def step(h, x):
            gate = jax.nn.sigmoid(x @ params["wg"] + h @ params["ug"])
            new = jnp.tanh(x @ params["w"] + (gate * h) @ params["u"])
            h = (1 - gate) * h + gate * new
            return h, h

        h, ys = jax.lax.scan(step, jnp.zeros((4, width)), xs)
        return (ys**2).mean() + h.sum()

    params = {key: f32(width, width) for key in ("wg", "ug", "w", "u")}
    return loss, (params, f32(length, 4, width))


MODELS = {
    "transformer": lambda: named_models.transformer(4, 32, 16, 2, scanned=False),
    "scanned transformer": lambda: named_models.transformer(4, 32, 16, 2, scanned=True),
    "resnet": lambda: named_models.resnet(2, 2, 4, 8, 2),
    "recurrent": recurrent,
}


def as_reckoned(trace: rm.Trace, at: str) -> bool:
    """Under jax_remat3 a checkpoint inside another keeps its own policy, which no reckoning of the outer one sees."""
    return not (_jax.remat3() and trace.engine.sites and at == "function")


# Random choices save what nobody would: values in shared and nested bodies, read in one call and not in another.
# JAX 0.12 with jax_remat3 saves small constants besides.
INEXACT = {"nested_scan", "nested_checkpoint", "binary8", "constant_captured"}
