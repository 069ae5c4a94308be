"""Which filters are kept or dropped together, which are always kept, and so when each channel exists.

Two relations are all that is decided: filters are *tied* (a union-find over atoms) or *frozen* (always kept). Both only
ever grow, so constraints can be applied one after the other, in any order: the order decides how many filters remain
prunable, not whether the result is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from slimstart.graph.constraints import CONSTANT, ZERO, Constraints, Layout, Presence, UnionFind, when_carried
from slimstart.graph.sizes import Attribute, Expression, leaves

Atoms = frozenset[int]


class Solver:
    """Ties and frozen filters of one network.

    Args:
        constraints: those of a finished trace; its union-find `atoms` is shared, and grows here.

    Attributes:
        atoms: ties between filters; `find` gives the root, representing all that are tied.
        frozen: the reason for each root whose filters are always kept.
        fixed_attributes: attributes of modules that must not change, because they are used as numbers.
        numbers: sizes of tensors and attributes together that are used as numbers, with the reason.
        written: for each root of the carriers, the atoms that write it.
        carried: the same, or None where the carrier always exists.
        normed: roots of the carriers that are normalised over, with those that are equally wide in a network without
            ports. All writers of one share one mask, so whatever is carried is live.
    """

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self.atoms = constraints.atoms
        self.frozen: dict[int, str] = {}
        self.fixed_attributes: set[Attribute] = set()
        self.numbers: list[tuple[Expression, str]] = []
        self.written: dict[int, set[int]] = defaultdict(set)
        self.carried: dict[int, Atoms | None] = {}
        self.normed: set[int] = set()
        # Caches, valid until the next tie or freeze: a network of a thousand layers asks for a few sets many times.
        self._roots: dict[Atoms, Atoms | None] = {}
        self._table: list[Atoms | None] = []
        self._without_ports: list[Atoms | None] = []
        self._solve_carriers()

    # --- ties and frozen filters -----------------------------------------------------------------------------------

    def freeze(self, atoms: Iterable[int], reason: str) -> None:
        """Always keep these filters."""
        for atom in atoms:
            root = self.atoms.find(atom)
            if root not in self.frozen:
                self.frozen[root] = reason
                self._forget()

    def tie(self, atoms: Iterable[int]) -> None:
        """Keep or drop these filters together."""
        first, *rest = sorted(set(atoms)) or [0]
        for atom in rest:
            one, other = self.atoms.find(first), self.atoms.find(atom)
            if one != other:
                # If either is frozen, both are now; the reason is moved to the new root, whichever that is.
                reason = self.frozen.pop(one, None) or self.frozen.pop(other, None)
                self.frozen.pop(other, None)
                root = self.atoms.union(one, other)
                self._forget()
                if reason is not None:
                    self.frozen[root] = reason

    def exists(self, presence: Presence) -> Atoms | None:
        """The roots of the filters that write a channel: it exists if one of them is kept; None: it always does."""
        node, live = divmod(presence, 2)
        if node <= ZERO:
            return None
        carrier = self.constraints.carriers.find(node)
        return self.roots(self.constraints.live[node] if live and carrier not in self.normed else self.carried[carrier])

    def exists_table(self) -> list[Atoms | None]:
        """`exists` of every presence, by its number."""
        if self._table:
            return self._table
        find = self.constraints.carriers.find
        table: list[Atoms | None] = [None, None] * (ZERO + 1)
        for node in range(ZERO + 1, len(self.constraints.live)):
            carrier = find(node)
            carried = self.roots(self.carried[carrier])
            table.append(carried)
            table.append(carried if carrier in self.normed else self.roots(self.constraints.live[node]))
        self._table = table
        return table

    def carried_without_ports(self) -> list[Atoms | None]:
        """For every node, the roots of the filters that write its carrier in a network without ports.

        There, a depthwise convolution or a normalisation is as wide as its input, so the carriers on both sides are
        one.
        """
        if self._without_ports:
            return self._without_ports
        merged = self.constraints.merged_carriers()
        written: dict[int, set[int]] = defaultdict(set)
        always = {merged.find(CONSTANT), merged.find(ZERO)}
        for carrier, atoms in self.carried.items():
            root = merged.find(carrier)
            written[root] |= atoms or set()
            if atoms is None:
                always.add(root)
        sets = {root: None if root in always else self.roots(frozenset(atoms)) for root, atoms in written.items()}
        self._without_ports = [sets[merged.find(node)] for node in range(len(merged.parent))]
        return self._without_ports

    def _forget(self) -> None:
        """Clear the caches."""
        self._roots.clear()
        self._table, self._without_ports = [], []

    def roots(self, atoms: Atoms | None) -> Atoms | None:
        """The roots of a set of writers; None if one of them is always kept."""
        if atoms is None:
            return None
        if atoms not in self._roots:
            roots = frozenset(map(self.atoms.find, atoms))
            self._roots[atoms] = None if any(root in self.frozen for root in roots) else roots
        return self._roots[atoms]

    def equalise(self, presences: Iterable[Presence], reason: str) -> None:
        """Keep or drop these channels together."""
        sets = {self.exists(presence) for presence in presences}
        if len(sets) < 2:
            return
        atoms = [atom for s in sets if s is not None for atom in s]
        if None in sets:
            self.freeze(atoms, reason)
        else:
            self.tie(atoms)

    # --- from constraints to ties ----------------------------------------------------------------------------------

    def _solve_carriers(self) -> None:
        """Find the writers of every carrier; tie and freeze those that may not have masks of their own."""
        constraints, find = self.constraints, self.constraints.carriers.find
        always: set[int] = set()
        for node, live in enumerate(constraints.live):
            if live is None:
                always.add(find(node))
            else:
                self.written[find(node)] |= live
        required: dict[int, str] = {}
        for node, reason in constraints.required.items():
            required.setdefault(find(node), reason)
        tied = {find(node) for node in constraints.tied}
        for carrier in range(len(constraints.live)):
            if find(carrier) != carrier:
                continue
            atoms = self.written[carrier]
            # A channel that must exist and has a single writer needs that writer. With several, the writers can still
            # be dropped: the stream then holds a zero there.
            alone = len(atoms) <= 1 and carrier not in always
            if carrier in tied:
                self.tie(atoms)
            if (carrier in tied and (carrier in required or carrier in always)) or (carrier in required and alone):
                self.freeze(atoms, required.get(carrier, "it is tied to channels that are always there"))
            self.carried[carrier] = None if carrier in required or carrier in always else frozenset(atoms)
        self._solve_normed(always, required)
        for node, reason in constraints.added_parameters.items():
            if find(node) not in self.normed:
                self.freeze(constraints.live[node] or (), reason)

    def _solve_normed(self, always: set[int], required: Mapping[int, str]) -> None:
        """Tie all writers of what is normalised over."""
        if not self.constraints.normed:
            return
        merged = self.constraints.merged_carriers()
        streams = {merged.find(node) for node in self.constraints.normed}
        members: dict[int, list[int]] = defaultdict(list)
        for carrier in self.carried:
            if merged.find(carrier) in streams:
                members[merged.find(carrier)].append(carrier)
        for carriers in members.values():
            self.normed.update(carriers)
            atoms = set[int]().union(*(self.written[carrier] for carrier in carriers))
            self.tie(atoms)
            if whole := [carrier for carrier in carriers if carrier in required or carrier in always]:
                self.freeze(atoms, required.get(whole[0], "it is tied to channels that are always there"))

    def keep(self, reasons: Mapping[str, str]) -> None:
        """Freeze the filters of named modules and parameters; "" names the whole model."""
        for writer, atoms in self.constraints.writers.items():
            names = (writer[0], self.constraints.layers[writer])
            for name, reason in reasons.items():
                if not name or any(own == name or own.startswith(name + ".") for own in names):
                    self.freeze(atoms, reason)

    def apply_constraints(self) -> None:
        """Freeze outputs and sizes that are used as numbers; tie channels that must exist together."""
        constraints = self.constraints
        for node, reason in constraints.frozen.items():
            # `live` is None where a constant was added, and then does not say who else writes: freeze all writers.
            live = constraints.live[node]
            self.freeze(self.written[constraints.carriers.find(node)] if live is None else live, reason)
        for expression, reason in constraints.numbers:
            kinds = {type(leaf) for leaf in leaves(expression)}
            if len(kinds) > 1:  # both may shrink, as in the width of heads: `channels // self.heads`
                self.numbers.append((expression, reason))
                continue
            for leaf in leaves(expression):
                if isinstance(leaf, Attribute):
                    self.fixed_attributes.add(leaf)
                elif leaf.nodes.shape[1] == 1:
                    self.freeze_nodes(leaf.nodes.reshape(-1).tolist(), reason)
                else:  # several channels at each index (the width of heads): along another dimension they can go
                    constraints.layouts.append(Layout(leaf.nodes, (None, None), frozenset({0}), reason))
        for presences in constraints.together:
            self.equalise(presences, "it is tied to channels that are always there")
        for (name, dim), entries in constraints.entries.items():
            # A parameter that is used twice, or whose index is: there is one slice, so all its channels agree.
            if len(entries) > 1 or len(set(entries[0][0])) < len(entries[0][0]):
                whole = constraints.unfollowed.get(name)
                reason = f"{name}: {whole}" if whole else f"{name} is shared with channels that are always there"
                for presences in index_presences(constraints, name, dim).values():
                    self.equalise(presences, reason)

    def freeze_unwritten(self) -> None:
        """Always keep channels that are created with a size and are not tied to those of a parameter."""
        written = {self.atoms.find(atom) for atoms in self.constraints.writers.values() for atom in atoms}
        for atoms in self.constraints.unwritten.values():
            self.freeze((a for a in atoms if self.atoms.find(a) not in written), "it is created with a fixed size")

    def freeze_nodes(self, nodes: Iterable[int], reason: str) -> None:
        """Always keep the filters that write the carriers of these nodes."""
        for node in set(nodes):
            if node > ZERO:
                self.freeze(self.exists(when_carried(node)) or (), reason)

    def guarantee_channels(self, axes: Sequence[Sequence[Presence]]) -> dict[int, int]:
        """Freeze as few filters as needed for every layer to keep a channel.

        Filters of one parameter form a group, of which the mask keeps at least one. An axis that does not contain all
        of some group (half of a layer that is split in two) could still end up empty: there, one filter is always kept.

        Returns:
            The group of every root that can be dropped.
        """
        while True:  # a filter that is frozen leaves its group, which may leave another axis without a whole group
            written = [
                sorted({root for root in map(self.atoms.find, atoms) if root not in self.frozen})
                for atoms in self.constraints.writers.values()
            ]
            together = UnionFind()
            together.parent = list(range(len(self.atoms.parent)))
            for roots in written:
                for root in roots:
                    together.union(root, roots[0])
            groups = {root: together.find(root) for roots in written for root in roots}
            members: dict[int, set[int]] = defaultdict(set)
            for root, group in groups.items():
                members[group].add(root)
            stable = True
            exists = self.exists_table()
            for axis in axes:
                sets = {exists[presence] for presence in axis}
                if not sets or None in sets:
                    continue
                roots_here: set[int] = set().union(*(s for s in sets if s is not None))
                if not any(members[groups[r]] <= roots_here for r in roots_here):
                    self.freeze([min(roots_here)], "a layer would be left without channels")
                    stable = False
            if stable:
                return groups


def index_presences(constraints: Constraints, name: str, dim: int) -> dict[int, tuple[Presence, ...]]:
    """For every index along a dimension of a named tensor, the channels that it belongs to."""
    entries = constraints.entries[name, dim]
    if all(indices == entries[0][0] for indices, _ in entries):  # nearly always
        return dict(zip(entries[0][0], zip(*(presences for _, presences in entries), strict=True), strict=True))
    found: dict[int, tuple[Presence, ...]] = defaultdict(tuple)
    for indices, presences in entries:
        for index, presence in zip(indices, presences, strict=True):
            found[index] += (presence,)
    return found


def axis_presences(constraints: Constraints, name: str, dim: int, size: int) -> tuple[Presence, ...]:
    """When each index along a dimension of a named tensor exists; indices that are never used always do."""
    entries = constraints.entries[name, dim]
    if entries[0][0] == tuple(range(size)):
        return entries[0][1]
    channels = index_presences(constraints, name, dim)
    return tuple(channels[i][0] if i in channels else CONSTANT for i in range(size))
