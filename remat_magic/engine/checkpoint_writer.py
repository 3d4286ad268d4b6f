"""The program with checkpoints at places that have none: around calls, several of them, or steps of a loop."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from remat_magic import _jax
from remat_magic.engine.calls import Calls, Interval
from remat_magic.engine.possible import Intervals, PossibleSites, Where, is_walked
from remat_magic.engine.sites import PUT_AT
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.walk import last_reads, walk
from remat_magic.records import RematError


def with_checkpoints(closed: Any, calls: Calls, possible: PossibleSites, policies: Iterable[tuple[str, Any]]) -> Any:
    """A jaxpr of the program with checkpoints at places that have none.

    Args:
        closed: the jaxpr.
        calls: those that were recorded when it was traced.
        possible: its places.
        policies: keys, those of sites too, which are left as they are, with a policy each.

    Raises:
        RematError: a key chooses no call.
    """
    chosen = {key: (where, policy) for key, policy in policies if (where := possible.where(key)) is not None}
    return _Writer(closed, calls, chosen)(closed) if chosen else closed


@dataclass(frozen=True, slots=True)
class _Group:
    """The equations ``first`` to ``last`` (excluded) of a jaxpr, to be under one checkpoint."""

    first: int
    last: int
    checkpoint: Checkpoint
    given: tuple[Any, ...]
    returned: tuple[Any, ...]


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
        self._steps: dict[int, tuple[int, Checkpoint]] = {}  # by that of a loop's body, with how many
        self._anew = Rewriter()
        self._parts: dict[Any, Any] = {}  # for all calls that do the same one jaxpr, as JAX has it of one function
        ordered = self._in_order()
        for key, (where, policy) in chosen.items():
            who = where.callee.who
            of_callee = [
                call for call in ordered if call.interval.callee.who == who and call.decorated == where.decorated
            ]
            selected = of_callee[where.calls]
            if not selected:
                raise RematError(f"at={key!r} chooses none of the {len(of_callee)} calls of {who[0]}.")
            checkpoint = Checkpoint(policy, "{} at {}:{}".format(*who), PUT_AT + key, self._parts)
            if where.group > 1:
                selected = [*self._beside(selected, where.group, checkpoint, key)]
            for jaxpr, interval in _grouped(selected, where.group):
                group = _Group(interval.first, interval.last, checkpoint, interval.given, interval.returned)
                self._groups.setdefault(id(jaxpr), []).append(group)

    def _beside(
        self, selected: Sequence[_Standing], size: int, checkpoint: Checkpoint, key: str
    ) -> Iterator[_Standing]:
        """The calls that are not the only one in each step of a loop; the steps of the other loops are grouped."""
        in_jaxpr = Counter(id(call.jaxpr) for call in selected)
        for call in selected:
            loop = call.around is not None and (_jax.is_scan(call.around) or _jax.is_while(call.around))
            if not loop or in_jaxpr[id(call.jaxpr)] > 1:
                yield call
            elif _jax.is_while(call.around) or _jax.writes_to_inputs(call.around):
                why = "of unknown length" if _jax.is_while(call.around) else "that writes to references"
                raise RematError(
                    f"at={key!r}: {call.interval.callee.who[0]} is called in a loop {why}, whose steps "
                    "cannot be grouped."
                )
            elif self._steps.setdefault(id(call.jaxpr), (size, checkpoint)) != (size, checkpoint):
                raise RematError(f"at={key!r}: another number of steps of the same loop is chosen too: choose one.")

    def _in_order(self) -> list[_Standing]:
        """Every call in program order, those of each jaxpr once."""
        ordered: list[_Standing] = []
        beginning: dict[int, dict[int, list[_Standing]]] = {}  # by jaxpr the calls, by the equation that they begin at
        for scope, eqn in walk(self._root, is_walked, once=True):
            jaxpr, around = scope.jaxpr, scope.eqn
            if id(jaxpr) not in beginning:
                standing = [_Standing(jaxpr, around, interval, False) for interval in self._places.of(jaxpr, around)]
                standing += [_Standing(jaxpr, around, interval, True) for interval in self._places.decorated(jaxpr)]
                at_equation = beginning[id(jaxpr)] = dict[int, list[_Standing]]()
                for call in sorted(standing, key=lambda call: -call.interval.last):
                    at_equation.setdefault(id(jaxpr.eqns[call.interval.first]), []).append(call)
            ordered += beginning[id(jaxpr)].get(id(eqn), ())
        return ordered

    def __call__(self, jaxpr: Any) -> Any:
        old = _jax.open_jaxpr(jaxpr)
        new = self._anew(jaxpr, self._equations)
        if id(old) in self._steps:
            self._steps[id(_jax.open_jaxpr(new))] = self._steps[id(old)]
        return new

    def _equations(self, jaxpr: Any, _: Renamed) -> list[Any]:
        eqns = [_jax.map_jaxprs(eqn, self) if is_walked(eqn) else eqn for eqn in jaxpr.eqns]
        groups = sorted(self._groups.get(id(jaxpr), []), key=lambda group: (group.first, -group.last))
        last_read = last_reads(eqns, jaxpr.outvars)
        for group in groups:
            last_read.update((var, max(group.first, last_read.get(var, 0))) for var in group.given)
        return self._written(jaxpr, eqns, 0, len(eqns), _nested(groups), last_read)

    def _in_groups(self, eqns: Iterable[Any]) -> Iterator[Any]:
        """The equations, those of loops with their steps in groups."""
        for eqn in eqns:
            grouped = self._steps.get(id(_jax.open_jaxpr(_jax.scan_body(eqn)))) if _jax.is_scan(eqn) else None
            yield from (eqn,) if grouped is None else in_segments(eqn, *grouped)

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
        number, following = first, 0
        while following < len(groups):
            group, inside = groups[following], following + 1
            following = bisect.bisect_left(groups, group.last, inside, key=lambda other: other.first)
            written += self._in_groups(eqns[number : group.first])
            body = self._written(jaxpr, eqns, group.first, group.last, groups[inside:following], last_read)
            number = group.last
            body_outputs = {var for eqn in body for var in eqn.outvars}
            # JAX keeps all that a function is given or returns, whether it is read or not.
            read_later = (var for eqn in body for var in eqn.outvars if last_read.get(var, -1) >= group.last)
            outputs = [*dict.fromkeys((*(var for var in group.returned if var in body_outputs), *read_later))]
            written += [group.checkpoint.around(jaxpr, body, outputs, group.given)] if outputs else body
        return [*written, *self._in_groups(eqns[number:last])]


def _grouped(calls: Sequence[_Standing], size: int) -> Iterator[tuple[Any, Interval]]:
    """Each ``size`` calls after one another in one jaxpr as one interval with what is between them."""
    groups: list[tuple[Any, list[Interval]]] = []
    for call in calls:
        jaxpr, interval = call.jaxpr, call.interval
        open_group = groups[-1][1] if groups and groups[-1][0] is jaxpr else []
        if 0 < len(open_group) < size and open_group[-1].last <= interval.first:
            open_group.append(interval)
        else:
            groups.append((jaxpr, [interval]))
    for jaxpr, group in groups:
        first, last = group[0], group[-1]
        given = first.given if len(group) == 1 else ()
        yield jaxpr, Interval(last.callee, first.first, last.last, given, last.returned)


def _nested(groups: Iterable[_Group]) -> list[_Group]:
    """Groups that stand beside or inside one another; of two that cross, the first."""
    nested: list[_Group] = []
    around: list[_Group] = []
    for group in groups:
        while around and around[-1].last <= group.first:
            around.pop()
        if not around or group.last <= around[-1].last:
            nested.append(group)
            around.append(group)
    return nested


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to put around equations.

    Attributes:
        policy: the policy.
        function: what the function under it is called.
        use: what JAX takes it for.
        parts: the jaxprs that were made, one for all that do the same, as JAX has it of one function.
    """

    policy: Any = None
    function: str = "segment"
    use: str = "checkpoint / remat"
    parts: dict[Any, Any] = field(default_factory=dict)

    def around(self, jaxpr: Any, eqns: Sequence[Any], outputs: Sequence[Any], given: Sequence[Any] = ()) -> Any:
        """The equation of a checkpoint.

        Args:
            jaxpr: what the equations are from.
            eqns: the equations.
            outputs: what of them it returns.
            given: what its function is given, whether they read it or not.
        """
        outputs_inside = {var for eqn in eqns for var in eqn.outvars}
        read = (atom for eqn in eqns for atom in eqn.invars if not _jax.is_literal(atom) and atom not in outputs_inside)
        operands = tuple(dict.fromkeys((*given, *read)))
        part = self.shared(_jax.part(jaxpr, eqns, operands, outputs, self.function, self.use))
        return _jax.checkpoint_equation(eqns[0], part, operands, outputs, self.policy)

    def shared(self, part: Any) -> Any:
        """The one jaxpr of those that do the same."""
        return self.parts.setdefault((self.use, _jax.structure(part)), part)


def in_segments(eqn: Any, size: int, checkpoint: Checkpoint) -> list[Any]:
    """The equations of a scan with its steps in segments.

    Args:
        eqn: the scan's equation. What it makes is what these make.
        size: how many steps a segment has.
        checkpoint: what is put around each.
    """
    length = _jax.scan_length(eqn)
    size = min(size, length)
    if not size:
        return [eqn]
    count = length // size
    whole = count * size
    body = _jax.open_jaxpr(_jax.scan_body(eqn))
    consts, carries, _ = _jax.scan_split(eqn)
    before, xs = eqn.invars[:consts], eqn.invars[consts + carries :]
    outvars = [_jax.fresh_var(var) if _jax.is_dropped(var) else var for var in eqn.outvars]
    carry, ys = outvars[:carries], outvars[carries:]

    def segments(*values: Any) -> list[Any]:
        return [value[:whole].reshape(count, size, *value.shape[1:]) for value in values]

    def left_over(*values: Any) -> list[Any]:
        return [value[whole:] for value in values]

    def steps(*values: Any) -> list[Any]:
        flat = [value.reshape(whole, *value.shape[2:]) for value in values[: len(ys)]]
        return [jnp.concatenate(parts) for parts in zip(flat, values[len(ys) :], strict=True)] if rest else flat

    def segment(scan: Any) -> Any:
        return checkpoint.around(body, [scan], scan.outvars)

    rest = length - whole
    one_segment = _alone(eqn, size)
    step = _jax.part(body, [segment(one_segment)], one_segment.invars, one_segment.outvars, checkpoint.function, "scan")
    step = _jax.closed(checkpoint.shared(step))

    eqns: list[Any] = []
    stacks = [_jax.fresh_rows(var, count) for var in _jax.rearranged(eqn, segments, ys)[1]]
    left_ys = [_jax.fresh_rows(y, rest) for y in ys] if rest else []

    def scan(first: list[Any], last: list[Any]) -> None:
        cut, chunks = _jax.rearranged(eqn, segments, xs)
        eqns.extend(cut)
        eqns.append(_jax.replace_scan(eqn, [*before, *first, *chunks], [*last, *stacks], count, step))

    def scan_rest(first: list[Any], last: list[Any]) -> None:
        cut, remainder = _jax.rearranged(eqn, left_over, xs)
        eqns.extend(cut)
        eqns.append(segment(_jax.replace_scan(eqn, [*before, *first, *remainder], [*last, *left_ys], rest)))

    first = eqn.invars[consts : consts + carries]
    middle = [*map(_jax.fresh_var, carry)]
    if not rest:
        scan(first, carry)
    elif _jax.is_reversed(eqn):
        scan_rest(first, middle)
        scan(middle, carry)
    else:
        scan(first, middle)
        scan_rest(middle, carry)
    together, whole_ys = _jax.rearranged(eqn, steps, [*stacks, *left_ys])
    names = dict(zip(whole_ys, ys, strict=True))
    eqns += [join.replace(outvars=[names.get(var, var) for var in join.outvars]) for join in together]
    return eqns


def _alone(eqn: Any, length: int) -> Any:
    """A scan's equation with another number of steps, and with variables of its own."""
    body = _jax.open_jaxpr(_jax.scan_body(eqn))
    consts, carries, _ = _jax.scan_split(eqn)
    kept = consts + carries
    operands = [
        *map(_jax.fresh_var, body.invars[:kept]),
        *(_jax.fresh_rows(scanned, length) for scanned in eqn.invars[kept:]),
    ]
    ys = (_jax.fresh_rows(y, length) for y in eqn.outvars[carries:])
    return _jax.replace_scan(eqn, operands, [*map(_jax.fresh_var, body.outvars[:carries]), *ys], length)
