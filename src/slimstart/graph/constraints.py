"""What one run of a network writes down: channel nodes, who writes them, and what must be true of them.

Every activation carries a tensor of **node** ids of its own shape (dimensions along which nothing changes are kept at
length one). A node is a channel at a point of the network. It has

- a *live set*: the atoms (filters) that write it; `None` if something that is always on does. An atom is one index of
  a dimension of a parameter. Under filter coupling an addition unites live sets.
- a *carrier*: the physical channel. Tensors that the user's forward adds must have equal shapes, so their nodes share a
  carrier, and the carrier exists if any of its writers is kept. A layer that is called as a module may read fewer
  channels than are carried, and write fewer (`Port`).
- *exact*: whether the tensor can hold only channels that are live, because an absent one would not be zero (behind a
  sigmoid) or because nothing can put zeros there (a weight used outside its module).

Nothing is decided here: the solver reads the notes when the run is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimstart.graph.sizes import Expression

CONSTANT = 0  # inputs, parameters that are added, whatever is not followed: always there
ZERO = 1  # padding with zero channels: always there, and neutral in an addition


Presence = int
"""When a channel exists, packed into an integer because there are hundreds of thousands: see the next two functions."""


def when_live(node: int) -> Presence:
    """The channel exists where its node is live: what a layer with a port reads or writes."""
    return 2 * node + 1


def when_carried(node: int) -> Presence:
    """The channel exists where its carrier does: what an operation sees that cannot choose."""
    return 2 * node


@dataclass(frozen=True, eq=False)
class Layout:
    """Channels may be removed only as whole hyperplanes along one dimension of these nodes.

    Attributes:
        nodes: node ids, length one along dimensions where they do not change.
        sizes: for every dimension the size the user's forward asks for, or None where it follows by itself.
        rigid: dimensions along which nothing may be removed.
        reason: why the channels stay whole if it cannot be done.
    """

    nodes: Tensor
    sizes: tuple[Expression | int | None, ...]
    rigid: frozenset[int]
    reason: str


@dataclass(frozen=True, eq=False)
class Count:
    """The user's forward says `size` where it means the number of these rows of channels (a split, a slice)."""

    rows: tuple[tuple[int, ...], ...]
    size: Expression | int
    reason: str


@dataclass(frozen=True)
class PortNote:
    """Nodes at the input or output of a layer, along its channel dimension (counted from the end)."""

    dim: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class CostNote:
    """Multiply-adds of one operation: `coefficient` times the product of the numbers of channels in `factors`."""

    coefficient: int
    factors: tuple[tuple[Presence, ...], ...]


class UnionFind:
    """Disjoint sets of integers, growing on demand."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def add(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        parent = self.parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(self, first: int, second: int) -> int:
        first, second = self.find(first), self.find(second)
        if first != second:
            first, second = min(first, second), max(first, second)
            self.parent[second] = first
        return first


@dataclass
class Ledger:
    """The notes of one trace. `coupling` decides what an addition does."""

    coupling: str
    atoms: UnionFind = field(default_factory=UnionFind)
    writers: dict[tuple[str, int], range] = field(default_factory=dict)  # (parameter, dim) -> its atoms
    layers: dict[tuple[str, int], str] = field(default_factory=dict)  # (parameter, dim) -> the layer that writes
    carriers: UnionFind = field(default_factory=UnionFind)
    live: list[frozenset[int] | None] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    tied: set[int] = field(default_factory=set)  # nodes whose carrier allows no two masks
    whole: dict[int, str] = field(default_factory=dict)  # nodes whose carrier must exist, with the reason
    frozen: dict[int, str] = field(default_factory=dict)  # nodes whose writers must all be kept
    entries: dict[tuple[str, int], list[tuple[tuple[int, ...], tuple[Presence, ...]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    together: list[tuple[Presence, ...]] = field(default_factory=list)  # exist at the same time
    layouts: list[Layout] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    costs: list[CostNote] = field(default_factory=list)
    reads: dict[str, PortNote] = field(default_factory=dict)
    writes: dict[str, PortNote] = field(default_factory=dict)
    layer_attributes: dict[tuple[str, str], tuple[Presence, ...]] = field(default_factory=dict)
    same_width: list[tuple[int, int]] = field(default_factory=list)  # in and out of layers within channels
    numbers: list[tuple[Expression, str]] = field(default_factory=list)  # sizes used as numbers
    unfollowed: dict[str, str] = field(default_factory=dict)  # module or parameter -> reason

    def __post_init__(self) -> None:
        # What was seen before gives the same node again: in the second run, and where a module is called twice.
        self._twins: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._layer_outputs: dict[tuple[str, int, int], int] = {}
        self._written: dict[tuple[str, int, bool], dict[int, int]] = defaultdict(dict)
        for live in (None, frozenset[int]()):
            self.new_node(live, exact=False)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def new_node(self, live: frozenset[int] | None, exact: bool, like: int | None = None) -> int:
        """A node; `like` shares its carrier with another one."""
        node = self.carriers.add()
        self.live.append(live)
        self.exact.append(exact)
        if like is not None:
            self.carriers.union(node, like)
        return node

    def write(self, parameter: str, dim: int, size: int, indices: Iterable[int], layer: str, exact: bool) -> list[int]:
        """Fresh nodes written by the given indices of a parameter's dimension, which has `size` of them.

        Args:
            layer: the name of who writes: the module, or the parameter where that is used outside its module.
            exact: whether nothing can put zeros among the channels written.
        """
        if (parameter, dim) not in self.writers:
            self.layers[parameter, dim] = f"{parameter}[{dim}]" if layer in self.layers.values() else layer
            first = len(self.atoms.parent)
            self.atoms.parent.extend(range(first, first + size))
            self.writers[parameter, dim] = range(first, first + size)
        atoms = self.writers[parameter, dim]
        indices, known = tuple(indices), self._written[parameter, dim, exact]
        for index in indices:
            if index not in known:
                known[index] = self.new_node(frozenset({atoms[index]}), exact)
        nodes = [known[index] for index in indices]
        self.follow(parameter, dim, indices, [when_live(node) for node in nodes])
        return nodes

    def layer_output(self, module: str, index: int, node: int) -> int:
        """The node that a layer within channels writes at `index`, from `node`."""
        if node <= ZERO:
            return node
        key = (module, index, node)
        if key not in self._layer_outputs:
            self._layer_outputs[key] = self.new_node(self.live[node], exact=False)
            self.same_width.append((node, self._layer_outputs[key]))
        return self._layer_outputs[key]

    def follow(self, name: str, dim: int, indices: Iterable[int], presences: Iterable[Presence]) -> None:
        """Indices of a named tensor's dimension exist when the given channels do."""
        entry = (tuple(indices), tuple(presences))
        if entry not in self.entries[name, dim]:
            self.entries[name, dim].append(entry)

    def pass_on(self, node: int, zero_preserving: bool) -> int:
        """The node behind an operation within one channel."""
        if zero_preserving or node <= ZERO or self.live[node] is None or self.exact[node]:
            # a padded zero that turns into something else is a constant
            return CONSTANT if node == ZERO and not zero_preserving else node
        if node not in self._twins:
            self._twins[node] = self.new_node(self.live[node], exact=True, like=node)
        return self._twins[node]

    def added(self, first: int, second: int) -> int:
        """The node of a sum."""
        pair = (min(first, second), max(first, second))
        if pair not in self._sums:
            self._sums[pair] = self._added(*pair)
        return self._sums[pair]

    def _added(self, first: int, second: int) -> int:
        if first == second:
            return first
        if first == ZERO:
            self.whole.setdefault(second, "zero channels are padded to it")
            return second
        if first == CONSTANT:
            if second == ZERO:
                return CONSTANT
            self.whole.setdefault(second, "an input or a parameter is added to it")
            self._tie_if_exact(second)
            return self.new_node(None, exact=False, like=second)
        left, right = self.live[first], self.live[second]
        self.carriers.union(first, second)
        if left == right:
            return second if self.exact[second] else first
        if self.coupling == "stream":
            self.tied.add(first)
        self._tie_if_exact(first)
        self._tie_if_exact(second)
        exact = self.exact[first] or self.exact[second]
        return self.new_node(None if left is None or right is None else left | right, exact, like=first)

    def multiplied(self, first: int, second: int) -> int:
        """The node of a product, or of any other function of two channels: both exist at the same time."""
        if first == second:
            return first
        first, second = sorted((first, second))
        if first <= ZERO:
            if second > ZERO:
                self.whole.setdefault(second, "it meets channels that are always there")
            return second if first == CONSTANT else ZERO
        self.carriers.union(first, second)
        self.tied.add(first)
        return second if self.exact[first] else first

    def _tie_if_exact(self, node: int) -> None:
        if self.exact[node]:
            self.tied.add(node)

    def keep_whole(self, nodes: Tensor | Iterable[int], reason: str) -> None:
        """The carriers of these nodes must exist: something reads them for which an absent channel is not a zero."""
        for node in _distinct(nodes):
            if node > ZERO:
                self.whole.setdefault(node, reason)
                self._tie_if_exact(node)

    def freeze(self, nodes: Tensor | Iterable[int], reason: str) -> None:
        """All writers of these nodes must be kept."""
        for node in _distinct(nodes):
            if node > ZERO:
                self.frozen.setdefault(node, reason)

    def used_as_number(self, expression: Expression, module: str) -> None:
        self.numbers.append((expression, f"its size is used as a number in {module or 'the forward'}"))

    # --- layers ----------------------------------------------------------------------------------------------------

    def port(self, ports: dict[str, PortNote], module: str, dim: int, nodes: Iterable[int]) -> None:
        """Note the nodes at a layer's input or output. A layer that is met again must find the same channels there."""
        note = PortNote(dim, tuple(nodes))
        if module not in ports:
            ports[module] = note
            return
        for before, now in zip(ports[module].nodes, note.nodes, strict=False):
            if before != now:
                self.together.append((when_carried(before), when_carried(now)))
                self.together.append((when_live(before), when_live(now)))

    def counts_channels(self, module: str, name: str, presences: Iterable[Presence]) -> None:
        self.layer_attributes.setdefault((module, name), tuple(presences))


def _distinct(nodes: Tensor | Iterable[int]) -> list[int]:
    return torch.unique(nodes).tolist() if isinstance(nodes, Tensor) else sorted(set(nodes))
