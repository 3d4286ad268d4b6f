"""Values and gradients under each policy beside those without: alike, or told by how much and where."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.measuring import measure as gradients
from remat_magic.measuring.measure import _difference
from tests.programs import PROGRAMS

POLICIES = ("nothing_saveable", "dots_saveable", "everything_saveable")


# One of a kind; the two last are those that differ: in what they round to, and in what JAX refuses.
USUAL = ("scanned_checkpoint", "conditional", "custom_vjp", "mixed_precision", "complex_numbers")


@pytest.mark.parametrize("name", USUAL)
def test_policies_leave_gradients_as_they_are(name, remat3):
    """To the last bits of float32, or of bfloat16 where the program rounds to it."""
    fun, args = PROGRAMS[name]
    differences = rm.check_gradients(rm.trace(fun, *args), POLICIES)
    assert tuple(difference.policy for difference in differences) == POLICIES
    tolerance = 1e-2 if name == "mixed_precision" else 1e-5
    for difference in differences:
        if difference.error:  # JAX marks what it saves with an operation that complex numbers do not have
            assert (name, difference.policy) == ("complex_numbers", "everything_saveable")
            assert "JAX cannot save a complex value" in difference.error
        else:
            assert difference.relative <= tolerance


def turning(wrong):
    """A function, its arguments, and a policy under which one element of its gradient is wrong by a factor.

    The rules of custom_vjp are Python, which runs again for every policy.
    """
    asked = []

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def backward(cosine, g):
        return (cosine * g * jnp.ones(3).at[1].set(wrong if asked else 1.0),)

    f.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), backward)

    def policy(prim, *args, **params):
        asked.append(prim)
        return False

    return lambda w, x: (w * f(x)).sum(), (jnp.array([1.0, 2.0, 4.0]), jnp.array([0.0, 0.5, 3.0])), policy


def test_what_a_step_returns_is_compared_on_what_it_is_called_with(remat2):
    fun, args, policy = turning(1.5)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        loss, gradient = jax.value_and_grad(fun, 1)(w, x)
        return w, x - gradient, loss

    trace = rm.trace(step, *args)
    right, wrong = rm.check_gradients(trace, ["nothing_saveable", policy], inputs=(args, {}))
    # w * cos(x) is wrong by half in its second element, and that element stands in the new x, the second output.
    assert wrong.error == ""
    assert (wrong.where, wrong.index) == ("output 1", (1,))
    assert np.isclose(wrong.absolute, 0.5 * 2 * np.cos(0.5))
    assert right.absolute == 0
    (alone,) = rm.check_gradients(rm.trace(step, *args), ["nothing_saveable"])  # an optimizer's state is no random one
    assert alone.error == ""
    assert not any(array.is_deleted() for array in args)


def test_a_gradient_of_each_device_is_checked_and_measured_in_its_step():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def update(w, x):
        gradient = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())(w, x)
        return w - jax.lax.pmean(gradient, "data")

    parts = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
    step = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=parts, out_specs=parts[0], check_vma=False))
    args = jnp.eye(4), jnp.ones((2, 4))
    trace = rm.trace(step, *args)
    (whole,) = rm.check_gradients(trace, ["nothing_saveable"], inputs=(args, {}))
    assert (whole.absolute, whole.error) == (0, "")
    assert trace.measure("nothing_saveable", inputs=(args, {}), runs=1).run_seconds > 0
    (alone,) = rm.check_gradients(trace, ["nothing_saveable"])  # what one device does is no program by itself
    assert alone.error.endswith("pass inputs=(args, kwargs) of a call of update.")


def test_a_difference_is_told_with_its_place(remat2):
    fun, (w, x), policy = turning(1.5)
    (told,) = rm.check_gradients(rm.trace(fun, w, x), [policy], inputs=((w, x), {}))
    true = np.asarray(w * jnp.cos(x))
    assert told.where == told.relative_where == "the gradient of x"
    assert told.index == (1,)
    assert told.absolute == pytest.approx(0.5 * true[1], rel=1e-5)
    assert told.relative == pytest.approx(0.5 * true[1] / np.abs(true).max(), rel=1e-5)


def test_not_a_number_on_one_side_is_infinitely_far(remat2):
    fun, (w, x), policy = turning(float("nan"))
    (told,) = rm.check_gradients(rm.trace(fun, w, x), [policy], inputs=((w, x), {}))
    assert (told.absolute, told.relative, told.index) == (np.inf, np.inf, (1,))


def difference(mine, theirs):
    return _difference("p", "function", ["a"], [np.array(mine, float)], [np.array(theirs, float)])


def test_equal_infinities_and_nans_are_no_difference():
    told = difference([np.inf, np.nan, 1], [np.inf, np.nan, 1])
    assert (told.absolute, told.where, told.relative) == (0, "", 0)
    assert difference([np.inf], [-np.inf]).absolute == np.inf
    assert difference([], []).absolute == 0


def test_outputs_are_compared_too(monkeypatch):
    run = gradients._run

    def off_by_one(variant, *more):
        values = run(variant, *more)
        return values if variant.selection.policy == "none" else [values[0] + 1, *values[1:]]

    monkeypatch.setattr(gradients, "_run", off_by_one)
    (told,) = rm.check_gradients(rm.trace(jnp.sum, jnp.zeros(2)), ["nothing_saveable"])
    assert (told.where, told.index, told.absolute) == ("the output", (), 1)


def test_places_are_those_of_the_report():
    fun, args = PROGRAMS["scanned_checkpoint"]
    trace = rm.trace(fun, *args)
    (key,) = (site.key for site in trace.engine.primal.table.sites)
    (told,) = rm.check_gradients(trace, ["as_written"], at=key)
    assert (told.at, told.error) == (key, "")
    (told,) = rm.check_gradients(trace, ["as_written"], at={key: "nothing_saveable"})
    assert (told.policy, told.error) == ("mixed", "")
