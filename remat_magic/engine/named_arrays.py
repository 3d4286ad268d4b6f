"""A pytree that passes an argument's arrays to a trace under the names that the user knows them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class PathText:
    """A key of a pytree's path, already written as ``jax.tree_util.keystr`` would write the whole."""

    text: str

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
class NamedArrays:
    """The arrays of one argument under their paths in it, so that JAX's messages call them as the user would."""

    def __init__(self, paths: tuple[str, ...], values: Sequence[Any]) -> None:
        self.paths, self.values = paths, values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[PathText, Any]], tuple[str, ...]]:
        """As JAX asks: the arrays under their paths, and what is static."""
        return [(PathText(path), value) for path, value in zip(self.paths, self.values, strict=True)], self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> NamedArrays:
        """As JAX asks: the same paths with other values."""
        return cls(paths, values)
