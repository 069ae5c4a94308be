"""A search, put together: the networks of a draw, what exchanges them, and the steps that train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.graph import ChannelGraph
from slimstart.narrow import Networks, ResidentNetworks, ResidentSlotNetworks, SlotNetworks
from slimstart.policies import DeviceLearner, Learner
from slimstart.steps.backward import Backward
from slimstart.steps.choice import choose
from slimstart.steps.graphs import Steps
from slimstart.steps.search import DeviceSearch, Search

ALIGN = 8  # of networks in static slots, where nobody has said otherwise


@dataclass(frozen=True)
class Assembly:
    """The parts of one search.

    Attributes:
        networks: of the present draw.
        search: which learns, draws, and exchanges the networks.
        steps: captured ones, or None.
        eager: why there are none.
    """

    networks: Networks
    search: Search
    steps: Steps | None
    eager: str | None


def assemble(
    model: nn.Module,
    optimizer: Optimizer,
    graph: ChannelGraph,
    policy: Learner,
    backward: Backward,
    engine: str,
    device: torch.device | None = None,
    wrapped: bool = False,
) -> Assembly:
    """Put a search together, and begin it; arguments as for `SparseTraining`.

    Args:
        device: for the narrow networks, where the dense model is to stay on the host.
        wrapped: whether something else runs in the place of the networks.

    Raises:
        ValueError: this engine cannot be had.
    """
    place = device or device_of(model)
    with _as_if_on(place, optimizer) if device is not None else nullcontext():
        chosen, reason = ("eager", "the network is wrapped") if wrapped else choose(engine, optimizer, place)
    padding = policy.padding
    if chosen == "graphs" and padding is not None and padding.align == 1:
        if engine == "graphs":
            raise ValueError("`engine` is 'graphs' and `align` 1: without room to spare, shapes change at every draw")
        chosen, reason = "eager", "`align` is 1, so shapes change at every draw"
    align = 1 if padding is None else padding.align or (ALIGN if chosen == "graphs" else 1)
    steps: Steps | None = None
    networks: Networks
    if align == 1 and chosen == "eager":
        networks = (
            Networks(model, optimizer, graph) if device is None else ResidentNetworks(model, optimizer, graph, device)
        )
        search = Search(policy, networks)
    else:
        spread = None if padding is None else padding.spread
        networks = slots = (
            SlotNetworks(model, optimizer, graph, align, spread)
            if device is None
            else ResidentSlotNetworks(model, optimizer, graph, align, spread, device)
        )
        search = Search(policy, networks)
        if chosen == "graphs":
            losses = torch.zeros(policy.num_masks, dtype=torch.float64, device=place)
            steps = Steps(slots, backward, losses)
            if isinstance(policy, DeviceLearner) and policy.capturable:
                search = DeviceSearch(policy, slots, losses, steps.ok, steps.side)
    search.begin()
    return Assembly(networks, search, steps, reason)


@contextmanager
def _as_if_on(device: torch.device, optimizer: Optimizer) -> Iterator[None]:
    """The optimizer's groups hold stand-ins on the device, while it is asked what it can do there."""
    held = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().new_empty(0, device=device), False) for p in group["params"]]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params
