"""The user's texts with what an edit writes into them: names, and what to call things of JAX's."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic.editing.names import NameOption, body_start, suggested
from remat_magic.editing.retracing import NewWrapper
from remat_magic.editing.source import ParsedText, TextChanges, literal
from remat_magic.editing.user_code import UserCode
from remat_magic.facts.facts import Facts
from remat_magic.parsing import parse_python
from remat_magic.records import EditedName, FileEdit

# By the module of a library: what it is usually called, the import of it, and what it has for jax.checkpoint.
CHECKPOINTS = {
    "equinox": ("eqx", "import equinox as eqx", "filter_checkpoint"),
    "flax.nnx": ("nnx", "from flax import nnx", "remat"),
    "flax.linen": ("nn", "import flax.linen as nn", "remat"),
}


class _Imports:
    """What to call things of JAX's in one text, with the imports that this takes."""

    def __init__(self, text: ParsedText, namespace: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._namespace, self._chosen = namespace, dict[str, str]()
        self._local = {  # the names that functions bind
            node.arg if isinstance(node, ast.arg) else node.id
            for function in text.functions
            for node in ast.walk(function)
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        }

    def _name(self, thing: Any, usual: str, line: str) -> str:
        """The name of something, an import of it added where it has none.

        Args:
            thing: the object.
            usual: what it is usually called.
            line: the import that binds it to that name.
        """
        if usual not in self._chosen:
            bound = {name for name, value in self._namespace.items() if value is thing} - self._local
            names = [name for name in self._namespace if name in bound and not name.startswith("_")]
            name = usual if usual in bound else next(iter(names), "")
            if not name:
                name = usual
                while name in self._local or name in self._namespace:
                    name = f"{name}_"
                self.lines.append(line if name == usual else f"{line} as {name}")
            self._chosen[usual] = name
        return self._chosen[usual]

    def jax(self) -> str:
        """The module jax."""
        return self._name(jax, "jax", "import jax")

    def checkpoint_name(self) -> str:
        """``jax.ad_checkpoint.checkpoint_name``."""
        line = "from jax.ad_checkpoint import checkpoint_name"
        return self._name(ad_checkpoint.checkpoint_name, "checkpoint_name", line)

    def checkpoint(self, library: str) -> str:
        """What a library has for ``jax.checkpoint``; JAX's own where that is empty."""
        if not library:
            return f"{self.jax()}.checkpoint"
        usual, line, function = CHECKPOINTS[library]
        return f"{self._name(sys.modules[library], usual, line)}.{function}"

    def partial(self) -> str:
        """``functools.partial``, by its module where the text has that."""
        partial, namespace = functools.partial, self._namespace
        if namespace.get("functools") is functools and namespace.get("partial") is not partial:
            return "functools.partial"
        return self._name(partial, "partial", "from functools import partial")


class EditedTexts:
    """The texts, with what has been written into them so far.

    Attributes:
        wrappers: what has become of the checkpoints around functions.
    """

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._code = code
        self._edited: dict[str, tuple[TextChanges, _Imports]] = {}
        self._used = {*facts.engine.names}
        self.wrappers: list[NewWrapper] = []

    def of(self, text: ParsedText) -> tuple[TextChanges, _Imports]:
        """The changes of a text, and its imports."""
        if text.file not in self._edited:
            self._edited[text.file] = TextChanges(text), _Imports(text, self._code.namespaces[text.file])
        return self._edited[text.file]

    def files(self) -> tuple[FileEdit, ...]:
        """What the user is to have."""
        for changes, imports in self._edited.values():
            changes.add_imports(imports.lines)
            imports.lines = []
        return tuple(changes.file_edit() for changes, _ in self._edited.values() if changes)

    def trees(self) -> dict[str, ast.Module]:
        """What Python makes of it; after ``files``."""
        return {file: parse_python(changes.compiled()) for file, (changes, _) in self._edited.items() if changes}

    def name(self, option: NameOption) -> EditedName:
        """Write the name that an option stands for, unless it is there already."""
        nameable = option.nameable
        if nameable is None:
            return EditedName(option.name, values=len(option.values), existing=True)
        text, node = nameable.text, nameable.node
        name = suggested(nameable, self._used)
        changes, imports = self.of(text)
        called, written = imports.checkpoint_name(), literal(name)
        if isinstance(node, ast.expr):
            changes.wrap(node, f"{called}(", f", {written})")
            return EditedName(name, text.segment(node), text.span(node), len(option.values))
        line = f"{nameable.variable} = {called}({nameable.variable}, {written})"
        body = getattr(node, "body", None)
        if body is None:
            changes.add_after(node, line)
        else:
            changes.add_first(body, body_start(node), line)
        return EditedName(name, nameable.variable, text.span(node), len(option.values))
