"""Where a checkpoint should go, and with which policy: several of both tried, and what each costs by JAX's own answer.

The search tries what promises most first, so that a first front stands soon, and leaves out what cannot matter. What
promises most is a place that makes much and is called often: what it saves goes away, and comes back for one call at a
time.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from remat_magic import _jax, devices
from remat_magic.compare import row_of
from remat_magic.engine.halves import without_gc
from remat_magic.engine.primal import Contents
from remat_magic.engine.vmaps import middle
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.facts import Facts, Variant
from remat_magic.policies import MIXED
from remat_magic.records import ComparisonRow, Places, Plan, Progress, RematError, Report
from remat_magic.records.fit import by_hand

if TYPE_CHECKING:
    from remat_magic.planning.search import Objective, Request

Figure = Literal["peak_bytes", "peak_high"]

CLEARLY_LOWER = 0.8  # of a peak: what is below that is clearly lower
_NOTHING, _BATCHLESS, _DOTS = "nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable"
POLICIES = (_NOTHING, _BATCHLESS, _DOTS)
_LEAST = 0.001  # of all that is made: a place that makes less is not tried
_LOWER = 0.99  # of the peak without a checkpoint: what is above that is hardly lower
# Of checkpoints in each other, each of which repeats all inside it once more. Under jax_remat3 the name stacks that JAX
# writes then grow faster than any power of the depth: 550 names at 3, 10,000 at 4, 200,000 at 5, by hand too.
DEEPEST = 3
_SEARCHED = 16  # choices that are tried where a plan is asked for and no search was made
FEW = 12  # of them that promise most, which may be enough
_INSIDE = 2  # places in checkpoints that are tried, too
_FEWEST = 4  # calls that are worth grouping
_LOOPS = 2  # of which several steps together are tried at once
_LARGE = 0.1  # of all that is made: a vmap or a call that makes less is not tried in parts
_SURELY = 0.97  # of a capacity: what is to be held by a line through two peaks may be a little more
_MOSTLY = 0.9  # of what a place makes
_KNOWN = 2  # what has no checkpoint, and what is as written: these are always tried


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A policy at a place, or policies at several; ``after`` is the choice by which it is worth a try.

    With a ``limit`` it is a plan there, of which what is named of its report is to stay within so many bytes;
    With ``offloads`` it may move values to the host. What is ``late`` promises less than plans.
    """

    policy: str
    at: str
    after: tuple[str, str] | None = None
    limit: tuple[Figure, int] | None = None
    offloads: bool = False
    late: bool = False


def places(facts: Facts, device: str | devices.Device | None = None, most: int = 40) -> Places:
    """``Trace.places``."""
    if most < 1:
        raise RematError(f"most={most!r} choices are too few: give 1 or more.")
    chosen = None if device is None else devices.get(device)
    search = Search(facts, memory_of(chosen), chosen or devices.default())
    search.finish(most)
    return search.places()


def searched(facts: Facts, memory: DeviceMemory = PLAIN, most: int = _SEARCHED) -> list[Report]:
    """What so many choices that promise most come to, with no estimate of times."""
    return Search(facts, memory).finish(most)


class Search:
    """What was tried so far, and what was left out.

    Args:
        facts: of the traced function.
        memory: peaks are as on a device that holds values so.
        device: whose times are estimated, None for none.
        capacity: the bytes that are to be fitted, for which plans are made. Default: none are made.
        request: of a plan for a peak: that is the capacity, and reports that are there already count too.
        at: the only place. Default: all.
    """

    def __init__(
        self,
        facts: Facts,
        memory: DeviceMemory,
        device: devices.Device | None = None,
        capacity: int | None = None,
        *,
        request: Request | None = None,
        at: str | None = None,
    ) -> None:
        self._facts, self._memory, self._request, self._at = facts, memory, request, at
        self._device = request.objective.device if request else device
        self._capacity = request.budget if request else capacity
        self.reports: dict[Any, list[Report]] = {}  # those that do the same together
        self.failed: list[ComparisonRow] = []
        self._left_out: dict[str, list[str]] = {}  # what, by the reason
        self._planned = dict[str, None]()  # where plans are made
        self._cuts = list[tuple[str, Sequence[int], str]]()  # what can be cut, in how many parts, the policy of each

    def run(self, most: int) -> Iterator[Progress]:
        """Try everything, but so many choices at most, and plans; how far it is before each choice, and at the end."""
        by_key, capacity = dict[tuple[str, str], _Candidate](), self._capacity
        for choice in self._choices():
            by_key.setdefault((choice.policy, choice.at), choice)
        left, done, most = deque(by_key.values()), 0, most + _KNOWN
        while left or capacity is not None:
            if capacity is not None and (not left or left[0].late or done >= most):
                self._add_known()
                # It is known now which places are worth a plan.
                plans = [*self._more_parts(capacity), *self._within(capacity)]
                left, capacity, most = deque([*plans, *left]), None, max(most, done + len(plans))
                continue
            choice = left[0]
            in_vain = self._in_vain(choice)
            if in_vain:
                self._leave_out(in_vain, label_of(left.popleft()))
                continue
            if done >= most:
                self._leave_out(f"{most - _KNOWN} choices were tried", *map(label_of, left))
                break
            yield Progress(done, done + len(left), label_of(choice))
            self._attempt(left.popleft())
            done += 1
        yield Progress(done, done)

    def finish(self, most: int) -> list[Report]:
        """Try so many choices, and plans; the reports of all."""
        deque(self.run(most), maxlen=0)
        return self.tried

    def _add_known(self) -> None:
        """Take in the reports that are there already, where a plan is to cost no more than these."""
        tried = {(report.policy, report.at) for report in self.tried}
        for variant in self._facts.known() if self._request else ():
            report = variant.report(self._memory)
            if not report.backward_error and (report.policy, report.at) not in tried:
                self.add(report, only_new=False)

    # ------------------------------------------------------------------------------------------------- what to try

    def _choices(self) -> Iterator[_Candidate]:
        """What to try, what promises most first."""
        engine = self._facts.engine
        if self._at is not None:
            yield from (_Candidate(policy, self._at) for policy in ("none", "everything_saveable", *POLICIES))
            return
        inside = engine.primal.contents
        sites = [site.key for site in engine.primal.table.sites]
        places = self._worth_trying(inside)
        # In a checkpoint, another lowers what that repeats.
        around = [inside[key].operations for key in sites if key in inside]
        outside = [key for key in places if not any(inside[key].operations < other for other in around)]
        free = [key for key in outside if key not in sites]
        best = engine.default_at if sites else next(iter(places), "function")
        yield _Candidate("none", "sites" if sites else "function")
        yield _Candidate("as_written", engine.default_at)
        yield from (_Candidate(policy, best) for policy in POLICIES)
        of_loops = {group.key.rpartition("/")[0]: group.key for group in engine.primal.possible.groups}
        loops = [key for key in outside if key in of_loops]
        for key in dict.fromkeys((*outside[:1], *loops[:_LOOPS])):
            calls = inside[key].calls
            if key in of_loops or calls >= _FEWEST:
                yield _Candidate(_NOTHING, key)
                yield _Candidate(_NOTHING, of_loops.get(key, f"{key}/{round(math.sqrt(calls))}"), (_NOTHING, key))
        apart = _apart([key for key in outside if "<lambda>" not in key], inside)  # which have no definition
        if len(apart) > 1:
            for policy in (_NOTHING, _BATCHLESS):
                yield _mixed(dict.fromkeys(apart, policy))
        if self._request is None:  # a plan is for a place of the program that is there
            yield from self._first_parts(inside)
        yield from self._moved(sites, [key for key in places if key not in sites], inside)
        for key in free[:2]:
            yield from _at(key)
        first, *others = _at("function")
        some = self._capacity is not None and best != "function"
        yield from (replace(first, after=(_NOTHING, best)) if some else first, *others)
        for key in sites if len(sites) > 1 else ():
            yield _Candidate("none", key)
            yield from _at(key)
        for key in [key for key in places if key not in outside][:_INSIDE]:
            yield from _at(key)
        groups = (choice for key in free[:1] for choice in _groups(key, inside[key].calls))
        for group in engine.primal.possible.groups:
            yield from _steps(group.key, sites) if group.key.rpartition("/")[0] in outside else ()
        others = (choice for key in free[2:] for choice in _at(key))
        yield from (replace(choice, late=True) for choice in (*groups, *others))

    def _first_parts(self, inside: Mapping[str, Contents]) -> Iterator[_Candidate]:
        """What can be cut, in as many parts as are to fit, else about the square root of the most.

        Microbatches repeat nothing. Of a vmap each call of which makes little nothing is tried.
        """
        engine, little = self._facts.engine, list[str]()
        # By their lines: of a module the callee is its method, and what is mapped the module.
        keys = {callee.who[1:]: key for key, callee in engine.primal.possible.callees.items()}
        for vmap in engine.vmaps.values():
            own = inside.get(keys.get(vmap.who[1:], ""))
            if own is not None and own.nbytes < _LARGE * inside["function"].nbytes * own.runs:
                little.append(vmap.key)
            elif numbers := vmap.divisors:
                self._cuts.append((vmap.key, numbers, _NOTHING))
                enough = self._enough(numbers)
                counts = (numbers[0], middle(numbers)) if enough in (None, numbers[0]) else (enough,)
                yield from (_Candidate(_NOTHING, f"{vmap.key} in {n}") for n in dict.fromkeys(counts))
        if little:
            self._leave_out("one call makes less than a tenth of all", *little)
        numbers, count, why = engine.in_microbatches(lambda numbers: self._enough(numbers) or middle(numbers))
        if why:
            self._leave_out(why.rstrip("."), "microbatches")
        if numbers:
            self._cuts.append((engine.batch_key, numbers, "none"))
            yield _Candidate("none", f"{engine.batch_key} in {count}")
        for key in self._large_calls(inside):
            self._cuts.append((key, engine.divisors, _NOTHING))
            yield from (_Candidate(_NOTHING, at) for at in (key, f"{key} in {middle(engine.divisors)}"))

    def _large_calls(self, inside: Mapping[str, Contents]) -> list[str]:
        """Functions that are called once, can be in parts and make much, but not by what runs in them many times."""
        large, numbers = list[str](), self._facts.engine.divisors
        for key in sorted(inside.keys() - {"function"}, key=lambda key: -inside[key].nbytes):
            own, operations = inside[key], inside[key].operations
            again = (it.nbytes for it in inside.values() if it.runs > 1 and it.operations < operations)
            within = any(operations <= inside[other].operations for other in large)
            little = own.nbytes < _LARGE * inside["function"].nbytes or max(again, default=0) > own.nbytes / 2
            if own.runs > 1 or little or within or not numbers:
                continue
            try:
                large += [key] if self._facts.engine.parted(f"{key} in {middle(numbers)}") else []
            except RematError as error:
                self._leave_out(str(error).rstrip("."), f"{key} in parts")
        return large[:_INSIDE]

    def _enough(self, numbers: Sequence[int]) -> int | None:
        """The fewest parts that are to fit, as what is held for one example falls with them, and no sum does.

        None where nothing is to fit, or none does.
        """
        report = self._facts.under().report(self._memory)
        if self._capacity is None or not report.peak_bytes or not report.peak_high:
            return None
        falls = falling(report)
        sums = sum(
            4 * math.prod(leaf.value.shape)
            for leaf in self._facts.engine.primal.signature.arrays
            if leaf.differentiated
        )
        range_ = report.peak_high / report.peak_bytes
        left = _SURELY * self._capacity / range_ - (report.peak_bytes - falls + sums)
        return next((n for n in numbers if falls / n <= left), None)

    def _more_parts(self, capacity: int) -> Iterator[_Candidate]:
        """The fewest parts that fit, as the two that were tried tell: what is held is a + b / parts.

        Microbatches that do not fit by themselves are tried with the checkpoint that lowers the peak most.
        """
        by_place = {(it.policy, it.at): it.peak_high for it in self.tried if it.peak_high}
        for key, numbers, policy in self._cuts:
            tried = {n: by_place[policy, at] for n in numbers if (policy, at := f"{key} in {n}") in by_place}
            if (policy, key) in by_place:
                tried[1] = by_place[policy, key]
            elif self._written and self._written.peak_high:
                if min(tried.values(), default=0) <= capacity:
                    continue
                tried[1] = self._written.peak_high
            if len(tried) < 2:
                continue
            (few, high), *_, (many, low) = sorted(tried.items())
            b = (high - low) / (1 / few - 1 / many)
            fitting = [n for n in numbers if low + b * (1 / n - 1 / many) <= _SURELY * capacity]
            yield from (_Candidate(policy, f"{key} in {n}") for n in fitting[:1] if n not in tried)
            inside = self._facts.engine.primal.contents
            own = inside[key].operations if key in inside else set[int]()
            others = [at for _, at in sorted(by_place, key=by_place.__getitem__) if at in inside]
            others = [at for at in others if not own & inside[at].operations]
            if (policy == "none" or own) and others and not fitting:
                yield _mixed({f"{key} in {many}": policy, others[0]: _NOTHING})

    def _worth_trying(self, inside: Mapping[str, Contents]) -> list[str]:
        """The places that make enough to matter, each once, those with most to gain first."""
        engine = self._facts.engine
        keys = [site.key for site in (*engine.primal.table.sites, *engine.primal.possible.sites) if site.key in inside]
        smallest = _LEAST * inside["function"].nbytes
        small = [key for key in keys if inside[key].nbytes < smallest]
        if small:
            self._leave_out("its values are less than a thousandth of all", *small)
        deep = [key for key in keys if inside[key].depths[key] > DEEPEST]
        if deep:
            self._leave_out(f"its calls are nested more than {DEEPEST} deep", *deep)
        keys = [key for key in keys if key not in (*small, *deep)]
        # Where calls of two are the same either will do, but a lambda has no definition to write a checkpoint on.
        same: dict[tuple[frozenset[int], int], str] = {}
        for key in keys:
            calls = frozenset(inside[key].operations), inside[key].runs
            other = same.setdefault(calls, key)
            if other != key:
                same[calls], dropped = (key, other) if "<lambda>" in other else (other, key)
                self._leave_out(f"a checkpoint on {same[calls]} does the same", dropped)
        return sorted(same.values(), key=lambda key: (-inside[key].gain, -inside[key].nbytes))

    def _moved(self, sites: list[str], free: list[str], inside: Mapping[str, Contents]) -> Iterator[_Candidate]:
        """Each checkpoint taken off, and put on the nearest place around it, or on the dearest inside."""
        for site in sites:
            own = inside[site].operations if site in inside else set()
            around = [key for key in free if inside[key].operations > own]
            within = [key for key in free if inside[key].operations < own]
            nearest = min(around, key=lambda key: len(inside[key].operations), default=None)
            for key in (*([nearest] if nearest else []), *within[:1]):
                first = _mixed({site: "none", key: _NOTHING})
                yield first
                yield replace(_mixed({site: "none", key: _BATCHLESS}), after=(first.policy, first.at))

    def _within(self, capacity: int) -> Iterator[_Candidate]:
        """Plans that fill a capacity at the places where least is added within it: surely, and by the estimate alone.

        Also such that move values to the host, at places in loops of a device of which the link is known.
        """
        written = self._written
        if self._request is not None:
            usual = [] if self._at or written is None else self._promising("peak_bytes", capacity, written)
            at = self._at or self._facts.engine.default_at
            yield from (
                _Candidate("a plan", it, limit=("peak_bytes", capacity)) for it in dict.fromkeys((at, *usual[:1]))
            )
            return
        if written is None or ((written.peak_high or 0) <= capacity and not written.recomputed_flops):
            return  # nothing costs less
        surely, perhaps = (self._promising(figure, capacity, written)[:1] for figure in ("peak_high", "peak_bytes"))
        self._planned = dict.fromkeys((*surely, *perhaps))
        for at in surely:
            yield _Candidate(f"plan that fits at {at}", at, limit=("peak_high", capacity))
        if written.recomputed_flops or (written.peak_bytes or 0) > capacity:
            for at in perhaps:
                yield _Candidate(f"plan that may fit at {at}", at, limit=("peak_bytes", capacity))
        for at in surely or perhaps:
            loops = (row.path[:1] for report in self._known(at) for row in report.recomputed)
            if self._link and any(path and path[0].startswith("scan") for path in loops):
                limit = ("peak_high" if surely else "peak_bytes", capacity)
                yield _Candidate(f"plan that offloads at {at}", at, limit=limit, offloads=True)

    def _promising(self, figure: Figure, capacity: int, written: Report) -> list[str]:
        """The places where a choice fits, those first where a plan is to cost least by a line to what does not.

        A plan at a place can do all that one inside it can.
        """
        cost, peak_of = self._objective().of, operator.attrgetter(figure)
        costs = dict[str, float]()
        for at in dict.fromkeys(report.at for report in self.tried):
            known = sorted([*self._known(at), written], key=peak_of)
            below = [report for report in known if peak_of(report) <= capacity]
            if below and below != [written]:
                low, above = min(below, key=cost), [report for report in known if peak_of(report) > capacity]
                high = min(above, key=cost, default=low)
                part = (capacity - peak_of(low)) / max(peak_of(high) - peak_of(low), 1)
                costs[at] = cost(low) + min(part, 1) * (cost(high) - cost(low))
        inside = self._facts.engine.primal.contents
        parts = {at: inside[at].operations for at in costs if at != "function" and at in inside}
        outer = [at for at in costs if not any(parts.get(at, set()) < other for other in parts.values())]
        return [at for at in sorted(outer, key=costs.__getitem__) if at.rpartition("/")[0] not in costs]

    # ------------------------------------------------------------------------------------------------- what was tried

    @property
    def tried(self) -> list[Report]:
        """The reports of all that was tried."""
        return [report for alike in self.reports.values() for report in alike]

    def _known(self, at: str) -> list[Report]:
        """What JAX's policies, and the program as written, come to at a place."""
        return [it for it in self.tried if it.at == at and it.policy in (*POLICIES, "as_written") and it.peak_bytes]

    @property
    def _written(self) -> Report | None:
        return next((report for report in self.tried if report.policy == "as_written" and report.peak_bytes), None)

    @property
    def _link(self) -> float | None:
        return None if self._device is None else self._device.host_bandwidth

    def _objective(self, *, offloads: bool = False) -> Objective:
        from remat_magic.planning.search import Objective  # whose solver takes long to import

        if self._request is not None:
            return self._request.objective
        return Objective(self._device, self._link if offloads else None)

    def _plan(self, choice: _Candidate) -> Plan | str | None:
        """A plan, which goes by its key from now on; one that is a policy of JAX's has a row already."""
        from remat_magic.planning.search import FEW_NODES, Request, filling

        assert choice.limit is not None
        figure, limit = choice.limit
        objective, peak_of = self._objective(offloads=choice.offloads), operator.attrgetter(figure)
        request = self._request or Request(limit, "peak", objective, nodes=FEW_NODES, memory=self._memory)
        # What is written by hand beats nothing that an edit writes.
        rivals = (it for it in self.tried if it.peak_bytes and (self._request or not by_hand(it.at)))
        fitting = (it for it in rivals if peak_of(it) <= limit)
        beat = min(map(objective.of, fitting), default=math.inf)
        plan = filling(
            self._facts, choice.at, request, peak_of, self._known(choice.at), beat, by_source=not self._request
        )
        return plan and (plan.apart_from(self._facts.engine.plans) if plan.names else plan.policy)

    @without_gc()
    def _attempt(self, choice: _Candidate) -> None:
        """Let JAX say what a choice does."""
        try:
            policy = choice.policy if choice.limit is None else self._plan(choice)
            if policy is None:
                return
            variant = self._facts.under(policy, choice.at)
            if self._saves_too_much(variant, choice):
                return
            report = variant.report(self._memory)
        except RematError as error:
            if choice.limit is not None:  # what is too little for a plan is no choice
                return
            self.failed.append(ComparisonRow(choice.policy, choice.at, error=str(error), label=label_of(choice)))
            return
        only_new = choice.limit is not None and self._request is None
        if not (only_new and self._is_hardly_better(report)):
            self.add(report, only_new=only_new)

    def _saves_too_much(self, variant: Variant, choice: _Candidate) -> bool:
        """Whether half of what a choice saves more than another, that nearly fits, is too much: whatever is donated."""
        fewer = next((it for it in self.tried if (it.policy, it.at) == (_BATCHLESS, choice.at)), None)
        if self._capacity is None or choice.policy != _DOTS or fewer is None:
            return False
        given = sum(_jax.nbytes(leaf.value) for leaf in self._facts.engine.given.signature.arrays)
        left = self._capacity + given - (fewer.peak_bytes or 0)
        if (variant.preview.saved_bytes - fewer.saved_bytes) / 2 <= left:
            return False
        self._leave_out(f"it saves too much more than {label_of(fewer)}", label_of(choice))
        return True

    def add(self, report: Report, *, only_new: bool) -> None:
        """Take in a report; one that is to be ``only_new`` not where another choice makes the same program."""
        alike = self.reports.setdefault(_effect(report), [])
        if not (only_new and alike):
            alike.append(report)

    def _is_hardly_better(self, plan: Report) -> bool:
        """Whether a policy of JAX's at its place has no higher peak, and costs hardly more."""
        from remat_magic.planning.search import CLEARLY

        cost = self._objective().of
        return any(
            (report.peak_bytes or 0) <= (plan.peak_bytes or 0) and CLEARLY * cost(report) <= cost(plan)
            for report in self._known(plan.at)
            if report.policy in POLICIES
        )

    def _in_vain(self, choice: _Candidate) -> str:
        """Why a choice is not worth a try, by what others have come to; empty where it is."""
        if choice.late and self._planned:
            inside = self._facts.engine.primal.contents
            around = set[int]().union(*(inside[at].operations for at in self._planned if at in inside))
            own = inside[whole_function(choice.at)].operations
            if len(own & around) > _MOSTLY * len(own):
                return f"plans at {' and '.join(self._planned)} are tried instead"
        if choice.after is None:
            return ""
        by_choice = {(report.policy, report.at): report for report in self.tried}
        tried = by_choice.get(choice.after)
        without = next((report for (key, _), report in by_choice.items() if key == "none"), None)
        if tried is None or tried.peak_bytes is None:
            return "what saves nothing there was not tried either"
        if choice.at == "function" and choice.policy == _NOTHING and without is not None:
            lower = tried.peak_bytes < CLEARLY_LOWER * (without.peak_bytes or 0)
            return f"{label_of(tried)} recomputes it part by part" if lower else ""
        if choice.policy == _DOTS and (fewer := by_choice.get((_BATCHLESS, choice.at))):  # which saves no more
            tried = fewer
            if without is not None and (fewer.peak_bytes or 0) > (without.peak_bytes or 0):
                return f"the estimated peak is no lower with {label_of(fewer)}"
        if choice.policy in (_BATCHLESS, _DOTS) or _BATCHLESS in choice.at:
            # They can lower the peak where to save nothing does not: then all is recomputed at once.
            if any(row.primitive in _jax.MATMULS for row in tried.recomputed):
                return ""
            none = "no matrix product is recomputed there that they could save"
            return none if tried.policy == _NOTHING else f"{label_of(tried)} does the same"
        one, _, size = choice.at.rpartition("/")
        if without is not None and one == choice.after[1]:  # that one call of a group gains nothing says little
            again = (without.saved_bytes - tried.saved_bytes) / max(self._facts.engine.primal.contents[one].runs, 1)
            more = "they would recompute more at once than they stop saving"
            return more * (tried.saved_bytes <= int(size) * again)
        if without is not None and (tried.peak_bytes or 0) > _LOWER * (without.peak_bytes or 0):
            return f"the estimated peak is hardly lower with {label_of(tried)}"
        return ""

    def _leave_out(self, why: str, *choices: str) -> None:
        self._left_out.setdefault(why, []).extend(choices)

    @property
    def not_tried(self) -> tuple[str, ...]:
        """Sentences on what was left out."""
        return tuple(f"Not tried, since {why}: {', '.join(choices)}." for why, choices in self._left_out.items())

    def places(self) -> Places:
        """What is known by now."""
        rows = [*map(self._row, self.reports.values()), *self.failed]
        tried = {(report.policy, report.at): report for report in self.tried}
        return Places(self._facts.engine.primal.name, tuple(rows), self._device, tried, self.not_tried)

    def _row(self, reports: list[Report]) -> ComparisonRow:
        # What changes nothing goes by the name of no checkpoint.
        first, *others = sorted(reports, key=lambda report: report.policy != "none")
        return replace(row_of(first, self._device), label=label_of(first), same_as=tuple(map(label_of, others)))


def falling(report: Report) -> int:
    """The bytes of a peak that fall with the number of examples."""
    return sum(nbytes for kind, nbytes in report.peak_by_kind if kind in ("residual", "temporary"))


def whole_function(at: str) -> str:
    """The place that is all calls of the function of which a place is some, or some at once."""
    return re.sub(r"(\[[-\d:]*\])?(/\d+|(?<!\)) in \d+)?$", "", at)


def label_of(choice: Report | _Candidate) -> str:
    """How people call a policy at a place."""
    if choice.policy == MIXED:
        return choice.at
    # The label of a plan has its place where that is not the usual one.
    name = choice.label if isinstance(choice, Report) and choice.label else choice.policy
    return name if name.endswith(f" at {choice.at}") else f"{name} at {choice.at}"


def _effect(report: Report) -> Any:
    """What makes two reports of one function the same, wherever their checkpoints are."""
    saved = Counter((row.type, row.kind, row.nbytes) for row in report.residuals if row.kind != "literal")
    again = Counter((row.primitive, row.outputs, row.times, row.repeated) for row in report.recomputed)
    return frozenset(saved.items()), frozenset(again.items()), report.peak_bytes, report.backward_error


def _apart(places: list[str], inside: Mapping[str, Contents]) -> list[str]:
    """Places that hold nothing of one another, taken in order."""
    apart: list[str] = []
    for key in places:
        if not any(inside[key].operations & inside[other].operations for other in apart):
            apart.append(key)
    return apart


def _mixed(chosen: Mapping[str, str]) -> _Candidate:
    return _Candidate(MIXED, ", ".join(f"{key}={policy}" for key, policy in chosen.items()))


def _at(key: str) -> Iterator[_Candidate]:
    """The policies at a place: those that save matrix products only if some are recomputed there."""
    yield _Candidate(_NOTHING, key)
    yield from (_Candidate(policy, key, (_NOTHING, key)) for policy in (_BATCHLESS, _DOTS))


def _groups(key: str, calls: int) -> Iterator[_Candidate]:
    """A checkpoint on some of the calls, or around several after one another; nothing where these are few."""
    if calls < _FEWEST:
        return
    yield _Candidate(_NOTHING, f"{key}[::2]", (_NOTHING, key))
    # Together they can gain where one by one does not.
    yield from (_Candidate(_NOTHING, f"{key}/{size}") for size in (2, round(math.sqrt(calls))))


def _steps(group: str, sites: list[str]) -> Iterator[_Candidate]:
    """A checkpoint around several steps of a loop, with and without one on each step."""
    key = group.rpartition("/")[0]
    yield _Candidate(_NOTHING, group)
    if key in sites:
        yield _mixed({key: "none", group: _NOTHING})
    else:
        yield replace(_mixed(dict.fromkeys((key, group), _NOTHING)), after=(_NOTHING, key))
