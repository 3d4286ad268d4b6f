"""What equations and jaxprs cost: floating-point operations, bytes moved, and what no formula covers.

Loops cost their body times its trip count, a conditional its worst branch, a call its body. Nothing is skipped in
silence: what cannot be counted is named in ``Cost.uncosted``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from remat_magic import _jax
from remat_magic.facts.cost_table import BYTES, FLOPS, moved_bytes
from remat_magic.jaxprs.bodies import bodies

__all__ = ["FREE", "Cost", "Live", "equation_cost", "is_operation", "jaxpr_cost", "trip_count"]

Live = Callable[[Any], bool]
"""Tells an equation that matters from dead code, of which jax_remat3 leaves some in backward jaxprs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of all that is covered by a formula.

    ``uncosted`` has the names of the primitives that none covers, sorted, each once; ``while`` stands there for a loop
    whose trip count is unknown, so that its body is counted as if it ran once. The bytes of uncosted operations are
    counted all the same.
    """

    flops: int = 0
    bytes: int = 0
    uncosted: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """The cost of both."""
        if not (self.uncosted or other.uncosted):
            return Cost(self.flops + other.flops, self.bytes + other.bytes)
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            tuple(sorted({*self.uncosted, *other.uncosted})),
        )

    def scaled(self, times: int) -> Cost:
        """The cost of that many runs."""
        return Cost(self.flops * times, self.bytes * times, self.uncosted)


FREE = Cost()


def jaxpr_cost(jaxpr: Any, live: Live | None = None) -> Cost:
    """The cost of one run of a jaxpr, open or closed; of its live equations alone where ``live`` tells them."""
    flops = moved = 0
    uncosted: set[str] = set()
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        if live is None or live(eqn):
            cost = equation_cost(eqn, live)
            flops += cost.flops
            moved += cost.bytes
            uncosted.update(cost.uncosted)
    return Cost(flops, moved, tuple(sorted(uncosted)))


def equation_cost(eqn: Any, live: Live | None = None) -> Cost:
    """The cost of one run of an equation, the (live) equations of the jaxprs inside it included.

    In a ``shard_map``, where shapes are those of one device, it is the cost of all devices together.
    """
    name = _jax.primitive_name(eqn)
    formula = FLOPS.get(name)
    if formula is not None:
        flops = formula(eqn)
        moved = BYTES.get(name, moved_bytes)(eqn)
        return Cost(0, moved, (name,)) if flops is None else Cost(flops, moved)
    if name in _ELEMENT_BODIES:
        return _ELEMENT_BODIES[name](eqn)
    if name in _CONTAINERS:
        return _CONTAINERS[name](eqn, live)
    inside = bodies(eqn)
    if inside:
        runs = (jaxpr_cost(body.jaxpr, live).scaled(1 if body.times is None else body.times) for body in inside)
        return sum(runs, FREE)
    expansion = _expansion(eqn)
    return Cost(0, moved_bytes(eqn), (name,)) if expansion is None else jaxpr_cost(expansion)


def is_operation(eqn: Any) -> bool:
    """Whether an equation is one operation of the device: the jaxprs in it, if any, say what is done to an element."""
    name = _jax.primitive_name(eqn)
    return name in FLOPS or name in _ELEMENT_BODIES


# ----------------------------------------------------------------------------------------- equations with jaxprs inside


def _worst_branch(eqn: Any, live: Live | None) -> Cost:
    """The branch of most FLOPs, of most bytes among equals; what any branch leaves uncosted."""
    costs = [jaxpr_cost(branch, live) for branch in eqn.params["branches"]]
    worst = max(costs, key=lambda cost: (cost.flops, cost.bytes))
    return Cost(worst.flops, worst.bytes, tuple(sorted({name for cost in costs for name in cost.uncosted})))


def _while(eqn: Any, live: Live | None) -> Cost:
    """Body and condition times the trip count where it can be read from the jaxpr, else once, and uncosted."""
    body, condition = jaxpr_cost(eqn.params["body_jaxpr"], live), jaxpr_cost(eqn.params["cond_jaxpr"], live)
    times = trip_count(eqn)
    if times is None:
        return body + condition + Cost(uncosted=("while",))
    return body.scaled(times) + condition.scaled(times + 1)


def _linear_solve(eqn: Any, live: Live | None) -> Cost:
    """The solver alone: the matrix product beside it serves derivatives."""
    return jaxpr_cost(eqn.params["jaxprs"].solve, live)


def _linear_call(eqn: Any, live: Live | None) -> Cost:
    """The function, not its transpose, which stands beside it."""
    return jaxpr_cost(eqn.params["callee"], live)


def _shard_map(eqn: Any, live: Live | None) -> Cost:
    """The body once on each device of the axes that are mapped."""
    mesh = eqn.params["mesh"]
    axes = eqn.params.get("manual_axes") or mesh.axis_names
    return jaxpr_cost(eqn.params["jaxpr"], live).scaled(math.prod(mesh.shape[axis] for axis in axes))


def _kernel(eqn: Any, _live: Live | None) -> Cost:
    """A Pallas kernel: what its author's ``cost_estimate`` says, if there is one."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is None:
        return Cost(0, moved_bytes(eqn), ("pallas_call",))
    return Cost(estimate.flops + estimate.transcendentals, estimate.bytes_accessed)


_CONTAINERS = {
    "cond": _worst_branch,
    "while": _while,
    "custom_linear_solve": _linear_solve,
    "linear_call": _linear_call,
    "shard_map": _shard_map,
    "pallas_call": _kernel,
}


# ------------------------------------------------------------------------- operations whose jaxpr combines two elements


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _per_element(eqn: Any, jaxpr: Any, times: int) -> Cost:
    """``times`` runs of the scalar jaxpr of a reduction or scatter; bytes are those of the whole equation."""
    inner = FREE if jaxpr is None else jaxpr_cost(jaxpr)
    moved = BYTES.get(eqn.primitive.name, moved_bytes)(eqn)
    return Cost(inner.flops * times, moved, inner.uncosted)


def _reduce(eqn: Any) -> Cost:
    """The computation for each element that is reduced away."""
    return _per_element(eqn, eqn.params["jaxpr"], max(_size(eqn.invars[0]) - _size(eqn.outvars[0]), 0))


def _reduce_window(eqn: Any) -> Cost:
    """The computation w - 1 times for each window of w elements."""
    taps = math.prod(eqn.params["window_dimensions"]) - 1
    return _per_element(eqn, eqn.params["jaxpr"], _size(eqn.outvars[0]) * taps)


def _select_and_scatter(eqn: Any) -> Cost:
    """For each window the selection w - 1 times and the scatter once."""
    windows, taps = _size(eqn.invars[1]), math.prod(eqn.params["window_dimensions"]) - 1
    scattered = Cost(jaxpr_cost(eqn.params["scatter_jaxpr"]).flops * windows)
    return _per_element(eqn, eqn.params["select_jaxpr"], windows * taps) + scattered


def _scatter(eqn: Any) -> Cost:
    """The update's computation, none for a plain scatter, for each element of the updates."""
    return _per_element(eqn, eqn.params["update_jaxpr"], _size(eqn.invars[2]))


def _combining_scatter(eqn: Any) -> Cost:
    """One operation for each element of the updates."""
    return Cost(_size(eqn.invars[2]), BYTES[eqn.primitive.name](eqn))


_ELEMENT_BODIES = {
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "select_and_scatter": _select_and_scatter,
    "scatter": _scatter,
    **dict.fromkeys(["scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"], _combining_scatter),
}


# ----------------------------------------------------------------------------------------------------------------------


def _expansion(eqn: Any) -> Any | None:
    """What a high-level primitive of JAX 0.12 (``jnp.searchsorted``) is written out to, or None where it cannot be."""
    prim = eqn.params.get("_prim")
    expand = getattr(prim, "expand", None)
    if prim is None or expand is None:
        return None

    def written_out(*leaves: Any) -> Any:
        return expand(*jax.tree.unflatten(prim.in_tree, leaves))

    try:
        return jax.make_jaxpr(written_out)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in prim.in_avals_flat))
    except Exception:  # noqa: BLE001 - anyone's code may run here; the caller then says that it is uncosted
        return None


# --------------------------------------------------------------------------------------------------- trip counts

_DIRECTION = {"lt": 1, "le": 1, "gt": -1, "ge": -1}


def trip_count(eqn: Any) -> int | None:
    """The trip count of a ``while`` equation that counts an integer from one number to another in fixed steps.

    Read where the start, the bound and the step are all numbers written in the jaxpr, the loop ends on a single
    comparison of the counter with the bound (``i < n``, ``i <= n`` and their mirror images), and the body adds the step
    to it or subtracts it. JAX writes a ``fori_loop`` between known numbers as a scan, which has a length of its own.

    Returns:
        The number of times that the body runs, or None where the jaxpr does not tell.
    """
    params = eqn.params
    condition, body = _jax.open_jaxpr(params["cond_jaxpr"]), _jax.open_jaxpr(params["body_jaxpr"])
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    test = _maker(condition, condition.outvars[0])
    if test is None or test.primitive.name not in _DIRECTION:
        return None
    inputs = {id(var): index for index, var in enumerate(condition.invars)}
    counter, limit = test.invars
    direction = _DIRECTION[test.primitive.name]
    if inputs.get(id(counter), -1) < of_condition:  # "n > i": the counter may stand on the right
        counter, limit, direction = limit, counter, -direction
    carry = inputs.get(id(counter), -1) - of_condition
    if carry < 0:
        return None
    outer_limit = inputs.get(id(limit), of_condition)
    start = _number(eqn.invars[of_condition + of_body + carry])
    bound = _number(limit if outer_limit >= of_condition else eqn.invars[outer_limit])
    step = _step(body, body.invars[of_body + carry], body.outvars[carry])
    if start is None or bound is None or step is None or step * direction <= 0:
        return None
    distance = (bound - start) * direction + (test.primitive.name in ("le", "ge"))
    return max(0, -(-distance // abs(step)))


def _step(body: Any, counter: Any, following: Any) -> int | None:
    """What one iteration adds to the counter."""
    update = _maker(body, following)
    if update is None or update.primitive.name not in ("add", "sub"):
        return None
    left, right = update.invars
    if left is counter:
        step = _number(right)
    elif right is counter and update.primitive.name == "add":
        step = _number(left)
    else:
        return None
    return step if step is None or update.primitive.name == "add" else -step


def _maker(jaxpr: Any, var: Any) -> Any:
    return next((eqn for eqn in jaxpr.eqns if any(out is var for out in eqn.outvars)), None)


def _number(atom: Any) -> int | None:
    """The value of an integer scalar that is written in the jaxpr."""
    if not _jax.is_literal(atom) or atom.aval.shape or atom.aval.dtype.kind not in "iu":
        return None
    return int(atom.val)
