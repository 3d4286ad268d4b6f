"""Sentences that a reader of any report of a function must know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from remat_magic.engine.gradients import Differentiated
from remat_magic.engine.primal import Primal
from remat_magic.engine.steps import ITSELF
from remat_magic.records import GradientCall, Note

_NAMED = 4  # of several arguments


def of_program(stale: Sequence[str], hidden: Sequence[str], *, complex_values: str) -> Iterator[Note]:
    """What is to be known of a function; ``hidden`` are the names that only the rules of custom derivatives hold."""
    if complex_values:
        yield Note("complex-values", complex_values)
    if stale:
        yield Note(
            "stale-trace",
            f"JAX still holds an older trace of {', '.join(stale)}, from before it or what it calls was redefined: "
            "this report shows the new definition, but your next jit or grad may run the old one until "
            "jax.clear_caches().",
            stale,
        )
    if hidden:
        yield Note(
            "names-out-of-reach",
            f"{', '.join(map(repr, hidden))} {'is' if len(hidden) == 1 else 'are'} named inside a custom derivative "
            "rule, which is Python: checkpoint sites in there are out of reach.",
            hidden,
        )


def of_gradients(
    function: str, chosen: GradientCall | None, gradients: Sequence[GradientCall], bare: bool, unknown: str
) -> Iterator[Note]:
    """What was decided about a function that takes gradients inside, and how to turn it round.

    ``chosen`` is the gradient that is shown, None for the function's own derivative. ``bare``: the function is what a
    library made to take the gradient, and nothing else. ``unknown`` says why the memory of the whole step is not known;
    empty where it is.
    """
    if not gradients:
        return
    first, *others = [chosen, *(other for other in gradients if other is not chosen)] if chosen else gradients
    place = f" ({first.place})" if first.place else ""
    if chosen is None:
        yield Note(
            "gradient-inside",
            f"{function} takes the gradient of {first.function}{place} inside, and this report is of the derivative of "
            f"{function} itself. gradient={first.key!r} shows the gradient inside.",
            (function,),
        )
        return
    others_too = f", or one of {', '.join(repr(other.key) for other in others)}" if others else ""
    how = f"write gradient={ITSELF!r}, in a cell --gradient {ITSELF}{others_too}"
    if bare:
        yield Note(
            "gradient-called",
            f"This is the gradient of {first.function}{place}. To differentiate that gradient, {how}.",
            (function, first.key),
        )
        return
    peak = f"the peak is of this gradient alone, since {unknown}" if unknown else "the peak is of the whole step"
    yield Note(
        "gradient-of-step",
        f"{function} takes the gradient of {first.function}{place}, and that is what is shown; {peak}. "
        f"For the derivative of {function} itself, {how}.",
        (function, first.key),
    )


def of_copies(inside: Differentiated) -> Iterator[Note]:
    """What the figures are of where a gradient is taken for several examples at once, or on several devices."""
    function, examples, devices = inside.who[0], inside.vmaps.sizes, inside.devices
    if math.prod(examples) > 1:
        count = " x ".join(map(str, examples))
        yield Note(
            "gradient-per-example",
            f"{function} is differentiated for {count} examples at once (jax.vmap), and what they save is held "
            "together: shapes and bytes are of them all.",
            (function,),
        )
    if math.prod(devices.values()) > 1:
        axes = ", ".join(f"{size} along {axis!r}" for axis, size in devices.items())
        yield Note(
            "gradient-per-device",
            f"{function} is differentiated on each device by itself ({axes}): shapes and bytes are of one device.",
            (function,),
        )


def of_devices(given: Primal, primal: Primal, devices: int, *, per_device: bool) -> Iterator[Note]:
    """What the figures are of where several devices share the work."""
    function, unknown, untold = primal.name, primal.unknown_values, primal.untold_axes
    if not per_device:
        yield Note(
            "devices-together",
            f"{function} is sharded automatically over {devices} devices, and only XLA knows how. All bytes and FLOPs, "
            f"arguments too, are of all {devices} together, each value counted once. XLA was not "
            f"asked: {given.answer.why_not or primal.answer.why_not}.",
            (function,),
        )
        return
    if untold:
        axes = ", ".join(map(repr, untold))
        parts = (
            f"XLA decides how the values of {function} are sharded over {axes} of the mesh: figures are those of one "
            f"device if each of {devices} devices holds an equal part."
        )
        inside = (
            f"XLA may also shard the values of a shard_map of {function} over {axes} of the mesh, and does not say so: "
            f"bytes and FLOPs are counted as if every device along {axes} had all of them."
        )
        yield Note("devices-unknown", parts if primal.answer.spread is None else inside, tuple(untold))
    if unknown:
        yield Note(
            "devices-unknown",
            f"{unknown} value{'s' if unknown > 1 else ''} that {function} computes outside of its shard_map "
            f"{'have' if unknown > 1 else 'has'} no sharding in the type: counted as if every device held all of it.",
            (function,),
        )


def of_mesh(given: Primal, devices: int) -> Iterator[Note]:
    """What nothing says about where it is on a mesh, which so many devices share."""
    function, mesh, unplaced = given.name, given.mesh, given.unplaced
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    if devices == 1 and math.prod(mesh.values()) > 1:
        yield Note(
            "mesh-unused",
            f"Nothing of {function} is sharded over the mesh {axes}: every device holds and computes all of it. Give "
            "the arguments NamedShardings, or the jitted step in_shardings.",
            (function,),
        )
    elif unplaced:
        named = ", ".join(unplaced[:_NAMED]) + (f" and {len(unplaced) - _NAMED} more" * (len(unplaced) > _NAMED))
        yield Note(
            "argument-unplaced",
            f"{named} {'have' if len(unplaced) > 1 else 'has'} neither a sharding nor a spec: XLA decides, and usually "
            "every device holds all of it.",
            tuple(unplaced),
        )


def of_settings(settings: Sequence[str]) -> Iterator[Note]:
    """What is to be known of Python numbers that had to stay numbers."""
    if settings:
        predicate = "are Python numbers" if len(settings) > 1 else "is a Python number"
        yield Note(
            "number-not-differentiated",
            f"{', '.join(settings)} {predicate} that the function needs as such, and not differentiated: to "
            "differentiate, pass arrays.",
            tuple(settings),
        )


def policy_of_matmuls(policy: str) -> Note:
    """How little jax_remat3 asks a policy."""
    return Note(
        "policy-asked-little",
        f"jax_remat3 asks a policy about matmuls, convolutions and named values only: what {policy} says of other "
        "operations has no effect.",
        (policy,),
    )
