"""What a TPU holds in the memory beside its compute units: how long, which values first, and where they lie."""

from dataclasses import replace

import jax
import pytest
from jax import lax

import remat_magic as rm
from remat_magic import devices
from remat_magic.facts.device_memory import memory_of
from remat_magic.facts.held import Held
from remat_magic.facts.schedule import Schedule
from remat_magic.facts.step_clock import Clock
from remat_magic.facts.vector_memory import LiveBuffer, placed
from remat_magic.jaxprs.straight_line import StraightLines
from tests.benchmarks.named_models import shape
from tests.test_elsewhere import compiler

TPU = "TPU v5e"
WIDE, SQUARE = shape(4096, 1024), shape(1024, 1024)
VALUE, WEIGHT = 4096 * 1024 * 4, 1024 * 1024 * 4
PRODUCT = 2 * 4096 * 1024 * 1024 / 197e12  # seconds of one product of both on a v5e, which arithmetic limits
LONGEST = 8 * 128 * 2**20 / 0.819e12  # seconds in which the whole memory is filled 8 times: 30 products, not 31


# ---------------------------------------------------------------------------------------------------------- how long


def products(count):
    def multiplied(z, w):
        for _ in range(count):
            z = z @ w
        return z

    return multiplied


def loop(count, length):
    return lambda z, w: lax.scan(lambda z, _: (products(count)(z, w), None), z, length=length)[0]


WAITS = {
    "30 products": (products(31), True),  # the first of them reads it
    "31 products": (products(32), False),
    "a loop of 5 products": (loop(5, 64), True),  # taken to run 5 times, whatever it does
    "a loop of 8 products": (loop(8, 8), False),
}


def waiting(between):
    """A training step in which a value waits until what comes between is done."""

    def step(p, x, w):
        y = x @ w
        return p - jax.grad(lambda p: (p**2).sum())(p), (between(y, w) * y).sum()

    return rm.trace(jax.jit(step), shape(8), WIDE, SQUARE)


def in_memory(peak):
    """How many of the values are in the device's own memory at the peak, beside the arguments."""
    return round((peak - VALUE - WEIGHT) / VALUE)


def test_so_many_products_take_so_long():
    assert 30 * PRODUCT < LONGEST < 31 * PRODUCT


@pytest.mark.parametrize("between", WAITS)
def test_what_waits_for_long_is_not_in_the_vector_memory(between):
    fun, stays = WAITS[between]
    assert in_memory(waiting(fun).report(device=TPU).peak_bytes) == (0 if stays else 1)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("between", WAITS)
def test_xla_moves_it_out_after_as_long(between):
    fun, stays = WAITS[between]
    trace = waiting(fun)
    measured = trace.measure(device=compiler(TPU))
    assert in_memory(measured.needed_bytes) == (0 if stays else 1)
    assert trace.report(device=TPU).peak_bytes == pytest.approx(measured.needed_bytes, rel=0.02)


def clock_of(fun, *args):
    """The clock of a program on a TPU, and its steps."""
    schedule = Schedule(on=replace(memory_of(devices.get(TPU)), reserves=False))
    jaxpr = jax.make_jaxpr(fun)(*args)
    given = [schedule.permanent(var.aval, Held(0, var.aval)) for var in jaxpr.jaxpr.invars]
    schedule.kept = {*schedule.run(StraightLines(), jaxpr, given, "forward")}
    return schedule


def elapsed(fun, *args):
    """How long a program takes, in bytes that could be moved meanwhile."""
    schedule = clock_of(fun, *args)
    return Clock(schedule.steps, schedule, {}).times[-1]


def test_a_step_takes_as_long_as_it_moves_or_computes():
    assert elapsed(lambda x: x[::-1], WIDE) == 2 * VALUE
    halves = [shape(*given.shape, dtype=jax.numpy.bfloat16) for given in (WIDE, SQUARE)]
    assert elapsed(lambda x, w: x @ w, *halves) == pytest.approx(PRODUCT * 0.819e12, rel=1e-3)
    narrow = shape(4096, 8), shape(8, 1024)
    assert elapsed(lambda x, w: x @ w, *narrow) >= VALUE + 4096 * 8 * 4 + 8 * 1024 * 4


def test_a_step_that_takes_a_few_rows_does_not_move_the_others():
    def rows(x, first):
        return lax.dynamic_slice(x, (first, 0), (8, 1024))

    moved = 2 * 8 * 1024 * 4  # read and written; besides that the number of the first
    assert moved <= elapsed(rows, WIDE, shape(dtype=jax.numpy.int32)) < moved + 64


def test_what_stays_in_registers_takes_no_time():
    once, twice = (
        elapsed(lambda x, n=n: sum(jax.numpy.sin(x * k) for k in range(1, n + 1)).sum(0), WIDE) for n in (1, 2)
    )
    assert once == twice


def test_a_loop_waits_for_what_it_takes_slices_of():
    """The stack is not read before five products are done, and these are not counted five times."""

    def scanned(xs, w):
        z = lax.scan(lambda z, x: (products(5)(z, w) + x, x[:8] * 2), xs[0], xs)
        return z[0], z[1]

    schedule = clock_of(scanned, shape(4, *WIDE.shape), SQUARE)
    (body_time,) = (body for eqn, body in schedule._body_times.items() if body.elapsed > 0)
    seconds = max(body_time.waits) / 0.819e12
    assert 4 * PRODUCT < seconds < 7 * PRODUCT
    assert body_time.elapsed / 0.819e12 == pytest.approx(5 * 5 * PRODUCT, rel=0.2)


# ----------------------------------------------------------------------------------------------------- which, and where


def test_what_most_is_won_by_comes_first():
    read_often, big = LiveBuffer(0, 4, 4, 1, gain=40), LiveBuffer(0, 4, 9, 2, gain=27)
    assert placed([big, read_often], [0] * 4, 10)[0] == {1}  # 40 / 2 is more than 27 / 3
    assert placed([big, read_often._replace(gain=16)], [0] * 4, 10)[0] == {2}


def test_where_there_is_no_gap_all_are_packed_anew():
    # 1 and 2 come first, and 3 bytes are left beside 2, but not all in one place; packed anew 3 lies on 2.
    first, second = LiveBuffer(0, 2, 3, 1, gain=90), LiveBuffer(1, 4, 4, 2, gain=80)
    third = LiveBuffer(2, 4, 6, 3, gain=10)
    assert placed([first, second, third], [0] * 4, 10)[0] == {1, 2, 3}
