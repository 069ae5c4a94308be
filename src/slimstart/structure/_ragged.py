"""Lists of different lengths as flat index tensors: expanding, joining and multiplying them without a Python loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Incidence:
    """Sets as rows (owner, member), sorted by owner, no row twice.

    Attributes:
        owner: (N,) int64, which set.
        member: (N,) int64, what it contains.
        num_sets: sets are 0 .. num_sets - 1; some may be empty.
    """

    owner: Tensor
    member: Tensor
    num_sets: int
    lengths: Tensor = field(init=False)
    starts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        lengths = torch.bincount(self.owner, minlength=self.num_sets)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "starts", torch.cumsum(lengths, 0) - lengths)

    @classmethod
    def from_padded(cls, table: Tensor, num_members: int) -> Incidence:
        """From one row per set, padded with -1; what a row repeats counts once."""
        owner = torch.arange(table.shape[0]).repeat_interleave(table.shape[1])
        member = table.reshape(-1)
        return cls._from_rows(owner[member >= 0], member[member >= 0], table.shape[0], num_members)

    @classmethod
    def _from_rows(cls, owner: Tensor, member: Tensor, num_sets: int, num_members: int) -> Incidence:
        rows = torch.unique(owner * max(num_members, 1) + member)
        return cls(rows // max(num_members, 1), rows % max(num_members, 1), num_sets)

    def with_unions(self, first: Tensor, second: Tensor) -> Incidence:
        """These sets, followed by the unions of sets `first[i]` and `second[i]`."""
        num_members = int(self.member.max()) + 1 if self.member.numel() else 0
        i, rows = expand(self.starts[first], self.lengths[first])
        j, more = expand(self.starts[second], self.lengths[second])
        unions = Incidence._from_rows(
            torch.cat([i, j]), self.member[torch.cat([rows, more])], first.numel(), num_members
        )
        owner = torch.cat([self.owner, unions.owner + self.num_sets])
        return Incidence(owner, torch.cat([self.member, unions.member]), self.num_sets + unions.num_sets)


class RaggedProduct:
    r"""The products :math:`y_i = \prod_{j \in S_i} x_j` over sets of different sizes.

    Sets are padded to powers of two and multiplied size by size: at most twice the work, a few operations, and
    `torch.prod`, whose gradient is right where factors are 0 (a sum of logarithms has none there).

    Args:
        sets: the sets S.
        one: an index at which x is 1, for padding.

    Attributes:
        position: product i is at `position[i]` of the result.
    """

    def __init__(self, sets: Incidence, one: int) -> None:
        width = torch.ones_like(sets.lengths)
        while bool((width < sets.lengths).any()):
            width = torch.where(width < sets.lengths, 2 * width, width)
        order = torch.argsort(width, stable=True)
        self.position = torch.empty_like(order)
        self.position[order] = torch.arange(order.numel())
        column = torch.arange(sets.owner.numel()) - sets.starts[sets.owner]
        self._tables: list[tuple[int, Tensor]] = []
        begin = 0
        for size, number in zip(*(each.tolist() for each in torch.unique(width, return_counts=True)), strict=True):
            rows = width[sets.owner] == size
            table = torch.full((size, number), one)
            table[column[rows], self.position[sets.owner[rows]] - begin] = sets.member[rows]
            self._tables.append((size, table.reshape(-1)))
            begin += number

    def __call__(self, x: Tensor) -> Tensor:
        parts = [x.index_select(0, table).view(size, -1) for size, table in self._tables]
        # One line of a table is its own product; torch.prod over it would be a copy.
        products = [part[0] if size == 1 else part.prod(0) for (size, _), part in zip(self._tables, parts, strict=True)]
        return products[0] if len(products) == 1 else torch.cat([x[:0], *products])


def expand(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """All (i, starts[i] + k) with 0 <= k < lengths[i], in order of i and k."""
    which = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    before = torch.cumsum(lengths, 0) - lengths
    return which, torch.arange(which.numel()) - before[which] + starts[which]


def join(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """All (i, j) with left[i] == right[j]."""
    ordered, order = torch.sort(right, stable=True)
    begin = torch.searchsorted(ordered, left)
    which, where = expand(begin, torch.searchsorted(ordered, left, right=True) - begin)
    return which, order[where]


def group_totals(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct keys, ascending, and the sum of the values that share each."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    return unique, torch.zeros(unique.numel(), dtype=values.dtype).index_add(0, inverse, values)
