r"""Spare capacity: how many positions each layer of a narrow network has, so that its shapes survive the next draws.

A draw keeps :math:`n_g` units of group g, and this number differs from draw to draw. Its network is built with capacity
for :math:`S_g \ge n_g` units, a multiple of `align`; the remaining positions are *padding*, zeros in every tensor. A
channel of a stream exists if one of several units writes it, so the number of channels changes even where every
:math:`n_g` is the same: streams have capacity for all channels that a draw is likely to have.

Capacity is chosen from the keep-probabilities, above the expected number of units by `spread` standard deviations,

.. math:: S_g > \sum_{u \in g} s_u + \mathrm{spread} \sqrt{\textstyle\sum_{u \in g} s_u (1 - s_u)}.

It is kept until a draw exceeds it, or until a new choice would save a good part of the FLOPs (hysteresis, because new
shapes cost a capture of all CUDA graphs). Once every s is 0 or 1, there is only the padding up to `align`.

`Planner` chooses the capacity, on the host. `Placement` computes which dense channel each position holds, on the device
of the masks: what `Selection` says on the host (`graph.select(mask, frame)`), for n masks at once. The shapes of its
results depend on the capacity alone, and no value is read on the host, so a CUDA graph can hold the computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimstart.costs import CostTable
from slimstart.graph import ChannelGraph, Port

RENEW = 1.15  # capacity is replaced when it executes this many times the FLOPs of a new choice
# Above this many times `align`, capacity is a multiple of twice `align`: a GPU is faster with 64 channels than with 56.
COARSE = 4
POSSIBLE = 1e-4  # a stream has capacity for a channel whose probability is at least this


@dataclass(frozen=True)
class Capacity:
    """The positions that a network has.

    Attributes:
        units: (num_groups,) int64, the number of units of each group.
        streams: (num_events,) bool, the channels written by several units that have a position; for channels written by
            one unit, which `units` counts, it has no meaning.
    """

    units: Tensor
    streams: Tensor

    def equals(self, other: Capacity) -> bool:
        return torch.equal(self.units, other.units) and torch.equal(self.streams, other.streams)


@dataclass(frozen=True)
class Executed:
    """Costs of a step as executed, padding included.

    Attributes:
        flops: FLOPs of `example_inputs` through the network that is trained.
        reference_flops: FLOPs of `example_inputs` through each reference.
        num_filters: number of filters of each layer in the network that is trained.
    """

    flops: int
    reference_flops: tuple[int, ...]
    num_filters: dict[str, int]

    @classmethod
    def exactly(cls, graph: ChannelGraph, masks: Tensor) -> Executed:
        """Of networks exactly as wide as their masks (n, U)."""
        selections = [graph.select(mask) for mask in masks]
        costs = [graph.flops_within(selection.happens[:-1]) for selection in selections]
        return cls(costs[0], tuple(costs[1:]), num_filters(graph, selections[0].mask))


class Planner:
    """Chooses the capacity of networks, draw by draw.

    Args:
        align: units per group are a multiple of this, or the whole group.
        spread: standard deviations above the mean, a width that draws hardly ever exceed.
    """

    def __init__(self, graph: ChannelGraph, align: int, spread: float) -> None:
        table = graph.costs
        self._graph, self.align, self._spread = graph, align, spread
        self._group, self._events = table.unit_group.cpu(), table.events.cpu()
        self._size = torch.bincount(self._group)
        self._shared = shared_events(table)

    def __call__(self, now: Capacity | None, kept: Tensor, keep_probs: Tensor | None, look: bool = True) -> Capacity:
        """Capacity for these masks: `now` itself if it is large enough and not much too large.

        Args:
            kept: (n, U) masks of one draw, after the at-least-one rule.
            keep_probs: s; None where the structure is fixed and there will be no other mask.
            look: whether to check if less capacity would do, which need not be done at every draw.
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
        if overflows:  # rebuilding costs the same for one group as for all that will need more soon
            return Capacity(torch.maximum(new.units, now.units), now.streams | new.streams)
        return now

    def of(self, graph: ChannelGraph) -> Planner:
        """The planner of another graph, with the same settings."""
        return self if graph is self._graph else Planner(graph, self.align, self._spread)

    def flops(self, capacity: Capacity) -> int:
        """FLOPs of `example_inputs` through a network of this capacity, padding included."""
        frame = torch.where(self._shared, capacity.streams, self._typical_units(capacity)[self._events[:, 0]])
        return self._graph.flops_within(frame)

    def executed(self, capacity: Capacity, num_masks: int) -> Executed:
        """Costs of a step of networks of this capacity."""
        flops = self.flops(capacity)
        return Executed(flops, (flops,) * (num_masks - 1), num_filters(self._graph, self._typical_units(capacity)))

    def _typical_units(self, capacity: Capacity) -> Tensor:
        """(U,) bool: the units of one network of this capacity; all of them have the same shapes."""
        return first_units(self._group, self._size, capacity)

    def _needed(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The largest number of units of each group in a mask, and the channels of streams that any mask keeps."""
        kept = kept.cpu()
        counts = torch.zeros(len(kept), self._size.numel(), dtype=torch.int64).index_add(1, self._group, kept.long())
        padded = torch.cat([kept.any(0), kept.new_zeros(1)])
        return counts.amax(0), padded[self._events].any(1) & self._shared

    def _new(self, needed: Tensor, happens: Tensor, s: Tensor | None) -> Capacity:
        """Capacity chosen without regard to the present one; arguments are results of `_needed`, and s."""
        want, possible = needed, happens
        if s is not None:
            s = s.cpu().double()
            zeros = torch.zeros(self._size.numel(), dtype=torch.float64)
            mean = zeros.index_add(0, self._group, s)
            spread = zeros.index_add(0, self._group, s * (1 - s)).sqrt()
            want = torch.maximum(needed, (mean + self._spread * spread + 1e-6).floor().long() + (spread > 1e-3))
            # The probability that no writer of a channel is drawn; the pads of `events` are -1, the last entry.
            absent = torch.cat([1 - s, s.new_ones(1)])[self._events].prod(1)
            possible = happens | ((1 - absent > POSSIBLE) & self._shared)
        return Capacity(torch.minimum(aligned(want, self.align), self._size), possible)


def num_filters(graph: ChannelGraph, units: Tensor) -> dict[str, int]:
    """The number of filters of each layer that are kept with these units, unprunable ones included."""
    return {name: int((units[owner.clamp(min=0)] | (owner < 0)).sum()) for name, owner in graph.filters.items()}


def aligned(widths: Tensor, align: int) -> Tensor:
    """Widths rounded up to what a GPU is fast with: multiples of `align`, and large ones of twice `align`."""
    step = torch.where(widths > COARSE * align, 2 * align, align) if align > 1 else torch.ones_like(widths)
    return (widths + step - 1) // step * step


def shared_events(table: CostTable) -> Tensor:
    """(num_events,) bool: the channels that more than one unit writes."""
    return (table.events >= 0).sum(1).cpu() > 1


def first_units(group: Tensor, size: Tensor, capacity: Capacity) -> Tensor:
    """(U,) bool: of every group the first units, as many as the capacity has."""
    start = torch.cumsum(size, 0) - size  # the units of a group are consecutive
    return torch.arange(group.numel()) - start[group] < capacity.units[group]


# --- positions -------------------------------------------------------------------------------------------------------


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
        """The positions of masks (n, U), after the at-least-one rule."""
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
        kept, placed = (pad(units, (0, 1)) for units in (kept, placed))
        happens = kept[:, self._events].any(2)
        frame = torch.where(self._shared, self._streams, placed[:, self._writer])
        return (
            pad(frame, (0, 1), value=True),
            pad(happens, (0, 1), value=True),
            spare,
        )
