"""From a key, the small expression that says which policy, to the policy."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat_magic.parsing import parse_expression
from remat_magic.policies.objects import PROBES, from_object, meaning_of, same_make
from remat_magic.policies.table import (
    AS_WRITTEN,
    CANONICAL,
    DESTINATION,
    JAX,
    MODULE,
    NO_CHECKPOINT,
    PLAIN,
    ROWS,
    SOURCE,
    TABLE,
    Resolved,
    call,
    example,
    no_such_names,
)
from remat_magic.records import Choice, Note, RematError


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
            tree = parse_expression(policy.strip())
        except SyntaxError:
            raise RematError(f"{policy!r} is not a policy: {_nearest(policy, namespace)}") from None
        return _Reader(tuple(names), namespace or {}, function).read(tree)
    return from_object(policy, names, function)


def _nearest(text: str, namespace: Mapping[str, Any] | None) -> str:
    known = [*CANONICAL, *(name for name in namespace or {} if not name.startswith("_"))]
    close = difflib.get_close_matches(text.split("(", 1)[0].strip(), known, 1, 0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(row.key for row in TABLE)}."


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
        key = CANONICAL.get(name)
        if key == "as_written":
            return Resolved(key, "", AS_WRITTEN, ROWS[key].meaning)
        if key == "none":
            return Resolved(key, "", NO_CHECKPOINT, ROWS[key].meaning)
        if key in PLAIN:
            return Resolved(key, f"{MODULE}.{key}", getattr(JAX, key), ROWS[key].meaning)
        if key == "offload_dot_with_no_batch_dims":  # complete: both its parameters have defaults here
            return self._offload_dot(SOURCE, DESTINATION)
        if key is not None:
            raise RematError(f"{key} is a factory: call it, as in {example(key, self._names)}.")
        found = self._lookup(tree)
        if found is not None:
            resolved = from_object(found, self._names, self._function)
            own = not any(same_make(found, probe) for probe in PROBES.values()) and resolved.key not in PLAIN
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
        key = CANONICAL.get(name)
        if key is None:
            if self._lookup(tree.func) is not None:
                raise RematError(
                    f"{ast.unparse(tree)} cannot be called from here: give its result a name, and use that name."
                )
            raise RematError(f"{name!r} is not a policy: {_nearest(name, self._namespace)}")
        if not ROWS[key].parameters:
            raise RematError(f"{key} takes no arguments: write {key}.")
        if key == "save_from_both_policies":
            if len(tree.args) != 2 or tree.keywords:
                raise RematError(f"{key} takes two policies, as in {example(key, self._names)}.")
            return self._either(self.read(tree.args[0]), self.read(tree.args[1]))
        arguments, keywords = self._literals(key, tree)
        if key == "offload_dot_with_no_batch_dims":
            bound = self._bind(key, ("offload_src", "offload_dst"), arguments, keywords)
            return self._offload_dot(bound.get("offload_src", SOURCE), bound.get("offload_dst", DESTINATION))
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
                bound.get("offload_src", SOURCE),
                bound.get("offload_dst", DESTINATION),
            )
        if keywords:
            raise RematError(f"{key} takes names only, as in {example(key, self._names)}.")
        flat = [item for argument in arguments for item in ([argument] if isinstance(argument, str) else argument)]
        names = self._expand(flat)
        full = call(key, names)
        notes = ()
        if key == "save_anything_except_these_names":
            full = f"{key}({', '.join(map(repr, names))})"
            sentence = "save_anything_except_these_names saves everything: JAX ignores the names it is given."
            notes = (Note("names-ignored", sentence, names),)
        return Resolved(full, f"{MODULE}.{full}", getattr(JAX, key)(*names), ROWS[key].meaning, notes)

    def _literals(self, key: str, tree: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        try:
            arguments = [ast.literal_eval(item) for item in tree.args]
            keywords = {item.arg or "": ast.literal_eval(item.value) for item in tree.keywords}
        except ValueError:
            raise RematError(f"the arguments of {key} are quoted names, as in {example(key, self._names)}.") from None
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
            raise RematError(no_such_names(unknown, self._names, self._function))
        return tuple(found)

    def _by_name(self, save: tuple[str, ...], offload: tuple[str, ...], source: str, destination: str) -> Resolved:
        both = [name for name in save if name in offload]
        if both:
            raise RematError(f"{', '.join(map(repr, both))} cannot be saved and offloaded at once: choose one.")
        if not offload:
            full = call("save_only_these_names", save)
            policy: Callable[..., Any] = JAX.save_only_these_names(*save)
        else:
            full = (
                f"save_and_offload_only_these_names(names_which_can_be_saved={list(save)!r}, "
                f"names_which_can_be_offloaded={list(offload)!r}, offload_src={source!r}, offload_dst={destination!r})"
            )
            policy = JAX.save_and_offload_only_these_names(
                names_which_can_be_saved=list(save),
                names_which_can_be_offloaded=list(offload),
                offload_src=source,
                offload_dst=destination,
            )
        return Resolved(full, f"{MODULE}.{full}", policy, meaning_of(full))

    @staticmethod
    def _offload_dot(source: str, destination: str) -> Resolved:
        key = "offload_dot_with_no_batch_dims"
        full = f"{key}(offload_src={source!r}, offload_dst={destination!r})"
        return Resolved(
            key if (source, destination) == (SOURCE, DESTINATION) else full,  # as the row of the table is called
            f"{MODULE}.{full}",
            JAX.offload_dot_with_no_batch_dims(offload_src=source, offload_dst=destination),
            ROWS[key].meaning,
        )

    @staticmethod
    def _either(left: Resolved, right: Resolved) -> Resolved:
        for side in (left, right):
            if side.policy is AS_WRITTEN or side.policy is NO_CHECKPOINT:
                raise RematError(f"{side.key} is not a policy to combine: use two of {', '.join(PLAIN)} or names.")
            if side.key.startswith(("offload_", "save_and_offload_")):
                raise RematError(
                    f"save_from_both_policies cannot hold {side.key.split('(')[0]}: JAX combines only policies that "
                    "answer yes or no, so write a policy function that returns Offloadable itself."
                )
        return Resolved(
            f"{left.key} | {right.key}",
            f"{MODULE}.save_from_both_policies({left.code}, {right.code})",
            JAX.save_from_both_policies(left.policy, right.policy),
            ROWS["save_from_both_policies"].meaning,
            left.notes + right.notes,
        )
