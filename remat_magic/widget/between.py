"""What is done between cells: looking ahead, applying a choice, and closing the widgets of a cell that runs again."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Between", "between", "forget"]

# Long enough for the next cell of "Run All" to begin first.
_DELAY = 0.3
_PAUSE = 0.02


class _Kept(Protocol):
    def close(self) -> None: ...
    def look_ahead(self) -> bool: ...


class Between:
    """One shell's idle time.

    Args:
        shell: an IPython ``InteractiveShell``; it is held weakly.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        # The first widget is made by a cell that was running before the events below were listened to.
        self._busy = True
        self._cell_id: str | None = None
        self._by_cell: dict[str, list[weakref.ref[_Kept]]] = {}
        self._ahead: list[weakref.ref[_Kept]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = _running_loop()
        self._queue: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)

    def stop(self) -> None:
        """Listen no more, and forget everything."""
        shell = self._shell()
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._before)
            shell.events.unregister("post_run_cell", self._after)
        self._cancel()
        self._by_cell.clear()

    def keep(self, widget: _Kept, cell_id: str | None) -> None:
        """Close ``widget`` when its cell runs again, and let it look ahead once the running cell has ended."""
        cell_id = cell_id or self._cell_id
        if cell_id:
            self._by_cell.setdefault(cell_id, []).append(weakref.ref(widget))
        self._put_first(widget)

    def resume(self, widget: _Kept) -> None:
        """Let ``widget`` look ahead again, as after a change of its place. From any thread."""
        self._put_first(widget)
        if self._loop is not None and not self._busy:
            self._loop.call_soon_threadsafe(self._schedule, _DELAY)

    def soon(self, action: Callable[[], None]) -> bool:
        """Run ``action`` on the main thread while no cell runs; from any thread.

        Returns:
            Whether it has to wait for a running cell.
        """
        with self._lock:
            if self._busy:
                self._queue.append(action)
                return True
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._unless_busy, action)
        else:
            action()
        return False

    def _unless_busy(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._busy:
                self._queue.append(action)
                return
        action()

    def _before(self, info: Any = None) -> None:
        with self._lock:
            self._busy = True
        self._cancel()
        self._cell_id = getattr(info, "cell_id", None)
        self._loop = _running_loop() or self._loop
        for reference in self._by_cell.pop(self._cell_id or "", ()):
            widget = reference()
            if widget is not None:
                widget.close()

    def _after(self, _result: Any = None) -> None:
        with self._lock:
            self._busy = False
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

    def _put_first(self, widget: _Kept) -> None:
        self._ahead = [weakref.ref(widget), *(other for other in self._ahead if other() not in (None, widget))]

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, delay: float) -> None:
        self._cancel()
        if self._ahead and self._loop is not None and self._loop.is_running():
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        """One retrace, then room for whatever else the loop has to do."""
        self._timer = None
        if self._busy or not self._ahead:
            return
        first = self._ahead[0]
        widget = first()
        if widget is None or not widget.look_ahead():
            self._ahead = [other for other in self._ahead if other is not first]
        self._schedule(_PAUSE)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_shells: weakref.WeakKeyDictionary[Any, Between] = weakref.WeakKeyDictionary()


def forget(shell: Any) -> None:
    """Leave a shell alone, as when the extension is unloaded."""
    idle = _shells.pop(shell, None)
    if idle is not None:
        idle.stop()


def between(shell: Any) -> Between | None:
    """The shell's idle time, from the first call on; None outside IPython."""
    if shell is None:
        return None
    if shell not in _shells:
        _shells[shell] = Between(shell)
    return _shells[shell]
