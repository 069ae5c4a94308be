"""Times of narrow networks on the user's device, for `Latency` budgets.

    table = measure_latency(model, images, mode="inference")
    sparse = SparseTraining(model, optimizer, images[:2], Latency(0.5, table), total_steps=steps)

Networks of random widths and depths are timed as a whole, in the mode in which the finished network will run. An
estimate is fitted to their times (`slimstart.policies.latency`). In the training, a `Timer` times the networks that are
found, in turns with the dense network, so that a device that becomes slower does not look like a slow network.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.costs import LatencyTable
from slimstart.devices import cuda_devices, device_of
from slimstart.errors import BudgetError
from slimstart.graph import ChannelGraph, trace
from slimstart.inputs import as_call
from slimstart.narrow import compact, without_verified
from slimstart.policies.base import check_count
from slimstart.policies.budgets import Flops
from slimstart.policies.latency import digest, features, table_of
from slimstart.policies.widths import ALIGN, Fit
from slimstart.steps.wrappers import unwrapped_model

logger = logging.getLogger(__name__)
Run = Callable[[], object]
SPREAD = 0.8  # standard deviation of log-widths around equal shares: what searches find is within it
WARM_UP = 2  # runs that are not timed: caches fill, and memory is allocated
LEAST = 0.02  # of the dense network's FLOPs; smaller networks are not measured
TURNS = 5  # of a network and the dense one, in a training


def measure_latency(
    model: nn.Module,
    example_inputs: Any,
    mode: str | Callable[[nn.Module], Run] = "inference",
    *,
    coupling: str = "stream",
    keep: Iterable[str] = (),
    norms: str = "shrink",
    num_networks: int = 60,
    repeats: int = 5,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    table: LatencyTable | None = None,
) -> LatencyTable:
    """Measure narrow networks of a model, on its device.

    It takes about `2 * num_networks * repeats` runs of a network of medium size. Nothing else should use the device.
    The table has a copy of the model, to time the networks of a training in turns with it.

    Args:
        model: the dense model; it is not changed.
        example_inputs: as for `SparseTraining`, but of the batch size that counts.
        mode: "inference"; "training" (forward, backward and a step of SGD); or a function of your own that prepares a
            network and returns a function which runs it once: compiled, captured, or with ONNX Runtime.
        coupling: as in the training.
        keep: as in the training.
        norms: as in the training; "keep" for a pretrained model.
        num_networks: number of networks of random widths and depths.
        repeats: timed runs of each, of which the median counts.
        seed: seed of the widths.
        clock: function that returns the time in seconds.
        table: an earlier table of this model, from a file. Nothing is measured now, and the table gets its timer back.

    Raises:
        BudgetError: `table` is of another network, or of another mode.
    """
    check_count("num_networks", num_networks)
    check_count("repeats", repeats)
    args, kwargs = as_call(example_inputs)
    if isinstance(mode, str) and mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"`mode` is {mode!r}; it must be one of {known}, or a function that prepares a network")
    prepare = MODES[mode](args, kwargs) if isinstance(mode, str) else mode
    name = mode if isinstance(mode, str) else getattr(mode, "__qualname__", type(mode).__name__)
    model = unwrapped_model(model)
    graph = traced(model, example_inputs, coupling, keep, norms)
    timer = Timer(copy.deepcopy(model), graph, prepare, repeats, clock)
    if table is not None:
        if (table.structure, table.mode) != (digest(graph.costs), name):
            raise BudgetError("`table` was measured on another network, or in another `mode`; leave it out")
        return replace(table, timer=timer)
    rows, times, dense = [], [], []
    for mask, removed in random_networks(graph, num_networks, seed):
        own, whole = timer.turn(timer.prepared(mask, removed))
        rows.append(features(graph.costs.without(removed), mask))
        times.append(own / whole)
        dense.append(whole)
    dense_ms = statistics.median(dense)
    device = device_of(model)
    found = table_of(
        graph.costs,
        rows,
        [dense_ms * share for share in times],
        dense_ms=dense_ms,
        device=_name(device),
        mode=name,
        precision=str(next(model.parameters()).dtype).removeprefix("torch."),
        batch=", ".join(str(tuple(value.shape)) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)),
        software=f"torch {torch.__version__}",
        timer=timer,
    )
    logger.info("%d networks in mode %s: estimates are within %.1f %%", num_networks, name, 100 * found.error)
    return found


def traced(model: nn.Module, example_inputs: Any, coupling: str, keep: Iterable[str], norms: str) -> ChannelGraph:
    """The graph of a table: without layers that turn out not to be removable, because a table counts the others."""
    graph = trace(model, example_inputs, coupling, keep, norms=norms)
    if graph.num_units == 0:
        raise BudgetError("nothing in the model can shrink")
    return without_verified(model, graph, graph.layers, example_inputs)


class Timer:
    """Time narrow networks of a model, in turns with the dense one.

    Args:
        model: the dense model, which this object keeps.
        graph: its graph.
        prepare: function that returns a function which runs a network once.
        repeats: timed runs in a turn.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        prepare: Callable[[nn.Module], Run],
        repeats: int,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._graph, self._prepare, self._repeats, self._clock = model, graph, prepare, repeats, clock
        self._device = device_of(model)

    def __call__(self, mask: Tensor, removed: Sequence[int]) -> float:
        """The time of the network of a mask (U,) without some of `graph.layers`, as a multiple of the dense one's."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if several and torch.distributed.get_world_size() > 1:
            raise BudgetError(
                "the times of several processes differ, but their networks must not: measure in a program of its own, "
                "`save_table`, and train with `load_table`, that is with the estimate alone"
            )
        run = self.prepared(mask, removed)
        turns = (self.turn(run) for _ in range(TURNS))
        return statistics.median(own / whole for own, whole in turns)

    def prepared(self, mask: Tensor, removed: Sequence[int]) -> Run:
        """The network of a mask, ready to run."""
        graph = self._graph.without(self._graph.layers[i].name for i in removed)
        with torch.enable_grad():  # a structure changes within the step of an optimizer
            return self._prepare(compact(self._model, graph.select(mask)))

    @cached_property
    def _dense(self) -> Run:
        return self.prepared(torch.ones(self._graph.num_units, dtype=torch.bool), ())

    def turn(self, run: Run) -> tuple[float, float]:
        """Median times of a network and of the dense one, in milliseconds."""
        with torch.random.fork_rng(devices=cuda_devices(self._model)), torch.enable_grad():
            own = median_ms(run, self._repeats, self._device, self._clock)
            return own, median_ms(self._dense, (self._repeats + 1) // 2, self._device, self._clock)


def random_networks(graph: ChannelGraph, number: int, seed: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Masks of random widths, of any size, and for every second one some layers to remove."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(number):
        removed = tuple(_random_layers(graph, generator)) if i % 2 else ()
        costs = graph.costs.without(removed)
        flops = Flops(1.0).bind(costs)
        most = flops.share(torch.ones(costs.num_units))
        least = min(most, max(LEAST, 1.01 * flops.minimum / flops.dense))
        share = least * (most / least) ** float(torch.rand(1, generator=generator))
        fit = Fit(Flops(share).bind(costs), costs)
        noise = SPREAD * torch.randn(len(fit.sizes), generator=generator, dtype=torch.float64)
        yield fit.mask(fit(fit.shares() + noise), ALIGN), removed


def _random_layers(graph: ChannelGraph, generator: torch.Generator) -> list[int]:
    """A random number of random layers."""
    most = len(graph.layers)
    number = int(torch.randint(most + 1, (1,), generator=generator))
    return sorted(torch.randperm(most, generator=generator)[:number].tolist())


def median_ms(run: Run, repeats: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of some runs in milliseconds, after `WARM_UP` that are not timed."""
    times = []
    for _ in range(repeats + WARM_UP):
        _wait(device)
        began = clock()
        run()
        _wait(device)
        times.append(1e3 * (clock() - began))
    return statistics.median(times[WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "CPU")
    except OSError:
        return "CPU"


def _inference(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[nn.Module], Run]:
    def prepare(network: nn.Module) -> Run:
        network.eval()
        return torch.no_grad()(lambda: network(*args, **kwargs))

    return prepare


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[nn.Module], Run]:
    def prepare(network: nn.Module) -> Run:
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-9, momentum=0.9)

        def run() -> None:
            optimizer.zero_grad()
            output = network(*args, **kwargs)
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"the model returns a {type(output).__name__}, of which mode 'training' has no loss; give a "
                    "function as `mode`, which prepares a network and returns a function that takes one step"
                )
            output.float().square().mean().backward()
            optimizer.step()

        return run

    return prepare


MODES = {"inference": _inference, "training": _training}
