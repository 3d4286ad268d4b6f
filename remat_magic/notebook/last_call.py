"""The call that the last statement of a cell means, handed to the inspection in place of being made.

``F(a, *b, k=c)`` becomes ``inspect_call(line, "", F, a, *b, k=c)``, so that Python evaluates each operand as before.
But people also write ``print(float(F(a)))``, ``F(a).block_until_ready()`` or ``state, loss = F(a)``. Which of several
calls is meant shows only in the functions once they are evaluated. So what is compiled asks about one after another:
``inspect_call(line, "", kept(), a) if not consumes(F) else ...``, where ``kept()`` is the F that was asked about, and
each operand is still evaluated once, and in order.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from remat_magic.parsing import parse_python

__all__ = ["hooked_expression", "inspecting", "magic_call", "shown"]

_Node = TypeVar("_Node", bound=ast.AST)

_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
# What is not looked into: it runs several times, later, or perhaps not at all.
_OPAQUE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.BoolOp, ast.IfExp)


def magic_call(method: str, where: ast.AST, *operands: Any, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    """A call of a method of the magic, at the place of another node; operands are expressions or constants."""
    text = f"get_ipython().magics_manager.registry['RematMagics'].{method}"
    function = parse_python(text, "eval").body
    for node in ast.walk(function):
        ast.copy_location(node, where)
    arguments = [one if isinstance(one, ast.expr) else ast.Constant(one) for one in operands]
    return ast.copy_location(ast.Call(function, arguments, list(keywords)), where)


def hooked_expression(line: str, expression: ast.expr, defined: ast.expr | None = None) -> ast.expr:
    """The expression with its call handed to the inspection; without one, it is the function to inspect.

    Args:
        line: the magic's line.
        expression: the expression.
        defined: inspects what the cell defines, where the call is one as of ``print`` and means none; None: refuse it.
    """
    calls = _calls(expression)
    if not calls:
        return magic_call("inspect_function", expression, line, expression)
    return _Hooked(line, calls, defined=defined).expression()


def inspecting(body: list[ast.stmt], line: str, defined: ast.expr) -> list[ast.stmt] | None:
    """A cell's statements with the call of the last one handed to the inspection; None where it has no call.

    Args:
        body: the statements.
        line: the magic's line.
        defined: inspects what the cell defines, where the last statement turns out to mean no call.
    """
    match body:
        case [*before, ast.Expr(value) as last] if _is_user_call(value):
            hooked = hooked_expression(line, value, _if_any(defined))
            within = [*before, shown(hooked)]  # of an `if`, of which IPython shows nothing by itself
            result = _before_what_shows(body, line, defined, within)
            return [*before, ast.copy_location(ast.Expr(hooked), last)] if result is within else result
    return _within(body, line, defined)


def _if_any(defined: ast.expr) -> ast.expr | None:
    """What inspects the functions that a cell defines; None where it defines none."""
    match defined:
        case ast.Call(args=[*_, ast.Constant(())]):
            return None
        case _:
            return defined


def _within(body: list[ast.stmt], line: str, defined: ast.expr | None) -> list[ast.stmt] | None:
    """The same where IPython does not show the value of a last expression by itself.

    Args:
        body: the statements.
        line: as for ``inspecting``.
        defined: as there; None in a loop, which goes on where no call is meant, and else is left.
    """
    return _before_what_shows(body, line, defined, _last(body, line, defined))


def _last(body: list[ast.stmt], line: str, defined: ast.expr | None) -> list[ast.stmt] | None:
    match body:
        case [*before, ast.Expr(value) as last] if _is_user_call(value) and defined is not None:
            return [*before, shown(hooked_expression(line, value, _if_any(defined)))]
        case [*before, ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Assert() as last]:
            conditional = _asking(last, line, _otherwise(defined), in_loop=defined is None)
            return None if conditional is None else [*before, conditional]
        case [*before, ast.For() | ast.While() as last]:
            turns = _in_turns(last, line, defined)
            first = _first_turn(last, line, defined, turns) if isinstance(last, ast.For) else None
            return None if (statements := first or turns) is None else [*before, *statements]
        case [*before, ast.With() | ast.AsyncWith() as last]:
            inside = _within(last.body, line, defined)
            return None if inside is None else [*before, _changed(last, body=inside)]
        case [*before, ast.If() as last]:
            branches = [_within(last.body, line, defined), _within(last.orelse, line, defined)]
            if branches == [None, None]:
                return None
            required = ast.keyword("required", ast.Constant(value=False))
            if_any = _otherwise(None if defined is None else _changed(defined, keywords=[required]))
            plain = [[*branch, *if_any] for branch in (last.body, last.orelse)]
            chosen, otherwise = (inside or as_is for inside, as_is in zip(branches, plain, strict=True))
            return [*before, _changed(last, body=chosen, orelse=otherwise)]
        case _:
            return None


def _otherwise(defined: ast.expr | None) -> list[ast.stmt]:
    """What follows where no call is meant."""
    return [] if defined is None else [shown(defined)]


def _leave(defined: ast.expr | None, where: ast.AST) -> list[ast.stmt]:
    """What follows an inspection: in a loop, its end."""
    return [ast.copy_location(ast.Break(), where)] if defined is None else []


def _in_turns(loop: ast.For | ast.While, line: str, defined: ast.expr | None) -> list[ast.stmt] | None:
    """A loop that runs until the call that its turns end with, which is inspected; None where there is none."""
    if loop.orelse or any(isinstance(node, ast.Break) for node in ast.walk(loop)):
        return None
    inside = _within(loop.body, line, None)
    if inside is None:
        return None
    finished = _otherwise(defined) or [ast.copy_location(ast.Continue(), loop)]
    return [_changed(loop, body=inside, orelse=finished), *_leave(defined, loop)]


def _first_turn(
    loop: ast.For, line: str, defined: ast.expr | None, turns: list[ast.stmt] | None
) -> list[ast.stmt] | None:
    """A loop of which the call that its turns begin with is inspected, with the first item; None where there is none.

    What the call is given must be known without running anything: no calls in its brackets; and what follows it in
    the turn must only show its result.

    Args:
        loop: the loop.
        line: as for ``inspecting``.
        defined: as for ``_within``.
        turns: what to run where that call is not meant; by default the loop.
    """
    first, *rest = loop.body
    value = first.value if isinstance(first, (ast.Expr, *_ASSIGNMENTS)) else None
    calls = [] if value is None else [node for node in ast.walk(value) if isinstance(node, ast.Call)]
    functions = _functions_in(rest, {name.partition(".")[0] for name in _targets(first)})
    if value is None or functions is None or len(calls) != 1 or calls != _calls(value):
        return None
    (call,) = calls
    held = tuple(node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name))
    asked = magic_call("is_meant", call, call.func, *call.args, keywords=call.keywords)
    remark = "Of the loop at the end, the first turn is inspected."
    inspected = magic_call("inspect_kept", call, line, remark, tuple(_targets(first)), "The loop did not run.")
    showing = _later(ast.Tuple(functions, ast.Load()), call)
    items = magic_call("first_item", loop.iter, ast.unparse(call), _later(call.func, call), showing, loop.iter, held)
    turn = ast.ListComp(
        _either(asked, inspected, ast.Constant(None)), [ast.comprehension(loop.target, items, [], is_async=0)]
    )
    runs = magic_call("runs_loop", loop, ast.copy_location(turn, loop))
    run, *after = turns or [loop, *_otherwise(defined)]
    run = _changed(run, iter=magic_call("kept_items", loop.iter))
    shows = [shown(magic_call("result", loop)), *_leave(defined, loop)]
    return [ast.copy_location(ast.If(runs, [run, *after], shows), loop)]


# So many statements at the end of a cell are looked behind.
_SHOWING = 4


def _before_what_shows(
    body: list[ast.stmt], line: str, defined: ast.expr | None, plain: list[ast.stmt] | None
) -> list[ast.stmt] | None:
    """The call that statements at the end only use the result of, as ``print(loss)`` does after ``loss = F(a)``.

    Whether they do is asked about their functions, of the last statement, of the last two, and so on.

    Args:
        body: the statements.
        line: as for ``inspecting``.
        defined: as for ``_within``.
        plain: what to run where they do more.
    """
    result = plain
    for count in range(1, min(_SHOWING, len(body) - 1) + 1):
        *before, call = body[:-count]
        showing = body[-count:]
        if not isinstance(showing[0], (ast.Expr, ast.Assert, ast.If, *_ASSIGNMENTS)):
            break
        if not isinstance(call, (ast.Expr, *_ASSIGNMENTS)):
            continue
        functions = _functions_in(showing, {name.partition(".")[0] for name in _targets(call)})
        if result is None:
            *others, last = body
            if isinstance(last, ast.Expr) and defined is not None:
                last = shown(last.value)
            result = [*others, last, *_otherwise(defined)]
        then = result[len(before) + 1 :]
        conditional = None if functions is None else _asking(call, line, then, showing, in_loop=defined is None)
        if functions is not None and conditional is not None:
            asked = [_later(ast.Tuple(functions, ast.Load()), call)]
            # A cell that only prepares something may end in an assignment too: a gradient tells it from a step.
            if isinstance(body[-1], _ASSIGNMENTS) and defined is not None:
                asked += [_later(one.func, call) for one in _calls(call)[:1]]
            question = magic_call("only_show", call, *asked)
            choice = ast.If(question, [conditional], result[len(before) :])
            result, plain = [*before, ast.copy_location(choice, call)], result
    return None if plain is None else result


def _functions_in(statements: Sequence[ast.stmt], assigned: set[str]) -> list[ast.expr] | None:
    """What is called in some statements, but for what is ``assigned`` and its methods.

    None where that cannot be told, or where one of them assigns something that is not made of this.
    """
    functions: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, _ASSIGNMENTS):
            if assigned.isdisjoint(node.id for node in ast.walk(statement) if isinstance(node, ast.Name)):
                return None
            assigned = assigned.union(name.partition(".")[0] for name in _targets(statement))
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.stmt) and not (node in statements or isinstance(node, ast.Expr | ast.If | ast.Pass)):
            return None
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            return None
        if not isinstance(node, ast.Call) or not _is_user_call(node):
            continue
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in {"get_ipython", *assigned}:
            continue
        if not isinstance(root, ast.Name) or any(isinstance(part, ast.Call) for part in ast.walk(node.func)):
            return None
        functions.append(node.func)
    return functions


def shown(value: ast.expr) -> ast.Expr:
    """Show a value as IPython shows that of a last expression."""
    return ast.copy_location(ast.Expr(magic_call("show", value, value)), value)


def _asking(
    statement: ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Assert,
    line: str,
    then: Sequence[ast.stmt],
    showing: Sequence[ast.stmt] = (),
    in_loop: bool = False,
) -> ast.stmt | None:
    """``y = F(x)``: inspected where F is the user's own and can be differentiated, else run as it stands.

    Args:
        statement: the statement.
        line: the magic's line.
        then: what follows it where it runs.
        showing: what follows it as written, of which magics and shell commands run in any case.
        in_loop: whether it stands in a loop, which an inspection ends.
    """
    value = statement.test if isinstance(statement, ast.Assert) else statement.value
    calls = [] if value is None else _calls(value)
    if value is None or not calls:
        return None
    commands = [one for one in showing if isinstance(one, ast.Expr) and _is_command(one.value)]
    skipped = "What follows it did not run either." if len(commands) < len(showing) else ""
    skipped = "The loop ended there." if in_loop else skipped
    value = _Hooked(line, calls, value, tuple(_targets(statement)), skipped).expression()
    result = magic_call("result", value)
    run = _changed(statement, **{"test" if isinstance(statement, ast.Assert) else "value": result})
    if isinstance(statement, ast.Expr) and not showing and not in_loop:
        run = shown(result)
    inspected: list[ast.stmt] = [shown(result), *commands]
    if in_loop:
        inspected.append(ast.Break())
    return ast.copy_location(ast.If(magic_call("runs", value, value), [run, *then], inspected), statement)


class _Hooked:
    """Of several calls the one that is meant, as an expression that asks.

    Args:
        line: the magic's line.
        calls: in the order of their evaluation.
        whole: the expression that they are of, if it is to run where none of them is meant.
        targets: what its value would be assigned to.
        skipped: a sentence on what else does not run.
        defined: what to do, after them, where none of them is meant and there is no ``whole``; None: refuse the first.
    """

    def __init__(
        self,
        line: str,
        calls: Sequence[ast.Call],
        whole: ast.expr | None = None,
        targets: tuple[str, ...] = (),
        skipped: str = "",
        defined: ast.expr | None = None,
    ) -> None:
        self.defined = defined
        self.line, self.calls, self.whole, self.targets, self.skipped = line, calls, whole, targets, skipped
        for number, node in enumerate(node for call in calls for node in ast.walk(call)):
            node.number = number  # pyright: ignore[reportAttributeAccessIssue]  (copies keep it)

    def expression(self) -> ast.expr:
        """Asks about one function after another, and inspects."""
        return self._first(self.calls, self.whole)

    def _first(self, calls: Sequence[ast.Call], whole: ast.expr | None, asked: bool = False) -> ast.expr:
        """The first of some calls that is meant, else the whole; with ``asked``, their first owner is not."""
        if not calls:
            last = self.calls[0]
            return magic_call("inspect_call", last, self.line, "", _kept(last)) if whole is None else whole
        call, *others = calls
        owners = _owners(call)[asked:]
        if not owners:
            return self._if_meant(call, others, whole)
        owner, steps = owners[0]
        question = magic_call("gives_result", owner, _number(owner), owner.func, steps)
        call, whole = _replaced(call, owner.func, _kept(owner)), _keeping(whole, owner)
        owner, _ = _owners(call)[0]
        return _either(question, self._if_meant(owner, others, whole), self._first([call, *others], whole, asked=True))

    def _if_meant(self, call: ast.Call, others: Sequence[ast.Call], whole: ast.expr | None) -> ast.expr:
        """A call, or the first that is meant of those in its brackets and after it."""
        operands = [*call.args, *(keyword.value for keyword in call.keywords)]
        inside = [inner for operand in operands for inner in _calls(operand)]
        if not inside and not (self.defined if whole is None else others):
            return self._inspected(call, others, whole)
        asking = "consumes" if whole is None else "prepares"
        question = magic_call(asking, call, _number(call), call.func)
        kept = _replaced(call, call.func, _kept(call))
        inspected = self._inspected(kept, others, whole)
        if whole is not None:
            within = self._first([*inside, *others], _keeping(whole, call))
            return _either(question, within, inspected)
        if inside:  # a library's function is meant where none is in its brackets: jnp.mean(f(x)) is f(x)
            of_library = magic_call("computes", call, _number(call))
            inspected = _either(of_library, self._first_or(inside, inspected), inspected)
        if self.defined is None:
            return _either(question, self._first([*inside, *others], None), inspected)
        run = ast.Tuple([magic_call("show", call, kept), self.defined], ast.Load())
        run = ast.Subscript(ast.copy_location(run, call), ast.Constant(1), ast.Load())
        return _either(question, self._first_or(inside, ast.copy_location(run, call)), inspected)

    def _first_or(self, calls: Sequence[ast.Call], otherwise: ast.expr) -> ast.expr:
        """What is shown of the first of some calls that is meant, or of another expression that has them in it."""
        return magic_call("inspection", calls[0] if calls else otherwise, self._first(calls, otherwise))

    def _inspected(self, call: ast.Call, others: Sequence[ast.Call], whole: ast.expr | None) -> ast.expr:
        written = _text(_same(self.calls, call))
        remark = f"Of the calls in the last line, the first is inspected: `{written}`." if others else ""
        request = [self.line, remark]
        if whole is None:
            return magic_call("inspect_call", call, *request, call.func, *call.args, keywords=call.keywords)
        question = magic_call("is_meant", call, call.func, *call.args, keywords=call.keywords)
        run = _replaced(whole, _same([whole], call), magic_call("run_kept", call))
        return _either(question, magic_call("inspect_kept", call, *request, self.targets, self.skipped), run)


def _keeping(whole: ast.expr | None, call: ast.Call) -> ast.expr | None:
    """The whole expression with the function of a call in it as it was asked about."""
    return None if whole is None else _replaced(whole, _same([whole], call).func, _kept(call))


def _same(trees: Sequence[ast.AST], call: ast.Call) -> ast.Call:
    """The call in some trees that this one is, or is a changed copy of."""
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next(node for node in nodes if _number(node) == _number(call))


def _number(node: ast.AST) -> int | None:
    return getattr(node, "number", None)


def _either(question: ast.expr, yes: ast.expr, no: ast.expr) -> ast.expr:
    return ast.copy_location(ast.IfExp(question, yes, no), question)


def _kept(call: ast.Call) -> ast.expr:
    """The call's function, which was asked about before."""
    return magic_call("kept", call, _number(call))


def _later(expression: ast.expr, where: ast.AST) -> ast.expr:
    """A function of nothing that evaluates an expression."""
    return ast.copy_location(ast.Lambda(ast.arguments([], [], None, [], [], None, []), expression), where)


def _replaced(tree: _Node, part: ast.AST, other: ast.AST) -> _Node:
    """A copy of a tree with another part."""
    return copy.deepcopy(tree, {id(part): other})


def _changed(node: _Node, **fields: object) -> _Node:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_command(expression: ast.expr) -> bool:
    """Whether it is one of the calls that IPython writes for ``%magic``, ``!command`` and ``f?``."""
    match expression:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"), [], []), _)):
            return True
        case _:
            return False


def _is_user_call(expression: ast.expr) -> bool:
    """Whether it is a call that the user wrote."""
    return isinstance(expression, ast.Call) and not _is_command(expression)


def _calls(node: ast.AST) -> list[ast.Call]:
    """The outermost calls of an expression, in the order of their evaluation."""
    if isinstance(node, ast.expr) and _is_user_call(node):
        return [node]  # pyright: ignore[reportReturnType]
    if isinstance(node, (*_OPAQUE, ast.Call)):
        return []
    return [call for child in ast.iter_child_nodes(node) for call in _calls(child)]


def _owners(call: ast.Call) -> list[tuple[ast.Call, tuple[str, ...]]]:
    """The calls that a call is a method of, innermost first, each with what is done to its result.

    Of ``f(x)[0].mean().item()`` they are ``f(x)`` with ``("[]", "mean", "()", "item", "()")``, and ``f(x)[0].mean()``
    with ``("item", "()")``. In ``grad(f)(x)`` the call of ``grad`` makes the function, and is none.
    """
    owners: list[tuple[ast.Call, tuple[str, ...]]] = []
    steps: tuple[str, ...] = ("()",)
    node = call.func
    while True:
        match node:
            case ast.Attribute(inner, name):
                steps = (name, *steps)
            case ast.Subscript(inner):
                steps = ("[]", *steps)
            case ast.Call(inner) if steps[0] != "()" and _is_user_call(node):
                owners.insert(0, (node, steps))
                steps = ("()", *steps)
            case _:
                return owners
        node = inner


def _targets(statement: ast.stmt) -> Iterator[str]:
    """What a statement would assign to, as written."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(name, ast.Store()):
                yield name
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                yield ast.unparse(node)
            case _:
                pass


def _text(call: ast.Call) -> str:
    text = ast.unparse(call)
    return text if len(text) <= 60 else f"{ast.unparse(call.func)}(...)"
