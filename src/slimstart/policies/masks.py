"""Masks that keep to a budget exactly: the most probable one, and drawn ones with their least probable units cut."""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.policies.budgets import BoundBudget
from slimstart.policies.ranking import places, ranked


def most_probable(s: Tensor, groups: Tensor) -> Tensor:
    """The most probable of the masks that keep, in every group, the expected number of units, and at least one.

    (The most probable mask of all would be empty wherever s < 1/2, as it is at the start of most searches.)

    Args:
        s: keep-probabilities (U,), on the CPU.
        groups: each unit's group (U,), on the CPU.
    """
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    expected = torch.zeros(num_groups, dtype=torch.float64).index_add(0, groups, s)
    return places(s, groups) < expected.round().clamp(min=1)[groups]


def cut(mask: Tensor, s: Tensor, table: CostTable, budget: BoundBudget) -> Tensor:
    """The mask with as few of its least probable units removed as the budget asks, after the at-least-one rule.

    Args:
        mask: a draw (U,), on the CPU.
        s: keep-probabilities (U,), on the CPU.
    """
    mask = table.at_least_one(mask)
    if budget.cost(mask) <= budget.limit:
        return mask
    kept = mask.nonzero().squeeze(1)
    groups = table.unit_group.cpu()[kept]
    order, rank = ranked(s[kept], groups)
    relative = rank / torch.bincount(groups)[groups[order]]
    # Each group's best unit goes last (the at-least-one rule would put a worse one in its place). Among equals the
    # last of a group goes first, counted in parts of the group, so that equal s make equally narrow layers.
    last_first = torch.argsort(relative, descending=True, stable=True)
    by_s = torch.argsort(s[kept[order[last_first]]], stable=True)
    removal = last_first[by_s]
    removal = removal[torch.argsort((rank[removal] == 0).to(torch.uint8), stable=True)]
    units = kept[order[removal]]
    too_few, enough = 0, units.numel()
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if budget.cost(_without(mask, units[:middle])) <= budget.limit:
            enough = middle
        else:
            too_few = middle
    return table.at_least_one(_without(mask, units[:enough]))


def _without(mask: Tensor, units: Tensor) -> Tensor:
    mask = mask.clone()
    mask[units] = False
    return mask
