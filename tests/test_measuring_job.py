"""Measuring in the background: results, progress, cancelling, and what the thread may and may not hold."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

import remat_magic as rm
from remat_magic import _jax
from remat_magic.measuring import measure as module
from tests.programs import PROGRAMS

CHOICES = [("none", None), ("nothing_saveable", None), ("dots_saveable", "function")]


@pytest.fixture
def trace():
    fun, args = PROGRAMS["three_layers"]
    return rm.trace(fun, *args)


@pytest.fixture
def gate(monkeypatch):
    """XLA, held up until the test lets it go on."""

    class Gate:
        reached, opened = threading.Event(), threading.Event()

    compiler = module.compile_for_memory

    def held_up(*args):
        Gate.reached.set()
        assert Gate.opened.wait(600)
        return compiler(*args)

    monkeypatch.setattr(module, "compile_for_memory", held_up)
    yield Gate
    Gate.opened.set()


@pytest.mark.slow
def test_results_are_those_of_measuring_one_by_one(trace):
    job = rm.Measuring(trace, CHOICES, inputs="random", runs=2)
    assert job.wait(600)
    assert [result.error for result in job.results] == [""] * 3
    alone = [trace.measure(policy, at) for policy, at in CHOICES]
    assert [(r.policy, r.at, r.temp_bytes, r.flops) for r in job.results] == [
        (r.policy, r.at, r.temp_bytes, r.flops) for r in alone
    ]
    assert [result.runs for result in job.results] == [2] * 3


def test_updates_come_from_its_thread_step_by_step(trace):
    seen = []

    def update(job):
        seen.append((threading.current_thread(), job.progress, len(job.results)))

    job = rm.Measuring(trace, CHOICES, on_update=update)
    assert job.wait(600)
    assert {thread for thread, _, _ in seen} == {job._thread}
    assert [(progress.done, progress.current, results) for _, progress, results in seen] == [
        (0, "none", 0),
        (1, "nothing_saveable", 1),
        (2, "dots_saveable at function", 2),
        (3, "", 3),
    ]
    assert [progress.finished for _, progress, _ in seen] == [False, False, False, True]
    assert job.progress.total == 3


def test_a_failing_callback_stops_nothing(trace, caplog):
    job = rm.Measuring(trace, CHOICES[:2], on_update=lambda job: 1 / 0)
    assert job.wait(600)
    assert len(job.results) == 2
    assert "ZeroDivisionError" in caplog.text


def test_failures_are_results(trace):
    job = rm.Measuring(trace, [("nonesuch", None), ("none", None)])
    assert job.wait(600)
    assert [bool(result.error) for result in job.results] == [True, False]
    job = rm.Measuring(trace, [("none", None)], inputs=((jnp.ones(3),), {}))
    assert job.wait(600)
    assert "another structure" in job.results[0].error


def test_cancelled_between_two_measurements(trace):
    def update(job):
        if job.progress.done == 1:
            job.cancel()

    job = rm.Measuring(trace, CHOICES, on_update=update)
    assert job.wait(600)
    assert [result.policy for result in job.results] == ["none"]
    assert job.progress.cancelled
    assert job.progress.finished


def test_cancelling_does_not_wait_for_xla_and_drops_its_result(trace, gate):
    job = rm.Measuring(trace, CHOICES)
    assert gate.reached.wait(600)
    job.cancel()  # the gate is shut: it would wait for ever
    assert job.progress.finished
    assert not job.wait(0.05)  # the compilation goes on
    gate.opened.set()
    assert job.wait(600)
    assert job.results == ()


def test_the_trace_is_free_while_xla_compiles(trace, gate):
    job = rm.Measuring(trace, CHOICES[:1])
    assert gate.reached.wait(600)
    assert trace.lock.acquire(timeout=5)  # held by another thread, this would be refused
    trace.lock.release()
    assert trace.report("everything_saveable").complete
    gate.opened.set()
    assert job.wait(600)


def test_arrays_are_let_go(trace):
    arrays = [jnp.ones(leaf.value.shape) for leaf in trace.arguments]
    held = [weakref.ref(array) for array in arrays]
    job = rm.Measuring(trace, CHOICES[:1], inputs=(tuple(arrays), {}))
    del arrays
    assert job.wait(600)
    assert job.results[0].error == ""
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_settings_of_the_making_thread_hold_on_its_thread(trace):
    seen = []

    def update(job):
        seen.append((jax.config.jax_default_matmul_precision, jax.config.jax_numpy_rank_promotion))

    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("raise"):
        job = rm.Measuring(trace, CHOICES[:1], on_update=update)
    assert job.wait(600)
    assert set(seen) == {("highest", "raise")}


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(600)
    return found[0]


def test_settings_are_taken_along_and_given_back():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    device = jax.devices()[0]

    def current():
        return (
            jax.config.jax_enable_x64,
            jax.config.jax_default_device,
            jax.sharding.get_abstract_mesh().axis_names,
        )

    usual = current()
    with jax.enable_x64(True), jax.default_device(device), jax.set_mesh(mesh):
        inside = current()
        assert inside == (True, device, ("data",))
        settings = _jax.thread_settings()
        assert in_thread(current) == usual  # a new thread has none of them by itself

    def there():
        with settings():
            taken = current()
        return taken, current()

    assert in_thread(there) == (inside, usual)
    assert current() == usual


def test_old_meshes_are_taken_along():
    from jax._src.mesh import thread_resources

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    thread_resources.stack.append(thread_resources.stack[-1].with_mesh(mesh))
    try:
        settings = _jax.thread_settings()
    finally:
        thread_resources.stack.pop()

    def there():
        with settings():
            taken = thread_resources.env.physical_mesh
        return taken, thread_resources.env.physical_mesh.empty

    assert in_thread(there) == (mesh, True)
