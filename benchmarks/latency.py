"""Budgets of time on this machine: what finished networks take, against what they may.

    python benchmarks/latency.py --out results/latency_cpu.json

One table and one search for each network, mode and fraction. The finished network and the dense one take turns,
and the ratio of neighbouring turns counts. The time is that of the processor on one thread, so that a shared machine
can be used.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import benchmark_record
import torch
from front_door import loop
from paper_steps.turns import spread

from slimstart import EqualWorth, Latency, SparseTraining, flops, measure_latency
from slimstart.lab import models
from slimstart.steps.measuring import MODES, median_ms

NETWORKS = {"vgg19": (32, 10), "mobilenet_v1": (64, 16)}  # size of images, number of classes
BATCH = 8


def measured(name: str, mode: str, fraction: float, num_networks: int, turns: int) -> dict[str, Any]:
    """What one network takes of its budget."""
    size, num_classes = NETWORKS[name]
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, size, size), torch.randint(num_classes, (BATCH,))
    dense = models.build(name, num_classes=num_classes)
    began = time.perf_counter()
    table = measure_latency(dense, images, fraction, mode, num_networks=num_networks, clock=time.process_time)
    seconds = time.perf_counter() - began
    model = copy.deepcopy(dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    policy = EqualWorth(resample_every=2, search_steps=16)
    sparse = SparseTraining(model, optimizer, images[:2], Latency(fraction, table), policy=policy)
    while not sparse.settled:
        loop(model, optimizer, images, labels)
    finished = sparse.finish()
    flops_ratio = flops(finished, images[:1]) / flops(dense, images[:1])
    prepare = MODES[mode]((images,), {})
    own, whole = prepare(finished), prepare(copy.deepcopy(dense))
    pairs = [
        (median_ms(own, 5, images.device, time.process_time), median_ms(whole, 3, images.device, time.process_time))
        for _ in range(turns)
    ]
    taken = [of_own / of_whole / fraction for of_own, of_whole in pairs]
    return {
        "network": name,
        "mode": mode,
        "fraction": fraction,
        "of_budget": statistics.median(taken),
        "spread_of_budget": spread(taken),
        "of_tables_budget": statistics.median(of_own for of_own, _ in pairs) / table.dense_ms / fraction,
        "ms": statistics.median(of_own for of_own, _ in pairs),
        "flops_ratio": flops_ratio,
        "error": table.error,
        "dense_ms": table.dense_ms,
        "table_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25, 0.12])
    parser.add_argument("--num-networks", type=int, default=120)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[1]
    rows = []
    for name, mode, fraction in itertools.product(args.networks, args.modes, args.fractions):
        rows.append(measured(name, mode, fraction, args.num_networks, args.turns))
        print(rows[-1], flush=True)
        if args.out:
            load = {"cores": os.cpu_count(), "load_before": before, "load_after": os.getloadavg()[1]}
            benchmark_record.write(args.out, "latency", rows, batch=BATCH, num_networks=args.num_networks, **load)


if __name__ == "__main__":
    main()
