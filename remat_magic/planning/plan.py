"""Plans: the least recomputation within a budget of memory, and the frontier of all budgets."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from remat_magic import units
from remat_magic.devices import Device
from remat_magic.facts.facts import Facts
from remat_magic.planning.objective import Objective, objective
from remat_magic.planning.peak import within_peak
from remat_magic.planning.planner import Asked, Planner, planner
from remat_magic.planning.sweep import sweep
from remat_magic.records import FrontierPoint, Listed, Plan, RematError
from remat_magic.units import parse_bytes

__all__ = ["budget_bytes", "frontier", "plan"]


def plan(
    facts: Facts,
    budget: int | float | str,
    at: str | None = None,
    *,
    of: str = "saved",
    cost: str = "flops",
    device: str | Device | None = None,
    offload: float | str | bool | None = None,
    separately: bool = False,
    together: bool = False,
    seconds: float = 10.0,
    gap: float = 0.01,
) -> Plan:
    """What to save within a budget so that recomputation costs least.

    Every intermediate gets a checkpoint name, and an integer programme chooses among them. The choice is then applied
    and traced, so that what the plan says of it is what JAX does; where one of JAX's own policies fits the budget and
    costs less (it can keep what no name reaches, such as the cosine of a sine), the plan is that policy. Values inside
    the branches of a ``lax.cond`` are not chosen among, and ``Plan.status`` says so where there are any.

    Args:
        facts: of the traced function.
        budget: in bytes: a number, a text like ``"2 GiB"``, or as a float from 0 to 1 (or a text like ``"30%"``) the
            fraction of what there is without a checkpoint there.
        at: one place or all sites, as for ``trace.report``.
        of: what the budget is of: ``"saved"`` bytes, or the estimated ``"peak"`` (``Report.peak_bytes``), for which
            plans of several saved bytes are tried.
        cost: what is to be least: recomputed ``"flops"``, or the estimated ``"seconds"`` of recomputing on ``device``.
        device: a device or its name; by default the one that JAX runs on.
        offload: values may also go to the host's pinned memory and come back: over a link of so many bytes/s (a number,
            or a text like ``"32 GB/s"``), or True for the device's own. What is least is then seconds.
        separately: decide equal layers that share one body (the calls of one checkpointed or jitted function) one by
            one, not together; slower.
        together: decide equal layers that a Python loop unrolls together too: what one expression of the source makes
            is saved in all of them or in none. More is recomputed, and there is less to name.
        seconds: the time limit of the solver.
        gap: how far from the best, relatively, the solver may stop.

    Raises:
        RematError: the budget is no size, or less is never needed at this place; no such site, device or option; no
            backward half.
    """
    if of not in ("saved", "peak"):
        raise RematError(f"of={of!r} is nothing that a budget can be of: choose 'saved' or 'peak'.")
    least = objective(cost, device, offload)
    found = planner(facts, at, separately, together)
    if of == "peak":
        most = facts.report("none", found.at).peak_bytes
        if most is None:
            raise RematError(f"the peak of {facts.engine.function_name} is not known: give a budget of saved bytes.")
        limit = budget_bytes(budget, most)
        made = within_peak(found, Asked(*_names(facts, found, limit, least, of), limit, least, of), seconds, gap)
        return _with_branches(made, found)
    limit = budget_bytes(budget, found.most)
    made = found.within(Asked(*_names(facts, found, limit, least, of), limit, least), limit, seconds, gap)
    if made is None:
        few, keeps = units.apart(limit, facts.preview("nothing_saveable", found.at).saved_bytes)
        raise RematError(
            f"{few} are too few: nothing_saveable at {found.at!r} keeps {keeps} of {facts.engine.function_name} "
            "already; raise the budget, or plan for at='function'."
        )
    return _with_branches(made, found)


def _with_branches(made: Plan, found: Planner) -> Plan:
    """A plan that says where there are values that it could not choose."""
    if not found.parts.naming.branches:
        return made
    return replace(made, status=f"{made.status} Values inside the branches of a conditional are not among the choices.")


def frontier(
    facts: Facts,
    points: int = 20,
    at: Any = None,
    *,
    separately: bool = False,
    together: bool = False,
    seconds: float = 1.0,
) -> Listed[FrontierPoint]:
    """The least recomputation for evenly spaced budgets, from the least to all that is saved without a checkpoint.

    Of many values the lower hull of all choices bounds them, and between its corners choices are mixed; what time
    is left goes into integer programmes where the distance from the bound is largest. The figures are reckoned, not
    traced.

    Args:
        facts: of the traced function.
        points: how many budgets.
        at: as for ``plan``.
        separately: as for ``plan``.
        together: as for ``plan``.
        seconds: how long to go on improving, in seconds of work: a busy machine takes longer.

    Raises:
        RematError: as ``plan``; fewer than two points.
    """
    if points < 2:
        raise RematError(f"a frontier has two points or more, not {points}.")
    ours = planner(facts, at, separately, together)
    least, _ = ours.graph.predict(())
    most = max(ours.most, least)
    budgets = [least + (most - least) * i // (points - 1) for i in range(points)]
    began = time.thread_time()
    hull = ours.hull(seconds / 2)
    left = seconds - (time.thread_time() - began)
    found = sweep(ours.problem(), budgets, left, hull.mixed)
    return Listed(
        ours.point(budget, each.saved_bytes, each.cost, each.bound)
        for budget, each in zip(budgets, found, strict=True)
        if each is not None
    )


def plan_bound(
    facts: Facts,
    budget: int | float | str,
    at: Any = None,
    *,
    separately: bool = False,
    together: bool = False,
    first: float = 2.0,
    seconds: float = 0.04,
) -> FrontierPoint:
    """A bound on what any plan within a budget recomputes, and the best choice within it that is known so far.

    The first call at a place takes JAX's tracing and up to ``first`` seconds for the hull; later ones read it off, and
    go on with it for up to ``seconds`` where it is not complete. The figures are reckoned, not traced.

    Args:
        facts: of the traced function.
        budget: of saved bytes, as for ``trace.plan``.
        at: as for ``trace.plan``.
        separately: as for ``trace.plan``.
        together: as for ``trace.plan``.
        first: how long the first call may search, in seconds.
        seconds: how long the others may.

    Raises:
        RematError: as ``trace.plan``.
    """
    found = planner(facts, at, separately, together)
    limit = budget_bytes(budget, found.most)
    return found.point(limit, *found.hull(first).at(limit, seconds))


def budget_bytes(budget: int | float | str, most: int) -> int:
    """The bytes of a budget, of which ``most`` is the whole."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget) if isinstance(budget, str) else None
    if percent is not None:
        budget = min(float(percent[1]) / 100, 1.0)
    if isinstance(budget, float) and 0.0 <= budget <= 1.0:
        return int(budget * most)
    return parse_bytes(budget, "budget")


def _names(facts: Facts, found: Planner, limit: int, least: Objective, of: str) -> tuple[str, str]:
    """The key of a plan, and its label: its budget, and what else was asked for where that is not usual."""
    place = "" if found.at == facts.engine.default_at else f" at {found.at}"
    apart = ", one by one" if found.separately else ", equal layers together" if found.together else ""
    more = f"{place}{apart}{least.text}"
    if of == "peak":
        return f"plan(peak {limit}{more})", f"plan within {units.nbytes(limit)} of peak{more}"
    return f"plan({limit}{more})", f"plan within {units.nbytes(limit)}{more}"
