"""Step times of slimstart with the paper's policy, of the dense network, and of the narrow network, which is the limit.

All times of a row are measured in one process, in turns. slimstart runs in whole windows of `resample_every` steps, so
its time includes drawing masks, both forwards and the update of s.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paper_steps.contenders import Memory, Plain, Work, every_way, warm_up
from paper_steps.structures import executed_flops, to_the_middle, typical_mask
from paper_steps.turns import Turn, spread, take_turns
from slimstart.flop_counter import flops
from slimstart.lab.recipes.recipe import make_model, parse_budget
from slimstart.lab.run import environment as surroundings
from slimstart.narrow import compact
from slimstart.policies import Paper
from slimstart.steps.drawing import LOOK_EVERY
from slimstart.training import SparseTraining

SHORT_WINDOW = 20  # steps of slimstart in a turn, where every step draws
LONG_TURN = 50, 500.0  # at most so many steps and milliseconds of a plain network in a turn

logger = logging.getLogger(__name__)
_SHORTCUTS = "convolutions of 1 x 1 with strides"
Row = dict[str, Any]


class Benchmark:
    """The dense network of a benchmark, and its batch; `settings` are the options of `run_paper_steps.py`."""

    def __init__(self, settings: argparse.Namespace, device: torch.device) -> None:
        self.settings = settings
        surroundings.set_precision(settings.precision)
        torch.manual_seed(settings.seed)
        self.model = make_model(settings.model, num_classes=settings.classes, in_channels=3).to(device)
        images = torch.randn(settings.batch_size, 3, settings.image_size, settings.image_size, device=device)
        labels = torch.randint(0, settings.classes, (settings.batch_size,), device=device)
        channels_last = settings.channels_last and not (device.type == "cpu" and _has_strided_shortcuts(self.model))
        if channels_last != settings.channels_last:
            logger.warning("nothing is measured in channels-last: on a CPU, %s may corrupt memory there", _SHORTCUTS)
        self.work = Work(images, labels, settings.precision, channels_last)
        self._example = images[:1]
        self.dense_flops = flops(self.model, self._example)

    def rows(self) -> Iterator[Row]:
        with _compiling_for_many() if self.settings.compile else contextlib.nullcontext():
            dense = every_way(self.model, self.work, self.settings.compile)
            for budget in self.settings.budgets:
                yield from self._rows(dense, budget)

    def _rows(self, dense: Mapping[str, Plain], budget: str) -> Iterator[Row]:
        """Rows of one structure, which share the narrow network."""
        by_hand = self._search(budget, resample_every=10**9, engine="eager")
        to_the_middle(by_hand.learner, self.settings.seed)
        state = by_hand.learner.state_dict()
        small = compact(self.model, by_hand.graph.select(typical_mask(by_hand)))
        plain = {"dense": dense, "narrow": every_way(small, self.work, self.settings.compile)}
        common = {
            **{name: getattr(self.settings, name) for name in ("model", "batch_size", "coupling", "precision")},
            "budget": budget,
            "flops_ratio": flops(small, self._example) / self.dense_flops,
        }
        del by_hand, small  # free their memory
        for resample_every in self.settings.resample_every:
            yield {**common, **self._compared(plain, budget, state, resample_every)}

    def _compared(
        self, plain: Mapping[str, Mapping[str, Plain]], budget: str, state: Mapping[str, Any], resample_every: int
    ) -> Row:
        """The fields of a row that are measured in turns."""
        work, device = self.work, self.work.device
        window = resample_every if resample_every > 1 else SHORT_WINDOW
        # The same objects in all steps: captured steps are found by them.
        batch, loss_fn = work.batch(work.channels_last), work.loss
        memory = Memory(device)
        sparse = self._search(budget, resample_every, "auto")
        sparse.learner.load_state_dict(state)
        # Capacity was chosen for another s; it is adapted before the clock runs.
        for _ in range(1 if sparse.engine == "eager" else LOOK_EVERY + 1):
            sparse.resample()

        def step() -> None:
            sparse.step(loss_fn, *batch)

        # Two windows on a GPU, until shapes do not change any more and all steps are captured.
        window_ms = window * warm_up(step, device, 2 * window if device.type == "cuda" else 2)
        peak = memory.peak(step)
        turns = {("ours", ""): Turn(step, window)}
        for name, ways in plain.items():
            for way, one in ways.items():
                num_steps = round(min(window_ms, LONG_TURN[1]) / one.step_ms)
                turns[name, way] = Turn(one.step, min(max(1, num_steps), LONG_TURN[0]))
        times = take_turns(turns, device, self.settings.rounds, self.settings.seconds)
        medians = {name: statistics.median(found) for name, found in times.items()}
        engines = {name: {way: medians[name, way] for way in ways} for name, ways in plain.items()}
        best = {"ours": "", **{name: min(found, key=found.__getitem__) for name, found in engines.items()}}
        ms = {name: medians[name, way] for name, way in best.items()}
        return {
            "resample_every": resample_every,
            "executed_flops_ratio": executed_flops(sparse) / self.dense_flops,
            **{f"{name}_ms": median for name, median in ms.items()},
            **{f"{name}_spread_ms": spread(times[name, way]) for name, way in best.items()},
            "speedup": ms["dense"] / ms["ours"],
            "of_limit": ms["narrow"] / ms["ours"],
            "peak_memory": None if peak is None else max(0, peak - _dense_memory(self.model)),
            "narrow_peak_memory": plain["narrow"][best["narrow"]].peak_memory,
            **{f"{name}_engines": found for name, found in engines.items()},
            "our_engine": sparse.engine + ", channels-last" * work.channels_last,
            "num_turns": len(times["ours", ""]),
        }

    def _search(self, budget: str, resample_every: int, engine: str) -> SparseTraining:
        settings, work = self.settings, self.work
        model = work.copy_of(self.model, work.channels_last)
        return SparseTraining(
            model,
            work.optimizer(model),
            self._example,
            parse_budget(budget),
            policy=Paper(resample_every=resample_every, align=settings.align, seed=settings.seed),
            coupling=settings.coupling,
            engine=engine,
        )


def _compiling_for_many() -> contextlib.AbstractContextManager[None]:
    """Let PyTorch compile many networks of one class: they share a forward, and its limit is eight."""
    limits: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=10**6, accumulated_recompile_limit=10**6
    )
    return limits


def _has_strided_shortcuts(model: nn.Module) -> bool:
    """Whether channels-last must be avoided on a CPU: oneDNN writes beyond its memory in the backward of such layers.

    Seen in torch 2.13 on AVX2, with fewer than 8 input channels.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    return any(layer.kernel_size == (1, 1) and layer.stride != (1, 1) for layer in layers)


def _dense_memory(model: nn.Module) -> int:
    """Bytes of the dense weights and statistics, and of SGD's momentum."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 2 * weights + sum(buffer.nbytes for buffer in model.buffers())
