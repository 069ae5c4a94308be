"""Padded networks: the networks of a draw that have spare capacity, so that their shapes survive the next draw.

Tensors of static networks keep their addresses while the capacity does, so that captured steps remain valid. Three
methods of `PaddedNetworks` move such networks to another draw, and read no value on the host, so that a CUDA graph can
hold them:

    propose()       masks -> positions, and whether they fit the capacity
    write_back()    the trained network -> the store
    accept()        the proposed positions are taken: the store -> the trained network

Padding computes zero, but a gradient can reach it all the same: through a stream that another layer writes too, or from
an activation that does not keep zero. `PaddingGradients` sets such gradients to zero, otherwise padding would learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimstart.graph import Selection
from slimstart.kernels import Move, Moves
from slimstart.narrow.capacity import Capacity, Placement, Positions
from slimstart.narrow.change import Change
from slimstart.narrow.compact import in_order_of
from slimstart.narrow.modules import Network
from slimstart.narrow.optimizer_state import Entry
from slimstart.narrow.references import ReferenceNetwork, References
from slimstart.narrow.store import Key, Store
from slimstart.narrow.stream_ports import Side, set_port


class PaddedNetworks:
    """The trained network and the references of a draw, in one capacity.

    Attributes:
        masks, positions: of the present draw, after the at-least-one rule; `accept` changes them in place.
        proposed_masks, proposed: those that `propose` was last called with; at first the present ones.
    """

    def __init__(
        self,
        network: Network,
        store: Store,
        references: References,
        capacity: Capacity,
        placement: Placement,
        masks: Tensor,
        positions: Positions,
    ) -> None:
        self._network, self._graph, self._store, self._references = network, network.graph, store, references
        self.capacity, self.placement = capacity, placement
        self.masks, self.positions = masks, positions
        self.proposed_masks, self.proposed = masks.clone(), positions.clone()
        self._reference: ReferenceNetwork | None = None
        self._reference_ports = positions.ports[0].clone()
        self._known: object = None  # addresses and types of the tensors for which the tables below were made

    def set_ports(self, change: Change, network: Network, buffer: Tensor) -> None:
        """Add to a change: ports of a network at static positions, which `buffer` holds."""
        found: dict[str, list[Side | None]] = {name: [None, None] for name in network.ports}
        for (name, is_write), (own, num_own, stream, num_stream) in self.placement.ports.items():
            found[name][is_write] = Side(buffer[own : own + num_own], buffer[stream : stream + num_stream])
        reads, writes = self._graph.reads, self._graph.writes
        for name, (read, write) in found.items():
            dims = reads[name].dim if name in reads else 0, writes[name].dim if name in writes else 0
            width = 0 if write is None or write.back is None else len(write.back)
            change.call(set_port, network.ports[name], read, write, width, dims)
            change.set(network.ports[name], "stream_positions", None)  # also where there is padding on neither side

    # --- moves on the device -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, masks: Tensor) -> None:
        """Compute the positions of raw masks, in `proposed`."""
        kept = self._graph.costs.at_least_one(masks)
        self.proposed_masks.copy_(kept)
        self.proposed.copy_(self.placement(kept))

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the tensors of the trained network to the store."""
        self._moves.scatter_(self.positions.row[0])

    @torch.no_grad()
    def accept(self) -> None:
        """Become the proposed networks."""
        self.masks.copy_(self.proposed_masks)
        self.positions.copy_(self.proposed)
        self._moves.gather_(self.positions.row[0])
        self._mark_real.gather_(self.positions.row[0])

    def move(self) -> None:
        """Go from the present networks to the proposed ones."""
        self.write_back()
        self.accept()

    @torch.no_grad()
    def load_reference(self, number: int) -> None:
        """Fill the reference network with the values of mask `number` (1, 2, ...)."""
        self._fill_reference.gather_(self.positions.row[number])
        self._reference_ports.copy_(self.positions.ports[number])
        if changing := self._references.changing:
            snapshot = self._references.snapshot
            torch._foreach_copy_([self.reference.buffer(one) for one in changing], [snapshot[one] for one in changing])

    @property
    def reference(self) -> ReferenceNetwork:
        """The reference network, whose tensors keep their addresses; there is one after `make_tables`."""
        assert self._reference is not None
        return self._reference

    def make_tables(self, entries: Sequence[Entry], real: Mapping[str, Tensor]) -> bool:
        """Make the tables of all moves, unless those that exist are for the present tensors.

        Tensors are replaced by others where an optimizer makes its state in the first step, or the user moves the
        model.

        Args:
            real: as of `PaddingGradients`.

        Returns:
            Whether earlier tables were replaced, so that CUDA graphs that hold moves must be captured again.
        """
        network, store = self._network, self._store
        narrow = {name: network.tensor(name).detach() for name in self._graph.tensors}
        now = [(t.data_ptr(), t.dtype) for t in (*narrow.values(), *(entry.value for entry in entries))]
        if now == self._known:
            return False
        stale = self._known is not None
        moves = [self._move(name, store.like(Key(name), tensor), tensor) for name, tensor in narrow.items()]
        for entry in entries:
            dense = store.like(entry.place, entry.value, entry.start_in(store))
            moves.append(self._move(entry.name, dense, entry.value))
        self._moves = Moves(moves)
        self._mark_real = Moves([self._move(name, self._ones(name, one), one) for name, one in real.items()])
        if len(self.masks) > 1:
            reference = self._reference
            # The user may have moved the model to another type, as by `model.half()`.
            if reference is None or any(reference.tensor(n).dtype != t.dtype for n, t in narrow.items()):
                reference = self._reference = self._new_reference()
            self._fill_reference = Moves(
                [self._move(n, store[Key(n)], reference.tensor(n).detach()) for n in self._graph.tensors]
            )
        self._known = now
        return stale

    def forget_tables(self) -> None:
        """Make `make_tables` make them again."""
        self._known = None

    def _new_reference(self) -> ReferenceNetwork:
        reference = ReferenceNetwork(self._network.module, self._graph, self._references.buffers)
        change, mask = Change(), self.masks[1]
        selection = self._graph.select(mask, self.placement.frame(mask))
        reference.fill(change, self._store, selection, mask.device, in_place=False)
        self.set_ports(change, reference, self._reference_ports)
        change.apply()
        return reference

    def _ones(self, name: str, like: Tensor) -> Tensor:
        """Dense ones without memory of their own: gathered, they are 1 where a channel is real and 0 at padding."""
        return torch.ones((), dtype=like.dtype, device=like.device).expand(self._store[Key(name)].shape)

    def _move(self, name: str, dense: Tensor, narrow: Tensor) -> Move:
        return Move(dense, narrow, {p.dim: self.placement.start[p.axis] for p in self._graph.tensors.get(name, ())})


class PaddingGradients:
    """Hooks on parameters that set the gradients of their padding to zero.

    Attributes:
        real: for every padded parameter by name, 1 where it is real and 0 where it is padding; empty without padding.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.real: dict[str, Tensor] = {}
        self._handles: dict[str, RemovableHandle] = {}
        self._by_hook = True

    def register(self) -> None:
        """Register the hooks that are missing: a parameter may have been frozen until now."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._handles:
                # After the gradient is accumulated, so that sums over several backward passes are covered too.
                self._handles[name] = parameter.register_post_accumulate_grad_hook(partial(self._zero_one, name))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()

    def _zero_one(self, name: str, parameter: Tensor) -> None:
        if self._by_hook and parameter.grad is not None and name in self.real:
            parameter.grad.mul_(self.real[name])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Do nothing in backward passes within this context; `zero` is called afterwards, in fewer kernels."""
        self._by_hook = False
        try:
            yield
        finally:
            self._by_hook = True

    def zero(self) -> None:
        """Set the gradients of all padding to zero."""
        found = [(p.grad, self.real[name]) for name, p in self._parameters.items() if p.grad is not None and self.real]
        if found:
            torch._foreach_mul_([grad for grad, _ in found], [real for _, real in found])


def real_entries(selection: Selection, name: str, dense: Tensor, device: torch.device) -> Tensor:
    """1 where a narrow tensor is real and 0 where it is padding, with the dimensions of the dense one in memory."""
    narrow = torch.ones(selection.shape(name, dense.shape), dtype=dense.dtype, device=device)
    for dim, positions in selection.indices(name, device).items():
        narrow.mul_((positions >= 0).to(dense.dtype).view([-1 if d == dim else 1 for d in range(dense.dim())]))
    return in_order_of(dense, narrow)
