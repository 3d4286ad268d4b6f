"""Whether a function fits a device as it is written, and what would make it fit: ``Trace.fit``, by estimates.

One search looks at everything that is known to help: policies at places, checkpoints around several calls, plans.
Choices that make one program are one, and of all stand first that fit, what adds the least time leading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_magic import _jax, devices, units
from remat_magic.engine.halves import without_gc
from remat_magic.engine.microbatches import batches
from remat_magic.engine.retrace import policy_of_each
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.facts import Facts, Variant
from remat_magic.facts.times import added, offloading, times
from remat_magic.jaxprs.walk import walk
from remat_magic.planning.places import Search, falling
from remat_magic.policies import MIXED
from remat_magic.records import ComparisonRow, Edit, Fit, FitChoice, Progress, RematError, Report, Times
from remat_magic.records.fit import by_hand, microbatches_in, ordered

LIKE = "H100 SXM"
"""The device as on which peaks are where only bytes are given."""

_MOST, _LEAST, _WORK = 40, 12, 14_000  # choices that are tried, and operations that are traced for all of them
_LOWER = 0.99  # of a peak: what is above that is hardly lower
_EDITS = 4  # that are written to find one that can be
_TRACED = 5  # batches that are traced
_PARTS_OF_BATCH = 1, 2, 4, 8, 16, 32, 64  # of which a batch may have to be a multiple
_SPARED = 0.995  # of a capacity, by an estimate times what XLA says more of another batch
_FAR = 64  # times of the batch, and what is larger says nothing
_ENOUGH = 2  # that fit with donation by the estimate: XLA may say otherwise of the first
_PARTS = re.compile(r"(?P<name>.+?)(?:\[(?P<slice>[-\d:]*)\])?(?:/(?P<group>\d+))?")
_IN_PARTS = re.compile(r" in \d+$")
_PARTED = re.compile(r" in \d+(?:$|=)")  # somewhere, of several places
_KEPT = "XLA keeps on the device what is offloaded there outside of loops."


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be fitted: so many bytes, of a device or (None) of one that is not known."""

    capacity: int
    device: devices.Device | None
    memory: DeviceMemory

    @classmethod
    def of(cls, device_or_bytes: str | float | devices.Device | None) -> Target:
        """That of a device, its name, bytes, or (None) the accelerator that is here.

        Raises:
            RematError: no such device, no size, no accelerator is here, or the device's memory is not known.
        """
        given = device_or_bytes
        if given is None:
            device = devices.accelerator(look=True)
            if device is None:
                raise RematError(
                    "No accelerator that is known is here: name the device to fit, one of "
                    f"{', '.join(map(repr, devices.names()))}, or give bytes such as '24 GiB'."
                )
        elif isinstance(given, devices.Device) or (isinstance(given, str) and not re.match(r"\s*[\d.]", given)):
            device = devices.get(given)
        else:
            capacity = units.parse_bytes(given, "device_or_bytes")
            return cls(capacity, None, memory_of(devices.get(LIKE)))
        capacity = devices.usable_bytes(device)
        if capacity is None:
            raise RematError(f"How much memory {device.name} has is not known: give bytes such as '24 GiB'.")
        return cls(capacity, device, memory_of(device))


Write = Callable[[Facts, FitChoice], Edit | str]
"""Gives the edit of a choice, or a sentence on why none writes it; empty where that cannot be known."""


class Fitting:
    """What ``Trace.fitting`` finds out by estimates, and what it makes of the word of a compiler.

    Args:
        facts: of the traced function.
        target: what is to be fitted.
        write: gives the edit of a choice.
    """

    def __init__(self, facts: Facts, target: Target, write: Write) -> None:
        self._facts, self._target, self._write = facts, target, write
        self._search = Search(facts, target.memory, target.device, target.capacity)
        self._view = _View(facts, target, facts.under().report(target.memory))

    def stages(self) -> Generator[Fit, None, None]:
        """The program as written, then what is known before each choice, then all.

        At last what would be offered first is written as an edit, and so are plans. What cannot be is no answer.
        """
        facts, target, view = self._facts, self._target, self._view
        device = "" if target.device is None else target.device.name
        fit = Fit(facts.engine.primal.name, device, target.capacity, view.as_written, report=view.report)
        if why := view.report.backward_error:
            yield replace(fit, not_tried=(why,), progress=Progress(1, 1))
            return
        written = facts.under().timeline(target.memory)
        fit = replace(fit, tried=(view.as_written,), timeline=written, progress=Progress(0, 1, "what could change"))
        yield fit
        operations = sum(1 for _ in walk(facts.engine.primal.closed, once=True))
        for progress in self._search.run(max(_LEAST, min(_MOST, _WORK // max(operations, 1)))):
            fit = replace(self._anew(fit, donating=progress.finished), progress=progress)
            if not progress.finished:
                yield fit
        done = fit.progress.done
        for _ in range(_EDITS):
            top = view.unsettled(fit)
            if top is None:
                break
            yield replace(fit, progress=Progress(done, done + 1, f"the edit of {top.what}"))
            fit = self.settled(fit, [top])
        yield replace(fit, progress=Progress(done, done + 1, "the largest batch"))
        yield replace(self.with_batch(fit), not_tried=self._search.not_tried, progress=Progress(done, done))

    @without_gc()
    def settled(self, fit: Fit, choices: Iterable[FitChoice]) -> Fit:
        """The same, unless an edit writes all of some choices; else without those that none writes."""
        anew = False
        for choice in choices:
            if choice.which in self._view.written or choice.by_hand:
                continue
            self._view.write(choice, self._write(self._facts, choice))
            anew |= bool(self._view.written[choice.which])
        return self._anew(fit, donating=True) if anew else fit

    @without_gc()
    def with_batch(self, fit: Fit) -> Fit:
        """The same with the largest batch that fits, which is as XLA says where it was asked."""
        needed = fit.needed_bytes if fit.compiled else None
        batch = largest_batch(self._facts, self._target, self._view.report, needed)
        return replace(fit, largest_batch=batch)

    def _anew(self, fit: Fit, *, donating: bool) -> Fit:
        return replace(
            fit, tried=self._view.ordered(self._search.reports.values(), self._search.failed, donating=donating)
        )


def fit_choice(facts: Facts, chosen: Variant, device_or_bytes: str | float | devices.Device | None = None) -> FitChoice:
    """``Trace.fit_choice``."""
    target = Target.of(device_or_bytes)
    return _View(facts, target, facts.under().report(target.memory)).choice(chosen.report(target.memory))


# ------------------------------------------------------------------------------------------------------ the choices


class _View:
    """Reports as choices, held against the program as it is written.

    Attributes:
        report: of the program as it is written.
        as_written: that as a choice.
        written: why no edit writes a choice, empty where one does, by ``which`` it is.
    """

    def __init__(self, facts: Facts, target: Target, written: Report) -> None:
        self._facts, self._target, self.report = facts, target, written
        self._undonatable = ""
        self.written = dict[tuple[str, str], str]()
        self._times: Times | None = None
        if target.device is not None and not written.backward_error:
            self._times = times(written, target.device)
        self._flops = (written.forward_flops or 0) + (written.backward_flops or 0)
        self.as_written = self.choice(written)
        # XLA for CPUs writes what is given back into donated memory too, and takes about as much more beside it.
        self._donation = None if target.memory == PLAIN else facts.engine.donation

    def choice(self, report: Report) -> FitChoice:
        """A report as a choice."""
        plan = self._facts.engine.plans.get(report.policy)
        known, code = (
            not report.backward_error and self.report.peak_bytes is not None,
            plan.code if plan else report.code,
        )
        unusable = report.backward_error
        if offloading(report, self._target.device) == "kept":
            unusable = unusable or _KEPT
        if by_hand(report.at) and not code:
            unusable = unusable or "No code is known for it: trace.function gives a function that does it."
        seconds = self._seconds(report) if known else None
        choice = FitChoice(
            what_of(self._facts, report),
            report.policy,
            report.at,
            report.peak_bytes,
            report.peak_low,
            report.peak_high,
            None,
            extra_seconds=seconds,
            extra_time=seconds / self._times.total
            if self._times and seconds is not None and self._times.total
            else None,
            extra_flops=(report.recomputed_flops - self.report.recomputed_flops) / self._flops
            if known and self._flops
            else None,
            saved_bytes=report.saved_bytes,
            code=with_imports(code),
            plan=plan,
            unusable=unusable,
            idle=self._idle(report),
        )
        return choice.within(self._target.capacity)

    def _idle(self, report: Report) -> str:
        """What is to be said of parts whose largest product has fewer rows than a tile of the device."""
        device = self._target.device
        if device is None or not device.holds_otherwise or not _PARTED.search(report.at):
            return ""
        tile, before = 8 if device.is_tpu else 16, _rows(self._facts.under())
        rows = _rows(self._facts.under(report.policy, report.at))
        small = (
            f"The largest product of a part has {rows} rows, and takes {device.name} no less time than one of {tile}."
        )
        return small if 0 < rows < min(tile, before) else ""

    def write(self, choice: FitChoice, edit: Edit | str) -> None:
        """Take note of how a choice is written."""
        why = edit if isinstance(edit, str) else ""
        if not isinstance(edit, str) and not edit.verified:
            whys = (*edit.unnamed, *edit.differences, "no edit of the source does just that")
            why = f"No edit writes it: {whys[0]}"
        elif choice.donate:  # what cannot be written then cannot be of any that donates
            self._undonatable = why
        self.written[choice.which] = why

    def unsettled(self, fit: Fit) -> FitChoice | None:
        """What would be offered and was not written yet: the first, and plans, which often cannot be."""
        choices = [it for it in fit.choices if not it.by_hand and it.which != self.as_written.which]
        hopeful = [it for it in choices if it.fits is not False]
        hopeful = hopeful or sorted(choices, key=lambda it: it.needed_bytes or math.inf)[:1]
        offered = (it for number, it in enumerate(hopeful) if it.plan is not None or not number)
        return next((it for it in offered if it.which not in self.written), None)

    def _seconds(self, report: Report) -> float | None:
        if self._times is None or self._target.device is None:
            return None
        if report.policy == self.report.policy and report.at == self.report.at:
            return 0.0
        if microbatches_in(report.at) > 1 and report.complete:  # each reads the parameters again
            return times(report, self._target.device).total - self._times.total
        extra, before = (added(it, self._target.device) for it in (report, self.report))
        return None if extra is None or before is None else extra - before

    def ordered(
        self, groups: Iterable[Sequence[Report]], failed: Iterable[ComparisonRow], *, donating: bool
    ) -> tuple[FitChoice, ...]:
        """Each program once, and what failed; in order. What is ``donating`` besides takes another look at each."""
        choices = [self.as_written]
        for reports in groups:
            if any(report.policy == self.report.policy and report.at == self.report.at for report in reports):
                continue  # what does the same as the program as written
            first = min(reports, key=lambda report: report.policy != "none")
            choices.append(self.choice(first))
        choices += (
            FitChoice(what_of(self._facts, row), row.policy, row.at, None, None, None, None, unusable=row.error)
            for row in failed
        )
        choices = [replace(it, unusable=it.unusable or self.written.get(it.which, "")) for it in choices]
        more = self._donating(choices) if donating else ()
        more = (replace(it, unusable=self._undonatable or self.written.get(it.which, "")) for it in more)
        return ordered([*choices, *more])

    def _donating(self, choices: Sequence[FitChoice]) -> Iterator[FitChoice]:
        """What is needed with donation: as written, and where that is not enough, under the cheapest first."""
        donation, memory, lowest, fitting = self._donation, self._target.memory, math.inf, 0
        if donation is None:
            return
        usable = [choice for choice in choices if not choice.unusable and choice.needed_bytes is not None]
        enough = min((choice.cost for choice in usable if choice.fits), default=(math.inf, math.inf))
        others = sorted((it for it in usable if not it.fits and it.cost < enough), key=lambda it: it.cost)
        for choice in dict.fromkeys((self.as_written, *others)):
            also = "" if choice is self.as_written else f" and {choice.what}"
            draft = replace(
                choice,
                what=f"donate {', '.join(donation.names)}{also}",
                donate=donation.names,
                # Of a plan an edit is the code, and half of what is to be written would be none.
                code="\n".join(filter(None, (choice.code, donation.code))) if choice.code or not choice.plan else "",
            )
            report = self._facts.under(draft).report(memory)
            if (report.peak_bytes or 0) <= min(_LOWER * (choice.needed_bytes or 0), lowest - 1):
                lowest = report.peak_bytes or 0
                peak = {"needed_bytes": lowest, "needed_low": report.peak_low, "needed_high": report.peak_high}
                found = replace(draft, **peak).within(self._target.capacity)
                yield found
                fitting += bool(found.fits and choice.fits is not True)
                if fitting == _ENOUGH:
                    return


def _rows(variant: Variant) -> int:
    """How many rows the largest product of a forward half has."""
    return max((_jax.product(eqn) for _, eqn in walk(variant.retrace.forward.closed, once=True)), default=(0, 0))[1]


# ------------------------------------------------------------------------------------------------ what they are called


def what_of(facts: Facts, choice: Report | ComparisonRow) -> str:
    """A choice in one line, such as "@jax.checkpoint on block"."""
    plan = facts.engine.plans.get(choice.policy)
    if plan is not None and plan.names:
        away = sum(value.offloaded for value in plan.names)
        values = len(plan.names) - away
        done = [f"save {values} value{'s' * (values != 1)}"] * (values > 0)
        done += [f"offload {away}" if done else f"offload {away} value{'s' * (away != 1)}"] * (away > 0)
        return f"{', '.join(done)} of {_place(facts, plan.at)}, repeat the rest"
    if choice.policy != MIXED:
        return _what(choice.policy, _place(facts, choice.at))
    by_policy: dict[tuple[str, str], list[str]] = {}
    for at, policy in policy_of_each(choice.at).items():
        by_policy.setdefault((policy, at * bool(_IN_PARTS.search(at))), []).append(_place(facts, at))
    return ", ".join(_what(policy, " and ".join(places)) for (policy, _), places in by_policy.items())


def _what(policy: str, place: str) -> str:
    if microbatches_in(place) > 1:
        each = "" if policy in ("none", "as_written") else f", each under {policy}"
        return f"the gradient in {microbatches_in(place)} microbatches{each}"
    if policy == "as_written":
        return "as written"
    if _IN_PARTS.search(place):
        under = "a checkpoint" if policy == "nothing_saveable" else policy
        return f"{place} parts" + f", each under {under}" * (policy != "none")
    if policy == "none":
        return f"no checkpoint on {place}"
    return f"@jax.checkpoint on {place}" if policy == "nothing_saveable" else f"{policy} at {place}"


def _place(facts: Facts, at: str) -> str:
    """How a place is called in a sentence."""
    primal = facts.engine.primal
    sites = {site.key for site in primal.table.sites}
    if at == "function":
        return primal.name
    if at == "sites":
        return " and ".join(sorted(sites)) if len(sites) < 4 else f"all {len(sites)} checkpoints"
    parts = _PARTS.fullmatch(at)
    if at in sites or at in primal.possible.callees or parts is None:
        return at
    name, calls, group = parts["name"], parts["slice"], parts["group"]
    if calls == "::2":
        name = f"every second call of {name}"
    elif calls and calls.startswith(":") and calls[1:].isdigit():
        name = f"the first {calls[1:]} calls of {name}"
    elif calls:
        name = f"{name}[{calls}]"
    return f"every {group} calls of {name} together" if group else name


def with_imports(code: str) -> str:
    """Code to paste, with what it needs that a program with JAX may not have."""
    needed = {
        "functools": "functools." in code.partition("  # ")[0],
        "jax": "jax.lax.map(" in code or "jax.tree.map(" in code,
    }
    imports = "".join(f"import {name}\n" for name, is_needed in needed.items() if is_needed)
    return f"{imports}\n{code}" if imports else code


# ------------------------------------------------------------------------------------------------------ the batch


def largest_batch(facts: Facts, target: Target, written: Report, by_xla: int | None = None) -> int | None:
    """The largest batch with which the program as written fits, by lines through what it needs at two; None if unknown.

    It is a batch that was traced. The function is traced anew for each, which whoever counts its calls sees. A batch
    that is far from what it is says nothing: then there is none.

    Args:
        facts: of the traced function.
        target: what is to be fitted.
        written: the report of the program as written.
        by_xla: what XLA says that it needs, which an estimate is about as far from at other batches.
    """
    for batch, leaves in batches(facts.engine.given, facts.engine.step):
        arrays = facts.engine.given.signature.arrays
        fixed = sum(_jax.nbytes(leaf.value) for leaf in arrays if leaf.name not in leaves)
        needed = facts.memo.setdefault((__name__, target.memory, batch, *leaves), {batch: written.peak_bytes or 0})
        capacity = target.capacity
        if by_xla is not None:
            fixed = 0 if fixed >= min(by_xla, needed[batch]) else fixed
            capacity = fixed + math.floor(_SPARED * (capacity - fixed) * (needed[batch] - fixed) / (by_xla - fixed))
            capacity = max(capacity, needed[batch]) if by_xla <= target.capacity else capacity
        if capacity - fixed > _FAR * (needed[batch] - fixed):
            return None
        guess = batch + math.floor(batch * (capacity - needed[batch]) / max(falling(written), 1))
        if batch <= guess < batch + _PARTS_OF_BATCH[-1]:
            guess = 2 * batch  # what is cut into parts may take none that is so near
        for _ in range(_TRACED):
            size = _between(needed, capacity) if len(needed) > 1 else max(guess, 1)
            if size in needed:
                break
            for part in _PARTS_OF_BATCH:  # a batch may be cut into equal parts, or lie on several devices
                size -= size % part
                found = _needed(facts, target, dict.fromkeys(leaves, size)) if size and size not in needed else None
                if found is not None:
                    needed[size] = found
                    break
            else:
                break
        if len(needed) > 1:
            return max((size for size, bytes_ in needed.items() if bytes_ <= capacity), default=None)
    return None


def _between(needed: Mapping[int, int], capacity: int) -> int:
    """The next batch to trace: where the line through the two nearest to the capacity meets it."""
    fitting = [size for size, bytes_ in needed.items() if bytes_ <= capacity]
    others = [size for size in needed if size not in fitting]
    low, high = max(fitting, default=0), min(others, default=0)
    one, other = (low, high) if fitting and others else sorted(fitting)[-2:] if fitting else (high, max(others))
    slope = (needed[other] - needed[one]) / (other - one)
    if slope <= 0:
        return low
    size = math.floor(one + (capacity - needed[one]) / slope)
    return max(low, min(size, high - 1) if others else size)


def _needed(facts: Facts, target: Target, leading: Mapping[str, int]) -> int | None:
    """What the program needs with arguments of other sizes; None where it takes none such."""
    engine = facts.engine
    try:
        other = Facts(engine.retraced(engine.given.fun, leading))
        return other.under().schedule(target.memory).highest()[0]
    except Exception:  # noqa: BLE001 - whatever the user's function raises when it is given another batch
        return None
