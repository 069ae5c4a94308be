"""Bytes that processes exchange, and step times, dense and narrow: one process and two, over gloo.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --out results/scaling_cpu.json
    python benchmarks/scaling.py --tables results/scaling_cpu.json    # those of docs/scaling.md

The whole batch is the same for any number of processes. Times are medians, without the first steps. "exchange" is an
all-reduce of as many bytes as the gradients have. For networks that are only counted (`--count`), the bytes are those
of draws at the beginning of a search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import benchmark_record
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.distributed import data_parallel, joined
from slimstart.distributed.process_group import ProcessGroup
from slimstart.lab import models
from slimstart.policies import Paper
from slimstart.steps import PlainTraining

BUDGETS = (1.0, 0.25, 0.10, 0.05)
WARM_UP, STEPS = 2, 8

# For the table of what is to be expected. Links, per GPU and direction: NVLink 4 within a machine of 8, InfiniBand NDR
# between machines; data sheets, of which a ring reaches about 80 %. Latency of one step of a ring or tree.
NVLINK, INFINIBAND, REACHED, LATENCY = 450e9, 50e9, 0.8, 5e-6
MACHINE = 8
GPUS = (8, 64, 1024)
# H200, bfloat16, 256 images, WRN-28-10: dense, and at 10 % FLOPs held for 50 steps (results/bench-h200).
WRN_FLOPS, WRN_MS, WRN_NARROW_MS = 5_243_328_768, 21.457, 5.928
RESNET50_FLOPS, NORMS = 4_089_184_256, 53


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def measure(ranks: ProcessGroup, name: str, budget: float, held: int, batch_size: int) -> dict[str, Any]:
    """One row: steps of a network at a budget, 1.0 being plain dense training, held for so many steps."""
    torch.manual_seed(0)
    model = models.build(name, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    own = batch_size * (ranks.rank + 1) // ranks.size - batch_size * ranks.rank // ranks.size
    batch = torch.randn(own, 3, 32, 32), torch.randint(10, (own,))
    dense_bytes = sum(4 * p.numel() for p in model.parameters())
    net = model if ranks.size == 1 else data_parallel(model)
    if budget == 1.0:
        training: Any = PlainTraining(net, optimizer)
    else:
        policy = Paper(resample_every=held)
        training = slimstart.SparseTraining(net, optimizer, batch[0][:1], slimstart.Flops(budget), policy=policy)
    times, sizes = [], []
    for _ in range(WARM_UP + STEPS):
        sizes.append(dense_bytes if budget == 1.0 else training.gradient_bytes)
        ranks.barrier()
        began = time.perf_counter()
        training.step(loss_fn, *batch)
        times.append(1000 * (time.perf_counter() - began))
    gradient_bytes = round(statistics.mean(sizes))
    return {
        "model": name,
        "ranks": ranks.size,
        "flops": budget,
        "resample_every": held,
        "batch_size": batch_size,
        "gradient_bytes": gradient_bytes,
        "dense_gradient_bytes": dense_bytes,
        "step_ms": statistics.median(times[WARM_UP:]),
        "exchange_ms": exchange(ranks, gradient_bytes),
    }


def exchange(ranks: ProcessGroup, num_bytes: int) -> float | None:
    """Milliseconds of an all-reduce."""
    if ranks.size == 1:
        return None
    times, content = [], torch.zeros(num_bytes // 4)
    for _ in range(WARM_UP + STEPS):
        ranks.barrier()
        began = time.perf_counter()
        dist.all_reduce(content)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[WARM_UP:])


def count(name: str, budget: float, draws: int = 5) -> dict[str, Any]:
    """Bytes alone, for a network that is too large to be trained here."""
    model = models.build(name, num_classes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = slimstart.SparseTraining(
        model, optimizer, torch.zeros(1, 3, 224, 224), slimstart.Flops(budget), policy="paper"
    )
    sizes = []
    for _ in range(draws):
        sizes.append(sparse.gradient_bytes)
        sparse.resample()
    return {
        "model": name,
        "flops": budget,
        "gradient_bytes": round(statistics.mean(sizes)),
        "dense_gradient_bytes": sparse.dense_gradient_bytes,
    }


def measured(rows: list[dict[str, Any]]) -> list[str]:
    """The table of one process and of two."""
    lines = ["| FLOPs, % | held for | gradients, MB | of dense, % | exchange, ms | 1 process, ms | 2 processes, ms |"]
    lines.append("|---" * 7 + "|")
    one, two = ([row for row in rows if row.get("ranks") == size] for size in (1, 2))
    for a, b in zip(one, two, strict=True):
        share = 100 * b["gradient_bytes"] / b["dense_gradient_bytes"]
        lines.append(
            f"| {100 * b['flops']:.0f} | {b['resample_every'] if b['flops'] < 1 else ''} | "
            f"{b['gradient_bytes'] / 1e6:.1f} | {share:.1f} | {b['exchange_ms']:.0f} | {a['step_ms']:.0f} | "
            f"{b['step_ms']:.0f} |"
        )
    return lines


def expected(rows: list[dict[str, Any]]) -> list[str]:
    """The table of efficiency against one GPU, where the exchange does not overlap with the backward."""
    (row,) = (row for row in rows if row["model"] == "resnet50")
    dense_ms = WRN_MS * RESNET50_FLOPS / WRN_FLOPS
    narrow_ms, name = dense_ms * WRN_NARROW_MS / WRN_MS, f"{100 * row['flops']:.0f} % FLOPs"
    own, dense = row["gradient_bytes"], row["dense_gradient_bytes"]
    lines = ["| | step, ms | gradients, MB | " + " | ".join(f"{n:,} GPUs" for n in GPUS) + " |", "|---" * 6 + "|"]
    for about, step, size, norms in (
        ("dense", dense_ms, dense, 0),
        (name, narrow_ms, own, 0),
        (f"{name}, if gradients were dense", narrow_ms, dense, 0),
        ("dense, synchronised batch norm", dense_ms, dense, 2 * NORMS),
        (f"{name}, synchronised batch norm", narrow_ms, own, 2 * NORMS),
    ):
        cells = []
        for n in GPUS:
            # The losses are one small exchange; a norm is one forwards and one backwards.
            ms = 1000 * (all_reduce_seconds(size, n) + (1 + norms) * all_reduce_seconds(0, n))
            cells.append(f"{100 * step / (step + ms):.0f} % ({ms:.1f} ms)")
        lines.append(f"| {about} | {step:.1f} | {size / 1e6:.1f} | " + " | ".join(cells) + " |")
    return lines


def all_reduce_seconds(size: float, gpus: int) -> float:
    """Seconds of an all-reduce: within a machine, then a ring between machines, then within a machine again."""
    inside = 2 * (MACHINE - 1) / MACHINE * size / (REACHED * NVLINK) + 2 * (MACHINE - 1) * LATENCY
    machines = gpus // MACHINE
    if machines == 1:
        return inside
    between = 2 * (machines - 1) / machines * (size / MACHINE) / (REACHED * INFINIBAND)
    return inside + between + 2 * (machines - 1).bit_length() * LATENCY


def worker(options: argparse.Namespace) -> None:
    with joined() as ranks:
        cases = [(budget, held) for budget in BUDGETS for held in (1, 50) if budget < 1 or held == 1]
        rows = [measure(ranks, options.model, budget, held, options.batch_size) for budget, held in cases]
        if ranks.rank == 0:
            Path(options.worker).write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vgg19")
    parser.add_argument("--count", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--out", type=Path, default=Path("results/scaling_cpu.json"))
    parser.add_argument("--tables", type=Path, help="print those of docs/scaling.md, from this record")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tables:
        rows = json.loads(options.tables.read_text())["rows"]
        print("\n".join([*measured(rows), "", *expected(rows)]))
        return
    if options.worker:
        worker(options)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            own = ["--model", options.model, "--batch-size", str(options.batch_size), "--worker", f"{folder}/{size}"]
            subprocess.run([*torchrun, __file__, *own], check=True)
            rows += json.loads(Path(folder, str(size)).read_text())
    rows.append(count(options.count, 0.10))
    benchmark_record.write(options.out, "scaling", rows, warm_up=WARM_UP, steps=STEPS)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
