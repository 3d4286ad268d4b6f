"""A flat function's derivative as JAX makes it: the forward and the backward half, and both as one program."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.one_device import Propagated, Spread
from remat_magic.jaxprs.provenance import Provenances, Spans
from remat_magic.jaxprs.rewriting import without_checks
from remat_magic.jaxprs.walk import TypeOf, own_type, walk
from remat_magic.records import RematError
from remat_magic.user_files import is_user_file


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The forward half: a closed jaxpr whose outputs are the function's ``outputs`` and then the residual leaves.

    ``tree`` rebuilds the VJP function from the leaves; ``no_cotangents`` has for each output without a cotangent what
    stands for it, and None for the others. Under ``vmaps``, ``axes`` has the axes of each residual, and
    then of each output, that these map. ``type_of`` gives the types of the variables of both halves, with how they are
    spread over a mesh.
    """

    closed: Any
    outputs: int
    tree: Any
    residual_types: tuple[Any, ...]
    output_types: tuple[Any, ...]
    no_cotangents: tuple[Any, ...]
    vmaps: _jax.Vmaps | None = None
    axes: tuple[tuple[int | None, ...], ...] = ()
    type_of: TypeOf = own_type


def _vjp(
    function: Callable[..., Sequence[Any]], arrays: Sequence[Any], differentiated: Sequence[int], outputs: int
) -> tuple[list[Any], Callable[..., Any], list[Any]]:
    """The outputs of a flat function, their VJP, and its auxiliary outputs: those after the first ``outputs``.

    ``differentiated`` are the positions of the arguments to differentiate; the others are closed over.
    """

    def of_differentiated(*chosen: Any) -> Any:
        values = list(arrays)
        for position, value in zip(differentiated, chosen, strict=True):
            values[position] = value
        made = list(function(*values))
        return made[:outputs], made[outputs:]

    return jax.vjp(of_differentiated, *(arrays[position] for position in differentiated), has_aux=True)


def _no_cotangent(aval: Any) -> Any:
    """The cotangent of an output that is not inexact: one of type float0, which is a NumPy dtype only."""
    return np.zeros(aval.shape, jax.dtypes.float0)


def forward_half(
    function: Callable[..., Sequence[Any]],
    types: Sequence[Any],
    differentiated: Sequence[int],
    outputs: int,
    auxiliary: int,
    vmaps: _jax.Vmaps | None,
) -> Forward:
    """Trace ``jax.vjp`` of a flat function of values of these types, which gives outputs and then auxiliary ones.

    ``differentiated`` are the positions of the arguments to differentiate; the others are closed over. It is traced
    under ``vmaps``, if any; ``types`` are those outside.
    """
    trees: list[Any] = []
    no_cotangents: list[Any] = []

    def forward(*arrays: Any) -> list[Any]:
        primals, vjp, aux = _vjp(function, arrays, differentiated, outputs)
        # The leaves, not the VJP itself: make_jaxpr caches the tree of what it returns, and with it the backward
        # jaxpr, for as long as the process lives.
        leaves, tree = tree_flatten(vjp)
        trees.append(tree)
        types = map(jax.typeof, primals)  # a number that stands in the program is Python's
        no_cotangents[:] = [None if _jax.is_inexact(aval) else _no_cotangent(aval) for aval in types]
        return [*primals, *aux, *leaves]

    mapped = vmaps.over(forward) if vmaps else None
    closed = jax.make_jaxpr(mapped or forward)(*types)
    out_types, axes = closed.out_avals, mapped.axes if mapped else []
    return Forward(
        closed,
        outputs + auxiliary,
        trees[0],
        tuple(out_types[outputs + auxiliary :]),
        tuple(out_types[:outputs]),
        tuple(no_cotangents),
        vmaps,
        (*axes[outputs + auxiliary :], *axes[:outputs]),
    )


def backward_half(half: Forward) -> Any:
    """The closed jaxpr of the backward half: residual leaves and cotangents in, gradients out.

    JAX raises where a function has a forward half but no backward one.
    """
    count = len(half.residual_types)
    inexact = [_jax.is_inexact(aval) for aval in half.output_types]

    def backward(*values: Any) -> Any:
        leaves, given = values[:count], iter(values[count:])
        cotangents = [next(given) if nothing is None else nothing for nothing in half.no_cotangents]
        return jax.tree.leaves(tree_unflatten(half.tree, leaves)(cotangents))

    types = [aval for aval, yes in zip(half.output_types, inexact, strict=True) if yes]
    axes = [axes for axes, yes in zip(half.axes, [True] * count + inexact, strict=False) if yes]
    mapped = half.vmaps.over(backward, axes) if half.vmaps else backward
    closed = jax.make_jaxpr(mapped)(*half.residual_types, *types)
    if isinstance(half.type_of, Propagated):
        of_outputs = half.type_of.of(_jax.open_jaxpr(half.closed).outvars)
        given = [where for where, yes in zip(of_outputs, inexact, strict=False) if yes]
        ask_xla(half.type_of, closed, [*of_outputs[half.outputs :], *given], half.type_of.gradients)
    elif isinstance(half.type_of, Spread) and half.type_of.known:
        saved = _jax.open_jaxpr(half.closed).outvars[half.outputs :]
        pairs = zip(_jax.open_jaxpr(closed).invars, map(half.type_of, saved), strict=False)
        half.type_of.learn(closed, {var: aval for var, aval in pairs if aval is not var.aval})
    return closed


def ask_xla(spread: Propagated, closed: Any, shardings: Sequence[Any], outputs: Sequence[Any] | None = None) -> None:
    """Ask XLA how it spreads the values of a closed jaxpr, with its inputs and outputs spread so, None as it likes."""
    try:
        spread.ask(closed, shardings, outputs)
    except Exception as error:
        if is_passing(error) or isinstance(error, RematError):
            raise
        raise RematError(
            f"XLA does not say how it spreads the values over the mesh: {one_line(text_of(error), 300)}"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """A program that takes a trace's array leaves and returns its outputs, auxiliary outputs and gradients, flat.

    Or the training step around it, which takes the step's array leaves and returns what the step does, flat.
    ``jaxpr`` is the program, ``lowered`` is ready to compile.
    ``forward`` and ``backward`` are the halves that the report is of. ``outputs`` counts the gradient's outputs and
    auxiliary outputs. ``donated`` are the positions of the arguments that it may write over.
    """

    jaxpr: Any
    lowered: jax.stages.Lowered
    forward: Forward
    backward: Any
    outputs: int
    provenances: Provenances
    donated: tuple[int, ...] = ()


def value_and_gradients(
    function: Callable[..., Sequence[Any]],
    differentiated: Sequence[int],
    outputs: int,
    vmaps: _jax.Vmaps | None,
) -> Callable[..., list[Any]]:
    """A flat function that returns all that ``function`` returns and then the gradients.

    The cotangent of each of the first ``outputs`` outputs is one everywhere, as for ``jax.grad`` of a scalar; the
    other outputs have none. Under ``vmaps``, it takes and returns the values of all examples.
    """

    def gradient(*arrays: Any) -> list[Any]:
        primals, vjp, aux = _vjp(function, arrays, differentiated, outputs)
        typed = [(primal, jax.typeof(primal)) for primal in primals]
        cotangents = [jnp.ones_like(primal) if _jax.is_inexact(aval) else _no_cotangent(aval) for primal, aval in typed]
        return [*primals, *aux, *vjp(cotangents)]

    return vmaps.over(gradient) if vmaps else gradient


def input_type(aval: Any, sharding: Any) -> Any:
    """What to lower for: the type of an argument, on the devices that its sharding names, if it has one."""
    if sharding is None:
        return aval
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def lower(
    function: Callable[..., Any],
    types: Sequence[Any],
    platform: str | None,
    donated: Sequence[int] = (),
    out_shardings: Sequence[Any] | None = None,
) -> tuple[Any, jax.stages.Lowered]:
    """The jaxpr of a flat function and the same lowered, for where its arguments are or for another platform.

    Of a device that is not here nothing can call Python: what equinox checks by that is left out of what is lowered.
    ``donated`` are the positions of arguments to write over, ``out_shardings`` those of what it gives, if any.
    """
    options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": [*out_shardings]}
    traced = jax.jit(function, donate_argnums=tuple(donated), **options).trace(*types)
    jaxpr = traced.jaxpr
    if platform and (unchecked := without_checks(jaxpr)) is not jaxpr:
        traced = jax.jit(_jax.as_function(unchecked), donate_argnums=tuple(donated), **options).trace(*types)
    return _jax.open_jaxpr(jaxpr), traced.lower(lowering_platforms=(platform,) if platform else None)


_pauses: set[object] = set()
_pause_lock = threading.Lock()
_was_on = True


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Pause the garbage collector: a retrace makes only objects that live, and collecting doubles its time.

    The last to end turns it back on, so that traces in several threads do not do so under each other. An interrupt
    between any two steps leaves it as it was found.
    """
    global _was_on
    pause = object()
    try:
        with _pause_lock:
            if not _pauses:
                _was_on = gc.isenabled()
            _pauses.add(pause)
            gc.disable()
        yield
    finally:
        with _pause_lock:
            _pauses.discard(pause)
            if not _pauses and _was_on:
                gc.enable()


COMPLEX = "reduce_precision does not accept dtype complex"
"""What JAX says of a policy that would save a complex value."""


@contextlib.contextmanager
def failures(
    function: str, policy: str, written: Mapping[str, str] = MappingProxyType({}), closed: Any = None
) -> Iterator[None]:
    """Tell what JAX raises during a retrace in one sentence that names the mend.

    ``written`` are the policies by site that the source sets and the choice leaves as they are, ``closed`` the program.
    """
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        raise RematError(_sentence(function, policy, error, written, closed)) from error


@contextlib.contextmanager
def differentiating(function: str) -> Iterator[None]:
    """Tell in the same way what JAX cannot differentiate where a function takes gradients itself."""
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        text = text_of(error)
        # A failed assertion without a text may be the user's own.
        if COMPLEX in text or (text and _undifferentiable(function, error, text, None)):
            raise RematError(_sentence(function, "its own policies", error, {})) from error
        raise


def is_passing(error: Exception) -> bool:
    """Whether a failure says nothing about the program, and asking again may succeed: no memory, or no stack."""
    return isinstance(error.__cause__, (MemoryError, RecursionError))


def _sentence(function: str, policy: str, error: Exception, written: Mapping[str, str], closed: Any = None) -> str:
    text = one_line(text_of(error), 4000)
    if COMPLEX in text:
        who, sites = f"{function} would under {policy}", " at 'sites'" if written else ""
        if written and policy in ("as_written", "nothing_saveable"):
            who = " and ".join(f"{site} may under {own}, as is written" for site, own in written.items())
        return (
            f"JAX cannot save a complex value under a policy, as {who}: choose one that saves none, such as "
            f"'nothing_saveable'{sites}, or name the real and the imaginary part and save these by name."
        )
    if "Effects not supported" in text:
        effects = text.rsplit(":", 1)[-1].strip()
        return (
            f"{function} has side effects that jax.checkpoint forbids ({effects}): take io_callback and the like out "
            "of the checkpointed part, or choose the policy 'none'."
        )
    first = text.split(". ")[0].rstrip(".")
    sentence = f"JAX cannot trace {function} under {policy}: {type(error).__name__}: {first[:400]}{_place(error)}."
    return _undifferentiable(function, error, text, closed) or sentence


_NO_DERIVATIVE = "{0} cannot be differentiated: {1}{2} has no derivative; give it one by jax.custom_vjp."
_WITHOUT_RULE = "{0} cannot be differentiated: {3}{2}; give that part a jax.custom_vjp."
_AS_JAX_SAYS = "{0} cannot be differentiated: {3}{2}."
# By what JAX says: of a kernel of Pallas that linearization failed, or nothing at all.
_SENTENCES = {
    "Reverse-mode differentiation does not work for lax.while_loop": (
        "{0} has no backward pass: JAX cannot differentiate a while_loop (or a fori_loop of unknown length){2} in "
        "reverse; give fori_loop static bounds, or use lax.scan."
    ),
    "callbacks do not support JVP": _NO_DERIVATIVE,
    "custom_lin'|forward-mode autodiff": (
        "{0} cannot be differentiated: a jax.custom_vjp function{2} is met in forward mode (jax.jvp, jax.jacfwd, a "
        "Hessian-vector product), where it has no rule; make it a jax.custom_jvp."
    ),
    "using defvjp|vmap_method|grad requires|Gradient only defined": _AS_JAX_SAYS,
    "ifferentiation rule|ranspose rule|jvp_method|VP defined|VP not implemented|Linearization failed|^$"
    "|cannot be differentiated|gradients are only implemented|Derivatives of": _WITHOUT_RULE,
}


def _undifferentiable(function: str, error: Exception, text: str, closed: Any) -> str:
    """What cannot be traced or differentiated, by name and place; empty for an error of another kind."""
    if type(error).__name__ == "TraceContextError":
        return (
            f"{function} changes a module of flax nnx that is not among its arguments, or is outside of a transform of "
            "JAX's: pass model, optimizer and rngs as arguments, and take nnx.grad, nnx.jit, nnx.scan and the like."
        )
    if not (text or isinstance(error, AssertionError)):  # no memory, as a rule
        return ""
    place = _place(error) or _called_from(error, text, closed)
    _, unhashable, what = text.rpartition("unhashable type: ")
    if unhashable and "Tracer" not in what and not _raised_by_user(error):
        return (
            f"{function} cannot be traced: jax.jit or the like{place} is given an object that holds arrays and has no "
            f"hash ({one_line(what, 80)}): pass it as an argument that is not static, or take eqx.filter_jit."
        )
    sentence = next((sentence for words, sentence in _SENTENCES.items() if re.search(words, text)), "")
    kind = "a pure_callback" if text.startswith("Pure") else "an io_callback"
    what = one_line(text, 300).rstrip(".") or "JAX cannot differentiate the operation"
    return sentence.format(function, kind, place, what)


def _called_from(error: Exception, text: str, closed: Any) -> str:
    """The user's line that calls what has no line of the user's itself: a library's loop, a callback under vmap.

    That is of the only such call in the program, or of the gradient that is taken.
    """
    spans, found = Spans(), set[str]()
    for scope, eqn in walk(closed, once=True) if closed is not None else ():
        inner, outer, called = eqn, scope, None
        while inner is not None and called is None and _jax.is_refused(eqn, text):
            called = spans.frames(_jax.traceback_of(inner)).source
            inner, outer = outer and outer.eqn, outer and outer.parent
        found |= {called.place} if called is not None else set()
    raised = spans.raised(error.__traceback__)
    found = found or ({raised.place} if raised is not None else set())
    return f" called from {found.pop()}" if len(found) == 1 else ""


def _raised_by_user(error: Exception) -> bool:
    """Whether the user's own code raised an error, and is no ``__hash__``, which JAX asks."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_name != "__hash__" and is_user_file(frame.f_code.co_filename)


def _place(error: Exception) -> str:
    """Where the operation stands that JAX was at, as it says by an exception before this one."""
    before: BaseException | None = error
    while before is not None and type(before).__name__ != "JaxStackTraceBeforeTransformation":
        before = before.__cause__
    span = Spans().raised(before.__traceback__) if before is not None else None
    return f" at {span.place}" if span is not None and span.place else ""
