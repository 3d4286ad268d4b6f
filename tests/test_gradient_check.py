"""Values and gradients under each policy beside those without: alike, or told by how much and where."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_magic as rm
from remat_magic.tuning.gradients import _difference
from tests.programs import PROGRAMS

POLICIES = ("nothing_saveable", "dots_saveable", "everything_saveable")


@pytest.mark.parametrize("name", PROGRAMS)
def test_policies_leave_gradients_as_they_are(name, remat3):
    """To the last bits of float32, or of bfloat16 where the program rounds to it."""
    fun, args = PROGRAMS[name]
    found = rm.check_gradients(rm.trace(fun, *args), POLICIES)
    assert [(difference.policy, difference.error) for difference in found] == [(policy, "") for policy in POLICIES]
    tolerance = 1e-2 if name == "mixed_precision" else 1e-5
    assert all(difference.relative <= tolerance for difference in found)


def turning(wrong):
    """A function whose derivative is another one from its second trace on, by a factor, in one element."""
    traced = itertools.count()

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def forward(x):
        return jnp.sin(x), jnp.cos(x)

    def backward(cosine, g):
        factor = jnp.ones(3).at[1].set(1.0 if next(traced) == 0 else wrong)
        return (cosine * g * factor,)

    f.defvjp(forward, backward)
    return lambda w, x: (w * f(x)).sum()


def test_a_difference_is_told_with_its_place():
    w, x = jnp.array([1.0, 2.0, 4.0]), jnp.array([0.0, 0.5, 3.0])
    trace = rm.trace(turning(1.5), w, x)
    trace.gradient("none")  # the rule of policy "none" is traced first
    (found,) = rm.check_gradients(trace, ["nothing_saveable"], inputs=((w, x), {}))
    true = np.asarray(w * jnp.cos(x))
    assert found.where == found.relative_where == "the gradient of x"
    assert found.index == (1,)
    assert found.absolute == pytest.approx(0.5 * true[1], rel=1e-5)
    assert found.relative == pytest.approx(0.5 * true[1] / np.abs(true).max(), rel=1e-5)


def test_not_a_number_on_one_side_is_infinitely_far():
    w, x = jnp.ones(3), jnp.ones(3)
    trace = rm.trace(turning(float("nan")), w, x)
    trace.gradient("none")
    (found,) = rm.check_gradients(trace, ["nothing_saveable"], inputs=((w, x), {}))
    assert (found.absolute, found.relative, found.index) == (np.inf, np.inf, (1,))


def difference(mine, theirs):
    return _difference("p", "function", ["a"], [np.array(mine, float)], [np.array(theirs, float)])


def test_equal_infinities_and_nans_are_no_difference():
    found = difference([np.inf, np.nan, 1], [np.inf, np.nan, 1])
    assert (found.absolute, found.where, found.relative) == (0, "", 0)
    assert difference([np.inf], [-np.inf]).absolute == np.inf
    assert difference([], []).absolute == 0


def test_relative_is_in_units_of_the_largest_element():
    assert difference([0.5, 100], [0, 100]).relative == 0.005
    assert difference([0.5], [0]).relative == np.inf


def test_outputs_are_compared_too():
    """The value of this function differs, not its gradient."""
    traced = itertools.count()

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x + (next(traced) > 0), None), lambda _, g: (g,))
    trace = rm.trace(lambda x: f(x).sum(), jnp.zeros(()))
    trace.gradient("none")
    (found,) = rm.check_gradients(trace, ["nothing_saveable"])
    assert (found.where, found.index, found.absolute) == ("the output", (), 1)


def test_places_are_those_of_the_report():
    fun, args = PROGRAMS["scanned_checkpoint"]
    trace = rm.trace(fun, *args)
    (key,) = (site.key for site in trace.sites)
    (found,) = rm.check_gradients(trace, ["as_written"], at=key)
    assert (found.at, found.error) == (key, "")
    (found,) = rm.check_gradients(trace, ["as_written"], at={key: "nothing_saveable"})
    assert (found.policy, found.error) == ("mixed", "")


def test_failures_are_sentences():
    fun, args = PROGRAMS["three_layers"]
    trace = rm.trace(fun, *args)
    wrong, right = rm.check_gradients(trace, ["nonesuch", "none"])
    assert "is not a policy" in wrong.error
    assert wrong.absolute is None
    assert (right.error, right.absolute) == ("", 0)
    (found,) = rm.check_gradients(trace, ["none"], inputs=((1.0,), {}))
    assert "another structure" in found.error
    with pytest.raises(rm.RematError, match="compared on values"):
        rm.check_gradients(trace, ["none"], inputs=None)
