"""The narrow networks of a training: the user's own module, its references, and the optimizer state that belongs to it.

`Networks` makes the user's module the network of one mask after another. Parameters remain the same objects; their
data, the optimizer's state, the integer attributes and the ports of layers on streams follow the mask. A change is
prepared as a whole (`change.py`), from the store of dense tensors (`store.py`).

A network is exactly as wide as its mask, or, with a `Planner`, has spare capacity (`capacity.py`, `padding.py`): its
shapes then change seldom.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from slimstart.graph import ChannelGraph, Selection
from slimstart.narrow.capacity import Capacity, Executed, Placement, Planner
from slimstart.narrow.change import Change
from slimstart.narrow.compact import narrow_copy, tensor_names
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.modules import Network, common_type, find_copy, set_mode
from slimstart.narrow.optimizer_state import Entry, entries
from slimstart.narrow.padding import PaddedNetworks, PaddingGradients, real_entries
from slimstart.narrow.references import References
from slimstart.narrow.store import Key, Store


class _Placed(NamedTuple):
    """The placement of the masks of a draw; `capacity` and `placement` are None without padding."""

    masks: Tensor  # after the at-least-one rule where there is padding
    capacity: Capacity | None
    placement: Placement | None
    selection: Selection  # of the first mask


class Networks:
    """The user's model as the network of a draw, with the optimizer state that belongs to it, and its references.

    Args:
        model: network that is trained; dense, and narrow from the first change on.
        planner: chooses spare capacity; None for networks exactly as wide as their mask.
        static: with a planner, tensors keep their addresses as long as the capacity does.
        device: device of the narrow networks, where the dense tensors are to stay on the host.

    Attributes:
        graph: graph of the present networks, which may be without some layers.
        network: the model, as a module that becomes the network of one selection after another.
        masks: (n, U), of the present draw. The first network is trained.
        version: increases whenever tensors of the model get other storages, so that captured steps are invalid.
        followers: copies of the model that change with it, each with its own dense tensors.
        padding: hooks that set the gradients of padding to zero.
    """

    masks: Tensor

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        graph: ChannelGraph,
        planner: Planner | None = None,
        static: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.dense_graph, self.graph, self._optimizers = model, graph, graph, tuple(optimizers)
        self._planner, self._static, self._device = planner, static, device
        self.network = Network(model, graph)
        self._names = {id(parameter): name for name, parameter in self.network.parameters.items()}
        self.store = Store({name: self.network.tensor(name) for name in graph.tensors}, host=device is not None)
        self.masks = torch.ones(1, graph.num_units, dtype=torch.bool)
        self.version = 0
        self.followers: list[tuple[Network, Store]] = []
        self._selection: Selection | None = None
        self._padded: PaddedNetworks | None = None
        self.padding = PaddingGradients(self.network.parameters)
        self.references = References(self)
        self._units: dict[int, Tensor] = {}  # along axes that were asked for
        self._units_version = -1

    # --- the present networks ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the narrow networks."""
        return self._device or next(self.model.parameters()).device

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter that can shrink; None for others."""
        return self._names.get(id(parameter))

    @property
    def capacity(self) -> Capacity | None:
        """The capacity of the present networks; None where they are exactly as wide as their masks."""
        return None if self._padded is None else self._padded.capacity

    @property
    def on_device(self) -> PaddedNetworks:
        """The present networks, with the moves of static ones."""
        assert self._padded is not None, "networks of exact widths are moved by the host"
        return self._padded

    @property
    def are_static(self) -> bool:
        """Whether tensors keep their addresses, and draws are moved on the device."""
        return self._static and self._padded is not None and not self.store.host

    @property
    def selection(self) -> Selection:
        """Layout of the model, padding included."""
        if self.are_static or self._selection is None:  # static networks may have been moved by the device
            kept = self.graph.costs.at_least_one(self.masks[0])
            frame = None if self._padded is None else self._padded.placement.frame(kept)
            self._selection = self.graph.select(kept, frame)
        return self._selection

    @property
    def exact_selection(self) -> Selection:
        """The same without padding."""
        return self.graph.select(self.masks[0])

    def select_like_present(self, mask: Tensor) -> Selection:
        """The selection of another mask, padded to the present shapes if it fits their capacity."""
        frame = None
        if self._padded is not None:
            kept, placement = self.graph.costs.at_least_one(mask.to(self.device)), self._padded.placement
            frame = placement.frame(kept) if bool(placement(kept[None]).fits) else None
        return self.graph.select(mask, frame)

    def selection_of(self, masks: Tensor, capacity: Capacity | None, removed: Iterable[str]) -> Selection:
        """Layout of the model for a draw, with this capacity or, if None, with one that is chosen now."""
        return self._place(masks, None, True, capacity, self._without(removed)).selection

    def _without(self, removed: Iterable[str]) -> ChannelGraph:
        """The graph without some layers: the present one, with what it has computed, if they are the present ones."""
        removed = set(removed)
        return self.graph if removed == set(self.removed) else self.dense_graph.without(removed)

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the layers that the present networks are without."""
        return tuple(layer.name for layer in self.graph.removed)

    def whole_state(self) -> dict[str, Tensor]:
        """The model's own tensors by the keys of its state dict, with those of removed layers."""
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        for name, module in self.network.removed_modules(self.graph):
            state |= {f"{name}.{key}": tensor for key, tensor in module.state_dict(keep_vars=True).items()}
        return state

    def dense_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the model would have with all its channels and layers; a copy."""
        self.flush()
        names = self.network.names
        return {
            key: self.store[Key(names[key])].clone() if key in names else tensor.detach().clone()
            for key, tensor in self.whole_state().items()
        }

    @property
    def statistics(self) -> Sequence[Tensor]:
        """Buffers that a forward may change."""
        norms = [m for m in self.model.modules() if isinstance(m, _NormBase)]
        of_norms = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
        return [b for name, b in self.model.named_buffers() if name in self.graph.tensors or id(b) in of_norms]

    def units_along(self, axis: int) -> Tensor:
        """(n,) int64 on the device: the unit of each position of an axis; `graph.num_units` where there is none."""
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
        """Costs of a step with the present networks."""
        if self._planner is not None and self._padded is not None:
            return self._planner.executed(self._padded.capacity, len(self.masks))
        return Executed.exactly(self.graph, self.masks.cpu())

    # --- a change of structure ---------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def flush(self) -> None:
        """Bring the store up to date with the model and the optimizers."""
        self.network.check()
        if self.are_static:
            self.refresh()
            self.on_device.write_back()
            return
        if self.version:  # before the first change, the model has the dense tensors themselves
            self.network.write(self.store, self.selection)
        for entry in self._entries():
            self.store.write(entry.place, self.selection, entry.value, entry.start_in(self.store))

    def _entries(self) -> list[Entry]:
        names = {key: name for key, name in self._names.items() if name in self.graph.tensors}
        return list(entries(self._optimizers, names))

    def _place(
        self, masks: Tensor, keep_probs: Tensor | None, look: bool, capacity: Capacity | None, graph: ChannelGraph
    ) -> _Placed:
        """The placement of a draw in a graph; other arguments as for `prepare`."""
        if self._planner is None:
            return _Placed(masks.clone(), None, None, graph.select(masks[0]))
        kept = graph.costs.at_least_one(masks.to(self.device))
        now = self._padded if graph is self.graph else None
        present = None if now is None else now.capacity
        capacity = capacity or self._planner.of(graph)(present, kept, keep_probs, look)
        if now is not None and capacity is now.capacity and kept.shape == self.masks.shape:
            placement = now.placement
        else:
            placement = Placement(graph, capacity, self.device)
        return _Placed(kept, capacity, placement, graph.select(kept[0], placement.frame(kept[0])))

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(
        self,
        masks: Tensor,
        keep_probs: Tensor | None = None,
        look: bool = True,
        store: Store | None = None,
        capacity: Capacity | None = None,
        removed: Iterable[str] | None = None,
        followers: Sequence[Store] | None = None,
    ) -> Change:
        """Everything that makes the model, and the optimizers' state, those of another draw.

        Args:
            masks: (n, U) raw draws.
            keep_probs: s, to choose capacity for later draws too; None where the structure is fixed.
            look: whether to find out if less capacity would do.
            store: dense tensors that replace the present ones; the caller then also restores the optimizers' state.
            capacity: of the new networks; by default one is chosen.
            removed: names of layers that the new networks are without; by default those of the present ones. The
                optimizer state of such a layer is dropped. A layer that returns has its stored weights and new state.
            followers: dense tensors that replace the present ones of the followers.
        """
        graph = self.graph if removed is None else self._without(removed)
        same_layers = graph is self.graph
        returning = set(self.graph.removed) - set(graph.removed)
        if any(layer in network.graph.removed for layer in returning for network, _ in self.followers):
            raise RuntimeError("a layer returns that a copy given to `follow` was made without; make the copy again")
        if store is None:
            self.flush()
        else:
            self.network.check()
        present = self.version and same_layers and torch.equal(masks.cpu(), self.masks.cpu())
        if store is None and self._planner is None and present:
            return Change()  # nothing changes, so captured and compiled steps remain valid
        change = Change()
        placed = self._place(masks, keep_probs, look, capacity, graph)
        selection, now = placed.selection, self._padded
        # Captured steps know tensors by address: as long as the shapes are the same, new values are copied into them.
        in_place = self._static and now is not None and placed.placement is now.placement and store is None
        self.network.fill(change, store or self.store, selection, self.device, in_place)
        for entry in self._entries() if store is None else ():
            if entry.name not in graph.tensors:
                continue
            value = self.store.read(entry.place, selection, self.device)
            change.copy(entry.value, value) if in_place else change.put(entry.state, entry.key, value)
        if self._device is not None and not self.version:
            self._move_fixed(change, self._device)
        stores = [own for _, own in self.followers] if followers is None else followers
        followed = [(network, own) for (network, _), own in zip(self.followers, stores, strict=True)]
        for network, own in followed:
            if followers is None:  # averages have been updated since the last change; save those first
                network.write(own, self.selection)
            network.fill(change, own, selection, self.device, in_place=False)
            network.point_ports(change, selection)
        change.set(self, "followers", followed)
        if not same_layers:
            self._change_layers(change, graph)
        change.call(self._clear_gradients)
        change.set(self, "_selection", selection)
        change.reshapes = not in_place
        if not in_place:
            change.set(self, "version", self.version + 1)
        if store is not None:
            change.set(self, "store", store)
        if len(placed.masks) == 1:  # there is no reference: free its memory
            change.call(self.references.release)
        if placed.placement is None:
            self.network.point_ports(change, selection)
            change.set(self, "masks", placed.masks)
        else:
            self._pad(change, placed, store or self.store, in_place)
        return change

    def _change_layers(self, change: Change, graph: ChannelGraph) -> None:
        """Take over a graph with other layers."""
        for layer in set(graph.removed) - set(self.graph.removed):
            for name in layer.modules:
                for parameter in self.model.get_submodule(name).parameters():
                    for optimizer in self._optimizers:
                        change.call(optimizer.state.pop, parameter, None)
                    if (kept := self.name_of(parameter)) is not None:
                        change.call(self.store.drop_state, kept)
        change.set(self, "graph", graph)
        if self._planner is not None:
            change.set(self, "_planner", self._planner.of(graph))
        change.call(self.references.release)

    def _pad(self, change: Change, placed: _Placed, store: Store, in_place: bool) -> None:
        """Positions, ports and padding of a network with spare capacity."""
        assert placed.placement is not None
        assert placed.capacity is not None
        positions = placed.placement(placed.masks)
        if not bool(positions.fits):
            raise AssertionError("a network of this capacity does not have its shapes; please report this")
        real = {
            name: real_entries(placed.selection, name, self.store[Key(name)], self.device)
            for name in self.network.parameters
        }
        if in_place:
            now = self.on_device.positions
            change.copy(self.masks, placed.masks)
            change.copy(now.row, positions.row)
            change.copy(now.ports, positions.ports)
            for name, mine in self.padding.real.items():
                change.copy(mine, real[name])
            return
        padded = PaddedNetworks(
            self.network, store, self.references, placed.capacity, placed.placement, placed.masks, positions
        )
        change.set(self, "_padded", padded)
        change.set(self, "masks", padded.masks)
        change.set(self.padding, "real", real)
        padded.set_ports(change, self.network, positions.ports[0])
        change.call(self.padding.register)

    def _move_fixed(self, change: Change, device: torch.device) -> None:
        """Move what cannot shrink, and so is not in the store, to the device of the narrow network."""
        for name, tensor in tensor_names(self.model).items():
            if name not in self.graph.tensors:
                change.swap(tensor, tensor.detach().to(device))
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if id(parameter) not in self._names else ():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        change.put(state, key, value.to(device))

    def _clear_gradients(self) -> None:
        self.network.clear_gradients()
        torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values

    @torch.no_grad()
    def follower_stores(self) -> Iterator[Store]:
        """Copies of the dense tensors of all followers."""
        for network, own in self.followers:
            network.write(own, self.selection)
            yield own.copy()

    def follow(self, follower: nn.Module) -> None:
        """Let a copy of the model change its structure with it; `follower` as for `find_copy`."""
        network = Network(find_copy(follower, self.model), self.graph)
        self.flush()
        self.followers.append((network, self.store.copy()))

    def copy_of(self, mask: Tensor) -> nn.Module:
        """An independent network of a mask, with the present layers and weights."""
        self.flush()
        module = narrow_copy(self.model, self.store.tensors, self.graph.select(mask), device=self._device)
        remove_hooks(module)
        return module

    def dense_copy(self) -> nn.Module:
        """An independent network with all channels and layers, and the present weights."""
        self.flush()
        whole, removed = self.dense_graph, list(self.network.removed_modules(self.graph))
        model = copy.deepcopy(self.model) if removed else self.model
        for name, module in removed:
            returned, training = copy.deepcopy(module), model.get_submodule(name).training
            set_mode(returned, training)
            model.set_submodule(name, returned)
        everything = whole.select(torch.ones(whole.num_units, dtype=torch.bool))
        found = narrow_copy(model, self.store.tensors, everything, device=self._device)
        for name, _ in removed:
            found.get_submodule(name).to(device=self.device, dtype=common_type(self.model))
        remove_hooks(found)
        return found

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, plain: bool = False) -> Change:
        """Everything that makes the model a plain module: no padding, no unneeded port, and with `plain` no port."""
        self.flush()
        change, selection = Change(), self.exact_selection
        for entry in self._entries():
            change.put(entry.state, entry.key, self.store.read(entry.place, selection, self.device, plain))
        for network, own in self.followers:
            network.write(own, self.selection)
        for network, own in ((self.network, self.store), *self.followers):
            network.finish(change, own, selection, self.device, plain)
        change.call(self.padding.remove)
        change.call(self._clear_gradients)
        change.set(self, "_padded", None)
        change.set(self, "_planner", None)
        change.set(self, "_selection", selection)
        change.set(self.padding, "real", {})
        change.set(self, "version", self.version + 1)
        change.call(self.references.end)
        return change

    # --- static networks ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Let moves on the device know the present tensors: those of optimizer state after the first step, say."""
        self.padding.register()
        self.version += self.on_device.make_tables(self._entries(), self.padding.real)

    def tensors_replaced(self) -> None:
        """Note that the optimizers have been given other tensors."""
        self.version += 1
        if self._padded is not None:
            self._padded.forget_tables()

    @property
    def static_references(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """The references of a captured step, each with the function that fills it first."""
        return self.references.static
