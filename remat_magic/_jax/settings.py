"""The settings of JAX that a trace depends on, and how a thread takes them to another."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import jax

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
