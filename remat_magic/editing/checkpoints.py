"""Writing policies into the user's texts: at the checkpoints that they apply, or with new ones; and names for them."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import jax
from jax import ad_checkpoint

from remat_magic import libraries
from remat_magic.editing.names import NameOption, body_start, suggested
from remat_magic.editing.source import Function, ParsedText, TextChanges, first_line, literal, names_call
from remat_magic.editing.user_code import PARTIAL, Application, NewWrapper, UserCode
from remat_magic.engine.calls import called_from
from remat_magic.engine.engine import Engine
from remat_magic.engine.sites import Identity
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.walk import walk
from remat_magic.parsing import parse_expression, parse_python
from remat_magic.policies import Key
from remat_magic.records import EditedName, FileEdit, Plan, RematError, Site


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

        ``usual`` is what it is usually called, ``line`` the import that binds it to that name.
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
        usual, line, function = libraries.CHECKPOINTS[library]
        return f"{self._name(sys.modules[library], usual, line)}.{function}"

    def partial(self) -> str:
        """``functools.partial``, by its module where the text has that."""
        partial, namespace = functools.partial, self._namespace
        if namespace.get("functools") is functools and namespace.get("partial") is not partial:
            return "functools.partial"
        return self._name(partial, "partial", "from functools import partial")


_PolicyText = Callable[[ParsedText, int], str]
"""The text of a policy in a text, on a line of it."""


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
        self._policies: dict[Application, tuple[str, tuple[str, ...]]] = {}  # by where they were written

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

    def write_policy(
        self,
        plan: Plan,
        names: tuple[str, ...],
        sites: tuple[Site, ...],
        places: Mapping[str, Sequence[Application]],
        insertion: Insertion,
    ) -> None:
        """Write a plan's policy.

        Args:
            plan: the plan.
            names: what it saves by name, where it is no policy of JAX.
            sites: the checkpoint sites that it is for; none: a new checkpoint is written.
            places: where the source applies the checkpoint of each site, by its key.
            insertion: how a new checkpoint is written.
        """
        takes_off = plan.policy == "none" and not plan.names
        factory = "" if plan.names or takes_off else _code_of(plan.policy)

        def policy(text: ParsedText, line: int) -> str:
            _, imports = self.of(text)
            start = f"{imports.jax()}.checkpoint_policies"
            if not names:
                return factory.replace(_POLICIES, f"{start}.") or f"{start}.nothing_saveable"
            return names_call(f"{start}.save_only_these_names", names, text.indent(line))

        for site in sites:
            if not places.get(site.key):
                raise RematError(
                    f"the jax.checkpoint of {site.function} cannot be found in source text of yours: a library applies "
                    "it, it is haiku's, or it is passed on under another name, so give it the policy by hand."
                )
        for place in {id(place): place for site in sites for place in places[site.key]}.values():
            if place in self._policies:
                if self._policies[place] != (plan.policy, names):
                    of = ", ".join(key for key, own in places.items() if place in own)
                    raise RematError(
                        f"line {place.text.start(place.node)[0]} of {place.text.place} applies the checkpoints of {of} "
                        "together: choose one policy for them."
                    )
                continue
            self._policies[place] = plan.policy, names
            if takes_off:
                self._take_off(place)
            else:
                self._set(place, policy)
        if sites or takes_off:
            return
        for text, call in insertion.calls:
            self._checkpoint_call(text, call, policy, insertion)
        for text, definition in insertion.definitions:
            self._checkpoint(text, definition, policy, insertion.library, insertion.options)

    def _set(self, place: Application, policy: _PolicyText) -> None:
        """Give a checkpoint another policy."""
        text = place.text
        changes, imports = self.of(text)
        partial = "" if isinstance(place.node, ast.Call) else imports.partial()
        written = policy(text, place.node.lineno)
        place.set_policy(changes, written, partial)
        self.wrappers.append(NewWrapper(text, place.maker(parse_expression(written)), place))

    def _take_off(self, place: Application) -> None:
        text, node = place.text, place.node
        changes, _ = self.of(text)
        (first, column), (last, end) = text.start(node), text.end(node)
        alone = text.lines[first - 1][:column].strip() == "@" and not text.lines[last - 1][end:].strip()
        if place.is_of_linen:
            raise RematError(
                f"without the checkpoint at line {first} of {text.place} flax would call parameters otherwise: take it "
                "off by hand."
            )
        if node in getattr(place.inner, "decorator_list", []) and alone:
            changes.delete_lines(first, last)
        elif place.whole is not None and isinstance(place.inner, ast.expr):
            inner = text.segment(place.inner)
            is_part = isinstance(text.parents.get(id(place.whole)), ast.Call | ast.Attribute)
            bare = isinstance(place.inner, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            changes.replace(place.whole, inner if bare or not is_part else f"({inner})")
        else:
            raise RematError(f"line {first} of {text.place} does more than apply one checkpoint: take it off by hand.")
        self.wrappers.append(NewWrapper(text, None, place))

    def _checkpoint(
        self, text: ParsedText, node: Function, policy: _PolicyText, library: str, further_options: str
    ) -> None:
        """Put a new checkpoint on a definition, or around a lambda."""
        changes, imports = self.of(text)
        checkpoint = imports.checkpoint(library)
        options = f"{_option(policy(text, node.lineno))}{further_options}"
        if isinstance(node, ast.Lambda):
            changes.wrap(node, f"{checkpoint}(", f"{options})")
        else:
            decorator = f"{imports.partial()}({checkpoint}{options})" if options else checkpoint
            changes.decorate(node, f"@{decorator}", above=library == "flax.linen")
        maker = parse_expression(f"{PARTIAL}({checkpoint}{options})")
        self.wrappers.append(NewWrapper(text, maker, text.functions.index(node)))

    def _checkpoint_call(self, text: ParsedText, call: ast.Call, policy: _PolicyText, insertion: Insertion) -> None:
        """Put a new checkpoint around what is called."""
        changes, imports = self.of(text)
        start = f"{imports.checkpoint(insertion.library)}("
        end = f"{_option(policy(text, call.lineno))}{insertion.options})"
        bound = [text.segment(keyword) for keyword in call.keywords] if insertion.bind else []
        if bound:
            changes.drop_keywords(call)
            changes.wrap(call.func, f"{start}{imports.partial()}(", f", {', '.join(bound)}){end}")
        else:
            changes.wrap(call.func, start, end)


_POLICIES = "jax.checkpoint_policies."
_OF_ARGUMENTS = ("equinox", "flax.nnx")  # those that a plain function can need, for the arguments that it takes


@dataclass(frozen=True, slots=True)
class Insertion:
    """One way to write a checkpoint where there is none.

    Attributes:
        library: whose, by its module; empty for JAX's own.
        definitions: the functions that get it, with their texts; none at calls.
        calls: else the calls that get it, with their texts.
        options: the text of further arguments.
        bind: whether what is passed by keyword at these calls is bound before, by ``functools.partial``.
    """

    library: str = ""
    definitions: tuple[tuple[ParsedText, Function], ...] = ()
    calls: tuple[tuple[ParsedText, ast.Call], ...] = ()
    options: str = ""
    bind: bool = False


def insertions_of_function(code: UserCode, engine: Engine) -> list[Insertion]:
    """Those for the whole function: JAX's own checkpoint first, then that of the library whose modules it uses."""
    definition = code.definition(engine.differentiated_inside)
    if definition is None:
        raise RematError(
            "the traced function is not defined in source text of yours: define a function that calls it, and trace "
            "that."
        )
    kinds = {libraries.module_kind(cls) for cls in {type(thing) for thing in code.things}}
    static = _numbers(_static_arguments(engine))
    return [
        Insertion(library, (definition,), options=static * (library != "equinox"))
        for library in ("", *_OF_ARGUMENTS)
        if not library or library in kinds
    ]


def _static_arguments(engine: Engine) -> list[int]:
    """The numbers of the positional arguments that hold no array."""
    leaves = engine.primal.signature.leaves
    arrays = {leaf.position for leaf in leaves if leaf.is_array}
    others = {leaf.position for leaf in leaves if not leaf.is_array and leaf.position is not None}
    # The object of a method is no argument of the call that was traced.
    function: Any = engine.given.fun
    bound = engine.differentiated_inside is None and (
        isinstance(function, MethodType) or not (isinstance(function, FunctionType) or hasattr(function, "__wrapped__"))
    )
    return sorted(position + bound for position in others - arrays)


def insertions_at(code: UserCode, engine: Engine, at: str) -> list[Insertion]:
    """Those for a function without a checkpoint, the most usual ones first; none where the source has no such place.

    None passes the module that is called to the checkpoint: of the layers of linen and those of nnx that change their
    state there is a snippet.
    """
    place = engine.place(at)
    if place is None or place.callee.library == "haiku":
        return []
    callee = place.callee
    # A checkpoint of linen's that is given the module is not written around a function that only calls modules.
    library = callee.library if callee.library in libraries.CHECKPOINTS and not callee.within else ""
    static, bound = [position for position, _ in callee.static if position is not None], bool(callee.module)
    insertions: list[Insertion] = []
    if (definitions := _definitions(code, callee.who)) and library == "equinox":
        insertions.append(Insertion(library, definitions))
    elif definitions:
        of_object = [[0, *some] for some in _beginnings(static)] * (callee.module == "class")
        insertions += [
            Insertion(library, definitions, options=_numbers(some)) for some in (*of_object, *_beginnings(static))
        ]
    calls = tuple(_calls(code, engine, callee.who))
    if calls and library != "flax.linen":
        own = "" if library == "flax.nnx" else library  # whose checkpoint takes no objects, and JAX's holds them
        given = [] if library == "equinox" else [position - bound for position in static]
        for bind in (False, True)[: 1 + any(call.keywords for _, call in calls)]:
            insertions += [Insertion(own, calls=calls, options=_numbers(it), bind=bind) for it in _beginnings(given)]
    return insertions


def _beginnings(positions: list[int]) -> list[list[int]]:
    """All of them first: parameters that have their defaults are no arguments, and stand at the end."""
    return [positions[:count] for count in range(len(positions), -1, -1)]


def _numbers(positions: Sequence[int]) -> str:
    return f", static_argnums={tuple(positions)}" if positions else ""


def _definitions(code: UserCode, who: Identity) -> tuple[tuple[ParsedText, Function], ...]:
    """Where the source defines a function; several lambdas can begin on one line."""
    name, file, line = who
    text = code.texts.get(file)
    short = name.rpartition(".")[2]
    return tuple(
        (text, node)
        for node in (() if text is None else text.functions)
        if text is not None and (node.lineno if isinstance(node, ast.Lambda) else first_line(node)) == line
        if short == ("<lambda>" if isinstance(node, ast.Lambda) else node.name)
    )


def _calls(code: UserCode, engine: Engine, who: Identity) -> Iterator[tuple[ParsedText, ast.Call]]:
    """Where the source calls a function, as JAX's tracebacks say."""
    called = {
        place for _, eqn in walk(engine.primal.provenances.closed) if (place := called_from(eqn, who)) is not None
    }
    positions = {(frame.co_filename, *[*frame.co_positions()][instruction // 2]) for frame, instruction in called}
    for text in code.texts.values():
        for node in ast.walk(text.tree):
            if isinstance(node, ast.Call) and (
                (text.file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) in positions
            ):
                yield text, node


def _option(policy: str) -> str:
    """How a new checkpoint is given a policy; one that saves nothing is ``jax.checkpoint``'s own."""
    return "" if policy.endswith(".checkpoint_policies.nothing_saveable") else f", policy={policy}"


def _code_of(policy: str) -> str:
    """The expression for a policy of JAX's that a report was given of, so that its names are those of the program."""
    try:
        key = Key.parse(policy)
    except RematError:  # what a policy of the user's is called need be no expression: <lambda>
        key = Key.own(policy)
    if any(alternative.own for alternative in key.alternatives):
        raise RematError(f"{policy} is a policy of your own: give it to jax.checkpoint by hand.")
    return key.code
