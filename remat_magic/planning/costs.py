"""What a plan is to make least, within which budget: recomputed FLOPs, or the estimated seconds that they take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import devices, units
from remat_magic.facts import kernels
from remat_magic.facts.times import seconds, times
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.planning.graph import Graph
from remat_magic.records import RematError, Report

__all__ = ["Costs", "Objective", "budget_bytes", "objective"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What is to be least: a cost for each node of a graph, and one for each byte that is offloaded.

    ``transfer`` is None where nothing may be offloaded. ``whole`` tells that all costs are whole numbers, as FLOPs are.
    """

    nodes: Sequence[float]
    transfer: float | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Objective:
    """FLOPs (no ``device``) or seconds on a device; ``link`` is the bandwidth to the host, None: nothing goes there."""

    device: devices.Device | None = None
    link: float | None = None

    @property
    def cost(self) -> str:
        """What a plan calls it."""
        return "flops" if self.device is None else "seconds"

    @property
    def key(self) -> tuple[str, float | None]:
        """Equal for equal objectives."""
        return ("" if self.device is None else self.device.name, self.link)

    @property
    def text(self) -> str:
        """What distinguishes the key of its plans: empty for FLOPs."""
        if self.device is None:
            return ""
        return f", seconds on {self.device.name}" + ("" if self.link is None else f", offload at {self.link:g} B/s")

    def of(self, report: Report) -> float:
        """The cost of a report: its recomputed FLOPs, or the seconds that its policy adds."""
        if self.device is None:
            return report.recomputed_flops
        return times(report, self.device).extra

    def costs(self, graph: Graph, backward: Any) -> Costs:
        """The costs of a graph's nodes.

        The seconds of an operation are those of its share of the kernel that it would be in if all were recomputed;
        what is saved changes the kernels, so that the sum over a choice is near the report's estimate, and not equal.
        """
        if self.device is None:
            return Costs(graph.flops)
        shares = kernels.shares(backward, LiveEquations(backward.jaxpr), graph.type_of)
        nodes = [
            seconds(
                [replace(shares[id(eqn)], times=runs) for eqn, runs in operations if id(eqn) in shares], self.device
            )[0]
            for operations in graph.operations
        ]
        # There and back: twice over the link.
        return Costs(nodes, None if self.link is None else 2 / self.link, whole=False)


def objective(cost: str, device: str | devices.Device | None, offload: float | str | bool | None) -> Objective:
    """What ``trace.plan`` was asked to make least.

    Raises:
        RematError: no such cost or device; no device is known; the device's link to the host is not known.
    """
    if cost not in ("flops", "seconds"):
        raise RematError(f"cost={cost!r} is nothing that a plan can make least: choose 'flops' or 'seconds'.")
    if offload is None or offload is False:
        offload = None
    if cost == "flops" and offload is None:
        return Objective()
    device = devices.default() if device is None else devices.get(device)
    if device is None:
        raise RematError("The device that JAX runs on is not known here: name one by device=, or register it.")
    if offload is None:
        return Objective(device)
    if offload is True:
        link = device.host_bandwidth
        if link is None:
            raise RematError(f"How fast {device.name} reaches the host is not known: give offload= in bytes/s.")
    else:
        text = offload.strip().removesuffix("/s") if isinstance(offload, str) else offload
        link = float(units.parse_bytes(text, "offload"))
        if not link:
            raise RematError("offload=0 bytes/s moves nothing: give the bandwidth to the host, or leave offload out.")
    return Objective(replace(device, host_bandwidth=link), link)


def budget_bytes(budget: float | str, most: int) -> int:
    """The bytes of a budget, of which ``most`` is the whole."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget) if isinstance(budget, str) else None
    if percent is not None:
        budget = min(float(percent[1]) / 100, 1.0)
    if isinstance(budget, float) and 0.0 <= budget <= 1.0:
        return int(budget * most)
    return units.parse_bytes(budget, "budget")
