"""Learning of the structure, on flat tensors: widths or keep-probabilities, masks, budgets.

Nothing here knows a network: its cost comes in as a `slimstart.costs.CostTable`, and which tensors a mask concerns is
known to `slimstart.graph`.

Open `base.py` first: the contract between a training and a policy. There are two policies:

- `equal_worth.py` learns widths from gradients (the default). Widths are rounded in `widths.py`, here and everywhere;
  `depth.py` has a rule for how many layers remain.
- `paper.py` is Algorithm 1 of the paper: masks are drawn (`masks.py`), their losses give a gradient of the
  keep-probabilities (`estimators.py`), which takes a step (`adam.py`) and is projected on the budget (`projection.py`).

Both use `budgets.py`: the exact cost of a mask, and the expected cost of keep-probabilities in closed form
(`expected_cost.py`, on index tensors of `ragged.py`); `latency.py` is a budget of time and `memory.py` one of bytes.
`named.py` finds a policy by its name.
"""

from slimstart.policies.base import DeviceLearner, GradientLearner, Learner, Padding, Policy
from slimstart.policies.budgets import BoundBudget, Budget, Channels, Flops, FractionBudget, JointBudget, Params, joined
from slimstart.policies.equal_worth import EqualWorth, EqualWorthSearch
from slimstart.policies.estimators import ESTIMATORS, Estimator, get_estimator, leave_one_out_of, score
from slimstart.policies.latency import Latency
from slimstart.policies.masks import cut, sample
from slimstart.policies.memory import Memory
from slimstart.policies.named import POLICIES, get_policy
from slimstart.policies.paper import SAMPLINGS, Paper, PaperSearch
from slimstart.policies.projection import project, uniform_start

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
    "FractionBudget",
    "GradientLearner",
    "JointBudget",
    "Latency",
    "Learner",
    "Memory",
    "Padding",
    "Paper",
    "PaperSearch",
    "Params",
    "Policy",
    "cut",
    "get_estimator",
    "get_policy",
    "joined",
    "leave_one_out_of",
    "project",
    "sample",
    "score",
    "uniform_start",
]
