"""Evaluated callees are recognised for what they are."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from remat_magic.notebook.callee import called, prepares
from remat_magic.notebook.rebinding import applied
from remat_magic.records import RematError


def f(x, y=1.0):
    return jnp.sum(x * y)


def g(x, y=1.0):
    return f(x, y), {"aux": y}


def seen(callee, *args, **kwargs):
    inspected = called(callee, args, kwargs)
    return inspected.fun, inspected.args, dict(inspected.kwargs), inspected.wrt, inspected.has_aux


PLAIN = [
    (f, None, False),
    (jax.grad(f), 0, False),
    (jax.grad(f, argnums=1), 1, False),
    (jax.grad(f, argnums=-1), 1, False),
    (jax.grad(f, argnums=(1, 0)), (1, 0), False),
    (jax.value_and_grad(f, (0,)), (0,), False),
    (jax.grad(g, has_aux=True), 0, True),
    (jax.value_and_grad(g, argnums=(0, 1), has_aux=True), (0, 1), True),
    (jax.jit(jax.grad(f)), 0, False),
    (jax.jit(jax.jit(jax.value_and_grad(f, argnums=1))), 1, False),
    (jax.jacrev(f, argnums=1), 1, False),
    (functools.partial(jax.grad(f, argnums=1)), 1, False),
]


@pytest.mark.parametrize(("callee", "wrt", "has_aux"), PLAIN)
def test_a_gradient_is_of_the_function_that_it_differentiates(callee, wrt, has_aux):
    assert seen(callee, 2.0, 3.0) == (g if has_aux else f, (2.0, 3.0), {}, wrt, has_aux)
    assert called(callee, (2.0, 3.0), {}).notes == ()


@pytest.mark.parametrize("taker", [jax.vjp, jax.linearize, jax.ad_checkpoint.print_saved_residuals])
def test_what_takes_the_function_and_its_arguments_is_seen_through(taker):
    assert seen(taker, f, 2.0, 3.0) == (f, (2.0, 3.0), {}, None, False)


def test_jitted_functions_are_traced_as_they_are():
    jitted = jax.jit(f)
    assert seen(jitted, 2.0) == (jitted, (2.0,), {}, None, False)
    assert seen(jax.grad(jitted), 2.0) == (jitted, (2.0,), {}, 0, False)
    assert called(jitted, (2.0,), {}).notes == ()


def test_a_jitted_gradient_that_says_how_arguments_are_spread_stays_whole():
    """Peeled, the specs would be lost, and with them that each device has a part."""
    step = jax.jit(jax.value_and_grad(f), in_shardings=(P(), P("data")))
    callee = called(step, (1.0, 2.0), {})
    assert (callee.fun, callee.loss, callee.wrt) == (step, f, None)
    plain = called(jax.jit(jax.value_and_grad(f)), (1.0, 2.0), {})
    assert (plain.fun, plain.wrt) == (f, 0)


def test_partials_become_leading_arguments_and_positions_move():
    assert seen(functools.partial(f, 2.0), 3.0) == (f, (2.0, 3.0), {}, None, False)
    assert seen(functools.partial(f, y=3.0), 2.0) == (f, (2.0,), {"y": 3.0}, None, False)
    assert seen(functools.partial(f, y=3.0), 2.0, y=4.0) == (f, (2.0,), {"y": 4.0}, None, False)
    inside = jax.grad(functools.partial(f, 2.0))  # its argument 0 is f's argument 1
    assert seen(inside, 3.0) == (f, (2.0, 3.0), {}, 1, False)
    outside = functools.partial(jax.grad(f, argnums=(1, 0)), 2.0)
    assert seen(outside, 3.0) == (f, (2.0, 3.0), {}, (1, 0), False)
    both = functools.partial(jax.grad(functools.partial(g, 2.0), has_aux=True), 3.0)
    assert seen(both) == (g, (2.0, 3.0), {}, 1, True)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, x):
        return jnp.sum(self.scale * x)

    @jax.jit
    def jitted(self, x):
        return jnp.sum(x)

    def __call__(self, x):
        return self.loss(x)


class Layer(NamedTuple):
    """A callable pytree, as equinox's modules are."""

    weight: float

    def __call__(self, x):
        return jnp.sum(self.weight * x)


def test_a_method_takes_its_object_as_an_argument():
    model = Scaled(2.0)
    assert seen(model.loss, 3.0) == (Scaled.loss, (model, 3.0), {}, None, False)
    assert seen(jax.grad(model.loss), 3.0) == (Scaled.loss, (model, 3.0), {}, 1, False)
    assert seen(model.jitted, 3.0) == (Scaled.jitted, (model, 3.0), {}, None, False)


def test_a_callable_object_is_itself_or_its_call():
    model, layer = Scaled(2.0), Layer(2.0)
    assert seen(model, 3.0) == (model, (3.0,), {}, None, False)
    assert seen(layer, 3.0) == (Layer.__call__, (layer, 3.0), {}, None, False)
    assert seen(jax.grad(layer), 3.0) == (Layer.__call__, (layer, 3.0), {}, 1, False)


def test_of_a_second_derivative_one_gradient_is_taken_off_and_it_is_said():
    second = jax.grad(jax.grad(f))
    fun, args, _, wrt, _ = seen(second, 2.0)
    assert (args, wrt) == ((2.0,), 0)
    assert seen(fun, 2.0)[0] is f
    (note,) = called(second, (2.0,), {}).notes
    assert "itself a derivative" in note
    (note,) = called(jax.vjp, (jax.grad(f), 2.0), {}).notes
    assert "itself a derivative" in note


@pytest.mark.parametrize(
    "derivative", [jax.vmap(jax.grad(f)), jax.jacfwd(f), jax.hessian(f), jax.checkpoint(jax.grad(f))]
)
def test_derivatives_below_a_wrapper_are_said(derivative):
    inspected = called(derivative, (2.0,), {})
    assert inspected.fun is derivative
    assert "itself a derivative" in " ".join(inspected.notes)


def test_unknown_wrappers_are_traced_as_they_are():
    @functools.wraps(f)
    def logged(*args):
        return f(*args)

    inspected = called(jax.grad(logged), (2.0,), {})
    assert (inspected.fun, inspected.wrt) == (logged, 0)
    assert inspected.notes == ()


def test_a_wrapper_that_is_a_pytree_stays_whole():
    class Gradient(NamedTuple):
        """What equinox's ``filter_grad`` returns is much like this."""

        inside: object

        __wrapped__ = property(lambda self: self.inside)

        def __call__(self, x):
            return jax.grad(self.inside)(x)

    wrapper = Gradient(f)
    inspected = called(wrapper, (2.0,), {})
    assert (inspected.fun, inspected.args) == (wrapper, (2.0,))


def test_an_applied_function_is_its_original_wherever_it_stands():
    once = applied(f, lambda *args: f(*args))
    twice = applied(once, lambda *args: f(*args))
    for callee in (once, twice, functools.partial(twice), jax.jit(once)):
        assert seen(callee, 2.0) == (f, (2.0,), {}, None, False)
    for callee in (jax.grad(once), jax.jit(jax.grad(twice)), jax.grad(jax.jit(once))):
        assert seen(callee, 2.0) == (f, (2.0,), {}, 0, False)


@pytest.mark.parametrize("args", [(), (2.0,)])
def test_argnums_beyond_the_call_are_refused(args):
    with pytest.raises(RematError, match=f"argnums=2 asks for argument 2, and the call has {len(args)}"):
        called(jax.grad(f, argnums=2), args, {})


@pytest.mark.parametrize(
    ("callee", "args", "mend"),
    [
        (print, (), "end the cell with the call to inspect"),
        (float, (1,), "end the cell with the call to inspect"),
        (Scaled, (1,), "end the cell with the call to inspect"),
        (3, (), "not a function but of type int"),
        (jax.jvp, (f, (1.0,), (1.0,)), "forward mode"),
        (jax.vjp, (), r"vjp\(f, x\)"),
        (jax.vjp, (1.0,), r"vjp\(f, x\)"),
    ],
)
def test_what_has_no_backward_pass(callee, args, mend):
    with pytest.raises(RematError, match=mend):
        called(callee, args, {})


@pytest.mark.parametrize(
    ("file", "prepared"),
    [
        ("/elsewhere/site-packages/library/init.py", True),
        ("<generated_library>", True),
        ("<ipython-input-1-0123>", False),
        ("/home/me/model.py", False),
    ],
)
def test_whose_a_function_is_goes_by_its_file_as_everywhere(file, prepared):
    """Installed packages of another environment, and code that libraries generate, are not the user's."""
    namespace = {}
    exec(compile("def fun(x): return x", file, "exec"), namespace)
    assert prepares(namespace["fun"]) == prepared
