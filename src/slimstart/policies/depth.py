r"""How many layers a network keeps at a budget, and which: a rule, fitted to a table of trained networks.

FLOPs grow with depth times width squared. At a fraction b of them, for a training of T steps, the rule keeps

.. math:: \text{layers} \propto b^{\gamma} (T / T_0)^{\lambda},
    \qquad \gamma = 0.6, \quad \lambda = 0.3, \quad T_0 = 8000

and the rest of the budget goes into widths. Only layers that can be removed count. A deep narrow network without
shortcuts learns slowly, so short trainings (T < T_0) get fewer layers; residual branches are not concerned. The factor
for the length remains between 1/2 and 2.

Layers come in stages, of layers of equal size. The stage with most layers loses its last one first. Of equals that is
the one at the size of the feature map at which most layers are left, such as a convolution within the first block of a
residual stage; then the last one: layers on small feature maps add least. At every size of the feature map at least one
layer with weights remains.

The convolutions that remain see enough of the image. A k x k convolution with dilation d widens what one output depends
on by (k - 1) d of its n x n inputs, a fraction (k - 1) d / n of the image. The sum of these fractions remains at least
3/4, or half of the dense network's where that is less. This matters in networks of few stages: those of many stages see
all of the image in any case, and it does not apply to networks without such convolutions.

The constants are from networks of equal FLOPs, trained for 40 epochs of CIFAR-10, CIFAR-100 and Tiny ImageNet
(`benchmarks/structures`).

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
SEEN = 0.75  # fraction of the image that convolutions see, or half of what they see in the dense network
SHORT, LONG = 0.5, 2.0  # smallest and largest factor for the length: the rule is not extrapolated further


def layers_to_remove(
    costs: CostTable, budget: Budget, exponent: float = GAMMA, total_steps: int | None = None
) -> tuple[int, ...]:
    """Positions in `costs.layers` of the layers that go.

    That is the number of the rule, but enough layers remain to fill the budget and to see the image, and more go if
    otherwise one unit per group would exceed it.

    Args:
        exponent: gamma; 0 keeps all layers. Of several budgets the smallest counts, and of a budget of time the FLOPs
            that it allows.
        total_steps: T; without it the length of the training has no influence.

    Raises:
        BudgetError: one unit per group exceeds the budget, without all layers that may go.
    """
    if not exponent or not costs.layers:
        return ()
    order = _removal_order(costs)
    length = 1.0 if total_steps is None else min(max(SHORT, (total_steps / STEPS) ** LENGTH), LONG)
    num_residual = sum(not layer.outputs.numel() for layer in costs.layers)  # no channels replace those of a branch
    num_sequential = len(costs.layers) - num_residual
    most = num_residual * max(1.0, length) + num_sequential * length

    def follows(number: int) -> bool:
        """Whether a network without the first `number` layers has as many as the rule allows."""
        share: float = budget.flops_share(costs.without(order[:number])) ** exponent
        return len(costs.layers) - number <= round(most * share)

    number = bisect.bisect_left(range(len(order)), True, key=follows)
    # Sums of floating-point numbers in another order differ in their last digits.
    enough = min(SEEN, costs.reach / 2) - 1e-9
    while (
        number
        and costs.without(order[:number]).reach < enough
        and budget.flops_share(costs.without(order[: number - 1])) > 0
    ):
        number -= 1
    all_units = torch.ones(costs.num_units, dtype=torch.bool)
    while number and (bound := budget.bind(costs.without(order[:number]))).cost(all_units) < bound.limit:
        number -= 1
    return tuple(sorted(order[:number]))


def _removal_order(costs: CostTable) -> list[int]:
    """The layers that may go, the first to go first; the last layers with some number of positions are not in it."""
    weights = [_params_by_positions(layer.flops, layer.params) for layer in costs.layers]
    stages: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # by positions, FLOPs and parameters
    for i, layer in enumerate(costs.layers):
        positions = max(weights[i], key=weights[i].__getitem__, default=0)
        stages[positions, costs.dense(layer.flops), costs.dense(layer.params)].append(i)
    left = _params_by_positions(costs.flops, costs.params)
    order = []
    for _ in costs.layers:
        present = Counter(positions for (positions, *_), own in stages.items() for _ in own)
        chosen = max(reversed(stages), key=lambda stage: (len(stages[stage]), present[stage[0]]))
        # Of equals at the same positions, the smallest.
        equals = (one for one in stages if one[0] == chosen[0] and len(stages[one]) == len(stages[chosen]))
        index = stages[min(equals, key=lambda stage: stage[1:])].pop()
        if all(left[positions] > params for positions, params in weights[index].items()):
            left -= weights[index]
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
