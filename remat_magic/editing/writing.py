"""Writing names and a policy into the user's texts."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic.editing.names import NameOption, suggested, used_names
from remat_magic.editing.parsed_text import ParsedText, first_line
from remat_magic.editing.probes import body_start
from remat_magic.editing.text_changes import TextChanges
from remat_magic.editing.user_code import EditedCall, UserCode, referent
from remat_magic.facts.facts import Facts
from remat_magic.parsing import parse_python
from remat_magic.policies import resolve
from remat_magic.records import EditedName, FileEdit, Plan, RematError, Site

__all__ = ["EditedTexts"]

_POLICIES = "jax.checkpoint_policies."


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

    def partial(self) -> str:
        """``functools.partial``."""
        namespace = self._namespace
        if namespace.get("functools") is functools and namespace.get("partial") is not functools.partial:
            return "functools.partial"
        return self._name(functools.partial, "partial", "from functools import partial")


class EditedTexts:
    """The texts with names and a policy written into them.

    ``calls`` are the calls of ``jax.checkpoint`` that were changed.
    """

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._code, self._facts = code, facts
        self._edited: dict[str, tuple[TextChanges, _Imports]] = {}
        self._used = set(facts.engine.names).union(*map(used_names, code.texts.values()))
        self.calls: list[EditedCall] = []

    def _of(self, text: ParsedText) -> tuple[TextChanges, _Imports]:
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

    # ----------------------------------------------------------------------------------------------------------- names

    def name(self, option: NameOption) -> EditedName:
        """Write the name that an option stands for, unless it is there already."""
        nameable = option.nameable
        if nameable is None:
            return EditedName(option.name, values=len(option.values), existing=True)
        text, node = nameable.text, nameable.node
        name = suggested(nameable, self._used)
        changes, imports = self._of(text)
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

    # ---------------------------------------------------------------------------------------------------------- policy

    def policy(self, plan: Plan, names: tuple[str, ...], sites: tuple[Site, ...]) -> None:
        """Write a plan's policy.

        Args:
            plan: the plan.
            names: what it saves by name, where it is no policy of JAX.
            sites: the checkpoint sites that it is for; none: a new checkpoint around the whole function.

        Raises:
            RematError: the place is not in the user's text, or the policy is the user's own.
        """
        factory = "" if plan.names or plan.policy == "none" else resolve(plan.policy).code
        if factory and not factory.startswith(_POLICIES):
            raise RematError(f"{plan.policy} is a policy of your own: give it to jax.checkpoint by hand.")
        takes_off = plan.policy == "none" and not plan.names

        def policy(changes: TextChanges, imports: _Imports, node: Any, used: int) -> str:
            """The policy's text, on the line of a node which is so long already."""
            start = f"{imports.jax()}.checkpoint_policies"
            if not names:
                return f"{start}.{factory.removeprefix(_POLICIES) or 'nothing_saveable'}"
            return changes.names_call(f"{start}.save_only_these_names", names, changes.text.indent(node.lineno), used)

        for site in sites:
            if takes_off:
                self._take_off(site)
            else:
                self._set(site, policy)
        if not sites and not takes_off:
            self._checkpoint_function(policy)

    def _checkpoint_function(self, policy: Any) -> None:
        definition = self._code.definition(self._facts.engine.differentiated_inside)
        if definition is None:
            raise RematError(
                "the traced function is not defined in source text of yours: define a function that calls it, and "
                "trace that."
            )
        text, node = definition
        changes, imports = self._of(text)
        static = self._static_arguments()
        numbers = f", static_argnums=({', '.join(map(str, static))},)" if static else ""
        checkpoint = f"{imports.jax()}.checkpoint"
        if isinstance(node, ast.Lambda):
            changes.wrap(node, f"{checkpoint}(", f", policy={policy(changes, imports, node, 40)}{numbers})")
            return
        start = f"@{imports.partial()}({checkpoint}, policy="
        changes.decorate(node, f"{start}{policy(changes, imports, node, len(start))}{numbers})")

    def _static_arguments(self) -> list[int]:
        """The numbers of the positional arguments that hold no array.

        Raises:
            RematError: one holds arrays and what ``jax.checkpoint`` cannot take.
        """
        engine = self._facts.engine
        arrays = {leaf.position for leaf in engine.leaves if leaf.is_array}
        others = [(leaf.position, leaf) for leaf in engine.leaves if not leaf.is_array and leaf.position is not None]
        for position, leaf in others:
            if position in arrays and not isinstance(leaf.value, (int, float, complex)):
                raise RematError(
                    f"jax.checkpoint takes arrays, and the argument {leaf.argument} of {engine.function_name} holds "
                    f"{leaf.name}, of type {type(leaf.value).__name__}: pass the arrays apart from the rest, as "
                    "equinox.partition parts them."
                )
        # The object of a method is no argument of the call that was traced.
        function = engine.traced
        bound = engine.differentiated_inside is None and (
            isinstance(function, MethodType)
            or not (isinstance(function, FunctionType) or hasattr(function, "__wrapped__"))
        )
        return sorted({position + bound for position, _ in others if position not in arrays})

    def _set(self, site: Site, policy: Any) -> None:
        """Give the checkpoint of a site another policy."""
        for text, decorator in (decorators := list(self._decorators(site))):
            changes, imports = self._of(text)
            if isinstance(decorator, ast.Call):
                changes.set_keyword(decorator, "policy", policy(changes, imports, decorator, 20))
            else:
                partial = imports.partial()
                changes.wrap(decorator, f"{partial}(", f", policy={policy(changes, imports, decorator, 30)})")
        for text, call in () if decorators else self._called(site):
            changes, imports = self._of(text)
            used = text.end(call)[1] - len(text.indent(call.lineno))
            written = policy(changes, imports, call, used)
            changes.set_keyword(call, "policy", written)
            self.calls.append(EditedCall(text, call, site, written))

    def _take_off(self, site: Site) -> None:
        for text, decorator in (decorators := list(self._decorators(site))):
            (first, column), (last, end) = text.start(decorator), text.end(decorator)
            if text.lines[first - 1][:column].strip() != "@" or text.lines[last - 1][end:].strip():
                raise RematError(
                    f"line {first} of {text.place} holds more than the decorator: take jax.checkpoint off by hand."
                )
            self._of(text)[0].delete_lines(first, last)
        for text, call in () if decorators else self._called(site):
            self._of(text)[0].replace(call, text.segment(call.args[0]))
            self.calls.append(EditedCall(text, call, site, None))

    # ----------------------------------------------------------------------------------------- checkpoints in the texts

    def _decorators(self, site: Site) -> Iterator[tuple[ParsedText, ast.expr]]:
        """The decorators that make a site: ``@jax.checkpoint`` itself, or the call of ``partial`` with it."""
        where = site.source
        text = self._code.texts.get(where.file) if where is not None else None
        if where is None or text is None:
            return
        namespace = self._code.namespaces[text.file]
        for node in text.functions:
            if isinstance(node, ast.Lambda) or node.name != site.function or first_line(node) != where.line:
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(callee, [first, *_]) if referent(callee, namespace) is functools.partial:
                        checkpoint = first
                    case _:
                        checkpoint = decorator
                if _is_checkpoint(checkpoint, namespace):
                    yield text, decorator

    def _called(self, site: Site) -> list[tuple[ParsedText, ast.Call]]:
        """The calls of ``jax.checkpoint`` on the function that is the site.

        Raises:
            RematError: there is none.
        """
        calls = [
            (text, call)
            for text in self._code.texts.values()
            for call in ast.walk(text.tree)
            if isinstance(call, ast.Call) and call.args and _is_checkpoint(call.func, self._code.namespaces[text.file])
        ]
        on_site = [(text, call) for text, call in calls if _is_on(call.args[0], site, text)]
        on_site = on_site or [(text, call) for text, call in calls if _is_called_at(text, call, site)]
        if not on_site and len(calls) == 1 and not isinstance(calls[0][1].args[0], ast.Lambda):
            on_site = calls
        if not on_site:
            raise RematError(
                f"the jax.checkpoint of {site.function} cannot be found in source text of yours: it is applied by a "
                "library or under another name, so give it the policy by hand."
            )
        return on_site


def _is_checkpoint(expression: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression is ``jax.checkpoint`` itself, by whatever name."""
    thing = referent(expression, namespace)
    return thing is jax.checkpoint or thing is jax.remat


def _is_on(argument: ast.expr, site: Site, text: ParsedText) -> bool:
    """Whether what ``jax.checkpoint`` is called with is the function that is the site."""
    where = site.source
    match argument:
        case ast.Name(name) | ast.Attribute(_, name) if name == site.function:
            return True
        case ast.Lambda():
            return where is not None and text.file == where.file and argument.lineno == where.line
        case ast.Name(name):  # a lambda that was given a name
            return site.function == "<lambda>" and any(
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Lambda)
                and where is not None
                and node.value.lineno == where.line
                and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
                for node in ast.walk(text.enclosing(argument) or text.tree)
            )
        case _:
            return False


def _is_called_at(text: ParsedText, call: ast.Call, site: Site) -> bool:
    """Whether what a call of ``jax.checkpoint`` makes is called where the site is."""
    where, above = site.source, text.parents.get(id(call))
    return (
        where is not None
        and text.file == where.file
        and isinstance(above, ast.Call)
        and above.func is call
        and above.lineno <= where.line <= (above.end_lineno or where.line)
    )
