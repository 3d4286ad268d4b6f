"""The search for plans at one place: the least recomputation within a budget of saved bytes, or of the estimated peak.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import communicating, offloading
from remat_magic.planning.planner import Objective, Planner, budget_bytes, objective, planner
from remat_magic.planning.solver import GAP, NODES, Problem, Solution
from remat_magic.policies import MIXED
from remat_magic.records import FrontierPoint, Kernel, Listed, Plan, PlannedValue, RematError, Report
from remat_magic.records.plan_file import is_policy

__all__ = [
    "BUILT_IN",
    "FEW_NODES",
    "Choice",
    "best_of_groups",
    "built_in",
    "frontier",
    "known_choices",
    "limit_of",
    "order",
    "plan_at",
    "plan_of",
]

BUILT_IN = (
    "none",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)
FEW_NODES = 10
"""Of the solver's tree, where many budgets are solved for and none is to be proven best."""

_BEYOND_NAMES = ("none", "everything_saveable")  # these keep what no name reaches
_ATTEMPTS = 4  # solutions, where JAX saves more than was reckoned
_TRIED = 4  # names, whose subsets are tried where a policy reaches further by them
_GRID = 4  # budgets of saved bytes tried at first, evenly spaced, since a peak need not rise with what is saved
_STEPS = 4  # halvings of the interval in which the last plan lies that fits
_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."
_TIMED_OUT = "The solver met its time limit: on a faster machine it may find better."


@dataclass(frozen=True, slots=True)
class _Request:
    """What a plan is asked for; ``key`` and ``label`` are what it is called."""

    key: str
    label: str
    budget: int
    objective: Objective
    of: str = "saved"
    gap: float = GAP


def plan_at(
    facts: Facts,
    at: str | None,
    budget: float | str,
    of: str = "saved",
    *,
    cost: str = "flops",
    device: str | Device | None = None,
    offload: float | str | bool | None = None,
    gap: float = GAP,
    nodes: int = NODES,
    beat: float | None = None,
    policies: Sequence[str] = BUILT_IN,
) -> Plan:
    """The plan at one place; all else is as for ``Trace.plan``.

    With ``beat``, what another choice costs within a peak, plans that cost more are not looked for. The ``policies`` of
    JAX's are tried too within saved bytes, and the solver's tree has so many ``nodes`` at most.
    """
    least = objective(cost, device, offload)
    choices = planner(facts, at)
    limit = limit_of(facts, choices.at, budget, of)
    request = _Request(*_key_and_label(facts, choices.at, limit, least, of), limit, least, of, gap)
    if of == "peak":
        best = _PeakSearch(choices, request, beat).result()
    else:
        best = _within_saved(choices, request, limit, choices.problem(least), nodes=nodes, policies=policies)
    if best is None:
        few, keeps = units.apart(limit, facts.saved_bytes("nothing_saveable", choices.at))
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {keeps} of {facts.engine.function_name} "
            "already; raise the budget, or plan for at='function'."
        )
    if best.names:
        _remember(facts, best)
    sentences = [best.status]
    if best.offloaded_bytes and offloading(facts.report(best), least.device) != "moved":
        sentences.append(_OFFLOADED)
    if least.device is not None:
        sentences.append(_unweighed(facts, best, least.device))
    if best.timed_out:
        sentences.append(_TIMED_OUT)
    status = " ".join(filter(None, sentences))
    if choices.parts.naming.unreached:
        status = status.replace("No choice of names", "No choice of the values considered")
    return replace(best, status=status, unreached=choices.unreached)


def limit_of(facts: Facts, at: str, budget: float | str, of: str) -> int:
    """A budget in bytes, of which a share is of what there is without a checkpoint at a place.

    Raises:
        RematError: it is no budget, or a share of what is not known: of a peak, or of what JAX cannot trace there.
    """

    def most() -> int:
        try:
            whole = facts.saved_bytes("none", at) if of == "saved" else facts.report("none", at).peak_bytes
        except RematError as error:
            raise RematError(f"{error} Give the budget in bytes, since it is no share of that.") from error
        if whole is None:
            raise RematError(
                f"the peak of {facts.engine.function_name} without a checkpoint is not known: give the budget in "
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
    request = _Request(f"{plan.policy} in the source", f"{plan.label} in the source", plan.budget_bytes, Objective())
    best = _within_saved(choices, request, limit, Problem(choices.graph, group=group), names_only=True)
    if best is None or not best.names:
        return None
    # Of all choices, and not of groups alone.
    bound = (choices.problem().relax(limit) if plan.of == "saved" else None) or 0.0
    return replace(best, bound=min(int(bound), best.recomputed_flops), status="The best of what the source can name.")


def frontier(facts: Facts, points: int = 10, at: str | None = None) -> Listed[FrontierPoint]:
    """``Trace.frontier``."""
    if points < 2:
        raise RematError(f"a frontier has two points or more, not {points}.")
    choices = planner(facts, at)
    problem, found = choices.problem(), list[FrontierPoint]()
    least, _ = choices.graph.predict(())
    most = max(choices.most, least)
    for number in range(points):
        budget = least + (most - least) * number // (points - 1)
        solution = problem.solve(budget, nodes=FEW_NODES)
        if solution is None:
            continue
        costs = [(int(solution.cost), solution.saved_bytes)]
        if found:  # what fits a smaller budget fits a larger one
            costs.append((found[-1].recomputed_flops, found[-1].saved_bytes))
        if choices.most <= budget:  # autodiff without a checkpoint may keep what no name reaches
            costs.append((choices.flops_without_checkpoint(), choices.most))
        flops, saved = min(costs)
        found.append(FrontierPoint(budget, saved, flops, int(min(solution.bound, flops)), choices.unreached))
    return Listed(found)


# ----------------------------------------------------------------------------------------------- choices that are known


@dataclass(frozen=True, slots=True)
class Choice:
    """A report, and the plan whose values are saved, None where a policy decides."""

    report: Report
    plan: Plan | None = None

    @property
    def peak(self) -> int:
        """The estimated peak, in bytes."""
        return self.report.peak_bytes or 0

    @property
    def text(self) -> str:
        """What people call it, with its place."""
        if self.report.policy == MIXED:
            return self.report.at
        return f"{'values that were chosen' if self.plan else self.report.policy} at {self.report.at}"

    def order(self, least: Objective) -> tuple[float, int, bool]:
        """What it costs, and its peak: of two the lower is preferred, and of equals what has no policy as written."""
        return least.of(self.report), self.peak, self.report.policy == "as_written"


def _remember(facts: Facts, plan: Plan) -> None:
    """Let a plan be a choice from now on, whatever is asked for next."""
    with facts.lock:
        remembered = facts.on(None).memo.setdefault(__name__, {})
        remembered.setdefault((plan.names, plan.at), plan)  # by its first key, which has a report


def known_choices(facts: Facts, least: Objective, *, at: str | None = None) -> list[Choice]:
    """Choices whose figures JAX has given already, whoever asked, and whose peak is known; the cheapest first.

    Args:
        facts: of the traced function; peaks are as on their device.
        least: what is to be least. Without a link to the host nothing that is offloaded is a choice.
        at: the only place. Default: all.
    """
    with facts.lock:
        plans = [*facts.on(None).memo.get(__name__, {}).values(), *facts.engine.plans.values()]
        plans = [plan for plan in plans if plan.names and at in (None, plan.at)]
        policies = [
            (policy, place)
            for policy, place in facts.known()
            if is_policy(policy) and policy not in facts.engine.plans and at in (None, place)
        ]
        choices = [Choice(facts.report(plan), plan) for plan in plans]
        choices += [Choice(facts.report(policy, place)) for policy, place in policies]
    eligible = (choice for choice in choices if _is_eligible(choice.report, least))
    return sorted(eligible, key=lambda choice: choice.order(least))


def built_in(facts: Facts, places: Iterable[str], least: Objective) -> Iterator[Choice]:
    """JAX's own policies at places, those whose report is not known yet."""
    sites = {site.key for site in facts.engine.sites}
    for at in places:
        for policy in BUILT_IN:
            if policy == "none" and at not in (*sites, "sites", "function"):
                continue  # there is no checkpoint to take off
            try:
                if facts.cached(policy, at) is None and _is_eligible(report := facts.report(policy, at), least):
                    yield Choice(report)
            except RematError:  # complex values, which this JAX cannot save
                continue


def _is_eligible(report: Report, least: Objective) -> bool:
    """Whether it is complete, and nothing goes to the host that must not."""
    offloads = report.offloaded_bytes and least.link is None
    return report.peak_bytes is not None and not report.backward_error and not offloads


# ----------------------------------------------------------------------------------------------------- plans as records


def plan_of(facts: Facts, choice: Choice, limit: int, least: Objective, of: str) -> Plan:
    """A choice as a plan within so many bytes, by which it is called unless it stands in a table by its own key."""
    report, plan = choice.report, choice.plan
    plain = _of_report(report, _Request(report.policy, report.label, limit, least, of))
    if plan is None:
        return plain
    if report.policy not in facts.engine.plans:
        policy, label = _key_and_label(facts, plan.at, limit, least, of)
        plain = replace(plain, policy=policy, label=label)
    same = ("names", "fingerprint", "unreached", "predicted_bytes", "predicted_flops")
    return replace(plain, **{name: getattr(plan, name) for name in same})


def _key_and_label(facts: Facts, at: str, limit: int, least: Objective, of: str) -> tuple[str, str]:
    """The key of a plan, and its label: its budget, and what else was asked for where that is not usual."""
    suffix = ("" if at == facts.engine.default_at else f" at {at}") + least.text
    if of == "peak":
        return f"plan(peak {limit}{suffix})", f"plan within {units.nbytes(limit)} of peak{suffix}"
    return f"plan({limit}{suffix})", f"plan within {units.nbytes(limit)}{suffix}"


def _of_report(report: Report, request: _Request) -> Plan:
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


def _with_bound(applied: Plan, bound: float, spent: float, timed_out: bool) -> Plan:
    """A plan with its bound, and a sentence on how sure it is."""
    in_seconds = applied.cost == "seconds"
    best = replace(applied, solve_seconds=spent, timed_out=timed_out)
    if in_seconds:
        best = replace(best, bound_seconds=min(bound, applied.predicted_seconds or 0.0))
    else:
        best = replace(best, bound=min(int(bound), applied.recomputed_flops))
    exact = (best.saved_bytes, best.offloaded_bytes, best.recomputed_flops) == (
        best.predicted_bytes,
        best.predicted_offloaded_bytes,
        best.predicted_flops,
    )
    departs = "" if exact else " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    if best.gap == 0:
        gain = "takes less time, as reckoned" if in_seconds else "recomputes less"
        return replace(best, status=f"No choice of names within the budget {gain}.{departs}")
    expense = "the time that is added, as reckoned," if in_seconds else "what is recomputed"
    return replace(best, status=f"At most {max(best.gap, 0.0001):.2%} of {expense} could be spared.{departs}")


def order(candidate: Plan) -> tuple[float, int]:
    """What a plan costs, and its peak: of two plans the lower is preferred."""
    cost = candidate.recomputed_flops if candidate.seconds is None else candidate.seconds
    return cost, candidate.peak_bytes or 0


def _unweighed(facts: Facts, plan: Plan, device: Device) -> str:
    """A sentence about communication that a plan does not weigh; empty where it does, or where there is none.

    What XLA inserts follows from the whole program, and belongs to no value: it is told of the finished plan.
    """
    report = facts.report(plan)
    now, before = (_inserted(weighed) for weighed in (report, facts.report("none", plan.at)))
    if not now and not before:
        sends = report.communicated_bytes and device.interconnect is None
        if not sends:
            return ""
        return f"How fast {device.name} reaches others is not known: what they tell each other counts as no time."
    sentence = "What XLA has devices tell each other, with automatic sharding, belongs to no value and is not weighed"
    if not all(kernel.known for kernel in (*now, *before)):
        return f"{sentence}."
    added_bytes = sum(kernel.bytes for kernel in now) - sum(kernel.bytes for kernel in before)
    took = communicating(now, device), communicating(before, device)
    if not added_bytes:
        return f"{sentence}: with this plan it is as much as without a checkpoint."
    than = "more" if added_bytes > 0 else "less"
    sentence += f": with this plan XLA gives {units.nbytes(abs(added_bytes))} {than} than without one"
    if took[0] is None or took[1] is None:
        return f"{sentence}, which takes an unknown time."
    longer = took[0] - took[1]
    # Each time is the least that the links allow, and more bytes need not be more that is sent.
    return f"{sentence}, by the links' speed {units.seconds(abs(longer))} {'longer' if longer >= 0 else 'shorter'}."


def _inserted(report: Report) -> list[Kernel]:
    """What XLA has devices tell each other in both halves."""
    return [kernel for kernel in (*report.forward_kernels, *report.backward_kernels) if kernel.inserted]


# -------------------------------------------------------------------------------------------------- within saved bytes


def _within_saved(
    choices: Planner,
    request: _Request,
    limit: int,
    problem: Problem,
    *,
    nodes: int = NODES,
    names_only: bool = False,
    policies: Sequence[str] = BUILT_IN,
    worth: Callable[[Solution], bool] = lambda solution: True,
) -> Plan | None:
    """The best plan that saves at most ``limit`` bytes, None where more is saved whatever is chosen.

    With ``names_only`` it is a choice of names even where a policy of JAX's costs less; the ``policies`` are those that
    are looked at. What is not ``worth`` it is not traced, and None is returned.
    """
    as_names, other_keys = ([], []) if names_only else _built_in_within(choices, limit, problem, policies)
    best: Plan | None = None
    bound, spent, allowed, timed_out = 0.0, 0.0, limit, False
    for attempt in range(_ATTEMPTS):
        solution = problem.solve(allowed, request.gap, nodes)
        if solution is None:
            break
        spent += solution.seconds
        timed_out |= solution.timed_out
        if attempt == 0:
            bound = solution.bound
            # The solver stops within its gap: a policy of JAX's may be the better choice of names.
            solution = min([solution, *as_names], key=lambda choice: choice.cost)
        if not worth(solution):
            return None
        applied = _applied(choices, request, solution)
        if applied.saved_bytes <= limit:
            best = _with_bound(applied, bound, spent, timed_out)
            break
        if not solution.names:
            break
        # JAX saves more than was predicted: leave that much room.
        allowed = max(allowed - (applied.saved_bytes - limit), choices.graph.predict(())[0])
    if best is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest = choices.problem().solve(limit, request.gap, nodes)
        other = None if fewest is None else _applied(choices, request, fewest)
        if other is not None and other.saved_bytes <= limit and (other.seconds or 0) < (best.seconds or 0):
            cost = problem.measure(fewest.names)[1] if fewest is not None else 0.0
            best = _with_bound(replace(other, predicted_seconds=cost), bound, spent, timed_out)
    for key in other_keys:
        best = _better(choices, key, request, best, bound)
    return best


def _built_in_within(
    choices: Planner, limit: int, problem: Problem, policies: Sequence[str]
) -> tuple[list[Solution], list[str]]:
    """Those of JAX's own policies that stay within the limit: as choices of names, and keys of the others."""
    as_names: list[Solution] = []
    others: list[str] = []
    own_names = _own_names(choices)
    for key in (*policies, *own_names):
        try:
            saved = choices.facts.saved_bytes(key, choices.at)
        except RematError:  # complex values, which this JAX cannot save
            continue
        if saved > limit:
            continue
        names = None if key in own_names else choices.saved_by(key)
        exact = names is not None and choices.graph.predict(names)[0] == saved
        if names is not None and exact:
            as_names.append(Solution(names, saved, problem.measure(names)[1]))
        if key in _BEYOND_NAMES or not exact:
            others.append(key)
    return as_names, others


def _own_names(choices: Planner) -> list[str]:
    """The policies that save some of the program's own names, where these reach what a plan's names do not.

    Inside the branches of a conditional JAX keeps a value by its name. Of many names only the hidden ones are tried.
    """
    naming, names = choices.parts.naming, choices.facts.engine.names
    if not naming.unreached or choices.facts.engine.remat3:
        return []
    if len(names) > _TRIED:
        reached = {value.name for value in naming.values.values()}
        names = [name for name in names if name not in reached][:_TRIED]
    subsets = (subset for count in range(1, len(names) + 1) for subset in itertools.combinations(names, count))
    return [f"save_only_these_names({', '.join(map(repr, subset))})" for subset in subsets]


def _applied(choices: Planner, request: _Request, solution: Solution) -> Plan:
    """The plan of a solution, with the figures of the report that JAX gives for it."""
    values = tuple(choices.values(solution.names, solution.offloaded))
    draft = choices.draft(request.key, request.budget, values, request.label)
    report = choices.facts.report(draft if values else "nothing_saveable", None if values else choices.at)
    figures = choices.graph.figures(solution.names, solution.offloaded)
    applied = replace(
        _of_report(report, request),
        predicted_bytes=figures.saved_bytes,
        predicted_flops=figures.recomputed_flops,
        predicted_offloaded_bytes=figures.offloaded_bytes,
        predicted_seconds=None if request.objective.device is None else solution.cost,
    )
    if not values:
        return applied
    return replace(applied, names=values, fingerprint=draft.fingerprint, code=_code(choices, report, values))


def _code(choices: Planner, report: Report, values: tuple[PlannedValue, ...]) -> str:
    """What to paste if the program's own names do the same."""
    if any(value.name is None or value.offloaded for value in values):
        return ""
    own = sorted({value.name for value in values if value.name})
    named = choices.facts.report(f"save_only_these_names({', '.join(map(repr, own))})", choices.at)
    same = (named.saved_bytes, named.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
    return named.code if same else ""


def _better(choices: Planner, key: str, request: _Request, best: Plan | None, bound: float) -> Plan | None:
    """The plan of a policy of JAX's, if it costs less than the best so far."""
    least = None if best is None else order(best)[0]
    if least == 0:
        return best
    report = choices.facts.report(key, choices.at)
    if report.backward_error or (least is not None and request.objective.of(report) >= least):
        return best
    gain = "recomputes less" if request.objective.device is None else "takes less time"
    text = f"{key} {gain} within the budget than any choice of names that was found."
    better = replace(_of_report(report, request), status=text)
    if best is not None:
        better = replace(better, solve_seconds=best.solve_seconds, timed_out=best.timed_out)
    if better.seconds is None:
        return replace(better, bound=min(int(bound), report.recomputed_flops))
    return replace(better, bound_seconds=min(bound, better.seconds))


# ------------------------------------------------------------------------------------------------------- within a peak


class _PeakSearch:
    """The cheapest plan found whose report has an estimated peak of at most ``request.budget`` bytes.

    Where peaks rise with the bytes saved, the largest budget that fits is between one that does and the next that does
    not. They need not: what is known already, JAX's own policies and a few evenly spaced budgets are tried first, those
    that cost least before the others. Each candidate is judged by the report that JAX gives for it; those that cannot
    win are not traced: they save more than the peak may be, or cost more than the best, or than ``beat``.
    """

    def __init__(self, choices: Planner, request: _Request, beat: float | None) -> None:
        self._choices, self._request = choices, request
        self._problem = choices.problem(request.objective)
        self._beat = math.inf if beat is None else beat
        self._best: Plan | None = None
        self._lowest: Plan | None = None
        self._tried = 0
        self._timed_out = False
        self._prunes = True
        self._verdict: bool | None = None  # of a solution that was not traced, whether its peak is taken to fit
        self._costs: dict[int, float] = {}  # of what was found for a budget
        self._beyond = 0  # what the peak of the last plan that was traced holds beside what is saved

    def result(self) -> Plan:
        """The cheapest that fits.

        Raises:
            RematError: none fits; says what the least peak is that was found.
        """
        choices, limit, least = self._choices, self._request.budget, self._request.objective
        for choice in known_choices(choices.facts, least, at=choices.at):
            self._take(plan_of(choices.facts, choice, limit, least, "peak"))
        lowest, _ = choices.graph.predict(())
        everything, _ = choices.graph.predict(self._problem.names)  # more than autodiff saves by itself, as a rule
        room = max(0, choices.most - lowest)
        budgets = sorted({everything, *(lowest + room * i // _GRID for i in range(_GRID + 1))})
        high = self._first_pass(budgets)
        if high is None and self._best is None and self._beat == math.inf:
            self._prunes = False  # for the least peak, which is to be told
            self._first_pass(budgets)
        if high is not None:
            self._between(budgets[budgets.index(high) - 1], high, max(1, (everything - lowest) // 1000))
        if self._best is None:
            raise RematError(self._too_little())
        # What is saved is held at the peak at least once, with the arguments: no choice that fits saves more. But for a
        # device, where values may be narrower or elsewhere.
        bound = (self._problem.relax(limit) if choices.facts.is_plain else None) or 0.0
        text = f"The cheapest of {self._tried} plans tried whose estimated peak fits; no other is ruled out."
        best = replace(self._best, status=text, timed_out=self._timed_out)
        if best.cost == "seconds":
            return replace(best, bound_seconds=min(bound, best.predicted_seconds or 0.0))
        return replace(best, bound=min(int(bound), best.recomputed_flops))

    def _too_little(self) -> str:
        name = self._choices.facts.engine.function_name
        if self._lowest is None:
            return f"the peak of {name} is not known: give a budget of saved bytes."
        budget, least = units.apart(self._request.budget, self._lowest.peak_bytes or 0)
        plan_text = "values that were chosen" if self._lowest.names else self._lowest.label
        return (
            f"No plan at {self._choices.at!r} keeps the estimated peak of {name} within {budget}: the least "
            f"found is {least} ({plan_text}); raise the budget, use smaller batches, "
            "or checkpoint inside the function."
        )

    def _first_pass(self, budgets: Sequence[int]) -> int | None:
        """Try JAX's policies and budgets of saved bytes, in falling order; the least one above the last that fits."""
        for key in BUILT_IN:
            self._policy(key)
        for number in reversed(range(len(budgets))):
            if self._budget(budgets[number]):
                return budgets[number + 1] if number + 1 < len(budgets) else None
        return None

    def _between(self, low: int, high: int, least: int) -> None:
        """Try budgets between one that fits and one that does not, as long as they differ by more than ``least``."""
        if self._has_floor:
            high = max(low, min(high, self._request.budget + 1))
        for number in range(_STEPS):
            cheapest = self._costs.get(high, -math.inf)
            done = self._best is not None and order(self._best)[0] <= cheapest * (1 + self._request.gap)
            if high - low <= least or done:
                break
            middle = self._request.budget - self._beyond  # if the peak holds as much beside what is saved
            if number % 2 or not low + least < middle < high - least:
                middle = (low + high) // 2
            low, high = (middle, high) if self._budget(middle) else (low, middle)

    @property
    def _has_floor(self) -> bool:
        """Whether a peak holds at least what is saved: a device may keep values elsewhere, or narrower."""
        return self._prunes and self._choices.facts.is_plain

    def _cannot_win(self, cost: float) -> bool:
        """Whether what costs so many FLOPs is no better than what is known; seconds are the report's only."""
        if not self._prunes or self._request.objective.device is not None:
            return False
        return cost > self._beat or (self._best is not None and cost >= order(self._best)[0])

    def _policy(self, key: str) -> None:
        """Try a policy of JAX's."""
        facts, at = self._choices.facts, self._choices.at
        try:
            if self._has_floor and facts.saved_bytes(key, at) > self._request.budget:
                return
            names = self._choices.saved_by(key) if self._best is not None and key not in _BEYOND_NAMES else None
            if names is not None:
                saved, cost = self._choices.graph.predict(names)
                if saved == facts.saved_bytes(key, at) and self._cannot_win(cost):
                    return
            report = facts.report(key, at)
        except RematError:  # complex values, which this JAX cannot save
            return
        if not report.backward_error:
            self._take(_of_report(report, self._request))

    def _budget(self, saved: int) -> bool:
        """Try the best plan for a budget of saved bytes; whether its peak fits.

        One that would cost too much is taken to fit, so that what costs less is tried next.
        """
        self._verdict = None

        def worth(solution: Solution) -> bool:
            self._timed_out |= solution.timed_out
            self._costs.setdefault(saved, solution.cost)
            if self._has_floor and solution.saved_bytes > self._request.budget:
                self._verdict = False
            elif self._cannot_win(solution.cost):
                self._verdict = True
            return self._verdict is None

        candidate = _within_saved(
            self._choices, self._request, saved, self._problem, nodes=FEW_NODES, names_only=True, worth=worth
        )
        if self._verdict is not None:
            return self._verdict
        if candidate is not None and candidate.peak_bytes is not None:
            self._beyond = candidate.peak_bytes - candidate.saved_bytes
        return candidate is not None and self._take(candidate)

    def _take(self, candidate: Plan) -> bool:
        if candidate.peak_bytes is None:
            return False
        self._tried += 1
        if candidate.names:
            _remember(self._choices.facts, candidate)
        if self._lowest is None or candidate.peak_bytes < (self._lowest.peak_bytes or 0):
            self._lowest = candidate
        fits = candidate.peak_bytes <= self._request.budget
        if fits and (self._best is None or order(candidate) < order(self._best)):
            self._best = candidate
        return fits
