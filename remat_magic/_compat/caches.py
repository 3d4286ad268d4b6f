"""JAX's trace caches: tracing apart from the user's entries in them, and reading which of those are out of date."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import config
from jax._src.interpreters import partial_eval as pe

from remat_magic._compat.jaxprs import open_jaxpr, pretty
from remat_magic._compat.settings import set_locally

_generations = itertools.count(0x52454D41)  # far from any profile version that a user sets


def new_generation() -> int:
    """A number that keys a set of entries in JAX's trace caches which nobody else uses."""
    return next(_generations)


@contextlib.contextmanager
def tracing(generation: int, use_remat3: bool, x64: bool) -> Iterator[None]:
    """Trace apart from the user's cached traces, with ``jax_remat3`` and ``jax_enable_x64`` pinned.

    ``jax_xla_profile_version`` is part of the key of every trace cache and means nothing to tracing itself, so that
    nested functions that the user has redefined are traced anew while the user's own entries stay as they are.
    """
    wanted: list[tuple[Any, Any]] = [(config.jax_xla_profile_version, generation), (config.enable_x64, x64)]
    if hasattr(config, "remat3"):
        wanted.append((config.remat3, use_remat3))
    with set_locally(wanted):
        yield


def stale_traces(generation: int, top: Callable[..., Any], closed: Any) -> list[tuple[Callable[..., Any], str]]:
    """The user's functions of which JAX still holds an older trace than the one made under ``generation``.

    No Python of the user runs: JAX's cache is asked with tracing forbidden, so that a miss raises.

    Args:
        generation: the number the fresh trace was made under.
        top: the function that was traced, and
        closed: its fresh jaxpr, compared with older traces of ``top`` itself.

    Returns:
        The stale functions with their names, each once.
    """
    cache = pe.trace_to_jaxpr
    stale: dict[int, tuple[Callable[..., Any], str]] = {}

    def differs(fresh: Any, old: Any) -> bool:
        fresh, old = open_jaxpr(fresh), open_jaxpr(old)
        return len(fresh.eqns) != len(old.eqns) or pretty(fresh) != pretty(old)

    usual = config.jax_xla_profile_version.value
    users: dict[Any, Any] = {}
    fresh_keys: list[tuple[Any, tuple[Any, ...], Any, Any]] = []
    for ref, context, args, kwargs in cache.cache_keys():
        function = ref()
        if function is None:
            continue
        if generation in context:
            fresh_keys.append((function, context, args, kwargs))
        elif function is top:
            users[id(function), args] = (function, args, kwargs)
    # Not JAX's own context managers, which an interrupt can leave without putting anything back.
    with set_locally([(config.no_tracing, True)]):
        for function, _, args, kwargs in fresh_keys:
            with set_locally([(config.jax_xla_profile_version, usual)]):
                try:
                    old = cache(function, *args, **dict(kwargs))[0]
                except Exception:  # noqa: BLE001 - not in the user's cache: nothing old to be wrong about
                    continue
            with set_locally([(config.jax_xla_profile_version, generation)]):
                try:
                    fresh = cache(function, *args, **dict(kwargs))[0]
                except Exception:  # noqa: BLE001 - evicted meanwhile
                    continue
            if differs(fresh, old):
                stale[id(function)] = (function, args[1].func_name)
        for function, args, kwargs in users.values():
            try:
                old = cache(function, *args, **dict(kwargs))[0]
            except Exception:  # noqa: BLE001 - made under another configuration than today's
                continue
            same_types = [str(v.aval) for v in open_jaxpr(old).invars] == [
                str(v.aval) for v in open_jaxpr(closed).invars
            ]
            if same_types and differs(closed, old):
                stale[id(function)] = (function, args[1].func_name)
    return list(stale.values())
