"""Checkpoint equations and checkpoint names: primitives before jax_remat3, instances in one call primitive with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import no_effects

from remat_magic._jax.jaxprs import open_jaxpr
from remat_magic._jax.primitives import high
from remat_magic._jax.private import JAX_VERSION, cannot, courtesy, needed
from remat_magic.errors import RematError

_remat_p = needed("jax._src.ad_checkpoint.remat_p")
_name_p = needed("jax._src.ad_checkpoint.name_p")

# From 0.12 on, the "high-level" primitives of jax_remat3 are instances held in one call primitive's params.
_HIGH: list[Any] = [
    courtesy(f"jax._src.ad_checkpoint.{name}", "nothing can be traced with jax_remat3 on")
    if JAX_VERSION >= (0, 12)
    else None
    for name in (
        "RematTraced",
        "CheckpointName",
        "CheckpointNameFwd",
        "PrimalLeftTangentRight",
        "call_hi_primitive_p",
    )
]
_RematTraced, _CheckpointName, _CheckpointNameFwd, _PrimalLeft, _call_hi = _HIGH
_NAMES_HIGH = tuple(cls for cls in (_CheckpointName, _CheckpointNameFwd) if cls is not None)


def remat3() -> bool:
    """Whether ``jax_remat3`` is on.

    Raises:
        RematError: it is on in a JAX that only has half of it (before 0.12), where names are lost, or that has it
            otherwise than is known here.
    """
    on = bool(getattr(jax.config, "jax_remat3", False))
    if on and JAX_VERSION < (0, 12):
        raise RematError(
            f"jax_remat3 is unfinished in jax {jax.__version__}: turn it off "
            "(jax.config.update('jax_remat3', False)) or install jax 0.12 or newer."
        )
    if on and None in (_RematTraced, _CheckpointName, _PrimalLeft, _call_hi):
        raise cannot("its jax_remat3 is another one; turn that off (jax.config.update('jax_remat3', False))")
    return on


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is an application of ``jax.checkpoint``."""
    if eqn.primitive.name in ("remat2", "checkpoint", "remat"):
        return "policy" in eqn.params
    return is_high_checkpoint(eqn)


def checkpoint_body(eqn: Any) -> Any:
    """The jaxpr under a checkpoint equation."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else high(eqn).params["jaxpr"]


def checkpoint_policy(eqn: Any) -> Any:
    """The policy of a checkpoint equation; None saves nothing."""
    return eqn.params["policy"] if "policy" in eqn.params else high(eqn).params["policy"]


def is_high_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a checkpoint of jax_remat3, which stays around what a backward pass does again."""
    return _RematTraced is not None and type(high(eqn)) is _RematTraced


def replace_checkpoint(eqn: Any, jaxpr: Any, policy: Any) -> Any:
    """The checkpoint equation with another body and policy."""
    if "jaxpr" in eqn.params:
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "policy": policy})
    prim = high(eqn)  # jax_remat3: the instance is immutable, build another
    return eqn.replace(params={**eqn.params, "_prim": type(prim)(**{**prim.params, "jaxpr": jaxpr, "policy": policy})})


def checkpoint_equation(like: Any, body: Any, operands: Sequence[Any], outvars: Sequence[Any], policy: Any) -> Any:
    """An equation that puts an open jaxpr under a checkpoint, as ``jax.checkpoint`` makes it with today's settings.

    Args:
        like: the equation whose context it takes; it has no source position of its own.
        body: the jaxpr.
        operands: the variables that it is given.
        outvars: the variables that are its outputs.
        policy: the checkpoint's.
    """
    if remat3():
        primitive, params = _call_hi, {"_prim": _RematTraced(body, policy)}
    else:
        params = {"jaxpr": body, "policy": policy, "prevent_cse": True, "differentiated": False}
        primitive = _remat_p
    return like.replace(
        invars=list(operands),
        outvars=list(outvars),
        primitive=primitive,
        params=params,
        effects=body.effects,
        source_info=type(like.source_info)(None, type(like.source_info.name_stack)()),
    )


def old_checkpoint(eqn: Any, jaxpr: Any) -> Any:
    """A checkpoint equation with another body, as it is without jax_remat3, where it is a primitive of its own."""
    if "jaxpr" in eqn.params:
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr})
    params = high(eqn).params
    return eqn.replace(
        primitive=_remat_p,
        params={
            "jaxpr": open_jaxpr(jaxpr),
            "policy": params["policy"],
            "prevent_cse": params["prevent_cse"],
            "differentiated": False,
        },
    )


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that an equation gives to its operand, or None.

    Raises:
        RematError: it is no string, which JAX takes as well.
    """
    prim = high(eqn)
    name = prim.name if _NAMES_HIGH and isinstance(prim, _NAMES_HIGH) else None
    name = eqn.params["name"] if eqn.primitive.name == "name" else name
    if name is not None and not isinstance(name, str):
        raise RematError(f"checkpoint_name takes a string, not {type(name).__name__}: {name!r}.")
    return name


def policy_says_of_name(policy: Callable[..., Any], aval: Any, name: str) -> Any:
    """What a policy answers when JAX asks it about a value with a checkpoint name, under jax_remat3 too."""
    return policy(_name_p, aval, name=name)


def name_equation(like: Any, operand: Any, output: Any, name: str) -> Any:
    """An equation that gives a checkpoint name to a value, as ``checkpoint_name`` makes it under today's settings.

    Args:
        like: the equation whose source position and context it takes.
        operand: the variable to name.
        output: the variable that is the named value.
        name: the name.
    """
    if remat3():  # an instance in the one call primitive
        primitive, params = _call_hi, {"_prim": _CheckpointName(name, operand.aval)}
    else:
        primitive, params = _name_p, {"name": name}
    return like.replace(invars=[operand], outvars=[output], primitive=primitive, params=params, effects=no_effects)


def is_primal_left(eqn: Any) -> bool:
    """jax_remat3's marker of a saved value; only its first operand is read in a backward pass."""
    return _PrimalLeft is not None and type(high(eqn)) is _PrimalLeft
