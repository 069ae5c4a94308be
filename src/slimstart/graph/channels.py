"""What a trace finds, as frozen data: units, the slices of every named tensor that they own, and what they cost.

A **unit** is the smallest set of indices that can be removed together; a mask has one entry per unit. An **event** is a
set of units of which at least one must be kept for a channel to exist: `{u}` for a filter of a plain layer, all the
writers so far for a channel of a residual stream. An **axis** lists, for every index along one tensor dimension, the
event on which it depends (-1: always there). Many tensors share an axis: a convolution's filters, its bias, the four
vectors of the normalisation behind it. `ChannelGraph.select` resolves a mask once per axis; everything that has
channels (weights, statistics, momentum, averages) is then moved by `Selection.gather` and `Selection.scatter_`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slimstart.costs import CostTable

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Slice:
    """One dimension of a named tensor: index i stays if event `axes[axis][i]` happens.

    Without ports a layer has to be as wide as the tensors around it: then `carried` is the axis, and the indices that
    `axis` would drop are zeros.
    """

    dim: int
    axis: int
    carried: int


@dataclass(frozen=True)
class Port:
    """Where a layer meets a tensor that carries more channels than the layer has (a residual stream).

    The tensor carries the channels of axis `carried`; the layer reads or writes those of axis `live`. `dim` is the
    channel dimension, counted from the end.
    """

    dim: int
    carried: int
    live: int


@dataclass(frozen=True)
class Counter:
    """An integer attribute of a module: `dense` minus the number of indices that are gone from its axis."""

    axis: int
    carried: int
    dense: int


@dataclass(frozen=True)
class ChannelGroup:
    """Units of which at least one is always kept, because a layer without channels is none.

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
class ChannelGraph:
    """Which indices of which tensors live and die together; made by `slimstart.trace`.

    Attributes:
        coupling: "filter" (every filter its own mask) or "stream" (all writers of a stream share one).
        groups: the channel groups in network order; their units are consecutive.
        tensors: for every parameter and buffer that can shrink, its slices.
        axes: for every axis, the event (row of `costs.events`) of each index, -1 where always there.
        reads, writes: ports of layers on streams, by module name.
        attributes: integer attributes that count channels, by module and name.
        filters: for every layer with filters, the unit of each (-1: always there).
        left_whole: {name: reason} for what was not followed or cannot shrink.
        costs: the cost table.
        coverage: share of the FLOPs of one forward that belongs to operations that can shrink.
    """

    coupling: str
    groups: tuple[ChannelGroup, ...]
    tensors: Mapping[str, tuple[Slice, ...]]
    axes: tuple[Tensor, ...]
    reads: Mapping[str, Port]
    writes: Mapping[str, Port]
    attributes: Mapping[tuple[str, str], Counter]
    filters: Mapping[str, Tensor]
    left_whole: Mapping[str, str]
    costs: CostTable
    coverage: float

    @property
    def num_units(self) -> int:
        return self.costs.num_units

    @cached_property
    def digest(self) -> str:
        """A short name of what the units mean, to tell whether a mask belongs to this graph."""
        meaning = [(group.name, group.units.start, group.units.stop, group.layers) for group in self.groups]
        return hashlib.sha256(repr((self.coupling, meaning)).encode()).hexdigest()[:16]

    def units_along(self, axis: int) -> Tensor:
        """(n,) int64: the unit of each index of an axis, -1 where always there; of several units, the first."""
        return torch.cat([self.costs.events[:, 0].cpu(), torch.tensor([-1])])[self.axes[axis]]

    def select(self, mask: Tensor) -> Selection:
        """What stays under a mask; the first unit of a group that the mask empties is kept all the same.

        Args:
            mask: bool tensor of shape (num_units,).
        """
        if mask.dim() > 1:
            raise ValueError(f"`mask` has shape {tuple(mask.shape)}; it needs one entry per unit, ({self.num_units},)")
        mask = self.costs.at_least_one(mask.detach().to("cpu", torch.bool))
        padded = torch.cat([mask, mask.new_zeros(1)])  # the pads of `events` are -1: the last entry
        happens = padded[self.costs.events].any(dim=1)
        return Selection(self, mask, torch.cat([happens, happens.new_ones(1)]))

    def select_within(self, mask: Tensor, frame: Tensor) -> PaddedSelection:
        """What stays under a mask, in a frame with room for more: the rest of it are zeros.

        Args:
            frame: bool tensor of shape (num_events,), true wherever an event of `mask` happens.
        """
        inner = self.select(mask)
        outer = torch.cat([frame.cpu(), frame.new_ones(1, device="cpu")])
        if bool((inner.happens & ~outer).any()):
            raise ValueError("`frame` must have room for everything that `mask` keeps")
        return PaddedSelection(self, inner.mask, outer, inner=inner)

    def flops_within(self, frame: Tensor) -> int:
        """FLOPs of one forward of a network that fills a frame (a bool tensor of shape (num_events,)), zeros included.

        The at-least-one rule is the frame's business.
        """
        owner, events, weights, offsets = self._factors
        counts: list[int] = offsets.index_add(0, owner, weights * frame[events]).tolist()
        return self.costs.flops.constant + sum(
            term.coefficient * math.prod(counts[factor] for factor in term.factors) for term in self.costs.flops.terms
        )

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All factors of the cost table in a row: to which an entry belongs, its event and weight; and the offsets."""
        factors = self.costs.factors
        sizes = torch.tensor([factor.events.numel() for factor in factors], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(factors)), sizes)
        nothing = torch.zeros(0, dtype=torch.int64)
        events = torch.cat([nothing, *(factor.events.cpu() for factor in factors)])
        weights = torch.cat([nothing, *(factor.weights.cpu() for factor in factors)])
        return owner, events, weights, torch.tensor([factor.offset for factor in factors], dtype=torch.int64)

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
        if self.left_whole:
            lines.append("left whole:")
            lines.extend(f"  {name}: {reason}" for name, reason in self.left_whole.items())
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Selection:
    """A mask, resolved: for every axis, which indices stay.

    `gather` and `scatter_` are inverses on the entries that stay: after `scatter_(name, dense, gather(name, dense))`
    nothing has changed, and entries that are not selected are never read or written.
    """

    graph: ChannelGraph
    mask: Tensor
    happens: Tensor = field(repr=False)  # per event, with a True behind the last for index -1

    @cached_property
    def _kept(self) -> dict[tuple[int, torch.device], Tensor | None]:
        return {}

    @cached_property
    def _flat(self) -> dict[tuple[Any, ...], Tensor]:
        return {}

    def kept(self, axis: int, device: torch.device = _CPU) -> Tensor | None:
        """Indices that stay along an axis, in order; None where all do."""
        if (axis, device) not in self._kept:
            if device == _CPU:
                present = self.present(axis)
                indices = None if bool(present.all()) else present.nonzero().squeeze(1)
            else:  # once per axis and not once per tensor
                on_host = self.kept(axis)
                indices = None if on_host is None else on_host.to(device)
            self._kept[axis, device] = indices
        return self._kept[axis, device]

    def present(self, axis: int) -> Tensor:
        """Bool tensor: which indices of an axis stay."""
        return self.happens[self.graph.axes[axis]]

    def real(self, axis: int) -> Tensor:
        """Bool tensor: which indices of an axis stay and are not mere passengers."""
        return self.present(axis)

    def count(self, axis: int) -> int:
        kept = self.kept(axis)
        return self.graph.axes[axis].numel() if kept is None else kept.numel()

    def indices(self, name: str, device: torch.device = _CPU) -> dict[int, Tensor]:
        """{dimension: indices that stay} for a named tensor; dimensions that stay whole are not listed."""
        found = {piece.dim: self.kept(piece.axis, device) for piece in self.graph.tensors.get(name, ())}
        return {dim: kept for dim, kept in found.items() if kept is not None}

    def shape(self, name: str, dense: torch.Size) -> torch.Size:
        """The shape that `gather` gives to a tensor of this name."""
        sizes = list(dense)
        for dim, kept in self.indices(name).items():
            sizes[dim] = kept.numel()
        return torch.Size(sizes)

    def gather(self, name: str, dense: Tensor) -> Tensor:
        """The entries of `dense` that stay, as a new narrow tensor (`dense` itself where all of them do)."""
        indices = self.indices(name, dense.device)
        if _is_convolution(indices, dense):
            rows, flat = self._filters(name, dense)
            return rows.index_select(0, flat).view(indices[0].numel(), indices[1].numel(), *dense.shape[2:])
        for dim, kept in indices.items():
            dense = dense.index_select(dim, kept)
        return dense

    def scatter_(self, name: str, dense: Tensor, narrow: Tensor) -> Tensor:
        """Write `narrow` over the entries of `dense` that stay, in place; the others are left alone."""
        indices = self.indices(name, dense.device)
        if not indices:
            return dense.copy_(narrow) if dense is not narrow else dense
        if len(indices) == 1:
            ((dim, kept),) = indices.items()
            return dense.index_copy_(dim, kept, narrow)
        if _is_convolution(indices, dense):
            rows, flat = self._filters(name, dense)
            rows.index_copy_(0, flat, narrow.reshape(flat.numel(), rows.shape[1]))
            return dense
        last = max(indices)
        index = [
            indices[dim].view(-1, *[1] * (last - dim)) if dim in indices
            # a dimension between two sliced ones is indexed too, so that the indexed ones are adjacent
            else torch.arange(dense.shape[dim], device=dense.device).view(-1, *[1] * (last - dim))
            for dim in range(min(indices), last + 1)
        ]  # fmt: skip
        dense[(slice(None),) * min(indices) + tuple(index)] = narrow
        return dense

    def _filters(self, name: str, dense: Tensor) -> tuple[Tensor, Tensor]:
        """A convolution's weight as one row per kernel, and the rows that stay: one pass in place of two."""
        axes = {piece.dim: piece.axis for piece in self.graph.tensors[name]}
        key = (axes[0], axes[1], dense.device)
        if key not in self._flat:
            indices = self.indices(name, dense.device)
            self._flat[key] = (indices[0][:, None] * dense.shape[1] + indices[1]).view(-1)
        return dense.view(dense.shape[0] * dense.shape[1], dense.shape[2:].numel()), self._flat[key]


@dataclass(frozen=True, eq=False)
class PaddedSelection(Selection):
    """A selection in a wider frame: some channels come along as passengers, as zeros that stay zero.

    Shapes, attributes and ports are those of the frame; values are those of `inner`, what is really kept. All entries
    of a passenger are zero (its filter, its normalisation row, its readers' columns), so it computes zero and is never
    stored.
    """

    inner: Selection = field(kw_only=True)

    def real(self, axis: int) -> Tensor:
        return self.inner.present(axis)

    def gather(self, name: str, dense: Tensor) -> Tensor:
        """The entries of `dense` within the frame, zero where they are passengers'."""
        framed = super().gather(name, dense)
        for dim, absent in self.absent(name, dense.device).items():
            framed = framed.index_fill(dim, absent, 0)
        return framed

    def scatter_(self, name: str, dense: Tensor, narrow: Tensor) -> Tensor:
        """Write what is really kept over the entries of `dense`, in place; passengers are left behind."""
        for dim, real in self._places(name, dense.device, passengers=False).items():
            narrow = narrow.index_select(dim, real)
        return self.inner.scatter_(name, dense, narrow)

    def absent(self, name: str, device: torch.device = _CPU) -> dict[int, Tensor]:
        """{dimension: places of passengers in the narrow tensor}, where there are some."""
        return self._places(name, device, passengers=True)

    def _places(self, name: str, device: torch.device, passengers: bool) -> dict[int, Tensor]:
        found = {piece.dim: self._along(piece.axis, device) for piece in self.graph.tensors.get(name, ())}
        return {dim: places[passengers] for dim, places in found.items() if places[True].numel()}

    def _along(self, axis: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places along an axis of the frame: of what is really kept, and of passengers."""
        if (axis, device) not in self._found:
            real = self.inner.present(axis)[self.present(axis)]
            both = real.nonzero().squeeze(1), (~real).nonzero().squeeze(1)
            self._found[axis, device] = both[0].to(device), both[1].to(device)
        return self._found[axis, device]

    @cached_property
    def _found(self) -> dict[tuple[int, torch.device], tuple[Tensor, Tensor]]:
        return {}


def _is_convolution(indices: Mapping[int, Tensor], tensor: Tensor) -> bool:
    """Whether both leading dimensions, and only they, are cut, in front of kernels that lie together in memory."""
    return indices.keys() == {0, 1} and tensor.dim() > 2 and tensor.is_contiguous()
