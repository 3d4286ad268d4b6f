"""How values pass through the equations of a jaxpr that hold other jaxprs.

One description for scan, while, cond, jit, checkpoint, custom derivatives and the rest, so that every analysis
(origins, readers, recomputation, sites, names) walks them the same way.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax._src import core
from jax._src.linear_util import wrap_init

from remat_magic._jax.jaxprs import (
    checkpoint_body,
    checkpoint_policy,
    consts_of,
    function_name,
    is_checkpoint,
    is_jaxpr,
    is_literal,
    like_tuple,
    open_jaxpr,
    replace_checkpoint,
)
from remat_magic._jax.primitives import (
    ELEMENTWISE,
    FEW_TERMS,
    MATMULS,
    MOVES,
    VIEWS,
    high_params,
    is_check,
    is_cond,
    is_custom_rule,
    is_jit,
    primitive_name,
    scan_body,
    scan_length,
    scan_split,
)
from remat_magic._jax.private import courtesy

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
    kind: Literal["loop", "call", "branch"] = "call"
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
