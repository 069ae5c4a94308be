"""Reshapes: along which dimension may channels go?

Say a forward views 32 channels as (4, 8). After some channels are gone, the user's own code views the rest, with the
sizes it computes then. That is right only if what is gone is whole rows or whole columns, and if the sizes follow: one
computed from `x.shape` follows by itself, one read from an attribute of a module follows if the attribute is changed
too, a literal never does. For every such place we take the first dimension for which this works, tie the channels of
each of its hyperplanes, and note the attribute; where none works, the channels stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slimstart.graph.ledger import ZERO, Count, Layout, Presence, when_carried
from slimstart.graph.sizes import Attribute, Dimension, Expression, evaluate, leaves
from slimstart.graph.solver import Solver

Rows = list[list[int]]


class LayoutSolver:
    """Chooses, ties, and remembers which attributes have to change."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.slots: dict[Attribute, Rows] = {}  # attribute -> for each of the things it counts, their nodes

    def solve(self) -> None:
        ledger = self.solver.ledger
        # Those with fewer choices first, so that the others can agree with them.
        layouts = sorted(ledger.layouts, key=lambda one: len(_candidates(one)))
        chosen = [layout for layout in layouts if self._choose(layout)]
        for count in ledger.counts:
            self._count(count)
        while any([self._violated(layout) for layout in chosen] + [self._miscounts(c) for c in ledger.counts]):
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

    def _size(self, expression: Expression | int, removed: set[int], trial: dict[Attribute, Rows]) -> int:
        def leaf(it: Dimension | Attribute) -> int:
            if isinstance(it, Dimension):
                return sum(not self._gone(row, removed) for row in it.nodes.tolist())
            rows = trial.get(it, self.slots.get(it))
            return it.value if rows is None else it.value - sum(self._gone(row, removed) for row in rows)

        return evaluate(expression, leaf)

    def _removable(self, nodes: Iterable[int]) -> set[int]:
        """The filters behind these channels, if they can go at all."""
        removed: set[int] = set()
        for node in nodes:
            removed |= (self.solver.exists(when_carried(node)) if node > ZERO else None) or set()
        return removed

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _choose(self, layout: Layout) -> bool:
        """Tie the channels along the first dimension that works; returns whether any can still go."""
        nodes = layout.nodes.reshape(-1).tolist()
        if not self._removable([*nodes, *self._nodes_behind(layout.sizes)]):
            return False
        candidates = _candidates(layout)
        rows = {dim: _rows(layout.nodes, dim) for dim in candidates}
        # A dimension whose hyperplanes are units already costs nothing.
        candidates.sort(
            key=lambda dim: sum(len({self.solver.exists(when_carried(n)) for n in row}) > 1 for row in rows[dim])
        )
        for dim in candidates:
            expression = layout.sizes[dim]
            trial: dict[Attribute, Rows] = {}
            if isinstance(expression, Attribute) and expression not in self.solver.fixed_attributes:
                trial[expression] = self.slots.get(expression, rows[dim])
            probes = [self._removable(row) for row in (rows[dim][0], rows[dim][-1])]
            if all(self._sizes_fit(layout, dim, rows[dim], removed, trial) for removed in probes):
                for row in rows[dim]:
                    self.solver.equalise(map(when_carried, row), layout.reason)
                for attribute, slots in trial.items():
                    self._register(attribute, slots, rows[dim], layout.reason)
                return True
        self._give_up(nodes, layout.sizes, layout.reason)
        return False

    def _sizes_fit(
        self, layout: Layout, dim: int | None, rows: Rows, removed: set[int], trial: dict[Attribute, Rows]
    ) -> bool:
        """Whether all sizes come out right once these filters are gone: along `dim` fewer, elsewhere the same."""
        gone = sum(self._gone(row, removed) for row in rows)
        for other, expression in enumerate(layout.sizes):
            if expression is not None:
                before, after = (self._size(expression, s, trial) for s in (set[int](), removed))
                if after != before - (gone if other == dim else 0):
                    return False
        return True

    def _register(self, attribute: Attribute, slots: Rows, rows: Rows, reason: str) -> None:
        """The attribute counts these rows from now on; what it counted before goes along with them."""
        self.slots.setdefault(attribute, slots)
        if len(slots) != len(rows):
            return self.solver.freeze_nodes([n for row in (*slots, *rows) for n in row], reason)
        for slot, row in zip(slots, rows, strict=True):
            self.solver.equalise(map(when_carried, (*slot, *row)), reason)
        return None

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
        for removed in self._samples(nodes) + self._samples(self._nodes_behind(layout.sizes)):
            if not self._rectangular(layout, removed):
                self._give_up(nodes, layout.sizes, layout.reason)
                return True
        return False

    def _samples(self, nodes: Iterable[int]) -> list[set[int]]:
        """For a few of these channels, the filters without which they are gone."""
        sets = {self.solver.exists(when_carried(node)) for node in nodes if node > ZERO} - {None}
        ordered = sorted((s for s in sets if s is not None), key=min)
        return [set(s) for s in ordered[:: max(1, len(ordered) // 3)]]

    def _rectangular(self, layout: Layout, removed: set[int]) -> bool:
        """Whether what is gone is whole hyperplanes along one dimension, and the sizes say the same."""
        known: dict[int, bool] = {}
        flat = [known.setdefault(n, self._gone([n], removed)) for n in layout.nodes.reshape(-1).tolist()]
        gone = torch.tensor(flat).view(layout.nodes.shape)
        if not bool(gone.any()):
            return self._sizes_fit(layout, None, [], removed, {})
        for dim in _candidates(layout):
            along = gone.movedim(dim, 0).reshape(gone.shape[dim], -1)
            if bool((along == along[:, :1]).all()):
                return self._sizes_fit(layout, dim, _rows(layout.nodes, dim), removed, {})
        return False

    # --- counts ------------------------------------------------------------------------------------------------------

    def _count(self, count: Count) -> None:
        expression = count.size
        if isinstance(expression, Attribute) and expression not in self.solver.fixed_attributes:
            rows = [list(row) for row in count.rows]
            if expression.value == len(rows):
                self._register(expression, self.slots.get(expression, rows), rows, count.reason)

    def _miscounts(self, count: Count) -> bool:
        nodes = [node for row in count.rows for node in row]
        for removed in self._samples(nodes) + self._samples(self._nodes_behind([count.size])):
            gone = sum(self._gone(row, removed) for row in count.rows)
            if self._size(count.size, removed, {}) != self._size(count.size, set(), {}) - gone:
                self._give_up(nodes, [count.size], count.reason)
                return True
        return False


def _candidates(layout: Layout) -> list[int]:
    return [d for d in range(layout.nodes.dim()) if layout.nodes.shape[d] > 1 and d not in layout.rigid]


def _rows(nodes: Tensor, dim: int) -> Rows:
    rows: Rows = nodes.movedim(dim, 0).reshape(nodes.shape[dim], -1).tolist()
    return rows
