"""Places that could have a checkpoint and have none: finding them, and putting checkpoints there.

A place is a function that is called, by its definition. Its key, as ``at=``, is the function's name; ``block[::2]`` is
every second of its calls, ``block[:8]`` the first eight, ``block/3`` one checkpoint around each three in a row: where a
loop makes one call in each step, JAX's loop or one of Python, around three of its steps. Functions that have a
checkpoint have such places too.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat_magic import _jax
from remat_magic.engine.calls import Callee, Calls, Interval
from remat_magic.engine.segments import SHORTEST, Checkpoint, in_segments, segment_of
from remat_magic.engine.site_code import Loop, code_of, code_of_calls, code_of_group
from remat_magic.engine.sites import PUT_AT, Identity, SiteTable, definition, identity, keys_of
from remat_magic.engine.spellings import default_texts, spellings
from remat_magic.engine.whole_steps import Steps
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.spans import Spans
from remat_magic.jaxprs.walk import scopes, walk
from remat_magic.records import RematError, Site
from remat_magic.user_files import is_user_file

__all__ = ["Intervals", "PossibleSites", "Where", "possible_sites"]

_KEY = re.compile(r"(?P<name>.+?)(?P<slice>\[(-?\d*):(-?\d*)(?::(-?\d*))?\])?(?:/(?P<group>\d+))?")


@dataclass(frozen=True, slots=True)
class Where:
    """Which calls of a function have a checkpoint.

    Attributes:
        callee: the function.
        calls: which of its calls, in the order of the program.
        group: how many calls after one another one checkpoint is around.
        decorated: whether these calls have a checkpoint already.
    """

    callee: Callee
    calls: slice = field(default_factory=lambda: slice(None))
    group: int = 1
    decorated: bool = False


@dataclass(frozen=True, slots=True)
class PossibleSites:
    """The places of a program that have no checkpoint.

    Attributes:
        sites: each as a site.
        callees: the functions by their keys.
        decorated: those that have a checkpoint, by the keys of their sites.
        loops: by key of either kind the loop that makes one call in each step, the longest of several.
        besides: the keys of either kind of which there are calls that no such loop makes.
        groups: steps of these loops that are worth a checkpoint around them, as sites.
    """

    sites: tuple[Site, ...]
    callees: Mapping[str, Callee]
    decorated: Mapping[str, Callee]
    loops: Mapping[str, Loop]
    besides: frozenset[str]
    groups: tuple[Site, ...]

    def where(self, key: str) -> Where | None:
        """What a key asks for; None where it is of no such place.

        Raises:
            RematError: there is nothing to group, or no call is chosen.
        """
        if key in self.decorated:
            return None
        if key in self.callees:
            return Where(self.callees[key])
        match = _KEY.fullmatch(key)
        name = match["name"] if match else ""
        callee = self.decorated.get(name) or self.callees.get(name)
        if match is None or callee is None:
            return None
        chosen = slice(None)
        if match["slice"]:
            chosen = slice(*(int(text) if text else None for text in match["slice"][1:-1].split(":")))
        group = int(match["group"] or 1)
        if group < 1 or chosen.step == 0:
            raise RematError(f"at={key!r}: a step, or a number of calls in a group, is 1 at least.")
        if name in self.decorated and match["slice"]:  # their calls share one trace, which does not tell them apart
            raise RematError(
                f"at={key!r}: {name} has a checkpoint of its own: choose all of its calls, or groups of them."
            )
        return Where(callee, chosen, group, name in self.decorated)

    def code(self, key: str, policy: str = "") -> str:
        """What to write for a checkpoint at a place; arguments are those of ``where`` and ``code_of``."""
        where = self.where(key)
        assert where is not None
        if where.group > 1:
            name = _KEY.fullmatch(key)["name"]  # pyright: ignore[reportOptionalSubscript] - `where` matched
            return code_of_group(where.callee, where.group, self.loops.get(name), name in self.besides, policy)
        return code_of(where.callee, policy) if key in self.callees else code_of_calls(where.callee, policy, key)

    def put(self, closed: Any, calls: Calls, policies: Iterable[tuple[str, Any]]) -> Any:
        """A jaxpr of the program with checkpoints at places that have none.

        Args:
            closed: the jaxpr.
            calls: those that were recorded when it was traced.
            policies: keys, those of sites too, which are left as they are, with a policy each.

        Raises:
            RematError: a key chooses no call.
        """
        chosen = {key: (where, policy) for key, policy in policies if (where := self.where(key)) is not None}
        return _Writer(closed, calls, chosen)(closed) if chosen else closed

    def grouped_loops(self, closed: Any, calls: Calls, key: str) -> list[Any]:
        """The scans of a program whose steps a place groups; arguments as for ``put``."""
        where = self.where(key)
        return [] if where is None else _Writer(closed, calls, {key: (where, None)}).grouped_loops()


class Intervals:
    """The intervals of a program's jaxprs that a checkpoint can be put around. Reads each jaxpr once."""

    def __init__(self, closed: Any, calls: Calls) -> None:
        self._root = _jax.open_jaxpr(closed)
        self._calls = calls
        self._spans = Spans()
        self._of: dict[int, tuple[Any, list[Interval]]] = {}
        self._decorated: dict[int, tuple[Any, list[Interval]]] = {}

    def of(self, jaxpr: Any, around: Any = None) -> list[Interval]:
        """Those of a jaxpr, outer ones first.

        Args:
            jaxpr: an open jaxpr.
            around: the equation that it is the body of.
        """
        cached = self._of.get(id(jaxpr))
        if cached is None:
            cached = self._of[id(jaxpr)] = jaxpr, self._find(jaxpr, around)
        return cached[1]

    def _find(self, jaxpr: Any, around: Any) -> list[Interval]:
        intervals = self._calls.of(jaxpr)
        is_decorated = around is not None and (_jax.is_checkpoint(around) or _jax.is_jit(around))
        if jaxpr is self._root or is_decorated:  # the function itself, or one that is a place by its equation
            intervals = [one for one in intervals if (one.first, one.last) != (0, len(jaxpr.eqns))]
        for number, eqn in enumerate(jaxpr.eqns):
            callee = self._jitted(eqn)
            if callee is not None and len(jaxpr.eqns) > (jaxpr is self._root):
                intervals.append(Interval(callee, number, number + 1))
        intervals = [one for one in intervals if self._can_have_checkpoint(jaxpr, one)]
        return sorted(intervals, key=lambda one: (one.first, -one.last))

    def decorated(self, jaxpr: Any) -> list[Interval]:
        """The calls in a jaxpr that have a checkpoint already, each of one equation."""
        cached = self._decorated.get(id(jaxpr))
        if cached is None:
            calls = [
                Interval(Callee(identity(eqn, self._spans)), number, number + 1)
                for number, eqn in enumerate(jaxpr.eqns)
                if _jax.is_checkpoint(eqn)
            ]
            cached = self._decorated[id(jaxpr)] = jaxpr, calls
        return cached[1]

    def _jitted(self, eqn: Any) -> Callee | None:
        """The function of the user's own that an equation is the jitted call of."""
        if not _jax.is_jit(eqn):
            return None
        (body,) = _jax.bodies(eqn)
        name, file, line = _jax.function_name(body.jaxpr)
        whole = [one.callee for one in self._calls.of(body.jaxpr) if one.last - one.first == len(body.jaxpr.eqns)]
        if whole:
            return whole[0]
        return Callee((name, file, line)) if file and line and is_user_file(file) else None

    def _can_have_checkpoint(self, jaxpr: Any, interval: Interval) -> bool:
        eqns = jaxpr.eqns[interval.first : interval.last]
        return interval.callee.who not in self._calls.elsewhere and not any(map(_jax.writes_to_inputs, eqns))


def _is_walked(eqn: Any) -> bool:
    return not _jax.is_custom_rule(eqn)  # what the rules of custom derivatives do is Python


def possible_sites(closed: Any, calls: Calls, table: SiteTable) -> PossibleSites:
    """The places of a program, in the order of their first call.

    Args:
        closed: the primal jaxpr.
        calls: those that were recorded when it was traced.
        table: the places that have a checkpoint.
    """
    places = Intervals(closed, calls)
    times: dict[Identity, int | None] = {}
    callees: dict[Identity, Callee] = {}
    loops: dict[tuple[Identity, bool], Loop] = {}
    widest: dict[tuple[Identity, bool], tuple[Loop, int]] = {}
    besides: set[tuple[Identity, bool]] = set()
    # Of functions that are given what is no array an equation of each call, with that around it.
    called: dict[Identity, list[tuple[Any, Any]]] = {}

    for scope in scopes(closed, _is_walked):
        jaxpr, runs, around = scope.jaxpr, scope.times, scope.eqn
        standing = [(one, True) for one in places.decorated(jaxpr)]
        standing += [(one, False) for one in places.of(jaxpr, around)]
        once = Counter((one.callee.who, decorated) for one, decorated in standing)
        if around is None or not _jax.is_scan(around):
            besides.update(once)
        else:
            besides.update(place for place, count in once.items() if count > 1)
            alone = [(one, decorated) for one, decorated in standing if once[one.callee.who, decorated] == 1]
            for one, decorated in alone:
                place = one.callee.who, decorated
                loops[place] = max(Loop.of(around, one.callee), loops.get(place, Loop()), key=lambda loop: loop.length)
            if alone:
                one, decorated = max(
                    alone, key=lambda each: (each[0].last - each[0].first, "<" not in each[0].callee.who[0])
                )
                loop, before = Loop.of(around, one.callee), widest.get((one.callee.who, decorated), (Loop(), 0))[1]
                if loop.length >= SHORTEST:
                    widest[one.callee.who, decorated] = loops[one.callee.who, decorated], before + (runs or 0)
        for interval in places.of(jaxpr, around):
            who = interval.callee.who
            before = times.get(who, 0)
            times[who] = None if runs is None or before is None else before + runs
            callees.setdefault(who, interval.callee)
            if interval.callee.static and interval.callee.module != "equinox":  # which takes them as they are given
                called.setdefault(who, []).append((jaxpr.eqns[interval.first], around))
    for who, eqns in called.items():
        defaults = tuple(default_texts(who).items())
        callees[who] = replace(callees[who], calls=spellings(who, eqns), defaults=defaults)
    taken = frozenset(table.keys.values())
    keys: dict[Identity, str] = {}
    for who, key in keys_of(tuple(times)).items():
        # A function may have a checkpoint in one place, and be called without one in another.
        keys[who] = f"{key} (without a checkpoint)" if key in taken else key
    sites = tuple(
        Site(
            keys[who],
            who[0],
            count or 0,
            "",
            definition((who[0].rpartition(".")[2], *who[1:])),
            possible=True,
            code=code_of(callees[who]),
        )
        for who, count in times.items()
    )
    key_of = {
        **{(who, False): key for who, key in keys.items()},
        **{(who, True): key for who, key in table.keys.items()},
    }
    groups: list[Site] = []
    for (who, decorated), (loop, steps) in widest.items():
        size = segment_of(loop.length)
        groups.append(
            Site(
                f"{key_of[who, decorated]}/{size}",
                who[0],
                math.ceil(steps / size),
                "",
                definition((who[0].rpartition(".")[2], *who[1:])),
                possible=True,
                code=code_of_group(callees.get(who, Callee(who)), size, loop, (who, decorated) in besides),
            )
        )
    return PossibleSites(
        sites,
        {keys[who]: callees[who] for who in times},
        {key: Callee(who) for who, key in table.keys.items()},
        {key_of[place]: loop for place, loop in loops.items() if place in key_of},
        frozenset(key_of[place] for place in besides if place in key_of),
        tuple(groups),
    )


# ----------------------------------------------------------------------------------------------- putting them there


@dataclass(frozen=True, slots=True)
class _Group:
    """The equations ``first`` to ``last`` (excluded) of a jaxpr, to be under one checkpoint.

    Those with the numbers ``apart`` are put before it.
    """

    first: int
    last: int
    checkpoint: Checkpoint
    given: tuple[Any, ...]
    returned: tuple[Any, ...]
    apart: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Standing:
    """A call where it stands: in which jaxpr, the body of which equation, and whether it has a checkpoint."""

    jaxpr: Any
    around: Any
    interval: Interval
    decorated: bool


class _Writer:
    """Writes the jaxprs of one program anew, with checkpoints around some of its calls."""

    def __init__(self, closed: Any, calls: Calls, chosen: Mapping[str, tuple[Where, Any]]) -> None:
        self._root = closed
        self._places = Intervals(closed, calls)
        self._groups: dict[int, list[_Group]] = {}  # by the identity of a jaxpr
        self._steps: dict[int, list[tuple[int, Checkpoint]]] = {}  # by that of a loop's body, with how many
        self._anew = Rewriter()
        self._parts: dict[Any, Any] = {}  # for all calls that do the same one jaxpr, as JAX has it of one function
        ordered = self._in_order(_jax.open_jaxpr(closed))
        for key, (where, policy) in chosen.items():
            who = where.callee.who
            of_callee = [one for one in ordered if one.interval.callee.who == who and one.decorated == where.decorated]
            selected = of_callee[where.calls]
            if not selected:
                raise RematError(f"at={key!r} chooses none of the {len(of_callee)} calls of {who[0]}.")
            checkpoint = Checkpoint(policy, "{} at {}:{}".format(*who), PUT_AT + key, self._parts)
            if where.group > 1:
                selected = [*self._beside(selected, where.group, checkpoint, key)]
            for jaxpr, interval, apart in _grouped(selected, where.group, where.calls == slice(None)):
                group = _Group(interval.first, interval.last, checkpoint, interval.given, interval.returned, apart)
                self._groups.setdefault(id(jaxpr), []).append(group)

    def _beside(
        self, selected: Sequence[_Standing], size: int, checkpoint: Checkpoint, key: str
    ) -> Iterator[_Standing]:
        """The calls that are not the only one in each step of a loop; the steps of the other loops are grouped."""
        in_jaxpr = Counter(id(one.jaxpr) for one in selected)
        for one in selected:
            loop = one.around is not None and (_jax.is_scan(one.around) or _jax.is_while(one.around))
            if not loop or in_jaxpr[id(one.jaxpr)] > 1:
                yield one
            elif _jax.is_while(one.around) or _jax.writes_to_inputs(one.around):
                why = "of unknown length" if _jax.is_while(one.around) else "that writes to references"
                raise RematError(
                    f"at={key!r}: {one.interval.callee.who[0]} is called in a loop {why}, whose steps "
                    "cannot be grouped."
                )
            else:
                self._steps.setdefault(id(one.jaxpr), []).append((size, checkpoint))

    def _in_order(self, root: Any) -> list[_Standing]:
        """Every call in program order, those of each jaxpr once."""
        ordered: list[_Standing] = []
        seen: set[int] = set()

        def visit(jaxpr: Any, around: Any) -> None:
            if id(jaxpr) in seen:
                return
            seen.add(id(jaxpr))
            standing = [_Standing(jaxpr, around, one, False) for one in self._places.of(jaxpr, around)]
            standing += [_Standing(jaxpr, around, one, True) for one in self._places.decorated(jaxpr)]
            standing.sort(key=lambda one: (one.interval.first, -one.interval.last))
            position = 0
            for number, eqn in enumerate(jaxpr.eqns):
                while position < len(standing) and standing[position].interval.first <= number:
                    ordered.append(standing[position])
                    position += 1
                for body in () if _jax.is_custom_rule(eqn) else _jax.bodies(eqn):
                    visit(body.jaxpr, eqn)

        visit(root, None)
        return ordered

    def __call__(self, jaxpr: Any) -> Any:
        old = _jax.open_jaxpr(jaxpr)
        new = self._anew(jaxpr, self._equations)
        if id(old) in self._steps:
            self._steps[id(_jax.open_jaxpr(new))] = self._steps[id(old)]
        return new

    def _equations(self, jaxpr: Any, _: Renamed) -> list[Any]:
        eqns = [eqn if _jax.is_custom_rule(eqn) else _jax.map_jaxprs(eqn, self) for eqn in jaxpr.eqns]
        groups = sorted(self._groups.get(id(jaxpr), []), key=lambda group: (group.first, -group.last))
        last_read = {atom: n for n, eqn in enumerate(eqns) for atom in eqn.invars if not _jax.is_literal(atom)}
        for group in groups:
            last_read.update((var, max(group.first, last_read.get(var, 0))) for var in group.given)
        last_read.update((atom, len(eqns)) for atom in jaxpr.outvars if not _jax.is_literal(atom))
        return self._written(jaxpr, eqns, 0, len(eqns), _nested(groups), last_read)

    def grouped_loops(self) -> list[Any]:
        """The scans, in the program that is to be written anew, whose steps are to be grouped."""
        return [eqn for _, eqn in walk(self._root) if self._is_grouped(eqn)]

    def _is_grouped(self, eqn: Any) -> bool:
        return _jax.is_scan(eqn) and id(_jax.open_jaxpr(_jax.scan_body(eqn))) in self._steps

    def _in_groups(self, eqns: Iterable[Any]) -> Iterator[Any]:
        """The equations, those of loops with their steps in groups: the largest outside."""
        for eqn in filter(None, eqns):  # without those that were put before
            if self._is_grouped(eqn):
                groups = self._steps[id(_jax.open_jaxpr(_jax.scan_body(eqn)))]
                yield from _segments(eqn, sorted(groups, key=lambda group: group[0]))
            else:
                yield eqn

    def _written(
        self,
        jaxpr: Any,
        eqns: Sequence[Any],
        first: int,
        last: int,
        groups: Sequence[_Group],
        last_read: Mapping[Any, int],
    ) -> list[Any]:
        """The equations ``first`` to ``last``, with each group of them as one checkpoint."""
        written: list[Any] = []
        number, after = first, 0
        while after < len(groups):
            group, inside = groups[after], after + 1
            after = bisect.bisect_left(groups, group.last, inside, key=lambda other: other.first)
            written += self._in_groups(eqns[number : group.first])
            if group.apart:
                written += filter(None, (eqns[number] for number in sorted(group.apart)))
                eqns = [None if number in group.apart else eqn for number, eqn in enumerate(eqns)]
            body = self._written(jaxpr, eqns, group.first, group.last, groups[inside:after], last_read)
            number = group.last
            made = {var for eqn in body for var in eqn.outvars}
            # JAX keeps all that a function is given or returns, whether it is read or not.
            read_later = (var for eqn in body for var in eqn.outvars if last_read.get(var, -1) >= group.last)
            outputs = [*dict.fromkeys((*(var for var in group.returned if var in made), *read_later))]
            if not outputs:
                written += body
                continue
            written.append(group.checkpoint.around(jaxpr, body, outputs, group.given))
        return [*written, *self._in_groups(eqns[number:last])]


def _segments(eqn: Any, groups: Sequence[tuple[int, Checkpoint]]) -> list[Any]:
    """A scan with its steps in segments, in segments again, from the last of some sizes to the first."""
    if not groups:
        return [eqn]
    size, checkpoint = groups[-1]
    return in_segments(eqn, size, checkpoint, lambda segment: _segments(segment, groups[:-1]))


def _grouped(calls: Sequence[_Standing], size: int, whole: bool) -> Iterator[tuple[Any, Interval, frozenset[int]]]:
    """Each ``size`` calls after one another in one jaxpr as one interval with what is between them.

    If they are ``whole`` steps of a loop of the user's, all that these do belongs to it, as in a function of so many
    steps; what it returns is then what is read later. What the loop goes through, the last, is no part of it.
    """
    steps: dict[int, Steps] = {}
    for jaxpr in {id(call.jaxpr): call.jaxpr for call in calls}.values() if whole and size > 1 else ():
        steps[id(jaxpr)] = Steps(jaxpr, [call.interval for call in calls if call.jaxpr is jaxpr])
    groups: list[tuple[Any, list[Interval]]] = []
    for call in calls:
        jaxpr, interval = call.jaxpr, call.interval
        before = groups[-1][1] if groups and groups[-1][0] is jaxpr else []
        of_jaxpr = steps.get(id(jaxpr))
        goes_on = 0 < len(before) < size and before[-1].last <= interval.first
        if goes_on and (of_jaxpr is None or of_jaxpr.go_on(before[-1], interval)):
            before.append(interval)
        else:
            groups.append((jaxpr, [interval]))
    for jaxpr, group in groups:
        first, last = group[0], group[-1]
        span = steps[id(jaxpr)].whole(first, last) if id(jaxpr) in steps else None
        if span is not None:
            yield jaxpr, Interval(last.callee, *span[:2]), span[2]
        else:
            given = first.given if len(group) == 1 else ()
            yield jaxpr, Interval(last.callee, first.first, last.last, given, last.returned), frozenset()


def _nested(groups: Iterable[_Group]) -> list[_Group]:
    """Groups that stand beside or inside one another; of two that cross, the first."""
    kept: list[_Group] = []
    around: list[_Group] = []
    for group in groups:
        while around and around[-1].last <= group.first:
            around.pop()
        if not around or group.last <= around[-1].last:
            kept.append(group)
            around.append(group)
    return kept
