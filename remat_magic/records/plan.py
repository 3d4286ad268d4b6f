"""The best choice of what to save under a budget: plain data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat_magic.records.base import Displayed, Labelled
from remat_magic.records.source import SourceSpan


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """A value that a plan saves.

    ``key`` is the name that the plan gives it, ``name`` the one that the program itself gives it, or None. ``type`` is
    that of one of them as JAX writes it, empty where calls differ; ``nbytes`` are the bytes of all ``times`` together.
    ``library`` is the line of an installed package that ``source`` called, as in ``Residual``.

    ``output`` is the result's number among those of its operation, None for a value that a loop carries in. Of the
    values that one operation of one expression makes, as in equal layers, it is number ``number``, from 0, of
    ``alike``.
    """

    key: str
    nbytes: int
    times: int = 1
    type: str = ""
    primitive: str = ""
    name: str | None = None
    source: SourceSpan | None = None
    path: tuple[str, ...] = ()
    output: int | None = 0
    offloaded: bool = False
    library: SourceSpan | None = None
    number: int = 0
    alike: int = 1

    @property
    def origin(self) -> tuple[SourceSpan | None, SourceSpan | None, tuple[str, ...], str, int | None, str]:
        """What is the same for the values that one operation of one expression makes."""
        return self.source, self.library, self.path, self.primitive, self.output, self.type


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Displayed, Labelled):
    """What to save within ``budget_bytes`` so that as little as possible is recomputed.

    ``saved_bytes``, ``offloaded_bytes``, ``recomputed_flops``, ``forward_flops`` and ``peak_bytes`` are those of the
    report that JAX gives for the plan. ``of`` tells what the budget is of: bytes "saved", or the estimated "peak",
    which is as on ``peak_device``; empty where that holds values as they are. What XLA needs is to be expected between
    ``peak_low`` and ``peak_high``. ``cost`` tells what is least:
    "flops", or "seconds" on ``device``, where ``seconds`` are those of the report, recomputation and offloading
    together, and ``host_bandwidth`` is what offloading was estimated with, in bytes/s, None where nothing may be
    offloaded.

    No choice of ``names`` within the budget recomputes fewer FLOPs than ``bound``, or takes fewer seconds than
    ``bound_seconds`` where these are what is least, both as estimated. ``unreached`` tells what a policy may keep that
    no name does, and of which a bound says nothing. Equal layers that share one body are decided together, those of a
    Python loop one by one. A policy of JAX's that does better is taken instead: then ``names`` is empty and ``policy``
    its key.
    ``status`` is one sentence on how sure this is, ``code`` what to paste, empty where only
    ``plan.apply(function)`` can apply it. ``policy`` is the key that it goes by among policies, ``label`` what people
    call it ("plan within 121 MB of peak"). On a mesh ``of_devices`` tells whose the figures are, as in ``Report``.
    ``fingerprint`` tells programs of other operations apart.
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
    uncosted: tuple[str, ...] = ()
    fingerprint: str = ""
    of: str = "saved"
    cost: str = "flops"
    device: str = ""
    host_bandwidth: float | None = None
    offloaded_bytes: int = 0
    seconds: float | None = None
    bound_seconds: float | None = None
    label: str = ""
    unreached: tuple[str, ...] = ()
    peak_device: str = ""
    of_devices: str = ""
    peak_low: int | None = None
    peak_high: int | None = None

    def apart_from(self, plans: dict[str, Plan]) -> Plan:
        """The plan under a key, and a label, that no other choice among ``plans`` has, into which it is put.

        Its place is added where that tells it from the other of its key, else a number.
        """
        suffix, numbers = "", itertools.count(2)
        while (other := plans.setdefault(self.policy + suffix, self)) and (other.names, other.at) != (
            self.names,
            self.at,
        ):
            apart = f" at {self.at}"
            suffix = apart if not suffix and plans[self.policy].at != self.at else f" #{next(numbers)}"
        return dataclasses.replace(self, policy=self.policy + suffix, label=self.label + suffix) if suffix else self

    @property
    def gap(self) -> float:
        """How much of the cost a better choice could spare at most: 0 is proven best."""
        cost, bound = float(self.recomputed_flops), float(self.bound)
        if self.cost == "seconds":
            cost, bound = self.seconds or 0.0, self.bound_seconds or 0.0
        return 0.0 if cost <= bound else (cost - bound) / cost

    def apply(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """``fun`` with the plan's checkpoint: the same values and gradients, with just the plan's values saved.

        It traces at every call, for whatever shapes it is given, so wrap it in ``jax.jit``; it works under ``jit``,
        ``grad``, ``vmap`` and ``jvp``. ``fun`` is the function that the plan was made for, or one that does the same
        operations. Nothing needs to have been inspected in this process.

        Raises:
            RematError: when the function is called: it does other operations than those that the plan was made for.
        """
        from remat_magic.engine.engine import with_plan

        return with_plan(self, fun)
