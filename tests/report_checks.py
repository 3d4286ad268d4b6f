"""What must hold for the report of any function: its residuals are JAX's own, and its parts agree with each other."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
from jax._src import dtypes
from jax._src.ad_checkpoint import saved_residuals
from jax._src.core import jaxprs_in_params

import remat_magic as rm
from remat_magic import _jax


def types_of_jax(fun, args, kwargs=None) -> Counter[str]:
    """JAX's own list of what it saves."""
    listed = saved_residuals(fun, *args, **(kwargs or {}))
    return Counter(aval.str_short(short_dtypes=True) for aval, source in listed if source != "from a literal")


def types_of_ours(report: rm.Report) -> Counter[str]:
    """What a report says is saved, written as JAX writes it."""
    found: Counter[str] = Counter()
    for residual in report.residuals:
        if residual.kind != "literal":
            space = f"<{residual.memory_space}>" if residual.memory_space else ""
            found[f"{residual.dtype}{space}[{','.join(map(str, residual.shape))}]"] += 1
    return found


def types_and_kinds(report: rm.Report) -> Counter[tuple[str, tuple[int, ...], str]]:
    """What a report says is saved; Python's own numbers differ between a function and its jaxpr, and are no memory."""
    return Counter((row.dtype, row.shape, row.kind) for row in report.residuals if row.kind != "literal")


def costs_of(report: rm.Report) -> tuple[int | None, ...]:
    """The figures that one program has, however it was come by."""
    return report.saved_bytes, report.argument_bytes, report.repeated_flops, report.deferred_flops, report.peak_bytes


def check_report(report: rm.Report, trace: rm.Trace, policy, at, *files: str) -> None:
    """That the parts of a report agree.

    Args:
        report: the report.
        trace: of what.
        policy: under which policy.
        at: at which place.
        *files: in which the function stands.
    """
    outputs = trace.engine.primal.output_types
    forward = trace.forward(policy, at)
    assert report.forward.text == forward.pretty_print(use_color=False)
    residuals = list(forward.out_avals)[len(outputs) + trace.engine.primal.auxiliary :]
    # Every byte is of one kind.
    kinds = (report.saved_bytes, report.argument_bytes, report.constant_bytes, report.offloaded_bytes)
    assert sum(kinds) + report.unread_bytes == sum(row.nbytes for row in report.residuals)
    for row in report.residuals:
        assert row.nbytes >= 0
        assert (row.kind == "argument") <= (row.argument is not None)
        if row.kind == "argument":
            assert row.argument in {leaf.name for leaf in trace.arguments}
        if row.kind in ("intermediate", "offloaded"):
            assert row.origins, row
            assert row.primitive == row.origins[0].primitive
            # What a program computes, it computes on some line of it, unless it only passes an argument or number on.
            made = [origin for origin in row.origins if origin.primitive]
            assert all(origin.source is not None and origin.source.file in files for origin in made), row
    if report.backward_error:
        assert report.backward_error.endswith(".")
        return
    backward = trace.backward(policy, at)
    assert report.backward.text == backward.pretty_print(use_color=False)
    inexact = [leaf for leaf in outputs if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    differentiated = [leaf.value for leaf in trace.arguments if leaf.differentiated]
    for found, expected in ((backward.in_avals, (*residuals, *inexact)), (backward.out_avals, differentiated)):
        assert [(aval.shape, aval.dtype) for aval in found] == [(aval.shape, aval.dtype) for aval in expected]
    # Marked lines are lines of recomputation, and every residual is marked in both programs.
    values = {number for number, row in enumerate(report.residuals) if row.kind != "literal"}
    halves = report.forward, report.backward
    ahead, back = ({row for line in half.lines for _, row in line.residuals} for half in halves)
    assert ahead == values
    assert values <= back <= set(range(len(report.residuals)))  # a literal is a variable in the backward program alone
    assert bool(report.recomputed) == any(line.recomputation for line in report.backward.lines)
    assert report.peak_bytes >= sum(_jax.nbytes(leaf.value) for leaf in trace.arguments)
    assert report.saved_bytes <= report.peak_bytes
    assert max(moment.bytes for moment in trace.timeline(policy, at).moments) == report.peak_bytes
    # The kernels do what the equations do, and recomputation is part of the backward pass.
    for kernels, flops in (
        (report.forward_kernels, report.forward_flops),
        (report.backward_kernels, report.backward_flops),
    ):
        if not report.uncosted and all(kernel.known for kernel in kernels):
            assert sum(kernel.flops * kernel.times for kernel in kernels) == flops
    assert report.recomputed_flops <= report.backward_flops
    assert report.recomputed_flops == report.repeated_flops + report.deferred_flops
    assert min(report.forward_flops, report.backward_flops) >= 0
    for equation in report.recomputed:
        assert equation.times is None or equation.times >= 0
        assert equation.flops is None or equation.flops >= 0
    # What is recomputed is a value of the forward pass, so it cannot depend on a cotangent.
    told = Counter((equation.primitive, equation.outputs) for equation in report.recomputed)
    free = Counter(_free_of_cotangents(backward.jaxpr, [False] * len(residuals) + [True] * len(inexact))[1])
    assert not told - free


def _free_of_cotangents(jaxpr, given: list[bool]) -> tuple[list[bool], list[tuple[str, tuple[str, ...]]]]:
    """Which outputs depend on the inputs ``given``, and the operations at any depth that do not.

    A walk of its own, which takes a dependence that it cannot follow for none.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    tainted = {var for var, yes in zip(jaxpr.invars, given, strict=True) if yes}
    free = []

    def depends(atom) -> bool:
        return not hasattr(atom, "val") and atom in tainted

    for eqn in jaxpr.eqns:
        reading = [depends(atom) for atom in eqn.invars]
        name = _primitive_of(eqn)
        made = eqn.params.get("_prim")  # of jax_remat3
        bodies = [*jaxprs_in_params(eqn.params if made is None else getattr(made, "params", {}))]
        out = [any(reading)] * len(eqn.outvars)
        if bodies:
            out, found = _in_bodies(eqn, bodies, reading)
            free += found
        elif name == "optimization_barrier":
            out = reading
        elif name == "PrimalLeftTangentRight":
            out = [reading[0]] * len(eqn.outvars)
        if not bodies and not any(out):
            free.append((name, tuple(_short_type(var.aval) for var in eqn.outvars)))
        tainted.update(var for var, yes in zip(eqn.outvars, out, strict=True) if yes)
    return [depends(atom) for atom in jaxpr.outvars], free


def _in_bodies(eqn, bodies, reading: list[bool]) -> tuple[list[bool], list[tuple[str, tuple[str, ...]]]]:
    """The same of an equation that has jaxprs inside; a loop's carry that depends on what is given enters it again."""
    reading = reading[1:] if eqn.primitive.name == "cond" else list(reading)
    while True:
        out, free = [False] * len(eqn.outvars), []
        for body in bodies:
            followed = len(body.invars) == len(reading) and eqn.primitive.name != "while"
            leaving, found = _free_of_cotangents(body, reading if followed else [False] * len(body.invars))
            free += found
            if followed and len(leaving) == len(out):
                out = [one or two for one, two in zip(out, leaving, strict=True)]
        again = [index for index, output in _carried(eqn) if out[output] and not reading[index]]
        if not again:
            return out, free
        for index in again:
            reading[index] = True


def _carried(eqn) -> list[tuple[int, int]]:
    """Pairs of operand and output of a scan that are one carried value."""
    if eqn.primitive.name != "scan":
        return []
    if "num_carry" in eqn.params:
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    else:
        consts, carries = (len(list(part)) for part in eqn.params["ft_in"].unpack()[:2])
    return [(consts + i, i) for i in range(carries)]


def _primitive_of(eqn) -> str:
    made = type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name
    return {"RematTraced": "checkpoint", "CheckpointName": "name", "CheckpointNameFwd": "name"}.get(made, made)


def _short_type(aval) -> str:
    return f"{dtypes.short_dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"
