import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attend: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attend = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x, mask):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attend(h, h, h, mask)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key, layers=12, width=768, heads=12, vocabulary=32000):
        keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Embedding(vocabulary, width, key=keys[0])
        self.blocks = [Block(width, heads, k) for k in keys[2:]]
        self.head = eqx.nn.Linear(width, vocabulary, key=keys[1])

    def __call__(self, tokens):
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(x)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


@eqx.filter_jit
def train_step(model, opt_state, tokens):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


optimizer = optax.adamw(3e-4)
model = eqx.filter_eval_shape(Model, jax.random.key(0))
opt_state = eqx.filter_eval_shape(lambda model: optimizer.init(eqx.filter(model, eqx.is_array)), model)
args = model, opt_state, jax.ShapeDtypeStruct((24, 1024), jnp.int32)
