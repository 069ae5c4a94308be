"""Test cases in several processes, forked from one that has imported PyTorch, so that they start at once."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slimstart.distributed.process_group import ProcessGroup

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.distributed_cases"])


def on_ranks(
    size: int,
    case: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60.0,
    patience: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """What `case(ranks, *arguments)` returns on each of `size` gloo ranks, or the exception that it ends with.

    A rank that is killed gives None; one that has not ended after `timeout` seconds is killed. Collectives time out
    after `patience` seconds. The backend "cuda:gloo" is for tensors on GPUs alone, as nccl is.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            settings = (rank, size, backend, str(Path(folder) / "store"), patience, theirs, case, arguments)
            worker = CONTEXT.Process(target=_run, args=settings, daemon=True)
            worker.start()
            theirs.close()
            workers.append((worker, ours))
        found, end = [], time.monotonic() + timeout
        for _, ours in workers:
            try:
                in_time = ours.poll(max(0.0, end - time.monotonic()))
                found.append(pickle.loads(ours.recv_bytes()) if in_time else TimeoutError())
            except EOFError:  # it was killed
                found.append(None)
        for worker, _ in workers:
            worker.kill()  # no error if it has ended already
            worker.join()
        return found


def _run(
    rank: int,
    size: int,
    backend: str,
    store: str,
    patience: float,
    answer: Connection,
    case: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=patience)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        outcome = case(ProcessGroup(weakref.ref(dist.group.WORLD)), *arguments)
    except Exception as error:
        traceback.print_exc()
        outcome = error
    answer.send_bytes(pickle.dumps(outcome))
    answer.close()
    os._exit(0)  # at once, without waiting for the other processes
