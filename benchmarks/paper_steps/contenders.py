"""What `run_paper_steps.py` times: a plain network with every engine that could be its fastest."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from slimstart.lab.run.evaluation import logits_of
from slimstart.lab.run.make_method import Batch
from slimstart.lab.run.step_times import Stopwatch
from slimstart.steps import PlainTraining

logger = logging.getLogger(__name__)
WARM_UP = 4  # steps, in which an engine does what it does once


@dataclass(frozen=True)
class Way:
    """How a plain network is trained: "eager", by "graphs", by graphs that are "fused", or by graphs of "compile"."""

    kind: str
    channels_last: bool

    @property
    def name(self) -> str:
        return self.kind + ", channels-last" * self.channels_last


@dataclass(frozen=True)
class Work:
    """The work of a step, the same for all networks: one batch, cross-entropy in a precision, SGD."""

    images: Tensor
    labels: Tensor
    precision: str
    channels_last: bool

    @property
    def device(self) -> torch.device:
        return self.images.device

    def batch(self, channels_last: bool) -> Batch:
        return self.images.contiguous(memory_format=_format(channels_last)), self.labels

    def loss(self, net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(net, images, self.precision), labels)

    def optimizer(self, network: nn.Module) -> Optimizer:
        fused = self.device.type == "cuda"
        # A small rate: labels are random, and a loss that is not finite would end the benchmark.
        return SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=fused)

    def copy_of(self, network: nn.Module, channels_last: bool) -> nn.Module:
        moved: nn.Module = copy.deepcopy(network).to(memory_format=_format(channels_last))  # type: ignore[call-overload]
        return moved.train()


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def ways(device: torch.device, channels_last: bool, compiled: bool) -> list[Way]:
    """All ways that could be the fastest on this device: both memory formats on a CPU, the given one on a GPU.

    Graphs use the depthwise kernels of slimstart, which are a little slower than cuDNN's for some layers.
    """
    kinds = ("eager", "graphs", "fused") if device.type == "cuda" else ("eager",)
    formats = (channels_last,) if device.type == "cuda" else (False, True)[: 1 + channels_last]
    return [Way(kind, last) for kind in kinds for last in formats] + [Way("compile", channels_last)] * compiled


class Plain:
    """Training of a copy of a plain network in one way, after its warm-up.

    Attributes:
        step_ms: a rough step time.
        peak_memory: in bytes, weights and optimizer included; None on a CPU.
    """

    def __init__(self, network: nn.Module, work: Work, way: Way) -> None:
        memory = Memory(work.device)
        self.network = work.copy_of(network, way.channels_last)
        self.optimizer, self._loss = work.optimizer(self.network), work.loss
        self._batch = work.batch(way.channels_last)
        if way.kind == "compile":
            self.network.compile(dynamic=False)  # widths are constants: code for any width would be slower
        self._engine = "eager" if way.kind == "eager" or work.device.type == "cpu" else "graphs"
        self.training = PlainTraining(self.network, self.optimizer, engine=self._engine, fuse=way.kind == "fused")
        self.step_ms = warm_up(self.step, work.device, WARM_UP)
        self.peak_memory = memory.peak(self.step)

    @property
    def problem(self) -> str | None:
        """Why it does not run in this way, if so."""
        return self.training.reason if self._engine == "graphs" else None

    def step(self) -> None:
        self.training.step(self._loss, *self._batch)


def every_way(network: nn.Module, work: Work, compiled: bool) -> dict[str, Plain]:
    """Trainings of the network in all ways that work here, by name; ways that do not work are logged."""
    found: dict[str, Plain] = {}
    for way in ways(work.device, work.channels_last, compiled):
        try:
            plain = Plain(network, work, way)
        except Exception as error:
            if way.kind != "compile":
                raise
            logger.warning(
                "torch.compile is left out, because it does not work here: %s", str(error).partition("\n")[0]
            )
            continue
        if plain.problem is not None:
            logger.warning("%s is left out: %s", way.name, plain.problem)
        else:
            found[way.name] = plain
    return found


def warm_up(step: Callable[[], object], device: torch.device, num_steps: int) -> float:
    """Run `num_steps` steps, and return the milliseconds of one more."""
    for _ in range(num_steps):
        step()
    watch = Stopwatch(device, in_parts=False)
    step()
    return watch.stop()


class Memory:
    """GPU memory that is taken from now on, by tensors and by captured graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            gc.collect()  # earlier networks may be kept alive by cycles
            torch.cuda.empty_cache()
            self._allocated, self._reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def peak(self, step: Callable[[], object]) -> int | None:
        """Bytes while `step` runs; None on a CPU."""
        if self._device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        allocated = torch.cuda.max_memory_allocated(self._device) - self._allocated
        # The memory of a captured graph remains reserved, but counts as allocated only during capture.
        torch.cuda.empty_cache()
        return max(allocated, torch.cuda.memory_reserved(self._device) - self._reserved)
