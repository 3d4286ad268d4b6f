"""Looking up what JAX does not promise to keep, and keeping account of what this JAX lacks.

``needed`` is for what no trace can do without: the first one that is missing is told when something is traced, in one
sentence. ``courtesy`` is for what a trace is only better with: where it is missing, its user does without.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from remat_magic.errors import RematError

JAX_VERSION: tuple[int, ...] = jax.__version_info__
TESTED = ((0, 10), (0, 11), (0, 12))  # the lines of JAX that the tests run on


@dataclass(frozen=True, slots=True)
class Lack:
    """A name that this JAX does not have, and what that means to the user; ``needed`` tells that nothing goes on."""

    name: str
    effect: str
    needed: bool


_lacks: dict[str, Lack] = {}


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def needed(path: str) -> Any:
    """A name by its dotted path; None where it is missing, which ``require`` then tells."""
    value = _find(path)
    if value is None:
        _lacks[path] = Lack(path, "nothing can be traced", True)
    return value


def courtesy(path: str, effect: str) -> Any:
    """A name by its dotted path; None where it is missing, with the ``effect`` that this has."""
    value = _find(path)
    if value is None:
        do_without(path, effect)
    return value


class Replaced:
    """A function of JAX's, by its ``path``, in the place of which another one stands while anybody takes that.

    ``own`` is JAX's own, None where it is missing; ``found`` what stood there last: another library may have put one of
    its own there. ``effect`` is as for ``courtesy``.
    """

    def __init__(self, path: str, effect: str, other: Callable[..., Any]) -> None:
        module, _, self._name = path.rpartition(".")
        self.own = self.found = courtesy(path, effect)
        self._module = None if self.own is None else importlib.import_module(module)
        self._other, self._lock, self._takers = other, threading.Lock(), set[object]()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Have the other one stand there; an interrupt between any two steps undoes it."""
        taker = object()
        try:
            with self._lock:
                self._takers.add(taker)
                if self.own is not None and (there := getattr(self._module, self._name)) is not self._other:
                    self.found = there
                    setattr(self._module, self._name, self._other)
            yield
        finally:
            with self._lock:
                self._takers.discard(taker)
                if not self._takers and getattr(self._module, self._name, None) is self._other:
                    setattr(self._module, self._name, self.found)


def do_without(what: str, effect: str) -> None:
    """Take down that something of this JAX is missing or other than it was."""
    _lacks.setdefault(what, Lack(what, effect, False))


def lacks() -> tuple[Lack, ...]:
    """What this JAX lacks, as far as it has been asked for: what is needed first."""
    return tuple(sorted(_lacks.values(), key=lambda lack: (not lack.needed, lack.name)))


def require() -> None:
    """Make sure that this JAX has all that is needed."""
    missing = [lack.name for lack in lacks() if lack.needed]
    if missing:
        raise cannot(f"it has no {', '.join(missing)}")


def is_tested() -> bool:
    """Whether the tests run on this line of JAX."""
    return JAX_VERSION[:2] in TESTED


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Read what JAX has made; a JAX that was not tested may write it in another way."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        if is_tested():
            raise
        raise cannot(f"it writes its jaxprs in another way ({type(error).__name__}: {error})") from error


def cannot(reason: str) -> RematError:
    """The error for a JAX that this version cannot work with."""
    lines = ", ".join(".".join(map(str, line)) for line in TESTED)
    return RematError(
        f"remat_magic does not work with jax {jax.__version__}: {reason}. It was tested on jax {lines}: install one of "
        "these (pip install 'jax~=0.12.0'), or a newer remat_magic."
    )
