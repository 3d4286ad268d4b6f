"""How the values of a program are spread over a mesh: by its types, by its ``shard_map`` calls, or by XLA's word.

Types of an explicit mesh tell it of every value. Outside of a ``shard_map`` on an automatic mesh they tell nothing:
there XLA says it. Where it cannot, the specs of a ``shard_map`` tell of what goes in and out of it, and from
there it is followed through what keeps a shape as it is: elementwise operations, views, calls and loops. Of anything
else nothing is known, and every device is taken to have all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remat_magic import _jax
from remat_magic.jaxprs.walk import Scope, TypeOf, walk

_ROUNDS = 8  # of following values through a program: deeper nests of loops and calls are none that people write


class Spread:
    """Tells the types of variables, with how they are spread over a mesh where that is known of them."""

    def __init__(self) -> None:
        self._types: dict[Any, Any] = {}

    def __call__(self, atom: Any) -> Any:
        """The type of a variable or literal."""
        return atom.aval if _jax.is_literal(atom) else self._types.get(atom, atom.aval)

    @property
    def known(self) -> bool:
        """Whether it knows more than the variables' own types."""
        return bool(self._types)

    def take(self, other: Spread) -> None:
        """Know what another one knows."""
        self._types.update(other._types)

    def learn(self, jaxpr: Any, given: Mapping[Any, Any] | None = None) -> None:
        """Find out about the variables of a jaxpr at any depth; ``given`` are types that are known of some."""
        self._types.update(given or {})
        equations = list(walk(jaxpr))
        for _, eqn in reversed(equations):  # what is inside of another first
            for var, aval in _jax.spec_types(eqn, self):
                self._types.setdefault(var, aval)
        before = -1
        for number in range(_ROUNDS):
            if len(self._types) == before:
                break
            before = len(self._types)
            for scope, eqn in equations if number % 2 == 0 else reversed(equations):
                for one, other, stacked in _alike(scope, eqn):
                    self._follow(one, other, stacked)

    def _follow(self, one: Any, other: Any, stacked: int) -> None:
        """Take what is known of one variable for another; the first has ``stacked`` more dimensions in front."""
        if one in self._types and other not in self._types:
            self._types[other] = _jax.spread_like(other.aval, self._types[one], skip=stacked)
        elif other in self._types and one not in self._types:
            self._types[one] = _jax.spread_like(one.aval, self._types[other], lead=stacked)


class Propagated(Spread):
    """Tells the types of variables as XLA spreads them over an automatic mesh.

    ``shardings`` has XLA's own sharding of each variable, over the mesh as it is on the machine; ``gradients`` is how
    what surrounds a backward half has its results spread, where something does. ``communicated`` has for each program
    that was asked about, one after another, how often a device takes part in each collective, None where unknown.
    """

    def __init__(self, gradients: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.gradients = gradients
        self.shardings: dict[Any, Any] = {}
        self.communicated: list[Counter[_jax.CompiledCollective] | None] = []

    def ask(self, closed: Any, shardings: Sequence[Any], results: Sequence[Any] | None = None) -> None:
        """Find out about the variables of a closed jaxpr, with its inputs and results spread so (None: as XLA likes).

        JAX and XLA may raise whatever they like where it cannot be compiled.
        """
        shardings_inside, communicated = _jax.propagated(closed, shardings, results)
        self.communicated.append(communicated)
        self.shardings.update(shardings_inside)
        self.learn(
            closed, {var: _jax.type_in_mesh(var.aval, xla.mesh, xla.spec) for var, xla in shardings_inside.items()}
        )

    def of(self, atoms: Iterable[Any]) -> list[Any]:
        """XLA's sharding of each variable; None for literals, and for what XLA does not tell."""
        return [None if _jax.is_literal(atom) else self.shardings.get(atom) for atom in atoms]


def _alike(scope: Scope, eqn: Any) -> Iterator[tuple[Any, Any, int]]:
    """The pairs of variables that an equation spreads alike, and how many dimensions the first has more."""
    if _jax.is_shard_map(eqn):
        return
    pairs = list[tuple[Any, Any]]()
    for inner in scope.inner(eqn):
        pairs += [(atom, var) for var, came in inner.before.items() for _, atom in came]
        pairs += [(result, var) for var, gone in inner.after.items() for there, result in gone if there is scope]
    if _jax.keeps_shape(eqn):
        pairs += [(atom, var) for atom in eqn.invars for var in eqn.outvars]
    for one, other in pairs:
        if _jax.is_literal(one) or _jax.is_literal(other) or not getattr(other.aval, "ndim", 0):
            continue
        if one.aval.shape == other.aval.shape:
            yield one, other, 0
        elif _jax.is_scan(eqn) and one.aval.shape[1:] == other.aval.shape:
            yield one, other, 1


def unknown_values(jaxpr: Any, type_of: TypeOf) -> int:
    """How many values are made outside of every ``shard_map`` of which it is not known how they are spread."""
    return sum(
        _jax.mesh_devices(type_of(var)) == 1 and getattr(var.aval, "size", 0) > 1
        for scope, eqn in walk(jaxpr, lambda eqn: not _jax.is_shard_map(eqn), once=True)
        if not _jax.is_shard_map(eqn) and not scope.inner(eqn)
        for var in eqn.outvars
    )
