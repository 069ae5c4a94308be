r"""Memory of a training step as a budget: what is kept from the forward until the optimizer's step, counted exactly.

A step keeps its parameters, their gradients and optimizer state, and the tensors that the forward saves for the
backward. Saved tensors are activations, so that their bytes are linear in the numbers of channels. With :math:`w_g` the
units of group g,

.. math:: M(m) = c + \sum_g a_g \, w_g(m) + b \, \mathrm{params}(m),

where b are the bytes of a parameter with its gradient and state, and c and :math:`a_g` are counted in forwards of
networks that differ in one group (`slimstart.measure_memory`). Removable layers have such a sum of their own, which is
subtracted where they are gone. Autocast saves a copy of every weight in lower precision, so that b is larger for
weights between two channels; copies of other weights are linear in widths. All coefficients are whole numbers of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from slimstart.costs import CostTable, Factor, Polynomial, Term
from slimstart.errors import BudgetError
from slimstart.policies.budgets import BoundPolynomial, FractionBudget
from slimstart.policies.expected_cost import ExpectedCost
from slimstart.policies.latency import digest
from slimstart.policies.widths import flops_share


@dataclass(frozen=True)
class SavedBytes:
    """What a part of the network saves for the backward.

    Attributes:
        constant: bytes that do not depend on widths.
        of_units: bytes of every unit of each group.
    """

    constant: int
    of_units: Sequence[int]


@dataclass(frozen=True)
class MemoryTable:
    """Bytes that a training step of one network keeps; made by `slimstart.measure_memory`.

    Attributes:
        structure: digest of the units of the cost table to which the bytes belong.
        batch: shapes of the inputs.
        dense_bytes: of the dense network.
        per_parameter: bytes of a parameter with its gradient and optimizer state.
        per_copy: bytes of the copy of a weight between two channels that autocast saves; 0 without autocast.
        saved: of the whole network, without these copies.
        layers: what the network saves less without each of `CostTable.layers`.
    """

    structure: str
    batch: str
    dense_bytes: int
    per_parameter: int
    per_copy: int
    saved: SavedBytes = field(repr=False)
    layers: Sequence[SavedBytes] = field(repr=False)

    def polynomial(self, costs: CostTable) -> tuple[CostTable, Polynomial]:
        """The bytes of a network, over a table that has the units of each group as additional factors.

        Args:
            costs: of the network, or of the network without some of its layers.

        Raises:
            BudgetError: the bytes are of another network.
        """
        if digest(costs) != self.structure:
            raise BudgetError(
                "`table` was counted on another network, or with another coupling or other `keep` or `norms`; count on "
                "this one, with the arguments of the training"
            )
        whole = costs.whole or costs
        removed = [i for i, layer in enumerate(whole.layers) if not any(layer is one for one in costs.layers)]
        table = _with_unit_counts(whole).without(removed)
        constant, terms = self.saved.constant, Counter(dict(enumerate(self.saved.of_units)))
        for layer in removed:
            constant -= self.layers[layer].constant
            terms.subtract(dict(enumerate(self.layers[layer].of_units)))
        first = len(whole.factors)
        saved = tuple(Term(number, (first + group,)) for group, number in terms.items() if number)
        constant += self.per_parameter * table.params.constant
        params = [replace(term, coefficient=self.per_parameter * term.coefficient) for term in table.params.terms]
        copies = [
            replace(term, coefficient=self.per_copy * term.coefficient) for term in between_channels(table.params)
        ]
        return table, Polynomial(constant, (*saved, *params, *copies))


def between_channels(params: Polynomial) -> tuple[Term, ...]:
    """The terms of weights between two channels that can be removed."""
    return tuple(term for term in params.terms if len(term.factors) == 2)


@dataclass(frozen=True)
class Memory(FractionBudget):
    """At most this fraction of the bytes that a dense training step keeps, with a table of `slimstart.measure_memory`.

    That is parameters, gradients, optimizer state and saved activations. It is not all that a device needs: temporary
    tensors of single operations are not counted, nor the stored weights that are not in the network
    (`full_model_device="cpu"` stores them on the host).
    """

    table: MemoryTable = field(repr=False)

    has_table: ClassVar[bool] = True

    @classmethod
    def of(cls, num_bytes: float, table: MemoryTable) -> Memory:
        """The budget of so many bytes."""
        return cls(num_bytes / table.dense_bytes, table)

    def bind(self, table: CostTable) -> BoundPolynomial:
        counted, polynomial = self.table.polynomial(table)
        return BoundPolynomial(self, ExpectedCost(counted, polynomial), self.table.dense_bytes, "bytes")

    def flops_share(self, costs: CostTable) -> float:
        return flops_share(self, costs)


def _with_unit_counts(costs: CostTable) -> CostTable:
    """The table with a factor for each group, the number of its units, after its own factors."""
    num_events, width = costs.events.shape
    own = torch.full((costs.num_units, width), -1)
    own[:, 0] = torch.arange(costs.num_units)
    group = torch.unique(costs.unit_group.cpu(), return_inverse=True)[1]
    factors = []
    for number in range(int(group.max()) + 1):
        units = (group == number).nonzero()[:, 0]
        factors.append(Factor(0, num_events + units, torch.ones_like(units)))
    return replace(costs, events=torch.cat([costs.events.cpu(), own]), factors=(*costs.factors, *factors))
