"""JAX's caches of traces: an inspection has some of its own, so that nothing of it stays when it is dropped.

While it is traced, some more of JAX's functions are quicker ones (see ``quick``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from jax._src import ad_checkpoint, config, pjit, util
from jax._src.interpreters import partial_eval as pe

from remat_magic._jax.settings import JAX_VERSION, set_locally

__all__ = ["Generation", "tracing", "user_traces"]

_weakly = functools.partial(util.weakref_lru_cache, maxsize=None)

# What holds the jaxprs of an inspection that is over, and how to make another of it (measured on 0.10.2 and 0.12.0.1).
# What else JAX caches hangs on the jaxprs in these, weakly.
_KNOWN: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Any]], ...] = (
    # An entry for each function and setting while the function lives, which jnp.where and the like do for ever. The
    # first has no limit; the others have 2,048 entries, of which the user's would be pushed out.
    (pe, "trace_to_jaxpr", _weakly),
    (ad_checkpoint, "_trace_to_jaxpr", _weakly),
    (pjit, "_infer_params_cached", _weakly),
    # With jax_remat3 the tree of what a function returns holds a VJP, and its jaxprs.
    (pjit, "_check_and_canonicalize_out_shardings", functools.cache),
)

_CACHES = [known for known in _KNOWN if hasattr(known[0], known[1])]  # a newer JAX may have others

_numbers = itertools.count(0x52454D41)  # far from any profile version that a user sets
_in_force = threading.local()  # .generation: that of this thread, if it traces for an inspection
_lock = threading.Lock()
# The versions that tests/test_quick.py has been run on; on every other one JAX's own functions do it all.
_QUICK_KNOWN = JAX_VERSION[:3] in ((0, 10, 2), (0, 12, 0))
_tracing_now: set[object] = set()  # one for each inspection that is being traced

user_traces: Any = pe.trace_to_jaxpr
"""JAX's own cache of traces, which has the user's."""


class _Chooser:
    """Stands in for one of JAX's caches while an inspection is traced: other threads go on using JAX's own."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generation = getattr(_in_force, "generation", None)
        return (self._cache if generation is None else generation.cache_for(self._cache))(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Generation:
    """What keeps the traces of one inspection apart from all others, the user's too.

    Args:
        quick: whether to trace with the quicker functions, as is done by default on a JAX that they were held
            against.

    Attributes:
        number: keys its entries in those caches of JAX's that it shares with the user.
    """

    def __init__(self, quick: bool = _QUICK_KNOWN) -> None:
        self.number = next(_numbers)
        self.quick = quick
        self._own: dict[int, Any] = {}

    def cache_for(self, cache: Any) -> Any:
        """A cache of the same function as one of JAX's."""
        own = self._own.get(id(cache))
        if own is None:
            function = _cached_function(cache)
            # In a JAX that keeps it elsewhere, the inspection's traces stay in JAX's cache, under their own number.
            own = self._own[id(cache)] = cache if function is None else _MAKERS[id(cache)](function)
        return own

    @property
    def traces(self) -> Any:
        """The cache of the traces that this inspection has made."""
        return self.cache_for(user_traces)


def _cached_function(cache: Any) -> Callable[..., Any] | None:
    """The function that a cache is of, None where it is not found; JAX's own kinds of cache do not say."""
    known = getattr(cache, "__wrapped__", None)
    held = (each for each in gc.get_referents(cache) if type(each) is FunctionType)
    return known or next((each for each in held if each.__name__ != "<lambda>"), None)


_JAX_OWN = [getattr(module, name) for module, name, _ in _CACHES]
_MAKERS = {id(cache): make for cache, (_, _, make) in zip(_JAX_OWN, _CACHES, strict=True)}


def _choice(own: Callable[..., Any], quick: Callable[..., Any]) -> Callable[..., Any]:
    """A function (and not a ``_Chooser``, since it can be a method) that chooses as those do."""

    @functools.wraps(own)
    def choose(*args: Any, **kwargs: Any) -> Any:
        generation = getattr(_in_force, "generation", None)
        return (own if generation is None or not generation.quick else quick)(*args, **kwargs)

    return choose


def _stand_ins() -> Sequence[tuple[Any, str, Callable[..., Any]]]:
    if not _QUICK_KNOWN:  # it may not have what they are made of
        return ()
    from remat_magic._jax.quick import QUICK

    return QUICK


_QUICK = _stand_ins()
_OF_JAX = [
    *((module, name, cache) for cache, (module, name, _) in zip(_JAX_OWN, _CACHES, strict=True)),
    *((place, name, getattr(place, name)) for place, name, _ in _QUICK),
]
_CHOOSING = [
    *((module, name, _Chooser(cache)) for cache, (module, name, _) in zip(_JAX_OWN, _CACHES, strict=True)),
    *((place, name, _choice(getattr(place, name), quick)) for place, name, quick in _QUICK),
]


def _install(functions: Sequence[tuple[Any, str, Any]]) -> None:
    for place, name, function in functions:
        setattr(place, name, function)


@contextlib.contextmanager
def _own_caches(generation: Generation) -> Iterator[None]:
    """Have JAX use a generation's caches in this thread; an interrupt between any two steps leaves JAX its own."""
    before = getattr(_in_force, "generation", None)
    mine = object()
    try:
        with _lock:
            _tracing_now.add(mine)
            _install(_CHOOSING)
        _in_force.generation = generation
        yield
    finally:
        _in_force.generation = before
        with _lock:
            _tracing_now.discard(mine)
            if not _tracing_now:
                _install(_OF_JAX)


@contextlib.contextmanager
def tracing(generation: Generation, use_remat3: bool, x64: bool) -> Iterator[None]:
    """Trace apart from the user's cached traces, with ``jax_remat3`` and ``jax_enable_x64`` pinned.

    ``jax_xla_profile_version`` is part of the key of every trace cache and means nothing to tracing itself, so that
    nested functions that the user has redefined are traced anew while the user's own entries stay as they are.
    """
    wanted: list[tuple[Any, Any]] = [(config.jax_xla_profile_version, generation.number), (config.enable_x64, x64)]
    if hasattr(config, "remat3"):
        wanted.append((config.remat3, use_remat3))
    with _own_caches(generation), set_locally(wanted):
        yield
