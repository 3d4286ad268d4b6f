"""The checkpoint names of a program: what each was given to, where, and which policies can see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat_magic import _jax
from remat_magic.engine.engine import Engine
from remat_magic.engine.sites import nearest_span
from remat_magic.jaxprs.flow import Maker, makers
from remat_magic.jaxprs.walk import walk
from remat_magic.records import SourceSpan

__all__ = ["GivenName", "given_names", "makers_of_operands"]


@dataclass(frozen=True, slots=True, eq=False)
class GivenName:
    """One place of the program that names a value; ``sites`` are the checkpoint sites around it, outermost first."""

    name: str
    source: SourceSpan | None
    sites: tuple[str, ...]
    makers: tuple[Maker, ...]


def given_names(engine: Engine) -> list[GivenName]:
    """All names in the order of the program; a body that several calls share counts once."""
    names: dict[tuple[int, tuple[str, ...]], GivenName] = {}
    for scope, eqn in walk(engine.provenances.closed):
        name = _jax.checkpoint_name_of(eqn)
        if name is None:
            continue
        sites = tuple(engine.site_of(outer) for outer in scope.around() if _jax.is_checkpoint(outer))[::-1]
        if (id(eqn), sites) not in names:
            source = nearest_span(engine.provenances.spans, scope, eqn)
            names[id(eqn), sites] = GivenName(name, source, sites, tuple(makers(scope, eqn.invars[0])))
    return list(names.values())


def makers_of_operands(maker: Maker) -> Iterator[Maker]:
    """What makes the operands of the operation that made a value; arguments, constants and literals left out."""
    if maker.eqn is not None:
        for atom in maker.eqn.invars:
            yield from (operand for operand in makers(maker.scope, atom) if operand.eqn is not None)
