"""The record of a trace: channels at every point of the network, which filters write them, and constraints on them.

Every activation has a tensor of **node** ids of its own shape (of length one along dimensions where they do not
change). A node is a channel at a point of the network. It has

- a *live set*: the atoms (filters) that write it; `None` if something writes it that is always there. An atom is one
  index along a dimension of a parameter. Under filter coupling an addition unites live sets.
- a *carrier*: the physical channel. Tensors that the user's forward adds must have equal shapes, so their nodes share a
  carrier, and the carrier exists if any of its writers is kept. A layer that is called as a module may read fewer
  channels than are carried, and write fewer (`Port`).
- *exact*: whether the tensor can hold live channels only. That is so where an absent channel would not be zero (after a
  sigmoid), and where nothing can put zeros in its place (a weight that is used outside its module).

Example: in `relu(a(x) + b(x))`, channel 3 of `a(x)` and channel 3 of `b(x)` are two nodes with one atom each. Their sum
is a third node with both atoms, and all three share a carrier: the tensors are equally wide, and channel 3 exists if
`a` or `b` keeps its filter 3. Under stream coupling the two atoms are tied, so both filters are kept or none.

Nothing is decided here: the solver reads the constraints when the run is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimstart.graph.flow import Flow
from slimstart.graph.sizes import Attribute, Expression

CONSTANT = 0  # the node of inputs, of parameters that are added, of everything that is not followed: always there
ZERO = 1  # the node of zero channels that are padded: always there, and neutral in an addition


Presence = int
"""When a channel exists: a node and one bit, in one integer because there are hundreds of thousands of them.

Made by the two functions below; the solver takes it apart with `divmod(presence, 2)`.
"""


def when_live(node: int) -> Presence:
    """The channel exists where its node is live: what a layer with a port reads or writes."""
    return 2 * node + 1


def when_carried(node: int) -> Presence:
    """The channel exists where its carrier does: what an operation without a port reads."""
    return 2 * node


@dataclass(frozen=True, eq=False)
class Layout:
    """Channels may be removed only as whole hyperplanes along one dimension of these nodes.

    Attributes:
        nodes: node ids, length one along dimensions where they do not change.
        sizes: for every dimension the size that the user's forward asks for; None where any size is right.
        rigid: dimensions along which nothing may be removed.
        reason: why the channels are not prunable if no dimension works.
    """

    nodes: Tensor
    sizes: tuple[Expression | int | None, ...]
    rigid: frozenset[int]
    reason: str


@dataclass(frozen=True, eq=False)
class Count:
    """A size in the user's forward that must remain the number of these rows of channels (a split, a slice)."""

    rows: tuple[tuple[int, ...], ...]
    size: Expression | int
    reason: str


@dataclass(frozen=True)
class PortNodes:
    """Nodes at the input or output of a layer, along its channel dimension (counted from the end)."""

    dim: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class OperationCost:
    """Multiply-adds of one operation: `coefficient` times the product of the numbers of channels in `factors`.

    Attributes:
        module: the innermost module that was running.
    """

    coefficient: int
    factors: tuple[tuple[Presence, ...], ...]
    module: str


@dataclass(frozen=True, eq=False)
class ParameterIndices:
    """Some indices along a dimension of a parameter, which exist as its layers read and write them."""

    parameter: str
    dim: int
    indices: tuple[int, ...]


CallKey = tuple[bool, str, int]
"""Whether the model is in training mode, a module, and the number of the call among those that run directly in it."""

ChannelsOfCall = tuple[int, tuple[Presence, ...]]
"""The channel dimension of an operation's input, counted from the end, and when each channel exists."""


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
class Constraints:
    """Everything that is recorded in one trace.

    `coupling` decides what an addition does, `norms` what an operation does whose result depends on the number of its
    channels.
    """

    coupling: str
    norms: str = "keep"
    whole_norms: frozenset[CallKey] = frozenset()  # calls that need all their channels, although norms shrink
    atoms: UnionFind = field(default_factory=UnionFind)
    writers: dict[tuple[str, int], range] = field(default_factory=dict)  # (parameter, dim) -> its atoms
    layers: dict[tuple[str, int], str] = field(default_factory=dict)  # (parameter, dim) -> the layer of these atoms
    carriers: UnionFind = field(default_factory=UnionFind)
    live: list[frozenset[int] | None] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    tied: set[int] = field(default_factory=set)  # nodes whose carrier needs one mask for all its writers
    required: dict[int, str] = field(default_factory=dict)  # nodes whose carrier must exist, with the reason
    frozen: dict[int, str] = field(default_factory=dict)  # nodes whose writers must all be kept
    entries: dict[tuple[str, int], list[tuple[tuple[int, ...], tuple[Presence, ...]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    together: list[tuple[Presence, ...]] = field(default_factory=list)  # exist at the same time
    layouts: list[Layout] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    costs: list[OperationCost] = field(default_factory=list)
    reads: dict[str, PortNodes] = field(default_factory=dict)
    writes: dict[str, PortNodes] = field(default_factory=dict)
    layer_attributes: dict[tuple[str, str], tuple[Presence, ...]] = field(default_factory=dict)
    same_width: list[tuple[int, int]] = field(default_factory=list)  # input and output of depthwise layers and norms
    normed: set[int] = field(default_factory=set)  # nodes whose number an operation divides by
    over_channels: dict[CallKey, ChannelsOfCall] = field(default_factory=dict)  # these operations
    added_parameters: dict[int, str] = field(default_factory=dict)  # nodes that are kept unless they are normed
    flows: dict[bool, Flow] = field(default_factory=dict)  # of the run in training mode, and of the other one
    parameter_sizes: list[tuple[ParameterIndices, Expression, str]] = field(default_factory=list)  # see `resolve`
    parameter_norms: list[tuple[CallKey, int, ParameterIndices]] = field(default_factory=list)
    over_rows: dict[CallKey, ChannelsOfCall] = field(default_factory=dict)  # divisions of filters by their lengths
    row_norms: list[tuple[CallKey, int, ParameterIndices]] = field(default_factory=list)  # see `resolve`
    followers: list[tuple[ParameterIndices, ParameterIndices]] = field(default_factory=list)
    inputs_of_weights: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # dimensions, by parameter
    used_otherwise: set[str] = field(default_factory=set)  # parameters that are not only weights of layers
    numbers: list[tuple[Expression, str]] = field(default_factory=list)  # sizes that must not change
    products: set[int] = field(default_factory=set)  # nodes of products of channels, as the scores of attention heads
    nonzero: set[int] = field(default_factory=set)  # nodes that need not be zero where their filters are dropped
    unwritten: dict[Attribute, range] = field(default_factory=dict)  # atoms of tensors created with a size, see `sized`
    unfollowed: dict[str, str] = field(default_factory=dict)  # module or parameter -> reason

    def __post_init__(self) -> None:
        # The same operation on the same nodes gives the same node again. Otherwise the second run (training mode), and
        # the second call of a module, would make other channels, and nothing would say that they are the same.
        self._changed: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._layer_outputs: dict[tuple[str, int, int], int] = {}
        self._written: dict[tuple[str, int, bool], dict[int, int]] = defaultdict(dict)
        self._sized: dict[Attribute, list[int]] = {}
        for live in (None, frozenset[int]()):
            self.new_node(live, exact=False)

    # --- nodes -----------------------------------------------------------------------------------------------------

    def new_node(self, live: frozenset[int] | None, exact: bool, like: int | None = None) -> int:
        """A new node; it shares the carrier of the node `like`, if one is given."""
        node = self.carriers.add()
        self.live.append(live)
        self.exact.append(exact)
        if like is not None:
            self.carriers.union(node, like)
        return node

    def write(self, parameter: str, dim: int, size: int, indices: Iterable[int], layer: str, exact: bool) -> list[int]:
        """The nodes that the given indices of a parameter's dimension write.

        Args:
            size: the length of the dimension.
            layer: the name of the module, or of the parameter where that is used outside its module.
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

    def sized(self, attribute: Attribute) -> list[int]:
        """The nodes of a tensor that is created with an attribute as its size: they exist as the attribute counts.

        They have atoms of their own, which no parameter writes. Those that are not tied to filters are always kept.
        """
        if attribute not in self.unwritten:
            first, size = len(self.atoms.parent), attribute.value
            self.atoms.parent.extend(range(first, first + size))
            self.unwritten[attribute] = range(first, first + size)
            nodes = [self.new_node(frozenset({atom}), exact=True) for atom in range(first, first + size)]
            self._sized[attribute] = nodes
            rows = tuple((node,) for node in nodes)
            self.counts.append(Count(rows, attribute, "a tensor is created with a fixed size"))
        return self._sized[attribute]

    def layer_output(self, module: str, index: int, node: int) -> int:
        """The node that a depthwise layer or a normalisation writes at `index`, from `node`."""
        if node <= ZERO:
            return node
        key = (module, index, node)
        if key not in self._layer_outputs:
            self._layer_outputs[key] = self.new_node(self.live[node], exact=False)
            self.same_width.append((node, self._layer_outputs[key]))
        return self._layer_outputs[key]

    def follow(self, name: str, dim: int, indices: Iterable[int], presences: Iterable[Presence]) -> None:
        """Require that indices along a dimension of a named tensor exist exactly when the given channels do."""
        entry = (tuple(indices), tuple(presences))
        if entry not in self.entries[name, dim]:
            self.entries[name, dim].append(entry)

    def pass_on(self, node: int, zero_preserving: bool) -> int:
        """The node after an operation that treats every channel separately."""
        if zero_preserving or node <= ZERO or self.live[node] is None or self.exact[node]:
            if node > ZERO and not zero_preserving:
                self.nonzero.add(node)
            # A padded zero that becomes another number is a constant.
            return CONSTANT if node == ZERO and not zero_preserving else node
        if node not in self._changed:
            self._changed[node] = self.new_node(self.live[node], exact=True, like=node)
            self.nonzero.add(self._changed[node])
            if node in self.products:  # scores with a mask are scores
                self.products.add(self._changed[node])
        return self._changed[node]

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
            self.required.setdefault(second, "zero channels are padded to it")
            return second
        if first == CONSTANT:
            if second == ZERO:
                return CONSTANT
            self.required.setdefault(second, "an input or a parameter is added to it")
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
        total = self.new_node(None if left is None or right is None else left | right, exact, like=first)
        if not self.nonzero.isdisjoint((first, second)):
            self.nonzero.add(total)
        return total

    def multiplied(self, first: int, second: int) -> int:
        """The node of a product, or of any other function of two channels, which are kept or dropped together."""
        if first == second:
            return first
        first, second = sorted((first, second))
        if first <= ZERO:
            if second > ZERO:
                self.required.setdefault(second, "it meets channels that are always there")
            return second if first == CONSTANT else ZERO
        self.carriers.union(first, second)
        self.tied.add(first)
        product = second if self.exact[first] else first
        self.products.add(product)
        return product

    def equally_wide(self, first: int, second: int) -> None:
        """Let two channels be carried together: they are at the same index of tensors that must have equal shapes."""
        first, second = sorted((first, second))
        if first <= ZERO:
            if second > ZERO:
                self.keep_all([second], "its size is that of a tensor whose channels are always there")
            return
        self.carriers.union(first, second)
        if self.live[first] != self.live[second]:
            if self.coupling == "stream":
                self.tied.add(first)
            self._tie_if_exact(first)
            self._tie_if_exact(second)

    def _tie_if_exact(self, node: int) -> None:
        if self.exact[node]:
            self.tied.add(node)

    def keep_all(self, nodes: Tensor | Iterable[int], reason: str) -> None:
        """Require that the carriers of these nodes exist: for their reader, an absent channel is not a zero.

        Where several layers write a carrier, their filters can still be dropped: zeros remain in its place.
        """
        for node in _distinct(nodes):
            if node > ZERO:
                self.required.setdefault(node, reason)
                self._tie_if_exact(node)

    def freeze(self, nodes: Tensor | Iterable[int], reason: str) -> None:
        """Require that all filters that write these nodes are kept."""
        for node in _distinct(nodes):
            if node > ZERO:
                self.frozen.setdefault(node, reason)

    def normalise(self, call: CallKey, dim: int, nodes: Iterable[int]) -> tuple[Presence, ...]:
        """Record an operation whose result depends on the number of its channels: only those that exist may count.

        Args:
            dim: their dimension, counted from the end.
        """
        nodes = tuple(nodes)
        self.normed.update(node for node in nodes if node > ZERO)
        presences = tuple(map(when_carried, nodes))
        self.over_channels[call] = dim, presences
        return presences

    def resolve(self) -> None:
        """Add the constraints on parameters that are computed with before a layer reads them.

        Which of their indices belong to which channels is known only when the trace is over.
        """
        for follower, leader in self.followers:
            presences = self._presences_of(leader) or (0,) * len(leader.indices)
            self.follow(follower.parameter, follower.dim, follower.indices, presences)
        for found, size, reason in self.parameter_sizes:
            if presences := self._presences_of(found):
                self.counts.append(Count(tuple((presence // 2,) for presence in presences), size, reason))
        for call, dim, found in self.parameter_norms:
            presences = self._presences_of(found)
            if presences and self.norms == "shrink" and call not in self.whole_norms:
                self.normalise(call, dim, (presence // 2 for presence in presences))
            elif presences:
                self.follow(found.parameter, found.dim, found.indices, [0] * len(found.indices))
        # Filters that are divided by their own lengths: a dropped one, zero in a masked network, has none. They do not
        # depend on each other, so they may be a part of what others write.
        self.over_rows = {
            call: (dim, presences) for call, dim, found in self.row_norms if (presences := self._presences_of(found))
        }

    def _presences_of(self, found: ParameterIndices) -> tuple[Presence, ...]:
        """When each of these indices exists; none if nothing says that they can go."""
        known: dict[int, Presence] = {}
        for indices, presences in self.entries.get((found.parameter, found.dim), ()):
            known |= {index: one for index, one in zip(indices, presences, strict=True) if index not in known}
        return tuple(known[i] for i in found.indices) if known.keys() >= set(found.indices) else ()

    def used_as_number(self, expression: Expression, module: str) -> None:
        self.numbers.append((expression, f"its size is used as a number in {module or 'the forward'}"))

    def merged_carriers(self) -> UnionFind:
        """The carriers of a network without ports.

        There, a depthwise convolution or a normalisation is as wide as its input, so the carriers on both sides are
        one.
        """
        merged = UnionFind()
        merged.parent = list(self.carriers.parent)
        for first, second in self.same_width:
            merged.union(first, second)
        return merged

    # --- layers ----------------------------------------------------------------------------------------------------

    def port(self, ports: dict[str, PortNodes], module: str, dim: int, nodes: Iterable[int]) -> None:
        """Record the nodes at a layer's input or output.

        A layer that is called several times has one set of weights, so the channels there are tied across its calls.
        """
        found = PortNodes(dim, tuple(nodes))
        if module not in ports:
            ports[module] = found
            return
        for before, now in zip(ports[module].nodes, found.nodes, strict=False):
            if before != now:
                self.together.append((when_carried(before), when_carried(now)))
                self.together.append((when_live(before), when_live(now)))

    def counts_channels(self, module: str, name: str, presences: Iterable[Presence]) -> None:
        self.layer_attributes.setdefault((module, name), tuple(presences))


def _distinct(nodes: Tensor | Iterable[int]) -> list[int]:
    return torch.unique(nodes).tolist() if isinstance(nodes, Tensor) else sorted(set(nodes))
