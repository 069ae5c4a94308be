"""Times on a CPU after the search: a training step and an inference, of dense and narrow networks and of slimstart.

    python benchmarks/cpu_time.py --out results/cpu_time.json

All contenders of a network take turns in one process, because times on shared machines vary. Where other processes
want the cores, too, look at one thread and at the time of the processor (`cpu_ms`), which does not count the time in
which others had the core; with two threads it counts the time in which one waits for the other.

*Plain* is a copy of the finished network, of the same widths, without hooks. Widths are those of a search of two rounds
on random images, so almost equal shares. ONNX Runtime runs the exported networks on as many threads as PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import benchmark_record
import onnxruntime
import torch
from front_door import loop
from paper_steps.turns import spread
from torch import Tensor, nn

from slimstart import EqualWorth, Flops, SparseTraining, flops
from slimstart.io.export import to_onnx
from slimstart.lab import models

NETWORKS = {"vgg19": (32, 10), "mobilenet_v1": (64, 16)}  # size of images, number of classes
BUDGET = 0.1

Side = Callable[[], object]


def session(network: nn.Module, images: Tensor, threads: int) -> Side:
    """An inference of the exported network with ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        to_onnx(network, path := Path(folder) / "network.onnx", images[:1])
        runtime = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    given = {runtime.get_inputs()[0].name: images.contiguous().numpy()}
    return lambda: runtime.run(None, given)


def training(model: nn.Module, images: Tensor, labels: Tensor) -> Side:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return lambda: loop(model, optimizer, images, labels)


@torch.no_grad()
def _forward(network: nn.Module, images: Tensor) -> Tensor:
    result: Tensor = network(images)
    return result


def take_turns(sides: Mapping[str, Side], rounds: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of every turn of every side, on the clock and of the processor; the first turn is not counted.

    No new round begins after `seconds`, once there are two.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    began = time.perf_counter()
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - began > seconds:
            break
        for name in sorted(sides, reverse=number % 2 == 1):
            clock, processor = time.perf_counter(), time.process_time()
            sides[name]()
            if number:
                times = time.perf_counter() - clock, time.process_time() - processor
                found[name].append((1e3 * times[0], 1e3 * times[1]))
    return found


def measured(name: str, batch: int, threads: int, rounds: int, seconds: float) -> dict[str, Any]:
    """One network: milliseconds of each contender, their spread, and ratios of medians."""
    size, num_classes = NETWORKS[name]
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, num_classes, (batch,))

    def make() -> nn.Module:
        return models.build(name, num_classes=num_classes).to(memory_format=torch.channels_last)

    dense, model = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sparse = SparseTraining(
        model, optimizer, images[:2], Flops(BUDGET), policy=EqualWorth(resample_every=1, search_steps=2)
    )
    while not sparse.settled:
        loop(model, optimizer, images[:8], labels[:8])
    plain = sparse.snapshot()
    steps = {
        "step: dense": training(dense, images, labels),
        "step: plain": training(plain, images, labels),
        "step: slimstart": lambda: loop(model, optimizer, images, labels),
    }
    found = take_turns(steps, rounds, seconds)
    finished = sparse.finish()
    for network in (dense, finished):
        network.eval()
    inferences = {
        "inference: dense": lambda: _forward(dense, images),
        "inference: slimstart": lambda: _forward(finished, images),
        "inference: dense, ONNX Runtime": session(dense, images, threads),
        "inference: slimstart, ONNX Runtime": session(finished, images, threads),
    }
    found |= take_turns(inferences, rounds, seconds)
    turns = [{side: [turn[i] for turn in runs] for side, runs in found.items()} for i in (0, 1)]
    ms, cpu_ms = ({side: statistics.median(runs) for side, runs in one.items()} for one in turns)
    ratios = {
        "step, of plain": ("step: plain", "step: slimstart"),
        "step, of dense": ("step: dense", "step: slimstart"),
        "inference, of dense": ("inference: dense", "inference: slimstart"),
        "inference, of dense, ONNX Runtime": ("inference: dense, ONNX Runtime", "inference: slimstart, ONNX Runtime"),
    }
    return {
        "network": name,
        "batch": batch,
        "image": f"3x{size}x{size}",
        "threads": threads,
        "flops_ratio": flops(finished, images[:1]) / flops(dense, images[:1]),
        "rounds": len(found["step: dense"]),
        "ms": ms,
        "spread_ms": {side: spread(runs) for side, runs in turns[0].items()},
        "cpu_ms": cpu_ms,
        "spread_cpu_ms": {side: spread(runs) for side, runs in turns[1].items()},
        "speed": {name: ms[other] / ms[own] for name, (other, own) in ratios.items()},
        "cpu_speed": {name: cpu_ms[other] / cpu_ms[own] for name, (other, own) in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new round begins after this time")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    before = os.getloadavg()[1]
    rows = [
        measured(name, args.batch, threads, args.rounds, args.seconds)
        for name in args.networks
        for threads in args.threads
    ]
    for row in rows:
        print(
            json.dumps({name: row[name] for name in ("network", "threads", "rounds", "speed", "cpu_speed")}, indent=1)
        )
    if args.out:
        # More than one process for each core: the machine was shared, and times are larger than on an idle one.
        load = {"cores": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()[1]}
        benchmark_record.write(args.out, "cpu_time", rows, onnxruntime=onnxruntime.__version__, **load)


if __name__ == "__main__":
    main()
