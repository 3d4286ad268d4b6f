"""Plans at one place: the least recomputation within a budget of saved bytes, or what fills a peak.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from remat_magic import devices, units
from remat_magic.devices import Device
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import offloading
from remat_magic.planning.planner import FLOPS, Objective, Planner, budget_bytes, objective, planner
from remat_magic.planning.solver import GAP, NODES, Problem, Solution
from remat_magic.policies import MIXED
from remat_magic.records import Plan, RematError, Report

BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
FEW_NODES = 10
"""Of the solver's tree, where many budgets are solved for and none is to be proven best."""

_ATTEMPTS = 4  # solutions, where JAX saves more than was reckoned
_GRID = 4  # budgets of saved bytes, evenly spaced, where no plan fills the peak; twice as many where none fits
_GUESSES = 3  # budgets of saved bytes that would fill the peak by what is known of it
FILLED = 0.98
"""Of the peak that is allowed: a plan that needs as much leaves next to nothing to gain."""
CLEARLY = 0.99
"""Of what another choice costs: a plan that spares less is not worth its names."""
_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for: a budget in bytes, and what that is of; ``gap`` and ``nodes`` are the solver's.

    ``share`` is the budget as it was asked for. Peaks are as on a device that holds values as ``memory`` says.
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
    def asked(
        cls,
        facts: Facts,
        at: str | None,
        budgets: Iterable[tuple[str, float | str | None]],
        cost: str,
        device: str | Device | None,
        offload: float | str | bool | None,
        gap: float,
    ) -> Request:
        """What ``Trace.plan`` was asked for, of which the one budget that is not None is taken.

        Raises:
            RematError: there is no budget or there are several, or it is of nothing known; no such option or device.
        """
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
        """What its plan is called: the budget, and what else was asked for where that is not usual."""
        suffix = ("" if at == facts.engine.default_at else f" at {at}") + self.objective.text
        if self.of == "peak":
            return f"plan(peak {self.budget}{suffix})", f"plan within {units.nbytes(self.budget)} of peak{suffix}"
        return f"plan({self.budget}{suffix})", f"plan within {units.nbytes(self.budget)}{suffix}"


def told(facts: Facts, best: Plan, request: Request) -> Plan:
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
    """A budget in bytes, of which a share is of what there is without a checkpoint at a place, and in such a memory.

    Raises:
        RematError: it is no budget, or a share of what is not known: of a peak, or of what JAX cannot trace there.
    """

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

    Args:
        facts: of the traced function.
        plan: the other plan.
        group: the group of each value that may be saved, by the value's name.

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
    """A plan with its bound, and a sentence on how sure it is; both bound and ``cost`` are as reckoned."""
    in_seconds = plan.cost == "seconds"
    if in_seconds:  # seconds are not reckoned exactly
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
    """The best plan at a place that saves no more than the budget.

    Raises:
        RematError: more is saved whatever is chosen.
    """
    choices, limit = planner(facts, at), request.budget
    solved, solution = _solved(choices, request, choices.problem(request.objective))
    policies = [_policy(choices, request, key) for key in BUILT_IN[: None if solved is None else -1]]
    found = [*([solved] if solved else []), *(it for it in policies if it and it.saved_bytes <= limit)]
    if solved is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest, _ = _solved(choices, request, choices.problem())
        found += [fewest] if fewest else []
    if not found:
        few, keeps = units.apart(limit, facts.under("nothing_saveable", choices.at).saved_bytes)
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {keeps} of {facts.engine.primal.name} "
            f"already; raise the budget, or choose another place."
        )
    best = min(found, key=order)
    best = with_bound(best, solution.bound, solution.cost) if solution else with_bound(best, 0.0)
    return told(facts, best, request)


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
    reckoned = problem.graph.figures(solution.names, solution.offloaded)
    figures = made.saved_bytes, made.offloaded_bytes, made.recomputed_flops
    if figures == (reckoned.saved_bytes, reckoned.offloaded_bytes, reckoned.recomputed_flops):
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
    held: Callable[[Report], int | None],
    known: Iterable[Report],
    beat: float = math.inf,
    *,
    by_source: bool = False,
) -> Plan | None:
    """A plan at a place that fills a limit, by lines through what saves least there and what was tried by then.

    Args:
        facts: of the traced function.
        at: the place.
        request: what is asked for; its budget is the limit.
        held: what of a report is to stay within the limit.
        known: choices at the place; the one that saves most of those within the limit is begun with.
        beat: what another choice within the limit costs: None where no plan is found that costs clearly less.
        by_source: as for ``Planner.problem``; otherwise budgets between the least and the most are tried too, where
            none of these fills the limit: a peak need not rise evenly.
    """
    choices, limit, least = planner(facts, at), request.budget, request.objective
    problem = choices.problem(least, by_source=by_source)
    sizes = sorted((report.saved_bytes, held(report) or 0) for report in known)
    points = dict([max((size for size in sizes if size[1] <= limit), default=(0, math.inf))])
    ((saved, most),) = points.items()
    clearly = CLEARLY if by_source else 1.0
    slope = max(((needed - most) / (more - saved) for more, needed in sizes if more > saved), default=1.0)
    best: Plan | None = None

    def attempt(solution: Solution | None) -> bool:
        """Try a solution, if it is a new one that costs less."""
        nonlocal best, beat
        # Seconds are not reckoned as exactly as FLOPs.
        if solution is None or (least.device is None and solution.cost >= clearly * beat):
            return False
        plan = _applied(choices, request, problem, solution)
        report = facts.under(plan if plan.names else plan.policy, plan.at).report(request.memory)
        if (best and plan.names == best.names) or (report.saved_bytes in points and not report.offloaded_bytes):
            return False
        needed = points[report.saved_bytes] = held(report) or 0
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
