"""Jaxprs, their equations and variables: taken apart, changed, printed, evaluated; checkpoints and checkpoint names."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core  # not of jax.extend: with that jax 0.12 imports settings, after which all is compiled anew
from jax._src.core import no_effects
from jax.core import Tracer
from jax.tree_util import tree_leaves

from remat_magic._jax.primitives import HIGH_LEVEL, high, params_key
from remat_magic._jax.private import JAX_VERSION, cannot, courtesy, needed
from remat_magic.errors import RematError

Jaxpr: Any = core.Jaxpr
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)  # 0.12 has one class for open and closed jaxprs
Literal: Any = core.Literal
Var: Any = core.Var
DropVar: Any = core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without constants; 0.12 has one class for both and returns itself."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constvars, empty for an open one."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def constant_keys(body: Any, consts: Sequence[Any]) -> dict[Any, int]:
    """For each constvar of an open jaxpr what tells its value from others, in whichever jaxprs that is a constant."""
    values = itertools.zip_longest(body.constvars, consts)
    return {var: id(var if value is None else value) for var, value in values}


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter's value is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_closed(jaxpr: Any) -> bool:
    """Whether a jaxpr has the values of its constants; 0.12 has one class for both, and always says so."""
    return isinstance(jaxpr, ClosedJaxpr)


def with_body(jaxpr: Any, body: Any) -> Any:
    """``body`` closed as ``jaxpr`` was: with the same constants, or open."""
    if Jaxpr is ClosedJaxpr:  # 0.12: one class; the constants belong to the leading invars
        return body.with_consts(jaxpr.consts) if jaxpr.consts and not body.consts else body
    make: Any = ClosedJaxpr  # 0.10: a class of its own, made of a jaxpr and its constants
    return make(body, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else body


def with_consts(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A closed jaxpr with other values of its constants."""
    make: Any = ClosedJaxpr
    return jaxpr.with_consts([*consts]) if Jaxpr is ClosedJaxpr else make(jaxpr.jaxpr, [*consts])


def closed(body: Any) -> Any:
    """An open jaxpr without constants as a closed one."""
    make: Any = ClosedJaxpr
    return body if isinstance(body, ClosedJaxpr) else make(body, ())


def like_tuple(value: Any, items: Sequence[Any]) -> Any:
    """A tuple of jaxprs with other items: a linear solve has its four in a named tuple, and reads them by name."""
    make = getattr(value, "_make", tuple)
    return make(items)


_allowed = courtesy("jax._src.effects.custom_derivatives_allowed_effects", "steps of losses that print have no memory")


def has_effects(jaxpr: Any) -> bool:
    """Whether running it does more than to compute its outputs, and than a rule of a custom derivative may do.

    Such a rule may print, call back and talk to other devices.
    """
    effects = open_jaxpr(jaxpr).effects
    return bool(_allowed.filter_not_in(effects) if _allowed else effects)


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any] | None = None) -> Any:
    """An open jaxpr with other equations (and outputs)."""
    jaxpr = open_jaxpr(jaxpr)
    changes: dict[str, Any] = {"eqns": list(eqns), "debug_info": jaxpr.debug_info}
    if outvars is not None:
        changes["outvars"] = list(outvars)
    return jaxpr.replace(**changes, **_highness(jaxpr, eqns))


def _highness(jaxpr: Any, eqns: Sequence[Any]) -> dict[str, bool]:
    """Whether a jaxpr of these equations, made from another, has to be lowered before it runs, if this JAX asks that.

    A checkpoint is such an equation under jax_remat3, and one that is put into a loop makes the loop such an equation.
    """
    if not hasattr(jaxpr, "is_high"):  # from 0.11 on
        return {}
    high = any(eqn.primitive.is_high(*(atom.aval for atom in eqn.invars), **eqn.params) for eqn in eqns)
    return {"is_high": high or jaxpr.is_high}


def part(jaxpr: Any, eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], name: str, use: str) -> Any:
    """An open jaxpr of some of the equations of another, as a function of its own.

    ``use`` is what JAX takes it for; ``use_of`` gives it back.
    """
    old = open_jaxpr(jaxpr)
    info = old.debug_info._replace(traced_for=use, func_src_info=name, arg_names=None, result_paths=None)
    effects = frozenset(effect for eqn in eqns for effect in eqn.effects)
    return Jaxpr([], list(invars), list(outvars), list(eqns), effects, info, **_highness(old, eqns))


def structure(jaxpr: Any) -> Hashable:
    """A key that is equal for open jaxprs that do the same in the same surroundings, whatever their variables are.

    Jaxprs inside the equations are told apart by their identity, and so are constants that are no numbers; names of
    scopes not by the numbers in them, as in ``Block_0`` and ``Block_1``.
    """
    numbers: dict[Any, int] = {}

    def key(atom: Any) -> Hashable:
        if isinstance(atom, core.Literal):
            return _literal_key(atom)
        return numbers.setdefault(atom, len(numbers)), atom.aval

    inputs = tuple(map(key, jaxpr.invars))
    eqns = tuple(
        (
            eqn.primitive,
            params_key(eqn),
            re.sub(r"\d+", "", name_stack(eqn)),
            eqn.ctx,
            *map(key, eqn.invars),
            *map(key, eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, eqns, tuple(map(key, jaxpr.outvars)), jaxpr.effects


def _literal_key(literal: Any) -> Hashable:
    value = literal.val
    number = value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value
    # As text, since 0.0 and -0.0 are equal.
    return literal.aval, repr(number) if isinstance(number, (bool, int, float, complex)) else id(number)


def do_the_same(eqn: Any, other: Any) -> bool:
    """Whether two equations make the same of the same variables, if they are given them."""
    return (
        eqn.primitive is other.primitive
        and [_literal_key(atom) for atom in eqn.invars if is_literal(atom)]
        == [_literal_key(atom) for atom in other.invars if is_literal(atom)]
        and params_key(eqn) == params_key(other)
    )


def use_of(jaxpr: Any) -> str:
    """What JAX says that it traced a jaxpr for, such as ``"checkpoint / remat"``; empty where it says nothing."""
    return getattr(open_jaxpr(jaxpr).debug_info, "traced_for", None) or ""


def writes_to_inputs(eqn: Any) -> bool:
    """Whether an equation reads or writes a mutable reference that it is given."""
    return any(hasattr(effect, "input_index") or hasattr(effect, "input") for effect in eqn.effects)


def with_outputs(closed: Any, count: int) -> Any:
    """A closed jaxpr with the first ``count`` of its outputs, itself where it has no more."""
    jaxpr = open_jaxpr(closed)
    if len(jaxpr.outvars) == count:
        return closed
    return with_body(closed, replace_eqns(jaxpr, jaxpr.eqns, jaxpr.outvars[:count]))


def name_stack(eqn: Any) -> str:
    """The name stack of an equation, as text."""
    return str(eqn.source_info.name_stack)


def untransformed_scopes(eqn: Any) -> Iterator[str]:
    """The names in the name stack of an equation that no transformation, such as ``jvp``, is written around.

    Read off its elements, of which checkpoints in each other make very many under jax_remat3.
    """
    transformed = False  # by the element before, which wraps one name
    for element in eqn.source_info.name_stack.stack:
        if type(element).__name__ == "Transform":
            transformed = True
            continue
        if not transformed:
            yield element.name
        transformed = False


def traceback_of(eqn: Any) -> Any:
    """The traceback object of an equation (None where JAX kept none); its identity is the key of provenance."""
    return eqn.source_info.traceback


def with_traceback(eqn: Any, token: Any) -> Any:
    """A copy of an equation that carries ``token`` in place of its traceback."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=token))


def fresh_var(like: Any) -> Any:
    """A new variable of the same type."""
    return Var(like.aval)


def fresh_rows(like: Any, count: int) -> Any:
    """A new variable of the same type but for the length of the first axis."""
    return Var(like.aval.update(shape=(count, *like.aval.shape[1:])))


class _TellingVar(Var):
    """A variable that tells what it is called whenever it is printed."""

    __slots__ = ("tell",)

    tell: Callable[[str, Any], None]

    def pretty_print(self, context: Any, *, print_dtype: bool = True) -> str:
        name = super().pretty_print(context, print_dtype=print_dtype)
        self.tell(name, context)
        return name


def telling_var(like: Any, tell: Callable[[str, Any], None]) -> Any:
    """A new variable of the same type that, when a jaxpr's text is made, passes its name to ``tell``.

    The second argument is the printer's context, which is one for all the names that are told apart.
    """
    var = _TellingVar(like.aval)
    var.tell = tell
    return var


def replace_vars(jaxpr: Any, renamed: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """An open jaxpr with other variables for its inputs and outputs, one for one."""
    return jaxpr.replace(
        constvars=renamed(jaxpr.constvars),
        invars=renamed(jaxpr.invars),
        outvars=renamed(jaxpr.outvars),
        debug_info=jaxpr.debug_info,
    )


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal and not a variable."""
    return isinstance(atom, Literal)


def read_by(eqn: Any) -> list[Any]:
    """The variables that an equation reads, which are all but its literals."""
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def is_dropped(var: Any) -> bool:
    """Whether an output of an equation is thrown away."""
    return isinstance(var, DropVar)


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A function of flat arguments that evaluates a closed jaxpr."""
    return core.jaxpr_as_fun(closed)


def function_name(jaxpr: Any) -> tuple[str, str, int]:
    """``(name, file, line)`` of the function that a jaxpr was traced from; empty and 0 where JAX does not know."""
    info = open_jaxpr(jaxpr).debug_info
    try:
        return info.func_name or "", info.func_filename or "", info.func_lineno or 0
    except Exception:  # noqa: BLE001 - jaxprs that JAX builds itself have no function
        return "", "", 0


def argument_names(jaxpr: Any) -> Sequence[str]:
    """What its function calls the inputs of a jaxpr, as JAX noted it: ``params['w']``; empty texts for others."""
    return open_jaxpr(jaxpr).debug_info.arg_names or ()


def pretty(jaxpr: Any, source_map: list[list[tuple[int, int, Any]]] | None = None) -> str:
    """JAX's own text of a jaxpr, without colours (inside ipykernel ``str`` has ANSI codes).

    ``source_map`` is filled with one list per line of ``(start column, end column, traceback or token)``.
    """
    return open_jaxpr(jaxpr).pretty_print(use_color=False, source_map=source_map)


# ----------------------------------------------------------------------------------------------- checkpoints and names


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
    """Whether ``jax_remat3`` is on; an error where a JAX has half of it (before 0.12, names are lost), or another."""
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
    return eqn.primitive.name == HIGH_LEVEL and type(high(eqn)) is _RematTraced


def replace_checkpoint(eqn: Any, jaxpr: Any, policy: Any) -> Any:
    """The checkpoint equation with another body and policy."""
    if "jaxpr" in eqn.params:
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr, "policy": policy})
    prim = high(eqn)  # jax_remat3: the instance is immutable, build another
    return eqn.replace(params={**eqn.params, "_prim": type(prim)(**{**prim.params, "jaxpr": jaxpr, "policy": policy})})


def checkpoint_equation(like: Any, body: Any, operands: Sequence[Any], outvars: Sequence[Any], policy: Any) -> Any:
    """An equation that puts an open jaxpr under a checkpoint, as ``jax.checkpoint`` makes it with today's settings.

    Its context is that of ``like``; it has no source position of its own.
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
    """The name that an equation gives to its operand, or None."""
    if eqn.primitive.name == "name":
        name = eqn.params["name"]
    elif eqn.primitive.name == HIGH_LEVEL and isinstance(high(eqn), _NAMES_HIGH):
        name = high(eqn).name
    else:
        return None
    if name is not None and not isinstance(name, str):
        raise RematError(f"checkpoint_name takes a string, not {type(name).__name__}: {name!r}.")
    return name


def policy_says_of_name(policy: Callable[..., Any], aval: Any, name: str) -> Any:
    """What a policy answers when JAX asks it about a value with a checkpoint name, under jax_remat3 too."""
    return policy(_name_p, aval, name=name)


def name_equation(like: Any, operand: Any, output: Any, name: str) -> Any:
    """An equation that gives a checkpoint name to a variable, as ``checkpoint_name`` makes it under today's settings.

    Its source position and context are those of ``like``.
    """
    if remat3():  # an instance in the one call primitive
        primitive, params = _call_hi, {"_prim": _CheckpointName(name, operand.aval)}
    else:
        primitive, params = _name_p, {"name": name}
    return like.replace(invars=[operand], outvars=[output], primitive=primitive, params=params, effects=no_effects)


def is_primal_left(eqn: Any) -> bool:
    """jax_remat3's marker of a saved value; only its first operand is read in a backward pass."""
    return eqn.primitive.name == HIGH_LEVEL and type(high(eqn)) is _PrimalLeft


# -------------------------------------------------------------------------------- the jaxpr that this thread is making


_trace_now: Any = courtesy("jax._src.core.trace_ctx", "places that have no checkpoint are not offered")

ELSEWHERE = object()
"""What ``staged`` gives where operations are carried out otherwise than by writing them down, as under ``jax.jvp``."""


def staged() -> Any:
    """The trace that makes the innermost jaxpr that is being made; ``vmap`` writes what it maps into that one too.

    None where no jaxpr is made. Who keeps it longer than it lasts leaks tracers.
    """
    stage: Any = getattr(_trace_now, "trace", None)
    while type(stage).__name__ == "BatchTrace":
        stage = stage.parent_trace
    if hasattr(getattr(stage, "frame", None), "tracing_eqns"):
        return stage
    return None if stage is None or type(stage).__name__ == "EvalTrace" else ELSEWHERE


def equations_of(stage: Any) -> Sequence[Any]:
    """The equations that a trace of JAX's, as ``staged`` gives it, has written so far."""
    return stage.frame.tracing_eqns


def inputs_of(stage: Any) -> Sequence[Any]:
    """The variables of such a trace that are the inputs of the jaxpr that it makes."""
    return stage.frame.invars


def constants_of(stage: Any) -> Mapping[Any, Any]:
    """The values from outside that such a trace has read so far, by the variables that stand for them."""
    return stage.frame.constvar_to_val


def variables(values: Any) -> list[Any]:
    """The variables, in the jaxpr that is being made, of the traced arrays in a pytree."""
    found = []
    for leaf in leaves(values):
        while type(leaf).__name__ == "BatchTracer":
            leaf = leaf.val
        if isinstance(leaf, Tracer):
            found.append(getattr(leaf, "val", None))
    return found


def leaves(values: Any) -> list[Any]:
    """The leaves of a pytree; none where it is no pytree."""
    try:
        return tree_leaves(values)
    except Exception:  # noqa: BLE001 - of a class of the user's, or a dictionary whose keys have no order
        return []


def makers(equations: Sequence[Any], begin: int) -> dict[int, tuple[int, int]]:
    """For the identity of each variable that is made by these equations, from number ``begin`` on, its place.

    That is the number of the equation and of the output.
    """
    eqns = ((number, _standing(eqn)) for number, eqn in enumerate(equations[begin:], begin))
    return {id(var): (number, i) for number, eqn in eqns if eqn is not None for i, var in enumerate(eqn.outvars)}


def tracebacks(equations: Sequence[Any]) -> list[Any]:
    """The traceback of each equation of a jaxpr that is being made; None for one that JAX has dropped again."""
    eqns = map(_standing, equations)
    return [None if eqn is None else eqn.source_info.traceback for eqn in eqns]


def _standing(equation: Any) -> Any:
    return equation() if isinstance(equation, weakref.ref) else equation  # 0.11: by a weak reference
