r"""How many layers a network keeps at a budget, and which: a rule, not something learned.

FLOPs grow with depth times width squared. At a fraction b of them, the rule lets both shrink alike:

.. math:: \text{layers} \propto b^{\gamma}, \qquad \text{width}^2 \propto b^{1 - \gamma}, \qquad \gamma = 1/2

Only layers that can be removed count. They come in stages, runs of layers of equal size. The stages with most layers
lose one first, and of equals the last.
"""

from __future__ import annotations

import torch

from slimstart.costs import CostTable
from slimstart.policies.budgets import Budget


def layers_to_remove(costs: CostTable, budget: Budget, exponent: float) -> tuple[int, ...]:
    """Positions in `costs.layers` of the layers that go: as the rule says, but enough remain to fill the budget.

    Args:
        exponent: gamma; 0 keeps all layers. Of several budgets the smallest counts.
    """
    order = _removal_order(costs)
    number = len(order) - round(len(order) * budget.smallest**exponent)
    limit, all_units = budget.bind(costs).limit, torch.ones(costs.num_units, dtype=torch.bool)
    while number and budget.bind(costs.without(order[:number])).cost(all_units) < limit:
        number -= 1
    return tuple(sorted(order[:number]))


def _removal_order(costs: CostTable) -> list[int]:
    """All removable layers, the first to go first."""
    sizes = [(costs.dense(layer.flops), costs.dense(layer.params)) for layer in costs.layers]
    stages: list[list[int]] = []
    for i, size in enumerate(sizes):
        if i and sizes[i - 1] == size:
            stages[-1].append(i)
        else:
            stages.append([i])
    order = []
    for _ in sizes:
        most = max(map(len, stages))
        order.append(next(stage for stage in reversed(stages) if len(stage) == most).pop())
    return order
