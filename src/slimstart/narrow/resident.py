"""Networks on a device whose dense model stays on the host, for models that are larger than the device.

Dense weights, statistics and optimizer state never leave the host; at a draw only those entries cross the bus that one
of the two networks has and the other has not (`crossing.py`). After `exchange` the dense model therefore knows nothing
of what the present network has learned since it was drawn or before; `store` tells it everything.

`ResidentNetworks` is exactly as wide as a draw; `resident_slots.py` has the same in static slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.crossing import Beside, DenseRow, Exchange, Route, Tally
from slimstart.narrow.networks import Named, Networks, Traffic
from slimstart.narrow.page_locked import PageLocked
from slimstart.narrow.subnet import Subnet


@dataclass(frozen=True)
class _Way:
    """From the present network to another, whose tensors are being filled.

    Attributes:
        mask: raw.
        selection, places: of the mask.
        route: on the device.
        fresh: the new tensors by name; those of the optimizer's state are in `ready`, by the dense tensor's id.
        up, down: bytes that cross the bus.
    """

    mask: Tensor
    selection: Selection
    places: Tensor
    route: Route
    exchange: Exchange
    fresh: Mapping[str, Tensor]
    ready: Mapping[int, Tensor]
    up: int
    down: int


class ResidentNetworks(Networks):
    """Exactly what a draw keeps, on a device; the dense model is on the host.

    Args:
        device: for the narrow networks and their optimizer state.
    """

    _places: Tensor  # of the network that is trained

    def __init__(self, model: nn.Module, optimizer: Optimizer, graph: ChannelGraph, device: torch.device) -> None:
        super().__init__(model, optimizer, graph, device)
        self._locked, self._beside, self._row = PageLocked(device), Beside(device), DenseRow(graph)
        self._locked.take_(tensor_names(model).values())
        self._ahead: list[_Way] = []  # to the next network, and to its reference
        self._known: Any = None  # what they were made for
        self._filled: Tensor | None = None  # the mask whose values the reference has, since the draw
        self._drawn: dict[str, Tensor] = {}  # buffers as they were at the draw, before any forward
        self._up = self._down = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._up, self._down)

    # --- from draw to draw -------------------------------------------------------------------------------------------

    def prepare(self, masks: Tensor) -> None:
        """Fetch what enters with the next draw, beside the steps that are still to come.

        All of it, in the memory that the last network has left: there are never more than two networks.
        """
        self._forget()
        states = self.link.pairs()
        self._locked.take_([*(dense for _, dense, _ in states), *map(self.net.dense, self.net.changing)])
        self._known = self._now()
        with self._beside():
            if len(masks) == 2:  # with more there is one place for all of them, which `references` fills
                self._ahead = [self._towards(masks[1], self.reference)]
                self._filled = None
                self.reference.install(self._ahead[0].fresh, self._ahead[0].selection)
            self._ahead.insert(0, self._towards(masks[0], self.net, states))
            for way in self._ahead:
                way.exchange.enter(way.route)
        self._up += sum(way.up for way in self._ahead)

    def exchange(self, masks: Tensor, keep_probs: Tensor | None, look: bool = True) -> None:
        self.link.pairs()  # for the scalars
        expected = zip(self._ahead, masks, strict=False)
        if not self._ahead or self._known != self._now() or any(not torch.equal(way.mask, m) for way, m in expected):
            self.prepare(masks)
        self._beside.join()
        for way in self._ahead:
            way.exchange.stay(way.route)
        way, *others = self._ahead
        self.net.install(way.fresh, way.selection)
        self.link.point(self.net.parameters, way.selection, way.ready)
        self._ahead = []
        with self._beside():
            way.exchange.leave(way.route)
            self._beside.keep(way.exchange.old)
        self._down += way.down
        self._filled = others[0].mask if others else None
        self.masks, self._places = masks.clone(), way.places
        self._remember()
        self.version += 1
        self.__dict__.pop("executed", None)

    def _towards(
        self, mask: Tensor, target: Subnet, states: Named = (), buffers: Mapping[str, Tensor] | None = None
    ) -> _Way:
        """Make tensors for another network, in the place of the target's.

        Args:
            states: the optimizer's (`pairs`).
            buffers: to take in the place of the present network's.
        """
        selection = self.graph.select(mask)
        places = self._row.places(selection)
        fresh: dict[str, Tensor] = {}
        ready: dict[int, Tensor] = {}
        tensors = []
        for name in dict.fromkeys((*self.net.changing, *target.changing)):
            if not target.has_own(name):
                continue
            dense, old = self.net.dense(name), (buffers or {}).get(name, self.net.tensor(name))
            if name in self.graph.tensors:
                fresh[name] = self._empty(name, dense, selection)
            tensors.append((name, dense.detach(), old, fresh.get(name, target.tensor(name))))
        for name, dense, narrow in states:
            ready[id(dense)] = self._empty(name, dense, selection) if name in self.graph.tensors else narrow
            tensors.append((name, dense, narrow, ready[id(dense)]))
        moving = [one for one in tensors if one[2] is not one[3]]  # the others are whole, and stay where they are
        route = Route.between(self._row, self._places, places)
        tally = Tally(self._row, [(dense, self._cuts(name)) for name, dense, _, _ in moving])
        return _Way(
            mask,
            selection,
            places,
            route.to(self.device),
            Exchange([(dense, old, new, self._starts(name)) for name, dense, old, new in moving]),
            fresh,
            ready,
            up=int(tally(places, route.back)),
            down=int(tally(self._places, route.across)),
        )

    def _empty(self, name: str, dense: Tensor, selection: Selection) -> Tensor:
        order = sorted(range(dense.dim()), key=lambda dim: -dense.stride()[dim])
        shape = selection.shape(name, dense.shape)
        return torch.empty_permuted(shape, order, dtype=dense.dtype, device=self.device)

    def _cuts(self, name: str) -> dict[int, int]:
        return {piece.dim: piece.axis for piece in self.graph.tensors.get(name, ())}

    def _starts(self, name: str) -> dict[int, int]:
        return {dim: self._row.start[axis] for dim, axis in self._cuts(name).items()}

    def _now(self) -> tuple[Any, ...]:
        """Other tensors, another tuple."""
        names = self.net.changing
        return (*names, *self.link.addresses, *(self.net.dense(name).data_ptr() for name in names))

    def _forget(self) -> None:
        """Drop what was prepared."""
        if self._ahead:
            self._beside.join()  # the memory is used again
            self._ahead = []

    # --- other networks ----------------------------------------------------------------------------------------------

    def references(self) -> Iterator[nn.Module]:
        for mask in self.masks[1:]:
            if self._filled is None or not torch.equal(self._filled, mask):
                self._fill(mask)
            yield self.reference.module

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        self._remember()
        for mask in masks:
            self._fill(mask)
            yield self.reference.module

    def _remember(self) -> None:
        self._drawn = {name: buffer.clone() for name, buffer in self.net.buffers.items()}

    def _fill(self, mask: Tensor) -> None:
        """Fill the reference with the values of another mask."""
        self._forget()
        self._filled = None
        self._beside.join()
        if self.reference.selection is None:  # it has nothing yet that stays
            self._beside.finish()
            self.reference.load(self.graph.select(mask))
        way = self._towards(mask, self.reference, buffers=self._drawn)
        self.reference.install(way.fresh, way.selection)
        way.exchange.enter(way.route)
        way.exchange.stay(way.route)
        self._up += way.up

    # --- all of it ---------------------------------------------------------------------------------------------------

    def _load(self, selection: Selection, ports: bool = True) -> None:
        self._forget()
        self._beside.finish()
        super()._load(selection, ports)
        self._places = self._row.places(selection)
        self._remember()
        self._up += self._everything(self._places)
        self._filled = None
        if len(self.masks) == 1:  # there may be no other: give the memory back
            self.reference = self._companion()
        else:
            self._filled = self.masks[1]
            self.reference.load(self.graph.select(self._filled))
            names = [name for name in self.net.changing if self.reference.has_own(name)]
            tally = Tally(self._row, [(self.net.dense(name), self._cuts(name)) for name in names])
            assert self.reference.selection is not None
            self._up += int(tally(self._row.places(self.reference.selection)))

    def store(self) -> None:
        self._beside.finish()
        self._down += self._everything(self._places)
        super().store()

    def _everything(self, places: Tensor) -> int:
        """Bytes of all that the network and the optimizer hold."""
        weights = [(self.net.dense(name), self._cuts(name)) for name in self.net.changing]
        states = [(dense, self._cuts(name)) for name, dense, _ in self.link.pairs()]
        return int(Tally(self._row, [*weights, *states])(places))

    def release(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self.link.release(state_dict)

    def adopt(self) -> None:
        self._beside.finish()  # what is on its way home goes into state that is forgotten now
        self._forget()
        super().adopt()
