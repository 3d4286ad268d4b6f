"""The steps of a scan in segments, each under a checkpoint: what stands in the place of the scan's equation then.

The scan becomes one over segments, and each segment one over its steps, of the same body. What is left over is one
shorter segment at the end. A program that is written so by hand is traced to the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from remat_magic import _jax

SHORTEST = 4
"""Steps: of fewer there is nothing to nest."""


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


def segment_of(length: int) -> int:
    """Steps a segment: near the square root, and a divisor of the length if one is within a factor of two of it."""
    root = math.sqrt(length)
    near = [n for n in range(2, length) if length % n == 0 and root / 2 <= n <= root * 2]
    return min(near, key=lambda n: abs(math.log(n / root)), default=round(root))
