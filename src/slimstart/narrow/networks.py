"""The networks of a draw: the one that is trained, with the optimizer that trains it, and its references.

`Networks` gives every draw exactly the channels that it keeps, so shapes change with every draw. `SlotNetworks`, in
`slotted.py`, is the same with shapes that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.optimizer_state import OptimizerLink
from slimstart.narrow.subnet import Subnet

Named = Sequence[tuple[str, Tensor, Tensor]]
"""(name, dense, narrow), of weights, statistics or optimizer state."""


@dataclass(frozen=True)
class Executed:
    """What runs in a step, zeros of padding included.

    Attributes:
        flops: of one example through the network that is trained.
        reference_flops: of one example through each reference.
        num_filters: of every layer with filters, in the network that is trained.
    """

    flops: int
    reference_flops: tuple[int, ...]
    num_filters: dict[str, int]


@dataclass(frozen=True)
class Traffic:
    """Bytes of weights, statistics and optimizer state that have crossed a bus.

    Attributes:
        up: from the dense model to narrow networks.
        down: back.
    """

    up: int
    down: int


class Networks:
    """Exactly what a draw keeps.

    The dense model is the truth about everything that is not in a draw, and, after `store`, about everything.

    Args:
        model: the dense model.
        optimizer: over its parameters; it holds the narrow ones from the first `enter` on.
        graph: of the model.
        device: for the narrow networks, if not that of the dense model: see `resident.py`.

    Attributes:
        masks: (n, U), of the present draw, as they were drawn. The first network is trained.
        net: the narrow network that is trained.
        version: another one whenever tensors of `net` have been exchanged for others.
    """

    masks: Tensor

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, graph: ChannelGraph, device: torch.device | None = None
    ) -> None:
        self.graph, self.model, self._device = graph, model, device
        self.net = Subnet(model, graph, device)
        self.reference = self._companion()
        named = dict(model.named_parameters())
        narrow = {name: named[name] for name in (graph.tensors if device is None else named) if name in named}
        self.link = OptimizerLink(optimizer, narrow)
        self.version = 0
        self._units: dict[int, Tensor] = {}  # along axes that were asked for
        self._units_of = -1  # the version that they are of

    def _companion(self) -> Subnet:
        """Another narrow network beside the one that is trained."""
        return Subnet(self.model, self.graph, self._device, None if self._device is None else self.net)

    @property
    def device(self) -> torch.device:
        """Where the narrow networks are."""
        return self._device or next(self.model.parameters()).device

    def enter(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        """Become the networks of another draw; what the last ones have learned must have been stored.

        Args:
            masks: (n, U) raw draws.
            keep_probs: s, for room to be made with foresight; None where the structure is fixed.
            look: whether to find out if less room would do.
        """
        self.masks = masks.clone()
        self._load(self.graph.select(masks[0]))

    def prepare(self, masks: Tensor) -> None:
        """These masks will be the next draw: a time to begin with whatever takes long."""

    def exchange(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        """Become the networks of the next draw, with what the present ones have learned; arguments as for `enter`."""
        self.store()
        self.enter(masks, keep_probs, look)

    def _load(self, selection: Selection, ports: bool = True) -> None:
        self.version += 1
        self.net.load(selection, ports)
        self.link.point(self.net.parameters, selection)
        self.__dict__.pop("executed", None)

    def units_along(self, axis: int) -> Tensor:
        """(n,) int64 on the device: whose unit each entry of the trained network is, along an axis of the graph.

        The number of all units stands for none: an entry that always stays, or a passenger's.
        """
        assert self.net.selection is not None
        if self._units_of != self.version:
            self._units, self._units_of = {}, self.version
        if axis not in self._units:
            units, kept = self.graph.units_along(axis), self.net.selection.kept(axis)
            units = units if kept is None else units[kept]
            self._units[axis] = torch.where(units < 0, self.graph.num_units, units).to(self.device)
        return self._units[axis]

    def references(self) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other."""
        for mask in self.masks[1:]:
            self.reference.load(self.graph.select(mask))
            yield self.reference.module

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        """Networks of other masks (n, U), one after the other, with the dense model's values; the draw stays."""
        for mask in masks:
            self.reference.load(self.graph.select(mask))
            yield self.reference.module

    def store(self) -> None:
        """Write what the network and the optimizer have learned into the dense model and state."""
        assert self.net.selection is not None
        self.net.store()
        self.link.store(self.net.selection)

    def reload(self) -> None:
        """The dense model has been loaded: take the new values over."""
        assert self.net.selection is not None
        self._load(self.net.selection)

    def release(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """The optimizer is about to load a dense state dict."""

    def adopt(self) -> None:
        """The optimizer has loaded a dense state dict: take it over."""
        assert self.net.selection is not None
        self.version += 1
        self.link.adopt(self.net.parameters, self.net.selection)

    @cached_property
    def executed(self) -> Executed:
        """What runs in a step now."""
        frames = [self.graph.select(mask) for mask in self.masks.cpu()]
        costs = [self.graph.flops_within(frame.happens[:-1]) for frame in frames]
        return Executed(costs[0], tuple(costs[1:]), num_filters(self.graph, frames[0].mask))

    @property
    def traffic(self) -> Traffic:
        """What has crossed the bus so far, where the dense model is on the other side of one."""
        return Traffic(0, 0)

    @property
    def room(self) -> dict[str, Tensor]:
        """What there is room for, where that is more than the draw; for checkpoints."""
        return {}

    def restore(self, masks: Tensor, room: Mapping[str, Tensor], keep_probs: Tensor | None) -> None:
        """Be again what a checkpoint says, for a dense model that has been loaded."""
        self.enter(masks, keep_probs)


def num_filters(graph: ChannelGraph, units: Tensor) -> dict[str, int]:
    """How many filters of each layer go with these units, those that are always there included."""
    return {name: int((units[owner.clamp(min=0)] | (owner < 0)).sum()) for name, owner in graph.filters.items()}
