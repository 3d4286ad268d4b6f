"""Texts of Python's loops with one checkpoint around each few of their steps."""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat_magic.editing.carried import carried_by
from remat_magic.editing.edited_texts import Imports
from remat_magic.editing.parsed_text import ParsedText
from remat_magic.editing.python_loops import (
    Comprehension,
    PythonLoop,
    guards_of,
    has_end,
    jumps_of,
    own_parameter,
    statement_of,
    stored,
)
from remat_magic.editing.text_changes import TextChanges
from remat_magic.records import RematError

__all__ = ["GroupsOfSteps"]


@dataclass(frozen=True, slots=True)
class GroupsOfSteps:
    """Puts the steps of a loop into groups, each a function that is defined and called.

    Attributes:
        text: the text.
        changes: that it gets.
        size: how many steps a group has.
        decorator: the checkpoint, as a decorator on a line that is so far indented.
        checkpoint: what that is called, and its policy on a line that is so far indented.
        new_name: a name that nothing in the text has, like another one.
        imports: what to call other things.
        of_linen: whether the loop is in a module of linen: then a group is given the module, and has from it what a
            ``for`` loop goes through.
        added: as for ``mark_added``, what is told of the functions.
    """

    text: ParsedText
    changes: TextChanges
    size: int
    decorator: Callable[[str], str]
    checkpoint: Callable[[str], tuple[str, str]]
    new_name: Callable[[str], str]
    imports: Imports
    of_linen: bool
    added: tuple[set[str], set[str]]

    def write(self, loop: PythonLoop) -> None:
        """Group the steps of a loop.

        Raises:
            RematError: its steps do what no function can do for them.
        """
        if self.of_linen and not isinstance(loop, ast.For) and not _counts_numbers(loop):
            raise RematError(
                f"the loop at line {loop.lineno} of {self.text.place} can go through modules of flax which the "
                "checkpoint around its steps must make: make it a for loop, and ask again."
            )
        if isinstance(loop, ast.For | ast.While):
            self._statement(loop)
        elif isinstance(loop, ast.Call):
            self._call(loop)
        else:
            self._comprehension(loop)

    def _own(self, loop: ast.For | ast.While) -> list[str]:
        """What a group is given before what its steps take: the module."""
        return [own_parameter(self.text, loop)] if self.of_linen else []

    def _statement(self, loop: ast.For | ast.While) -> None:
        text, changes, size = self.text, self.changes, self.size
        guards = guards_of(loop) if isinstance(loop, ast.For) and not self.of_linen else []
        carried = carried_by(text, loop, guards)
        step = "\t" if text.indent(loop.lineno).startswith("\t") else "    "
        given, left = ", ".join([*self._own(loop), *carried.taken]), ", ".join(carried.left)
        breaks = [] if guards else [node for node in jumps_of(loop) if isinstance(node, ast.Break)]
        ended = [self.new_name("ended")] if breaks else []
        for node in breaks:
            fields = (value for _, value in ast.iter_fields(text.parents[id(node)]))
            block = next(value for value in fields if isinstance(value, list) and node in value)
            changes.add_first(block, block.index(node), f"{ended[0]} = True")
        lines = [*(f"{name} = None" for name in carried.unbound), *(f"{name} = False" for name in ended)]
        inside = [f"{2 * step}{line}" for line in _outer(text, loop, [*carried.counts, *ended])]
        if isinstance(loop, ast.For):
            lines += self._few_at_a_time(loop, guards, step, bool(breaks))
        else:
            number, test = self.new_name("_"), text.segment(loop.test)
            lines.append(f"while {f'({test})' if chr(10) in test else test}:")
            if isinstance(loop.test, ast.Constant):
                changes.indent(loop, 2 * step)
                changes.replace_word(loop, "while", "for")
                changes.replace(loop.test, f"{number} in range({size})")
            else:
                changes.indent(loop, 3 * step)
                inside.append(f"{2 * step}for {number} in range({size}):")
                changes.replace_word(loop, "while", "if")
        group, decorator = self.new_name("group"), self.decorator(text.indent(loop.lineno) + step)
        changes.lines_before(loop, [*lines, "", f"{step}{decorator}", f"{step}def {group}({given}):", *inside])
        after = [f"{step}if {name}:\n{text.indent(loop.lineno)}{2 * step}break" for name in ended]
        changes.lines_after(loop, [f"{2 * step}return {left}", "", f"{step}{left} = {group}({given})", *after])
        self.added[1].add(group)

    def _few_at_a_time(self, loop: ast.For, guards: Sequence[ast.stmt], step: str, may_end: bool) -> list[str]:
        """Let a loop go through a few of its steps, chosen before by its guards; the lines before it, with another."""
        text, changes, size = self.text, self.changes, self.size
        through, steps, indent = text.segment(loop.iter), self.new_name("steps"), text.indent(loop.lineno)
        if self.of_linen and may_end and not has_end(loop):
            raise RematError(
                f"the loop at line {loop.lineno} of {text.place} may only end by its `break`: let it go through a list "
                "or a range, and ask again."
            )
        removed = range(_with_comments(text, guards[0]), text.end(guards[-1])[0] + 1) if guards else range(0)
        changes.indent(loop, 2 * step, {*removed, *range(loop.iter.lineno + 1, text.end(loop.iter)[0] + 1)})
        if may_end and not self.of_linen:  # which may have no end: no more is taken than a group at a time
            few = self.new_name("few")
            changes.replace(loop.iter, few)
            return [
                f"{steps} = iter({through})",
                f"while {few} := list({self.imports.of_module(itertools.islice)}({steps}, {size})):",
            ]
        first, lines = self.new_name("first"), [f"{steps} = list({through})"]
        if removed:
            changes.delete_lines(removed[0], removed[-1])
            lines = [
                f"{steps} = []",
                f"for {text.segment(loop.target)} in {f'({through})' if chr(10) in through else through}:",
            ]
            lines += [text.lines[line - 1].removeprefix(indent) for line in removed]
            lines.append(
                f"{text.indent(guards[0].lineno).removeprefix(indent)}{steps}.append({ast.unparse(loop.target)})"
            )
        if self.of_linen:
            lines, steps = [], f"list({through})"
        changes.replace(loop.iter, f"{steps}[{first} : {first} + {size}]")
        return [*lines, f"for {first} in range(0, len({steps}), {size}):"]

    def _call(self, loop: ast.Call) -> None:
        """Call a function that does what ``functools.reduce``, ``map`` or ``jax.tree.map`` does."""
        called = self.text.segment(loop.func)
        like = "functools.reduce" if called.endswith("reduce") else "map" if called == "map" else "jax.tree.map"
        if (loop.keywords and called.endswith("reduce")) or any(isinstance(part, ast.Starred) for part in loop.args):
            raise RematError(
                f"the call of {like} at line {loop.lineno} of {self.text.place} has arguments that no edit passes on: "
                "write the checkpoint there by hand."
            )
        name, jax = self.new_name(f"{like.partition('.')[2].replace('.', '_') or like}_in_groups"), self.imports.jax()
        parameters, begin, given, value, then, end = (part.format(called=called, jax=jax) for part in _LIKE[like])
        lines = f'''\
def {name}(function, {parameters}):
    """Like {like}, with one checkpoint around each {self.size} steps."""
    {begin}
    while few := list({self.imports.of_module(itertools.islice)}(steps, {self.size})):

        {self.decorator(" " * 8)}
        def group({given}):
            return {value}

        {then}group({given})
    {end}'''
        self.changes.lines_before(statement_of(self.text, loop), [*lines.rstrip().splitlines(), ""])
        self.changes.replace(loop.func, name)
        self.added[0].add(name)

    def _comprehension(self, loop: Comprehension) -> None:
        """Take the values of each group from a comprehension that is a function, which is called."""
        text, where = self.text, f"the comprehension at line {loop.lineno} of {self.text.place}"
        if any(isinstance(node, ast.NamedExpr | ast.Await) for node in ast.walk(loop)):
            raise RematError(f"{where} assigns a variable, or awaits: make it a for loop, and ask again.")
        value, group, steps, first = (self.new_name(usual) for usual in ("value", "group", "steps", "first"))
        targets, going_through = _gone_through(text, loop)
        element = loop.value if isinstance(loop, ast.DictComp) else loop.elt
        lines = [f"for {steps} in [{going_through}]"]
        if isinstance(loop, ast.GeneratorExp):  # which may have no end: no more is taken than a group at a time
            few = f"lambda {steps}={steps}: list({self.imports.of_module(itertools.islice)}({steps}, {self.size}))"
            lines.append(f"for {group} in iter({few}, [])")
            self.added[1].add(steps)
            taken, yielded = group, value
        else:
            lines.append(f"for {first} in range(0, len({steps}), {self.size})")
            taken, yielded = f"{steps}[{first} : {first} + {self.size}]", value
        opening, closing = ("[", "]") if isinstance(loop, ast.ListComp) else ("(", ")")
        opening, closing = ("{", "}") if isinstance(loop, ast.DictComp | ast.SetComp) else (opening, closing)
        if isinstance(loop, ast.DictComp):  # whose keys may be no arrays
            lines.append(f"for {group} in [{taken}]")
            yielded, taken = f"{text.segment(loop.key)}: {value}", group
        indent = text.indent(loop.lineno) + "    "
        parts = [node for each in loop.generators for node in (each.iter, *each.ifs)]
        parts += [loop.key] if isinstance(loop, ast.DictComp) else []
        comments = self.changes.comments(loop, [element, *parts])
        checkpoint, policy = self.checkpoint(f"{indent}    ")
        call, end = f"{checkpoint}(", ")()"
        if isinstance(loop, ast.DictComp):
            lines.append(f"for {targets}, {value} in zip({group}, {call}")
            end += ")"
        else:
            lines.append(f"for {value} in {call}")
        lines.append(f"    lambda {group}={taken}: [")
        before = textwrap.indent("\n".join([*comments, yielded, *lines]), indent)
        after = f" for {targets} in {group}],\n{indent}    policy={policy},\n{indent}{end}\n"
        self.changes.replace_around(
            loop, element, f"{opening}\n{before}", f"{after}{text.indent(loop.lineno)}{closing}"
        )
        self.added[1].add(group)


_VALUES = "[function(*step) for step in few]"
# Parameters, how it begins, what a group is given and makes, what becomes of that, and how it ends.
_LIKE = {
    "functools.reduce": (
        "iterable, *initial",
        "value, *values = (*initial, *iterable)\n    steps = iter(values)",
        "value",
        "{called}(function, few, value)",
        "value = ",
        "return value",
    ),
    "map": ("*iterables", "steps = zip(*iterables)", "", _VALUES, "yield from ", ""),
    "jax.tree.map": (
        "tree, *rest, is_leaf=None",
        "leaves, structure = {jax}.tree.flatten(tree, is_leaf)\n"
        "    steps, values = zip(leaves, *map(structure.flatten_up_to, rest)), []",
        "",
        _VALUES,
        "values += ",
        "return {jax}.tree.unflatten(structure, values)",
    ),
}


def _with_comments(text: ParsedText, node: ast.stmt) -> int:
    """The line where a statement begins, or the comments above it."""
    line = node.lineno
    while text.lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


def _outer(text: ParsedText, loop: ast.For | ast.While, names: Sequence[str]) -> list[str]:
    """The statements that let a function in a loop assign variables of the one around it."""
    nodes = ast.walk(text.enclosing(loop) or text.tree)
    of_module = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    kinds = {"global": [*filter(of_module.__contains__, names)], "nonlocal": sorted({*names} - of_module)}
    return [f"{kind} {', '.join(of_kind)}" for kind, of_kind in kinds.items() if of_kind]


def _counts_numbers(loop: PythonLoop) -> bool:
    """Whether each step adds to a variable of the condition, or subtracts from it."""
    tested = (
        {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)} if isinstance(loop, ast.While) else {}
    )
    for statement in loop.body if isinstance(loop, ast.While) else []:
        match statement:
            case ast.AugAssign(ast.Name(name)) | ast.Assign([ast.Name(name)], ast.BinOp()) if name in tested:
                return True
            case _:
                pass
    return False


def _gone_through(text: ParsedText, loop: Comprehension) -> tuple[str, str]:
    """What a comprehension assigns in each step, and a list of what it assigns to that; of a generator, an iterator."""
    (generator, *others) = loop.generators
    lazy = isinstance(loop, ast.GeneratorExp)
    if not others and not generator.ifs:
        target = text.segment(generator.target)
        through = f"{'iter' if lazy else 'list'}({text.segment(generator.iter)})"
        return f"({target})" if isinstance(generator.target, ast.Tuple) else target, through
    names = sorted(stored(generator.target for generator in loop.generators))
    targets = names[0] if len(names) == 1 else f"({', '.join(names)})"
    parts = [f"for {text.segment(each.target)} in {_in_brackets(text, each.iter)}" for each in loop.generators]
    conditions = [[f"if {_in_brackets(text, test)}" for test in each.ifs] for each in loop.generators]
    clauses = [" ".join([part, *own]) for part, own in zip(parts, conditions, strict=True)]
    through = f"{targets} {' '.join(clauses)}"
    return targets, f"({through})" if lazy else f"[{through}]"


def _in_brackets(text: ParsedText, node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Compare)
    return text.segment(node) if simple else f"({text.segment(node)})"
