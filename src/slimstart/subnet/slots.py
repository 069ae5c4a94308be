r"""Static slots: how many units of each group a sub-network has room for, so that its shapes survive a draw.

A draw keeps :math:`n_g` units of group g, and every draw another number. Its network is built with room for
:math:`S_g \ge n_g` units, a multiple of `align`; the places that are left are taken by units that were not drawn, as
zeros (`ChannelGraph.select_within`). So the padded network is one that a mask describes, too, and its cost is in the
cost table.

Room is made when a draw needs it, and taken away when much less would do (hysteresis): otherwise shapes would change
all the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.costs import CostTable

SHRINK = 1.5  # room is taken away when there is so many times what the draw needs, and more than `align` to spare


class Slots:
    """The room that each group has now.

    Args:
        table: the network's cost table.
        align: room is a multiple of this, or the whole group. With 1 there is no room but for the draw itself.
    """

    def __init__(self, table: CostTable, align: int) -> None:
        self._table, self.align = table, align
        self._group = table.unit_group.cpu()
        self._size = torch.bincount(self._group)
        self._start = torch.cumsum(self._size, 0) - self._size  # the units of a group are consecutive
        self.room = torch.zeros_like(self._size)

    def frames(self, masks: Tensor) -> Tensor:
        """For every mask (a row) one that keeps its units, and as many more as there is room for.

        The room is adjusted first, for all of them together, so that the networks of a draw have the same shapes.
        """
        masks = torch.stack([self._table.at_least_one(mask.cpu().bool()) for mask in masks])
        if self.align == 1:
            return masks
        needed = torch.zeros(len(masks), self._size.numel(), dtype=torch.int64).index_add(1, self._group, masks.long())
        self._adjust(needed.amax(0))
        spare = (self.room - needed)[:, self._group]
        # Passengers are the first units of a group that were not drawn: the same ones in all groups of a stream.
        waiting = (~masks).long()
        before = torch.cumsum(waiting, 1) - waiting
        rank = before - before[:, self._start][:, self._group]
        return masks | (rank < spare)

    def _adjust(self, needed: Tensor) -> None:
        aligned = torch.minimum((needed + self.align - 1) // self.align * self.align, self._size)
        too_small = self.room < needed
        too_large = (self.room > SHRINK * aligned) & (self.room - aligned > self.align)
        self.room = torch.where(too_small | too_large, aligned, self.room)
