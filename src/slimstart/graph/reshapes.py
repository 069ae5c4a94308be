"""Reshapes: along which dimension may channels go?

Say a forward views 32 channels as (4, 8). After some channels are gone, the user's own code views the rest, with the
sizes it computes then. That is right only if what is gone is whole rows or whole columns, and if the sizes follow: one
computed from `x.shape` follows by itself, one read or computed from attributes of a module follows if one of them is
changed too, a literal never does. For every such place we take the first dimension for which this works, tie the
channels of each of its hyperplanes, and note the attributes; where none works, the channels stay whole.

Ties make the sizes right for one removal as for another. What was decided is tried all the same, on single removals and
on nearly everything at once, because a later tie may undo it.
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
Counting = tuple[Attribute, Rows]
"""An attribute, and for each of the things that it may count their nodes."""
Slots = dict[Attribute, Rows]


class LayoutSolver:
    """Chooses, ties, and remembers which attributes have to change."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.slots: Slots = {}  # attribute -> for each of the things it counts, their nodes
        self.decided: dict[Attribute, list[Layout]] = defaultdict(list)  # attribute -> layouts with sizes by it

    def solve(self) -> None:
        ledger = self.solver.ledger
        # Those with fewer choices first, so that the others can agree with them.
        for layout in sorted(ledger.layouts, key=lambda one: (_computes(one), len(_candidates(one)))):
            self._choose(layout)
            for leaf in (leaf for size in layout.sizes if size is not None for leaf in leaves(size)):
                if isinstance(leaf, Attribute):
                    self.decided[leaf].append(layout)
        for count in ledger.counts:
            self._count(count)
        while any([self._violated(layout) for layout in ledger.layouts] + [self._miscounts(c) for c in ledger.counts]):
            pass

    def attribute_presences(self) -> dict[Attribute, tuple[Presence, ...]]:
        """For every attribute to change, when each of the things that it counts exists."""
        return {attribute: tuple(when_carried(row[0]) for row in rows) for attribute, rows in self.slots.items()}

    # --- what is gone, and what a size is then -----------------------------------------------------------------------

    def _gone(self, nodes: Iterable[int], removed: set[int]) -> bool:
        """Whether all of these channels are gone once the given filters are."""
        for node in nodes:
            atoms = self.solver.exists(when_carried(node)) if node > ZERO else None
            if atoms is None or not atoms <= removed:
                return False
        return True

    def _size(self, expression: Expression | int, removed: set[int], trial: Slots) -> int:
        """What a size is without these filters; -1 if it is rounded, which is right for some masks only."""

        def leaf(it: Dimension | Attribute) -> int:
            if isinstance(it, Dimension):
                return sum(not self._gone(row, removed) for row in it.nodes.tolist())
            rows = trial.get(it, self.slots.get(it))
            return it.value if rows is None else it.value - sum(self._gone(row, removed) for row in rows)

        values = {it: leaf(it) for it in leaves(expression)}
        if all(value == full(it) for it, value in values.items()):
            return evaluate(expression, full)
        try:
            evaluate(expression, full, exact=True)
            return evaluate(expression, values.__getitem__, exact=True)
        except ArithmeticError:
            return -1

    def _removable(self, nodes: Iterable[int]) -> set[int]:
        """The filters behind these channels, if they can go at all."""
        removed: set[int] = set()
        for node in nodes:
            removed |= (self.solver.exists(when_carried(node)) if node > ZERO else None) or set()
        return removed

    # --- which attributes to change ----------------------------------------------------------------------------------

    def _agreement(
        self, rows: Rows, options: Iterable[Counting], fits: Callable[[set[int], Slots], bool]
    ) -> Slots | None:
        """What attributes have to count for sizes to fit whichever rows go; None if that cannot be done.

        Of all the ways the one that ties least, counting what it can: what is counted is right for every mask.
        """
        best, least = None, math.inf
        usable = [option for option in options if option[0] not in self.solver.fixed_attributes]
        for number in (1, 2, 0):
            for chosen in itertools.combinations(usable, number):
                trial: Slots = {}
                for attribute, counted in chosen:
                    before = trial.get(attribute, self.slots.get(attribute))
                    trial[attribute] = counted if before is None else _side_by_side(before, counted)
                cost, parts = self._tied([*rows, *itertools.chain(*trial.values())])
                if cost and len(parts) == 1:
                    continue  # everything would go at once, which is never
                if cost < least and all(fits(out, trial) and self._leaves_alone(out, trial) for out in _tries(parts)):
                    best, least = trial, cost
                if least == 0:
                    return best
        return best

    def _leaves_alone(self, removed: set[int], trial: Slots) -> bool:
        """Whether attributes that count for the first time do not undo what was decided while they did not."""
        before = (layout for attribute in trial if attribute not in self.slots for layout in self.decided[attribute])
        return all(self._rectangular(layout, removed, trial) for layout in before)

    def _tied(self, blocks: Rows) -> tuple[int, list[set[int]]]:
        """If the channels of each block went together: how many ties would be new, and the filters that go at once."""
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

    def _register(self, trial: Slots, reason: str) -> None:
        """The attributes count this from now on, which so goes as a whole."""
        for attribute, slots in trial.items():
            self.slots.setdefault(attribute, slots)
            for slot in slots:
                self.solver.equalise(map(when_carried, slot), reason)

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _choose(self, layout: Layout) -> None:
        """Tie the channels along the first dimension that works."""
        nodes = layout.nodes.reshape(-1).tolist()
        if not self._removable([*nodes, *self._nodes_behind(layout.sizes)]):
            return
        candidates = _candidates(layout)
        rows = {dim: rows_along(layout.nodes, [dim]) for dim in candidates}
        # A dimension whose hyperplanes are units already costs nothing.
        candidates.sort(
            key=lambda dim: sum(len({self.solver.exists(when_carried(n)) for n in row}) > 1 for row in rows[dim])
        )
        for dim in candidates:

            def fits(removed: set[int], trial: Slots, dim: int = dim) -> bool:
                return self._sizes_fit(layout, dim, rows[dim], removed, trial)

            trial = self._agreement(rows[dim], countings_along(layout, dim), fits)
            if trial is not None:
                for row in rows[dim]:
                    self.solver.equalise(map(when_carried, row), layout.reason)
                return self._register(trial, layout.reason)
        return self._give_up(nodes, layout.sizes, layout.reason)

    def _sizes_fit(self, layout: Layout, dim: int | None, rows: Rows, removed: set[int], trial: Slots) -> bool:
        """Whether all sizes come out right once these filters are gone: along `dim` fewer, elsewhere the same."""
        gone = sum(self._gone(row, removed) for row in rows)
        for other, expression in enumerate(layout.sizes):
            if expression is not None:
                before, after = (self._size(expression, s, trial) for s in (set[int](), removed))
                if after != before - (gone if other == dim else 0):
                    return False
        return True

    def _give_up(self, nodes: Iterable[int], sizes: Iterable[Expression | int | None], reason: str) -> None:
        """Freeze the channels of a reshape that cannot follow, and those on which its sizes depend."""
        self.solver.freeze_nodes([*nodes, *self._nodes_behind(sizes)], reason)

    def _nodes_behind(self, sizes: Iterable[Expression | int | None]) -> list[int]:
        nodes: list[int] = []
        for leaf in (leaf for size in sizes if size is not None for leaf in leaves(size)):
            if isinstance(leaf, Dimension):
                nodes += leaf.nodes.reshape(-1).tolist()
            else:
                nodes += [node for row in self.slots.get(leaf, []) for node in row]
        return nodes

    def _violated(self, layout: Layout) -> bool:
        """Freeze the channels of a layout that no longer works; returns whether something changed."""
        nodes = layout.nodes.reshape(-1).tolist()
        for removed in self._samples(nodes, layout.sizes):
            if not self._rectangular(layout, removed, {}):
                self._give_up(nodes, layout.sizes, layout.reason)
                return True
        return False

    def _samples(self, nodes: list[int], sizes: Iterable[Expression | int | None]) -> list[set[int]]:
        """The filters behind a few of these channels, behind nearly all, and so for each leaf of the sizes."""
        samples: list[set[int]] = []
        behind = [self._nodes_behind([leaf]) for size in sizes if size is not None for leaf in leaves(size)]
        for some in (nodes, *behind):
            sets = {self.solver.exists(when_carried(node)) for node in some if node > ZERO} - {None}
            samples += _tries(sorted((s for s in sets if s is not None), key=min))
        return samples

    def _rectangular(self, layout: Layout, removed: set[int], trial: Slots) -> bool:
        """Whether what is gone is whole hyperplanes along one dimension, and the sizes say the same."""
        known: dict[int, bool] = {}
        flat = [known.setdefault(n, self._gone([n], removed)) for n in layout.nodes.reshape(-1).tolist()]
        gone = torch.tensor(flat).view(layout.nodes.shape)
        if not bool(gone.any()):
            return self._sizes_fit(layout, None, [], removed, trial)
        for dim in _candidates(layout):
            along = gone.movedim(dim, 0).reshape(gone.shape[dim], -1)
            whole = bool((along == along[:, :1]).all())  # for more than one dimension only if everything is gone
            if whole and self._sizes_fit(layout, dim, rows_along(layout.nodes, [dim]), removed, trial):
                return True
        return False

    # --- counts ------------------------------------------------------------------------------------------------------

    def _count(self, count: Count) -> None:
        rows = [list(row) for row in count.rows]
        trial = self._agreement(
            rows, countings(count.size, rows), lambda removed, trial: self._counts(count, removed, trial)
        )
        self._register(trial or {}, count.reason)

    def _counts(self, count: Count, removed: set[int], trial: Slots) -> bool:
        """Whether the size is still the number of rows once these filters are gone."""
        gone = sum(self._gone(row, removed) for row in count.rows)
        return self._size(count.size, removed, trial) == self._size(count.size, set(), trial) - gone

    def _miscounts(self, count: Count) -> bool:
        nodes = [node for row in count.rows for node in row]
        for removed in self._samples(nodes, [count.size]):
            if not self._counts(count, removed, {}):
                self._give_up(nodes, [count.size], count.reason)
                return True
        return False


def _candidates(layout: Layout) -> list[int]:
    return [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1 and d not in layout.rigid]


def _computes(layout: Layout) -> bool:
    """Whether a size is computed from attributes; the sizes that are plain attributes say what those count."""
    sizes = (size for size in layout.sizes if isinstance(size, Arithmetic))
    return any(isinstance(leaf, Attribute) for size in sizes for leaf in leaves(size))


def _side_by_side(first: Rows, second: Rows) -> Rows:
    return [list({*one, *other}) for one, other in zip(first, second, strict=True)]


def _tries(sets: Sequence[Iterable[int]]) -> list[set[int]]:
    """A few of these removals, and all of them but the first together."""
    if not sets:
        return []
    return [*map(set, sets[:: max(1, len(sets) // 3)]), set(sets[-1]), set().union(*sets[1:]) - set(sets[0])]


def countings(size: Expression | int | None, rows: Rows) -> Iterator[Counting]:
    """What the attributes of a size may count, if the size is the number of these rows.

    A sum counts its first part first. A factor of a product counts blocks, or rows that lie a fixed distance apart.
    """
    if isinstance(size, Attribute):
        if size.value == len(rows):
            yield size, rows
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
    """What the attributes in the sizes of a layout may count, if channels go along one of its dimensions.

    A dividend, as `self.dim` in `view(..., self.heads, self.dim // self.heads)`, counts along the neighbours too.
    """
    yield from countings(layout.sizes[dim], rows_along(layout.nodes, [dim]))
    dims = [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1]
    runs = [dims[i:j] for i in range(len(dims)) for j in range(i + 1, len(dims) + 1) if dim in dims[i:j]]
    for dividend in (dividend for size in layout.sizes for dividend in _dividends(size)):
        for run in runs:
            if math.prod(layout.nodes.shape[d] for d in run) == evaluate(dividend, full):
                yield from countings(dividend, rows_along(layout.nodes, run))


def rows_along(nodes: Tensor, dims: Sequence[int]) -> Rows:
    """The nodes at each index along these dimensions together."""
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
