"""The functions that the benchmarks inspect: a GPT-2-small-sized transformer, unrolled and scanned, as shapes only."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 768, 12, 50257, 1024, 8


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def _attention(p: Any, x: Any) -> Any:
    batch, length, width = x.shape
    q, k, v = jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, axis=-1)
    q, k, v = (y.reshape(batch, length, HEADS, -1).transpose(0, 2, 1, 3) for y in (q, k, v))
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / (width // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    y = jnp.einsum("bhts,bhsd->bhtd", weights, v).transpose(0, 2, 1, 3).reshape(batch, length, width)
    return y @ p["out"] + p["out_bias"]


def block(p: Any, x: Any) -> Any:
    """One transformer block; x is (batch, length, width)."""
    x = x + _attention(p, _norm(x, p["norm1"], p["norm1_bias"]))
    h = jax.nn.gelu(_norm(x, p["norm2"], p["norm2_bias"]) @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"]


def _block_shapes(*lead: int) -> dict[str, jax.ShapeDtypeStruct]:
    w = WIDTH
    sizes = {
        "qkv": (w, 3 * w),
        "qkv_bias": (3 * w,),
        "out": (w, w),
        "out_bias": (w,),
        "norm1": (w,),
        "norm1_bias": (w,),
        "norm2": (w,),
        "norm2_bias": (w,),
        "up": (w, 4 * w),
        "up_bias": (4 * w,),
        "down": (4 * w, w),
        "down_bias": (w,),
    }
    return {name: shape(*lead, *size) for name, size in sizes.items()}


def transformer(
    blocks: int, *, site: bool = False, scanned: bool = False, policy: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training loss and its arguments.

    Args:
        blocks: how many.
        site: whether each block is under ``jax.checkpoint``.
        scanned: whether the blocks are scanned over stacked weights.
        policy: of these checkpoints.
    """
    # A function that JAX has not seen, as a cell defines one each time that it runs.
    fresh = types.FunctionType(block.__code__, globals(), "block")
    one = jax.checkpoint(fresh, policy=policy) if site else block

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens] + params["position"]
        if scanned:
            x = jax.lax.scan(lambda x, p: (one(p, x), None), x, params["blocks"])[0]
        else:
            for p in params["blocks"]:
                x = one(p, x)
        logits = x @ params["embedding"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
        return -picked.mean()

    params = {
        "embedding": shape(VOCABULARY, WIDTH),
        "position": shape(LENGTH, WIDTH),
        "blocks": _block_shapes(blocks) if scanned else [_block_shapes() for _ in range(blocks)],
    }
    return loss, (params, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))
