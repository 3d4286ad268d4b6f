import operator

import jax
import jax.numpy as jnp

SCANNED = True
L, D, H, V, B, T = 12, 1024, 16, 50304, 20, 1024


def norm(x, scale):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)


def attend(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 8
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights.astype(jnp.bfloat16), v)


def block(x, p):
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    q, k, v = (y.reshape(B, T, H, D // H) for y in jnp.split(norm(x, p["norm1"]) @ p["qkv"], 3, -1))
    x = x + attend(q, k, v).reshape(B, T, D) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def loss_fn(params, tokens):
    x = params["embedding"][tokens].astype(jnp.bfloat16)
    if SCANNED:
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
    else:
        for number in range(L):
            x = block(x, jax.tree.map(operator.itemgetter(number), params["blocks"]))
    logits = (x @ params["embedding"].T.astype(jnp.bfloat16)).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


@jax.jit
def train_step(params, momentum, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum, loss


def f32(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


blocks = {"norm1": f32(L, D), "qkv": f32(L, D, 3 * D), "out": f32(L, D, D)}
blocks |= {"norm2": f32(L, D), "up": f32(L, D, 4 * D), "down": f32(L, 4 * D, D)}
params = {"embedding": f32(V, D), "blocks": blocks}
args = params, params, jax.ShapeDtypeStruct((B, T), jnp.int32)
