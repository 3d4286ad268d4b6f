"""The primal program: the user's function, run once as Python, and the settings of JAX that it was traced under.

And what is inside each place of it: which operations, and how much they make. Read off its jaxpr.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from remat_magic import _jax, policies
from remat_magic.engine.calls import Calls, recording
from remat_magic.engine.gradients import Differentiated, find_gradients, half_of
from remat_magic.engine.halves import Forward, ask_xla, differentiating, forward_half
from remat_magic.engine.namespaces import Namespace
from remat_magic.engine.possible import Intervals, PossibleSites, possible_sites
from remat_magic.engine.signature import Signature, can_be_output, flatten_outputs
from remat_magic.engine.sites import SiteTable, find_sites
from remat_magic.engine.vmaps import Vmaps
from remat_magic.jaxprs.one_device import Propagated, Spread, unknown_values
from remat_magic.jaxprs.provenance import Provenances
from remat_magic.jaxprs.walk import walk
from remat_magic.records import RematError

# Operations of a program that XLA propagates shardings in unasked: a second for each thousand, and each choice
# of a policy about as long again.
_LARGE = 2000


class Answer(NamedTuple):
    """How XLA shards values; else why that is not known, and whether only because it takes long."""

    spread: Propagated | None
    why_not: str = ""
    takes_long: bool = False


class Primal:
    """A function traced once for some arguments.

    ``look_inside``: the gradients that it takes are looked for, and calls stand for these in its jaxpr. ``calls`` were
    recorded where the Python of the function ran before. ``shardings`` are of the array leaves and of the gradients, by
    default those that the arguments have, and none. ``however_long``: XLA propagates its shardings, however large.
    ``names`` are what the names of the function stand for, by default what they do now. The function may raise what it
    likes.

    ``closed`` goes from the array leaves to the outputs and then the auxiliary outputs that are arrays; ``updating``
    has what the function puts into its arguments as further outputs. ``function`` is one function object that evaluates
    it: JAX caches by identity. ``gradients`` are the functions that it differentiates inside, outer ones first,
    ``calls`` the calls of functions that it makes, ``vmaps`` its ``vmap`` calls by key, ``mesh`` the axes and sizes of
    the mesh that is set around it. ``smaller`` has by the key of a place in parts the program for such a part of the
    batch, and its calls.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        signature: Signature | Differentiated,
        has_aux: bool,
        look_inside: bool = True,
        calls: Calls | None = None,
        shardings: tuple[Sequence[Any], Sequence[Any]] | None = None,
        however_long: bool = False,
        names: Namespace | None = None,
    ) -> None:
        self.fun, self.signature = fun, signature
        self.however_long = however_long
        self.names = Namespace(fun) if names is None else names
        _jax.require()
        self.remat3 = _jax.remat3()
        self.has_aux = has_aux
        self._x64 = _jax.x64()
        # What `with` blocks set is a thread's own, and a widget retraces in another thread.
        self._settings = signature.settings or _jax.thread_settings()
        self._generation = _jax.Generation()
        self._answer: Answer | None = None
        self.types = tuple(leaf.value for leaf in signature.arrays)
        self.arguments = tuple(leaf.name for leaf in signature.arrays)
        given = tuple(leaf.sharding for leaf in signature.arrays)
        self.shardings, self._of_gradients = (given, None) if shardings is None else shardings
        self._given_so = shardings is not None or not isinstance(signature, Differentiated)
        self.outputs = self.auxiliary = 0
        self._odd: Any = None  # an output that is no array
        self.smaller: dict[str, tuple[Any, Calls]] = {}
        self.gradients: tuple[Differentiated, ...] = ()
        recorded = recording() if calls is None else contextlib.nullcontext(calls)
        vmaps = Vmaps()
        as_it_was, naming = self.names.as_it_was(), differentiating(self.name)
        with self.tracing(), as_it_was, naming, recorded as self.calls, _jax.mapping(vmaps):
            self.mesh = _jax.mesh_in_force()

            def jaxpr() -> Any:
                return self.signature.jaxpr(fun, self._flat)

            if look_inside:
                self.updating, self.gradients = find_gradients(jaxpr, self.calls)
            else:
                self.updating = jaxpr()
        self.vmaps = vmaps.found()
        self.closed = _jax.with_outputs(self.updating, self.outputs + self.auxiliary)
        stale = _jax.stale_traces(self._generation, fun, self.closed, self._is_as_jax_makes_it)
        self.stale = tuple(dict.fromkeys(name for _, name in stale))
        self.function = _jax.as_function(self.closed)

    def _is_as_jax_makes_it(self, jaxpr: Any) -> bool:
        """Whether a jaxpr holds no stand-in for a gradient, which JAX would write in another way."""
        return not self.gradients or not any(
            half_of(eqn) or "jvp(" in _jax.name_stack(eqn) for _, eqn in walk(jaxpr, once=True)
        )

    @functools.cached_property
    def provenances(self) -> Provenances:
        """Where its operations stand."""
        with _jax.reading():
            return Provenances(self.closed, self.name)

    @functools.cached_property
    def table(self) -> SiteTable:
        """Its checkpoint sites."""
        with _jax.reading():
            return find_sites(self.closed, self.provenances.spans, policies.describe)

    @functools.cached_property
    def possible(self) -> PossibleSites:
        """The places that could have a checkpoint and have none."""
        with _jax.reading():
            return possible_sites(self.closed, self.calls, self.table)

    @functools.cached_property
    def contents(self) -> Mapping[str, Contents]:
        """What is inside each place, those that have a checkpoint and those that could, by key; see ``Contents``."""
        with _jax.reading():
            return contents(self)

    def _flat(self, output: Any) -> list[Any]:
        leaves, aux = flatten_outputs(output, self.has_aux, self.name)
        # What goes in as it is may come out, as an equinox model's functions do.
        given = {id(leaf.value) for leaf in self.signature.leaves if not leaf.is_array}
        self._odd = next((leaf for leaf in leaves if not can_be_output(leaf) and id(leaf) not in given), None)
        leaves = [leaf for leaf in leaves if can_be_output(leaf)]
        auxiliary_leaves = [leaf for leaf in aux if can_be_output(leaf)]
        self.outputs, self.auxiliary = len(leaves), len(auxiliary_leaves)
        return [*leaves, *auxiliary_leaves]

    def require_differentiable(self) -> None:
        """Make sure that there is something to differentiate, and something that has a derivative."""
        self.signature.require_differentiable()
        if self._odd is not None:
            raise RematError(
                f"{self.name} returns a {type(self._odd).__name__}, which is not an array: return arrays, or set "
                "has_aux=True and return it as auxiliary data."
            )
        types = self.output_types
        if not any(_jax.is_inexact(aval) for aval in types):
            returned = ", ".join(map(_jax.type_text, types)) or "nothing"
            raise RematError(
                f"{self.name} cannot be differentiated: it returns {returned}, and only floating-point outputs "
                "have a derivative."
            )

    def half(self, function: Callable[..., Sequence[Any]]) -> Forward:
        """The forward half of ``function``, a form of this program."""
        signature = self.signature
        half = forward_half(
            function, self.types, signature.differentiated, self.outputs, self.auxiliary, signature.vmaps
        )
        if self.devices == 1:
            return half
        return replace(half, type_of=self._spread(half.closed))

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.signature.function

    @property
    def text(self) -> str:
        """One line: ``loss(params: 3 leaves 192 B, x f32[4]) -> f32[]``."""
        types = [_jax.type_text(aval) for aval in self.output_types]
        return self.signature.text(types[0] if len(types) == 1 else f"({', '.join(types)})")

    @property
    def output_types(self) -> tuple[Any, ...]:
        """The types of the outputs, auxiliary ones left out."""
        return tuple(self.closed.out_avals[: self.outputs])

    @contextlib.contextmanager
    def tracing(self, remat3: bool | None = None) -> Iterator[None]:
        """Trace as this program was traced: with the settings of its thread, apart from the user's cached traces.

        ``remat3`` is jax_remat3, where it is to be other than it was.
        """
        used = self.remat3 if remat3 is None else remat3
        try:
            with self._settings(), _jax.tracing(self._generation, used, self._x64):
                yield
        except (KeyboardInterrupt, MemoryError, RecursionError):
            # What is broken off can stay in JAX's caches as begun (jaxlib of 0.10 and 0.12), and asking for the same
            # again then raises "RecursionError: Recursively calling": ask other caches from now on.
            self._generation = _jax.Generation()
            raise

    def tracing_again(self) -> contextlib.AbstractContextManager[None]:
        """Trace the function for other arguments, with the settings of whoever calls it but for jax_remat3."""
        return _jax.tracing(self._generation, self.remat3, _jax.x64())

    def site_of(self, eqn: Any) -> str:
        """The key of the site that a checkpoint equation of the program belongs to; empty for none."""
        return self.table.key_of(eqn, self.provenances.spans)

    def _spread(self, closed: Any) -> Spread:
        """How the values of a jaxpr with this program's inputs are spread over a mesh."""
        if self.answer.spread is not None:
            propagated = Propagated(self._of_gradients)
            ask_xla(propagated, closed, self.shardings)
            return propagated
        spread, given = Spread(), dict[Any, Any]()
        if not self.maps_devices:  # types tell, or nothing does
            return spread
        for var, sharding in zip(_jax.open_jaxpr(closed).invars, self.shardings, strict=False):
            if _jax.automatic_devices(sharding) > 1 and hasattr(sharding, "spec"):
                given[var] = _jax.type_in_mesh(var.aval, sharding.mesh, sharding.spec)
        spread.learn(closed, given)
        return spread

    def of_any_size(self) -> Primal:
        """The same program, whose shardings XLA propagates of whatever size it is."""
        other: Primal = copy.copy(self)
        other._generation, other._answer, other.however_long = _jax.Generation(), None, True
        other.__dict__.pop("unplaced", None)
        return other

    @property
    def answer(self) -> Answer:
        """How XLA shards the values over an automatic mesh, or why that is not known; nothing where types have it."""
        # No cached_property: in Python 3.11 all traces would wait for each other's compilations.
        if self._answer is None:
            self._answer = self._propagate()
        return self._answer

    def _propagate(self) -> Answer:
        if self.automatic_devices == 1:
            return Answer(None)
        if not self._given_so:
            return Answer(None, "it is not known how what is differentiated inside is given to it")
        if self.signature.vmaps:
            return Answer(None, "jax.vmap maps the gradient that it takes")
        if not self.however_long and sum(1 for _ in walk(self.closed, once=True)) > _LARGE:
            return Answer(
                None,
                f"it has more than {_LARGE:,} operations, which takes long; trace.of_one_device() asks all the "
                "same, and so does Ask XLA in the widget",
                takes_long=True,
            )
        propagated = Propagated()
        try:
            with self.tracing():
                ask_xla(propagated, self.closed, self.shardings)
        except RematError as error:
            return Answer(None, str(error).rstrip("."))
        return Answer(propagated)

    def shardings_of(self, gradient: Differentiated) -> tuple[list[Any], list[Any]] | None:
        """The shardings, by XLA, of what a gradient inside is given and of the gradients; None where not known."""
        if self.answer.spread is None:
            return None
        number = self.gradients.index(gradient)
        calls = {half_of(eqn): eqn for _, eqn in walk(self.closed, once=True)}
        forward, backward = (calls.get((half, number)) for half in ("forward", "backward"))
        if forward is None:
            return None
        given = forward.invars[len(forward.invars) - len(gradient.types) :]
        return self.answer.spread.of(given), self.answer.spread.of([] if backward is None else backward.outvars)

    @functools.cached_property
    def maps_devices(self) -> bool:
        """Whether a ``shard_map`` is in the program."""
        return any(_jax.is_shard_map(eqn) for _, eqn in walk(self.closed, once=True))

    @property
    def devices(self) -> int:
        """How many devices share the work as far as types, each ``shard_map`` and XLA tell; 1 without a mesh."""
        return max(self._explicit_devices, self.automatic_devices if self.answer.spread is not None else 1)

    @property
    def mesh_devices(self) -> int:
        """How many devices its mesh has, as far as the program and what is set around it tell; 1 without one."""
        of_arguments = map(_jax.devices_of, self.shardings)
        return max(self._explicit_devices, self.automatic_devices, math.prod(self.mesh.values()), *of_arguments)

    @functools.cached_property
    def unplaced(self) -> tuple[str, ...]:
        """The arguments of which nothing says how they are spread, where XLA decides about that."""
        if self.answer.spread is None:
            return ()
        # By a constraint inside of a body.
        constrained = {var for var, sharding in self.answer.spread.shardings.items() if any(sharding.spec)}
        placed = _jax.placed(self.closed) | constrained
        rows = zip(self.signature.arrays, self.shardings, _jax.open_jaxpr(self.closed).invars, strict=False)
        return tuple(
            leaf.name for leaf, sharding, var in rows if sharding is None and var.aval.shape and var not in placed
        )

    @functools.cached_property
    def _explicit_devices(self) -> int:
        atoms = (var for _, eqn in walk(self.closed, once=True) for var in eqn.outvars)
        spread = max((_jax.mesh_devices(var.aval) for var in (*_jax.open_jaxpr(self.closed).invars, *atoms)), default=1)
        mapped = (_jax.mapped_devices(eqn) for _, eqn in walk(self.closed, once=True)) if self.maps_devices else ()
        return max((spread, *mapped))

    @functools.cached_property
    def automatic_devices(self) -> int:
        """Over how many devices values are sharded without a word of it in their types."""
        in_equations = (_jax.automatic_devices_in(eqn) for _, eqn in walk(self.closed, once=True))
        return max((*map(_jax.automatic_devices, self.shardings), *in_equations), default=1)

    @property
    def untold_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that XLA may spread values over as well, in which neither types nor XLA tell of them.

        XLA's shardings are of values outside of a ``shard_map`` only.
        """
        if self.devices == 1:
            return ()
        equations = (
            eqn for _, eqn in walk(self.closed, once=True) if self.answer.spread is None or _jax.is_shard_map(eqn)
        )
        return tuple(sorted(set().union(*map(_jax.untold_axes, equations))))

    @property
    def unknown_values(self) -> int:
        """How many values outside of every ``shard_map`` count as replicated, since their sharding is not known."""
        if self.answer.spread is not None:
            return unknown_values(self.closed, self.answer.spread)
        return unknown_values(self.closed, self._spread(self.closed)) if self.maps_devices else 0

    @functools.cached_property
    def has_complex_values(self) -> bool:
        """Whether complex numbers are computed, which no policy can save."""
        return any(_jax.is_complex(var.aval) for _, eqn in walk(self.closed, once=True) for var in eqn.outvars)

    @functools.cached_property
    def has_custom_rules(self) -> bool:
        """Whether a custom derivative rule, which is Python and may hold names of its own, is called."""
        return any(_jax.is_custom_rule(eqn) for _, eqn in walk(self.closed, once=True))


@dataclass(slots=True)
class Contents:
    """What is inside a place.

    Attributes:
        operations: the identities of the tracebacks of its equations, at any depth.
        nbytes: of all floating-point values that these make, in all calls together. What autodiff saves is among them,
            or as large as one of them.
        calls: how many times the place stands in the program; what a loop repeats stands there once.
        runs: how often it runs; what a loop of unknown length repeats is taken to run once.
        depths: how deep the calls of each place inside it stand in each other, by key; 1 where they do not.
    """

    operations: set[int] = field(default_factory=set)
    nbytes: int = 0
    calls: int = 0
    runs: int = 0
    depths: dict[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """What goes away for good if the place saves nothing: all that it makes but for one run."""
        return self.nbytes * (1 - 1 / max(self.runs, 1))

    def add(self, other: Contents, runs: int) -> None:
        """Add what runs so many times."""
        self.operations |= other.operations
        self.nbytes += other.nbytes * runs
        for key, depth in other.depths.items():
            self.depths[key] = max(depth, self.depths.get(key, 0))


def contents(primal: Primal) -> dict[str, Contents]:
    """For each place of a program by its key, those that have a checkpoint and those that could have one.

    That of ``"function"`` is all there is.
    """
    intervals = Intervals(primal.closed, primal.calls)
    keys = {callee.who: key for key, callee in primal.possible.callees.items()}
    spans = primal.provenances.spans
    places: dict[str, Contents] = {"function": Contents(calls=1, runs=1)}
    whole: dict[int, Contents] = {}

    def inside(jaxpr: Any, around: Any, runs: int, again: bool) -> Contents:
        """What is inside a jaxpr; its places are added, as standing in the program only where it is not ``again``."""
        contents = [Contents() for _ in jaxpr.eqns]
        for eqn, content in zip(jaxpr.eqns, contents, strict=True):
            content.operations.add(id(_jax.traceback_of(eqn)))
            bodies = () if _jax.is_custom_rule(eqn) else _jax.bodies(eqn)
            if not bodies:
                content.nbytes = sum(_jax.nbytes(var.aval) for var in eqn.outvars if _jax.is_inexact(var.aval))
            for body in bodies:
                times = 1 if body.times is None else body.times
                counted = again or id(body.jaxpr) in whole
                content.add(inside(body.jaxpr, eqn, runs * times, counted), times)
            if _jax.is_checkpoint(eqn):
                place(primal.table.key_of(eqn, spans), [content], runs, again)
        for interval in reversed(intervals.of(jaxpr, around)):  # what is inside others first
            place(keys[interval.callee.who], contents[interval.first : interval.last], runs, again)
        total = whole[id(jaxpr)] = Contents()
        for content in contents:
            total.add(content, 1)
        return total

    def place(key: str, parts: list[Contents], runs: int, again: bool) -> None:
        content = places.setdefault(key, Contents())
        content.calls += not again
        content.runs += runs
        depth = 1 + max((part.depths.get(key, 0) for part in parts), default=0)
        for part in parts:
            content.add(part, runs)
            part.depths[key] = depth
        content.depths[key] = max(depth, content.depths.get(key, 0))

    places["function"].add(inside(_jax.open_jaxpr(primal.closed), None, 1, False), 1)
    return places
