"""Reshapes: the dimension along which channels may be removed, and the attributes that have to change with them.

Say a forward views 32 channels as (4, 8). In a narrow network the user's own code views the channels that are left,
with the sizes that it computes then. That is right only if whole rows or whole columns were removed, and if the sizes
are those of what is left: a size computed from `x.shape` is, a size read or computed from attributes of a module is if
one of them is changed too, and a literal never is. For every reshape we take the first dimension for which this works,
tie the channels of each of its hyperplanes, and record the attributes. Where none works, the channels are not prunable.

Because of the ties, sizes that are right for one removal are right for all. Every decision is nevertheless checked at
the end, on single removals and on nearly everything at once, because a later tie may break it.

What an attribute counts has to be found too. A forward asks for `self.heads * self.head_dim` channels, and there are
4 * 12. Then `self.heads` may count blocks of 12 consecutive channels, or `self.head_dim` every twelfth channel:
whichever is changed makes the size right, and what it counts is removed as a whole. `countings` lists all
possibilities; those that agree with the rest of the forward are chosen.

A size may also be that of another tensor: `b, n, c = x.shape; y.view(b, n, c)`. Where nothing else works, the channels
of both are tied, one by one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slimstart.graph.constraints import ZERO, Count, Layout, Presence, UnionFind, when_carried
from slimstart.graph.sizes import Arithmetic, Attribute, Dimension, Expression, evaluate, full, leaves
from slimstart.graph.solver import Atoms, Solver

Rows = list[list[int]]
"""Nodes in rows; the channels of a row are removed together."""
Counting = tuple[Attribute | Dimension, Rows]
"""An attribute or the size of a tensor, and the rows that it may count; those of a tensor with its own channels."""
Counted = dict[Attribute | Dimension, Rows]
"""For each attribute that has to change, the rows that it counts; and the same for sizes of other tensors."""


class ReshapeSolver:
    """Chooses a dimension for every reshape, ties the channels, and records the attributes that have to change.

    Args:
        solver: solver with all other constraints applied.
    """

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.counted: Counted = {}
        self.decided: dict[Attribute, list[Layout]] = defaultdict(list)  # layouts that have an attribute in a size

    def solve(self) -> None:
        """Decide every reshape, split and slice of the trace."""
        constraints = self.solver.constraints
        # Layouts with fewer choices first, so that the others can agree with them.
        for layout in sorted(constraints.layouts, key=lambda one: (_computes(one), len(_candidates(one)))):
            self._choose(layout)
            for leaf in (leaf for size in layout.sizes if size is not None for leaf in leaves(size)):
                if isinstance(leaf, Attribute):
                    self.decided[leaf].append(layout)
        for count in constraints.counts:
            self._count(count)
        # A filter that is frozen may break another layout, so all are checked again until nothing changes. This ends
        # because frozen filters only grow. Lists, not generators: each pass checks everything.
        while any(
            [self._violated(layout) for layout in constraints.layouts]
            + [self._count_violated(c) for c in constraints.counts]
            + [self._number_violated(*number) for number in self.solver.numbers]
        ):
            pass

    def attribute_presences(self) -> dict[Attribute, tuple[Presence, ...]]:
        """For every attribute that has to change, when each of the rows that it counts exists."""
        return {
            attribute: tuple(when_carried(row[0]) for row in rows)
            for attribute, rows in self.counted.items()
            if isinstance(attribute, Attribute)
        }

    # --- sizes after a removal ---------------------------------------------------------------------------------------

    def _gone(self, nodes: Iterable[int], removed: set[int]) -> bool:
        """Whether all of these channels are removed if the given filters are."""
        for node in nodes:
            atoms = self.solver.exists(when_carried(node)) if node > ZERO else None
            if atoms is None or not atoms <= removed:
                return False
        return True

    def _size(self, expression: Expression | int, removed: set[int], trial: Counted) -> int:
        """A size without these filters; -1 if a division has a remainder, so that it is right for some masks only."""

        def leaf(it: Dimension | Attribute) -> int:
            if isinstance(it, Dimension):
                return sum(not self._gone(row, removed) for row in it.nodes.tolist())
            rows = trial.get(it, self.counted.get(it))
            return it.value if rows is None else it.value - sum(self._gone(row, removed) for row in rows)

        values = {it: leaf(it) for it in leaves(expression)}
        if all(value == full(it) for it, value in values.items()):
            return evaluate(expression, full)
        try:
            # If the dense size has a remainder already, the forward rounds, and no other width can be predicted.
            evaluate(expression, full, exact=True)
            return evaluate(expression, values.__getitem__, exact=True)
        except ArithmeticError:
            return -1

    def _removable(self, nodes: Iterable[int]) -> set[int]:
        """The filters that write these channels and can be dropped."""
        removed: set[int] = set()
        for node in nodes:
            removed |= (self.solver.exists(when_carried(node)) if node > ZERO else None) or set()
        return removed

    # --- which attributes to change ----------------------------------------------------------------------------------

    def _agreement(
        self, rows: Rows, options: Iterable[Counting], fits: Callable[[set[int], Counted], bool]
    ) -> Counted | None:
        """The attributes that have to change for all sizes to be right whichever rows are removed.

        Among all possibilities with two, one or no attribute, the one with the fewest new ties. With equal ties, one
        that counts: a count is right for every mask, a size that happens to agree only for those that were tried.

        Args:
            rows: rows that are removed as a whole.
            options: sizes that attributes may count.
            fits: whether all sizes are right without some filters, if attributes count this.

        Returns:
            The attributes with what they count; None if nothing works.
        """
        best, least = None, math.inf
        usable = [option for option in options if option[0] not in self.solver.fixed_attributes]
        for number in (1, 2, 0):
            for chosen in itertools.combinations(usable, number):
                trial: Counted = {}
                for attribute, counted in chosen:
                    before = trial.get(attribute, self.counted.get(attribute))
                    trial[attribute] = counted if before is None else _joined_rows(before, counted)
                cost, parts = self._tied([*rows, *itertools.chain(*trial.values())])
                if cost and len(parts) == 1:
                    continue  # all channels would be one unit, which is never removed
                if cost < least and all(fits(out, trial) and self._keeps_decided(out, trial) for out in _trials(parts)):
                    best, least = trial, cost
                if least == 0:
                    return best
        return best

    def _keeps_decided(self, removed: set[int], trial: Counted) -> bool:
        """Whether earlier layouts still work if attributes change that did not have to change for them."""
        new = (it for it in trial if isinstance(it, Attribute) and it not in self.counted)
        before = (layout for attribute in new for layout in self.decided[attribute])
        return all(self._rectangular(layout, removed, trial) for layout in before)

    def _tied(self, blocks: Rows) -> tuple[int, list[set[int]]]:
        """The number of new ties if the channels of each block were tied, and the sets of filters tied then."""
        joint, block_of = UnionFind(), dict[int, int]()
        present = [{self.solver.exists(when_carried(node)) for node in block} for block in blocks]
        for sets in present:
            block = joint.add()
            for atom in itertools.chain(*filter(None, sets)):
                joint.union(block, block_of.setdefault(atom, block))
        parts: dict[int, set[Atoms | None]] = defaultdict(set)
        for block, sets in enumerate(present):
            parts[joint.find(block)] |= sets
        atoms = [set[int]().union(*filter(None, sets)) for sets in parts.values()]
        return sum(len(sets) - 1 for sets in parts.values()), list(filter(None, atoms))

    def _register(self, trial: Counted, reason: str) -> None:
        """Let attributes count rows, and tie the channels of each row."""
        for attribute, rows in trial.items():
            if isinstance(attribute, Attribute):
                self.counted.setdefault(attribute, rows)
            for row in rows:
                self.solver.equalise(map(when_carried, row), reason)

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _choose(self, layout: Layout) -> None:
        """Tie the channels along the first dimension that works."""
        nodes = layout.nodes.reshape(-1).tolist()
        if not self._removable([*nodes, *self._nodes_of(layout.sizes)]):
            return
        candidates = _candidates(layout)
        rows = {dim: rows_along(layout.nodes, [dim]) for dim in candidates}
        # Dimensions that need the fewest new ties first: none where the hyperplanes are units already.
        candidates.sort(
            key=lambda dim: sum(len({self.solver.exists(when_carried(n)) for n in row}) > 1 for row in rows[dim])
        )
        # Sizes of other tensors are tied to these channels only if no dimension works without that.
        for tying, dim in itertools.product((False, True), candidates):

            def fits(removed: set[int], trial: Counted, dim: int = dim) -> bool:
                return self._sizes_fit(layout, dim, rows[dim], removed, trial)

            options = list(countings_along(layout, dim))
            if tying and not any(isinstance(leaf, Dimension) for leaf, _ in options):
                continue
            options = [option for option in options if tying or isinstance(option[0], Attribute)]
            trial = self._agreement(rows[dim], options, fits)
            if trial is not None:
                for row in rows[dim]:
                    self.solver.equalise(map(when_carried, row), layout.reason)
                return self._register(trial, layout.reason)
        return self._freeze(nodes, layout.sizes, layout.reason)

    def _sizes_fit(self, layout: Layout, dim: int | None, rows: Rows, removed: set[int], trial: Counted) -> bool:
        """Whether all sizes are right without these filters: smaller along `dim`, the same along other dimensions."""
        gone = sum(self._gone(row, removed) for row in rows)
        for other, expression in enumerate(layout.sizes):
            if expression is not None:
                before, after = (self._size(expression, s, trial) for s in (set[int](), removed))
                if after != before - (gone if other == dim else 0):
                    return False
        return True

    def _freeze(self, nodes: Iterable[int], sizes: Iterable[Expression | int | None], reason: str) -> None:
        """Freeze the channels of a reshape for which no dimension works, and those on which its sizes depend."""
        self.solver.freeze_nodes([*nodes, *self._nodes_of(sizes)], reason)

    def _nodes_of(self, sizes: Iterable[Expression | int | None]) -> list[int]:
        """The channels on which sizes depend."""
        nodes: list[int] = []
        for leaf in (leaf for size in sizes if size is not None for leaf in leaves(size)):
            if isinstance(leaf, Dimension):
                nodes += leaf.nodes.reshape(-1).tolist()
            else:
                nodes += [node for row in self.counted.get(leaf, []) for node in row]
        return nodes

    def _violated(self, layout: Layout) -> bool:
        """Freeze the channels of a layout that no longer works; returns whether something changed."""
        nodes = layout.nodes.reshape(-1).tolist()
        for removed in self._samples(nodes, layout.sizes):
            if not self._rectangular(layout, removed, {}):
                self._freeze(nodes, layout.sizes, layout.reason)
                return True
        return False

    def _samples(self, nodes: list[int], sizes: Iterable[Expression | int | None]) -> list[set[int]]:
        """Removals to check: filters of a few of these channels, of nearly all, and so for each leaf of the sizes."""
        samples: list[set[int]] = []
        dependencies = [self._nodes_of([leaf]) for size in sizes if size is not None for leaf in leaves(size)]
        for some in (nodes, *dependencies):
            sets = {self.solver.exists(when_carried(node)) for node in some if node > ZERO} - {None}
            samples += _trials(sorted((s for s in sets if s is not None), key=min))
        return samples

    def _rectangular(self, layout: Layout, removed: set[int], trial: Counted) -> bool:
        """Whether whole hyperplanes along one dimension are removed, and the sizes are right then."""
        nodes = layout.nodes.reshape(-1).tolist()
        known = {node: self._gone([node], removed) for node in set(nodes)}  # a node is at many places of a layout
        flat = [known[node] for node in nodes]
        gone = torch.tensor(flat).view(layout.nodes.shape)
        if not bool(gone.any()):
            return self._sizes_fit(layout, None, [], removed, trial)
        for dim in _candidates(layout):
            along = gone.movedim(dim, 0).reshape(gone.shape[dim], -1)
            # True for more than one dimension only if everything is removed.
            whole = bool((along == along[:, :1]).all())
            if whole and self._sizes_fit(layout, dim, rows_along(layout.nodes, [dim]), removed, trial):
                return True
        return False

    # --- counts ------------------------------------------------------------------------------------------------------

    def _count(self, count: Count) -> None:
        """Find attributes that make a size the number of its rows, whichever are removed."""
        rows = [list(row) for row in count.rows]
        options = list(countings(count.size, rows))
        plain = [option for option in options if isinstance(option[0], Attribute)]
        trial = None
        for tried in (plain, options) if len(plain) < len(options) else (plain,):
            trial = trial or self._agreement(rows, tried, lambda out, trial: self._count_fits(count, out, trial))
        self._register(trial or {}, count.reason)

    def _count_fits(self, count: Count, removed: set[int], trial: Counted) -> bool:
        """Whether the size is still the number of rows without these filters."""
        gone = sum(self._gone(row, removed) for row in count.rows)
        return self._size(count.size, removed, trial) == self._size(count.size, set(), trial) - gone

    def _count_violated(self, count: Count) -> bool:
        nodes = [node for row in count.rows for node in row]
        for removed in self._samples(nodes, [count.size]):
            if not self._count_fits(count, removed, {}):
                self._freeze(nodes, [count.size], count.reason)
                return True
        return False

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _number_violated(self, expression: Expression, reason: str) -> bool:
        """Freeze the channels on which a number depends, if it is not the same without some of them."""
        for removed in self._samples([], [expression]):
            if self._size(expression, removed, {}) != evaluate(expression, full):
                self._freeze([], [expression], reason)
                return True
        return False


def _candidates(layout: Layout) -> list[int]:
    return [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1 and d not in layout.rigid]


def _computes(layout: Layout) -> bool:
    """Whether a size is computed from attributes: what those count is decided best after plain attributes are."""
    sizes = (size for size in layout.sizes if isinstance(size, Arithmetic))
    return any(isinstance(leaf, Attribute) for size in sizes for leaf in leaves(size))


def _joined_rows(first: Rows, second: Rows) -> Rows:
    return [list({*one, *other}) for one, other in zip(first, second, strict=True)]


def _trials(sets: Sequence[Iterable[int]]) -> list[set[int]]:
    """Removals to try: a few of the sets one by one, and all but the first together."""
    if not sets:
        return []
    return [*map(set, sets[:: max(1, len(sets) // 3)]), set(sets[-1]), set().union(*sets[1:]) - set(sets[0])]


def countings(size: Expression | int | None, rows: Rows) -> Iterator[Counting]:
    """Possible counts of a size's attributes, if the size is the number of these rows.

    The left part of a sum counts the first rows. A factor of a product counts blocks of rows, or rows at a fixed
    distance from each other.
    """
    if isinstance(size, Attribute):
        if size.value == len(rows):
            yield size, rows
    elif isinstance(size, Dimension):
        if len(size.nodes) == len(rows):
            yield size, [row + own for row, own in zip(rows, size.nodes.tolist(), strict=True)]
    elif isinstance(size, Arithmetic) and evaluate(size, full) == len(rows):
        if size.function is operator.add:
            first = evaluate(size.left, full)
            yield from countings(size.left, rows[:first])
            yield from countings(size.right, rows[first:])
        elif size.function is operator.mul:
            for factor in (size.left, size.right):
                number = evaluate(factor, full)
                if number > 1:
                    length = len(rows) // number
                    yield from countings(factor, [_joined(rows[i * length : (i + 1) * length]) for i in range(number)])
                    yield from countings(factor, [_joined(rows[i::number]) for i in range(number)])


def countings_along(layout: Layout, dim: int) -> Iterator[Counting]:
    """Possible counts of the attributes in the sizes of a layout, if channels are removed along one of its dimensions.

    A dividend, as `self.dim` in `view(..., self.heads, self.dim // self.heads)`, may count along several neighbouring
    dimensions.
    """
    yield from countings(layout.sizes[dim], rows_along(layout.nodes, [dim]))
    dims = [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1]
    runs = [dims[i:j] for i in range(len(dims)) for j in range(i + 1, len(dims) + 1) if dim in dims[i:j]]
    for dividend in (dividend for size in layout.sizes for dividend in _dividends(size)):
        for run in runs:
            if math.prod(layout.nodes.shape[d] for d in run) == evaluate(dividend, full):
                yield from countings(dividend, rows_along(layout.nodes, run))


def rows_along(nodes: Tensor, dims: Sequence[int]) -> Rows:
    """The nodes at each combination of indices along these dimensions."""
    front = nodes.movedim(list(dims), list(range(len(dims))))
    rows: Rows = front.reshape(math.prod(front.shape[: len(dims)]), -1).tolist()
    return rows


def _dividends(size: Expression | int | None) -> Iterator[Expression | int]:
    if isinstance(size, Arithmetic):
        if size.function is operator.floordiv:
            yield size.left
        yield from _dividends(size.left)
        yield from _dividends(size.right)


def _joined(rows: Rows) -> list[int]:
    return [node for row in rows for node in row]
