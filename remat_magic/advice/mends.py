"""Code that mends: a policy with one checkpoint name more, or less."""

from __future__ import annotations

import re
from collections.abc import Iterable

from remat_magic.policies import Key
from remat_magic.records import PlannedValue

__all__ = ["name_for", "with_name", "without_names"]


def with_name(policy: Key | None, name: str) -> str:
    """The code of a policy that saves one checkpoint name more; None is a policy of which no key is known."""
    return f"policy={(policy or Key.own('its_policy')).saving(name).code}"


def without_names(policy: Key | None, names: Iterable[str]) -> str:
    """The code of a policy that saves by name, without some names; empty for another policy."""
    if policy is None or len(policy.alternatives) > 1:  # another alternative may save them by what is computed
        return ""
    left = policy.without(*names)
    return "" if left == policy else f"policy={left.code}"


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
