"""Writing a checkpoint where there is none: on definitions, at calls, or around steps of loops."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from types import FunctionType, MethodType

from remat_magic.editing.applications import PARTIAL
from remat_magic.editing.edited_texts import EditedTexts, Imports
from remat_magic.editing.groups_of_lifted_steps import lifted_helper
from remat_magic.editing.groups_of_steps import GroupsOfSteps
from remat_magic.editing.jax_loops import JaxLoop, helper
from remat_magic.editing.lifted_loops import LiftedLoop
from remat_magic.editing.live_code import NewWrapper
from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.editing.python_loops import PythonLoop, loop_around, statement_of
from remat_magic.editing.text_changes import TextChanges
from remat_magic.editing.user_code import UserCode
from remat_magic.editing.ways import Way
from remat_magic.facts.facts import Facts
from remat_magic.parsing import parse_expression
from remat_magic.records import RematError

__all__ = ["NewCheckpoints", "PolicyText"]

PolicyText = Callable[[TextChanges, Imports, str, int], str]
"""The text of a policy in a text, on a line that is so far indented, and so long already."""


class NewCheckpoints:
    """Writes checkpoints into texts."""

    def __init__(self, facts: Facts, code: UserCode, texts: EditedTexts) -> None:
        self._facts, self._code, self._texts, self._way = facts, code, texts, Way()
        self._modules: dict[str, str] = {}  # the parameter of new lambdas, by file
        self._counters: dict[ast.FunctionDef, str] = {}  # what counts calls in a function

    def write(self, way: Way, policy: PolicyText) -> None:
        """Write a checkpoint in a way.

        Raises:
            RematError: the text has no room for it.
        """
        self._way = way
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

    def _checkpoint_function(self, policy: PolicyText) -> None:
        definition = self._code.definition(self._facts.engine.differentiated_inside, self._way.which)
        if definition is None:
            raise RematError(
                "the traced function is not defined in source text of yours: define a function that calls it, and "
                "trace that."
            )
        static = [] if self._way.library == "equinox" else self._static_arguments()
        self._checkpoint(*definition, policy, f", static_argnums={tuple(static)}" if static else "")

    def _checkpoint(self, text: ParsedText, node: Function, policy: PolicyText, options: str) -> None:
        """Put a new checkpoint on a definition, or around a lambda."""
        changes, imports = self._texts.of(text)
        checkpoint = imports.checkpoint(self._way.library)
        if isinstance(node, ast.Lambda):
            options = f", policy={policy(changes, imports, text.indent(node.lineno), 40)}{options})"
            changes.wrap(node, f"{checkpoint}(", options)
        else:
            start = f"@{imports.partial()}({checkpoint}"
            options = f", policy={policy(changes, imports, text.indent(node.lineno), len(start) + 9)}{options})"
            changes.decorate(node, f"{start}{options}", above=self._way.library == "flax.linen")
        maker = parse_expression(f"{PARTIAL}({checkpoint}{options}")
        self._texts.wrappers.append(NewWrapper(text, maker, text.functions.index(node)))

    def _checkpoint_call(self, text: ParsedText, call: ast.Call, policy: PolicyText) -> None:
        """Put a new checkpoint around what is called."""
        changes, imports = self._texts.of(text)
        start = f"{imports.checkpoint(self._way.library)}("
        end = f", policy={policy(changes, imports, text.indent(call.lineno), 40)}{self._way.options})"
        if self._way.as_argument:
            module = self._modules.setdefault(text.file, "") or self._texts.new_name("module")
            self._modules[text.file] = module
            self._texts.added[1].add(module)
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

    def _count_steps(self, text: ParsedText, call: ast.Call) -> str:
        """Give the times that a call is made numbers; the condition for those that are chosen."""
        changes, imports = self._texts.of(text)
        counter = self._way.counter
        if isinstance(counter, str):
            return self._way.condition.format(counter)
        if counter is not None:
            if counter not in self._counters:
                name = self._counters[counter] = self._texts.new_name("numbers")
                calls = {id(node) for _, node in (*self._way.calls, *self._way.through)}
                inside = (any(id(node) in calls for node in ast.walk(statement)) for statement in counter.body)
                first = [*inside].index(True)
                changes.add_first(counter.body, first, f"{name} = {imports.of_module(itertools.count)}()")
                for other, node in self._way.through:
                    if isinstance(node, ast.Call):
                        self._texts.of(other)[0].set_keyword(node, name, name)
                    else:
                        self._texts.of(other)[0].add_parameter(node, f"{name}=None")
            name = self._counters[counter]
            is_given = f"{name} and " if self._way.through else ""
            return is_given + self._way.condition.format(f"next({name})")
        loop = loop_around(text, call)
        assert isinstance(loop, ast.For | ast.comprehension)
        number = self._texts.new_name("number")
        is_tuple = isinstance(loop.target, ast.Tuple)
        changes.wrap(loop.target, f"{number}, {'(' * is_tuple}", ")" * is_tuple)
        changes.wrap(loop.iter, "enumerate(", ")")
        return self._way.condition.format(number)

    def _decorator(self, changes: TextChanges, imports: Imports, policy: PolicyText, indent: str) -> str:
        start = f"@{imports.partial()}({imports.checkpoint(self._way.library)}, policy="
        return f"{start}{policy(changes, imports, indent, len(start))})"

    def _group_jax_loop(self, loop: JaxLoop, policy: PolicyText) -> None:
        """Call a function that does what a loop of JAX's does, in groups of steps."""
        text = loop.text
        changes, imports = self._texts.of(text)
        name = self._texts.new_name(f"{loop.kind}_in_groups")
        decorator = self._decorator(changes, imports, policy, "" if loop.has_inputs else "    ")
        lines = helper(loop, self._way.size, name, imports.jax(), decorator)
        changes.lines_before(statement_of(text, loop.call), [*lines, ""])
        changes.replace(loop.call.func, name)
        self._texts.added[0].add(name)

    def _group_lifted_loop(self, loop: LiftedLoop, policy: PolicyText) -> None:
        """Call a function that does what a scan of flax's does, in groups of steps."""
        text = loop.text
        changes, imports = self._texts.of(text)
        checkpoint = imports.checkpoint(loop.library)
        written = policy(changes, imports, " " * 8, len(f"return {checkpoint}(steps, policy="))
        before = statement_of(text, loop.named)
        name, flax = self._texts.new_name("scan_in_groups"), checkpoint.rpartition(".")[0]
        written = f"{checkpoint}(steps, policy={written})"
        lines = lifted_helper(loop, self._way.size, name, flax, imports.jax(), written)
        changes.lines_before(before, [*lines, ""])
        changes.replace(loop.named, name)
        self._texts.added[0].add(name)

    def _group_python_loop(self, text: ParsedText, loop: PythonLoop, policy: PolicyText) -> None:
        """Put the steps of a loop of Python into groups."""
        changes, imports = self._texts.of(text)

        def checkpoint(indent: str) -> tuple[str, str]:
            return imports.checkpoint(self._way.library), policy(changes, imports, indent, len("policy="))

        GroupsOfSteps(
            text,
            changes,
            self._way.size,
            lambda indent: self._decorator(changes, imports, policy, indent),
            checkpoint,
            self._texts.new_name,
            imports,
            self._way.library == "flax.linen",
            self._texts.added,
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
