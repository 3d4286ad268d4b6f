"""Plans at one place: the least recomputation within a budget of saved bytes, or what fills a peak.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.ad_checkpoint import Saveable

from remat_magic import _jax, devices, units
from remat_magic.devices import Device
from remat_magic.engine.engine import Dissection
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts import kernels
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import added, offloading, seconds
from remat_magic.jaxprs.rewriting import COMPLEX, NamedValue
from remat_magic.jaxprs.walk import LiveEquations, walk
from remat_magic.planning.graph import Graph, build
from remat_magic.planning.solver import GAP, NODES, Costs, Problem, Solution
from remat_magic.policies import AS_WRITTEN, MIXED, NO_CHECKPOINT, Resolved
from remat_magic.records import Plan, PlannedValue, RematError, Report

INSIDE = "values inside "


class Planner:
    """The graph of a function at a place, and its values.

    May be used from any thread: what is worked out later is stored when it is complete.
    """

    def __init__(self, facts: Facts, parts: Dissection) -> None:
        self.facts, self.parts, self.graph = facts, parts, build(parts, facts.engine.microbatches)
        self._lock = threading.RLock()  # locked while problems are set up
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
        # JAX calls policies with operations of the derivative too; under jax_remat3 it does not.
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
    """The planner for a place of a trace, made once."""
    at = facts.engine.default_at if at is None else at
    key = (__name__, str(at))
    with facts.lock:
        cached = facts.memo.get(key)
        if cached is None:
            cached = facts.memo[key] = Planner(facts, facts.engine.dissect(at))
        return cached


# ---------------------------------------------------------------------------------------------- what a policy answers


def saved_by(facts: Facts, parts: Dissection, resolved: Resolved) -> frozenset[str]:
    """The names of the values that a policy keeps on the device at the place that parts are of.

    What a policy says of operations that only the derivative has (the cosine of a sine) shows in no name.
    """
    policy, values = resolved.policy, parts.naming.values
    answers: dict[tuple[int, int], bool] = {}  # of a policy about an equation, however many values that makes
    if policy is not AS_WRITTEN and policy is not NO_CHECKPOINT:
        return frozenset(name for name, value in values.items() if _says(policy, value, answers))
    taken_off = frozenset[str]()
    if policy is NO_CHECKPOINT:
        own = own_checkpoint(facts.engine.primal.provenances.closed)
        at_function = frozenset() if own is None else frozenset({facts.engine.primal.site_of(own)})
        every = frozenset(site.key for site in facts.engine.primal.table.sites)
        taken_off = {"function": at_function, "sites": every}.get(parts.at, frozenset({parts.at}))
    outermost: dict[int, Any] = {}  # by the identity of an operation's traceback: the policy that decides for it
    for scope, eqn in walk(facts.engine.primal.provenances.closed):
        if (traceback := id(_jax.traceback_of(eqn))) not in outermost:
            around = [it for it in scope.around() if _jax.is_checkpoint(it)]
            written = (it for it in reversed(around) if facts.engine.primal.site_of(it) not in taken_off)
            # Without jax_remat3 the outermost checkpoint decides for those inside.
            outermost[traceback] = next(map(_jax.checkpoint_policy, written), NO_CHECKPOINT)
    names: set[str] = set()
    for name, value in values.items():
        own = outermost.get(id(_jax.traceback_of(value.eqn)), NO_CHECKPOINT)
        if own is NO_CHECKPOINT or _says(own, value, answers):
            names.add(name)
    return frozenset(names)


def _says(policy: Any, value: NamedValue, answers: dict[tuple[int, int], bool]) -> bool:
    """Whether a policy saves a value: by the operation that makes it, or by the name that the program gives it."""
    if policy is None or value.output is None:
        return False

    def saves(answer: Any) -> bool:
        return answer is True or answer is Saveable

    key = (id(policy), id(value.eqn))
    if key not in answers:
        answers[key] = saves(_jax.policy_says(policy, value.eqn))
    if answers[key] or value.name is None:
        return answers[key]
    return saves(_jax.policy_says_of_name(policy, value.aval, value.name))


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
    """The objective of ``trace.plan``: least FLOPs, or least seconds on a device."""
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
    """The bytes of a budget; a share is of ``most``, which is called only then: it may be unknown."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget) if isinstance(budget, str) else None
    if percent is not None:
        budget = min(float(percent[1]) / 100, 1.0)
    if isinstance(budget, float) and 0.0 <= budget <= 1.0:
        return int(budget * most())
    return units.parse_bytes(budget, "budget")


BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
FEW_NODES = 10
"""Of the solver's tree, where many budgets are solved for and none is to be proven best."""

_ATTEMPTS = 4  # solutions, where JAX saves more than was predicted
_GRID = 4  # budgets of saved bytes, evenly spaced, where no plan fills the peak; twice as many where none fits
_GUESSES = 3  # budgets of saved bytes that would fill the peak by what is known of it
FILLED = 0.98
"""Of the peak that is allowed: a plan that needs as much leaves next to nothing to gain."""
CLEARLY = 0.99
"""Of what another choice costs: a plan that spares less is not worth its names."""
_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a plan: a budget in bytes, and what that is of; ``gap`` and ``nodes`` are the solver's.

    ``share`` is the budget as it was given, such as ``"30%"``. Peaks are as on a device with such a ``memory``.
    """

    budget: int
    of: str = "saved"
    objective: Objective = FLOPS
    gap: float = GAP
    nodes: int = NODES
    memory: DeviceMemory = PLAIN
    share: float | str = 0
    peak_device: str = ""

    @classmethod
    def of_options(
        cls,
        facts: Facts,
        at: str | None,
        budgets: Iterable[tuple[str, float | str | None]],
        cost: str,
        device: str | Device | None,
        offload: float | str | bool | None,
        gap: float,
    ) -> Request:
        """The request of ``Trace.plan``'s options, of which the one budget that is not None is taken."""
        given = [(of, limit) for of, limit in budgets if limit is not None]
        if any(of not in ("saved", "peak") for of, _ in given):
            raise RematError(f"of={given[0][0]!r} is nothing that a budget can be of: choose 'saved' or 'peak'.")
        if len(given) != 1:
            raise RematError("a plan has one budget: give saved=, peak= or budget, as in trace.plan(peak='2 GiB').")
        if not gap >= 0:
            raise RematError(f"gap={gap!r} is no share of the cost: give 0 or more.")
        ((of, limit),) = given
        least, there = objective(cost, device, offload), None if device is None else devices.get(device)
        memory = memory_of(there)
        budget = _bytes_of(facts, at or facts.engine.default_at, limit, of, memory)
        name = there.name if there is not None and memory != PLAIN else ""
        return cls(budget, of, least, gap, memory=memory, share=limit, peak_device=name)

    def key_and_label(self, facts: Facts, at: str) -> tuple[str, str]:
        """What its plan is called: the budget, and the place and objective where these are not the usual ones."""
        suffix = ("" if at == facts.engine.default_at else f" at {at}") + self.objective.text
        if self.of == "peak":
            return f"plan(peak {self.budget}{suffix})", f"plan within {units.nbytes(self.budget)} of peak{suffix}"
        return f"plan({self.budget}{suffix})", f"plan within {units.nbytes(self.budget)}{suffix}"


def with_status(facts: Facts, best: Plan, request: Request) -> Plan:
    """A plan with what else must be known of it."""
    device = request.objective.device
    report = facts.under(best if best.names else best.policy, best.at).report(request.memory)
    moved = not best.offloaded_bytes or offloading(report, device) == "moved"
    unweighed = "" if device is None else _unweighed(report, device)
    sentences = [best.status, "" if moved else _OFFLOADED, unweighed]
    status = " ".join(filter(None, sentences))
    try:
        choices = planner(facts, best.at)
    except RematError:  # several places, or parts, of which there are no plans
        return replace(best, status=status)
    if choices.parts.naming.unreached:
        status = status.replace("No choice of names", "No choice of the values considered")
    code = _code(choices, best, request) if best.names else best.code
    return replace(best, status=status, code=code, unreached=choices.unreached)


def _bytes_of(facts: Facts, at: str, budget: float | str, of: str, memory: DeviceMemory) -> int:
    """A budget in bytes, of which a share is of what there is without a checkpoint at a place, and in such a memory."""

    def most() -> int:
        try:
            without = facts.under("none", at)
            whole = without.saved_bytes if of == "saved" else without.report(memory).peak_bytes
        except RematError as error:
            raise RematError(f"{error} Give the budget in bytes, since it is no share of that.") from error
        if whole is None:
            raise RematError(
                f"the peak of {facts.engine.primal.name} without a checkpoint is not known: give the budget in "
                "bytes, or of saved bytes."
            )
        return whole

    return budget_bytes(budget, most)


def best_of_groups(facts: Facts, plan: Plan, group: Mapping[str, str]) -> Plan | None:
    """The best plan within another's budget that saves each group of values as a whole or not at all.

    ``group`` has the group of each value that may be saved, by the value's name.

    Returns:
        The plan, or None where none saves anything.
    """
    choices = planner(facts, plan.at)
    # Of a peak that has room for what the plan saves no more is known.
    limit = plan.saved_bytes if plan.of == "peak" else plan.budget_bytes or plan.saved_bytes
    best, _ = _solved(choices, Request(limit), Problem(choices.graph, group=group))
    if best is None or not best.names:
        return None
    called = {"policy": f"{plan.policy} in the source", "label": f"{plan.label} in the source"}
    return replace(best, **called, budget_bytes=plan.budget_bytes, status="The best of what the source can name.")


# ------------------------------------------------------------------------------------------------- plans that are known


def order(plan: Plan) -> tuple[float, int, bool]:
    """What a plan costs, and its peak: the lower is preferred, and of equals what has no policy as written."""
    cost = plan.recomputed_flops if plan.seconds is None else plan.seconds
    return cost, plan.peak_bytes or 0, plan.policy == "as_written"


def called(plan: Plan) -> str:
    """What people call it, with its place."""
    if plan.policy == MIXED:
        return plan.at
    return f"{'values that were chosen' if plan.names else plan.policy} at {plan.at}"


def as_plan(facts: Facts, request: Request, report: Report) -> Plan:
    """A report as a plan for a request, by which it is called unless its own key stands for it."""
    plan, least = facts.engine.plans.get(report.policy), request.objective
    seconds = None if least.device is None else least.of(report)
    made = Plan(
        report.function,
        report.at,
        report.policy,
        request.budget,
        report.saved_bytes,
        report.recomputed_flops,
        0,
        code=report.code,
        forward_flops=report.forward_flops,
        peak_bytes=report.peak_bytes,
        peak_low=report.peak_low,
        peak_high=report.peak_high,
        uncosted=report.uncosted,
        of=request.of,
        cost=least.cost,
        device="" if least.device is None else least.device.name,
        host_bandwidth=least.link,
        offloaded_bytes=report.offloaded_bytes,
        seconds=seconds,
        label=report.label,
        of_devices=report.of_devices,
        peak_device=request.peak_device,
    )
    return made if plan is None else _like(made, plan)


def _like(made: Plan, plan: Plan) -> Plan:
    """A plan with the values of another one, and what was said of them."""
    same = ("names", "fingerprint", "unreached", "status")
    return replace(made, **{name: getattr(plan, name) for name in same})


def with_bound(plan: Plan, bound: float, cost: float | None = None) -> Plan:
    """A plan with its bound, and a sentence on how sure it is; both bound and ``cost`` are as predicted."""
    in_seconds = plan.cost == "seconds"
    if in_seconds:  # seconds are not predicted exactly
        seconds = plan.seconds or 0.0
        best = replace(plan, bound_seconds=seconds * min(bound / cost, 1.0) if cost else seconds)
    else:
        best = replace(plan, bound=min(int(bound), plan.recomputed_flops))
    if best.gap == 0:
        status = f"No choice of names within the budget {'takes less time' if in_seconds else 'recomputes less'}."
    else:
        would, less = ("add", "less time, by the estimates") if in_seconds else ("recompute", "less")
        status = f"The best choice of names would {would} at most {max(best.gap, 0.0001):.2%} {less}."
    return replace(best, status=" ".join(filter(None, (status, plan.status))))


def _unweighed(report: Report, device: Device) -> str:
    """A sentence about communication that no plan for seconds weighs, since it belongs to no value; else empty."""
    if any(kernel.inserted for kernel in (*report.forward_kernels, *report.backward_kernels)):
        return "Communication that XLA inserts, with automatic sharding, belongs to no value: the plan ignores it."
    if report.communicated_bytes and device.interconnect is None:
        return f"The bandwidth from {device.name} to other devices is not known: communication counts as no time."
    return ""


# -------------------------------------------------------------------------------------------------- within saved bytes


def within_saved(facts: Facts, at: str, request: Request) -> Plan:
    """The best plan at a place that saves no more than the budget."""
    choices, limit = planner(facts, at), request.budget
    solved, solution = _solved(choices, request, choices.problem(request.objective))
    policies = [_policy(choices, request, key) for key in BUILT_IN[: None if solved is None else -1]]
    found = [*([solved] if solved else []), *(it for it in policies if it and it.saved_bytes <= limit)]
    if solved is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest, _ = _solved(choices, request, choices.problem())
        found += [fewest] if fewest else []
    if not found:
        few, least_bytes = units.apart(limit, facts.under("nothing_saveable", choices.at).saved_bytes)
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {least_bytes} of {facts.engine.primal.name} "
            f"already; raise the budget, or choose another place."
        )
    best = min(found, key=order)
    best = with_bound(best, solution.bound, solution.cost) if solution else with_bound(best, 0.0)
    return with_status(facts, best, request)


def _policy(choices: Planner, request: Request, key: str) -> Plan | None:
    """A policy of JAX's as a plan; None where it cannot be."""
    try:
        report = choices.facts.under(key, choices.at).report(request.memory)
    except RematError:  # complex values, which this JAX cannot save
        return None
    return None if report.backward_error else as_plan(choices.facts, request, report)


def _solved(choices: Planner, request: Request, problem: Problem) -> tuple[Plan | None, Solution | None]:
    """The best choice of names within a budget of saved bytes that was found, and the first solution."""
    allowed, first = request.budget, None
    for _ in range(_ATTEMPTS):
        solution = problem.solve(allowed, request.gap, request.nodes)
        if solution is None:
            break
        first = first or solution
        plan = _applied(choices, request, problem, solution)
        if plan.saved_bytes <= request.budget:
            return plan, first
        # JAX saves more than was predicted: leave that much room.
        allowed = max(allowed - (plan.saved_bytes - request.budget), choices.graph.predict(())[0])
    return None, first


def _applied(choices: Planner, request: Request, problem: Problem, solution: Solution) -> Plan:
    """The plan of a solution, with the figures of the report that JAX gives for it."""
    facts, values = choices.facts, tuple(choices.values(solution.names, solution.offloaded))
    if not values:
        return as_plan(facts, request, facts.under("nothing_saveable", choices.at).report(request.memory))
    key, label = request.key_and_label(facts, choices.at)
    draft = choices.draft(key, request.budget, values, label)
    report = facts.under(draft).report(request.memory)
    made = _like(as_plan(facts, request, replace(report, policy=key, label=label)), draft)
    predicted = problem.graph.figures(solution.names, solution.offloaded)
    figures = made.saved_bytes, made.offloaded_bytes, made.recomputed_flops
    if figures == (predicted.saved_bytes, predicted.offloaded_bytes, predicted.recomputed_flops):
        return made
    return replace(made, status="JAX's figures, which are shown, differ from those that the plan was made by.")


def _code(choices: Planner, plan: Plan, request: Request) -> str:
    """What to paste if the program's own names do the same as a plan's."""
    if any(value.name is None or value.offloaded for value in plan.names):
        return ""
    own = sorted({value.name for value in plan.names if value.name})
    variant = choices.facts.under(f"save_only_these_names({', '.join(map(repr, own))})", choices.at)
    named = variant.report(request.memory)
    same = (named.saved_bytes, named.recomputed_flops) == (plan.saved_bytes, plan.recomputed_flops)
    return named.code if same else ""


# ------------------------------------------------------------------------------------------------------- within a peak


def filling(
    facts: Facts,
    at: str,
    request: Request,
    bytes_of: Callable[[Report], int | None],
    known: Iterable[Report],
    beat: float = math.inf,
    *,
    by_source: bool = False,
) -> Plan | None:
    """A plan at a place that fills a limit, by lines through what saves least there and what was tried by then.

    Args:
        facts: of the traced function.
        at: the place.
        request: its budget is the limit.
        bytes_of: what of a report is to stay within the limit.
        known: choices at the place; the one that saves most of those within the limit is begun with.
        beat: what another choice within the limit costs: None where no plan is found that costs clearly less.
        by_source: as for ``Planner.problem``; otherwise budgets between the least and the most are tried too, where
            none of these fills the limit: a peak need not rise evenly.
    """
    choices, limit, least = planner(facts, at), request.budget, request.objective
    problem = choices.problem(least, by_source=by_source)
    sizes = sorted((report.saved_bytes, bytes_of(report) or 0) for report in known)
    points = dict([max((size for size in sizes if size[1] <= limit), default=(0, math.inf))])
    ((saved, most),) = points.items()
    clearly = CLEARLY if by_source else 1.0
    slope = max(((needed - most) / (more - saved) for more, needed in sizes if more > saved), default=1.0)
    best: Plan | None = None

    def attempt(solution: Solution | None) -> bool:
        """Try a solution, if it is a new one that costs less."""
        nonlocal best, beat
        # Seconds are not predicted as exactly as FLOPs.
        if solution is None or (least.device is None and solution.cost >= clearly * beat):
            return False
        plan = _applied(choices, request, problem, solution)
        report = facts.under(plan if plan.names else plan.policy, plan.at).report(request.memory)
        if (best and plan.names == best.names) or (report.saved_bytes in points and not report.offloaded_bytes):
            return False
        needed = points[report.saved_bytes] = bytes_of(report) or 0
        if needed <= limit and least.of(report) < clearly * beat:
            best, beat = plan, least.of(report)
        return True

    def is_filled() -> bool:
        return any(FILLED * limit <= needed <= limit for needed in points.values())

    def guess() -> None:
        for _ in range(_GUESSES):
            low = max((size for size, needed in points.items() if needed <= limit), default=None)
            if low is None or is_filled():
                return
            high = min((size for size in points if size > low), default=None)
            rise = max(slope, 0.01) if high is None else (points[high] - points[low]) / (high - low)
            budget = low + int((limit - points[low]) / rise) if rise else low
            if not attempt(problem.solve(budget, request.gap, FEW_NODES)):
                return

    guess()
    if not by_source and not is_filled():
        lowest, highest = (choices.graph.predict(names)[0] for names in ((), problem.names))
        highest = max(lowest, min(highest, limit)) if request.memory == PLAIN else highest
        count = _GRID if beat < math.inf else 2 * _GRID
        for number in range(count):
            budget = lowest + (highest - lowest) * number // count
            attempt(problem.solve(budget, request.gap, FEW_NODES))
        guess()
    return best


def no_plan(facts: Facts, where: str, request: Request, lowest: Plan | None) -> RematError:
    """Says that no plan fits, and what the least peak is that was found."""
    name = facts.engine.primal.name
    if lowest is None:
        return RematError(f"the peak of {name} is not known: give a budget of saved bytes.")
    few, least = units.apart(request.budget, lowest.peak_bytes or 0)
    in_update = facts.under(lowest if lowest.names else lowest.policy, lowest.at).report(request.memory).in_update
    return RematError(
        f"No plan{where} keeps the estimated peak of {name} within {few}: the least found is {least} "
        f"({called(lowest)}); raise the budget.{f' {in_update}' if in_update else ''}"
    )
