"""Which of a program's values a policy saves: what it says when it is asked about the operations that make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.ad_checkpoint import Offloadable, Saveable

from remat_magic import _jax
from remat_magic.engine.engine import Dissection
from remat_magic.engine.sites import own_checkpoint
from remat_magic.facts.facts import Facts
from remat_magic.jaxprs.naming import NamedValue
from remat_magic.policies import AS_WRITTEN, NO_CHECKPOINT, Resolved

__all__ = ["answered", "offloads", "saves"]

_Around = tuple[tuple[str, Any], ...]  # the checkpoints around an operation, outermost first: site and policy


def saves(answer: Any) -> bool:
    """Whether a policy's answer keeps a value on the device."""
    return answer is True or answer is Saveable


def offloads(answer: Any) -> bool:
    """Whether a policy's answer moves a value to another memory."""
    return isinstance(answer, Offloadable)


def answered(
    facts: Facts, parts: Dissection, resolved: Resolved, says: Callable[[Any], bool] = saves
) -> frozenset[str]:
    """The names of the values that a policy saves (or what else it ``says``) at the place that parts are of.

    What a policy says of operations that only the derivative has (the cosine of a sine) shows in no name.
    """
    policy, values = resolved.policy, parts.naming.values
    if policy is not AS_WRITTEN and policy is not NO_CHECKPOINT:
        return frozenset(name for name, value in values.items() if _says(says, policy, value))
    taken_off = frozenset[str]()
    if policy is NO_CHECKPOINT:
        own = own_checkpoint(facts.engine.index.closed)
        at_function = frozenset() if own is None else frozenset({facts.engine.site_of(own)})
        every = frozenset(site.key for site in facts.engine.sites)
        taken_off = {"function": at_function, "sites": every}.get(parts.at, frozenset({parts.at}))
    around = _checkpoints(facts)
    found: set[str] = set()
    for name, value in values.items():
        sites = around.get(id(_jax.traceback_of(value.eqn)), ())
        written = [policy for key, policy in sites if key not in taken_off]
        # Without jax_remat3 the outermost checkpoint decides for those inside.
        if _says(says, written[0], value) if written else says(True):
            found.add(name)
    return frozenset(found)


def _checkpoints(facts: Facts) -> Mapping[int, _Around]:
    """The checkpoints around each operation of the primal program, by the identity of its traceback."""
    found: dict[int, _Around] = {}

    def visit(jaxpr: Any, around: _Around) -> None:
        for eqn in jaxpr.eqns:
            found.setdefault(id(_jax.traceback_of(eqn)), around)
            inside = around
            if _jax.is_checkpoint(eqn):
                inside = (*around, (facts.engine.site_of(eqn), _jax.checkpoint_policy(eqn)))
            for body in _jax.bodies(eqn):
                visit(body.jaxpr, inside)

    visit(_jax.open_jaxpr(facts.engine.index.closed), ())
    return found


def _says(says: Callable[[Any], bool], policy: Any, value: NamedValue) -> bool:
    """What a policy says of a value, of its operation or of the name that the program gives it."""
    if policy is None or value.output is None:
        return False
    eqn = value.eqn
    if says(_jax.policy_says(policy, eqn)):
        return True
    if value.name is None:
        return False
    return says(_jax.policy_says_of_name(policy, value.aval, value.name))
