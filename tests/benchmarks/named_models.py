"""Trainable models with checkpoint names, small enough to compile: a transformer and a residual convolutional net."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

NAMES = ("qkv", "context", "up")


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def _block(p: Any, x: Any) -> Any:
    _, length, width = x.shape
    heads = p["qkv"].shape[-2]
    qkv = checkpoint_name(jnp.einsum("btd,dcnh->cbtnh", _norm(x, p["norm1"]), p["qkv"]), "qkv")
    q, k, v = qkv
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / (width // heads) ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    context = checkpoint_name(jnp.einsum("bnts,bsnh->btnh", weights, v), "context")
    x = x + jnp.einsum("btnh,nhd->btd", context, p["out"])
    h = checkpoint_name(_norm(x, p["norm2"]) @ p["up"], "up")
    return x + jax.nn.gelu(h) @ p["down"]


def transformer(
    blocks: int = 12, width: int = 256, length: int = 128, batch: int = 4, *, scanned: bool, heads: int = 4
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loss and its arguments; each block is a checkpoint site of the name ``block``."""

    @jax.checkpoint
    def block(p: Any, x: Any) -> Any:
        return _block(p, x)

    def loss(params: Any, x: Any) -> Any:
        if scanned:
            x = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0]
        else:
            for p in params:
                x = block(p, x)
        return (x**2).mean()

    def weights(*lead: int) -> dict[str, Any]:
        return {
            "norm1": shape(*lead, width),
            "qkv": shape(*lead, width, 3, heads, width // heads),
            "out": shape(*lead, heads, width // heads, width),
            "norm2": shape(*lead, width),
            "up": shape(*lead, width, 4 * width),
            "down": shape(*lead, 4 * width, width),
        }

    params = weights(blocks) if scanned else [weights() for _ in range(blocks)]
    return loss, (params, shape(batch, length, width))
