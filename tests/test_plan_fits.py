"""Plans until it fits: judged by a compiler, which here is one that can be seen through, and XLA's own where it is."""

import dataclasses
import functools

import jax
import pytest

import remat_magic as rm
from remat_magic import devices, units
from remat_magic.devices import Device, Target
from remat_magic.planning.fitting_plans import plan_that_fits
from remat_magic.records import Measurement, RematError
from tests.programs import f32
from tests.test_elsewhere import compiler


def block(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss(params, x):
    for w in params:
        x = block(x, w)
    return (x**2).sum()


ARGS = ([{"up": f32(64, 256), "down": f32(256, 64)}] * 6, f32(512, 64))


ON = "H100 SXM"


class Compiler:
    """Needs so much of the peak that is estimated as on a GPU, and remembers what it was asked for."""

    def __init__(self, trace, memory, factor=1.3):
        self.trace, self.memory, self.factor, self.asked = trace, memory, factor, []

    def __call__(self, policy, at):
        report = self.trace.report(policy, at, device=ON)
        self.asked.append((report.policy, report.at))
        needed = self.needs(report)
        sizes = {"needed_bytes": needed, "available_bytes": self.memory}
        return Measurement(report.policy, report.at, fits=needed <= self.memory, **sizes)

    def needs(self, report):
        return round(report.peak_bytes * self.factor)

    def plan(self, **options):
        small = Device("small", {"f32": 1e14}, 1e13, 1e12, self.memory, None, "made up", target=Target("cuda"))
        return plan_that_fits(self.trace.facts, small, self, **options)


@pytest.fixture(scope="module")
def trace():
    return rm.trace(loss, *ARGS)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "factor"), [(0.6, 1.3), (0.75, 0.6)])  # the least is 0.57
def test_the_plan_fits_and_no_policy_of_jax_that_fits_recomputes_less(trace, part, factor):
    most = trace.report("none", device=ON).peak_bytes * factor
    there = Compiler(trace, round(part * most), factor)
    plan = there.plan()
    chosen = trace.report(plan, device=ON)
    assert there.needs(chosen) <= there.memory
    assert plan.recomputed_flops == chosen.recomputed_flops
    assert len(there.asked) == len(set(there.asked)) <= 12  # nothing is compiled twice
    for row in trace.places(device=ON).rows:
        report = None if row.error else trace.report(row.policy, row.at, device=ON)
        if report is not None and there.needs(report) <= there.memory:
            assert plan.recomputed_flops <= report.recomputed_flops, row.label
    assert f"it needs {units.nbytes(there.needs(chosen))} of" in plan.status


def test_what_fits_without_a_checkpoint_needs_none(trace):
    there = Compiler(trace, 10**9)
    plan = there.plan()
    assert (plan.policy, plan.recomputed_flops, len(there.asked)) == ("none", 0, 1)


class Barriers(Compiler):
    """Needs much less where a checkpoint saves everything than where there is none, as XLA may."""

    def needs(self, report):
        return super().needs(report) // (4 if report.policy == "everything_saveable" else 1)


@pytest.mark.slow
def test_a_checkpoint_that_saves_everything_is_tried():
    def products(ws, x):
        for w in ws:
            x = block(x, w)
        return x.sum()

    def block(x, w):
        return x @ w["up"] @ w["down"]

    trace = rm.trace(products, *ARGS)
    bare, everything = (trace.report(*choice, device=ON) for choice in (("none",), ("everything_saveable", "block")))
    assert bare.peak_bytes == everything.peak_bytes  # by estimate it is of no use
    there = Barriers(trace, bare.peak_bytes)
    assert there.plan().recomputed_flops == 0


def test_where_nothing_fits_the_nearest_is_said(trace):
    there = Compiler(trace, 10**5)
    with pytest.raises(RematError, match="use smaller batches"):
        there.plan()
    assert len(there.asked) == 4


CLOSE = ("dots_with_no_batch_dims_saveable", "block")  # neither is its estimate among the lowest


class Close(Compiler):
    """Needs a little more than there is, but for one choice, of which no estimate tells."""

    def needs(self, report):
        return self.memory + (0 if (report.policy, report.at) == CLOSE else self.memory // 50)


def test_where_all_need_about_as_much_the_one_that_fits_is_found(trace):
    there = Close(trace, 10**8)
    plan = there.plan()
    assert (plan.policy, plan.at) == CLOSE
    assert len(there.asked) <= 12


def test_a_place_that_was_given_is_the_only_one(trace):
    there = Compiler(trace, round(0.8 * 1.3 * trace.report("none", device=ON).peak_bytes))
    assert there.plan(at="block").at == "block"
    assert {at for _, at in there.asked} == {"block"}


def test_what_cannot_be_compiled_says_why(trace):
    def fails(policy, at):
        return Measurement("none", "function", error="there is no such layout.")

    with pytest.raises(RematError, match="there is no such layout"):
        plan_that_fits(trace.facts, devices.get("H100 SXM"), fails)


def test_a_budget_and_a_device_are_too_much(trace):
    with pytest.raises(RematError, match="has no budget"):
        trace.plan("1 GiB", fits="H100 SXM")
    with pytest.raises(RematError, match="names a device that is not here"):
        trace.plan(fits=devices.THIS_CPU)


@pytest.mark.slow
def test_xla_itself_says_that_it_fits(monkeypatch, cache):
    """On an H100 with little memory, which is another device for its compiler."""
    compiler("H100 SXM")

    def scanned(params, x):
        return (jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2).sum()

    args = ({"up": f32(6, 256, 1024), "down": f32(6, 1024, 256)}, f32(4096, 256))
    trace = rm.trace(scanned, *args)
    h100 = devices.get("H100 SXM")
    needed = functools.partial(trace.measure, device=h100)
    bare, least = needed("none").needed_bytes, needed("nothing_saveable", "block").needed_bytes
    memory = (bare + least) // 2 * 4 // 3  # of which JAX gives a program three quarters
    facts = {**h100.target.facts, "device_memory_size": memory}
    target = dataclasses.replace(h100.target, facts=facts)
    small = dataclasses.replace(h100, name="H100 with little", memory_bytes=memory, target=target)
    plan = trace.plan(fits=small)
    measured = trace.measure(plan, plan.at, device=small)
    assert measured.fits
    assert least <= measured.needed_bytes <= devices.usable_bytes(small) < bare
    assert 0 < plan.recomputed_flops <= trace.report("nothing_saveable", "block").recomputed_flops


def test_the_plan_has_the_peak_of_its_device(trace):
    """By which it is searched for, and an edit of it is held against the budget."""
    there = Compiler(trace, round(0.6 * 1.3 * trace.report("none").peak_bytes))
    plan = plan_that_fits(trace.facts, dataclasses.replace(devices.get("TPU v5e"), memory_bytes=there.memory), there)
    assert plan.peak_device == "TPU v5e"
    assert plan.peak_bytes == trace.report(plan, device="TPU v5e").peak_bytes != trace.report(plan).peak_bytes
    assert trace.plan(peak="90%").peak_device == ""
