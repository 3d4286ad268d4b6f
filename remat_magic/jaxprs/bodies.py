"""How values pass through the equations of a jaxpr that hold other jaxprs.

One description for scan, while, cond, jit, checkpoint, custom derivatives and the rest, so that every analysis
(origins, readers, recomputation, sites, names) walks them the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from remat_magic import _jax

# These compute nothing: the value that comes out is the value that went in.
TRANSPARENT = frozenset({"reduce_precision", "optimization_barrier", "name", "device_put", "PrimalLeftTangentRight"})
# What the branches of a cond that do not make a residual put in its place: never read.
PLACEHOLDERS = frozenset({"empty", "empty2"})
# Wrappers that JAX itself introduces; a user would not know them as a call.
_UNNAMED_CALLS = frozenset({"closed_call", "core_call", "eval_jaxpr", "call", "core_closed_call"})


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A jaxpr inside an equation.

    ``operands[i]`` is the index of the equation's operand that enters as the body's i-th invar, or None where the
    correspondence is unknown. ``results[j]`` is the body's output that leaves as the equation's j-th output (None:
    unknown). ``carries`` pairs a body's output with the invar that it becomes in the next iteration. ``label`` is
    empty where the body is not a call or loop of the user's; ``times`` is None where it is not known.
    """

    jaxpr: Any
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    kind: Literal["loop", "call", "branch"] = "call"
    label: str = ""
    times: int | None = 1
    carries: tuple[tuple[int, int], ...] = ()


def _call(eqn: Any, jaxpr: Any, label: str) -> Body:
    body = _jax.open_jaxpr(jaxpr)
    inputs, outputs = len(body.invars), len(body.outvars)
    return Body(
        body,
        tuple(range(inputs)) if inputs == len(eqn.invars) else (None,) * inputs,
        tuple(range(outputs)) if outputs == len(eqn.outvars) else (None,) * len(eqn.outvars),
        label=label,
    )


def _scan(eqn: Any) -> tuple[Body, ...]:
    consts, carries, _ = _jax.scan_split(eqn)
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    length = int(eqn.params["length"])
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
    condition, body = _jax.open_jaxpr(params["cond_jaxpr"]), _jax.open_jaxpr(params["body_jaxpr"])
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
        body = _jax.open_jaxpr(branch)
        operands = tuple(range(1, 1 + len(body.invars)))
        bodies.append(Body(body, operands, tuple(range(len(body.outvars))), "branch", f"cond branch {number}"))
    return tuple(bodies)


def _linear_solve(eqn: Any) -> tuple[Body, ...]:
    """The solver, whose result the equation's is; the three jaxprs beside it serve derivatives and transposes."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    body = _jax.open_jaxpr(eqn.params["jaxprs"].solve)
    right = range(sum(lengths), len(eqn.invars))
    operands = (*range(first, first + lengths.solve), *right)
    return (Body(body, operands, tuple(range(len(eqn.outvars))), label="custom_linear_solve"),)


def _named_call(eqn: Any, parameter: str) -> tuple[Body, ...]:
    jaxpr = eqn.params[parameter]
    return (_call(eqn, jaxpr, str(eqn.params.get("name") or _jax.function_name(jaxpr)[0])),)


def label_of(eqn: Any) -> str:
    """What a user would call an equation: the function of a call, else the primitive."""
    name = _jax.primitive_name(eqn)
    if name == "jit" or name.startswith("custom_"):
        found = bodies(eqn)
        return found[0].label if found and found[0].label else name
    return name


def _checkpoint(eqn: Any) -> tuple[Body, ...]:
    if not _jax.is_checkpoint(eqn):  # another primitive in 0.12's one call primitive
        return _calls(eqn)
    jaxpr = _jax.checkpoint_body(eqn)
    return (_call(eqn, jaxpr, _jax.function_name(jaxpr)[0]),)


def _custom_derivative(eqn: Any) -> tuple[Body, ...]:
    return _named_call(eqn, "call_jaxpr" if "call_jaxpr" in eqn.params else "fun_jaxpr")


def _calls(eqn: Any) -> tuple[Body, ...]:
    """Whatever jaxprs stand in the parameters, each taken for a call."""
    name = eqn.primitive.name
    label = "" if name in _UNNAMED_CALLS else name
    found: list[Body] = []
    for value in _jax.high_params(eqn).values():
        if _jax.is_jaxpr(value):
            found.append(_call(eqn, value, label))
        elif isinstance(value, (tuple, list)):
            found += [_call(eqn, item, label) for item in value if _jax.is_jaxpr(item)]
    return tuple(found)


_READ_BY: dict[str, Callable[[Any], tuple[Body, ...]]] = {
    **dict.fromkeys(["remat2", "checkpoint", "remat", "call_hi_primitive"], _checkpoint),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(["jit", "pjit"], lambda eqn: _named_call(eqn, "jaxpr")),
    **dict.fromkeys(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"], _custom_derivative),
    "custom_linear_solve": _linear_solve,
    "pallas_call": lambda eqn: (),
}


def bodies(eqn: Any) -> tuple[Body, ...]:
    """The jaxprs inside an equation, none for an ordinary operation (and for kernels, which are one operation)."""
    return _READ_BY.get(eqn.primitive.name, _calls)(eqn) if eqn.params else ()


def multiply(times: int | None, more: int | None) -> int | None:
    """The product of two counts; unknown if either is."""
    return None if times is None or more is None else times * more


def walk(jaxpr: Any) -> Iterator[tuple[Any, int | None]]:
    """Every equation at any depth with the number of times that it runs, in program order."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn, 1
        for body in bodies(eqn):
            for inner, times in walk(body.jaxpr):
                yield inner, multiply(body.times, times)


def nbytes(aval: Any) -> int:
    """Bytes of one value of a type (packed: 4-bit types count half), from its shape and dtype.

    PRNG keys count the bytes of their seed arrays, as ``key.size * itemsize`` does in JAX.
    """
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(map(int, shape)) * int(dtype.itemsize)


def type_text(aval: Any) -> str:
    """A type in JAX's short form, ``f32[5,4]``."""
    shape = getattr(aval, "shape", ())
    return f"{_jax.short_dtype(aval)}[{','.join(map(str, shape))}]"
