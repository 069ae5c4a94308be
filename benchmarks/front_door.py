"""Costs of `SparseTraining` in a training loop: a step after the search, a change of structure, and memory.

Both networks of a comparison run in one process, in turns, and the medians of their times are compared, because times
on shared machines vary. The plain network is a copy of the finished one, without hooks.

    python benchmarks/front_door.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart import EqualWorth, Flops, SparseTraining
from slimstart.lab import models


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    """One step as users write it."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def in_turns(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median time of each side in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 3):
        for name in sorted(sides, reverse=number % 2 == 1):
            began = time.perf_counter()
            sides[name]()
            if number >= 3:  # the first ones warm up
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


def settled_step(name: str, budget: float, batch: int, rounds: int) -> dict[str, Any]:
    """A settled step in the user's loop, against the same loop on the plain narrow network."""
    torch.manual_seed(0)
    model = models.build(name, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    policy = EqualWorth(resample_every=1, search_steps=2)
    sparse = SparseTraining(model, optimizer, images[:2], Flops(budget), policy=policy)
    while not sparse.settled:
        loop(model, optimizer, images, labels)
    plain = sparse.snapshot()
    own = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    times = in_turns(
        {
            "slimstart": lambda: loop(model, optimizer, images, labels),
            "plain": lambda: loop(plain, own, images, labels),
        },
        rounds,
    )
    return {**times, "ratio": times["slimstart"] / times["plain"]}


def change(name: str, budget: float) -> dict[str, Any]:
    """A change of structure, and the memory of what is stored, in units of the dense model's weights."""
    torch.manual_seed(0)
    model = models.build(name, num_classes=10)
    dense = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    sparse = SparseTraining(
        model, optimizer, images[:2], Flops(budget), policy=EqualWorth(resample_every=1000), total_steps=100_000
    )
    before = sparse.stored_bytes
    seconds = []
    for _ in range(7):
        loop(model, optimizer, images, labels)
        began = time.perf_counter()
        sparse.resample()
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "stored_weights": before / dense}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the record to this file")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "torch": torch.__version__,
        "slimstart": slimstart.__version__,
        "device": "cpu, one thread",
        "settled_step_ms": {
            "vgg19, 10 % FLOPs, batch 16": settled_step("vgg19", 0.10, 16, arguments.rounds),
            "resnet20, 30 % FLOPs, batch 16": settled_step("resnet20", 0.30, 16, arguments.rounds),
        },
        "change_of_structure": {"vgg19, 10 % FLOPs": change("vgg19", 0.10)},
    }
    print(json.dumps(record, indent=1))
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
