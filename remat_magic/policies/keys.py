"""The table of checkpoint policies, and a policy's key: the small expression that says which, parsed into a value.

A new kind of policy is a row here, how its arguments are read and written in ``Alternative``, and the object that JAX
takes for it (and how that is recognised) in ``objects``.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from remat_magic.parsing import parse_expression
from remat_magic.records import Choice, RematError
from remat_magic.user_files import is_user_file

OWN = "A policy of your own."
AS_WRITTEN = object()  # keep the checkpoint's own policy
NO_CHECKPOINT = object()  # take the checkpoint away
MIXED = "mixed"  # what goes for a key where places have policies of their own

JAX = jax.checkpoint_policies
MODULE = "jax.checkpoint_policies"
# From the device's memory to the host's, as in JAX's own examples: what a key offloads goes there.
MEMORIES = {"offload_src": "device", "offload_dst": "pinned_host"}
_MEMORIES = ", ".join(f"{name}={memory!r}" for name, memory in MEMORIES.items())


def _row(key: str, meaning: str, *parameters: str, label: str = "", aliases: tuple[str, ...] = ()) -> Choice:
    return Choice(key, label or key, meaning, parameters=parameters, aliases=aliases)


TABLE = (
    _row("as_written", "The checkpoints and policies that the program itself has.", label="as written"),
    _row("none", "No checkpoint here: autodiff saves whatever its rules ask for."),
    _row("nothing_saveable", "Save no intermediate, recompute all (JAX's default when policy is None)."),
    _row("everything_saveable", "Save every intermediate that the derivatives read."),
    _row(
        "dots_saveable",
        "Save the outputs of matrix multiplications and convolutions, recompute the rest.",
        aliases=("checkpoint_dots",),
    ),
    _row(
        "dots_with_no_batch_dims_saveable",
        "Save the outputs of matrix multiplications without batch dimensions (weights times activations).",
        aliases=("checkpoint_dots_with_no_batch_dims",),
    ),
    _row(
        "offload_dot_with_no_batch_dims",
        "As dots_with_no_batch_dims_saveable, but move what is saved to another memory.",
    ),
    _row("save_only_these_names", "Save the values with these checkpoint names, recompute the rest.", "names"),
    _row("save_any_names_but_these", "Save every named value except these, recompute the rest.", "names"),
    _row(
        "save_anything_except_these_names",
        "Saves everything: in JAX today this factory ignores the names it is given.",
        "names",
    ),
    _row(
        "save_and_offload_only_these_names",
        "Save some named values, move others to another memory, recompute the rest.",
        "names_which_can_be_saved",
        "names_which_can_be_offloaded",
    ),
    _row(
        "save_from_both_policies",
        "Save what either of two policies saves.",
        "policy_1",
        "policy_2",
    ),
    _row(
        "names",
        "Save, offload or recompute each named value.",
        "save",
        "offload",
        label="by name",
    ),
)
ROWS: dict[str, Choice] = {row.key: row for row in TABLE}
CANONICAL: dict[str, str] = {alias: row.key for row in TABLE for alias in (row.key, *row.aliases)}
PLAIN = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def call(factory: str, names: Iterable[str]) -> str:
    """The key of a factory with names: ``save_only_these_names('h')``."""
    return f"{factory}({', '.join(map(repr, names))})"


def example(factory: str, names: Sequence[str]) -> str:
    """A call of a factory as a user could write it, with some of these names."""
    some = ", ".join(map(repr, names[:2])) or "'h'"
    if factory == "save_and_offload_only_these_names":
        return f"{factory}(names_which_can_be_saved=[], names_which_can_be_offloaded=[{some}])"
    if factory == "offload_dot_with_no_batch_dims":
        return f"{factory}({_MEMORIES})"
    if factory == "names":
        return f"names(save=[{some}], offload=[])"
    if factory == "save_from_both_policies":
        return f"{factory}(dots_saveable, save_only_these_names({some}))"
    return f"{factory}({some})"


PREFIXES = ("jax.checkpoint_policies.", "jax.ad_checkpoint.checkpoint_policies.", "checkpoint_policies.")
_SAVING = "save_only_these_names"
_OFFLOADING = "save_and_offload_only_these_names"
_OFFLOADING_DOTS = "offload_dot_with_no_batch_dims"
_EITHER = "save_from_both_policies"
_BY_NAME = {"names": ("save", "offload"), _OFFLOADING: ("names_which_can_be_saved", "names_which_can_be_offloaded")}
_OFFLOADS = (_OFFLOADING, _OFFLOADING_DOTS)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the policies that ``|`` stands between.

    ``policy`` is the key of a row of the table or, where ``own``, the text of a policy of the user's own: a dotted
    name or a call. ``names`` are what a row that takes names is given, those to save where it can also offload.
    ``identifiers`` are what an own policy is looked up by.
    """

    policy: str
    names: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    own: bool = False
    identifiers: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.policy if self.policy == _OFFLOADING_DOTS else self._call()  # as the row of the table is called

    @property
    def code(self) -> str:
        """The expression for ``policy=``, empty for what is no policy."""
        if self.own:
            return self.policy
        return "" if self.policy in ("as_written", "none") else f"{MODULE}.{self._call()}"

    def _call(self) -> str:
        if self.own:
            return self.policy
        if self.policy == _OFFLOADING_DOTS:
            return f"{self.policy}({_MEMORIES})"
        if not ROWS[self.policy].parameters:
            return self.policy
        if self.policy == _OFFLOADING:
            saved, offloaded = _BY_NAME[_OFFLOADING]
            return f"{self.policy}({saved}={list(self.names)!r}, {offloaded}={list(self.offloaded)!r}, {_MEMORIES})"
        return call(self.policy, self.names)


@dataclass(frozen=True, slots=True)
class Key:
    """A policy as text, parsed: one alternative or several, of which each may save a value.

    ``str`` gives the canonical text: JAX's aliases, ``None`` and ``names(...)`` stand there under the name of what they
    do. Names are as written, so globs and regular expressions are still to be matched.
    """

    alternatives: tuple[Alternative, ...]

    @staticmethod
    def parse(text: str, names: Sequence[str] = (), namespace: Mapping[str, Any] | None = None) -> Key:
        """The key that a text is. Identifiers that are no row of the table are taken for policies of the user's own.

        Errors have the checkpoint ``names`` of the function as examples, and the nearest identifier of the namespace.
        """
        try:
            tree = parse_expression(text.strip())
        except (SyntaxError, ValueError):  # the latter for a null character, before Python 3.12
            raise no_such_policy(text, namespace) from None
        return Key(tuple(_Reader(names, namespace).read(tree)))

    @staticmethod
    def own(text: str) -> Key:
        """The key of a policy of the user's own, which need be no expression: ``<lambda>``."""
        return Key((Alternative(text, own=True),))

    @staticmethod
    def by_name(save: Iterable[str], offload: Iterable[str] = ()) -> Key:
        """The key that saves some names, offloads others and recomputes the rest."""
        save, offload = tuple(dict.fromkeys(save)), tuple(dict.fromkeys(offload))
        if offload:
            return Key((Alternative(_OFFLOADING, save, offload),))
        return Key((Alternative(_SAVING, save) if save else Alternative("nothing_saveable"),))

    def __str__(self) -> str:
        return " | ".join(map(str, self.alternatives))

    @property
    def code(self) -> str:
        """The expression for ``policy=``, empty for what is no policy."""
        first, *others = (alternative.code for alternative in self.alternatives)
        for other in others:
            first = f"{MODULE}.{_EITHER}({first}, {other})"
        return first

    @property
    def names(self) -> tuple[str, ...]:
        """Every checkpoint name that it asks for, globs and ``re:`` as written, each once; memories are none."""
        return tuple(
            dict.fromkeys(
                name for alternative in self.alternatives for name in (*alternative.names, *alternative.offloaded)
            )
        )

    @property
    def identifiers(self) -> frozenset[str]:
        """The identifiers that are looked up in the user's namespace."""
        return frozenset[str]().union(*(alternative.identifiers for alternative in self.alternatives))

    def renamed(self, wrong: str, right: str) -> Key:
        """The key that asks for another name in the place of one."""

        def changed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(right if name == wrong else name for name in names))

        return Key(
            tuple(
                replace(alternative, names=changed(alternative.names), offloaded=changed(alternative.offloaded))
                for alternative in self.alternatives
            )
        )


def _is(alternative: Alternative, *policies: str) -> bool:
    return not alternative.own and alternative.policy in policies


def check_combinable(keys: Sequence[Key]) -> None:
    """Raise RematError where JAX cannot combine policies: one of several keys is no policy, or offloads."""
    for alternative in (alternative for key in keys for alternative in key.alternatives if len(keys) > 1):
        if _is(alternative, "as_written", "none"):
            raise RematError(f"{alternative} is not a policy to combine: use two of {', '.join(PLAIN)} or names.")
        if _is(alternative, *_OFFLOADS):
            raise RematError(
                f"{_EITHER} cannot hold {alternative.policy}: JAX combines only policies that answer yes or no, so "
                "write a policy function that returns Offloadable itself."
            )


def no_such_policy(text: str, namespace: Mapping[str, Any] | None) -> RematError:
    """The error for what is no policy, with the nearest that there is."""
    own = [name for name, value in (namespace or {}).items() if _is_users(value)]
    name, defined = text.split("(", 1)[0].strip(), [*CANONICAL, *own]
    begun = [key for key in defined if name and key.startswith(name)]
    close = begun or difflib.get_close_matches(name, defined, 1, 0.7)
    mend = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(row.key for row in TABLE)}."
    return RematError(f"{text!r} is not a policy: {mend}")


def _is_users(value: Any) -> bool:
    return is_user_file(getattr(getattr(value, "__code__", None), "co_filename", ""))


class _Reader:
    """Reads the expression of a key."""

    def __init__(self, names: Sequence[str], namespace: Mapping[str, Any] | None) -> None:
        self._names, self._namespace = names, namespace

    def read(self, tree: ast.expr) -> list[Alternative]:
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
            return self._either(tree.left, tree.right)
        if isinstance(tree, ast.Constant) and tree.value is None:
            return [Alternative("nothing_saveable")]
        called = tree.func if isinstance(tree, ast.Call) else tree
        name = _dotted(called)
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        policy = CANONICAL.get(name.removeprefix(prefix))
        if policy is None:
            if not name:
                raise no_such_policy(ast.unparse(called), self._namespace)
            identifiers = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
            return [Alternative(ast.unparse(tree), own=True, identifiers=identifiers)]
        if isinstance(tree, ast.Call):
            return self._called(policy, tree)
        if ROWS[policy].parameters:
            raise RematError(f"{policy} is a factory: call it, as in {example(policy, self._names)}.")
        return [Alternative(policy)]

    def _either(self, left: ast.expr, right: ast.expr) -> list[Alternative]:
        sides = [self.read(left), self.read(right)]
        check_combinable([Key(tuple(side)) for side in sides])
        return [alternative for side in sides for alternative in side]

    def _called(self, policy: str, tree: ast.Call) -> list[Alternative]:
        if not ROWS[policy].parameters and policy != _OFFLOADING_DOTS:
            raise RematError(f"{policy} takes no arguments: write {policy}.")
        if policy == _EITHER:
            if len(tree.args) != 2 or tree.keywords:
                raise RematError(f"{policy} takes two policies, as in {example(policy, self._names)}.")
            return self._either(*tree.args)
        try:
            arguments = [ast.literal_eval(argument) for argument in tree.args]
            keywords = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in tree.keywords}
        except (ValueError, TypeError):
            raise self._not_quoted(policy) from None
        if policy == _OFFLOADING_DOTS or policy in _BY_NAME:
            by_name = _BY_NAME.get(policy, ())
            values = _bound(policy, (*by_name, *MEMORIES, *(["recompute"] if by_name else [])), arguments, keywords)
            if any(values.get(name, memory) != memory for name, memory in MEMORIES.items()):
                raise RematError(f"a key offloads with {_MEMORIES}: give the policy object for other memories.")
            if policy == _OFFLOADING_DOTS:
                return [Alternative(policy)]
            return [*Key.by_name(*(_names(values.get(name, ())) for name in by_name)).alternatives]
        if keywords:
            raise RematError(f"{policy} takes names only, as in {example(policy, self._names)}.")
        return [Alternative(policy, tuple(dict.fromkeys(name for argument in arguments for name in _names(argument))))]

    def _not_quoted(self, policy: str) -> RematError:
        return RematError(f"the arguments of {policy} are quoted names, as in {example(policy, self._names)}.")


def _dotted(tree: ast.expr) -> str:
    """A dotted name as it is written, empty for another expression."""
    if isinstance(tree, ast.Attribute):
        owner = _dotted(tree.value)
        return owner and f"{owner}.{tree.attr}"
    return tree.id if isinstance(tree, ast.Name) else ""


def _bound(policy: str, parameters: Sequence[str], arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    unknown = [word for word in keywords if word not in parameters]
    if unknown or len(arguments) > len(parameters):
        raise RematError(f"{policy} takes {', '.join(parameters)}; not {', '.join(unknown) or 'so many arguments'}.")
    return {**dict(zip(parameters, arguments, strict=False)), **keywords}


def _names(argument: Any) -> tuple[str, ...]:
    """The names of an argument: one, or a list of them."""
    names = tuple(argument) if isinstance(argument, (list, tuple, set)) else (argument,)
    for name in names:
        if not isinstance(name, str):
            raise RematError(f"a checkpoint name is a string, not {type(name).__name__}: {name!r}.")
    return names
