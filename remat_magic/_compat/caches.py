"""JAX's caches of traces: an inspection has some of its own, so that nothing of it stays when it is dropped."""

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

from remat_magic._compat.settings import set_locally

__all__ = ["Generation", "tracing", "user_traces"]

_weakly = functools.partial(util.weakref_lru_cache, maxsize=None)

# What holds the jaxprs of an inspection that is over, and how to make another of it (measured on 0.10.2 and 0.12.0.1).
# What else JAX caches hangs on the jaxprs in these, weakly.
_CACHES: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Any]], ...] = (
    # An entry for each function and setting while the function lives, which jnp.where and the like do for ever. The
    # first has no limit; the others have 2,048 entries, of which the user's would be pushed out.
    (pe, "trace_to_jaxpr", _weakly),
    (ad_checkpoint, "_trace_to_jaxpr", _weakly),
    (pjit, "_infer_params_cached", _weakly),
    # With jax_remat3 the tree of what a function returns holds a VJP, and its jaxprs.
    (pjit, "_check_and_canonicalize_out_shardings", functools.cache),
)

_numbers = itertools.count(0x52454D41)  # far from any profile version that a user sets
_in_force = threading.local()  # .generation: that of this thread, if it traces for an inspection
_lock = threading.Lock()
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

    Attributes:
        number: keys its entries in those caches of JAX's that it shares with the user.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._own: dict[int, Any] = {}

    def cache_for(self, cache: Any) -> Any:
        """A cache of the same function as one of JAX's."""
        own = self._own.get(id(cache))
        if own is None:
            own = self._own[id(cache)] = _MAKERS[id(cache)](_cached_function(cache))
        return own

    @property
    def traces(self) -> Any:
        """The cache of the traces that this inspection has made."""
        return self.cache_for(user_traces)


def _cached_function(cache: Any) -> Callable[..., Any]:
    """The function that a cache is of; JAX's own kinds of cache do not say."""
    known = getattr(cache, "__wrapped__", None)
    held = (each for each in gc.get_referents(cache) if type(each) is FunctionType)
    return known or next(each for each in held if each.__name__ != "<lambda>")


_JAX_OWN = [getattr(module, name) for module, name, _ in _CACHES]
_MAKERS = {id(cache): make for cache, (_, _, make) in zip(_JAX_OWN, _CACHES, strict=True)}
_CHOOSERS = [_Chooser(cache) for cache in _JAX_OWN]


def _install(caches: Sequence[Any]) -> None:
    for cache, (module, name, _) in zip(caches, _CACHES, strict=True):
        setattr(module, name, cache)


@contextlib.contextmanager
def _own_caches(generation: Generation) -> Iterator[None]:
    """Have JAX use a generation's caches in this thread; an interrupt between any two steps leaves JAX its own."""
    before = getattr(_in_force, "generation", None)
    mine = object()
    try:
        with _lock:
            _tracing_now.add(mine)
            _install(_CHOOSERS)
        _in_force.generation = generation
        yield
    finally:
        _in_force.generation = before
        with _lock:
            _tracing_now.discard(mine)
            if not _tracing_now:
                _install(_JAX_OWN)


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
