"""The last statement of a cell, with the call that it means handed to the inspection.

``state, loss = F(a)`` is inspected where F is the user's own and can be differentiated, and runs as it stands where
not; so do statements before others that only show its result, and those at the end of blocks. Which call of an
expression is meant, ``hooked_call`` asks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from remat_magic.notebook.hooked_call import (
    Hooked,
    asked,
    calls_in,
    hooked_expression,
    is_command,
    is_user_call,
    later,
    shown,
    with_fields,
)

_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def inspecting(body: list[ast.stmt], line: str, defined: ast.expr) -> list[ast.stmt] | None:
    """A cell's statements with the call of the last one handed to the inspection; None where it has no call.

    Args:
        body: the statements.
        line: the magic's line.
        defined: inspects what the cell defines, where the last statement turns out to mean no call.
    """
    match body:
        case [*before, ast.Expr(value) as last] if is_user_call(value):
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
        case [*before, ast.Expr(value) as last] if is_user_call(value) and defined is not None:
            return [*before, shown(hooked_expression(line, value, _if_any(defined)))]
        case [*before, ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Assert() as last]:
            conditional = _asking(last, line, _otherwise(defined), in_loop=defined is None)
            return None if conditional is None else [*before, conditional]
        case [*before, ast.For() | ast.While() as last]:
            turns = _in_turns(last, line, defined)
            return None if turns is None else [*before, *turns]
        case [*before, ast.With() | ast.AsyncWith() as last]:
            inside = _within(last.body, line, defined)
            return None if inside is None else [*before, with_fields(last, body=inside)]
        case [*before, ast.If() as last]:
            branches = [_within(last.body, line, defined), _within(last.orelse, line, defined)]
            if branches == [None, None]:
                return None
            required = ast.keyword("required", ast.Constant(value=False))
            if_any = _otherwise(None if defined is None else with_fields(defined, keywords=[required]))
            plain = [[*branch, *if_any] for branch in (last.body, last.orelse)]
            chosen, otherwise = (inside or as_is for inside, as_is in zip(branches, plain, strict=True))
            return [*before, with_fields(last, body=chosen, orelse=otherwise)]
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
    return [with_fields(loop, body=inside, orelse=finished), *_leave(defined, loop)]


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
        statements_after = result[len(before) + 1 :]
        conditional = (
            None if functions is None else _asking(call, line, statements_after, showing, in_loop=defined is None)
        )
        if functions is not None and conditional is not None:
            operands = [later(ast.Tuple(functions, ast.Load()), call)]
            # A cell that only prepares something may end in an assignment too: a gradient tells it from a step.
            if isinstance(body[-1], _ASSIGNMENTS) and defined is not None:
                operands += [later(outermost.func, call) for outermost in calls_in(call)[:1]]
            question = asked("only_show", call, *operands)
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
        if not isinstance(node, ast.Call) or not is_user_call(node):
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


def _asking(
    statement: ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Assert,
    line: str,
    statements_after: Sequence[ast.stmt],
    showing: Sequence[ast.stmt] = (),
    in_loop: bool = False,
) -> ast.stmt | None:
    """``y = F(x)``: inspected where F is the user's own and can be differentiated, else run as it stands.

    Args:
        statement: the statement.
        line: the magic's line.
        statements_after: what follows it where it runs.
        showing: what follows it as written, of which magics and shell commands run in any case.
        in_loop: whether it stands in a loop, which an inspection ends.
    """
    value = statement.test if isinstance(statement, ast.Assert) else statement.value
    calls = [] if value is None else calls_in(value)
    if value is None or not calls:
        return None
    commands = [command for command in showing if isinstance(command, ast.Expr) and is_command(command.value)]
    skipped = "What follows it did not run either." if len(commands) < len(showing) else ""
    skipped = "The loop ended there." if in_loop else skipped
    value = Hooked(line, calls, value, tuple(_targets(statement)), skipped).expression()
    result = asked("result", value)
    run = with_fields(statement, **{"test" if isinstance(statement, ast.Assert) else "value": result})
    if isinstance(statement, ast.Expr) and not showing and not in_loop:
        run = shown(result)
    inspected: list[ast.stmt] = [shown(result), *commands]
    if in_loop:
        inspected.append(ast.Break())
    return ast.copy_location(ast.If(asked("runs", value, value), [run, *statements_after], inspected), statement)


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
