"""Networks in static slots whose dense model stays on the host: `slotted.py` and `resident.py` in one.

Tensors stay where they are, so the next network is fetched into a second set of them, and at the draw the two exchange
their contents:

    propose()        new masks -> seats, and the routes from the present ones (`crossing.py`)
    prefetch()       what enters is fetched, beside the steps that are still to come
    move()           what stays is moved on the device; the two sets are swapped
    (crossing)       what leaves goes home, beside the steps of the next window

A device that is short of memory has little to spare for a second set, so it is a share (`AHEAD`) of what the network
and the optimizer hold; the rest crosses the bus within `move`, where it lies, and through a scratch as large as the
largest tensor.

`propose` and `move` hold no decision of the host's. Of a single reference, what enters is fetched ahead too, into the
reference itself, which has run by then; several have one place between them and are filled when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.crossing import Beside, Exchange, Route, Tally, Turnover
from slimstart.narrow.networks import Named, Traffic
from slimstart.narrow.page_locked import PageLocked, num_bytes
from slimstart.narrow.seating import Seats
from slimstart.narrow.slotted import SlotNetworks

AHEAD = 0.5  # of the bytes of weights, statistics and optimizer state that change with a draw


class ResidentSlotNetworks(SlotNetworks):
    """Networks with room for passengers, on a device; the dense model is on the host.

    Args:
        device: for the narrow networks and their optimizer state.
    """

    _occupied_type = torch.bool  # a quarter of the memory

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        graph: ChannelGraph,
        align: int,
        spread: float | None,
        device: torch.device,
    ) -> None:
        super().__init__(model, optimizer, graph, align, spread, device)
        self._locked, self._beside = PageLocked(device), Beside(device)
        self._locked.take_(tensor_names(model).values())
        self._fetched = False  # what enters with the proposed networks is on its way
        self._is_fixed = False  # there will be no other draw
        self._crossed = torch.zeros(2, dtype=torch.int64, device=device)  # bytes, up and down

    @property
    def traffic(self) -> Traffic:
        up, down = self._crossed.tolist()
        return Traffic(up, down)

    # --- what the device does alone ----------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, masks: Tensor) -> None:
        super().propose(masks)
        for number, route in enumerate(self._routes):
            route.copy_(self._route_to(self.proposed, number))

    @torch.no_grad()
    def move(self) -> None:
        for exchange, route in zip(self._exchanges, self._routes, strict=True):
            exchange.stay(route)
        self._exchanges[0].swap(self._scratch)
        self._turnover(self._routes[0])  # only now: the reference has taken what it needs
        self._left.copy_(self._routes[0])  # a new proposal may come before everything has arrived
        self._crossed[0] += self._of_turnover(self._left.new, self._left.back)
        self._crossed[1] += self._of_cut(self._left.old, self._left.across)
        self.masks.copy_(self.proposed_masks)
        self._seats.copy_(self.proposed)
        self._occupy.gather_(self._seats.places[0])
        self._remember()
        if self._is_single:
            self._reference_ports.copy_(self._seats.ports[1])

    def load_reference(self, number: int) -> None:
        if not self._is_single:  # which has been filled at the draw
            self._seat_reference(self._seats, number)

    @torch.no_grad()
    def _seat_reference(self, seats: Seats, number: int) -> None:
        """With the present values of a mask, wherever they are."""
        route = self._route_to(seats, number)
        self._to_reference.enter(route)
        self._to_reference.stay(route)
        self._crossed[0] += self._of_reference(route.new, route.back)
        self._reference_ports.copy_(seats.ports[number])

    def _remember(self) -> None:
        """Keep buffers as they are at the draw: of several references, some are filled after a forward."""
        for name, buffer in self._drawn.items():
            buffer.copy_(self.net.tensor(name))

    def _route_to(self, seats: Seats, number: int) -> Route:
        assert self._seating is not None
        return Route.between(self._seating, self._seats.places[0], seats.places[number])

    @property
    def _is_single(self) -> bool:
        return len(self.masks) == 2

    # --- beside it ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefetch(self) -> None:
        with self._beside():
            for exchange, route in zip(self._exchanges, self._routes, strict=True):
                exchange.enter(route)
        for tally, route in zip(self._tallies, self._routes, strict=True):
            self._crossed[0] += tally(route.new, route.back)
        self._fetched = True

    @contextmanager
    def crossing(self) -> Iterator[None]:
        self.refresh()
        if not self._fetched:
            self.prefetch()
        self._beside.join()
        yield
        with self._beside():
            self._exchanges[0].leave_swapped(self._left)
        if len(self.masks) > 2:  # the next step fills its references, also with what is leaving
            self._beside.join()
        self._fetched = False

    # --- what the host does ------------------------------------------------------------------------------------------

    def prepare(self, masks: Tensor) -> None:
        self.refresh()
        self.propose(masks.to(self.device))
        self.prefetch()

    def exchange(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        kept = self.graph.costs.at_least_one(masks.to(self.device))
        self.refresh()
        if self.slots.adjust(kept, keep_probs, look) or kept.shape != self.masks.shape:
            self.store()
            self._build(kept)
            self._take_over()
            return
        if not self._fetched:
            self.propose(kept)
        with self.crossing():
            self.move()
        self._forget()

    def enter(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        self._beside.finish()
        self._is_fixed = keep_probs is None
        super().enter(masks, keep_probs, look)
        self._take_over()

    def reload(self) -> None:
        self._beside.finish()
        super().reload()
        self._take_over()

    def _take_over(self) -> None:
        """The trained network has the dense model's values; its reference gets them too, and nothing is ahead."""
        self._crossed[0] += self._of_all(self._seats.places[0])
        self._fetched = False
        self._remember()
        if self._is_single:
            self._seat_reference(self._seats, 1)

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        self._beside.join()
        self._remember()
        try:
            yield from super().of_masks(masks)
        finally:
            self._fetched = False
            if self._is_single:
                self._seat_reference(self._seats, 1)

    def store(self) -> None:
        self._beside.finish()
        super().store()
        self._crossed[1] += self._of_all(self._seats.places[0])
        self._beside.finish()

    def release(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.link.release(state_dict)

    # --- tables of what moves ----------------------------------------------------------------------------------------

    def _build(self, kept: Tensor) -> None:
        self._drop()
        super()._build(kept)

    @torch.no_grad()
    def _set_tables(self, trained: Named, in_reference: Sequence[str]) -> None:
        assert self._seating is not None
        self._drop()
        self._locked.take_(dense for _, dense, _ in trained)
        super()._set_tables(trained, in_reference)
        cut = [one for one in trained if one[0] in self.graph.tensors and not self._is_fixed]
        ahead, rest = shared_out(cut)
        seconds = [(*one, torch.empty_like(one[2], requires_grad=False)) for one in ahead]
        largest = max((num_bytes(narrow) for _, _, narrow in cut), default=0)
        self._scratch = torch.empty(largest, dtype=torch.uint8, device=self.device)
        self._exchanges, self._tallies = [self._exchange(seconds)], [self._tally(ahead)]
        self._turnover = Turnover([(dense, narrow, self._starts(name)) for name, dense, narrow in rest], self._scratch)
        self._of_turnover, self._of_cut, self._of_all = self._tally(rest), self._tally(cut), self._tally(trained)
        buffers = {} if len(self.masks) < 3 else self.net.buffers
        self._drawn = {name: buffers[name].clone() for name in in_reference if name in buffers}
        if len(self.masks) > 1:
            present = [(name, self._drawn.get(name, self.net.tensor(name))) for name in in_reference]
            shared = [(name, self.net.dense(name), narrow) for name, narrow in present]
            self._to_reference = self._exchange([(*one, self.reference.tensor(one[0])) for one in shared])
            self._of_reference = self._tally(shared)
        if self._is_single:
            self._exchanges.append(self._to_reference)
            self._tallies.append(self._of_reference)
        self._routes = [self._route_to(self.proposed, number).clone() for number in range(len(self._exchanges))]
        self._left = self._routes[0].clone()
        self._exchanges[0].stay(self._left.nowhere)
        self._turnover(self._left.nowhere)

    def _drop(self) -> None:
        """Give the memory of what is made anew back, before that is made."""
        self._beside.finish()  # the host waits: somebody on another stream may get the memory
        self._fetched = False
        made = ("_moves", "_occupy", "_in_reference", "_exchanges", "_turnover", "_to_reference", "_scratch", "_drawn")
        for name in made:
            vars(self).pop(name, None)

    def _exchange(self, tensors: Sequence[tuple[str, Tensor, Tensor, Tensor]]) -> Exchange:
        return Exchange([(dense, old, new, self._starts(name)) for name, dense, old, new in tensors])

    def _tally(self, tensors: Named) -> Tally:
        assert self._seating is not None
        axes = self.graph.tensors
        cuts = [{piece.dim: piece.axis for piece in axes.get(name, ())} for name, _, _ in tensors]
        return Tally(self._seating, [(dense, own) for (_, dense, _), own in zip(tensors, cuts, strict=True)])


def shared_out(tensors: Named) -> tuple[Named, Named]:
    """Those that are fetched ahead, which are a share of all by their size, and the rest."""
    ahead: list[tuple[str, Tensor, Tensor]] = []
    rest: list[tuple[str, Tensor, Tensor]] = []
    left = AHEAD * sum(num_bytes(narrow) for _, _, narrow in tensors)
    for one in tensors:
        size = num_bytes(one[2])
        (ahead if size <= left else rest).append(one)
        left -= size if size <= left else 0
    return ahead, rest
