r"""Latency as a budget: the time of a narrow network, from times of other narrow networks on the same device.

The time of a network is taken to be a polynomial in the numbers of its channels, with the terms that its FLOPs and
parameters have: a time for every pair of an input and an output channel of a layer, a time for every channel, and a
constant,

.. math:: T(m) = t_0 + \sum_k t_k \prod_{f \in k} n_f(m), \qquad t_k \ge 0.

The coefficients are fitted to measured networks by non-negative least squares of relative errors, so T never falls
where a channel is added. Layers are not measured one by one: in a network they overlap, share caches and are fused,
and their times do not add up. As a polynomial, T is a cost like FLOPs, and every policy can use it. It is an estimate:
`LatencyTable.error` says how far it is off for networks that were left out of the fit. Of the networks that fill a
budget a search prefers those whose time is underestimated, so a budget is filled to `AIM` of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimstart.costs import CostTable, LatencyTable, Polynomial, Term
from slimstart.errors import BudgetError
from slimstart.policies.budgets import BoundPolynomial, FractionBudget
from slimstart.policies.expected_cost import ExpectedCost

PICOSECONDS = 10**9  # in a millisecond; coefficients are whole numbers, so that costs are exact
AIM = 0.96  # networks found by searches took 1 to 8 % more than estimated, on a CPU
FOLDS = 5  # parts of the measurements that are left out in turn


def polynomial_of(table: LatencyTable, costs: CostTable) -> Polynomial:
    """The time of a network, in picoseconds; of layers that are removed only their part of the constant.

    Raises:
        BudgetError: the table is of another network.
    """
    if digest(costs) != table.structure:
        raise BudgetError(
            "`table` was measured on another network, or with another coupling or other `keep` or `norms`; measure "
            "this one, with the arguments of the training"
        )
    present = set(keys(costs))
    return Polynomial(table.constant, tuple(Term(time, factors) for factors, time in table.terms if factors in present))


@dataclass(frozen=True)
class Latency(FractionBudget):
    """At most this fraction of the dense network's time, as estimated from a table (`slimstart.measure_latency`)."""

    table: LatencyTable = field(repr=False)

    @classmethod
    def of(cls, milliseconds: float, table: LatencyTable) -> Latency:
        """The budget of so many milliseconds."""
        return cls(milliseconds / table.dense_ms, table)

    def bind(self, table: CostTable) -> BoundPolynomial:
        cost = ExpectedCost(table, polynomial_of(self.table, table))
        return BoundPolynomial(self, cost, round(AIM * self.table.dense_ms * PICOSECONDS), "picoseconds")


def digest(costs: CostTable) -> str:
    """What identifies the units and factors of a network."""
    costs = costs.whole or costs
    parts = [costs.unit_group, costs.events]
    for factor in costs.factors:
        parts += [torch.tensor([factor.offset]), factor.events, factor.weights]
    state = hashlib.sha256()
    for part in parts:
        state.update(f"{tuple(part.shape)}".encode())
        state.update(part.cpu().numpy().tobytes())
    return state.hexdigest()


def keys(costs: CostTable) -> list[tuple[int, ...]]:
    """The factors of every term of the FLOPs and parameters of a network."""
    return sorted({tuple(sorted(term.factors)) for part in (costs.flops, costs.params) for term in part.terms})


def features(costs: CostTable, mask: Tensor) -> list[int]:
    """The product of every term at a mask, and 1 for the constant."""
    kept = costs.at_least_one(mask.cpu())
    happens = torch.cat([kept, kept.new_zeros(1)])[costs.events].any(1)  # the pads are -1: the last entry
    counts = [factor.offset + int((factor.weights * happens[factor.events]).sum()) for factor in costs.factors]
    return [*(math.prod(counts[factor] for factor in factors) for factors in keys(costs)), 1]


def fitted(
    rows: Sequence[Sequence[int]], milliseconds: Sequence[float], weights: Sequence[float]
) -> tuple[np.ndarray, float]:
    """Non-negative times of every feature, in milliseconds, and the error for rows of full weight, left out in turn."""
    features, times, given = (np.asarray(values, dtype=float) for values in (rows, milliseconds, weights))
    fold, errors = np.arange(len(times)) % FOLDS, np.zeros(len(times))
    for number in range(FOLDS):
        out = fold == number
        if out.any() and not out.all():
            rest = non_negative(features[~out], times[~out], given[~out])
            errors[out] = features[out] @ rest / times[out] - 1
    return non_negative(features, times, given), float(np.quantile(np.abs(errors[given == given.max()]), 0.9))


def non_negative(features: np.ndarray, times: np.ndarray, weights: np.ndarray) -> np.ndarray:
    r"""The x >= 0 that minimises :math:`\sum_i w_i^2 (f_i \cdot x / t_i - 1)^2`.

    By the active-set method of Lawson and Hanson (1974, ch. 23): entries become positive one after the other, the one
    of steepest descent first, and are 0 again where the least-squares solution of the positive ones is negative.
    """
    relative = features * (weights / times)[:, None]
    scales = np.maximum(np.linalg.norm(relative, axis=0), np.finfo(float).tiny)
    relative = relative / scales
    x, positive = np.zeros(relative.shape[1]), np.zeros(relative.shape[1], dtype=bool)
    for _ in range(3 * len(x)):
        descent = np.where(positive, 0.0, relative.T @ (weights - relative @ x))
        if descent.max() <= 1e-10 * np.linalg.norm(weights):
            break
        positive[descent.argmax()] = True
        while True:
            solution = np.zeros(len(x))
            solution[positive] = np.linalg.lstsq(relative[:, positive], weights, rcond=None)[0]
            falling = positive & (solution <= 0)
            if not falling.any():
                x = solution
                break
            x = x + (x[falling] / (x[falling] - solution[falling])).min() * (solution - x)
            positive &= x > 1e-14
            x[~positive] = 0
    result: np.ndarray = x / scales
    return result


def table_of(
    costs: CostTable,
    rows: Sequence[Sequence[int]],
    milliseconds: Sequence[float],
    weights: Sequence[float],
    **conditions: Any,
) -> LatencyTable:
    """The table of measured networks.

    Args:
        rows: `features` of every network.
        milliseconds: their times.
        weights: in the fit.
        conditions: the other attributes of the table.
    """
    times, error = fitted(rows, milliseconds, weights)
    whole = [math.ceil(time * PICOSECONDS) for time in times.tolist()]
    terms = tuple((factors, time) for factors, time in zip(keys(costs), whole, strict=False) if time)
    return LatencyTable(
        structure=digest(costs),
        error=error,
        num_networks=len(rows),
        constant=whole[-1],
        terms=terms,
        **conditions,
    )
