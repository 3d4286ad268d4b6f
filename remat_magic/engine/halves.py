"""A flat function's derivative as JAX makes it: the forward and the backward half, and both as one program."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from remat_magic import _jax
from remat_magic.engine.failures import is_passing
from remat_magic.errors import one_line, text_of
from remat_magic.jaxprs.one_device import Propagated, Spread
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.rewriting import without_checks
from remat_magic.jaxprs.walk import TypeOf, own_type
from remat_magic.records import RematError


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The forward half: a closed jaxpr whose outputs are the function's ``outputs`` and then the residual leaves.

    ``tree`` rebuilds the VJP function from the leaves; ``no_cotangents`` has for each output without a cotangent what
    stands for it, and None for the others. Under ``vmaps``, ``axes`` tells which axes of each residual, and
    then of each output, these map. ``type_of`` tells the types of the variables of both halves, with how they are
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
        results = list(function(*values))
        return results[:outputs], results[outputs:]

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
        results, vjp, aux = _vjp(function, arrays, differentiated, outputs)
        # The leaves, not the VJP itself: make_jaxpr caches the tree of what it returns, and with it the backward
        # jaxpr, for as long as the process lives.
        leaves, tree = tree_flatten(vjp)
        trees.append(tree)
        types = map(jax.typeof, results)  # a number that stands in the program is Python's
        no_cotangents[:] = [None if _jax.is_inexact(aval) else _no_cotangent(aval) for aval in types]
        return [*results, *aux, *leaves]

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


def ask_xla(spread: Propagated, closed: Any, shardings: Sequence[Any], results: Sequence[Any] | None = None) -> None:
    """Ask XLA how it spreads the values of a closed jaxpr, with its inputs and results spread so, None as it likes."""
    try:
        spread.ask(closed, shardings, results)
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
        results, vjp, aux = _vjp(function, arrays, differentiated, outputs)
        typed = [(result, jax.typeof(result)) for result in results]
        cotangents = [jnp.ones_like(result) if _jax.is_inexact(aval) else _no_cotangent(aval) for result, aval in typed]
        return [*results, *aux, *vjp(cotangents)]

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
    results: Sequence[Any] | None = None,
) -> tuple[Any, jax.stages.Lowered]:
    """The jaxpr of a flat function and the same lowered, for where its arguments are or for another platform.

    Of a device that is not here nothing can call Python: what equinox checks by that is left out of what is lowered.
    ``donated`` are the positions of arguments to write over, ``results`` the shardings of what it gives, if any.
    """
    options: dict[str, Any] = {} if results is None else {"out_shardings": [*results]}
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
