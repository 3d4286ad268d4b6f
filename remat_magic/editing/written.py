"""Writing names and a policy into the user's sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from remat_magic.editing.choice import Place, names_in, suggested
from remat_magic.editing.place import Imports, write_policy
from remat_magic.editing.probe import body_start
from remat_magic.editing.setting import EditedCall, Setting
from remat_magic.editing.text import Writer, code_with, file_edit
from remat_magic.facts.facts import Facts
from remat_magic.parsing import parse_python
from remat_magic.policies import resolve
from remat_magic.records import EditedName, FileEdit, Plan, RematError, Site

__all__ = ["Written"]


class Written:
    """The edited texts."""

    def __init__(self, facts: Facts, setting: Setting) -> None:
        self._setting = setting
        self._writers: dict[str, tuple[Writer, Imports]] = {}
        self._used = set(facts.engine.names).union(*map(names_in, setting.sources.values()))
        # The object of a method is no argument of the call that was traced.
        fun = facts.engine.traced
        bound = isinstance(fun, MethodType) or not (isinstance(fun, FunctionType) or hasattr(fun, "__wrapped__"))
        self._static = tuple(number + bound for number in _static(facts))
        self.calls: list[EditedCall] = []

    def _writer(self, file: str) -> tuple[Writer, Imports]:
        if file not in self._writers:
            source = self._setting.sources[file]
            self._writers[file] = Writer(source), Imports(source, self._setting.namespaces[file])
        return self._writers[file]

    def name(self, place: Place) -> EditedName:
        """Write the name of one place, unless it is there already."""
        candidate = place.candidate
        if candidate is None:
            return EditedName(place.name, values=len(place.values), existing=True)
        source, node = candidate.source, candidate.node
        name = suggested(candidate, self._used)
        write, imports = self._writer(source.file)
        called, literal = imports.checkpoint_name(), write.literal(name)
        shown: Any = node
        if candidate.kind in ("expression", "argument"):
            write.wrap(node, f"{called}(", f", {literal})")
        else:
            line = f"{candidate.name} = {called}({candidate.name}, {literal})"
            body: Any = getattr(node, "body", None)
            if body is None:
                write.add_after(shown, line)
            else:
                write.add_first(body, body_start(node), line)
        expression = source.segment(node) if candidate.kind in ("expression", "argument") else candidate.name
        return EditedName(name, expression, source.span(node), len(place.values))

    def policy(self, plan: Plan, names: tuple[str, ...], sites: tuple[Site, ...]) -> None:
        """Write the policy."""
        code = "" if plan.names else resolve(plan.policy).code
        prefix = "jax.checkpoint_policies."
        if not plan.names and plan.policy != "none" and not code.startswith(prefix):
            raise RematError(f"{plan.policy} is a policy of your own: give it to jax.checkpoint by hand.")

        def text(write: Writer, imports: Imports, indent: str, used: int) -> str:
            start = f"{imports.jax()}.checkpoint_policies"
            if not plan.names or not names:
                return f"{start}.{code.removeprefix(prefix) or 'nothing_saveable'}"
            return write.names_call(f"{start}.save_only_these_names", names, indent, used)

        self.calls += write_policy(
            self._setting, self._writer, sites, None if plan.policy == "none" else text, self._static
        )

    def _changed(self) -> Iterable[tuple[Writer, Imports]]:
        for writer, imports in self._writers.values():
            if writer.changes:
                yield writer, imports

    def files(self) -> tuple[FileEdit, ...]:
        """What the user is to have."""
        for writer, imports in self._changed():
            writer.add_imports(imports.lines)
            imports.lines = []
        return tuple(file_edit(writer.source, writer.changes) for writer, _ in self._changed())

    def trees(self) -> dict[str, ast.Module]:
        """What Python makes of it; after ``files``."""
        return {
            writer.source.file: parse_python(code_with(writer.source, writer.changes)) for writer, _ in self._changed()
        }


def _static(facts: Facts) -> tuple[int, ...]:
    """The numbers of the positional arguments that hold no array."""
    by_number: dict[int, list[bool]] = {}
    for leaf in facts.engine.leaves:
        if leaf.position is not None:
            by_number.setdefault(leaf.position, []).append(leaf.is_array)
    return tuple(number for number, arrays in sorted(by_number.items()) if not any(arrays))
