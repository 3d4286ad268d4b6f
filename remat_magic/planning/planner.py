"""What there is to choose from at one place of a traced function: the values, the graph of what saving them changes.

And which of these values a policy of JAX's saves, found by asking the policy about the operations that make them; and
what is to be least: recomputed FLOPs, or the estimated seconds that they take.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.ad_checkpoint import Offloadable, Saveable

from remat_magic import _jax, devices, units
from remat_magic.engine.engine import Dissection
from remat_magic.engine.plan_values import find_again, occurrences
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts import kernels
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import seconds, times
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.jaxprs.naming import NamedValue
from remat_magic.jaxprs.walk import walk
from remat_magic.planning.equal_layers import equal_layers
from remat_magic.planning.graph import Graph, GroupedGraph
from remat_magic.planning.graph_building import build
from remat_magic.planning.hull import Hull
from remat_magic.planning.problem import Costs, Problem
from remat_magic.policies import AS_WRITTEN, NO_CHECKPOINT, Resolved, resolve
from remat_magic.records import Plan, PlannedValue, RematError, Report, dearest

__all__ = ["INSIDE", "Objective", "Planner", "budget_bytes", "objective", "offloaded_by", "planner", "saved_by"]

INSIDE = "values inside "


class Planner:
    """The graph of a function at a place, and its values; ``most`` bytes are saved there without a checkpoint.

    Where equal layers are decided together, ``group`` tells for each value's name that of its group, by which the graph
    and all choices go. May be used from any thread: what is worked out later is stored when it is complete.
    """

    def __init__(
        self,
        facts: Facts,
        parts: Dissection,
        graph: Graph,
        separately: bool,
        most: int,
        group: Mapping[str, str] | None = None,
        values: Mapping[str, PlannedValue] | None = None,
    ) -> None:
        self.facts, self.parts, self.graph = facts, parts, graph
        self.separately, self.most, self.group = separately, most, group
        self._lock = threading.RLock()  # held while problems are set up and the hull is searched
        self._problems: dict[tuple[str, float | None], Problem] = {}
        self._values_by_name = values
        self._hull: Hull | None = None
        self._flops_without: int | None = None

    @property
    def at(self) -> str:
        """Where the policy is."""
        return self.parts.at

    @property
    def unreached(self) -> tuple[str, ...]:
        """What a policy may keep that is not among the choices: no bound is of these."""
        naming = self.parts.naming.unreached
        # Policies are asked about operations of the derivative too; under jax_remat3 they are not.
        derived = self.graph.deferred and not self.facts.engine.remat3
        return (*(f"{INSIDE}{place}" for place in naming), *(("values that only a derivative has",) * derived))

    @property
    def together(self) -> bool:
        """Whether equal layers are decided together, also those that share no body."""
        return self.group is not None

    def grouped(self, group: Mapping[str, str]) -> Planner:
        """A planner of whole groups: ``group`` tells that of each value that may be saved, by the value's name."""
        graph = GroupedGraph.of(self.graph, group)
        return Planner(self.facts, self.parts, graph, self.separately, self.most, group, self.every_value())

    def problem(self, objective: Objective | None = None) -> Problem:
        """The integer program for what is to be least, FLOPs by default."""
        objective = objective or Objective()
        with self._lock:
            problem = self._problems.get(objective.key)
            if problem is None:
                costs = objective.costs(self.graph, self.parts.backward)
                layers = () if self.together else equal_layers(self.every_value().values(), self.parts)
                problem = self._problems[objective.key] = Problem(self.graph, costs, layers)
            return problem

    def hull(self, seconds: float) -> Hull:
        """The hull of all choices for FLOPs; when first asked for, so many seconds are spent on it."""
        with self._lock:
            if self._hull is None:
                hull = Hull(self.problem())
                hull.refine(None, seconds)
                self._hull = hull
            return self._hull

    def flops_without_checkpoint(self) -> int:
        """What is recomputed without a checkpoint there, by those inside it."""
        if self._flops_without is None:
            equations = self.facts.recomputed("none", self.at)
            self._flops_without = sum(equation.flops or 0 for equation in dearest(equations))
        return self._flops_without

    def saved_by(self, key: str) -> frozenset[str] | None:
        """The names of what a policy saves, as far as they are read; None where it is not asked about values."""
        resolved = resolve(key)
        if not callable(resolved.policy):
            return None
        names = saved_by(self.facts, self.parts, resolved)
        return self.graph.used(names if self.group is None else {self.group[n] for n in names & self.group.keys()})

    def keys_of(self, plan: Plan) -> frozenset[str]:
        """The names of a plan's values here, which a program that has changed since may give other numbers."""
        keys = frozenset(value.key for value in plan.names)
        if plan.fingerprint == self.parts.naming.fingerprint:
            return keys
        return frozenset(find_again(plan, self.parts.naming, self.parts.provenances)[0].values())

    def draft(self, key: str, budget: int, values: tuple[PlannedValue, ...], label: str = "") -> Plan:
        """A plan that saves some values, with no figures yet."""
        return Plan(
            self.facts.engine.function_name,
            self.at,
            key,
            budget,
            0,
            0,
            0,
            values,
            separately=self.separately,
            together=self.together,
            fingerprint=self.parts.naming.fingerprint,
            label=label,
        )

    def values(self, names: Collection[str], offloaded: Collection[str] = ()) -> Iterator[PlannedValue]:
        """The values that names are given to, as far as they are read, in the order of the program."""
        sizes = self.graph.own_sizes(self.graph.used_gates(names))
        every = self.every_value()
        if self.group is not None:
            offloaded = {name for name, group in self.group.items() if group in offloaded}
        for value in self._values(sizes, offloaded):
            yield replace(value, number=every[value.key].number, alike=every[value.key].alike)

    def every_value(self) -> Mapping[str, PlannedValue]:
        """All values that could be saved, by name, each with its bytes where nothing else is saved."""
        if self._values_by_name is None:
            values = [*self._values(self.graph.own_sizes(self.graph.gates), ())]
            count = Counter(value.origin for value in values)
            before: Counter[Any] = Counter()
            by_name: dict[str, PlannedValue] = {}
            for value in values:
                by_name[value.key] = replace(value, number=before[value.origin], alike=count[value.origin])
                before[value.origin] += 1
            self._values_by_name = by_name  # only now that it is complete: other threads iterate over it
        return self._values_by_name

    def _values(self, sizes: Mapping[str, tuple[int, int]], offloaded: Collection[str]) -> Iterator[PlannedValue]:
        named = self.parts.naming.values
        where = occurrences(self.parts.naming, self.parts.provenances) if sizes else {}
        for key in (name for name in named if name in sizes):
            value = named[key]
            eqn, output = value.eqn, value.output
            place = self.parts.provenances.of(eqn)
            yield PlannedValue(
                key,
                *sizes[key],
                _jax.type_text(value.aval),
                _jax.primitive_name(eqn) if output is not None else "",
                value.name,
                place.source if place else None,
                place.path if place else (),
                output,
                where[key].number,
                where[key].count,
                key in offloaded,
                place.library if place else None,
            )


def planner(facts: Facts, at: str | None, separately: bool, together: bool = False) -> Planner:
    """The planner for a place of a trace, made once.

    Raises:
        RematError: as ``Engine.dissect``; equal layers cannot be decided both ``separately`` and ``together``.
    """
    if separately and together:
        raise RematError("equal layers are decided separately or together: give one of these, not both.")
    at = facts.engine.default_at if at is None else at
    key = (__name__, str(at), separately, together)
    with facts.lock:
        cached = facts.memo.get(key)
        if cached is None and together:
            plain = planner(facts, at, False)
            layers = equal_layers(plain.every_value().values(), plain.parts)
            group = {name: names[0] for names in layers for name in names}
            cached = facts.memo[key] = plain.grouped(group)
        if cached is None:
            parts = facts.engine.dissect(at, separately)
            most = facts.saved_bytes("none", at)
            cached = facts.memo[key] = Planner(facts, parts, build(parts), separately, most)
        return cached


# ---------------------------------------------------------------------------------------------- what a policy answers


def saved_by(facts: Facts, parts: Dissection, resolved: Resolved) -> frozenset[str]:
    """The names of the values that a policy keeps on the device at the place that parts are of.

    What a policy says of operations that only the derivative has (the cosine of a sine) shows in no name.
    """
    return _answered(facts, parts, resolved, lambda answer: answer is True or answer is Saveable)


def offloaded_by(facts: Facts, parts: Dissection, resolved: Resolved) -> frozenset[str]:
    """The names of the values that a policy moves to another memory."""
    return _answered(facts, parts, resolved, lambda answer: isinstance(answer, Offloadable))


_Around = tuple[tuple[str, Any], ...]  # the checkpoints around an operation, outermost first: site and policy


def _answered(facts: Facts, parts: Dissection, resolved: Resolved, is_meant: Callable[[Any], bool]) -> frozenset[str]:
    """The names of the values for which a policy gives an answer that is meant."""
    policy, values = resolved.policy, parts.naming.values
    asked: dict[tuple[int, int], Any] = {}  # once about an equation, however many values it makes
    if policy is not AS_WRITTEN and policy is not NO_CHECKPOINT:
        return frozenset(name for name, value in values.items() if _says(policy, value, is_meant, asked))
    taken_off = frozenset[str]()
    if policy is NO_CHECKPOINT:
        own = own_checkpoint(facts.engine.provenances.closed)
        at_function = frozenset() if own is None else frozenset({facts.engine.site_of(own)})
        every = frozenset(site.key for site in facts.engine.sites)
        taken_off = {"function": at_function, "sites": every}.get(parts.at, frozenset({parts.at}))
    around = _checkpoints(facts)
    names: set[str] = set()
    for name, value in values.items():
        sites = around.get(id(_jax.traceback_of(value.eqn)), ())
        written = [policy for key, policy in sites if key not in taken_off]
        # Without jax_remat3 the outermost checkpoint decides for those inside.
        if _says(written[0], value, is_meant, asked) if written else is_meant(True):
            names.add(name)
    return frozenset(names)


def _checkpoints(facts: Facts) -> Mapping[int, _Around]:
    """The checkpoints around each operation of the primal program, by the identity of its traceback."""
    checkpoints: dict[int, _Around] = {}
    for scope, eqn in walk(facts.engine.provenances.closed):
        traceback = id(_jax.traceback_of(eqn))
        if traceback not in checkpoints:
            around = [*filter(_jax.is_checkpoint, scope.around())][::-1]
            checkpoints[traceback] = tuple(
                (facts.engine.site_of(checkpoint), _jax.checkpoint_policy(checkpoint)) for checkpoint in around
            )
    return checkpoints


def _says(policy: Any, value: NamedValue, is_meant: Callable[[Any], bool], asked: dict[tuple[int, int], Any]) -> bool:
    """Whether a policy's answer is meant, of a value's operation or of the name that the program gives it."""
    if policy is None or value.output is None:
        return False
    key = (id(policy), id(value.eqn))
    if key not in asked:
        asked[key] = _jax.policy_says(policy, value.eqn)
    if is_meant(asked[key]):
        return True
    return value.name is not None and is_meant(_jax.policy_says_of_name(policy, value.aval, value.name))


# -------------------------------------------------------------------------------------------------- what is to be least


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


def budget_bytes(budget: float | str, most: Callable[[], int]) -> int:
    """The bytes of a budget; a share is of ``most``, which is asked for only then: it may be unknown."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget) if isinstance(budget, str) else None
    if percent is not None:
        budget = min(float(percent[1]) / 100, 1.0)
    if isinstance(budget, float) and 0.0 <= budget <= 1.0:
        return int(budget * most())
    return units.parse_bytes(budget, "budget")
