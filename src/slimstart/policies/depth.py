r"""How many layers a network keeps at a budget, and which: a rule, fitted to a table of trained networks.

FLOPs grow with depth times width squared. At a fraction b of them, for a training of T steps, the rule keeps

.. math:: \text{layers} \propto b^{\gamma} (T / T_0)^{\lambda}, \qquad
    \gamma = 0.6, \quad \lambda = 0.3, \quad T_0 = 8000

and the rest of the budget goes into widths. Only layers that can be removed count. They come in stages, of layers of
equal size. The stage with most layers loses one first, and of equals the last one: layers on small feature maps add
least. At every number of positions (size of the feature map) at least one layer with weights remains.

The constants are from networks of equal FLOPs, trained for 40 epochs of CIFAR-10, CIFAR-100 and Tiny ImageNet
(`benchmarks/structures`). A deep narrow network learns slowly, so short trainings get fewer layers, but the factor for
the length remains between 1/2 and 2.

With a budget of time, b is the fraction of the FLOPs that a uniform network with the remaining layers has within it. If
layers take time of their own, it is larger with fewer layers.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict

import torch

from slimstart.costs import CostTable, Polynomial
from slimstart.policies.budgets import Budget

GAMMA = 0.6
LENGTH = 0.3  # lambda
STEPS = 8000  # T_0
SHORT, LONG = 0.5, 2.0  # smallest and largest factor for the length: the rule is not extrapolated further


def layers_to_remove(
    costs: CostTable, budget: Budget, exponent: float = GAMMA, total_steps: int | None = None
) -> tuple[int, ...]:
    """Positions in `costs.layers` of the layers that go: as the rule says, but enough remain to fill the budget.

    Args:
        exponent: gamma; 0 keeps all layers. Of several budgets the smallest counts, and of a budget of time the FLOPs
            that it allows.
        total_steps: T; without it the length of the training has no influence.
    """
    if not exponent or not costs.layers:
        return ()
    order = _removal_order(costs)
    length = 1.0 if total_steps is None else min(max(SHORT, (total_steps / STEPS) ** LENGTH), LONG)

    def follows(number: int) -> bool:
        """Whether a network without the first `number` layers has as many as the rule allows."""
        share: float = budget.flops_share(costs.without(order[:number])) ** exponent
        return len(costs.layers) - number <= round(len(costs.layers) * share * length)

    number = bisect.bisect_left(range(len(order)), True, key=follows)
    all_units = torch.ones(costs.num_units, dtype=torch.bool)
    while number and (bound := budget.bind(costs.without(order[:number]))).cost(all_units) < bound.limit:
        number -= 1
    return tuple(sorted(order[:number]))


def _removal_order(costs: CostTable) -> list[int]:
    """The layers that may go, the first to go first; the last layers with some number of positions are not in it."""
    stages: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, layer in enumerate(costs.layers):
        stages[costs.dense(layer.flops), costs.dense(layer.params)].append(i)
    left = _params_by_positions(costs.flops, costs.params)
    order = []
    while any(stages.values()):
        most = max(map(len, stages.values()))
        index = next(stage for stage in reversed(stages.values()) if len(stage) == most).pop()
        own = _params_by_positions(costs.layers[index].flops, costs.layers[index].params)
        if all(left[positions] > params for positions, params in own.items()):
            left -= own
            order.append(index)
    return order


def _params_by_positions(flops: Polynomial, params: Polynomial) -> Counter[int]:
    """By how many positions weights are applied at, the coefficients of their numbers.

    Only weights between two channels are counted: terms of one factor add those of a depthwise layer and of its norm.
    """
    weights = {term.factors: term.coefficient for term in params.terms if len(term.factors) == 2}
    found: Counter[int] = Counter()
    for term in flops.terms:
        if term.factors in weights:
            found[term.coefficient // weights[term.factors]] += weights[term.factors]
    return found
