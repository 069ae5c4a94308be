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

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimstart.graph import ChannelGraph, Selection
from slimstart.kernels import Move, Moves
from slimstart.narrow.capacity import Capacity, Layout, Planner, Positions
from slimstart.narrow.change import Change
from slimstart.narrow.compact import (
    RECORD,
    Record,
    attribute_values,
    narrow_copy,
    port_sides,
    ports_in,
    tensor_names,
    tensor_places,
)
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.optimizer_state import Entry, entries
from slimstart.narrow.store import Key, Store
from slimstart.narrow.stream_ports import Side, close_port, open_port, set_port


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


class Network:
    """A module whose tensors are those of a selection; the same module for ever.

    Args:
        module: of the class of the graph's model, with the same names.
        graph: of the model.
    """

    def __init__(self, module: nn.Module, graph: ChannelGraph) -> None:
        self.module, self.graph = module, graph
        places = tensor_places(module)
        self._owners = {
            name: [(module.get_submodule(path), key) for path, key in places[name]] for name in graph.tensors
        }
        self._parameters = {name: p for name, p in module.named_parameters() if name in graph.tensors}
        owners = {owner for found in self._owners.values() for owner, _ in found}
        self._layers = [
            (f"{path}.{key}".lstrip("."), parent, key, layer)
            for path, parent in module.named_modules()
            for key, layer in parent._modules.items()
            if layer is not None and not owners.isdisjoint(layer.modules())
        ]
        self.ports = {name: module.get_submodule(name) for name in ports_in(graph)}

    def tensor(self, name: str) -> Tensor:
        """The narrow tensor of this name, as it is now: `model.to(...)` replaces buffers."""
        owner, key = self._owners[name][0]
        tensor: Tensor = getattr(owner, key)
        return tensor

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that can shrink, by name."""
        return self._parameters

    def check(self) -> None:
        """Refuse a module in which somebody has exchanged a layer or a parameter."""
        layers = [name for name, parent, key, layer in self._layers if parent._modules.get(key) is not layer]
        for name in layers or [
            name
            for name, parameter in self._parameters.items()
            if any(owner._parameters.get(key) is not parameter for owner, key in self._owners[name])
        ]:
            raise RuntimeError(
                f"{name!r} of the model is another {'layer' if layers else 'parameter'} than when the SparseTraining "
                "was made. Replace layers before that; `finish` comes before other changes"
            )

    def fill(self, change: Change, store: Store, selection: Selection, device: torch.device, in_place: bool) -> None:
        """Become the network of a selection, with the values of a store."""
        assign = change.copy if in_place else change.swap
        for name in self.graph.tensors:
            assign(self.tensor(name), store.read(Key(name), selection, device))
        for owner, attribute, value in attribute_values(self.module, selection):
            change.set(owner, attribute, value)

    def point_ports(self, change: Change, selection: Selection) -> None:
        """Point the ports of layers on streams at what a selection keeps."""
        for name, layer in self.ports.items():
            sides, width, dims = port_sides(name, selection)
            change.call(set_port, layer, sides[0], sides[1], width, dims)


class Companion(Network):
    """A second network beside the model: it shares parameters that cannot shrink, and has buffers of its own.

    So a forward through it leaves no trace in the model.
    """

    def __init__(self, networks: Networks) -> None:
        model, graph = networks.model, networks.graph
        memo: dict[int, object] = {}
        for name, tensor in tensor_names(model).items():
            if name in graph.tensors:
                empty = tensor.detach().new_empty(0)
                memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor
        module = copy.deepcopy(model, memo)
        remove_hooks(module)
        super().__init__(module, graph)
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._seen: dict[int, tuple[int, int]] = {}  # versions of both buffers when they were last equal
        twins = dict(self._pairs)
        self._buffers = [(twins[owner], key) for owner, key in networks.whole_buffers]
        self.selection: Selection | None = None

    @torch.no_grad()
    def follow(self, values: Sequence[Tensor]) -> None:
        """Be in the model's modes, and have these values of the buffers that cannot shrink."""
        for mine, twin in self._pairs:
            if twin.training is not mine.training:  # to set an attribute of a module takes far longer than to look
                twin.training = mine.training
        for number, (value, (twin, key)) in enumerate(zip(values, self._buffers, strict=True)):
            own = self.buffer(number)
            if self._seen.get(number) == (value._version, own._version):
                continue
            if _alike(own, value):
                own.copy_(value)
            else:
                own = twin._buffers[key] = value.detach().clone()
            self._seen[number] = (value._version, own._version)

    def buffer(self, number: int) -> Tensor:
        """One of the buffers that cannot shrink."""
        twin, key = self._buffers[number]
        buffer: Tensor = getattr(twin, key)
        return buffer

    def become(self, store: Store, selection: Selection, device: torch.device, values: Sequence[Tensor]) -> None:
        """Be the network of a selection; `values` as for `follow`."""
        change = Change()
        self.fill(change, store, selection, device, in_place=False)
        self.point_ports(change, selection)
        change.apply()
        torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values
        self.selection = selection
        self.follow(values)


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
        self._real: dict[str, Tensor] = {}  # for every padded parameter, 1 where it is real and 0 where it is padding
        self._zeroing: dict[str, RemovableHandle] = {}
        self._zeroing_on = True
        self._known: Any = None  # what the tables of moves were made for
        shrinking = {id(self._network.tensor(name)) for name in graph.tensors}
        self.whole_buffers = [
            (owner, key)
            for owner in model.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and id(buffer) not in shrinking
        ]
        self._noted: dict[int, tuple[Tensor, int]] = {}  # values of these buffers, and their versions then
        self._changing: set[int] = set()  # those that do not stay as they are

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
        if self._planner is None:
            return self.graph.select(masks[0])
        kept = self.graph.costs.at_least_one(masks.to(self.device))
        capacity = capacity or self._planner(self.capacity, kept, None)
        return self.graph.select(kept[0], Layout(self.graph, capacity, self.device).frame(kept[0]))

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
        for name in self.graph.tensors if self.version else ():
            self.store.write(Key(name), self.selection, self.tensor(name).detach())
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
        change, layout, frame = Change(), None, None
        kept = masks.clone()
        if self._planner is not None:
            kept = self.graph.costs.at_least_one(masks.to(self.device))
            capacity = capacity or self._planner(self.capacity, kept, keep_probs, look)
            layout = self._layout
            if layout is None or capacity is not self.capacity or kept.shape != self.masks.shape:
                layout = Layout(self.graph, capacity, self.device)
            frame = layout.frame(kept[0])
        selection = self.graph.select(kept[0], frame)
        in_place = self._static and layout is not None and layout is self._layout and store is None
        self._network.fill(change, store or self.store, selection, self.device, in_place)
        for entry in self._entries() if store is None else ():  # who brings a store brings the optimizers' state too
            value = self.store.read(Key(entry.name, entry.key), selection, self.device)
            change.copy(entry.value, value) if in_place else change.put(entry.state, entry.key, value)
        if self._device is not None and not self.version:
            self._move_whole(change, self._device)
        for network, own in self.followers:
            for name in self.graph.tensors if self.version else ():
                own.write(Key(name), self.selection, network.tensor(name).detach())
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
            for name, mine in self._real.items():
                change.copy(mine, self._real_entries(selection, name))
            return
        change.set(self, "_layout", layout)
        change.set(self, "masks", kept)
        change.set(self, "_positions", positions)
        change.set(self, "proposed", positions.clone())
        change.set(self, "proposed_masks", kept.clone())
        change.set(self, "_reference_ports", positions.ports[0].clone())
        change.set(self, "_companion", None)
        change.set(self, "_known", None)
        change.set(self, "_real", {name: self._real_entries(selection, name) for name in self.parameters})
        self._set_ports(change, self._network, layout, positions.ports[0])
        change.call(self._zero_padding_gradients)

    # --- references --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def note_buffers(self) -> None:
        """Note the buffers that cannot shrink, for references: they begin a step with what the model begins it with.

        A forward of the model may change them, and may run in parallel.
        """
        copies: list[Tensor] = []
        values: list[Tensor] = []
        for number, (owner, key) in enumerate(self.whole_buffers):
            buffer: Tensor = getattr(owner, key)
            noted, version = self._noted.get(number, (None, -1))
            if noted is None or not _alike(noted, buffer):
                self._noted[number] = buffer.detach().clone(), buffer._version
                self.version += number in self._changing  # a graph has the other one
                continue
            if version != buffer._version:
                self.version += number not in self._changing  # references are captured again, with it
                self._changing.add(number)
                self._noted[number] = noted, buffer._version
            if number in self._changing:  # without a new version, too: a graph gives none
                copies.append(noted)
                values.append(buffer)
        if copies:
            torch._foreach_copy_(copies, values)

    def _values(self, noted: bool) -> list[Tensor]:
        """Of the buffers that cannot shrink: those noted, or the present ones."""
        if noted:
            return [self._noted[number][0] for number in range(len(self.whole_buffers))]
        return [getattr(owner, key) for owner, key in self.whole_buffers]

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
            companion.follow(self._values(noted=True))
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
            companion = Companion(self)
        if not self._moves_on_device:
            self._companion = companion
        for mask in masks:
            frame = None
            if self._layout is not None:
                kept = self.graph.costs.at_least_one(mask.to(self.device))
                fits = bool(self._layout(kept[None]).fits)  # shapes that the device has seen already
                frame = self._layout.frame(kept) if fits else None
            companion.become(self.store, self.graph.select(mask, frame), self.device, self._values(noted))
            yield companion.module

    def copy_of(self, mask: Tensor | None = None, plain: bool = False) -> nn.Module:
        """A plain network of a mask, by default the present one, with the present weights."""
        self.flush()
        selection = self.exact_selection if mask is None else self.graph.select(mask)
        module = narrow_copy(self.model, self.store.tensors, selection, plain, self._device)
        remove_hooks(module)
        return module

    # --- the end -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, plain: bool = False) -> Change:
        """Everything that leaves a plain module behind: no padding, no port that is not needed."""
        self.flush()
        change, selection = Change(), self.exact_selection
        for name in self.graph.tensors:
            change.swap(self.tensor(name), self.store.read(Key(name), selection, self.device, plain))
        for entry in self._entries():
            change.put(
                entry.state, entry.key, self.store.read(Key(entry.name, entry.key), selection, self.device, plain)
            )
        for owner, attribute, value in attribute_values(self.model, selection, plain):
            change.set(owner, attribute, value)
        for network, own in self.followers:
            for name in self.graph.tensors:
                own.write(Key(name), self.selection, network.tensor(name).detach())
                change.swap(network.tensor(name), own.read(Key(name), selection, self.device, plain))
            for owner, attribute, value in attribute_values(network.module, selection, plain):
                change.set(owner, attribute, value)
        for network in (self._network, *(network for network, _ in self.followers)):
            for name, layer in network.ports.items():
                sides, width, dims = port_sides(name, selection)
                if plain or all(side is None for side in sides):
                    change.call(close_port, layer)
                else:
                    change.call(set_port, layer, sides[0], sides[1], width, dims)
            dense = {name: self.store[Key(name)] for name in self.graph.tensors}
            shapes = {name: tuple(dense.get(name, t).shape) for name, t in tensor_names(network.module).items()}
            shapes = {name: shape for name, shape in shapes.items() if ".stream_" not in f".{name}"}
            change.put(vars(network.module), RECORD, Record(tuple(self.graph.attributes), shapes))
        for handle in self._zeroing.values():
            change.call(handle.remove)
        change.call(self._clear_gradients)
        change.set(self, "_layout", None)
        change.set(self, "_planner", None)
        change.set(self, "_selection", selection)
        change.set(self, "_real", {})
        change.set(self, "version", self.version + 1)
        change.call(self._release)
        return change

    def _release(self) -> None:
        """Give the memory of references, and of tables, back."""
        self._companion = None
        self._noted.clear()
        for tables in ("_moves", "_mark_real", "_in_reference"):
            vars(self).pop(tables, None)

    def open_ports(self, change: Change) -> None:
        """Give layers on streams their ports, in the model."""
        for layer in self._network.ports.values():
            change.call(open_port, layer)

    # --- padding -----------------------------------------------------------------------------------------------------

    def _real_entries(self, selection: Selection, name: str) -> Tensor:
        dense = self.store[Key(name)]
        narrow = torch.ones(selection.shape(name, dense.shape), dtype=dense.dtype, device=self.device)
        for dim, positions in selection.indices(name, self.device).items():
            narrow.mul_((positions >= 0).to(dense.dtype).view([-1 if d == dim else 1 for d in range(dense.dim())]))
        return _in_order_of(dense, narrow)

    def _zero_padding_gradients(self) -> None:
        """Keep gradients of padding at zero: otherwise it would learn.

        Padding computes zero, but a gradient can reach it all the same: through a stream that another layer writes too,
        or from an activation that does not keep zero.
        """
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in self._zeroing:
                hook = partial(self._zero_padding, name)
                self._zeroing[name] = parameter.register_post_accumulate_grad_hook(hook)

    def _zero_padding(self, name: str, parameter: Tensor) -> None:
        if self._zeroing_on and parameter.grad is not None and name in self._real:
            parameter.grad.mul_(self._real[name])

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Gradients of padding are left as they come, until `zero_padding` clears them all at once."""
        self._zeroing_on = False
        try:
            yield
        finally:
            self._zeroing_on = True

    def zero_padding(self) -> None:
        """Clear the gradients of all padding."""
        with_grad = [
            (p.grad, self._real[name]) for name, p in self.parameters.items() if p.grad is not None and self._real
        ]
        if with_grad:
            torch._foreach_mul_([grad for grad, _ in with_grad], [real for _, real in with_grad])

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
        if self._changing:
            changing = sorted(self._changing)
            torch._foreach_copy_(
                [self._companion.buffer(one) for one in changing], [self._noted[one][0] for one in changing]
            )

    @property
    def companions(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """Networks that run forward beside the model in a captured step, each with what fills it before."""
        if len(self.masks) == 1:
            return []
        companion = self._static_companion()
        if not self._noted:  # in the middle of a window that was loaded
            self.note_buffers()
        companion.follow(self._values(noted=True))
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
        self._zero_padding_gradients()
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
        self._mark_real = Moves([self._move(name, self._ones(name, real), real) for name, real in self._real.items()])
        if len(self.masks) > 1 and self._companion is None:
            self._companion = Companion(self)
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


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _in_order_of(dense: Tensor, narrow: Tensor) -> Tensor:
    order = sorted(range(dense.dim()), key=lambda dim: -dense.stride()[dim])
    inverse = [order.index(dim) for dim in range(dense.dim())]
    return narrow.permute(order).contiguous().permute(inverse)
