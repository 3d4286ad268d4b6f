"""``%%remat`` and ``%remat``: the extension as IPython sees it.

Loading imports neither JAX nor the widget; the first inspection does.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
    output_can_be_silenced,
)
from IPython.core.magic_arguments import argument, magic_arguments

from remat_magic.notebook.cell import CellTransformer, calls_something, mark, watched_expression
from remat_magic.notebook.line import NAME_KINDS, Options, one_sentence, option_actions, parse
from remat_magic.notebook.rebinding import Rebinding
from remat_magic.notebook.running import Found, Running
from remat_magic.notebook.session import Session
from remat_magic.records import RematError

if TYPE_CHECKING:
    from remat_magic.notebook.callee import Callee


_OWN_LINE = re.compile(r"%%remat\b.*\n?")


@magics_class
class RematMagics(Magics):
    """The magic itself. What ``cell`` and ``calls`` write into a cell calls its methods, or those of what is ``now``.

    ``now`` is what a cell, or an expression on the line, is running in; those around it wait until it has ended.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.ip = shell
        self.session = Session(shell)
        self.parser = vars(RematMagics.remat)["parser"]
        self.parser.allow_abbrev = False
        self.transformer = CellTransformer(self.parser)
        self.matcher = matcher_for(self.parser, self.session)
        self._running = list[Running]()

    @no_var_expand
    @needs_local_scope
    @output_can_be_silenced
    @magic_arguments()
    @argument(
        "-p",
        "--policy",
        help="""Checkpoint policy: a key such as dots_saveable; a call such as save_only_these_names('a', 'attn_*');
        two joined by "|", in quotes; or the name of your own policy. Default: as the function is written.""",
    )
    @argument(
        "--site",
        "--at",
        dest="at",
        metavar="SITE",
        help="""Where the policy goes: "function", "sites" (all of them), or the key of one checkpoint site. Default:
        the function's own decorator, else its sites, else the whole function.""",
    )
    @argument(
        "--wrt",
        help="""What is differentiated: numbers or names of arguments, such as 0,2 or params. Default: what jax.grad or
        jax.vjp in the call says, else every floating-point leaf.""",
    )
    @argument(
        "--gradient",
        metavar="KEY",
        help="""Of a function that takes gradients inside, which of them: its key, or none for the derivative of the
        function itself. Default: of a training step the gradient that saves most.""",
    )
    @argument(
        "--step",
        metavar="NAME",
        help="""The function that is the training step, where the cell takes gradients before it. Default: what takes
        the first gradient.""",
    )
    @argument(
        "--device",
        metavar="DEVICE",
        help="""An accelerator that need not be here, or several: "TPU v5e", "H100 SXM", "TPU v5e:2x4", "H100 SXM x8".
        What times are estimated for, and what the shown choice is compiled for, to see whether it fits. Default: the
        one chosen last.""",
    )
    @argument(
        "--mesh",
        metavar="AXES",
        help="""A mesh to trace on, such as "data=4,model=2", that may be larger than this machine. Arguments without a
        sharding of their own are spread as in_shardings of the jitted step says. Default: the mesh of the arguments,
        or what jax.set_mesh has set.""",
    )
    @argument(
        "--names",
        action="append",
        metavar="NAMES",
        help="""Choose by checkpoint name instead of --policy: "save=a,attn_* offload=b" recomputes all others; "a,b" is
        "save=a,b". Globs and re:... are allowed.""",
    )
    @argument(
        "--args",
        help="""For a function without a call, its arguments in quotes, as between a call's brackets: "W1, W2, n=3".
        Default: your variables with the names of its parameters.""",
    )
    @argument(
        "-o",
        dest="output",
        metavar="VAR",
        help="""Keep the widget in this variable: VAR.report is what is shown, VAR.function the function with the
        chosen policy.""",
    )
    @argument(
        "--text",
        nargs="?",
        const="short",
        default="",
        choices=["short", "full"],
        metavar="full",
        help="""Print text instead of showing a widget: with a device whether it fits and what to change, else what is
        saved. --text=full prints every value and both jaxprs besides.""",
    )
    @argument(
        "--apply",
        action="store_true",
        help="When the cell has ended, bind the function's name to the function with the chosen policy.",
    )
    @argument("call", nargs="*", help="The call to inspect, to the end of the line. It is not executed.")
    @line_cell_magic
    def remat(self, line: str, cell: str | None = None, local_ns: MutableMapping[str, Any] | None = None) -> Any:
        """Show what JAX saves for the backward pass of a function, and what it recomputes.

        %%remat [options] [call]     as the first line of a cell
        %remat [options] call        for a function defined elsewhere
        %remat [options]             for the cell that ran out of memory, else the one before

        The cell runs until its training step is called, wherever that is: in a loop, in main(). The step does not
        run; it is traced with abstract values. If no gradient is taken before the last call, such as loss(params, x),
        that call is inspected, and not made. A cell that only defines functions: the one that it decorates with
        jax.checkpoint, or the one that no other calls, with your variables of its parameters' names as arguments.
        Options come first; the rest of the line is Python, read as it stands.
        """
        __tracebackhide__ = True
        if cell is not None:
            return self.show(self._run_cell(f"%%remat {line}\n{cell}"))  # of an exported notebook
        expression = self._read(line).tree
        if expression is None:
            return self._run_again(line)
        if not calls_something(expression):
            return self.inspect_function(line, self._evaluated(expression, local_ns))
        with self.running(line):
            self._evaluated(watched_expression(expression), local_ns)
        return self.answer(line)

    def check(self, line: str, later: bool = False) -> None:
        """Say what is wrong with a line, before anything runs; or of its policy later, as the cell may define it."""
        __tracebackhide__ = True
        self._running.clear()  # of a cell before that failed
        self._read(line, later)

    def _read(self, line: str, later: bool = False) -> Options:
        __tracebackhide__ = True
        options = parse(self.parser, line)
        if options.policy is None and options.device is None:
            return options
        from remat_magic import policies
        from remat_magic.notebook.callee import named_device

        with one_sentence():
            named_device(options.device)
            if options.policy is None:
                return options
            key = policies.Key.parse(options.policy, namespace=self.session.namespace)
            if not later:
                # Which checkpoint names the function has is not known yet: those of the policy will do.
                policies.resolve(key, key.names, self.session.namespace)
        return options

    def running(self, line: str, imports: bool = False, loops: bool = False) -> Running:
        """What a cell runs in, as a checked line asks; whether it ``imports`` something, and ends in what ``loops``."""
        options = parse(self.parser, line)
        self._running.append(Running(self.session, options, partial(self._found, options=options), imports, loops))
        return self.now

    @property
    def now(self) -> Running:
        """What is running now."""
        return self._running[-1]

    def answer(self, line: str, functions: Sequence[tuple[str, bool, tuple[str, ...]]] = ()) -> Any:
        """Show what the cell came to, or the function of some that it defines: the widget, or None with ``--text``."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import defined

        options = parse(self.parser, line)
        with one_sentence():
            found = self._running.pop().answer(functions)
            if found is not None:
                return self._shown(found, options)
            return self.inspect_function(line, *defined(self.session.namespace, functions))

    def inspect_function(self, line: str, fun: Any, remark: str = "", /) -> Any:
        """Inspect a function with the arguments that ``--args`` or the namespace gives."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import with_arguments

        session, options = self.session, parse(self.parser, line)
        with one_sentence():
            if not callable(fun):
                raise RematError(f"`{options.expression}` is a {type(fun).__name__}: name a function or a call.")
            callee = with_arguments(fun, options.args, session.namespace, session.variables)
            return self._shown(self._found(callee.saying(remark), options), options)

    def _found(self, callee: Callee, options: Options) -> Found:
        """A callee traced."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import traced, with_shapes_for_donated

        callee, rebinding = self._rebinding(with_shapes_for_donated(callee), options)
        with _interruptible(), self.session.patience(f"Tracing {callee.name}…"):
            return Found(callee, traced(callee, options.wrt, options.gradient, options.mesh), rebinding)

    def _shown(self, found: Found, options: Options) -> Any:
        """From the trace to the widget."""
        __tracebackhide__ = True
        from remat_magic.notebook.callee import inspected

        callee, trace, rebinding = found
        if isinstance(rebinding, RematError):
            if options.apply:
                raise rebinding
            rebinding = None
        session = self.session
        session.remember(trace)
        with _interruptible():
            return session.show(inspected(callee, trace, options, session.namespace), options, rebinding)

    def _rebinding(self, callee: Callee, options: Options) -> tuple[Callee, Rebinding | RematError]:
        """What to trace, and where Apply binds its function, or why it cannot: nothing has a plain name.

        Where only the gradient of a function has a name, as a decorator leaves it, that gradient is traced as it is.
        """
        from remat_magic.libraries import layers

        namespace = self.session.namespace
        try:
            return callee, Rebinding(namespace, layers(callee.fun), layers(callee.loss))
        except RematError as error:
            gradient = None if options.wrt else callee.gradient
            if gradient is not None:
                with contextlib.suppress(RematError):
                    return gradient.saying(" ".join(callee.notes)), Rebinding(namespace, [gradient.fun])
            return callee, error

    def show(self, value: object, last: bool = True) -> None:
        """Display a value as IPython displays that of an expression, the last one of a cell or another."""
        if self.ip.ast_node_interactivity == "all" or (last and self.ip.ast_node_interactivity != "none"):
            sys.displayhook(value)

    def _evaluated(self, expression: ast.expr, local_ns: MutableMapping[str, Any] | None = None) -> Any:
        __tracebackhide__ = True
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<%remat>", "eval")
        try:
            return eval(code, self.ip.user_global_ns, local_ns)  # noqa: S307  (the user's own Python)
        except NameError as error:
            inner = error.__traceback__ and error.__traceback__.tb_next
            if error.name is None or inner is None or inner.tb_next is not None:
                raise  # from within what the operands call
            raise UsageError(f"`{error.name}` is not defined: assign it first, or correct the call.") from None

    def _run_cell(self, text: str) -> Any:
        """Run a whole cell, as ``get_ipython().run_cell_magic`` of an exported notebook asks for; its value."""
        __tracebackhide__ = True
        ip = self.ip
        source = ip.transform_cell(text)
        return self._run(ip.compile.ast_parse(source), ip.compile.cache(source, ip.execution_count, raw_code=text))

    def _run(self, module: Any, name: str) -> Any:
        __tracebackhide__ = True
        ip: Any = self.ip
        value = None
        for statement in ip.transform_ast(module).body:
            if isinstance(statement, ast.Expr):
                code = ip.compile(ast.Expression(statement.value), name, "eval")
            else:
                code = ip.compile(ast.Module([statement], []), name, "exec")
            value = eval(code, ip.user_global_ns, ip.user_ns)  # noqa: S307  (the user's own cell)
        return value

    def _run_again(self, line: str) -> Any:
        """Run the cell that ran out of memory, else the one before, until its step; and say what XLA said."""
        __tracebackhide__ = True
        ip, ran = self.ip, self.session.exhausted or self.session.before
        if ran is None:
            raise UsageError(
                "nothing to inspect: write a call after %remat, such as %remat loss(params, x), or run a cell before."
            )
        first, own = f"%%remat {line}\n", _OWN_LINE.match(ran.text)
        module: Any = ip.compile.ast_parse(ip.transform_cell(first + (ran.text[own.end() :] if own else ran.text)))
        for node in ast.walk(module) if own is None else ():  # the lines are those of the cell, which has no such line
            if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
                node.lineno, node.end_lineno = max(1, node.lineno - 1), max(1, (node.end_lineno or 1) - 1)
        flags = compile(module, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True).co_flags
        if flags & inspect.CO_COROUTINE:
            raise UsageError("the cell awaits something: put %%remat on it and run it again.")
        name = ip.compile.cache(ip.transform_cell(ran.text), ran.number, raw_code=ran.text)
        if ran.message:
            self.session.show_message(ran.message, as_text=bool(parse(self.parser, line).text))
        return self._run(module, name)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Tell of Ctrl-C in one sentence: the code that it interrupts is this package's, or the function's as a trace."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # IPython keeps the last error and with it these frames, which hold a model, and JAX's settings in force
        # where the interrupt came between two steps of a `with`.
        traceback.clear_frames(interrupt.__traceback__)
        raise UsageError("tracing was interrupted, and nothing was inspected: run the cell again.") from None


def load(ip: InteractiveShell) -> None:
    """Register the magic, its transformers, completion and event; loading twice leaves one of each."""
    unload(ip)
    magics = RematMagics(ip)
    ip.register_magics(magics)
    ip.input_transformers_cleanup.append(mark)
    ip.ast_transformers.append(magics.transformer)
    ip.Completer.custom_matchers.append(magics.matcher)
    for event, hook in magics.session.events:
        ip.events.register(event, hook)


def unload(ip: InteractiveShell) -> None:
    """Take out all that ``load`` put in; nothing happens where it is not loaded."""
    manager: Any = ip.magics_manager
    magics = manager.registry.pop(RematMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        manager.magics[kind].pop("remat", None)
    lists: tuple[Any, ...] = (ip.input_transformers_cleanup, ip.ast_transformers, ip.Completer.custom_matchers)
    for registry, hook in zip(lists, (mark, magics.transformer, magics.matcher), strict=True):
        with contextlib.suppress(ValueError):  # IPython itself drops an AST transformer that raises
            registry.remove(hook)
    for event, hook in magics.session.events:
        ip.events.unregister(event, hook)
    idle = sys.modules.get("remat_magic.widget.idle")  # no widget was ever shown where it is not imported
    if idle is not None:
        idle.forget(ip)


# ------------------------------------------------------------------------------------------------------- tab completion


_LINE = re.compile(r"\s*%{1,2}remat\s(?P<written>.*)")
_AFTER_OPTION = re.compile(
    r"""(?:|.*\s)(?P<option>--?[A-Za-z][\w-]*)[ =]+(?P<value>"[^"]*|'[^']*|[^\s"'(]*(?:\(.*)?)"""
)
_CHECKPOINT_NAME = re.compile(r"""checkpoint_name\(.*?["']([\w./-]+)["']\s*\)""")


def matcher_for(
    parser: argparse.ArgumentParser, session: Session
) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """A matcher for ``ip.Completer.custom_matchers``."""

    @context_matcher(identifier="remat_magic")
    def remat_matcher(context: CompletionContext) -> SimpleMatcherResult:
        line = _LINE.fullmatch(context.text_until_cursor)
        if line is None:
            return {"completions": [], "suppress": False}
        candidates = set(_candidates(parser, session, line["written"], context))
        matching = sorted(candidate for candidate in candidates if candidate.startswith(context.token))
        return {"completions": [SimpleCompletion(text) for text in matching], "suppress": bool(matching)}

    return remat_matcher


def _open_option(parser: argparse.ArgumentParser, before: str) -> re.Match[str] | None:
    """The option whose value the cursor stands in."""
    after = _AFTER_OPTION.fullmatch(before)
    action = option_actions(parser).get(after["option"]) if after else None
    if after is None or action is None or action.nargs == 0:
        return None
    return after if action.nargs != "?" or before[after.end("option")] == "=" else None


def _candidates(
    parser: argparse.ArgumentParser, session: Session, written: str, context: CompletionContext
) -> Iterable[str]:
    """What may stand at the cursor where the line is not yet Python."""
    options = option_actions(parser)
    after = _open_option(parser, written.removesuffix(context.token))
    if after is None:
        return options if context.token.startswith("-") else ()
    value = after["value"].lstrip("\"'")
    names = {*session.offered["names"], *_CHECKPOINT_NAME.findall(context.full_text)}
    match options[after["option"]].dest:
        case "policy" if "(" not in value:
            from remat_magic import policies

            keys = (key for choice in policies.choices() for key in (choice.key, *choice.aliases))
            return (*keys, *session.offered["policy"])
        case "policy":
            return names
        case "names":
            return names if re.search(r"[=,]$", value) else {*names, *(f"{kind}=" for kind in NAME_KINDS)}
        case "at" | "gradient" | "text" as option:
            own = {"at": ("function", "sites"), "gradient": ("none",), "text": ("full",)}
            return (*own[option], *session.offered.get(option, ()))
        case _:
            return ()
