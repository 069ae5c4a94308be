"""Accuracy on the test images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart.devices import evaluating
from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from slimstart.lab.data import ImageData
from slimstart.steps.depthwise_mode import AllWidths


def logits_of(network: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Logits of a network in the compute precision of a recipe, as float32."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = network(images)
    return logits.float()


@torch.no_grad()
def evaluate(
    network: nn.Module, data: ImageData, precision: str, ranks: ProcessGroup = SINGLE_PROCESS
) -> tuple[float, float]:
    """Mean loss and top-1 accuracy, in percent, of a network on the test images; each process evaluates its share."""
    loss: Tensor | float = 0.0
    correct: Tensor | int = 0
    with evaluating(network), AllWidths():  # the kernels of captured steps, so that no others are built
        for images, labels in data.test.epoch(0):
            if not len(labels):  # the last batch may have fewer images than there are processes
                continue
            logits = logits_of(network, images, precision)
            loss = loss + F.cross_entropy(logits, labels, reduction="sum").double()
            correct = correct + (logits.argmax(1) == labels).sum()
    total, hits = ranks.total(torch.tensor([float(loss), int(correct)], dtype=torch.float64)).tolist()
    return total / data.test.num_images, 100 * hits / data.test.num_images
