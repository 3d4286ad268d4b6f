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

from jax.ad_checkpoint import Saveable

from remat_magic import _jax, devices, units
from remat_magic.engine.engine import Dissection
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts import kernels
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import added, seconds
from remat_magic.jaxprs.rewriting import COMPLEX, NamedValue
from remat_magic.jaxprs.walk import LiveEquations, walk
from remat_magic.planning.graph import Graph, build
from remat_magic.planning.solver import Costs, Problem
from remat_magic.policies import AS_WRITTEN, NO_CHECKPOINT, Resolved
from remat_magic.records import Plan, PlannedValue, RematError, Report

INSIDE = "values inside "


class Planner:
    """The graph of a function at a place, and its values; ``most`` bytes are saved there without a checkpoint.

    May be used from any thread: what is worked out later is stored when it is complete.
    """

    def __init__(self, facts: Facts, parts: Dissection, graph: Graph, most: int) -> None:
        self.facts, self.parts, self.graph, self.most = facts, parts, graph, most
        self._lock = threading.RLock()  # held while problems are set up
        self._problems: dict[tuple[object, bool], Problem] = {}
        self._values_by_name: Mapping[str, PlannedValue] | None = None

    @property
    def at(self) -> str:
        """Where the policy is."""
        return self.parts.at

    @property
    def unreached(self) -> tuple[str, ...]:
        """What a policy may keep that is not among the choices: no bound is of these."""
        naming = self.parts.naming.unreached
        inside = (place if place == COMPLEX else f"{INSIDE}{place}" for place in naming)
        # Policies are asked about operations of the derivative too; under jax_remat3 they are not.
        derived = self.graph.deferred and not self.facts.engine.primal.remat3
        return (*inside, *(("values that only a derivative has",) * derived))

    def problem(self, objective: Objective | None = None, *, by_source: bool = False) -> Problem:
        """The integer program for what is to be least, FLOPs by default.

        ``by_source``: what an expression of the user's is worth is saved in all its calls, and nothing made inside one.
        """
        objective = objective or FLOPS
        with self._lock:
            problem = self._problems.get((objective.key, by_source))
            if problem is None:
                own, values = self.parts.naming.values, self.every_value() if by_source else {}
                written = {key: it for key, it in values.items() if it.source and not (it.library or own[key].in_rule)}
                last = {(it.source, it.path): it.origin for it in written.values()}
                group = {key: str(it.origin) for key, it in written.items() if last[it.source, it.path] == it.origin}
                costs = objective.costs(self.graph, self.parts.backward)
                problem = Problem(self.graph, costs, group=group if by_source else None)
                self._problems[objective.key, by_source] = problem
            return problem

    def draft(self, key: str, budget: int, values: tuple[PlannedValue, ...], label: str = "") -> Plan:
        """A plan that saves some values, with no figures yet."""
        function, fingerprint = self.facts.engine.primal.name, self.parts.naming.fingerprint
        return Plan(function, self.at, key, budget, 0, 0, 0, values, fingerprint=fingerprint, label=label)

    def values(self, names: Collection[str], offloaded: Collection[str] = ()) -> Iterator[PlannedValue]:
        """The values that names are given to, as far as they are read, in the order of the program."""
        sizes = self.graph.sizes(self.graph.run(names).gates)
        for key, value in self.every_value().items():
            if key in sizes:
                nbytes, times = sizes[key]
                yield replace(value, nbytes=nbytes, times=times, offloaded=key in offloaded)

    def every_value(self) -> Mapping[str, PlannedValue]:
        """All values that could be saved, by name, each with its bytes where nothing else is saved."""
        if self._values_by_name is None:
            sizes = self.graph.sizes(self.graph.gates)
            values = [self._value(name, *sizes[name]) for name in self.parts.naming.values if name in sizes]
            count = Counter(value.origin for value in values)
            before: Counter[Any] = Counter()
            by_name: dict[str, PlannedValue] = {}
            for value in values:
                by_name[value.key] = replace(value, number=before[value.origin], alike=count[value.origin])
                before[value.origin] += 1
            self._values_by_name = by_name  # only now that it is complete: other threads iterate over it
        return self._values_by_name

    def _value(self, key: str, nbytes: int, times: int) -> PlannedValue:
        value = self.parts.naming.values[key]
        place = self.parts.provenances.of(value.eqn)
        return PlannedValue(
            key,
            nbytes,
            times,
            _jax.type_text(value.aval),
            _jax.primitive_name(value.eqn) if value.output is not None else "",
            value.name,
            place.source if place else None,
            place.path if place else (),
            value.output,
            library=place.library if place else None,
        )


def planner(facts: Facts, at: str | None) -> Planner:
    """The planner for a place of a trace, made once.

    Raises:
        RematError: as ``Engine.dissect``.
    """
    at = facts.engine.default_at if at is None else at
    key = (__name__, str(at))
    with facts.lock:
        cached = facts.memo.get(key)
        if cached is None:
            parts = facts.engine.dissect(at)
            cached = facts.memo[key] = Planner(
                facts, parts, build(parts, facts.engine.microbatches), facts.under("none", at).saved_bytes
            )
        return cached


# ---------------------------------------------------------------------------------------------- what a policy answers

_Around = tuple[tuple[str, Any], ...]  # the checkpoints around an operation, outermost first: site and policy


def saved_by(facts: Facts, parts: Dissection, resolved: Resolved) -> frozenset[str]:
    """The names of the values that a policy keeps on the device at the place that parts are of.

    What a policy says of operations that only the derivative has (the cosine of a sine) shows in no name.
    """
    policy, values = resolved.policy, parts.naming.values
    asked: dict[tuple[int, int], bool] = {}  # once about an equation, however many values it makes
    if policy is not AS_WRITTEN and policy is not NO_CHECKPOINT:
        return frozenset(name for name, value in values.items() if _says(policy, value, asked))
    taken_off = frozenset[str]()
    if policy is NO_CHECKPOINT:
        own = own_checkpoint(facts.engine.primal.provenances.closed)
        at_function = frozenset() if own is None else frozenset({facts.engine.primal.site_of(own)})
        every = frozenset(site.key for site in facts.engine.primal.table.sites)
        taken_off = {"function": at_function, "sites": every}.get(parts.at, frozenset({parts.at}))
    around = _checkpoints(facts)
    names: set[str] = set()
    for name, value in values.items():
        sites = around.get(id(_jax.traceback_of(value.eqn)), ())
        written = [policy for key, policy in sites if key not in taken_off]
        # Without jax_remat3 the outermost checkpoint decides for those inside.
        if not written or _says(written[0], value, asked):
            names.add(name)
    return frozenset(names)


def _checkpoints(facts: Facts) -> Mapping[int, _Around]:
    """The checkpoints around each operation of the primal program, by the identity of its traceback."""
    checkpoints: dict[int, _Around] = {}
    for scope, eqn in walk(facts.engine.primal.provenances.closed):
        traceback = id(_jax.traceback_of(eqn))
        if traceback not in checkpoints:
            around = [*filter(_jax.is_checkpoint, scope.around())][::-1]
            checkpoints[traceback] = tuple(
                (facts.engine.primal.site_of(checkpoint), _jax.checkpoint_policy(checkpoint)) for checkpoint in around
            )
    return checkpoints


def _saves(answer: Any) -> bool:
    return answer is True or answer is Saveable


def _says(policy: Any, value: NamedValue, asked: dict[tuple[int, int], bool]) -> bool:
    """Whether a policy saves it, asked of a value's operation or of the name that the program gives it."""
    if policy is None or value.output is None:
        return False
    key = (id(policy), id(value.eqn))
    if key not in asked:
        asked[key] = _saves(_jax.policy_says(policy, value.eqn))
    if asked[key]:
        return True
    return value.name is not None and _saves(_jax.policy_says_of_name(policy, value.aval, value.name))


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
        return added(report, self.device) or 0.0

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


FLOPS = Objective()


def objective(cost: str, device: str | devices.Device | None, offload: float | str | bool | None) -> Objective:
    """What ``trace.plan`` was asked to make least.

    Raises:
        RematError: no such cost or device; no device is known; the device's link to the host is not known.
    """
    if cost not in ("flops", "seconds"):
        raise RematError(f"cost={cost!r} is not a cost of plans: choose 'flops' or 'seconds'.")
    if offload is None or offload is False:
        offload = None
    if cost == "flops" and offload is None:
        return FLOPS
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
