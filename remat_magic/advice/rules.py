"""Advice: what about a policy, or a program, costs memory or has no effect, with the line, the figure, the mend.

Each rule is a function of what is known; it gives advice only where JAX's own jaxprs show the fault, and is silent
otherwise. Nothing is compiled. What a user has to choose by is a figure: every finding has one, but for those that say
that something has no effect.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import linecache
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from remat_magic import _jax, units
from remat_magic.advice.logits import Logits, logits_of
from remat_magic.devices import Device
from remat_magic.engine.calls import calls_scoped_modules, frames
from remat_magic.engine.checkpoint_writer import Checkpoint
from remat_magic.engine.engine import Engine, with_cast
from remat_magic.engine.sites import nearest_span
from remat_magic.facts.buffers import PLAIN, DeviceMemory, memory_of
from remat_magic.facts.causes import Widened, given_back, widened
from remat_magic.facts.facts import Facts, Variant
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.walk import Maker, last_reads, makers, walk
from remat_magic.parsing import parse_source
from remat_magic.planning.fit import what_of
from remat_magic.planning.places import searched
from remat_magic.planning.search import Planner, planner, saved_by
from remat_magic.policies import MIXED, Key
from remat_magic.records import Advice, FitChoice, Listed, PlannedValue, RematError, Report, SourceSpan
from remat_magic.records.fit import by_hand, microbatches_in


@dataclass(frozen=True, slots=True, eq=False)
class GivenName:
    """One place of the program that names a value; ``sites`` are the checkpoint sites around it, outermost first."""

    name: str
    source: SourceSpan | None
    sites: tuple[str, ...]
    makers: tuple[Maker, ...]


def given_names(engine: Engine) -> list[GivenName]:
    """All names in the order of the program; a body that several calls share counts once."""
    names: dict[tuple[int, tuple[str, ...]], GivenName] = {}
    for scope, eqn in walk(engine.primal.provenances.closed):
        name = _jax.checkpoint_name_of(eqn)
        if name is None:
            continue
        sites = tuple(engine.primal.site_of(outer) for outer in scope.around() if _jax.is_checkpoint(outer))[::-1]
        if (id(eqn), sites) not in names:
            source = nearest_span(engine.primal.provenances.spans, scope, eqn)
            names[id(eqn), sites] = GivenName(name, source, sites, tuple(makers(scope, eqn.invars[0])))
    return list(names.values())


_LOGITS = 0.1  # of what is saved, or of the peak: logits that take less are not worth a sentence


@dataclass(eq=False)
class Case:
    """What the rules look at. ``in_force`` has for each site, and for the whole function (""), the policy in force."""

    variant: Variant
    memory: DeviceMemory  # as in which the peaks are
    report: Report = field(init=False)
    names: list[GivenName] = field(init=False)
    in_force: dict[str, Key] = field(init=False)
    facts: Facts = field(init=False)

    def __post_init__(self) -> None:
        self.facts, self.report = self.variant.facts, self.variant.report(self.memory)
        self.names = given_names(self.facts.engine)
        self.in_force = {site.key: key_of(site.policy) for site in self.facts.engine.primal.table.sites}
        if self.report.policy in ("as_written", "mixed"):
            return
        policy, at, engine = key_of(self.report.policy), self.report.at, self.facts.engine
        if at == engine.default_at == "function" and len(engine.primal.table.sites) == 1:
            at = "sites"  # the function's own decorator
        if at == "function":
            # A checkpoint around others overrules them, but for jax_remat3.
            self.in_force = {"": policy, **(self.in_force if engine.primal.remat3 else {})}
        self.in_force |= {key: policy for key in self.in_force if key and at in ("sites", key)}

    def other(self, policy: str, at: str | None = None) -> Report | None:
        """The report of another policy, at the same place or another one; None where there is none."""
        if self.report.policy == MIXED:
            return None
        try:
            report = self.facts.under(policy, at or self.report.at).report(self.memory)
        except RematError:
            return None
        return None if report.backward_error else report

    @property
    def policy_in_force(self) -> Key | None:
        """The key of the policy; of the program as written that of its checkpoints, None where these have several."""
        if self.report.policy != "as_written":
            return key_of(self.report.policy)
        everywhere = self.report.at in ("sites", self.facts.engine.default_at)
        written = {key for site, key in self.in_force.items() if everywhere or self.report.at == site}
        return written.pop() if len(written) == 1 else None

    @property
    def built(self) -> bool:
        """Whether the policy is one that was chosen, not the program as written or without the checkpoint."""
        return self.report.policy not in ("as_written", "none", "mixed")

    @cached_property
    def saved(self) -> tuple[Planner, frozenset[str]] | None:
        """What plans for the place choose among, and the names there of what the policy keeps; None where unknown."""
        selection = self.variant.selection
        if selection.plan is not None or selection.resolved is None or self.report.backward_error:
            return None
        try:
            place = planner(self.facts, self.report.at)
            return place, saved_by(self.facts, place.parts, selection.resolved) & place.every_value().keys()
        except RematError:
            return None

    def keeping(self, keys: Collection[str], label: str) -> Report | None:
        """The report of keeping just the values of these names at the place; None where JAX cannot."""
        assert self.saved is not None
        place, _ = self.saved
        values = tuple(value for key, value in place.every_value().items() if key in keys)
        if not values:
            return self.other("nothing_saveable")
        try:
            return self.facts.under(place.draft(label, 0, values, label)).report(self.memory)
        except RematError:
            return None

    def under_checkpoint(self, sources: Collection[SourceSpan]) -> tuple[int, int, str] | None:
        """By how much less is saved, and how much more recomputed, with these lines of a function in a checkpoint.

        And what to do for it. None where they can be in none, or JAX cannot tell.
        """
        if len({(source.file, source.function) for source in sources}) != 1 or self.facts.engine.devices > 1:
            return None
        of, lines = next(iter(sources)), [line for each in sources for line in (each.line, each.end_line)]
        part = lines_of_part(of.file, min(lines), max(lines))
        if part is None:
            return None
        first, last = part
        try:
            before, after = under_checkpoint(self.facts, of, first, last)
        except RematError:
            return None
        if before.saved_bytes != self.report.saved_bytes or after.backward_error:
            return None
        where = f"line {first}" if first == last else f"lines {first} to {last}"
        mend = f"Put {where} of {of.function} in a function of its own: jax.checkpoint(part)(...) keeps its inputs."
        return before.saved_bytes - after.saved_bytes, after.recomputed_flops - before.recomputed_flops, mend

    @cached_property
    def lower(self) -> list[Report]:
        """What lowers the peak clearly and is known as code, of the choices that ``trace.fit`` tries first."""
        if self.report.policy == MIXED or self.report.backward_error or not self.report.peak_bytes:
            return []
        tried = searched(self.facts, self.memory, _TRIED_FIRST)
        tried = [it for it in tried if it.peak_bytes and (it.code if by_hand(it.at) else it.policy != "none")]
        return [it for it in tried if (it.peak_bytes or 0) <= _LOWER * self.report.peak_bytes]

    @cached_property
    def logits(self) -> list[tuple[Logits, int, int, Report | None]]:
        """The logits of losses that take much: the bytes of them that are saved, and held at the peak, and a choice.

        By that most of what the peak is lower are logits.
        """
        report, large = self.report, list[tuple[Logits, int, int, Report | None]]()
        for logits in logits_of(self.facts):
            saved, alive = logits.saved(report.residuals), 0
            if not report.backward_error:
                alive = logits.alive(self.variant.timeline(self.memory).alive)
            if saved > _LOGITS * report.saved_bytes or alive > _PART * (report.peak_bytes or 0):
                large.append(
                    (logits, saved, alive, _cheapest([it for it in self.lower if self._frees(it, logits, alive)]))
                )
        return large

    def _frees(self, choice: Report, logits: Logits, alive: int) -> bool:
        spared = (self.report.peak_bytes or 0) - (choice.peak_bytes or 0)
        held = logits.alive(self.facts.under(choice.policy, choice.at).timeline(self.memory).alive)
        return 2 * (alive - held) >= max(alive, spared)


def key_of(policy: str) -> Key:
    """The key of a report's or a site's policy, which need be no expression where it is one of the user's own."""
    try:
        return Key.parse(policy)
    except RematError:
        return Key.own(policy)


def at_line(span: SourceSpan | None) -> str:
    """A line of the user's after "at", empty where it is not known."""
    return "" if span is None else f" at {span.place}"


# ------------------------------------------------------------------------------------------------- what has no effect


def stale(case: Case) -> Iterator[Advice]:
    """Functions redefined since JAX traced them."""
    for name in case.facts.engine.stale:
        yield Advice(
            "stale-trace",
            f"JAX still holds an older trace of {name}, from before it or what it calls was redefined: jit and grad "
            "may run that one.",
            "Call jax.clear_caches().",
            stake=case.report.peak_bytes or case.report.saved_bytes,  # all that is said here is in doubt
        )


def unknown_name(case: Case) -> Iterator[Advice]:
    """A name that the function does not have, or that is given where the policy's checkpoint does not reach."""
    function, names = case.facts.engine.primal.name, case.facts.engine.names
    for policy in dict.fromkeys(case.in_force.values()):
        for name in [name for name in policy.names if name not in names]:
            close = difflib.get_close_matches(name, names, 1)
            mend = f"Name a value: checkpoint_name(x, {name!r})."
            if names:
                mend = f"Write {close[0]!r}." if close else f"Use one of {', '.join(map(repr, names))}."
            yield Advice(
                "unknown-name",
                f"The policy asks for {name!r}, which {function} does not have.",
                mend,
                stake=_changed(case, policy, name, close[0]) if close else None,
            )
    for site, policy in case.in_force.items():
        for name in policy.names:
            places = [place for place in case.names if place.name == name]
            if places and site and not any(site in place.sites for place in places):
                yield Advice(
                    "unknown-name",
                    f"The policy of {site} asks for {name!r}, which is named outside {site}"
                    f"{at_line(places[0].source)}: a policy sees only what is computed under its checkpoint.",
                    f"Compute and name it inside {site}, or put the checkpoint with this policy around both.",
                    source=places[0].source,
                )


def _changed(case: Case, policy: Key, wrong: str, right: str) -> int | None:
    """How many bytes more are saved if a policy asks for another name; None where that is not known."""
    mended = case.other(str(policy.renamed(wrong, right))) if policy == case.policy_in_force else None
    return None if mended is None else abs(mended.saved_bytes - case.report.saved_bytes)


def saved_in_vain(case: Case) -> Iterator[Advice]:
    """A value saved by name whose operation runs again all the same."""
    in_vain = {note.about for note in case.report.notes if note.kind == "saved-in-vain"}
    rows = {(row.name, row.primitive): row for row in reversed(case.report.residuals) if row.name}
    for row in [row for about, row in rows.items() if about in in_vain]:
        given = next((place for place in case.names if place.name == row.name), None)
        named = [maker for maker in (given.makers if given else ()) if maker.eqn is not None]
        operands = (before for maker in named for atom in maker.eqn.invars for before in makers(maker.scope, atom))
        before, inputs = [maker for maker in operands if maker.eqn is not None], list[str]()
        for maker in before:
            place = case.facts.engine.primal.provenances.of(maker.eqn, maker.scope.chain)
            inputs.append(f"the {_jax.primitive_name(maker.eqn)}{at_line(place.source if place else None)}")
        spared = _named_before(case, row.name or "", before)
        if spared <= 0:
            continue
        what = " and ".join(dict.fromkeys(inputs))
        yield Advice(
            "saved-in-vain",
            f"{row.name!r} takes {units.nbytes(row.nbytes)}, and {row.primitive}{at_line(row.source)} runs again "
            "all the same: its derivative reads the value from before it was named.",
            f"Name {what} instead: recomputing {row.primitive} from it costs little.",
            spared,
            "FLOPs",
            row.source,
            stake=row.nbytes,
        )


def _named_before(case: Case, name: str, makers: Sequence[Maker]) -> int:
    """The FLOPs that are spared where what these make is named in the place of what has a name."""
    if case.saved is None:
        return 0
    place, saved_names = case.saved
    before = {(id(_jax.traceback_of(maker.eqn)), _jax.primitive_name(maker.eqn)) for maker in makers}
    named = place.parts.naming.values
    instead = {
        key for key, it in named.items() if (id(_jax.traceback_of(it.eqn)), _jax.primitive_name(it.eqn)) in before
    }
    rest = {key for key in saved_names if named[key].name != name}
    after = case.keeping(rest | instead, f"{case.report.label} but before {name}") if instead else None
    return 0 if after is None else case.report.recomputed_flops - after.recomputed_flops


def changes_nothing(case: Case) -> Iterator[Advice]:
    """A policy that does what is done without it."""
    report = case.report
    if not case.built or report.backward_error:
        return
    for key, text in (("none", "no checkpoint at all"), ("as_written", "the program as written")):
        other = case.other(key)
        is_none = key == "as_written" and report.at == "function" and not case.facts.engine.primal.table.sites
        if other is not None and not is_none and _essence(report) == _essence(other):
            yield Advice(
                "changes-nothing",
                f"{report.policy} at {report.at} saves the same {units.nbytes(report.saved_bytes)} and recomputes the "
                f"same as {text}.",
                "Leave it off, or choose a policy that saves less.",
                report.saved_bytes,
                "bytes",
            )
            return


def _essence(report: Report) -> Any:
    saved = sorted((row.type, row.kind, row.nbytes) for row in report.residuals if row.kind != "literal")
    return saved, report.recomputed_flops, len(report.recomputed)


_HARDLY = 0.9  # of the peak without: a checkpoint that leaves more of it is not worth what it costs


def only_costs(case: Case) -> Iterator[Advice]:
    """A checkpoint around the whole function that hardly lowers the peak."""
    report = case.report
    if report.at != "function" or not case.built or report.saved_bytes or not report.recomputed_flops:
        return
    other = case.other("none")
    if other is None or report.peak_bytes is None or report.peak_bytes < _HARDLY * (other.peak_bytes or 0):
        return
    yield Advice(
        "only-costs",
        f"{report.policy} around the whole of {report.function} saves nothing and recomputes everything, and the "
        f"estimated peak is hardly lower: {units.nbytes(report.peak_bytes)}, without it "
        f"{units.nbytes(other.peak_bytes or 0)}.",
        "Checkpoint its parts, such as each layer: what one part recomputes is freed before the next.",
        report.recomputed_flops,
        "FLOPs",
        stake=other.saved_bytes,
    )


def in_update(case: Case) -> Iterator[Advice]:
    """A peak where no checkpoint reaches: in what a training step does after its gradient."""
    report, engine = case.report, case.facts.engine
    if not report.in_update:
        return
    donation, spared, more = engine.donation, 0, dict[str, Any]()
    if donation is None:
        mend = "Choose an optimizer that keeps less, or keep its state in fewer bits."
    else:
        code, _, where = donation.code.partition("  # ")
        mend, more["code"] = f"Write {code}, which {where.rpartition('; ')[2]}.", code
    if donation is not None and case.memory != PLAIN:  # XLA for CPUs takes about as much beside what is donated
        donating = FitChoice("", report.policy, report.at, None, None, None, None, donate=donation.names)
        with contextlib.suppress(RematError):  # of a policy that no key stands for
            spared = (report.peak_bytes or 0) - (case.facts.under(donating).report(case.memory).peak_bytes or 0)
    if spared > 0:
        mend = f"{mend} Then the estimated peak is {units.nbytes((report.peak_bytes or 0) - spared)}."
        more |= {"figure": spared, "unit": "bytes"}
    yield Advice("peak-in-update", report.in_update, mend, stake=report.peak_bytes, **more)


# --------------------------------------------------------------------------------------------- what would free memory

_LOWER = 0.8  # of the peak: what is below that is worth a checkpoint
_NEARLY = 1.25  # of the lowest peak: what comes so near and recomputes less is the better
_TRIED_FIRST = 6  # choices of the search, which begins with what promises most


def no_checkpoint(case: Case) -> Iterator[Advice]:
    """The cheapest choice near the lowest peak, of those that ``trace.fit`` tries first."""
    best = _cheapest(case.lower)
    if best is not None and best not in [chosen for *_, chosen in case.logits]:
        kind = "steps-together" if "/" in best.at else "no-checkpoint-there"
        sites = (*case.facts.engine.primal.table.sites, *case.facts.engine.primal.possible.sites)
        site = next((site for site in (*sites, *case.facts.engine.primal.possible.groups) if site.key == best.at), None)
        yield _choosing(case, best, kind, site.source if site else None)


def _cheapest(choices: Sequence[Report]) -> Report | None:
    """What repeats least of what comes near the lowest peak."""
    most = _NEARLY * min((it.peak_bytes or 0 for it in choices), default=0)
    near = [it for it in choices if (it.peak_bytes or 0) <= most]
    return min(near, key=lambda it: (it.repeated_flops, it.peak_bytes), default=None)


def _choosing(
    case: Case, best: Report, kind: str, source: SourceSpan | None, begins: str = "", stake: int | None = None
) -> Advice:
    """To choose what lowers the peak."""
    peak, lower = case.report.peak_bytes or 0, best.peak_bytes or 0
    code, _, where = best.code.partition("  # ")
    place = "statement that takes the gradient" if microbatches_in(best.at) > 1 else "call"
    where = where or f"in place of the {place}" * by_hand(best.at)
    again = ""
    if case.report.forward_flops:
        now, then = (choice.repeated_flops / case.report.forward_flops for choice in (case.report, best))
        again = f", and {then:.0%} of the forward pass is repeated (now {now:.0%})"
    overlap = (best.peak_high or lower) >= (case.report.peak_low or peak)
    doubt = " The ranges of both overlap, so XLA may need as much: trace.fit asks it." if overlap else ""
    what = f"{what_of(case.facts, best)} the estimated peak is {', not '.join(units.apart(lower, peak))}"
    mend = f"Write {code}{f' {where}' if where.startswith('on ') else f', {where}' if where else ''}."
    sentence, spared = f"{begins}With {what}{again}.{doubt}", peak - lower
    return Advice(kind, sentence, mend, spared, "bytes", source, best.policy, best.at, stake, code=code)


def softmax_of_logits(case: Case) -> Iterator[Advice]:
    """Logits that take a large part of the memory, and the choice by which they do not."""
    report = case.report
    for logits, saved, alive, best in case.logits:
        takes = [_of(saved, report.saved_bytes, "saved")] if saved else []
        takes += [f"with its gradients {_of(alive, report.peak_bytes or 0, 'at the estimated peak')}"] if alive else []
        what = f"The softmax of the logits {logits.type}{at_line(logits.source)} takes {', and '.join(takes)}."
        if best is not None:
            yield _choosing(case, best, "softmax-of-logits", logits.source, f"{what} ", max(saved, alive))
        elif alive > (1 - _LOWER) * (report.peak_bytes or 0):
            mend = "Compute the product and the loss of each row in a function head: trace.fit then tries it in parts."
            yield Advice("softmax-of-logits", what, mend, source=logits.source, stake=alive)


def _of(part: int, whole: int, what: str) -> str:
    return f"{units.nbytes(part)} of the {units.nbytes(whole)} {what} ({units.percent(part, whole)})"


_HALF = {"bf16": "bfloat16", "f16": "float16"}
_WIDE_PART = 0.25  # of all that is saved: from there on what is wider is worth a sentence


def too_wide(case: Case) -> Iterator[Advice]:
    """Wide residuals of narrow values that met wide arguments, or else in a program of narrow weights."""
    engine = case.facts.engine
    cause = widened(case.variant.retrace.forward, engine.primal.provenances)
    if cause is not None and cause.nbytes >= _WIDE_PART * case.report.saved_bytes:
        yield from _cast(case, cause)
        return
    sizes = Counter[str]()
    for leaf in engine.primal.signature.arrays:
        sizes[_jax.short_dtype(leaf.value)] += leaf.value.size * leaf.value.dtype.itemsize
    halves = sum(size for kind, size in sizes.items() if kind in _HALF)
    if not halves or 2 * halves < sizes.total():
        return
    rows = [row for row in case.report.residuals if row.kind == "intermediate" and row.kept]
    # Of logits the rule above speaks.
    wide = [row for row in rows if row.dtype in ("f32", "f64") and not any(of.saved([row]) for of, *_ in case.logits)]
    total = sum(row.nbytes for row in wide)
    if not wide or total < _WIDE_PART * case.report.saved_bytes:
        return
    largest = max(wide, key=lambda row: row.nbytes)
    kind = max(_HALF.keys() & sizes.keys(), key=lambda kind: sizes[kind])
    lines = [{row.source for row in some if row.source} for some in (wide, [largest])]
    parts = (case.under_checkpoint(some) for some in lines) if not engine.primal.table.sites else ()
    part = next(filter(None, parts), None)
    if part is None or part[0] <= total // 2:
        return
    spared, _, mend = part
    maker = largest.primitive or "an argument"
    yield Advice(
        "wide-residuals",
        f"The arguments are {kind}, and {units.nbytes(total)} of the {units.nbytes(case.report.saved_bytes)} saved are "
        f"wider: the largest is {largest.type}, of {maker}{at_line(largest.source)}.",
        mend,
        spared,
        "bytes",
        largest.source,
        stake=total,
    )


def _cast(case: Case, cause: Widened) -> Iterator[Advice]:
    """What is wide because of some arguments, and what is saved less where the arguments are cast: by a retrace."""
    arrays = case.facts.engine.primal.signature.arrays
    names = [arrays[number].name for number in cause.arguments]
    whole = tuple(dict.fromkeys(arrays[number].argument for number in cause.arguments))
    spared: int | None = 0
    with contextlib.suppress(Exception):  # the user's own, where the types do not fit then
        mended = with_cast(case.facts.engine, whole, _HALF[cause.narrow])
        again = None if mended is None else case.variant.of(mended).report()
        spared = None if again is None else case.report.saved_bytes - again.saved_bytes
    if spared is None or spared > _PART * case.report.saved_bytes:
        less = "" if spared is None else f": {units.nbytes(spared)} less is saved"
        yield Advice(
            "wide-residuals",
            f"{units.nbytes(cause.nbytes)} of the {units.nbytes(case.report.saved_bytes)} saved are f32 because "
            f"{cause.narrow} values meet {_listed(names)} in f32, first{at_line(cause.source)}.",
            f"Cast the f32 of {_listed(whole)} to {cause.narrow} before{less}.",
            spared,
            "" if spared is None else "bytes",
            cause.source,
            stake=cause.nbytes,
        )


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _MOST
    return f"{', '.join(names[:_MOST])} and {more} more" if more > 0 else ", ".join(names)


def argument_given_back(case: Case) -> Iterator[Advice]:
    """Large results that are arguments."""
    step = case.facts.engine.step
    for found in given_back(case.facts.engine):
        if found.nbytes > _PART * (case.report.peak_bytes or math.inf):
            names, function = _listed(found.arguments), case.report.function if step is None else step.given.name
            whose = f"The loop{at_line(found.source)} stacks" if found.source else f"{function} returns"
            yield Advice(
                "argument-given-back",
                f"{whose} {names} unchanged, as a copy: {units.nbytes(found.nbytes)}.",
                f"Do not return {'it' if len(found.arguments) == 1 else 'them'}; use the argument instead.",
                found.nbytes,
                "bytes",
                found.source,
            )


# A chain of elementwise operations takes few FLOPs for each byte of its result, and recomputing it about as long as
# reading the result; a matmul over a hundred channels takes a hundred. It is also to be clearly better than what a
# checkpoint around everything exchanges bytes and FLOPs for.
_CHEAP = 10.0
_BETTER = 1.5
_PART = 0.05  # of all that is saved: what is smaller is not worth a sentence
_MOST = 3
_TRIED = 5  # of the candidates


def cheap_to_recompute(case: Case) -> Iterator[Advice]:
    """Kept values of one expression that take many bytes for the FLOPs that they spare.

    A checkpoint on its lines alone is at no place that there is, so that ``trace.fit`` has no such choice.
    """
    report, saved, work = case.report, case.report.saved_bytes, case.report.recomputed_flops
    if case.saved is None or not saved or case.built or case.facts.engine.primal.table.sites:
        return
    place, saved_names = case.saved
    base = place.graph.figures(saved_names)
    least, all_again = place.graph.predict(())
    usual = (all_again - work) / (saved - least) if saved > least else 0.0
    of_logits = {source for logits, *_ in case.logits for source in logits.sources}  # another rule speaks of these

    def is_cheap(spared: int, again: int) -> bool:
        return spared >= _PART * saved and again <= min(_CHEAP, usual / _BETTER) * spared

    groups, used = dict[SourceSpan, list[PlannedValue]](), place.graph.used(saved_names)
    for key, value in place.every_value().items():
        if key in used and value.source and value.source not in of_logits:
            groups.setdefault(value.source, []).append(value)
    candidates = list[tuple[float, SourceSpan]]()
    for source, values in groups.items():
        if sum(value.nbytes for value in values) >= _PART * saved:
            after = place.graph.figures(saved_names - {value.key for value in values})
            spared, again = base.saved_bytes - after.saved_bytes, after.recomputed_flops - base.recomputed_flops
            if is_cheap(spared, again):
                candidates.append((spared / max(again, 1), source))
    said = set[str]()
    for _, source in sorted(candidates, key=lambda one: -one[0])[:_TRIED]:
        rows = [row for row in report.residuals if row.source == source]
        readers = [reader.source for row in rows for reader in row.needed_by if reader.source]
        part = case.under_checkpoint({source, *readers})
        if part is None or len(said) == _MOST or part[2] in said or not is_cheap(*part[:2]):
            continue
        spared, again, mend = part
        said.add(mend)
        first, times = groups[source][0], sum(value.times for value in groups[source])
        yield Advice(
            "cheap-to-recompute",
            f"`{source.expression}`{at_line(source)} ({first.primitive}{f', {times:,} times' if times > 1 else ''}) "
            f"saves {units.nbytes(spared)} ({units.percent(spared, saved)} of all that is saved), which would take "
            f"{units.flops(again)} to compute again.",
            mend,
            spared,
            "bytes",
            source,
        )


# Of those with as much at stake the first comes first.
ANYWHERE: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    stale,
    in_update,
    unknown_name,
    saved_in_vain,
    changes_nothing,
    argument_given_back,
)
OF_GRADIENT: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    no_checkpoint,
    only_costs,
    cheap_to_recompute,
    softmax_of_logits,
    too_wide,
)
QUICK = frozenset((stale, unknown_name, saved_in_vain, changes_nothing, argument_given_back, too_wide))
"""Those that trace no other choices, but for the program without a checkpoint."""


def advise(variant: Variant, device: Device | None, *, quick: bool = False) -> Listed[Advice]:
    """Advice on one choice, what has most at stake first; the peaks are as on the device.

    Where ``quick``, only what takes no other choices to be traced.
    """
    try:
        case = Case(variant, memory_of(device))
    except RematError as error:
        if variant.selection.policy != "as_written" or str(error) not in variant.engine.notes:
            raise
        mend = "Choose 'nothing_saveable' at 'sites'."
        return Listed([Advice("complex-values", str(error), mend, policy="nothing_saveable", at="sites", share=1.0)])
    # What frees memory of the gradient alone lowers no peak that is elsewhere.
    rules = ANYWHERE if case.report.in_update else (*OF_GRADIENT, *ANYWHERE)
    findings = dict[tuple[str, str], Advice]()
    # Of calls that are alike it is said once.
    for advice in (advice for rule in rules if rule in QUICK or not quick for advice in rule(case)):
        findings.setdefault((advice.kind, advice.sentence), replace(advice, share=_share(case.report, advice)))
    return Listed(sorted(findings.values(), key=lambda advice: -advice.share))


def _share(report: Report, advice: Advice) -> float:
    """What part of the memory, or of the work, a finding speaks of."""
    flops = (report.forward_flops or 0) + (report.backward_flops or 0)
    work = (advice.figure or 0) / flops if advice.unit == "FLOPs" and flops else 0.0
    return min(max(work, (advice.stake or 0) / (report.peak_bytes or report.saved_bytes or 1)), 1.0)


# ------------------------------------------------------------------ lines of a function under a checkpoint of their own


def lines_of_part(file: str, first: int, last: int) -> tuple[int, int] | None:
    """The lines of the whole statements there; None where these cannot be put in a function of their own.

    They can where they follow one another in one block, and do no more than assign to variables or return.
    """
    module = parse_source("".join(linecache.getlines(file)))
    for node in ast.walk(module) if module else ():
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            part = [it for it in block if it.lineno <= last and first <= it.end_lineno] if type(block) is list else []
            if not part or first < part[0].lineno or part[-1].end_lineno < last:
                continue
            if all(isinstance(it, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return) for it in part) and not any(
                isinstance(getattr(within, "ctx", None), ast.Store) and not isinstance(within, ast.Name | ast.Tuple)
                for it in part
                for within in ast.walk(it)
            ):
                return part[0].lineno, part[-1].end_lineno
    return None


def under_checkpoint(facts: Facts, of: SourceSpan, first: int, last: int) -> tuple[Report, Report]:
    """The report of a program as it is, and with some lines of the function ``of`` under a checkpoint at each run.

    RematError where the lines call modules of linen or haiku.
    """
    closed, anew, checkpoint = facts.engine.primal.provenances.closed, Rewriter(), Checkpoint(function="part")

    def rewritten(jaxpr: Any) -> Any:
        return anew(jaxpr, written)

    def inside(eqns: Iterable[Any]) -> Iterator[Any]:
        return (eqn if _jax.is_custom_rule(eqn) else _jax.map_jaxprs(eqn, rewritten) for eqn in eqns)

    def written(jaxpr: Any, _: Renamed) -> Iterator[Any]:
        last_read, number = last_reads(jaxpr.eqns, jaxpr.outvars), 0
        for begin, end in _runs(jaxpr, of, first, last):
            yield from inside(jaxpr.eqns[number:begin])
            eqns, number = jaxpr.eqns[begin:end], end
            later = [var for eqn in eqns for var in eqn.outvars if last_read.get(var, -1) >= end]
            yield from [checkpoint.around(jaxpr, eqns, later)] if later else eqns
        yield from inside(jaxpr.eqns[number:])

    return _report(facts.engine, closed), _report(facts.engine, rewritten(closed))


def _runs(jaxpr: Any, of: SourceSpan, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The equations of a jaxpr that the lines make, each time that they are run by themselves."""
    begin, begun = None, None
    for number, eqn in enumerate(jaxpr.eqns):
        stack = frames(eqn)
        within = [
            code.co_filename == of.file
            and code.co_name == of.function
            and first <= ([*code.co_positions()][instruction // 2][0] or 0) <= last
            for code, instruction in stack
        ]
        here = any(within)
        if here and calls_scoped_modules(stack[: within.index(True)]):
            raise RematError("a module that keeps its parameters in a scope of its own leaks them from a checkpoint.")
        if begin is not None and (not here or stack == begun):
            yield begin, number
            begin = None
        if here and begin is None:
            begin, begun = number, stack
    if begin is not None:
        yield begin, len(jaxpr.eqns)


def _report(engine: Engine, closed: Any) -> Report:
    leaves = engine.primal.signature.arrays
    wrt = tuple(number for number, leaf in enumerate(leaves) if leaf.differentiated)
    with _jax.tracing(_jax.Generation(), engine.primal.remat3, _jax.x64()):
        other = Engine(_jax.as_function(closed), tuple(leaf.value for leaf in leaves), {}, wrt, False)
        return Facts(other).under().report()
