"""Writing names and a policy into the user's texts."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic.editing.applications import PARTIAL, Application
from remat_magic.editing.groups_of_steps import GroupsOfSteps
from remat_magic.editing.jax_loops import JaxLoop, helper
from remat_magic.editing.lifted_loops import LiftedLoop, lifted_helper
from remat_magic.editing.live_code import NewWrapper
from remat_magic.editing.names import NameOption, suggested, used_names
from remat_magic.editing.parsed_text import Function, ParsedText, mark_added
from remat_magic.editing.probes import body_start
from remat_magic.editing.python_loops import PythonLoop, loop_around, statement_of
from remat_magic.editing.text_changes import TextChanges
from remat_magic.editing.user_code import UserCode, referent
from remat_magic.editing.ways import CHECKPOINTS, Way
from remat_magic.facts.facts import Facts
from remat_magic.libraries import class_of_linen
from remat_magic.parsing import parse_expression, parse_python
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
    """The texts with names and a policy written into them.

    ``wrappers`` is what has become of the checkpoints around functions.
    """

    def __init__(self, facts: Facts, code: UserCode) -> None:
        self._code, self._facts, self._way = code, facts, Way()
        self._edited: dict[str, tuple[TextChanges, _Imports]] = {}
        self._used = set(facts.engine.names).union(*map(used_names, code.texts.values()))
        self._added: tuple[set[str], set[str]] = set(), set()  # names of functions, as for `mark_added`
        self._policies: dict[Application, tuple[str, tuple[str, ...]]] = {}  # what was written where
        self._new_names: set[str] = set()
        self._modules: dict[str, str] = {}  # the parameter of new lambdas, by file
        self._counters: dict[ast.FunctionDef, str] = {}  # what counts calls in a function
        self.wrappers: list[NewWrapper] = []

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
        trees = {file: parse_python(changes.compiled()) for file, (changes, _) in self._edited.items() if changes}
        for tree in trees.values():
            mark_added(tree, *self._added)
        return trees

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

    def policy(
        self,
        plan: Plan,
        names: tuple[str, ...],
        sites: tuple[Site, ...],
        places: Mapping[str, Sequence[Application]],
        way: Way,
    ) -> None:
        """Write a plan's policy.

        Args:
            plan: the plan.
            names: what it saves by name, where it is no policy of JAX.
            sites: the checkpoint sites that it is for; none: a new checkpoint around the whole function.
            places: where the source applies the checkpoint of each site, by its key.
            way: how a new checkpoint is written.

        Raises:
            RematError: the place is not in the user's text, or the policy is the user's own.
        """
        self._way = way
        factory = "" if plan.names or plan.policy == "none" else resolve(plan.policy).code
        if factory and not factory.startswith(_POLICIES):
            raise RematError(f"{plan.policy} is a policy of your own: give it to jax.checkpoint by hand.")
        takes_off = plan.policy == "none" and not plan.names

        def policy(changes: TextChanges, imports: _Imports, indent: str, used: int) -> str:
            """The policy's text, on a line that is so far indented, and so long already."""
            start = f"{imports.jax()}.checkpoint_policies"
            if not names:
                return f"{start}.{factory.removeprefix(_POLICIES) or 'nothing_saveable'}"
            return changes.names_call(f"{start}.save_only_these_names", names, indent, used)

        for site in sites:
            if not places.get(site.key):
                raise RematError(
                    f"the jax.checkpoint of {site.function} cannot be found in source text of yours: a library applies "
                    "it, or it is passed on under another name, so give it the policy by hand."
                )
        for place in {id(place): place for site in sites for place in places[site.key]}.values():
            before = self._policies.get(place)
            self._policies[place] = plan.policy, names
            if before is not None and before != (plan.policy, names):
                of = ", ".join(key for key, own in places.items() if place in own)
                raise RematError(
                    f"line {place.text.start(place.node)[0]} of {place.text.place} applies the checkpoints of {of} "
                    "together: choose one policy for them."
                )
            if before is not None:
                continue
            if takes_off:
                self._take_off(place)
            else:
                self._set(place, policy)
        if not sites and not takes_off:
            self._checkpoint_anew(policy)

    def _checkpoint_anew(self, policy: Any) -> None:
        """Put a checkpoint where there is none, in the chosen way."""
        way = self._way
        for loop in way.loops:
            if isinstance(loop, JaxLoop):
                self._group_jax_loop(loop, policy)
            elif isinstance(loop, LiftedLoop):
                self._group_lifted_loop(loop, policy)
            else:
                self._group_python_loop(*loop, policy)
        for text, call in way.calls:
            self._checkpoint_call(text, call, policy)
        for text, definition in way.definitions:
            self._checkpoint(text, definition, policy, way.options)
        if not (way.loops or way.calls or way.definitions):
            self._checkpoint_function(policy)

    def _checkpoint_function(self, policy: Any) -> None:
        definition = self._code.definition(self._facts.engine.differentiated_inside)
        if definition is None:
            raise RematError(
                "the traced function is not defined in source text of yours: define a function that calls it, and "
                "trace that."
            )
        static = [] if self._way.library == "equinox" else self._static_arguments()
        self._checkpoint(*definition, policy, f", static_argnums={tuple(static)}" if static else "")

    def _checkpoint(self, text: ParsedText, node: Function, policy: Any, options: str) -> None:
        """Put a new checkpoint on a definition, or around a lambda."""
        changes, imports = self._of(text)
        checkpoint = imports.checkpoint(self._way.library)
        if isinstance(node, ast.Lambda):
            options = f", policy={policy(changes, imports, text.indent(node.lineno), 40)}{options})"
            changes.wrap(node, f"{checkpoint}(", options)
        else:
            start = f"@{imports.partial()}({checkpoint}"
            options = f", policy={policy(changes, imports, text.indent(node.lineno), len(start) + 9)}{options})"
            changes.decorate(node, f"{start}{options}", above=self._way.library == "flax.linen")
        maker = parse_expression(f"{PARTIAL}({checkpoint}{options}")
        self.wrappers.append(NewWrapper(text, maker, text.functions.index(node)))

    def _checkpoint_call(self, text: ParsedText, call: ast.Call, policy: Any) -> None:
        """Put a new checkpoint around what is called."""
        changes, imports = self._of(text)
        start = f"{imports.checkpoint(self._way.library)}("
        end = f", policy={policy(changes, imports, text.indent(call.lineno), 40)}{self._way.options})"
        if self._way.as_argument:
            module = self._modules.setdefault(text.file, "") or self._new_name(text, "module")
            self._modules[text.file] = module
            self._added[1].add(module)
            bound = [text.segment(keyword) for keyword in call.keywords] if self._way.bind else []
            if bound:
                changes.drop_keywords(call)
            rest = "*args, **kwargs" if call.keywords and not bound else "*args"
            function = f"lambda {module}, {rest}: {module}({', '.join([rest, *bound])})"
            written = f"{start}{function}{end}"
            if self._way.condition:
                written = f"({written} if {self._count_steps(text, call)} else {function})"
            changes.pass_callee(call, written)
            return
        if self._way.bind and call.keywords:
            start += f"{imports.partial()}("
            end = "".join(f", {text.segment(keyword)}" for keyword in call.keywords) + f"){end}"
            changes.drop_keywords(call)
        if self._way.condition:
            start, end = f"({start}", f"{end} if {self._count_steps(text, call)} else {text.segment(call.func)})"
        changes.wrap(call.func, start, end)

    # ------------------------------------------------------------------------------------------------ in steps of loops

    def _new_name(self, text: ParsedText, usual: str) -> str:
        """A name that nothing in a text has, nor what was written into one before."""
        names = {node.id for node in ast.walk(text.tree) if isinstance(node, ast.Name)}
        names |= {*self._code.namespaces[text.file], *self._new_names}
        names |= {node.arg for node in ast.walk(text.tree) if isinstance(node, ast.arg)}
        names |= {getattr(function, "name", "") for function in text.functions}
        while usual in names:
            usual += "_"
        self._new_names.add(usual)
        return usual

    def _count_steps(self, text: ParsedText, call: ast.Call) -> str:
        """Give the times that a call is made numbers; the condition for those that are chosen."""
        changes, imports = self._of(text)
        counter = self._way.counter
        if isinstance(counter, str):
            return self._way.condition.format(counter)
        if counter is not None:
            if counter not in self._counters:
                name = self._counters[counter] = self._new_name(text, "numbers")
                inside = (any(call in ast.walk(statement) for _, call in self._way.calls) for statement in counter.body)
                first = [*inside].index(True)
                changes.add_first(counter.body, first, f"{name} = {imports.of_module(itertools.count)}()")
            return self._way.condition.format(f"next({self._counters[counter]})")
        loop = loop_around(text, call)
        assert isinstance(loop, ast.For | ast.comprehension)
        number = self._new_name(text, "number")
        is_tuple = isinstance(loop.target, ast.Tuple)
        changes.wrap(loop.target, f"{number}, {'(' * is_tuple}", ")" * is_tuple)
        changes.wrap(loop.iter, "enumerate(", ")")
        return self._way.condition.format(number)

    def _decorator(self, changes: TextChanges, imports: _Imports, policy: Any, indent: str) -> str:
        start = f"@{imports.partial()}({imports.checkpoint(self._way.library)}, policy="
        return f"{start}{policy(changes, imports, indent, len(start))})"

    def _group_jax_loop(self, loop: JaxLoop, policy: Any) -> None:
        """Call a function that does what a loop of JAX's does, in groups of steps."""
        text = loop.text
        changes, imports = self._of(text)
        name = self._new_name(text, f"{loop.kind}_in_groups")
        decorator = self._decorator(changes, imports, policy, "" if loop.has_inputs else "    ")
        lines = helper(loop, self._way.size, name, imports.jax(), decorator)
        changes.lines_before(statement_of(text, loop.call), [*lines, ""])
        changes.replace(loop.call.func, name)
        self._added[0].add(name)

    def _group_lifted_loop(self, loop: LiftedLoop, policy: Any) -> None:
        """Call a function that does what a scan of flax's does, in groups of steps."""
        text = loop.text
        changes, imports = self._of(text)
        checkpoint = imports.checkpoint(loop.library)
        written = policy(changes, imports, " " * 8, len(f"return {checkpoint}(steps, policy="))
        before = statement_of(text, loop.named)
        name, flax = self._new_name(text, "scan_in_groups"), checkpoint.rpartition(".")[0]
        written = f"{checkpoint}(steps, policy={written})"
        lines = lifted_helper(loop, self._way.size, name, flax, imports.jax(), written)
        changes.lines_before(before, [*lines, ""])
        changes.replace(loop.named, name)
        self._added[0].add(name)

    def _group_python_loop(self, text: ParsedText, loop: PythonLoop, policy: Any) -> None:
        """Put the steps of a loop of Python into groups."""
        changes, imports = self._of(text)

        def checkpoint(indent: str) -> tuple[str, str]:
            return imports.checkpoint(self._way.library), policy(changes, imports, indent, len("policy="))

        GroupsOfSteps(
            text,
            changes,
            self._way.size,
            lambda indent: self._decorator(changes, imports, policy, indent),
            checkpoint,
            lambda usual: self._new_name(text, usual),
            self._way.library == "flax.linen",
            self._added,
        ).write(loop)

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

    def _set(self, place: Application, policy: Any) -> None:
        """Give a checkpoint another policy."""
        node, indent = place.node, place.text.indent(place.node.lineno)
        changes, imports = self._of(place.text)
        if isinstance(node, ast.Call):
            used = 20 if place.is_decorator else place.text.end(node)[1] - len(indent)
            written = policy(changes, imports, indent, used)
            changes.set_keyword(node, "policy", written)
        else:
            partial = imports.partial()
            written = policy(changes, imports, indent, 30)
            changes.wrap(node, f"{partial}(", f", policy={written})")
        self.wrappers.append(NewWrapper(place.text, place.maker(parse_expression(written)), place))

    def _take_off(self, place: Application) -> None:
        text, node = place.text, place.node
        changes, _ = self._of(text)
        if place.is_decorator:
            (first, column), (last, end) = text.start(node), text.end(node)
            if text.lines[first - 1][:column].strip() != "@" or text.lines[last - 1][end:].strip():
                raise RematError(
                    f"line {first} of {text.place} holds more than the decorator: take jax.checkpoint off by hand."
                )
            changes.delete_lines(first, last)
            if isinstance(place.inner, ast.ClassDef):
                name = place.inner.name
                changes.add_after(place.inner, f"{name} = {_class_of_same_name(name, name)}")
        elif place.whole is not None and isinstance(place.inner, ast.expr):
            inner = text.segment(place.inner)
            is_part = isinstance(text.parents.get(id(place.whole)), ast.Call | ast.Attribute)
            bare = isinstance(place.inner, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            if place.made_class(self._code) or (self._way.names_kept and place.is_of_linen):
                cls = referent(place.inner, self._code.scope(text.file))
                changes.replace(place.whole, _class_of_same_name(inner, getattr(cls, "__name__", "")))
            else:
                changes.replace(place.whole, inner if bare or not is_part else f"({inner})")
        else:
            name = self._new_name(text, "function")
            self._added[1].add(name)
            changes.replace(node, f"(lambda {name}: {name})")
        self.wrappers.append(NewWrapper(text, None, place))


def _class_of_same_name(inner: str, name: str) -> str:
    """A class like another one, but called as that which flax's checkpoint makes of it: so are its parameters."""
    new = f'"{class_of_linen(name)}"' if name else f'f"{class_of_linen("")}{{{inner}.__name__}}"'
    return f"type({new}, ({inner},), {{}})"
