"""Texts of loops with one checkpoint around each few of their steps: ``for`` loops, and calls of JAX's loops."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.records import RematError

__all__ = [
    "JaxLoop",
    "LoopKind",
    "PythonLoop",
    "carried_by",
    "end_of_count",
    "helper",
    "loop_around",
    "own_counter",
    "own_parameter",
    "statement_of",
]

LoopKind = Literal["scan", "map", "fori_loop"]
PythonLoop = ast.For | ast.While | ast.comprehension

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


# --------------------------------------------------------------------------------------------------------- Python loops


def loop_around(text: ParsedText, node: ast.AST) -> PythonLoop | None:
    """The innermost loop of its function that a node is repeated by, a comprehension's last one where that does it."""
    below, above = node, text.parents.get(id(node))
    while above is not None and not isinstance(above, Function):
        if isinstance(above, ast.For | ast.While) and below in above.body:
            return above
        if isinstance(above, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            if not isinstance(below, ast.comprehension):
                return above.generators[-1]
            if below is not above.generators[0] or node not in ast.walk(below.iter):
                return None
        below, above = above, text.parents.get(id(above))
    return None


def own_counter(loop: ast.While) -> str:
    """The variable that counts the steps of a loop one by one and is compared to end it; empty where none does."""
    compared = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    stores = Counter(
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    for statement in loop.body:
        match statement:
            case ast.AugAssign(ast.Name(name), ast.Add(), ast.Constant(1)):
                pass
            case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(other), ast.Add(), ast.Constant(1))) if name == other:
                pass
            case _:
                continue
        if name in compared and stores[name] == 1:
            return name
    return ""


def end_of_count(loop: ast.While) -> ast.expr | None:
    """What the counter of a loop is less than in each step, which no step changes; None where that is not seen."""
    match loop.test:
        case ast.Compare(ast.Name(name), [ast.Lt()], [end]) if name == own_counter(loop):
            return end if _stored(loop.body).isdisjoint(_loaded([end])) else None
        case _:
            return None


def own_parameter(text: ParsedText, loop: ast.stmt) -> str:
    """What the object is called in the method that a loop stands in, or a function within it.

    Raises:
        RematError: it stands in no method, or the object has no such name there.
    """
    function, inner = text.enclosing(loop), set[str]()
    while function is not None:
        arguments, is_method = function.args, isinstance(text.parents.get(id(function)), ast.ClassDef)
        if is_method and (given := [*arguments.posonlyargs, *arguments.args]) and given[0].arg not in inner:
            return given[0].arg
        inner |= {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
        inner |= _stored([function] if isinstance(function, ast.Lambda) else function.body)
        function = None if is_method else text.enclosing(function)
    raise RematError(
        f"the loop at line {loop.lineno} of {text.place} is not in a method of the module itself: write the checkpoint "
        "around some of its steps there by hand."
    )


def carried_by(text: ParsedText, loop: ast.For | ast.While) -> tuple[list[str], list[str]]:
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
    if loop.orelse:
        raise RematError(f"{where} has an `else`: write what is in it after the loop, and ask again.")
    if any(
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
    targets = _stored([loop.target]) if isinstance(loop, ast.For) else {own_counter(loop)}
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
    inside = (inner for node in nodes for inner in ast.walk(node))
    return {node.id for node in inside if isinstance(node, ast.Name) and _is_load(node)}


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
