"""What is saved for the backward pass, where each value comes from and who needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat_magic import _jax
from remat_magic.engine.halves import Forward
from remat_magic.jaxprs.provenance import Provenance, Provenances
from remat_magic.jaxprs.rewriting import is_given
from remat_magic.jaxprs.walk import Maker, Scope, makers, readers
from remat_magic.records import Kind, Origin, Reader, Residual


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved value: its variable in the forward jaxpr and the residual outputs that carry it."""

    atom: Any
    leaves: tuple[int, ...]


def saved_values(forward: Any, outputs: int) -> list[Saved]:
    """The saved values in the order in which JAX lists them: literals, constants, arguments, intermediates.

    Same as ``jax.ad_checkpoint.print_saved_residuals``: a value saved twice counts once, and ``reduce_precision``
    (which JAX puts on every residual) is looked through. The first ``outputs`` outputs of the forward jaxpr are the
    function's, the others the residuals.
    """
    jaxpr = _jax.open_jaxpr(forward)
    through = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if _jax.is_rounding(eqn)}
    literals: list[Saved] = []
    leaves: dict[Any, list[int]] = {}
    for leaf, atom in enumerate(jaxpr.outvars[outputs:]):
        if not _jax.is_literal(atom):
            while not _jax.is_literal(atom) and atom in through:
                atom = through[atom]
        if _jax.is_literal(atom):
            literals.append(Saved(atom, (leaf,)))
        else:
            leaves.setdefault(atom, []).append(leaf)
    bound = [
        *jaxpr.constvars,
        *jaxpr.invars,
        *(var for eqn in jaxpr.eqns for var in eqn.outvars),
    ]
    return literals + [Saved(var, tuple(leaves[var])) for var in bound if var in leaves]


def locate(provenances: Provenances, scope: Scope, eqn: Any) -> Provenance:
    """The primal place of an equation, else what its own traceback and nesting tell."""
    path, times = scope.nesting
    provenance = provenances.of(eqn, scope.chain)
    if provenance is not None:
        # JAX hoists what does not change out of a loop: where an equation stands now says how often it runs.
        return provenance if provenance.times == times else replace(provenance, times=times)
    frames = provenances.spans.frames(_jax.traceback_of(eqn))
    here: Scope | None = scope
    while frames.source is None and here is not None and here.eqn is not None:
        outer = provenances.of(here.eqn, here.parent.chain if here.parent else ())
        frames = frames.inside(outer.frames if outer else provenances.spans.frames(_jax.traceback_of(here.eqn)))
        here = here.parent
    return Provenance("", "", frames, path, times, ())


def _origin(provenances: Provenances, maker: Maker, arguments: Sequence[str]) -> Origin:
    name = next((name for name in maker.names if not is_given(name)), None)
    if maker.eqn is None:
        path, times = maker.scope.nesting
        argument = arguments[maker.argument] if maker.argument is not None else None
        return Origin("", None, path, times, name, argument)
    place = locate(provenances, maker.scope, maker.eqn)
    return Origin(_jax.primitive_name(maker.eqn), place.source, place.path, place.times, name, library=place.library)


def _kind(atom: Any, top: Scope, made_by: Sequence[Maker]) -> Kind:
    if _jax.is_literal(atom):
        return "literal"
    if atom in top.inputs:
        return "argument"
    if atom in top.constants:
        return "constant"
    if _jax.memory_space(atom.aval):
        return "offloaded"
    if made_by and not any(maker.copied for maker in made_by):
        if all(maker.argument is not None for maker in made_by):
            return "argument"
        if all(maker.eqn is None and maker.argument is None for maker in made_by):
            return "constant"
    return "intermediate"


def residuals(
    half: Forward, saved: Sequence[Saved], provenances: Provenances, arguments: Sequence[str]
) -> tuple[Residual, ...]:
    """The residuals of a forward half without ``needed_by``; ``arguments`` are the names of its inputs."""
    top = Scope(_jax.open_jaxpr(half.closed))
    types: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the identity of the type, which is kept along
    rows: list[Residual] = []
    for value in saved:
        made_by = makers(top, value.atom)
        kind = _kind(value.atom, top, made_by)
        origins = tuple(dict.fromkeys(_origin(provenances, maker, arguments) for maker in made_by))
        first = origins[0] if origins else Origin("")
        aval = half.type_of(value.atom)
        if id(aval) not in types:
            types[id(aval)] = aval, _as_held(aval)
        rows.append(
            Residual(
                **types[id(aval)][1],
                kind=kind,
                primitive=first.primitive,
                name=first.name,
                argument=first.argument,
                source=first.source,
                library=first.library,
                path=first.path,
                times=first.times,
                origins=origins,
            )
        )
    return tuple(rows)


def _as_held(aval: Any) -> dict[str, Any]:
    """What a residual has from its type."""
    text = _jax.type_text(aval)
    return {
        "dtype": text[: text.index("[")],
        "shape": tuple(int(size) for size in getattr(aval, "shape", ())),
        "nbytes": _jax.nbytes(aval),
        "memory_space": _jax.memory_space(aval),
        "replicated": _jax.is_replicated(aval),
        "sharding": _jax.sharding_text(aval, text),
        "shard_shape": tuple(int(size) for size in getattr(_jax.of_one_device(aval), "shape", ())),
    }


def needed_by(
    backward: Scope,
    saved: Sequence[Saved],
    provenances: Provenances,
    live: Callable[[Any], bool],
    recomputing: Callable[[Any], bool],
    gradients: Sequence[str],
) -> list[tuple[Reader, ...]]:
    """For each saved value the operations of the backward pass that read it, each kind of reader once.

    The first inputs of ``backward`` are the residual leaves, ``gradients`` the argument of each of its outputs.
    ``live`` tells an equation that matters from dead code, ``recomputing`` whether one recomputes a forward value.
    """
    rows: list[tuple[Reader, ...]] = []
    known: dict[tuple[int, int], Reader] = {}
    for value in saved:
        readers_of_value: dict[Reader, None] = {}
        for leaf in value.leaves:
            for scope, eqn in readers(backward, backward.jaxpr.invars[leaf], live):
                key = id(scope), id(eqn)
                if key not in known:
                    place = provenances.of(eqn, scope.chain)
                    where = place or locate(provenances, scope, eqn)
                    known[key] = Reader(
                        _jax.primitive_name(eqn),
                        place.label if place else "",
                        where.source,
                        where.path,
                        recomputing(eqn),
                        ", ".join(gradients[output] for output in _becomes(scope, eqn, live)),
                    )
                readers_of_value.setdefault(known[key])
        rows.append(tuple(readers_of_value))
    return rows


def _becomes(scope: Scope, eqn: Any, live: Callable[[Any], bool]) -> list[int]:
    """The outputs of the program that the results of an equation are, moved, cast and summed up, and no more."""
    found, seen = set[int](), set[tuple[int, int]]()
    todo = [(scope, var) for var in eqn.outvars]
    while todo:
        here, value = todo.pop()
        if (id(here), id(value)) in seen:
            continue
        seen.add((id(here), id(value)))
        if here.parent is None and value in here.outputs:
            found |= {number for number, out in enumerate(here.jaxpr.outvars) if out is value}
        todo += here.after.get(value, ())
        for reader, operand in here.readers.get(value, ()):
            if not live(reader):
                continue
            entered = [(inner, var) for inner in here.inner(reader) for var in inner.entered_by.get(operand, ())]
            if entered:
                todo += entered
            elif _jax.is_transparent(reader):
                todo.append((here, reader.outvars[operand if len(reader.outvars) == len(reader.invars) else 0]))
            elif _jax.moves_or_adds(reader):
                todo += [(here, var) for var in reader.outvars]
            else:
                return []
    return sorted(found)
