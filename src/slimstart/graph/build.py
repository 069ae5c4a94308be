"""From the constraints of a trace to a `ChannelGraph`.

In this order: carriers that need one mask tie their writers; required channels are frozen; indices that must exist
together are tied; reshapes choose a dimension along which channels may be removed; every layer is guaranteed a channel;
the filters that remain are numbered as units, and slices, ports, attributes and costs are listed.
"""

from __future__ import annotations

import collections
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from slimstart.costs import CostTable, Factor, LayerCost, Polynomial, Term
from slimstart.graph.channels import ChannelGraph, ChannelGroup, Counter, Port, Slice
from slimstart.graph.constraints import (
    Constraints,
    PortNodes,
    Presence,
    when_carried,
    when_live,
)
from slimstart.graph.removable import Found, find_removable
from slimstart.graph.reshapes import ReshapeSolver
from slimstart.graph.sizes import Attribute
from slimstart.graph.solver import Solver, axis_presences


def build_graph(constraints: Constraints, model: nn.Module, reasons: Mapping[str, str]) -> ChannelGraph:
    """The graph of a traced model.

    Args:
        constraints: constraints that the trace has recorded.
        model: the model that was traced.
        reasons: {name of a module or parameter: why its filters are not prunable}.
    """
    solver = Solver(constraints)
    solver.keep(reasons)
    solver.apply_constraints()
    reshapes = ReshapeSolver(solver)
    reshapes.solve()
    solver.freeze_unwritten()  # only now: reshapes tie such channels to those of parameters
    sizes = {name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())}
    tensors = {
        (name, dim): axis_presences(constraints, name, dim, sizes[name][dim]) for name, dim in constraints.entries
    }
    # Not only parameters need a channel: streams, the inputs of operations that cost, and what is normalised over.
    axes = dict.fromkeys(tensors.values())
    for port in (*constraints.reads.values(), *constraints.writes.values()):
        axes[tuple(map(when_carried, port.nodes))] = None
    for cost in constraints.costs:
        axes.update(dict.fromkeys(cost.factors))
    for _, presences in (constraints.over_channels | constraints.over_rows).values():
        axes[presences] = None
    groups = solver.guarantee_channels(list(axes))
    removable = find_removable(solver, model, reasons)
    return _write_graph(solver, groups, tensors, reshapes.attribute_presences(), model, removable)


class _Tables:
    """Events, axes and factors, each distinct one once, in the order in which they are first needed."""

    def __init__(self, solver: Solver, unit_of: dict[int, int]) -> None:
        self.solver = solver
        self.unit_of = unit_of
        self.events: dict[frozenset[int], int] = {}
        self.axes: dict[tuple[int, ...], int] = {}
        self.factors: dict[tuple[int, ...], int] = {}
        # Caches: the weight, bias and statistics of a layer all have the same channels.
        self._event_table = [self.event(roots) for roots in solver.exists_table()]
        self._events_of: dict[tuple[Presence, ...], tuple[int, ...]] = {}
        self._carried_axis_of: dict[tuple[Presence, ...], int] = {}
        self._carried_table = [self.event(roots) for roots in solver.carried_without_ports()]

    def event(self, roots: frozenset[int] | None) -> int:
        """The event on which a channel depends, by the filters that write it; -1 if it always exists."""
        return -1 if roots is None else self.events.setdefault(roots, len(self.events))

    def _events(self, presences: tuple[Presence, ...]) -> tuple[int, ...]:
        if presences not in self._events_of:
            self._events_of[presences] = tuple(map(self._event_table.__getitem__, presences))
        return self._events_of[presences]

    def axis(self, presences: tuple[Presence, ...]) -> int | None:
        """The axis of these channels; None if all of them always exist."""
        events = self._events(presences)
        return None if max(events, default=-1) < 0 else self.axes.setdefault(events, len(self.axes))

    def carried_axis(self, presences: tuple[Presence, ...]) -> int:
        """The axis of the tensors that carry these channels in a network without ports (`compact(..., plain=True)`)."""
        if presences not in self._carried_axis_of:
            events = tuple(self._carried_table[presence // 2] for presence in presences)
            self._carried_axis_of[presences] = self.axes.setdefault(events, len(self.axes))
        return self._carried_axis_of[presences]

    def term(self, coefficient: int, factors: Iterable[tuple[Presence, ...]]) -> Term | int:
        """A cost term, or a number where none of the channels can be removed."""
        chosen = []
        for presences in factors:
            events = self._events(presences)
            if max(events, default=-1) < 0:
                coefficient *= len(events)
            else:
                chosen.append(self.factors.setdefault(events, len(self.factors)))
        return Term(coefficient, tuple(chosen)) if chosen else coefficient

    def padded_events(self) -> Tensor:
        width = max(map(len, self.events), default=1)
        rows = [sorted(self.unit_of[r] for r in roots) + [-1] * (width - len(roots)) for roots in self.events]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)

    def factor_list(self) -> tuple[Factor, ...]:
        factors = []
        for events in self.factors:
            counts = collections.Counter(events)
            offset = counts.pop(-1, 0)
            kinds = (
                torch.tensor(list(counts), dtype=torch.int64),
                torch.tensor(list(counts.values()), dtype=torch.int64),
            )
            factors.append(Factor(offset, *kinds))
        return tuple(factors)


def _polynomial(terms: Iterable[Term | int]) -> Polynomial:
    constant, kept = 0, collections.Counter[tuple[int, ...]]()
    for term in terms:
        if isinstance(term, int):
            constant += term
        else:
            kept[tuple(sorted(term.factors))] += term.coefficient
    return Polynomial(constant, tuple(Term(coefficient, factors) for factors, coefficient in kept.items()))


def _write_graph(
    solver: Solver,
    groups: dict[int, int],
    channels: dict[tuple[str, int], tuple[Presence, ...]],
    attributes: dict[Attribute, tuple[Presence, ...]],
    model: nn.Module,
    removable: tuple[list[Found], dict[str, str]],
) -> ChannelGraph:
    """The graph, from what the solver found.

    Args:
        groups: the group of every root atom that can be dropped.
        channels: for dimensions of named tensors, when each index exists.
        attributes: for attributes of the user's modules, when each of the channels that they count exists.
        removable: layers that can go as a whole, and why others cannot.
    """
    constraints, find = solver.constraints, solver.atoms.find
    # Units of a group have consecutive numbers, so that a group is a range.
    roots = sorted(groups, key=lambda root: (groups[root], root))
    unit_of = {root: unit for unit, root in enumerate(roots)}
    tables = _Tables(solver, unit_of)

    tensors: dict[str, list[Slice]] = defaultdict(list)
    dimensions: dict[str, dict[int, tuple[Presence, ...]]] = defaultdict(dict)
    for (name, dim), presences in channels.items():
        if (axis := tables.axis(presences)) is not None:
            tensors[name].append(Slice(dim, axis, tables.carried_axis(presences)))
            dimensions[name][dim] = presences
    reads = _ports(tables, constraints.reads)
    writes = _ports(tables, constraints.writes)
    counted: dict[tuple[str, str], Counter] = {}
    layers = {key: (found, len(found)) for key, found in constraints.layer_attributes.items()}
    users = {(leaf.module, leaf.name): (found, leaf.value) for leaf, found in attributes.items()}
    for key, (found, dense) in (layers | users).items():
        if (axis := tables.axis(found)) is not None:
            counted[key] = Counter(axis, tables.carried_axis(found), dense)
    over_channels = {}
    for call, (dim, presences) in (constraints.over_channels | constraints.over_rows).items():
        if (axis := tables.axis(presences)) is not None:
            over_channels[call] = (dim, axis)

    flops = [(tables.term(cost.coefficient, cost.factors), cost) for cost in constraints.costs]
    params: dict[str, Term | int] = {}
    for name, parameter in model.named_parameters():
        cut = dimensions.get(name, {})
        rest = 1
        for dim, size in enumerate(parameter.shape):  # dimensions that cannot shrink are a constant factor
            rest *= 1 if dim in cut else size
        params[name] = tables.term(rest, cut.values())
    totals = [cost.coefficient * math.prod(map(len, cost.factors)) for _, cost in flops]
    shrinking = sum(d for d, (term, _) in zip(totals, flops, strict=True) if isinstance(term, Term))

    filters = {}
    members: dict[int, list[str]] = defaultdict(list)
    unit_filters = [0] * len(roots)
    for writer, atoms in constraints.writers.items():
        kept = [unit_of.get(find(atom), -1) for atom in atoms]
        filters[constraints.layers[writer]] = torch.tensor(kept, dtype=torch.int64)
        for unit in kept:
            if unit >= 0:
                unit_filters[unit] += 1
        for group in {groups[roots[unit]] for unit in kept if unit >= 0}:
            members[group].append(constraints.layers[writer])
    labels = sorted(members)
    position = {label: number for number, label in enumerate(labels)}
    unit_group = torch.tensor([position[groups[root]] for root in roots], dtype=torch.int64)
    removable_layers, not_removable = removable
    reach = _reach(constraints, model)
    layer_costs = []
    for layer, ties in ((one.layer, one.ties) for one in removable_layers):
        own = [units[units >= 0] for name, units in filters.items() if layer.has(name)]
        layer_costs.append(
            LayerCost(
                unit_filters=torch.bincount(torch.cat([torch.zeros(0, dtype=torch.int64), *own]), minlength=len(roots)),
                flops=_polynomial(term for term, cost in flops if layer.has(cost.module)),
                params=_polynomial(term for name, term in params.items() if layer.has(name)),
                outputs=torch.tensor([unit_of[atom] for atom, _ in ties], dtype=torch.int64),
                inputs=torch.tensor([tables.event(solver.exists(when)) for _, when in ties], dtype=torch.int64),
                reach=sum(own for name, own in reach.items() if layer.has(name)),
            )
        )
    costs = CostTable(
        unit_group=unit_group,
        unit_filters=torch.tensor(unit_filters, dtype=torch.int64),
        events=tables.padded_events(),
        factors=tables.factor_list(),
        flops=_polynomial(term for term, _ in flops),
        params=_polynomial(params.values()),
        layers=tuple(layer_costs),
        reach=sum(reach.values()),
    )
    channel_groups = []
    start = 0
    for label, size in zip(labels, torch.bincount(unit_group).tolist() if roots else [], strict=True):
        names = tuple(dict.fromkeys(members[label]))
        units = range(start, start + size)  # roots are sorted by group
        channel_groups.append(ChannelGroup(names[0], units, names, sum(unit_filters[start : start + size])))
        start += size
    return ChannelGraph(
        coupling=constraints.coupling,
        groups=tuple(channel_groups),
        tensors={name: tuple(slices) for name, slices in tensors.items()},
        axes=tuple(torch.tensor(axis, dtype=torch.int64) for axis in tables.axes),
        reads=reads,
        writes=writes,
        attributes=counted,
        filters=filters,
        not_prunable=_not_prunable(solver, tensors, model),
        costs=costs,
        coverage=shrinking / max(1, sum(totals)),
        layers=tuple(one.layer for one in removable_layers),
        not_removable=not_removable,
        norms=constraints.norms,
        over_channels=over_channels,
        weights={
            name: min(dims)
            for name, dims in constraints.inputs_of_weights.items()
            if len(dims) == 1 and name not in constraints.used_otherwise
        },
    )


def _reach(constraints: Constraints, model: nn.Module) -> dict[str, float]:
    """By how much each convolution widens what one output sees, as a fraction of the image."""
    modules, found = dict(model.named_modules()), defaultdict[str, float](float)
    for call in constraints.flows[False].calls:
        layer = modules[call.module]
        if isinstance(layer, _ConvNd) and not layer.transposed and call.before is not None:
            num_dims = len(layer.kernel_size)
            parts = zip(layer.kernel_size, layer.dilation, call.before.shape[-num_dims:], strict=True)
            found[call.module] += sum((k - 1) * d / size for k, d, size in parts) / num_dims
    return found


def _ports(tables: _Tables, found: dict[str, PortNodes]) -> dict[str, Port]:
    """Ports of layers that read or write other channels than the tensor carries."""
    ports = {}
    for module, port in found.items():
        carried = tables.axis(tuple(map(when_carried, port.nodes)))
        live = tables.axis(tuple(map(when_live, port.nodes)))
        if carried != live:
            # A side that cannot shrink has no axis of its own, but the port needs one: every entry always exists.
            always = tables.axes.setdefault((-1,) * len(port.nodes), len(tables.axes))
            ports[module] = Port(port.dim, always if carried is None else carried, always if live is None else live)
    return ports


def _not_prunable(solver: Solver, tensors: dict[str, list[Slice]], model: nn.Module) -> dict[str, str]:
    """Layers without a filter that can be dropped, and modules and parameters that were not followed, with reasons."""
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    reasons: dict[str, str] = {}
    for writer, atoms in solver.constraints.writers.items():
        roots = {solver.atoms.find(atom) for atom in atoms}
        if roots <= solver.frozen.keys():
            reasons[solver.constraints.layers[writer]] = solver.frozen[min(roots)]
    for name, reason in solver.constraints.unfollowed.items():
        if name and name in known and name not in tensors:
            reasons.setdefault(name.removesuffix(".weight"), reason)
    return reasons
