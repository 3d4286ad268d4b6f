"""Which of the gradients that a function takes inside a trace is of, as it is of a training step's."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from remat_magic import _jax
from remat_magic.engine.gradients import Differentiated, half_of, is_half
from remat_magic.engine.halves import Forward, backward_half, input_type, lower, without_gc
from remat_magic.engine.primal import Primal
from remat_magic.engine.sites import Identity, definition, keys_of
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import LiveEquations, Scope, scopes, walk
from remat_magic.records import ArgumentRole, GradientCall, Half, RematError

ITSELF = "none"
"""The key that asks for the derivative of the function itself."""


class InnerGradient:
    """A gradient that a program takes inside: its record, the function that it is of, and the program."""

    def __init__(self, call: GradientCall, function: Differentiated, given: Primal) -> None:
        self.call, self.function, self.given = call, function, given

    @functools.cached_property
    def primal(self) -> Primal:
        """The function that is differentiated, as a program of its own."""
        function, given = self.function, self.given
        shardings = given.shardings_of(function)
        return Primal(function.evaluate, function, True, False, given.calls, shardings, given.however_long)

    @functools.cached_property
    def _step(self) -> Step | str:
        return step_of(self.given, self.function)

    @property
    def step(self) -> Step | None:
        """The training step that takes it; None where that is not known."""
        return self._step if isinstance(self._step, Step) else None

    @property
    def why_no_step(self) -> str:
        """Why that is not known, as the end of a sentence; empty where it is."""
        return self._step if isinstance(self._step, str) else ""

    @functools.cached_property
    def others(self) -> tuple[InnerGradient, ...]:
        """Each gradient that the program takes, by its number: also those that have no record."""
        return tuple(InnerGradient(self.call, function, self.given) for function in self.given.gradients)

    @functools.cached_property
    def half(self) -> Forward:
        """Its forward half as it is written."""
        with self.primal.tracing():
            return self.primal.half(self.primal.function)

    @functools.cached_property
    def backward(self) -> Any:
        """Its backward half as it is written, closed."""
        with self.primal.tracing():
            return backward_half(self.half)

    @property
    def saved_bytes(self) -> int:
        """The bytes that the gradient saves as it is written, arguments left out."""
        jaxpr = _jax.open_jaxpr(self.half.closed)
        intermediates = {var for eqn in jaxpr.eqns for var in eqn.outvars}
        saved = {var for var in jaxpr.outvars[self.half.outputs :] if not _jax.is_literal(var)}
        return sum(_jax.nbytes(var.aval) for var in intermediates & saved)


def inner_gradients(primal: Primal) -> tuple[InnerGradient, ...]:
    """The gradients that a program takes inside; calls of one function are one.

    That is the first of which the program gives back what may be the gradient, or else the first. The dearest come
    first, and those that stand inside the function of another one after it: what they save is part of what that one
    saves.
    """
    calls: set[tuple[str, int]] = set()
    transposed: set[int] = set()  # by the identity of a traceback
    for scope, eqn in walk(primal.closed, once=True) if primal.gradients else ():
        half = half_of(eqn)
        if half is not None:
            calls.add(half)
            if half[0] == "forward" and _is_returned(scope, eqn.outvars[-1]):  # by who returns what jax.vjp gives
                calls.add(("backward", half[1]))
        elif "transpose(" in _jax.name_stack(eqn):
            transposed.add(id(_jax.traceback_of(eqn)))
    # What is differentiated and never pulled back is no gradient, nor is what jax.eval_shape is called with.
    functions = {
        number: inner
        for number, inner in enumerate(primal.gradients)
        if ("backward", number) in calls
        or (("forward", number) not in calls and not transposed.isdisjoint(_tracebacks(inner)))
    }
    first: dict[Identity, Differentiated] = {}
    given_back: set[Identity] = set()
    outputs = _given_back(primal) if functions else ()
    places: dict[int, tuple[Identity, int]] = {}  # by the identity of a traceback
    for number, inner in functions.items():
        first.setdefault(inner.who, inner)
        # A step may attack its examples first, by gradients of the same loss in these.
        if inner.who not in given_back and _is_among(outputs, inner):
            given_back.add(inner.who)
            first[inner.who] = inner
        for traceback in _tracebacks(inner):
            places[traceback] = inner.who, number  # inner ones last: outer ones have their equations
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
    gradients = list[InnerGradient]()
    for who, inner in first.items():
        call = GradientCall(keys[who], who[0], definition(who), paths.get(who, ()), times.get(who, 1), inner.wrt)
        gradients.append(InnerGradient(call, inner, primal))
    if len(gradients) > 1:
        gradients.sort(key=lambda gradient: (gradient.function.depth, -gradient.saved_bytes))
    return tuple(gradients)


def _tracebacks(inner: Differentiated) -> Iterator[int]:
    """The identities of the tracebacks of a function's equations, which those of its gradient have too."""
    return (id(_jax.traceback_of(eqn)) for eqn in _jax.open_jaxpr(inner.closed).eqns)


def _is_returned(scope: Scope, var: Any) -> bool:
    """Whether the program returns a value, from however many calls."""
    while var in scope.jaxpr.outvars:
        if scope.parent is None:
            return True
        var = scope.eqn.outvars[scope.jaxpr.outvars.index(var)]
        scope = scope.parent
    return False


def choose(
    primal: Primal, gradients: Sequence[InnerGradient], key: str | None, differentiate: bool
) -> InnerGradient | None:
    """The gradient that a trace is of, of those that a function takes inside; None for its own derivative.

    ``key`` is that of the one that is wanted, or ``ITSELF``. ``differentiate``: something else says that the
    function itself is to be differentiated.
    """
    if key is None:
        return gradients[0] if gradients and not differentiate and _is_step(primal, gradients) else None
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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A training step around a gradient.

    Attributes:
        given: the step as it was traced; calls stand in its jaxpr for the halves of the gradients that it takes
            (``half_of`` knows them).
        roles: what each input is to the gradient.
        constants: the same of arrays that it closes over, as a trainer's own are, by ``Scope.constant_keys``; what the
            gradient reads besides, such as a mask, is left out.
        donated: for each input whether its memory may be written over.
    """

    given: Primal
    roles: tuple[ArgumentRole, ...]
    constants: Mapping[int, ArgumentRole]
    donated: tuple[bool, ...]

    @property
    def closed(self) -> Any:
        """Its closed jaxpr."""
        return self.given.updating

    def donating(self, arguments: Collection[str]) -> Step:
        """The same step that may write over some arguments, too."""
        leaves = self.given.signature.arrays
        pairs = zip(self.donated, leaves, strict=True)
        return replace(self, donated=tuple(yes or leaf.argument in arguments for yes, leaf in pairs))


class Halves(NamedTuple):
    """Both halves of a gradient in a step, the backward one closed, with where its operations stand and its inputs."""

    forward: Forward
    backward: Any
    provenances: Provenances
    arguments: tuple[str, ...]


def _examples_outside(given: Primal, function: Differentiated) -> int:
    """For how many examples a gradient is taken that is known for one: a ``vmap`` maps a ``jit`` or loop around it.

    Such a body is traced for one example first, and mapped when it stands there.
    """
    wanted = ("forward", given.gradients.index(function))
    leaves = [*function.constants.values(), *function.primals]
    return max(
        (
            math.prod(atom.aval.shape) // (math.prod(leaf.value.shape) or 1)
            for _, eqn in walk(given.updating, once=True)
            if half_of(eqn) == wanted
            for atom, leaf in zip(eqn.invars[len(eqn.invars) - len(leaves) :], leaves, strict=True)
        ),
        default=1,
    )


def step_of(given: Primal, function: Differentiated) -> Step | str:
    """The step that differentiates a function; else, for a sentence, why it is not known."""
    number = given.gradients.index(function)
    calls = {half_of(eqn): (scope, eqn) for scope, eqn in walk(given.updating, once=True)}
    examples = max(_examples_outside(given, inner) for inner in given.gradients)
    if examples > 1:
        return f"jax.vmap maps a call around it over {examples} examples: shapes and bytes are of one example"
    if function.depth:
        return f"{function.who[0]} is differentiated inside of what is differentiated itself"
    if ("forward", number) in calls and ("backward", number) not in calls:
        return "its backward pass is not in there: what jax.vjp gives is returned"
    if apart := _halves_apart(given):
        whose = "its" if number in apart else "another gradient's"
        return f"{whose} backward pass runs in a loop or a branch that its forward pass is outside of"
    if ("backward", number) not in calls:
        if _jax.has_effects(function.closed):
            return f"{function.who[0]} writes to what is outside of it, a jax.ref or the like"
        return "the gradient is differentiated itself, or mapped by what is not jax.vmap"
    scope, eqn = calls["forward", number]
    primals = len(function.primals)
    operands = eqn.invars[len(eqn.invars) - primals - len(function.constants) :]
    parameters, captured = _behind(scope, operands[len(operands) - primals :])
    batch, read = _behind(scope, operands[: len(operands) - primals])
    count = len(given.types)
    roles: list[ArgumentRole] = [
        "parameter" if index in parameters else "batch" if index in batch else "state" for index in range(count)
    ]
    read_inside = {*read, *map(id, _jax.consts_of(function.closed))} - captured.keys()
    constants: dict[int, ArgumentRole] = {
        key: "parameter" if key in captured else "state"
        for around in scopes(given.updating, lambda eqn: half_of(eqn) is None)
        for key in around.constant_keys.values()
        if key not in read_inside
    }
    jaxpr = _jax.open_jaxpr(given.updating)
    donated = {atom for eqn in jaxpr.eqns for atom in _jax.donated(eqn) if not _jax.is_literal(atom)}
    return Step(given, tuple(roles), constants, tuple(var in donated for var in jaxpr.invars))


def _halves_apart(given: Primal) -> set[int]:
    """The numbers of the gradients whose backward half is in another loop's or branch's body than the forward half."""
    around: dict[tuple[Half, int], set[int]] = {}
    # Each call of a jitted function counts: one may be in a loop, and another one outside.
    for scope, eqn in walk(given.updating, lambda eqn: half_of(eqn) is None):
        half = half_of(eqn)
        if half is not None:
            while scope.parent is not None and scope.body is not None and scope.body.inlines:
                scope = scope.parent
            around.setdefault(half, set()).add(id(scope.eqn))
    return {
        number
        for (half, number), bodies in around.items()
        if half == "backward" and not bodies <= around.get(("forward", number), bodies)
    }


def lowered_step(
    given: Primal, step: Step, applied: Callable[..., Any], shardings: Sequence[Any], platform: str | None
) -> tuple[Any, jax.stages.Lowered, tuple[int, ...]]:
    """The jaxpr of a step under a policy, the same lowered, and the positions of the arguments that it writes over.

    ``applied`` is the step with the policy in it, ``platform`` what to lower for; None for where the arguments are.
    """
    whole = Primal(applied, given.signature, given.has_aux, look_inside=False, names=given.names)
    left = Counter(map(_kind, whole.updating.out_avals))
    donated = list[int]()  # those only that an output fits into, as JAX does: it warns of others
    for number, aval in enumerate(whole.types):
        if step.donated[number] and left[_kind(aval)]:
            left[_kind(aval)] -= 1
            donated.append(number)
    program, out_shardings = whole.updating, None
    # XLA makes another program of a jitted function that is called in one than of the function itself.
    called = _jax.called_whole(program)
    if called and all(None in pair or pair[0] == pair[1] for pair in zip(shardings, called[1], strict=True)):
        program, wanted_shardings, out_shardings = called
        shardings = [own or as_wanted for own, as_wanted in zip(shardings, wanted_shardings, strict=True)]
    types = [input_type(aval, sharding) for aval, sharding in zip(whole.types, shardings, strict=True)]
    with whole.tracing(), without_gc():
        return *lower(_jax.as_function(program), types, platform, donated, out_shardings), tuple(donated)


def _behind(scope: Scope, atoms: Iterable[Any]) -> tuple[set[int], dict[int, Any]]:
    """The inputs of the whole program that values depend on, and the keys of constants with their types.

    What a loop carries round is left out.
    """
    inputs: set[int] = set()
    constants: dict[int, Any] = {}
    visited: set[tuple[int, int]] = set()
    todo = [(scope, atom) for atom in atoms]
    while todo:
        here, atom = todo.pop()
        if _jax.is_literal(atom) or (id(here), id(atom)) in visited:
            continue
        visited.add((id(here), id(atom)))
        maker = here.makers.get(atom)
        index = here.inputs.get(atom)
        if atom in here.constant_keys:
            constants[here.constant_keys[atom]] = atom.aval
        elif maker is not None:
            todo += [(here, operand) for operand in maker[0].invars]
        elif index is not None and here.parent is None:
            inputs.add(index)
        elif index is not None and here.parent is not None and here.body is not None:
            operand = here.body.operands[index]
            if operand is not None:
                todo.append((here.parent, here.eqn.invars[operand]))
    return inputs, constants


def _is_step(primal: Primal, gradients: Sequence[InnerGradient]) -> bool:
    """Whether a program uses gradients that it takes, as a training step does, rather than being one to differentiate.

    A step gives back something like what it differentiates (new parameters, or the gradient), or like all that it makes
    that of (parameters that it casts, or puts into one vector), or its outputs do not depend on the gradient at all
    (flax's nnx updates a model in place). A loss of which a gradient is a part, such as a
    penalty or a physics-informed residual, does neither; what returns one number of which a gradient is a part is one.
    """
    if not _uses_gradients(primal.closed):
        return True
    outputs = _given_back(primal)
    return [aval.shape for aval in outputs] != [()] and any(
        _is_among(outputs, gradient.function) or _sources_are_among(outputs, primal, gradient.function)
        for gradient in gradients
    )


def _uses_gradients(closed: Any, wanted: Sequence[bool] | None = None) -> bool:
    """Whether the outputs of a program, or those ``wanted`` of them, depend on gradients that it takes."""
    alive = LiveEquations(_jax.open_jaxpr(closed), wanted)
    return any(alive(eqn) and "transpose(" in _jax.name_stack(eqn) for _, eqn in walk(closed, once=True))


def _given_back(primal: Primal) -> Sequence[Any]:
    """The types of what a program returns, and of what it puts into its arguments where gradients are in that.

    Without gradients these are what nnx puts together again, whether it is changed or not.
    """
    returned, all_ = primal.closed.out_avals, primal.updating.out_avals
    put = [number >= len(returned) for number in range(len(all_))]
    return all_ if any(put) and _uses_gradients(primal.updating, put) else returned


def _is_among(outputs: Sequence[Any], function: Differentiated) -> bool:
    """Whether something like all that a function is differentiated in is among the results of a program."""
    wanted = _differentiated_types(function)
    # A number per example is no gradient by its shape: any column of results has it.
    mapped = bool(function.vmaps or function.devices) and any(shape for shape, _ in wanted)
    copies = function.copies if mapped else 0
    return bool(wanted) and all(
        sum(_is_like(aval, kind, copies) for aval in outputs) >= count for kind, count in wanted.items()
    )


def _sources_are_among(outputs: Sequence[Any], primal: Primal, function: Differentiated) -> bool:
    """Whether values of the types of all arrays that a function is differentiated in, or that these are made of."""
    if (function.vmaps or function.devices) and not any(shape for shape, _ in _differentiated_types(function)):
        return False  # a derivative in each example's number is like these, too
    wanted, number = Counter[tuple[Any, Any]](), primal.gradients.index(function)
    for scope, eqn in walk(primal.closed, once=True):
        if half_of(eqn) == ("forward", number):
            inputs, constants = _behind(scope, eqn.invars[len(eqn.invars) - len(function.primals) :])
            types = (*(primal.types[index] for index in inputs), *constants.values())
            wanted = Counter(_kind(aval) for aval in types if _jax.is_inexact(aval))
            break
    return bool(wanted) and not wanted - Counter(map(_kind, outputs))


def _differentiated_types(function: Differentiated) -> Counter[tuple[Any, Any]]:
    """The types of what is differentiated, of one example and on one device, and how many there are of each."""
    primals = zip(function.primals, function.closed.in_avals, strict=True)
    return Counter(_kind(aval) for leaf, aval in primals if leaf.differentiated)


def _is_like(aval: Any, kind: tuple[Any, Any], copies: int) -> bool:
    """Whether a value is of a shape and dtype, or of several copies of that: each of an example, or on a device."""
    shape, dtype = kind
    if aval.dtype != dtype or aval.shape == shape:
        return aval.dtype == dtype
    if not copies or len(aval.shape) < len(shape):
        return False
    multiple, rest = divmod(math.prod(aval.shape), math.prod(shape) or 1)
    if multiple == 1:  # of a single one, in an axis of its own
        return not rest and len(aval.shape) > len(shape) and _without_ones(aval.shape) == _without_ones(shape)
    return multiple > 1 and not rest and copies % multiple == 0


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _kind(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype
