"""Budgets: the largest part of the dense network's filters, parameters or FLOPs that a narrow one may have.

A budget is a fraction and knows no network. Bound to a cost table (`bind`), it gives the limit, the cost of a mask, and
the expected cost of keep-probabilities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.devices import Movable
from slimstart.errors import BudgetError
from slimstart.policies.expected_cost import ExpectedCost


class BoundBudget(Movable, ABC):
    """A budget over one network's cost table: limit, cost of a mask, expected cost of keep-probabilities.

    It is made on the CPU; `to` gives one for another device, where `expected` reads no value on the host, so that a
    CUDA graph can hold it.

    Attributes:
        dense: cost of the whole network, also where the table is without some of its layers.
        minimum: cost of the empty mask, for which the at-least-one rule keeps the first unit of every group.
        limit: fraction * dense.
        num_units: U.
    """

    num_units: int
    dense: int
    minimum: int
    limit: float

    @abstractmethod
    def cost(self, mask: Tensor) -> int:
        """The exact cost of a mask after the at-least-one rule, which is applied here.

        Args:
            mask: bool tensor of shape (U,), such as a raw draw.
        """

    @abstractmethod
    def expected(self, s: Tensor) -> Tensor:
        """The expected cost of keep-probabilities s of shape (..., U), which the budget limits.

        Returns:
            float64 of shape (...), on the budget's device, differentiable.
        """

    def gradient(self, s: Tensor) -> Tensor:
        """The gradient of `expected` at s; both of shape (U,)."""
        point = s.detach().double().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.expected(point), point)
        return gradient

    def _set_limit(self, budget: Budget, num_units: int, dense: int, what: str) -> None:
        self.num_units, self.dense = num_units, dense
        self.minimum = self.cost(torch.zeros(num_units, dtype=torch.bool))
        self.limit = budget.fraction * self.dense
        if self.limit < self.minimum:
            # Rounded up, so that the number in the message is feasible when the user types it.
            least = min(math.ceil(self.minimum / self.dense * 10_000) / 10_000, 1.0)
            raise BudgetError(
                f"`{type(budget).__name__}({budget.fraction:g})` allows {self.limit:.6g} of {self.dense} {what}, but "
                f"one unit per group already costs {self.minimum}; feasible from {least:g} to 1"
            )

    def _check(self, name: str, tensor: Tensor, shape: torch.Size) -> None:
        if shape != (self.num_units,):
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)}; it needs one entry per unit, ({self.num_units},)"
            )


class BoundChannels(BoundBudget):
    r"""`Channels` over a cost table: the linear constraint :math:`\sum_u f_u s_u \le K` of the paper.

    `expected` is this sum. It does not count the filter that the at-least-one rule keeps in an empty group, so that the
    constraint is linear and the projection the exact Euclidean one. `cost` of a mask counts it.
    """

    def __init__(self, budget: Budget, table: CostTable) -> None:
        self._table = table
        self.filters = table.unit_filters.cpu().double()
        self._set_limit(budget, table.num_units, int((table.whole or table).unit_filters.sum()), "filters")

    def cost(self, mask: Tensor) -> int:
        self._check("mask", mask, mask.shape)
        kept = self._table.at_least_one(mask.bool().to(self._table.unit_group.device))
        return int(self._table.unit_filters[kept].sum())

    def expected(self, s: Tensor) -> Tensor:
        self._check("s", s, s.shape[-1:])
        return (self.filters * s.to(self.device, torch.float64)).sum(-1)


class BoundPolynomial(BoundBudget):
    """`Params` or `Flops` over a cost table: the exact expectation over independent draws and the at-least-one rule."""

    def __init__(self, budget: Budget, cost: ExpectedCost, dense: int, what: str) -> None:
        self._cost = cost
        self._set_limit(budget, cost.num_units, dense, what)

    def cost(self, mask: Tensor) -> int:
        self._check("mask", mask, mask.shape)
        return self._cost.of_mask(mask.bool().to(self.device))

    def expected(self, s: Tensor) -> Tensor:
        self._check("s", s, s.shape[-1:])
        return self._cost.mean(s.to(self.device, torch.float64))


@dataclass(frozen=True)
class Budget(ABC):
    """A fraction of the dense network's cost, 0 < fraction <= 1."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise BudgetError(f"`fraction` of `{type(self).__name__}` is {self.fraction}; it must be in (0, 1]")

    @abstractmethod
    def bind(self, table: CostTable) -> BoundBudget:
        """This budget for one network.

        Raises:
            BudgetError: even the narrowest sub-network costs more; the message gives the feasible range.
        """


@dataclass(frozen=True)
class Channels(Budget):
    """At most this fraction of all filters: the paper's budget, K = fraction * number of filters."""

    def bind(self, table: CostTable) -> BoundChannels:
        return BoundChannels(self, table)


@dataclass(frozen=True)
class Params(Budget):
    """At most this fraction of the dense network's parameters; for the paper's policy on average until it settles."""

    def bind(self, table: CostTable) -> BoundPolynomial:
        whole = table.whole or table
        return BoundPolynomial(self, ExpectedCost(table, table.params), whole.dense(whole.params), "parameters")


@dataclass(frozen=True)
class Flops(Budget):
    """At most this fraction of the dense network's FLOPs; one multiply-add is 1.

    They are those of one forward on the example inputs. The paper's policy meets it on average until it settles.
    """

    def bind(self, table: CostTable) -> BoundPolynomial:
        whole = table.whole or table
        return BoundPolynomial(self, ExpectedCost(table, table.flops), whole.dense(whole.flops), "multiply-adds")
