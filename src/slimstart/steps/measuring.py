"""Measured times of narrow networks on the user's device, from which `Latency` budgets are made.

    table = measure_latency(model, images, near=0.5, mode="inference")
    sparse = SparseTraining(model, optimizer, images[:2], Latency(0.5, table), total_steps=steps)

Networks of random widths are timed as a whole, in the mode in which the finished network will run: first some of any
size, then others that take as long as the budget allows, by a fit to those before. A polynomial does not follow what a
device does from small layers to large ones, but it does near one size. The fit is in `slimstart.policies.latency`.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimstart.costs import LatencyTable
from slimstart.devices import device_of
from slimstart.graph import trace
from slimstart.inputs import as_call
from slimstart.narrow import compact
from slimstart.policies.base import check_count
from slimstart.policies.budgets import BoundBudget, Flops
from slimstart.policies.latency import Latency, features, table_of
from slimstart.policies.widths import ALIGN, Fit

logger = logging.getLogger(__name__)
Run = Callable[[], object]
ROUND = 10  # networks between two fits
BROAD, FAR = 1 / 3, 0.2  # the part of all networks that has any size, and their weight in the fit
SPREAD = 0.8  # standard deviation of log-widths around equal shares: what searches find is within it
WARM_UP = 3  # runs that are not timed: caches fill, and memory is allocated
LEAST = 0.02  # of the dense network's FLOPs; smaller networks are not measured


def measure_latency(
    model: nn.Module,
    example_inputs: Any,
    near: float,
    mode: str | Callable[[nn.Module], Run] = "inference",
    *,
    coupling: str = "stream",
    keep: Iterable[str] = (),
    norms: str = "shrink",
    num_networks: int = 120,
    repeats: int = 7,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyTable:
    """Measure narrow networks of a model, on its device.

    It takes about `num_networks * repeats` runs of a network of medium size. Nothing else should use the device.

    Args:
        model: the dense model; it is not changed.
        example_inputs: as for `SparseTraining`, but of the batch size that counts.
        near: the fraction of the dense network's time at which the table is used: most networks take about as long.
        mode: "inference"; "training" (forward, backward and a step of SGD); or a function of your own that prepares a
            network and returns a function which runs it once: compiled, captured, or with ONNX Runtime.
        coupling: as in the training.
        keep: as in the training.
        norms: as in the training; "keep" for a pretrained model.
        num_networks: number of networks of random widths.
        repeats: timed runs of each, of which the median counts.
        seed: seed of the widths.
        clock: function that returns the time in seconds.
    """
    check_count("num_networks", num_networks)
    check_count("repeats", repeats)
    device = device_of(model)
    args, kwargs = as_call(example_inputs)
    graph = trace(model, example_inputs, coupling, keep, norms=norms)
    costs, num_groups = graph.costs, len(graph.groups)
    if isinstance(mode, str) and mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ValueError(f"`mode` is {mode!r}; it must be one of {known}, or a function that prepares a network")
    prepare = MODES[mode](args, kwargs) if isinstance(mode, str) else mode

    def measured(network: nn.Module) -> float:
        return median_ms(prepare(network), repeats, device, clock)

    generator = torch.Generator().manual_seed(seed)
    whole = Flops(1.0).bind(costs)
    least = math.log(min(1.0, max(LEAST, 1.01 * whole.minimum / whole.dense)))
    every = torch.ones(costs.num_units, dtype=torch.bool)
    rows: list[list[int]] = []
    times: list[float] = []
    weights: list[float] = []
    dense: list[float] = []

    def table() -> LatencyTable:
        return table_of(
            costs,
            rows,
            times,
            weights,
            near=near,
            dense_ms=statistics.median(dense),
            device=_name(device),
            mode=mode if isinstance(mode, str) else getattr(mode, "__qualname__", type(mode).__name__),
            precision=str(next(model.parameters()).dtype).removeprefix("torch."),
            batch=", ".join(
                str(tuple(value.shape)) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
            ),
            software=f"torch {torch.__version__}",
        )

    bound: BoundBudget
    for number in range(num_networks):
        if number % ROUND == 0:  # a machine may become slower on the way
            dense.append(measured(compact(model, graph.select(every))))
        if number < BROAD * num_networks:
            share = math.exp(least * float(torch.rand(1, generator=generator)))
            bound, weight = Flops(share).bind(costs), FAR
        elif number % ROUND == 0 or weight == FAR:
            bound, weight = Latency(near, table()).bind(costs), 1.0
        fit = Fit(bound, costs)
        noise = SPREAD * torch.randn(num_groups, generator=generator, dtype=torch.float64)
        mask = fit.mask(fit(fit.shares() + noise), ALIGN)
        rows.append(features(costs, mask))
        times.append(measured(compact(model, graph.select(mask))))
        weights.append(weight)
    found = table()
    logger.info("%d networks in mode %s: estimates are within %.1f %%", num_networks, found.mode, 100 * found.error)
    return found


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
