"""The settings of JAX that a trace depends on, how a thread takes them to another, and an inspection's own caches."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import jax

from remat_magic._jax.jaxprs import open_jaxpr, pretty
from remat_magic._jax.private import JAX_VERSION, courtesy, do_without

_CARRIED = "settings made in `with` blocks, meshes too, are not in force while a click is answered"
_settings: Any = jax.config  # its attributes are made at run time


def x64() -> bool:
    """Whether 64-bit types are on in this thread."""
    return bool(_settings.jax_enable_x64)


def partitionable_threefry() -> bool:
    """Whether random bits are made so that each device can make its own."""
    return bool(getattr(_settings, "jax_threefry_partitionable", True))


def default_device() -> Any:
    """The device that a program runs on whose arguments name none."""
    chosen = _settings.jax_default_device
    if isinstance(chosen, str):  # the name of a platform
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def has_begun() -> bool:
    """Whether JAX has looked for devices yet, of whose memory it takes its part then; True where that is not known."""
    begun = courtesy("jax._src.xla_bridge.backends_are_initialized", "JAX looks for devices when a widget is shown")
    return bool(begun()) if begun is not None else True


FOLLOWS_POLICIES = JAX_VERSION >= (0, 12)
"""Whether what XLA for CPUs allocates follows a policy outside of scans: before it undoes checkpoints there."""


def runs_on_cpu() -> bool:
    """Whether JAX runs on the CPU, as far as that is known without looking for other devices."""
    if has_begun():
        return jax.default_backend() == "cpu"
    return _settings.jax_platforms == "cpu" or not any(map(find_spec, ("jax_plugins", "libtpu")))


LARGEST_SHARE_OF_GPU = 0.95
"""The share of a GPU's memory that JAX can be told to let a process have: CUDA keeps some of it."""

_USUAL_SHARE = 0.75


def share_of_gpu() -> float:
    """The share of a GPU's memory that JAX lets a process have, by the environment variables that it reads.

    docs.jax.dev, *GPU memory allocation*. Tried on an H200 with JAX 0.11: what needs 78% of its memory runs out of it,
    with preallocation and without, and runs with ``XLA_CLIENT_MEM_FRACTION=.95``, as 90% does.
    """
    if _gives_all():
        return 1.0
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or ""
    try:
        return float(given)
    except ValueError:  # none, or one with which JAX does not start either
        return _USUAL_SHARE


def memory_limit(device: Any) -> int | None:
    """How many bytes of a device's memory JAX's allocator gives out; None where it does not say, as on a CPU."""
    return None if _gives_all() else _allocator(device, "bytes_limit")


def most_allocated(device: Any) -> int | None:
    """The most bytes that JAX's allocator has had in use on a device in this process; None where it does not say."""
    return _allocator(device, "peak_bytes_in_use")


def _allocator(device: Any, figure: str) -> int | None:
    try:
        return (device.memory_stats() or {}).get(figure)
    except Exception:  # noqa: BLE001 - some platforms have no such figures, and say so by an error of their own
        return None


def _gives_all() -> bool:
    """Whether a GPU's memory is asked for from CUDA, which has no limit: "cuda_async" names one, and goes beyond it."""
    return os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").casefold() in ("platform", "cuda_async")


def setting(name: str, effect: str) -> Any:
    """A setting of JAX that one thread can give another value; None in a JAX where it is not, with that effect."""
    return _of_a_thread(f"jax._src.config.{name}", effect)


def _of_a_thread(path: str, effect: str) -> Any:
    state = courtesy(path, effect)
    return state if hasattr(state, "get_local") and hasattr(state, "set_local") else None


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Take down the settings of JAX that this thread has made in ``with`` blocks, meshes included.

    They are the thread's own, and contextvars do not carry them. What is returned makes a context manager that puts
    them in force in whichever thread enters it. A courtesy: what a JAX keeps elsewhere stays behind.
    """
    try:
        config = courtesy("jax._src.config.config_ext", _CARRIED)
        objects = _setting_objects(tuple(name for name in list(sys.modules) if name.startswith("jax._src")))
        local = [(item, value) for item in objects if (value := item.get_local()) is not config.unset]
    except Exception as error:  # noqa: BLE001 - a newer JAX keeps them otherwise
        do_without(f"the settings of a thread as they were ({type(error).__name__}: {error})", _CARRIED)
        local = []
    resources = courtesy("jax._src.mesh.thread_resources", _CARRIED)
    meshes = list(getattr(resources, "stack", ())[1:])  # those of the old `with mesh:`

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        with set_locally(local), _under(resources, meshes):
            yield

    return in_force


@functools.lru_cache(maxsize=1)  # to look through the modules takes a third of the time of a small trace
def _setting_objects(modules: tuple[str, ...]) -> list[Any]:
    """All settings of JAX, as far as the modules of these names have them."""
    config = courtesy("jax._src.config.config_ext", _CARRIED)
    states = courtesy("jax._src.config.config_states", _CARRIED)
    if config is None or states is None:
        return []
    # Most are entries of `config_states`; meshes, default devices and the like are plain Config objects, which 0.10
    # has in `config` and 0.12 in the modules that use them.
    candidates: dict[int, Any] = {id(state): state for state in states.values()}
    for name in modules:
        for item in list(vars(sys.modules[name]).values()):
            if isinstance(item, config.Config):
                candidates[id(item)] = item
    # The trace that a thread is in is no setting, and is over when the settings are put in force again.
    return [item for item in candidates.values() if not getattr(item, "name", "").startswith("trace_state")]


@contextlib.contextmanager
def _under(resources: Any, meshes: Sequence[Any]) -> Iterator[None]:
    """Have the meshes of another thread's ``with`` blocks in force in this one."""
    if not meshes:
        yield
        return
    before = (resources.stack, resources.env)
    try:
        resources.stack = [*resources.stack, *meshes]
        resources.env = resources.stack[-1]
        yield
    finally:
        resources.stack, resources.env = before


_LEFT = "what is traced after an interrupt may be told to be of another line, or cannot be traced"
_source_position = courtesy("jax._src.source_info_util._source_info_context", _LEFT)
_traces_under_way = [
    state
    for name in ("trace_state", "trace_state_strong_ref", "axis_env_state")
    if (state := _of_a_thread(f"jax._src.core.{name}", _LEFT)) is not None
]


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Leave what this thread is tracing, and for which line, as it was.

    JAX notes both at the beginning of a block and takes them back at its end; an interrupt between them leaves them so.
    """
    position = getattr(_source_position, "context", None)
    under_way = [(state, state.get_local()) for state in _traces_under_way]
    try:
        yield
    finally:
        for state, value in under_way:
            state.set_local(value)
        if position is not None:
            _source_position.context = position


@contextlib.contextmanager
def set_locally(wanted: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Give settings of JAX values in this thread, as pairs; an interrupt between any two leaves all as they were."""
    before = [(item, item.get_local()) for item, _ in wanted]
    try:
        for item, value in wanted:
            item.set_local(value)
        yield
    finally:
        for item, value in before:
            item.set_local(value)


# --------------------------------------------------------------------------------------------- JAX's caches of traces


# An inspection has some of its own, so that nothing of it stays when it is dropped. A courtesy: where a JAX keeps its
# traces elsewhere, or another library has replaced a cache, they stay in JAX's caches, under a number of their own.

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
