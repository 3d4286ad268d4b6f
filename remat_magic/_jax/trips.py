"""How often the body of a ``while`` loop runs, where its jaxpr tells."""

from __future__ import annotations

from typing import Any

from remat_magic._jax.jaxprs import is_literal, open_jaxpr

__all__ = ["trip_count"]

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
    condition, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
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
    if not is_literal(atom) or atom.aval.shape or atom.aval.dtype.kind not in "iu":
        return None
    return int(atom.val)
