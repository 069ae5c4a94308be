"""Training of a network whose structure does not change, on the same engine: what ours is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from slimstart.distributed.process_group import num_examples, ranks_of, reporting, running_statistics
from slimstart.steps.backward import Backward
from slimstart.steps.choice import choose
from slimstart.steps.eager import NOTHING, LossFunction, detached, loss_of
from slimstart.steps.graphs import Steps
from slimstart.steps.optimizers import fuse as fuse_optimizer
from slimstart.steps.optimizers import unfuse
from slimstart.steps.stepping import Stepping


class PlainTraining(Stepping):
    """Steps of one network; on a GPU as CUDA graphs.

    Args:
        net: changed in place. `DistributedDataParallel` makes several ranks train as one, by eager steps.
        optimizer: over its parameters.
        engine: "eager", "graphs", or "auto": graphs on a GPU.
        max_grad_norm: the norm of all gradients together is clipped at this.
        fuse: join batch norm with the ReLU and the sum behind it; in graphs.
        also: as for `Backward`.

    Attributes:
        num_steps: taken so far.
        num_examples: of the last step, over all ranks.
    """

    _unchanged = "weights are"

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        *,
        engine: str = "auto",
        max_grad_norm: float | None = None,
        fuse: bool = True,
        also: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.net, self.num_steps, self.num_examples = net, 0, 0.0
        self.ranks = ranks_of(net)
        self.ranks.broadcast_([*net.parameters(), *net.buffers()])
        self._backward = Backward((optimizer,), max_grad_norm, also=also)
        device = next(net.parameters()).device
        chosen, self._eager = choose(engine if self.ranks.size == 1 else "eager", optimizer, device)
        self._steps = None
        if chosen == "eager":
            optimizer.register_load_state_dict_post_hook(unfuse)
        else:
            losses = torch.zeros(1, dtype=torch.float64, device=device)
            subject = _Subject(net)
            self._steps = Steps(subject, self._backward, losses, fuse)
            optimizer.register_load_state_dict_post_hook(subject.exchanged)

    def step(self, loss_fn: LossFunction, *batch: Any) -> Any:
        """One step of gradient descent; returns the detached loss.

        Raises:
            NonFiniteLossError: in graphs, a step or two after a loss that was not finite; nothing has changed since.
                Eager steps do not look.
        """
        self._check()
        kind = None if self._steps is None else self._steps.find(loss_fn, batch)
        self.num_steps += 1
        self.num_examples = num_examples(batch)
        if self._steps is None or kind is None:
            return self._step_eagerly(loss_fn, batch)
        kind.load(batch)
        self._steps.launch(kind)
        return kind.result()

    def _step_eagerly(self, loss_fn: LossFunction, batch: Sequence[Any]) -> Any:
        with reporting():
            with self._kernels:
                loss, more = loss_of(loss_fn(self.net, *batch))
            statistics = running_statistics(self.net) if self.ranks.size > 1 else ()
            found = self.ranks.average([loss], self.num_examples, statistics)
            self._backward(loss if found.weight == 1 else found.weight * loss)
        self.num_examples = found.num_examples
        return found.losses[0].detach() if more is NOTHING else (found.losses[0].detach(), detached(more))


class _Subject:
    """A network alone, as the subject of captured steps."""

    static_references: Sequence[tuple[Callable[[], None], nn.Module]] = ()

    def __init__(self, module: nn.Module) -> None:
        self.module, self.version = module, 0

    def exchanged(self, optimizer: Optimizer) -> None:
        """The optimizer has loaded a state dict: it has other tensors now, and the settings of where it was saved."""
        fuse_optimizer(optimizer)
        self.version += 1

    @property
    def statistics(self) -> Sequence[Tensor]:
        return [buffer for m in self.module.modules() if isinstance(m, _NormBase) for buffer in m.buffers()]

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        yield

    def zero_padding(self) -> None:
        pass
