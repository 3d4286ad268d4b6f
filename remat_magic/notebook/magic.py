"""``%%remat`` and ``%remat``: the extension as IPython sees it.

Loading imports neither JAX nor the widget; the first inspection does.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

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

from remat_magic.notebook.cell import CellTransformer, mark
from remat_magic.notebook.completion import matcher_for
from remat_magic.notebook.hooked_call import hooked_expression
from remat_magic.notebook.line import Options, parse
from remat_magic.notebook.questions import Inspected, Questions
from remat_magic.notebook.rebinding import Rebinding
from remat_magic.notebook.session import Session
from remat_magic.records import RematError
from remat_magic.wording import printable

if TYPE_CHECKING:
    from remat_magic.notebook.callee import Callee


@magics_class
class RematMagics(Magics):
    """The magic itself. What ``cell`` and ``last_call`` write into a cell calls its methods, or asks ``questions``."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.ip = shell
        self.session = Session(shell)
        self.parser = vars(RematMagics.remat)["parser"]
        self.parser.allow_abbrev = False
        self.transformer = CellTransformer(self.parser)
        self.matcher = matcher_for(self.parser, self.session)
        self.questions = Questions(self.session)

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

        The cell runs as it is, but its last line, if it is a call such as loss(params, x) or
        jax.grad(loss)(params, x), is inspected and not executed: its function and arguments are evaluated, and the
        function is traced with abstract values. Where the cell ends otherwise, the one function that it defines (or
        the one that it decorates with jax.checkpoint) is inspected, with your variables of its parameters' names as
        arguments. Options come first; the rest of the line is Python, read as it stands.
        """
        __tracebackhide__ = True
        if cell is not None:
            return self._run_cell(f"%%remat {line}\n{cell}")  # of an exported notebook
        expression = self._read(line).tree
        if expression is None:
            raise UsageError("nothing to inspect: write a call after %remat, such as %remat loss(params, x).")
        return self._evaluate(hooked_expression(line, expression), local_ns)

    def check(self, line: str, bound: Iterable[str] = ()) -> None:
        """Say what is wrong with a line, before anything runs.

        Args:
            line: what follows ``%%remat``.
            bound: names that the cell is going to bind ("*": any); a policy that uses them is not judged yet.

        Raises:
            UsageError: of one sentence.
        """
        __tracebackhide__ = True
        self.questions.forget()
        self._read(line, bound)

    def _read(self, line: str, bound: Iterable[str] = ()) -> Options:
        __tracebackhide__ = True
        options = parse(self.parser, line)
        if options.policy is None and options.device is None:
            return options
        from remat_magic import policies
        from remat_magic.notebook.inspection import named_device

        with _one_sentence():
            named_device(options.device)
            if options.policy is None:
                return options
            key = policies.Key.parse(options.policy, namespace=self.session.namespace)
            if not {"*", *key.identifiers} & set(bound):
                # Which checkpoint names the function has is not known yet: those that are asked for will do.
                policies.resolve(key, key.names, self.session.namespace)
        return options

    def inspect_call(self, line: str, remark: str, fun: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Inspect what the call ``fun(*args, **kwargs)`` differentiates or computes, as a checked line asks.

        This and the two methods below are what a cell calls in place of its last call. Each returns the widget (None
        with ``--text``, where all is printed), and raises UsageError of one sentence for what the user can mend.
        """
        __tracebackhide__ = True
        from remat_magic.notebook.callee import called
        from remat_magic.notebook.functions import makes_a_function

        if makes_a_function(fun):
            return self.inspect_function(line, fun(*args, **kwargs))
        with _one_sentence():
            return self._inspect(called(fun, args, kwargs).saying(remark), parse(self.parser, line))

    def inspect_function(self, line: str, fun: Any, remark: str = "", /) -> Any:
        """Inspect a function with the arguments that ``--args`` or the namespace gives."""
        __tracebackhide__ = True
        from remat_magic.notebook.defined import with_arguments

        session, options = self.session, parse(self.parser, line)
        with _one_sentence():
            if not callable(fun):
                raise RematError(f"`{options.expression}` is a {type(fun).__name__}: name a function or a call.")
            callee = with_arguments(fun, options.args, session.namespace, session.variables)
            return self._inspect(callee.saying(remark), options)

    def inspect_defined(
        self, line: str, functions: Sequence[tuple[str, bool, tuple[str, ...]]], required: bool = True
    ) -> Any:
        """Inspect the function that the cell defines; where it is not ``required``, it may define none."""
        __tracebackhide__ = True
        from remat_magic.notebook.defined import defined

        with _one_sentence():
            try:
                function = defined(self.session.namespace, functions)
            except RematError:
                if required:
                    raise
                print("Nothing is inspected: the `if` around the call did not apply.")  # noqa: T201
                return None
            return self.inspect_function(line, *function)

    def inspect_kept(self, line: str, remark: str, targets: tuple[str, ...], skipped: str) -> Any:
        """Inspect the call that was asked about last; ``targets`` are not assigned to."""
        __tracebackhide__ = True
        fun, args, kwargs = self.questions.take_call()
        unassigned = _unassigned(targets, self.session.namespace) or ("The call did not run." if skipped else "")
        remark = " ".join(filter(None, [remark, unassigned, skipped]))
        return Inspected(self.inspect_call(line, remark, fun, *args, **kwargs))

    def _inspect(self, callee: Callee, options: Options) -> Any:
        """From the callee to the widget."""
        __tracebackhide__ = True
        from remat_magic.notebook.inspection import inspected, traced

        session = self.session
        try:
            callee, rebinding = self._rebinding(callee, options)
            with session.patience(f"Tracing {callee.name}…"):
                trace = traced(callee, options.wrt, options.gradient, options.mesh)
            session.remember(trace)
            return session.show(inspected(callee, trace, options, session.namespace), options, rebinding)
        except KeyboardInterrupt as interrupt:
            # IPython keeps the last error and with it these frames, which hold a model, and JAX's settings in force
            # where the interrupt came between two steps of a `with`.
            traceback.clear_frames(interrupt.__traceback__)
            raise UsageError("tracing was interrupted, and nothing was inspected: run the cell again.") from None

    def _rebinding(self, callee: Callee, options: Options) -> tuple[Callee, Rebinding | None]:
        """What to trace, and where Apply binds its function; None where nothing has a plain name and none is asked for.

        Where only the gradient of a function has a name, as a decorator leaves it, that gradient is traced as it is.
        """
        from remat_magic.libraries import layers

        namespace = self.session.namespace
        try:
            return callee, Rebinding(namespace, layers(callee.fun), layers(callee.loss))
        except RematError:
            gradient = None if options.wrt else callee.gradient
            if gradient is not None:
                with contextlib.suppress(RematError):
                    return gradient.saying(" ".join(callee.notes)), Rebinding(namespace, [gradient.fun])
            if options.apply:
                raise
            return callee, None

    def show(self, value: object) -> None:
        """Display a value as the last expression of a cell."""
        if self.ip.ast_node_interactivity != "none":
            sys.displayhook(value)

    def _evaluate(self, expression: ast.expr, local_ns: MutableMapping[str, Any] | None) -> Any:
        __tracebackhide__ = True
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<%remat>", "eval")
        try:
            return eval(code, self.ip.user_global_ns, local_ns)  # noqa: S307  (the user's own Python)
        except NameError as error:
            inner = error.__traceback__ and error.__traceback__.tb_next
            if error.name is None or inner is None or inner.tb_next is not None:
                raise  # from within what the operands call
            raise UsageError(f"`{error.name}` is not defined: assign it first, or correct the call.") from None

    def _run_cell(self, text: str) -> None:
        """Run a whole cell and show its value, as ``get_ipython().run_cell_magic`` of an exported notebook asks for."""
        __tracebackhide__ = True
        ip = self.ip
        source = ip.transform_cell(text)
        name = ip.compile.cache(source, ip.execution_count, raw_code=text)
        module: ast.Module = ip.transform_ast(ip.compile.ast_parse(source, filename=name))
        value = None
        for statement in module.body:
            code = _code(statement, name, ip.compile)
            value = eval(code, ip.user_global_ns, ip.user_ns)  # noqa: S307  (the user's own cell)
        self.show(value)


def _code(statement: ast.stmt, name: str, compiled: Callable[..., CodeType]) -> CodeType:
    """A statement as IPython compiles it, whose compiler is typed as if it took text alone."""
    if isinstance(statement, ast.Expr):
        return compiled(ast.Expression(statement.value), name, "eval")
    return compiled(ast.Module([statement], []), name, "exec")


def _unassigned(targets: tuple[str, ...], namespace: Mapping[str, Any]) -> str:
    """What became of the names that a call would have been assigned to."""
    old_names = [f"`{name}`" for name in targets if name in namespace or not name.isidentifier()]
    new_names = [f"`{name}`" for name in targets if f"`{name}`" not in old_names]
    outcomes = list[str]()
    if old_names:
        kept = "keep their old values" if len(old_names) > 1 else "keeps its old value"
        outcomes.append(f"{' and '.join(old_names)} {kept}")
    if new_names:
        outcomes.append(f"{' and '.join(new_names)} {'are' if len(new_names) > 1 else 'is'} not assigned")
    return f"The call did not run: {', '.join(outcomes)}." if targets else ""


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Let IPython say what the user can mend in one sentence, without a traceback."""
    try:
        yield
    except RematError as error:
        raise UsageError(printable(_in_options(str(error)))) from None


# Parameters of rm.trace in a sentence: with a value, as a word of their own, or in code's quotes.
_PARAMETER = re.compile(r"(?<![-\w])(wrt|at|gradient)=('[^']*'|[\w-]+)|(?<![-\w`])(wrt)(?!\w)|`(wrt|at|gradient)`")
_AUX = "set has_aux=True and return it as auxiliary data"


def _in_options(sentence: str) -> str:
    """What ``rm.trace`` says of its parameters, in the words of the line."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1] or match[3] or match[4], match[2] or ""
        return f"--{name} {value if ' ' in value else value.strip(chr(39))}".rstrip()

    auxiliary = "return it as auxiliary data and write the call as jax.grad(f, has_aux=True)(...)"
    return _PARAMETER.sub(option, sentence.replace(_AUX, auxiliary))


def load(ip: InteractiveShell) -> None:
    """Register the magic, its transformers, completion and event; loading twice leaves one of each."""
    unload(ip)
    magics = RematMagics(ip)
    ip.register_magics(magics)
    ip.input_transformers_cleanup.append(mark)
    ip.ast_transformers.append(magics.transformer)
    ip.Completer.custom_matchers.append(magics.matcher)
    ip.events.register("pre_run_cell", magics.session.pre_run_cell)


def unload(ip: InteractiveShell) -> None:
    """Take out all that ``load`` put in; nothing happens where it is not loaded."""
    manager: Any = ip.magics_manager
    magics = manager.registry.pop(RematMagics.__name__, None)
    if magics is None:
        return
    for kind in ("line", "cell"):
        manager.magics[kind].pop("remat", None)
    registered: list[tuple[list[Any], Any]] = [
        (ip.input_transformers_cleanup, mark),
        (ip.ast_transformers, magics.transformer),
        (ip.Completer.custom_matchers, magics.matcher),
    ]
    for registry, hook in registered:
        with contextlib.suppress(ValueError):  # IPython itself drops an AST transformer that raises
            registry.remove(hook)
    ip.events.unregister("pre_run_cell", magics.session.pre_run_cell)
    idle = sys.modules.get("remat_magic.widget.idle")  # no widget was ever shown where it is not imported
    if idle is not None:
        idle.forget(ip)
