"""Sums over a running training, and the record of a finished one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.flop_counter import flops
from slimstart.lab import records
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.method import Method
from slimstart.lab.run.step_times import StepTimes
from slimstart.lab.run.task import Task
from slimstart.lab.run.train_cost import formula_flops, layer_flops
from slimstart.narrow.stream_ports import StreamPort


@dataclass
class Progress:
    """The position of the next step, and the sums so far; a checkpoint holds it."""

    epoch: int = 0  # from 0
    batch: int = 0  # of this epoch: the next one
    loss_sum: float = 0.0
    flops_sum: int = 0  # of the trained network, over the steps of this epoch
    seconds: float = 0.0  # of this epoch, without evaluation
    formula_flops: float = 0.0  # of one image, by the paper's formulas, over all steps that they count
    formula_steps: int = 0
    train_flops: int = 0  # up to the beginning of this epoch
    accuracy: float | None = None
    peak_memory: int = 0
    gradient_bytes: int = 0  # that each process has exchanged, over all steps
    command: str = field(default_factory=surroundings.command)  # that began the run
    started: str = field(default_factory=surroundings.now)
    history: list[records.Epoch] = field(default_factory=list)
    structures: list[records.Structure] = field(default_factory=list)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`."""
        history = [records.Epoch(**epoch) for epoch in state["history"]]
        structures = [records.Structure(**structure) for structure in state.get("structures", ())]
        return cls(**{**state, "history": history, "structures": structures})


def make_record(
    name: str,
    task: Task,
    method: Method,
    progress: Progress,
    network: nn.Module,
    loss: float,
    accuracy: float,
    times: StepTimes | None,
    choosing: records.Choosing | None,
) -> records.Record:
    """The record of a finished run.

    Args:
        network: the finished network; `loss` and `accuracy` are its own, on the test images.
        times: step times; None where they were not measured.
        choosing: the choice of the structure, where there were trials.
    """
    recipe, own_flops = task.recipe, flops(network, task.example)
    choosing_flops, choosing_seconds = (0, 0.0) if choosing is None else (choosing.train_flops, choosing.train_seconds)
    train_flops = method.ledger.total + choosing_flops
    train_seconds = sum(epoch.seconds for epoch in progress.history) + progress.seconds  # the latter of finishing
    own_params = sum(parameter.numel() for parameter in network.parameters())
    dense_train_flops = sum(epoch.dense_train_flops for epoch in progress.history)
    dense = formula_flops(task.dense.flops, task.dense.flops)
    # Without a step that the formulas count, there is only what runs: three forwards of the finished network.
    own = progress.formula_flops or formula_flops(own_flops, own_flops)
    saving = (progress.formula_steps or 1) * dense / own
    return records.Record(
        name=name,
        method=recipe.method,
        model=recipe.model,
        data=recipe.data,
        num_classes=task.data.num_classes,
        image_shape=task.data.image_shape,
        budget=recipe.budget,
        seed=recipe.seed,
        epochs=recipe.total_epochs,
        batch_size=recipe.batch_size,
        config=dataclasses.asdict(recipe),
        config_hash=recipe.hash,
        command=progress.command,
        **surroundings.facts(task.device),
        started=progress.started,
        finished=surroundings.now(),
        accuracy=accuracy,
        test_loss=loss,
        flops=own_flops,
        dense_flops=task.dense.flops,
        flops_ratio=own_flops / task.dense.flops,
        params=own_params,
        dense_params=task.dense.params,
        params_ratio=own_params / task.dense.params,
        layers=_layers(method.graph.filters, task, network),
        train_flops=train_flops,
        dense_train_flops=dense_train_flops,
        train_cost_saving=saving,
        executed_saving=dense_train_flops / train_flops,
        train_seconds=train_seconds + choosing_seconds,
        step_ms=None if times is None else times.total,
        step_forward_ms=None if times is None else times.forward,
        step_backward_ms=None if times is None else times.backward,
        dense_step_ms=None if times is None else times.dense,
        narrow_step_ms=None if times is None else times.narrow,
        peak_memory_bytes=progress.peak_memory,
        history=tuple(progress.history),
        engine=method.engine,
        ports=sum(isinstance(layer, StreamPort) for layer in network.modules()),
        building_seconds=method.building_seconds,
        structures=tuple(progress.structures) or None,
        choosing=choosing,
        **_exchanged(task, progress),
    )


def _exchanged(task: Task, progress: Progress) -> dict[str, Any]:
    if task.ranks.size == 1:
        return {}
    return {
        "ranks": task.ranks.size,
        "batch_norm": task.place.batch_norm,
        "gradient_bytes": round(progress.gradient_bytes / (task.recipe.total_epochs * task.steps_per_epoch)),
        "dense_gradient_bytes": task.dense.gradient_bytes,
    }


def structure_of(keep_probs: Tensor | None, expected_cost: float | None) -> dict[str, Any]:
    if keep_probs is None:
        return {}
    bins = torch.histc(keep_probs, records.NUM_BINS, 0.0, 1.0)
    certain = ((keep_probs < 0.05) | (keep_probs > 0.95)).double().mean()
    return {
        "expected_cost": expected_cost,
        "certain": float(certain),
        "keep_probs": tuple(int(count) for count in bins),
    }


def _layers(filters: Mapping[str, Tensor], task: Task, network: nn.Module) -> tuple[records.Layer, ...]:
    """Every layer of the finished network, with its filters and FLOPs and those of the dense network.

    A shallower sibling is compared with itself before its widths were scaled, for the dense network has other layers.
    """
    found = []
    modules, dense, own = dict(network.named_modules()), task.dense.layer_flops, layer_flops(network, task.example)
    for name, units in filters.items():
        layer = modules.get(name)
        removed = layer is None or isinstance(layer, nn.Identity)
        width = 0 if removed else getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)
        if width is not None:
            # A layer without FLOPs is used in a way that is not counted by layer; a shallower sibling has other layers.
            same = task.recipe.method != "shallow" and dense.get(name)
            costs = (dense[name], 0 if removed else own.get(name)) if same else (None, None)
            found.append(records.Layer(name, units.numel(), int(width), *costs))
    return tuple(found)
