"""What a pruning method is given, for tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import trace
from slimstart.lab.methods.pruning import Trained
from slimstart.policies import Budget


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def trained(
    net: nn.Module, budget: Budget, size: int = 8, *, num_images: int = 4, num_batches: int = 1, **more: Any
) -> Trained:
    """A network for images of 3 x size x size and 4 classes, its budget, and random batches."""
    dtype = next(net.parameters()).dtype
    graph = trace(net, torch.zeros(1, 3, size, size, dtype=dtype), "stream")
    generator = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randn(num_images, 3, size, size, generator=generator, dtype=dtype),
            torch.randint(0, 4, (num_images,), generator=generator),
        )
        for _ in range(num_batches)
    ]
    return Trained(net, graph, budget.bind(graph.costs), batches, more.pop("loss_fn", loss_fn), **more)
