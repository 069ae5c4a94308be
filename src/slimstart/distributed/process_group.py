"""Collective operations of the processes that train one network.

A single process is the default; for it every operation is free and changes nothing. All operations but `rank` and
`size` are collective: a process that does not call one keeps the others waiting, until the process group's timeout.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from slimstart.errors import ConfigError, DesynchronisedError, ProcessGroupError

T = TypeVar("T")
CPU = torch.device("cpu")


class Averages(NamedTuple):
    """Means over the examples of all processes.

    Attributes:
        weight: factor of this process's loss, its number of examples * processes / total number. With it, the mean over
            processes that `DistributedDataParallel` takes of gradients is the mean over examples.
        num_examples: number of examples of all processes.
    """

    losses: Sequence[Tensor]
    weight: float
    num_examples: float


@dataclass(frozen=True)
class ProcessGroup:
    """A process group, in one of its processes.

    Attributes:
        reference: weak reference to the group, because a group that is alive when Python exits can crash the process;
            None for a single process.
        device: device of tensors that the group can exchange.
    """

    reference: weakref.ref[Any] | None = None
    device: torch.device = CPU

    @property
    def group(self) -> Any:
        """PyTorch's group; None for a single process."""
        found = None if self.reference is None else self.reference()
        if found is None and self.reference is not None:
            raise ProcessGroupError("the process group has been destroyed; collective operations must come before")
        return found

    @property
    def rank(self) -> int:
        return 0 if self.reference is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.reference is None else dist.get_world_size(self.group)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes, in float64 on the CPU."""
        found = values.detach().to(self.device, torch.float64, copy=True)
        if self.reference is not None:
            with reporting():
                dist.all_reduce(found, group=self.group)
        return found.cpu()

    def average(self, losses: Sequence[Tensor], count: float, statistics: Sequence[Tensor] = ()) -> Averages:
        """Means over the examples of all processes, in one exchange.

        Args:
            losses: scalars, each a mean over this process's examples.
            count: number of examples of this process.
            statistics: tensors that are averaged in place.
        """
        if self.reference is None:
            return Averages(losses, 1.0, count)
        numbers = [torch.stack([loss.detach().to(self.device, torch.float64) for loss in losses])]
        numbers += [tensor.detach().to(self.device, torch.float64).flatten() for tensor in statistics]
        weighted = torch.cat([torch.cat(numbers) * count, torch.tensor([float(count)], device=self.device)])
        *sums, total = self.total(weighted).split([len(losses), *(t.numel() for t in statistics), 1])
        for tensor, found in zip(statistics, sums[1:], strict=True):
            # `.data` raises no version: batch norm saves them for its backward, which does not read them in training.
            tensor.data.copy_((found / total).view_as(tensor))
        means = [mean.to(loss) for mean, loss in zip((sums[0] / total).unbind(), losses, strict=True)]
        return Averages(means, count * self.size / float(total), float(total))

    def average_step(self, net: nn.Module, losses: Sequence[Tensor], count: float) -> Averages:
        """Means of losses, and of the running statistics that the forward has changed, over the examples."""
        return self.average(losses, count, running_statistics(net) if self.size > 1 else ())

    def average_statistics(self, net: nn.Module, training: bool = False) -> None:
        """Average the running statistics of a network; `training`: only those that a forward changes."""
        if self.size > 1:
            self.average([torch.zeros(())], 1, running_statistics(net, training))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set in some process."""
        if self.reference is None:
            return flags
        return tuple(self.total(torch.tensor(flags)).gt(0).tolist())

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0; `check_reach` refuses devices that the group cannot exchange."""
        if self.reference is not None:
            self.check_reach(tensors)
            with reporting(), torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def check_reach(self, tensors: Sequence[Tensor]) -> None:
        """Check that the group can exchange tensors of these devices; PyTorch's own error is late and hard to read.

        Raises:
            ConfigError: the process group has no backend for the device of a tensor.
        """
        backends = dist.get_backend_config(self.group)
        reached = {part.partition(":")[0] for part in backends.split(",")}
        if beyond := sorted({tensor.device.type for tensor in tensors} - reached):
            raise ConfigError(
                f"the model is on {' and '.join(beyond)}, where these processes cannot exchange it: the backend of "
                f"their process group is {backends}. Call torch.distributed.init_process_group("
                "'cpu:gloo,cuda:nccl'), or use slimstart.distributed.joined"
            )

    # --- Python objects ----------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.reference is None:
            return [value]
        found: list[Any] = [None] * self.size
        with reporting():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0 only; all processes get its result, or raise its error."""
        if self.reference is None:
            return function()
        outcome: list[Any] = [None, None]  # the result, and the error
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
        with reporting():
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        value: T = outcome[0]
        return value

    def barrier(self) -> None:
        """Wait for all processes."""
        self.total(torch.zeros(1))

    def all_or_none(self, prepare: Callable[[], T]) -> T:
        """The result of a function that all processes run; if it fails in one of them, all raise.

        Raises:
            ProcessGroupError: it has failed in another process.
        """
        problem: Exception | None = None
        try:
            result = prepare()
        except Exception as error:
            problem = error
        (failed,) = self.any(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise ProcessGroupError("another process could not change its structure, so none did; look for its error")
        return result

    # --- checks ------------------------------------------------------------------------------------------------------

    @property
    def debugging(self) -> bool:
        """Whether the user asked PyTorch for extra checks: TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL."""
        return self.reference is not None and get_debug_level() != DebugLevel.OFF

    def check_equal(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Compare checksums of named tensors over all processes.

        Raises:
            DesynchronisedError: some tensors differ; raised in all processes, with their names.
        """
        if self.reference is None:
            return
        every = self.gather({name: _checksum(tensor) for name, tensor in tensors.items()})
        for rank, found in enumerate(every):
            if odd := [name for name in tensors if found.get(name) != every[0].get(name)]:
                more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
                raise DesynchronisedError(
                    f"{', '.join(odd[:3])}{more} of rank {rank} differ from those of rank 0 {when}; all processes need "
                    "the same seed and the same steps, with gradients averaged"
                )


SINGLE_PROCESS = ProcessGroup()


def process_group(wrappers: Iterable[DistributedDataParallel]) -> ProcessGroup:
    """The processes over which wrappers average gradients; the single process without wrappers."""
    for ddp in wrappers:
        return ProcessGroup(weakref.ref(ddp.process_group), next(ddp.parameters()).device)
    return SINGLE_PROCESS


def running_statistics(net: nn.Module, training: bool = True) -> list[Tensor]:
    """Running means and variances of normalisation layers; `training`: only those that a forward changes."""
    norms = [m for m in net.modules() if isinstance(m, _NormBase) and (m.training or not training)]
    return [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]


def num_examples(batch: Iterable[Any]) -> int:
    """The length of the first tensor or list in a batch, which may be in a dict or a dataclass; 1 if there is none."""
    return next(_lengths(batch), 1)


def _lengths(parts: Iterable[Any]) -> Iterator[int]:
    for part in parts:
        if isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 0):
            yield len(part)
        elif isinstance(part, Mapping):
            yield from _lengths(part.values())
        elif is_dataclass(part):
            yield from _lengths(vars(part).values())


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """The size of the gradients of a step, which processes exchange."""
    return sum(p.nbytes for p in parameters if p.requires_grad)


@contextmanager
def reporting() -> Iterator[None]:
    """Translate the errors of an exchange that fails because another process is gone.

    Raises:
        ProcessGroupError: in place of the backend's error.
    """
    try:
        yield
    except ProcessGroupError:
        raise
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(word in text for word in ("gloo", "NCCL", "Connection")):
            raise
        reason = text.splitlines()[0]
        raise ProcessGroupError(
            "another process has failed, or has not answered within the process group's timeout; look for its error, "
            f"and resume from the last checkpoint ({reason})"
        ) from error


def _checksum(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
