"""The search for plans at one place: the least recomputation within a budget of saved bytes, or of the estimated peak.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.buffers import PLAIN, DeviceMemory
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import offloading
from remat_magic.planning.planner import FLOPS, Objective, Planner, budget_bytes, planner
from remat_magic.planning.solver import GAP, NODES, Problem, Solution
from remat_magic.policies import MIXED
from remat_magic.records import Plan, PlannedValue, RematError, Report

_BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
FEW_NODES = 10
"""Of the solver's tree, where many budgets are solved for and none is to be proven best."""

_POLICY = re.compile(r"[^\W\d]\w*(\('[^'\\]*'(, '[^'\\]*')*\))?")  # of JAX's, or that saves some of the program's names
_ATTEMPTS = 4  # solutions, where JAX saves more than was reckoned
_GRID = 4  # budgets of saved bytes, evenly spaced, where no plan fills the peak; twice as many where none fits
_GUESSES = 3  # budgets of saved bytes that would fill the peak by what is known of it
FILLED = 0.98
"""Of the peak that is allowed: a plan that needs as much leaves next to nothing to gain."""
CLEARLY = 0.99
"""Of what another choice costs: a plan that spares less is not worth its names."""
_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."
_TIMED_OUT = "The solver met its time limit: on a faster machine it may find better."


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is asked for: a budget in bytes, and what that is of; ``gap`` and ``nodes`` are the solver's.

    Peaks are as on a device that holds values as ``memory`` says.
    """

    budget: int
    of: str = "saved"
    objective: Objective = FLOPS
    gap: float = GAP
    nodes: int = NODES
    memory: DeviceMemory = PLAIN

    def key_and_label(self, facts: Facts, at: str) -> tuple[str, str]:
        """What its plan is called: the budget, and what else was asked for where that is not usual."""
        suffix = ("" if at == facts.engine.default_at else f" at {at}") + self.objective.text
        if self.of == "peak":
            return f"plan(peak {self.budget}{suffix})", f"plan within {units.nbytes(self.budget)} of peak{suffix}"
        return f"plan({self.budget}{suffix})", f"plan within {units.nbytes(self.budget)}{suffix}"


def plan_at(
    facts: Facts,
    at: str | None,
    request: Request,
    *,
    beat: float = math.inf,
    policies: Sequence[str] = _BUILT_IN,
) -> Plan:
    """The plan at one place.

    Args:
        facts: of the traced function.
        at: the place.
        request: what is asked for.
        beat: what another choice within the peak costs: what costs as much is not looked for.
        policies: those of JAX's that are tried too.

    Raises:
        RematError: none fits, or only what costs as much as ``beat``.
    """
    choices = planner(facts, at)
    if request.of == "peak":
        best = _within_peak(choices, request, policies, beat)
    else:
        best = _within_saved(choices, request, policies)
    sentences = [best.status]
    device = request.objective.device
    if best.offloaded_bytes and offloading(facts.under(best).report(request.memory), device) != "moved":
        sentences.append(_OFFLOADED)
    if device is not None:
        report = facts.under(best if best.names else best.policy, best.at).report(request.memory)
        sentences.append(_unweighed(report, device))
    if best.timed_out:
        sentences.append(_TIMED_OUT)
    status = " ".join(filter(None, sentences))
    if choices.parts.naming.unreached:
        status = status.replace("No choice of names", "No choice of the values considered")
    code = _code(choices, best, request) if best.names else best.code
    return replace(best, status=status, code=code, unreached=choices.unreached)


def limit_of(facts: Facts, at: str, budget: float | str, of: str, memory: DeviceMemory) -> int:
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
    # Of all choices, and not of groups alone.
    bound = (choices.problem().relax(limit) if plan.of == "saved" else None) or 0.0
    return replace(
        best,
        policy=f"{plan.policy} in the source",
        label=f"{plan.label} in the source",
        budget_bytes=plan.budget_bytes,
        bound=min(int(bound), best.recomputed_flops),
        status="The best of what the source can name.",
    )


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


def known_plans(facts: Facts, request: Request, at: str | None = None) -> list[Plan]:
    """Choices whose figures JAX has given already, whoever asked, and whose peak is known; the cheapest first.

    Args:
        facts: of the traced function.
        request: what they are to be plans for. Without a link to the host nothing that is offloaded is a choice.
        at: the only place. Default: all.
    """
    with facts.lock:
        kept, by_key = _remembered(facts).values(), facts.engine.plans
        plans = [plan for plan in (*kept, *by_key.values()) if plan.names and at in (None, plan.at)]
        chosen = [(variant, variant.selection) for variant in facts.known()]
        policies = [
            variant.report(request.memory)
            for variant, of in chosen
            if _POLICY.fullmatch(of.policy) and of.policy not in by_key and at in (None, of.at)
        ]
        found = [
            *(_of_plan(facts, request, plan) for plan in plans),
            *(_of_report(request, report) for report in policies if not report.backward_error),
        ]
    link = request.objective.link
    return sorted(
        (plan for plan in found if plan.peak_bytes is not None and (link is not None or not plan.offloaded_bytes)),
        key=order,
    )


def _remembered(facts: Facts) -> dict[tuple[tuple[PlannedValue, ...], str], Plan]:
    """The plans that were traced, each under its first key, which has a report."""
    return facts.memo.setdefault(__name__, {})


def _of_report(request: Request, report: Report) -> Plan:
    """A report as a plan, without its values and with nothing said of a bound."""
    least = request.objective
    seconds = None if least.device is None else least.of(report)
    return Plan(
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
        predicted_seconds=seconds,
        label=report.label,
        of_devices=report.of_devices,
    )


def _of_plan(facts: Facts, request: Request, plan: Plan) -> Plan:
    """What another plan saves as a plan for a request, by which it is called unless its own key stands for it."""
    made = _of_report(request, facts.under(plan).report(request.memory))
    if plan.policy not in facts.engine.plans:
        policy, label = request.key_and_label(facts, plan.at)
        made = replace(made, policy=policy, label=label)
    same = ("names", "fingerprint", "unreached", "predicted_bytes", "predicted_flops", "predicted_offloaded_bytes")
    return replace(made, **{name: getattr(plan, name) for name in same})


def _with_bound(plan: Plan, bound: float) -> Plan:
    """A plan with its bound, and a sentence on how sure it is."""
    in_seconds = plan.cost == "seconds"
    if in_seconds:
        best = replace(plan, bound_seconds=min(bound, plan.predicted_seconds or 0.0))
    else:
        best = replace(plan, bound=min(int(bound), plan.recomputed_flops))
    if best.gap == 0:
        status = f"No choice of names within the budget {'takes less time' if in_seconds else 'recomputes less'}."
    else:
        expense = "the time that is added, as reckoned," if in_seconds else "what is recomputed"
        status = f"At most {max(best.gap, 0.0001):.2%} of {expense} could be spared."
    figures = best.saved_bytes, best.offloaded_bytes, best.recomputed_flops
    reckoned = best.predicted_bytes, best.predicted_offloaded_bytes, best.predicted_flops
    if best.names and figures != reckoned:
        status += " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    return replace(best, status=status)


def _unweighed(report: Report, device: Device) -> str:
    """A sentence about communication that no plan for seconds weighs, since it belongs to no value; else empty."""
    if any(kernel.inserted for kernel in (*report.forward_kernels, *report.backward_kernels)):
        return "What XLA has devices tell each other, with automatic sharding, belongs to no value and is not weighed."
    if report.communicated_bytes and device.interconnect is None:
        return f"How fast {device.name} reaches others is not known: what they tell each other counts as no time."
    return ""


# -------------------------------------------------------------------------------------------------- within saved bytes


def _within_saved(choices: Planner, request: Request, policies: Sequence[str]) -> Plan:
    """The best plan that saves no more than the budget.

    Raises:
        RematError: more is saved whatever is chosen.
    """
    facts, limit = choices.facts, request.budget
    solved, solution = _solved(choices, request, choices.problem(request.objective))
    if solved is not None:  # what saves nothing is a choice of names
        policies = [key for key in policies if key != "nothing_saveable"]
    found = [*([solved] if solved else []), *_policies(choices, request, policies)]
    if solved is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest, _ = _solved(choices, request, choices.problem())
        found += [fewest] if fewest else []
    if not found:
        few, keeps = units.apart(limit, facts.under("nothing_saveable", choices.at).saved_bytes)
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {keeps} of {facts.engine.primal.name} "
            f"already; raise the budget{_or_whole(facts, choices.at)}."
        )
    best = _with_bound(min(found, key=order), 0.0 if solution is None else solution.bound)
    return best if solution is None else replace(best, solve_seconds=solution.seconds, timed_out=solution.timed_out)


def _or_whole(facts: Facts, at: str) -> str:
    """That a plan may be made for the whole function, where that saves less and JAX can."""
    try:
        whole, here = (facts.under("nothing_saveable", place) for place in ("function", at))
        less = not whole.report().backward_error and whole.saved_bytes < here.saved_bytes
    except RematError:
        less = False
    return ", or plan for at='function'" if less else ""


def _policies(choices: Planner, request: Request, policies: Sequence[str]) -> Iterator[Plan]:
    """JAX's own policies as plans, those that save no more than the budget."""
    facts = choices.facts
    for key in policies:
        try:
            # What is saved is held at the peak. But for a device values may be narrower, or elsewhere.
            held = request.of == "saved" or request.memory == PLAIN
            variant = facts.under(key, choices.at)
            if held and variant.saved_bytes > request.budget:
                continue
            report = variant.report(request.memory)
        except RematError:  # complex values, which this JAX cannot save
            continue
        if not report.backward_error:
            yield _of_report(request, report)


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
    predicted = problem.graph.figures(solution.names, solution.offloaded)
    key, label = request.key_and_label(facts, choices.at)
    draft = replace(
        choices.draft(key, request.budget, values, label),
        predicted_bytes=predicted.saved_bytes,
        predicted_flops=predicted.recomputed_flops,
        predicted_offloaded_bytes=predicted.offloaded_bytes,
    )
    if values:
        with facts.lock:
            draft = _remembered(facts).setdefault((values, choices.at), draft)
        plan = _of_plan(facts, request, draft)
    else:
        plan = _of_report(request, facts.under("nothing_saveable", choices.at).report(request.memory))
    if request.objective.device is None:
        return plan
    seconds = choices.problem(request.objective).measure(solution.names, solution.offloaded)[1]
    return replace(plan, predicted_seconds=seconds)


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


def _within_peak(choices: Planner, request: Request, policies: Sequence[str], beat: float) -> Plan:
    """The cheapest of what is known at the place, of JAX's policies, and of plans that fill the peak.

    Raises:
        RematError: none fits; says what the least peak is that was found.
    """
    facts, limit, problem = choices.facts, request.budget, choices.problem(request.objective)
    tried = [*_policies(choices, request, policies), *known_plans(facts, request, choices.at)]
    tried = [plan for plan in tried if plan.peak_bytes is not None]
    held = operator.attrgetter("peak_bytes")

    def fits(plan: Plan) -> bool:
        return (plan.peak_bytes or 0) <= limit

    def cheapest() -> float:
        return min([beat, *(order(plan)[0] for plan in filter(fits, tried))])

    def fill(known: Iterable[Plan]) -> None:
        found = filling(facts, choices.at, request, held, known, cheapest())
        tried.extend([found] if found else [])

    fill([plan for plan in tried if not plan.names])
    if not any(FILLED * limit <= (plan.peak_bytes or 0) <= limit for plan in tried):  # a peak need not rise evenly
        least, most = (choices.graph.predict(names)[0] for names in ((), problem.names))
        most = max(least, min(most, limit)) if request.memory == PLAIN else most
        count = _GRID if cheapest() < math.inf else 2 * _GRID
        budgets = (least + (most - least) * number // count for number in range(count))
        solutions = filter(None, (problem.solve(budget, request.gap, FEW_NODES) for budget in budgets))
        beaten = cheapest() if request.objective.device is None else math.inf
        grid = [_applied(choices, request, problem, it) for it in solutions if it.cost < beaten]
        tried += grid
        fill(grid)
    best = min(filter(fits, tried), key=order, default=None)
    if best is None:
        lowest = min((plan for plan in tried if plan.peak_bytes), key=lambda plan: plan.peak_bytes or 0, default=None)
        raise no_plan(facts, f" at {choices.at!r}", request, lowest)
    bound = (problem.relax(limit) if request.memory == PLAIN else None) or 0.0
    best = _with_bound(replace(best, timed_out=any(plan.timed_out for plan in tried)), bound)
    if not best.gap:
        return best
    text = f"Of {len(tried)} choices tried it is the cheapest whose estimated peak fits; there may be a cheaper one."
    return replace(best, status=text)


def filling(
    facts: Facts,
    at: str,
    request: Request,
    held: Callable[[Report | Plan], int | None],
    known: Iterable[Report | Plan],
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
        by_source: as for ``Planner.problem``.
    """
    choices, limit, least = planner(facts, at), request.budget, request.objective
    problem = choices.problem(least, by_source=by_source)
    sizes = sorted((report.saved_bytes, held(report) or 0) for report in known)
    saved, most = max((size for size in sizes if size[1] <= limit), default=(0, math.inf))
    slope = max(((needed - most) / (more - saved) for more, needed in sizes if more > saved), default=1.0)
    points, best = {saved: most}, None
    for _ in range(_GUESSES):
        low = max((size for size, needed in points.items() if needed <= limit), default=None)
        if low is None:
            break
        high = min((size for size in points if size > low), default=None)
        rise = max(slope, 0.01) if high is None else (points[high] - points[low]) / (high - low)
        solution = problem.solve(low + int((limit - points[low]) / rise), request.gap, FEW_NODES)
        # Seconds are not reckoned as exactly as FLOPs.
        if solution is None or (least.device is None and solution.cost > CLEARLY * beat):
            break
        plan = _applied(choices, request, problem, solution)
        report = facts.under(plan if plan.names else plan.policy, plan.at).report(request.memory)
        if (best and plan.names == best.names) or (report.saved_bytes in points and not report.offloaded_bytes):
            break
        needed = points[report.saved_bytes] = held(report) or 0
        if needed <= limit and least.of(report) < CLEARLY * beat:
            best, beat = plan, least.of(report)
        if FILLED * limit <= needed <= limit:
            break
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
