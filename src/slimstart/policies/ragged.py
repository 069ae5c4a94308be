"""Lists of different lengths as flat index tensors: expanding, joining and multiplying them without a Python loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from slimstart.devices import Movable

PADDING = 8192  # so many entries more take about the time of one kernel more, on a GPU


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


class RaggedProduct(Movable):
    r"""The products :math:`y_i = \prod_{j \in S_i} x_j` over sets of different sizes, behind x itself.

    Sets are padded to powers of two, or more where that saves a table, and multiplied size by size: `torch.prod` has
    the right gradient where factors are 0 (a sum of logarithms has none there).

    Args:
        sets: the sets S.
        num_inputs: the length of x.
        one: an index at which x is 1, for padding.

    Attributes:
        position: product i is at `position[i]` of the result; a set of one member is that entry of x.
        num_outputs: the length of the result.
    """

    def __init__(self, sets: Incidence, num_inputs: int, one: int) -> None:
        width = _widths(sets.lengths)
        self.position = torch.full((sets.num_sets,), one)
        single = sets.lengths[sets.owner] == 1
        self.position[sets.owner[single]] = sets.member[single]
        column = torch.arange(sets.owner.numel()) - sets.starts[sets.owner]
        self.num_outputs = num_inputs
        self._shapes: list[tuple[int, int]] = []
        tables = [torch.zeros(0, dtype=torch.int64)]
        for size in torch.unique(width[width > 1]).tolist():
            chosen = (width == size).nonzero().squeeze(1)
            self.position[chosen] = self.num_outputs + torch.arange(chosen.numel())
            rows = width[sets.owner] == size
            table = torch.full((size, chosen.numel()), one)
            table[column[rows], self.position[sets.owner[rows]] - self.num_outputs] = sets.member[rows]
            tables.append(table.reshape(-1))
            self._shapes.append((size, chosen.numel()))
            self.num_outputs += chosen.numel()
        self._members = torch.cat(tables)

    def __call__(self, x: Tensor) -> Tensor:
        """x of shape (..., num_inputs) and the products behind it, (..., num_outputs)."""
        return torch.cat([x, *self._products(x)], -1) if self._shapes else x

    def _products(self, x: Tensor) -> list[Tensor]:
        # On their own, so that the members, which may be more than x, are forgotten before anything else is made.
        parts = x.index_select(-1, self._members).split([size * number for size, number in self._shapes], -1)
        return [part.unflatten(-1, shape).prod(-2) for part, shape in zip(parts, self._shapes, strict=True)]


def _widths(lengths: Tensor) -> Tensor:
    """To what size each set is padded."""
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
