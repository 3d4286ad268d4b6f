"""Which function is inspected, and with which arguments: from an evaluated call to its trace.

Objects are recognised, not their spelling: a gradient may be stored, jitted or made elsewhere.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import print_saved_residuals
from jax.core import Tracer

from remat_magic import _jax, api, devices, libraries, policies, units
from remat_magic._jax.transforms import (
    asks_shardings,
    gradient_in,
    is_backward_pass,
    is_checkpointed,
    is_forward_derivative,
    is_jitted,
)
from remat_magic.errors import one_line, printable, text_of
from remat_magic.libraries import layers
from remat_magic.meshes import mesh
from remat_magic.notebook.line import Options, one_sentence
from remat_magic.notebook.rebinding import original_of
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file


@dataclass(frozen=True, slots=True)
class Callee:
    """A function and the arguments of its call, as ``rm.trace`` takes them.

    ``wrt`` are positions in ``args`` (None: every inexact leaf). ``bound`` of the ``args`` come first without standing
    in the call: what a partial or a method holds. ``notes`` are sentences for the reader. Where ``fun`` is a gradient
    that is traced as it is, ``loss`` is what it is of; where it was taken off, ``gradient`` is the call as it stood.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrt: int | tuple[int, ...] | None = None
    has_aux: bool = False
    bound: int = 0
    notes: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    gradient: Callee | None = None

    @property
    def name(self) -> str:
        """The function's own name, or its type's."""
        return name_of(self.fun)

    def saying(self, remark: str) -> Callee:
        """With one more note in front; none if it is empty."""
        return replace(self, notes=(remark, *self.notes)) if remark else self


def called(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee:
    """The function that the call ``fun(*args, **kwargs)`` differentiates, or that it calls: one gradient is taken off.

    RematError where the call is none that has a backward pass.
    """
    if not callable(fun):
        raise RematError(
            f"what is called is not a function but of type {type(fun).__name__}: call the function to inspect."
        )
    if consumes(fun):
        raise RematError(
            f"`{name_of(fun)}` is not a function that JAX differentiates: end the cell with the call to inspect, "
            "such as loss(params, x)."
        )
    if is_backward_pass(fun):
        raise RematError("this is the backward pass of a call of jax.vjp before it: inspect that, jax.vjp(f, x).")
    if inspect.iscoroutinefunction(fun):
        raise RematError(f"`{name_of(fun)}` is a coroutine, which JAX cannot trace: call the function that it awaits.")
    fun = original_of(fun if (lowered := lowered_by(fun)) is None else lowered)
    if isinstance(fun, functools.partial) and takes_the_function(fun.func):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    differentiated = _in_function_taker(fun, args, kwargs) or _in_gradient(fun, args, kwargs)
    callee = _spread(differentiated or Callee(fun, args, kwargs))
    if libraries.is_gradient(fun) and callee.loss is None:
        callee = replace(callee, gradient=Callee(fun, args, kwargs, loss=callee.fun))
    wrt = callee.wrt  # which counted from the arguments of the call
    if isinstance(wrt, tuple):
        wrt = tuple(position + callee.bound for position in wrt)
    return replace(callee, wrt=wrt + callee.bound if isinstance(wrt, int) else wrt)


def may_be_inspected(callee: Callee, last: bool) -> bool:
    """Whether a call is given something to differentiate; else it only prepares something, or trains all by itself.

    Where the cell ends with the call alone (``last``), arrays of integers suffice: a model may be an object.
    """
    leaves = _leaves(callee.args, callee.kwargs)
    if any(isinstance(leaf, Iterator) for leaf in leaves):  # of batches, which a trace would take from it
        return False
    kinds = [getattr(leaf, "dtype", bool) for leaf in leaves]
    inexact = any(jnp.issubdtype(kind, jnp.inexact) or (last and kind is not bool) for kind in kinds)
    return inexact or any(isinstance(leaf, float | complex) for leaf in leaves)


def with_shapes_for_donated(callee: Callee) -> Callee:
    """With types in the place of arrays that were donated, and have no values any more."""

    def is_donated(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()

    def stand_in(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_donated(leaf) else leaf

    given = (callee.args, dict(callee.kwargs))
    if not any(map(is_donated, jax.tree.leaves(given))):
        return callee
    args, kwargs = jax.tree.map(stand_in, given)
    return replace(callee, args=args, kwargs=kwargs)


def has_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether some arguments have no values to run on."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in _leaves(args, kwargs))


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """All leaves, iterators among them, which JAX warns of."""
    return jax.tree.leaves((args, dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, Iterator))


def cannot_be_traced(error: Exception) -> bool:
    """Whether a function that raised this while it was traced may train: it does, or looks at values."""
    errors = jax.errors
    of_jax = (errors.ConcretizationTypeError, errors.TracerArrayConversionError, errors.UnexpectedTracerError)
    return isinstance(error, (RematError, *of_jax, errors.NonConcreteBooleanIndexError))


def _in_function_taker(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.vjp(f, *primals)`` and its like."""
    if fun is jax.jvp:
        raise RematError("jax.jvp is forward mode, which saves nothing for a backward pass: inspect f(...) itself.")
    if not takes_the_function(fun):
        return None
    if not args or not callable(args[0]):
        raise RematError(f"{fun.__name__} takes the function first: {fun.__name__}(f, x).")
    if fun is libraries.vjp_of_nnx():  # its modules are no arguments of JAX's: its gradient is traced as it is
        loss = original_of(args[0])
        return Callee(libraries.gradient_by(fun, loss, kwargs), args[1:], loss=loss)
    if fun in (jax.eval_shape, print_saved_residuals):  # which hand all keywords on
        return Callee(args[0], args[1:], kwargs)
    return Callee(args[0], args[1:], has_aux=bool(kwargs.get("has_aux", False)))


def _in_gradient(fun: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callee | None:
    """``jax.grad(f)(...)``, ``jit(value_and_grad(f))(...)`` and their like, stored ones and libraries' too."""
    given, spread = (fun, args, kwargs), False
    while (gradient := gradient_in(fun)) is None:
        if isinstance(fun, functools.partial):
            args, kwargs = (*fun.args, *args), {**fun.keywords, **kwargs}
            fun = fun.func
        elif is_jitted(fun) or libraries.is_jitted(fun):
            spread = spread or asks_shardings(fun)
            fun = fun.__wrapped__
        elif args and (loss := libraries.loss_of_equinox(fun)) is not None:
            return Callee(loss, args, kwargs, wrt=0, has_aux=bool(getattr(fun, "_has_aux", False)))
        elif args and (loss := libraries.loss_of_optax(fun)) is not None:
            return Callee(loss, args, {name: value for name, value in kwargs.items() if name != "state"}, wrt=0)
        elif (of_modules := libraries.loss_of_nnx(fun)) is not None:
            loss = original_of(of_modules.loss)
            # What nnx differentiates of a module only nnx knows: its gradient is traced, and the loss found in there.
            if loss is of_modules.loss:
                return Callee(*given, loss=loss)
            return Callee(of_modules.of(loss), args, kwargs, loss=loss)
        else:
            return None
    if spread:  # how is said around the gradient, which is therefore traced, and the loss found in there
        return Callee(*given, loss=gradient.fun)
    argnums = gradient.argnums if isinstance(gradient.argnums, tuple) else (gradient.argnums,)
    outside = [position for position in argnums if not -len(args) <= position < len(args)]
    if outside:
        raise RematError(
            f"argnums={gradient.argnums} asks for argument {outside[0]}, and the call has {len(args)} positional ones."
        )
    wrt = tuple(position % len(args) for position in argnums)
    is_number = not isinstance(gradient.argnums, tuple)
    return Callee(gradient.fun, args, kwargs, wrt=wrt[0] if is_number else wrt, has_aux=gradient.has_aux)


def _spread(callee: Callee) -> Callee:
    """Let partials, methods and callable pytrees become leading arguments; leave everything else alone."""
    fun, args, kwargs, bound = callee.fun, callee.args, callee.kwargs, callee.bound
    while True:
        fun = original_of(fun)
        if isinstance(fun, functools.partial):
            args, kwargs, bound = (*fun.args, *args), {**fun.keywords, **kwargs}, bound + len(fun.args)
            fun = fun.func
        elif (method := libraries.method_of(fun)) is not None:
            fun, owner = method
            args, bound = (owner, *args), bound + 1
        elif is_jitted(fun) and original_of(fun.__wrapped__) is not fun.__wrapped__:
            fun = original_of(fun.__wrapped__)
        else:
            break
    notes = (*callee.notes, *_notes_of_wrappers(fun))
    return replace(callee, fun=fun, args=args, kwargs=kwargs, bound=bound, notes=notes)


def _notes_of_wrappers(fun: Any) -> Iterator[str]:
    """The note that a function is itself a derivative, where one is below wrappers: ``jax.vmap(jax.grad(f))``."""
    for layer in layers(fun):
        if gradient_in(layer) is not None or is_forward_derivative(layer):
            name = name_of(fun)
            yield f"`{name}` is itself a derivative: what is shown is what differentiating it once more saves."
            return
        if isinstance(layer, types.FunctionType) and is_user_file(layer.__code__.co_filename):
            return  # what a wrapper of the user's own does with what it wraps shows in its trace


# ----------------------------------------------------------------------------------------------- what a function is for


# Of JAX's own functions those that are called for what comes out of others.
_CONSUMERS = (jax.block_until_ready, jax.device_get, jax.device_put, jax.debug.print)
_CONSUMING_MODULES = sys.stdlib_module_names | {"numpy", "IPython", "matplotlib", "pandas", "rich", "tqdm"}


def makes_a_function(fun: Any) -> bool:
    """Whether a call of this is no call yet: ``jax.grad(f)`` alone, without the arguments of ``f``."""
    makers = (jax.grad, jax.value_and_grad, jax.jacrev, jax.jit, jax.checkpoint, jax.vmap, functools.partial)
    return any(fun is maker for maker in makers)


def consumes(fun: Any) -> bool:
    """Whether a function is called for its effect, or makes another thing of a result: ``print``, ``float``.

    Where a call is in its brackets, that is meant.
    """
    if isinstance(fun, type | types.BuiltinFunctionType) or any(fun is consumer for consumer in _CONSUMERS):
        return not makes_a_function(fun)
    function = getattr(fun, "__func__", fun)
    if not isinstance(function, types.FunctionType):
        return False
    module = str(function.__globals__.get("__name__"))  # functools.wraps gives __module__ to what it wraps
    return module.partition(".")[0] in _CONSUMING_MODULES or module.endswith((".tree_util", ".tree"))


def prepares(fun: Any) -> bool:
    """Whether a function only prepares or reads something, as ``jnp.ones`` and ``optimizer.init`` do, or ``float``.

    All others are gradients, or code of the user's own.
    """
    if consumes(fun) or makes_a_function(fun) or not callable(fun) or is_backward_pass(fun):
        return True
    if differentiates(fun) or lowered_by(fun) is not None:
        return False
    return not any(libraries.applies_a_model(layer) or _is_users(layer) for layer in layers(fun))


def is_compiled(fun: Any) -> bool:
    """Whether it was compiled ahead of time or exported: there is no Python that could be traced."""
    exported = getattr(sys.modules.get("jax.export"), "Exported", ())
    return isinstance(fun, jax.stages.Compiled) or isinstance(getattr(fun, "__self__", None), exported)


def differentiates(fun: Any) -> bool:
    """Whether a call of this takes a gradient, or makes ready to."""
    return any(takes_the_function(layer) or libraries.is_gradient(layer) for layer in layers(fun))


def takes_a_gradient(fun: Any) -> bool:
    """Whether a call of this takes a gradient for sure, as no call does that only tells of one."""
    only_tell = (jax.eval_shape, print_saved_residuals)
    return differentiates(fun) and not any(layer is one for layer in layers(fun) for one in only_tell)


def takes_the_function(fun: Any) -> bool:
    """Whether it is ``jax.vjp`` or its like, which are called with a function and then its arguments."""
    takers = (jax.vjp, jax.linearize, jax.eval_shape, print_saved_residuals)
    of_equinox = getattr(sys.modules.get("equinox"), "filter_vjp", None)
    return fun is not None and any(fun is taker for taker in (*takers, of_equinox, libraries.vjp_of_nnx()))


def lowered_by(fun: Any) -> Any:
    """The jitted function that this is the ``lower``, or a similar method, of; None for anything else."""
    owner: Any = getattr(fun, "__self__", None)
    return owner if is_jitted(owner) and fun in (owner.lower, owner.trace, owner.eval_shape) else None


def _is_users(fun: Any) -> bool:
    """Whether a function, or the class of an object, is the user's own."""
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if code is not None:
        return is_user_file(code.co_filename)
    module = sys.modules.get(type(fun).__module__)
    file = getattr(module, "__file__", None)
    return module is not builtins and (not file or is_user_file(file))


def name_of(fun: Any) -> str:
    """The function's own name, or its type's."""
    return str(getattr(fun, "__name__", type(fun).__name__))


# ------------------------------------------------------------------------------------- what trains, while it is traced


class Trains(BaseException):
    """Breaks off the trace of a function that trains; the code that is traced does not see it as an error."""


@contextlib.contextmanager
def unless_it_trains(fun: Any) -> Iterator[None]:
    """Trace a function until it shows that it trains: where a loop of its own, or of what it calls, takes a gradient.

    Then ``Trains`` is raised. Nothing is done for None, and for what is no function or method written in Python.
    """
    code = getattr(getattr(fun, "__func__", fun), "__code__", None)
    if not isinstance(code, types.CodeType) or not is_user_file(code.co_filename):
        yield
        return

    def hold(traceable: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        frames, frame = list[types.FrameType](), sys._getframe(1)  # noqa: SLF001
        while frame is not None and (not frames or frames[-1].f_code is not code):
            frames.append(frame)
            frame = frame.f_back
        own = itertools.takewhile(lambda one: not str(one.f_globals.get("__name__")).startswith("jax."), frames[::-1])
        if frames[-1].f_code is code and any(_in_loop(one) for one in own if is_user_file(one.f_code.co_filename)):
            raise Trains
        return traceable

    with _jax.holding(hold):
        yield


def _in_loop(frame: types.FrameType) -> bool:
    """Whether the call that a frame is making stands in a ``for`` or ``while`` of its code."""
    at = frame.f_lasti
    jumps = (one for one in dis.get_instructions(frame.f_code) if "JUMP_BACKWARD" in one.opname)
    return any(one.argval <= at <= one.offset for one in jumps if "NO_INTERRUPT" not in one.opname)


# --------------------------------------------------------------------------------------------- where no call is written


def defined(
    namespace: Mapping[str, Any], functions: Sequence[tuple[str, bool, tuple[str, ...]]]
) -> tuple[Callable[..., Any], str]:
    """The function of a cell that is meant, and a remark where several could be; RematError where there is none.

    It is the one decorated with ``jax.checkpoint``, or rather the one that calls that; without any, the one that no
    other of the cell's calls. Of several, the last. ``functions`` are the names to which the cell gives functions, or
    (False) what a call returned, which counts if it is checkpointed; each with the names used in it.
    """
    uses = {name: set(used) for name, _, used in functions if callable(namespace.get(name))}
    for _ in uses:
        for name, used in uses.items():
            uses[name] = used.union(*(uses[other] for other in used & uses.keys()))
    checkpointed = {name for name in uses if any(map(is_checkpointed, layers(namespace[name])))}
    candidates = {name: uses[name] for name, is_function, _ in functions if name in uses and is_function}
    candidates = {name: uses[name] for name in uses if name in candidates or name in checkpointed}
    if checkpointed:
        candidates = {name: used for name, used in candidates.items() if checkpointed & {name, *used}}
    inside = {other for name, used in candidates.items() for other in used if other != name}
    *others, chosen = [name for name in candidates if name not in inside] or candidates or [None]
    if chosen is None:
        raise RematError(
            "nothing to inspect: end the cell with a call, such as loss(params, x), write the call after %%remat, "
            "or define one function in the cell."
        )
    if not others:
        return namespace[chosen], ""
    names = " and ".join(f"`{name}`" for name in (*others, chosen))
    return namespace[chosen], (
        f"The cell defines {names}: the last is inspected; to choose another, end the cell with its call, such as "
        f"{others[-1]}(...)."
    )


def with_arguments(fun: Any, written: str | None, namespace: Mapping[str, Any], variables: Mapping[str, Any]) -> Callee:
    """A function, or a gradient, with arguments that no call gives.

    They are ``written`` as between a call's brackets, to be evaluated in the namespace, else the ``variables`` with the
    names of the parameters. RematError where one is missing; what else goes wrong in them is raised as it is.
    """
    __tracebackhide__ = True
    if written is not None:
        return called(fun, *_written_arguments(written, namespace))
    args, kwargs, used = _arguments_by_name(fun, variables)
    note = f"Arguments: your variable{'s' * (len(used) > 1)} {', '.join(used)}." if used else ""
    return called(fun, args, kwargs).saying(note)


def _written_arguments(written: str, namespace: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    __tracebackhide__ = True
    code = f"(lambda *args, **kwargs: (args, kwargs))(\n{written}\n)"
    try:
        return eval(compile(code, "<--args>", "eval"), dict(namespace))  # noqa: S307  (the user's own Python)
    except NameError as error:
        if error.name is None or error.name in namespace:
            raise
        raise RematError(f"--args names `{error.name}`, which is not defined: assign it, or name another.") from None


def _arguments_by_name(
    fun: Callable[..., Any], variables: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """The variables with the names of the parameters, and which names were used.

    Parameters with a default may lack a variable; ``*args`` and ``**kwargs`` get nothing.
    """
    name = name_of(fun)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        raise RematError(f"the parameters of `{name}` cannot be read: give its arguments with --args.") from None
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: each for each in signature.parameters.values() if each.kind not in various}
    needed = [each for each in named if named[each].default is inspect.Parameter.empty]
    missing = [f"`{each}`" for each in needed if each not in variables]
    if missing:
        this, it = ("this name", "it") if len(missing) == 1 else ("these names", "them")
        raise RematError(
            f"`{name}` needs {' and '.join(missing)}, and no variable has {this}: assign {it}, or give the arguments "
            'with --args "...".'
        )
    given = OrderedDict((each, variables[each]) for each in named if each in variables)
    bound = inspect.BoundArguments(signature, given)
    return bound.args, bound.kwargs, [*bound.arguments]


# ------------------------------------------------------------------------------------------- from a callee to its trace


# What rm.trace has parameters of, so that a function's own of these names are given to it beforehand.
_TAKEN = ("wrt", "has_aux", "gradient")


@dataclass(frozen=True, slots=True)
class Inspection:
    """A traced function under the policy that a line asks for.

    ``device`` is the name of the accelerator that was chosen, empty for this machine, None where none was.
    ``loss`` is what the call differentiates, if the trace is of the call as it is.
    """

    trace: api.Trace
    policy: str
    at: str | None
    title: str
    loss: Any = None
    device: str | None = None


def traced(
    callee: Callee, wrt: tuple[int | str, ...] | None, gradient: str | None = None, axes: str | None = None
) -> api.Trace:
    """The trace of a callee, as ``--wrt``, ``--gradient`` and ``--mesh`` say.

    An exception of the inspected function itself is raised as it is, with the frames of the user's own code.
    """
    __tracebackhide__ = True
    around = contextlib.nullcontext() if axes is None else jax.set_mesh(mesh(axes))
    fun, kwargs = callee.fun, dict(callee.kwargs)
    own_keywords = {name: kwargs.pop(name) for name in _TAKEN if name in kwargs}
    if own_keywords:
        fun = functools.partial(fun, **own_keywords)
    positions = callee.wrt if wrt is None else _positions(callee, wrt)
    try:
        with around:
            return api.trace(fun, *callee.args, wrt=positions, has_aux=callee.has_aux, gradient=gradient, **kwargs)
    except RematError:
        raise
    except Exception as error:  # noqa: BLE001  (any exception of the user's function)
        raised = error
    own = _own_frames(raised.__traceback__)
    if own is None:  # raised before the function began: the call does not fit it
        with one_sentence():
            raise RematError(_misfit(callee, raised))
    raised.add_note(_while_tracing(callee, raised))
    cause = raised.__cause__
    # A cause within JAX, which it hides where it raises one itself, would stand before the user's own line.
    raise raised.with_traceback(own) from cause if cause and _own_frames(cause.__traceback__) else None


def inspected(callee: Callee, trace: api.Trace, options: Options, namespace: Mapping[str, Any]) -> Inspection:
    """The trace under the policy and at the place of a line; what is wrong with these is raised here, by RematError."""
    policy = policies.resolve(options.policy or "as_written", trace.names, namespace, trace.function_name)
    device = named_device(options.device)
    if device and not units.is_bytes(device):
        devices.get(device).check_mesh(trace.mesh_devices)
    trace.preview(policy.key, options.at, namespace)
    return Inspection(trace, policy.key, options.at, " ".join(callee.notes), callee.loss, device)


def named_device(name: str | None) -> str | None:
    """The name of the accelerator of a line, or so many bytes; empty for the machine itself, None for nothing."""
    if name is None:
        return None
    return "" if name.strip().casefold() == devices.THIS_CPU.casefold() else devices.named(name)


def _positions(callee: Callee, wrt: tuple[int | str, ...]) -> tuple[int | str, ...]:
    written = len(callee.args) - callee.bound  # those are what the user counts

    def position(number: int) -> int:
        if not -written <= number < written:
            raise RematError(f"--wrt {number} asks for an argument that the call does not have: it has {written}.")
        return callee.bound + number % written

    return tuple(argument if isinstance(argument, str) else position(argument) for argument in wrt)


def _misfit(callee: Callee, raised: BaseException) -> str:
    text = one_line(text_of(raised))
    if "static argument" in text:  # of jax.jit, given a float: a float is traced unless wrt says otherwise
        return (
            f"`{callee.name}` is jitted with a static argument that is a float here, and floats are differentiated: "
            "say what is, such as --wrt x."
        )
    if not callee.args and not callee.kwargs:
        return f"{callee.name} was called without arguments: nothing to differentiate."
    return f"`{callee.name}` cannot be called so: {text.removesuffix('.')}."


def _while_tracing(callee: Callee, raised: BaseException) -> str:
    """The sentence under the traceback of the user's function."""
    try:
        arguments = inspect.signature(callee.fun).bind(*callee.args, **callee.kwargs).arguments
    except (TypeError, ValueError):
        arguments = dict(callee.kwargs)
    odd = [
        f"`{name}` is a {type(leaf).__name__}"
        for name, argument in arguments.items()
        for leaf in jax.tree.leaves(argument)
        if not (callable(leaf) or hasattr(leaf, "shape") or isinstance(leaf, complex | float | int))
    ]
    hint = f" Where an array is needed, pass one: {', '.join(odd)}." if odd else ""
    name = printable(callee.name)
    return f"%remat: `{name}` raised this {type(raised).__name__} while it was traced abstractly.{hint}"


def _own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of JAX and of this package."""
    folders = {Path(jax.__file__).parent, Path(__file__).parents[1]}
    files = {Path(contextlib.__file__), Path(functools.__file__)}  # JAX's calls go through these
    frames: list[TracebackType] = []
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if folders.isdisjoint(file.parents) and file not in files:
            frames.append(traceback)
        traceback = traceback.tb_next
    own: TracebackType | None = None
    for frame in reversed(frames):
        own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return own
