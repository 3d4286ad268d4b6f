"""From a key to the object that JAX takes as ``policy=``, and from an object back to its key."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_magic.policies.keys import (
    AS_WRITTEN,
    JAX,
    MEMORIES,
    NO_CHECKPOINT,
    OWN,
    PLAIN,
    PREFIXES,
    ROWS,
    Alternative,
    Key,
    check_combinable,
    example,
    no_such_policy,
)
from remat_magic.records import Choice, Note, RematError


@dataclass(frozen=True, slots=True)
class Resolved:
    """A policy ready for JAX.

    ``policy`` is a JAX policy, ``AS_WRITTEN`` or ``NO_CHECKPOINT``; ``code`` the expression for ``policy=``, empty
    for these two. ``meaning`` is one line, ``notes`` are sentences to show with it. ``own`` are the policies of the
    user's own that it is, or combines.
    """

    key: str
    code: str
    policy: Any
    meaning: str = ""
    notes: tuple[Note, ...] = ()
    own: tuple[Any, ...] = ()


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
        namespace: where identifiers that are no row of the table are looked up.
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
        policy = Key.parse(policy, names, namespace)
    if not isinstance(policy, Key):
        return _of_object(policy, names, function)[1]
    pairs = [_of_alternative(alternative, names, namespace, function) for alternative in policy.alternatives]
    check_combinable([key for key, _ in pairs])
    (_, combined), *others = pairs
    for _, other in others:
        combined = Resolved(
            f"{combined.key} | {other.key}",
            f"jax.checkpoint_policies.save_from_both_policies({combined.code}, {other.code})",
            JAX.save_from_both_policies(combined.policy, other.policy),
            ROWS["save_from_both_policies"].meaning,
            combined.notes + other.notes,
            combined.own + other.own,
        )
    return combined


def _of_alternative(
    alternative: Alternative, names: Sequence[str], namespace: Mapping[str, Any] | None, function: str
) -> tuple[Key, Resolved]:
    if alternative.own:
        return _of_own(alternative, names, namespace, function)
    save, offload = _matching(alternative.names, names, function), _matching(alternative.offloaded, names, function)
    in_both = [name for name in save if name in offload]
    if in_both:
        raise RematError(f"{', '.join(map(repr, in_both))} cannot be saved and offloaded at once: choose one.")
    expanded = dataclasses.replace(alternative, names=save, offloaded=offload)
    row = expanded.policy
    notes: tuple[Note, ...] = ()
    if row in ("as_written", "none"):
        policy: Any = AS_WRITTEN if row == "as_written" else NO_CHECKPOINT
    elif row in PLAIN:
        policy = getattr(JAX, row)
    elif row == "offload_dot_with_no_batch_dims":
        policy = JAX.offload_dot_with_no_batch_dims(**MEMORIES)
    elif row == "save_and_offload_only_these_names":
        policy = JAX.save_and_offload_only_these_names(
            names_which_can_be_saved=list(save),
            names_which_can_be_offloaded=list(offload),
            **MEMORIES,
        )
    else:
        policy = getattr(JAX, row)(*save)
        if row == "save_anything_except_these_names":
            sentence = f"{row} saves everything: JAX ignores the names it is given."
            notes = (Note("names-ignored", sentence, save),)
    return Key((expanded,)), Resolved(str(expanded), expanded.code, policy, ROWS[row].meaning, notes)


def _of_own(
    alternative: Alternative, names: Sequence[str], namespace: Mapping[str, Any] | None, function: str
) -> tuple[Key, Resolved]:
    """What a policy that is no row of the table stands for in the user's namespace."""
    name, called, _ = alternative.policy.partition("(")
    first, *attributes = name.split(".")
    value = (namespace or {}).get(first)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    if value is None:
        raise no_such_policy(name.removeprefix(prefix), namespace)
    if called:
        raise RematError(f"{alternative.policy} cannot be called from here: give its result a name, and use that name.")
    key, resolved = _of_object(value, names, function)
    if resolved.own and len(key.alternatives) == 1:
        # A policy of the user's own goes by the name that the user gave it, and that is also its code.
        resolved = dataclasses.replace(resolved, key=name, code=name)
    return key, resolved


def _matching(patterns: Iterable[str], names: Sequence[str], function: str) -> tuple[str, ...]:
    """Names as they are, globs and regular expressions (``re:``) as those of the ``names`` that they match."""
    matched: dict[str, None] = {}
    unknown: list[str] = []
    for pattern in patterns:
        if pattern in names:
            matched.setdefault(pattern)
            continue
        if pattern.startswith("re:"):
            try:
                expression = re.compile(pattern[3:])
            except re.error as error:
                raise RematError(f"{pattern!r} is not a regular expression: {error}.") from None
            matches = [name for name in names if expression.fullmatch(name)]
        else:
            matches = fnmatch.filter(names, pattern) if any(mark in pattern for mark in "*?[") else []
        matched.update(dict.fromkeys(matches))
        if not matches:
            unknown.append(pattern)
    if unknown:
        raise RematError(_no_such_names(unknown, names, function))
    return tuple(matched)


def _no_such_names(unknown: Sequence[str], names: Sequence[str], function: str) -> str:
    which = ", ".join(map(repr, unknown))
    verb = "is not a checkpoint name" if len(unknown) == 1 else "are not checkpoint names"
    has = f"it has {', '.join(map(repr, names))}" if names else "it has none: add jax.ad_checkpoint.checkpoint_name"
    return f"{which} {verb} of {function}; {has}."


# ------------------------------------------------------------------------------------------- from an object to its key

# One policy of each factory: what the same factory made has the same code, or type.
_MADE_BY: dict[str, Any] = {
    "save_only_these_names": JAX.save_only_these_names("x"),
    "save_any_names_but_these": JAX.save_any_names_but_these("x"),
    "save_anything_except_these_names": JAX.save_anything_except_these_names("x"),
    "save_and_offload_only_these_names": JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=(), **MEMORIES
    ),
    "offload_dot_with_no_batch_dims": JAX.offload_dot_with_no_batch_dims(**MEMORIES),
    "save_from_both_policies": JAX.save_from_both_policies(JAX.dots_saveable, JAX.dots_saveable),
}


def describe(policy: Any) -> str:
    """The key of a policy object: JAX's own are recognised with their arguments, others go by their own name.

    None is ``nothing_saveable``, which is what JAX takes it for.
    """
    return str(Key(tuple(alternative for alternative, _ in _alternatives(policy))))


def _of_object(policy: Any, names: Sequence[str], function: str) -> tuple[Key, Resolved]:
    """A policy object as it is, with its key; arguments and errors are those of ``resolve``."""
    if policy is None:
        policy = JAX.nothing_saveable
    for factory in _MADE_BY:
        if policy is getattr(JAX, factory):
            raise RematError(f"{factory} is a factory: call it, as in {example(factory, names)}.")
    if not callable(policy):
        raise RematError(
            f"a policy is a key such as 'dots_saveable' or a policy function, not {type(policy).__name__}: {policy!r}."
        )
    if inspect.isclass(policy):
        raise RematError(f"{policy.__name__} is a class, not a policy: pass one of its instances.")
    parts = _alternatives(policy)
    key = Key(tuple(alternative for alternative, _ in parts))
    unknown = [name for name in key.names if name not in names]
    notes = (Note("names-unknown", _no_such_names(unknown, names, function), unknown),) if unknown else ()
    own = tuple(part for alternative, part in parts if alternative.own)
    if len(parts) > 1:
        meaning = ROWS["save_from_both_policies"].meaning
    else:
        meaning = OWN if own else ROWS[key.alternatives[0].policy].meaning
    return key, Resolved(str(key), key.code, policy, meaning, notes, own)


def _alternatives(policy: Any) -> list[tuple[Alternative, Any]]:
    """What a policy object combines, each with its key."""
    if policy is None:
        policy = JAX.nothing_saveable
    for row in PLAIN:
        plain = getattr(JAX, row)
        if policy is plain or (dataclasses.is_dataclass(policy) and policy == plain):
            return [(Alternative(row), policy)]
    factory = next((factory for factory, probe in _MADE_BY.items() if _same_factory(policy, probe)), None)
    arguments = _captured(policy) if factory else {}
    if factory is None or any(arguments.get(name, memory) != memory for name, memory in MEMORIES.items()):
        name = getattr(policy, "__qualname__", None) or type(policy).__name__
        return [(Alternative(name.split("<locals>.")[-1], own=True), policy)]
    if factory == "save_from_both_policies":
        return [*_alternatives(arguments["policy_1"]), *_alternatives(arguments["policy_2"])]
    if factory == "save_anything_except_these_names":
        return [(Alternative(factory), policy)]
    if factory in ("save_only_these_names", "save_any_names_but_these"):
        (names,) = arguments.values()
        return [(Alternative(factory, _ordered(names)), policy)]
    saved, offloaded = arguments.get("names_which_can_be_saved", ()), arguments.get("names_which_can_be_offloaded", ())
    return [(Alternative(factory, _ordered(saved), _ordered(offloaded)), policy)]


def _captured(policy: Any) -> dict[str, Any]:
    """What a factory closed over: free variables of a function, or (save_*_names in jax 0.10) dataclass fields."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    code = getattr(policy, "__code__", None)
    cells = getattr(policy, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False)}


def _same_factory(policy: Any, probe: Any) -> bool:
    if inspect.isfunction(policy) and inspect.isfunction(probe):
        return policy.__code__ is probe.__code__
    return type(policy) is type(probe) and dataclasses.is_dataclass(probe)


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Sets in a settled order, sequences as they are."""
    return tuple(sorted(names) if isinstance(names, (set, frozenset)) else names)
