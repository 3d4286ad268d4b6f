import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class Block(nn.Module):
    heads: int = 12

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Model(nn.Module):
    layers: int = 12
    width: int = 768
    vocabulary: int = 32000

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block()(x, mask)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


@jax.jit
def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def init(key, tokens):
    return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens)["params"], tx=optax.adamw(3e-4))


model, tokens = Model(), jax.ShapeDtypeStruct((24, 1024), jnp.int32)
args = jax.eval_shape(init, jax.random.key(0), tokens), tokens
