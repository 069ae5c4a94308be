r"""Watching: tell a policy, before every step of the optimizer, how the loss changes with each unit.

All that other layers read of a unit goes through columns of their weights, so a gate a at the unit is a factor of those
columns, and at a = 1

.. math:: \partial L / \partial a = \sum_{\text{columns}} w \cdot \partial L / \partial w

comes from gradients that are there already. A hook of the user's own optimizer does it, so it happens in any loop, and
in a CUDA graph that holds the optimizer's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph
from slimstart.graph.readers import readers
from slimstart.structure import WatchingPolicy
from slimstart.subnet import Networks


class Watch:
    """The gradients of all units, told to a policy.

    Args:
        policy: that wants to know.
        networks: of which the one that is trained is watched.
        model: the dense one, of which the graph is.

    Attributes:
        active: whether the policy is told.
    """

    def __init__(
        self, policy: WatchingPolicy, networks: Networks, graph: ChannelGraph, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._policy, self._networks, self._num_units = policy, networks, graph.num_units
        self._readers = readers(graph, model)
        self.active = True
        policy.to(networks.device)
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.active:
            return
        columns, units = [], []
        for reader in self._readers:
            weight = self._networks.net.parameters[reader.weight]
            if weight.grad is not None:  # none where it is frozen
                others = [dim for dim in range(weight.dim()) if dim != reader.dim]
                columns.append((weight * weight.grad).sum(others).double())
                units.append(self._networks.units_along(reader.axis))
        if columns:
            gradients = torch.zeros(self._num_units + 1, dtype=torch.float64, device=columns[0].device)
            gradients.index_add_(0, torch.cat(units), torch.cat(columns))
            self._policy.watch_(gradients[:-1])  # the last is of what always stays
