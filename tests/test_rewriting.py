"""Programs are written anew one way: what is shared stays shared, and what does not change stays itself."""

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from remat_magic import _jax
from remat_magic.engine.sites import PolicyWriter
from remat_magic.jaxprs.rewriting import name_everything
from remat_magic.jaxprs.walk import leaves, scopes, walk
from remat_magic.policies import AS_WRITTEN, NO_CHECKPOINT
from tests.programs import f32


def program(wrap):
    layer = wrap(lambda x: jnp.tanh(jnp.sin(x)))
    return jax.make_jaxpr(lambda x: layer(layer(x)) * 2.0)(f32(4))


def bodies(closed):
    """The jaxprs inside a program, by identity."""
    inside = [body.jaxpr for eqn in _jax.open_jaxpr(closed).eqns for body in _jax.bodies(eqn)]
    return len(inside), len(set(map(id, inside)))


def test_a_body_that_two_calls_share_is_written_once():
    closed = program(jax.jit)
    assert bodies(closed) == (2, 1)
    assert bodies(name_everything(closed).closed) == (2, 1)
    checkpointed = program(lambda layer: jax.jit(jax.checkpoint(layer)))
    bare = PolicyWriter(lambda _: NO_CHECKPOINT)(checkpointed)
    assert bodies(checkpointed) == bodies(bare) == (2, 1)
    assert not any(_jax.is_checkpoint(eqn) for _, eqn in walk(bare))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_what_does_not_change_stays_itself(wrap):
    closed = program(wrap)
    assert PolicyWriter(lambda _: AS_WRITTEN)(closed) is closed


def test_a_spliced_checkpoint_computes_the_same():
    closed = program(jax.checkpoint)
    bare = PolicyWriter(lambda _: NO_CHECKPOINT)(closed)
    names = [_jax.primitive_name(eqn) for _, eqn in walk(bare)]
    assert names == ["sin", "tanh", "sin", "tanh", "mul"]
    x = jnp.arange(4.0)
    run = jax.extend.core.jaxpr_as_fun
    assert (run(bare)(x)[0] == run(closed)(x)[0]).all()


def test_jaxprs_and_operations_come_in_the_order_of_the_walk():
    def fun(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.sin(x).sum(), lambda x: jax.jit(jnp.cos)(x).sum(), x)

    closed = jax.make_jaxpr(fun)(f32(4))
    walked = list(walk(closed))
    entered = list(dict.fromkeys(id(scope.jaxpr) for scope, _ in walked))
    assert [id(scope.jaxpr) for scope in scopes(closed)] == entered
    top = walked[0][0]
    operations = [id(leaf) for eqn in top.jaxpr.eqns for _, leaf in leaves(top, eqn)]
    assert operations == [id(eqn) for scope, eqn in walked if not scope.inner(eqn)]
