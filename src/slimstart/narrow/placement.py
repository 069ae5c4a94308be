"""Which dense channel each position of a padded network holds, computed from masks on their device.

This is what `Selection` says on the host (`graph.select(mask, frame)`), for n masks at once. The shapes of all results
depend on the capacity alone, and no value is read on the host, so a CUDA graph can hold the computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.graph import ChannelGraph, Port
from slimstart.narrow.capacity import Capacity, first_units, shared_events


@dataclass(frozen=True)
class Positions:
    """Which dense channel every position holds, in the n networks of a draw.

    Attributes:
        row: (n, num_positions) int32, the dense index at every position of every axis, one axis after the other; -1 for
            padding.
        ports: (n, num_port_positions) int32, for each channel of a layer with a port its position in the stream, and
            the other way round; -1 for padding.
        fits: bool, whether the capacity is enough; if not, `row` and `ports` are meaningless.
    """

    row: Tensor
    ports: Tensor
    fits: Tensor

    def copy_(self, other: Positions) -> None:
        for mine, its in ((self.row, other.row), (self.ports, other.ports), (self.fits, other.fits)):
            mine.copy_(its)

    def clone(self) -> Positions:
        return Positions(self.row.clone(), self.ports.clone(), self.fits.clone())


class Placement:
    """Computes the positions of networks of one capacity; along an axis they are in the order of the dense network.

    Attributes:
        start: for every axis, where its positions begin in `Positions.row`.
        count: for every axis, its number of positions.
        ports: {(layer, is_write): (start, count, stream_start, stream_count)} for every side of a port that is needed:
            where the layer's channels are in `Positions.ports`, and those of the stream.
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

        # All networks of this capacity have the same shapes; take those of one of them.
        frame, _, _ = self._happens(first_units(group, size, capacity).to(device)[None])
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
        """Whether in some draw the channels of a layer may differ from those of the stream."""
        live, carried = axes[port.live], axes[port.carried]
        is_fixed = bool(fixed[live].all() & fixed[carried].all())
        return not (torch.equal(live, carried) or (is_fixed and torch.equal(present[live], present[carried])))

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
        # All shapes are fixed, so channels without a position cannot be left out: they are written to one more entry at
        # the end, which is then cut off.
        target = torch.where(present, position, self._num_positions).clamp_(max=self._num_positions)
        row = torch.full((len(kept), self._num_positions + 1), -1, dtype=torch.int32, device=self._device)
        row.scatter_(1, target, torch.where(real, self._local, -1))
        row = row[:, :-1].contiguous()

        # The position of each dense channel within its own axis; for a port, looked up on the axis of the other side.
        within = torch.where(real, position - self._start, -1).to(torch.int32)
        held = row[:, self._port_position]
        ports = torch.where(held >= 0, within.gather(1, self._port_other + held.clamp(min=0)), -1)
        return Positions(row, ports, fits)

    def frame(self, kept: Tensor) -> Tensor:
        """(num_events,) bool: the events that have a position in the network of one mask, padding included."""
        return self._happens(kept[None])[0][0, :-1]

    def _happens(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Events with a position, and events that happen, both (n, num_events + 1) bool; the last always does.

        And (n, num_groups) int64: the capacity that is left in each group.
        """
        taken = torch.zeros(len(kept), self._units.numel(), dtype=torch.int64, device=self._device)
        spare = self._units - taken.index_add_(1, self._group, kept.long())
        # Padding takes the positions of the first units of a group that were not drawn. The rank of such a unit within
        # its group is the number of units not drawn before it, less those before its group.
        waiting = (~kept).long()
        before = torch.cumsum(waiting, 1) - waiting
        rank = before - before[:, self._first][:, self._group]
        placed = kept | (rank < spare[:, self._group])
        # The pads of `events` are -1: the last entry. Events of removed layers have nothing else.
        kept, placed = (torch.nn.functional.pad(units, (0, 1)) for units in (kept, placed))
        happens = kept[:, self._events].any(2)
        frame = torch.where(self._shared, self._streams, placed[:, self._writer])
        return (
            torch.nn.functional.pad(frame, (0, 1), value=True),
            torch.nn.functional.pad(happens, (0, 1), value=True),
            spare,
        )
