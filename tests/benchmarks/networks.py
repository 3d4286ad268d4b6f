"""Losses and training steps of language models and of images, of 1 to 60 GB, as shapes; and the parts of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Program = tuple[Callable[..., Any], tuple[Any, ...]]
F32, BF16, I32, C64 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__.strip("_")] = make
    return make


# ------------------------------------------------------------------------------------------------------------- parts


def S(*sizes: int, of: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, of)


def norm(x: Any, scale: Any = 1) -> Any:
    wide = x.astype(F32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def heads_of(x: Any, count: int) -> Any:
    return x.reshape(*x.shape[:-1], count, -1)


def attend(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """Of (batch, length, heads, width each)."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(q.dtype), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def _attention(p: Any, x: Any, count: int, *, causal: bool = True) -> Any:
    q, k, v = (heads_of(x @ p[name], count) for name in "qkv")
    return attend(q, k, v, causal=causal) @ p["o"]


def _block(count: int, *, causal: bool = True) -> Callable[[Any, Any], Any]:
    def block(x: Any, p: Any) -> Any:
        x = x + checkpoint_name(_attention(p, norm(x, p["n"]), count, causal=causal), "attended")
        return x + jax.nn.gelu(norm(x, p["m"]) @ p["up"]) @ p["down"]

    return block


def _weights(width: int, *lead: int, of: Any = F32, wide: int = 4, kv: int | None = None) -> dict[str, Any]:
    """Of a block of attention and a matmul up and down."""
    kv = kv or width
    sizes = {"q": (width, width), "k": (width, kv), "v": (width, kv), "o": (width, width), "n": (width,)}
    sizes |= {"m": (width,), "up": (width, wide * width), "down": (wide * width, width)}
    return {name: S(*lead, *size, of=of) for name, size in sizes.items()}


def cross_entropy(logits: Any, labels: Any) -> Any:
    right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits.astype(F32), -1) - right).mean()


def conv(x: Any, w: Any, stride: int = 1, groups: int = 1, dilation: int = 1) -> Any:
    spatial = "HW"[: x.ndim - 2]
    letters = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * len(spatial),
        "SAME",
        rhs_dilation=(dilation,) * len(spatial),
        dimension_numbers=letters,
        feature_group_count=groups,
    )


def scanned(step: Callable[[Any, Any], Any], x: Any, stacked: Any) -> Any:
    def each(x: Any, p: Any) -> Any:
        return step(x, p), None

    return lax.scan(each, x, stacked)[0]


def in_layers(params: Any, x: Any, act: Callable[[Any], Any] = jnp.tanh) -> Any:
    for w in params[:-1]:
        x = act(x @ w)
    return x @ params[-1]


def _adam(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A training step of it."""

    def step(params: Any, first: Any, second: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
        new = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
        return new, first, second, value

    return step


# --------------------------------------------------------------------------------------------------- language models


def _language_loss(layer: Any, params: Any, tokens: Any) -> Any:
    x = scanned(layer, params["words"][tokens], params["layers"])
    return cross_entropy(norm(x) @ params["words"].T, tokens)


@program
def lm_scanned() -> Program:
    """Scanned blocks in float32, a tied embedding."""
    params = {"layers": _weights(1024, 12), "words": S(32000, 1024)}
    return functools.partial(_language_loss, _block(16)), (params, S(4, 1024, of=I32))


@program
def lm_scanned_half() -> Program:
    """Scanned blocks in bfloat16, each a checkpoint, in a step with Adam."""
    params = {"layers": _weights(2048, 16, of=BF16), "words": S(50000, 2048, of=BF16)}
    loss = functools.partial(_language_loss, jax.checkpoint(_block(16)))
    return _adam(loss), (params, params, params, S(4, 2048, of=I32))


@program
def lm_unrolled() -> Program:
    """Unrolled blocks in float32."""
    block = _block(12)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens] + params["places"]
        for p in params["layers"]:
            x = block(x, p)
        return cross_entropy(norm(x) @ params["head"], tokens)

    params = {"layers": [_weights(768)] * 4, "words": S(50257, 768), "places": S(1024, 768), "head": S(768, 50257)}
    return loss, (params, S(8, 1024, of=I32))


@program
def lm_unrolled_half() -> Program:
    """Unrolled blocks with a gate in bfloat16, each a checkpoint that saves names."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attended"))
    def block(x: Any, p: Any) -> Any:
        x = x + checkpoint_name(_attention(p, norm(x, p["n"]), 16), "attended")
        h = norm(x, p["m"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens]
        for p in params["layers"]:
            x = block(x, p)
        return cross_entropy(norm(x) @ params["words"].T, tokens)

    layer = _weights(2048, of=BF16) | {"gate": S(2048, 8192, of=BF16)}
    return loss, ({"layers": [layer] * 4, "words": S(32000, 2048, of=BF16)}, S(4, 2048, of=I32))


@program
def lm_grouped() -> Program:
    """Grouped queries with rotated positions in bfloat16."""
    heads, groups, length, width = 16, 4, 2048, 2048

    def rotate(x: Any) -> Any:
        angles = jnp.arange(length)[:, None] / 1e4 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
        left, right = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def layer(x: Any, p: Any) -> Any:
        h = norm(x, p["n"])
        q, k, v = (
            rotate(heads_of(h @ p["q"], heads)),
            rotate(heads_of(h @ p["k"], groups)),
            heads_of(h @ p["v"], groups),
        )
        k, v = (jnp.repeat(each, heads // groups, 2) for each in (k, v))
        x = x + attend(q, k, v) @ p["o"]
        return x + jax.nn.silu(norm(x, p["m"]) @ p["up"]) @ p["down"]

    params = {"layers": _weights(width, 12, of=BF16, kv=512), "words": S(32000, width, of=BF16)}
    return functools.partial(_language_loss, layer), (params, S(2, length, of=I32))


@program
def lm_experts() -> Program:
    """A mixture of eight experts, of which each token goes to two, dispatched by index."""
    count, width, room = 8, 1024, 5120

    def experts(p: Any, x: Any) -> Any:
        gates, chosen = lax.top_k(jax.nn.softmax((x @ p["router"]).astype(F32)), 2)
        flat = chosen.reshape(-1)
        hot = jax.nn.one_hot(flat, count, dtype=I32)
        place = flat * room + jnp.clip((jnp.cumsum(hot, 0) * hot).sum(-1) - 1, 0, room - 1)
        taken = jnp.zeros((count * room, width), x.dtype).at[place].set(jnp.repeat(x, 2, 0)).reshape(count, room, width)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", taken, p["in"])), p["out"])
        return (made.reshape(-1, width)[place].reshape(-1, 2, width) * gates[..., None].astype(x.dtype)).sum(1)

    def layer(x: Any, p: Any) -> Any:
        x = x + _attention(p, norm(x, p["n"]), 16)
        return x + experts(p, norm(x, p["m"]).reshape(-1, width)).reshape(x.shape)

    layers = {name: size for name, size in _weights(width, 6, of=BF16).items() if name not in ("up", "down")}
    layers |= {"router": S(6, width, count, of=BF16), "in": S(6, count, width, 2 * width, of=BF16)}
    layers |= {"out": S(6, count, 2 * width, width, of=BF16)}
    return functools.partial(_language_loss, layer), (
        {"layers": layers, "words": S(32000, width, of=BF16)},
        S(8, 2048, of=I32),
    )


@program
def lm_lora() -> Program:
    """Frozen scanned blocks in bfloat16 with trained matrices of a low rank beside theirs."""

    def layer(x: Any, both: Any) -> Any:
        p, low = both

        def through(x: Any, name: str) -> Any:
            return x @ p[name] + (x @ low[name][0]) @ low[name][1]

        h = norm(x, p["n"])
        q, k, v = (heads_of(through(h, name), 16) for name in "qkv")
        x = x + through(attend(q, k, v), "o")
        return x + jax.nn.gelu(norm(x, p["m"]) @ p["up"]) @ p["down"]

    def loss(low: Any, frozen: Any, tokens: Any) -> Any:
        return _language_loss(layer, frozen | {"layers": (frozen["layers"], low)}, tokens)

    low = {name: (S(16, 2048, 16, of=BF16), S(16, 16, 2048, of=BF16)) for name in "qkvo"}
    frozen = {"layers": _weights(2048, 16, of=BF16), "words": S(32000, 2048, of=BF16)}
    return loss, (low, frozen, S(2, 2048, of=I32))


@program
def lm_long() -> Program:
    """A long context: attention over parts of keys and values in a scan, with a running maximum."""
    heads, part = 8, 2048

    def attend(q: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, kv: Any) -> Any:
            most, total, mixed = carry
            scores = jnp.einsum("shd,thd->hst", q, kv[0]).astype(F32) / q.shape[-1] ** 0.5
            new = jnp.maximum(most, scores.max(-1))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            mixed = mixed * old[..., None] + jnp.einsum("hst,thd->hsd", weights.astype(q.dtype), kv[1])
            return (new, total * old + weights.sum(-1), mixed), None

        begin = jnp.full((heads, len(q)), -1e30), jnp.zeros((heads, len(q))), jnp.zeros((heads, len(q), q.shape[-1]))
        parts = tuple(each.reshape(-1, part, *each.shape[1:]) for each in (k, v))
        (_, total, mixed), _ = lax.scan(jax.checkpoint(step), begin, parts)
        return (mixed / total[..., None]).transpose(1, 0, 2).reshape(len(q), -1).astype(q.dtype)

    def layer(x: Any, p: Any) -> Any:
        q, k, v = (heads_of(norm(x, p["n"]) @ p[name], heads) for name in "qkv")
        x = x + attend(q, k, v) @ p["o"]
        return x + jax.nn.gelu(norm(x, p["m"]) @ p["up"]) @ p["down"]

    params = {"layers": _weights(1024, 4, of=BF16), "words": S(16000, 1024, of=BF16)}
    return functools.partial(_language_loss, layer), (params, S(8192, of=I32))


@program
def lm_chunked() -> Program:
    """Logits of 128,000 words in parts, each a checkpoint in a scan."""
    block = _block(16)

    def loss(params: Any, tokens: Any) -> Any:
        x = norm(scanned(block, params["words"][tokens], params["layers"])).reshape(16, -1, 1024)
        one = jax.checkpoint(lambda x, labels: cross_entropy(x @ params["words"].T, labels))
        labels = tokens.reshape(16, -1)
        return lax.scan(lambda total, part: (total + one(*part), None), 0.0, (x, labels))[0]

    params = {"layers": _weights(1024, 8, of=BF16), "words": S(128000, 1024, of=BF16)}
    return loss, (params, S(8, 1024, of=I32))


@program
def translator() -> Program:
    """An encoder and a decoder that attends to it, with dropout."""

    def drop(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def cross(p: Any, x: Any, other: Any, *, causal: bool) -> Any:
        q, k, v = (heads_of(given @ p[name], 8) for name, given in (("q", x), ("k", other), ("v", other)))
        return attend(q, k, v, causal=causal) @ p["o"]

    def encode(x: Any, both: Any) -> Any:
        p, key = both
        x = x + cross(p, norm(x), norm(x), causal=False)
        return x + drop(key, jax.nn.relu(norm(x) @ p["up"]) @ p["down"])

    def decode(encoded: Any, x: Any, both: Any) -> Any:
        p, key = both
        x = x + cross(p, norm(x), norm(x), causal=True)
        x = x + cross(p["other"], norm(x), encoded, causal=False)
        return x + drop(key, jax.nn.relu(norm(x) @ p["up"]) @ p["down"])

    def loss(params: Any, source: Any, target: Any, key: Any) -> Any:
        first, second = jax.random.split(key, (2, 6))
        encoded = scanned(encode, params["words"][source], (params["encoder"], first))
        made = scanned(functools.partial(decode, encoded), params["words"][target], (params["decoder"] | {}, second))
        return cross_entropy(made @ params["words"].T, target)

    both = _weights(512, 6)
    params = {"encoder": both, "decoder": both | {"other": both}, "words": S(32000, 512)}
    return loss, (params, S(16, 512, of=I32), S(16, 512, of=I32), jax.eval_shape(lambda: jax.random.key(0)))


@program
def linear_attention() -> Program:
    """Attention without a softmax: sums of keys times values, part by part."""
    part = 128

    def mix(p: Any, x: Any) -> Any:
        q, k, v = (heads_of(x @ p[name], 8) for name in "qkv")
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        q, k, v = (y.reshape(y.shape[0], -1, part, *y.shape[2:]) for y in (q, k, v))
        before = jnp.cumsum(jnp.einsum("bcthd,bcthe->bchde", k, v), 1)
        before = jnp.pad(before[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        inside = jnp.einsum("bcshd,bcthd->bchst", q, k) * jnp.tril(jnp.ones((part, part), x.dtype))
        made = jnp.einsum("bcshd,bchde->bcshe", q, before) + jnp.einsum("bchst,bcthe->bcshe", inside, v)
        return norm(made).reshape(x.shape) @ p["o"]

    def layer(x: Any, p: Any) -> Any:
        x = x + mix(p, norm(x, p["n"]))
        return x + jax.nn.gelu(norm(x, p["m"]) @ p["up"]) @ p["down"]

    params = {"layers": _weights(512, 8), "words": S(16000, 512)}
    return functools.partial(_language_loss, layer), (params, S(4, 4096, of=I32))


@program
def state_space() -> Program:
    """Gated linear recurrences with a state, each an associative scan over the sequence."""

    def mix(p: Any, x: Any) -> Any:
        u, gate = x @ p["in"], jax.nn.silu(x @ p["gate"])
        step = jax.nn.softplus(u @ p["step"])
        decay = jnp.exp(-step[..., None] * jnp.exp(p["a"]))
        given = (step * u)[..., None] * (x @ p["b"])[..., None, :]

        def join(before: Any, after: Any) -> Any:
            return before[0] * after[0], after[0] * before[1] + after[1]

        states = lax.associative_scan(join, (decay, given), axis=1)[1]
        return ((states * (x @ p["c"])[..., None, :]).sum(-1) * gate) @ p["out"]

    def loss(params: Any, x: Any) -> Any:
        return (scanned(lambda x, p: x + mix(p, norm(x)), x, params) ** 2).mean()

    sizes = {"in": (256, 512), "gate": (256, 512), "step": (512, 512), "a": (512, 8), "b": (256, 8), "c": (256, 8)}
    return loss, ({k: S(4, *v) for k, v in (sizes | {"out": (512, 256)}).items()}, S(8, 1024, 256))


# ------------------------------------------------------------------------------------------------ images and signals


@program
def vision_transformer() -> Program:
    """Unrolled blocks over patches in bfloat16."""
    block = _block(12, causal=False)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = _conv_patches(images, params["patch"]) + params["places"]
        for p in params["layers"]:
            x = block(x, p)
        return cross_entropy(x.mean(1) @ params["head"], labels)

    params = {"patch": S(16, 16, 3, 768, of=BF16), "places": S(196, 768, of=BF16), "head": S(768, 1000, of=BF16)}
    params |= {"layers": [_weights(768, of=BF16)] * 6}
    return loss, (params, S(256, 224, 224, 3, of=BF16), S(256, of=I32))


def _conv_patches(images: Any, w: Any) -> Any:
    x = lax.conv_general_dilated(images, w, w.shape[:2], "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x.reshape(len(x), -1, x.shape[-1])


@program
def mixer() -> Program:
    """Matmuls over patches and over channels in turn."""

    def block(x: Any, p: Any) -> Any:
        x = x + (jax.nn.gelu(norm(x).swapaxes(1, 2) @ p["a"]) @ p["b"]).swapaxes(1, 2)
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(scanned(block, x @ params["in"], params["layers"]).mean(1) @ params["head"], labels)

    sizes = {"a": (196, 384), "b": (384, 196), "up": (768, 3072), "down": (3072, 768)}
    params = {"in": S(768, 768), "layers": {k: S(8, *v) for k, v in sizes.items()}, "head": S(768, 1000)}
    return loss, (params, S(128, 196, 768), S(128, of=I32))


@program
def residual_net() -> Program:
    """Residual blocks of convolutions with batch norms, in three sizes."""

    def normalise(x: Any, scale: Any) -> Any:
        mean = x.mean((0, 1, 2))
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * scale

    def block(p: Any, x: Any) -> Any:
        h = jax.nn.relu(normalise(conv(x, p["w"]), p["s"]))
        return jax.nn.relu(x + normalise(conv(h, p["u"]), p["t"]))

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = images
        for stage in params["stages"]:
            x = conv(x, stage["enter"], 2)
            for p in stage["blocks"]:
                x = block(p, x)
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    stages, before = [], 3
    for c in (64, 128, 256):
        each = {"w": S(3, 3, c, c), "u": S(3, 3, c, c), "s": S(c), "t": S(c)}
        stages.append({"enter": S(3, 3, before, c), "blocks": [each] * 2})
        before = c
    return loss, ({"stages": stages, "head": S(256, 1000)}, S(128, 224, 224, 3), S(128, of=I32))


@program
def convnext() -> Program:
    """Convolutions of each channel, then matmuls over channels, in bfloat16."""

    def block(x: Any, p: Any) -> Any:
        h = norm(conv(x, p["depth"], groups=x.shape[-1]), p["s"])
        return x + (jax.nn.gelu(h @ p["up"]) @ p["down"]) * p["t"]

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = images
        for stage in params["stages"]:
            size = stage["enter"].shape[0]
            x = lax.conv_general_dilated(
                x, stage["enter"], (size, size), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            for p in stage["blocks"]:
                x = block(x, p)
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels)

    def stage(size: int, before: int, c: int) -> Any:
        sizes = {"depth": (7, 7, 1, c), "s": (c,), "t": (c,), "up": (c, 4 * c), "down": (4 * c, c)}
        return {
            "enter": S(size, size, before, c, of=BF16),
            "blocks": [{k: S(*v, of=BF16) for k, v in sizes.items()}] * 2,
        }

    params = {"stages": [stage(4, 3, 128), stage(2, 128, 256), stage(2, 256, 512)], "head": S(512, 1000, of=BF16)}
    return loss, (params, S(128, 224, 224, 3, of=BF16), S(128, of=I32))


@program
def unet_diffusion() -> Program:
    """A U-net that predicts noise, told the time, in float32."""

    def double(p: Any, x: Any, time: Any) -> Any:
        h = conv(jax.nn.silu(norm(x)), p["w"]) + (time @ p["t"])[:, None, None]
        h = conv(jax.nn.silu(norm(h)), p["u"])
        return h + x @ p["skip"]

    def loss(params: Any, images: Any, noise: Any, times: Any) -> Any:
        angles = times[:, None] * jnp.exp(-jnp.arange(64) / 8)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        level = times[:, None, None, None]
        x, beside = conv(jnp.sqrt(1 - level) * images + jnp.sqrt(level) * noise, params["in"]), []
        for p in params["down"]:
            x = double(p, x, time)
            beside.append(x)
            x = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
        x = double(params["middle"], x, time)
        for p, other in zip(params["up"], reversed(beside), strict=True):
            x = jax.image.resize(x, (*other.shape[:3], x.shape[3]), "nearest")
            x = double(p, jnp.concatenate([x, other], -1), time)
        return ((x @ params["out"] - noise) ** 2).mean()

    def weights(before: int, after: int) -> Any:
        return {"w": S(3, 3, before, after), "u": S(3, 3, after, after), "t": S(128, after), "skip": S(before, after)}

    params = {"in": S(3, 3, 3, 64), "down": [weights(64, 64), weights(64, 128)], "middle": weights(128, 256)}
    params |= {"up": [weights(384, 128), weights(192, 64)], "out": S(64, 3)}
    return loss, (params, S(32, 128, 128, 3), S(32, 128, 128, 3), S(32))


@program
def gan_step() -> Program:
    """A step of a generator and a discriminator, each by its own gradient."""

    def generate(g: Any, z: Any) -> Any:
        x = (z @ g["in"]).reshape(-1, 8, 8, 256)
        for w in g["up"]:
            x = jax.nn.relu(
                conv(jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest"), w)
            )
        return jnp.tanh(x)

    def judge(d: Any, x: Any) -> Any:
        for w in d["down"]:
            x = jax.nn.leaky_relu(conv(x, w, 2))
        return x.mean((1, 2)) @ d["out"]

    def step(g: Any, d: Any, z: Any, images: Any) -> Any:
        def of_judge(d: Any) -> Any:
            return (jax.nn.softplus(-judge(d, images)) + jax.nn.softplus(judge(d, generate(g, z)))).mean()

        d_loss, d_grads = jax.value_and_grad(of_judge)(d)
        d = jax.tree.map(lambda p, q: p - 1e-3 * q, d, d_grads)
        g_loss, g_grads = jax.value_and_grad(lambda g: jax.nn.softplus(-judge(d, generate(g, z))).mean())(g)
        return jax.tree.map(lambda p, q: p - 1e-3 * q, g, g_grads), d, g_loss + d_loss

    wide = [(256, 256), (256, 128), (128, 64), (64, 3)]
    g = {"in": S(128, 16384), "up": [S(3, 3, *pair) for pair in wide]}
    d = {"down": [S(3, 3, *pair) for pair in ((3, 64), (64, 128), (128, 256))], "out": S(256)}
    return step, (g, d, S(512, 128), S(512, 128, 128, 3))


@program
def wave_net() -> Program:
    """Dilated convolutions over sound, with gates."""

    def loss(params: Any, x: Any, labels: Any) -> Any:
        x, kept = x @ params["in"], 0.0
        for place, p in enumerate(params["layers"]):
            h = conv(x, p["w"], dilation=2**place)
            left, right = jnp.split(h, 2, -1)
            h = jnp.tanh(left) * jax.nn.sigmoid(right)
            x, kept = x + h @ p["r"], kept + h @ p["s"]
        return cross_entropy(jax.nn.relu(kept) @ params["out"], labels)

    each = {"w": S(2, 128, 256), "r": S(128, 128), "s": S(128, 256)}
    params = {"in": S(1, 128), "layers": [each] * 8, "out": S(256, 256)}
    return loss, (params, S(16, 16000, 1), S(16, 16000, of=I32))


@program
def spectral_operator() -> Program:
    """Layers of a product in Fourier space (a neural operator) over two dimensions."""
    modes, width = 32, 64

    def layer(x: Any, p: Any) -> Any:
        f = jnp.fft.rfft2(x, axes=(1, 2))[:, :modes, :modes]
        f = jnp.einsum("bxyi,xyio->bxyo", f, lax.complex(p["re"], p["im"]))
        f = jnp.zeros((len(x), 256, 129, width), C64).at[:, :modes, :modes].set(f)
        return jax.nn.gelu(jnp.fft.irfft2(f, axes=(1, 2)) + x @ p["w"])

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((scanned(layer, x @ params["in"], params["layers"]) @ params["out"] - y) ** 2).mean()

    layers = {name: S(4, modes, modes, width, width) for name in ("re", "im")} | {"w": S(4, width, width)}
    return loss, ({"in": S(3, width), "layers": layers, "out": S(width, 1)}, S(32, 256, 256, 3), S(32, 256, 256, 1))


@program
def complex_layers() -> Program:
    """Layers of complex weights on complex signals, of which the size counts in the end."""

    def loss(params: Any, x: Any) -> Any:
        z = lax.complex(x, jnp.zeros_like(x))
        for p in params:
            z = z @ lax.complex(p["re"], p["im"])
            z = z * jax.nn.sigmoid(jnp.abs(z) - 1)
        return (jnp.abs(z) ** 2).mean()

    return loss, ([{"re": S(1024, 1024), "im": S(1024, 1024)}] * 6, S(65536, 1024))
