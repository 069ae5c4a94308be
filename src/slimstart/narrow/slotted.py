"""Networks in static slots: tensors stay where they are, and a draw only moves numbers into them.

Room, and so every shape, changes seldom (`slots.py`); then networks are built anew. In between a draw is three steps on
the device that hold no decision of the host's, and so can be captured in a CUDA graph:

    propose()        new masks -> seats, and whether there is room for them (`seating.py`)
    leave()          the network that is trained -> the dense model
    accept()         the proposed seats are taken: the dense model -> the network that is trained

All tensors (weights, statistics, optimizer state) go in one kernel each way (`slimstart.kernels.Moves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph
from slimstart.kernels import Move, Moves
from slimstart.narrow.networks import Executed, Named, Networks, num_filters
from slimstart.narrow.seating import Seating, Seats
from slimstart.narrow.slots import Room, Slots
from slimstart.narrow.streams import Side, set_port
from slimstart.narrow.subnet import Subnet


class SlotNetworks(Networks):
    """Networks with room for passengers, whose entries are zero and stay zero.

    Args:
        align, spread: see `Slots`.

    Attributes:
        masks: after the at-least-one rule.
        proposed, proposed_masks: what `propose` has found, and for which masks (after the at-least-one rule).
        occupied: for every narrow parameter, 1 where its entries are real and 0 where they are passengers'.
    """

    proposed: Seats
    proposed_masks: Tensor
    _occupied_type: torch.dtype | None = None  # that of the parameter, which is multiplied fastest

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        graph: ChannelGraph,
        align: int,
        spread: float | None = 4.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(model, optimizer, graph, device)
        self.slots = Slots(graph, align, spread)
        self.occupied: dict[str, Tensor] = {}
        self._seating: Seating | None = None
        self._hooked: dict[str, nn.Parameter] = {}
        self._silent_by_hook = True
        self._dense_units: dict[int, Tensor] = {}  # along axes that were asked for
        self._known: Any = None  # what the tables of moves were made for

    # --- what the device does alone ----------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, masks: Tensor) -> None:
        """Find seats for raw masks on the device, in `proposed`."""
        assert self._seating is not None
        kept = self.graph.costs.at_least_one(masks)
        self.proposed_masks.copy_(kept)
        self.proposed.copy_(self._seating(kept))

    @torch.no_grad()
    def leave(self) -> None:
        """Write what the trained network holds into the dense model and state."""
        self._moves.scatter_(self._seats.places[0])

    @torch.no_grad()
    def accept(self) -> None:
        """Become the proposed networks."""
        self.masks.copy_(self.proposed_masks)
        self._seats.copy_(self.proposed)
        self._moves.gather_(self._seats.places[0])
        self._occupy.gather_(self._seats.places[0])

    def move(self) -> None:
        """From the present networks to the proposed ones."""
        self.leave()
        self.accept()

    def prefetch(self) -> None:
        """Begin with whatever takes long about the proposed networks."""

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """Around `move`: what it needs before, and what it leaves behind where that is not on the device."""
        self.refresh()  # an eager step within the window may have made optimizer state
        yield

    @torch.no_grad()
    def load_reference(self, number: int) -> None:
        """Fill the reference network with the values of mask `number` (1, 2, ...)."""
        self._seat_reference(self._seats, number)

    def _seat_reference(self, seats: Seats, number: int) -> None:
        self._in_reference.gather_(seats.places[number])
        self._reference_ports.copy_(seats.ports[number])

    # --- what the host does ------------------------------------------------------------------------------------------

    def enter(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        kept = self.graph.costs.at_least_one(masks.to(self.device))
        changed = self.slots.adjust(kept, keep_probs, look)
        if changed or self._seating is None or kept.shape != self.masks.shape or kept.device != self.masks.device:
            self._build(kept)
            return
        self.refresh()
        self.propose(kept)
        self.accept()
        self._forget()

    def _forget(self) -> None:
        """Drop what belongs to the values that were there before."""
        for parameter in self.net.parameters.values():
            parameter.grad = None
        torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values

    def _build(self, kept: Tensor) -> None:
        """Networks of new shapes, with the dense model's values."""
        self.masks, self.proposed_masks = kept.clone(), kept.clone()
        self._seating = Seating(self.graph, self.slots.room, self.device)
        self._seats = self._seating(kept)
        if not bool(self._seats.fits):
            raise AssertionError("a network of this room does not have the shapes that it should; please report this")
        self.proposed = Seats(*(tensor.clone() for tensor in (self._seats.places, self._seats.ports, self._seats.fits)))
        self._load(self.graph.select_within(kept[0], self._seating.frame(kept[0])), ports=False)
        self._set_ports(self.net, self._seats.ports[0])
        self._reference_ports = self._seats.ports[0].clone()
        if len(kept) > 1:
            self.reference.load(self.graph.select_within(kept[1], self._seating.frame(kept[1])), ports=False)
            self._set_ports(self.reference, self._reference_ports)
        else:  # there will be no other: give the memory back
            self.reference = self._companion()
        self.occupied = {
            name: torch.zeros_like(p.detach(), dtype=self._occupied_type) for name, p in self.net.parameters.items()
        }
        self._known = None
        self.refresh()
        self._occupy.gather_(self._seats.places[0])

    def _silence(self, name: str, parameter: Tensor) -> None:
        """See to it that gradients of passengers are zero: otherwise they would learn.

        A passenger computes zero, but a gradient can reach it all the same: through a stream that another layer writes
        too, or from behind an activation that does not keep zero.
        """
        if self._silent_by_hook and parameter.grad is not None:
            parameter.grad.mul_(self.occupied[name])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Gradients of passengers are left as they come, until `silence` clears them all at once."""
        self._silent_by_hook = False
        try:
            yield
        finally:
            self._silent_by_hook = True

    def silence(self) -> None:
        """Clear the gradients of all passengers."""
        with_grad = [(p.grad, self.occupied[name]) for name, p in self.net.parameters.items() if p.grad is not None]
        if with_grad:
            torch._foreach_mul_([grad for grad, _ in with_grad], [mask for _, mask in with_grad])

    # --- as the subject of captured steps ----------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self.net.module

    @property
    def statistics(self) -> Sequence[Tensor]:
        return self.net.statistics

    @property
    def companions(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        self.reference.follow_modes()
        return [(partial(self.load_reference, number), self.reference.module) for number in range(1, len(self.masks))]

    def units_along(self, axis: int) -> Tensor:
        assert self._seating is not None
        start = self._seating.start[axis]
        places = self._seats.places[0, start : start + self._seating.count[axis]].long()
        if axis not in self._dense_units:
            units = self.graph.units_along(axis)
            self._dense_units[axis] = torch.where(units < 0, self.graph.num_units, units).to(self.device)
        return torch.where(places < 0, self.graph.num_units, self._dense_units[axis][places.clamp(min=0)])

    def references(self) -> Iterator[nn.Module]:
        self.reference.follow_modes()
        for number in range(1, len(self.masks)):
            self.load_reference(number)
            torch.clear_autocast_cache()
            yield self.reference.module

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        if len(self.masks) == 1 or self._seating is None:  # no room was made for a second network
            yield from super().of_masks(masks)
            return
        self.reference.follow_modes()
        spare = self._companion()
        for mask in self.graph.costs.at_least_one(masks.to(self.device)):
            seats = self._seating(mask[None])
            if bool(seats.fits):  # shapes that the device has seen already: nothing has to be found out anew
                self._seat_reference(seats, 0)
                torch.clear_autocast_cache()
                yield self.reference.module
            else:
                spare.load(self.graph.select(mask))
                yield spare.module

    def store(self) -> None:
        self.refresh()
        self.leave()
        self.link.pairs()  # for the scalars

    @torch.no_grad()
    def reload(self) -> None:
        self.refresh()
        self._moves.gather_(self._seats.places[0])
        self._forget()

    def adopt(self) -> None:
        assert self._seating is not None
        self.version += 1
        frame = self._seating.frame(self.masks[0])
        self.link.adopt(self.net.parameters, self.graph.select_within(self.masks[0], frame))
        self._known = None

    @cached_property
    def executed(self) -> Executed:
        flops = self.slots.flops
        return Executed(flops, (flops,) * (len(self.masks) - 1), num_filters(self.graph, self.slots.typical_units))

    @property
    def room(self) -> dict[str, Tensor]:
        return {"units": self.slots.room.units.clone(), "streams": self.slots.room.streams.clone()}

    def restore(self, masks: Tensor, room: Mapping[str, Tensor], keep_probs: Tensor | None) -> None:
        if room:  # otherwise the checkpoint is of a training without slots
            self.slots.room = Room(room["units"].clone(), room["streams"].clone())
        self._seating = None
        self.enter(masks, keep_probs)

    # --- tables of what moves ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Make the tables anew if the optimizer has state that they do not know; after eager steps, that is.

        Parameters that have been thawed since get their hooks, too.
        """
        for name, parameter in self.net.parameters.items():
            if parameter.requires_grad and self._hooked.get(name) is not parameter:
                self._hooked[name] = parameter
                parameter.register_post_accumulate_grad_hook(partial(self._silence, name))
        names = self.net.changing
        now = (*names, *self.link.addresses, *(self.net.dense(name).data_ptr() for name in names))
        if now == self._known:
            return
        self._known = None
        self.version += 1
        weights = [(name, self.net.dense(name), self.net.tensor(name)) for name in names]
        self._set_tables([*weights, *self.link.pairs()], [name for name in names if self.reference.has_own(name)])
        self._known = now

    def _set_tables(self, trained: Named, in_reference: Sequence[str]) -> None:
        """Make the tables.

        Args:
            trained: all that the trained network and the optimizer hold.
            in_reference: names of what a reference has of its own.
        """
        self._moves = Moves([self._move(name, dense, narrow) for name, dense, narrow in trained])
        self._occupy = Moves([self._occupied_move(name) for name in self.occupied])
        if len(self.masks) > 1:
            self._in_reference = Moves(
                [self._move(name, self.net.dense(name), self.reference.tensor(name)) for name in in_reference]
            )

    def _starts(self, name: str) -> dict[int, int]:
        """For every dimension of a tensor that is cut, where its entries begin among the seats."""
        assert self._seating is not None
        return {piece.dim: self._seating.start[piece.axis] for piece in self.graph.tensors.get(name, ())}

    def _move(self, name: str, dense: Tensor, narrow: Tensor) -> Move:
        return Move(dense, narrow, self._starts(name))

    def _occupied_move(self, name: str) -> Move:
        one = torch.ones((), dtype=self.occupied[name].dtype, device=self.occupied[name].device)
        return self._move(name, one.expand(self.net.dense(name).shape), self.occupied[name])

    def _set_ports(self, subnet: Subnet, buffer: Tensor) -> None:
        """Point the ports at static storage."""
        assert self._seating is not None
        found: dict[str, list[Side | None]] = {name: [None, None] for name in subnet.ports}
        for (name, is_write), (own, num_own, stream, num_stream) in self._seating.ports.items():
            found[name][is_write] = Side(buffer[own : own + num_own], buffer[stream : stream + num_stream])
        reads, writes = self.graph.reads, self.graph.writes
        for name, (read, write) in found.items():
            dims = reads[name].dim if name in reads else 0, writes[name].dim if name in writes else 0
            set_port(
                subnet.ports[name], read, write, 0 if write is None or write.back is None else len(write.back), dims
            )
