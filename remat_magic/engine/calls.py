"""Which calls of functions the equations of a jaxpr come from, recorded while it is traced.

A call is an interval of the equations of one jaxpr: those that were made between its beginning and its return. JAX
makes other jaxprs of this one later on, and evaluates it again. Its equations keep their tracebacks then, by which the
intervals are found again.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from jax.tree_util import tree_leaves

from remat_magic import _jax
from remat_magic.engine import signature
from remat_magic.engine.sites import Identity, name_of
from remat_magic.libraries import (
    intercepts,
    is_of,
    is_trial_of_linen,
    module_kind,
    written_class,
)
from remat_magic.user_files import STAND_IN, is_library_file, is_user_file

_NO_FUNCTIONS = frozenset({"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
_numbers = itertools.count()
_UNKNOWN: Any = object()
_SUSPENDS = 0x20 | 0x80 | 0x100 | 0x200  # generators and coroutines, which return more than once


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A function that is called.

    Attributes:
        who: its name (``block``, ``Layer.__call__``), file and line.
        module: whose module its first argument is: ``"flax.linen"``, ``"flax.nnx"``, ``"equinox"``, ``"haiku"``,
            ``"class"`` for an object of another class, empty for none.
        parameters: the names of its parameters.
        static: the positions and names of parameters that were given something which is no array, such as a bool; those
            that only a keyword gives have no position.
        within: the library in whose transformed functions or modules it is called, and which it calls itself, though it
            is no module's: ``"haiku"``, ``"flax.linen"``, empty for none. Only that one's checkpoint passes on what its
            modules ask for.
        leaks: whether something is used after it that it has made and does not return, as what it writes into a list or
            an object that it is given: a checkpoint lets nothing else out.
    """

    who: Identity
    module: str = ""
    parameters: tuple[str, ...] = ()
    static: tuple[tuple[int | None, str], ...] = ()
    within: str = ""
    leaks: bool = False

    @property
    def library(self) -> str:
        """Whose checkpoint it needs, as ``module``."""
        return self.within or self.module


_Given = tuple[str, Any, "tuple[int, int] | None"]  # of a leaf the parameter, itself, and its place


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call: the equations ``begin`` to ``end`` (excluded) of one jaxpr, as they were written down.

    ``returned`` has what it returned of these, by the number of the equation and of its output; ``given`` what it was
    given of the equations before these, of the inputs, which are those of an equation -1, and as variables of what is
    constant in it, each with the name of the parameter.
    """

    callee: CalledFunction
    begin: int
    end: int
    given: Sequence[tuple[Any, str]]
    returned: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """One call in a jaxpr: its equations ``first`` to ``last`` (excluded) there, and the variables it took and gave.

    ``given`` has the name of the parameter for each; ``is_known`` where all that it returned is among these.
    """

    callee: CalledFunction
    first: int
    last: int
    given: Mapping[Any, str] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()
    is_known: bool = False


@dataclass(slots=True, eq=False)
class _Frame:
    """A jaxpr while it was made: its calls, inner ones first, and the tracebacks of the equations in them."""

    calls: list[Call] = field(default_factory=list)
    tracebacks: list[tuple[int, Any]] = field(default_factory=list)
    equations: Sequence[Any] = ()  # only while calls are open: JAX must not find them held after the trace
    constants: Mapping[Any, Any] = field(default_factory=dict)  # only then, too
    open: int = 0
    inputs: tuple[Any, ...] = ()
    makers: dict[int, tuple[int, int]] = field(default_factory=dict)
    reached: int = 0  # how far `makers` goes

    def places(self, values: Iterable[Any]) -> tuple[tuple[int, int], ...]:
        """Where what is traced in some pytrees was made, as in ``Call``."""
        self.makers.update(_jax.makers(self.equations, self.reached))
        self.reached = len(self.equations)
        places = (self.makers.get(id(var)) for value in values for var in _jax.variables(value))
        return tuple(place for place in places if place is not None)


class Calls:
    """The calls that were made while something was traced.

    ``earlier`` are those of traces of the same before, whose inner jaxprs JAX may have in its cache.
    """

    def __init__(self, earlier: Calls | None = None) -> None:
        self._earlier = earlier
        self._frames: dict[int, _Frame] = {}  # by number
        self._callees: dict[int, CalledFunction | None] = {}  # by identity of their code; None: can have none
        self._codes: list[CodeType] = []
        self._traces: dict[int, tuple[weakref.ref[Any], _Frame]] = {}  # by the identity of a trace
        self._open: list[tuple[FrameType, _Frame | None, CalledFunction, int, list[_Given]]] = []
        self.elsewhere: set[Identity] = set()
        """Functions that were also called where no jaxpr is written, as under ``jax.jvp``, or in a nested gradient."""
        self._positions: dict[int, dict[int, list[int]]] = {}  # by identity of a traceback: for each frame

    # ----------------------------------------------------------------------------------------------------- recording

    def begin(self, frame: FrameType) -> None:
        """A function is called."""
        code = frame.f_code
        callee = self._callees.get(id(code), _UNKNOWN)
        if callee is _UNKNOWN:
            callee = self._callees[id(code)] = _callee(frame)
            self._codes.append(code)  # kept alive, so that its identity stays its own
        trace = None if callee is None else _jax.staged()
        if callee is None or trace is None:
            return
        if trace is _jax.ELSEWHERE:
            self._open.append((frame, None, callee, 0, []))
            if callee.who not in self.elsewhere and not is_trial_of_linen(frame):
                self.elsewhere.add(callee.who)
            return
        weak, inside = self._traces.get(id(trace), (None, None))
        if inside is None or weak is None or weak() is not trace:
            inside = self._frames[next(_numbers)] = _Frame(inputs=tuple(_jax.inputs_of(trace)))
            inside.makers.update((id(var), (-1, number)) for number, var in enumerate(inside.inputs))
            self._traces[id(trace)] = weakref.ref(trace), inside
        inside.equations, inside.constants = _jax.equations_of(trace), _jax.constants_of(trace)
        inside.open += 1
        # A checkpoint on a method of a class of the user's closes over `self`.
        values = [*_given(frame)][callee.module == "class" :]
        given = [(name, leaf) for _, name, value in values for leaf in _jax.leaves(value)]
        given = [(name, leaf, next(iter(inside.places([leaf])), None)) for name, leaf in given]
        self._open.append((frame, inside, callee, len(inside.equations), given))

    def end(self, frame: FrameType, value: Any) -> None:
        """A function has returned a value."""
        while any(entry[0] is frame for entry in self._open):
            caller, inside, callee, begin, given = self._open.pop()
            if inside is None:
                continue
            end = len(inside.equations)
            inside.open -= 1
            if caller is frame and end > begin:  # else it raised
                returned = tuple(place for place in inside.places([value]) if place[0] >= begin)
                owners = {id(leaf): name for name, leaf, place in given if place is None}
                taken: list[tuple[Any, str]] = [(place, name) for name, _, place in given if place is not None]
                read = inside.constants.items()
                taken += [(var, owners[id(value)]) for var, value in read if id(value) in owners]
                inside.calls.append(Call(callee, begin, end, taken, returned))
                if not inside.open:
                    inside.tracebacks.extend(enumerate(_jax.tracebacks(inside.equations[begin:end]), begin))
            if not inside.open:
                inside.equations, inside.constants = (), {}

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Take the calls from now on for such of a gradient within another one, which are no places."""
        before = set(self._frames)
        yield
        for key in set(self._frames) - before:
            self.elsewhere.update(call.callee.who for call in self._frames[key].calls)

    def close(self) -> None:
        """Nothing more is recorded."""
        self._open.clear()
        self._callees.clear()
        self._codes.clear()
        self._traces.clear()
        for number, frame in self._frames.items():
            frame.equations, frame.constants, frame.makers = (), {}, {}
            self._add(number, frame)

    def _add(self, number: int, frame: _Frame) -> None:
        for position, traceback in frame.tracebacks:
            if traceback is not None:
                self._positions.setdefault(id(traceback), {}).setdefault(number, []).append(position)

    def adopt(self, later: Calls, but: Any = None) -> None:
        """Take over what another trace recorded; not the jaxpr ``but``, which JAX does not keep."""
        left_out = None if but is None else later._find(but)[1]
        for number, frame in later._frames.items():
            if number not in (left_out, *self._frames):
                self._frames[number] = frame
                self._add(number, frame)

    def of(self, jaxpr: Any) -> list[Interval]:
        """The calls in a jaxpr, those in its equations' own jaxprs left out; outer ones before those inside them."""
        places, number = self._find(jaxpr)
        if number is None:
            return [] if self._earlier is None else self._earlier.of(jaxpr)
        at: list[int | None] = []
        reached = -1  # equations keep their order; what one call of JAX's own writes has one traceback
        for positions in places:
            candidates = positions.get(number, [])
            index = bisect.bisect_right(candidates, reached)
            if index < len(candidates):
                reached = candidates[index]
            at.append(reached if reached in candidates[: index + 1] else None)  # several can come of one
        placed = [(position, index) for index, position in enumerate(at) if position is not None]
        order = [position for position, _ in placed]
        opened = _jax.open_jaxpr(jaxpr)
        eqns, invars = opened.eqns, {*opened.invars}
        outer = {*opened.constvars, *invars}
        # JAX moves inputs around, and leaves some out.
        variables_of = {-1: [var if var in invars else None for var in self._frames[number].inputs]}
        variables_of |= {position: eqns[index].outvars for position, index in placed}

        def variable(place: Any) -> Any:
            if not isinstance(place, tuple):
                return place if place in outer else None
            return next(iter(variables_of.get(place[0], ())[place[1] : place[1] + 1]), None)

        intervals: list[Interval] = []
        for call in self._frames[number].calls:
            first, after = bisect.bisect_left(order, call.begin), bisect.bisect_left(order, call.end)
            if first < after:
                given = {var: name for place, name in call.given if (var := variable(place)) is not None}
                returned = tuple(var for place in call.returned if (var := variable(place)) is not None)
                known = len(returned) == len(call.returned)
                end = placed[after - 1][1] + 1
                intervals.append(Interval(call.callee, placed[first][1], end, given, returned, known))
        return sorted(intervals, key=lambda interval: (interval.first, -interval.last))

    def _find(self, jaxpr: Any) -> tuple[list[dict[int, list[int]]], int | None]:
        """For each equation of a jaxpr where it can have been made, and the number of the one jaxpr it was made as."""
        places = [self._positions.get(id(_jax.traceback_of(eqn)), {}) for eqn in _jax.open_jaxpr(jaxpr).eqns]
        votes = Counter(number for positions in places for number in positions)
        return places, votes.most_common(1)[0][0] if votes else None


@contextlib.contextmanager
def recording(earlier: Calls | None = None) -> Iterator[Calls]:
    """Record this thread's calls until it ends; ``earlier`` as for ``Calls``."""
    calls = Calls(earlier)
    try:
        with watching(calls):
            yield calls
    finally:
        calls.close()


def _callee(frame: FrameType) -> CalledFunction | None:
    """What is called, if it is a function that a checkpoint can be put on: the user's, or a library's module."""
    code = frame.f_code
    if code.co_name in _NO_FUNCTIONS or code.co_flags & _SUSPENDS or STAND_IN in code.co_varnames:
        return None
    users = is_user_file(code.co_filename)
    if not users and code.co_name != "__call__":
        return None
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    module, name = "", name_of(code)
    owner: Any = frame.f_locals.get("self")
    if parameters[:1] == ("self",):
        module = module_kind(type(owner)) or "class"
        name = f"{written_class(type(owner)).__name__}.{code.co_name}"
    of_library = module not in ("", "class")
    if not of_library and (not users or intercepts(frame)):
        return None
    cls = type(owner)
    if not users and (cls.__name__.startswith("_") or cls.__module__.startswith("equinox._")):
        return None  # no layer, but a wrapper such as what eqx.filter_jit returns
    static = tuple((position, name) for position, name, value in _given(frame) if _is_static(value))
    static = static[1:] if module and static[:1] == ((0, "self"),) else static
    return CalledFunction((name, code.co_filename, code.co_firstlineno), module, parameters, static)


def _given(frame: FrameType) -> Iterator[tuple[int | None, str, Any]]:
    """The position, if any, the name and the value of each argument of a call."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    for position, name in enumerate(code.co_varnames[:count]):
        yield position if position < code.co_argcount else None, name, values.get(name)
    if code.co_flags & inspect.CO_VARARGS:
        rest = code.co_varnames[count]
        yield from ((position, rest, value) for position, value in enumerate(values.get(rest, ()), code.co_argcount))
        count += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        yield from ((None, name, value) for name, value in values.get(code.co_varnames[count], {}).items())


def _is_static(value: Any) -> bool:
    """Whether a checkpoint is to pass an argument on as it is: a function, or what holds no array, and no module."""
    if callable(value):
        return True
    try:
        leaves = tree_leaves(value)
    except Exception:  # noqa: BLE001 - of a class of the user's, or a dictionary whose keys have no order
        leaves = [value]
    return bool(leaves) and not any(hasattr(leaf, "dtype") or module_kind(type(leaf)) for leaf in leaves)


def frames(eqn: Any) -> list[tuple[CodeType, int]]:
    """The code that made an equation and the instruction in each, innermost first."""
    traceback = _jax.traceback_of(eqn)
    return [] if traceback is None else [*zip(*traceback.raw_frames(), strict=True)]


def calls_scoped_modules(stack: Iterable[tuple[CodeType, int]]) -> bool:
    """Whether some of these frames are of modules whose parameters would leak from jax.checkpoint."""
    return any(is_of(library, code) for code, _ in stack for library in ("flax.linen", "haiku"))


def in_checkpointed_loop(eqns: Iterable[Any]) -> bool:
    """Whether some are of equinox's loop that keeps so many of its steps, as diffrax's adjoint does by it."""
    codes = (code for eqn in eqns for code, _ in frames(eqn))
    return any(is_of("equinox", code) and code.co_filename.endswith("checkpointed.py") for code in codes)


def called_from(eqn: Any, who: tuple[str, str, int]) -> tuple[CodeType, int] | None:
    """The code of the user's that called a function of which an equation is, or which it calls, and the instruction."""
    outside = frames(eqn)
    inside = [(code.co_filename, code.co_firstlineno) == who[1:] for code, _ in outside]
    # What JAX traces apart from its caller, as a checkpoint's body, has frames of its own alone.
    is_call = _jax.is_checkpoint(eqn) or _jax.is_jit(eqn)
    if not (is_call and any(_jax.function_name(body.jaxpr)[1:] == who[1:] for body in _jax.bodies(eqn))):
        outside = outside[inside.index(True) + 1 :] if True in inside else []
    # What stands in for the user's code while an edit is traced is none of it.
    traced = itertools.takewhile(lambda frame: frame[0].co_filename != signature.__file__, outside)
    own = (frame for frame in traced if is_user_file(frame[0].co_filename))
    return next((frame for frame in own if STAND_IN not in frame[0].co_varnames), None)


def within_library(eqns: Iterable[Any], who: tuple[str, str, int]) -> str:
    """What the equations of a call tell of the function: ``CalledFunction.within``."""
    for eqn in eqns if "haiku" in sys.modules or "flax.linen" in sys.modules else ():
        codes = [code for code, _ in frames(eqn)]
        own = [(code.co_filename, code.co_firstlineno) == who[1:] for code in codes]
        inside, outside = (codes[: own.index(True)], codes[own.index(True) + 1 :]) if True in own else ([], [])
        for library in ("haiku", "flax.linen"):
            if all(any(is_of(library, code) for code in part) for part in (inside, outside)):
                return library
    return ""


# --------------------------------------------------------------------------------------------------- hooks of Python


_watchers: dict[int, list[Any]] = {}  # by thread
_lock = threading.Lock()


@contextlib.contextmanager
def watching(watcher: Any) -> Iterator[None]:
    """Have ``begin(frame)`` and ``end(frame, value)`` of a watcher called at this thread's calls.

    Those are the calls of the user's functions, and of ``__call__`` in libraries, as of layers.

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


def _is_recorded(code: CodeType) -> bool:
    """Whether it is code of the user's, or of a call in a library; not what Python writes for a record.

    JAX makes a thousand dataclasses and named tuples for twelve layers. Their methods are in ``<string>``, in which is
    what a user's ``exec`` defines, too.
    """
    if not is_user_file(code.co_filename):
        return code.co_name == "__call__" and is_library_file(code.co_filename)
    of_record = code.co_qualname.startswith("__create_fn__.<locals>.") or code.co_names == ("_tuple_new",)
    return code.co_filename != "<string>" or not of_record


_NAME = "remat_magic"
_monitoring: Any = getattr(sys, "monitoring", None)


@functools.cache
def _tool() -> int | None:
    """The tool number of ``sys.monitoring`` (Python 3.12) whose callbacks are the watchers; None where it is taken."""
    numbers = (4, 3) if hasattr(sys, "monitoring") else ()
    number = next((number for number in numbers if _monitoring.get_tool(number) in (None, _NAME)), None)
    if number is None:
        return None

    def started(code: CodeType, _: int) -> Any:
        if not _is_recorded(code):
            return _monitoring.DISABLE
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.begin(sys._getframe(1))  # noqa: SLF001 - the function's
        return None

    def returned(code: CodeType, _: int, value: Any) -> Any:
        if not _is_recorded(code):
            return _monitoring.DISABLE
        for watcher in _watchers.get(threading.get_ident(), ()):
            watcher.end(sys._getframe(1), value)  # noqa: SLF001
        return None

    if _monitoring.get_tool(number) is None:
        _monitoring.use_tool_id(number, _NAME)
    _monitoring.register_callback(number, _monitoring.events.PY_START, started)
    _monitoring.register_callback(number, _monitoring.events.PY_RETURN, returned)
    return number


@contextlib.contextmanager
def _hooked(thread: int) -> Iterator[None]:
    """Before 3.12: watch calls by the debugger's hook, the quicker one, or the profiler's while that is in use."""
    get: Any
    put: Any
    get, put = (sys.gettrace, sys.settrace) if sys.gettrace() is None else (sys.getprofile, sys.setprofile)
    before: Any = get()
    others: dict[int, CodeType] = {}  # that is not recorded, by identity: to hash a code object takes long

    def hook(frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        if id(code) in others:  # a hundred thousand times for twelve layers
            return None
        if not _is_recorded(code):
            others[id(code)] = code
            return None
        if event == "call":
            frame.f_trace_lines = False
            for watcher in _watchers.get(thread, ()):
                watcher.begin(frame)
        elif event == "return":
            for watcher in _watchers.get(thread, ()):
                watcher.end(frame, value)
        return hook

    def chained(frame: FrameType, event: str, value: Any) -> None:
        before(frame, event, value)
        hook(frame, event, value)

    try:
        put(chained if callable(before) else hook)
        yield
    finally:
        if before is None or callable(before):
            put(before)
        else:  # cProfile's own, which only it can put there again
            before.enable()
