"""JAX's caches of traces: an inspection has some of its own, so that nothing of it stays when it is dropped.

A courtesy: where a JAX keeps its traces elsewhere, or another library has put a function of its own in the place of a
cache, the inspection's traces stay in JAX's caches, under a number of their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import jax

from remat_magic._jax.jaxprs import open_jaxpr, pretty
from remat_magic._jax.private import courtesy, do_without
from remat_magic._jax.settings import left_as_found, set_locally, setting

_EFFECT = "traces of an inspection stay in JAX's own caches after it"
_weakref_lru_cache = courtesy("jax._src.util.weakref_lru_cache", _EFFECT)


def _weakly(function: Callable[..., Any]) -> Any:
    return _weakref_lru_cache(function, maxsize=None)


class _Place:
    """Where JAX has one of its caches, and how to make another of the same function.

    While inspections are traced, a chooser stands there; it hands other threads on to what it found.
    """

    def __init__(self, module: str, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self.module, self.name, self.make = importlib.import_module(module), name, make
        self.jax_own = getattr(self.module, name)
        self.chooser: _Chooser | None = None

    @functools.cached_property
    def function(self) -> Callable[..., Any] | None:
        """The function that the cache is of, None where it is not found; JAX's own kinds of cache do not say."""
        wrapped = getattr(self.jax_own, "__wrapped__", None)
        # Its entries are among what it refers to: thousands, in a session that lasts.
        functions = (held for held in gc.get_referents(self.jax_own) if type(held) is FunctionType)
        return wrapped or next((function for function in functions if function.__name__ != "<lambda>"), None)

    def install(self) -> None:
        """Let a chooser stand where the cache is."""
        now = getattr(self.module, self.name)
        if now is not self.chooser:
            self.chooser = _Chooser(self, now)
            setattr(self.module, self.name, self.chooser)

    def restore(self) -> None:
        """Put back what the chooser was put in the place of, unless another library has replaced it meanwhile."""
        if self.chooser is not None and getattr(self.module, self.name) is self.chooser:
            setattr(self.module, self.name, self.chooser.replaced)


class _Chooser:
    """Stands in for one of JAX's caches while an inspection is traced: other threads go on using what was there."""

    def __init__(self, place: _Place, replaced: Any) -> None:
        self.place, self.replaced = place, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generation = getattr(_in_force, "generation", None)
        # A function of another library's is called, and asks JAX's cache if it wants to.
        if generation is None or self.replaced is not self.place.jax_own:
            return self.replaced(*args, **kwargs)
        return generation.cache_for(self.place)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)


# What holds the jaxprs of an inspection that is over, and how to make another of it (measured on 0.10.2, 0.11 and
# 0.12.0.1). What else JAX caches hangs on the jaxprs in these, weakly.
_PLACES = [
    _Place(module, name, make)
    for module, name, make in (
        # An entry for each function and setting while the function lives, which jnp.where and the like do for ever. The
        # first has no limit; the others have 2,048 entries, of which the user's would be pushed out.
        ("jax._src.interpreters.partial_eval", "trace_to_jaxpr", _weakly),
        ("jax._src.ad_checkpoint", "_trace_to_jaxpr", _weakly),
        ("jax._src.pjit", "_infer_params_cached", _weakly),
        # With jax_remat3 the tree of what a function returns holds a VJP, and its jaxprs.
        ("jax._src.pjit", "_check_and_canonicalize_out_shardings", functools.cache),
    )
    if _weakref_lru_cache is not None and courtesy(f"{module}.{name}", _EFFECT) is not None
]

_numbers = itertools.count(0x52454D41)  # far from any profile version that a user sets
_in_force = threading.local()  # .generation: that of this thread, if it traces for an inspection
_lock = threading.Lock()
_tracing_now: set[object] = set()  # one for each inspection that is being traced

_user_traces = next((place for place in _PLACES if place.name == "trace_to_jaxpr"), None)
user_traces: Any = None if _user_traces is None else _user_traces.jax_own
"""JAX's own cache of traces, which has the user's; None in a JAX that has it elsewhere."""


class Generation:
    """What keeps the traces of one inspection apart from all others, the user's too.

    Attributes:
        number: keys its entries in those caches of JAX's that it shares with the user.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._own: dict[str, Any] = {}

    def cache_for(self, place: _Place) -> Any:
        """A cache of the same function as one of JAX's."""
        own = self._own.get(place.name)
        if own is None:
            # In a JAX that keeps it elsewhere, the inspection's traces stay in JAX's cache, under their own number.
            own = self._own[place.name] = place.jax_own if place.function is None else place.make(place.function)
        return own

    @property
    def traces(self) -> Any:
        """The cache of the traces that this inspection has made; None in a JAX that has its own elsewhere."""
        return None if _user_traces is None else self.cache_for(_user_traces)


@contextlib.contextmanager
def _own_caches(generation: Generation) -> Iterator[None]:
    """Have JAX use a generation's caches in this thread; an interrupt between any two steps leaves JAX its own."""
    before = getattr(_in_force, "generation", None)
    this_trace = object()
    try:
        with _lock:
            _tracing_now.add(this_trace)
            for place in _PLACES:
                place.install()
        _in_force.generation = generation
        yield
    finally:
        _in_force.generation = before
        with _lock:
            _tracing_now.discard(this_trace)
            if not _tracing_now:
                for place in _PLACES:
                    place.restore()


def is_inspecting() -> bool:
    """Whether this thread traces for an inspection."""
    return getattr(_in_force, "generation", None) is not None


@contextlib.contextmanager
def tracing(generation: Generation, use_remat3: bool, x64: bool) -> Iterator[None]:
    """Trace apart from the user's cached traces, with ``jax_remat3`` and ``jax_enable_x64`` pinned.

    ``jax_xla_profile_version`` is part of the key of every trace cache and means nothing to tracing itself, so that
    nested functions that the user has redefined are traced anew while the user's own entries stay as they are.
    """
    wanted = [
        (setting("jax_xla_profile_version", "a function that was redefined may be shown as it was"), generation.number),
        (setting("enable_x64", "jax_enable_x64 is that of whoever asks, not that of the trace"), x64),
    ]
    if hasattr(jax.config, "jax_remat3"):  # a JAX that has gone over to it has no setting for it
        wanted.append((setting("remat3", "jax_remat3 is that of whoever asks, not that of the trace"), use_remat3))
    wanted = [pair for pair in wanted if pair[0] is not None]
    with _own_caches(generation), set_locally(wanted), left_as_found():
        yield


# -------------------------------------------------------------------------------------- what JAX still holds of before


_UNTOLD = "no note tells of functions that JAX still holds an older trace of"


def stale_traces(
    generation: Generation, top: Callable[..., Any], closed: Any, comparable: Callable[[Any], bool]
) -> list[tuple[Callable[..., Any], str]]:
    """The user's functions of which JAX still holds an older trace than the one made under ``generation``, with names.

    No Python of the user runs: JAX's cache is asked with tracing forbidden, so that a miss raises. A courtesy: none is
    found in a JAX that keeps its traces otherwise. Older traces of ``top`` itself, the function that was traced, are
    compared with its fresh jaxpr ``closed``; ``comparable`` tells the fresh jaxprs that JAX would make in just the same
    way.
    """
    no_tracing, number = setting("no_tracing", _UNTOLD), setting("jax_xla_profile_version", _UNTOLD)
    if user_traces is None or no_tracing is None or number is None:
        return []
    try:
        # Not JAX's own context managers, which an interrupt can leave without putting anything back.
        with set_locally([(no_tracing, True)]):
            return _stale(generation, number, top, closed, comparable)
    except Exception as error:  # noqa: BLE001 - whatever a newer JAX does otherwise costs the note, not the trace
        do_without(f"the cache of traces as it was ({type(error).__name__}: {error})", _UNTOLD)
        return []


def _stale(
    generation: Generation, number: Any, top: Callable[..., Any], closed: Any, comparable: Callable[[Any], bool]
) -> list[tuple[Callable[..., Any], str]]:
    stale: dict[int, tuple[Callable[..., Any], str]] = {}
    for function, args, kwargs in _alive(generation.traces):
        try:
            old = user_traces(function, *args, **kwargs)[0]
        except Exception:  # noqa: BLE001 - not in the user's cache: nothing old to be wrong about
            continue
        with set_locally([(number, generation.number)]):
            try:
                fresh = generation.traces(function, *args, **kwargs)[0]
            except Exception:  # noqa: BLE001 - made under a setting that the function itself made
                continue
        if _differ(fresh, old) and comparable(fresh):
            stale[id(function)] = (function, args[1].func_name)
    for function, args, kwargs in _alive(user_traces, top):
        try:
            old = user_traces(function, *args, **kwargs)[0]
        except Exception:  # noqa: BLE001 - made under another configuration than today's
            continue
        if _input_types(old) == _input_types(closed) and _differ(closed, old) and comparable(closed):
            stale[id(function)] = (function, args[1].func_name)
    return list(stale.values())


def _alive(cache: Any, only: Callable[..., Any] | None = None) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The keys of a cache whose function is still there, or is ``only``: function, arguments, keyword arguments."""
    return [
        (function, args, dict(kwargs))
        for ref, _, args, kwargs in cache.cache_keys()  # thousands, in a session that lasts
        if (function := ref()) is not None and (only is None or function is only)
    ]


def _differ(fresh: Any, old: Any) -> bool:
    fresh, old = open_jaxpr(fresh), open_jaxpr(old)
    return len(fresh.eqns) != len(old.eqns) or pretty(fresh) != pretty(old)


def _input_types(jaxpr: Any) -> list[str]:
    return [str(var.aval) for var in open_jaxpr(jaxpr).invars]
