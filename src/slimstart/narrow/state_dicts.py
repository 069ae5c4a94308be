"""The state dicts of a narrow model and of its optimizers, which contain their structure.

`model.state_dict()` is that of the narrow network, without padding. Its metadata, which PyTorch saves with it, has the
mask, so `model.load_state_dict` can give the model the structure of the saved tensors. An optimizer's state dict has
the mask too. State of a structure that the model does not have yet is kept until it has, so the two can be loaded in
either order. They are enough for evaluation and `finish`. To continue training, load the state dict of SparseTraining,
which has everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.errors import CheckpointError
from slimstart.graph import Selection
from slimstart.narrow.change import Change
from slimstart.narrow.compact import attribute_values, port_sides, ports_in
from slimstart.narrow.hooks import Hook
from slimstart.narrow.networks import Networks
from slimstart.narrow.optimizer_state import held_by
from slimstart.narrow.removed_layers import modules_of
from slimstart.narrow.shrink import METADATA
from slimstart.narrow.store import Key, is_dense
from slimstart.narrow.stream_ports import PORT, positions


class ModelState:
    """Hooks on a model that is narrow.

    Args:
        change: called with a mask and names of layers before tensors of that structure are loaded; makes the model the
            mask's network without these layers.
    """

    def __init__(self, networks: Networks, change: Callable[[Tensor, Sequence[str]], None]) -> None:
        self._networks, self._change = networks, change
        networks.model.register_state_dict_post_hook(Hook(self._saved))
        networks.model.register_load_state_dict_pre_hook(Hook(self._loading))
        networks.model.register_load_state_dict_post_hook(Hook(self._loaded))

    def _saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        selection = self._networks.exact_selection
        metadata[METADATA] = {
            **structure_of(self._networks),
            "attributes": {(owner, name): value for owner, name, value in attribute_values(selection)},
            "identities": dict(modules_of(selection.graph.removed)),
        }
        if self._networks.selection.padded:
            self._networks.flush()
            for name in ports_in(selection.graph):
                state_dict._metadata[prefix + name][PORT] = positions(*port_sides(name, selection)[:2])  # type: ignore[attr-defined]
            for key, name in self._networks.network.names.items():
                if prefix + key in state_dict:
                    exact = self._networks.store.read(Key(name), selection, self._networks.device)
                    state_dict[prefix + key] = exact

    def _loading(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Check everything, change the structure of the model, and pad tensors, which are saved without padding."""
        networks = self._networks
        if metadata.get("assign_to_params_buffers"):
            raise CheckpointError(
                "`assign=True` would replace parameters that the training and its optimizer hold; leave it out, and "
                "values are copied into them"
            )
        found = metadata.get(METADATA)
        selection = networks.exact_selection
        if found is not None:
            if not _is_structure(networks, found):
                raise CheckpointError(
                    "the state dict is of another network, coupling, `keep` or `pretrained`; nothing was loaded. "
                    "Make the SparseTraining as the one whose model was saved"
                )
            selection = networks.dense_graph.without(found.get("removed", ())).select(found["mask"])
        changes = found is not None and not has_structure(networks, found)
        self._check(state_dict, prefix, selection, changes)
        if changes:
            self._change(selection.mask, [layer.name for layer in selection.graph.removed])
        if networks.selection.padded:
            for key, name in networks.network.names.items():
                if (value := state_dict.get(prefix + key)) is not None:
                    networks.store.write(Key(name), selection, value.to(networks.network.tensor(name).dtype))
                    state_dict[prefix + key] = networks.store.read(Key(name), networks.selection, networks.device)

    def _loaded(self, *_: Any) -> None:
        """Write the loaded tensors to the store, from which references are filled."""
        self._networks.flush()

    def _check(self, state_dict: dict[str, Any], prefix: str, selection: Selection, complete: bool) -> None:
        """Refuse tensors of other shapes. PyTorch checks names, but a change of structure needs all tensors."""
        removed = selection.graph.removed
        whole = self._networks.whole_state() if complete else self._networks.model.state_dict()
        own = {key: tensor for key, tensor in whole.items() if not any(layer.has(key) for layer in removed)}
        given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        problems = []
        if complete and (odd := sorted(own.keys() ^ given.keys())):
            problems.append(f"names differ: {', '.join(odd[:3])}")
        for key, tensor in own.items():
            name = self._networks.network.names.get(key)
            shape = tensor.shape if name is None else selection.shape(name, self._networks.store[Key(name)].shape)
            value = given.get(key)
            if key in given and (not isinstance(value, Tensor) or value.shape != shape):
                seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                problems.append(f"{key} is {seen}, and must be {tuple(shape)}")
            elif isinstance(value, Tensor) and not is_dense(value):
                problems.append(f"{key} is a tensor of another kind ({value.layout}, {value.device})")
        if problems:
            raise CheckpointError(
                f"the state dict does not fit the narrow model ({'; '.join(problems[:3])}); nothing was loaded. Dense "
                "weights are loaded before the SparseTraining is made; a training is resumed with the state dict of "
                "SparseTraining; slimstart.shrink_to makes a dense module fit a narrow state dict"
            )


class PartialLoads:
    """Hooks on optimizers, and what has been loaded so far.

    Args:
        loaded: called with an optimizer after it has loaded a state dict, which may have changed its settings.

    Attributes:
        missing: state that must be loaded before training can continue.
    """

    def __init__(
        self, networks: Networks, optimizers: Sequence[Optimizer], loaded: Callable[[Optimizer], None]
    ) -> None:
        self._networks, self._optimizers, self._after = networks, optimizers, loaded
        self.missing: frozenset[str] = frozenset()
        self._structure: Mapping[str, Any] = {}  # of the optimizer's state dict that is being loaded
        # Optimizer state of a structure that the model does not have yet, and that structure.
        self._waiting: dict[Tensor, tuple[dict[str, Any], Mapping[str, Any]]] = {}
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_state_dict_post_hook(self._saved),
                optimizer.register_load_state_dict_pre_hook(self._loading),
                optimizer.register_load_state_dict_post_hook(self._loaded),
            )
        ]

    @property
    def model_alone(self) -> bool:
        """Whether the model has loaded the structure of a state dict that the training has not."""
        return "the optimizer" in self.missing

    def check(self) -> None:
        """Refuse to continue training."""
        if self.missing:
            raise RuntimeError(
                f"a state dict of another structure was loaded without that of {' and '.join(sorted(self.missing))}. "
                "To continue training, load the state dict of SparseTraining, which has everything; `finish` works "
                "without"
            )

    def model_takes(self, change: Change) -> None:
        """Add to a change that gives the model the structure of a state dict: note what must be loaded now."""
        change.set(self, "missing", self.missing | {"the optimizer", "SparseTraining"})
        change.call(self._hand_out)

    def clear(self) -> None:
        """Forget what has been loaded in parts, after everything was loaded."""
        self.missing, self._waiting = frozenset(), {}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hand_out(self) -> None:
        """Give parameters the optimizer state of their present structure, where it was loaded before."""
        for parameter, (state, structure) in list(self._waiting.items()):
            if _fits(state, parameter) and has_structure(self._networks, structure):
                owner = next(one for one in self._optimizers if id(parameter) in held_by([one]))
                owner.state[parameter] = self._waiting.pop(parameter)[0]

    def _saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # PyTorch ignores keys that it does not know.
        state_dict[METADATA] = structure_of(self._networks)

    def _loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        found = state_dict.get(METADATA)
        if found is not None and not _is_structure(self._networks, found):
            raise CheckpointError(
                "the optimizer's state dict is of another network, coupling, `keep` or `pretrained`; nothing was "
                "loaded. Make the SparseTraining as the one whose optimizer was saved"
            )
        self._structure = found or {}

    def _loaded(self, optimizer: Optimizer) -> None:
        self._after(optimizer)
        self._networks.tensors_replaced()
        structure, self._structure = self._structure, {}
        other = not has_structure(self._networks, structure)
        for parameter, state in list(optimizer.state.items()):
            moves = isinstance(parameter, nn.Parameter) and self._networks.name_of(parameter) is not None
            if moves and (other or not _fits(state, parameter)):
                self._waiting[parameter] = optimizer.state.pop(parameter), structure
                self.missing = self.missing | {"SparseTraining"}


def structure_of(networks: Networks) -> dict[str, Any]:
    """Structure that a state dict contains."""
    return {
        "structure": networks.dense_graph.digest,
        "mask": networks.exact_selection.mask.clone(),
        "removed": list(networks.removed),
    }


def _is_structure(networks: Networks, saved: Any) -> bool:
    """Whether this is a result of `structure_of` for a network of the same model."""
    if not isinstance(saved, Mapping) or saved.get("structure") != networks.dense_graph.digest:
        return False
    mask, removed = saved.get("mask"), saved.get("removed", [])
    known = [layer.name for layer in networks.dense_graph.layers]
    num_units = networks.dense_graph.num_units
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (num_units,) and is_dense(mask)
    return fits and isinstance(removed, list | tuple) and all(name in known for name in removed)


def has_structure(networks: Networks, saved: Mapping[str, Any]) -> bool:
    """Whether the present network has the structure of a state dict; a dict without one is taken for the present."""
    mask = saved.get("mask")
    same_layers = set(saved.get("removed", networks.removed)) == set(networks.removed)
    return same_layers and (mask is None or torch.equal(mask, networks.exact_selection.mask))


def _fits(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether optimizer state belongs to a parameter of this shape."""
    return all(v.shape == parameter.shape for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
