"""Texts of calls of JAX's loops with one checkpoint around each few of their steps."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from remat_magic.editing.parsed_text import ParsedText
from remat_magic.records import RematError

__all__ = ["JaxLoop", "LoopKind", "helper"]

LoopKind = Literal["scan", "map", "fori_loop"]

# Their parameters, in their order, under the names that JAX gives them.
_PARAMETERS: dict[LoopKind, tuple[str, ...]] = {
    "scan": ("f", "init", "xs", "length", "reverse", "unroll"),
    "map": ("f", "xs"),
    "fori_loop": ("lower", "upper", "body_fun", "init_val"),
}
_DEFAULTS = {"xs": "=None", "length": "=None", "reverse": "=False", "unroll": "=1"}


@dataclass(frozen=True, slots=True, eq=False)
class JaxLoop:
    """A call of one of JAX's loops in a text, as it was traced."""

    text: ParsedText
    call: ast.Call
    kind: LoopKind
    length: int
    has_inputs: bool
    is_reversed: bool


def helper(loop: JaxLoop, size: int, name: str, jax: str, decorator: str) -> list[str]:
    """The lines of a function that does what a loop does, with one checkpoint around each so many steps.

    Args:
        loop: the loop.
        size: how many steps.
        name: what to call the function.
        jax: what the module is called.
        decorator: the checkpoint.

    Raises:
        RematError: the call has other arguments than these loops usually have.
    """
    parameters = _parameters(loop)
    options = "".join(f", {option}={option}" for option in ("reverse", "unroll") if option in parameters)
    reverse = ", reverse=reverse" if "reverse" in parameters else ""
    size = min(size, loop.length)
    rest = loop.length % size
    steps, of_rest = ("steps", "steps") if loop.has_inputs else (f"steps({size})", f"steps({rest})")
    step_input, left_over = ("xs", "rest") if loop.has_inputs else ("_", "None")
    body: list[str] = []
    if loop.kind == "map":
        returned_carry, inner = "", f"def several(xs):\n    return {jax}.lax.map(f, xs)"
        whole, last = f"ys = {jax}.lax.map({steps}, groups)", f"last = {of_rest}({left_over})"
    else:
        returned_carry, function, init, length = "carry, ", "f", "init", "length"
        if loop.kind == "fori_loop":
            body += ["def step(carry, _):", "    i, x = carry", "    return (i + 1, body_fun(i, x)), None", ""]
            function, init, length = "step", "(lower, init_val)", "(upper - lower)"
        xs, groups = ("xs", "groups") if loop.has_inputs else ("None, count", f"None, {length} // {size}")
        inner = f"def several(carry, {step_input}):\n    return {jax}.lax.scan({function}, carry, {xs}{options})"
        first, second = ("carry", init) if loop.is_reversed and rest else (init, "carry")
        whole = f"carry, ys = {jax}.lax.scan({steps}, {first}, {groups}{reverse})"
        last = f"carry, last = {of_rest}({second}, {left_over})"
    inner = f"{decorator}\n{inner}"
    if loop.has_inputs:
        body += [*inner.replace("def several", "def steps").split("\n"), ""]
        cut = f"x[:-{rest}]" if rest else "x"
        body.append(f"groups = {jax}.tree.map(lambda x: {cut}.reshape(-1, {size}, *x.shape[1:]), xs)")
        body += [f"rest = {jax}.tree.map(lambda x: x[-{rest}:], xs)"] if rest else []
    else:
        body += ["def steps(count):", *(f"    {line}" for line in [*inner.split("\n"), "", "return several"]), ""]
    body += ([last, whole] if loop.is_reversed else [whole, last]) if rest else [whole]
    ys = f"{jax}.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)"
    if rest and loop.kind != "fori_loop":
        body.append(f"ys = {ys}")
        ys = f"{jax}.tree.map(lambda y, z: {jax}.numpy.concatenate([y, z]), ys, last)"
    body.append("return carry[1]" if loop.kind == "fori_loop" else f"return {returned_carry}{ys}")
    head = [
        f"def {name}({', '.join(parameter + _DEFAULTS.get(parameter, '') for parameter in parameters)}):",
        f'    """Like jax.lax.{loop.kind}, with one checkpoint around each {size} steps."""',
        "",
    ]
    return [line.rstrip() for line in [*head, *(f"    {line}" for line in body)]]


def _parameters(loop: JaxLoop) -> list[str]:
    """Those of the loop's parameters that its call gives an argument to."""
    all_parameters = _PARAMETERS[loop.kind]
    keywords = [keyword.arg for keyword in loop.call.keywords]
    if (
        any(isinstance(argument, ast.Starred) for argument in loop.call.args)
        or len(loop.call.args) > len(all_parameters)
        or not {*keywords} <= {*all_parameters}
    ):
        raise RematError(
            f"the call of jax.lax.{loop.kind} at line {loop.call.lineno} of {loop.text.place} has arguments that no "
            "edit passes on: write the checkpoint there by hand."
        )
    given = {*all_parameters[: len(loop.call.args)], *keywords}
    return [parameter for parameter in all_parameters if parameter in given]
