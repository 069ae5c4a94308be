r"""The probability that all units of a set are dropped, for many sets at once.

The mask is an independent draw :math:`m_u \sim \mathrm{Bernoulli}(s_u)` followed by the at-least-one rule. With
:math:`q = 1 - s`, a group's product :math:`Q_g = \prod_{u \in g} q_u` and its first unit :math:`f_g`,

.. math:: P(A) = \prod_g \Big[ \prod_{u \in A \cap g} q_u - [f_g \in A] \, Q_g \Big]

(the first unit is not dropped when the draw drops the whole group).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.policies._ragged import Incidence, RaggedProduct
from slimstart.policies.tables import Tables


class Groups:
    """Units by group, groups numbered 0, 1, ... without gaps."""

    def __init__(self, unit_group: Tensor) -> None:
        _, self.of_unit, self.size = torch.unique(unit_group, return_inverse=True, return_counts=True)
        units = torch.arange(unit_group.numel())
        first = torch.full_like(self.size, unit_group.numel())
        self.first = first.scatter_reduce(0, self.of_unit, units, "amin")
        self.is_first = torch.zeros(unit_group.numel(), dtype=torch.bool)
        self.is_first[self.first] = True


class DropProbabilities(Tables):
    r"""P(A) of every set A of units, as a product over *atoms*.

    The part of A within a group is a *block*. A block that contains the group's first unit is one atom, of value
    :math:`\prod q_u - Q_g`; in any other, each unit is an atom of value :math:`q_u`.

    Attributes:
        position: P(A) is at `position[A]` of the result.
        one, zero: where the result is always 1, and always 0.
    """

    def __init__(self, sets: Incidence, groups: Groups) -> None:
        num_units, num_groups = groups.of_unit.numel(), groups.size.numel()
        self.one, self.zero = num_units, num_units + 1
        group = groups.of_unit[sets.member]
        key, block, count = torch.unique(
            sets.owner * max(num_groups, 1) + group, return_inverse=True, return_counts=True
        )
        block_owner, block_group = key // max(num_groups, 1), key % max(num_groups, 1)
        has_first = torch.zeros(key.numel(), dtype=torch.bool)
        has_first[block[groups.is_first[sets.member]]] = True

        # Products of q: the blocks {first unit of g}, one for each group (most networks have no others); the blocks of
        # several units; and the whole groups.
        several = has_first & (count > 1)
        number = torch.cumsum(several, 0) - 1 + num_groups
        num_blocks = num_groups + int(several.sum())
        rows = several[block]
        owner = torch.cat([torch.arange(num_groups), number[block[rows]], groups.of_unit + num_blocks])
        members = torch.cat([groups.first, sets.member[rows], torch.arange(num_units)])
        self._of_units = RaggedProduct(_sorted(owner, members, num_blocks + num_groups), num_units + 2, self.one)
        whose = torch.cat([torch.arange(num_groups), block_group[several]])
        position = self._of_units.position
        self._blocks_and_groups = torch.cat([position[:num_blocks], position[num_blocks + whose]])

        blocks_from = self._of_units.num_outputs
        block_atom = blocks_from + torch.where(several, number, block_group)
        alone = ~has_first[block]
        owner = torch.cat([sets.owner[alone], block_owner[has_first]])
        atoms = torch.cat([sets.member[alone], block_atom[has_first]])
        self._of_atoms = RaggedProduct(_sorted(owner, atoms, sets.num_sets), blocks_from + num_blocks, self.one)
        self.position = self._of_atoms.position
        self._constants = torch.tensor([1, 0], dtype=torch.float64)

    def __call__(self, s: Tensor) -> Tensor:
        """At keep-probabilities of shape (..., U), along the last dimension."""
        q = torch.cat([1 - s, self._constants.expand(*s.shape[:-1], 2)], -1)
        products = self._of_units(q)
        blocks, whole_groups = products.index_select(-1, self._blocks_and_groups).chunk(2, -1)
        return self._of_atoms(torch.cat([products, blocks - whole_groups], -1))


def _sorted(owner: Tensor, member: Tensor, num_sets: int) -> Incidence:
    order = torch.argsort(owner, stable=True)
    return Incidence(owner[order], member[order], num_sets)
