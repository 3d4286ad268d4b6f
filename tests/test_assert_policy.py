"""Limits that a training repository's tests assert."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic.records import Report
from tests.cost_helpers import S


def net(w, x):
    h = checkpoint_name(jnp.sin(w @ x), "h")
    return jnp.sin(w @ h).sum()


W, V = S(100, 100), S(100)


@pytest.fixture
def trace(remat2):
    return rm.trace(net, W, V)


def test_limits_that_hold_give_the_report(trace):
    report = rm.assert_policy(
        trace,
        policy="dots_saveable",
        saved_at_most="1 kB",  # two dots of 400 bytes
        peak_at_most="1 MiB",
        offloaded_at_most=0,
        recomputed_flops_at_most="21 kFLOPs",
        residuals_at_most=2,
    )
    assert report is trace.report("dots_saveable")


def test_limits_are_inclusive(trace):
    report = trace.report("dots_saveable")
    rm.assert_policy(report, saved_at_most=report.saved_bytes, peak_at_most=report.peak_bytes)
    for limit in ("saved_at_most", "peak_at_most"):
        with pytest.raises(AssertionError):
            rm.assert_policy(report, **{limit: getattr(report, limit.replace("_at_most", "_bytes")) - 1})


def test_the_sentence_says_what_and_where(trace):
    with pytest.raises(AssertionError) as raised:
        rm.assert_policy(trace, "dots_saveable", saved_at_most="0.7 kB", residuals_at_most=1)
    text = str(raised.value)
    assert text.startswith(
        "net under dots_saveable: 800 saved bytes, and at most 700 are allowed; 2 saved residuals, and"
    )
    assert "400 bytes f32[100] of dot_general at test_assert_policy.py:" in text
    assert "(w @ x)" in text
    assert "\n" not in text


def test_names_are_told(trace):
    with pytest.raises(AssertionError, match=r"400 bytes f32\[100\] of sin named 'h' at "):
        rm.assert_policy(trace, "save_only_these_names('h')", saved_at_most=0)


def test_many_residuals_are_counted():
    def chain(x):
        for _ in range(8):
            x = jnp.sin(x)
        return x.sum()

    with pytest.raises(AssertionError, match=", and 5 more"):
        rm.assert_policy(rm.trace(chain, V), "none", residuals_at_most=7)


def test_too_much_recomputation_fails(trace):
    with pytest.raises(AssertionError, match=r"[0-9,]+ recomputed FLOPs, and at most 1,000 are allowed"):
        rm.assert_policy(trace, "nothing_saveable", recomputed_flops_at_most=1000)


def test_unknown_costs_do_not_pass():
    """Recomputation inside a loop of unknown length costs at least as much as is known, maybe more."""

    def fun(x):
        y = jnp.sin(x)
        n = jax.lax.while_loop(lambda c: c < 10, lambda c: c * 2, jax.lax.stop_gradient(y).sum())
        return (jnp.sin(y) * n).sum()

    trace = rm.trace(fun, V)
    unknown = {each.primitive for each in trace.report("nothing_saveable", "function").recomputed if not each.known}
    assert unknown
    with pytest.raises(AssertionError, match="whose cost is not known"):
        rm.assert_policy(trace, "nothing_saveable", "function", recomputed_flops_at_most="1 PFLOPs")


def test_a_failure_names_the_site():
    block = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(w @ x)))
    trace = rm.trace(lambda w, x: block(w, block(w, x)).sum(), W, V)
    site = trace.engine.sites[0].key
    with pytest.raises(AssertionError, match=f"under none at {site}: "):
        rm.assert_policy(trace, "none", site, saved_at_most=0)


def test_no_backward_pass_fails():
    fun = lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()  # noqa: E731
    with pytest.raises(AssertionError, match="cannot differentiate a while_loop"):
        rm.assert_policy(rm.trace(fun, V), saved_at_most="1 GB")


MISTAKES = {
    "no limit": (lambda t: rm.assert_policy(t), "needs a limit: one of saved_at_most, peak_at_most"),
    "no size": (lambda t: rm.assert_policy(t, saved_at_most="2 GiG"), "saved_at_most='2 GiG' is no number of bytes"),
    "no cost": (lambda t: rm.assert_policy(t, recomputed_flops_at_most="2 GB"), "is no number of FLOPs"),
    "no trace": (lambda t: rm.assert_policy(net, saved_at_most=1), "not function: call rm.trace first"),
    "no policy": (lambda t: rm.assert_policy(t, "dots_savable", saved_at_most=1), "did you mean 'dots_saveable'?"),
    "a report's policy": (lambda t: rm.assert_policy(t.report(), "none", saved_at_most=1), "has its policy already"),
    "half a report": (
        lambda t: rm.assert_policy(Report("p", "function", complete=False), peak_at_most=1),
        "of the forward half alone",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_no_failed_assertions(case, trace):
    work, expected = MISTAKES[case]
    with pytest.raises(rm.RematError) as raised:
        work(trace)
    assert expected in str(raised.value)


@pytest.mark.slow
def test_it_survives_optimised_python():
    """``python -O`` drops assert statements; this one is raised."""
    import subprocess
    import sys

    code = (
        "import remat_magic as rm\nfrom remat_magic.records import Report, Residual\n"
        "rm.assert_policy(Report('p', 'function', (Residual('f32', (2,), 8, 'intermediate'),)), saved_at_most=4)"
    )
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=400)
    assert "AssertionError: " in ran.stderr
