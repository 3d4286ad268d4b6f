"""One process, many inspections: what an inspection leaves behind, and what it may not touch."""

import gc
import weakref
from collections import Counter

import comm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ipywidgets import Widget
from jax._src import pjit
from jax._src.interpreters import partial_eval as pe

import remat_magic as rm
from remat_magic import _jax
from remat_magic.widget import RematWidget
from remat_magic.widget import widget as widget_module
from remat_magic.widget.idle import IdleTime
from tests.test_widget import FakeShell

# Functions of JAX's own (jnp.where, jax.nn.gelu) live for ever, and so would what is cached of them for an inspection.
LOSS = """
@jax.checkpoint
def block(p, x):
    h = jax.nn.gelu(x @ p)
    return x + jnp.where(h > 0, h, jnp.sin(h)) @ p.T

def loss(p, x):
    x, _ = jax.lax.scan(lambda c, _: (block(p, c), None), block(p, x), None, length=3)
    return jnp.mean(x**2)
"""
ARGS = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32))
POLICIES = (("as_written", None), ("nothing_saveable", "function"), ("dots_saveable", "sites"))

# Caches of JAX's that keep no jaxpr and drop the oldest (after 2,048 and 4,096 types or shardings) fill up at first.
SLACK = 500
# A tracer of jax_remat3's lives for ever, and its trace with it: the finalizer that JAX 0.12 gives it holds the trace.
REMAT3_SLACK = 3000
TIMES = 4 if _jax.remat3() else 12


def fresh():
    """A loss as a cell that is run again defines it."""
    names = {"jax": jax, "jnp": jnp}
    exec(LOSS, names)
    return names["loss"]


def inspect(fun):
    trace = rm.trace(fun, *ARGS)
    for policy, at in POLICIES:
        assert trace.report(policy, at).complete


def alive() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def left_behind(work, times: int) -> Counter[str]:
    """What each run of ``work`` leaves, by type."""
    for _ in range(3):  # imports, tables and the like come once
        work()
    before = alive()
    for _ in range(times):
        work()
    after = alive()
    after.subtract(before)
    return Counter({name: count / times for name, count in after.items()})


def check_bounded(left: Counter[str]) -> None:
    if _jax.remat3():
        assert sum(left.values()) < REMAT3_SLACK, left.most_common(8)
        return
    assert left["Jaxpr"] < 0.2, left.most_common(8)  # a single one would be left by each if any were
    assert left["Trace"] == 0
    assert sum(left.values()) < SLACK, left.most_common(8)


@pytest.mark.parametrize("times", [6, pytest.param(TIMES, marks=pytest.mark.slow)])
def test_inspections_of_fresh_functions_leave_nothing(times):
    check_bounded(left_behind(lambda: inspect(fresh()), times))


@pytest.mark.parametrize("times", [6, pytest.param(TIMES, marks=pytest.mark.slow)])
def test_inspections_of_one_function_leave_nothing(times):
    fun = fresh()  # and so its block lives on, with which JAX would key what it traced
    check_bounded(left_behind(lambda: inspect(fun), times))


def test_toggling_policies_leaves_nothing():
    trace = rm.trace(fresh(), *ARGS)

    def toggle():
        for policy, at in POLICIES:
            trace.report(policy, at)

    toggle()
    left = left_behind(toggle, 334)
    # All of them together, in a thousand toggles: no list grows.
    assert sum(left.values()) < 1, left.most_common(8)


class Channels:
    """The channels to a browser that are open, as ipykernel's comm manager counts them."""

    def __init__(self):
        self.open = set()

    def create(self, **_):
        channels = self

        class Channel:
            def __init__(self):
                self.comm_id = f"comm {id(self)}"
                channels.open.add(self)

            def on_msg(self, callback):
                self.callback = callback

            def send(self, data, buffers=None):
                pass

            def close(self):
                channels.open.discard(self)

        return Channel()


@pytest.mark.parametrize("many", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_widgets_and_their_cells_run_again(many, monkeypatch):
    channels, shell = Channels(), FakeShell()
    monkeypatch.setattr(comm, "create_comm", channels.create)
    monkeypatch.setattr(widget_module, "_kernel", object)
    idle = IdleTime(shell)
    mine: weakref.WeakSet[rm.Trace] = weakref.WeakSet()

    def run(cell):
        shell.before(cell)
        trace = rm.trace(fresh(), *ARGS)
        mine.add(trace)  # other tests leave some, which go when they will
        widget = RematWidget(trace, "nothing_saveable")
        idle.keep(widget, cell)
        widget._worker.join()
        shell.after()

    def traces():
        gc.collect()
        return len(mine)

    for cell in range(many):
        run(str(cell))
    once = traces(), len(channels.open), sum(alive().values())
    assert once[:2] == (many, 2 * many)  # a widget's channel and its layout's
    for cell in range(many):
        run(str(cell))
    again = traces(), len(channels.open), sum(alive().values())
    assert again[:2] == once[:2]
    # Of those that are gone nothing is left but what JAX itself caches, and keeps few of.
    assert again[2] - once[2] < many * (REMAT3_SLACK if _jax.remat3() else SLACK)
    idle.stop()
    Widget.close_all()
    assert (traces(), len(channels.open)) == (0, 0)


def test_the_users_traces_are_left_alone():
    ran = Counter()

    @jax.checkpoint
    def block(x):
        ran["block"] += 1
        return jnp.where(x > 0, jnp.sin(x), x)

    @jax.jit
    def loss(x):
        ran["loss"] += 1
        return jnp.sum(block(block(x)))

    x = jnp.ones(3)
    gradient = jax.jit(jax.grad(loss))
    loss(x), gradient(x), jax.make_jaxpr(loss)(x)
    before = Counter(ran)
    held = pe.trace_to_jaxpr.cache_info().currsize
    for _ in range(3):
        inspected = rm.trace(loss, x)
        inspected.report("nothing_saveable", "function")
    assert ran == before + Counter(loss=3, block=3)  # once for each inspection, whatever is cached of it
    assert pe.trace_to_jaxpr.cache_info().currsize <= held  # no entry of ours in it
    loss(x), gradient(x), jax.make_jaxpr(loss)(x)
    assert ran == before + Counter(loss=3, block=3)  # the user's own traces are still there


@pytest.mark.parametrize("fails", [False, True])
def test_jax_has_its_own_caches_back(fails):
    own = pe.trace_to_jaxpr, pjit._infer_params_cached, pjit._check_and_canonicalize_out_shardings

    def loss(x):
        assert pe.trace_to_jaxpr is not own[0]
        if fails:
            raise KeyError("mine")
        return jnp.sum(x)

    if fails:
        with pytest.raises(KeyError, match="mine"):
            rm.trace(loss, ARGS[0])
    else:
        rm.trace(loss, ARGS[0]).report("nothing_saveable")
    assert own == (pe.trace_to_jaxpr, pjit._infer_params_cached, pjit._check_and_canonicalize_out_shardings)


def test_no_tracer_leaks():
    if _jax.remat3():  # JAX's own gradient leaks one: test ours when this fails
        with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
            jax.make_jaxpr(jax.grad(jax.checkpoint(fresh(), policy=jax.checkpoint_policies.dots_saveable)))(*ARGS)
        return
    with jax.checking_leaks():
        inspect(fresh())


@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_a_trace_keeps_no_array_alive(make):
    p, x = make((8, 16), "float32"), make((2, 8), "float32")
    refs = [weakref.ref(p), weakref.ref(x)]
    trace = rm.trace(fresh(), p, x)
    del p, x
    for policy, at in POLICIES:
        trace.report(policy, at)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
