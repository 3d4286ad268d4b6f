"""What equations and jaxprs cost: floating-point operations, bytes moved and communicated, what no formula covers.

Loops cost their body times its trip count, a conditional its worst branch, a call its body. Nothing is skipped in
silence: what cannot be counted is named in ``Cost.uncosted``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax
from remat_magic._jax.formulas import (
    BYTES,
    FLOPS,
    element_bodies,
    expansion,
    kernel_estimate,
    moved_bytes,
)
from remat_magic.jaxprs.one_device import TypeOf, own_type

Live = Callable[[Any], bool]
"""Tells an equation that matters from dead code, of which jax_remat3 leaves some in backward jaxprs."""


@dataclass(frozen=True, slots=True)
class Cost:
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

    def __add__(self, other: Cost) -> Cost:
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
    return _costs_of_jaxprs(live, type_of)(jaxpr)


def equation_cost(eqn: Any, type_of: TypeOf = own_type) -> Cost:
    """What one run of an equation costs one device, those of the jaxprs inside it included."""
    return _equation_cost(eqn, _costs_of_jaxprs(None, type_of), type_of)


CostOf = Callable[[Any], Cost]
"""Tells the cost of one run of a jaxpr."""


def _costs_of_jaxprs(live: Live | None, type_of: TypeOf) -> CostOf:
    """Tells what jaxprs cost, and looks once at a body that several calls share."""
    costs: dict[int, tuple[Any, Cost]] = {}  # by the identity of the jaxpr, which is kept along

    def cost_of(jaxpr: Any) -> Cost:
        body = _jax.open_jaxpr(jaxpr)
        if id(body) not in costs:
            flops = moved = communicated = sent = 0
            uncosted: set[str] = set()
            for eqn in body.eqns:
                if live is None or live(eqn):
                    cost = _equation_cost(eqn, cost_of, type_of)
                    flops += cost.flops
                    moved += cost.bytes
                    communicated += cost.communicated
                    sent += cost.sent
                    uncosted.update(cost.uncosted)
            costs[id(body)] = body, Cost(flops, moved, tuple(sorted(uncosted)), communicated, sent)
        return costs[id(body)][1]

    return cost_of


def _equation_cost(eqn: Any, cost_of: CostOf, type_of: TypeOf) -> Cost:
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
        return replace(worst, uncosted=sum((cost for cost, _ in runs), FREE).uncosted)
    if runs:  # a loop whose trip count is unknown counts once, and is told
        unknown = Cost(uncosted=("while",)) if any(times is None for _, times in runs) else FREE
        return sum((cost.scaled(1 if times is None else times) for cost, times in runs), unknown)
    estimate = kernel_estimate(eqn)
    if estimate is not None:
        return Cost(*estimate)
    written_out = expansion(eqn)
    return Cost(0, moved_bytes(eqn), (name,)) if written_out is None else jaxpr_cost(written_out)
