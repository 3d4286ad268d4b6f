"""The checkpoint names of a program: what each was given to, where, and which policies can see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat_magic import _jax
from remat_magic.engine.engine import Engine
from remat_magic.jaxprs.flow import Maker, Scope, makers
from remat_magic.records import SourceSpan

__all__ = ["GivenName", "given_names", "makers_of_operands"]


@dataclass(frozen=True, slots=True, eq=False)
class GivenName:
    """One place of the program that names a value; ``sites`` are the checkpoint sites around it, outermost first."""

    name: str
    source: SourceSpan | None
    sites: tuple[str, ...]
    made: tuple[Maker, ...]


def given_names(engine: Engine) -> list[GivenName]:
    """All names in the order of the program; a body that several calls share counts once."""
    seen: set[tuple[int, tuple[str, ...]]] = set()
    found: list[GivenName] = []

    def visit(scope: Scope, sites: tuple[str, ...], outer: SourceSpan | None) -> None:
        if (id(scope.jaxpr), sites) in seen:
            return
        seen.add((id(scope.jaxpr), sites))
        for eqn in scope.jaxpr.eqns:
            source = engine.provenances.spans.of(_jax.traceback_of(eqn)) or outer
            name = _jax.checkpoint_name_of(eqn)
            if name is not None:
                found.append(GivenName(name, source, sites, tuple(makers(scope, eqn.invars[0]))))
            inside = (*sites, engine.site_of(eqn)) if _jax.is_checkpoint(eqn) else sites
            for inner in scope.inner(eqn):
                visit(inner, inside, source)

    visit(Scope(_jax.open_jaxpr(engine.provenances.closed)), (), None)
    return found


def makers_of_operands(maker: Maker) -> Iterator[Maker]:
    """What makes the operands of the operation that made a value; arguments, constants and literals left out."""
    if maker.eqn is not None:
        for atom in maker.eqn.invars:
            yield from (found for found in makers(maker.scope, atom) if found.eqn is not None)
