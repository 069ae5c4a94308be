"""Depthwise convolutions by kernels for all widths, against cuDNN's, which are compiled for each width.

python benchmarks/depthwise_time.py --device cuda --out results/depthwise_h200.json

Forward and backward of 3 x 3 filters in bfloat16, channels-last: the first call, then CUDA graphs. The first call of
the Triton kernels may find them in the cache on disk.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import benchmark_record
import torch
import torch.nn.functional as F
from paper_steps.turns import Turn, take_turns
from torch import Tensor

from slimstart.kernels.depthwise import Window, depthwise_conv2d
from slimstart.lab.run.step_times import Stopwatch
from slimstart.steps.cuda_graph import capture


class Layer(NamedTuple):
    """A layer of a MobileNetV1 with some width or other."""

    channels: int
    size: int
    stride: int


LAYERS = (
    *(Layer(24, 64, 1), Layer(48, 64, 2), Layer(64, 32, 1), Layer(72, 32, 2), Layer(104, 16, 1), Layer(136, 16, 2)),
    *(Layer(200, 8, 1), Layer(256, 8, 2), Layer(360, 4, 1), Layer(512, 4, 2), Layer(520, 2, 1)),
)


def step_of(layer: Layer, ours: bool, batch: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of one layer, of its input and its filters."""
    x = torch.randn(batch, layer.channels, layer.size, layer.size, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(layer.channels, 1, 3, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
    window = Window((layer.stride,) * 2, (1, 1), (1, 1))
    upstream = torch.ones((), device=device, dtype=torch.bfloat16)

    def convolved() -> Tensor:
        return depthwise_conv2d(x, weight, None, window) if ours else F.conv2d(x, weight, None, *window, layer.channels)

    def step() -> None:
        y = convolved()
        torch.autograd.grad(y, (x, weight), upstream.expand_as(y).contiguous(memory_format=torch.channels_last))

    return step


def measure(layer: Layer, batch: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of the first call and of a later one, by torch and by ours."""
    row: dict[str, float] = {**layer._asdict(), "batch": batch}
    turns = {}
    for name in ("torch", "ours"):
        step = step_of(layer, name == "ours", batch, device)
        watch = Stopwatch(device, in_parts=False)
        step()
        row[f"{name}_first_ms"] = watch.stop()
        replay = capture(step).replay if device.type == "cuda" else step
        turns[name] = Turn(replay, num_steps=10)
    for name, times in take_turns(turns, device, rounds, seconds=10).items():
        row[f"{name}_ms"] = statistics.median(times)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    for layer in LAYERS:
        row = measure(layer, args.batch, device, args.rounds)
        rows.append(row)
        print(
            f"{layer.channels} channels, {layer.size} x {layer.size}, stride {layer.stride}: torch "
            f"{row['torch_first_ms']:.0f} ms, then {row['torch_ms']:.3f} ms; ours {row['ours_first_ms']:.0f} ms, then "
            f"{row['ours_ms']:.3f} ms ({row['ours_ms'] / row['torch_ms']:.2f} times)",
            flush=True,
        )
    whole = {name: sum(row[name] for row in rows) for name in ("torch_ms", "ours_ms")}
    print(f"all of them: {whole['ours_ms'] / whole['torch_ms']:.2f} times the time of torch")
    if args.out:
        benchmark_record.write(args.out, "depthwise_time", rows, args.device)


if __name__ == "__main__":
    main()
