"""The paper's maths on flat tensors: keep-probabilities s, masks, losses; it knows no network.

Here: drawing masks and their score (`probabilities`), the gradient of s from losses (`estimators`), Adam (`adam`), what
a mask or s costs (`budgets`, with the closed form in `expectation` and `dropping`), the nearest s within a budget
(`projection`, and for GPUs `multisection`), masks within it (`cutting`), draws with a cap on their widths (`capping`),
what a training asks of all this (`policies`) and the object that puts it together (`bernoulli`). In place of single
units, widths: by what units are worth (`equal_worth`), or by the losses of pairs (`widths`), both filling the budget
(`fitting`); which units those are says their place in the group (`ranking`). `naming` makes a policy by its name. For
studies: how far losses and gradients of sampled masks lie apart (`dispersion`). Not here: layers, tensors with names,
training steps; costs come in as a plain `slimstart.costs.CostTable`.

Open `bernoulli` first: `BernoulliUnits._learn_` is the paper's update of s in half a dozen lines.
"""

from slimstart.policies.bernoulli import SAMPLINGS, BernoulliUnits
from slimstart.policies.budgets import BoundBudget, Budget, Channels, Flops, Params
from slimstart.policies.cutting import cut
from slimstart.policies.equal_worth import EqualWorth
from slimstart.policies.estimators import ESTIMATORS, Estimator, get_estimator, leave_one_out_of
from slimstart.policies.naming import POLICIES, make_policy
from slimstart.policies.policies import DevicePolicy, Policy, WatchingPolicy
from slimstart.policies.probabilities import sample, score
from slimstart.policies.projection import project, uniform_start
from slimstart.policies.widths import NestedWidths

__all__ = [
    "ESTIMATORS",
    "POLICIES",
    "SAMPLINGS",
    "BernoulliUnits",
    "BoundBudget",
    "Budget",
    "Channels",
    "DevicePolicy",
    "EqualWorth",
    "Estimator",
    "Flops",
    "NestedWidths",
    "Params",
    "Policy",
    "WatchingPolicy",
    "cut",
    "get_estimator",
    "leave_one_out_of",
    "make_policy",
    "project",
    "sample",
    "score",
    "uniform_start",
]
