r"""The cost table: plain data that `graph` derives from a network and `structure` evaluates; it knows neither.

A network's cost (its FLOPs, or its parameters) is a polynomial in "how many channels are there". With a mask
:math:`m \in \{0,1\}^U` over units,

.. math:: \mathrm{cost}(m) = c_0 + \sum_t a_t \, n_{l(t)}(m) \, n_{r(t)}(m), \qquad
          n_f(m) = o_f + \sum_{e \in f} w_e \, [\, \exists u \in e : \tilde m_u = 1 \,]

where an *event* e is a set of units of which at least one must be kept for the channel to exist (a stream channel
exists if some writer keeps it), a *factor* f counts the indices of one tensor dimension (:math:`o_f` of them always
there), and a *term* t multiplies one or two factors (a convolution: inputs times outputs).

:math:`\tilde m` is the mask after the **at-least-one rule**: units form groups (`unit_group`), and where the draw drops
every unit of a group, its first unit is kept all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factor:
    """How many indices of one tensor dimension exist: `offset` always, and `weights[i]` more if `events[i]` happens."""

    offset: int
    events: Tensor  # (n,) int64, indices into CostTable.events
    weights: Tensor  # (n,) int64


@dataclass(frozen=True)
class Term:
    """`coefficient` times the product of one or two factors (indices into `CostTable.factors`)."""

    coefficient: int
    factors: tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """`constant` plus the sum of the terms."""

    constant: int
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class CostTable:
    """Everything that `structure` needs to know of a network."""

    unit_group: Tensor  # (U,) int64: the group of each unit; a group's first unit is the one with the lowest index
    unit_filters: Tensor  # (U,) int64: how many filters go with each unit
    events: Tensor  # (E, W) int64: unit indices, padded with -1
    factors: tuple[Factor, ...]
    flops: Polynomial  # of one forward on the example inputs; one multiply-add = 1
    params: Polynomial
    _rule: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_units(self) -> int:
        return self.unit_group.numel()

    def at_least_one(self, mask: Tensor) -> Tensor:
        """The mask with the first unit of every empty group kept; the input is not changed.

        All shapes are fixed and no value is asked for, so a CUDA graph can hold it (after a first call on the device).

        Args:
            mask: bool tensor of shape (..., num_units).
        """
        if mask.shape[-1:] != (self.num_units,):
            raise ValueError(f"`mask` has shape {tuple(mask.shape)}; it needs one entry per unit, ({self.num_units},)")
        if mask.device not in self._rule:
            self._rule[mask.device] = self._group_and_first(mask.device)
        group, first = self._rule[mask.device]
        mask = mask.bool()
        # Whole numbers: the order in which a GPU adds them does not matter.
        kept = torch.zeros(*mask.shape[:-1], first.numel(), dtype=torch.int32, device=mask.device)
        empty = kept.index_add_(-1, group, mask.int()) == 0
        return mask.index_copy(-1, first, mask.index_select(-1, first) | empty)

    def _group_and_first(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each unit's group, numbered without gaps, and each group's first unit."""
        labels, group = torch.unique(self.unit_group.cpu(), return_inverse=True)
        first = torch.full_like(labels, self.num_units)
        first.scatter_reduce_(0, group, torch.arange(self.num_units), "amin")
        return group.to(device), first.to(device)
