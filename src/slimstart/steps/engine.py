"""The choice between eager and captured steps, and what a training needs for either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.distributed.process_group import process_group
from slimstart.graph import ChannelGraph
from slimstart.kernels import use_triton
from slimstart.narrow import Networks, Planner
from slimstart.policies import DeviceLearner, Learner, Padding
from slimstart.steps.depthwise_mode import AllWidths
from slimstart.steps.drawing import DeviceDrawing, Drawing
from slimstart.steps.eager import Backward, check_finite
from slimstart.steps.graphs import Steps
from slimstart.steps.optimizers import fuse
from slimstart.steps.structure import Structure
from slimstart.steps.unit_gradients import UnitGradients
from slimstart.steps.wrappers import data_parallel_around

ENGINES = ("auto", "eager", "graphs")
ALIGN = 8  # alignment of capacity in captured steps, where a policy sets none


class Stepping:
    """Base of a training whose steps may be captured.

    Attributes:
        num_steps: number of steps taken.
    """

    num_steps: int
    _steps: Steps | None
    _eager: str | None  # reason for which there are no captured steps
    _unchanged: str  # subject and verb of what a loss that is not finite leaves unchanged, for the message

    @property
    def reason(self) -> str | None:
        """The reason for eager steps, or, with captured steps, for the last eager one; None if it was captured."""
        return self._eager if self._steps is None else self._steps.reason

    @property
    def engine(self) -> str:
        """The engine of the last step: "graphs", or "eager", also where a step could not be captured."""
        return "graphs" if self.reason is None else "eager"

    @property
    def _kernels(self) -> AbstractContextManager[object]:
        """Context for eager forwards with the kernels of captured steps, so that no further ones are compiled."""
        return nullcontext() if self._steps is None else AllWidths()

    def _check(self, wait: bool = False) -> None:
        """Raise if a captured step has met a loss that is not finite.

        Args:
            wait: whether to wait for the device, so that the last step is included.
        """
        if self._steps is not None:
            if wait:
                torch.cuda.synchronize()
            if self._steps.failed:
                self.num_steps -= self._steps.reset()
                check_finite(self.num_steps, math.nan, unchanged=self._unchanged)


def choose(engine: str, optimizer: Optimizer, device: torch.device) -> tuple[str, str | None]:
    """("eager" or "graphs", reason for "eager"), as close to the user's wish as the hardware permits.

    Raises:
        ValueError: there is no such engine, or "graphs" was asked for and is not possible.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}; it must be one of {', '.join(map(repr, ENGINES))}")
    if engine == "eager":
        return "eager", "it was asked for"
    reason = None
    if device.type != "cuda":
        reason = f"the model is on {device.type}, and CUDA graphs need a GPU"
    elif device.index not in (None, torch.cuda.current_device()):
        reason = f"the model is on {device}, which is not the current device; call torch.cuda.set_device before"
    elif not use_triton(torch.empty(0, device=device)):
        reason = "Triton, which compiles the kernels, does not work here"
    elif not fuse(optimizer, device):
        reason = f"{type(optimizer).__name__} has no fused step for a CUDA graph (SGD, Adam and AdamW have one)"
    if reason is None:
        return "graphs", None
    if engine == "graphs":
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    return "eager", reason


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
        learner: running state of the policy.
        gradients: unit gradients, for a policy that learns from gradients.
        backward: backward and update.
        device: device of the narrow networks, where dense weights are stored on the host.

    Returns:
        The structure, the captured steps or None, and the reason for None.

    Raises:
        ValueError: this engine is not possible.
    """
    place, from_losses = device or device_of(model), gradients is None
    padding = None if graph.over_channels else learner.padding  # padding would count in norms over channels
    on_host = device is not None and from_losses
    chosen, reason = _choose_for_learner(model, optimizers, learner, padding, engine, place, on_host)
    if engine == "graphs" and chosen == "eager":
        raise ValueError(f"`engine` is 'graphs', but {reason}")
    align = 1 if padding is None else padding.align or (ALIGN if chosen == "graphs" else 1)
    planner = Planner(graph, align, padding.spread) if padding is not None and align > 1 else None
    static = chosen == "graphs" and planner is not None and from_losses
    networks = Networks(model, optimizers, graph, planner, static, device)
    if chosen == "eager":
        return Structure(networks, learner, Drawing(learner), gradients), None, reason
    losses = torch.zeros(learner.num_masks, dtype=torch.float64, device=place)
    steps = Steps(networks, backward, losses)
    drawing = Drawing(learner)
    if static and isinstance(learner, DeviceLearner) and learner.capturable:
        drawing = DeviceDrawing(learner, networks, losses, steps.ok, steps.side)
    return Structure(networks, learner, drawing, gradients), steps, None


def _choose_for_learner(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    learner: Learner,
    padding: Padding | None,
    engine: str,
    place: torch.device,
    on_host: bool,
) -> tuple[str, str | None]:
    """("eager" or "graphs", reason for "eager")."""
    if on_host:
        return "eager", "dense weights are on the host, and references are copied from there"
    if len(optimizers) > 1:
        return "eager", "there are several optimizers"
    if process_group(data_parallel_around(model)).size > 1:
        return "eager", "several processes train together"
    chosen, reason = choose(engine, optimizers[0], place)
    if chosen == "graphs" and padding is not None and padding.align == 1:
        return "eager", "`align` is 1, so shapes change at every structure update"
    if chosen == "graphs" and padding is None and learner.num_masks > 1:
        why = "no padding" if learner.padding is None else "padding would count in norms over channels"
        return "eager", f"the policy has references and {why}, so their shapes change at every structure update"
    return chosen, reason
