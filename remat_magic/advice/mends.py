"""Code that mends: a policy with one checkpoint name more, or less."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from remat_magic.facts.names import names_asked_for
from remat_magic.parsing import parse_expression
from remat_magic.policies import resolve
from remat_magic.records import PlannedValue, RematError

__all__ = ["name_for", "with_name", "without_names"]


def with_name(policy: str, name: str, names: Iterable[str]) -> str:
    """The code of a policy (a key) that saves one checkpoint name more; ``names`` are those that there are."""
    known = tuple(dict.fromkeys([*names, name]))
    head = policy.partition("(")[0]
    if policy in ("none", "as_written", "nothing_saveable", ""):
        key = f"save_only_these_names({name!r})"
    elif head == "save_only_these_names" and "|" not in policy:
        key = f"save_only_these_names({', '.join(map(repr, (*names_asked_for(policy), name)))})"
    elif head == "save_any_names_but_these" and "|" not in policy:
        key = f"{head}({', '.join(repr(each) for each in names_asked_for(policy) if each != name)})"
    else:
        key = f"{policy} | save_only_these_names({name!r})"
    return _code(key, known)


def without_names(policy: str, less: Iterable[str], names: Iterable[str]) -> str:
    """The code of a policy that saves by name, without some names; empty for another policy."""
    names, less = tuple(names), frozenset(less)
    head = policy.partition("(")[0]
    if "|" in policy or head not in _BY_NAME:
        return ""
    if head == "save_any_names_but_these":
        return _code(f"{head}({', '.join(map(repr, dict.fromkeys([*names_asked_for(policy), *sorted(less)])))})", names)
    try:
        call = parse_expression(policy)
    except SyntaxError:
        return ""
    lists = [[each for each in given if each not in less] for given in _lists(call)]
    if head == "save_only_these_names":
        return _code(f"names(save={lists[0]!r})", names)
    return _code(f"names(save={lists[0]!r}, offload={lists[1]!r})", names)


_BY_NAME = ("save_only_these_names", "save_any_names_but_these", "save_and_offload_only_these_names")


def _lists(call: ast.expr) -> list[list[str]]:
    """The names in a call of a factory: those of its lists, or of all that it is given."""
    assert isinstance(call, ast.Call)
    if call.args:
        return [[ast.literal_eval(each) for each in call.args]]
    keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return [[*keywords.get("names_which_can_be_saved", ())], [*keywords.get("names_which_can_be_offloaded", ())]]


def _code(key: str, names: tuple[str, ...]) -> str:
    try:
        return f"policy={resolve(key, names).code}"
    except RematError:  # of a policy of the user's own there is nothing but the name
        left, _, right = key.rpartition(" | ")
        code = resolve(right, names).code
        return f"policy=jax.checkpoint_policies.save_from_both_policies({left}, {code})" if left else f"policy={code}"


_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]+)?=(?!=)\s*(.*?)\s*(?:#.*)?")


def name_for(value: PlannedValue, taken: Iterable[str]) -> str:
    """A checkpoint name for a value, none of those taken: of the variable that it is assigned to, or is a part of."""
    source, operation = value.source, value.primitive.removesuffix("_general") or "value"
    assigned = _ASSIGNED.fullmatch(source.text) if source else None
    if assigned and source and assigned[2] == source.expression:
        base = assigned[1]
    else:
        around = assigned[1] if assigned else source.function.rpartition(".")[2] if source else ""
        base = "_".join(filter(None, [around if around.isidentifier() else "", operation]))
    taken, name, number = frozenset(taken), base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name
