"""More models for the estimate, big enough that a TPU's memory beside the vector memory matters."""

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


def decoder(layers: int = 3, width: int = 512, words: int = 4096, batch: int = 8, length: int = 512) -> _Model:
    """Scanned layers with grouped queries and rotated positions in float32, and a loss of the logarithm of the sum."""
    heads, groups, each = 8, 2, width // 8

    def rotate(x: Any) -> Any:
        angles = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(0, each, 2) / each)
        left, right = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def attend(p: Any, x: Any) -> Any:
        q = rotate((x @ p["q"]).reshape(batch, length, heads, each)).reshape(batch, length, groups, -1, each)
        k = rotate((x @ p["k"]).reshape(batch, length, groups, each))
        v = (x @ p["v"]).reshape(batch, length, groups, each)
        scores = jnp.einsum("bsgrd,btgd->bgrst", q, k) / each**0.5
        masked = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
        return jnp.einsum("bgrst,btgd->bsgrd", jax.nn.softmax(masked), v).reshape(x.shape) @ p["o"]

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        x = x + attend(p, _norm(x, p["norm1"]))
        h = _norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Any, embedding: Any, head: Any, tokens: Any) -> Any:
        logits = jax.lax.scan(layer, embedding[tokens], params)[0] @ head
        right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean()

    params = {
        **{name: shape(layers, width, width) for name in "qo"},
        **{name: shape(layers, width, groups * each) for name in "kv"},
        **{name: shape(layers, width) for name in ("norm1", "norm2")},
        **{name: shape(layers, width, 3 * width) for name in ("gate", "up")},
        "down": shape(layers, 3 * width, width),
    }
    return loss, (params, shape(words, width), shape(width, words), shape(batch, length, dtype=jnp.int32))


def depthwise(blocks: int = 3, width: int = 128, size: int = 56, batch: int = 32) -> _Model:
    """Convolutions of each channel by itself in bfloat16, each before two matmuls over the channels."""

    def block(p: Any, x: Any) -> Any:
        h = jax.lax.conv_general_dilated(
            x, p["depth"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=width
        )
        h = h.astype(jnp.float32)
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
        h = jax.nn.gelu(h.astype(x.dtype) * p["scale"] @ p["up"])
        return x + h @ p["down"]

    def loss(params: Any, images: Any) -> Any:
        x = images
        for p in params:
            x = block(p, x)
        return (x.astype(jnp.float32) ** 2).mean()

    each = {
        "depth": shape(7, 7, 1, width, dtype=_HALF),
        "scale": shape(width, dtype=_HALF),
        "up": shape(width, 4 * width, dtype=_HALF),
        "down": shape(4 * width, width, dtype=_HALF),
    }
    return loss, ([each] * blocks, shape(batch, size, size, width, dtype=_HALF))


def state_space(layers: int = 3, width: int = 256, batch: int = 16, length: int = 1024) -> _Model:
    """Gated linear recurrences, each an associative scan over the sequence."""

    def mix(p: Any, x: Any) -> Any:
        decay = jax.nn.sigmoid(x @ p["decay"])
        given = (1 - decay) * (x @ p["in"])

        def join(before: Any, after: Any) -> Any:
            return before[0] * after[0], after[0] * before[1] + after[1]

        return jax.lax.associative_scan(join, (decay, given), axis=1)[1] * jax.nn.silu(x @ p["gate"])

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = x + mix(p, _norm(x, p["norm"])) @ p["out"]
        return (x**2).mean()

    each = {**{name: shape(width, width) for name in ("decay", "in", "gate", "out")}, "norm": shape(width)}
    return loss, ([each] * layers, shape(batch, length, width))


def translator(layers: int = 2, width: int = 256, batch: int = 16, length: int = 256) -> _Model:
    """An encoder and a decoder that attends to it, with dropout, in float32."""

    def attend(p: Any, x: Any, other: Any) -> Any:
        q, k, v = (
            (given @ p[name]).reshape(batch, length, 8, -1) for name, given in {"q": x, "k": other, "v": other}.items()
        )
        weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape) @ p["o"]

    def drop(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def forward(p: Any, x: Any, key: Any) -> Any:
        return x + drop(key, jax.nn.relu(_norm(x, p["norm"]) @ p["up"]) @ p["down"])

    def encode(p: Any, x: Any, key: Any) -> Any:
        return forward(p, x + attend(p["self"], x, x), key)

    def decode(p: Any, x: Any, encoded: Any, key: Any) -> Any:
        x = x + attend(p["self"], x, x)
        return forward(p, x + attend(p["cross"], x, encoded), key)

    def loss(params: Any, source: Any, target: Any, key: Any) -> Any:
        encoded, made = source, target
        for p, now in zip(params["encoder"], jax.random.split(key, layers), strict=True):
            encoded = encode(p, encoded, now)
        for p, now in zip(params["decoder"], jax.random.split(jax.random.fold_in(key, 1), layers), strict=True):
            made = decode(p, made, encoded, now)
        return ((made - target) ** 2).mean()

    attention = {name: shape(width, width) for name in "qkvo"}
    dense = {"norm": shape(width), "up": shape(width, 4 * width), "down": shape(4 * width, width), "self": attention}
    params = {"encoder": [dense] * layers, "decoder": [{**dense, "cross": attention}] * layers}
    both = shape(batch, length, width), shape(batch, length, width)
    return loss, (params, *both, jax.eval_shape(lambda: jax.random.key(0)))


def messages(rounds: int = 3, width: int = 128, nodes: int = 16384, edges: int = 262144) -> _Model:
    """Nodes of a graph that send each other messages, summed where they arrive."""

    def step(p: Any, x: Any, ends: Any) -> Any:
        sent = jnp.tanh(jnp.concatenate([x[ends[0]], x[ends[1]]], -1) @ p["message"])
        arrived = jax.ops.segment_sum(sent, ends[1], nodes)
        return x + jax.nn.gelu(jnp.concatenate([x, arrived], -1) @ p["node"])

    def loss(params: Any, x: Any, ends: Any) -> Any:
        for p in params:
            x = step(p, x, ends)
        return (x**2).mean()

    each = {"message": shape(2 * width, 2 * width), "node": shape(3 * width, width)}
    return loss, ([each] * rounds, shape(nodes, width), shape(2, edges, dtype=jnp.int32))
