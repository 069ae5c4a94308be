"""Costs of `SparseTraining` in a training loop: a step after the search, a change of structure, and memory.

Both networks of a comparison run in one process, in turns, and the medians of their times are compared, because times
on shared machines vary. The plain network is a copy of the finished one, without hooks.

    python benchmarks/front_door.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import benchmark_record
import torch
import torch.nn.functional as F
from paper_steps.turns import Turn, take_turns
from torch import nn

from slimstart import EqualWorth, Flops, SparseTraining
from slimstart.lab import models


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    """One step as users write it."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def settled_step(name: str, budget: float, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a settled step in the user's loop, and of the same loop on the plain narrow network."""
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
    sides = {
        "slimstart": Turn(lambda: loop(model, optimizer, images, labels)),
        "plain": Turn(lambda: loop(plain, own, images, labels)),
    }
    take_turns(sides, images.device, rounds=3, seconds=math.inf)  # the first ones warm up
    found = take_turns(sides, images.device, rounds, seconds=math.inf)
    times = {side: statistics.median(turns) for side, turns in found.items()}
    return {"network": name, "budget": budget, **times, "ratio": times["slimstart"] / times["plain"]}


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
    return {"network": name, "seconds": statistics.median(seconds), "stored_weights": before / dense}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [settled_step("vgg19", 0.10, 16, args.rounds), settled_step("resnet20", 0.30, 16, args.rounds)]
    rows.append(change("vgg19", 0.10))
    print(json.dumps(rows, indent=1))
    if args.out:
        benchmark_record.write(args.out, "front_door", rows)


if __name__ == "__main__":
    main()
