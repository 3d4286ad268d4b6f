"""The best choice of what to save under a budget, and advice about a policy: plain data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from remat_magic.model.report import RematError, SourceSpan

__all__ = ["Advice", "FrontierPoint", "Plan", "PlannedValue"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Something about a policy, or about the program, that costs memory or work without need, and how to mend it.

    ``kind`` names the rule, ``sentence`` says what is wrong and where, ``mend`` what to do. ``figure`` is what is at
    stake in ``unit``, None where that is not known. ``source`` is the line that ``sentence`` speaks of.
    """

    kind: str
    sentence: str
    mend: str
    figure: int | None = None
    unit: Literal["", "bytes", "FLOPs"] = ""
    source: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """A value that a plan saves.

    ``key`` is the name that the plan gives it, ``name`` the one that the program itself gives it, or None. ``type`` is
    that of one of them as JAX writes it, empty where calls differ; ``nbytes`` are the bytes of all ``times`` together.
    """

    key: str
    nbytes: int
    times: int = 1
    type: str = ""
    primitive: str = ""
    name: str | None = None
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to save within ``budget_bytes`` so that as little as possible is recomputed.

    ``saved_bytes``, ``recomputed_flops``, ``forward_flops`` and ``peak_bytes`` are those of the report that JAX gives
    for the plan; ``predicted_bytes`` and ``predicted_flops`` are what was reckoned before. No choice of ``names``
    within the budget recomputes fewer FLOPs than ``bound``, where equal layers that share one body are decided
    together, or one by one if ``separately``; a policy of JAX's that does better is taken instead: then ``names`` is
    empty and ``policy`` its key. ``status`` is one sentence on how sure this is, ``code`` what to paste, empty where
    only ``trace.function(plan)`` can apply it. ``fingerprint`` tells programs of other operations apart.
    """

    function: str
    at: str
    policy: str
    budget_bytes: int
    saved_bytes: int
    recomputed_flops: int
    bound: int
    names: tuple[PlannedValue, ...] = ()
    code: str = ""
    status: str = ""
    forward_flops: int | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_flops: int | None = None
    uncosted: tuple[str, ...] = ()
    separately: bool = False
    fingerprint: str = ""
    solve_seconds: float = 0.0

    @property
    def gap(self) -> float:
        """How much of the recomputation a better choice could spare at most: 0 is proven best."""
        if self.recomputed_flops <= self.bound:
            return 0.0
        return (self.recomputed_flops - self.bound) / self.recomputed_flops

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON; ``from_dict`` has the same plan again."""
        return dataclasses.asdict(self) | {"names": [dataclasses.asdict(value) for value in self.names]}

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """A plan that was written out.

        Raises:
            RematError: it is none: a field is missing, unknown or of another type, or a number is negative.
        """
        return _read(Plan, data, "the plan")


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """What can be had within a budget, as reckoned; ``trace.plan`` of the same budget has it confirmed by JAX.

    No choice within ``budget_bytes`` recomputes fewer FLOPs than ``bound``.
    """

    budget_bytes: int
    saved_bytes: int
    recomputed_flops: int
    bound: int


# ------------------------------------------------------------------------------------------------ reading what is given

_T = TypeVar("_T")
_RECORDS: dict[str, type[Any]] = {"PlannedValue": PlannedValue, "SourceSpan": SourceSpan}


def _read(record: type[_T], data: Any, what: str) -> _T:
    """A record of plain JSON, with every field checked against its annotation."""
    if not isinstance(data, dict):
        raise RematError(f"{what} is no JSON object but {type(data).__name__}: give what Plan.to_dict() made.")
    fields = {field.name: str(field.type) for field in dataclasses.fields(record)}  # pyright: ignore[reportArgumentType]
    wrong = sorted({*fields} ^ {str(key) for key in data})
    if wrong:
        which = ", ".join(map(repr, wrong[:3]))
        raise RematError(f"{what} lacks, or should not have, {which}: give what Plan.to_dict() made.")
    return record(**{name: _value(data[name], kind, f"{what}'s {name}") for name, kind in fields.items()})


def _value(value: Any, kind: str, what: str) -> Any:
    kind, _, optional = kind.partition(" | ")
    if value is None and optional == "None":
        return None
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        if isinstance(value, (list, tuple)):
            return tuple(_value(each, item, f"{what}[{i}]") for i, each in enumerate(value))
    elif kind in _RECORDS:
        return _read(_RECORDS[kind], value, what)
    elif kind == "float":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
    elif kind == "int":
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    elif (kind, type(value)) in (("str", str), ("bool", bool)):
        return value
    raise RematError(f"{what} is no {kind}: {str(value)[:40]!r}.")
