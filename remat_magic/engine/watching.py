"""Being told of the functions that this thread calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from remat_magic.user_files import is_library_file, is_user_file

_watchers: dict[int, list[Any]] = {}  # by thread
_lock = threading.Lock()


@contextlib.contextmanager
def watching(watcher: Any) -> Iterator[None]:
    """Tell a watcher of this thread's calls of the user's functions, and of ``__call__`` in libraries, as of layers.

    It has ``begin(frame)`` and ``end(frame, value)``.

    An interrupt between any two steps undoes it.
    """
    thread, tool = threading.get_ident(), _tool()
    hook = contextlib.nullcontext() if tool is not None or thread in _watchers else _hooked(thread)
    try:
        with _lock:
            _watchers[thread] = [*_watchers.get(thread, ()), watcher]
            if tool is not None:
                _monitoring.set_events(tool, _monitoring.events.PY_START | _monitoring.events.PY_RETURN)
        with hook:
            yield
    finally:
        try:
            _leave(watcher, thread, tool)
        finally:  # the first can have been interrupted itself
            _leave(watcher, thread, tool)


def _leave(watcher: Any, thread: int, tool: int | None) -> None:
    with _lock:
        others = [other for other in _watchers.get(thread, ()) if other is not watcher]
        if others:
            _watchers[thread] = others
        else:
            _watchers.pop(thread, None)
        if tool is not None and not _watchers:
            _monitoring.set_events(tool, 0)


def _is_told_of(code: CodeType) -> bool:
    file = code.co_filename
    if is_user_file(file):
        return file != "<string>" or not _is_of_record(code)
    return code.co_name == "__call__" and is_library_file(file)


def _is_of_record(code: CodeType) -> bool:
    """Whether it is of a method that Python writes for a dataclass or a named tuple, in the words that it uses there.

    JAX makes a thousand of such objects for twelve layers; what a user's ``exec`` defines is in ``<string>`` too.
    """
    return code.co_qualname.startswith("__create_fn__.<locals>.") or code.co_names == ("_tuple_new",)


# ------------------------------------------------------------------------------------------------ from Python 3.12 on

_NAME = "remat_magic"
_monitoring: Any = getattr(sys, "monitoring", None)


@functools.cache
def _tool() -> int | None:
    """A number under which Python tells of calls, and but once of those that nobody is told of; None: it cannot."""
    numbers = (4, 3) if hasattr(sys, "monitoring") else ()
    number = next((number for number in numbers if _monitoring.get_tool(number) in (None, _NAME)), None)
    if number is None:
        return None

    def started(code: CodeType, _: int) -> Any:
        if not _is_told_of(code):
            return _monitoring.DISABLE
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.begin(sys._getframe(1))  # noqa: SLF001 - the function's
        return None

    def returned(code: CodeType, _: int, value: Any) -> Any:
        if not _is_told_of(code):
            return _monitoring.DISABLE
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.end(sys._getframe(1), value)  # noqa: SLF001
        return None

    if _monitoring.get_tool(number) is None:
        _monitoring.use_tool_id(number, _NAME)
    _monitoring.register_callback(number, _monitoring.events.PY_START, started)
    _monitoring.register_callback(number, _monitoring.events.PY_RETURN, returned)
    return number


# -------------------------------------------------------------------------------------------------------- before that


@contextlib.contextmanager
def _hooked(thread: int) -> Iterator[None]:
    """Tell of calls by the debugger's hook, which is quicker, or by the profiler's while a debugger uses that."""
    get: Any
    put: Any
    get, put = (sys.gettrace, sys.settrace) if sys.gettrace() is None else (sys.getprofile, sys.setprofile)
    before: Any = get()
    others: dict[int, CodeType] = {}  # that nobody is told of, by identity: to hash a code object takes long

    def told(frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        if id(code) in others:  # asked a hundred thousand times for twelve layers
            return None
        if not _is_told_of(code):
            others[id(code)] = code
            return None
        if event == "call":
            frame.f_trace_lines = False
            for watcher in _watchers.get(thread, ()):
                watcher.begin(frame)
        elif event == "return":
            for watcher in _watchers.get(thread, ()):
                watcher.end(frame, value)
        return told

    def told_after(frame: FrameType, event: str, value: Any) -> None:
        before(frame, event, value)
        told(frame, event, value)

    try:
        put(told_after if callable(before) else told)
        yield
    finally:
        if before is None or callable(before):
            put(before)
        else:  # cProfile's own, which only it can put there again
            before.enable()
