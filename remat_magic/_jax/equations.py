"""What an equation is called, where it comes from and how it is divided, on every line of JAX."""

from __future__ import annotations

from typing import Any


def high(eqn: Any) -> Any:
    """The high-level primitive that an equation applies, held in the params of one call primitive (0.12); else None."""
    return eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None


def primitive_name(eqn: Any) -> str:
    """The primitive's name, seen through JAX 0.12's one call primitive for all high-level ones."""
    prim = high(eqn)
    if prim is None:
        return eqn.primitive.name
    return {"RematTraced": "checkpoint", "CheckpointName": "name", "CheckpointNameFwd": "name"}.get(
        type(prim).__name__, type(prim).__name__
    )


def high_params(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, a high-level primitive's own included."""
    prim = high(eqn)
    return eqn.params if prim is None else dict(getattr(prim, "params", {}))


def scan_split(eqn: Any) -> tuple[int, int, int]:
    """``(consts, carries, stacked outputs)`` of a scan equation.

    0.10 writes two numbers; 0.12 writes the tree of its operands, of which the numbers are the sizes.
    """
    params = eqn.params
    if "num_carry" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        consts, carries = (len(list(part)) for part in params["ft_in"].unpack()[:2])
    return consts, carries, len(eqn.outvars) - carries


def name_stack(eqn: Any) -> str:
    """The name stack of an equation, as text."""
    return str(eqn.source_info.name_stack)


def traceback_of(eqn: Any) -> Any:
    """The traceback object of an equation (None where JAX kept none); its identity is the key of provenance."""
    return eqn.source_info.traceback


def with_traceback(eqn: Any, token: Any) -> Any:
    """A copy of an equation that carries ``token`` in place of its traceback."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=token))
