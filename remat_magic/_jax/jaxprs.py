"""Jaxprs, equations, variables: taken apart, changed, printed, evaluated; checkpoints; the jaxprs inside equations."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Literal as OneOf

import jax
import numpy as np
from jax._src import core  # not of jax.extend: with that jax 0.12 imports settings, after which all is compiled anew
from jax._src.core import no_effects
from jax._src.linear_util import wrap_init
from jax.core import Tracer
from jax.tree_util import tree_leaves

from remat_magic._jax.primitives import (
    ELEMENTWISE,
    FEW_TERMS,
    HIGH_LEVEL,
    MATMULS,
    MOVES,
    VIEWS,
    high,
    high_params,
    is_check,
    is_cond,
    is_custom_rule,
    is_jit,
    params_key,
    primitive_name,
    scan_body,
    scan_length,
    scan_split,
)
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


# -------------------------------------------------------------------------------------- the jaxprs inside an equation


# One description for scan, while, cond, jit, checkpoint, custom derivatives and the rest, so that every analysis walks
# them in the same way.

_user_context = courtesy(
    "jax._src.source_info_util.user_context", "values in the rules of custom derivatives have no line"
) or (lambda *_, **__: contextlib.nullcontext())

_FORWARD_RULE = "fwd_jaxpr_thunk"  # of a custom_vjp

# Wrappers that JAX itself introduces; a user would not know them as a call.
_UNNAMED_CALLS = frozenset({"closed_call", "core_call", "eval_jaxpr", "call", "core_closed_call"})


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A jaxpr inside an equation.

    ``operands[i]`` is the index of the equation's operand that enters as the body's i-th invar, or None where the
    correspondence is unknown. ``results[j]`` is the body's output that leaves as the equation's j-th output (None:
    unknown). ``carries`` pairs a body's output with the invar that it becomes in the next iteration. ``label`` is
    empty where the body is not a call or loop of the user's; ``times`` is None where it is not known, as of a ``while``
    loop. ``consts`` are the values of its constants, where it has its own.
    """

    jaxpr: Any
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    kind: OneOf["loop", "call", "branch"] = "call"
    label: str = ""
    times: int | None = 1
    carries: tuple[tuple[int, int], ...] = ()
    consts: Sequence[Any] = ()

    @property
    def inlines(self) -> bool:
        """Whether a body is part of the program around it: a call, of which every input and output is known.

        The body of a ``shard_map`` knows a device's part of them.
        """
        return self.kind == "call" and None not in self.operands and None not in self.results


def _call(eqn: Any, jaxpr: Any, label: str) -> Body:
    body = open_jaxpr(jaxpr)
    inputs, outputs = len(body.invars), len(body.outvars)
    return Body(
        body,
        tuple(range(inputs)) if inputs == len(eqn.invars) else (None,) * inputs,
        tuple(range(outputs)) if outputs == len(eqn.outvars) else (None,) * len(eqn.outvars),
        label=label,
        consts=consts_of(jaxpr),
    )


def _scan(eqn: Any) -> tuple[Body, ...]:
    consts, carries, _ = scan_split(eqn)
    body, length = open_jaxpr(scan_body(eqn)), scan_length(eqn)
    return (
        Body(
            body,
            tuple(range(len(body.invars))),
            tuple(range(len(body.outvars))),
            "loop",
            f"scan x{length}",
            length,
            tuple((carry, consts + carry) for carry in range(carries)),
        ),
    )


def _while(eqn: Any) -> tuple[Body, ...]:
    params = eqn.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    carries = len(body.outvars)
    first_carry = of_condition + of_body
    return (
        Body(
            body,
            tuple(range(of_condition, first_carry + carries)),
            tuple(range(carries)),
            "loop",
            "while",
            None,
            tuple((carry, of_body + carry) for carry in range(carries)),
        ),
        Body(
            condition,
            (*range(of_condition), *range(first_carry, first_carry + carries)),
            (None,) * carries,
            "loop",
            "while",
            None,
        ),
    )


def _cond(eqn: Any) -> tuple[Body, ...]:
    bodies = []
    for number, branch in enumerate(eqn.params["branches"]):
        body = open_jaxpr(branch)
        operands = tuple(range(1, 1 + len(body.invars)))
        bodies.append(Body(body, operands, tuple(range(len(body.outvars))), "branch", f"cond branch {number}"))
    return tuple(bodies)


def _linear_solve(eqn: Any) -> tuple[Body, ...]:
    """The solver, whose result the equation's is; the three jaxprs beside it serve derivatives and transposes."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    body = open_jaxpr(eqn.params["jaxprs"].solve)
    right = range(sum(lengths), len(eqn.invars))
    operands = (*range(first, first + lengths.solve), *right)
    return (Body(body, operands, tuple(range(len(eqn.outvars))), label="custom_linear_solve"),)


def _named_call(eqn: Any, parameter: str) -> tuple[Body, ...]:
    jaxpr = eqn.params[parameter]
    return (_call(eqn, jaxpr, str(eqn.params.get("name") or function_name(jaxpr)[0])),)


def label_of(eqn: Any) -> str:
    """What a user would call an equation: the function of a call, else the primitive."""
    inside = bodies(eqn) if is_jit(eqn) or is_custom_rule(eqn) else ()
    return inside[0].label if inside and inside[0].label else primitive_name(eqn)


def _checkpoint(eqn: Any) -> tuple[Body, ...]:
    if not is_checkpoint(eqn):  # another primitive in 0.12's one call primitive
        return _calls(eqn)
    jaxpr = checkpoint_body(eqn)
    return (_call(eqn, jaxpr, function_name(jaxpr)[0]),)


def _calls(eqn: Any) -> tuple[Body, ...]:
    """Whatever jaxprs stand in the parameters, each taken for a call."""
    name = eqn.primitive.name
    label = "" if name in _UNNAMED_CALLS else name
    calls: list[Body] = []
    for value in high_params(eqn).values():
        if isinstance(value, (tuple, list)):
            calls += [_call(eqn, item, label) for item in value if type(item) is not int and is_jaxpr(item)]
        elif is_jaxpr(value):
            calls.append(_call(eqn, value, label))
    return tuple(calls)


def _nothing(_: Any) -> tuple[Body, ...]:
    return ()


_READ_BY: dict[str, Callable[[Any], tuple[Body, ...]]] = {
    **dict.fromkeys(ELEMENTWISE | FEW_TERMS | VIEWS | MOVES | MATMULS, _nothing),  # most equations, whatever they have
    **dict.fromkeys(["remat2", "checkpoint", "remat", "call_hi_primitive"], _checkpoint),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(["jit", "pjit"], lambda eqn: _named_call(eqn, "jaxpr")),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call"], lambda eqn: _named_call(eqn, "call_jaxpr")),
    "custom_linear_solve": _linear_solve,
    # The function, not its transpose, which stands beside it.
    "linear_call": lambda eqn: (_call(eqn, eqn.params["callee"], "linear_call"),),
    "pallas_call": _nothing,
}


def bodies(eqn: Any) -> tuple[Body, ...]:
    """The jaxprs inside an equation, none for an ordinary operation (and for kernels, which are one operation)."""
    return _READ_BY.get(eqn.primitive.name, _calls)(eqn) if eqn.params else ()


def map_jaxprs(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """The equation with each of the jaxprs in it changed; itself where none is."""
    if is_checkpoint(eqn):
        body = checkpoint_body(eqn)
        changed = change(body)
        return eqn if changed is body else replace_checkpoint(eqn, changed, checkpoint_policy(eqn))
    params = {key: _changed(value, change) for key, value in eqn.params.items()}
    return eqn if all(params[key] is value for key, value in eqn.params.items()) else eqn.replace(params=params)


def unchecked(eqn: Any) -> Any:
    """A check by equinox's ``error_if`` that finds nothing, of a conditional equation; itself where it is none."""
    branches = eqn.params["branches"] if is_cond(eqn) else ()
    passing = [branch for branch in branches if not any(map(is_check, open_jaxpr(branch).eqns))]
    if len(passing) in (0, len(branches)):
        return eqn
    first, *operands = eqn.invars  # the number of the branch, which nothing need work out any more
    branches = (passing[0],) * len(branches)
    return eqn.replace(invars=[core.Literal(0, first.aval), *operands], params={**eqn.params, "branches": branches})


def rule_inputs(eqn: Any) -> Any:
    """The operands of a custom derivative's call that its rule is given: all but the constants that JAX captured."""
    return eqn.invars[eqn.params["num_consts"] :]


def map_rule(eqn: Any, change: Callable[[Any, int], Any], perturbed: Sequence[bool]) -> Any:
    """The call of a custom derivative with the jaxpr changed that its rule becomes; itself where it has no such rule.

    Rules are Python, which JAX runs when it differentiates: the forward rule of a ``custom_vjp``, or that of a
    ``custom_jvp`` which gives results and tangents. The rule is changed at once, and again whenever JAX asks for other
    tangents; it may raise what it likes. ``change`` is given the rule's jaxpr and how many of its inputs are primal:
    the rest are tangents. ``perturbed`` is as ``perturbed_operands`` has it.
    """
    key = next((key for key in (_FORWARD_RULE, "jvp_jaxpr_fun") if key in eqn.params), None)
    if key is None:
        return eqn
    rule, inputs = eqn.params[key], len(rule_inputs(eqn))
    changed: dict[tuple[bool, ...], tuple[Any, ...]] = {}

    def changed_rule(*flags: bool) -> tuple[Any, ...]:
        if flags not in changed:
            jaxpr, *rest = rule.call_wrapped(*flags)
            changed[flags] = (change(jaxpr, inputs), *rest)
        return changed[flags]

    info = eqn.source_info
    # As when JAX evaluates the call: it keeps what the rule becomes, with the line of the call. The flags of one rule
    # say which inputs are perturbed, those of the other which tangents are zero.
    with _user_context(info.traceback, name_stack=info.name_stack), eqn.ctx.manager:
        changed_rule(*(perturbed if key == _FORWARD_RULE else [False] * inputs))
    return eqn.replace(params={**eqn.params, key: wrap_init(changed_rule, debug_info=rule.debug_info)})


def perturbed_operands(eqn: Any) -> tuple[bool, ...] | None:
    """Which operands of a ``custom_vjp`` had a tangent when JAX last differentiated it; None where it has not.

    Its rule should be asked with no others: it may refuse them, as equinox's loops do. Besides, JAX has one place for
    how many values the rule keeps, whatever the operands, and does not fill it again for those it asked with before.
    What has no such rule has no such operands.
    """
    if _FORWARD_RULE not in eqn.params:
        return ()
    cells = (cell.cell_contents for cell in getattr(eqn.params[_FORWARD_RULE].f, "__closure__", None) or ())
    answers = next((content for content in cells if isinstance(content, dict)), {})
    return next(reversed(answers), None)


def rearranged(like: Any, change: Callable[..., list[Any]], operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What a function of arrays does to variables: equations with the source position of another, and results."""
    with _user_context(like.source_info.traceback, name_stack=like.source_info.name_stack), like.ctx.manager:
        jaxpr = open_jaxpr(jax.make_jaxpr(change)(*(atom.aval for atom in operands)))
    given = dict(zip(jaxpr.invars, operands, strict=True))
    eqns = [
        eqn.replace(invars=[atom if is_literal(atom) else given.get(atom, atom) for atom in eqn.invars])
        for eqn in jaxpr.eqns
    ]
    return eqns, [given.get(var, var) for var in jaxpr.outvars]


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if is_jaxpr(value):
        return change(value)
    if isinstance(value, tuple) and any(map(is_jaxpr, value)):
        items = [change(item) if is_jaxpr(item) else item for item in value]
        return value if all(map(operator.is_, items, value)) else like_tuple(value, items)
    return value
