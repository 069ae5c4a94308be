"""Which filters are tied, which are frozen, and so when each channel exists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from slimstart.graph.constraints import CONSTANT, ZERO, Ledger, Presence, UnionFind, when_carried
from slimstart.graph.sizes import Attribute, leaves

Atoms = frozenset[int]


class Solver:
    """Which atoms are tied, which are frozen, and so when each channel exists."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.atoms = ledger.atoms
        self.frozen: dict[int, str] = {}  # root atom -> reason
        self.fixed_attributes: set[Attribute] = set()
        self.written: dict[int, set[int]] = defaultdict(set)  # root of carriers -> the atoms that write it
        self.carried: dict[int, Atoms | None] = {}  # root of carriers -> the atoms that write it; None: always there
        self._roots: dict[Atoms, Atoms | None] = {}  # what `roots` has answered since the last tie or freeze
        self._table: list[Atoms | None] = []
        self._solve_carriers()

    # --- the three verbs -------------------------------------------------------------------------------------------

    def freeze(self, atoms: Iterable[int], reason: str) -> None:
        """These filters are always kept."""
        for atom in atoms:
            root = self.atoms.find(atom)
            if root not in self.frozen:
                self.frozen[root] = reason
                self._forget()

    def tie(self, atoms: Iterable[int]) -> None:
        """These filters are kept or dropped together."""
        first, *rest = sorted(set(atoms)) or [0]
        for atom in rest:
            one, other = self.atoms.find(first), self.atoms.find(atom)
            if one != other:
                reason = self.frozen.pop(one, None) or self.frozen.pop(other, None)
                self.frozen.pop(other, None)
                root = self.atoms.union(one, other)
                self._forget()
                if reason is not None:
                    self.frozen[root] = reason

    def exists(self, presence: Presence) -> Atoms | None:
        """The (tied) filters of which one must be kept for the channel to exist; None: it always does."""
        node, live = divmod(presence, 2)
        if node <= ZERO:
            return None
        return self.roots(self.ledger.live[node] if live else self.carried[self.ledger.carriers.find(node)])

    def exists_table(self) -> list[Atoms | None]:
        """`exists` for every presence at once, by index."""
        if self._table:
            return self._table
        find = self.ledger.carriers.find
        table: list[Atoms | None] = [None, None] * (ZERO + 1)
        for node in range(ZERO + 1, len(self.ledger.live)):
            table.append(self.roots(self.carried[find(node)]))
            table.append(self.roots(self.ledger.live[node]))
        self._table = table
        return table

    def _forget(self) -> None:
        """Ties or freezes have changed what exists."""
        self._roots.clear()
        self._table = []

    def roots(self, atoms: Atoms | None) -> Atoms | None:
        """What a set of writers comes down to: one filter for each tie, or None if one of them is always kept."""
        if atoms is None:
            return None
        if atoms not in self._roots:
            roots = frozenset(map(self.atoms.find, atoms))
            self._roots[atoms] = None if any(root in self.frozen for root in roots) else roots
        return self._roots[atoms]

    def equalise(self, presences: Iterable[Presence], reason: str) -> None:
        """These channels exist at the same time."""
        sets = {self.exists(presence) for presence in presences}
        if len(sets) < 2:
            return
        atoms = [atom for s in sets if s is not None for atom in s]
        if None in sets:
            self.freeze(atoms, reason)
        else:
            self.tie(atoms)

    # --- the steps -------------------------------------------------------------------------------------------------

    def _solve_carriers(self) -> None:
        ledger, find = self.ledger, self.ledger.carriers.find
        always: set[int] = set()
        for node, live in enumerate(ledger.live):
            if live is None:
                always.add(find(node))
            else:
                self.written[find(node)] |= live
        whole: dict[int, str] = {}
        for node, reason in ledger.whole.items():
            whole.setdefault(find(node), reason)
        tied = {find(node) for node in ledger.tied}
        for carrier in range(len(ledger.live)):
            if find(carrier) != carrier:
                continue
            atoms = self.written[carrier]
            # A channel that one layer alone writes and that must exist needs its writer; a stream can hold a zero.
            alone = len(atoms) <= 1 and carrier not in always
            if carrier in tied:
                self.tie(atoms)
            if (carrier in tied and (carrier in whole or carrier in always)) or (carrier in whole and alone):
                self.freeze(atoms, whole.get(carrier, "it is tied to channels that are always there"))
            self.carried[carrier] = None if carrier in whole or carrier in always else frozenset(atoms)

    def keep(self, reasons: Mapping[str, str]) -> None:
        """Leave the filters of named modules and parameters whole."""
        for writer, atoms in self.ledger.writers.items():
            names = (writer[0], self.ledger.layers[writer])
            for name, reason in reasons.items():
                if not name or any(own == name or own.startswith(name + ".") for own in names):
                    self.freeze(atoms, reason)

    def settle_notes(self) -> None:
        """Outputs, sizes used as numbers, indices with several channels, channels that go together."""
        ledger = self.ledger
        for node, reason in ledger.frozen.items():
            live = ledger.live[node]  # something always on hides who else writes: then all writers are meant
            self.freeze(self.written[ledger.carriers.find(node)] if live is None else live, reason)
        for expression, reason in ledger.numbers:
            for leaf in leaves(expression):
                if isinstance(leaf, Attribute):
                    self.fixed_attributes.add(leaf)
                else:
                    self.freeze_nodes(leaf.nodes.reshape(-1).tolist(), reason)
        for presences in ledger.together:
            self.equalise(presences, "it is tied to channels that are always there")
        for (name, dim), entries in ledger.entries.items():
            if len(entries) > 1 or len(set(entries[0][0])) < len(entries[0][0]):
                for presences in index_presences(ledger, name, dim).values():
                    self.equalise(presences, f"{name} is used in a way that keeps it whole")

    def freeze_nodes(self, nodes: Iterable[int], reason: str) -> None:
        """Whatever writes the carriers of these nodes is always kept."""
        for node in set(nodes):
            if node > ZERO:
                self.freeze(self.exists(when_carried(node)) or (), reason)

    def guarantee_channels(self, axes: Sequence[Sequence[Presence]]) -> dict[int, int]:
        """Freeze as little as needed for every layer to have a channel; returns the group of every root atom.

        Filters of one parameter form a group, of which the mask keeps at least one. An axis that does not contain all
        of some group (half of a layer that is split in two) could still end up empty: there, one filter is always kept.
        """
        while True:
            written = [
                sorted({root for root in map(self.atoms.find, atoms) if root not in self.frozen})
                for atoms in self.ledger.writers.values()
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


def index_presences(ledger: Ledger, name: str, dim: int) -> dict[int, tuple[Presence, ...]]:
    """For every index of a dimension of a named tensor, the channels it belongs to."""
    entries = ledger.entries[name, dim]
    if all(indices == entries[0][0] for indices, _ in entries):  # nearly always
        return dict(zip(entries[0][0], zip(*(presences for _, presences in entries), strict=True), strict=True))
    found: dict[int, tuple[Presence, ...]] = defaultdict(tuple)
    for indices, presences in entries:
        for index, presence in zip(indices, presences, strict=True):
            found[index] += (presence,)
    return found


def axis_presences(ledger: Ledger, name: str, dim: int, size: int) -> tuple[Presence, ...]:
    """When each index of a dimension of a named tensor exists; indices that nobody uses always do."""
    entries = ledger.entries[name, dim]
    if entries[0][0] == tuple(range(size)):
        return entries[0][1]
    channels = index_presences(ledger, name, dim)
    return tuple(channels[i][0] if i in channels else CONSTANT for i in range(size))
