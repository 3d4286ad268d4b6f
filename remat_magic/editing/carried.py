"""What the steps of a loop statement take from the steps before, and leave to what comes after them."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from remat_magic.editing.parsed_text import Function, ParsedText
from remat_magic.editing.python_loops import KEEPING, is_load, jumps_of, loaded, stored
from remat_magic.records import RematError

__all__ = ["Carried", "carried_by"]


class Carried(NamedTuple):
    """The variables that the steps of a loop change.

    Attributes:
        taken: those that they take from the steps before.
        left: those that they leave to what comes after.
        counts: those that hold numbers of Python, what ends the loop, or what it goes through and leaves, which no
            checkpoint may turn into arrays.
        unbound: those that nothing but the loop assigns before they are given to a step.
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
    if any(isinstance(node, _DEFINING) for node in inside):
        raise RematError(
            f"{where} defines a function in its steps, or imports: write the checkpoint around some of them by hand."
        )
    if handled := _handled(text, loop):
        raise RematError(
            f"{where} may end by an exception that is handled at line {handled.lineno}, by which the steps of its last "
            "group would be lost: end it by `break`, and ask again."
        )
    if any(isinstance(node, ast.Return) for node in inside):
        raise RematError(
            f"{where} returns in its steps: assign what it returns, `break`, return it after the loop, and ask again."
        )
    if asked := [node for node in inside if isinstance(node, ast.Call) and _asks_for_function(node)]:
        raise RematError(
            f"{where} calls `{text.segment(asked[0])}`, which would not do the same in a function around its steps: "
            "write the checkpoint there by hand."
        )
    if any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal) for node in inside):
        raise RematError(
            f"{where} yields, awaits, or declares variables in its steps: write the checkpoint around some of them by "
            "hand."
        )
    nodes = [*ast.walk(text.enclosing(loop) or text.tree)]
    targets = stored([loop.target]) if isinstance(loop, ast.For) else set[str]()
    stores = [node for node in inside if isinstance(node, ast.Attribute | ast.Subscript) and not is_load(node)]
    made = {name for node in nodes for name in _made(node)}
    stores += [node for node in inside if _extends(node, made)]
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
    body = loop.body[len(guards) :]
    own = {id(node) for node in ast.walk(loop)}
    others = [node for node in nodes if id(node) not in own]
    declaring = (node for node in nodes if isinstance(node, ast.Global | ast.Nonlocal))
    outer = {name for node in declaring if text.enclosing(node) is text.enclosing(loop) for name in node.names}
    outer &= stored(loop.body) | targets
    bound = _bound(text.enclosing(loop) or text.tree, own) & (stored(loop.body) | targets)
    is_repeated = any(isinstance(statement, ast.For | ast.While) for statement in _around(text, loop))
    counts = _counts(nodes, stored(loop.body) & (bound if is_repeated else stored(loop.body)))
    jumps = {*jumps_of(loop)}
    all_run = [*itertools.takewhile(lambda statement: jumps.isdisjoint(ast.walk(statement)), body)]
    (first_read, _), (_, written) = _reads(body, targets), _reads(all_run, targets)
    later = _reads(_after(text, loop), set())[0] | _reads(loop.orelse, set())[0]
    within = [node for node in others if isinstance(node, Function) and node is not text.enclosing(loop)]
    later |= outer.union(*map(_read_by, within))  # whenever these are called
    counts = (counts | _counts(nodes, outer)) & (first_read | later)
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
    first = set[str]()
    if not is_repeated:
        after = {id(node) for node in others if getattr(node, "lineno", 0) > loop.lineno}
        first = carried - first_read - outer - _bound(text.enclosing(loop) or text.tree, own | after)
    order = [node.id for node in inside if isinstance(node, ast.Name) and node.id in left]
    order = [*dict.fromkeys([*order, *sorted(left)])]
    if not left:
        raise RematError(
            f"{where} assigns no variable that is read after its steps: write the checkpoint around them by hand."
        )
    return Carried(
        [name for name in order if name in carried],
        order,
        sorted(counts),
        sorted(first | counts - bound - outer),
    )


_DEFINING = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def _handled(text: ParsedText, loop: ast.For | ast.While) -> ast.stmt | None:
    """The statement of its function that goes on after an exception of a loop, which may be meant to end that."""
    below: ast.AST = loop
    for above in _around(text, loop):
        match above:
            case ast.Try(body, handlers) if below in body:
                if any(not isinstance(handler.body[-1], ast.Raise) for handler in handlers):
                    return above
            case ast.With(items) if any("suppress" in text.segment(item.context_expr) for item in items):
                return above
            case _:
                pass
        below = above
    return None


def _around(text: ParsedText, node: ast.AST) -> Iterator[ast.AST]:
    """The nodes around a statement in its function."""
    above = text.parents.get(id(node))
    while above is not None and not isinstance(above, Function):
        yield above
        above = text.parents.get(id(above))


def _asks_for_function(call: ast.Call) -> bool:
    """Whether what a call does depends on the function that it stands in."""
    return not call.args and isinstance(call.func, ast.Name) and call.func.id in ("dir", "locals", "super", "vars")


def _keeps(node: ast.AST, own: set[str]) -> bool:
    """Whether a statement puts something into a list, a set or a dictionary that is not made in the same steps."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(of, name))) if name in KEEPING:
            return not (isinstance(of, ast.Name) and of.id in own)
        case _:
            return False


def _extends(node: ast.AST, made: set[str]) -> bool:
    """Whether a statement adds to a list, a set or a dictionary that the function has not made."""
    match node:
        case ast.AugAssign(ast.Name(name), _, value) if isinstance(value, _DISPLAY):
            return name not in made
        case _:
            return False


def _made(node: ast.AST) -> set[str]:
    """The variables that a statement assigns a list, a tuple, a set or a dictionary which is written there."""
    match node:
        case ast.Assign(targets, value) | ast.AnnAssign(ast.expr() as targets, _, value) if isinstance(value, _DISPLAY):
            return stored(targets if isinstance(targets, list) else [targets])
        case _:
            return set()


_DISPLAY = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.ListComp | ast.SetComp | ast.DictComp


def _read_by(function: Function) -> set[str]:
    """The variables of outside that a function reads."""
    nodes = [*ast.walk(function)]
    outer = {name for node in nodes if isinstance(node, ast.Nonlocal) for name in node.names}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    own = {node.arg for node in nodes if isinstance(node, ast.arg)} | (stored(body) - outer)
    return loaded(body) - own


def _bound(function: ast.AST, without: Collection[int]) -> set[str]:
    """The variables that a function itself binds, besides in some of its nodes."""
    names, todo = set[str](), [*ast.iter_child_nodes(function)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and not is_load(node) and id(node) not in without:
            names.add(node.id)
        if not isinstance(node, Function | ast.ClassDef | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            todo += ast.iter_child_nodes(node)
    return names


def _counts(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """Those of the variables of a function that only hold numbers or texts that are written in it, or come of such.

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
    through = Counter(name for node in nodes if isinstance(node, ast.For) for name in _numbers(node.target, node.iter))
    numbers = {name for name in through if through[name] == places[name]}
    while wrong := {name for name in counts if not all(_is_count(value, counts | numbers) for value in values[name])}:
        counts -= wrong
    return counts


def _is_count(value: ast.expr, counts: set[str]) -> bool:
    match value:
        case ast.Constant() | ast.JoinedStr() | ast.Call(ast.Name("len"), [_]):
            return True
        case ast.Attribute(attr=name) | ast.Subscript(ast.Attribute(attr=name)):
            return name in _SHAPE
        case ast.Name(name):
            return name in counts
        case ast.UnaryOp(_, operand):
            return _is_count(operand, counts)
        case ast.BinOp(left, _, right) | ast.IfExp(_, left, right):
            return _is_count(left, counts) and _is_count(right, counts)
        case _:
            return False


def _numbers(target: ast.expr, iterated: ast.expr) -> set[str]:
    """The variables of a loop that go through numbers of Python."""
    match target, iterated:
        case ast.Name(name), ast.Call(ast.Name("range" | "count") | ast.Attribute(attr="count")):
            return {name}
        case ast.Tuple([number, inner]), ast.Call(ast.Name("enumerate"), [of, *_]):
            return stored([number]) | _numbers(inner, of)
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), several):
            return set[str]().union(*map(_numbers, targets, several))
        case _:
            return set()


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
            case ast.Match(subject, cases):
                tests = [ast.Expr(case.guard or subject) for case in cases]
                branches = [
                    _reads([test, *case.body], written | stored([case.pattern]))
                    for test, case in zip(tests, cases, strict=True)
                ]
                reads |= loaded([subject]) - written
                reads = reads.union(*(read for read, _ in branches))
                if isinstance(cases[-1].pattern, ast.MatchAs) and not (cases[-1].pattern.pattern or cases[-1].guard):
                    written = set.intersection(*(written for _, written in branches))
            case ast.Try(body, [], [], finalbody):
                inside = _reads([*body, *finalbody], written)
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
        if isinstance(above, ast.Try) and node in above.body:
            handling = [statement for handler in above.handlers for statement in handler.body]
            statements = [*handling, *statements, *above.orelse, *above.finalbody]
        node, above = above, text.parents.get(id(above))
    return statements
