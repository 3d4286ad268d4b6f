"""What equations and jaxprs cost: floating-point operations, bytes moved and communicated, what no formula covers.

Loops cost their body times its trip count, a conditional its worst branch, a call its body. Nothing is skipped in
silence: what cannot be counted is named in ``Cost.uncosted``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from remat_magic import _jax
from remat_magic._jax.formulas import (
    BYTES,
    FLOPS,
    element_bodies,
    expansion,
    kernel_estimate,
    moved_bytes,
)
from remat_magic.jaxprs.walk import TypeOf, own_type

Live = Callable[[Any], bool]
"""Tells an equation that matters from dead code, of which jax_remat3 leaves some in backward jaxprs."""


class Cost(NamedTuple):  # one for each equation of a report
    """FLOPs and bytes of all that is covered by a formula.

    ``uncosted`` has the names of the primitives that none covers, sorted, each once; ``while`` stands there for a loop
    whose trip count is unknown, so that its body is counted as if it ran once. The bytes of uncosted operations are
    counted all the same. ``communicated`` are the bytes of what collectives give a device, ``sent`` what it sends for
    them at least (``_jax.communication``).
    """

    flops: int = 0
    bytes: int = 0
    uncosted: tuple[str, ...] = ()
    communicated: int = 0
    sent: int = 0

    def __add__(self, other: Cost) -> Cost:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The cost of both."""
        uncosted = {*self.uncosted, *other.uncosted} if self.uncosted or other.uncosted else ()
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            tuple(sorted(uncosted)),
            self.communicated + other.communicated,
            self.sent + other.sent,
        )

    def scaled(self, times: int) -> Cost:
        """The cost of that many runs."""
        return Cost(self.flops * times, self.bytes * times, self.uncosted, self.communicated * times, self.sent * times)


FREE = Cost()


def jaxpr_cost(jaxpr: Any, live: Live | None = None, type_of: TypeOf = own_type) -> Cost:
    """What one run of a jaxpr costs one device; ``live`` tells the equations that count, all do if None."""
    return Costs(live, type_of).of_jaxpr(jaxpr)


def equation_cost(eqn: Any, type_of: TypeOf = own_type) -> Cost:
    """What one run of an equation costs one device, those of the jaxprs inside it included."""
    return Costs(None, type_of).of_equation(eqn)


class Costs:
    """What jaxprs and equations cost, each found once, though several calls may share it; see ``jaxpr_cost``."""

    def __init__(self, live: Live | None = None, type_of: TypeOf = own_type) -> None:
        self._live, self._type_of = live, type_of
        self._known: dict[int, tuple[Any, Cost]] = {}  # by the identity of the jaxpr or equation, which stays alive so

    def of_jaxpr(self, jaxpr: Any) -> Cost:
        """Of one run of a jaxpr, open or closed."""
        body = _jax.open_jaxpr(jaxpr)
        if id(body) not in self._known:
            costs = [self.of_equation(eqn) for eqn in body.eqns if self._live is None or self._live(eqn)]
            flops, moved, uncosted, communicated, sent = zip(*costs, strict=True) if costs else [()] * 5
            names = tuple(sorted({name for several in uncosted for name in several}))
            self._known[id(body)] = body, Cost(sum(flops), sum(moved), names, sum(communicated), sum(sent))
        return self._known[id(body)][1]

    def of_equation(self, eqn: Any) -> Cost:
        """Of one run of an equation."""
        if id(eqn) not in self._known:
            self._known[id(eqn)] = eqn, _equation_cost(eqn, self.of_jaxpr, self._type_of)
        return self._known[id(eqn)][1]


def _equation_cost(eqn: Any, cost_of: Callable[[Any], Cost], type_of: TypeOf) -> Cost:
    name, whole = _jax.primitive_name(eqn), eqn
    if type_of is not own_type:  # on a mesh
        eqn = _jax.equation_of_one(eqn, type_of)
    formula = FLOPS.get(name)
    if formula is not None:
        flops = formula(eqn)
        moved = BYTES.get(name, moved_bytes)(eqn)
        talk = _jax.communication(whole, eqn)
        communicated, sent = (0, 0) if talk is None else (talk.nbytes, talk.sent)
        return Cost(flops or 0, moved, (name,) if flops is None else (), communicated, sent)
    per_element = element_bodies(eqn)
    if per_element is not None:  # its jaxprs say what is done to an element; the bytes are those of the whole equation
        inside = sum((jaxpr_cost(jaxpr).scaled(times) for jaxpr, times in per_element), FREE)
        return Cost(inside.flops, BYTES.get(name, moved_bytes)(eqn), inside.uncosted)
    runs = [(cost_of(body.jaxpr), body.times) for body in _jax.bodies(whole)]
    if _jax.is_cond(eqn):
        worst = max((cost for cost, _ in runs), key=lambda cost: (cost.flops, cost.bytes))
        return worst._replace(uncosted=sum((cost for cost, _ in runs), FREE).uncosted)
    if runs:  # a loop whose trip count is unknown counts once, and is named
        unknown = Cost(uncosted=("while",)) if any(times is None for _, times in runs) else FREE
        return sum((cost.scaled(1 if times is None else times) for cost, times in runs), unknown)
    estimate = kernel_estimate(eqn)
    if estimate is not None:
        return Cost(*estimate)
    written_out = expansion(eqn)
    return Cost(0, moved_bytes(eqn), (name,)) if written_out is None else jaxpr_cost(written_out)
