"""Training with several processes, each with its part of every batch: torch.distributed, started by torchrun.

    with joined():
        sparse = SparseTraining(model, optimizer, images[:1], budget, total_steps=steps)
        parallel = data_parallel(model)     # or any DistributedDataParallel, before or after
        ...                                 # a loop that calls `parallel`, or `sparse.step`
        model = sparse.finish()

At the first step all processes get the weights of rank 0, including those that are not in the network. From then on
they change to the same structures at the same steps and stay bit-identical: they exchange the gradients of the *narrow*
network and learn the structure from the averages. A change of structure happens in all processes, or, if one of them
cannot prepare it, in none, with an error in all. `docs/scaling.md` says what else is averaged.

`step`, `optimizer.step()`, `update`, `resample`, `settle`, `finish` and a `snapshot` with batches are collective;
`state_dict` and `save` are not, so that a single process can write a checkpoint.
"""

from __future__ import annotations

import gc
import inspect
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup, reporting
from slimstart.errors import ConfigError

TIMEOUT = 600.0  # seconds
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"  # torch < 2.13

_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def data_parallel(net: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel` without broadcasts of buffers in forwards: `SparseTraining` averages statistics."""
    device = next(net.parameters()).device
    settings = {"device_ids": [device] if device.type == "cuda" else None, _SYNC_BUFFERS: False}
    with reporting():  # processes compare their parameters
        wrapped = DistributedDataParallel(net, **{**settings, **options})
    _wrapped.add(wrapped)
    return wrapped


def started_by_torchrun() -> bool:
    """Whether torchrun has started this process and others."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", 1)) > 1


def restarted() -> bool:
    """Whether torchrun has restarted this process after a failure (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def own_device(name: str = "auto") -> str:
    """The device of this process: the GPU of its local rank, or the CPU where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """Initialise the process group of torchrun for a block, and destroy it afterwards; a single process needs none.

    gloo connects CPUs, and nccl GPUs, where there are any. The `ProcessGroup` that is returned uses gloo.

    Args:
        timeout: seconds after which waiting for another process ends with a `ProcessGroupError`. Anything longer fails
            too, such as waiting for one process to write a large checkpoint.
    """
    if not timeout > 0:
        raise ConfigError(f"`timeout` is {timeout}; it must be a positive number of seconds")
    if not started_by_torchrun():
        yield SINGLE_PROCESS
        return
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if on_gpu:
        torch.cuda.set_device(own_device("cuda"))
    patience = timedelta(seconds=timeout)
    with reporting():
        # The store can survive a restart, with the addresses of processes that are gone.
        store, rank, size = next(rendezvous("env://", timeout=patience))
        store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    try:
        yield ProcessGroup(weakref.ref(dist.group.WORLD))
    finally:
        # Threads of a group that still hold resources when Python exits crash the process.
        for net in _wrapped:
            for name in ("reducer", "logger", "process_group"):
                setattr(net, name, None)
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.1)
