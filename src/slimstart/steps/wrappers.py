"""What users put around a model, `DistributedDataParallel` and `torch.compile`: it follows when shapes change.

A wrapper may be made before the `SparseTraining` or after it, so it is looked for when it matters: at the first step,
and at every change of structure.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from slimstart.ranks import ALONE, Ranks

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


def check_model(model: nn.Module) -> None:
    """Refuse what cannot follow a change of shapes, by name, and say what to do.

    Raises:
        TypeError: the model is wrapped or parametrised in a way that cannot follow.
    """
    for name, module in model.named_modules():
        where = f"{name!r} of `model`" if name else "`model`"
        for cls in type(module).__mro__:
            if cls.__name__ in _REFUSED and cls.__module__.split(".")[0] in ("torch", "deepspeed"):
                raise TypeError(f"{where} is a {cls.__name__}, which cannot be narrowed: {_REFUSED[cls.__name__]}")
        if parametrize.is_parametrized(module):
            raise TypeError(
                f"{where} has parametrizations ({', '.join(module.parametrizations)}), whose tensors cannot "
                "be narrowed; call torch.nn.utils.parametrize.remove_parametrizations first"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data) is not torch.Tensor or parameter.is_quantized:
            raise TypeError(
                f"{name!r} of `model` is a {type(parameter.data).__name__} in {parameter.dtype}, which cannot be "
                "narrowed; slimstart trains plain floating-point parameters"
            )


def data_parallel_around(model: nn.Module) -> list[DistributedDataParallel]:
    """Every `DistributedDataParallel` that averages gradients of a model."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    # PyTorch keeps no list of wrappers, and a module does not know what is around it.
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [ddp for ddp in found if "module" in ddp._modules and any(module is model for module in ddp.modules())]


def process_group(wrappers: list[DistributedDataParallel]) -> Ranks:
    """The processes that wrappers average gradients over."""
    for ddp in wrappers:
        return Ranks(weakref.ref(ddp.process_group), next(ddp.parameters()).device)
    return ALONE


def check_data_parallel(ddp: DistributedDataParallel) -> None:
    """Refuse options that keep copies of parameters which cannot follow.

    Raises:
        ValueError: an option of the wrapper is not supported.
    """
    for option, used in (
        ("mixed_precision", getattr(ddp, "mixed_precision", None) is not None),
        ("delay_all_reduce_named_params", bool(getattr(ddp, "_delay_all_reduce_params", None))),
        ("the python reducer of compiled autograd", bool(getattr(ddp, "_use_python_reducer", False))),
    ):
        if used:
            raise ValueError(f"DistributedDataParallel with {option} cannot follow a change of structure; leave it out")


def rebuild(ddp: DistributedDataParallel) -> None:
    """Let a wrapper reduce gradients of the present shapes: the same object, options and communication hooks.

    Its reducer holds buckets, and hooks on gradient accumulators, of the shapes that parameters had when it was made.
    So it gets another one, as PyTorch does when a wrapper is unpickled.
    """
    wrapper: Any = ddp
    if wrapper.reducer is not None:
        wrapper.reducer._remove_autograd_hooks()
    wrapper.reducer = wrapper.logger = None
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    wrapper._has_rebuilt_buckets = wrapper._lazy_init_ran = False
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]


def allow_recompilation() -> None:
    """After a change of structure compiled code is compiled once more, which must not count against Dynamo's limit.

    Beyond its limit (eight by default), Dynamo runs a frame eagerly, without a word.
    """
    if "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo"].config
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, getattr(config, name) + 1)
