"""The program with checkpoints at places that have none: around calls, their parts, several, or steps of a loop."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from remat_magic import _jax
from remat_magic.engine.calls import Calls, Interval
from remat_magic.engine.parts import PartedCall, place_of
from remat_magic.engine.possible import Intervals, Where, is_walked
from remat_magic.engine.primal import Primal
from remat_magic.engine.sites import PUT_AT
from remat_magic.jaxprs.rewriting import Renamed, Rewriter
from remat_magic.jaxprs.walk import last_reads, walk
from remat_magic.policies import NO_CHECKPOINT
from remat_magic.records import RematError


def with_checkpoints(
    primal: Primal, policies: Iterable[tuple[str, Any]], traced: tuple[Any, Calls] | None = None
) -> Any:
    """A jaxpr of the program with checkpoints at places that have none, by their keys, each with a policy.

    Sites are left as they are. ``traced``: another jaxpr of it, and the calls that were recorded when that was traced.
    It is an error where a key chooses no call, or such as are not known to be what their parts make.
    """
    closed, calls = traced or (primal.closed, primal.calls)
    chosen = {key: (where, policy) for key, policy in policies if (where := primal.possible.where(key)) is not None}
    return _Writer(closed, calls, chosen, primal.smaller)(closed) if chosen else closed


def parted_calls(primal: Primal, key: str) -> list[PartedCall]:
    """The calls that a place in parts is of; errors as of ``with_checkpoints``."""
    writer = _Writer(primal.closed, primal.calls, {key: (primal.possible.where(key), None)}, primal.smaller)
    return [group.parted for groups in writer.groups.values() for group in groups if group.parted]


@dataclass(frozen=True, slots=True)
class _Group:
    """The equations of an interval of a jaxpr, to be under one checkpoint; or in parts, and the jaxpr of one."""

    interval: Interval
    checkpoint: Checkpoint
    parted: PartedCall | None = None
    part: Any = None


@dataclass(frozen=True, slots=True)
class _Standing:
    """A call where it stands: in which jaxpr, the body of which equation, and whether it has a checkpoint."""

    jaxpr: Any
    around: Any
    interval: Interval
    decorated: bool


class _Writer:
    """Writes the jaxprs of one program anew, with checkpoints around some of its calls."""

    def __init__(
        self,
        closed: Any,
        calls: Calls,
        chosen: Mapping[str, tuple[Any, Any]],
        smaller: Mapping[str, tuple[Any, Calls]] = MappingProxyType({}),
    ) -> None:
        self._root = closed
        self._consts = dict(zip(_jax.open_jaxpr(closed).constvars, _jax.consts_of(closed), strict=True))
        self._places = Intervals(closed, calls)
        self.groups: dict[int, list[_Group]] = {}  # by the identity of a jaxpr
        self._steps: dict[int, tuple[int, Checkpoint]] = {}  # by that of a loop's body, with how many
        self._anew = Rewriter()
        self._parts: dict[Any, Any] = {}  # for all calls that do the same one jaxpr, as JAX has it of one function
        self._ordered = self._in_order()
        for key, (where, policy) in chosen.items():
            who, selected = where.callee.who, self._selected(key, where)
            checkpoint = Checkpoint(policy, "{} at {}:{}".format(*who), PUT_AT + key, self._parts)
            if where.parts:
                others = {other: own for other, own in chosen.items() if not own[0].parts}
                self._cut(selected, checkpoint, key, where, _Writer(*smaller[key], others))
                continue
            if where.group > 1:
                selected = [*self._beside(selected, where.group, checkpoint, key)]
            for jaxpr, interval in _grouped(selected, where.group):
                self.groups.setdefault(id(jaxpr), []).append(_Group(interval, checkpoint))

    def _selected(self, key: str, where: Where) -> list[_Standing]:
        """The calls that a key chooses."""
        own = where.callee.who, where.decorated
        of_callee = [call for call in self._ordered if (call.interval.callee.who, call.decorated) == own]
        selected = of_callee[where.calls]
        if not selected:
            raise RematError(f"at={key!r} chooses none of the {len(of_callee)} calls of {own[0][0]}.")
        return selected

    def _cut(
        self, selected: Sequence[_Standing], checkpoint: Checkpoint, key: str, where: Where, smaller: _Writer
    ) -> None:
        """Have calls done in parts, each of which is the call in a smaller program, if that is known to be the same."""
        try:
            of_parts = smaller._selected(key, where)
            if len(of_parts) != len(selected):
                raise _jax.Refused("it is called another number of times for a part of the batch")
            for call, part in zip(selected, of_parts, strict=True):
                whole, alone = _equations_of(call), _equations_of(part)
                read = zip(map(self._consts.get, whole.invars), map(smaller._consts.get, alone.invars), strict=False)
                same = all(isinstance(b, Tracer) or a is b or _jax.same_value(a, b) for a, b in read)
                parted = PartedCall.of(part.interval, whole, alone, where.parts, same=same)
                group = _Group(call.interval, checkpoint, parted, smaller._under(checkpoint, part, alone))
                self.groups.setdefault(id(call.jaxpr), []).append(group)
        except _jax.Refused as refused:
            raise RematError(f"{key} cannot be done: {refused}{place_of(refused)}.") from None

    def _under(self, checkpoint: Checkpoint, call: _Standing, alone: Any) -> Any:
        """An open jaxpr of a call under a checkpoint, with what is written anew in it."""
        jaxpr, first, last = call.jaxpr, call.interval.first, call.interval.last
        inside = (
            it for it in self.groups.get(id(jaxpr), ()) if first <= it.interval.first and it.interval.last <= last
        )
        last_read = last_reads(jaxpr.eqns, jaxpr.outvars)
        eqns = self._written(jaxpr, self._mapped(jaxpr), first, last, _nested(inside), last_read)
        if checkpoint.policy is not NO_CHECKPOINT:
            eqns = [checkpoint.around(jaxpr, eqns, alone.outvars, alone.invars)]
        return checkpoint.shared(_jax.part(jaxpr, eqns, alone.invars, alone.outvars, checkpoint.function, "map"))

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
        eqns = self._mapped(jaxpr)
        groups = self.groups.get(id(jaxpr), [])
        last_read = last_reads(eqns, jaxpr.outvars)
        for call in (group.interval for group in groups):
            last_read.update((var, max(call.first, last_read.get(var, 0))) for var in call.given)
        return self._written(jaxpr, eqns, 0, len(eqns), _nested(groups), last_read)

    def _mapped(self, jaxpr: Any) -> list[Any]:
        return [_jax.map_jaxprs(eqn, self) if is_walked(eqn) else eqn for eqn in jaxpr.eqns]

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
            call = group.interval
            following = bisect.bisect_left(groups, call.last, inside, key=lambda other: other.interval.first)
            written += self._in_groups(eqns[number : call.first])
            number = call.last
            if group.parted is not None:
                if any(other.parted for other in groups[inside:following]):
                    raise RematError("One call in parts stands in another one: choose one of the two.")
                written += group.parted.mapped(group.part)
                continue
            body = self._written(jaxpr, eqns, call.first, call.last, groups[inside:following], last_read)
            body_outputs = {var for eqn in body for var in eqn.outvars}
            # JAX keeps all that a function is given or returns, whether it is read or not.
            read_later = (var for eqn in body for var in eqn.outvars if last_read.get(var, -1) >= call.last)
            outputs = [*dict.fromkeys((*(var for var in call.returned if var in body_outputs), *read_later))]
            written += [group.checkpoint.around(jaxpr, body, outputs, [*call.given])] if outputs else body
        return [*written, *self._in_groups(eqns[number:last])]


def _equations_of(call: _Standing) -> Any:
    """An open jaxpr of the equations of a call, of all that they read, and what it returns of them or is read later."""
    jaxpr, interval = call.jaxpr, call.interval
    eqns, last_read = jaxpr.eqns[interval.first : interval.last], last_reads(jaxpr.eqns, jaxpr.outvars)
    made = [var for eqn in eqns for var in eqn.outvars]
    read = [atom for eqn in eqns for atom in eqn.invars if not _jax.is_literal(atom)]
    # Not in the order of what it was given, of which less may be known in one program than in the other.
    outputs = dict.fromkeys(var for var in made if var in interval.returned or last_read.get(var, -1) >= interval.last)
    invars = [var for var in dict.fromkeys(read) if var not in {*made}]
    return _jax.part(jaxpr, eqns, invars, [*outputs], interval.callee.who[0], "map")


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
        given = first.given if len(group) == 1 else {}
        yield jaxpr, Interval(last.callee, first.first, last.last, given, last.returned)


def _nested(groups: Iterable[_Group]) -> list[_Group]:
    """Groups that stand beside or inside one another; of two that cross, the first."""
    nested: list[_Group] = []
    around: list[_Group] = []
    for group in sorted(groups, key=lambda group: (group.interval.first, -group.interval.last)):
        while around and around[-1].interval.last <= group.interval.first:
            around.pop()
        if not around or group.interval.last <= around[-1].interval.last:
            nested.append(group)
            around.append(group)
    return nested


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to put around equations: what the ``function`` under it is called, and what JAX takes it for.

    ``parts`` are the jaxprs that were made, one for all that do the same, as JAX has it of one function.
    """

    policy: Any = None
    function: str = "segment"
    use: str = "checkpoint / remat"
    parts: dict[Any, Any] = field(default_factory=dict)

    def around(self, jaxpr: Any, eqns: Sequence[Any], outputs: Sequence[Any], given: Sequence[Any] = ()) -> Any:
        """The equation of a checkpoint around some of a jaxpr, and what it returns of them.

        ``given`` is what its function is given, whether they read it or not.
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
    """The equations of a scan with its steps in segments of a size, under a checkpoint each; they make the same."""
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
    fixed = consts + carries
    operands = [
        *map(_jax.fresh_var, body.invars[:fixed]),
        *(_jax.fresh_rows(scanned, length) for scanned in eqn.invars[fixed:]),
    ]
    ys = (_jax.fresh_rows(y, length) for y in eqn.outvars[carries:])
    return _jax.replace_scan(eqn, operands, [*map(_jax.fresh_var, body.outvars[:carries]), *ys], length)
