"""Step times of slimstart with the paper's policy, of the dense network, and of the narrow network, which is the limit.

All times of a row are measured in one process, in turns. slimstart runs in whole windows of `resample_every` steps, so
its time includes drawing masks, both forwards and the update of s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paper_steps import records
from paper_steps.contenders import Memory, Plain, Work, every_way, search_in_parts, warm_up
from paper_steps.records import Bench, Row
from paper_steps.structures import decided, executed_flops, to_the_middle, typical_mask
from paper_steps.turns import Turn, spread, take_turns
from slimstart.errors import BudgetError, ConfigError
from slimstart.flop_counter import flops
from slimstart.graph import trace
from slimstart.lab.methods import uniform_of_flops
from slimstart.lab.recipes.recipe import make_model, parse_budget
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.step_times import compare
from slimstart.narrow import compact
from slimstart.narrow.stream_ports import StreamPort
from slimstart.policies import Paper
from slimstart.steps.drawing import LOOK_EVERY
from slimstart.training import SparseTraining

SHORT_WINDOW = 20  # steps of slimstart in a turn, where every step draws
LONG_TURN = 50, 500.0  # at most so many steps and milliseconds of a plain network in a turn

logger = logging.getLogger(__name__)
_SHORTCUTS = "convolutions of 1 x 1 with strides"
Contenders = Mapping[str, Mapping[str, Plain]]
Parts = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        align: None leaves it to `SparseTraining`.
        compiled: None measures torch.compile on a GPU only.
    """

    budgets: tuple[str, ...]
    resample_every: tuple[int, ...] = (10,)
    model: str = "vgg19"
    batch_size: int = 64
    image_size: int = 32
    num_classes: int = 10
    coupling: str = "filter"
    precision: str = "float32"
    align: int | None = None
    channels_last: bool = True
    compiled: bool | None = None
    rounds: int = 20
    seconds: float = 30.0
    seed: int = 0


def run(settings: Settings, device: str, folder: Path) -> Iterator[Row]:
    """Measure row by row, and write `folder/record.json` after each of them.

    Raises:
        ConfigError, BudgetError, CheckpointError: before anything is measured.
    """
    benchmark = Benchmark(settings, surroundings.find_device(device))
    file, started, rows = folder / "record.json", surroundings.now(), list[Row]()
    if file.exists():
        raise ConfigError(f"{folder} already holds a record; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; choose another --out") from error
    about = {"command": surroundings.command(), **surroundings.facts(benchmark.work.device), "started": started}
    for row in benchmark.rows():
        rows.append(row)
        bench = Bench(**about, finished=surroundings.now(), settings=dataclasses.asdict(settings), rows=tuple(rows))
        records.write(bench, file)
        yield row


class Benchmark:
    """The dense network of a benchmark, and its batch. The constructor refuses what cannot be measured."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        surroundings.set_precision(settings.precision)
        torch.manual_seed(settings.seed)
        self.model = make_model(settings.model, num_classes=settings.num_classes, in_channels=3).to(device)
        images = torch.randn(settings.batch_size, 3, settings.image_size, settings.image_size, device=device)
        labels = torch.randint(0, settings.num_classes, (settings.batch_size,), device=device)
        channels_last = settings.channels_last and not (device.type == "cpu" and _has_strided_shortcuts(self.model))
        if channels_last != settings.channels_last:
            logger.warning("nothing is measured in channels-last: on a CPU, %s may corrupt memory there", _SHORTCUTS)
        self.work = Work(images, labels, settings.precision, channels_last)
        self._example = images[:1]
        self.dense_flops = flops(self.model, self._example)
        graph = trace(self.model, self._example, settings.coupling)
        for budget in settings.budgets:
            parse_budget(budget).bind(graph.costs)
        self._compiled = device.type == "cuda" if settings.compiled is None else settings.compiled

    def rows(self) -> Iterator[Row]:
        with _compiling_for_many() if self._compiled else contextlib.nullcontext():
            dense = every_way(self.model, self.work, self._compiled)
            for budget in self.settings.budgets:
                yield from self._rows(dense, budget)

    def _rows(self, dense: Mapping[str, Plain], budget: str) -> Iterator[Row]:
        """Rows of one structure: they share the narrow network, and the times of the parts of a step."""
        work = self.work
        by_hand = self._search(budget, resample_every=10**9, engine="eager")
        to_the_middle(by_hand.learner, self.settings.seed)
        state, share = by_hand.learner.state_dict(), decided(by_hand.learner)
        small = compact(self.model, by_hand.graph.select(typical_mask(by_hand)))
        own_flops = flops(small, self._example)
        plain: dict[str, Mapping[str, Plain]] = {"dense": dense, "narrow": every_way(small, work, self._compiled)}
        if any(isinstance(layer, StreamPort) for layer in small.modules()):
            plain |= self._narrowed_by_hand(own_flops)
        eager = {name: plain[name][work.eager.name].step_in_parts for name in ("dense", "narrow")}
        steps = eager | search_in_parts(by_hand, work)
        parts = compare(steps, work.device, rounds=5, seconds=self.settings.seconds / 5)
        common = {
            **{name: getattr(self.settings, name) for name in ("model", "batch_size", "coupling", "precision")},
            "budget": budget,
            "structure": "middle",
            "decided": share,
            "flops_ratio": own_flops / self.dense_flops,
        }
        del by_hand, small, steps  # free their memory
        for resample_every in self.settings.resample_every:
            yield Row(**common, **self._compared(plain, parts, budget, state, resample_every))

    def _compared(
        self, plain: Contenders, parts: Parts, budget: str, state: Mapping[str, Any], resample_every: int
    ) -> dict[str, Any]:
        """The fields of a row that are measured in turns."""
        work, device = self.work, self.work.device
        window = resample_every if resample_every > 1 else SHORT_WINDOW
        batch, loss_fn = (
            work.batch(work.channels_last),
            work.loss,
        )  # the same objects in all steps: captured steps are found by them
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
        best = {name: min(found, key=found.__getitem__) for name, found in engines.items()}
        first, held = parts["first"], parts["held"]
        own_parts = {part: (first[part] + (resample_every - 1) * held[part]) / resample_every for part in held}
        ours = times["ours", ""]
        return {
            "resample_every": resample_every,
            "executed_flops_ratio": executed_flops(sparse) / self.dense_flops,
            **_timed("ours", ours, own_parts),
            **_timed("dense", times["dense", best["dense"]], parts["dense"]),
            **_timed("narrow", times["narrow", best["narrow"]], parts["narrow"]),
            "ours_mean_ms": statistics.fmean(ours),
            "speedup": engines["dense"][best["dense"]] / medians["ours", ""],
            "of_limit": engines["narrow"][best["narrow"]] / medians["ours", ""],
            "hand_narrow_ms": min(engines["hand_narrow"].values()) if "hand_narrow" in engines else None,
            "peak_memory": None if peak is None else max(0, peak - _dense_memory(self.model)),
            "narrow_peak_memory": plain["narrow"][best["narrow"]].peak_memory,
            **{f"{name}_engine": best[name] for name in ("dense", "narrow")},
            **{f"{name}_engines": engines[name] for name in ("dense", "narrow")},
            "our_engine": sparse.engine + ", channels-last" * work.channels_last,
            "num_turns": len(ours),
            "window": window,
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

    def _narrowed_by_hand(self, own_flops: int) -> dict[str, Mapping[str, Plain]]:
        """The uniform network of equal FLOPs: no layer needs a port on a stream. Empty if there is none."""
        try:
            small = uniform_of_flops(self.model, self._example, own_flops, self.dense_flops)
        except BudgetError:  # its streams alone may cost more than the narrow network
            return {}
        return {"hand_narrow": every_way(small, self.work, self._compiled)}


def _compiling_for_many() -> contextlib.AbstractContextManager[None]:
    """Let PyTorch compile many networks of one class: they share a forward, and its limit is eight."""
    limits: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=10**6, accumulated_recompile_limit=10**6
    )
    return limits


def _timed(name: str, times: Sequence[float], parts: Mapping[str, float]) -> dict[str, Any]:
    """The time fields of one network: median, spread, and the median divided as in eager steps."""
    median = statistics.median(times)
    divided = {f"{name}_{part}_ms": median * parts[part] / parts["total"] for part in ("forward", "backward")}
    return {f"{name}_ms": median, f"{name}_spread_ms": spread(times), **divided}


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
