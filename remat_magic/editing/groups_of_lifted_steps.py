"""Texts of flax's own scans with one checkpoint around each few of their steps.

Both scan over variables, which a checkpoint of JAX's around some of the steps would not see as such. Variables keep
their names and shapes: they are cut into groups on their way into the loops.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_magic.editing.lifted_loops import LiftedLoop
from remat_magic.records import RematError

__all__ = ["lifted_helper"]

_WIDTH = 88
_OF_NNX = {"in_axes", "out_axes", "length", "reverse", "unroll"}  # what a scan within a scan takes as it is
_NOT_OF_LINEN = {"methods", "data_transform"}
_RENEWED = ("variable_axes", "in_axes", "out_axes", "length")  # what is another for groups


def lifted_helper(loop: LiftedLoop, size: int, name: str, flax: str, jax: str, checkpoint: str) -> list[str]:
    """The lines of a function that does what a scan of flax does, with one checkpoint around each so many steps.

    Args:
        loop: the use of the scan.
        size: how many steps.
        name: what to call the function.
        flax: what the library's module is called.
        jax: what JAX is called.
        checkpoint: the checkpoint of ``steps``.

    Raises:
        RematError: it is given what no edit passes on.
    """
    size = min(size, loop.length)
    rest = loop.length % size
    of_linen = loop.library == "flax.linen"
    refused = {*loop.given} & _NOT_OF_LINEN if of_linen else {*loop.given[loop.positional :]} - _OF_NNX
    if refused:
        raise RematError(
            f"{loop.where} is given {', '.join(sorted(refused))}, which no edit passes on: write the checkpoint around "
            "some of its steps by hand."
        )
    if of_linen and loop.draws:
        raise RematError(
            f"{loop.where} draws random numbers, which are others where flax splits their keys for groups of steps: "
            "write the checkpoint around some of its steps by hand."
        )
    if of_linen and rest and (loop.collections is None or loop.collections - {"params"}):
        raise RematError(
            f"{loop.where} scans over variables besides parameters, which the {rest} steps that are left over would "
            f"not give back: choose a number of steps that {loop.length} is a multiple of."
        )
    parameters, body = _of_linen(loop, size, rest, flax, jax) if of_linen else _of_nnx(loop, size, rest, flax, jax)
    stay = "; variables keep their names and shapes" if of_linen else ""
    lines = [
        f"def {name}({', '.join(parameters)}):",
        f'    """Like {flax}.scan, with one checkpoint around each {size} steps{stay}."""',
        "",
        "    def checkpoint(steps):",
        f"        return {checkpoint}",
        "",
        *(f"    {line}" for line in body),
    ]
    return [line.rstrip() for line in lines]


def _of_linen(loop: LiftedLoop, size: int, rest: int, nn: str, jax: str) -> tuple[list[str], list[str]]:
    """The parameters and the body of such a function for linen."""
    parameters = [*dict.fromkeys(("target", *loop.given))]
    counted, variables = "length" in parameters, "variable_axes" in parameters
    options = [f"{parameter}={parameter}" for parameter in parameters if parameter not in ("target", *_RENEWED)]
    options += ["variable_axes=dict.fromkeys(variable_axes, 0)"] * variables
    into, out = ("in_axes" in parameters, "out_axes" in parameters)
    for parameter in ("in_axes", "out_axes"):
        firsts = f"{jax}.tree.map(lambda axis: axis if axis is {nn}.broadcast else 0, {parameter})"
        options += [f"{parameter}={firsts}"] * (parameter in parameters)
    whole = [parameter if parameter == "target" else f"{parameter}={parameter}" for parameter in parameters]
    body = _scan_of(f"{nn}.scan", ["target", *options], counted)

    named = "metadata_params" in parameters  # of arrays that hold the names of their axes

    def axes(function: str, tree: str, axis: str = "0") -> str:
        """The tree with the name of the axis that is scanned over added or removed."""
        return f"{nn}.meta.{function}_axis({tree}, {axis}, metadata_params)"

    def of_trees(name: str, arguments: Sequence[str], change: str, rows: int) -> list[str]:
        """A function of each array in a tree that is scanned over along an axis.

        Args:
            name: the function's.
            arguments: the trees, of a group and of what is left over, by the variables for their arrays.
            change: what becomes of the arrays.
            rows: how many axes are scanned over in what it returns; 0: in what it is given there are more.
        """
        trees = ["tree", "last"][: len(arguments)]
        lines = [f"def {name}(axis, {', '.join(trees)}):"]
        lines += [f"    if axis is {nn}.broadcast:", "        return tree"] if into or out else []
        if rows:
            lines += [f"    tree = {axes('remove', 'tree', 'axis')}"] * named
            lines += [f"    tree = {jax}.tree.map(lambda x: {jax}.numpy.moveaxis(x, axis, 0), tree)"]
        elif named:
            lines += [f"    tree = {axes('remove', axes('remove', 'tree'))}"]
            lines += [f"    last = {axes('remove', 'last')}"] * (len(trees) > 1)
        result = f"{jax}.tree.map(lambda {', '.join(arguments)}: {change}, {', '.join(trees)})"
        if named:
            lines += [f"    tree = {result}"]
            result = "tree" if rows else axes("add", "tree", "axis")
            for _ in range(rows):
                result = axes("add", result)
        return [*lines, f"    return {result}", ""]

    part, joined = f"x[:-{rest}]" if rest else "x", "x.reshape(-1, *x.shape[2:])"
    body += of_trees("apart", ["x"], f"{part}.reshape(-1, {size}, *x.shape[1:])", 2)
    if rest:
        body += of_trees("left_over", ["x"], f"x[-{rest}:]", 1)
        joined = f"{jax}.numpy.concatenate([{joined}, y])"
    body += of_trees("together", ["x", "y"] if rest else ["x"], f"{jax}.numpy.moveaxis({joined}, 0, axis)", 0)
    if variables:
        change = "change" if rest else "apart"
        arguments = ["target", "collection", f"lambda tree, axis=axis: {change}(axis, tree)"]
        arguments += [] if rest else ["lambda tree, axis=axis: together(axis, tree)", "mutable=True"]
        body += [
            f"def mapped(target{', change' * bool(rest)}):",
            "    for collection, axis in variable_axes.items():",
            *(f"        {line}" for line in _call(f"target = {nn}.map_variables", arguments)),
            "    return target",
            "",
        ]
    several, count, last = _lengths(size, rest) if counted else ("", "", "")
    loops = {"groups": ("apart", f"scan(checkpoint(scan(target{several})){count})")}
    if rest:
        loops["rest"] = "left_over", f"checkpoint(scan(target{last}))"
    for name, (change, scan) in loops.items():
        body.append(f"{name} = mapped({scan}{f', {change}' if rest else ''})" if variables else f"{name} = {scan}")
    body += [*_call(f"whole = {nn}.scan", whole), ""]
    own, call = ("module", "") if loop.of_function else ("self", ".__call__")

    def xs(change: str) -> str:
        return f"*{jax}.tree.map({change}, in_axes, xs)" if into else f"*{change}(0, xs)"

    runs = [f"carry, ys = groups{call}({own}, carry, {xs('apart')})"]
    if rest:
        runs.insert(0 if loop.is_reversed else 1, f"carry, last = rest{call}({own}, carry, {xs('left_over')})")
    ys = "ys, last" if rest else "ys"
    result = f"{jax}.tree.map(together, out_axes, {ys})" if out else f"together(0, {ys})"
    first = "whole(module, carry, *xs)" if loop.of_function else "super().__call__(carry, *xs)"
    function = [
        f"def {'in_groups' if loop.of_function else '__call__'}({own}, carry, *xs):",
        f"    if {own}.is_initializing():",
        f"        return {first}",
        *(f"    {run}" for run in runs),
        f"    return carry, {result}",
        "",
    ]
    if loop.of_function:
        return parameters, [*body, *function, "return in_groups"]
    body += ["class InGroups(whole):", *(f"    {line}" for line in function)]
    return parameters, [*body, "InGroups.__name__ = whole.__name__", "return InGroups"]


def _scan_of(scan: str, arguments: Sequence[str], counted: bool) -> list[str]:
    """The lines that define ``scan``, of which there is one within another."""
    length = ["length"] if counted else []
    own = ", ".join([arguments[0], *length])
    calls = _call(f"return {scan}", [*arguments, *(f"{argument}={argument}" for argument in length)])
    return [f"def scan({own}):", *(f"    {line}" for line in calls), ""]


def _call(function: str, arguments: Sequence[str]) -> list[str]:
    """A call, with a line for each argument where it is long."""
    line = f"{function}({', '.join(arguments)})"
    return [line] if len(line) <= _WIDTH else [f"{function}(", *(f"    {argument}," for argument in arguments), ")"]


def _lengths(size: int, rest: int) -> tuple[str, str, str]:
    """The arguments that say how many steps a group has, how many groups there are, and how many steps are left."""
    return f", {size}", f", length // {size}", f", {rest}"


def _of_nnx(loop: LiftedLoop, size: int, rest: int, nnx: str, jax: str) -> tuple[list[str], list[str]]:
    """The parameters and the body of such a function for nnx."""
    options = list(loop.given[loop.positional :])
    counted = "length" in options
    given = [f"{option}={option}" for option in options if option != "length"]
    body = _scan_of(f"{nnx}.scan", ["f", *given], counted)
    part = f"x[:-{rest}]" if rest else "x"
    body += [
        "def apart(tree):",
        f"    return {jax}.tree.map(lambda x: {part}.reshape(-1, {size}, *x.shape[1:]), tree)",
        "",
    ]
    joined = "x.reshape(-1, *x.shape[2:])"
    if rest:
        joined = f"{jax}.numpy.concatenate([{joined}, y])"
        body += ["def left_over(tree):", f"    return {jax}.tree.map(lambda x: x[-{rest}:], tree)", ""]
        body += ["def together(tree, last):", f"    return {jax}.tree.map(lambda x, y: {joined}, tree, last)", ""]
    else:
        body += ["def together(tree):", f"    return {jax}.tree.map(lambda x: {joined}, tree)", ""]
    into, out = loop.axes
    scanned = [number for number, axis in enumerate(into) if axis == "scan"]

    def call(function: str, given: str) -> str:
        numbers = {number: f"{given}[{place}]" for place, number in enumerate(scanned)}
        args = ["carry" if axis == "carry" else numbers.get(n, f"args[{n}]") for n, axis in enumerate(into)]
        return f"{function}({', '.join(args)})"

    several, count, last = _lengths(size, rest) if counted else ("", "", "")
    inner = [f"groups = scan(checkpoint(scan(f{several})){count})"]
    inner += [f"rest = checkpoint(scan(f{last}))"] if rest else []
    inner += ["", "def in_groups(*args):"]
    if "carry" in into:
        inner.append(f"    carry = args[{into.index('carry')}]")
    if scanned:
        inner.append(f"    scanned = [{', '.join(f'args[{number}]' for number in scanned)}]")  # it is updated
        inner.append(f"    graph, state = {nnx}.split(scanned)")
        inner.append(f"    chunks = {nnx}.merge(graph, apart(state))")
        inner += [f"    left = {nnx}.merge(graph, left_over(state))"] if rest else []

    def results(prefix: str) -> list[str]:
        return ["carry" if axis == "carry" else f"{prefix}{number}" for number, axis in enumerate(out or ("carry",))]

    runs = [f"    {', '.join(results('ys'))} = {call('groups', 'chunks')}"]
    if rest:
        at = 0 if loop.is_reversed else 1
        runs.insert(at, f"    {', '.join(results('last'))} = {call('rest', 'left')}")
    inner += runs
    if scanned:
        states = f"{nnx}.state(chunks)" + f", {nnx}.state(left)" * bool(rest)
        inner.append(f"    {nnx}.update(scanned, together({states}))")
    ys = [
        "carry" if own == "carry" else f"together({own}{f', {last}' if rest else ''})"
        for own, last in zip(results("ys"), results("last"), strict=True)
    ]
    inner += [f"    return {', '.join(ys)}", "", "return in_groups"]
    if loop.is_applied:
        return ["f", *options], [*body, *inner]
    return options, [*body, "def decorate(f):", *(f"    {line}" for line in inner), "", "return decorate"]
