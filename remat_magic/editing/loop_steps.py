"""Texts of loops with one checkpoint around each few of their steps: ``for`` loops, and calls of JAX's loops."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.records import RematError

__all__ = ["JaxLoop", "LoopKind", "carried_by", "for_loop_around", "helper", "own_parameter", "statement_of"]

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


def statement_of(text: ParsedText, node: ast.AST) -> ast.stmt:
    """The statement that a node stands in, which a definition can be written before.

    Raises:
        RematError: none can.
    """
    below, above = node, text.parents.get(id(node))
    while above is not None and not (isinstance(below, ast.stmt) and below in getattr(above, "body", [])):
        if isinstance(below, ast.stmt) and below in [*getattr(above, "orelse", []), *getattr(above, "finalbody", [])]:
            break
        below, above = above, text.parents.get(id(above))
    line, column = text.start(below) if isinstance(below, ast.stmt) else (1, 1)
    if text.enclosing(below) is None or text.lines[line - 1][:column].strip():
        raise RematError(
            f"the loop at line {line} of {text.place} stands where no function can be defined before it: write the "
            "checkpoint there by hand."
        )
    assert isinstance(below, ast.stmt)
    return below


# ------------------------------------------------------------------------------------------------ calls of JAX's loops


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
    options = "".join(f", {each}={each}" for each in ("reverse", "unroll") if each in parameters)
    reverse = ", reverse=reverse" if "reverse" in parameters else ""
    size = min(size, loop.length)
    rest = loop.length % size
    steps, of_rest = ("steps", "steps") if loop.has_inputs else (f"steps({size})", f"steps({rest})")
    taken, left_over = ("xs", "rest") if loop.has_inputs else ("_", "None")
    body: list[str] = []
    if loop.kind == "map":
        made, inner = "", f"def several(xs):\n    return {jax}.lax.map(f, xs)"
        whole, last = f"ys = {jax}.lax.map({steps}, groups)", f"last = {of_rest}({left_over})"
    else:
        made, function, init, length = "carry, ", "f", "init", "length"
        if loop.kind == "fori_loop":
            body += ["def step(carry, _):", "    i, x = carry", "    return (i + 1, body_fun(i, x)), None", ""]
            function, init, length = "step", "(lower, init_val)", "(upper - lower)"
        xs, groups = ("xs", "groups") if loop.has_inputs else ("None, count", f"None, {length} // {size}")
        inner = f"def several(carry, {taken}):\n    return {jax}.lax.scan({function}, carry, {xs}{options})"
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
    body.append("return carry[1]" if loop.kind == "fori_loop" else f"return {made}{ys}")
    head = [
        f"def {name}({', '.join(each + _DEFAULTS.get(each, '') for each in parameters)}):",
        f'    """Like jax.lax.{loop.kind}, with one checkpoint around each {size} steps."""',
        "",
    ]
    return [line.rstrip() for line in [*head, *(f"    {line}" for line in body)]]


def _parameters(loop: JaxLoop) -> list[str]:
    """Those of the loop's parameters that its call gives an argument to."""
    known = _PARAMETERS[loop.kind]
    keywords = [keyword.arg for keyword in loop.call.keywords]
    if (
        any(isinstance(argument, ast.Starred) for argument in loop.call.args)
        or len(loop.call.args) > len(known)
        or not {*keywords} <= {*known}
    ):
        raise RematError(
            f"the call of jax.lax.{loop.kind} at line {loop.call.lineno} of {loop.text.place} has arguments that no "
            "edit passes on: write the checkpoint there by hand."
        )
    given = {*known[: len(loop.call.args)], *keywords}
    last = max((number for number, each in enumerate(known) if each in known[: len(loop.call.args)]), default=-1)
    return [each for number, each in enumerate(known) if number <= last or each in given]


# ------------------------------------------------------------------------------------------------------------ for loops


def for_loop_around(text: ParsedText, node: ast.AST) -> ast.For | None:
    """The innermost ``for`` loop of its function that a node is repeated by; None where something else repeats it."""
    below, above = node, text.parents.get(id(node))
    while above is not None and not isinstance(above, Function):
        if isinstance(above, ast.For) and below in above.body:
            return above
        if isinstance(above, ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return None
        below, above = above, text.parents.get(id(above))
    return None


def own_parameter(text: ParsedText, loop: ast.For) -> str:
    """What the object is called in the method that a loop stands in.

    Raises:
        RematError: it stands in no method.
    """
    method = text.enclosing(loop)
    if isinstance(method, ast.FunctionDef) and isinstance(text.parents.get(id(method)), ast.ClassDef):
        for parameter in (*method.args.posonlyargs, *method.args.args):
            return parameter.arg
    raise RematError(
        f"the loop at line {loop.lineno} of {text.place} is not in a method of the module itself: write the checkpoint "
        "around some of its steps there by hand."
    )


def carried_by(text: ParsedText, loop: ast.For) -> tuple[list[str], list[str]]:
    """The variables that the steps of a loop take from those before, and those that they leave to what comes after.

    Raises:
        RematError: its steps do what no function can do for them.
    """
    where = f"the loop at line {loop.lineno} of {text.place}"
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    jumps = ast.Break | ast.Continue | ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal
    if any(isinstance(node, Function | ast.ClassDef) and not isinstance(node, ast.Lambda) for node in inside):
        raise RematError(f"{where} defines a function in its steps: write the checkpoint around some of them by hand.")
    loops_own = {id(node) for inner in inside if isinstance(inner, ast.For | ast.While) for node in ast.walk(inner)}
    if loop.orelse or any(
        isinstance(node, jumps) and not (isinstance(node, ast.Break | ast.Continue) and id(node) in loops_own)
        for node in inside
    ):
        raise RematError(f"{where} jumps or returns in its steps: write the checkpoint around some of them by hand.")
    stores = [node for node in inside if isinstance(node, ast.Attribute | ast.Subscript) and not _is_load(node)]
    if stores:
        raise RematError(
            f"{where} assigns `{text.segment(stores[0])}`, which a checkpoint around its steps would hide: write it by "
            "hand."
        )
    targets = _stored([loop.target])
    first_read, written = _reads(loop.body, targets)
    stored = _stored(loop.body) | targets
    later, _ = _reads(_after(text, loop), set())
    carried = {name for name in stored if name in first_read}
    left = {name for name in stored if name in carried | later}
    carried |= {name for name in left if name not in written}  # not written in each step
    order = [node.id for node in inside if isinstance(node, ast.Name) and node.id in left]
    order = [*dict.fromkeys([*order, *sorted(left)])]
    if not left:
        raise RematError(f"{where} leaves nothing to what comes after it.")
    return [name for name in order if name in carried], [name for name in order if name in left]


def _is_load(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that are written; those of comprehensions are their own."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not _is_load(node):
            names.add(node.id)
        names |= _stored(ast.iter_child_nodes(node))
    return names


def _loaded(nodes: Iterable[ast.AST]) -> set[str]:
    inside = (each for node in nodes for each in ast.walk(node))
    return {each.id for each in inside if isinstance(each, ast.Name) and _is_load(each)}


def _reads(statements: Sequence[ast.stmt], written: set[str]) -> tuple[set[str], set[str]]:
    """The variables that may be read before they are written, and those that are surely written."""
    reads: set[str] = set()
    written = set(written)
    for statement in statements:
        match statement:
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr():
                targets = _stored([statement])
                read = _loaded([statement]) | (targets if isinstance(statement, ast.AugAssign) else set())
                reads |= read - written
                written |= targets
            case ast.If(test, body, orelse):
                branches = [_reads(branch, written) for branch in (body, orelse)]
                reads |= (_loaded([test]) - written).union(*(read for read, _ in branches))
                written |= branches[0][1] & branches[1][1]
            case ast.For(target, iterated, body, orelse):
                reads |= _loaded([iterated]) - written | _reads(body, written | _stored([target]))[0]
                reads |= _reads(orelse, written)[0]
            case ast.With(items, body):
                reads |= _loaded(items) - written
                inside = _reads(body, written | _stored(items))
                reads |= inside[0]
                written |= inside[1]
            case _:
                reads |= _loaded([statement]) - written
    return reads, written


def _after(text: ParsedText, node: ast.AST) -> list[ast.stmt]:
    """What can run after a statement in its function, itself included where that is repeated."""
    statements: list[ast.stmt] = []
    above = text.parents.get(id(node))
    while above is not None and not isinstance(node, Function):
        for block in (getattr(above, name, []) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and node in block:
                statements += block[block.index(node) + 1 :]
        if isinstance(above, ast.For | ast.While):
            statements.append(above)
        node, above = above, text.parents.get(id(above))
    return statements
