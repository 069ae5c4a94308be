"""Wrappers of a model, `DistributedDataParallel` and `torch.compile`, and how they follow a change of shapes.

A wrapper may be made before or after the `SparseTraining`, so the search for it is repeated: in the constructor, at the
first step, and at every change of structure.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks, register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from slimstart.distributed.process_group import ProcessGroup
from slimstart.narrow.hooks import hooks_in

_REFUSED = {
    "FullyShardedDataParallel": "FSDP shards parameters, so their channels are not in one place",
    "FSDPModule": "FSDP shards parameters, so their channels are not in one place",
    "DeepSpeedEngine": "DeepSpeed keeps copies of the parameters that cannot follow",
    "PipelineModule": "DeepSpeed keeps copies of the parameters that cannot follow",
    "DataParallel": "its replicas are made from other devices at every forward; use DistributedDataParallel",
}


def unwrapped_model(model: nn.Module) -> nn.Module:
    """The user's own module inside `DistributedDataParallel` and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _has_weight_norm(module: nn.Module) -> bool:
    """Whether all parametrizations of a module are `weight_norm`, which the graph follows."""
    steps = (step for found in module.parametrizations.values() for step in found)  # type: ignore[operator]
    return all(type(step).__name__ == "_WeightNorm" for step in steps)


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot follow a change of shapes; the error says what to do."""
    for name, module in model.named_modules():
        where = f"{name!r} of `model`" if name else "`model`"
        for cls in type(module).__mro__:
            if cls.__name__ in _REFUSED and cls.__module__.split(".")[0] in ("torch", "deepspeed"):
                raise TypeError(f"{where} is a {cls.__name__}, which cannot be narrowed: {_REFUSED[cls.__name__]}")
        if parametrize.is_parametrized(module) and not _has_weight_norm(module):
            raise TypeError(
                f"{where} has parametrizations ({', '.join(module.parametrizations)}), whose tensors cannot "
                "be narrowed; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise TypeError(
                f"{name!r} of `model` has no shape yet; call the model once on a batch, to make the parameters of its "
                "lazy layers, before the SparseTraining and the optimizer"
            )
        plain = type(parameter.data) is torch.Tensor
        if not (plain and (parameter.is_floating_point() or parameter.is_complex())):  # packed integers, for example
            kind = type(parameter if plain else parameter.data).__name__
            raise TypeError(
                f"{name!r} of `model` is a {kind} in {parameter.dtype}, which cannot be narrowed; slimstart trains "
                "plain floating-point parameters"
            )
    for ddp in data_parallel_around(model, search=True):
        check_data_parallel(ddp)
    if any(not hook.is_inert for hook in hooks_in(model)):
        raise ValueError("`model` is in a SparseTraining already; call its `finish` first, or make a new model")


COMPILED = 8  # Dynamo's default limit of compilations of a module; beyond it, the module runs eagerly

_known: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def data_parallel_around(model: nn.Module, search: bool = False) -> list[DistributedDataParallel]:
    """All `DistributedDataParallel` wrappers of a model.

    Args:
        search: whether to search all of Python's objects, which takes some milliseconds. Wrappers that are made after
            the first search are known without another one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if search:
        # PyTorch keeps no list of wrappers, and a module does not know its wrapper. But there is a hook for new ones.
        if _notice not in _global_module_registration_hooks.values():
            register_module_module_registration_hook(_notice)
        classes = _with_subclasses(DistributedDataParallel)
        _known.update([one for one in gc.get_objects() if type(one) in classes])
    return [ddp for ddp in _known if "module" in ddp._modules and any(module is model for module in ddp.modules())]


def _notice(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if isinstance(owner, DistributedDataParallel):
        _known.add(owner)


def _with_subclasses(cls: type[Any]) -> set[type[Any]]:
    below: list[type[Any]] = cls.__subclasses__()
    return {cls}.union(*map(_with_subclasses, below))


def network_of(given: nn.Module, model: nn.Module, group: ProcessGroup) -> nn.Module:
    """The module to call in a step: the model in the wrapper in which the user gave it, or that averages gradients."""
    if given is not model and unwrapped_model(given) is model:
        return given
    if group.size == 1:
        return model
    for ddp in data_parallel_around(model):
        if unwrapped_model(ddp) is model:
            return ddp
    raise RuntimeError(
        "`step` finds no DistributedDataParallel around the model itself, so gradients would not be averaged; make "
        "one and keep it, or write the loop by hand"
    )


def check_data_parallel(ddp: DistributedDataParallel) -> None:
    """Refuse options that keep tensors of fixed shapes, or with which processes cannot change at the same step."""
    for option, used, instead in (
        ("mixed_precision", getattr(ddp, "mixed_precision", None) is not None, "use torch.autocast"),
        ("delay_all_reduce_named_params", bool(getattr(ddp, "_delay_all_reduce_params", None)), "leave it out"),
        ("the Python reducer of compiled autograd", bool(getattr(ddp, "_use_python_reducer", False)), "leave it out"),
        (
            "optimizers that step in the backward",
            any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()),
            "call `optimizer.step()` after it",
        ),
        ("join()", ddp._join_config.enable, "give all processes the same number of batches"),
    ):
        if used:
            raise ValueError(f"DistributedDataParallel with {option} cannot follow a change of structure; {instead}")


def rebuild(ddp: DistributedDataParallel) -> None:
    """Replace the reducer of a wrapper after a change of shapes; the wrapper, its options and its hooks remain.

    The reducer is C++. It allocates flat buckets for the shapes that parameters have when it is made, and registers
    hooks on their gradient accumulators; both are useless for other shapes, and nothing resizes them. PyTorch itself
    makes a new reducer where a wrapper is unpickled, and these are the same calls.
    """
    wrapper: Any = ddp
    hook_name = wrapper._get_ddp_logging_data().get("comm_hook", "") if wrapper.logger is not None else ""
    if wrapper.reducer is not None:
        wrapper.reducer._remove_autograd_hooks()  # otherwise gradients would also go into the old buckets
    wrapper.reducer = wrapper.logger = None
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    # After its first step a reducer rearranges its buckets by the order in which gradients arrived: let it do so again.
    wrapper._has_rebuilt_buckets = wrapper._lazy_init_ran = False
    for hook, state in wrapper._comm_hooks:
        _forget_buckets(state)
        dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]
    kind, _, name = hook_name.partition(".")
    if kind == "BuiltinCommHookType":
        functions: Any = dist
        functions._register_builtin_comm_hook(wrapper.reducer, getattr(functions.BuiltinCommHookType, name))
    if hook_name:
        wrapper.logger._set_comm_hook_name(hook_name)


def _forget_buckets(state: Any) -> None:
    """Drop the errors and factors that PowerSGD keeps for every bucket; it starts with new ones where it has none."""
    if type(state).__name__ == "PowerSGDState":
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(state, name).clear()
        # Two plain steps first: the reducer rearranges its buckets after the first one, and shapes would differ.
        state.iter = min(state.iter, state.start_powerSGD_iter - 2)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which compiled modules run eagerly.

    Under a torch function mode, Dynamo would compile for that mode, or give up on a module permanently.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import would take seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def allow_recompilation() -> None:
    """Raise Dynamo's limits of compilations at a change of structure, after which models are compiled again.

    Beyond its limits (eight for a module, 256 for code that modules share), Dynamo runs a frame eagerly. With this,
    every structure may be compiled as often as an ordinary model: in training, in evaluation, with other batches.
    """
    if "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo"].config
        config.recompile_limit += COMPILED
        config.accumulated_recompile_limit += COMPILED
