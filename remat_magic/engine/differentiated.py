"""A function that a function differentiates inside: as it was traced, its inputs, and its halves as calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from remat_magic import _jax
from remat_magic.engine.signature import Inputs, Leaf
from remat_magic.engine.sites import Identity
from remat_magic.jaxprs.values import is_inexact
from remat_magic.records import Half, RematError


@dataclass(frozen=True, slots=True, eq=False)
class Differentiated:
    """A function that is differentiated inside, as it was traced for one call.

    Attributes:
        who: name, file and line of its definition.
        closed: its closed jaxpr; takes what is differentiated, and has what it closes over as constants.
        constants: the indices of those constants that are values of the function around, and their leaves.
        primals: the leaves of what is differentiated.
        static: leaves of its arguments that are no arrays.
        outputs: how many outputs it has.
        auxiliary: how many auxiliary ones that are arrays, which follow.
        depth: how many functions it stands inside of that are differentiated too.
        vmaps: the ``jax.vmap`` calls around it; ``closed`` is of one example, the leaves have the types of them all.
        settings: puts in force the settings that it was traced under, with the axes of ``shard_map`` around it.
        devices: how many there are along each of these axes; ``closed`` is of one device.
    """

    who: Identity
    closed: Any
    constants: Mapping[int, Leaf]
    primals: tuple[Leaf, ...]
    static: tuple[Leaf, ...]
    outputs: int
    auxiliary: int
    depth: int
    vmaps: _jax.Vmaps
    settings: Callable[[], contextlib.AbstractContextManager[None]]
    devices: Mapping[str, int]

    def evaluate(self, *values: Any) -> tuple[list[Any], list[Any]]:
        """The outputs and the auxiliary outputs, from the values closed over and then those differentiated."""
        outer = dict(zip(self.constants, values, strict=False))
        constants = [outer.get(index, value) for index, value in enumerate(_jax.consts_of(self.closed))]
        results = eval_jaxpr(_jax.open_jaxpr(self.closed), constants, *values[len(outer) :])
        return results[: self.outputs], results[self.outputs :]

    @property
    def copies(self) -> int:
        """How many examples and devices it is evaluated for at once."""
        return math.prod([*self.vmaps.sizes, *self.devices.values()])

    @property
    def types(self) -> list[Any]:
        """The types of what ``evaluate`` takes, of one example."""
        constants = _jax.consts_of(self.closed)
        return [*(jax.typeof(constants[index]) for index in self.constants), *self.closed.in_avals]

    @property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated, in its own argument names."""
        return InnerInputs(self).wrt


class InnerInputs(Inputs):
    """The inputs of a function that is differentiated inside, as those of a function that is called."""

    def __init__(self, inner: Differentiated) -> None:
        self.function = inner.who[0]
        self.leaves = (*inner.constants.values(), *inner.primals, *inner.static)
        self.settings, self.vmaps, self._types = inner.settings, inner.vmaps, inner.types

    def text(self, outputs: str) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``, arguments in the order of the parameters."""
        ordered = Inputs()
        ordered.function = self.function
        ordered.leaves = tuple(sorted(self.leaves, key=lambda leaf: (leaf.position is None, leaf.position)))
        return ordered.text(outputs)

    def jaxpr(self, fun: Callable[..., Any], flat: Callable[[Any], Any]) -> Any:
        """As ``Signature.jaxpr``: the equations keep the positions that they had when traced inside."""
        return jax.make_jaxpr(lambda *arrays: flat(fun(*arrays)))(*self._types)

    def arrays_of(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> list[Any]:
        """As ``Signature.arrays_of``; the arguments of the function around do not tell what the gradient is given.

        Raises:
            RematError: always.
        """
        raise RematError(
            f"what {self.function} is given is computed on the way: leave the inputs out, and random ones are used."
        )

    def require_differentiable(self) -> None:
        """As ``Signature.require_differentiable``: JAX differentiates it, so there is."""


def halves_as_calls(inner: Differentiated, number: int) -> Callable[..., Any]:
    """A flat function of all inputs, whose halves under differentiation are calls of functions with known names."""
    count, differentiated = len(inner.constants), [leaf.differentiated for leaf in inner.primals]

    def forward(*values: Any) -> list[Any]:
        outputs, auxiliary = inner.evaluate(*values)
        return [*outputs, *auxiliary, zero(outputs)]  # the last links it with its backward half

    def backward(link: Any, values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        # What is read is all that matters here, and the types: the half itself is traced apart, under each policy.
        primals = [value for value, yes in zip(values[count:], differentiated, strict=True) if yes]
        both = link + zero(cotangents)
        return [primal + both.astype(primal.dtype) for primal in primals]

    def zero(read: Sequence[Any]) -> Any:
        """A number for which these are read; in a ``shard_map`` it would be another one on each device."""
        used = [value for value in read if is_inexact(jax.typeof(value)) and not inner.devices]
        return sum((jnp.any(value != value).astype("int32") for value in used), jnp.zeros((), "int32"))

    forward.__name__, backward.__name__ = f"{_FORWARD}{number}", f"{_BACKWARD}{number}"
    forward_call, backward_call = jax.jit(forward), jax.jit(backward)

    @jax.custom_vjp
    def call(*values: Any) -> list[Any]:
        return forward(*values)[:-1]

    def forward_rule(*values: Any) -> tuple[list[Any], Any]:
        *results, link = forward_call(*values)
        return results, (link, values)

    def backward_rule(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        link, values = saved
        gradients = iter(backward_call(link, values, cotangents[: inner.outputs]))
        return (*[None] * count, *(next(gradients) if yes else None for yes in differentiated))

    call.defvjp(forward_rule, backward_rule)
    return call


_FORWARD, _BACKWARD = "remat_magic_forward_", "remat_magic_backward_"


def is_half(label: str) -> bool:
    """Whether a call of that name stands for a half."""
    return label.startswith((_FORWARD, _BACKWARD))


def half_of(eqn: Any) -> tuple[Half, int] | None:
    """Which half an equation is the call of, and the number of the function in the order of ``find_gradients``."""
    if _jax.is_jit(eqn):
        name = _jax.label_of(eqn)
        if name.startswith(_FORWARD):
            return "forward", int(name.removeprefix(_FORWARD))
        if name.startswith(_BACKWARD):
            return "backward", int(name.removeprefix(_BACKWARD))
    return None
