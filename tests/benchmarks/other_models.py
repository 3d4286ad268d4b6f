"""Models that no rule of the estimate was made on, big enough that a TPU's memory beside the vector memory matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.benchmarks.named_models import shape

_Model = tuple[Callable[..., Any], tuple[Any, ...]]
_HALF = jnp.bfloat16


def unet(batch: int = 16, size: int = 96, width: int = 32, levels: int = 2) -> _Model:
    """Convolutions down to smaller and wider images and up again, with what was there at each size put beside."""

    def convolve(x: Any, w: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def double(p: Any, x: Any) -> Any:
        return jax.nn.silu(convolve(jax.nn.silu(convolve(x, p["first"])), p["second"]))

    def loss(params: Any, images: Any) -> Any:
        x, beside = images, []
        for p in params["down"]:
            x = double(p, x)
            beside.append(x)
            x = convolve(x, p["shrink"], 2)
        x = double(params["middle"], x)
        for p, other in zip(params["up"], reversed(beside), strict=True):
            x = jax.image.resize(x, (*other.shape[:3], x.shape[3]), "nearest")
            x = double(p, jnp.concatenate([x, other], -1))
        return ((x @ params["head"] - images) ** 2).mean()

    def weights(before: int, after: int) -> dict[str, Any]:
        return {"first": shape(3, 3, before, after), "second": shape(3, 3, after, after)}

    wide = [width * 2**level for level in range(levels + 1)]
    before = [3, *wide[:-2]]
    down = [weights(b, c) | {"shrink": shape(3, 3, c, c)} for b, c in zip(before, wide[:-1], strict=True)]
    up = [weights(wide[level + 1] + wide[level], wide[level]) for level in reversed(range(levels))]
    params = {"down": down, "middle": weights(wide[-2], wide[-1]), "up": up, "head": shape(width, 3)}
    return loss, (params, shape(batch, size, size, 3))


def _norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def _attend(p: Any, x: Any, heads: int, *, causal: bool) -> Any:
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], heads, -1) for name in "qkv")
    context = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    return context.reshape(x.shape) @ p["o"]


def vision(layers: int = 4, width: int = 384, tokens: int = 196, batch: int = 64) -> _Model:
    """Unrolled attention layers in bfloat16 over patches, and a mean over them."""

    def layer(p: Any, x: Any) -> Any:
        x = x + _attend(p, _norm(x, p["norm1"]), 6, causal=False)
        return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(params: Any, patches: Any, labels: Any) -> Any:
        x = patches @ params["embed"] + params["positions"]
        for p in params["layers"]:
            x = layer(p, x)
        logits = jax.nn.log_softmax((x.mean(1) @ params["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, labels[:, None], -1).mean()

    each = {
        **{name: shape(width, width, dtype=_HALF) for name in "qkvo"},
        **{name: shape(width, dtype=_HALF) for name in ("norm1", "norm2")},
        "up": shape(width, 4 * width, dtype=_HALF),
        "down": shape(4 * width, width, dtype=_HALF),
    }
    params = {
        "embed": shape(768, width, dtype=_HALF),
        "positions": shape(tokens, width, dtype=_HALF),
        "layers": [each] * layers,
        "head": shape(width, 1000, dtype=_HALF),
    }
    return loss, (params, shape(batch, tokens, 768, dtype=_HALF), shape(batch, dtype=jnp.int32))


def experts(layers: int = 4, width: int = 256, count: int = 8, tokens: int = 16384) -> _Model:
    """Scanned layers of experts, of which each token goes to one, with room for a quarter more than its share."""
    room = tokens * 5 // (4 * count)

    def route(p: Any, x: Any) -> tuple[Any, Any]:
        weights = jax.nn.softmax(x @ p["router"])
        gate, chosen = weights.max(-1), weights.argmax(-1)
        place = (jnp.cumsum(jax.nn.one_hot(chosen, count), 0) * jax.nn.one_hot(chosen, count)).sum(-1).astype(int) - 1
        return chosen * room + jnp.clip(place, 0, room - 1), gate

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        where, gate = route(p, x)
        taken = jnp.zeros((count * room, width)).at[where].set(x).reshape(count, room, width)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", taken, p["up"]))
        made = jnp.einsum("ecf,efd->ecd", hidden, p["down"]).reshape(-1, width)
        return x + made[where] * gate[:, None], None

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

    params = {
        "router": shape(layers, width, count),
        "up": shape(layers, count, width, 2 * width),
        "down": shape(layers, count, 2 * width, width),
    }
    return loss, (params, shape(tokens, width))


def tied(layers: int = 4, width: int = 512, words: int = 8192, batch: int = 16, length: int = 512) -> _Model:
    """Unrolled layers in bfloat16 with a gate, between an embedding that is also the last matrix."""

    def layer(p: Any, x: Any) -> Any:
        x = x + _attend(p, _norm(x, p["norm1"]), 8, causal=True)
        h = _norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, embedding: Any, tokens: Any) -> Any:
        x = embedding[tokens]
        for p in params:
            x = layer(p, x)
        logits = jax.nn.log_softmax((x @ embedding.T).astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    each = {
        **{name: shape(width, width, dtype=_HALF) for name in "qkvo"},
        **{name: shape(width, dtype=_HALF) for name in ("norm1", "norm2")},
        **{name: shape(width, 3 * width, dtype=_HALF) for name in ("gate", "up")},
        "down": shape(3 * width, width, dtype=_HALF),
    }
    return loss, ([each] * layers, shape(words, width, dtype=_HALF), shape(batch, length, dtype=jnp.int32))


def gated(steps: int = 128, width: int = 512, batch: int = 512) -> _Model:
    """One layer of gated recurrent units over a long sequence."""

    def cell(p: Any, hidden: Any, x: Any) -> tuple[Any, Any]:
        reset, update = jnp.split(jax.nn.sigmoid(x @ p["w"] + hidden @ p["u"]), 2, -1)
        new = jnp.tanh(x @ p["in"] + (reset * hidden) @ p["on"])
        hidden = update * hidden + (1 - update) * new
        return hidden, hidden

    def loss(params: Any, x: Any) -> Any:
        made = jax.lax.scan(lambda hidden, x: cell(params, hidden, x), jnp.zeros_like(x[0]), x)[1]
        return (made**2).mean()

    params = {
        **{name: shape(width, 2 * width) for name in "wu"},
        **{name: shape(width, width) for name in ("in", "on")},
    }
    return loss, (params, shape(steps, batch, width))
