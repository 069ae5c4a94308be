r"""The expected cost of a random mask, exactly and in closed form.

The cost is the polynomial of `slimstart.costs`, the mask an independent draw :math:`m_u \sim \mathrm{Bernoulli}(s_u)`
followed by the at-least-one rule. With :math:`q = 1 - s`, a group's product :math:`Q_g = \prod_{u \in g} q_u` and its
first unit :math:`f_g`, the probability that every unit of a set A is dropped is

.. math:: P(A) = \prod_g \Big[ \prod_{u \in A \cap g} q_u - [f_g \in A] \, Q_g \Big]

(the first unit is not dropped when the draw drops the whole group). Then :math:`\mathbb{E}[n_f] = o_f + \sum_{e \in f}
w_e (1 - P(e))` and

.. math:: \mathbb{E}[n_l n_r] = \mathbb{E}[n_l] \, \mathbb{E}[n_r] +
          \sum_{e \in l, \, f \in r} w_e w_f \, (P(e \cup f) - P(e) P(f))

where only *dependent* pairs contribute: events that share a unit, or of which one contains the first unit of a group
and the other any unit of that group. All index tables are made once; an evaluation is a dozen tensor operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.costs import CostTable, Polynomial
from slimstart.structure._ragged import Incidence, RaggedProduct, expand, group_totals, join


class ExpectedCost:
    """One polynomial of a cost table, ready to be evaluated on masks and on keep-probabilities.

    Args:
        table: of the network.
        polynomial: `table.flops` or `table.params`.
    """

    def __init__(self, table: CostTable, polynomial: Polynomial) -> None:
        self.num_units = table.num_units
        self._constant = polynomial.constant
        self._coefficients = [term.coefficient for term in polynomial.terms]
        self._groups = _Groups(table.unit_group.cpu())

        used = sorted({index for term in polynomial.terms for index in term.factors})
        slot = {index: position for position, index in enumerate(used)}
        # A term with one factor gets a second that is always 1, in the last place, so that all terms look alike.
        self._terms = [_padded(tuple(slot[index] for index in term.factors), len(used)) for term in polynomial.terms]
        self._offsets = [table.factors[index].offset for index in used] + [1]

        # Events are numbered anew, those that are used only; `owner` says to which factor an entry belongs.
        sizes = torch.tensor([table.factors[index].events.numel() for index in used], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(used)), sizes)
        empty = torch.zeros(0, dtype=torch.int64)
        events = torch.cat([empty, *(table.factors[index].events.cpu() for index in used)])
        weights = torch.cat([empty, *(table.factors[index].weights.cpu() for index in used)])
        kept_events, events = torch.unique(events, return_inverse=True)
        sets = Incidence.from_padded(table.events.cpu()[kept_events], self.num_units)

        first, second, pair_weights = self._dependent_pairs(sets, owner, events, weights)
        self._products = _DropProbabilities(sets.with_unions(first, second), self._groups)
        position = self._products.position
        self._entry_owner, self._entry_set = owner, position[events]
        self._entry_weights = weights.double()
        self._first, self._second = position[first], position[second]
        self._union = position[sets.num_sets :]
        self._pair_weights = pair_weights.double()

        left, right = torch.tensor(self._terms, dtype=torch.int64).reshape(-1, 2).unbind(1)
        self._left, self._right = left.contiguous(), right.contiguous()
        self._float_coefficients = torch.tensor(self._coefficients, dtype=torch.float64)
        self._float_offsets = torch.tensor(self._offsets, dtype=torch.float64)

    def mean(self, s: Tensor) -> Tensor:
        """The expected cost at float64 keep-probabilities of shape (U,): a scalar with a gradient."""
        dropped = self._products(s)
        counts = self._counts(dropped)
        value = self._float_coefficients @ (counts.index_select(0, self._left) * counts.index_select(0, self._right))
        if self._union.numel():
            independent = dropped.index_select(0, self._first) * dropped.index_select(0, self._second)
            value = value + self._pair_weights @ (dropped.index_select(0, self._union) - independent)
        return value + self._constant

    def of_mask(self, mask: Tensor) -> int:
        """The cost of one mask, exactly; the at-least-one rule is applied to it."""
        # At s in {0, 1} every probability is exactly 0 or 1 and the counts are whole numbers. Their products may pass
        # 2^53, where float64 skips integers, so these are Python's.
        counts = [int(count) for count in self._counts(self._products(mask.double())).round().tolist()]
        products = (a * counts[l] * counts[r] for a, (l, r) in zip(self._coefficients, self._terms, strict=True))
        return self._constant + sum(products)

    def _counts(self, dropped: Tensor) -> Tensor:
        """E[n_f] of every factor, and the constant 1."""
        alive = 1 - dropped.index_select(0, self._entry_set)
        return self._float_offsets.index_add(0, self._entry_owner, self._entry_weights * alive)

    def _dependent_pairs(
        self, sets: Incidence, owner: Tensor, events: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs of dependent events that a term multiplies, each once, with the sum of its a_t w_e w_f."""
        num_factors, num_groups = len(self._offsets) - 1, self._groups.size.numel()
        row_owner, row_entry = join(events, sets.owner)  # entries of factors -> (set, unit) rows of their events
        touched = torch.zeros(num_factors, num_groups, dtype=torch.bool)
        touched[owner[row_owner], self._groups.of_unit[sets.member[row_entry]]] = True
        keys, values = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for coefficient, (left, right) in zip(self._coefficients, self._terms, strict=True):
            if right == num_factors or not bool((touched[left] & touched[right]).any()):
                continue
            left_events, left_weights = group_totals(events[owner == left], weights[owner == left])
            right_events, right_weights = group_totals(events[owner == right], weights[owner == right])
            i, j = self._dependent(sets, left_events, right_events)
            e, f = left_events[i], right_events[j]
            keys.append(torch.minimum(e, f) * sets.num_sets + torch.maximum(e, f))
            values.append(coefficient * left_weights[i] * right_weights[j])
        pairs, totals = group_totals(torch.cat(keys), torch.cat(values))
        num_sets = max(sets.num_sets, 1)
        return pairs // num_sets, pairs % num_sets, totals

    def _dependent(self, sets: Incidence, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (i, j) of the dependent pairs among events `left[i]`, `right[j]`, each pair once."""
        l_event, l_row = expand(sets.starts[left], sets.lengths[left])
        r_event, r_row = expand(sets.starts[right], sets.lengths[right])
        l_unit, r_unit = sets.member[l_row], sets.member[r_row]
        l_group, r_group = self._groups.of_unit[l_unit], self._groups.of_unit[r_unit]
        l_first, r_first = self._groups.is_first[l_unit], self._groups.is_first[r_unit]
        pairs = []
        for l_keep, r_keep, l_key, r_key in (
            (slice(None), slice(None), l_unit, r_unit),  # a shared unit
            (l_first, slice(None), l_group, r_group),  # a group's first unit on the left, any of it on the right
            (slice(None), r_first, l_group, r_group),  # and the other way round
        ):
            i, j = join(l_key[l_keep], r_key[r_keep])
            pairs.append(l_event[l_keep][i] * right.numel() + r_event[r_keep][j])
        unique = torch.unique(torch.cat(pairs))
        return unique // max(right.numel(), 1), unique % max(right.numel(), 1)


class _Groups:
    """Units by group, groups numbered 0, 1, ... without gaps."""

    def __init__(self, unit_group: Tensor) -> None:
        _, self.of_unit, self.size = torch.unique(unit_group, return_inverse=True, return_counts=True)
        units = torch.arange(unit_group.numel())
        first = torch.full_like(self.size, unit_group.numel())
        self.first = first.scatter_reduce(0, self.of_unit, units, "amin")
        self.is_first = torch.zeros(unit_group.numel(), dtype=torch.bool)
        self.is_first[self.first] = True


class _DropProbabilities:
    r"""P(A) of every set A of units, as a product over *atoms*.

    The part of A within a group is a *block*. A block that contains the group's first unit is one atom, of value
    :math:`\prod q_u - Q_g`; in any other, each unit is an atom of value :math:`q_u`.
    """

    def __init__(self, sets: Incidence, groups: _Groups) -> None:
        num_units, num_groups = groups.of_unit.numel(), groups.size.numel()
        one, blocks_from = num_units, num_units + 1
        group = groups.of_unit[sets.member]
        key, block, count = torch.unique(
            sets.owner * max(num_groups, 1) + group, return_inverse=True, return_counts=True
        )
        block_owner, block_group = key // max(num_groups, 1), key % max(num_groups, 1)
        has_first = torch.zeros(key.numel(), dtype=torch.bool)
        has_first[block[groups.is_first[sets.member]]] = True

        # The blocks {first unit of g}, one for each group, come first; most networks have no others.
        several = has_first & (count > 1)
        number = torch.cumsum(several, 0) - 1 + num_groups
        rows = several[block]
        owner = torch.cat([torch.arange(num_groups), number[block[rows]]])
        order = torch.argsort(owner, stable=True)
        members = torch.cat([groups.first, sets.member[rows]])
        num_blocks = num_groups + int(several.sum())
        self._blocks = RaggedProduct(Incidence(owner[order], members[order], num_blocks), one)
        units = torch.argsort(groups.of_unit, stable=True)
        self._group_products = RaggedProduct(Incidence(groups.of_unit[units], units, num_groups), one)
        whose = torch.cat([torch.arange(num_groups), block_group[several]])
        self._block_group = torch.empty(num_blocks, dtype=torch.int64)
        self._block_group[self._blocks.position] = self._group_products.position[whose]

        block_atom = self._blocks.position[torch.where(several, number, block_group)] + blocks_from
        alone = ~has_first[block]
        owner = torch.cat([sets.owner[alone], block_owner[has_first]])
        atoms = torch.cat([sets.member[alone], block_atom[has_first]])
        order = torch.argsort(owner, stable=True)
        self._sets = RaggedProduct(Incidence(owner[order], atoms[order], sets.num_sets), one)
        self.position = self._sets.position
        self._one = torch.ones(1, dtype=torch.float64)

    def __call__(self, s: Tensor) -> Tensor:
        """P(A) at `position[A]`."""
        q = torch.cat([1 - s, self._one])
        blocks = self._blocks(q) - self._group_products(q).index_select(0, self._block_group)
        return self._sets(torch.cat([q, blocks]))


def _padded(factors: tuple[int, ...], one: int) -> tuple[int, int]:
    if len(factors) not in (1, 2):
        raise ValueError(f"a term of the cost table multiplies {len(factors)} factors; it must be one or two")
    return factors[0], factors[1] if len(factors) == 2 else one
