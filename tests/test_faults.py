"""What goes wrong while something is worked out leaves nothing behind: the next question is answered as if nothing had.

An interrupt comes at any moment. Here it is raised by the calls themselves: every function of the package (and some of
JAX's) is wrapped, the calls are counted in a first run, and then one run for each of some moments is interrupted there,
before or after the call. ``REMAT_FAULTS=200`` tries that many moments of each operation instead of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import logging
import os
import pkgutil
import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.error import UsageError
from jax._src import config, core, source_info_util
from jax._src.interpreters import partial_eval as pe
from jax.ad_checkpoint import checkpoint_name

import remat_magic as rm
from remat_magic._jax import settings
from remat_magic.engine import calls, halves, retrace
from remat_magic.measuring import measure as measuring
from remat_magic.records import RematError
from remat_magic.widget import RematWidget
from remat_magic.widget.worker import Worker
from tests.programs import f32, some_of
from tests.test_widget import FakeComm, FakeTrace, browser, messages, tell, views, workers_of  # noqa: F401 - fixtures

MOMENTS = int(os.environ.get("REMAT_FAULTS", "0")) or 1
P = jax.checkpoint_policies


def loss(w, x):
    @jax.checkpoint
    def layer(x):
        return checkpoint_name(jnp.tanh(w @ x), "h")

    x, _ = jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=2)
    return jnp.sin(layer(x)).sum()


SHAPES = f32(4, 4), f32(4)


def arrays():
    rng = np.random.default_rng(0)
    return rng.uniform(size=(4, 4)).astype(np.float32), rng.uniform(size=4).astype(np.float32)


# ------------------------------------------------------------------------------------------ an interrupt comes


class Moments:
    """Counts the calls of what is wrapped, and raises at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.at = -1
        self.raised = False

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.raised = True
            raise KeyboardInterrupt

    def of_ours(self, function):
        """A method of a context manager that is a generator: wrapped for the package's own."""
        mine = self.wrapped(function)

        def either(manager, *args):
            code = getattr(manager.gen, "gi_code", None)
            return (mine if code and code.co_filename.startswith(PACKAGE) else function)(manager, *args)

        return either

    def wrapped(self, function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)  # Python gives interrupts to the main thread alone
            self.pass_one()
            result = function(*args, **kwargs)
            self.pass_one()
            return result

        # Of no file of the user's, or it would be a line of what is inspected.
        counted.__code__ = counted.__code__.replace(co_filename=rm.__file__)
        return counted


PACKAGE = os.path.dirname(rm.__file__)


def _package_modules() -> list[types.ModuleType]:
    names = [module.name for module in pkgutil.walk_packages(rm.__path__, "remat_magic.")]
    return [rm, *map(importlib.import_module, names)]


@contextlib.contextmanager
def counted(moments: Moments):
    """Every function and method of the package wrapped, and the ways into JAX."""
    patch = pytest.MonkeyPatch()
    modules = _package_modules()
    wrappers: dict[int, types.FunctionType] = {}

    def wrapper(function):
        return wrappers.setdefault(id(function), moments.wrapped(function))

    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                for name, member in list(vars(value).items()):
                    if isinstance(member, types.FunctionType) and not name.startswith("__"):
                        patch.setattr(value, name, moments.wrapped(member))
                    elif isinstance(member, property) and member.fget is not None and not member.fset:
                        patch.setattr(value, name, property(moments.wrapped(member.fget), doc=member.__doc__))
    # Also where a module imported the function of another.
    for module in modules:
        for name, value in list(vars(module).items()):
            ours = isinstance(value, types.FunctionType) and (value.__module__ or "").startswith("remat_magic")
            # What stands in the place of a function of JAX's is known by what it is when it is taken away again.
            if ours and name != "_stand_in":
                patch.setattr(module, name, wrapper(value))
    for owner, name in ((jax, "make_jaxpr"), (jax, "vjp"), (jax, "checkpoint"), (jax.tree_util, "tree_flatten")):
        patch.setattr(owner, name, moments.wrapped(getattr(owner, name)))
    manager = contextlib._GeneratorContextManager  # between the two steps of a `with`
    for name in ("__enter__", "__exit__"):
        patch.setattr(manager, name, moments.of_ours(getattr(manager, name)))
    lowered = jax.stages.Lowered
    patch.setattr(lowered, "compile", moments.wrapped(lowered.compile))
    told = sys.unraisablehook

    def unraisable(failure):  # an interrupt in what Python calls when it collects something goes no further
        if not isinstance(failure.exc_value, KeyboardInterrupt):
            told(failure)

    patch.setattr(sys, "unraisablehook", unraisable)
    try:
        yield
    finally:
        patch.undo()


@functools.cache
def _undisturbed() -> dict[tuple[str, str], rm.Report]:
    trace = rm.trace(loss, *SHAPES)
    return {key: trace.report(*key) for key in QUESTIONS}


QUESTIONS = (("as_written", "sites"), ("dots_saveable", "function"), ("save_only_these_names('h')", "sites"))
_WATCHED = [config.jax_xla_profile_version, config.enable_x64, *([config.remat3] if hasattr(config, "remat3") else [])]


def state() -> list[object]:
    """What an interrupt must not leave otherwise: settings of this thread, the collector, JAX's own tracing."""
    gc.collect()
    position = source_info_util._source_info_context.context
    return [
        *(item.get_local() for item in _WATCHED),
        gc.isenabled(),
        set(halves._pauses),
        set(settings._tracing_now),
        dict(calls._watchers),
        sys.gettrace(),
        getattr(settings._in_force, "generation", None),
        type(pe.trace_to_jaxpr),
        core.trace_state_clean(),
        position.traceback,
        str(position.name_stack),
    ]


def essence(report: rm.Report) -> tuple[object, ...]:
    """What a report says but for who shares a body with whom: an interrupt can cost JAX the sharing of one."""
    rows = [dataclasses.replace(row, needed_by=()) for row in report.residuals]
    numbers = (report.forward_flops, report.backward_flops, report.recomputed_flops, report.complete)
    return rows, report.recomputed, numbers, report.backward_error, report.notes, report.sites


def check_trace(trace: rm.Trace) -> None:
    """It answers as one that was never interrupted, and another thread may ask."""
    free = []
    other = threading.Thread(target=lambda: free.append(trace.lock.acquire(timeout=1) and trace.lock.release() is None))
    other.start()
    other.join()
    assert free == [True], "the lock is held"
    for key, expected in _undisturbed().items():
        assert essence(trace.report(*key)) == essence(expected)


OPERATIONS = {
    "trace": lambda _: rm.trace(loss, *SHAPES),
    "report": lambda trace: [trace.report(*key) for key in QUESTIONS],
    "compare": lambda trace: [*trace.compare(["none", "dots_saveable"], "sites")],
    "plan": lambda trace: trace.plan(0.8, "sites"),
    "advice": lambda trace: trace.advice("save_only_these_names('h')", "sites"),
    "timeline": lambda trace: trace.timeline("dots_saveable", "function"),
    "function": lambda trace: trace.function("dots_saveable", "sites")(*arrays()),
    "measure": lambda trace: trace.measure("dots_saveable", "function", inputs="random", runs=1).error,
    "peak": lambda trace: trace.plan(peak=0.9, at="sites"),
}


def chosen(count: int, name: str) -> list[int]:
    """Moments all over an operation, its last among them."""
    return sorted({count, *random.Random(name).sample(range(1, count + 1), min(count, MOMENTS))})


def interrupted(moments: Moments, at: int, act) -> None:
    moments.count, moments.at, moments.raised = 0, at, False
    try:
        with counted(moments):
            act()
    except KeyboardInterrupt:
        pass
    # It may have a few moments less than when these were counted: one that was interrupted has filled caches.
    assert moments.raised or 0.99 * at < moments.count < at, "the interrupt was swallowed, or never came"


def _moments_of(act) -> int:
    """How many moments an operation on a new trace has, when it has as many as the last time.

    At first there are more: JAX fills its caches, and Python tells but once of each function of JAX's that it is called
    while calls are recorded.
    """
    counts = [-1, 0]
    while counts[-1] != counts[-2]:
        assert len(counts) < 10, counts
        trace, moments = rm.trace(loss, *SHAPES), Moments()
        gc.collect()  # or it comes in the midst of every second one, and what it calls is counted there
        with counted(moments):
            act(trace)
        counts.append(moments.count)
    return counts[-1]


@pytest.mark.parametrize("name", some_of(OPERATIONS, "trace", "report", "plan", "function"))
def test_an_interrupt_at_any_moment(name, remat3):
    _undisturbed.cache_clear()
    act = OPERATIONS[name]
    before = state()
    moments = Moments()
    expected = act(rm.trace(loss, *SHAPES))
    count = _moments_of(act)
    for at in chosen(count, name):
        trace = rm.trace(loss, *SHAPES)
        interrupted(moments, at, lambda: act(trace))  # noqa: B023 - called at once
        assert state() == before, f"at moment {at}"
        again = act(trace)
        if name not in ("report", "trace"):  # which check_trace holds against the undisturbed ones
            assert np.all(again == expected), f"at moment {at}"
        check_trace(again if name == "trace" else trace)


def test_an_interrupt_of_a_widget():
    """Assigning a policy, which is what the dropdown does."""
    _undisturbed.cache_clear()
    moments = Moments()

    def choose(widget):
        widget.policy = "none"
        widget.at = "function"
        return widget.report

    expected = choose(RematWidget(rm.trace(loss, *SHAPES)))
    with counted(moments):
        choose(RematWidget(rm.trace(loss, *SHAPES)))
    for at in chosen(moments.count, "widget"):
        widgets = []

        def act():
            widgets.append(RematWidget(rm.trace(loss, *SHAPES)))  # noqa: B023 - called at once
            choose(widgets[0])  # noqa: B023

        interrupted(moments, at, act)
        for widget in widgets:
            assert widget.report.policy == widget.policy
            assert choose(widget) == expected
            check_trace(widget._live.trace)
            widget.close()


def test_an_interrupt_of_a_cell(cells):
    """One sentence; the session, its names and JAX's settings are as before, and the cell can be run again."""
    cells.ok("import jax, jax.numpy as jnp", "x = jnp.ones(3)", "def wave(x): return jnp.sum(jnp.sin(x))")
    cell = ("%%remat --text", "wave(x)")
    cells.ok(*cell)
    expected = cells.out
    before = state()
    moments = Moments()
    with counted(moments):
        cells.ok(*cell)
    for at in chosen(moments.count, "cell"):
        moments.count, moments.at, moments.raised = 0, at, False
        error = None
        with counted(moments):
            try:
                result = cells.run(*cell)
            except KeyboardInterrupt:  # within IPython's own work on the text, which passes it on
                pass
            else:
                error = result.error_in_exec or result.error_before_exec
        if isinstance(error, UsageError):
            assert "interrupted" in str(error), error
        else:
            assert isinstance(error, KeyboardInterrupt | None), error
        cells.ok(*cell)
        assert cells.out == expected, f"after moment {at}"
        assert state() == before, f"after moment {at}"
    assert [type(transformer).__name__ for transformer in cells.shell.ast_transformers].count("CellTransformer") == 1


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize(
    "manager",
    [
        source_info_util.UserContextManager,
        source_info_util.SetNameStackContextManager,
        core.SetCurrentTraceContextManager,
    ],
)
def test_an_interrupt_while_jax_enters_or_leaves_a_block(monkeypatch, manager, method):
    """JAX then stays in it: whatever this thread traces later would be told to be of that line, or cannot be traced."""
    usual = getattr(manager, method)

    def interrupted(*args):
        if method == "__enter__":
            usual(*args)
        raise KeyboardInterrupt

    before = state()
    monkeypatch.setattr(manager, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rm.trace(loss, *SHAPES).report("dots_saveable", "function")
    monkeypatch.undo()
    assert state() == before
    _undisturbed.cache_clear()
    check_trace(rm.trace(loss, *SHAPES))


# ------------------------------------------------------------------------------------------ policies that misbehave


class Raises:
    """A policy that raises at its n-th question, once."""

    def __init__(self, n, error):
        self.n, self.error, self.asked = n, error, 0

    def __call__(self, prim, *args, **params):
        self.asked += 1
        if self.asked == self.n:
            raise self.error
        return prim.name == "dot_general"


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("error", [ValueError("no\n\n  good"), ZeroDivisionError(), RecursionError("deep")])
def test_a_policy_that_raises_at_the_nth_question(n, error, remat2):
    trace = rm.trace(loss, *SHAPES)
    mood = Raises(n, error)

    def moody(*args, **params):
        return mood(*args, **params)

    with pytest.raises(RematError) as raised:
        trace.report(moody, "sites")
    text = str(raised.value)
    assert type(error).__name__ in text
    assert "moody" in text
    assert "\n" not in text
    assert text.endswith(".")
    # It raises no more: the answer is that of a policy that never did.
    report, expected = trace.report(moody, "sites"), trace.report(P.dots_saveable, "sites")
    assert [row.type for row in report.residuals] == [row.type for row in expected.residuals]
    _undisturbed.cache_clear()
    check_trace(trace)


@pytest.mark.parametrize(
    "answer",
    [None, "yes", 1, 0.5, [], np.array([True, False]), jnp.ones(3), "x\ny\x1b[31m" * 1000, object(), np.True_, {}],
    ids=lambda answer: type(answer).__name__,
)
def test_a_policy_that_returns_nonsense(answer, remat2):
    trace = rm.trace(loss, *SHAPES)
    with pytest.raises(RematError) as raised:
        trace.report(lambda *_, **__: answer, "sites")
    text = str(raised.value)
    assert "it must return True or False" in text
    assert "\n" not in text
    assert len(text) < 600
    _undisturbed.cache_clear()
    check_trace(trace)


# ------------------------------------------------------------------------------------------ memory runs out


def _exhausted():
    from jax.errors import JaxRuntimeError

    return JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234567890 bytes.\n  [details]")


@pytest.mark.parametrize("error", [_exhausted(), MemoryError()])
def test_memory_runs_out_while_compiling(error, monkeypatch):
    trace = rm.trace(loss, *SHAPES)
    usual, calls = measuring.compile_for_memory, []

    def compile_for_memory(lowered, platform):
        calls.append(platform)
        if len(calls) == 1:
            raise error
        return usual(lowered, platform)

    monkeypatch.setattr(measuring, "compile_for_memory", compile_for_memory)
    measurement = trace.measure("dots_saveable", "sites", inputs="random", runs=1)
    assert measurement.error.startswith("out of memory: the device could not compile loss under dots_saveable;")
    assert measurement.error.endswith(".")
    assert "\n" not in measurement.error
    assert measurement.temp_bytes is None
    assert measurement.run_seconds is None
    again = trace.measure("dots_saveable", "sites", inputs="random", runs=1)
    assert not again.error
    assert again.run_seconds is not None
    _undisturbed.cache_clear()
    check_trace(trace)


def test_the_disk_is_full(tmp_path, monkeypatch):
    """One sentence of the system's, and no half file: neither the page, nor what was to become it."""
    report = rm.trace(loss, *SHAPES).report()
    path = tmp_path / "report.html"
    report.save_html(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(RematError, match="No space left"):
            report.save_html(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("Recursively calling <weakref>")])
def test_a_backward_half_that_fails_in_passing(error, monkeypatch):
    """It is no property of the function, so no report says that there is none, and the next question is answered.

    The second is what jaxlib raises for ever where an interrupt broke off what one of its caches was asked for.
    """
    trace = rm.trace(loss, *SHAPES)
    with monkeypatch.context() as patch:
        patch.setattr(retrace, "backward_half", lambda half: (_ for _ in ()).throw(error))
        with pytest.raises(RematError, match=type(error).__name__):
            trace.report("none", "sites")
    assert trace.report("none", "sites").complete
    assert not trace.report("none", "sites").backward_error


# ------------------------------------------------------------------------------------------ threads


def test_one_trace_from_eight_threads():
    trace = rm.trace(loss, *SHAPES)
    keys = [*_undisturbed(), ("none", "sites"), ("everything_saveable", "function")]
    reports_of: dict[tuple[str, str], list[rm.Report]] = {key: [] for key in keys}
    start = threading.Barrier(8)

    def ask(seed):
        start.wait()
        order = keys * 3
        random.Random(seed).shuffle(order)
        for key in order:
            reports_of[key].append(trace.report(*key))
            trace.timeline(*key)

    with ThreadPoolExecutor(8) as pool:
        for asked in [pool.submit(ask, seed) for seed in range(8)]:
            asked.result(timeout=240)
    for key, reports in reports_of.items():
        assert len(reports) == 24
        assert all(report is reports[0] for report in reports)  # made once
        assert reports[0] == _undisturbed().get(key, reports[0])
    assert gc.isenabled()


def test_the_collector_stays_off_where_the_user_turned_it_off():
    gc.disable()
    try:
        with halves.without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_widget_closed_while_its_worker_runs(browser, caplog):  # noqa: F811
    """Nothing is sent any more, no thread stays, and no exception is left to a log."""
    trace = FakeTrace(slow=0.2)
    widget = RematWidget(trace)
    content = {"type": "choose", "policy": "none", "at": "function", "serial": 1}
    channel = widget.comm
    channel.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    for kind in ("jaxprs", "memory", "advice"):
        message = {"type": kind, "policy": "none", "at": "function"}
        channel.callback({"content": {"data": {"method": "custom", "content": message}}, "buffers": []})
    workers = workers_of(widget)
    sent = len(channel.sent)
    widget.close()
    for worker in workers:
        worker.join()
        assert worker._thread is None or not worker._thread.is_alive()
    assert not [message for message in channel.sent[sent:] if message.get("method") == "custom"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    with pytest.raises(RematError, match="closed"):
        _ = widget.report


def test_a_request_that_fails_leaves_the_thread_to_the_next(caplog):
    done = []

    def work(request):
        if request == "bad":
            raise OSError("the connection is gone")
        done.append(request)

    worker = Worker(work)
    for request in ("bad", "good"):
        worker.post(request)
        worker.join()
    assert done == ["good"]
    assert worker._thread is None
    assert "a request of the browser failed" in caplog.text


def test_a_browser_that_sends_nonsense(browser):  # noqa: F811
    """Messages come from outside: whatever they hold, the widget goes on."""
    widget = RematWidget(FakeTrace())
    for content in (
        {},
        {"type": "choose"},
        {"type": "choose", "policy": None, "at": 7},
        {"type": "choose", "policy": "none", "at": "function", "serial": "x"},
        {"type": "names", "names": ["a"], "at": "function"},
        {"type": "names", "names": {"a": {"b": 1}}, "at": "function"},
        {"type": "jaxprs"},
        {"type": "compare", "device": "nonsense"},
        {"type": "nonsense"},
        [],
        None,
        "text",
    ):
        with contextlib.suppress(Exception):  # ipywidgets logs what a handler raises
            widget.comm.callback({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        widget._worker.join()
        for worker in workers_of(widget):
            worker.join()
    tell(widget, type="choose", policy="dots_saveable", at="function", serial=99)
    assert views(widget)[-1] == ("dots_saveable", True)
    assert not messages(widget, "nonsense")
    widget.close()


# ------------------------------------------------------------------------------------------ cells


def test_a_cell_that_raises_leaves_all_as_it_was(cells):
    cells.ok("import jax, jax.numpy as jnp", "x = jnp.ones(3)", "def wave(x): return jnp.sum(jnp.sin(x))")
    cells.ok("%%remat --text", "wave(x)")
    expected, before = cells.out, state()
    for bad in (
        ("%%remat --text", "def bad(x): raise ValueError('mine')", "bad(x)"),
        ("%%remat --text", "1 / 0", "wave(x)"),
        ("%%remat --text", "wave(x", ""),
        ("%%remat --text -p nonsense", "wave(x)"),
        ("%%remat --text", "wave(undefined)"),
        ("%%remat --text", "def leak(x): globals()['kept'] = x; return kept.sum() @ 3", "leak(x)"),
        ("%%remat --text", "raise SystemExit(3)", "wave(x)"),
    ):
        result = cells.run(*bad)
        assert not result.success, bad
        assert state() == before, bad
        cells.ok("%%remat --text", "wave(x)")
        assert cells.out == expected, bad
    cells.ok("y = jax.jit(wave)(x)")
    assert float(cells.ns["y"]) == pytest.approx(3 * np.sin(1))


def test_the_moments_are_those_of_the_package():
    """The counting itself: without it all of the above would pass."""
    moments = Moments()
    with counted(moments):
        rm.trace(loss, *SHAPES).report()
    assert moments.count > 100
    assert not hasattr(rm.trace, "__wrapped__")


def test_a_page_that_asks_for_a_subshell_of_the_kernel_before(monkeypatch):
    """JupyterLab does after a restart from elsewhere; ipykernel would drop the message without a word to the page."""
    from remat_magic.widget.widget import _subshell

    manager = types.SimpleNamespace(list_subshell=lambda: ["now"])
    kernel = types.SimpleNamespace(shell_channel_thread=types.SimpleNamespace(manager=manager))
    module = types.SimpleNamespace(Kernel=types.SimpleNamespace(instance=lambda: kernel))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelbase", module)
    assert [_subshell(None, asked) for asked in ("now", "before", None)] == ["now", None, None]
    del kernel.shell_channel_thread  # an ipykernel that arranges it otherwise decides itself
    assert _subshell(None, "before") == "before"
