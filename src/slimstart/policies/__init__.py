"""What is learned about the structure, on flat tensors: keep-probabilities or widths, masks, losses; no network.

Two policies: `paper` (Algorithm 1 of the paper) and `equal_worth` (widths from gradients), each with its settings and
its learner. `base` is the contract with a training, for policies of your own; `registry` has the names.

The mathematics of `paper`: drawing masks and their score (`probabilities`), with a cap on widths (`capping`); the
gradient of s (`estimators`), Adam (`adam`), the nearest s within the budget (`projection`, on GPUs `multisection`),
masks within the budget (`cutting`). Of `equal_worth`: widths that fill the budget (`widths`, the one place where widths
are rounded) and the redundancy of units (`participation`). Of both: the cost of a mask and of s (`budgets`, the closed
form in `expectation` and `dropping`) and the order of units in a group (`ranking`). `dispersion` is for studies. Costs
come in as a plain `slimstart.costs.CostTable`.

Open `paper` first: `PaperSearch._learn_` is the paper's update of s in half a dozen lines.
"""

from slimstart.policies.base import DeviceLearner, GradientLearner, Learner, Padding, Policy
from slimstart.policies.budgets import BoundBudget, Budget, Channels, Flops, Params
from slimstart.policies.equal_worth import EqualWorth, EqualWorthSearch
from slimstart.policies.estimators import ESTIMATORS, Estimator, get_estimator, leave_one_out_of
from slimstart.policies.masks import cut
from slimstart.policies.paper import SAMPLINGS, Paper, PaperSearch
from slimstart.policies.probabilities import sample, score
from slimstart.policies.projection import project, uniform_start
from slimstart.policies.registry import POLICIES, get_policy

__all__ = [
    "ESTIMATORS",
    "POLICIES",
    "SAMPLINGS",
    "BoundBudget",
    "Budget",
    "Channels",
    "DeviceLearner",
    "EqualWorth",
    "EqualWorthSearch",
    "Estimator",
    "Flops",
    "GradientLearner",
    "Learner",
    "Padding",
    "Paper",
    "PaperSearch",
    "Params",
    "Policy",
    "cut",
    "get_estimator",
    "get_policy",
    "leave_one_out_of",
    "project",
    "sample",
    "score",
    "uniform_start",
]
