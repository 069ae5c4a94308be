"""Budgets of time on this machine: what finished networks take, against what they may.

    python benchmarks/latency.py --out results/latency_cpu.json

One table for each network and mode, and one search for each fraction. The finished network and the dense one take
turns, and the ratio of neighbouring turns counts; so do the networks of the search, which are within the budget as far
as the search has measured. The time is that of the processor on one thread, so that a shared machine can be used.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmark_record
import torch
from front_door import loop
from paper_steps.turns import spread
from torch import Tensor, nn

from slimstart import EqualWorth, Latency, SparseTraining, flops, measure_latency
from slimstart.lab import models
from slimstart.steps.measuring import MODES, median_ms

NETWORKS = {"mobilenet_v1": (64, 16), "vgg19": (32, 10), "resnet20": (32, 10)}  # size of images, number of classes
BATCH = 8


def measured(name: str, mode: str, fractions: list[float], num_networks: int, turns: int) -> Iterator[dict[str, Any]]:
    """What one network takes of its budgets."""
    size, num_classes = NETWORKS[name]
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, size, size), torch.randint(num_classes, (BATCH,))
    dense = models.build(name, num_classes=num_classes)
    began = time.perf_counter()
    table = measure_latency(dense, images, mode, num_networks=num_networks, clock=time.process_time)
    seconds = time.perf_counter() - began
    prepare = MODES[mode]((images,), {})
    whole = prepare(copy.deepcopy(dense))

    def of_dense(network: nn.Module, turns: int) -> list[tuple[float, float]]:
        own = prepare(network)
        return [
            (median_ms(own, 5, images.device, time.process_time), median_ms(whole, 3, images.device, time.process_time))
            for _ in range(turns)
        ]

    for fraction in fractions:
        seen = []

        def timer(mask: Tensor, removed: Sequence[int], seen: list[float] = seen) -> float:
            assert table.timer is not None
            seen.append(table.timer(mask, removed))
            return seen[-1]

        model = copy.deepcopy(dense)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        policy = EqualWorth(rounds=8, resample_every=2, search_steps=16)
        began = time.perf_counter()
        budget = Latency(fraction, replace(table, timer=timer))
        sparse = SparseTraining(model, optimizer, images[:2], budget, policy=policy)
        of_budget = []
        while not sparse.settled:
            of_budget += [statistics.median(own / all_ for own, all_ in of_dense(sparse.snapshot(), 3)) / fraction]
            loop(model, optimizer, images, labels)
            loop(model, optimizer, images, labels)
        num_layers = len(sparse.dense_graph.layers)
        num_left = len(sparse.graph.layers)
        finished = sparse.finish()
        search_seconds = time.perf_counter() - began
        pairs = of_dense(finished, turns)
        taken = [own / all_ / fraction for own, all_ in pairs]
        yield {
            "network": name,
            "mode": mode,
            "fraction": fraction,
            "of_budget": statistics.median(taken),
            "spread_of_budget": spread(taken),
            "of_budget_in_the_search": of_budget,
            "num_timed": len(seen),
            "num_layers": num_layers,
            "num_left": num_left,
            "ms": statistics.median(own for own, _ in pairs),
            "flops_ratio": flops(finished, images[:1]) / flops(dense, images[:1]),
            "error": table.error,
            "parts": table.parts,
            "dense_ms": table.dense_ms,
            "table_seconds": seconds,
            "search_seconds": search_seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25, 0.12])
    parser.add_argument("--num-networks", type=int, default=60)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[1]
    rows = []
    for name, mode in itertools.product(args.networks, args.modes):
        for row in measured(name, mode, args.fractions, args.num_networks, args.turns):
            rows.append(row)
            print(row, flush=True)
            if args.out:
                load = {"cores": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()[1]}
                benchmark_record.write(args.out, "latency", rows, batch=BATCH, num_networks=args.num_networks, **load)


if __name__ == "__main__":
    main()
