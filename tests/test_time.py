"""Estimated times: by hand on a device of round numbers, and on programs whose limit is known."""

import dataclasses

import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic.devices import Device
from remat_magic.facts.times import communicating, seconds, times
from remat_magic.records import Kernel, Report, Residual
from tests.cost_helpers import S
from tests.programs import PROGRAMS

ROUND = Device("round", {"bf16": 1e12, "f32": 1e11}, 1e10, 1e9, 10**10, 1e8, "made up for this test")
BLIND = Device("blind", {"bf16": 1e12}, None, 1e9, 10**10, None, "nothing of vectors or the host")


def test_each_kernel_takes_what_limits_it():
    """10 ms of arithmetic beside 1 ms of memory; 2 ms of memory beside 1 ms of arithmetic, three times."""
    work = (Kernel(10**10, 10**6, "bf16", "matmul"), Kernel(10**7, 2 * 10**6, "f32", "vector", 3))
    assert seconds(work, ROUND) == (pytest.approx(0.010 + 3 * 0.002), True)


def test_the_dtype_decides_how_fast_a_matmul_is():
    assert seconds([Kernel(10**11, 0, "f32", "matmul")], ROUND)[0] == pytest.approx(1)
    assert seconds([Kernel(10**11, 0, "bf16", "matmul")], ROUND)[0] == pytest.approx(0.1)
    assert seconds([Kernel(10**10, 0, "f64", "matmul")], ROUND)[0] == pytest.approx(1)  # on the vector units


def test_what_is_not_known_makes_it_a_lower_bound():
    assert seconds([Kernel(None, 10**9, "f32", "vector")], ROUND) == (1, False)
    assert seconds([Kernel(1, 10**9, "f32", "vector", None)], ROUND) == (1, False)  # one iteration
    assert seconds([Kernel(10**12, 10**9, "f32", "matmul")], BLIND) == (1, False)  # no figure for it
    assert seconds([Kernel(10**12, 10**9, "f32", "vector")], BLIND) == (1, True)  # limited by memory, it is said


def test_what_is_inserted_and_not_known_is_no_time_of_none():
    linked = dataclasses.replace(ROUND, interconnect=1e9)
    sending = Kernel(0, 10**6, "f32", "vector", sent=10**6, inserted=True)
    assert communicating([sending], linked) == pytest.approx(0.001)
    assert communicating([sending, dataclasses.replace(sending, times=None, sent=0)], linked) is None
    assert communicating([sending], ROUND) is None  # how fast is not known
    assert communicating([Kernel(None, 10**9, "f32", "vector")], linked) == 0.0  # which sends nothing


def report(**changes):
    work = (Kernel(10**8, 0, "f32", "vector"),)
    return Report("p", "function", forward_kernels=work, backward_kernels=2 * work, recomputed_kernels=work, **changes)


def test_the_total_is_both_halves_with_recomputation_in_the_backward_one():
    estimate = times(report(), ROUND)
    assert (estimate.forward, estimate.backward, estimate.recomputed) == pytest.approx((0.01, 0.02, 0.01))
    assert estimate.total == pytest.approx(0.03)  # recomputation is part of the backward pass
    assert estimate.extra == pytest.approx(0.01)
    assert estimate.complete
    assert estimate.device == "round"


def test_offloading_goes_there_and_back():
    moved = report(residuals=(Residual("f32", (10**6,), 4 * 10**6, "offloaded"),))
    estimate = times(moved, ROUND)
    assert estimate.offload == pytest.approx(2 * 4e6 / 1e8)
    assert estimate.total == pytest.approx(0.03 + 0.08)
    assert estimate.extra == pytest.approx(0.01 + 0.08)
    unknown = times(moved, BLIND)
    assert unknown.offload is None
    assert not unknown.complete


def test_a_big_matmul_is_limited_by_arithmetic():
    """Of 4096 a side: three times 2 n^3 FLOPs for the value and both gradients, at 989.4 TFLOP/s."""
    n = 4096
    matrix = S(n, n, dtype="bfloat16")
    estimate = times(rm.trace(lambda a, b: (a @ b).astype("float32").sum(), matrix, matrix).report("none"), "H100 SXM")
    assert estimate.total == pytest.approx(3 * 2 * n**3 / 989.4e12, rel=0.3)
    assert estimate.forward + estimate.backward > 3 * 2 * n**3 / 989.4e12


def test_an_elementwise_function_is_limited_by_memory():
    """X is read for the sine and for the cosine, which is written; then that is read and the gradient written."""
    n = 10**8
    estimate = times(rm.trace(lambda x: jnp.sin(x).sum(), S(n)).report("none"), "A100 80GB SXM")
    assert estimate.total == pytest.approx(5 * 4 * n / 2.039e12, rel=0.01)


def test_recomputing_more_takes_longer(remat3):
    fun, args = PROGRAMS["attention"]
    trace = rm.trace(fun, *args)
    nothing, dots, everything = (
        times(trace.report(policy), ROUND) for policy in ("nothing_saveable", "dots_saveable", "everything_saveable")
    )
    assert nothing.recomputed > dots.recomputed > everything.recomputed == 0
    assert nothing.total > everything.total
    assert all(estimate.recomputed <= estimate.backward for estimate in (nothing, dots, everything))


def test_no_backward_pass_is_not_complete():
    import jax

    fun = lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, jnp.sin(x)).sum()  # noqa: E731
    assert not times(rm.trace(fun, S(3)).report(), ROUND).complete


def test_an_unknown_device_is_refused():
    with pytest.raises(rm.RematError, match="No device is called 'H1000'"):
        times(report(), "H1000")
