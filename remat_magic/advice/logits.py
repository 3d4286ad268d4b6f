"""The logits of a loss: found by what a program does with a product, by whatever function of a library it is done.

A cross-entropy takes exponentials of a product of matrices, adds them up over the classes, and takes the logarithm of
what that comes to. The softmax of an attention does not: another product reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from remat_magic import _jax
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.walk import Scope, makers, readers, walk
from remat_magic.records import LiveValue, Residual, SourceSpan

_Operation = tuple[Scope, Any]


@dataclass(frozen=True, slots=True)
class Logits:
    """A product whose softmax is the loss."""

    type: str  # as JAX writes it
    elements: frozenset[int]  # how many numbers it has, and what is taken out of it, in one turn of the loops around it
    turns: int  # how often the product runs in the loops around it; 2 where that is not known
    source: SourceSpan | None  # the line that takes the softmax
    sources: frozenset[SourceSpan]  # those of all operations on values of that size

    def saved(self, rows: Iterable[Residual]) -> int:
        """The bytes of residuals that are values of the logits' size, of the same lines."""
        return sum(
            row.nbytes
            for row in rows
            if row.kind == "intermediate" and row.kept and self._is_mine(row.type, (o.source for o in row.origins))
        )

    def alive(self, values: Iterable[LiveValue]) -> int:
        """The bytes that such values and their gradients take, of all that is in use at some moment."""
        inner = (value for value in values if value.kind != "gradient")  # that of a weight can be as large
        return sum(value.nbytes for value in inner if self._is_mine(value.type, (value.source,)))

    def _is_mine(self, text: str, sources: Iterable[SourceSpan | None]) -> bool:
        shape = [int(size) for size in re.findall(r"\d+", text.partition("[")[2])]
        # A loop stacks the values of its turns: there the last dimensions are those of one.
        sizes = (math.prod(shape[first:]) for first in range(len(shape) if self.turns != 1 else 1))
        return not self.elements.isdisjoint(sizes) and not self.sources.isdisjoint(sources)


def logits_of(facts: Facts) -> list[Logits]:
    """The products of a traced function whose softmax is a loss, those of one line that are alike once."""
    by_product: dict[int, Logits] = {}
    for scope, eqn in walk(facts.engine.primal.provenances.closed):
        if _jax.is_exponential(eqn):
            for product, logits in _read(facts, scope, eqn):
                by_product.setdefault(id(product), logits)
    return list(dict.fromkeys(by_product.values()))


def _read(facts: Facts, scope: Scope, exponential: Any) -> Iterator[tuple[Any, Logits]]:
    """The product that an exponential is of and what it is of, where it is one of logits."""
    elements = _size(exponential.outvars[0])
    classes = _classes(scope, exponential, elements)
    alike = _of_that_size(scope, exponential, elements, classes) if classes > 1 else None
    if alike is None:
        return
    spans = [(inner, eqn, facts.engine.primal.provenances.of(eqn, inner.chain)) for inner, eqn in alike]
    sources = {id(eqn): place.source for _, eqn, place in spans if place is not None and place.source is not None}
    # What a rule of the user's keeps stands where the function of that rule is called.
    rules = {id(rule): (around, rule) for inner, _ in alike for around, rule in _rules_around(inner)}
    places = [facts.engine.primal.provenances.of(rule, around.chain) for around, rule in rules.values()]
    calls = {place.source for place in places if place is not None and place.source is not None}
    for inner, eqn in alike:
        if _jax.is_matmul(eqn) and _near(_size(eqn.outvars[0]), elements):
            text, sizes = _jax.type_text(eqn.outvars[0].aval), frozenset({elements, _size(eqn.outvars[0])})
            source, all_sources = sources.get(id(exponential)), frozenset({*sources.values(), *calls})
            yield eqn, Logits(text, sizes, inner.nesting[1] or 2, source, all_sources)


def _rules_around(scope: Scope) -> Iterator[_Operation]:
    """The calls of functions with a derivative rule of their own that a scope is in."""
    while scope.parent is not None:
        if _jax.is_custom_rule(scope.eqn):
            yield scope.parent, scope.eqn
        scope = scope.parent


def _size(atom: Any) -> int:
    return int(getattr(atom.aval, "size", 0))


def _classes(scope: Scope, exponential: Any, elements: int) -> int:
    """How many exponentials make one sum of which a logarithm is taken; 0 where none is."""
    for inner, eqn in _onward(scope, exponential, lambda eqn: _size(eqn.outvars[0]) == elements):
        total = _size(eqn.outvars[0])
        if _jax.is_sum(eqn) and 0 < total < elements:
            after = _onward(inner, eqn, lambda eqn: not _jax.is_logarithm(eqn))
            if any(_jax.is_logarithm(reader) for _, reader in after):
                return elements // total
    return 0


def _onward(scope: Scope, eqn: Any, through: Any) -> Iterator[_Operation]:
    """What reads the results of an operation, and those of its readers, but of products, logarithms and other ends."""
    todo, visited = [(scope, eqn)], {(id(scope), id(eqn))}
    while todo:
        here, operation = todo.pop()
        for var in operation.outvars:
            for inner, reader in readers(here, var):
                if (id(inner), id(reader)) in visited:
                    continue
                visited.add((id(inner), id(reader)))
                yield inner, reader
                if through(reader) and not _jax.is_matmul(reader) and not _jax.is_logarithm(reader):
                    todo.append((inner, reader))


def _near(size: int, elements: int) -> bool:
    """Whether values of a size can be what others were taken out of, as all but the last of the logits are."""
    return elements <= size < 2 * elements


def _of_that_size(scope: Scope, eqn: Any, elements: int, classes: int) -> list[_Operation] | None:
    """All operations on values of about one size that one is connected with, up to the products that make them.

    None where a product makes something larger of them than one number for each row: they are no loss.
    """
    operations: dict[tuple[int, int], _Operation] = {(id(scope), id(eqn)): (scope, eqn)}
    todo = [(scope, eqn)]
    while todo:
        here, operation = todo.pop()
        size = max(map(_size, operation.outvars), default=0)
        if _jax.is_matmul(operation) and not _near(size, elements) and size * classes > elements:
            return None
        connected: list[_Operation] = []
        if not (_jax.is_matmul(operation) and _near(size, elements)):
            near = (atom for atom in operation.invars if _near(_size(atom), elements))
            before = (maker for atom in near for maker in makers(here, atom))
            connected += [(maker.scope, maker.eqn) for maker in before if maker.eqn is not None]
        if _near(size, elements):
            connected += [operation for var in operation.outvars for operation in readers(here, var)]
        for inner, neighbour in connected:
            key = id(inner), id(neighbour)
            if key not in operations:
                operations[key] = (inner, neighbour)
                todo.append((inner, neighbour))
    return list(operations.values())
