"""From the two halves of a derivative to a report, and how far XLA's peak may be from its estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from remat_magic import _jax, units
from remat_magic.devices import Device
from remat_magic.engine.calls import in_checkpointed_loop
from remat_magic.engine.halves import Forward
from remat_magic.facts.buffers import PLAIN, DeviceMemory, LiveBuffer
from remat_magic.facts.cost import Costs, equation_cost, jaxpr_cost
from remat_magic.facts.kernels import kernels_of_halves, nbytes_of
from remat_magic.facts.measured_ranges import RANGES
from remat_magic.facts.memory import Schedule, both_halves
from remat_magic.facts.program_text import live_program
from remat_magic.facts.residuals import Recomputation, Saved, locate, needed_by, residuals, saved_values
from remat_magic.facts.times import of_equations
from remat_magic.jaxprs.one_device import Propagated
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import LiveEquations, Maker, Scope, makers, walk
from remat_magic.records import (
    Life,
    LiveKind,
    LiveValue,
    Note,
    Program,
    Report,
    Residual,
    SourceSpan,
    Timeline,
)


def preview(blank: Report, half: Forward, provenances: Provenances, arguments: Sequence[str]) -> Report:
    """The report of the forward half: its residuals, without their readers."""
    saved = saved_values(half.closed, half.outputs)
    return replace(blank, residuals=residuals(half, saved, provenances, arguments))


def _forward_program(half: Forward, saved: Sequence[Saved], provenances: Provenances) -> Program:
    outputs = _jax.open_jaxpr(half.closed).outvars[half.outputs :]
    # As it was computed, and as it leaves: JAX puts a reduce_precision between the two.
    marked: dict[Any, int] = {}
    for row, value in enumerate(saved):
        leaving = (*(outputs[leaf] for leaf in value.leaves), value.atom)
        marked.update((atom, row) for atom in leaving if not _jax.is_literal(atom))  # some have no hash
    return live_program(half.closed, provenances, marked)


def read(first: Report, saved: Sequence[Saved], live: LiveEquations) -> tuple[Residual, ...]:
    """The residuals, those marked on which no output of the backward half depends, whose ``live`` code this is."""
    return tuple(
        replace(row, unread=not any(live.inputs[leaf] for leaf in value.leaves))
        for row, value in zip(first.residuals, saved, strict=True)
    )


def _of_all_parts(report: Report, parts: int) -> Report:
    """A report whose work is that of all the parts in which a gradient is taken; bytes are of one after another."""

    def all_(value: int | None) -> int | None:
        return value and value * parts

    again = (
        replace(
            it,
            flops=all_(it.flops),
            bytes=all_(it.bytes),
            times=all_(it.times),
            communicated_bytes=parts * it.communicated_bytes,
            sent_bytes=parts * it.sent_bytes,
        )
        for it in report.recomputed
    )
    flops = {"forward_flops": all_(report.forward_flops), "backward_flops": all_(report.backward_flops)}
    return replace(report, recomputed=tuple(again), **flops)


def full(
    first: Report,
    half: Forward,
    backward: Any,
    provenances: Provenances,
    gradients: Sequence[str],
    on: DeviceMemory = PLAIN,
    of_step: Schedule | None = None,
    parts: int = 1,
) -> Report:
    """The report of both halves; ``on`` is how a device holds values.

    ``gradients`` names the argument of each output of the backward half. The peak is that of the step that the halves
    are part of, if they are part of one. The gradient is taken in so many ``parts``.
    """
    recomputation = Recomputation(half.closed, backward, provenances, len(half.residual_types))
    live, type_of = recomputation.live, half.type_of
    saved = saved_values(half.closed, half.outputs)
    costs = Costs(live, type_of)
    forward_cost, backward_cost = jaxpr_cost(half.closed, type_of=type_of), costs.of_jaxpr(backward)
    schedule = of_step or both_halves(half.closed, backward, half.outputs, live, type_of, on)
    readers = needed_by(recomputation.top, saved, provenances, live, recomputation, gradients)
    rows = tuple(
        replace(row, needed_by=who, unread=not any(live.inputs[leaf] for leaf in value.leaves))
        for row, value, who in zip(first.residuals, saved, readers, strict=True)
    )
    communicated: tuple[int | None, int | None] = forward_cost.communicated, backward_cost.communicated
    kernels = kernels_of_halves(half.closed, backward, live, recomputation.kinds, type_of, communicated, parts)
    if isinstance(type_of, Propagated):  # XLA has compiled both halves
        communicated = (nbytes_of(type_of.communicated[0]), nbytes_of(type_of.communicated[1]))
    inputs = recomputation.top.jaxpr.invars
    marked = {inputs[leaf]: row for row, value in enumerate(saved) for leaf in value.leaves}
    report = replace(
        first,
        residuals=rows,
        recomputed=recomputation.records(costs.of_equation),
        forward_flops=forward_cost.flops,
        backward_flops=backward_cost.flops,
        forward=_forward_program(half, saved, provenances),
        backward=live_program(backward, provenances, marked, recomputation.kinds),
        notes=(
            *first.notes,
            *_saved_in_vain(half, saved, rows, recomputation),
            *_repeated_by_rules(half, recomputation, provenances, backward_cost.flops),
            *_replicated(first.devices, rows),
        ),
        uncosted=(forward_cost + backward_cost).uncosted,
        forward_communicated_bytes=communicated[0],
        backward_communicated_bytes=communicated[1],
        complete=True,
        forward_kernels=kernels[0],
        backward_kernels=kernels[1],
        recomputed_kernels=kernels[2],
    )
    return with_peak(report if parts == 1 else _of_all_parts(report, parts), schedule)


def _type_text(aval: Any) -> str:
    """A type as JAX writes it, with its sharding if it has one."""
    text = _jax.type_text(aval)
    return _jax.sharding_text(aval, text) or text


def _kind(buffer: LiveBuffer, of_step: bool) -> LiveKind:
    """What a buffer is, in a training step if it is one of that."""
    if buffer.argument is not None or buffer.constant:
        return buffer.role or ("constant" if buffer.constant else "argument")
    if buffer.residual or buffer.gradient:
        return "residual" if buffer.residual else "gradient"
    return "output" if of_step and buffer.output else "temporary"


def with_peak(report: Report, schedule: Schedule) -> Report:
    """A report with the peak of a schedule, and what that is made of."""
    most, at = schedule.highest()
    sums: dict[LiveKind, int] = {}
    live = schedule.live_at(at)
    for buffer in live:
        kind = _kind(buffer, schedule.of_step)
        sums[kind] = sums.get(kind, 0) + buffer.bytes
    notes = [note for note in report.notes if note.kind != "peak-in-update"]
    if schedule.phase(at) == "update":
        text = (
            f"The estimated peak, {units.nbytes(most)}, is in the update that follows the gradient: no checkpoint "
            "lowers it."
        )
        notes.append(Note("peak-in-update", text))
    low, high = peak_range(schedule, most, at, live)
    peak: dict[str, Any] = {"peak_bytes": most, "peak_low": low, "peak_high": high}
    return replace(report, **peak, peak_by_kind=tuple(sums.items()), notes=tuple(notes))


def _saved_in_vain(
    half: Forward, saved: Sequence[Saved], rows: Sequence[Residual], recomputation: Recomputation
) -> list[Note]:
    """Values saved by name whose own operation the backward pass runs again all the same.

    A derivative that reads its operation's result (tanh's, exp's) reads the value from before it was named, which the
    policy did not save. Operations differ by their tracebacks; calls of one shared body have one between them,
    so that as many must run again as are saved.
    """
    again: Counter[tuple[int, str]] = Counter(
        (id(_jax.traceback_of(eqn)), _jax.primitive_name(eqn))
        for _, eqn in recomputation.equations
        if recomputation.repeated(eqn)
    )
    top = Scope(_jax.open_jaxpr(half.closed))
    by_operation: dict[tuple[int, str], list[Residual]] = {}
    for value, row in zip(saved, rows, strict=True):
        if row.name and row.kind in ("intermediate", "offloaded"):
            eqn = makers(top, value.atom)[0].eqn
            if eqn is not None:
                by_operation.setdefault((id(_jax.traceback_of(eqn)), _jax.primitive_name(eqn)), []).append(row)
    notes: dict[Note, None] = {}
    for operation, named in by_operation.items():
        if again[operation] >= len(named):
            row = named[0]
            line = f" (line {row.source.line})" if row.source else ""
            sentence = (
                f"{row.name!r} is saved, and its {row.primitive} is recomputed all the same{line}: the derivative of "
                f"{row.primitive} reads the value from before it was named, so name what goes into {row.primitive} too."
            )
            notes.setdefault(Note("saved-in-vain", sentence, (row.name or "", row.primitive)))
    return list(notes)


_NAMED = 4  # primitives in a sentence
_MUCH = 0.01  # of the FLOPs of the backward half


def _repeated_by_rules(
    half: Forward, recomputation: Recomputation, provenances: Provenances, backward_flops: int
) -> Iterator[Note]:
    """What the backward rules of custom derivatives run again: no policy decides about it, and none recomputes it."""
    flops: Counter[str] = Counter()
    lines, known, repeated = dict[int, None](), True, list[Any]()
    for scope, eqn in recomputation.by_rules():
        price = equation_cost(eqn, type_of=half.type_of)
        if price.flops:
            repeated.append(eqn)
            flops[_jax.primitive_name(eqn)] += price.flops * scope.turns
            known = known and scope.times is not None
            source = locate(provenances, scope, eqn).source
            lines.update({source.line: None} if source else {})
    if flops.total() > _MUCH * backward_flops:
        names = [name for name, _ in flops.most_common(_NAMED)]
        what = f"{', '.join(names)}{' and more' if len(flops) > _NAMED else ''}"
        at = f" (line {', '.join(map(str, sorted(lines)[:_NAMED]))})" if lines else ""
        often = "" if known else " for each turn of a loop of unknown length"
        own = " checkpoints= of the loop, or of diffrax's adjoint, says how many steps it saves instead."
        yield Note(
            "rule-repeats",
            f"A custom derivative rule runs {what}{at} again in the backward pass under every policy: "
            f"{units.flops(flops.total())}{often}. They are not counted as recomputed."
            f"{own if in_checkpointed_loop(repeated) else ''}",
            names,
        )


_LARGE = 0.1  # of the bytes saved


def _replicated(devices: int, rows: Sequence[Residual]) -> Iterator[Note]:
    """Intermediates that every device holds whole, where they are a large part of what is saved."""
    needed = [row for row in rows if row.kind == "intermediate" and not row.unread]
    whole = [row for row in needed if row.replicated and row.shape]
    total = sum(row.nbytes for row in whole)
    if total > _LARGE * sum(row.nbytes for row in needed):
        largest = max(whole, key=lambda row: row.nbytes)
        values_text = (
            f"{largest.type} of {largest.primitive}{f' (line {largest.source.line})' if largest.source else ''}"
        )
        if len(whole) > 1:
            values_text = f"{len(whole)} saved values, the largest {values_text}"
        yield Note(
            "replicated",
            f"Each of {devices} devices holds all of {values_text}, {units.nbytes(total)}: sharded, each would hold a "
            "part.",
            (largest.primitive,),
        )


class Programs:
    """The jaxprs that a timeline is of, and where each equation at any depth stands in them."""

    def __init__(self) -> None:
        self._contexts: dict[int, tuple[Scope, _Context]] = {}  # by the identity of the equation
        self.tops: list[Any] = []

    def add_halves(self, half: Forward, backward: Any, provenances: Provenances, arguments: Sequence[str]) -> None:
        """Add both halves of a gradient; ``arguments`` are the names of its inputs."""
        forward = Scope(_jax.open_jaxpr(half.closed))
        context = _Context(forward, forward.jaxpr.outvars[half.outputs :], provenances, arguments)
        self._add(forward, context)
        self._add(Scope(_jax.open_jaxpr(backward)), context)

    def add(self, closed: Any, provenances: Provenances, arguments: Sequence[str]) -> None:
        """Add a program around gradients."""
        top = Scope(_jax.open_jaxpr(closed))
        self._add(top, _Context(top, (), provenances, arguments))

    def _add(self, top: Scope, context: _Context) -> None:
        self.tops.append(top.jaxpr)
        for scope, eqn in walk(top, once=True):
            self._contexts.setdefault(id(eqn), (scope, context))

    def source(self, eqn: Any) -> SourceSpan | None:
        """The line that an equation comes from."""
        if eqn is None:
            return None
        provenances = self._contexts[id(eqn)][1].provenances
        place = provenances.of(eqn)
        return place.source if place else provenances.spans.of(_jax.traceback_of(eqn))

    def maker(self, buffer: LiveBuffer) -> tuple[str, str | None, SourceSpan | None]:
        """The operation that made a value, in a loop's body too, the argument that it is (a slice of), and its line."""
        if buffer.eqn is None:
            return "", None, None
        scope, (forward, residuals, provenances, arguments) = self._contexts[id(buffer.eqn)]
        first: tuple[str, str | None, SourceSpan | None] | None = None
        for origin in _makers_inside(scope, buffer):
            if origin.argument is not None and origin.scope is not forward and origin.argument < len(residuals):
                origin = next(iter(makers(forward, residuals[origin.argument])))
            if origin.eqn is not None:
                return _jax.primitive_name(origin.eqn), None, locate(provenances, origin.scope, origin.eqn).source
            if origin.argument is not None and first is None:
                first = "", arguments[origin.argument] if origin.scope is forward else None, None
        return first or (_jax.primitive_name(buffer.eqn), None, self.source(buffer.eqn))


class _Context(NamedTuple):
    """What a value leads back to: a jaxpr, the residuals that it makes, provenances, and the names of its inputs."""

    forward: Scope
    residuals: Sequence[Any]
    provenances: Provenances
    arguments: Sequence[str]


def over_time(
    blank: Report,
    schedule: Schedule,
    programs: Programs,
    arguments: Sequence[str],
    step: str = "",
    device: Device | None = None,
) -> Timeline:
    """The memory that is needed from equation to equation, and what for.

    ``blank`` is what the timeline is of, the schedule of both halves or of a ``step``; ``programs`` is what that is of.
    The data sheet of ``device`` tells the time that passes.
    """
    moments, equations, live = schedule.over_time()
    peak = max(range(len(moments)), key=lambda number: moments[number].bytes)
    at_peak = [buffer for first, end, buffer in live if first <= peak < end]

    def value(buffer: LiveBuffer) -> LiveValue:
        if buffer.copy_of is None and buffer.argument is None:
            primitive, argument, line = programs.maker(buffer)
        else:
            place, line = (buffer.copy_of or buffer).argument, None
            primitive, argument = "copy" if buffer.copy_of else "", None if place is None else arguments[place]
        return LiveValue(
            _type_text(buffer.aval) if buffer.aval is not None else "",
            buffer.bytes,
            _kind(buffer, schedule.of_step),
            primitive,
            argument,
            line,
        )

    return Timeline(
        blank.policy,
        blank.at,
        blank.function,
        tuple(
            replace(moment, primitive=_jax.primitive_name(eqn) if eqn is not None else "", source=programs.source(eqn))
            for moment, eqn in zip(moments, equations, strict=True)
        ),
        peak,
        tuple(Life(first, end, value(buffer)) for first, end, buffer in live if buffer.bytes and first < end),
        blank.label,
        step,
        *peak_range(schedule, moments[peak].bytes, peak, at_peak),
        () if device is None else of_equations(equations, programs.tops, schedule.type_of, device),
    )


def _makers_inside(scope: Scope, buffer: LiveBuffer) -> list[Maker]:
    """What can have made a value that an equation of a scope makes, or hands to a body of its own."""
    if buffer.var is None:
        return []
    inner = (inner for inner in scope.inner(buffer.eqn) if buffer.var in inner.inputs)
    return makers(scope if buffer.var in buffer.eqn.outvars else next(inner, scope), buffer.var)


def without_backward(first: Report, half: Forward, provenances: Provenances, error: str) -> Report:
    """The report of a function that has a forward half only."""
    saved = saved_values(half.closed, half.outputs)
    return replace(first, forward=_forward_program(half, saved, provenances), complete=True, backward_error=error)


# ------------------------------------------------------------------------------------------- the range of the estimate


ON_CHIP = 128 << 20  # bytes of a TPU's VMEM, which its compiler uses first, and which are no device memory
_MANY = 32  # steps of a loop: what it stacks is then of steps in time, not of layers

What = Literal["layers", "plain", "moved"]


class Doubt(NamedTuple):
    """The bytes of a peak that are sure, and those that are not, by what makes them."""

    device: Literal["GPU", "TPU"]
    sure: int
    unsure: Counter[What]


def doubt(live: Iterable[LiveBuffer], on: DeviceMemory) -> Doubt:
    """What is sure and what is in doubt of the values that are live at a peak."""
    sure, unsure = 0, Counter[What]()
    for value in live:
        if value.argument is not None or value.constant or value.output:
            sure += value.bytes
        else:
            unsure[_what(value)] += value.bytes
    return Doubt("TPU" if on.tiled else "GPU", sure, unsure)


def _what(value: LiveBuffer) -> What:
    eqn = value.eqn
    if eqn is None:
        return "plain"
    if value.aval is None:  # what an operation needs inside: a scatter's copy, say
        return "moved"
    if _jax.is_scan(eqn) and value.var in eqn.outvars[len(_jax.carried_operands(eqn)) :]:
        return "moved" if _jax.scan_length(eqn) >= _MANY else "layers"
    return "plain" if (_jax.is_plain(eqn) or _jax.bodies(eqn)) and not _jax.is_complex(value.aval) else "moved"


def peak_range(schedule: Schedule, peak: int, at: int, live: Iterable[LiveBuffer]) -> tuple[int, int]:
    """Between which bytes XLA's word on the peak of a schedule is to be expected, given when it is and what is live.

    All that is live in the update of a step may be sure, and the gradient before it need more than is estimated.
    Of no device it is the peak itself: then it is counted by the program's own types, and says nothing of XLA.
    """
    if not schedule.on.fuses:
        return peak, peak
    low, high = _range(peak, live, schedule.on)
    if schedule.phase(at) == "update":
        gradient, before = schedule.highest(before_update=True)
        high = max(high, _range(gradient, schedule.live_at(before), schedule.on)[1])
    return low, high


def _range(most: int, live: Iterable[LiveBuffer], on: DeviceMemory) -> tuple[int, int]:
    """That of one moment, by the bytes that are live then and what they are."""
    doubted = doubt(live, on)
    low, high = (
        doubted.sure + sum(round(RANGES[doubted.device, what][end] * size) for what, size in doubted.unsure.items())
        for end in (0, 1)
    )
    return min(most, max(doubted.sure, low - ON_CHIP * on.tiled)), max(most, high)
