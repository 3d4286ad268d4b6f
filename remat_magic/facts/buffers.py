"""Numbered buffers: how many bytes each takes, what it holds, and for what it is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.facts.device_memory import PLAIN, DeviceMemory
from remat_magic.facts.held import Held
from remat_magic.facts.step_order import ScheduledStep
from remat_magic.jaxprs.one_device import TypeOf, own_type
from remat_magic.jaxprs.straight_line import StraightLine

__all__ = ["NOTHING", "Buffers"]

NOTHING = 0
"""The buffer of what takes no memory: literals."""


class Buffers:
    """Numbered buffers.

    Attributes:
        kept: those that are not freed after their last reader.
        saved: those of residuals.
        gradients: those of gradients that something reads later on.
        donated: those of arguments that may be written over; where results are reserved, these lie in them.
        throughout: those that are there from the beginning to the end.
        written: those that kernels read from memory, whatever could make them again.
        checkpoints: for what a checkpoint makes, which of them.
        sizes: the bytes of each.
        narrowed: the types of those that are held in bfloat16 instead of float32.
        type_of: tells the type of a variable, with how it is spread over a mesh.
        on: how the device holds values.
    """

    def __init__(self, type_of: TypeOf = own_type, on: DeviceMemory = PLAIN) -> None:
        self.type_of = type_of
        self.on = on
        self.kept: set[int] = set()
        self.saved: set[int] = set()
        self.gradients: set[int] = set()
        self.donated: set[int] = set()
        self.throughout = {NOTHING}
        self.written: set[int] = set()
        self.checkpoints: dict[int, tuple[int, int]] = {}
        self.sizes: list[int] = [0]
        self.narrowed: dict[int, Any] = {}
        self._contents: dict[int, Held] = {}
        self._constants: dict[int, int] = {}
        self._lanes: dict[tuple[int, ...], tuple[int, int]] = {}  # of the shapes that convolutions take and make

    def buffer(self, aval: Any, content: Held | None = None) -> int:
        """A new one for a value of that type; its ``content``, if it may be asked for."""
        self.sizes.append(self.nbytes(aval))
        number = len(self.sizes) - 1
        if content is not None:
            self._contents[number] = content
        return number

    def permanent(self, aval: Any, content: Held) -> int:
        """A new one which is there from the beginning to the end."""
        number = self.buffer(aval, content)
        self.throughout.add(number)
        return number

    def constant(self, key: int, aval: Any) -> int:
        """The one buffer of a constant, wherever it is met."""
        if key not in self._constants:
            self._constants[key] = self.permanent(aval, Held(0, aval, constant=True))
        return self._constants[key]

    def discard(self, buffer: int) -> None:
        """Let a buffer take no memory."""
        self.sizes[buffer] = 0

    def nbytes(self, aval: Any) -> int:
        """The bytes that a value of that type takes on the device."""
        return self.on.nbytes(aval, self._lanes.get(_jax.local_shape(aval), ()) if self._lanes else ())

    def lay_out(self, flat: StraightLine) -> None:
        """Lay out what is of the shapes that the convolutions of a straight line take and make as they do."""
        for operation, _, _ in flat.lines:
            for atom, lanes in _jax.lanes_of_convolution(operation.eqn):
                self._lanes[_jax.local_shape(self.type_of(atom))] = lanes

    def lay_out_results(self, steps: Sequence[ScheduledStep]) -> None:
        """Lay out what is given back as arguments are, whatever a convolution makes."""
        if self._lanes:
            types = self.types(steps)
            for number in self.results & types.keys():
                self.sizes[number] = self.on.nbytes(types[number])

    @property
    def lasting(self) -> set[int]:
        """Those that are held to the end."""
        return self.kept | self.throughout

    @property
    def results(self) -> set[int]:
        """Those of what is given back, with memory of their own."""
        return self.kept - self.throughout - {NOTHING}

    @property
    def reserved(self) -> set[int]:
        """Those that are there from the beginning, though something makes them."""
        return self.results if self.on.reserves else set()

    def content(self, number: int) -> Held | None:
        """What a buffer holds, where that was told when it was made."""
        return self._contents.get(number)

    def types(self, steps: Sequence[ScheduledStep]) -> dict[int, Any]:
        """The types of buffers, as far as they are known, given the steps that make them."""
        types = {number: content.aval for number, content in self._contents.items() if content.aval is not None}
        for step in steps:
            if step.eqn is not None:
                types.update(zip(step.makes, map(self.type_of, step.eqn.outvars), strict=True))
        return types
