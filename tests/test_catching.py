"""Code as it is, run until its training step is called."""

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm


def loss_fn(params, x):
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def test_a_loop_in_main_stops_at_its_step():
    ran = []

    def main(steps):
        params = [jnp.ones((4, 4))] * 3

        @jax.jit
        def train_step(params, x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return jax.tree.map(lambda w, g: w - g, params, grads), loss

        for _ in range(steps):
            params, _ = train_step(params, jnp.ones((2, 4)))
            ran.append(1)

    trace = rm.catch(main, 3)
    assert (ran, trace.function_name, trace.step is not None) == ([], "loss_fn", True)


def test_a_block_without_a_gradient_runs_to_its_end_and_says_so():
    with rm.catching() as caught:
        value = jax.jit(loss_fn)([jnp.ones((4, 4))], jnp.ones((2, 4)))
    assert float(value) > 0
    with pytest.raises(rm.RematError, match="nothing took a gradient: loss_fn ran"):
        _ = caught.trace
