"""What tests of plans share: models, places, and where a reckoning is not to be exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import _jax
from tests.benchmarks import named_models
from tests.programs import CHECKPOINTED, KINDS, PROGRAMS, f32

BUILT_IN = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "none")
PLACES = [*((name, "function") for name in PROGRAMS), *((name, "sites") for name in CHECKPOINTED)]
EACH_PLACE = [pytest.param(name, at, marks=() if name in KINDS else pytest.mark.slow) for name, at in PLACES]


def traced(name: str) -> rm.Trace:
    """The trace of a program or a model, the same for all tests: what one asks of it another need not work out."""
    return _traced(name, _jax.remat3())


@functools.cache
def _traced(name: str, remat3: bool) -> rm.Trace:
    fun, args = PROGRAMS[name] if name in PROGRAMS else MODELS[name]()
    return rm.trace(fun, *args)


def _norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1.0)


def _attention(p: Any, x: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ p["q"], x)) @ (x @ p["v"])


def block(p: Any, x: Any) -> Any:
    """The least of a transformer's block in which every policy of JAX's saves something else."""
    x = x + _attention(p, _norm(x))
    return x + jnp.tanh(_norm(x) @ p["up"]) @ p["down"]


def transformer(
    blocks: int, *, site: bool = False, scanned: bool = False, batch: int = 4
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loss and its arguments as of the one in ``benchmarks.models``, of a fifth of the operations.

    Args:
        blocks: how many.
        site: whether each block is under ``jax.checkpoint``.
        scanned: whether the blocks are scanned over stacked weights.
        batch: how many sequences; of many, not all that is saved is at hand in a TPU's vector memory.
    """
    one, lead = jax.checkpoint(block) if site else block, (blocks,) if scanned else ()

    def loss(params: Any, x: Any) -> Any:
        if scanned:
            return (jax.lax.scan(lambda x, p: (one(p, x), None), x, params)[0] ** 2).mean()
        for p in params:
            x = one(p, x)
        return (x**2).mean()

    sizes = {"q": (32, 32), "v": (32, 32), "up": (32, 128), "down": (128, 32)}
    weights = {name: f32(*lead, *size) for name, size in sizes.items()}
    return loss, (weights if scanned else [weights] * blocks, f32(batch, 64, 32))


MODELS = {
    "transformer": lambda: transformer(2, site=True),
    "scanned transformer": lambda: named_models.transformer(4, 32, 16, 2, scanned=True),
}


def as_reckoned(trace: rm.Trace, at: str) -> bool:
    """Under jax_remat3 a checkpoint inside another keeps its own policy, which no reckoning of the outer one sees."""
    return not (_jax.remat3() and trace.engine.primal.table.sites and at == "function")


# Random choices save what nobody would: values in shared and nested bodies, read in one call and not in another.
# JAX 0.12 with jax_remat3 saves small constants besides.
INEXACT = {"nested_scan", "nested_checkpoint", "binary8", "constant_captured"}
