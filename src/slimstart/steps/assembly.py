"""What a training is made of: its networks, what draws their masks, and captured steps where there can be some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.graph import ChannelGraph
from slimstart.narrow import Networks, Planner
from slimstart.policies import DeviceLearner, Learner, Policy
from slimstart.steps.backward import Backward
from slimstart.steps.choice import choose
from slimstart.steps.drawing import DeviceDrawing, Drawing
from slimstart.steps.graphs import Steps
from slimstart.steps.wrappers import data_parallel_around, process_group

ALIGN = 8  # of capacity in captured steps, where a policy leaves it open


@dataclass(frozen=True)
class Assembly:
    """The parts of a training.

    Attributes:
        networks: the model, and its references.
        drawing: learns from losses, and draws masks.
        steps: captured ones, or None.
        eager: why there are none.
    """

    networks: Networks
    drawing: Drawing
    steps: Steps | None
    eager: str | None


def assemble(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    graph: ChannelGraph,
    policy: Policy,
    learner: Learner,
    backward: Backward,
    engine: str,
    device: torch.device | None,
) -> Assembly:
    """Choose how steps run, and make everything for it; arguments as for `SparseTraining`.

    Args:
        device: of the narrow networks, where dense weights stay on the host.

    Raises:
        ValueError: this engine cannot be had.
    """
    place, padding, from_losses = device or device_of(model), learner.padding, policy.learns_from == "losses"
    chosen, reason = _choose(model, optimizers, learner, engine, place, on_host=device is not None and from_losses)
    if engine == "graphs" and chosen == "eager":
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    align = 1 if padding is None else padding.align or (ALIGN if chosen == "graphs" else 1)
    planner = Planner(graph, align, padding.spread) if padding is not None and align > 1 else None
    static = chosen == "graphs" and planner is not None and from_losses
    networks = Networks(model, optimizers, graph, planner, static, device)
    if chosen == "eager":
        return Assembly(networks, Drawing(learner), None, reason)
    losses = torch.zeros(learner.num_masks, dtype=torch.float64, device=place)
    steps = Steps(networks, backward, losses)
    drawing = Drawing(learner)
    if static and isinstance(learner, DeviceLearner) and learner.capturable:
        drawing = DeviceDrawing(learner, networks, losses, steps.ok, steps.side)
    return Assembly(networks, drawing, steps, None)


def _choose(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    learner: Learner,
    engine: str,
    place: torch.device,
    on_host: bool,
) -> tuple[str, str | None]:
    """("eager" or "graphs", why eager)."""
    if on_host:
        return "eager", "dense weights are on the host, from where references are filled"
    if len(optimizers) > 1:
        return "eager", "there are several optimizers"
    if process_group(data_parallel_around(model)).size > 1:
        return "eager", "several processes train together"
    chosen, reason = choose(engine, optimizers[0], place)
    if chosen == "graphs" and learner.padding is not None and learner.padding.align == 1:
        return "eager", "`align` is 1, so shapes change at every draw"
    if chosen == "graphs" and learner.padding is None and learner.num_masks > 1:
        return "eager", "the policy has references and no padding, so their shapes change at every draw"
    return chosen, reason
