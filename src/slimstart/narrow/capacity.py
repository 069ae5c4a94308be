r"""Capacity to spare: shapes of a network that survive a draw, and which dense channel each position then holds.

A draw keeps :math:`n_g` units of group g, and every draw another number. Its network is built with capacity for
:math:`S_g \ge n_g` units, a multiple of some `align`; the positions that are left are *padding*, zeros in every tensor.
A channel of a stream exists if one of several units writes it, so their number changes even where every :math:`n_g` is
the same: streams have capacity for all channels that a draw can bring at all.

Capacity comes from the keep-probabilities: more than the expected number of units and a `spread` of standard
deviations,

.. math:: S_g > \sum_{u \in g} s_u + \mathrm{spread} \sqrt{\textstyle\sum_{u \in g} s_u (1 - s_u)},

and it is kept until a draw overflows it, or until new capacity would save a good part of the FLOPs (hysteresis). Once s
has become 0 or 1, nothing is padded but to `align`.

`Planner` chooses the capacity, on the host. `Layout` computes positions from masks on the device: its shapes depend on
the capacity alone and no value is read on the host, so a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.graph import ChannelGraph, Port

RENEW = 1.15  # capacity is chosen again when it executes so many times the FLOPs of new capacity
COARSE = (
    4  # above so many times `align`, capacity is a multiple of twice that: a GPU is faster with 64 channels than 56
)
POSSIBLE = 1e-4  # a stream has capacity for a channel whose probability is at least this


@dataclass(frozen=True)
class Capacity:
    """What a network has positions for.

    Attributes:
        units: (num_groups,) int64, how many units of each group.
        streams: (num_events,) bool, which channels that several units write; of no meaning for the others.
    """

    units: Tensor
    streams: Tensor

    def equals(self, other: Capacity) -> bool:
        return torch.equal(self.units, other.units) and torch.equal(self.streams, other.streams)


class Planner:
    """Chooses the capacity of networks, draw by draw.

    Args:
        graph: of the network.
        align: units per group are a multiple of this, or the whole group.
        spread: standard deviations above the mean that draws hardly ever reach.
    """

    def __init__(self, graph: ChannelGraph, align: int, spread: float) -> None:
        table = graph.costs
        self._graph, self.align, self._spread = graph, align, spread
        self._group, self._events = table.unit_group.cpu(), table.events.cpu()
        self._size = torch.bincount(self._group)
        self._shared = shared_events(table)

    def __call__(self, now: Capacity | None, kept: Tensor, keep_probs: Tensor | None, look: bool = True) -> Capacity:
        """Capacity for these masks: `now` itself where it is good enough.

        Args:
            kept: (n, U) masks of one draw, after the at-least-one rule.
            keep_probs: s, or None where the structure is fixed and no other mask will come.
            look: whether to find out if less capacity would do; it need not be at every draw.
        """
        needed, happens = self._needed(kept)
        overflows = now is None or bool((needed > now.units).any() | (happens & ~now.streams).any())
        if now is not None and keep_probs is not None and not (overflows or look):
            return now
        new = self._new(needed, happens, keep_probs)
        if now is None:
            return new
        if keep_probs is None or self.flops(now) > RENEW * self.flops(new):
            return now if new.equals(now) else new
        if overflows:  # to rebuild costs the same for one group as for all that will need it soon
            return Capacity(torch.maximum(new.units, now.units), now.streams | new.streams)
        return now

    def flops(self, capacity: Capacity) -> int:
        """FLOPs of one example through a network of this capacity, padding included."""
        frame = torch.where(self._shared, capacity.streams, self.typical_units(capacity)[self._events[:, 0]])
        return self._graph.flops_within(frame)

    def typical_units(self, capacity: Capacity) -> Tensor:
        """(U,) bool: the units of one frame of this capacity; every frame has the same shapes."""
        return _first_units(self._group, self._size, capacity)

    def _needed(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The most units of each group, and the shared channels, that the masks keep."""
        kept = kept.cpu()
        counts = torch.zeros(len(kept), self._size.numel(), dtype=torch.int64).index_add(1, self._group, kept.long())
        padded = torch.cat([kept.any(0), kept.new_zeros(1)])
        return counts.amax(0), padded[self._events].any(1) & self._shared

    def _new(self, needed: Tensor, happens: Tensor, s: Tensor | None) -> Capacity:
        want, possible = needed, happens
        if s is not None:
            s = s.cpu().double()
            zeros = torch.zeros(self._size.numel(), dtype=torch.float64)
            mean = zeros.index_add(0, self._group, s)
            spread = zeros.index_add(0, self._group, s * (1 - s)).sqrt()
            want = torch.maximum(needed, (mean + self._spread * spread + 1e-6).floor().long() + (spread > 1e-3))
            absent = torch.cat([1 - s, s.new_ones(1)])[self._events].prod(1)
            possible = happens | ((1 - absent > POSSIBLE) & self._shared)
        return Capacity(torch.minimum(aligned(want, self.align), self._size), possible)


def aligned(widths: Tensor, align: int) -> Tensor:
    """The least widths, not below these, that a GPU is fast with: multiples of `align`, large ones of twice that."""
    step = torch.where(widths > COARSE * align, 2 * align, align) if align > 1 else torch.ones_like(widths)
    return (widths + step - 1) // step * step


def shared_events(table: CostTable) -> Tensor:
    """(num_events,) bool: the channels that more than one unit writes."""
    return (table.events >= 0).sum(1).cpu() > 1


def _first_units(group: Tensor, size: Tensor, capacity: Capacity) -> Tensor:
    start = torch.cumsum(size, 0) - size  # the units of a group are consecutive
    return torch.arange(group.numel()) - start[group] < capacity.units[group]


@dataclass(frozen=True)
class Positions:
    """Which dense channel every position holds, in n networks of one draw.

    Attributes:
        row: (n, num_positions) int32, the dense index at every position of every axis, -1 for padding.
        ports: (n, num_port_positions) int32, the same between layers and the streams around them.
        fits: bool, whether the capacity was enough; otherwise the rest means nothing.
    """

    row: Tensor
    ports: Tensor
    fits: Tensor

    def copy_(self, other: Positions) -> None:
        for mine, its in ((self.row, other.row), (self.ports, other.ports), (self.fits, other.fits)):
            mine.copy_(its)

    def clone(self) -> Positions:
        return Positions(self.row.clone(), self.ports.clone(), self.fits.clone())


class Layout:
    """The positions of networks of one capacity; along an axis they are in the order of the dense network.

    Args:
        graph: of the network.
        capacity: of the networks.
        device: where masks come from.

    Attributes:
        start: for every axis, where its positions begin in `Positions.row`.
        count: for every axis, how many it has.
        ports: for every side of every port that is needed, {(layer, is_write): (start of the layer's own positions in
            `Positions.ports`, how many, start of the stream's, how many)}.
    """

    def __init__(self, graph: ChannelGraph, capacity: Capacity, device: torch.device) -> None:
        table = graph.costs
        self._device = device
        group = table.unit_group.cpu()
        size = torch.bincount(group)
        self._group, self._units = group.to(device), capacity.units.to(device)
        self._first = (torch.cumsum(size, 0) - size).to(device)
        shared = shared_events(table)
        self._events, self._writer = table.events.to(device), table.events[:, 0].to(device)
        self._shared, self._streams = shared.to(device), (capacity.streams & shared).to(device)

        always = torch.tensor(len(table.events))
        axes = [torch.where(axis < 0, always, axis) for axis in graph.axes]
        lengths = [axis.numel() for axis in axes]
        self._axis = torch.cat([*axes, always[None][:0]]).to(device)
        self._local = torch.cat([*map(torch.arange, lengths), always[None][:0]]).to(device, torch.int32)
        first_index = [sum(lengths[:i]) for i in range(len(lengths))]  # of an axis in `_axis`

        # The shapes of any frame: the first units of every group stand for all.
        frame, _, _ = self._happens(_first_units(group, size, capacity).to(device)[None])
        present = frame[0].cpu()
        self.count = [int(present[axis].sum()) for axis in axes]
        self.start = [sum(self.count[:i]) for i in range(len(self.count))]
        self._start = torch.tensor(self.start).repeat_interleave(torch.tensor(lengths)).to(device)
        self._num_positions = sum(self.count)

        fixed = torch.cat([shared, shared.new_ones(1)])
        self.ports: dict[tuple[str, bool], tuple[int, int, int, int]] = {}
        own, others, total = [], [], 0
        for is_write, ports in ((False, graph.reads), (True, graph.writes)):
            for name, port in ports.items():
                if not self._needed(port, axes, present, fixed):
                    continue
                starts = []
                for axis, other in ((port.live, port.carried), (port.carried, port.live)):
                    starts += [total, self.count[axis]]
                    own.append(torch.arange(self.start[axis], self.start[axis] + self.count[axis]))
                    others.append(torch.full((self.count[axis],), first_index[other]))
                    total += self.count[axis]
                self.ports[name, is_write] = (starts[0], starts[1], starts[2], starts[3])
        nothing = torch.zeros(0, dtype=torch.int64)
        self._port_position = torch.cat([*own, nothing]).to(device)
        self._port_other = torch.cat([*others, nothing]).to(device)

    @staticmethod
    def _needed(port: Port, axes: list[Tensor], present: Tensor, fixed: Tensor) -> bool:
        """Whether a layer's channels are not, in all draws, just those of the stream."""
        live, carried = axes[port.live], axes[port.carried]
        still = bool(fixed[live].all() & fixed[carried].all())
        return not (torch.equal(live, carried) or (still and torch.equal(present[live], present[carried])))

    def __call__(self, kept: Tensor) -> Positions:
        """The positions of these masks.

        Args:
            kept: (n, U) bool, after the at-least-one rule.
        """
        frame, happens, spare = self._happens(kept)
        fits = (spare >= 0).all() & (happens <= frame).all()

        present, real = frame[:, self._axis], happens[:, self._axis]
        position = torch.cumsum(present, 1) - 1
        fits = fits & (position[:, -1:] == self._num_positions - 1).all()
        # What has no position is written behind the end, which is then cut off.
        target = torch.where(present, position, self._num_positions).clamp_(max=self._num_positions)
        row = torch.full((len(kept), self._num_positions + 1), -1, dtype=torch.int32, device=self._device)
        row.scatter_(1, target, torch.where(real, self._local, -1))
        row = row[:, :-1].contiguous()

        within = torch.where(real, position - self._start, -1).to(torch.int32)
        held = row[:, self._port_position]
        ports = torch.where(held >= 0, within.gather(1, self._port_other + held.clamp(min=0)), -1)
        return Positions(row, ports, fits)

    def frame(self, kept: Tensor) -> Tensor:
        """(num_events,) bool: everything that has a position in the network of one mask, padding included."""
        return self._happens(kept[None])[0][0, :-1]

    def _happens(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, num_events + 1) bool twice: what has a position, and what is kept; the last is always there.

        And (n, num_groups) int64: capacity that is left in each group.
        """
        taken = torch.zeros(len(kept), self._units.numel(), dtype=torch.int64, device=self._device)
        spare = self._units - taken.index_add_(1, self._group, kept.long())
        # Padding takes the first units of a group that were not drawn: the same ones in all groups of a stream.
        waiting = (~kept).long()
        before = torch.cumsum(waiting, 1) - waiting
        rank = before - before[:, self._first][:, self._group]
        placed = kept | (rank < spare[:, self._group])
        padded = torch.nn.functional.pad(kept, (0, 1))  # the pads of `events` are -1: the last entry
        happens = padded[:, self._events].any(2)
        frame = torch.where(self._shared, self._streams, placed[:, self._writer])
        return (
            torch.nn.functional.pad(frame, (0, 1), value=True),
            torch.nn.functional.pad(happens, (0, 1), value=True),
            spare,
        )
