"""The user's texts with what an edit writes into them: names, and what to call things of JAX's."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic.editing.live_code import NewWrapper, unwritable
from remat_magic.editing.names import NameOption, suggested, used_names
from remat_magic.editing.parsed_text import ParsedText, mark_added
from remat_magic.editing.probes import body_start
from remat_magic.editing.text_changes import TextChanges
from remat_magic.editing.user_code import UserCode
from remat_magic.editing.ways import CHECKPOINTS
from remat_magic.facts.facts import Facts
from remat_magic.parsing import parse_python
from remat_magic.records import EditedName, FileEdit

__all__ = ["EditedTexts", "Imports"]


class Imports:
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
        """``functools.partial``."""
        return self.of_module(functools.partial)

    def of_module(self, thing: type) -> str:
        """A class of Python's own, by its module where the text has that."""
        module, name, namespace = thing.__module__, thing.__name__, self._namespace
        if namespace.get(module) is sys.modules[module] and namespace.get(name) is not thing:
            return f"{module}.{name}"
        return self._name(thing, name, f"from {module} import {name}")


class EditedTexts:
    """The texts, with what has been written into them so far.

    Attributes:
        wrappers: what has become of the checkpoints around functions.
        added: names of functions that were written, as for ``mark_added``.
    """

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._code = code
        self._edited: dict[str, tuple[TextChanges, Imports]] = {}
        self._used = set(facts.engine.names).union(*map(used_names, code.texts.values()))
        self._new_names: set[str] = set()
        self.added: tuple[set[str], set[str]] = set(), set()
        self.wrappers: list[NewWrapper] = []

    def of(self, text: ParsedText) -> tuple[TextChanges, Imports]:
        """The changes of a text, and its imports."""
        if text.file not in self._edited:
            self._edited[text.file] = TextChanges(text), Imports(text, self._code.namespaces[text.file])
        return self._edited[text.file]

    def files(self) -> tuple[FileEdit, ...]:
        """What the user is to have."""
        for changes, imports in self._edited.values():
            changes.add_imports(imports.lines)
            imports.lines = []
        return tuple(changes.file_edit() for changes, _ in self._edited.values() if changes)

    def trees(self) -> dict[str, ast.Module]:
        """What Python makes of it; after ``files``.

        Raises:
            RematError: it is no Python.
        """
        try:
            trees = {file: parse_python(changes.compiled()) for file, (changes, _) in self._edited.items() if changes}
        except SyntaxError as error:
            raise unwritable(error) from error
        for tree in trees.values():
            mark_added(tree, *self.added)
        return trees

    def name(self, option: NameOption) -> EditedName:
        """Write the name that an option stands for, unless it is there already."""
        nameable = option.nameable
        if nameable is None:
            return EditedName(option.name, values=len(option.values), existing=True)
        text, node = nameable.text, nameable.node
        name = suggested(nameable, self._used)
        changes, imports = self.of(text)
        called, literal = imports.checkpoint_name(), changes.literal(name)
        if isinstance(node, ast.expr):
            changes.wrap(node, f"{called}(", f", {literal})")
            return EditedName(name, text.segment(node), text.span(node), len(option.values))
        line = f"{nameable.variable} = {called}({nameable.variable}, {literal})"
        body = getattr(node, "body", None)
        if body is None:
            changes.add_after(node, line)
        else:
            changes.add_first(body, body_start(node), line)
        return EditedName(name, nameable.variable, text.span(node), len(option.values))

    def new_name(self, usual: str) -> str:
        """A name that nothing in the texts has, nor what was written into one before."""
        names = {*self._new_names}
        for text in self._code.texts.values():
            nodes = [*ast.walk(text.tree)]
            names |= {node.id for node in nodes if isinstance(node, ast.Name)}
            names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            names |= {getattr(function, "name", "") for function in text.functions}
            names |= {*self._code.namespaces[text.file]}
        while usual in names:
            usual += "_"
        self._new_names.add(usual)
        return usual
