"""What is done between cells: prefetching, applying a choice, and closing the widgets of a cell that runs again."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections.abc import Callable, Container
from typing import Any, Protocol

from remat_magic.records import Report
from remat_magic.widget.live_trace import LiveTrace
from remat_magic.widget.worker import Worker

# Long enough for the next cell of "Run All" to begin first.
_DELAY = 0.3
_PAUSE = 0.02
# Prefetching stops when one retrace takes longer than this many seconds: whatever else Python does would be slowed.
UNIT = 0.1
# How long Python waits at its end for what is under way: a thread that is in XLA's code then could bring it down.
_LAST = 2.0


class _Widget(Protocol):
    @property
    def chosen_device(self) -> str | None: ...
    def close(self) -> None: ...
    def prefetch(self) -> bool: ...


class IdleTime:
    """One shell's idle time.

    What is prefetched is worked out on a thread of its own, for one widget after another, so that the next cell begins
    at once: nothing new is begun while it runs. The IPython shell is referenced weakly.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        # The first widget is made by a cell that was running before the events below were listened to.
        self.busy = True  # a cell is running: what nobody waits for is left until it has ended
        self._cell_id: str | None = None
        self._by_cell: dict[str, list[weakref.ref[_Widget]]] = {}
        self._chosen: dict[str, str] = {}  # by cell, the device that its reader has chosen
        self._prefetching: list[weakref.ref[_Widget]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = _running_loop()
        self._queue: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._worker = Worker[IdleTime](IdleTime._prefetch_all, "remat_magic prefetching")
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)

    def end(self) -> None:
        """Begin nothing more, as Python is ending, and wait a moment for what was begun."""
        self.busy = True
        self._cancel()
        self._worker.join(_LAST)

    def stop(self) -> None:
        """Listen no more, and forget everything."""
        shell = self._shell()
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._before)
            shell.events.unregister("post_run_cell", self._after)
        self._cancel()
        with self._lock:
            self._by_cell.clear()
            self._prefetching.clear()

    def keep(self, widget: _Widget, cell_id: str | None) -> None:
        """Close ``widget`` when its cell runs again, and let it prefetch once the running cell has ended."""
        cell_id = cell_id or self._cell_id
        with self._lock:
            if cell_id:
                self._by_cell.setdefault(cell_id, []).append(weakref.ref(widget))
        self._put_first(widget)

    def chosen_device(self, cell_id: str | None) -> str | None:
        """The device that the reader has chosen in the widget that this cell showed before; None if they did not."""
        return self._chosen.get(cell_id or self._cell_id or "")

    def resume(self, widget: _Widget) -> None:
        """Let ``widget`` prefetch again, as after a change of its place. From any thread."""
        self._put_first(widget)
        if self._loop is not None and not self.busy:
            self._loop.call_soon_threadsafe(self._schedule, _DELAY)

    def soon(self, action: Callable[[], None]) -> bool:
        """Run ``action`` on the main thread while no cell runs, from any thread; whether it has to wait for that."""
        if not self.busy and self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._unless_busy, action)
            return False
        return self._unless_busy(action)

    def _unless_busy(self, action: Callable[[], None]) -> bool:
        with self._lock:
            if self.busy:
                self._queue.append(action)
                return True
        action()
        return False

    def _before(self, info: Any = None) -> None:
        with self._lock:
            self.busy = True
        self._cancel()
        self._cell_id = getattr(info, "cell_id", None)
        self._loop = _running_loop() or self._loop
        with self._lock:
            references = self._by_cell.pop(self._cell_id or "", ())
        for reference in references:
            widget = reference()
            if widget is not None:
                if self._cell_id and (device := widget.chosen_device) is not None:
                    self._chosen[self._cell_id] = device
                widget.close()

    def _after(self, _result: Any = None) -> None:
        with self._lock:
            self.busy = False
            queue, self._queue = self._queue, []
        self._loop = _running_loop() or self._loop
        try:
            while queue:
                queue.pop(0)()
        finally:
            if queue:  # one has raised, which IPython tells; the others wait for the next cell
                with self._lock:
                    self._queue[:0] = queue
            self._schedule(_DELAY)

    def _put_first(self, widget: _Widget) -> None:
        with self._lock:
            others = [other for other in self._prefetching if other() not in (None, widget)]
            self._prefetching = [weakref.ref(widget), *others]

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, delay: float) -> None:
        self._cancel()
        if self._prefetching and self._loop is not None and self._loop.is_running():
            self._timer = self._loop.call_later(delay, self._worker.post, self)

    def _prefetch_all(self) -> None:
        """One retrace after another, with time for whatever else Python has to do, until a cell begins."""
        while True:
            with self._lock:
                if self.busy or not self._prefetching:
                    return
                first, *others = self._prefetching
                self._prefetching = others  # so that what resumes it meanwhile is not lost
            widget, goes_on = first(), False
            try:
                goes_on = widget is not None and widget.prefetch()
            finally:  # one that fails makes way for the others
                with self._lock:
                    if goes_on and first not in self._prefetching:
                        self._prefetching.insert(max(0, len(self._prefetching) - len(others)), first)
            del widget  # or it lives as long as the pause
            time.sleep(_PAUSE)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_shells: weakref.WeakKeyDictionary[Any, IdleTime] = weakref.WeakKeyDictionary()


def forget(shell: Any) -> None:
    """Leave a shell alone, as when the extension is unloaded."""
    idle = _shells.pop(shell, None)
    if idle is not None:
        idle.stop()


@atexit.register
def _end() -> None:
    for idle in list(_shells.values()):
        idle.end()


def idle_time(shell: Any) -> IdleTime | None:
    """The shell's idle time, from the first call on; None outside IPython."""
    if shell is None:
        return None
    if shell not in _shells:
        _shells[shell] = IdleTime(shell)
    return _shells[shell]


class Prefetch:
    """Of one widget's policies those that nobody has looked at yet, one after another."""

    def __init__(self) -> None:
        self._tried: set[tuple[str, str]] = set()
        self._slow = False

    def step(self, live: LiveTrace, at: str, cached: Container[tuple[str, str]]) -> tuple[Report | None, bool]:
        """The report of a policy at a place that is not cached, one retrace at most; and whether to go on.

        Not when all are ``cached``, by policy and place, or one took longer than is felt.
        """
        if self._slow:
            return None, False
        trace = live.trace
        if not trace.lock.acquire(blocking=False):
            return None, True  # the worker is tracing what the reader has chosen
        try:
            keys = [(choice.key, at) for choice in trace.choices()]
            key = next((key for key in keys if key not in self._tried and key not in cached), None)
            if key is None:
                return None, False
            self._tried.add(key)
            start = time.perf_counter()
            report = trace.report(*key, live.namespace)
            self._slow = time.perf_counter() - start > UNIT
        except Exception:  # noqa: BLE001 -- nobody looks at it yet; whoever does will see
            return None, True
        finally:
            trace.lock.release()
        return report, not self._slow
