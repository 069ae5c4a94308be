"""Units by group and score, and their places within their groups."""

from __future__ import annotations

import torch
from torch import Tensor


def ranked(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Units (U,) group by group, each by falling score, among equals the first first; and the place of each of them."""
    falling = torch.argsort(scores, descending=True, stable=True)
    order = falling[torch.argsort(group[falling], stable=True)]
    sizes = torch.bincount(group)
    return order, torch.arange(len(order)) - (torch.cumsum(sizes, 0) - sizes)[group[order]]


def places(scores: Tensor, group: Tensor) -> Tensor:
    """(U,) int64: each unit's place in its group, 0 for the highest score; among equals the first comes first."""
    order, place = ranked(scores, group)
    return torch.empty_like(order).scatter_(0, order, place)
