"""Copies of the user's namespaces, and text of the user's executed in them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from remat_magic.editing.setting import Setting
from remat_magic.editing.source import Source
from remat_magic.records import RematError

__all__ = ["Spaces"]


class Spaces:
    """A copy of each namespace that the sources stand in, and the ``trees`` that are executed there, by file name.

    Args:
        setting: the traced function with its sources.
        trees: the edited ones; a file that is not in it is as it was.
        given: names to put into every namespace.
    """

    def __init__(self, setting: Setting, trees: Mapping[str, ast.Module], given: Mapping[str, Any]) -> None:
        self._setting = setting
        self.trees = {file: trees.get(file, source.tree) for file, source in setting.sources.items()}
        self._copies: dict[int, dict[str, Any]] = {}
        for file in setting.sources:
            old = setting.namespaces[file]
            self._copies.setdefault(id(old), {**old, **given})

    def __len__(self) -> int:
        return len(self._copies)

    def of(self, file: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A file's namespace as it was, and its copy."""
        old = self._setting.namespaces[file]
        return old, self._copies[id(old)]

    def copy_of(self, namespace: Mapping[str, Any]) -> dict[str, Any] | None:
        """The copy of a namespace, None where there is none."""
        return self._copies.get(id(namespace))

    def run(
        self, source: Source, statement: ast.stmt, space: dict[str, Any], local: dict[str, Any] | None = None
    ) -> None:
        """Execute a definition.

        Raises:
            RematError: it raises.
        """
        flags = source.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        try:
            module = ast.Module([statement], [])
            exec(compile(module, source.file, "exec", flags=flags, dont_inherit=True), space, local)  # noqa: S102 - the user's own definitions, edited
        except Exception as error:
            name = getattr(statement, "name", "a definition")
            raise RematError(
                f"{name} of {source.place} cannot be defined apart from your session, to see what an edit does: "
                f"{type(error).__name__}: {error}."
            ) from error

    def evaluate(self, source: Source, expression: ast.expr, space: dict[str, Any]) -> Any:
        """The value of an argument of ``jax.checkpoint``, which may raise whatever it does."""
        code = compile(ast.Expression(expression), source.file, "eval", dont_inherit=True)
        return eval(code, space)  # noqa: S307 - an argument that the user, or the edit, wrote
