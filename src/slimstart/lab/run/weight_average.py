r"""An exponential moving average of weights, which follows changes of structure.

After step t, counted from 0, every weight and every running statistic w changes its average a:

.. math:: a \leftarrow d_t a + (1 - d_t) w, \qquad d_t = \min\left(d, \frac{1 + t}{10 + t}\right),

with the decay d of the recipe. The decay starts low, so that the initial weights are soon forgotten.

The averages are those of a copy of the network. Where the structure changes, `SparseTraining.follow` lets the copy
follow: the average of a channel that leaves the network is kept, and comes back with the channel.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.errors import CheckpointError


class WeightAverage:
    """Averages of all floating-point parameters and buffers of a network.

    Args:
        decay: decay of the average, in (0, 1).
        network: the network, whose values are copied.

    Attributes:
        network: the copy that has the averages.
    """

    def __init__(self, decay: float, network: nn.Module) -> None:
        self._decay, self._num_steps = decay, 0
        self.network = copy.deepcopy(network)

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Enter the weights after a step."""
        decay, own = min(self._decay, (1 + self._num_steps) / (10 + self._num_steps)), _averaged(self.network)
        for name, tensor in _averaged(network).items():
            own[name].lerp_(tensor, 1 - decay)
        self._num_steps += 1

    @torch.no_grad()
    def write_to(self, network: nn.Module) -> nn.Module:
        """Give a network of the present structure the averages in place of its weights; returns it."""
        own = _averaged(self.network)
        for name, tensor in _averaged(network).items():
            tensor.copy_(own[name])
        return network

    def state_dict(self) -> dict[str, Any]:
        """Without channels that the network does not have: they are in the state of the `SparseTraining`."""
        tensors = {name: tensor.detach().clone() for name, tensor in _averaged(self.network).items()}
        return {"num_steps": self._num_steps, "tensors": tensors}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            CheckpointError: it is of another network.
        """
        tensors, own = state["tensors"], _averaged(self.network)
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in own.items()}:
            raise CheckpointError("the averaged weights of the checkpoint are those of another network")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self._num_steps = state["num_steps"]


def _averaged(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
