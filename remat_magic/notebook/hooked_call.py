"""Of the calls of one expression the one that is meant, handed to the inspection in place of being made.

``F(a, *b, k=c)`` becomes ``inspect_call(line, "", F, a, *b, k=c)``, so that Python evaluates each operand as before.
But people also write ``print(float(F(a)))`` or ``F(a).block_until_ready()``. Which of several calls is meant shows only
in the functions once they are evaluated. So what is compiled asks about one after another:
``inspect_call(line, "", kept(), a) if not consumes(F) else ...``, where ``kept()`` is the F that was asked about, and
each operand is still evaluated once, and in order.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from remat_magic.parsing import parse_python

_Node = TypeVar("_Node", bound=ast.AST)

# What is not looked into: it runs several times, later, or perhaps not at all.
_OPAQUE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.BoolOp, ast.IfExp)


def magic_call(method: str, where: ast.AST, *operands: Any, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    """A call of a method of the magic, at the place of another node; operands are expressions or constants."""
    text = f"get_ipython().magics_manager.registry['RematMagics'].{method}"
    function = parse_python(text, "eval").body
    for node in ast.walk(function):
        ast.copy_location(node, where)
    arguments = [operand if isinstance(operand, ast.expr) else ast.Constant(operand) for operand in operands]
    return ast.copy_location(ast.Call(function, arguments, list(keywords)), where)


def asked(question: str, where: ast.AST, *operands: Any, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    """A call of a method of the magic's ``questions``; arguments as for ``magic_call``."""
    return magic_call(f"questions.{question}", where, *operands, keywords=keywords)


def shown(value: ast.expr) -> ast.Expr:
    """Show a value as IPython shows that of a last expression."""
    return ast.copy_location(ast.Expr(magic_call("show", value, value)), value)


def hooked_expression(line: str, expression: ast.expr, defined: ast.expr | None = None) -> ast.expr:
    """The expression with its call handed to the inspection; without one, it is the function to inspect.

    Args:
        line: the magic's line.
        expression: the expression.
        defined: inspects what the cell defines, where the call is one as of ``print`` and means none; None: refuse it.
    """
    calls = calls_in(expression)
    if not calls:
        return magic_call("inspect_function", expression, line, expression)
    return Hooked(line, calls, defined=defined).expression()


class Hooked:
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

    def _first(self, calls: Sequence[ast.Call], whole: ast.expr | None, owner_asked: bool = False) -> ast.expr:
        """The first of some calls that is meant, else the whole; with ``owner_asked``, their first owner is not."""
        if not calls:
            last = self.calls[0]
            return magic_call("inspect_call", last, self.line, "", _kept(last)) if whole is None else whole
        call, *others = calls
        owners = _owners(call)[owner_asked:]
        if not owners:
            return self._if_meant(call, others, whole)
        owner, steps = owners[0]
        question = asked("gives_result", owner, _number(owner), owner.func, steps)
        call, whole = _replaced(call, owner.func, _kept(owner)), _keeping(whole, owner)
        owner, _ = _owners(call)[0]
        return _either(
            question, self._if_meant(owner, others, whole), self._first([call, *others], whole, owner_asked=True)
        )

    def _if_meant(self, call: ast.Call, others: Sequence[ast.Call], whole: ast.expr | None) -> ast.expr:
        """A call, or the first that is meant of those in its brackets and after it."""
        operands = [*call.args, *(keyword.value for keyword in call.keywords)]
        inside = [inner for operand in operands for inner in calls_in(operand)]
        if not inside and not (self.defined if whole is None else others):
            return self._inspected(call, others, whole)
        asking = "consumes" if whole is None else "prepares"
        question = asked(asking, call, _number(call), call.func)
        kept = _replaced(call, call.func, _kept(call))
        inspected = self._inspected(kept, others, whole)
        if whole is not None:
            within = self._first([*inside, *others], _keeping(whole, call))
            return _either(question, within, inspected)
        if inside:  # a library's function is meant where none is in its brackets: jnp.mean(f(x)) is f(x)
            of_library = asked("computes", call, _number(call))
            inspected = _either(of_library, self._first_or(inside, inspected), inspected)
        if self.defined is None:
            return _either(question, self._first([*inside, *others], None), inspected)
        run = ast.Tuple([magic_call("show", call, kept), self.defined], ast.Load())
        run = ast.Subscript(ast.copy_location(run, call), ast.Constant(1), ast.Load())
        return _either(question, self._first_or(inside, ast.copy_location(run, call)), inspected)

    def _first_or(self, calls: Sequence[ast.Call], otherwise: ast.expr) -> ast.expr:
        """What is shown of the first of some calls that is meant, or of another expression that has them in it."""
        return asked("inspection", calls[0] if calls else otherwise, self._first(calls, otherwise))

    def _inspected(self, call: ast.Call, others: Sequence[ast.Call], whole: ast.expr | None) -> ast.expr:
        written = _text(_same(self.calls, call))
        remark = f"Of the calls in the last line, the first is inspected: `{written}`." if others else ""
        request = [self.line, remark]
        if whole is None:
            return magic_call("inspect_call", call, *request, call.func, *call.args, keywords=call.keywords)
        question = asked("is_meant", call, call.func, *call.args, keywords=call.keywords)
        run = _replaced(whole, _same([whole], call), asked("run_kept", call))
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
    """``yes if question else no``."""
    return ast.copy_location(ast.IfExp(question, yes, no), question)


def _kept(call: ast.Call) -> ast.expr:
    """The call's function, which was asked about before."""
    return asked("kept", call, _number(call))


def later(expression: ast.expr, where: ast.AST) -> ast.expr:
    """A function of nothing that evaluates an expression."""
    return ast.copy_location(ast.Lambda(ast.arguments([], [], None, [], [], None, []), expression), where)


def _replaced(tree: _Node, part: ast.AST, other: ast.AST) -> _Node:
    """A copy of a tree with another part."""
    return copy.deepcopy(tree, {id(part): other})


def with_fields(node: _Node, **fields: object) -> _Node:
    """A copy of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def is_command(expression: ast.expr) -> bool:
    """Whether it is one of the calls that IPython writes for ``%magic``, ``!command`` and ``f?``."""
    match expression:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython"), [], []), _)):
            return True
        case _:
            return False


def is_user_call(expression: ast.expr) -> bool:
    """Whether it is a call that the user wrote."""
    return isinstance(expression, ast.Call) and not is_command(expression)


def calls_in(node: ast.AST) -> list[ast.Call]:
    """The outermost calls of an expression, in the order of their evaluation."""
    if isinstance(node, ast.expr) and is_user_call(node):
        return [node]  # pyright: ignore[reportReturnType]
    if isinstance(node, (*_OPAQUE, ast.Call)):
        return []
    return [call for child in ast.iter_child_nodes(node) for call in calls_in(child)]


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
            case ast.Call(inner) if steps[0] != "()" and is_user_call(node):
                owners.insert(0, (node, steps))
                steps = ("()", *steps)
            case _:
                return owners
        node = inner


def _text(call: ast.Call) -> str:
    text = ast.unparse(call)
    return text if len(text) <= 60 else f"{ast.unparse(call.func)}(...)"
