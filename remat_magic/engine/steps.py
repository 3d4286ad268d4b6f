"""Which of the gradients that a function takes inside a trace is of, as it is of a training step's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.engine.gradients import Differentiated, InnerInputs, is_half
from remat_magic.engine.halves import forward_half
from remat_magic.engine.primal import Primal
from remat_magic.engine.sites import Identity, definition, keys_of
from remat_magic.jaxprs.dead_code import LiveEquations
from remat_magic.jaxprs.walk import walk
from remat_magic.records import GradientCall, RematError

__all__ = ["ITSELF", "InnerGradient", "choose", "inner_gradients"]

ITSELF = "none"
"""The key that asks for the derivative of the function itself."""


class InnerGradient:
    """A gradient that a program takes inside: what is told of it, and the function that it is of.

    Args:
        call: what is told of it.
        function: what is differentiated.
    """

    def __init__(self, call: GradientCall, function: Differentiated) -> None:
        self.call, self.function = call, function

    @functools.cached_property
    def primal(self) -> Primal:
        """The function that is differentiated, as a program of its own."""
        return Primal(self.function.evaluate, InnerInputs(self.function), True, look_inside=False)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """The bytes that the gradient saves as it is written, arguments left out."""
        primal = self.primal
        with primal.tracing():
            half = forward_half(
                primal.function, primal.types, primal.signature.differentiated, primal.outputs, primal.auxiliary
            )
        jaxpr = _jax.open_jaxpr(half.closed)
        made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
        saved = {var for var in jaxpr.outvars[half.outputs :] if not _jax.is_literal(var)}
        return sum(_jax.nbytes(var.aval) for var in made & saved)


def inner_gradients(primal: Primal) -> tuple[InnerGradient, ...]:
    """The gradients that a program takes inside; calls of one function are one gradient.

    The dearest come first, and those that stand inside the function of another one after it: what they save is part of
    what that one saves.
    """
    first: dict[Identity, Differentiated] = {}
    places: dict[int, tuple[Identity, int]] = {}  # by the identity of a traceback
    for number, inner in enumerate(primal.gradients):
        first.setdefault(inner.who, inner)
        for eqn in _jax.open_jaxpr(inner.closed).eqns:
            places[id(_jax.traceback_of(eqn))] = inner.who, number  # inner ones last: outer ones have their equations
    paths: dict[Identity, tuple[str, ...]] = {}
    times: dict[Identity, int | None] = {}
    counted: set[int] = set()
    for scope, eqn in walk(primal.closed, once=True) if first else ():
        who, number = places.get(id(_jax.traceback_of(eqn)), (None, -1))
        if who is not None and number not in counted:
            counted.add(number)
            paths.setdefault(who, tuple(label for label in scope.nesting[0] if not is_half(label)))
            before = times.get(who, 0)
            times[who] = None if before is None or scope.times is None else before + scope.times
    keys = keys_of(tuple(first))
    gradients = [
        InnerGradient(
            GradientCall(keys[who], who[0], definition(who), paths.get(who, ()), times.get(who, 1), inner.wrt), inner
        )
        for who, inner in first.items()
    ]
    if len(gradients) > 1:
        gradients.sort(key=lambda gradient: (gradient.function.depth, -gradient.saved_bytes))
    return tuple(gradients)


def choose(
    primal: Primal, gradients: Sequence[InnerGradient], key: str | None, differentiate: bool
) -> InnerGradient | None:
    """The gradient that a trace is of, None for the derivative of the function itself.

    Args:
        primal: the function.
        gradients: those that it takes inside, the dearest first.
        key: of the one that is asked for, or ``ITSELF``; None where nothing is.
        differentiate: whether something else says that the function itself is to be differentiated.

    Raises:
        RematError: there is none of that key.
    """
    if key is None:
        return gradients[0] if gradients and not differentiate and _is_step(primal) else None
    if key == ITSELF:
        return None
    for gradient in gradients:
        if gradient.call.key == key:
            return gradient
    has = ", ".join(repr(gradient.call.key) for gradient in gradients)
    raise RematError(
        f"{primal.name} takes no gradient {key!r} inside: "
        + (f"it takes {has}, and {ITSELF!r} is for its own." if has else "it takes none.")
    )


def _is_step(primal: Primal) -> bool:
    """Whether a program uses gradients, as a training step does, rather than being one to differentiate.

    A step gives back something like what it differentiates (new parameters, or the gradient), or its outputs do not
    depend on the gradient at all (flax's nnx updates a model in place). A loss of which a gradient is a part, such as a
    penalty or a physics-informed residual, does neither; what returns one number of which a gradient is a part is one.
    """
    alive = LiveEquations(_jax.open_jaxpr(primal.closed))
    if not any(alive(eqn) and "transpose(" in _jax.name_stack(eqn) for _, eqn in walk(primal.closed, once=True)):
        return True
    returned = [_kind(aval) for aval in primal.closed.out_avals]
    return [shape for shape, _ in returned] != [()] and any(
        all(returned.count(kind) >= wanted.count(kind) for kind in wanted)
        for inner in primal.gradients
        if (wanted := [_kind(leaf.value) for leaf in inner.primals if leaf.differentiated])
    )


def _kind(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype
