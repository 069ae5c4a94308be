"""The choice between eager and captured steps, and what a training needs for either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.distributed.process_group import process_group
from slimstart.graph import ChannelGraph
from slimstart.kernels import use_triton
from slimstart.narrow import Networks, Planner
from slimstart.policies import DeviceLearner, Learner
from slimstart.steps.drawing import DeviceDrawing, Drawing
from slimstart.steps.eager import Backward
from slimstart.steps.graphs import Steps
from slimstart.steps.optimizers import fuse
from slimstart.steps.structure import Structure
from slimstart.steps.unit_gradients import UnitGradients
from slimstart.steps.wrappers import data_parallel_around

ENGINES = ("auto", "eager", "graphs")
ALIGN = 8  # alignment of capacity in captured steps, where a policy sets none


def reason_for_eager(engine: str, optimizer: Optimizer, device: torch.device) -> str | None:
    """The reason for eager steps; None for captured ones, which are chosen if the hardware permits it.

    Raises:
        ValueError: there is no such engine, or "graphs" was asked for and is not possible.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}; it must be one of {', '.join(map(repr, ENGINES))}")
    if engine == "eager":
        return "it was asked for"
    reason = None
    if device.type != "cuda":
        reason = f"the model is on {device.type}, and CUDA graphs need a GPU"
    elif device.index not in (None, torch.cuda.current_device()):
        reason = f"the model is on {device}, which is not the current device; call torch.cuda.set_device before"
    elif not use_triton(torch.empty(0, device=device)):
        reason = "Triton, which compiles the kernels, does not work here"
    elif not fuse(optimizer, device):
        reason = f"{type(optimizer).__name__} has no fused step for a CUDA graph (SGD, Adam and AdamW have one)"
    if engine == "graphs" and reason is not None:
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    return reason


def assemble(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    graph: ChannelGraph,
    learner: Learner,
    gradients: UnitGradients | None,
    backward: Backward,
    engine: str,
    device: torch.device | None,
) -> tuple[Structure, Steps | None, str | None]:
    """Choose the engine, and whether networks have spare capacity and tensors keep their addresses.

    Args:
        model, optimizers, graph, engine: as in `SparseTraining`.
        gradients: unit gradients, for a policy that learns from gradients.
        device: device of the narrow networks, where dense weights are stored on the host.

    Returns:
        The structure, the captured steps or None, and the reason for None.
    """
    place, from_losses = device or device_of(model), gradients is None
    padding = None if graph.over_channels else learner.padding  # padding would count in norms over channels
    if device is not None and from_losses:
        reason: str | None = "dense weights are on the host, and references are copied from there"
    elif len(optimizers) > 1:
        reason = "there are several optimizers"
    elif process_group(data_parallel_around(model)).size > 1:
        reason = "several processes train together"
    else:
        reason = reason_for_eager(engine, optimizers[0], place)
        if reason is None and padding is not None and padding.align == 1:
            reason = "`align` is 1, so shapes change at every structure update"
        elif reason is None and padding is None and learner.num_masks > 1:
            why = "no padding" if learner.padding is None else "padding would count in norms over channels"
            reason = f"the policy has references and {why}, so their shapes change at every structure update"
    if engine == "graphs" and reason is not None:
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    align = 1 if padding is None else padding.align or (ALIGN if reason is None else 1)
    planner = Planner(graph, align, padding.spread) if padding is not None and align > 1 else None
    static = reason is None and planner is not None and from_losses
    networks = Networks(model, optimizers, graph, planner, static, device)
    if reason is not None:
        return Structure(networks, learner, Drawing(learner), gradients), None, reason
    losses = torch.zeros(learner.num_masks, dtype=torch.float64, device=place)
    steps = Steps(networks, backward, losses)
    drawing = Drawing(learner)
    if static and isinstance(learner, DeviceLearner) and learner.capturable:
        drawing = DeviceDrawing(learner, networks, losses, steps.ok, steps.side)
    return Structure(networks, learner, drawing, gradients), steps, None
