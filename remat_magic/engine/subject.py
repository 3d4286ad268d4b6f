"""What a trace is of: the user's function, run once as Python, or a gradient that it takes inside."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from remat_magic import _jax
from remat_magic.engine.contents import Contents, contents
from remat_magic.engine.differentiated import InnerInputs
from remat_magic.engine.primal import Primal
from remat_magic.engine.reloaded import restore_lines
from remat_magic.engine.signature import Leaf, Signature
from remat_magic.engine.sites import Identity
from remat_magic.engine.source_texts import source_texts
from remat_magic.engine.steps import ITSELF, InnerGradient, Step, choose, inner_gradients, step_of
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.records import GradientCall, Plan, RematError, Site

__all__ = ["Subject"]


class Subject:
    """A function traced once, and what is known of its program without another trace."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wrt: Any,
        has_aux: bool,
        gradient: str | None = None,
    ) -> None:
        if not callable(fun):
            raise RematError(f"trace needs a function, not {type(fun).__name__}: {fun!r}.")
        self.lock = threading.RLock()
        self._fun = fun
        restore_lines()
        self._given, self._settings = _traced(fun, args, kwargs, wrt, has_aux)
        self._gradients = inner_gradients(self._given)
        self._begin(gradient, wrt is not None or has_aux)

    def _begin(self, gradient: str | None, differentiate: bool) -> None:
        """Choose what the trace is of, and make ready for it; arguments are those of ``choose``."""
        self.plans: dict[str, Plan] = {}  # that a key stands for, where a search has made them
        fun, given = self._fun, self._given
        self._gradient = choose(given, self._gradients, gradient, differentiate)
        if self._gradient is not None:
            self._primal = self._gradient.primal
        elif not given.gradients:
            self._primal = given
        else:  # its own derivative is that of the program without the calls that stand for its gradients
            self._primal = Primal(fun, given.signature, given.has_aux, False, however_long=given.however_long)
        self._primal.require_differentiable()
        # Now, since the text is read from where the user will edit it.
        self.sources = source_texts(self._primal.provenances, fun)

    @property
    def function_name(self) -> str:
        """The function's own name."""
        return self._primal.name

    @property
    def signature(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        types = [_jax.type_text(aval) for aval in self._primal.output_types]
        return self._primal.signature.text(types[0] if len(types) == 1 else f"({', '.join(types)})")

    @property
    def wrt(self) -> tuple[str, ...]:
        """What is differentiated: arguments by name, or leaves where only some of an argument's are."""
        return self._primal.signature.wrt

    @property
    def arguments(self) -> tuple[Leaf, ...]:
        """The array leaves of the arguments, as types."""
        return self._primal.signature.arrays

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What the user knows the array leaves by."""
        return self._primal.arguments

    def inputs(self, *, alone: bool = False) -> Signature | InnerInputs:
        """The arguments of what ``gradient`` gives: of the training step where it is known, else of the function.

        Args:
            alone: of the gradient without the step.
        """
        return self._primal.signature if alone or self.step is None else self._given.signature

    @property
    def whole(self) -> Any:
        """The closed jaxpr of the function as it was given; calls stand there for the gradients that it takes."""
        return self._given.closed

    @property
    def sites(self) -> tuple[Site, ...]:
        """The places where ``jax.checkpoint`` is applied, in the order of their first call."""
        return self._primal.table.sites

    @property
    def possible_sites(self) -> tuple[Site, ...]:
        """The places where there is no checkpoint and could be one: functions that are called, loops' bodies."""
        return self._primal.possible.sites

    @property
    def groups(self) -> tuple[Site, ...]:
        """Steps of loops that are worth one checkpoint around several, as places: about the square root of all."""
        return self._primal.possible.groups

    @property
    def loops(self) -> tuple[str, ...]:
        """The keys of places that stand once in each step of a loop, so that steps can be grouped there."""
        return tuple(self._primal.possible.loops)

    def site_of(self, eqn: Any) -> str:
        """The key of the site that a checkpoint equation of the primal program belongs to."""
        return self._primal.site_of(eqn)

    def contents(self) -> Mapping[str, Contents]:
        """What is inside each place, those that have a checkpoint and those that could, by key; see ``Contents``."""
        with self.lock, _jax.reading():
            return contents(self._primal)

    @property
    def gradients(self) -> tuple[GradientCall, ...]:
        """The gradients that the function takes inside, the dearest first."""
        return tuple(gradient.call for gradient in self._gradients)

    @property
    def gradient_inside(self) -> GradientCall | None:
        """The one of them that the trace is of; None where it is of the function's own derivative."""
        return None if self._gradient is None else self._gradient.call

    @property
    def differentiated_inside(self) -> Identity | None:
        """Name, file and line of what a training step differentiates; None where the function itself is."""
        return None if self._gradient is None else self._gradient.function.who

    @functools.cached_property
    def step(self) -> Step | None:
        """The training step that the gradient is taken in; None where there is none, or where it is not known.

        It is not known where the gradient writes to references, is differentiated itself, or is part of another one.
        """
        return None if self._gradient is None else step_of(self._given, self._gradient)

    def of_gradient(self, key: str) -> Self:
        """One of another gradient that the function takes inside, or of the function itself.

        Raises:
            RematError: there is no such gradient, or the function itself cannot be differentiated.
            Exception: whatever the function raises, which is traced once more where it is itself differentiated.
        """
        with self.lock, self._given.tracing():  # whichever thread asks
            other: Subject = self._copy()
            other._begin(key, False)
            return other

    def _copy(self) -> Self:
        """One that is to begin anew."""
        other: Subject = copy.copy(self)
        other.__dict__.pop("step", None)
        other.lock = threading.RLock()
        return other

    @property
    def postponed(self) -> bool:
        """Whether XLA was not asked how values are spread only since that takes long: ``of_one_device`` asks."""
        return not self.per_device and (self._given.postponed or self._primal.postponed)

    def of_one_device(self) -> Self:
        """One of the same, for which XLA is asked how values are spread, however long that takes.

        Raises:
            RematError: XLA cannot be asked.
            Exception: as ``of_gradient``.
        """
        if self.per_device:
            return self
        with self.lock:
            other: Subject = self._copy()
            given = self._given.asked_however_long()
        other._given = given
        other._gradients = tuple(InnerGradient(inner.call, inner.function, given) for inner in self._gradients)
        with other.lock, given.tracing():
            other._begin(ITSELF if self._gradient is None else self._gradient.call.key, False)
            other.plans = dict(self.plans)
            if not other.per_device:
                why = given.why_not_asked or other._primal.why_not_asked
                raise RematError(f"XLA cannot be asked how {self.function_name} is spread over the devices: {why}.")
        return other

    def retraced(self, fun: Any) -> Self:
        """One of another function with arguments of the same types, under the same settings.

        Raises:
            Exception: whatever ``fun`` itself raises.
        """
        given, signature = self._given, self._given.signature
        args, kwargs = self.inputs_again()
        differentiated = tuple(leaf.name for leaf in signature.arrays if leaf.differentiated)
        wrt = differentiated if self._gradient is None else None
        gradient = ITSELF if self._gradient is None else self._gradient.call.key
        with given.tracing():
            other = type(self)(fun, args, kwargs, wrt, given.has_aux, gradient)
        return other.of_one_device() if given.however_long else other

    def inputs_again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same types as those that the function was traced with, and the static ones themselves."""
        signature = self._given.signature
        assert isinstance(signature, Signature)  # not that of a function inside
        arrays = [_of_type(leaf.value, leaf.sharding) for leaf in signature.arrays]
        return signature.call(lambda *args, **kwargs: (args, kwargs), arrays)

    @property
    def stale(self) -> tuple[str, ...]:
        """The functions of which JAX still holds an older trace than this one."""
        return tuple(dict.fromkeys((*self._given.stale, *self._primal.stale)))

    @property
    def provenances(self) -> Provenances:
        """The primal program and where its operations stand."""
        return self._primal.provenances

    @property
    def remat3(self) -> bool:
        """Whether the trace was made, and is retraced, with jax_remat3."""
        return self._primal.remat3

    @property
    def devices(self) -> int:
        """How many devices share the work; 1 without a mesh."""
        return self._primal.devices if self.per_device else self._given.automatic_devices

    @property
    def mesh_devices(self) -> int:
        """How many devices the mesh of the program has, without asking XLA; 1 for none."""
        return self._given.mesh_devices

    @property
    def per_device(self) -> bool:
        """Whether figures are of one device; not where sharding is automatic, of which no type tells."""
        return self._primal.devices > 1 or self._given.automatic_devices == 1

    @property
    def unplaced(self) -> tuple[str, ...]:
        """The arguments of which nothing says how they are spread; None of them where nothing is spread."""
        return self._given.unplaced if self._given.asked is not None else ()

    @property
    def traced(self) -> Any:
        """The function that was traced, as it was given."""
        return self._fun

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves of the arguments, static ones included."""
        return self._primal.signature.leaves


def _traced(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrt: Any, has_aux: bool
) -> tuple[Primal, tuple[str, ...]]:
    """The primal program, and the Python numbers that had to stay numbers, since the function needs them as such."""
    signature = Signature(fun, args, kwargs, wrt)
    try:
        return Primal(fun, signature, has_aux), ()
    except (RematError, MemoryError, RecursionError):
        raise
    except Exception:
        if not signature.numbers:
            raise
        with contextlib.suppress(Exception):  # else it is another matter, which the first error tells
            return Primal(fun, Signature(fun, args, kwargs, wrt, numbers=False), has_aux), signature.numbers
        raise


def _of_type(aval: Any, sharding: Any) -> Any:
    """A stand-in for an argument of a type."""
    if isinstance(aval, jax.ShapeDtypeStruct):
        return aval
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)
