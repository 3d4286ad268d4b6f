"""Losses and training steps of 1 to 60 GB, as shapes, on which estimates are held against XLA's compilers.

Rules of the estimate may be made on ``TUNING`` alone, its ranges on the programs of ``unseen.py`` too.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.benchmarks.networks import (
    I32,
    PROGRAMS,
    Program,
    S,
    attend,
    conv,
    cross_entropy,
    heads_of,
    in_layers,
    norm,
    program,
    scanned,
)

# ------------------------------------------------------------------------------------------------ graphs, sets, tables


@program
def graph_attention() -> Program:
    """Attention along the edges of a graph with several heads."""
    nodes, edges, heads, each = 200_000, 2_000_000, 4, 32

    def loss(params: Any, x: Any, send: Any, receive: Any, labels: Any) -> Any:
        for p in params["layers"]:
            h = (x @ p["w"]).reshape(nodes, heads, each)
            raw = jax.nn.leaky_relu((h * p["a"]).sum(-1)[send] + (h * p["b"]).sum(-1)[receive], 0.2)
            raw = jnp.exp(raw - jax.ops.segment_max(raw, receive, nodes)[receive])
            alpha = raw / (jax.ops.segment_sum(raw, receive, nodes)[receive] + 1e-9)
            x = jax.nn.elu(jax.ops.segment_sum(h[send] * alpha[..., None], receive, nodes).reshape(nodes, -1))
        return cross_entropy(x @ params["head"], labels)

    layer = {"w": S(128, heads * each), "a": S(heads, each), "b": S(heads, each)}
    ends = S(edges, of=I32), S(edges, of=I32)
    return loss, ({"layers": [layer] * 2, "head": S(128, 40)}, S(nodes, 128), *ends, S(nodes, of=I32))


@program
def gcn_edges() -> Program:
    """Edges that weigh the heads of the nodes that they come from by a gate."""
    nodes, edges, heads = 200_000, 1_000_000, 4

    def layer(x: Any, p: Any, send: Any, receive: Any) -> Any:
        h = (x @ p["w"]).reshape(nodes, heads, -1)
        score = (h * p["a"]).sum(-1)
        gate = jax.nn.sigmoid(score[send] - score[receive])
        return jnp.tanh(jax.ops.segment_sum(h[send] * gate[..., None], receive, nodes).reshape(nodes, -1))

    def loss(params: Any, x: Any, send: Any, receive: Any) -> Any:
        for p in params:
            x = layer(x, p, send, receive)
        return (x**2).mean()

    params = [{"w": S(128, 128), "a": S(heads, 32)}] * 2
    return loss, (params, S(nodes, 128), S(edges, of=I32), S(edges, of=I32))


@program
def gaussian_process() -> Program:
    """The likelihood of a Gaussian process, by the Cholesky factor of its kernel, for several sets of points."""

    def one(params: Any, x: Any, y: Any) -> Any:
        far = ((x[:, None] - x[None]) ** 2 / params["size"]).sum(-1)
        factor = jnp.linalg.cholesky(jnp.exp(-far) + params["noise"] * jnp.eye(len(x)))
        solved = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return (solved**2).sum() + jnp.log(jnp.diagonal(factor)).sum()

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jax.vmap(one, (None, 0, 0))(params, x, y).mean()

    return loss, ({"size": S(8), "noise": S()}, S(8, 4096, 8), S(8, 4096))


@program
def message_passing() -> Program:
    """Nodes of a graph that send each other messages made of both ends, in a scan."""
    nodes, width = 65536, 128

    def loss(params: Any, x: Any, ends: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            sent = jax.nn.silu(jnp.concatenate([x[ends[0]], x[ends[1]]], -1) @ p["m"])
            arrived = jax.ops.segment_sum(sent @ p["n"], ends[1], nodes)
            return x + jnp.tanh(jnp.concatenate([x, arrived], -1) @ p["u"])

        return (scanned(step, x, params) ** 2).mean()

    sizes = {"m": (2 * width, width), "n": (width, width), "u": (2 * width, width)}
    return loss, ({k: S(6, *v) for k, v in sizes.items()}, S(nodes, width), S(2, 1_000_000, of=I32))


@program
def point_cloud() -> Program:
    """Each point looks at its nearest neighbours (edge convolutions)."""

    def layer(x: Any, w: Any) -> Any:
        far = -2 * jnp.einsum("bnd,bmd->bnm", x, x) + (x**2).sum(-1)[:, None]
        _, near = lax.top_k(-far, 16)
        taken = jax.vmap(lambda x, near: x[near])(x, near)
        both = jnp.concatenate([jnp.broadcast_to(x[:, :, None], taken.shape), taken - x[:, :, None]], -1)
        return jax.nn.relu(both @ w).max(2)

    def loss(params: Any, points: Any, labels: Any) -> Any:
        x = points @ params["in"]
        for w in params["layers"]:
            x = layer(x, w)
        return cross_entropy(x.max(1) @ params["head"], labels)

    params = {"in": S(3, 64), "layers": [S(128, 64)] * 3, "head": S(64, 40)}
    return loss, (params, S(64, 2048, 3), S(64, of=I32))


@program
def recommender() -> Program:
    """Embeddings of many features, their products two by two, and dense layers."""

    def loss(params: Any, dense: Any, ids: Any, clicked: Any) -> Any:
        taken = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)(params["tables"], ids)
        x = in_layers(params["bottom"], dense, jax.nn.relu)
        each = jnp.concatenate([x[:, None], taken], 1)
        pairs = jnp.einsum("bid,bjd->bij", each, each)[:, *jnp.triu_indices(27, 1)]
        logits = in_layers(params["top"], jnp.concatenate([x, pairs], -1), jax.nn.relu)[:, 0]
        return (jax.nn.softplus(logits) - clicked * logits).mean()

    params = {"tables": S(26, 200_000, 64), "bottom": [S(13, 512), S(512, 64)]}
    params["top"] = [S(64 + 351, 1024), S(1024, 512), S(512, 1)]
    return loss, (params, S(65536, 13), S(65536, 26, of=I32), S(65536))


@program
def contrastive() -> Program:
    """Two towers whose outputs are told apart among a large batch."""

    def loss(params: Any, images: Any, texts: Any) -> Any:
        a, b = (norm(in_layers(params[k], x, jax.nn.gelu)) for k, x in (("image", images), ("text", texts)))
        logits = a @ b.T * jnp.exp(params["scale"])
        own = jnp.arange(len(a))
        return cross_entropy(logits, own) + cross_entropy(logits.T, own)

    tower = [S(1024, 4096), S(4096, 4096), S(4096, 512)]
    return loss, ({"image": tower, "text": tower, "scale": S()}, S(16384, 1024), S(16384, 1024))


@program
def quantized_autoencoder() -> Program:
    """Convolutions to codes of a book, the nearest by distance, straight through, and back."""

    def loss(params: Any, images: Any) -> Any:
        x = images
        for w in params["down"]:
            x = jax.nn.relu(conv(x, w, 2))
        flat = x.reshape(-1, x.shape[-1])
        far = (flat**2).sum(-1, keepdims=True) - 2 * flat @ params["book"].T + (params["book"] ** 2).sum(-1)
        code = params["book"][far.argmin(-1)].reshape(x.shape)
        y = x + lax.stop_gradient(code - x)
        for w in params["up"]:
            y = conv(
                jax.image.resize(jax.nn.relu(y), (len(y), 2 * y.shape[1], 2 * y.shape[2], y.shape[3]), "nearest"), w
            )
        return ((y - images) ** 2).mean() + ((lax.stop_gradient(x) - code) ** 2).mean() + ((x - code) ** 2).mean()

    params = {"down": [S(4, 4, 3, 128), S(4, 4, 128, 128)], "book": S(1024, 128)}
    params["up"] = [S(3, 3, 128, 128), S(3, 3, 128, 3)]
    return loss, (params, S(64, 256, 256, 3))


@program
def soft_ranks() -> Program:
    """Scores are sorted, and the discounted gain of their order is the loss."""

    def loss(params: Any, x: Any, worth: Any) -> Any:
        scores = in_layers(params, x, jax.nn.relu)[..., 0]
        order = jnp.argsort(-scores, -1)
        ranked = jnp.sort(scores + jax.nn.logsumexp(scores, -1, keepdims=True), -1)
        gain = jnp.take_along_axis(worth, order, -1) / jnp.log2(jnp.arange(2, worth.shape[-1] + 2))
        return -(gain * jax.nn.log_softmax(ranked)).sum(-1).mean()

    return loss, ([S(256, 256), S(256, 256), S(256, 1)], S(1024, 1024, 256), S(1024, 1024))


@program
def pair_triangles() -> Program:
    """Updates of pairs along the third side of triangles, as for proteins, in a scan."""

    def update(z: Any, p: Any) -> Any:
        h = norm(z)
        a, b = (jax.nn.sigmoid(h @ p[f"{k}g"]) * (h @ p[k]) for k in "ab")
        z = z + (jax.nn.sigmoid(h @ p["g"]) * norm(jnp.einsum("ikc,jkc->ijc", a, b))) @ p["o"]
        q, k, v = (heads_of(norm(z) @ p[name], 4) for name in "qkv")
        z = z + attend(q, k, v, causal=False) @ p["w"]
        return z + jax.nn.relu(norm(z) @ p["up"]) @ p["down"]

    def loss(params: Any, z: Any) -> Any:
        return (scanned(update, z, params) ** 2).mean()

    sizes = dict.fromkeys(("a", "ag", "b", "bg", "g", "o", "q", "k", "v", "w"), (128, 128))
    sizes |= {"up": (128, 512), "down": (512, 128)}
    return loss, ({k: S(4, *v) for k, v in sizes.items()}, S(256, 256, 128))


# ------------------------------------------------------------------------------------------------- steps through time


@program
def lstm_crf() -> Program:
    """An LSTM and a conditional random field over its outputs, both scans over a sequence."""

    def cell(p: Any, carry: Any, x: Any) -> Any:
        hidden, state = carry
        i, f, g, o = jnp.split(x + hidden @ p, 4, -1)
        state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
        return (hidden, state), hidden

    def loss(params: Any, x: Any, tags: Any) -> Any:
        zeros = jnp.zeros((x.shape[1], 512))
        x = lax.scan(functools.partial(cell, params["u"]), (zeros, zeros), x @ params["w"])[1]
        emitted = x @ params["out"]

        def forward(a: Any, e: Any) -> Any:
            return jax.nn.logsumexp(a[:, :, None] + params["moves"], 1) + e, None

        total = jax.nn.logsumexp(lax.scan(forward, emitted[0], emitted[1:])[0], -1)
        right = jnp.take_along_axis(emitted, tags[..., None], -1).sum((0, 2)) + params["moves"][
            tags[:-1], tags[1:]
        ].sum(0)
        return (total - right).mean()

    params = {"w": S(256, 2048), "u": S(512, 2048), "out": S(512, 64), "moves": S(64, 64)}
    return loss, (params, S(256, 512, 256), S(256, 512, of=I32))


@program
def gru() -> Program:
    """Two layers of gated recurrent units over a long sequence."""

    def cell(p: Any, hidden: Any, x: Any) -> Any:
        reset, update = jnp.split(jax.nn.sigmoid(x @ p["w"] + hidden @ p["u"]), 2, -1)
        hidden = update * hidden + (1 - update) * jnp.tanh(x @ p["i"] + (reset * hidden) @ p["o"])
        return hidden, hidden

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = lax.scan(functools.partial(cell, p), jnp.zeros_like(x[0]), x)[1]
        return (x**2).mean()

    p = {"w": S(512, 1024), "u": S(512, 1024), "i": S(512, 512), "o": S(512, 512)}
    return loss, ([p] * 2, S(512, 512, 512))


@program
def policy_gradient() -> Program:
    """Advantages by a scan backwards in time, and a clipped loss of a policy and of its critic."""

    def loss(params: Any, seen: Any, done: Any, rewards: Any, old: Any) -> Any:
        h = jnp.tanh(jnp.tanh(seen @ params["a"]) @ params["b"])
        values, logits = (h @ params["value"])[..., 0], h @ params["policy"]

        def back(after: Any, now: Any) -> Any:
            reward, ended, value, following = now
            after = reward + 0.99 * following * (1 - ended) - value + 0.95 * (1 - ended) * after
            return after, after

        each = rewards, done, lax.stop_gradient(values), lax.stop_gradient(jnp.roll(values, -1, 0))
        gain = lax.scan(back, jnp.zeros_like(rewards[0]), each, reverse=True)[1]
        ratio = jnp.exp(jax.nn.log_softmax(logits).max(-1) - old)
        kept = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        return ((values - lax.stop_gradient(gain + values)) ** 2).mean() - kept.mean()

    params = {"a": S(256, 512), "b": S(512, 512), "value": S(512, 1), "policy": S(512, 18)}
    return loss, (params, S(256, 2048, 256), S(256, 2048), S(256, 2048), S(256, 2048))


@program
def neural_ode() -> Program:
    """A differential equation whose right side is a net, by steps of Runge and Kutta."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        def right(x: Any) -> Any:
            return in_layers(params, x)

        def step(x: Any, _: Any) -> Any:
            a = right(x)
            b = right(x + 0.05 * a)
            c = right(x + 0.05 * b)
            return x + (a + 2 * b + 2 * c + right(x + 0.1 * c)) / 60, None

        return ((lax.scan(step, x, None, length=40)[0] - y) ** 2).mean()

    return loss, ([S(64, 256), S(256, 256), S(256, 64)], S(16384, 64), S(16384, 64))


@program
def waves() -> Program:
    """A wave through a medium that is looked for, by steps in time, heard at some places."""

    def loss(speed: Any, source: Any, heard: Any) -> Any:
        def spread(u: Any) -> Any:
            return sum(jnp.roll(u, k, axis) for k in (1, -1) for axis in (0, 1)) - 4 * u

        def step(carry: Any, pulse: Any) -> Any:
            before, now = carry
            after = 2 * now - before + speed**2 * spread(now)
            after = after.at[512, 512].add(pulse)
            return (now, after), after[64]

        zeros = jnp.zeros_like(speed)
        return ((lax.scan(step, (zeros, zeros), source)[1] - heard) ** 2).mean()

    return loss, (S(1024, 1024), S(1000), S(1000, 1024))


@program
def heat() -> Program:
    """Heat that spreads in three dimensions from where it is controlled, by steps in groups."""

    def loss(control: Any, conducts: Any, wanted: Any) -> Any:
        def step(u: Any, put: Any) -> Any:
            padded = jnp.pad(u, 1, mode="edge")
            around = padded[2:, 1:-1, 1:-1] + padded[:-2, 1:-1, 1:-1] + padded[1:-1, 2:, 1:-1]
            around = around + padded[1:-1, :-2, 1:-1] + padded[1:-1, 1:-1, 2:] + padded[1:-1, 1:-1, :-2]
            u = u + 0.1 * jnp.exp(conducts) * (around - 6 * u)
            return u.at[64].add(put), None

        group = jax.checkpoint(lambda u, puts: lax.scan(step, u, puts))
        return ((lax.scan(group, jnp.zeros_like(wanted), control)[0] - wanted) ** 2).mean()

    return loss, (S(10, 20, 128, 128), S(128, 128, 128), S(128, 128, 128))


@program
def molecular_dynamics() -> Program:
    """Particles that attract and repel two by two, by steps in time, and where they end."""

    def energy(params: Any, x: Any) -> Any:
        near = ((x[:, None] - x[None]) ** 2).sum(-1) + jnp.eye(len(x))
        sixth = (params["size"] / near) ** 3
        return (params["depth"] * (sixth**2 - sixth)).sum()

    def loss(params: Any, x: Any, v: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            x, v = carry
            v = v - 1e-3 * jax.grad(energy, 1)(params, x)
            return (x + 1e-3 * v, v), None

        return (lax.scan(step, (x, v), None, length=50)[0][0] ** 2).mean()

    return loss, ({"size": S(), "depth": S(2048, 2048)}, S(2048, 3), S(2048, 3))


# ------------------------------------------------------------------------------------------------- of other kinds


@program
def ensemble() -> Program:
    """Members of an ensemble by vmap, each a scan over its layers."""

    def member(p: Any, x: Any, y: Any) -> Any:
        return ((scanned(lambda x, p: x + jax.nn.relu(x @ p["a"] + p["b"]) @ p["c"], x, p) - y) ** 2).mean()

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jax.vmap(member, (0, None, None))(params, x, y).sum()

    return loss, ({"a": S(8, 8, 256, 1024), "b": S(8, 8, 1024), "c": S(8, 8, 1024, 256)}, S(8192, 256), S(8192, 256))


@program
def inner_steps() -> Program:
    """What a task learns in a few steps of its own, by vmap over tasks (meta-learning)."""

    def fit(params: Any, x: Any, y: Any) -> Any:
        return ((in_layers(params, x) - y) ** 2).mean()

    def task(params: Any, x: Any, y: Any) -> Any:
        adapted = params
        for _ in range(3):
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, jax.grad(fit)(adapted, x, y))
        return fit(adapted, x, y)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jax.vmap(task, (None, 0, 0))(params, x, y).mean()

    return loss, ([S(64, 512), S(512, 512), S(512, 64)], S(128, 2048, 64), S(128, 2048, 64))


@program
def nerf() -> Program:
    """Rays through a scene: colours and densities of points along them, put together."""

    def loss(params: Any, origins: Any, ways: Any, depths: Any, colours: Any) -> Any:
        points = origins[:, None] + ways[:, None] * depths[..., None]
        angles = points[..., None] * 2.0 ** jnp.arange(10)
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*points.shape[:2], -1)
        for w in params["layers"]:
            x = jax.nn.relu(x @ w)
        made = x @ params["out"]
        clear = jnp.exp(-jax.nn.softplus(made[..., 3]) * jnp.diff(depths, axis=1, append=6.0))
        through = jnp.cumprod(jnp.concatenate([jnp.ones_like(clear[:, :1]), clear[:, :-1]], 1), 1)
        seen = ((through * (1 - clear))[..., None] * jax.nn.sigmoid(made[..., :3])).sum(1)
        return ((seen - colours) ** 2).mean()

    params = {"layers": [S(60, 256)] + [S(256, 256)] * 5, "out": S(256, 4)}
    return loss, (params, S(8192, 3), S(8192, 3), S(8192, 128), S(8192, 3))


@program
def hessian_product() -> Program:
    """The product of a net's Hessian with a direction, whose size is to be small."""

    def inner(params: Any, x: Any, y: Any) -> Any:
        return cross_entropy(in_layers(params, x), y)

    def loss(params: Any, direction: Any, x: Any, y: Any) -> Any:
        product = jax.jvp(lambda p: jax.grad(inner)(p, x, y), (params,), (direction,))[1]
        return inner(params, x, y) + sum((leaf**2).mean() for leaf in product)

    params = [S(1024, 2048), S(2048, 2048), S(2048, 1000)]
    return loss, (params, params, S(65536, 1024), S(65536, of=I32))


@program
def physics_informed() -> Program:
    """A net that solves an equation: its second derivatives at many points are in the loss."""

    def loss(params: Any, points: Any, source: Any) -> Any:
        def value(x: Any) -> Any:
            return in_layers(params, x)[0]

        def along(x: Any, e: Any) -> Any:
            return jax.jvp(lambda x: jax.jvp(value, (x,), (e,))[1], (x,), (e,))[1]

        def bend(x: Any) -> Any:
            return sum(map(functools.partial(along, x), jnp.eye(3)))

        return ((jax.vmap(bend)(points) - source) ** 2).mean()

    return loss, ([S(3, 256), S(256, 256), S(256, 256), S(256, 1)], S(262144, 3), S(262144))


TUNING = PROGRAMS
