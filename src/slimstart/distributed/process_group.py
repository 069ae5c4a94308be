"""The processes that train one network together, and the few words that they exchange.

A process alone is the default, for which every verb costs nothing and changes nothing. All verbs but `rank` and `size`
are for all ranks at once: one that does not join in keeps the others waiting, until the process group's timeout.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Means over all examples of all ranks.

    Attributes:
        losses: the means.
        weight: what this rank's loss is multiplied by so that the plain mean over ranks, which gradients get from
            `DistributedDataParallel`, is the mean over examples: its count * ranks / count of all.
        num_examples: of all ranks.
    """

    losses: Sequence[Tensor]
    weight: float
    num_examples: float


@dataclass(frozen=True)
class ProcessGroup:
    """A process group, seen from one of its processes.

    Attributes:
        reference: to the group, weak: one that is held when Python ends can bring the process down. None for a process
            alone.
        device: of tensors that the group can exchange.
    """

    reference: weakref.ref[Any] | None = None
    device: torch.device = CPU

    @property
    def group(self) -> Any:
        """None for a process alone."""
        found = None if self.reference is None else self.reference()
        if found is None and self.reference is not None:
            raise ProcessGroupError("the process group has been destroyed; what is for all ranks must come before")
        return found

    @property
    def rank(self) -> int:
        return 0 if self.reference is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.reference is None else dist.get_world_size(self.group)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in float64 on the CPU."""
        found = values.detach().to(self.device, torch.float64, copy=True)
        if self.reference is not None:
            with reporting():
                dist.all_reduce(found, group=self.group)
        return found.cpu()

    def average(self, losses: Sequence[Tensor], count: float, statistics: Sequence[Tensor] = ()) -> Averages:
        """Means over all examples of all ranks, in one exchange.

        Args:
            losses: scalars; each a mean over this rank's examples.
            count: of examples of this rank.
            statistics: averaged in place.
        """
        if self.reference is None:
            return Averages(losses, 1.0, count)
        numbers = [torch.stack([loss.detach().to(self.device, torch.float64) for loss in losses])]
        numbers += [tensor.detach().to(self.device, torch.float64).flatten() for tensor in statistics]
        weighted = torch.cat([torch.cat(numbers) * count, torch.tensor([float(count)], device=self.device)])
        *sums, total = self.total(weighted).split([len(losses), *(t.numel() for t in statistics), 1])
        for tensor, found in zip(statistics, sums[1:], strict=True):
            # Behind autograd's back: batch norm keeps them for its backward, which does not look at them in training.
            tensor.data.copy_((found / total).view_as(tensor))
        means = [mean.to(loss) for mean, loss in zip((sums[0] / total).unbind(), losses, strict=True)]
        return Averages(means, count * self.size / float(total), float(total))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Which of the flags are set on some rank."""
        if self.reference is None:
            return flags
        return tuple(self.total(torch.tensor(flags)).gt(0).tolist())

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0.

        Raises:
            ConfigError: some of them are on a device that the process group has no backend for.
        """
        if self.reference is not None:
            self.check_reach(tensors)
            with reporting(), torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def check_reach(self, tensors: Sequence[Tensor]) -> None:
        """See whether the group can exchange tensors where they are; PyTorch says it less plainly, and later.

        Raises:
            ConfigError: some of them are on a device that the process group has no backend for.
        """
        backends = dist.get_backend_config(self.group)
        reached = {part.partition(":")[0] for part in backends.split(",")}
        if beyond := sorted({tensor.device.type for tensor in tensors} - reached):
            raise ConfigError(
                f"the model is on {' and '.join(beyond)}, where these ranks cannot exchange it: the backend of "
                f"their process group is {backends}. Begin with torch.distributed.init_process_group("
                "'cpu:gloo,cuda:nccl'), or let slimstart.distributed.joined do it"
            )

    # --- anything else -----------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """What each rank has, on all of them."""
        if self.reference is None:
            return [value]
        found: list[Any] = [None] * self.size
        with reporting():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, function: Callable[[], T]) -> T:
        """What a function returns on rank 0, on all ranks; it runs there alone. Where it raises, all ranks raise."""
        if self.reference is None:
            return function()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = error
                self._share(outcome)
                raise
        self._share(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        value: T = outcome[0]
        return value

    def _share(self, outcome: list[Any]) -> None:
        with reporting():
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.total(torch.zeros(1))

    # --- trust, and verify -------------------------------------------------------------------------------------------

    @property
    def debugging(self) -> bool:
        """Whether PyTorch was told to look closely: TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL."""
        return self.reference is not None and get_debug_level() != DebugLevel.OFF

    def check_equal(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """Compare checksums of named tensors over ranks.

        Raises:
            DesynchronisedError: on all ranks, with the names.
        """
        if self.reference is None:
            return
        every = self.gather({name: _checksum(tensor) for name, tensor in tensors.items()})
        for rank, found in enumerate(every):
            if odd := [name for name in tensors if found.get(name) != every[0].get(name)]:
                more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
                raise DesynchronisedError(
                    f"{', '.join(odd[:3])}{more} of rank {rank} differ from those of rank 0 {when}; all ranks need the "
                    "same seed and the same steps, with gradients averaged"
                )


SINGLE_PROCESS = ProcessGroup()


def ranks_of(net: nn.Module) -> ProcessGroup:
    """Those that `DistributedDataParallel`, anywhere in a network, averages gradients over."""
    for module in net.modules():
        if isinstance(module, DistributedDataParallel):
            return ProcessGroup(weakref.ref(module.process_group), next(module.parameters()).device)
    return SINGLE_PROCESS


def running_statistics(net: nn.Module, training: bool = True) -> list[Tensor]:
    """Means and variances that normalisation layers keep; `training`: only of those that a forward changes."""
    norms = [m for m in net.modules() if isinstance(m, _NormBase) and (m.training or not training)]
    return [t for m in norms for t in (m.running_mean, m.running_var) if t is not None]


def num_examples(batch: Sequence[Any]) -> int:
    """The length of the first tensor of a batch."""
    return next((len(one) for one in batch if isinstance(one, Tensor) and one.dim() > 0), 1)


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Of the gradients of a step, which is what ranks exchange."""
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


@contextmanager
def reporting() -> Iterator[None]:
    """Say it plainly where an exchange fails because another rank is gone.

    Raises:
        ProcessGroupError: in place of what the process group's backend says.
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
            "another rank has fallen out, or has not answered within the process group's timeout; look for its error, "
            f"and go on from the last checkpoint ({reason})"
        ) from error


def _checksum(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
