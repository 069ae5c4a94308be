"""What a step of SparseTraining costs beside a training step of the plain narrow network: the limit for any method.

Both sides are measured in one process, in turns, on networks of the same draws, so that a noisy machine disturbs both
alike; what counts is the ratio of the medians.

    python benchmarks/step_time.py --resample-every 1 50 --out results/step_time_cpu.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import records
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.models import vgg19


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def plain_step(net: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss_fn(net, images, labels).backward()
    optimizer.step()


def measure(resample_every: int, args: argparse.Namespace) -> dict[str, float | int]:
    """Median times of a window of steps, slimstart's and the narrow network's, per step."""
    torch.manual_seed(0)
    model = vgg19()
    images, labels = torch.randn(args.batch_size, 3, 32, 32), torch.randint(0, 10, (args.batch_size,))
    dense_flops = slimstart.flops(model, images[:1])
    sparse = slimstart.SparseTraining(
        model,
        sgd(model),
        images[:1],
        budget=slimstart.Flops(args.flops),
        resample_every=resample_every,
        align=args.align,
    )
    steps = max(1, min(resample_every, args.window))
    ours, narrow, ratios, flops = [], [], [], []
    for round_number in range(args.rounds + 1):
        # The plain network has the widths of the present draw, and weights of its own.
        plain = slimstart.compact(model, sparse.graph.select(sparse.mask))
        optimizer = sgd(plain)
        plain_step(plain, optimizer, images, labels)
        flops.append(slimstart.flops(plain, images[:1]) / dense_flops)
        began = time.perf_counter()
        for _ in range(steps):
            plain_step(plain, optimizer, images, labels)
        middle = time.perf_counter()
        if resample_every == 1:
            sparse.step(loss_fn, images, labels)
        else:  # a whole window is one draw, one pair of forwards, and the rest plain steps: scale to its length
            sparse.resample()
            for _ in range(steps):
                sparse.step(loss_fn, images, labels)
        ended = time.perf_counter()
        if round_number:  # the first round warms up
            narrow.append((middle - began) / steps)
            ours.append((ended - middle) / steps)
            ratios.append(ours[-1] / narrow[-1])
    return {
        "resample_every": resample_every,
        "flops_ratio": statistics.mean(flops),
        "ours_ms": 1e3 * statistics.median(ours),
        "narrow_ms": 1e3 * statistics.median(narrow),
        "ratio": statistics.median(ours) / statistics.median(narrow),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "rounds": args.rounds,
        "steps_per_round": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--flops", type=float, default=0.10, help="budget as a fraction of dense")
    parser.add_argument("--resample-every", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--window", type=int, default=50, help="at most so many steps per round")
    parser.add_argument("--align", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(every, args) for every in args.resample_every]
    for row in rows:
        print(
            f"resample_every={row['resample_every']:<4} {row['ours_ms']:.1f} ms, narrow {row['narrow_ms']:.1f} ms: "
            f"{row['ratio']:.2f}x ({row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f})"
        )
    if args.out:
        records.write(args.out, "step_time", rows, model="vgg19", batch_size=args.batch_size, align=args.align)


if __name__ == "__main__":
    main()
