"""The table of checkpoint policies: what each is called, what it does, and the code that asks JAX for it.

A policy is written as a *key*, a small expression that says the same in Python, in ``%%remat --policy`` and in the
widget's dropdown:

========================================================  ============================================================
``as_written``                                            what the program says
``none``                                                  no checkpoint at the chosen place, inner ones as written
``dots_saveable``                                         a member of ``jax.checkpoint_policies``, or an alias of one
``save_only_these_names('h', 'attn_*', 're:mlp[0-9]')``   a factory with its arguments; globs and regular expressions
                                                          stand for the names of the function that they match
``names(save=['h'], offload=['z'])``                      by name: these saved, those offloaded, all others recomputed
``dots_saveable | save_only_these_names('h')``            saved if either saves it
``my_policy``                                             a policy callable in the user's namespace
========================================================  ============================================================
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from remat_magic.model import Choice, Parameter, RematError

__all__ = ["AS_WRITTEN", "NO_CHECKPOINT", "Resolved", "by_name", "choices", "describe", "resolve"]

OWN = "A policy of your own."
AS_WRITTEN = object()  # keep the checkpoint's own policy
NO_CHECKPOINT = object()  # take the checkpoint away

_JAX = jax.checkpoint_policies
_MODULE = "jax.checkpoint_policies"
_SOURCE, _DESTINATION = "device", "pinned_host"  # the memories of JAX's own offloading examples

_NAMES = Parameter("names", "names")
_MEMORIES = (Parameter("offload_src", "memory", _SOURCE), Parameter("offload_dst", "memory", _DESTINATION))

_TABLE = (
    Choice("as_written", "as written", "The checkpoints and policies that the program itself has."),
    Choice("none", "none", "No checkpoint here: autodiff saves whatever its rules ask for."),
    Choice(
        "nothing_saveable",
        "nothing_saveable",
        "Save no intermediate, recompute all (JAX's default when policy is None).",
    ),
    Choice("everything_saveable", "everything_saveable", "Save every intermediate that the derivatives read."),
    Choice(
        "dots_saveable",
        "dots_saveable",
        "Save the outputs of matrix multiplications and convolutions, recompute the rest.",
        aliases=("checkpoint_dots",),
    ),
    Choice(
        "dots_with_no_batch_dims_saveable",
        "dots_with_no_batch_dims_saveable",
        "Save the outputs of matrix multiplications without batch dimensions (weights times activations).",
        aliases=("checkpoint_dots_with_no_batch_dims",),
    ),
    Choice(
        "offload_dot_with_no_batch_dims",
        "offload_dot_with_no_batch_dims",
        "As dots_with_no_batch_dims_saveable, but move what is saved to another memory.",
        parameters=_MEMORIES,
    ),
    Choice(
        "save_only_these_names",
        "save_only_these_names",
        "Save the values with these checkpoint names, recompute the rest.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_any_names_but_these",
        "save_any_names_but_these",
        "Save every named value except these, recompute the rest.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_anything_except_these_names",
        "save_anything_except_these_names",
        "Saves everything: in JAX today this factory ignores the names it is given.",
        parameters=(_NAMES,),
    ),
    Choice(
        "save_and_offload_only_these_names",
        "save_and_offload_only_these_names",
        "Save some named values, move others to another memory, recompute the rest.",
        parameters=(
            Parameter("names_which_can_be_saved", "names", ""),
            Parameter("names_which_can_be_offloaded", "names", ""),
            *_MEMORIES,
        ),
    ),
    Choice(
        "save_from_both_policies",
        "save_from_both_policies",
        "Save what either of two policies saves.",
        parameters=(Parameter("policy_1", "policy"), Parameter("policy_2", "policy")),
    ),
    Choice(
        "names",
        "by name",
        "Save, offload or recompute each named value.",
        parameters=(Parameter("save", "names", ""), Parameter("offload", "names", ""), *_MEMORIES),
    ),
)
_ROWS: dict[str, Choice] = {row.key: row for row in _TABLE}
_CANONICAL: dict[str, str] = {alias: row.key for row in _TABLE for alias in (row.key, *row.aliases)}
_PLAIN = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A policy ready for JAX.

    ``policy`` is a JAX policy, ``AS_WRITTEN`` or ``NO_CHECKPOINT``; ``code`` the expression for ``policy=``, empty
    for these two. ``meaning`` is one line, ``notes`` are sentences to show with it.
    """

    key: str
    code: str
    policy: Any
    meaning: str = ""
    notes: tuple[str, ...] = ()


def choices(names: Sequence[str] = ()) -> tuple[Choice, ...]:
    """The table of policies.

    Args:
        names: the checkpoint names of a function. Without any, factories stand in the table under their bare names,
            with the parameters they take; with some, every key is complete and can be used as it is.
    """
    if not names:
        return tuple(dataclasses.replace(row, code=_code_of_row(row)) for row in _TABLE)
    keys: list[str] = [row.key for row in _TABLE if not row.parameters or row.parameters == _MEMORIES]
    keys.append(_call("save_only_these_names", names))
    if 1 < len(names) <= 8:
        keys += [_call("save_only_these_names", (name,)) for name in names]
        keys += [_call("save_any_names_but_these", (name,)) for name in names]
    keys.append(
        f"save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded={list(names)!r}, "
        f"offload_src={_SOURCE!r}, offload_dst={_DESTINATION!r})"
    )
    rows = []
    for key in keys:
        found = resolve(key, names)
        rows.append(Choice(key, _ROWS[key].label if key in _ROWS else found.key, found.meaning, found.code))
    return tuple(rows)


def _code_of_row(row: Choice) -> str:
    if row.key in _PLAIN:
        return f"{_MODULE}.{row.key}"
    if row.parameters == _MEMORIES:
        return f"{_MODULE}.{row.key}(offload_src={_SOURCE!r}, offload_dst={_DESTINATION!r})"
    return ""


def by_name(
    save: Iterable[str | re.Pattern[str]] = (), offload: Iterable[str | re.Pattern[str]] = (), **memories: str
) -> str:
    """The key of a choice by name: the names (or globs, or compiled regular expressions) to save and to offload.

    Args:
        save: values to keep on the device.
        offload: values to move to another memory.
        **memories: ``offload_src`` and ``offload_dst``, JAX's names of memories; "device" and "pinned_host" if absent.
    """

    def texts(patterns: Iterable[str | re.Pattern[str]]) -> list[str]:
        return [f"re:{item.pattern}" if isinstance(item, re.Pattern) else item for item in patterns]

    extra = "".join(f", {key}={value!r}" for key, value in memories.items())
    return f"names(save={texts(save)!r}, offload={texts(offload)!r}{extra})"


def _call(factory: str, names: Iterable[str]) -> str:
    return f"{factory}({', '.join(map(repr, names))})"


# ----------------------------------------------------------------------------------------------- naming a policy object

_PROBES: dict[str, Any] = {
    "save_only_these_names": _JAX.save_only_these_names("x"),
    "save_any_names_but_these": _JAX.save_any_names_but_these("x"),
    "save_anything_except_these_names": _JAX.save_anything_except_these_names("x"),
    "save_and_offload_only_these_names": _JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=(), offload_src=_SOURCE, offload_dst=_DESTINATION
    ),
    "offload_dot_with_no_batch_dims": _JAX.offload_dot_with_no_batch_dims(_SOURCE, _DESTINATION),
    "save_from_both_policies": _JAX.save_from_both_policies(_JAX.dots_saveable, _JAX.dots_saveable),
}


def _captured(policy: Any) -> dict[str, Any]:
    """What a factory closed over: free variables of a function, or (save_*_names in jax 0.10) dataclass fields."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    code = getattr(policy, "__code__", None)
    cells = getattr(policy, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False)}


def _same_make(policy: Any, probe: Any) -> bool:
    if inspect.isfunction(policy) and inspect.isfunction(probe):
        return policy.__code__ is probe.__code__
    return type(policy) is type(probe) and dataclasses.is_dataclass(probe)


def describe(policy: Any) -> str:
    """The key of a policy object: JAX's own are recognised with their arguments, others go by their own name.

    None is ``nothing_saveable``, which is what JAX takes it for.
    """
    if policy is None:
        return "nothing_saveable"
    for key in _PLAIN:
        if policy is getattr(_JAX, key) or (dataclasses.is_dataclass(policy) and policy == getattr(_JAX, key)):
            return key
    for factory, probe in _PROBES.items():
        if not _same_make(policy, probe):
            continue
        held = _captured(policy)
        if factory == "save_from_both_policies":
            return f"{describe(held['policy_1'])} | {describe(held['policy_2'])}"
        if factory == "save_anything_except_these_names":
            return "save_anything_except_these_names()"
        if factory in ("save_only_these_names", "save_any_names_but_these"):
            (names,) = held.values()
            return _call(factory, _ordered(names))
        arguments = ", ".join(
            f"{key}={value!r}" if isinstance(value, str) else f"{key}={_ordered(value)!r}"
            for key, value in sorted(held.items(), key=lambda item: _ARGUMENT_ORDER.index(item[0]))
        )
        return f"{factory}({arguments})"
    name = getattr(policy, "__qualname__", None) or type(policy).__name__
    return name.split("<locals>.")[-1]


_ARGUMENT_ORDER = ("names_which_can_be_saved", "names_which_can_be_offloaded", "offload_src", "offload_dst")


def _ordered(names: Iterable[str]) -> list[str]:
    """Sets in a settled order, sequences as they are."""
    return sorted(names) if isinstance(names, (set, frozenset)) else list(names)


# --------------------------------------------------------------------------------------------------- resolving a policy


def resolve(
    policy: Any,
    names: Sequence[str] = (),
    namespace: Mapping[str, Any] | None = None,
    function: str = "the function",
) -> Resolved:
    """A policy from a key, or from a policy object.

    Args:
        policy: a key, or a JAX policy or any policy callable, or None (which JAX takes as ``nothing_saveable``).
        names: the checkpoint names of the function, which patterns are matched against.
        namespace: where identifiers that are no key are looked up.
        function: the function's name, for messages.

    Raises:
        RematError: an unknown key (the nearest one is named), a factory that was not called, a name that the function
            does not have, a pattern that matches none, or something that is not a policy.
    """
    if isinstance(policy, Resolved):
        return policy
    if isinstance(policy, Choice):
        policy = policy.key
    if isinstance(policy, str):
        try:
            tree = ast.parse(policy.strip(), mode="eval").body
        except SyntaxError:
            raise RematError(f"{policy!r} is not a policy: {_nearest(policy, namespace)}") from None
        return _Reader(tuple(names), namespace or {}, function).read(tree)
    return _from_object(policy, names, function)


def _from_object(policy: Any, names: Sequence[str], function: str) -> Resolved:
    if policy is None:
        policy = _JAX.nothing_saveable
    for factory in _PROBES:
        if policy is getattr(_JAX, factory):
            raise RematError(f"{factory} is a factory: call it, as in {_example(factory, names)}.")
    if not callable(policy):
        raise RematError(
            f"a policy is a key such as 'dots_saveable' or a policy function, not {type(policy).__name__}: {policy!r}."
        )
    if inspect.isclass(policy):
        raise RematError(f"{policy.__name__} is a class, not a policy: pass one of its instances.")
    key = describe(policy)
    code = _code(key, policy)
    unknown = [name for name in _names_in(policy) if name not in names]
    notes = (_no_such_names(unknown, names, function),) if unknown else ()
    return Resolved(key, code, policy, _meaning(key), notes)


def _names_in(policy: Any) -> list[str]:
    found: list[str] = []
    for factory, probe in _PROBES.items():
        if _same_make(policy, probe):
            for value in _captured(policy).values():
                if isinstance(value, (set, frozenset, tuple, list)):
                    found += [name for name in _ordered(value) if isinstance(name, str)]
                elif factory == "save_from_both_policies":
                    found += _names_in(value)
    return found


def _code(key: str, policy: Any) -> str:
    """The Python expression that makes a policy: JAX's by its public name, another by its own."""
    if isinstance(policy, str) or key in _PLAIN or any(_same_make(policy, probe) for probe in _PROBES.values()):
        tree = ast.parse(key, mode="eval").body
        return _python(tree)
    return key


def _python(tree: ast.expr) -> str:
    if isinstance(tree, ast.BinOp):
        return f"{_MODULE}.save_from_both_policies({_python(tree.left)}, {_python(tree.right)})"
    text = ast.unparse(tree)
    head = text.split("(", 1)[0]
    return f"{_MODULE}.{text}" if head in _CANONICAL else text


def _meaning(key: str) -> str:
    if " | " in key:
        return _ROWS["save_from_both_policies"].meaning
    row = _ROWS.get(key.split("(", 1)[0])
    return row.meaning if row else OWN


def _example(factory: str, names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:2])) or "'h'"
    if factory == "save_and_offload_only_these_names":
        return f"{factory}(names_which_can_be_saved=[], names_which_can_be_offloaded=[{shown}])"
    if factory == "offload_dot_with_no_batch_dims":
        return f"{factory}(offload_src={_SOURCE!r}, offload_dst={_DESTINATION!r})"
    if factory == "names":
        return f"names(save=[{shown}], offload=[])"
    if factory == "save_from_both_policies":
        return f"{factory}(dots_saveable, save_only_these_names({shown}))"
    return f"{factory}({shown})"


def _nearest(text: str, namespace: Mapping[str, Any] | None) -> str:
    known = [*_CANONICAL, *(name for name in namespace or {} if not name.startswith("_"))]
    close = difflib.get_close_matches(text.split("(", 1)[0].strip(), known, 1, 0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(row.key for row in _TABLE)}."


def _no_such_names(unknown: Sequence[str], names: Sequence[str], function: str) -> str:
    which = ", ".join(map(repr, unknown))
    verb = "is not a checkpoint name" if len(unknown) == 1 else "are not checkpoint names"
    has = f"it has {', '.join(map(repr, names))}" if names else "it has none: add jax.ad_checkpoint.checkpoint_name"
    return f"{which} {verb} of {function}; {has}."


class _Reader:
    """Reads the expression of a key."""

    def __init__(self, names: tuple[str, ...], namespace: Mapping[str, Any], function: str) -> None:
        self._names, self._namespace, self._function = names, namespace, function

    def read(self, tree: ast.expr) -> Resolved:
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
            return self._either(self.read(tree.left), self.read(tree.right))
        if isinstance(tree, ast.Constant) and tree.value is None:
            return resolve("nothing_saveable")
        if isinstance(tree, ast.Call):
            return self._factory(self._name(tree.func), tree)
        return self._bare(tree)

    def _name(self, tree: ast.expr) -> str:
        text = ast.unparse(tree)
        for prefix in ("jax.checkpoint_policies.", "jax.ad_checkpoint.checkpoint_policies.", "checkpoint_policies."):
            if text.startswith(prefix):
                return text.removeprefix(prefix)
        return text

    def _bare(self, tree: ast.expr) -> Resolved:
        name = self._name(tree)
        key = _CANONICAL.get(name)
        if key == "as_written":
            return Resolved(key, "", AS_WRITTEN, _ROWS[key].meaning)
        if key == "none":
            return Resolved(key, "", NO_CHECKPOINT, _ROWS[key].meaning)
        if key in _PLAIN:
            return Resolved(key, f"{_MODULE}.{key}", getattr(_JAX, key), _ROWS[key].meaning)
        if key == "offload_dot_with_no_batch_dims":  # complete: both its parameters have defaults here
            return self._offload_dot(_SOURCE, _DESTINATION)
        if key is not None:
            raise RematError(f"{key} is a factory: call it, as in {_example(key, self._names)}.")
        found = self._lookup(tree)
        if found is not None:
            resolved = _from_object(found, self._names, self._function)
            own = not any(_same_make(found, probe) for probe in _PROBES.values()) and resolved.key not in _PLAIN
            # A policy of the user's own goes by the name that the user gave it, and that is also its code.
            return dataclasses.replace(resolved, key=name, code=name) if own else resolved
        raise RematError(f"{name!r} is not a policy: {_nearest(name, self._namespace)}")

    def _lookup(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Name):
            return self._namespace.get(tree.id)
        if isinstance(tree, ast.Attribute):
            owner = self._lookup(tree.value)
            return getattr(owner, tree.attr, None) if owner is not None else None
        return None

    def _factory(self, name: str, tree: ast.Call) -> Resolved:
        key = _CANONICAL.get(name)
        if key is None:
            if self._lookup(tree.func) is not None:
                raise RematError(
                    f"{ast.unparse(tree)} cannot be called from here: give its result a name, and use that name."
                )
            raise RematError(f"{name!r} is not a policy: {_nearest(name, self._namespace)}")
        if not _ROWS[key].parameters:
            raise RematError(f"{key} takes no arguments: write {key}.")
        if key == "save_from_both_policies":
            if len(tree.args) != 2 or tree.keywords:
                raise RematError(f"{key} takes two policies, as in {_example(key, self._names)}.")
            return self._either(self.read(tree.args[0]), self.read(tree.args[1]))
        arguments, keywords = self._literals(key, tree)
        if key == "offload_dot_with_no_batch_dims":
            bound = self._bind(key, ("offload_src", "offload_dst"), arguments, keywords)
            return self._offload_dot(bound.get("offload_src", _SOURCE), bound.get("offload_dst", _DESTINATION))
        if key in ("names", "save_and_offload_only_these_names"):
            saved, offloaded = (
                ("save", "offload") if key == "names" else ("names_which_can_be_saved", "names_which_can_be_offloaded")
            )
            bound = self._bind(key, (saved, offloaded, "offload_src", "offload_dst", "recompute"), arguments, keywords)
            save, offload = self._expand(bound.get(saved, ())), self._expand(bound.get(offloaded, ()))
            if key == "names" and not save and not offload:
                return resolve("nothing_saveable")
            return self._by_name(
                save,
                offload,
                bound.get("offload_src", _SOURCE),
                bound.get("offload_dst", _DESTINATION),
            )
        if keywords:
            raise RematError(f"{key} takes names only, as in {_example(key, self._names)}.")
        flat = [item for argument in arguments for item in ([argument] if isinstance(argument, str) else argument)]
        names = self._expand(flat)
        full = _call(key, names)
        notes = ()
        if key == "save_anything_except_these_names":
            full = f"{key}({', '.join(map(repr, names))})"
            notes = ("save_anything_except_these_names saves everything: JAX ignores the names it is given.",)
        return Resolved(full, f"{_MODULE}.{full}", getattr(_JAX, key)(*names), _ROWS[key].meaning, notes)

    def _literals(self, key: str, tree: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        try:
            arguments = [ast.literal_eval(item) for item in tree.args]
            keywords = {item.arg or "": ast.literal_eval(item.value) for item in tree.keywords}
        except ValueError:
            raise RematError(f"the arguments of {key} are quoted names, as in {_example(key, self._names)}.") from None
        return arguments, keywords

    @staticmethod
    def _bind(key: str, known: Sequence[str], arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        unknown = [word for word in keywords if word not in known]
        if unknown or len(arguments) > len(known):
            raise RematError(f"{key} takes {', '.join(known)}; not {', '.join(unknown) or 'so many arguments'}.")
        return {**dict(zip(known, arguments, strict=False)), **keywords}

    def _expand(self, patterns: str | Iterable[str]) -> tuple[str, ...]:
        """Names as they are, globs and regular expressions as the names of the function that they match."""
        if isinstance(patterns, str):
            patterns = (patterns,)
        found: dict[str, None] = {}
        unknown: list[str] = []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise RematError(f"a checkpoint name is a string, not {type(pattern).__name__}: {pattern!r}.")
            if pattern in self._names:
                found.setdefault(pattern)
                continue
            if pattern.startswith("re:"):
                try:
                    expression = re.compile(pattern[3:])
                except re.error as error:
                    raise RematError(f"{pattern!r} is not a regular expression: {error}.") from None
                matches = [name for name in self._names if expression.fullmatch(name)]
            else:
                matches = fnmatch.filter(self._names, pattern) if any(mark in pattern for mark in "*?[") else []
            found.update(dict.fromkeys(matches))
            if not matches:
                unknown.append(pattern)
        if unknown:
            raise RematError(_no_such_names(unknown, self._names, self._function))
        return tuple(found)

    def _by_name(self, save: tuple[str, ...], offload: tuple[str, ...], source: str, destination: str) -> Resolved:
        both = [name for name in save if name in offload]
        if both:
            raise RematError(f"{', '.join(map(repr, both))} cannot be saved and offloaded at once: choose one.")
        if not offload:
            full = _call("save_only_these_names", save)
            policy: Callable[..., Any] = _JAX.save_only_these_names(*save)
        else:
            full = (
                f"save_and_offload_only_these_names(names_which_can_be_saved={list(save)!r}, "
                f"names_which_can_be_offloaded={list(offload)!r}, offload_src={source!r}, offload_dst={destination!r})"
            )
            policy = _JAX.save_and_offload_only_these_names(
                names_which_can_be_saved=list(save),
                names_which_can_be_offloaded=list(offload),
                offload_src=source,
                offload_dst=destination,
            )
        return Resolved(full, f"{_MODULE}.{full}", policy, _meaning(full))

    @staticmethod
    def _offload_dot(source: str, destination: str) -> Resolved:
        key = "offload_dot_with_no_batch_dims"
        full = f"{key}(offload_src={source!r}, offload_dst={destination!r})"
        return Resolved(
            full,
            f"{_MODULE}.{full}",
            _JAX.offload_dot_with_no_batch_dims(offload_src=source, offload_dst=destination),
            _ROWS[key].meaning,
        )

    @staticmethod
    def _either(left: Resolved, right: Resolved) -> Resolved:
        for side in (left, right):
            if side.policy is AS_WRITTEN or side.policy is NO_CHECKPOINT:
                raise RematError(f"{side.key} is not a policy to combine: use two of {', '.join(_PLAIN)} or names.")
            if side.key.startswith(("offload_", "save_and_offload_")):
                raise RematError(
                    f"save_from_both_policies cannot hold {side.key.split('(')[0]}: JAX combines only policies that "
                    "answer yes or no, so write a policy function that returns Offloadable itself."
                )
        return Resolved(
            f"{left.key} | {right.key}",
            f"{_MODULE}.save_from_both_policies({left.code}, {right.code})",
            _JAX.save_from_both_policies(left.policy, right.policy),
            _ROWS["save_from_both_policies"].meaning,
            left.notes + right.notes,
        )
