"""Relaxations by name: gates that learn a structure on a dense network, in place of a policy on narrow ones.

`gates` has their base class; `sampled_gates`, `thresholded_gates` and `grow_efficient` have the kinds.
"""

from __future__ import annotations

from torch import nn

from slimstart.errors import ConfigError, TraceError
from slimstart.graph import ChannelGraph
from slimstart.lab.methods.gates import Gates
from slimstart.lab.methods.grow_efficient import GrowEfficientGates
from slimstart.lab.methods.sampled_gates import BernoulliGates, GumbelGates, HardConcreteGates, SampledGates
from slimstart.lab.methods.thresholded_gates import SigmoidGates, SoftThresholdGates
from slimstart.policies import Budget

_GATES: dict[str, type[SampledGates] | type[SigmoidGates] | type[SoftThresholdGates] | type[GrowEfficientGates]] = {
    "ste": BernoulliGates,
    "sigmoid_ste": SigmoidGates,
    "gumbel": GumbelGates,
    "hard_concrete": HardConcreteGates,
    "soft_threshold": SoftThresholdGates,
    "grow_efficient": GrowEfficientGates,
}

RELAXATIONS = tuple(name for name in _GATES if name != "grow_efficient")
"""Names that `estimator` of a recipe may have; GrowEfficient is a method of its own."""


def make_gates(
    name: str, model: nn.Module, graph: ChannelGraph, budget: Budget, lr: float | None, total_steps: int, seed: int
) -> Gates:
    """The gates of a relaxation, on the device of the model.

    Args:
        name: one of `RELAXATIONS`, or "grow_efficient".
        model: dense; the gates of "soft_threshold" keep reading its weights.
        graph: channel graph of the model, with coupling "stream".
        budget: budget of the finished network.
        lr: learning rate of s; by default the relaxation's own.
        total_steps: number of steps of the search.
        seed: seed of the candidates; gates themselves draw from torch's own generator.
    """
    if name not in _GATES:
        raise ConfigError(f"`name` is {name!r}; it must be one of {', '.join(map(repr, _GATES))}")
    if graph.num_units == 0:
        raise TraceError("no channel of this network can go, so there is nothing to gate; print the graph to see why")
    kind = _GATES[name]
    return kind(model, graph, budget, kind.default_lr if lr is None else lr, total_steps, seed)
