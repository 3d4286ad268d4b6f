"""What if: for each value that a policy saves, or does not, what the other choice would change, by itself."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat_magic import devices
from remat_magic.facts.facts import Facts
from remat_magic.planning.alike import alike_values
from remat_magic.planning.answers import answered
from remat_magic.planning.flips import Flip, Flips
from remat_magic.planning.objective import Objective
from remat_magic.planning.planner import Planner, planner
from remat_magic.policies import resolve
from remat_magic.records import Listed, Plan, PlannedValue, RematError, Report, WhatIf

__all__ = ["names_saved", "what_if"]


def what_if(
    facts: Facts,
    policy: Any = "as_written",
    at: Any = None,
    *,
    device: str | devices.Device | None = None,
    by: str = "flops",
    separately: bool = False,
    together: bool = False,
    namespace: Mapping[str, Any] | None = None,
) -> Listed[WhatIf]:
    """For each residual that could be recomputed, and each recomputed value that could be saved: what that changes.

    Reckoned on the graph that plans are made on, all in one go; each plan, applied, does what is said of it. What could
    be saved comes first, that which spares most for each byte leading; then what could be recomputed, that whose bytes
    spare least leading.

    Args:
        facts: of the traced function.
        policy: as for ``trace.report``, a plan included.
        at: one place, or all sites.
        device: whose seconds are estimated; by default the one that JAX runs on, if it is known.
        by: what ranks: ``"flops"`` or ``"seconds"``.
        separately: for equal layers that share one body one by one, not together.
        together: for all values at once that one expression makes, in equal layers that a Python loop unrolls.
        namespace: where policies of one's own are looked up by name.

    Raises:
        RematError: no such policy, place or device; no backward half; or JAX does otherwise than is reckoned here (a
            checkpoint inside another under jax_remat3), so that nothing can be said.
    """
    if by not in ("flops", "seconds"):
        raise RematError(f"by={by!r} is nothing to rank by: choose 'flops' or 'seconds'.")
    chosen = devices.default() if device is None else devices.get(device)
    if by == "seconds" and chosen is None:
        raise RematError("The device that JAX runs on is not known here: name one by device=, or register it.")
    if isinstance(policy, Plan):
        at, separately = policy.at, policy.separately if policy.names else separately
    found = planner(facts, at, separately)
    report = facts.report(policy, found.at if not isinstance(policy, Plan) else None, namespace)
    if report.backward_error:
        raise RematError(report.backward_error)
    names = names_saved(found, policy, namespace)
    costs = None if chosen is None else Objective(chosen).costs(found.graph, found.parts.backward).nodes
    flips = Flips(found.graph, names, costs)
    base = _Base(found, flips, report)
    against = policy if isinstance(policy, Plan) else report.policy
    same = (flips.base.saved_bytes, flips.base.recomputed_flops) == (report.saved_bytes, report.recomputed_flops)
    if not same or not (isinstance(policy, Plan) or _is_key(facts, report.policy)):
        # What the policy keeps no choice of names does, or only its object stands for it: compare with the nearest.
        against = base.plan(flips.base, ", by value", ", by value") if flips.base.used else "nothing_saveable"
        told = facts.report(against, None if isinstance(against, Plan) else found.at)
        if (told.saved_bytes, told.recomputed_flops) != (flips.base.saved_bytes, flips.base.recomputed_flops):
            raise RematError(
                f"JAX saves or recomputes otherwise at {found.at!r} than is reckoned for {report.policy}, so that the "
                "effect of single values is not known: choose at='sites', or one site."
            )
    rows = [base.row(each, chosen, against) for each in base.groups(together)]
    return Listed(sorted(rows, key=lambda row: _rank(row, by)))


def _rank(row: WhatIf, by: str) -> tuple[int, float, int, str]:
    worth = row.flops_per_byte if by == "flops" or row.seconds_per_byte is None else row.seconds_per_byte
    if row.change == "save":
        return 0, -worth, -abs(row.saved_bytes), row.value.key
    return 1, worth, -abs(row.saved_bytes), row.value.key


def names_saved(found: Planner, policy: Any, namespace: Mapping[str, Any] | None) -> frozenset[str]:
    """The names of the values that a policy, or a plan, saves at the planner's place."""
    if isinstance(policy, Plan) and policy.names:
        return found.keys_of(policy)
    if isinstance(policy, Plan):
        policy = policy.policy
    facts = found.facts
    resolved = resolve(policy, facts.engine.names, namespace, facts.engine.function_name)
    return answered(facts, found.parts, resolved)


def _is_key(facts: Facts, key: str) -> bool:
    """Whether a policy's key says by itself which it is, and not by a name in the user's program."""
    try:
        resolve(key, facts.engine.names, None, facts.engine.function_name)
    except RematError:
        return False
    return True


class _Base:
    """The choice that the others differ from, and the plans that these are."""

    def __init__(self, found: Planner, flips: Flips, report: Report) -> None:
        self._found, self._flips, self._report = found, flips, report
        self._order = {name: i for i, name in enumerate(found.parts.naming.values)}
        self._values = found.every_value()
        self._used = sorted(flips.base.used, key=self._order.__getitem__)
        self._kept = [self._values[name] for name in self._used]

    def groups(self, together: bool) -> list[list[str]]:
        """The names that go the other way at once: each alone, or those alike that now go the same way."""
        found: list[list[str]] = []
        for names in (self._flips.base.used, self._flips.recomputed):
            mine = sorted(names, key=self._order.__getitem__)
            alike = alike_values((self._values[name] for name in mine), self._found.parts) if together else ()
            found += alike or [[name] for name in mine]
        return found

    def row(self, names: Sequence[str], device: devices.Device | None, against: str | Plan) -> WhatIf:
        """What flipping some names changes."""
        base, flip, value = self._flips.base, self._flips.flip(*names), self._values[names[0]]
        saving = names[0] not in self._flips.chosen
        sign = "+" if saving else "-"
        what = value.name or value.primitive or "carry"
        where = f" {value.source.place}" if value.source else ""
        many = f" x{len(names):,}" if len(names) > 1 else ""
        return WhatIf(
            "save" if saving else "recompute",
            value,
            flip.saved_bytes - base.saved_bytes,
            flip.recomputed_flops - base.recomputed_flops,
            None if device is None else flip.seconds - base.seconds,
            "" if device is None else device.name,
            # Values of one line read alike: only their names tell plans apart.
            self.plan(flip, f" {sign} {names[0]}{many}", f" {sign} {what}{where}{many}"),
            against,
            len(names),
        )

    def plan(self, flip: Flip, key: str, label: str) -> Plan:
        """The plan of a choice, with what is reckoned of it for its figures; what it is called begins as the report."""
        used = self._flips.base.used
        values: list[PlannedValue] = self._kept
        if flip.used != used:
            gone, new = used - flip.used, flip.used - used
            values = [value for value in values if value.key not in gone] if gone else list(values)
            for name in new:
                where = bisect.bisect(values, self._order[name], key=lambda value: self._order[value.key])
                values.insert(where, self._values[name])
        key, label = f"{self._report.policy}{key}", f"{self._report.label}{label}"
        draft = self._found.draft(key, flip.saved_bytes, tuple(values), label)
        if not values:
            draft = replace(draft, policy="nothing_saveable", label="", fingerprint="")
        return replace(
            draft,
            saved_bytes=flip.saved_bytes,
            recomputed_flops=flip.recomputed_flops,
            predicted_bytes=flip.saved_bytes,
            predicted_flops=flip.recomputed_flops,
            status="What one value changes, as reckoned.",
        )
