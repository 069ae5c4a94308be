"""The narrow networks of a training: the user's own module, its references, and the optimizer state that belongs to it.

`Networks` makes the user's module the network of a mask, and of another one, and of another one. Parameters stay the
same objects; their data, the optimizer's state, the integer attributes and the ports of layers on streams follow the
mask. A change is prepared as a whole (`change.py`), from the store of dense tensors (`store.py`).

A network is exactly as wide as its mask, or, with a `Planner`, has capacity to spare (`capacity.py`): shapes then
change seldom. With `static`, tensors also keep their addresses while the capacity does, so that captured steps stay
valid; and where the store is on the same device, three steps that read no value on the host move a network to another
draw, so that a CUDA graph can hold them:

    propose()        masks -> positions, and whether they fit the capacity
    leave()          the network that is trained -> the store
    accept()         the proposed positions are taken: the store -> the network that is trained
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph, Selection
from slimstart.kernels import Move, Moves
from slimstart.narrow.capacity import Capacity, Layout, Planner, Positions
from slimstart.narrow.change import Change
from slimstart.narrow.compact import (
    narrow_copy,
    tensor_names,
)
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.modules import Companion, Network, WholeBuffers
from slimstart.narrow.optimizer_state import Entry, entries
from slimstart.narrow.padding import PaddingGradients, real_entries
from slimstart.narrow.store import Key, Store
from slimstart.narrow.stream_ports import Side, open_port, set_port


@dataclass(frozen=True)
class Executed:
    """What runs in a step, padding included.

    Attributes:
        flops: of one example through the network that is trained.
        reference_flops: of one example through each reference.
        num_filters: of every layer with filters, in the network that is trained.
    """

    flops: int
    reference_flops: tuple[int, ...]
    num_filters: dict[str, int]


class _Placed(NamedTuple):
    """Masks of a draw, after the at-least-one rule where there is capacity to spare, and what the model then holds."""

    kept: Tensor
    capacity: Capacity | None
    layout: Layout | None
    selection: Selection


class Networks:
    """The user's model as the network of a draw, with the optimizer state that belongs to it, and its references.

    Args:
        model: dense; narrow from the first change on.
        optimizers: over its parameters.
        graph: of the model.
        planner: chooses capacity to spare; None for networks exactly as wide as their mask.
        static: tensors keep their addresses as long as the capacity does.
        device: of the narrow networks, where the dense tensors are to stay on the host.

    Attributes:
        store: the dense tensors.
        masks: (n, U), of the present draw. The first network is trained.
        version: changes whenever tensors of the model have got other storages.
    """

    masks: Tensor
    proposed: Positions
    proposed_masks: Tensor
    _positions: Positions
    _reference_ports: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        graph: ChannelGraph,
        planner: Planner | None = None,
        static: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.graph, self._optimizers = model, graph, tuple(optimizers)
        self._planner, self._static, self._device = planner, static, device
        self._network = Network(model, graph)
        self._names = {id(parameter): name for name, parameter in self._network.parameters.items()}
        self.store = Store({name: self._network.tensor(name) for name in graph.tensors}, host=device is not None)
        self.masks = torch.ones(1, graph.num_units, dtype=torch.bool)
        self.capacity: Capacity | None = None
        self.version = 0
        self.followers: list[tuple[Network, Store]] = []
        self._selection: Selection | None = None
        self._layout: Layout | None = None
        self._companion: Companion | None = None
        self._units: dict[int, Tensor] = {}  # along axes that were asked for
        self._units_version = -1
        self._padding = PaddingGradients(self._network.parameters)
        self._known: Any = None  # what the tables of moves were made for
        self._whole = WholeBuffers(self._network)

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the narrow networks are."""
        return self._device or next(self.model.parameters()).device

    @property
    def module(self) -> nn.Module:
        """The network that is trained."""
        return self.model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The narrow parameters by name."""
        return self._network.parameters

    def tensor(self, name: str) -> Tensor:
        return self._network.tensor(name)

    @property
    def selection(self) -> Selection:
        """What the model holds now, padding included."""
        if self._moves_on_device or self._selection is None:
            kept = self.graph.costs.at_least_one(self.masks[0])
            frame = None if self._layout is None else self._layout.frame(kept)
            self._selection = self.graph.select(kept, frame)
        return self._selection

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter that can shrink; None for others."""
        return self._names.get(id(parameter))

    @property
    def can_pad(self) -> bool:
        """Whether networks may have capacity to spare."""
        return self._planner is not None

    def selection_of(self, masks: Tensor, capacity: Capacity | None) -> Selection:
        """What the model would hold for a draw, with this capacity, or with what would be chosen now."""
        return self._place(masks, None, True, capacity).selection

    def _place(self, masks: Tensor, keep_probs: Tensor | None, look: bool, capacity: Capacity | None) -> _Placed:
        """Where a draw would be; arguments as for `prepare`."""
        if self._planner is None:
            return _Placed(masks.clone(), None, None, self.graph.select(masks[0]))
        kept = self.graph.costs.at_least_one(masks.to(self.device))
        capacity = capacity or self._planner(self.capacity, kept, keep_probs, look)
        layout = self._layout
        if layout is None or capacity is not self.capacity or kept.shape != self.masks.shape:
            layout = Layout(self.graph, capacity, self.device)
        return _Placed(kept, capacity, layout, self.graph.select(kept[0], layout.frame(kept[0])))

    @property
    def exact_selection(self) -> Selection:
        """The same without padding."""
        return self.graph.select(self.masks[0])

    @property
    def _moves_on_device(self) -> bool:
        return self._static and self._layout is not None and not self.store.host

    @property
    def statistics(self) -> Sequence[Tensor]:
        """Buffers that a forward may change."""
        norms = [m for m in self.model.modules() if isinstance(m, _NormBase)]
        buffers = {id(b): b for m in norms for b in m._buffers.values() if b is not None}
        for name in self.graph.tensors:
            tensor = self.tensor(name)
            if not isinstance(tensor, nn.Parameter):
                buffers.setdefault(id(tensor), tensor)
        return list(buffers.values())

    def units_along(self, axis: int) -> Tensor:
        """(n,) int64 on the device: the unit of each position of an axis; the number of all units stands for none."""
        if self._units_version != self.version:
            self._units, self._units_version = {}, self.version
        if axis not in self._units:
            units, positions = self.graph.units_along(axis), self.selection.positions(axis)
            if positions is not None:
                units = torch.where(positions < 0, -1, units[positions.clamp(min=0)])
            self._units[axis] = torch.where(units < 0, self.graph.num_units, units).to(self.device)
        return self._units[axis]

    @property
    def executed(self) -> Executed:
        """What runs in a step now."""
        if self._planner is not None and self.capacity is not None:
            flops = self._planner.flops(self.capacity)
            units = self._planner.typical_units(self.capacity)
            return Executed(flops, (flops,) * (len(self.masks) - 1), num_filters(self.graph, units))
        frames = [self.graph.select(mask) for mask in self.masks.cpu()]
        costs = [self.graph.flops_within(frame.happens[:-1]) for frame in frames]
        return Executed(costs[0], tuple(costs[1:]), num_filters(self.graph, frames[0].mask))

    # --- a change of structure ---------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def flush(self) -> None:
        """Bring the store up to date with the model and the optimizers."""
        self._network.check()
        if self._moves_on_device:
            self.refresh()
            self.leave()
            return
        if self.version:
            self._network.write(self.store, self.selection)
        for entry in self._entries():
            self.store.write(Key(entry.name, entry.key), self.selection, entry.value, self._start(entry))

    def _entries(self) -> list[Entry]:
        return list(entries(self._optimizers, self._names))

    def _start(self, entry: Entry) -> float | None:
        """What a state tensor starts from, where the store has none yet."""
        return 0.0 if Key(entry.name, entry.key) in self.store else entry.initial

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(
        self,
        masks: Tensor,
        keep_probs: Tensor | None = None,
        look: bool = True,
        store: Store | None = None,
        capacity: Capacity | None = None,
    ) -> Change:
        """Everything that makes the model, and the optimizers' state, those of another draw.

        Args:
            masks: (n, U) raw draws.
            keep_probs: s, to choose capacity with foresight; None where the structure is fixed.
            look: whether to find out if less capacity would do.
            store: dense tensors to take in place of the present ones, which are forgotten then.
            capacity: to have in place of one that is chosen.
        """
        if store is None:
            self.flush()
        else:
            self._network.check()
        if store is None and self._planner is None and self.version and torch.equal(masks.cpu(), self.masks.cpu()):
            return Change()  # what is captured, compiled or spread over processes remains valid
        change = Change()
        kept, capacity, layout, selection = self._place(masks, keep_probs, look, capacity)
        in_place = self._static and layout is not None and layout is self._layout and store is None
        self._network.fill(change, store or self.store, selection, self.device, in_place)
        for entry in self._entries() if store is None else ():  # who brings a store brings the optimizers' state too
            value = self.store.read(Key(entry.name, entry.key), selection, self.device)
            change.copy(entry.value, value) if in_place else change.put(entry.state, entry.key, value)
        if self._device is not None and not self.version:
            self._move_whole(change, self._device)
        for network, own in self.followers:
            network.write(own, self.selection)
            network.fill(change, own, selection, self.device, in_place=False)
            network.point_ports(change, selection)
        if layout is None:
            self._network.point_ports(change, selection)
        change.call(self._clear_gradients)
        change.set(self, "_selection", selection)
        change.reshapes = not in_place
        if not in_place:
            change.set(self, "version", self.version + 1)
        if store is not None:
            change.set(self, "store", store)
        if len(kept) == 1:  # there is no reference: give its memory back
            change.set(self, "_companion", None)
        if layout is None:
            change.set(self, "masks", kept)
        else:
            positions = layout(kept)
            if not bool(positions.fits):
                raise AssertionError("a network of this capacity does not have its shapes; please report this")
            change.set(self, "capacity", capacity)
            self._prepare_padding(change, layout, kept, positions, selection, in_place)
        return change

    def _move_whole(self, change: Change, device: torch.device) -> None:
        """What cannot shrink is not stored: it goes to the device with the narrow network, and stays there."""
        for name, tensor in tensor_names(self.model).items():
            if name not in self.graph.tensors:
                change.swap(tensor, tensor.detach().to(device))
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if id(parameter) not in self._names else ():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        change.put(state, key, value.to(device))

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values

    def _prepare_padding(
        self, change: Change, layout: Layout, kept: Tensor, positions: Positions, selection: Selection, in_place: bool
    ) -> None:
        """Positions, ports and padding of a network with capacity to spare."""
        if in_place:
            for mine, its in (
                (self.masks, kept),
                (self._positions.row, positions.row),
                (self._positions.ports, positions.ports),
            ):
                change.copy(mine, its)
            for name, mine in self._padding.real.items():
                change.copy(mine, self._real(selection, name))
            return
        change.set(self, "_layout", layout)
        change.set(self, "masks", kept)
        change.set(self, "_positions", positions)
        change.set(self, "proposed", positions.clone())
        change.set(self, "proposed_masks", kept.clone())
        change.set(self, "_reference_ports", positions.ports[0].clone())
        change.set(self, "_companion", None)
        change.set(self, "_known", None)
        change.set(self._padding, "real", {name: self._real(selection, name) for name in self.parameters})
        self._set_ports(change, self._network, layout, positions.ports[0])
        change.call(self._padding.watch)

    # --- references --------------------------------------------------------------------------------------------------

    def note_buffers(self) -> None:
        """Note the buffers that cannot shrink, for references, at the beginning of a step."""
        self.version += self._whole.note()

    def references(self, note: bool = True) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other.

        Args:
            note: begin with the present values of buffers; otherwise with those that `note_buffers` has seen last.
        """
        if note:
            self.note_buffers()
        if any(self.store[Key(name)].dtype != self.tensor(name).dtype for name in self.graph.tensors):
            self.flush()  # somebody has called `model.to(...)` since the draw
        if self._moves_on_device:
            companion = self._static_companion()
            companion.follow(self._whole.noted)
            for number in range(1, len(self.masks)):
                self.load_reference(number)
                torch.clear_autocast_cache()
                yield companion.module
            return
        yield from self._of_masks(self.masks[1:], noted=True)

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        """Networks of other masks (n, U), one after the other, with the present weights."""
        self.flush()
        yield from self._of_masks(masks, noted=False)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _of_masks(self, masks: Tensor, noted: bool) -> Iterator[nn.Module]:
        companion = self._companion
        if companion is None or self._moves_on_device:  # tensors of the one that graphs know keep their addresses
            companion = Companion(self.model, self.graph, self._whole.places)
        if not self._moves_on_device:
            self._companion = companion
        for mask in masks:
            frame = None
            if self._layout is not None:
                kept = self.graph.costs.at_least_one(mask.to(self.device))
                fits = bool(self._layout(kept[None]).fits)  # shapes that the device has seen already
                frame = self._layout.frame(kept) if fits else None
            companion.become(
                self.store,
                self.graph.select(mask, frame),
                self.device,
                self._whole.noted if noted else self._whole.values,
            )
            yield companion.module

    def copy_of(self, mask: Tensor) -> nn.Module:
        """A network of a mask that stands alone, with the present weights."""
        self.flush()
        module = narrow_copy(self.model, self.store.tensors, self.graph.select(mask), device=self._device)
        remove_hooks(module)
        return module

    # --- the end -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, plain: bool = False) -> Change:
        """Everything that leaves a plain module behind: no padding, no port that is not needed."""
        self.flush()
        change, selection = Change(), self.exact_selection
        for entry in self._entries():
            value = self.store.read(Key(entry.name, entry.key), selection, self.device, plain)
            change.put(entry.state, entry.key, value)
        for network, own in self.followers:
            network.write(own, self.selection)
        for network, own in ((self._network, self.store), *self.followers):
            network.finish(change, own, selection, self.device, plain)
        change.call(self._padding.remove)
        change.call(self._clear_gradients)
        change.set(self, "_layout", None)
        change.set(self, "_planner", None)
        change.set(self, "_selection", selection)
        change.set(self._padding, "real", {})
        change.set(self, "version", self.version + 1)
        change.call(self._release)
        return change

    def _release(self) -> None:
        """Give the memory of references, and of tables, back."""
        self._companion = None
        self._whole.clear()
        for tables in ("_moves", "_mark_real", "_in_reference"):
            vars(self).pop(tables, None)

    def open_ports(self, change: Change) -> None:
        """Give layers on streams their ports, in the model."""
        for layer in self._network.ports.values():
            change.call(open_port, layer)

    # --- padding -----------------------------------------------------------------------------------------------------

    def _real(self, selection: Selection, name: str) -> Tensor:
        return real_entries(selection, name, self.store[Key(name)], self.device)

    def without_hooks(self) -> AbstractContextManager[None]:
        """Gradients of padding are left as they come, until `zero_padding` clears them all at once."""
        return self._padding.left_alone()

    def zero_padding(self) -> None:
        """Clear the gradients of all padding."""
        self._padding.clear()

    def _set_ports(self, change: Change, network: Network, layout: Layout, buffer: Tensor) -> None:
        """Point the ports at static positions."""
        found: dict[str, list[Side | None]] = {name: [None, None] for name in network.ports}
        for (name, is_write), (own, num_own, stream, num_stream) in layout.ports.items():
            found[name][is_write] = Side(buffer[own : own + num_own], buffer[stream : stream + num_stream])
        reads, writes = self.graph.reads, self.graph.writes
        for name, (read, write) in found.items():
            dims = reads[name].dim if name in reads else 0, writes[name].dim if name in writes else 0
            width = 0 if write is None or write.back is None else len(write.back)
            change.call(set_port, network.ports[name], read, write, width, dims)

    # --- what a device does alone ------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, masks: Tensor) -> None:
        """Find positions for raw masks on the device, in `proposed`."""
        assert self._layout is not None
        kept = self.graph.costs.at_least_one(masks)
        self.proposed_masks.copy_(kept)
        self.proposed.copy_(self._layout(kept))

    @torch.no_grad()
    def leave(self) -> None:
        """Write what the trained network holds into the store."""
        self._moves.scatter_(self._positions.row[0])

    @torch.no_grad()
    def accept(self) -> None:
        """Become the proposed networks."""
        self.masks.copy_(self.proposed_masks)
        self._positions.copy_(self.proposed)
        self._moves.gather_(self._positions.row[0])
        self._mark_real.gather_(self._positions.row[0])

    def move(self) -> None:
        """From the present networks to the proposed ones."""
        self.leave()
        self.accept()

    @torch.no_grad()
    def load_reference(self, number: int) -> None:
        """Fill the reference network with the values of mask `number` (1, 2, ...)."""
        self._in_reference.gather_(self._positions.row[number])
        self._reference_ports.copy_(self._positions.ports[number])
        assert self._companion is not None
        if changing := self._whole.changing:
            noted = self._whole.noted
            torch._foreach_copy_([self._companion.buffer(one) for one in changing], [noted[one] for one in changing])

    @property
    def companions(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """Networks that run forward beside the model in a captured step, each with what fills it before."""
        if len(self.masks) == 1:
            return []
        companion = self._static_companion()
        if not self._whole.is_noted:  # in the middle of a window that was loaded
            self.note_buffers()
        companion.follow(self._whole.noted)
        return [(partial(self.load_reference, number), companion.module) for number in range(1, len(self.masks))]

    def _static_companion(self) -> Companion:
        """The reference network, whose tensors keep their addresses."""
        self.refresh()
        assert self._companion is not None
        return self._companion

    def exchanged(self) -> None:
        """Somebody has given the optimizers other tensors."""
        self.version += 1
        self._known = None

    def refresh(self) -> None:
        """Make the tables of moves again if there are other tensors: optimizer state after the first steps, say."""
        self._padding.watch()
        found = self._entries()
        narrow = [self.tensor(name) for name in self.graph.tensors]
        now = [(t.data_ptr(), t.dtype) for t in (*narrow, *(entry.value for entry in found))]
        if now == self._known:
            return
        assert self._layout is not None
        if self._companion is not None and any(
            self._companion.tensor(name).dtype != self.tensor(name).dtype for name in self.graph.tensors
        ):
            self._companion = None
        if self._known is not None:
            self.version += 1
        moves = [
            self._move(name, self.store.like(Key(name), self.tensor(name).detach()), self.tensor(name).detach())
            for name in self.graph.tensors
        ]
        for entry in found:
            dense = self.store.like(Key(entry.name, entry.key), entry.value, self._start(entry))
            moves.append(self._move(entry.name, dense, entry.value))
        self._moves = Moves(moves)
        self._mark_real = Moves(
            [self._move(name, self._ones(name, real), real) for name, real in self._padding.real.items()]
        )
        if len(self.masks) > 1 and self._companion is None:
            self._companion = Companion(self.model, self.graph, self._whole.places)
            change = Change()
            kept = self.masks[1]
            self._companion.fill(
                change, self.store, self.graph.select(kept, self._layout.frame(kept)), self.device, False
            )
            self._set_ports(change, self._companion, self._layout, self._reference_ports)
            change.apply()
        if self._companion is not None:
            self._in_reference = Moves(
                [self._move(n, self.store[Key(n)], self._companion.tensor(n).detach()) for n in self.graph.tensors]
            )
        self._known = now

    def _ones(self, name: str, like: Tensor) -> Tensor:
        return torch.ones((), dtype=like.dtype, device=like.device).expand(self.store[Key(name)].shape)

    def _move(self, name: str, dense: Tensor, narrow: Tensor) -> Move:
        assert self._layout is not None
        return Move(dense, narrow, {p.dim: self._layout.start[p.axis] for p in self.graph.tensors.get(name, ())})


def num_filters(graph: ChannelGraph, units: Tensor) -> dict[str, int]:
    """How many filters of each layer go with these units, those that are always there included."""
    return {name: int((units[owner.clamp(min=0)] | (owner < 0)).sum()) for name, owner in graph.filters.items()}
