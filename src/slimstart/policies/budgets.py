r"""Budgets: the largest part of the dense network's filters, parameters or FLOPs that a narrow one may have.

A budget is a fraction and knows no network. Bound to a cost table (`bind`), it gives the limit, the cost of a mask, and
the expected cost of keep-probabilities.

Several budgets :math:`c_i \le K_i` that must all hold are one budget again, `JointBudget`, with the cost

.. math:: c(m) = \max_i c_i(m) / K_i \le 1, \qquad c(s) = \max_i \mathbb{E}[c_i] / K_i \le 1.

So all that fits widths or masks to a budget, or projects on it, fits several.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

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
        limit: fraction * dense; for budgets that are measured, a little less.
        num_units: U.
    """

    num_units: int
    dense: float
    minimum: float
    limit: float

    @property
    def limits(self) -> tuple[float, ...]:
        """The limit of each budget: one, or those of several."""
        return (self.limit,)

    @abstractmethod
    def cost(self, mask: Tensor) -> float:
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

    def measured(self, mask: Tensor, removed: Sequence[int]) -> float | None:
        """Measure the network of a mask (U,) without some layers, and correct the costs from now on.

        Returns:
            What it takes, as a multiple of the budget; None for budgets that are exact or cannot be measured.
        """
        return None

    def tightest(self, s: Tensor) -> BoundBudget:
        """Of several budgets, the one nearest to its limit at s of shape (U,); or this one."""
        return self

    def share(self, s: Tensor) -> float:
        """The expected cost at s, as a fraction of the dense network's; of several budgets, that of the tightest."""
        tightest = self.tightest(s)
        return float(tightest.expected(s)) / tightest.dense

    def gradient(self, s: Tensor) -> Tensor:
        """The gradient of `expected` at s; both of shape (U,)."""
        point = s.detach().double().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.expected(point), point)
        return gradient

    def _set_limit(self, budget: FractionBudget, num_units: int, dense: float, what: str) -> None:
        self.num_units, self.dense = num_units, dense
        self.minimum = self.cost(torch.zeros(num_units, dtype=torch.bool))
        self.limit = budget.aim * budget.fraction * self.dense
        if self.limit < self.minimum:
            # Rounded up, so that the number in the message is feasible when the user types it.
            least = min(math.ceil(self.minimum / (budget.aim * self.dense) * 10_000) / 10_000, 1.0)
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

    def __init__(self, budget: FractionBudget, table: CostTable) -> None:
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

    def __init__(self, budget: FractionBudget, cost: ExpectedCost, dense: float, what: str) -> None:
        self._cost = cost
        self._set_limit(budget, cost.num_units, dense, what)

    def cost(self, mask: Tensor) -> float:
        self._check("mask", mask, mask.shape)
        return self._cost.of_mask(mask.bool().to(self.device))

    def expected(self, s: Tensor) -> Tensor:
        self._check("s", s, s.shape[-1:])
        return self._cost.mean(s.to(self.device, torch.float64))


class BoundJoint(BoundBudget):
    """Several budgets over one cost table; the cost is the largest multiple of a limit, and its limit is 1.

    Args:
        parts: the bound budgets.
    """

    def __init__(self, parts: Sequence[BoundBudget]) -> None:
        self._parts, self.num_units, self.limit = tuple(parts), parts[0].num_units, 1.0
        self.dense, self.minimum = self._largest("dense"), self._largest("minimum")

    @property
    def limits(self) -> tuple[float, ...]:
        return tuple(part.limit for part in self._parts)

    def to(self, device: torch.device | str) -> Self:
        moved = super().to(device)
        moved._parts = tuple(part.to(device) for part in self._parts)
        return moved

    # Divisions, not products with 1 / limit: c / K <= 1 in floating-point numbers if and only if c <= K.

    def _largest(self, name: str) -> float:
        return max(_multiple(getattr(part, name), part) for part in self._parts)

    def cost(self, mask: Tensor) -> float:
        return max(_multiple(part.cost(mask), part) for part in self._parts)

    def expected(self, s: Tensor) -> Tensor:
        return self._multiples(s).amax(0)

    def _multiples(self, s: Tensor) -> Tensor:
        """(N, ...): the expected cost in every budget, as a multiple of its limit."""
        return torch.stack([part.expected(s) / (part.limit or 1.0) for part in self._parts])

    def measured(self, mask: Tensor, removed: Sequence[int]) -> float | None:
        return max((one for part in self._parts if (one := part.measured(mask, removed)) is not None), default=None)

    def tightest(self, s: Tensor) -> BoundBudget:
        return self._parts[int(self._multiples(s).argmax())]


def _multiple(cost: float, part: BoundBudget) -> float:
    # A limit of 0 is that of a network in which nothing has a cost.
    return cost / (part.limit or 1.0)


class Budget(ABC):
    """A limit on the cost of a network, as a fraction of the dense network's."""

    @property
    @abstractmethod
    def has_table(self) -> bool:
        """Whether costs are from a table of measurements, which knows layers by their position among the removable."""

    @property
    @abstractmethod
    def smallest(self) -> float:
        """The fraction; of several budgets, the smallest one."""

    @abstractmethod
    def bind(self, table: CostTable) -> BoundBudget:
        """This budget for one network.

        The dense network is that of `table.whole`, if the table has one.

        Raises:
            BudgetError: even the narrowest sub-network costs more; the message gives the feasible range.
        """

    def flops_share(self, costs: CostTable) -> float:
        """About the fraction of the FLOPs that a network within the budget has; 0 if the budget is infeasible."""
        try:
            self.bind(costs)
        except BudgetError:
            return 0.0
        return self.smallest

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The budget with its fraction, or fractions, multiplied; none exceeds 1."""


@dataclass(frozen=True)
class FractionBudget(Budget):
    """A fraction of the dense network's cost, 0 < fraction <= 1."""

    fraction: float

    aim: ClassVar[float] = 1.0  # the part of the budget that is filled
    has_table: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise BudgetError(f"`fraction` of `{type(self).__name__}` is {self.fraction}; it must be in (0, 1]")

    @property
    def smallest(self) -> float:
        return self.fraction

    def scaled(self, factor: float) -> Self:
        return replace(self, fraction=min(1.0, factor * self.fraction))


@dataclass(frozen=True)
class JointBudget(Budget):
    """Several budgets of different kinds, which all hold; `joined` makes it.

    The narrowest sub-network is the same for all of them, so they are feasible together if each of them is.
    """

    budgets: tuple[FractionBudget, ...]

    def __post_init__(self) -> None:
        kinds = [type(budget).__name__ for budget in self.budgets]
        if repeated := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise BudgetError(f"`budget` has several of {', '.join(repeated)}; give the smallest of a kind")

    @property
    def has_table(self) -> bool:
        return any(budget.has_table for budget in self.budgets)

    @property
    def smallest(self) -> float:
        return min(budget.fraction for budget in self.budgets)

    def bind(self, table: CostTable) -> BoundJoint:
        bound, refused = [], []
        for budget in self.budgets:
            try:
                bound.append(budget.bind(table))
            except BudgetError as error:
                refused.append(str(error))
        if refused:
            raise BudgetError("; ".join(refused))
        return BoundJoint(bound)

    def flops_share(self, costs: CostTable) -> float:
        return min(budget.flops_share(costs) for budget in self.budgets)

    def scaled(self, factor: float) -> Self:
        return replace(self, budgets=tuple(budget.scaled(factor) for budget in self.budgets))


def joined(budget: Budget | Sequence[Budget]) -> Budget:
    """One budget: the given one, or a `JointBudget` of a list.

    Raises:
        TypeError: it is not a budget, nor a list of budgets.
        BudgetError: two budgets are of one kind.
    """
    if isinstance(budget, Budget):
        return budget
    try:
        given = tuple(budget)
    except TypeError:
        given = ()
    parts = tuple(one for one in given if isinstance(one, FractionBudget))
    if not parts or len(parts) < len(given):
        raise TypeError(
            f"`budget` is {budget!r}; it must be a budget, such as slimstart.Flops(0.10), or a list of several"
        )
    return parts[0] if len(parts) == 1 else JointBudget(parts)


@dataclass(frozen=True)
class Channels(FractionBudget):
    """At most this fraction of all filters: the paper's budget, K = fraction * number of filters."""

    def bind(self, table: CostTable) -> BoundChannels:
        return BoundChannels(self, table)


@dataclass(frozen=True)
class Params(FractionBudget):
    """At most this fraction of the dense network's parameters; for the paper's policy on average until it settles."""

    def bind(self, table: CostTable) -> BoundPolynomial:
        whole = table.whole or table
        return BoundPolynomial(self, ExpectedCost(table, table.params), whole.dense(whole.params), "parameters")


@dataclass(frozen=True)
class Flops(FractionBudget):
    """At most this fraction of the dense network's FLOPs; one multiply-add is 1.

    They are those of one forward on the example inputs. The paper's policy meets it on average until it settles.
    """

    def bind(self, table: CostTable) -> BoundPolynomial:
        whole = table.whole or table
        return BoundPolynomial(self, ExpectedCost(table, table.flops), whole.dense(whole.flops), "multiply-adds")
