"""Integer programs for HiGHS, through scipy, and the smaller one whose variables are sums of another's.

Equal layers make a search go through all orders of them: which of twelve layers keep a value is many choices, how many
do is one of thirteen. So variables that look alike are summed, and rows that look alike too; what is left is as large
as one layer, however many there are. No choice is lost by it: whatever the variables of the large program are, their
sums keep to the rows of the small one and cost the same, so that the optimum of the small one is a bound. Where the
variables of a sum are truly alike in all the program (a partition that colour refinement leaves as it is) the linear
programs even have the same optimum (Grohe, Kersting, Mladenov and Selman, ESA 2014); layers in a row are not, since
each reads the one before it.

The sums earn their place: without them the plan of 12, 19 or 48 blocks of GPT-2 small's size for the bytes of
``dots_saveable`` is 13% to 32% from its bound after ten seconds; with them it is proven best in 0.1 to 0.4 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

__all__ = ["INFEASIBLE", "IntegerProgram", "Summed", "summed"]

INFEASIBLE = 2  # a status of scipy's

# Bytes count a very little beside FLOPs (both add up to a thousand), or the solver saves what spares no work.
_TIE = 1e-6

# scipy's own annotations know numbers only, where arrays are meant.
_bounds: Any = Bounds
_constraint: Any = LinearConstraint


@dataclass(frozen=True, slots=True, eq=False)
class IntegerProgram:
    """Minimise ``cost @ x`` so that ``matrix @ x <= limits``, ``amounts @ x <= budget`` and ``low <= x <= high``.

    ``integral`` is 1 for the variables that have to be whole, and 0 for the others.
    """

    cost: Any
    amounts: Any
    low: Any
    high: Any
    integral: Any
    matrix: Any
    limits: Any

    def run(
        self, budget: float, seconds: float, gap: float, *, whole: bool = True, low: Any = None, high: Any = None
    ) -> Any:
        """What scipy's ``milp`` gives; with ``low`` and ``high`` in place of the program's own."""
        return milp(
            self.cost + _TIE * self.amounts,
            integrality=self.integral if whole else np.zeros(len(self.cost)),
            bounds=_bounds(self.low if low is None else low, self.high if high is None else high),
            constraints=[
                _constraint(self.matrix, -np.inf, self.limits),
                _constraint(self.amounts[None, :], -np.inf, budget),
            ],
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": gap},
        )

    def priced(self, price: float) -> Any:
        """The linear program without a budget, where a unit of ``amounts`` costs ``price``."""
        return milp(
            self.cost + price * self.amounts,
            bounds=_bounds(self.low, self.high),
            constraints=_constraint(self.matrix, -np.inf, self.limits),
        )

    def tie(self, budget: float) -> float:
        """What ``run`` at most adds to a cost, so that of choices that cost the same one of few bytes is found."""
        return _TIE * min(budget, float(self.amounts.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """An integer program of sums, and for each variable of the other one the number of its sum."""

    program: IntegerProgram
    member_of: Any


def summed(program: IntegerProgram, kinds: Sequence[Hashable]) -> Summed:
    """An integer program of the sums of variables that look alike.

    Alike are variables of one kind with the same cost, amount and limits, in rows that look alike. These rows are
    summed, and variables that add to these sums differently (the first and the last layer's, as a rule) stay apart, so
    that each sum of rows can be told by sums of variables.

    Args:
        program: the large one.
        kinds: of its variables; any will do for a bound, and the better they tell what is alike the nearer it is.
    """
    by_row: Any = csr_array(program.matrix)
    by_column: Any = by_row.T.tocsr()
    rows, columns = _entries(by_row), _entries(by_column)
    limits = program.limits.tolist()
    own = zip(kinds, program.cost, program.amounts, program.low, program.high, program.integral, strict=True)
    column = _numbered(own)
    row = _numbered((limit, _colours(terms, column)) for limit, terms in zip(limits, rows, strict=True))
    column = _numbered((before, _colours(terms, row)) for before, terms in zip(column, columns, strict=True))
    row = _numbered((limit, _colours(terms, column)) for limit, terms in zip(limits, rows, strict=True))
    shares: list[dict[int, float]] = []
    for terms in columns:
        share: dict[int, float] = {}
        for number, factor in terms:
            share[row[number]] = share.get(row[number], 0.0) + factor
        shares.append(share)
    member_of = _numbered((of, tuple(sorted(share.items()))) for of, share in zip(column, shares, strict=True))
    first: dict[int, int] = {}
    for number, of in enumerate(member_of):
        first.setdefault(of, number)
    one = list(first.values())
    size = np.bincount(member_of, minlength=len(one))
    entries = [(number, of, factor) for of, member in first.items() for number, factor in shares[member].items()]
    where, at, factors = zip(*entries, strict=True) if entries else ((), (), ())
    total = np.zeros(max(row, default=-1) + 1)
    np.add.at(total, row, program.limits)
    small = IntegerProgram(
        program.cost[one],
        program.amounts[one],
        program.low[one] * size,
        program.high[one] * size,
        program.integral[one],
        csr_array((factors, (where, at)), shape=(len(total), len(one))),
        total,
    )
    return Summed(small, np.array(member_of))


def _entries(matrix: Any) -> list[list[tuple[int, float]]]:
    """For each row of a sparse matrix the numbers of its columns, and the factors there."""
    ends, numbers, factors = matrix.indptr.tolist(), matrix.indices.tolist(), matrix.data.tolist()
    return [list(zip(numbers[start:end], factors[start:end], strict=True)) for start, end in itertools.pairwise(ends)]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """For each key its number among the different ones, in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _colours(terms: Iterable[tuple[int, float]], colours: Sequence[int]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((colours[number], factor) for number, factor in terms))
