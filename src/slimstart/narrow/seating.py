"""Who sits where: masks in, the index of every slot of every axis out, without the host.

Shapes are those of the room (`slots.py`), whatever the masks, and no value is ever asked for, so the whole of it can be
captured in a CUDA graph. Along an axis, channels of a draw and passengers sit in the order of the dense network; a seat
holds the dense index of its channel, or -1 where a passenger sits: whoever gathers takes zero there, and whoever
scatters leaves the dense network alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.graph import ChannelGraph, Port
from slimstart.narrow.slots import Room, shared_events


@dataclass(frozen=True)
class Seats:
    """Where everybody sits in n networks of one draw.

    Attributes:
        places: (n, num_slots) int32, the dense index at every slot of every axis, -1 where there is none.
        ports: (n, num_port_slots) int32, the same between layers and the streams around them.
        fits: bool, whether the room was enough; otherwise the rest means nothing.
    """

    places: Tensor
    ports: Tensor
    fits: Tensor

    def copy_(self, other: Seats) -> None:
        for mine, its in ((self.places, other.places), (self.ports, other.ports), (self.fits, other.fits)):
            mine.copy_(its)


class Seating:
    """The seats of one room.

    Args:
        graph: of the network.
        room: what there is room for.
        device: where masks come from.

    Attributes:
        start: for every axis, where its slots begin in `Seats.places`.
        count: for every axis, how many slots it has.
        axis: (num_slots,) int64, which axis a slot belongs to.
        local: (num_slots,) int32, the number of a slot within its axis.
        first: (num_slots,) int64, where the dense indices of its axis begin, if those of all axes are in a row.
        num_positions: how many dense indices all axes have.
        ports: for every side of every port that is needed, {(layer, is_write): (start of the layer's own slots in
            `Seats.ports`, how many, start of the stream's, how many)}.
    """

    def __init__(self, graph: ChannelGraph, room: Room, device: torch.device) -> None:
        table = graph.costs
        self._device = device
        group = table.unit_group.cpu()
        size = torch.bincount(group)
        self._group, self._room = group.to(device), room.units.to(device)
        self._first = (torch.cumsum(size, 0) - size).to(device)
        shared = shared_events(table)
        self._events, self._writer = table.events.to(device), table.events[:, 0].to(device)
        self._shared, self._streams = shared.to(device), (room.streams & shared).to(device)

        always = torch.tensor(len(table.events))
        axes = [torch.where(axis < 0, always, axis) for axis in graph.axes]
        lengths = [axis.numel() for axis in axes]
        self._axis = torch.cat([*axes, always[None][:0]]).to(device)
        self._local = torch.cat([*map(torch.arange, lengths), always[None][:0]]).to(device, torch.int32)
        self._first_position = [sum(lengths[:i]) for i in range(len(lengths))]  # of an axis in `_axis`

        # The shapes of any frame: the first units of every group stand for all.
        kept = torch.arange(group.numel()) - (torch.cumsum(size, 0) - size)[group] < room.units[group]
        frame, _, _ = self._happens(kept.to(device)[None])
        present = frame[0].cpu()
        self.count = [int(present[axis].sum()) for axis in axes]
        self.start = [sum(self.count[:i]) for i in range(len(self.count))]
        self._slot_start = torch.tensor(self.start).repeat_interleave(torch.tensor(lengths)).to(device)
        self.num_slots = sum(self.count)
        counts = torch.tensor(self.count, dtype=torch.int64)
        of_slot = torch.repeat_interleave(torch.arange(len(counts)), counts)
        starts, firsts = torch.tensor([self.start, self._first_position], dtype=torch.int64)
        self.axis, self.first = of_slot.to(device), firsts[of_slot].to(device)
        self.local = (torch.arange(self.num_slots) - starts[of_slot]).to(device, torch.int32)
        self.num_positions = sum(lengths)

        fixed = torch.cat([shared, shared.new_ones(1)])
        self.ports: dict[tuple[str, bool], tuple[int, int, int, int]] = {}
        slots, others, total = [], [], 0
        for is_write, ports in ((False, graph.reads), (True, graph.writes)):
            for name, port in ports.items():
                if not self._needed(port, axes, present, fixed):
                    continue
                starts = []
                for axis, other in ((port.live, port.carried), (port.carried, port.live)):
                    starts += [total, self.count[axis]]
                    slots.append(torch.arange(self.start[axis], self.start[axis] + self.count[axis]))
                    others.append(torch.full((self.count[axis],), self._first_position[other]))
                    total += self.count[axis]
                self.ports[name, is_write] = (starts[0], starts[1], starts[2], starts[3])
        nothing = torch.zeros(0, dtype=torch.int64)
        self._port_slot = torch.cat([*slots, nothing]).to(device)
        self._port_other = torch.cat([*others, nothing]).to(device)

    @staticmethod
    def _needed(port: Port, axes: list[Tensor], present: Tensor, fixed: Tensor) -> bool:
        """Whether a layer's channels are not, in all draws, just those of the stream."""
        live, carried = axes[port.live], axes[port.carried]
        still = bool(fixed[live].all() & fixed[carried].all())
        return not (torch.equal(live, carried) or (still and torch.equal(present[live], present[carried])))

    def __call__(self, kept: Tensor) -> Seats:
        """The seats of these masks.

        Args:
            kept: (n, U) bool, after the at-least-one rule.
        """
        frame, happens, spare = self._happens(kept)
        fits = (spare >= 0).all() & (happens <= frame).all()

        present, real = frame[:, self._axis], happens[:, self._axis]
        slot = torch.cumsum(present, 1) - 1
        fits = fits & (slot[:, -1:] == self.num_slots - 1).all()
        outside = torch.where(present, slot, self.num_slots).clamp_(max=self.num_slots)
        places = torch.full((len(kept), self.num_slots + 1), -1, dtype=torch.int32, device=self._device)
        places.scatter_(1, outside, torch.where(real, self._local, -1))
        places = places[:, :-1].contiguous()

        seat = torch.where(real, slot - self._slot_start, -1).to(torch.int32)
        who = places[:, self._port_slot]
        ports = torch.where(who >= 0, seat.gather(1, self._port_other + who.clamp(min=0)), -1)
        return Seats(places, ports, fits)

    def frame(self, kept: Tensor) -> Tensor:
        """(num_events,) bool: everybody in the network of one mask, passengers included."""
        return self._happens(kept[None])[0][0, :-1]

    def _happens(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, num_events + 1) bool twice: who has a seat, and who really comes; the last is always there.

        And (n, num_groups) int64: for how many more units of each group there is room.
        """
        taken = torch.zeros(len(kept), self._room.numel(), dtype=torch.int64, device=self._device)
        spare = self._room - taken.index_add_(1, self._group, kept.long())
        # Passengers are the first units of a group that were not drawn: the same ones in all groups of a stream.
        waiting = (~kept).long()
        before = torch.cumsum(waiting, 1) - waiting
        rank = before - before[:, self._first][:, self._group]
        seated = kept | (rank < spare[:, self._group])
        padded = torch.nn.functional.pad(kept, (0, 1))  # the pads of `events` are -1: the last entry
        happens = padded[:, self._events].any(2)
        frame = torch.where(self._shared, self._streams, seated[:, self._writer])
        return (
            torch.nn.functional.pad(frame, (0, 1), value=True),
            torch.nn.functional.pad(happens, (0, 1), value=True),
            spare,
        )
