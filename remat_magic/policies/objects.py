"""From a policy object back to its key: JAX's own are recognised, with what they were made of."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from remat_magic.parsing import parse_expression
from remat_magic.policies.table import (
    CANONICAL,
    DESTINATION,
    JAX,
    MEMORIES,
    MODULE,
    OWN,
    PLAIN,
    ROWS,
    SOURCE,
    Resolved,
    call,
    code_of_row,
    example,
    no_such_names,
)
from remat_magic.records import Note, RematError

PROBES: dict[str, Any] = {
    "save_only_these_names": JAX.save_only_these_names("x"),
    "save_any_names_but_these": JAX.save_any_names_but_these("x"),
    "save_anything_except_these_names": JAX.save_anything_except_these_names("x"),
    "save_and_offload_only_these_names": JAX.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=(), offload_src=SOURCE, offload_dst=DESTINATION
    ),
    "offload_dot_with_no_batch_dims": JAX.offload_dot_with_no_batch_dims(SOURCE, DESTINATION),
    "save_from_both_policies": JAX.save_from_both_policies(JAX.dots_saveable, JAX.dots_saveable),
}


def _captured(policy: Any) -> dict[str, Any]:
    """What a factory closed over: free variables of a function, or (save_*_names in jax 0.10) dataclass fields."""
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type):
        return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    code = getattr(policy, "__code__", None)
    cells = getattr(policy, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False)}


def same_make(policy: Any, probe: Any) -> bool:
    """Whether one factory made both."""
    if inspect.isfunction(policy) and inspect.isfunction(probe):
        return policy.__code__ is probe.__code__
    return type(policy) is type(probe) and dataclasses.is_dataclass(probe)


def describe(policy: Any) -> str:
    """The key of a policy object: JAX's own are recognised with their arguments, others go by their own name.

    None is ``nothing_saveable``, which is what JAX takes it for.
    """
    if policy is None:
        return "nothing_saveable"
    for key in PLAIN:
        if policy is getattr(JAX, key) or (dataclasses.is_dataclass(policy) and policy == getattr(JAX, key)):
            return key
    for factory, probe in PROBES.items():
        if not same_make(policy, probe):
            continue
        held = _captured(policy)
        if factory == "save_from_both_policies":
            return f"{describe(held['policy_1'])} | {describe(held['policy_2'])}"
        if factory == "save_anything_except_these_names":
            return "save_anything_except_these_names()"
        if factory in ("save_only_these_names", "save_any_names_but_these"):
            (names,) = held.values()
            return call(factory, _ordered(names))
        if held == {"offload_src": SOURCE, "offload_dst": DESTINATION}:
            return factory  # with these arguments it is a row of the table
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


def from_object(policy: Any, names: Sequence[str], function: str) -> Resolved:
    """A policy object as it is, with its key; arguments and errors are those of ``resolve``."""
    if policy is None:
        policy = JAX.nothing_saveable
    for factory in PROBES:
        if policy is getattr(JAX, factory):
            raise RematError(f"{factory} is a factory: call it, as in {example(factory, names)}.")
    if not callable(policy):
        raise RematError(
            f"a policy is a key such as 'dots_saveable' or a policy function, not {type(policy).__name__}: {policy!r}."
        )
    if inspect.isclass(policy):
        raise RematError(f"{policy.__name__} is a class, not a policy: pass one of its instances.")
    key = describe(policy)
    code = _code(key, policy)
    unknown = [name for name in _names_in(policy) if name not in names]
    notes = (Note("names-unknown", no_such_names(unknown, names, function), unknown),) if unknown else ()
    return Resolved(key, code, policy, meaning_of(key), notes)


def _names_in(policy: Any) -> list[str]:
    found: list[str] = []
    for factory, probe in PROBES.items():
        if same_make(policy, probe):
            for value in _captured(policy).values():
                if isinstance(value, (set, frozenset, tuple, list)):
                    found += [name for name in _ordered(value) if isinstance(name, str)]
                elif factory == "save_from_both_policies":
                    found += _names_in(value)
    return found


def _code(key: str, policy: Any) -> str:
    """The Python expression that makes a policy: JAX's by its public name, another by its own."""
    if isinstance(policy, str) or key in PLAIN or any(same_make(policy, probe) for probe in PROBES.values()):
        return _python(parse_expression(key))
    return key


def _python(tree: ast.expr) -> str:
    if isinstance(tree, ast.BinOp):
        return f"{MODULE}.save_from_both_policies({_python(tree.left)}, {_python(tree.right)})"
    text = ast.unparse(tree)
    if text in ROWS and ROWS[text].parameters == MEMORIES:
        return code_of_row(ROWS[text])
    head = text.split("(", 1)[0]
    return f"{MODULE}.{text}" if head in CANONICAL else text


def meaning_of(key: str) -> str:
    """One line of what the policy of a key does."""
    if " | " in key:
        return ROWS["save_from_both_policies"].meaning
    row = ROWS.get(key.split("(", 1)[0])
    return row.meaning if row else OWN
