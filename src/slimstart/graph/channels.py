"""The result of a trace, as frozen data: units, the slices of every named tensor that belong to them, and costs.

A **unit** is the smallest set of indices that can be removed together; a mask has one entry per unit. An **event** is a
set of units of which at least one must be kept for a channel to exist: `{u}` for a filter of a plain layer, all the
writers so far for a channel of a residual stream. An **axis** lists, for every index along one tensor dimension, the
event on which it depends (-1: always there). Many tensors share an axis: a convolution's filters, its bias, the four
vectors of the normalisation after it. `ChannelGraph.select` resolves a mask once per axis; everything that has
channels (weights, statistics, momentum, averages) is then moved by `Selection.gather` and `Selection.scatter_`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter as Counter_
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.kernels.moves import gather, scatter_

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Slice:
    """One dimension of a named tensor: index i is kept if event `axes[axis][i]` happens.

    Without ports a layer has to be as wide as the tensors around it: then `carried` is the axis, and indices that
    `axis` would drop are zeros.
    """

    dim: int
    axis: int
    carried: int


@dataclass(frozen=True)
class Port:
    """The position of a layer's channels in a tensor that carries more of them (a residual stream).

    The tensor carries the channels of axis `carried`; the layer reads or writes those of axis `live`. `dim` is the
    channel dimension, counted from the end.
    """

    dim: int
    carried: int
    live: int


@dataclass(frozen=True)
class Counter:
    """An integer attribute of a module: `dense` minus the number of indices that are removed along its axis."""

    axis: int
    carried: int
    dense: int


@dataclass(frozen=True)
class ChannelGroup:
    """Units of which at least one is always kept, because a layer needs a channel.

    Attributes:
        name: the first layer that writes these channels.
        units: the range of unit indices.
        layers: all layers whose filters belong to these units.
        num_filters: filters of these layers that belong to these units.
    """

    name: str
    units: range
    layers: tuple[str, ...]
    num_filters: int


@dataclass(frozen=True)
class RemovableLayer:
    """A part of the network that can go as a whole: the identity takes its place, or zero.

    Attributes:
        name: name of its first module; of a branch that is added in the forward around it, of the last one with FLOPs.
        modules: names of the modules that become the identity: a convolution or linear layer with its normalisation and
            activation, or one module around a residual branch.
        num_results: for each of them, the length of the tuple that it returns, 0 for a tensor, and None where one
            tensor is its only argument and its result.
        added: whether the forward around it adds its result to a stream; then the last module becomes zero.
    """

    name: str
    modules: tuple[str, ...]
    num_results: tuple[int | None, ...]
    added: bool = False

    def has(self, name: str) -> bool:
        """Whether a module, parameter or buffer belongs to this layer."""
        return any(name == module or name.startswith(module + ".") for module in self.modules)


@dataclass(frozen=True)
class ChannelGraph:
    """Which indices of which tensors are kept or dropped together; made by `slimstart.trace`.

    Attributes:
        coupling: "filter" (every filter its own mask) or "stream" (all writers of a stream share one).
        groups: the channel groups in network order; their units are consecutive.
        tensors: for every parameter and buffer that can shrink, its slices.
        axes: for every axis, the event (row of `costs.events`) of each index, -1 where always there.
        reads: ports through which layers read streams, by module name.
        writes: ports through which layers write into streams, by module name.
        attributes: integer attributes that count channels, by module and name.
        filters: for every layer with filters, the unit of each (-1: always there).
        not_prunable: {name: reason} for what was not followed or cannot shrink.
        costs: the cost table.
        coverage: share of the FLOPs of one forward that belongs to operations that can shrink.
        layers: the layers that can go as a whole, in network order; in that of `costs.layers`, too.
        not_removable: {name: reason} for layers that cannot.
        removed: the layers that are gone from this graph, see `without`.
        norms: "keep" or "shrink", as for `trace`.
        over_channels: for every call of a norm or a mean over channels that shrink, or of attention with one head of
            them, their dimension, counted from the end, and their axis. A call is known by the mode (whether training),
            the module, and its number there.
        weights: for parameters that the forward uses as weights of layers only, the dimension of the inputs.
    """

    coupling: str
    groups: tuple[ChannelGroup, ...]
    tensors: Mapping[str, tuple[Slice, ...]]
    axes: tuple[Tensor, ...]
    reads: Mapping[str, Port]
    writes: Mapping[str, Port]
    attributes: Mapping[tuple[str, str], Counter]
    filters: Mapping[str, Tensor]
    not_prunable: Mapping[str, str]
    costs: CostTable
    coverage: float
    layers: tuple[RemovableLayer, ...] = ()
    not_removable: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[RemovableLayer, ...] = ()
    norms: str = "keep"
    over_channels: Mapping[tuple[bool, str, int], tuple[int, int]] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_units(self) -> int:
        return self.costs.num_units

    @cached_property
    def digest(self) -> str:
        """A hash of what the units mean, to tell whether a mask belongs to this graph."""
        meaning = [(group.name, group.units.start, group.units.stop, group.layers) for group in self.groups]
        mode = (self.coupling, self.norms) if self.over_channels else (self.coupling,)
        return hashlib.sha256(repr((*mode, meaning)).encode()).hexdigest()[:16]

    def without(self, names: Iterable[str]) -> ChannelGraph:
        """The graph of the network without some layers. Units keep their numbers, so masks serve both graphs.

        Where the identity takes the place of a layer, the mask of its input is that of its output, too.

        Args:
            names: names of layers in `layers`.

        Raises:
            ValueError: there is no such layer, or it cannot be removed.
        """
        wanted = dict.fromkeys(names)
        position = {layer.name: i for i, layer in enumerate(self.layers)}
        if unknown := [name for name in wanted if name not in position]:
            reason = self.not_removable.get(
                unknown[0], "no layer of that name can be removed; print the graph for a list"
            )
            raise ValueError(f"{unknown[0]!r} cannot be removed: {reason}")
        gone = [layer for layer in self.layers if layer.name in wanted]
        if not gone:
            return self

        def stays(name: str) -> bool:
            return not any(layer.has(name) for layer in gone)

        costs = self.costs.without([position[layer.name] for layer in gone])
        groups = []
        for group in self.groups:
            layers = tuple(filter(stays, group.layers))
            num_filters = int(costs.unit_filters[group.units.start : group.units.stop].sum())
            if layers:
                groups.append(ChannelGroup(layers[0], group.units, layers, num_filters))
        return replace(
            self,
            groups=tuple(groups),
            tensors={name: pieces for name, pieces in self.tensors.items() if stays(name)},
            reads={name: port for name, port in self.reads.items() if stays(name)},
            writes={name: port for name, port in self.writes.items() if stays(name)},
            attributes={key: counter for key, counter in self.attributes.items() if stays(key[0])},
            filters={name: units for name, units in self.filters.items() if stays(name)},
            costs=costs,
            layers=tuple(layer for layer in self.layers if layer.name not in wanted),
            removed=(*self.removed, *gone),
            weights={name: dim for name, dim in self.weights.items() if stays(name)},
            over_channels={key: found for key, found in self.over_channels.items() if stays(key[1])},
        )

    def keeping(self, reasons: Mapping[str, str]) -> ChannelGraph:
        """The graph with further layers that cannot go as a whole, as {name: reason}."""
        kept = [layer.name not in reasons for layer in self.layers]
        return replace(
            self,
            costs=replace(self.costs, layers=tuple(itertools.compress(self.costs.layers, kept))),
            layers=tuple(itertools.compress(self.layers, kept)),
            not_removable={**self.not_removable, **reasons},
        )

    def units_along(self, axis: int) -> Tensor:
        """(n,) int64: the unit of each index of an axis, the first where there are several; -1 where always there."""
        return torch.cat([self.costs.events[:, 0].cpu(), torch.tensor([-1])])[self.axes[axis]]

    def select(self, mask: Tensor, frame: Tensor | None = None) -> Selection:
        """Resolve a mask. Where it drops every unit of a group, the first one is kept.

        Args:
            mask: bool tensor of shape (num_units,).
            frame: bool tensor of shape (num_events,), the events that have a position in the narrow network. It is true
                wherever an event of `mask` happens; the others are padding. By default there is no padding.
        """
        if mask.dim() > 1:
            raise ValueError(f"`mask` has shape {tuple(mask.shape)}; it needs one entry per unit, ({self.num_units},)")
        mask = self.costs.at_least_one(mask.detach().to("cpu", torch.bool))
        padded = torch.cat([mask, mask.new_zeros(1)])  # the pads of `events` are -1: the last entry
        happens = _and_always(padded[self.costs.events].any(dim=1))
        if frame is None:
            return Selection(self, mask, happens, happens)
        frame = _and_always(frame.cpu())
        if bool((happens & ~frame).any()):
            raise ValueError(
                f"`frame` must have capacity for everything that `mask` keeps; {int((happens & ~frame).sum())} events "
                "have no position in it"
            )
        return Selection(self, mask, happens, frame)

    def flops_within(self, frame: Tensor) -> int:
        """FLOPs of one forward of a network with the positions of a frame, padding included.

        Args:
            frame: bool tensor of shape (num_events,), in which the at-least-one rule holds already.
        """
        owner, events, weights, offsets = self._factors
        counts: list[int] = offsets.index_add(0, owner, weights * frame[events]).tolist()
        return self.costs.flops.constant + sum(
            term.coefficient * math.prod(counts[factor] for factor in term.factors) for term in self.costs.flops.terms
        )

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All factors of the cost table, concatenated: factor, event and weight of each entry; and the offsets."""
        factors = self.costs.factors
        sizes = torch.tensor([factor.events.numel() for factor in factors], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(factors)), sizes)
        nothing = torch.zeros(0, dtype=torch.int64)
        events = torch.cat([nothing, *(factor.events.cpu() for factor in factors)])
        weights = torch.cat([nothing, *(factor.weights.cpu() for factor in factors)])
        return owner, events, weights, torch.tensor([factor.offset for factor in factors], dtype=torch.int64)

    @property
    def summary(self) -> str:
        """One line: how much of the network can shrink, and what cannot, with the most frequent reason."""
        line = f"{self.coverage:.0%} of FLOPs can shrink"
        if self.not_prunable:
            reasons = Counter_(self.not_prunable.values())
            reason, _ = reasons.most_common(1)[0]
            others = f" (and {len(reasons) - 1} other reasons; print the graph)" if len(reasons) > 1 else ""
            number = len(self.not_prunable)
            line += f"; {number} layer{'s' * (number > 1)} cannot, because: {reason}{others}"
        if self.removed:
            line += f"; {len(self.removed)} of {len(self.removed) + len(self.layers)} removable layers are removed"
        return line

    def __str__(self) -> str:
        lines = [
            f"ChannelGraph: {self.num_units} units in {len(self.groups)} groups, coupling={self.coupling!r}, "
            f"{self.coverage:.1%} of the FLOPs can shrink"
        ]
        for group in self.groups:
            others = f" (+{len(group.layers) - 1} more)" if len(group.layers) > 1 else ""
            lines.append(
                f"  {group.name}{others}: units {group.units.start}..{group.units.stop - 1}, "
                f"{group.num_filters} filters"
            )
        if self.not_prunable:
            lines.append("not prunable:")
            lines.extend(f"  {name}: {reason}" for name, reason in self.not_prunable.items())
        if self.layers:
            lines.append("layers that can go as a whole:")
            lines.extend(f"  {', '.join(layer.modules)}" for layer in self.layers)
        if self.not_removable:
            lines.append("layers that cannot go as a whole:")
            lines.extend(f"  {name}: {reason}" for name, reason in self.not_removable.items())
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Selection:
    """A mask, resolved: for every axis, which dense index each position of a narrow tensor holds, -1 for padding.

    Without padding, positions are the indices that the mask keeps, in order. With it (`graph.select(mask, frame)`),
    they are those of the frame, and those that the mask does not keep are padding: zero in every tensor, and never
    stored.

    `gather` and `scatter_` are inverses on the entries that the mask keeps: after
    `scatter_(name, dense, gather(name, dense))` nothing has changed, and other entries are never read or written.

    Attributes:
        graph: to which the mask belongs.
        mask: (num_units,) bool, after the at-least-one rule.
        happens: (num_events + 1,) bool, the events that happen; the last entry is for -1, which always does.
        frame: the same for events that have a position.
    """

    graph: ChannelGraph
    mask: Tensor
    happens: Tensor = field(repr=False)
    frame: Tensor = field(repr=False)

    @property
    def padded(self) -> bool:
        """Whether there may be padding."""
        return self.frame is not self.happens

    def present(self, axis: int) -> Tensor:
        """Bool tensor: which indices of an axis have a position."""
        return self.frame[self.graph.axes[axis]]

    def real(self, axis: int) -> Tensor:
        """Bool tensor: which indices of an axis the mask keeps, so that they are not padding."""
        return self.happens[self.graph.axes[axis]]

    def positions(self, axis: int, device: torch.device = _CPU) -> Tensor | None:
        """(n,) int64: the dense index that each position along an axis holds, -1 for padding; None for all in order."""
        if (axis, device) not in self._positions:
            if device == _CPU:
                present, real = self.present(axis), self.real(axis)
                indices = present.nonzero().squeeze(1)
                found = None if bool(real.all()) else torch.where(real[indices], indices, -1)
            else:  # once per axis and not once per tensor
                on_host = self.positions(axis)
                found = None if on_host is None else on_host.to(device)
            self._positions[axis, device] = found
        return self._positions[axis, device]

    @cached_property
    def _positions(self) -> dict[tuple[int, torch.device], Tensor | None]:
        return {}

    def count(self, axis: int) -> int:
        """The number of positions along an axis."""
        positions = self.positions(axis)
        return self.graph.axes[axis].numel() if positions is None else positions.numel()

    def indices(self, name: str, device: torch.device = _CPU) -> dict[int, Tensor]:
        """{dimension: positions} for a named tensor; dimensions from which nothing is removed are not listed."""
        found = {piece.dim: self.positions(piece.axis, device) for piece in self.graph.tensors.get(name, ())}
        return {dim: positions for dim, positions in found.items() if positions is not None}

    def shape(self, name: str, dense: torch.Size) -> torch.Size:
        """The shape that `gather` gives to a tensor of this name."""
        sizes = list(dense)
        for dim, positions in self.indices(name).items():
            sizes[dim] = positions.numel()
        return torch.Size(sizes)

    def gather(self, name: str, dense: Tensor) -> Tensor:
        """The narrow tensor of a dense one, as a new tensor."""
        return gather(dense, self.indices(name, dense.device))

    def scatter_(self, name: str, dense: Tensor, narrow: Tensor) -> Tensor:
        """Write a narrow tensor over its part of `dense`, in place; other entries are not changed."""
        return scatter_(dense, narrow, self.indices(name, dense.device))


def _and_always(events: Tensor) -> Tensor:
    """The events with one more entry, for what does not depend on the mask."""
    return torch.cat([events, events.new_ones(1)])
