"""Sets of different sizes as flat index tensors, which are expanded, joined and multiplied without a Python loop.

A large network has too many events for a loop. A family of sets is two tensors, as in a sparse matrix: for {3, 5}, {}
and {5}, `owner` is [0, 0, 2] and `member` is [3, 5, 5].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from slimstart.devices import Movable

PADDING = 8192  # on a GPU, this many more entries take about as long as one more kernel


@dataclass(frozen=True)
class Incidence:
    """A family of sets as rows (owner, member), sorted by owner, each row once.

    Attributes:
        owner: (N,) int64, the number of the set.
        member: (N,) int64, a member of it.
        num_sets: sets are 0 .. num_sets - 1; some may be empty.
        lengths: (num_sets,) int64, the number of members of each set.
        starts: (num_sets,) int64, the first row of each set.
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
        """The sets of a table with one row per set, padded with -1; repeated members count once."""
        owner = torch.arange(table.shape[0]).repeat_interleave(table.shape[1])
        member = table.reshape(-1)
        return cls._from_rows(owner[member >= 0], member[member >= 0], table.shape[0], num_members)

    @classmethod
    def _from_rows(cls, owner: Tensor, member: Tensor, num_sets: int, num_members: int) -> Incidence:
        # One number per (owner, member), so that `unique` sorts by owner first.
        rows = torch.unique(owner * max(num_members, 1) + member)
        return cls(rows // max(num_members, 1), rows % max(num_members, 1), num_sets)

    def with_unions(self, first: Tensor, second: Tensor) -> Incidence:
        """These sets, followed by the unions of sets `first[i]` and `second[i]`."""
        num_members = int(self.member.max()) + 1 if self.member.numel() else 0
        # Row numbers of all members of each pair's first set, then of its second set; duplicates are dropped below.
        i, rows = expand(self.starts[first], self.lengths[first])
        j, more = expand(self.starts[second], self.lengths[second])
        unions = Incidence._from_rows(
            torch.cat([i, j]), self.member[torch.cat([rows, more])], first.numel(), num_members
        )
        owner = torch.cat([self.owner, unions.owner + self.num_sets])
        return Incidence(owner, torch.cat([self.member, unions.member]), self.num_sets + unions.num_sets)


class RaggedProduct(Movable):
    r"""The products :math:`y_i = \prod_{j \in S_i} x_j` over sets of different sizes, appended to x.

    Sets are padded to powers of two, or to the next larger size where that saves a kernel, and all sets of one size are
    multiplied at once. `torch.prod` has the right gradient where factors are 0; a sum of logarithms would not.

    Args:
        sets: the sets S.
        num_inputs: the length of x.
        one: an index at which x is 1, for padding.

    Attributes:
        position: product i is at `position[i]` of the result; for a set of one member that is an entry of x, and for an
            empty set it is `one`.
        num_outputs: the length of the result.
    """

    def __init__(self, sets: Incidence, num_inputs: int, one: int) -> None:
        width = _widths(sets.lengths)
        self.position = torch.full((sets.num_sets,), one)
        single = sets.lengths[sets.owner] == 1
        self.position[sets.owner[single]] = sets.member[single]
        column = torch.arange(sets.owner.numel()) - sets.starts[sets.owner]  # of each row within its set
        self.num_outputs = num_inputs
        self._shapes: list[tuple[int, int]] = []
        tables = [torch.zeros(0, dtype=torch.int64)]
        for size in torch.unique(width[width > 1]).tolist():
            chosen = (width == size).nonzero().squeeze(1)
            self.position[chosen] = self.num_outputs + torch.arange(chosen.numel())
            rows = width[sets.owner] == size
            # One column per set and one row per member; columns shorter than `size` are filled up with `one`.
            table = torch.full((size, chosen.numel()), one)
            table[column[rows], self.position[sets.owner[rows]] - self.num_outputs] = sets.member[rows]
            tables.append(table.reshape(-1))
            self._shapes.append((size, chosen.numel()))
            self.num_outputs += chosen.numel()
        self._members = torch.cat(tables)

    def __call__(self, x: Tensor) -> Tensor:
        """x of shape (..., num_inputs), followed by the products: (..., num_outputs)."""
        return torch.cat([x, *self._products(x)], -1) if self._shapes else x

    def _products(self, x: Tensor) -> list[Tensor]:
        # In a method of its own, so that the memory of all members, which may exceed that of x, is freed early.
        parts = x.index_select(-1, self._members).split([size * number for size, number in self._shapes], -1)
        return [part.unflatten(-1, shape).prod(-2) for part, shape in zip(parts, self._shapes, strict=True)]


def _widths(lengths: Tensor) -> Tensor:
    """The size to which each set is padded."""
    width = torch.ones_like(lengths)
    while bool((width < lengths).any()):
        width = torch.where(width < lengths, 2 * width, width)
    for size, larger in pairwise(torch.unique(width[width > 1]).tolist()):
        smaller = width == size
        if int(smaller.sum()) * (larger - size) <= PADDING:
            width[smaller] = larger
    return width


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
