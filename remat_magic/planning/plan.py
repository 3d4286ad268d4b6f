"""Plans: the least recomputation within a budget of saved bytes, or of the estimated peak.

A choice of names is found by the integer program, applied, and traced, so that its figures are JAX's. JAX's own
policies are tried as well: they can keep what no name reaches, such as the cosine of a sine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.facts.times import communicating, offloading
from remat_magic.planning.choices import BUILT_IN, Choice, known_choices, remember
from remat_magic.planning.planner import Objective, Planner, budget_bytes, objective, planner
from remat_magic.planning.problem import Problem, Solution
from remat_magic.records import Kernel, Plan, PlannedValue, RematError, Report

__all__ = ["best_of_groups", "limit_of", "order", "plan_at", "plan_of"]

_BEYOND_NAMES = ("none", "everything_saveable")  # these keep what no name reaches
_ATTEMPTS = 4
_TRIED = 4  # names, whose subsets are tried where a policy reaches further by them
_OFFLOADED = "XLA keeps most of what is offloaded outside of scans on the device, and all of it on a CPU: measure it."


@dataclass(frozen=True, slots=True)
class _Request:
    """What a plan is asked for: its key, what people call it, its budget, and what is to be least."""

    key: str
    label: str
    budget: int
    objective: Objective
    of: str = "saved"


def plan_at(
    facts: Facts,
    at: str | None,
    budget: float | str,
    of: str = "saved",
    *,
    cost: str = "flops",
    device: str | Device | None = None,
    offload: float | str | bool | None = None,
    separately: bool = False,
    together: bool = False,
    seconds: float = 10.0,
    gap: float = 0.01,
    beat: float | None = None,
) -> Plan:
    """The plan at one place; all else is as for ``Trace.plan``.

    With ``beat``, what another choice costs within a peak, plans that cost more are not looked for.
    """
    least = objective(cost, device, offload)
    choices = planner(facts, at, separately, together)
    limit = limit_of(facts, choices.at, budget, of)
    request = _Request(*_key_and_label(facts, choices, limit, least, of), limit, least, of)
    if of == "peak":
        best = _within_peak(choices, request, seconds, gap, beat)
    else:
        best = _within(choices, request, limit, seconds, gap)
    if best is None:
        few, keeps = units.apart(limit, facts.saved_bytes("nothing_saveable", choices.at))
        raise RematError(
            f"{few} are too few: nothing_saveable at {choices.at!r} keeps {keeps} of {facts.engine.function_name} "
            "already; raise the budget, or plan for at='function'."
        )
    if best.names:
        remember(facts, best)
    if best.offloaded_bytes and offloading(facts.report(best), least.device) != "moved":
        best = replace(best, status=f"{best.status} {_OFFLOADED}")
    if least.device is not None and (unweighed := _unweighed(facts, best, least.device)):
        best = replace(best, status=f"{best.status} {unweighed}")
    if choices.parts.naming.unreached:
        best = replace(best, status=best.status.replace("No choice of names", "No choice of the values considered"))
    return replace(best, unreached=choices.unreached)


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


def limit_of(facts: Facts, at: str, budget: float | str, of: str) -> int:
    """A budget in bytes, of which a share is of what there is without a checkpoint at a place.

    Raises:
        RematError: it is no budget, or the peak is not known.
    """
    most = facts.saved_bytes("none", at) if of == "saved" else facts.report("none", at).peak_bytes
    if most is None:
        raise RematError(f"the peak of {facts.engine.function_name} is not known: give a budget of saved bytes.")
    return budget_bytes(budget, most)


def plan_of(facts: Facts, choice: Choice, limit: int, least: Objective, of: str) -> Plan:
    """A choice as a plan within so many bytes, by which it is called unless it stands in a table by its own key."""
    report, plan = choice.report, choice.plan
    plain = _of_report(report, _Request(report.policy, report.label, limit, least, of))
    if plan is None:
        return plain
    if report.policy not in facts.engine.plans:
        policy, label = _key_and_label(facts, plan, limit, least, of)
        plain = replace(plain, policy=policy, label=label)
    same = ("names", "fingerprint", "separately", "together", "unreached", "predicted_bytes", "predicted_flops")
    return replace(plain, **{name: getattr(plan, name) for name in same})


def best_of_groups(facts: Facts, plan: Plan, group: Mapping[str, str]) -> Plan | None:
    """The best plan within another's budget that saves each group of values as a whole or not at all.

    Args:
        facts: of the traced function.
        plan: the other plan.
        group: the group of each value that may be saved, by the value's name.

    Returns:
        The plan, or None where none saves anything.
    """
    choices = planner(facts, plan.at, False).grouped(group)
    request = _Request(f"{plan.policy} in the source", f"{plan.label} in the source", plan.budget_bytes, Objective())
    best = _within(choices, request, plan.budget_bytes or plan.saved_bytes, 10.0, 0.01, names_only=True)
    return best if best is not None and best.names else None


def _key_and_label(facts: Facts, choices: Planner | Plan, limit: int, least: Objective, of: str) -> tuple[str, str]:
    """The key of a plan, and its label: its budget, and what else was asked for where that is not usual."""
    place = "" if choices.at == facts.engine.default_at else f" at {choices.at}"
    apart = ", one by one" if choices.separately else ", equal layers together" if choices.together else ""
    suffix = f"{place}{apart}{least.text}"
    if of == "peak":
        return f"plan(peak {limit}{suffix})", f"plan within {units.nbytes(limit)} of peak{suffix}"
    return f"plan({limit}{suffix})", f"plan within {units.nbytes(limit)}{suffix}"


# ---------------------------------------------------------------------------------------------- within bytes saved


def _within(
    choices: Planner,
    request: _Request,
    limit: int,
    seconds: float,
    gap: float,
    *,
    names_only: bool = False,
    worth: Callable[[Solution], bool] = lambda solution: True,
) -> Plan | None:
    """The best plan that saves at most ``limit`` bytes, None where more is saved whatever is chosen.

    With ``names_only`` it is a choice of names even where a policy of JAX's costs less. What is not ``worth`` it is not
    traced, and None is returned.
    """
    problem = choices.problem(request.objective)
    as_names, other_keys = _built_in(choices, limit, problem)
    best: Plan | None = None
    bound, spent, allowed = 0.0, 0.0, limit
    for attempt in range(_ATTEMPTS):
        solution = problem.solve(allowed, seconds, gap)
        if solution is None:
            break
        spent += solution.seconds
        bound = solution.bound if attempt == 0 else bound
        if attempt == 0:
            if not solution.proven and request.objective.device is None:
                mixed = choices.hull(0.5).mixed(allowed)
                as_names += [mixed] if mixed is not None else []
            # The solver stops within its gap: a policy of JAX's may be the better choice of names.
            solution = min([solution, *as_names], key=lambda choice: choice.cost)
        if not worth(solution):
            return None
        applied = _applied(choices, request, solution)
        if applied.saved_bytes <= limit:
            best = _with_bound(applied, solution, bound, spent)
            break
        if not solution.names:
            break
        # JAX saves more than was predicted: leave that much room.
        allowed = max(allowed - (applied.saved_bytes - limit), choices.graph.predict(())[0])
    if best is not None and request.objective.device is not None:
        # Seconds are near the report's only: what spares most FLOPs may take less time in the end.
        fewest = choices.problem().solve(limit, seconds, gap)
        other = None if fewest is None else _applied(choices, request, fewest)
        if other is not None and other.saved_bytes <= limit and (other.seconds or 0) < (best.seconds or 0):
            cost = problem.measure(fewest.names)[1] if fewest is not None else 0.0
            best = _with_bound(replace(other, predicted_seconds=cost), None, bound, spent)
    for key in () if names_only else other_keys:
        best = _better(choices, key, request, best, bound)
    return best


def _built_in(choices: Planner, limit: int, problem: Problem) -> tuple[list[Solution], list[str]]:
    """Those of JAX's own policies that stay within the limit: as choices of names, and keys of the others."""
    as_names: list[Solution] = []
    others: list[str] = []
    own_names = _own_names(choices)
    for key in (*BUILT_IN, *own_names):
        try:
            saved = choices.facts.saved_bytes(key, choices.at)
        except RematError:  # complex values, which this JAX cannot save
            continue
        if saved > limit:
            continue
        if key in own_names:
            others.append(key)
            continue
        names = choices.saved_by(key)
        exact = names is not None and choices.graph.predict(names)[0] == saved
        if names is not None and exact:
            as_names.append(Solution(names, saved, problem.measure(names)[1], 0, False, 0.0))
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
    return replace(
        applied,
        names=values,
        fingerprint=draft.fingerprint,
        separately=draft.separately,
        together=draft.together,
        code=_code(choices, report, values),
    )


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
    spent = 0.0 if best is None else best.solve_seconds
    better = replace(_of_report(report, request), status=text, solve_seconds=spent)
    if better.seconds is None:
        return replace(better, bound=min(int(bound), report.recomputed_flops))
    return replace(better, bound_seconds=min(bound, better.seconds))


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


def _with_bound(applied: Plan, solution: Solution | None, bound: float, spent: float) -> Plan:
    """A plan with its bound, and a sentence on how sure it is."""
    in_seconds = applied.cost == "seconds"
    if in_seconds:
        best = replace(applied, bound_seconds=min(bound, applied.predicted_seconds or 0.0), solve_seconds=spent)
    else:
        best = replace(applied, bound=min(int(bound), applied.recomputed_flops), solve_seconds=spent)
    exact = (best.saved_bytes, best.offloaded_bytes, best.recomputed_flops) == (
        best.predicted_bytes,
        best.predicted_offloaded_bytes,
        best.predicted_flops,
    )
    departs = "" if exact else " JAX saves or recomputes otherwise than was reckoned; the figures are JAX's."
    if best.gap == 0:
        gain = "takes less time, as reckoned" if in_seconds else "recomputes less"
        same = " that is the same in equal layers" if best.together else ""
        return replace(best, status=f"No choice of names{same} within the budget {gain}.{departs}")
    why = ", where the solver's time was up" if solution is not None and not solution.proven else ""
    expense = "the time that is added, as reckoned," if in_seconds else "what is recomputed"
    same = " by a choice that is the same in equal layers" if best.together else ""
    least = f"At most {max(best.gap, 0.0001):.2%} of {expense} could be spared{same}"
    return replace(best, status=f"{least}{why}.{departs}")


# ----------------------------------------------------------------------------------------------- within a peak

_GRID = 4  # budgets of saved bytes tried at first, evenly spaced, since a peak need not rise with what is saved
_STEPS = 6  # halvings of the interval in which the last plan lies that fits


def _within_peak(choices: Planner, request: _Request, seconds: float, gap: float, beat: float | None) -> Plan:
    """The cheapest plan found whose report has an estimated peak of at most ``request.budget`` bytes.

    Where peaks rise with the bytes saved, the largest budget that fits is between one that does and the next that does
    not. They need not: what is known already, JAX's own policies and a few evenly spaced budgets are tried first, those
    that cost least before the others. Each candidate is judged by the report that JAX gives for it; those that cannot
    win are not traced.

    Raises:
        RematError: none fits; says what the least peak is that was found.
    """
    search = _PeakSearch(choices, request, seconds, gap, beat)
    search.known()
    least, most = choices.graph.predict(())[0], choices.most
    everything, _ = choices.graph.predict(choices.problem().names)  # more than autodiff saves by itself, as a rule
    budgets = sorted({everything, *(least + max(0, most - least) * i // _GRID for i in range(_GRID + 1))})
    high = search.first_pass(budgets)
    if high is None and not search.has_best and beat is None:
        search.prunes = False  # for the least peak, which is to be told
        search.first_pass(budgets)
    if high is not None:
        search.between(budgets[budgets.index(high) - 1], high, max(1, (everything - least) // 1000))
    return search.result()


class _PeakSearch:
    """The plans tried so far.

    Attributes:
        prunes: whether what cannot win is left out: what saves more than the peak may be, or costs more than the best.
    """

    def __init__(
        self, choices: Planner, request: _Request, seconds: float, gap: float, beat: float | None = None
    ) -> None:
        self._choices, self._request = choices, request
        self._end = time.perf_counter() + seconds
        self._longest, self._gap = seconds / 4, gap
        self._beat = math.inf if beat is None else beat
        self._best: Plan | None = None
        self._lowest: Plan | None = None
        self._tried = 0
        self._verdict: bool | None = None  # of a solution that was not traced, whether its peak is taken to fit
        self._costs: dict[int, float] = {}  # of what was found for a budget
        self._beyond = 0  # what the peak of the last plan that was traced holds beside what is saved
        self.prunes = True

    @property
    def has_best(self) -> bool:
        """Whether a plan was found that fits."""
        return self._best is not None

    def known(self) -> None:
        """Try what JAX has given figures of at this place before, for whatever budget."""
        facts, least = self._choices.facts, self._request.objective
        for choice in known_choices(facts, least, at=self._choices.at, together=self._choices.together):
            self._take(plan_of(facts, choice, self._request.budget, least, "peak"))

    def first_pass(self, budgets: Sequence[int]) -> int | None:
        """Try JAX's policies and budgets of saved bytes, in rising order; the least one above the last that fits."""
        for key in BUILT_IN:
            self.policy(key)
        for number in reversed(range(len(budgets))):
            if self.budget(budgets[number]):
                return budgets[number + 1] if number + 1 < len(budgets) else None
        return None

    def between(self, low: int, high: int, least: int) -> None:
        """Try budgets between one that fits and one that does not, as long as they differ by more than ``least``."""
        if self._has_floor:
            high = max(low, min(high, self._request.budget + 1))
        for number in range(_STEPS):
            cheapest = self._costs.get(high, -math.inf)
            done = self._best is not None and order(self._best)[0] <= cheapest * (1 + self._gap)
            if high - low <= least or done:
                break
            middle = self._request.budget - self._beyond  # if the peak holds as much beside what is saved
            if number % 2 or not low + least < middle < high - least:
                middle = (low + high) // 2
            low, high = (middle, high) if self.budget(middle) else (low, middle)

    @property
    def _has_floor(self) -> bool:
        """Whether a peak holds at least what is saved: a device may keep values elsewhere, or narrower."""
        return self.prunes and self._choices.facts.is_plain

    def _cannot_win(self, cost: float) -> bool:
        """Whether what costs so many FLOPs is no better than what is known; seconds are the report's only."""
        if not self.prunes or self._request.objective.device is not None:
            return False
        return cost > self._beat or (self._best is not None and cost >= order(self._best)[0])

    def policy(self, key: str) -> None:
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

    def budget(self, saved: int) -> bool:
        """Try the best plan for a budget of saved bytes; whether its peak fits.

        One that would cost too much is taken to fit, so that what costs less is tried next.
        """
        left = max(0.1, min(self._longest, self._end - time.perf_counter()))
        self._verdict = None

        def worth(solution: Solution) -> bool:
            self._costs.setdefault(saved, solution.cost)
            if self._has_floor and solution.saved_bytes > self._request.budget:
                self._verdict = False
            elif self._cannot_win(solution.cost):
                self._verdict = True
            return self._verdict is None

        candidate = _within(self._choices, self._request, saved, left, self._gap, names_only=True, worth=worth)
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
            remember(self._choices.facts, candidate)
        if self._lowest is None or candidate.peak_bytes < (self._lowest.peak_bytes or 0):
            self._lowest = candidate
        fits = candidate.peak_bytes <= self._request.budget
        if fits and (self._best is None or order(candidate) < order(self._best)):
            self._best = candidate
        return fits

    def result(self) -> Plan:
        """The cheapest that fits."""
        limit, name = self._request.budget, self._choices.facts.engine.function_name
        if self._best is None:
            if self._lowest is None:
                raise RematError(f"the peak of {name} is not known: give a budget of saved bytes.")
            budget, least = units.apart(limit, self._lowest.peak_bytes or 0)
            plan_text = "values that were chosen" if self._lowest.names else self._lowest.label
            raise RematError(
                f"No plan at {self._choices.at!r} keeps the estimated peak of {name} within {budget}: the least "
                f"found is {least} ({plan_text}); raise the budget, use smaller batches, "
                "or checkpoint inside the function."
            )
        # What is saved is held at the peak at least once, with the arguments: no choice that fits saves more. But for a
        # device, where values may be narrower or elsewhere.
        plain = self._choices.facts.is_plain
        bound = (self._choices.problem(self._request.objective).relax(limit) if plain else None) or 0.0
        text = f"The cheapest of {self._tried} plans tried whose estimated peak fits; no other is ruled out."
        if self._best.cost == "seconds":
            return replace(self._best, bound_seconds=min(bound, self._best.predicted_seconds or 0.0), status=text)
        return replace(self._best, bound=min(int(bound), self._best.recomputed_flops), status=text)


def order(candidate: Plan) -> tuple[float, int]:
    """What a plan costs, and its peak: of two plans the lower is preferred."""
    cost = candidate.recomputed_flops if candidate.seconds is None else candidate.seconds
    return cost, candidate.peak_bytes or 0
