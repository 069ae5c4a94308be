"""Places of units within their groups."""

from __future__ import annotations

import torch
from torch import Tensor


def places(scores: Tensor, group: Tensor) -> Tensor:
    """(U,) int64: each unit's place in its group, 0 for the highest score; among equals the first comes first."""
    falling = torch.argsort(scores, descending=True, stable=True)
    order = falling[torch.argsort(group[falling], stable=True)]
    sizes = torch.bincount(group)
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order)) - (torch.cumsum(sizes, 0) - sizes)[group[order]]
    return found
