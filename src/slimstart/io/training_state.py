"""The state dict of a training: made, checked as a whole, and turned into a change of the networks and optimizers."""

from __future__ import annotations

import copy
import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slimstart.errors import CheckpointError
from slimstart.narrow import Capacity, Change, Key, Networks, Store
from slimstart.narrow.optimizer_state import parameters_of
from slimstart.narrow.shrink import METADATA
from slimstart.narrow.store import is_dense

FORMAT = "slimstart.training/2"
_KEYS = frozenset(
    "format coupling structure num_steps held_steps settled masks removed capacity pending followers policy model "
    "optimizers random".split()
)
# Entries that a scheduler makes in parameter groups.
_SCHEDULED = frozenset("initial_lr max_lr min_lr swa_lr base_momentum max_momentum".split())

_MAX_VALUES, _MAX_DEPTH = 1_000_000, 50
_END = object()


@dataclass(frozen=True)
class Saved:
    """A state dict that has been checked, with copies of its tensors."""

    num_steps: int
    held_steps: int
    settled: bool
    masks: Tensor
    removed: list[str]
    pending: Tensor | None
    capacity: Capacity | None
    policy: dict[str, Any]
    store: Store
    followers: list[Store]  # dense tensors of the copies that follow the model
    others: dict[str, Tensor]  # tensors of the model that cannot shrink
    optimizers: list[dict[str, Any]]
    random: Tensor


def dense_state(optimizer: Optimizer, networks: Networks) -> dict[str, Any]:
    """A copy of an optimizer's state dict with the state of all channels. The store must be up to date."""
    found = {key: value for key, value in copy.deepcopy(optimizer.state_dict()).items() if key != METADATA}
    for index, parameter in enumerate(parameters_of(optimizer)):
        name = networks.name_of(parameter)
        for key, value in found["state"].get(index, {}).items():
            if name is not None and isinstance(value, Tensor) and value.dim() > 0:
                found["state"][index][key] = networks.store[Key(name, key)].clone()
    return found


def state_dict_of(networks: Networks, optimizers: Sequence[Optimizer], **progress: Any) -> dict[str, Any]:
    """The state dict of a training; `progress` has the entries that networks and optimizers do not have."""
    capacity = networks.capacity
    return {
        "format": FORMAT,
        "coupling": networks.dense_graph.coupling,
        "structure": networks.dense_graph.digest,
        **progress,
        "masks": networks.masks.to("cpu", copy=True),
        "removed": list(networks.removed),
        "capacity": None if capacity is None else {"units": capacity.units, "streams": capacity.streams},
        "model": networks.dense_state_dict(),
        "followers": [store.tensors for store in networks.follower_stores()],
        "optimizers": [dense_state(one, networks) for one in optimizers],
        "random": torch.get_rng_state(),
    }


def checked(
    state: Any, networks: Networks, optimizers: Sequence[Optimizer], num_masks: int, learns_from_losses: bool
) -> Saved:
    """Check a state dict of a training.

    Args:
        num_masks: number of masks that the learner draws.

    Raises:
        CheckpointError: it is of another kind, another network or other optimizers.
    """
    _check_plain(state)
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        seen = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"this is no state dict of SparseTraining: 'format' is {reprlib.repr(seen)}, and must be {FORMAT!r}"
        )
    if missing := sorted(_KEYS - state.keys()):
        raise CheckpointError(f"the state dict lacks {', '.join(missing)}; it is incomplete")
    if unknown := sorted(map(str, state.keys() - _KEYS)):
        raise CheckpointError(f"the state dict has {', '.join(unknown)} too; it was written by another version")
    graph = networks.dense_graph
    for key, own in (("coupling", graph.coupling), ("structure", graph.digest)):
        if state[key] != own:
            raise CheckpointError(
                f"the state dict has {key}={reprlib.repr(state[key])}, this training {own!r}: other network, policy, "
                "`keep` or `pretrained`"
            )
    for key in ("num_steps", "held_steps"):
        if type(state[key]) is not int or state[key] < 0:
            raise CheckpointError(
                f"the state dict has {key}={reprlib.repr(state[key])}, which is not a number of steps"
            )
    for key, kind in (("settled", bool), ("policy", Mapping), ("model", Mapping)):
        if not isinstance(state[key], kind):
            raise CheckpointError(f"the state dict's {key} is not a {kind.__name__}")
    dense = {name: networks.store[Key(name)] for name in graph.tensors}
    layers = {layer.name for layer in graph.layers}
    removed = state["removed"]
    if not isinstance(removed, list) or not all(isinstance(name, str) and name in layers for name in removed):
        raise CheckpointError(f"the state dict is without {reprlib.repr(removed)}, and the network has no such layers")
    own_tensors = networks.whole_state()
    names = networks.network.names
    wanted = {key: dense[names[key]].shape if key in names else tensor.shape for key, tensor in own_tensors.items()}
    if _shapes(state["model"]) != wanted:
        raise CheckpointError("the state dict's model differs in its tensors or their shapes")
    for key, tensor in own_tensors.items():
        found = state["model"][key]
        if found.dtype != tensor.dtype and not (found.is_floating_point() and tensor.is_floating_point()):
            raise CheckpointError(f"the state dict has {key} in {found.dtype}, the model in {tensor.dtype}")
    for what, masks in (("masks", state["masks"]), ("pending", state["pending"])):
        if masks is None and what == "pending":
            continue
        fine = isinstance(masks, Tensor) and masks.dtype == torch.bool and masks.dim() == 2 and len(masks) > 0
        if not fine or masks.shape[1] != graph.num_units:
            raise CheckpointError(f"the state dict's {what} do not fit the network")
    rows, waits = len(state["masks"]), learns_from_losses and not state["settled"] and state["held_steps"] > 0
    if rows != num_masks and not (state["settled"] and rows == 1):
        raise CheckpointError(f"the state dict has {rows} masks, and this policy draws {num_masks}")
    pending = state["pending"]
    if (pending is not None) != waits or (pending is not None and len(pending) != num_masks):
        raise CheckpointError("the state dict's pending masks do not fit its steps since the last draw")
    random = state["random"]
    torch.Generator().set_state(random.cpu())  # raises for anything but a generator's state

    def store_of(tensors: Mapping[str, Tensor]) -> Store:
        place = "cpu" if networks.store.host else None
        copies = {
            name: value.to(place or dense[name].device, dense[name].dtype, copy=True) for name, value in tensors.items()
        }
        return Store(copies, networks.store.host)

    followers = state["followers"]
    if not isinstance(followers, list) or len(followers) != len(networks.followers):
        number = len(followers) if isinstance(followers, list) else "no"
        raise CheckpointError(
            f"the state dict has {number} copies that follow the model, and this training {len(networks.followers)}; "
            "call `follow` as often before loading as before saving"
        )
    shapes = {name: tensor.shape for name, tensor in dense.items()}
    if any(not isinstance(one, Mapping) or _shapes(one) != shapes for one in followers):
        raise CheckpointError("the state dict's copies that follow the model differ in their tensors or their shapes")
    others = {key: value.clone() for key, value in state["model"].items() if key not in names}
    return Saved(
        state["num_steps"],
        state["held_steps"],
        state["settled"],
        state["masks"].clone(),
        list(state["removed"]),
        None if pending is None else pending.clone(),
        _capacity(state["capacity"], networks),
        copy.deepcopy(dict(state["policy"])),
        store_of({names[key]: tensor for key, tensor in state["model"].items() if key in names}),
        list(map(store_of, followers)),
        others,
        _checked_optimizers(state["optimizers"], optimizers, networks),
        random.cpu().clone(),
    )


def _capacity(saved: Any, networks: Networks) -> Capacity | None:
    if saved is None:  # by a training without padding
        return None
    if not isinstance(saved, Mapping):
        raise CheckpointError("the state dict's capacity is not a mapping")
    found = Capacity(saved["units"].clone(), saved["streams"].clone())
    groups, events = len(networks.dense_graph.groups), len(networks.dense_graph.costs.events)
    fine = found.units.dtype == torch.int64 and found.streams.dtype == torch.bool
    if not fine or found.units.shape != (groups,) or found.streams.shape != (events,):
        raise CheckpointError("the state dict's capacity does not fit the network")
    return found


def _checked_optimizers(saved: Any, optimizers: Sequence[Optimizer], networks: Networks) -> list[dict[str, Any]]:
    if not isinstance(saved, list) or len(saved) != len(optimizers):
        raise CheckpointError(f"the state dict must have the state of {len(optimizers)} optimizer(s)")
    for one, optimizer in zip(saved, optimizers, strict=True):
        if not isinstance(one, Mapping):
            raise CheckpointError("the state dict's optimizer is not a mapping")
        if missing := sorted({"state", "param_groups"} - one.keys()):
            raise CheckpointError(f"the state dict's optimizer lacks {', '.join(missing)}; it is incomplete")
        groups = one["param_groups"]
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            raise CheckpointError("the state dict's optimizer has no list of parameter groups")
        if _groups(one) != _groups({"param_groups": optimizer.param_groups}):
            raise CheckpointError("the state dict's optimizer is of another kind, or has other parameter groups")
        for own, group in zip(optimizer.param_groups, one["param_groups"], strict=True):
            for key in group.keys() - {"params"}:
                wanted = own.get(key, 0.0)  # a scheduler's numbers may be missing here
                flags = key in ("foreach", "fused") and all(_kind(one) in (None, bool) for one in (wanted, group[key]))
                if _kind(wanted) != _kind(group[key]) and not flags:
                    raise CheckpointError(
                        f"the state dict's optimizer has {key}={reprlib.repr(group[key])}, this {wanted!r}"
                    )
        parameters = parameters_of(optimizer)
        if [index for group in one["param_groups"] for index in group["params"]] != list(range(len(parameters))):
            raise CheckpointError("the state dict's optimizer has its parameters in another order")
        _check_alike(one["state"], optimizer)
        for index, entries in one["state"].items():
            name = networks.name_of(parameters[index])
            shape = parameters[index].shape if name is None else networks.store[Key(name)].shape
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
                    raise CheckpointError(
                        f"the state dict's optimizer has {key!r} of shape {tuple(value.shape)} for a parameter of "
                        f"shape {tuple(shape)}"
                    )
    return [copy.deepcopy(dict(one)) for one in saved]


def _check_plain(state: Any) -> None:
    """Refuse tensors of other kinds than those of a network, and nests that are deep, or large by repetition.

    A list that contains another one twice, and so on sixty times, is small in a file, and has no end when it is read.
    """
    levels, num_values = [iter((state,))], 0
    while levels:
        value = next(levels[-1], _END)
        num_values += 1
        if num_values > _MAX_VALUES or len(levels) > _MAX_DEPTH:
            raise CheckpointError("the state dict has more values, or deeper ones, than that of any training")
        if value is _END:
            levels.pop()
        elif isinstance(value, Mapping):
            levels.append(iter(value.values()))
        elif isinstance(value, list | tuple):
            levels.append(iter(value))
        elif isinstance(value, Tensor) and not is_dense(value):
            raise CheckpointError(f"the state dict has a tensor of another kind ({value.layout}, {value.device})")


@torch.no_grad()
def prepare(saved: Saved, networks: Networks, optimizers: Sequence[Optimizer]) -> Change:
    """The change to the saved networks and optimizer state."""
    change = networks.prepare(
        saved.masks,
        None,
        store=saved.store,
        capacity=saved.capacity,
        removed=saved.removed,
        followers=saved.followers,
    )
    own = networks.whole_state()
    for key, value in saved.others.items():
        change.copy(own[key], value.to(own[key].device, own[key].dtype))
    selection = networks.selection_of(saved.masks, saved.capacity, saved.removed)
    for optimizer, one in zip(optimizers, saved.optimizers, strict=True):
        for group, values in zip(optimizer.param_groups, one["param_groups"], strict=True):
            for key, value in values.items():
                if key != "params":
                    change.put(group, key, value)
        state: dict[Any, dict[str, Any]] = defaultdict(dict)
        for index, entries in one["state"].items():
            parameter = parameters_of(optimizer)[index]
            name = networks.name_of(parameter)
            if name is not None and name not in selection.graph.tensors:
                continue  # of a layer that is gone
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    value = value.to(parameter.device)
                    if name is not None:
                        saved.store[Key(name, key)] = value.cpu() if saved.store.host else value
                        value = saved.store.read(Key(name, key), selection, parameter.device)
                state[parameter][key] = value
        change.set(optimizer, "state", state)
    return change


def _shapes(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(tensor, "shape", None) for name, tensor in model.items()}


def _groups(optimizer: Mapping[str, Any]) -> list[tuple[int, frozenset[str]]]:
    """The number of parameters of each group, and the hyper-parameters it has."""
    return [(len(group["params"]), frozenset(group) - _SCHEDULED) for group in optimizer["param_groups"]]


def _kind(setting: Any) -> Any:
    """The kind of a hyper-parameter; numbers, also in tensors, are all of one kind."""
    if setting is None or isinstance(setting, bool):
        return None if setting is None else bool
    if isinstance(setting, int | float) or (isinstance(setting, Tensor) and setting.numel() == 1):
        return float
    return [_kind(one) for one in setting] if isinstance(setting, list | tuple) else type(setting)


def _check_alike(state: Mapping[int, Mapping[str, Any]], optimizer: Optimizer) -> None:
    """Refuse state of unknown parameters, and, for PyTorch's optimizers, state that differs within a group."""
    number = 0
    seen: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
    if odd := state.keys() - range(len(parameters_of(optimizer))):
        raise CheckpointError(f"the state dict's optimizer has state for parameters {odd}, which do not exist")
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            entries = state.get(number)
            number += 1
            if entries and type(optimizer).__module__.startswith("torch.optim"):
                kinds = {key: (type(v), v.dtype) if isinstance(v, Tensor) else _kind(v) for key, v in entries.items()}
                if seen.setdefault((position, parameter.dtype), kinds) != kinds:
                    raise CheckpointError(
                        "the state dict's optimizer has state that differs between the parameters of a group"
                    )
