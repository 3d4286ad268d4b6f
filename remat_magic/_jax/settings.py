"""The settings of JAX that a trace depends on, and how a thread takes them to another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config, mesh

from remat_magic.errors import RematError

JAX_VERSION: tuple[int, ...] = jax.__version_info__
_Config: Any = config.config_ext.Config


def remat3() -> bool:
    """Whether ``jax_remat3`` is on.

    Raises:
        RematError: it is on in a JAX that only has half of it (before 0.12): names are lost there.
    """
    on = bool(config.remat3.value) if hasattr(config, "remat3") else False
    if on and JAX_VERSION < (0, 12):
        raise RematError(
            f"jax_remat3 is unfinished in jax {jax.__version__}: turn it off "
            "(jax.config.update('jax_remat3', False)) or install jax 0.12 or newer."
        )
    return on


def x64() -> bool:
    """Whether 64-bit types are on in this thread."""
    return bool(config.enable_x64.value)


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Take down the settings of JAX that this thread has made in ``with`` blocks, meshes included.

    They are the thread's own, and contextvars do not carry them.

    Returns:
        A context manager's maker, which puts them in force in whichever thread enters it.
    """
    # Most are entries of `config_states`; meshes, default devices and the like are plain Config objects, which 0.10
    # has in `config` and 0.12 in the modules that use them.
    known: dict[int, Any] = {id(state): state for state in config.config_states.values()}
    for name, module in list(sys.modules.items()):
        if name.startswith("jax._src"):
            known.update((id(item), item) for item in list(vars(module).values()) if isinstance(item, _Config))
    made = [(item, value) for item in known.values() if (value := item.get_local()) is not config.config_ext.unset]
    meshes = list(mesh.thread_resources.stack[1:])  # those of the old `with mesh:`

    @contextlib.contextmanager
    def in_force() -> Iterator[None]:
        resources = mesh.thread_resources
        old = (resources.stack, resources.env)
        try:
            with set_locally(made):
                resources.stack = [*resources.stack, *meshes]
                resources.env = resources.stack[-1]
                yield
        finally:
            resources.stack, resources.env = old

    return in_force


@contextlib.contextmanager
def set_locally(wanted: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Give settings of JAX other values in this thread; an interrupt between any two leaves all as they were.

    Args:
        wanted: pairs of a setting and its value.
    """
    before = [(item, item.get_local()) for item, _ in wanted]
    try:
        for item, value in wanted:
            item.set_local(value)
        yield
    finally:
        for item, value in before:
            item.set_local(value)


def default_device() -> Any:
    """The device that a program runs on whose arguments name none."""
    chosen = config.default_device.value
    if isinstance(chosen, str):  # the name of a platform
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen
