"""What the tests of costs and of the peak share."""

import contextlib

import jax

from remat_magic import _jax
from remat_magic.facts.cost import jaxpr_cost
from remat_magic.jaxprs.walk import walk

REMATS = ["r2", "r3"] if _jax.JAX_VERSION >= (0, 12) else ["r2"]  # jax_remat3 is unfinished before


@contextlib.contextmanager
def under(remat):
    """Under one of JAX's two implementations of jax.checkpoint."""
    if len(REMATS) == 1:
        yield
        return
    from jax._src import config

    with config.remat3(remat == "r3"):
        yield


def S(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def cost_of(f, *args):
    return jaxpr_cost(jax.make_jaxpr(f)(*args))


def flops_of(f, *args):
    """FLOPs of a function that formulas cover completely."""
    cost = cost_of(f, *args)
    assert cost.uncosted == ()
    return cost.flops


def only(jaxpr, name):
    """The first equation of a primitive, at any depth."""
    return next(eqn for _, eqn in walk(jaxpr) if eqn.primitive.name == name)
