"""Writing a program anew, jaxpr by jaxpr: what policies, checkpoints, names and texts put into it goes this one way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from remat_magic import _jax


class Renamed(dict[Any, Any]):
    """The variables or literals that are read in the place of variables."""

    def atom(self, atom: Any) -> Any:
        """What is read in the place of a variable or literal: itself if it is not renamed."""
        return atom if _jax.is_literal(atom) else self.get(atom, atom)

    def reads(self, eqn: Any) -> bool:
        """Whether an equation reads one of the variables."""
        return bool(self) and any(not _jax.is_literal(atom) and atom in self for atom in eqn.invars)

    def reading(self, eqn: Any) -> Any:
        """An equation that reads what it is to read, itself where nothing of it is renamed."""
        return eqn.replace(invars=[*map(self.atom, eqn.invars)]) if self.reads(eqn) else eqn


class Rewriter:
    """Writes jaxprs anew, each once: bodies that several calls share stay shared.

    JAX's own caches are keyed by the jaxpr, and twelve copies of one block would be traced twelve times. Several closed
    jaxprs may hold one open jaxpr (jax 0.10: branches that are closed anew at each call), which stays one as well.
    """

    def __init__(self) -> None:
        self._done: dict[Hashable, tuple[Any, Any]] = {}  # keeps the old one, so that its identity stays its own

    def __call__(self, jaxpr: Any, write: Callable[[Any, Renamed], Iterable[Any]], *key: Hashable) -> Any:
        """A jaxpr, open or closed, with other equations; itself where nothing changes.

        Args:
            jaxpr: the jaxpr.
            write: gives the equations of an open jaxpr anew, and puts down what is renamed by them.
            key: tells apart the ways in which one jaxpr is written.
        """
        old = _jax.open_jaxpr(jaxpr)
        if (id(jaxpr), *key) not in self._done:
            opened = self._done.get((id(old), *key))
            new = self._written(old, write) if opened is None else opened[1]
            self._done[id(old), *key] = old, new
            self._done[id(jaxpr), *key] = jaxpr, jaxpr if new is old else _jax.with_body(jaxpr, new)
        return self._done[id(jaxpr), *key][1]

    @staticmethod
    def _written(old: Any, write: Callable[[Any, Renamed], Iterable[Any]]) -> Any:
        renamed = Renamed()
        eqns = [*write(old, renamed)]
        if not renamed and len(eqns) == len(old.eqns) and all(a is b for a, b in zip(eqns, old.eqns, strict=True)):
            return old
        return _jax.replace_eqns(old, eqns, [*map(renamed.atom, old.outvars)])

    def clear(self) -> None:
        """Let go of all that was written."""
        self._done.clear()


def without_checks(jaxpr: Any) -> Any:
    """A program that calls no Python for equinox's ``error_if``: its checks find nothing. Itself where it has none."""
    rewriter = Rewriter()

    def write(old: Any, _: Renamed) -> Iterable[Any]:
        return [_jax.map_jaxprs(_jax.unchecked(eqn), lambda inner: rewriter(inner, write)) for eqn in old.eqns]

    return rewriter(jaxpr, write)
