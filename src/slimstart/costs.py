r"""The cost table: plain data that `graph` derives from a network and `policies` evaluates.

A network's cost (its FLOPs, or its parameters) is a polynomial in the numbers of its channels. With a mask
:math:`m \in \{0,1\}^U` over units,

.. math:: \mathrm{cost}(m) = c_0 + \sum_t a_t \, n_{l(t)}(m) \, n_{r(t)}(m), \qquad
          n_f(m) = o_f + \sum_{e \in f} w_e \, [\, \exists u \in e : \tilde m_u = 1 \,]

where an *event* e is a set of units of which at least one must be kept for a channel to exist (a stream channel exists
if some writer keeps it), a *factor* f counts the indices of one tensor dimension (:math:`o_f` of them are always
there), and a *term* t multiplies one or two factors (a convolution: inputs times outputs).

:math:`\tilde m` is the mask after the **at-least-one rule**: units form groups (`unit_group`), and if a mask drops
every unit of a group, the first one is kept nevertheless.

Some layers can be removed as a whole (`layers`). `CostTable.without` is the table of the network without them: their
terms are subtracted, and where the identity replaces a layer, its output channel i exists if its input channel i does.
Units keep their numbers, so one mask serves both tables; units that only the removed layers have are in no event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Factor:
    """The number of indices of a tensor dimension: `offset`, plus `weights[i]` for every `events[i]` that happens."""

    offset: int
    events: Tensor  # (n,) int64, indices into CostTable.events
    weights: Tensor  # (n,) int64


@dataclass(frozen=True)
class Term:
    """A coefficient times the product of one or two factors, which are indices into `CostTable.factors`."""

    coefficient: int
    factors: tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """A constant plus the sum of terms."""

    constant: int
    terms: tuple[Term, ...]

    def __sub__(self, other: Polynomial) -> Polynomial:
        coefficients = Counter({tuple(sorted(term.factors)): term.coefficient for term in self.terms})
        for term in other.terms:
            coefficients[tuple(sorted(term.factors))] -= term.coefficient
        terms = tuple(Term(coefficient, factors) for factors, coefficient in coefficients.items() if coefficient)
        return Polynomial(self.constant - other.constant, terms)


@dataclass(frozen=True)
class LayerCost:
    """Costs of one removable layer.

    Attributes:
        unit_filters: (U,) int64, filters of this layer that go with each unit.
        flops, params: the part of the table's polynomials that belongs to this layer.
        outputs: (n,) int64, units of its output channels that the input's channels replace while it is gone.
        inputs: (n,) int64, for each of them, the event of the input channel.
        reach: the part of the table's `reach` that belongs to this layer.
    """

    unit_filters: Tensor
    flops: Polynomial
    params: Polynomial
    outputs: Tensor
    inputs: Tensor
    reach: float = 0.0


@dataclass(frozen=True)
class CostTable:
    """Costs of a network's units and layers: all that policies know of it."""

    unit_group: Tensor  # (U,) int64: the group of each unit; a group's first unit is the one with the lowest index
    unit_filters: Tensor  # (U,) int64: how many filters go with each unit
    events: Tensor  # (E, W) int64: unit indices, padded with -1
    factors: tuple[Factor, ...]
    flops: Polynomial  # of one forward on the example inputs; one multiply-add = 1
    params: Polynomial
    layers: tuple[LayerCost, ...] = ()  # that can go as a whole, in network order; no two share a term
    whole: CostTable | None = None  # of a table without some layers, the one with all of them
    reach: float = 0.0  # of all convolutions: see `slimstart.policies.depth`
    _rule: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_units(self) -> int:
        return self.unit_group.numel()

    def without(self, layers: Collection[int]) -> CostTable:
        """The table of the network without some of its `layers`, by position; the other layers remain removable."""
        gone = [self.layers[i] for i in sorted(set(layers))]
        if not gone:
            return self
        flops, params, filters, reach = self.flops, self.params, self.unit_filters, self.reach
        for layer in gone:
            flops, params, reach = flops - layer.flops, params - layer.params, reach - layer.reach
            filters = filters - layer.unit_filters.to(filters.device)
        events = self._replaced_events(gone, alive=filters > 0)
        rest = tuple(layer for i, layer in enumerate(self.layers) if i not in set(layers))
        whole = self.whole or self
        return replace(
            self, unit_filters=filters, events=events, flops=flops, params=params, layers=rest, whole=whole, reach=reach
        )

    def dense(self, polynomial: Polynomial) -> int:
        """The value of a polynomial with all channels."""
        counts = [factor.offset + int(factor.weights.sum()) for factor in self.factors]
        return polynomial.constant + sum(
            term.coefficient * math.prod(counts[factor] for factor in term.factors) for term in polynomial.terms
        )

    def _replaced_events(self, gone: Collection[LayerCost], alive: Tensor) -> Tensor:
        """The events with the units of removed layers replaced by those of their inputs, or left out.

        Args:
            alive: (U,) bool, the units that remaining layers have.
        """
        events = self.events.cpu()
        # For every unit, those on which its channel depends now, padded with -1. The last row is for the pads.
        present = torch.where(alive.cpu(), torch.arange(self.num_units), -1)
        depends = torch.cat([present, present.new_full((1,), -1)])[:, None]
        for layer in gone:  # in network order, so what a layer reads has been replaced
            inputs = _sets(depends[events[layer.inputs.cpu()]].flatten(1))
            width = max(depends.shape[1], inputs.shape[1])
            depends, inputs = (pad(rows, (0, width - rows.shape[1]), value=-1) for rows in (depends, inputs))
            depends[layer.outputs.cpu()] = inputs
        return _sets(depends[events].flatten(1)).to(self.events.device)

    def at_least_one(self, mask: Tensor) -> Tensor:
        """The mask with the first unit of every empty group kept; the input is not changed.

        Shapes are fixed and no value is read on the host, so a CUDA graph can hold it after a first call on the device.

        Args:
            mask: bool tensor of shape (..., num_units).
        """
        if mask.shape[-1:] != (self.num_units,):
            raise ValueError(f"`mask` has shape {tuple(mask.shape)}; it needs one entry per unit, ({self.num_units},)")
        if mask.device not in self._rule:
            self._rule[mask.device] = self._group_and_first(mask.device)
        group, first = self._rule[mask.device]
        mask = mask.bool()
        # Integers, so that the result does not depend on the order in which a GPU adds them.
        kept = torch.zeros(*mask.shape[:-1], first.numel(), dtype=torch.int32, device=mask.device)
        empty = kept.index_add_(-1, group, mask.int()) == 0
        return mask.index_copy(-1, first, mask.index_select(-1, first) | empty)

    def _group_and_first(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each unit's group, numbered without gaps, and each group's first unit."""
        labels, group = torch.unique(self.unit_group.cpu(), return_inverse=True)
        first = torch.full_like(labels, self.num_units)
        first.scatter_reduce_(0, group, torch.arange(self.num_units), "amin")
        return group.to(device), first.to(device)


PARTS = ("constant", "layers", "products", "other multiply-adds", "parameters", "activations")  # of a time


@dataclass(frozen=True)
class LatencyTable:
    """Measured times of one network on one device; made by `slimstart.measure_latency`.

    Attributes:
        structure: digest of the units of the cost table to which the times belong.
        device, mode, precision, batch, software: the conditions; another one needs another table.
        dense_ms: median time of the dense network.
        parts: what parts of a network take in the dense one, in milliseconds (see `slimstart.policies.latency`).
        error: relative error of the sum of the parts, which nine in ten networks that were left out of the fit stay
            within.
        num_networks: number of measured networks.
        timer: function that times the network of a mask (U,) without some of `CostTable.layers`, as a multiple of the
            dense network's time. None for a table from a file: `measure_latency(..., table=table)` adds it.
    """

    structure: str
    device: str
    mode: str
    precision: str
    batch: str
    software: str
    dense_ms: float
    parts: Mapping[str, float] = field(hash=False)
    error: float
    num_networks: int
    version: int = 3
    timer: Callable[[Tensor, Sequence[int]], float] | None = field(default=None, repr=False, compare=False)


def _sets(rows: Tensor) -> Tensor:
    """Every row sorted, without repetitions, padded with -1 to the length of the longest one, or 1."""
    last = torch.iinfo(rows.dtype).max
    ordered = torch.where(rows < 0, last, rows).sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < last)
    if bool(repeated.any()):
        ordered[:, 1:].masked_fill_(repeated, last)
        ordered = ordered.sort(1).values
    width = max(1, int((ordered < last).sum(1).max())) if len(rows) else 1
    return torch.where(ordered == last, -1, ordered)[:, :width].contiguous()
