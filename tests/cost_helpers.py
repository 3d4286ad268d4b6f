"""What the tests of costs and of the peak share."""

import jax

from remat_magic.facts.cost import jaxpr_cost
from remat_magic.jaxprs.walk import walk


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
