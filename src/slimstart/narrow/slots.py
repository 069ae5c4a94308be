r"""Static slots: what a sub-network has room for, so that its shapes survive a draw.

A draw keeps :math:`n_g` units of group g, and every draw another number. Its network is built with room for
:math:`S_g \ge n_g` units, `aligned` to some number; the places that are left are taken by *passengers*, units that
were not drawn, as zeros. A channel of a stream exists if one of several units writes it, so their number changes even
where every :math:`n_g` is the same: streams have room for all channels that a draw can bring at all.

Room comes from the keep-probabilities: more than the expected number of units and a `spread` of standard deviations,

.. math:: S_g > \sum_{u \in g} s_u + \mathrm{spread} \sqrt{\textstyle\sum_{u \in g} s_u (1 - s_u)},

and it stays as it is until a draw overflows it, or until room made anew would save a good part of the FLOPs
(hysteresis). Once s has become 0 or 1, nothing is padded but to `align`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.graph import ChannelGraph

RENEW = 1.15  # room is made anew when it executes so many times the FLOPs of fresh room
COARSE = 4  # above so many times `align`, room is a multiple of twice that: a GPU is faster with 64 channels than 56
POSSIBLE = 1e-4  # a stream's channel has room if its probability is at least this


@dataclass(frozen=True)
class Room:
    """What there is room for.

    Attributes:
        units: (num_groups,) int64, how many units of each group.
        streams: (num_events,) bool, which channels that several units write; of no meaning for the others.
    """

    units: Tensor
    streams: Tensor


class Slots:
    """The room that networks have now, adjusted draw by draw; all of it on the host.

    Args:
        graph: of the network.
        align: room is `aligned` to this, or the whole group.
        spread: standard deviations above the mean that draws hardly ever reach; None where draws are so few that room
            is made anew for each of them.
    """

    def __init__(self, graph: ChannelGraph, align: int, spread: float | None = 4.0) -> None:
        table = graph.costs
        self._graph, self.align, self._spread = graph, align, spread
        self._group, self._events = table.unit_group.cpu(), table.events.cpu()
        self.size = torch.bincount(self._group)
        self.shared = shared_events(table)
        self.room = Room(torch.zeros_like(self.size), torch.zeros_like(self.shared))

    def adjust(self, kept: Tensor, keep_probs: Tensor | None, look: bool = True) -> bool:
        """See to it that there is room for these masks; returns whether that changed it.

        Args:
            kept: (n, U) masks of one draw, after the at-least-one rule.
            keep_probs: s, or None where the structure is fixed and no other mask will come.
            look: whether to find out if less room would do; it need not be at every draw.
        """
        keep_probs = None if self._spread is None else keep_probs
        needed, happens = self._needed(kept)
        too_small = needed > self.room.units
        missing = happens & ~self.room.streams
        overflows = bool(too_small.any() | missing.any())
        if not (overflows or look) and keep_probs is not None:
            return False
        fresh = self._fresh(needed, happens, keep_probs)
        first = not bool(self.room.units.any())
        if keep_probs is None or first or self._flops(self.room) > RENEW * self._flops(fresh):
            if torch.equal(fresh.units, self.room.units) and torch.equal(fresh.streams, self.room.streams):
                return False
            self.room = fresh
        elif overflows:  # to make room anew costs the same for one group as for all that will need it soon
            self.room = Room(torch.maximum(fresh.units, self.room.units), self.room.streams | fresh.streams)
        else:
            return False
        return True

    @property
    def flops(self) -> int:
        """FLOPs of one example through a network of this room, zeros included."""
        return self._flops(self.room)

    @property
    def typical_units(self) -> Tensor:
        """(U,) bool: the units of one frame of this room; every frame has the same shapes."""
        return self._units(self.room)

    def _needed(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The most units of each group, and the shared channels, that the masks keep."""
        kept = kept.cpu()
        counts = torch.zeros(len(kept), self.size.numel(), dtype=torch.int64).index_add(1, self._group, kept.long())
        padded = torch.cat([kept.any(0), kept.new_zeros(1)])
        return counts.amax(0), padded[self._events].any(1) & self.shared

    def _fresh(self, needed: Tensor, happens: Tensor, s: Tensor | None) -> Room:
        want, possible = needed, happens
        if s is not None and self._spread is not None:
            s = s.cpu().double()
            zeros = torch.zeros(self.size.numel(), dtype=torch.float64)
            mean = zeros.index_add(0, self._group, s)
            spread = zeros.index_add(0, self._group, s * (1 - s)).sqrt()
            want = torch.maximum(needed, (mean + self._spread * spread + 1e-6).floor().long() + (spread > 1e-3))
            absent = torch.cat([1 - s, s.new_ones(1)])[self._events].prod(1)
            possible = happens | ((1 - absent > POSSIBLE) & self.shared)
        return Room(torch.minimum(aligned(want, self.align), self.size), possible)

    def _units(self, room: Room) -> Tensor:
        start = torch.cumsum(self.size, 0) - self.size  # the units of a group are consecutive
        return torch.arange(self._group.numel()) - start[self._group] < room.units[self._group]

    def _flops(self, room: Room) -> int:
        frame = torch.where(self.shared, room.streams, self._units(room)[self._events[:, 0]])
        return self._graph.flops_within(frame)


def aligned(widths: Tensor, align: int) -> Tensor:
    """The least widths, not below these, that a GPU is fast with: multiples of `align`, large ones of twice that."""
    step = torch.where(widths > COARSE * align, 2 * align, align) if align > 1 else torch.ones_like(widths)
    return (widths + step - 1) // step * step


def shared_events(table: CostTable) -> Tensor:
    """(num_events,) bool: the channels that more than one unit writes."""
    return (table.events >= 0).sum(1).cpu() > 1
