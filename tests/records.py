"""Synthetic records; their numbers follow from simple arithmetic."""

from __future__ import annotations

import math
from typing import Any

from slimstart.lab.records import NUM_BINS, Epoch, Layer, Record, Structure, digest

VGG16 = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
IMAGES, BATCH_SIZE, DENSE_FLOPS, DENSE_PARAMS = 50_000, 256, 313_196_544, 14_728_266


def make(
    method: str = "slimstart",
    ratio: float = 0.1,
    seed: int = 0,
    epochs: int = 30,
    widths: tuple[int, ...] = VGG16,
    timed: bool = True,
    **changes: Any,
) -> Record:
    """A run whose finished network has `ratio` of the dense FLOPs.

    A search executes two forwards and one backward on networks of that size, 4 f_S per image against 3 f_D.
    """
    search = method == "slimstart"
    ratio = ratio if method != "dense" else 1.0
    settled = round(0.8 * epochs) if search else 0
    dense_train_flops = 3 * DENSE_FLOPS * IMAGES
    history = []
    for epoch in range(1, epochs + 1):
        searching, progress = epoch <= settled, epoch / epochs
        cost = ratio * (1 + 0.25 * math.exp(-epoch / 3)) if searching else ratio
        loss = 2.3 * math.exp(-4 * progress) + 0.05 + 0.02 * math.sin(epoch + seed)
        history.append(
            Epoch(
                epoch=epoch,
                phase="search" if searching else "train",
                lr=0.05 * (1 + math.cos(math.pi * progress)),
                train_loss=loss,
                test_loss=loss + 0.1,
                test_accuracy=_accuracy(ratio, seed)
                - 60 * math.exp(-6 * progress)
                + math.sin(3 * epoch + seed) * (1 - progress),
                flops_ratio=cost,
                train_flops=round(dense_train_flops * cost * (4 / 3 if searching else 1)),
                dense_train_flops=dense_train_flops,
                seconds=20 * cost + 4,
                images_per_second=IMAGES / (20 * cost + 4),
                expected_cost=ratio if searching else None,
                certain=progress**2 if searching else None,
                keep_probs=_histogram(progress, ratio) if searching else None,
            )
        )
    f_s = sum(epoch.flops_ratio for epoch in history[: settled or None]) / (settled or epochs)
    budget = None if method == "dense" else f"flops={ratio:g}"
    config = {"method": method, "model": "vgg16", "data": "cifar10", "budget": budget, "epochs": epochs, "lr": 0.1}
    train_flops = sum(epoch.train_flops for epoch in history)
    width = math.sqrt(ratio)
    layers = tuple(_layers(widths, width, search))
    fields: dict[str, Any] = {
        "name": f"vgg16-cifar10-{method}-{ratio:g}-seed{seed}",
        "method": method,
        "model": "vgg16",
        "data": "cifar10",
        "num_classes": 10,
        "image_shape": (3, 32, 32),
        "budget": budget,
        "seed": seed,
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "config": config | {"seed": seed},
        "config_hash": digest(config),
        "command": f"slimstart train vgg16-cifar10 --method {method} --seed {seed}",
        "commit": "8ca1f5e6a3c94b0d8ca1f5e6a3c94b0d8ca1f5e6",
        "version": "0.1.0",
        "device": "cuda",
        "hardware": "NVIDIA H200",
        "torch": "2.8.0",
        "python": "3.12.3",
        "started": f"2025-03-0{1 + seed % 9}T10:00:00+00:00",
        "finished": f"2025-03-0{1 + seed % 9}T11:30:00+00:00",
        "accuracy": _accuracy(ratio, seed),
        "test_loss": 0.31,
        "flops": round(DENSE_FLOPS * ratio),
        "dense_flops": DENSE_FLOPS,
        "flops_ratio": ratio,
        "params": round(DENSE_PARAMS * ratio * 0.8),
        "dense_params": DENSE_PARAMS,
        "params_ratio": ratio * 0.8 if method != "dense" else 1.0,
        "layers": layers,
        "structures": _structures(layers, width, settled) if settled > 1 else None,
        "train_flops": train_flops,
        "dense_train_flops": dense_train_flops * epochs,
        "train_cost_saving": 3 / (4 * f_s) if search else 1 / f_s,
        "executed_saving": dense_train_flops * epochs / train_flops,
        "train_seconds": sum(epoch.seconds for epoch in history),
        "step_ms": 24 * ratio + 6.5 if timed else None,
        "step_forward_ms": 8 * ratio + 2 if timed else None,
        "step_backward_ms": 16 * ratio + 1.5 if timed else None,
        "dense_step_ms": 26.0 if timed else None,
        "narrow_step_ms": 22 * ratio + 4 if timed else None,
        "peak_memory_bytes": round(2**30 * (0.4 + ratio)),
        "history": tuple(history),
    }
    return Record(**(fields | changes))


def study(epochs: int = 30) -> list[Record]:
    """Dense, and two methods at three budgets, three seeds each."""
    methods = [("dense", 1.0)] + [(m, r) for m in ("slimstart", "uniform") for r in (0.4, 0.1, 0.03)]
    return [
        make(method, ratio, seed, epochs, accuracy=_accuracy(ratio, seed) - (1.4 if method == "uniform" else 0))
        for method, ratio in methods
        for seed in range(3)
    ]


def _accuracy(ratio: float, seed: int) -> float:
    return 94.0 + 1.1 * math.log10(ratio) ** 3 / 1.5 + 0.2 * math.sin(7 * seed + ratio)


def _layers(widths: tuple[int, ...], width: float, uneven: bool) -> list[Layer]:
    bend = [1 + 0.6 * math.sin(1.3 * i) if uneven else 1.0 for i in range(len(widths))]
    kept = [min(dense, max(1, round(dense * width * b))) for dense, b in zip(widths, bend, strict=True)]
    before = [3, *widths]
    return [
        Layer(f"features.{3 * i}", dense, k, dense * before[i] * 9 * 256, k * max(1, before[i] // 2) * 9 * 256)
        for i, (dense, k) in enumerate(zip(widths, kept, strict=True))
    ]


def _structures(layers: tuple[Layer, ...], width: float, settled: int) -> tuple[Structure, ...]:
    """From equal shares to the widths of the finished network, in eight changes."""
    shares = [change / 8 for change in range(9)]
    return tuple(
        Structure(
            settled * share,
            {one.name: max(1, round((1 - share) * one.dense * width + share * one.width)) for one in layers},
        )
        for share in shares
    )


def _histogram(progress: float, ratio: float) -> tuple[int, ...]:
    """4224 units that start in one bin and gather at 0 and 1."""
    start = int(math.sqrt(ratio) * NUM_BINS)
    still = [math.exp(-((i - start) ** 2) / (0.5 + 30 * progress)) * (1 - progress) ** 1.5 for i in range(NUM_BINS)]
    ends = [progress * (1 - ratio), *[0.0] * (NUM_BINS - 2), progress * ratio]
    weights = [s + 3 * e for s, e in zip(still, ends, strict=True)]
    return tuple(round(4224 * w / sum(weights)) for w in weights)
