"""Advice: what about a policy, or a program, costs memory or work without need, with the line, the figure, the mend.

Each rule is a function of what is known; it gives advice only where JAX's own jaxprs show the fault, and is silent
otherwise. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from remat_magic import devices
from remat_magic.advice import names, policies, programs, values
from remat_magic.advice.case import Case
from remat_magic.facts.facts import Facts
from remat_magic.records import Advice, Listed, Plan

__all__ = ["advise"]


def advise(
    facts: Facts,
    policy: Any = "as_written",
    at: Any = None,
    namespace: Mapping[str, Any] | None = None,
    *,
    device: str | devices.Device | None = None,
) -> Listed[Advice]:
    """Advice on one policy at one place.

    Args:
        facts: of the traced function.
        policy: as for ``trace.report``, and so are ``at`` and ``namespace``.
        at: where.
        namespace: of the policy's identifiers.
        device: whose times are estimated; by default the one that JAX runs on, if it is known.

    Raises:
        RematError: as ``trace.report``; no such device.
    """
    chosen = None if device is None else devices.get(device)
    case = Case(
        facts, facts.report(policy, None if isinstance(policy, Plan) else at, namespace), at, policy, namespace, chosen
    )
    return Listed(advice for rule in _RULES for advice in rule(case))


# A family of rules is a file, and has its own list of them: a new rule is a function there, and its test. A stale trace
# is told first, since it puts the rest in doubt.
_RULES: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    programs.stale,
    *names.RULES,
    *policies.RULES,
    *values.RULES,
    *programs.RULES,
)
