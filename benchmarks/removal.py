"""What happens when a layer is removed in the middle of a training: the loss right after it, and some steps later.

A network is trained for some steps. Then, for each layer that can be removed, one copy continues without it and one
with it, with the same batches. The weights that read the layer's output are left as they are: they now read its input.

    python benchmarks/removal.py [--out FILE] [--steps 300] [--more 100]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from benchmark_record import write
from front_door import loop
from torch import Tensor, nn

from slimstart import compact, trace
from slimstart.lab import data, models
from slimstart.lab.run.evaluation import evaluate

NETWORKS = (("vgg16", 0.25), ("resnet20", 0.5))
LR = 0.05


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
    model.train()
    for images, labels in batches:
        loop(model, optimizer, images, labels)
    return model


def rows(name: str, width: float, steps: int, more: int) -> list[dict[str, Any]]:
    """One row per layer."""
    torch.manual_seed(0)
    images = data.load("fashion", batch_size=64)
    batches: list[tuple[Tensor, Tensor]] = []
    epoch = 0
    while len(batches) < steps + more:
        batches += images.train.epoch(epoch)
        epoch += 1
    model = models.build(name, num_classes=images.num_classes, in_channels=1, width=width)
    train(model, batches[:steps])
    graph = trace(model, batches[0][0][:2])
    everything = torch.ones(graph.num_units, dtype=torch.bool)
    before, _ = evaluate(model, images, "float32")
    stayed, _ = evaluate(train(copy.deepcopy(model), batches[steps : steps + more]), images, "float32")
    found = []
    for layer in graph.layers:
        short = compact(model, graph.without([layer.name]).select(everything))
        after, _ = evaluate(short, images, "float32")
        later, _ = evaluate(train(short, batches[steps : steps + more]), images, "float32")
        found.append(
            {
                "network": name,
                "layer": layer.name,
                "loss_before": before,
                "loss_right_after": after,
                "loss_later": later,
                "loss_later_with_it": stayed,
            }
        )
        print(f"{name} {layer.name}: {before:.3f}, right after {after:.3f}, later {later:.3f} (with it {stayed:.3f})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="steps before the layer is removed")
    parser.add_argument("--more", type=int, default=100, help="steps after it")
    arguments = parser.parse_args()
    table = [row for name, width in NETWORKS for row in rows(name, width, arguments.steps, arguments.more)]
    if arguments.out is not None:
        write(arguments.out, "removal", table, steps=arguments.steps, more=arguments.more, learning_rate=LR)


if __name__ == "__main__":
    main()
