"""From a ledger to a graph: decide what is one unit, and write down what each unit owns and costs.

In order: (1) carriers that allow one mask only tie their writers; (2) whatever must stay, stays; (3) indices that must
exist together are made to; (4) reshapes choose a dimension along which channels may go; (5) every layer is guaranteed
a channel; (6) what is left are units, and the tables are written. Ties and freezes only ever grow, so the order decides
how good the result is, not whether it is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from slimstart.graph.build import write_graph
from slimstart.graph.channels import ChannelGraph
from slimstart.graph.constraints import CONSTANT, Ledger, Presence, UnionFind, when_carried
from slimstart.graph.reshapes import LayoutSolver
from slimstart.graph.solver import Solver, index_presences


def axis_presences(ledger: Ledger, name: str, dim: int, size: int) -> tuple[Presence, ...]:
    """When each index of a dimension of a named tensor exists; indices that nobody uses always do."""
    entries = ledger.entries[name, dim]
    if entries[0][0] == tuple(range(size)):
        return entries[0][1]
    channels = index_presences(ledger, name, dim)
    return tuple(channels[i][0] if i in channels else CONSTANT for i in range(size))


def _guarantee_channels(solver: Solver, axes: Sequence[Sequence[Presence]]) -> dict[int, int]:
    """Freeze as little as needed for every layer to have a channel; returns the group of every root atom.

    Filters of one parameter form a group, of which the mask keeps at least one. An axis that does not contain all of
    some group (half of a layer that is split in two) could still end up empty: there, one filter is kept for good.
    """
    ledger = solver.ledger
    while True:
        written = [
            sorted({root for root in map(solver.atoms.find, atoms) if root not in solver.frozen})
            for atoms in ledger.writers.values()
        ]
        together = UnionFind()
        together.parent = list(range(len(solver.atoms.parent)))
        for roots in written:
            for root in roots:
                together.union(root, roots[0])
        groups = {root: together.find(root) for roots in written for root in roots}
        members: dict[int, set[int]] = defaultdict(set)
        for root, group in groups.items():
            members[group].add(root)
        stable = True
        exists = solver.exists_table()
        for axis in axes:
            sets = {exists[presence] for presence in axis}
            if not sets or None in sets:
                continue
            roots_here: set[int] = set().union(*(s for s in sets if s is not None))
            if not any(members[groups[r]] <= roots_here for r in roots_here):
                solver.freeze([min(roots_here)], "a layer would be left without channels")
                stable = False
        if stable:
            return groups


def solve(ledger: Ledger, model: nn.Module, reasons: Mapping[str, str]) -> ChannelGraph:
    """Turn the notes of a trace into a graph; `reasons` are names to leave whole."""
    solver = Solver(ledger)
    solver.keep(reasons)
    solver.settle_notes()
    layouts = LayoutSolver(solver)
    layouts.solve()
    sizes = {name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())}
    tensors = {(name, dim): axis_presences(ledger, name, dim, sizes[name][dim]) for name, dim in ledger.entries}
    axes = dict.fromkeys(tensors.values())
    for note in (*ledger.reads.values(), *ledger.writes.values()):
        axes[tuple(map(when_carried, note.nodes))] = None
    for cost in ledger.costs:
        axes.update(dict.fromkeys(cost.factors))
    groups = _guarantee_channels(solver, list(axes))
    return write_graph(solver, groups, tensors, layouts.attribute_presences(), model)
