"""Which functions JAX still holds an older trace of, from before they or what they call were redefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import config

from remat_magic._jax.caches import Generation, user_traces
from remat_magic._jax.jaxprs import open_jaxpr, pretty
from remat_magic._jax.settings import set_locally


def stale_traces(generation: Generation, top: Callable[..., Any], closed: Any) -> list[tuple[Callable[..., Any], str]]:
    """The user's functions of which JAX still holds an older trace than the one made under ``generation``.

    No Python of the user runs: JAX's cache is asked with tracing forbidden, so that a miss raises.

    Args:
        generation: what the fresh trace was made under.
        top: the function that was traced, and
        closed: its fresh jaxpr, compared with older traces of ``top`` itself.

    Returns:
        The stale functions with their names, each once.
    """
    stale: dict[int, tuple[Callable[..., Any], str]] = {}
    # Not JAX's own context managers, which an interrupt can leave without putting anything back.
    with set_locally([(config.no_tracing, True)]):
        for function, args, kwargs in _alive(generation.traces):
            try:
                old = user_traces(function, *args, **kwargs)[0]
            except Exception:  # noqa: BLE001 - not in the user's cache: nothing old to be wrong about
                continue
            with set_locally([(config.jax_xla_profile_version, generation.number)]):
                try:
                    fresh = generation.traces(function, *args, **kwargs)[0]
                except Exception:  # noqa: BLE001 - made under a setting that the function itself made
                    continue
            if _differ(fresh, old):
                stale[id(function)] = (function, args[1].func_name)
        for function, args, kwargs in [key for key in _alive(user_traces) if key[0] is top]:
            try:
                old = user_traces(function, *args, **kwargs)[0]
            except Exception:  # noqa: BLE001 - made under another configuration than today's
                continue
            if _input_types(old) == _input_types(closed) and _differ(closed, old):
                stale[id(function)] = (function, args[1].func_name)
    return list(stale.values())


def _alive(cache: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The keys of a cache whose function is still there: function, arguments and keyword arguments."""
    found = ((ref(), args, dict(kwargs)) for ref, _, args, kwargs in cache.cache_keys())
    return [key for key in found if key[0] is not None]


def _differ(fresh: Any, old: Any) -> bool:
    fresh, old = open_jaxpr(fresh), open_jaxpr(old)
    return len(fresh.eqns) != len(old.eqns) or pretty(fresh) != pretty(old)


def _input_types(jaxpr: Any) -> list[str]:
    return [str(var.aval) for var in open_jaxpr(jaxpr).invars]
