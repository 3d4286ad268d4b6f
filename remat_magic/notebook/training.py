"""Telling a function that trains from one to inspect, while it is traced: it takes gradients in a loop."""

from __future__ import annotations

import contextlib
import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from remat_magic import _jax
from remat_magic.user_files import is_user_file


class Trains(BaseException):
    """Breaks off the trace of a function that trains; the code that is traced does not see it as an error."""


@contextlib.contextmanager
def unless_it_trains(fun: Any) -> Iterator[None]:
    """Trace a function until it shows that it trains.

    It does where a loop of its own, or of a function that it calls, takes a gradient.

    Args:
        fun: the function. Nothing is done for None, and for what is no function or method written in Python.

    Raises:
        Trains: it does.
    """
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if not isinstance(code, CodeType) or not is_user_file(code.co_filename):
        yield
        return

    def hold(traceable: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        frames, frame = list[FrameType](), sys._getframe(1)  # noqa: SLF001
        while frame is not None and (not frames or frames[-1].f_code is not code):
            frames.append(frame)
            frame = frame.f_back
        own = itertools.takewhile(lambda one: not str(one.f_globals.get("__name__")).startswith("jax."), frames[::-1])
        if frames[-1].f_code is code and any(_in_loop(one) for one in own if is_user_file(one.f_code.co_filename)):
            raise Trains
        return traceable

    with _jax.holding(hold):
        yield


def _in_loop(frame: FrameType) -> bool:
    """Whether the call that a frame is making stands in a ``for`` or ``while`` of its code."""
    at = frame.f_lasti
    jumps = (one for one in dis.get_instructions(frame.f_code) if "JUMP_BACKWARD" in one.opname)
    return any(one.argval <= at <= one.offset for one in jumps if "NO_INTERRUPT" not in one.opname)
