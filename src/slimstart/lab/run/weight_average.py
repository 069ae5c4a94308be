r"""An exponential moving average of weights, which follows changes of structure.

After step t, counted from 0, every weight and every running statistic w changes its average a:

.. math:: a \leftarrow d_t a + (1 - d_t) w, \qquad d_t = \min\left(d, \frac{1 + t}{10 + t}\right),

with the decay d of the recipe. The decay starts low, so that the initial weights are soon forgotten.

The average of a channel that leaves the network is kept, and comes back with the channel. `SparseTraining.follow` does
the same for a copy of the model; here the averages are tensors by name, dense where the structure may change, so that a
checkpoint holds all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.errors import CheckpointError
from slimstart.graph import ChannelGraph, Selection


class WeightAverage:
    """Averages of all floating-point parameters and buffers of a network.

    Args:
        decay: decay of the average, in (0, 1).
        dense: the network with all its channels; its values are copied.
        graph: channel graph of that network, where its structure changes.
    """

    def __init__(self, decay: float, dense: nn.Module, graph: ChannelGraph | None = None) -> None:
        self._decay, self._graph, self._num_steps = decay, graph, 0
        self._dense = {name: tensor.detach().clone() for name, tensor in _averaged(dense).items()}
        self._narrow: dict[str, Tensor] = {}
        self._selection: Selection | None = None

    @torch.no_grad()
    def update(self, network: nn.Module, mask: Tensor | None = None) -> None:
        """Enter the weights after a step.

        Args:
            network: whose names are those of the dense one.
            mask: the channels that it has; None for all.
        """
        self._take(mask)
        decay = min(self._decay, (1 + self._num_steps) / (10 + self._num_steps))
        for name, tensor in _averaged(network).items():
            self._present[name].lerp_(tensor.detach(), 1 - decay)
        self._num_steps += 1

    @torch.no_grad()
    def write_to(self, network: nn.Module, mask: Tensor | None = None) -> nn.Module:
        """Give a network of this structure the averages in place of its weights; returns it."""
        self._take(mask)
        for name, tensor in _averaged(network).items():
            tensor.copy_(self._present[name])
        return network

    def network(self, network: nn.Module) -> nn.Module:
        """A copy of the network that has the averages in place of its weights."""
        return self.write_to(copy.deepcopy(network))

    @property
    def _present(self) -> dict[str, Tensor]:
        """The averages of the channels that the network has."""
        return self._dense if self._selection is None else self._narrow

    def _take(self, mask: Tensor | None) -> None:
        """Change to the structure of a mask."""
        if mask is None or (self._selection is not None and torch.equal(mask, self._selection.mask)):
            return
        assert self._graph is not None
        self._put_back()
        self._selection = self._graph.select(mask)
        self._narrow = {name: self._selection.gather(name, dense) for name, dense in self._dense.items()}

    def _put_back(self) -> None:
        if self._selection is not None:
            for name, narrow in self._narrow.items():
                self._selection.scatter_(name, self._dense[name], narrow)

    def state_dict(self) -> dict[str, Any]:
        self._put_back()
        return {"num_steps": self._num_steps, "tensors": {name: dense.clone() for name, dense in self._dense.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            CheckpointError: it is of another network.
        """
        tensors = state["tensors"]
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in self._dense.items()}:
            raise CheckpointError("the averaged weights of the checkpoint are those of another network")
        for name, dense in self._dense.items():
            dense.copy_(tensors[name])
        self._num_steps, self._selection, self._narrow = state["num_steps"], None, {}


def _averaged(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
