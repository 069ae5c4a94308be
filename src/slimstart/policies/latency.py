r"""Latency as a budget: the time of a narrow network on one device, estimated and then measured.

The estimate is a sum of parts, each proportional to a number that follows from the cost table,

.. math:: T(m) = \sum_p t_p \, c_p(m) / c_p(1), \qquad t_p \ge 0 :

a constant, the removable layers that are left, the multiply-adds between two channels, the other multiply-adds, the
parameters, and the inputs and outputs of layers with weights. The times :math:`t_p` are fitted to measured networks of
random widths and depths by least squares of relative errors. T is a polynomial in numbers of channels like FLOPs, so
every policy can use it. It has few coefficients, so that no channel seems to be free, but it is smooth, and devices are
not: `LatencyTable.error` is its error for networks that were left out of the fit.

Therefore networks are also timed when the structure of a training changes (`BoundBudget.measured`). The estimate is
multiplied by the ratio of the measured to the estimated time, and widths are fitted again until the measured time is
within the budget. That is for policies that change the structure a few times. The paper's policy draws a network every
few steps, and uses the estimate alone.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slimstart.costs import CostTable, LatencyTable, Polynomial, Term
from slimstart.errors import BudgetError
from slimstart.policies.budgets import BoundPolynomial, FractionBudget
from slimstart.policies.expected_cost import ExpectedCost
from slimstart.policies.widths import flops_share

FEMTOSECONDS = 10**12  # in a millisecond; coefficients are whole numbers, so that costs are exact
FOLDS = 5  # parts of the measurements that are left out in turn
Part = Mapping[tuple[int, ...], float]  # the coefficient of every product of factors


@dataclass(frozen=True)
class Latency(FractionBudget):
    """At most this fraction of the dense network's time, with a table of `slimstart.measure_latency`.

    With the default policy, networks are timed when the structure changes, and held within the budget. With the paper's
    policy, and with a table from a file, the estimate alone counts, and `table.error` is its relative error.
    """

    table: LatencyTable = field(repr=False)

    aim: ClassVar[float] = 0.96  # measured times vary by a few percent
    has_table: ClassVar[bool] = True

    @classmethod
    def of(cls, milliseconds: float, table: LatencyTable) -> Latency:
        """The budget of so many milliseconds."""
        return cls(milliseconds / table.dense_ms, table)

    def bind(self, table: CostTable) -> BoundLatency:
        return BoundLatency(self, table)

    def flops_share(self, costs: CostTable) -> float:
        return flops_share(self, costs)


class BoundLatency(BoundPolynomial):
    """`Latency` over a cost table, in milliseconds; `measured` corrects the estimate."""

    def __init__(self, budget: Latency, costs: CostTable) -> None:
        table = budget.table
        self._fraction, self._timer, self._scale = budget.fraction, table.timer, 1 / FEMTOSECONDS
        super().__init__(budget, ExpectedCost(costs, polynomial_of(table, costs)), table.dense_ms, "milliseconds")

    def cost(self, mask: Tensor) -> float:
        return self._scale * super().cost(mask)

    def expected(self, s: Tensor) -> Tensor:
        return self._scale * super().expected(s)

    def measured(self, mask: Tensor, removed: Sequence[int]) -> float | None:
        if self._timer is None:
            return None
        share = self._timer(mask, removed)
        self._scale *= share * self.dense / self.cost(mask)
        return share / self._fraction


def polynomial_of(table: LatencyTable, costs: CostTable) -> Polynomial:
    """The estimated time of a network in femtoseconds.

    Raises:
        BudgetError: the table is of another network.
    """
    if digest(costs) != table.structure:
        raise BudgetError(
            "`table` was measured on another network, or with another coupling or other `keep` or `norms`; measure "
            "this one, with the arguments of the training"
        )
    total: Counter[tuple[int, ...]] = Counter()
    for name, part in parts(costs).items():
        for factors, coefficient in part.items():
            total[factors] += round(table.parts[name] * FEMTOSECONDS * coefficient)
    constant = total.pop((), 0)
    return Polynomial(constant, tuple(Term(coefficient, factors) for factors, coefficient in total.items()))


def digest(costs: CostTable) -> str:
    """What identifies the units and the removable layers of a network, with any number of examples."""
    costs = costs.whole or costs
    params = [costs.params, *(layer.params for layer in costs.layers)]
    return hashlib.sha256(repr((costs.unit_group.tolist(), params)).encode()).hexdigest()


def parts(costs: CostTable) -> dict[str, Part]:
    """The parts of the time of a network; each is 1 for the dense network."""
    whole = costs.whole or costs
    counts = [factor.offset + int(factor.weights.sum()) for factor in whole.factors]
    found: dict[str, Part] = {
        "constant": {(): 1.0},
        "layers": {(): len(costs.layers) / len(whole.layers) if costs.whole else 1.0},
    }
    for (name, part), dense in zip(_numbers(costs).items(), _numbers(whole).values(), strict=True):
        most = value(dense, counts) or 1.0
        found[name] = {factors: coefficient / most for factors, coefficient in part.items()}
    return found


def _numbers(costs: CostTable) -> dict[str, Part]:
    """What the time of a network is proportional to, as the cost table has it."""
    flops, params = (
        {(): poly.constant} | {tuple(sorted(term.factors)): term.coefficient for term in poly.terms}
        for poly in (costs.flops, costs.params)
    )
    activations: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for factors in flops.keys() & params.keys() - {()}:
        for factor in factors:  # of a weight, FLOPs are the number of positions at which it is applied
            activations[(factor,)] += flops[factors] / params[factors]
    return {
        "products": {factors: number for factors, number in flops.items() if len(factors) == 2},
        "other multiply-adds": {factors: number for factors, number in flops.items() if len(factors) < 2},
        "parameters": params,
        "activations": activations,
    }


def value(part: Part, counts: Sequence[int]) -> float:
    """A part at the numbers of channels of all factors."""
    return sum(coefficient * math.prod(counts[factor] for factor in factors) for factors, coefficient in part.items())


def features(costs: CostTable, mask: Tensor) -> list[float]:
    """All parts at a mask."""
    kept = costs.at_least_one(mask.cpu())
    happens = torch.cat([kept, kept.new_zeros(1)])[costs.events].any(1)  # the pads are -1: the last entry
    counts = [factor.offset + int((factor.weights * happens[factor.events]).sum()) for factor in costs.factors]
    return [value(part, counts) for part in parts(costs).values()]


def fitted(rows: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[list[float], float]:
    """Non-negative times of all parts, and the error of nine in ten networks that were left out in turn.

    Args:
        rows: `features` of every network.
        times: their times.
    """
    relative = np.asarray(rows) / np.asarray(times)[:, None]
    fold, errors = np.arange(len(times)) % FOLDS, np.zeros(len(times))
    for out in (fold == number for number in range(min(FOLDS, len(times)))):
        if not out.all():
            errors[out] = relative[out] @ non_negative(relative[~out]) - 1
    return non_negative(relative).tolist(), float(np.quantile(np.abs(errors), 0.9))


def non_negative(relative: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |relative @ x - 1|: of all choices of positive entries the best, as there are few."""
    num_rows, num_parts = relative.shape
    best, least = np.zeros(num_parts), math.inf
    for chosen in itertools.product((False, True), repeat=num_parts):
        x = np.zeros(num_parts)
        x[list(chosen)] = np.linalg.lstsq(relative[:, chosen], np.ones(num_rows), rcond=None)[0]
        error = float(np.square(relative @ x - 1).sum())
        if (x >= 0).all() and error < least:
            best, least = x, error
    return best


def table_of(
    costs: CostTable, rows: Sequence[Sequence[float]], times: Sequence[float], **conditions: Any
) -> LatencyTable:
    """The table of measured networks.

    Args:
        rows: `features` of every network.
        times: their times in milliseconds.
        conditions: the other attributes of the table.
    """
    found, error = fitted(rows, times)
    return LatencyTable(
        structure=digest(costs),
        parts=dict(zip(parts(costs), found, strict=True)),
        error=error,
        num_networks=len(rows),
        **conditions,
    )
