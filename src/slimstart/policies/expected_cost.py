r"""The expected cost of a random mask, exactly and in closed form.

The cost is the polynomial of `slimstart.costs`. The mask is an independent draw :math:`m_u \sim
\mathrm{Bernoulli}(s_u)` followed by the at-least-one rule. With P(e) the probability that all units of event e are
dropped,

.. math:: \mathbb{E}[n_f] &= o_f + \sum_{e \in f} w_e (1 - P(e)) \\
          \mathbb{E}[n_l n_r] &= \mathbb{E}[n_l] \, \mathbb{E}[n_r] +
          \sum_{e \in l, \, f \in r} w_e w_f \, (P(e \cup f) - P(e) P(f))

where only *dependent* pairs contribute: events that share a unit, or pairs in which one event contains the first unit
of a group and the other any unit of that group. With :math:`q = 1 - s`, a group's product :math:`Q_g = \prod_{u \in g}
q_u` and its first unit :math:`f_g`,

.. math:: P(A) = \prod_g \Big[ \prod_{u \in A \cap g} q_u - [f_g \in A] \, Q_g \Big]

because the first unit is kept when the draw drops the whole group.

All index tables are made once. An evaluation is a dozen tensor operations, on one s or on many, and reads no value on
the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.costs import CostTable, Polynomial
from slimstart.devices import Movable
from slimstart.policies.ragged import Incidence, RaggedProduct, expand, group_totals, join

CHUNK = 64


class ExpectedCost(Movable):
    """One polynomial of a cost table, ready to be evaluated on masks and on keep-probabilities.

    Args:
        table: cost table of the network.
        polynomial: `table.flops` or `table.params`.
    """

    def __init__(self, table: CostTable, polynomial: Polynomial) -> None:
        self.num_units = table.num_units
        used = sorted({index for term in polynomial.terms for index in term.factors})
        slot = {index: position for position, index in enumerate(used)}
        # A last factor that is always 1: terms with one factor are multiplied by it, and the constant is a term with
        # twice this factor, so that all terms have two.
        terms = [_padded(tuple(slot[index] for index in term.factors), len(used)) for term in polynomial.terms]
        self._terms = [*terms, (len(used), len(used))]
        self._coefficients = [*(term.coefficient for term in polynomial.terms), polynomial.constant]
        offsets = [*(table.factors[index].offset for index in used), 1]

        # Only events that are used get a number; `owner` is the factor to which an entry belongs.
        sizes = torch.tensor([table.factors[index].events.numel() for index in used], dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(used)), sizes)
        empty = torch.zeros(0, dtype=torch.int64)
        events = torch.cat([empty, *(table.factors[index].events.cpu() for index in used)])
        weights = torch.cat([empty, *(table.factors[index].weights.cpu() for index in used)])
        kept_events, events = torch.unique(events, return_inverse=True)
        sets = Incidence.from_padded(table.events.cpu()[kept_events], self.num_units)
        groups = Groups(table.unit_group.cpu())

        pairs = _DependentPairs(sets, groups)
        for coefficient, (left, right) in zip(self._coefficients, self._terms, strict=True):
            pairs.add(coefficient, *((events[owner == side], weights[owner == side]) for side in (left, right)))
        first, second, pair_weights = pairs.totals()
        self._dropped = DropProbabilities(sets.with_unions(first, second), groups)
        position = self._dropped.position
        self._counts = _Counts(owner, position[events], weights, offsets, self._dropped)
        self._pairs = torch.cat([position[sets.num_sets :], position[first], position[second]])
        self._pair_weights = pair_weights.double()
        self._both = torch.tensor(self._terms, dtype=torch.int64).T.reshape(-1)
        self._float_coefficients = torch.tensor(self._coefficients, dtype=torch.float64)

    def mean(self, s: Tensor) -> Tensor:
        """The expected cost at float64 keep-probabilities of shape (..., U), of shape (...), with a gradient."""
        dropped = self._dropped(s)
        left, right = self._counts(dropped).index_select(-1, self._both).chunk(2, -1)
        value = (left * right) @ self._float_coefficients
        if self._pair_weights.numel():
            union, first, second = dropped.index_select(-1, self._pairs).chunk(3, -1)
            value = value + torch.addcmul(union, first, second, value=-1) @ self._pair_weights
        return value

    def of_mask(self, mask: Tensor) -> int:
        """The exact cost of one mask, to which the at-least-one rule is applied."""
        # For s in {0, 1} every probability is exactly 0 or 1 and the counts are whole numbers. Their products may be
        # larger than 2^53, above which float64 does not have all integers, so they are computed as Python's.
        counts = [int(count) for count in self._counts(self._dropped(mask.double())).round().tolist()]
        return sum(a * counts[l] * counts[r] for a, (l, r) in zip(self._coefficients, self._terms, strict=True))


class _Counts(Movable):
    r"""E[n_f] of every factor, as :math:`(o_f + \sum_e w_e) \cdot 1 - \sum_e w_e P(e)`.

    P(e) is summed over at most `CHUNK` events of one factor and weight at a time, and the sums are multiplied with a
    small matrix. On a GPU that is three kernels, and the order of additions is always the same, which it is not in
    `index_add`.
    """

    def __init__(self, owner: Tensor, position: Tensor, weights: Tensor, offsets: list[int], p: DropProbabilities):
        values, code = torch.unique(weights, return_inverse=True)
        num_values = max(values.numel(), 1)
        keys, run, length = torch.unique(owner * num_values + code, return_inverse=True, return_counts=True)
        order = torch.argsort(run, stable=True)
        run = run[order]
        rank = torch.arange(run.numel()) - (torch.cumsum(length, 0) - length)[run]
        num_chunks = (length + CHUNK - 1) // CHUNK
        chunk = (torch.cumsum(num_chunks, 0) - num_chunks)[run] + rank // CHUNK
        chunk_key = torch.repeat_interleave(keys, num_chunks)

        events = torch.full((chunk_key.numel() + 1, CHUNK), p.zero)
        events[chunk, rank % CHUNK] = position[order]
        events[-1, 0] = p.one
        matrix = torch.zeros(chunk_key.numel() + 1, len(offsets), dtype=torch.int64)
        matrix[torch.arange(chunk_key.numel()), chunk_key // num_values] = -values[chunk_key % num_values]
        matrix[-1] = torch.tensor(offsets).index_add(0, owner, weights)
        self._events, self._matrix = events.reshape(-1), matrix.double()

    def __call__(self, dropped: Tensor) -> Tensor:
        sums = dropped.index_select(-1, self._events).unflatten(-1, (-1, CHUNK)).sum(-1)
        return torch.mv(self._matrix.mT, sums) if sums.dim() == 1 else sums @ self._matrix


class _DependentPairs:
    """Pairs of dependent events that terms multiply, each once, with the sum of its a_t w_e w_f."""

    def __init__(self, sets: Incidence, groups: Groups) -> None:
        self._sets, self._groups = sets, groups
        self._keys, self._values = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]

    def add(self, coefficient: int, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
        """One term: the events and weights of its two factors."""
        (l_events, l_weights), (r_events, r_weights) = group_totals(*left), group_totals(*right)
        i, j = self._dependent(l_events, r_events)
        e, f = l_events[i], r_events[j]
        self._keys.append(torch.minimum(e, f) * self._sets.num_sets + torch.maximum(e, f))
        self._values.append(coefficient * l_weights[i] * r_weights[j])

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first events, the second, and the weights of the pairs."""
        pairs, totals = group_totals(torch.cat(self._keys), torch.cat(self._values))
        num_sets = max(self._sets.num_sets, 1)
        return pairs // num_sets, pairs % num_sets, totals

    def _dependent(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (i, j) of the dependent pairs among events `left[i]`, `right[j]`, each pair once."""
        sets, groups = self._sets, self._groups
        l_event, l_row = expand(sets.starts[left], sets.lengths[left])
        r_event, r_row = expand(sets.starts[right], sets.lengths[right])
        l_unit, r_unit = sets.member[l_row], sets.member[r_row]
        l_group, r_group = groups.of_unit[l_unit], groups.of_unit[r_unit]
        l_first, r_first = groups.is_first[l_unit], groups.is_first[r_unit]
        touched = torch.zeros(groups.size.numel(), dtype=torch.bool)
        touched[l_group] = True
        if not bool(touched[r_group].any()):  # true for most terms, and much faster than the joins
            return left[:0], right[:0]
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


def _padded(factors: tuple[int, ...], one: int) -> tuple[int, int]:
    if len(factors) not in (1, 2):
        raise ValueError(f"a term of the cost table multiplies {len(factors)} factors; it must be one or two")
    return factors[0], factors[1] if len(factors) == 2 else one


class Groups:
    """Units by group, groups numbered 0, 1, ... without gaps."""

    def __init__(self, unit_group: Tensor) -> None:
        _, self.of_unit, self.size = torch.unique(unit_group, return_inverse=True, return_counts=True)
        units = torch.arange(unit_group.numel())
        first = torch.full_like(self.size, unit_group.numel())
        self.first = first.scatter_reduce(0, self.of_unit, units, "amin")
        self.is_first = torch.zeros(unit_group.numel(), dtype=torch.bool)
        self.is_first[self.first] = True


class DropProbabilities(Movable):
    r"""P(A) of every set A of units, as a product over *atoms*.

    The part of A within a group is a *block*. A block that contains the group's first unit is one atom, of value
    :math:`\prod q_u - Q_g`; in any other, each unit is an atom of value :math:`q_u`.

    Attributes:
        position: P(A) is at `position[A]` of the result.
        one, zero: positions of a result that is always 1, and of one that is always 0.
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

        # Products of q, in this order: the blocks {first unit of g}, one for each group (most networks have no others);
        # the blocks of several units; and complete groups.
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
