"""What the steps of a loop statement take from the steps before, and leave to what comes after them."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.editing.python_loops import is_load, jumps_of, loaded, stored
from remat_magic.records import RematError

__all__ = ["Carried", "carried_by"]


class Carried(NamedTuple):
    """The variables that the steps of a loop change.

    Attributes:
        taken: those that they take from the steps before.
        left: those that they leave to what comes after.
        counts: those that hold numbers of Python, what ends the loop, or what it goes through and leaves, which no
            checkpoint may turn into arrays.
        unbound: those of these that nothing but the loop assigns.
    """

    taken: list[str]
    left: list[str]
    counts: list[str]
    unbound: list[str]


def carried_by(text: ParsedText, loop: ast.For | ast.While, guards: Sequence[ast.stmt] = ()) -> Carried:
    """The variables that the steps of a loop statement change.

    Args:
        text: the text.
        loop: the loop.
        guards: those of its first statements that go through it before the steps do, and leave its own variables.

    Raises:
        RematError: its steps do what no function can do for them.
    """
    where = f"the loop at line {loop.lineno} of {text.place}"
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, Function | ast.ClassDef) and not isinstance(node, ast.Lambda) for node in inside):
        raise RematError(f"{where} defines a function in its steps: write the checkpoint around some of them by hand.")
    if any(isinstance(node, ast.Return) for node in inside):
        raise RematError(
            f"{where} returns in its steps: assign what it returns, `break`, return it after the loop, and ask again."
        )
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal) for node in inside):
        raise RematError(
            f"{where} yields, awaits, or declares variables in its steps: write the checkpoint around some of them by "
            "hand."
        )
    stores = [node for node in inside if isinstance(node, ast.Attribute | ast.Subscript) and not is_load(node)]
    if stores:
        raise RematError(
            f"{where} assigns `{text.segment(stores[0])}`, which a checkpoint around its steps would hide: write it by "
            "hand."
        )
    kept = [node for node in inside if _keeps(node, stored(loop.body))]
    if kept:
        raise RematError(
            f"{where} does `{text.segment(kept[0])}`, by which a value would leave the checkpoint around its steps: "
            "write it by hand."
        )
    targets = stored([loop.target]) if isinstance(loop, ast.For) else set[str]()
    body = loop.body[len(guards) :]
    own = {id(node) for node in ast.walk(loop)}
    nodes = [*ast.walk(text.enclosing(loop) or text.tree)]
    others = [node for node in nodes if id(node) not in own]
    bound = {name for name in stored(loop.body) | targets if any(_binds(n, name) for n in others)}
    counts = _counts(nodes, bound & stored(loop.body))
    jumps = {*jumps_of(loop)}
    all_run = [*itertools.takewhile(lambda statement: jumps.isdisjoint(ast.walk(statement)), body)]
    (first_read, _), (_, written) = _reads(body, targets), _reads(all_run, targets)
    later = _reads(_after(text, loop), set())[0] | _reads(loop.orelse, set())[0]
    counts &= first_read | later
    counts |= set() if guards else (targets & later) - stored(body)
    if isinstance(loop, ast.While):
        counts |= stored(loop.body) & _tested(loop.test)
        first_read |= loaded([loop.test])  # each step begins with the condition
        if any(isinstance(node, ast.NamedExpr) for node in ast.walk(loop.test)):
            raise RematError(f"{where} assigns a variable in its condition: assign it in a step, and ask again.")
    changed = (stored(body) | (set() if guards else targets)) - counts
    carried = {name for name in changed if name in first_read}
    left = {name for name in changed if name in carried | later}
    carried |= {name for name in left if name not in written}  # not written in each step
    order = [node.id for node in inside if isinstance(node, ast.Name) and node.id in left]
    order = [*dict.fromkeys([*order, *sorted(left)])]
    if not left:
        raise RematError(f"{where} leaves nothing to what comes after it.")
    return Carried(
        [name for name in order if name in carried], order, sorted(counts), sorted((counts & targets) - bound)
    )


def _keeps(node: ast.AST, own: set[str]) -> bool:
    """Whether a statement puts something into a list, a set or a dictionary that is not made in the same steps."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(of, name))) if name in _KEEPING:
            return not (isinstance(of, ast.Name) and of.id in own)
        case _:
            return False


_KEEPING = {"add", "append", "appendleft", "extend", "insert", "setdefault", "update"}


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=bound) | ast.arg(bound):
            return bound == name and not is_load(node)
        case _:
            return False


def _counts(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """Those of the variables of a function that are only ever numbers which are written in it, or come of such.

    Args:
        nodes: of the function.
        names: the variables.
    """
    values: dict[str, list[ast.expr]] = {name: [] for name in names}
    places = Counter(node.id for node in nodes if isinstance(node, ast.Name) and not is_load(node))
    places.update(node.arg for node in nodes if isinstance(node, ast.arg))
    for node in nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(several)) if len(targets) == len(several):
                pairs = [*zip(targets, several, strict=True)]
            case ast.Assign([target], value) | ast.AugAssign(target, _, value):
                pairs = [(target, value)]
            case _:
                pass
        for target, value in pairs:
            if isinstance(target, ast.Name) and target.id in values:
                values[target.id].append(value)
    counts = {name for name in names if places[name] == len(values[name])}
    while wrong := {name for name in counts if not all(_is_count(value, counts) for value in values[name])}:
        counts -= wrong
    return counts


def _is_count(value: ast.expr, counts: set[str]) -> bool:
    match value:
        case ast.Constant(int() | float()) | ast.Call(ast.Name("len"), [_]):
            return True
        case ast.Name(name):
            return name in counts
        case ast.UnaryOp(_, operand):
            return _is_count(operand, counts)
        case ast.BinOp(left, _, right):
            return _is_count(left, counts) and _is_count(right, counts)
        case _:
            return False


def _tested(test: ast.expr) -> set[str]:
    """The variables by which a condition decides; not those of which it asks the shape alone, which may be arrays."""
    nodes = [*ast.walk(test)]
    shaped = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _SHAPE}
    return {node.id for node in nodes if isinstance(node, ast.Name) and is_load(node) and id(node) not in shaped}


_SHAPE = {"dtype", "ndim", "shape", "size"}


def _reads(statements: Sequence[ast.stmt], written: set[str]) -> tuple[set[str], set[str]]:
    """The variables that may be read before they are written, and those that are surely written."""
    reads: set[str] = set()
    written = set(written)
    for statement in statements:
        match statement:
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr():
                targets = stored([statement])
                read = loaded([statement]) | (targets if isinstance(statement, ast.AugAssign) else set())
                reads |= read - written
                written |= targets
            case ast.If(test, body, orelse):
                branches = [_reads(branch, written | stored([test])) for branch in (body, orelse)]
                reads |= (loaded([test]) - written).union(*(read for read, _ in branches))
                written |= (branches[0][1] & branches[1][1]) | stored([test])
            case ast.For(target, iterated, body, orelse):
                reads |= loaded([iterated]) - written | _reads(body, written | stored([target]))[0]
                written |= stored([target])  # where it has a step
                reads |= _reads(orelse, written)[0]
            case ast.With(items, body):
                reads |= loaded(items) - written
                inside = _reads(body, written | stored(items))
                reads |= inside[0]
                written |= inside[1]
            case _:
                reads |= loaded([statement]) - written
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
