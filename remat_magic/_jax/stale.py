"""Which functions JAX still holds an older trace of, from before they or what they call were redefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_magic._jax.caches import Generation, user_traces
from remat_magic._jax.jaxprs import open_jaxpr, pretty
from remat_magic._jax.private import do_without
from remat_magic._jax.settings import set_locally, setting

_EFFECT = "no note tells of functions that JAX still holds an older trace of"


def stale_traces(
    generation: Generation, top: Callable[..., Any], closed: Any, comparable: Callable[[Any], bool]
) -> list[tuple[Callable[..., Any], str]]:
    """The user's functions of which JAX still holds an older trace than the one made under ``generation``.

    No Python of the user runs: JAX's cache is asked with tracing forbidden, so that a miss raises. A courtesy: none is
    found in a JAX that keeps its traces otherwise.

    Args:
        generation: what the fresh trace was made under.
        top: the function that was traced, and
        closed: its fresh jaxpr, compared with older traces of ``top`` itself.
        comparable: tells the fresh jaxprs that JAX would make in just the same way.

    Returns:
        The stale functions with their names, each once.
    """
    no_tracing, number = setting("no_tracing", _EFFECT), setting("jax_xla_profile_version", _EFFECT)
    if user_traces is None or no_tracing is None or number is None:
        return []
    try:
        # Not JAX's own context managers, which an interrupt can leave without putting anything back.
        with set_locally([(no_tracing, True)]):
            return _stale(generation, number, top, closed, comparable)
    except Exception as error:  # noqa: BLE001 - whatever a newer JAX does otherwise costs the note, not the trace
        do_without(f"the cache of traces as it was ({type(error).__name__}: {error})", _EFFECT)
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
