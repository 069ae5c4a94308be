"""Write the graph: number the units, list the events, and spell out slices, ports, attributes and costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slimstart.costs import CostTable, Factor, Polynomial, Term
from slimstart.graph.channels import ChannelGraph, ChannelGroup, Port, Slice
from slimstart.graph.ledger import Presence, PortNote, when_carried, when_live
from slimstart.graph.sizes import Attribute

if TYPE_CHECKING:
    from slimstart.graph.solve import Solver


class Tables:
    """Events, axes and factors, each distinct one once."""

    def __init__(self, solver: Solver, unit_of: dict[int, int]) -> None:
        self.solver = solver
        self.unit_of = unit_of
        self.events: dict[frozenset[int], int] = {}
        self.axes: dict[tuple[int, ...], int] = {}
        self.factors: dict[tuple[int, ...], int] = {}

    def event(self, presence: Presence) -> int:
        """The event on which a channel depends; -1 if it always exists."""
        roots = self.solver.exists(presence)
        if roots is None:
            return -1
        return self.events.setdefault(frozenset(self.unit_of[root] for root in roots), len(self.events))

    def axis(self, presences: Iterable[Presence]) -> int | None:
        """The axis of these channels; None if all of them always exist."""
        events = tuple(map(self.event, presences))
        if all(event < 0 for event in events):
            return None
        return self.axes.setdefault(events, len(self.axes))

    def term(self, coefficient: int, factors: Iterable[Sequence[Presence]]) -> Term | int:
        """A cost term, or a plain number where nothing of it can change."""
        chosen = []
        for presences in factors:
            events = tuple(map(self.event, presences))
            if all(event < 0 for event in events):
                coefficient *= len(events)
            else:
                chosen.append(self.factors.setdefault(events, len(self.factors)))
        return Term(coefficient, tuple(chosen)) if chosen else coefficient

    def padded_events(self) -> Tensor:
        width = max(map(len, self.events), default=1)
        rows = [sorted(units) + [-1] * (width - len(units)) for units in self.events]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)

    def factor_list(self) -> tuple[Factor, ...]:
        factors = []
        for events in self.factors:
            counts = Counter(events)
            offset = counts.pop(-1, 0)
            kinds = (torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values()), dtype=torch.int64))
            factors.append(Factor(offset, *kinds))
        return tuple(factors)


def _polynomial(terms: Iterable[Term | int]) -> Polynomial:
    constant, kept = 0, Counter[tuple[int, ...]]()
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            kept[tuple(sorted(term.factors))] += term.coefficient
    return Polynomial(constant, tuple(Term(coefficient, factors) for factors, coefficient in kept.items()))


def layer_name(parameter: str) -> str:
    """`layer1.conv.weight` -> `layer1.conv`; a parameter of another name is its own layer."""
    return parameter.removesuffix(".weight") if parameter.endswith(".weight") else parameter


def write_graph(
    solver: Solver, groups: dict[int, int], attributes: dict[Attribute, list[Presence]], model: nn.Module
) -> ChannelGraph:
    """The graph, from what the solver found; `groups` maps every root atom that can go to its group."""
    from slimstart.graph.solve import index_presences

    ledger, find = solver.ledger, solver.atoms.find
    roots = sorted(groups, key=lambda root: (groups[root], root))
    unit_of = {root: unit for unit, root in enumerate(roots)}
    tables = Tables(solver, unit_of)

    tensors: dict[str, list[Slice]] = defaultdict(list)
    sizes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    dimensions: dict[str, dict[int, list[Presence]]] = defaultdict(dict)
    for name, dim in ledger.entries:
        channels = index_presences(ledger, name, dim)
        presences = [channels[i][0] if i in channels else 0 for i in range(sizes[name][dim])]
        if (axis := tables.axis(presences)) is not None:
            tensors[name].append(Slice(dim, axis))
            dimensions[name][dim] = presences
    reads = _ports(tables, ledger.reads)
    writes = _ports(tables, ledger.writes)
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for (module, attribute), presences_ in ledger.layer_attributes.items():
        if (axis := tables.axis(presences_)) is not None:
            counted[module, attribute] = (axis, len(presences_))
    for leaf, presences in attributes.items():
        if (axis := tables.axis(presences)) is not None:
            counted[leaf.module, leaf.name] = (axis, leaf.value)

    flops = [(tables.term(note.coefficient, note.factors), note) for note in ledger.costs]
    params: list[Term | int] = []
    for name, parameter in model.named_parameters():
        cut = dimensions.get(name, {})
        rest = 1
        for dim, size in enumerate(parameter.shape):
            rest *= 1 if dim in cut else size
        params.append(tables.term(rest, cut.values()))
    dense = [note.coefficient * _product(map(len, note.factors)) for _, note in flops]
    shrinking = sum(d for d, (term, _) in zip(dense, flops, strict=True) if isinstance(term, Term))

    filters = {}
    members: dict[int, list[str]] = defaultdict(list)
    unit_filters = [0] * len(roots)
    for (parameter, _), atoms in ledger.writers.items():
        units = [unit_of.get(find(atom), -1) for atom in atoms]
        filters[layer_name(parameter)] = torch.tensor(units, dtype=torch.int64)
        for unit in units:
            if unit >= 0:
                unit_filters[unit] += 1
        for group in {groups[roots[unit]] for unit in units if unit >= 0}:
            members[group].append(layer_name(parameter))
    labels = sorted(members)
    unit_group = torch.tensor([labels.index(groups[root]) for root in roots], dtype=torch.int64)
    costs = CostTable(
        unit_group=unit_group,
        unit_filters=torch.tensor(unit_filters, dtype=torch.int64),
        events=tables.padded_events(),
        factors=tables.factor_list(),
        flops=_polynomial(term for term, _ in flops),
        params=_polynomial(params),
    )
    found = []
    for number, label in enumerate(labels):
        units = [unit for unit, root in enumerate(roots) if groups[root] == label]
        layers = tuple(dict.fromkeys(members[label]))
        total = sum(unit_filters[unit] for unit in units)
        found.append(ChannelGroup(layers[0], range(units[0], units[-1] + 1), layers, total))
        assert len(units) == len(found[number].units)
    return ChannelGraph(
        coupling=ledger.coupling,
        groups=tuple(found),
        tensors={name: tuple(slices) for name, slices in tensors.items()},
        axes=tuple(torch.tensor(axis, dtype=torch.int64) for axis in tables.axes),
        reads=reads,
        writes=writes,
        attributes=counted,
        filters=filters,
        left_whole=_left_whole(solver, tensors),
        costs=costs,
        coverage=shrinking / max(1, sum(dense)),
    )


def _ports(tables: Tables, notes: dict[str, PortNote]) -> dict[str, Port]:
    """Ports of layers that see other channels than the tensor carries."""
    ports = {}
    for module, note in notes.items():
        carried = tables.axis(map(when_carried, note.nodes))
        live = tables.axis(map(when_live, note.nodes))
        if carried != live:
            always = tables.axes.setdefault((-1,) * len(note.nodes), len(tables.axes))
            ports[module] = Port(note.dim, always if carried is None else carried, always if live is None else live)
    return ports


def _left_whole(solver: Solver, tensors: dict[str, list[Slice]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for (parameter, _), atoms in solver.ledger.writers.items():
        roots = {solver.atoms.find(atom) for atom in atoms}
        if roots <= solver.frozen.keys():
            reasons[layer_name(parameter)] = solver.frozen[min(roots)]
    for name, reason in solver.ledger.unfollowed.items():
        if name not in tensors:
            reasons.setdefault(layer_name(name), reason)
    return reasons


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
