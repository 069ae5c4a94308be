"""The paper's maths on flat tensors: keep-probabilities s, masks, losses; it knows no network.

Here: drawing masks and their score (`probabilities`), the gradient of s from losses (`estimators`), what a mask or s
costs (`budgets`, with the closed form in `expectation`), the nearest s within a budget (`projection`), and the object
that puts them together (`policies`). Not here: layers, tensors with names, training steps; costs come in as a plain
`slimstart.costs.CostTable`.

Open `policies` first: `BernoulliUnits.update` is the paper's update of s in a dozen lines.
"""

from slimstart.structure.budgets import BoundBudget, Budget, Channels, Flops, Params
from slimstart.structure.estimators import ESTIMATORS, Estimator, get_estimator, leave_one_out_of
from slimstart.structure.policies import BernoulliUnits, Policy
from slimstart.structure.probabilities import sample, score
from slimstart.structure.projection import project, uniform_start

__all__ = [
    "ESTIMATORS",
    "BernoulliUnits",
    "BoundBudget",
    "Budget",
    "Channels",
    "Estimator",
    "Flops",
    "Params",
    "Policy",
    "get_estimator",
    "leave_one_out_of",
    "project",
    "sample",
    "score",
    "uniform_start",
]
