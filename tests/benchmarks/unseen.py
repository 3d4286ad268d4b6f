"""More losses and training steps of 1 to 60 GB, as shapes: no rule of the estimate is made on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.benchmarks.networks import (
    BF16,
    F32,
    I32,
    Program,
    S,
    attend,
    conv,
    cross_entropy,
    heads_of,
    in_layers,
    norm,
    scanned,
)

HELD_OUT: dict[str, Callable[[], Program]] = {}


def unseen(make: Any) -> Any:
    HELD_OUT[make.__name__] = make
    return make


def _stacked(count: int, of: Any = F32, **sizes: tuple[int, ...]) -> dict[str, Any]:
    return {name: S(count, *size, of=of) for name, size in sizes.items()}


# --------------------------------------------------------------------------------------------------------- sequences


@unseen
def selective_scan() -> Program:
    """Selective states (as Mamba's), by a scan over parts of the sequence, each with sums along it."""
    width, inner, states, part = 768, 1536, 16, 64

    def mix(x: Any, p: Any) -> Any:
        h, gate = jnp.split(norm(x) @ p["in"], 2, -1)
        h = jax.nn.silu(conv(h, p["conv"], groups=inner))
        step = jax.nn.softplus((h @ p["low"]) @ p["high"])
        put, taken = h @ p["put"], h @ p["taken"]
        parts = (each.reshape(len(x), -1, part, each.shape[-1]).swapaxes(0, 1) for each in (h, step, put, taken))

        def through(state: Any, each: Any) -> Any:
            h, step, put, taken = each
            decay = jnp.cumsum(step, 1)[..., None] * -jnp.exp(p["a"])
            given = ((step * h)[..., None] * put[:, :, None]) * jnp.exp(-decay)
            states = (state[:, None] + jnp.cumsum(given, 1)) * jnp.exp(decay)
            return states[:, -1], jnp.einsum("btdn,btn->btd", states, taken)

        begin = jnp.zeros((len(x), inner, states))
        made = lax.scan(jax.checkpoint(through), begin, tuple(parts))[1].swapaxes(0, 1).reshape(h.shape)
        return x + ((made + h * p["d"]) * jax.nn.silu(gate)) @ p["out"]

    def loss(params: Any, tokens: Any) -> Any:
        x = scanned(mix, params["words"][tokens], params["layers"])
        return cross_entropy(norm(x) @ params["words"].T, tokens)

    sizes = {"in": (width, 2 * inner), "conv": (4, 1, inner), "low": (inner, 48), "high": (48, inner), "d": (inner,)}
    sizes |= {"put": (inner, states), "taken": (inner, states), "a": (inner, states), "out": (inner, width)}
    return loss, ({"layers": _stacked(6, **sizes), "words": S(50000, width)}, S(8, 2048, of=I32))


@unseen
def perceiver() -> Program:
    """A few latents attend to a large array again and again with the same weights, and to themselves between."""

    def cross(p: Any, x: Any, other: Any, heads: int) -> Any:
        q, k, v = (heads_of(given @ p[n], heads) for n, given in (("q", norm(x)), ("k", other), ("v", other)))
        x = x + attend(q, k, v, causal=False) @ p["o"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(params: Any, seen: Any, labels: Any) -> Any:
        inputs = norm(seen @ params["in"])
        x = jnp.broadcast_to(params["latents"], (len(seen), 512, 512))
        for _ in range(4):
            x = cross(params["cross"], x, inputs, 1)
            x = scanned(lambda x, p: cross(p, x, norm(x), 8), x, params["own"])
        return cross_entropy(x.mean(1) @ params["head"], labels)

    def weights(keys: int) -> dict[str, tuple[int, ...]]:
        sizes = {"q": (512, 512), "k": (keys, 512), "v": (keys, 512), "o": (512, 512)}
        return sizes | {"up": (512, 1024), "down": (1024, 512)}

    params = {"in": S(261, 256), "latents": S(512, 512), "own": _stacked(4, **weights(512)), "head": S(512, 1000)}
    params["cross"] = {name: S(*size) for name, size in weights(256).items()}
    return loss, (params, S(16, 16384, 261), S(16, of=I32))


@unseen
def relative_translator() -> Program:
    """An encoder and a decoder in bfloat16 with biases by distance and gates, in a step that follows signs."""
    heads, buckets = 12, 32

    def bias(table: Any, length: int) -> Any:
        far = jnp.clip(jnp.arange(length)[:, None] - jnp.arange(length)[None], -15, 16) + 15
        return table[far].transpose(2, 0, 1)

    def mixed(p: Any, x: Any, other: Any, near: Any) -> Any:
        q, k, v = (heads_of(given @ p[n], heads) for n, given in (("q", x), ("k", other), ("v", other)))
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32)
        if near is not None:
            scores = scores + near
        made = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(BF16), v)
        return made.reshape(*made.shape[:2], -1) @ p["o"]

    def gated(p: Any, x: Any) -> Any:
        return (jax.nn.gelu(norm(x) @ p["gate"]) * (norm(x) @ p["up"])) @ p["down"]

    def loss(params: Any, source: Any, target: Any) -> Any:
        near = bias(params["near"], source.shape[1])
        causal = bias(params["causal"], target.shape[1])
        causal = jnp.where(jnp.tril(jnp.ones(causal.shape[1:], bool)), causal, -1e9)

        def encode(x: Any, p: Any) -> Any:
            x = x + mixed(p["own"], norm(x), norm(x), near)
            return x + gated(p, x)

        encoded = norm(scanned(encode, params["words"][source], params["encoder"]))

        def decode(x: Any, p: Any) -> Any:
            x = x + mixed(p["own"], norm(x), norm(x), causal)
            x = x + mixed(p["other"], norm(x), encoded, None)
            return x + gated(p, x)

        made = scanned(decode, params["words"][target], params["decoder"])
        return cross_entropy((norm(made) @ params["head"]).astype(F32), target)

    def step(params: Any, moved: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        new = jax.tree.map(lambda p, m, g: p - 1e-4 * jnp.sign(0.9 * m + 0.1 * g), params, moved, grads)
        return new, jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, moved, grads), value

    own = _stacked(8, BF16, **dict.fromkeys("qkvo", (768, 768)))
    dense = _stacked(8, BF16, gate=(768, 2048), up=(768, 2048), down=(2048, 768))
    params = {"encoder": {"own": own} | dense, "decoder": {"own": own, "other": own} | dense}
    params |= {"words": S(32128, 768, of=BF16), "head": S(768, 32128, of=BF16)}
    params |= {"near": S(buckets, heads, of=F32), "causal": S(buckets, heads, of=F32)}
    return step, (params, params, S(16, 512, of=I32), S(16, 256, of=I32))


@unseen
def sliding_window() -> Program:
    """Attention of each part of a sequence to itself and to the part before, unrolled layers in bfloat16."""
    heads, part = 8, 256

    def layer(x: Any, p: Any) -> Any:
        h = norm(x, p["n"])
        q, k, v = (heads_of(h @ p[name], heads).reshape(len(x), -1, part, heads, 64) for name in "qkv")
        k, v = (jnp.concatenate([jnp.pad(y[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * 3), y], 2) for y in (k, v))
        scores = jnp.einsum("bcshd,bcthd->bchst", q, k).astype(F32) / 8
        ahead = jnp.arange(part)[:, None] + part - jnp.arange(2 * part)[None]
        scores = jnp.where((ahead >= 0) & (ahead < part), scores, -1e30)
        made = jnp.einsum("bchst,bcthd->bcshd", jax.nn.softmax(scores).astype(BF16), v)
        x = x + made.reshape(x.shape) @ p["o"]
        return x + (jax.nn.silu(norm(x, p["m"]) @ p["gate"]) * (norm(x, p["m"]) @ p["up"])) @ p["down"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens]
        for p in params["layers"]:
            x = layer(x, p)
        return cross_entropy(norm(x) @ params["words"].T, tokens)

    each = {name: S(512, 512, of=BF16) for name in "qkvo"} | {"n": S(512, of=BF16), "m": S(512, of=BF16)}
    each |= {"gate": S(512, 1536, of=BF16), "up": S(512, 1536, of=BF16), "down": S(1536, 512, of=BF16)}
    return loss, ({"layers": [each] * 4, "words": S(32000, 512, of=BF16)}, S(2, 16384, of=I32))


@unseen
def transducer() -> Program:
    """Sound and text by a recurrent net each, joined pair by pair, and the probability of all ways through."""

    def recur(p: Any, x: Any) -> Any:
        def cell(hidden: Any, x: Any) -> Any:
            forget, new = jnp.split(x + hidden @ p["u"], 2, -1)
            hidden = jax.nn.sigmoid(forget) * hidden + (1 - jax.nn.sigmoid(forget)) * jnp.tanh(new)
            return hidden, hidden

        x = (x @ p["w"]).swapaxes(0, 1)
        return lax.scan(cell, jnp.zeros((x.shape[1], x.shape[2] // 2)), x)[1].swapaxes(0, 1)

    def loss(params: Any, sound: Any, text: Any) -> Any:
        heard, said = recur(params["heard"], sound), recur(params["said"], params["words"][text])
        joint = jax.nn.log_softmax(jnp.tanh(heard[:, :, None] + said[:, None]) @ params["out"])
        blank = joint[..., 0]
        word = jnp.take_along_axis(joint[:, :, :-1], text[:, None, 1:, None], -1)[..., 0]

        def along(before: Any, now: Any) -> Any:
            blank, word = now
            start = before + blank

            def up(low: Any, each: Any) -> Any:
                low = jnp.logaddexp(each[0], low + each[1])
                return low, low

            rest = lax.scan(up, start[:, 0], (start[:, 1:].T, word.T))[1].T
            return jnp.concatenate([start[:, :1], rest], 1), None

        begin = jnp.zeros(blank[:, 0].shape)
        return -lax.scan(along, begin, (blank.swapaxes(0, 1), word[:, :, :].swapaxes(0, 1)))[0][:, -1].mean()

    params = {"heard": {"w": S(80, 1024), "u": S(512, 1024)}, "said": {"w": S(256, 1024), "u": S(512, 1024)}}
    return loss, (params | {"words": S(512, 256), "out": S(512, 512)}, S(32, 300, 80), S(32, 48, of=I32))


@unseen
def speech_alignment() -> Program:
    """Convolutions and attention over sound in turn (as in a conformer), and a loss over alignments."""

    def block(x: Any, p: Any) -> Any:
        x = x + jax.nn.silu(norm(x) @ p["up"]) @ p["down"] / 2
        q, k, v = (heads_of(norm(x) @ p[name], 8) for name in "qkv")
        x = x + attend(q, k, v, causal=False) @ p["o"]
        left, right = jnp.split(norm(x) @ p["glu"], 2, -1)
        h = conv(left * jax.nn.sigmoid(right), p["depth"], groups=x.shape[-1])
        mean = h.mean((0, 1))
        h = (h - mean) * lax.rsqrt(((h - mean) ** 2).mean((0, 1)) + 1e-5)
        return norm(x + jax.nn.silu(h) @ p["point"])

    def loss(params: Any, sound: Any, text: Any) -> Any:
        x = jax.nn.relu(conv(sound, params["enter"], 2))
        x = scanned(block, x, params["layers"])
        spoken = jax.nn.log_softmax(x @ params["head"])
        states = jnp.stack([jnp.zeros_like(text), text], -1).reshape(len(text), -1)
        emitted = jnp.take_along_axis(spoken, states[:, None], -1)
        skips = jnp.pad(states[:, 2:] != states[:, :-2], ((0, 0), (2, 0)))

        def step(a: Any, now: Any) -> Any:
            one = jnp.pad(a[:, :-1], ((0, 0), (1, 0)), constant_values=-1e9)
            two = jnp.where(skips, jnp.pad(a[:, :-2], ((0, 0), (2, 0)), constant_values=-1e9), -1e9)
            return jax.nn.logsumexp(jnp.stack([a, one, two]), 0) + now, None

        begin = jnp.where(jnp.arange(states.shape[1]) < 2, emitted[:, 0], -1e9)
        return -lax.scan(step, begin, emitted[:, 1:].swapaxes(0, 1))[0][:, -1].mean()

    sizes = dict.fromkeys("qkvo", (256, 256)) | {"up": (256, 1024), "down": (1024, 256), "glu": (256, 512)}
    layers = _stacked(12, **sizes, depth=(31, 1, 256), point=(256, 256))
    params = {"enter": S(3, 80, 256), "layers": layers, "head": S(256, 1024)}
    return loss, (params, S(16, 1600, 80), S(16, 100, of=I32))


@unseen
def dispatched_experts() -> Program:
    """Experts that tokens are sent to by products with ones and zeros, scanned layers in bfloat16."""
    count, room, group = 16, 160, 1024

    def experts(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax((x @ p["router"]).astype(F32))
        best = jax.nn.one_hot(gates.argmax(-1), count)
        place = ((jnp.cumsum(best, 1) - 1) * best).sum(-1)
        sent = best[..., None] * jax.nn.one_hot(place, room)[:, :, None]
        back = (sent * (gates * best).sum(-1)[..., None, None]).astype(BF16)
        taken = jnp.einsum("gsec,gsm->egcm", sent.astype(BF16), x)
        made = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", taken, p["in"])), p["out"])
        return jnp.einsum("gsec,egcm->gsm", back, made)

    def layer(x: Any, p: Any) -> Any:
        q, k, v = (heads_of(norm(x) @ p[name], 16) for name in "qkv")
        x = x + attend(q, k, v) @ p["o"]
        return x + experts(p, norm(x).reshape(-1, group, x.shape[-1])).reshape(x.shape)

    def loss(params: Any, tokens: Any) -> Any:
        x = scanned(jax.checkpoint(layer), params["words"][tokens], params["layers"])
        return cross_entropy(norm(x) @ params["head"], tokens)

    sizes = dict.fromkeys("qkvo", (1024, 1024)) | {"router": (1024, count)}
    layers = _stacked(8, BF16, **sizes, **{"in": (count, 1024, 2048), "out": (count, 2048, 1024)})
    params = {"layers": layers, "words": S(32000, 1024, of=BF16), "head": S(1024, 32000, of=BF16)}
    return loss, (params, S(8, 1024, of=I32))


@unseen
def fourier_mixer() -> Program:
    """Tokens mixed by a Fourier transform over both dimensions, of which the real part goes on."""

    def layer(x: Any, p: Any) -> Any:
        x = norm(x + jnp.fft.fft(jnp.fft.fft(x), axis=1).real)
        return norm(x + jax.nn.gelu(x @ p["up"]) @ p["down"])

    def loss(params: Any, tokens: Any) -> Any:
        x = scanned(layer, params["words"][tokens], params["layers"])
        return cross_entropy(x @ params["words"].T, tokens)

    params = {"layers": _stacked(6, up=(512, 2048), down=(2048, 512)), "words": S(16000, 512)}
    return loss, (params, S(16, 1024, of=I32))


# ------------------------------------------------------------------------------------------------------------- images


@unseen
def bottleneck_net() -> Program:
    """Bottlenecks of convolutions with batch norms that keep running means, in a step with momentum."""

    def normalise(x: Any, p: Any, kept: Any) -> Any:
        mean, square = x.mean((0, 1, 2)), (x**2).mean((0, 1, 2))
        made = (x - mean) * (lax.rsqrt(square - mean**2 + 1e-5) * p["scale"]) + p["shift"]
        return made, 0.9 * kept + 0.1 * jnp.stack([mean, square])

    def block(p: Any, kept: Any, x: Any) -> Any:
        h, new = x, []
        for name in "abc":
            h, mean = normalise(conv(h, p[name]["w"]), p[name], kept[name])
            new.append(mean)
            h = h if name == "c" else jax.nn.relu(h)
        return jax.nn.relu(x + h), dict(zip("abc", new, strict=True))

    def loss(params: Any, kept: Any, images: Any, labels: Any) -> Any:
        x, new = jax.nn.relu(conv(images, params["stem"], 2)), []
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, of_stage in zip(params["stages"], kept, strict=True):
            x = conv(x, stage["enter"], 2)
            means = []
            for p, each in zip(stage["blocks"], of_stage, strict=True):
                x, mean = block(p, each, x)
                means.append(mean)
            new.append(means)
        return cross_entropy(x.mean((1, 2)) @ params["head"], labels), new

    def step(params: Any, moved: Any, kept: Any, *batch: Any) -> Any:
        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(params, kept, *batch)
        moved = jax.tree.map(lambda m, g: 0.9 * m + g, moved, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moved), moved, kept, value

    def part(size: int, before: int, after: int) -> Any:
        return {"w": S(size, size, before, after), "scale": S(after), "shift": S(after)}

    stages, means, before = list[Any](), list[Any](), 64
    for c in (64, 128, 256):
        each = {"a": part(1, 4 * c, c), "b": part(3, c, c), "c": part(1, c, 4 * c)}
        stages.append({"enter": S(1, 1, before, 4 * c), "blocks": [each] * 2})
        means.append([{"a": S(2, c), "b": S(2, c), "c": S(2, 4 * c)}] * 2)
        before = 4 * c
    params = {"stem": S(7, 7, 3, 64), "stages": stages, "head": S(1024, 1000)}
    return step, (params, params, means, S(64, 448, 448, 3), S(64, of=I32))


@unseen
def attention_unet() -> Program:
    """A U-net with group norms, attention in the middle and transposed convolutions upwards, in bfloat16."""

    def grouped(x: Any) -> Any:
        wide = x.astype(F32).reshape(*x.shape[:-1], 8, -1)
        mean = wide.mean((1, 2, 4), keepdims=True)
        spread = ((wide - mean) ** 2).mean((1, 2, 4), keepdims=True)
        return ((wide - mean) * lax.rsqrt(spread + 1e-5)).reshape(x.shape).astype(x.dtype)

    def block(p: Any, x: Any, time: Any) -> Any:
        h = conv(jax.nn.silu(grouped(x)), p["a"]) + (jax.nn.silu(time) @ p["t"])[:, None, None]
        return conv(jax.nn.silu(grouped(h)), p["b"]) + conv(x, p["skip"])

    def mixed(p: Any, x: Any) -> Any:
        flat = grouped(x).reshape(len(x), -1, x.shape[-1])
        q, k, v = (heads_of(flat @ p[name], 4) for name in "qkv")
        return x + (attend(q, k, v, causal=False) @ p["o"]).reshape(x.shape)

    def loss(params: Any, images: Any, noise: Any, time: Any) -> Any:
        x, beside = conv(images + noise, params["in"]), []
        for p in params["down"]:
            x = block(p, x, time)
            beside.append(x)
            x = conv(x, p["less"], 2)
        x = mixed(params["mixed"], block(params["middle"], x, time))
        for p, other in zip(params["up"], reversed(beside), strict=True):
            x = lax.conv_transpose(x, p["more"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = block(p, jnp.concatenate([x, other], -1), time)
        return ((conv(jax.nn.silu(grouped(x)), params["out"]) - noise).astype(F32) ** 2).mean()

    def weights(before: int, after: int) -> Any:
        sizes = {"a": (3, 3, before, after), "b": (3, 3, after, after), "t": (256, after)}
        return {k: S(*v, of=BF16) for k, v in (sizes | {"skip": (1, 1, before, after)}).items()}

    def sized(name: str, *size: int) -> Any:
        return {name: S(*size, of=BF16)}

    down = [weights(96, 96) | sized("less", 3, 3, 96, 96), weights(96, 192) | sized("less", 3, 3, 192, 192)]
    up = [weights(384, 192) | sized("more", 2, 2, 384, 192), weights(192, 96) | sized("more", 2, 2, 192, 96)]
    params = {"down": down, "up": up, "middle": weights(192, 384), "mixed": {n: S(384, 384, of=BF16) for n in "qkvo"}}
    params |= sized("in", 3, 3, 4, 96) | sized("out", 3, 3, 96, 4)
    return loss, (params, S(64, 128, 128, 4, of=BF16), S(64, 128, 128, 4, of=BF16), S(64, 256, of=BF16))


@unseen
def diffusion_transformer() -> Program:
    """Scanned blocks whose norms are scaled and shifted by the time, in bfloat16, each a checkpoint."""

    def block(condition: Any, x: Any, p: Any) -> Any:
        moved = jnp.split((jax.nn.silu(condition) @ p["to"])[:, None], 6, -1)
        h = norm(x) * (1 + moved[0]) + moved[1]
        q, k, v = (heads_of(each, 16) for each in jnp.split(h @ p["qkv"], 3, -1))
        x = x + moved[2] * (attend(q, k, v, causal=False) @ p["o"])
        h = norm(x) * (1 + moved[3]) + moved[4]
        return x + moved[5] * (jax.nn.gelu(h @ p["up"]) @ p["down"])

    def loss(params: Any, images: Any, noise: Any, time: Any, labels: Any) -> Any:
        angles = time[:, None] * jnp.exp(-jnp.arange(128) / 16)
        told = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(BF16) @ params["time"]
        condition = told + params["labels"][labels]
        x = ((1 - time)[:, None, None] * images + time[:, None, None] * noise).astype(BF16)
        x = x @ params["in"] + params["places"]
        x = scanned(jax.checkpoint(functools.partial(block, condition)), x, params["layers"])
        return (((norm(x) @ params["out"]).astype(F32) - (noise - images)) ** 2).mean()

    sizes = {"to": (1152, 6912), "qkv": (1152, 3456), "o": (1152, 1152), "up": (1152, 4608), "down": (4608, 1152)}
    params: dict[str, Any] = {"layers": _stacked(14, BF16, **sizes)}
    small = {"time": (256, 1152), "labels": (1001, 1152), "in": (16, 1152), "places": (1024, 1152), "out": (1152, 16)}
    params |= {k: S(*v, of=BF16) for k, v in small.items()}
    return loss, (params, S(16, 1024, 16), S(16, 1024, 16), S(16), S(16, of=I32))


@unseen
def masked_autoencoder() -> Program:
    """A quarter of an image's patches, by index, encoded; all of them decoded; the others are to be right."""

    def block(heads: int, x: Any, p: Any) -> Any:
        q, k, v = (heads_of(each, heads) for each in jnp.split(norm(x) @ p["qkv"], 3, -1))
        x = x + attend(q, k, v, causal=False) @ p["o"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(params: Any, patches: Any, shown: Any, back: Any) -> Any:
        x = patches @ params["in"] + params["places"]
        x = jnp.take_along_axis(x, shown[..., None], 1)
        x = norm(scanned(functools.partial(block, 12), x, params["encoder"])) @ params["between"]
        hidden = jnp.broadcast_to(params["mask"], (len(x), patches.shape[1] - x.shape[1], x.shape[2]))
        x = jnp.take_along_axis(jnp.concatenate([x, hidden], 1), back[..., None], 1) + params["other_places"]
        made = norm(scanned(functools.partial(block, 8), x, params["decoder"])) @ params["out"]
        wrong = ((made - patches) ** 2).mean(-1)
        return (wrong * (back >= shown.shape[1])).mean()

    def weights(count: int, c: int) -> Any:
        return _stacked(count, qkv=(c, 3 * c), o=(c, c), up=(c, 4 * c), down=(4 * c, c))

    params = {"encoder": weights(8, 768), "decoder": weights(4, 512), "in": S(768, 768), "places": S(196, 768)}
    params |= {"between": S(768, 512), "mask": S(512), "other_places": S(196, 512), "out": S(512, 768)}
    return loss, (params, S(256, 196, 768), S(256, 49, of=I32), S(256, 196, of=I32))


@unseen
def image_flow() -> Program:
    """A flow of couplings of halves of the channels by small convolutional nets, and its likelihood."""

    def couple(x: Any, p: Any) -> Any:
        z, total = x
        sign, size = jnp.linalg.slogdet(p["mix"])
        z = z @ p["mix"] * sign
        left, right = jnp.split(z, 2, -1)
        h = jax.nn.relu(conv(jax.nn.relu(conv(left, p["a"])), p["b"]))
        scale, shift = jnp.split(conv(h, p["c"]), 2, -1)
        scale = jnp.tanh(scale)
        right = right * jnp.exp(scale) + shift
        return jnp.concatenate([left, right], -1), total + scale.sum((1, 2, 3)) + size * z.shape[1] * z.shape[2]

    def loss(params: Any, images: Any) -> Any:
        x = images.reshape(len(images), 32, 2, 32, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 32, 32, 12)
        z, total = scanned(couple, (x, jnp.zeros(len(x))), params)
        return ((z**2).sum((1, 2, 3)) / 2 - total).mean()

    return loss, (
        _stacked(16, mix=(12, 12), a=(3, 3, 6, 256), b=(1, 1, 256, 256), c=(3, 3, 256, 12)),
        S(128, 64, 64, 3),
    )


# ---------------------------------------------------------------------------------------------- graphs, sets, tables


@unseen
def point_transformer() -> Program:
    """Points attend to their neighbours, which are told by index, with weights for each channel."""

    def layer(x: Any, where: Any, near: Any, p: Any) -> Any:
        def taken(y: Any) -> Any:
            return jax.vmap(lambda y, near: y[near])(y, near)

        far = jax.nn.relu((where[:, :, None] - taken(where)) @ p["far"]) @ p["farther"]
        weights = (x @ p["q"])[:, :, None] - taken(x @ p["k"]) + far
        weights = jax.nn.softmax(jax.nn.relu(weights @ p["a"]) @ p["b"], 2)
        return x + (weights * (taken(x @ p["v"]) + far)).sum(2) @ p["o"]

    def loss(params: Any, where: Any, near: Any, labels: Any) -> Any:
        x = where @ params["in"]
        for p in params["layers"]:
            x = layer(x, where, near, p)
        return cross_entropy(x @ params["head"], labels)

    each = {name: S(96, 96) for name in ("q", "k", "v", "o", "a", "b", "farther")} | {"far": S(3, 96)}
    params = {"in": S(3, 96), "layers": [each] * 2, "head": S(96, 13)}
    return loss, (params, S(8, 8192, 3), S(8, 8192, 16, of=I32), S(8, 8192, of=I32))


@unseen
def graph_transformer() -> Program:
    """Nodes that attend along edges with features of their own, which change as well, in a scan."""
    nodes, edges, heads, width = 50_000, 600_000, 8, 128

    def loss(params: Any, x: Any, e: Any, send: Any, receive: Any) -> Any:
        def layer(both: Any, p: Any) -> Any:
            x, e = both
            q, k, v = (heads_of(norm(x) @ p[name], heads) for name in "qkv")
            each = heads_of(norm(e) @ p["e"], heads)
            raw = q[receive] * k[send] * each / 4
            score = jnp.exp(jnp.clip(raw.sum(-1), -5, 5))
            total = jax.ops.segment_sum(score, receive, nodes)
            mixed = jax.ops.segment_sum(v[send] * score[..., None], receive, nodes) / (total[..., None] + 1e-6)
            x = x + mixed.reshape(nodes, width) @ p["o"]
            e = e + raw.reshape(edges, width) @ p["f"]
            return x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"], e

        x, e = scanned(layer, (x @ params["x"], e @ params["e"]), params["layers"])
        return (x.mean(0) ** 2).sum() + (e.mean(0) ** 2).sum()

    sizes = dict.fromkeys(("q", "k", "v", "e", "o", "f"), (width, width))
    layers = _stacked(4, **sizes, up=(width, 2 * width), down=(2 * width, width))
    ends = S(edges, of=I32), S(edges, of=I32)
    return loss, ({"x": S(64, width), "e": S(16, width), "layers": layers}, S(nodes, 64), S(edges, 16), *ends)


@unseen
def bags() -> Program:
    """Bags of words of one large table, each summed, crossed, and what is sold foretold of many kinds at once."""
    rows, taken, kinds = 32768, 4_000_000, 8

    def loss(params: Any, dense: Any, words: Any, bag: Any, sold: Any) -> Any:
        summed = jax.ops.segment_sum(params["table"][words], bag, rows * kinds).reshape(rows, -1)
        x0 = x = jnp.concatenate([jax.nn.relu(dense @ params["dense"]), summed], -1)
        for p in params["cross"]:
            x = x0 * ((x @ p["u"]) @ p["v"] + p["b"]) + x
        experts = jax.nn.relu(jnp.einsum("bd,edh->ebh", x, params["experts"]))
        gates = jax.nn.softmax(jnp.einsum("bd,dte->tbe", x, params["gates"]))
        mixed = jnp.einsum("ebh,tbe->tbh", experts, gates)
        logits = jnp.einsum("tbh,th->bt", mixed, params["heads"])
        return (jax.nn.softplus(logits) - sold * logits).mean()

    width = 64 * kinds + 128
    params: dict[str, Any] = {"table": S(3_000_000, 64), "dense": S(32, 128), "experts": S(6, width, 512)}
    params |= {"cross": [{"u": S(width, 128), "v": S(128, width), "b": S(width)}] * 3}
    params |= {"gates": S(width, 4, 6), "heads": S(4, 512)}
    return loss, (params, S(rows, 32), S(taken, of=I32), S(taken, of=I32), S(rows, 4))


@unseen
def transport() -> Program:
    """Two clouds of features that are carried to one another by Sinkhorn's steps."""

    def loss(params: Any, a: Any, b: Any) -> Any:
        a, b = (in_layers(params, x, jax.nn.gelu) for x in (a, b))
        cost = ((a**2).sum(-1)[..., None] + (b**2).sum(-1)[:, None] - 2 * jnp.einsum("bnd,bmd->bnm", a, b)) / 0.1

        def step(g: Any, _: Any) -> Any:
            f = -jax.nn.logsumexp(g[:, None] - cost, 2)
            return -jax.nn.logsumexp(f[..., None] - cost, 1), f

        g, f = lax.scan(step, jnp.zeros(cost.shape[::2]), None, length=12)
        return (jnp.exp(f[-1][..., None] + g[:, None] - cost) * cost).sum((1, 2)).mean()

    return loss, ([S(64, 256), S(256, 256), S(256, 64)], S(16, 2048, 64), S(16, 2048, 64))


# ------------------------------------------------------------------------------------------ derivatives, time, chance


@unseen
def sliced_scores() -> Program:
    """A net that learns the slope of a density: its derivative along directions by chance is in the loss."""

    def loss(params: Any, x: Any, ways: Any) -> Any:
        def score(x: Any) -> Any:
            h = x
            for p in params["layers"]:
                h = jax.nn.softplus(norm(h) @ p["w"] + p["b"]) @ p["v"] + h
            return h @ params["out"]

        made, along = jax.jvp(score, (x,), (ways,))
        return ((ways * along).sum(-1) + ((ways * made).sum(-1) ** 2) / 2).mean()

    params = {"layers": [{"w": S(512, 1024), "b": S(1024), "v": S(1024, 512)}] * 4, "out": S(512, 512)}
    return loss, (params, S(65536, 512), S(65536, 512))


@unseen
def mixture_density() -> Program:
    """A recurrent net that foretells mixtures of correlated pairs of numbers, as for handwriting."""
    count = 20

    def loss(params: Any, strokes: Any) -> Any:
        def cell(p: Any, carry: Any, x: Any) -> Any:
            hidden, state = carry
            i, f, g, o = jnp.split(x @ p["w"] + hidden @ p["u"] + p["b"], 4, -1)
            state = jax.nn.sigmoid(f + 1) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
            return (hidden, state), hidden

        x = strokes[:-1]
        for p in params["layers"]:
            begin = jnp.zeros((x.shape[1], 400)), jnp.zeros((x.shape[1], 400))
            x = lax.scan(functools.partial(cell, p), begin, x)[1]
        weights, mx, my, sx, sy, tied = jnp.split(x @ params["out"], 6, -1)
        tied = jnp.tanh(tied)
        x, y = ((strokes[1:, :, k, None] - m) / jnp.exp(s) for k, m, s in ((0, mx, sx), (1, my, sy)))
        far = (x**2 + y**2 - 2 * tied * x * y) / (1 - tied**2)
        each = jax.nn.log_softmax(weights) - far / 2 - sx - sy - jnp.log1p(-(tied**2)) / 2
        return -jax.nn.logsumexp(each, -1).mean()

    layers = [{"w": S(before, 1600), "u": S(400, 1600), "b": S(1600)} for before in (3, 400)]
    return loss, ({"layers": layers, "out": S(400, 6 * count)}, S(701, 128, 3))


@unseen
def learned_start() -> Program:
    """Weights of a small convolutional net from which tasks learn by a scan of steps, by vmap over tasks."""

    def made(params: Any, x: Any) -> Any:
        for w in params["convs"]:
            x = conv(x, w, 2)
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-3))
        return x.reshape(len(x), -1) @ params["head"]

    def task(params: Any, rates: Any, x: Any, labels: Any, other: Any, other_labels: Any) -> Any:
        def step(fast: Any, _: Any) -> Any:
            grads = jax.grad(lambda fast: cross_entropy(made(fast, x), labels))(fast)
            return jax.tree.map(lambda p, r, g: p - r * g, fast, rates, grads), None

        return cross_entropy(made(lax.scan(step, params, None, length=5)[0], other), other_labels)

    def loss(params: Any, rates: Any, *batch: Any) -> Any:
        return jax.vmap(task, (None, None, 0, 0, 0, 0))(params, rates, *batch).mean()

    params = {"convs": [S(3, 3, 3, 32), S(3, 3, 32, 32), S(3, 3, 32, 32)], "head": S(11 * 11 * 32, 5)}
    rates = {"convs": [S(), S(), S()], "head": S()}
    images = S(16, 25, 84, 84, 3), S(16, 25, of=I32)
    return loss, (params, rates, *images, *images)


@unseen
def smoke() -> Program:
    """Smoke in three dimensions, carried by a wind that is looked for, by steps in time."""

    def loss(wind: Any, start: Any, wanted: Any) -> Any:
        def slope(u: Any, axis: int) -> Any:
            return (jnp.roll(u, -1, axis) - jnp.roll(u, 1, axis)) / 2

        def step(u: Any, _: Any) -> Any:
            carried = sum(wind[axis] * slope(u, axis) for axis in range(3))
            spread = sum(jnp.roll(u, k, axis) for k in (1, -1) for axis in range(3)) - 6 * u
            half = u + 0.05 * (0.1 * spread - carried)
            carried = sum(wind[axis] * slope(half, axis) for axis in range(3))
            return u + 0.1 * (0.1 * spread - carried) / (1 + half**2), None

        return ((lax.scan(step, start, None, length=60)[0] - wanted) ** 2).mean()

    return loss, (S(3, 160, 160, 160), S(160, 160, 160), S(160, 160, 160))


@unseen
def latent_walk() -> Program:
    """A stochastic equation of a hidden state, by small steps with noise, from what is seen and back to it."""

    def loss(params: Any, seen: Any, key: Any) -> Any:
        told = in_layers(params["told"], seen, jax.nn.relu)

        def step(carry: Any, now: Any) -> Any:
            z, total = carry
            told, key = now
            drift = in_layers(params["drift"], jnp.concatenate([z, told], -1), jnp.tanh)
            prior = in_layers(params["prior"], z, jnp.tanh)
            wide = jax.nn.softplus(z @ params["wide"]) + 1e-2
            total = total + (((drift - prior) / wide) ** 2).mean()
            z = z + 0.1 * drift + 0.3 * wide * jax.random.normal(key, z.shape)
            return (z, total), z

        start = jnp.zeros((seen.shape[1], 64)), 0.0
        (_, total), z = lax.scan(step, start, (told, jax.random.split(key, len(seen))))
        return ((in_layers(params["shown"], z, jax.nn.relu) - seen) ** 2).mean() + total

    params = {"told": [S(32, 128), S(128, 64)], "drift": [S(128, 256), S(256, 256), S(256, 64)]}
    params |= {"prior": [S(64, 256), S(256, 64)], "wide": S(64, 64), "shown": [S(64, 128), S(128, 32)]}
    return loss, (params, S(100, 8192, 32), jax.eval_shape(lambda: jax.random.key(0)))
