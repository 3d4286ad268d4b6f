"""Advice on what ``jax_remat3`` does otherwise, whether it is on or not yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat_magic import _jax, units
from remat_magic.advice.case import Case, at_line
from remat_magic.advice.ground import Group
from remat_magic.advice.mends import name_for
from remat_magic.policies import Key, resolve
from remat_magic.records import Advice, RematError

__all__ = ["asks_little", "keeps_inner_checkpoints"]

_SHOWN = 3


def asks_little(case: Case) -> Iterator[Advice]:
    """A policy of the user's own that saves what jax_remat3 does not ask it about."""
    own = {policy for policy in case.asked.values() if not _resolves(policy, case.facts.engine.names)}
    ground = case.ground if len(own) == len(set(case.asked.values())) == 1 else None
    if ground is None:
        return
    used = ground.outcomes.base.used & ground.kept
    unasked = [value for value in ground.values(used) if value.name is None and value.primitive not in _jax.MATMULS]
    if not unasked:
        return
    (policy,) = own
    total = sum(value.nbytes for value in unasked)
    largest = max(unasked, key=lambda value: value.nbytes)
    when = "does not save" if case.facts.engine.remat3 else "would not save, though it does now"
    yield Advice(
        "remat3",
        f"jax_remat3 asks a policy about matmuls, convolutions and named values only: with it {policy} {when}, "
        f"{units.nbytes(total)}, the largest of {largest.primitive}{at_line(largest.source)}.",
        _by_name(case, ground.nameable(used)),
        total,
        "bytes",
        largest.source,
    )


def _resolves(policy: Key, names: Sequence[str]) -> bool:
    """Whether a key says by itself which policy it is, and not by a name in the user's program."""
    try:
        resolve(policy, names)
    except RematError:
        return False
    return True


def _by_name(case: Case, groups: list[Group]) -> str:
    """The equivalent by names of a policy that saves some values."""
    taken, given = list(case.facts.engine.names), list[str]()
    names = [group.name for group in groups if group.name]
    for group in groups:
        source = group.first.source
        if group.name or source is None:
            continue
        taken.append(name_for(group.first, taken))
        names.append(taken[-1])
        where = source.expression if source.end_line == source.line else f"... # {source.place}"
        given.append(f"checkpoint_name({where}, {taken[-1]!r})")
    if not given:
        return "Name the values that it should save, and use save_only_these_names."
    more = f" (and {len(given) - _SHOWN} more)" if len(given) > _SHOWN else ""
    policy = f"policy=jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, names))})"
    return f"By name it works with both: {', '.join(given[:_SHOWN])}{more}, and {policy}."


def keeps_inner_checkpoints(case: Case) -> Iterator[Advice]:
    """A policy around a function whose parts have checkpoints of their own."""
    if "" not in case.asked or not case.facts.engine.sites:
        return
    keys = ", ".join(site.key for site in case.facts.engine.sites)
    stay, say = ("stay", "is") if case.facts.engine.remat3 else ("would stay", "would be")
    yield Advice(
        "remat3",
        f"With jax_remat3 the checkpoints inside {stay} in force: what {keys} recomputes {say} said by its own policy, "
        f"whatever {case.report.policy} around the function says.",
        "Set the policy at='sites', or take the inner checkpoints off.",
    )
