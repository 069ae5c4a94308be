"""Training of a network whose structure does not change, on the same engine, for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slimstart.distributed.process_group import num_examples, process_group
from slimstart.narrow.padding import PaddingGradients
from slimstart.steps.eager import Backward, LossFunction, Stepping
from slimstart.steps.engine import reason_for_eager
from slimstart.steps.graphs import Steps
from slimstart.steps.optimizers import fuse as fuse_optimizer
from slimstart.steps.optimizers import unfuse


class PlainTraining(Stepping):
    """Steps of one network; on a GPU as CUDA graphs.

    Args:
        net: the network, which is trained in place; with `DistributedDataParallel` by eager steps.
        optimizer: optimizer of its parameters.
        engine: "eager", "graphs", or "auto": graphs on a GPU.
        max_grad_norm: maximum norm of all gradients together.
        fuse: whether captured steps fuse each batch norm with the sum and the ReLU after it.
        also: further update from the same gradients, see `Backward`.

    Attributes:
        num_steps: number of steps taken.
        num_examples: number of examples in the last step, over all processes.
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
        self.process_group = process_group(m for m in net.modules() if isinstance(m, DistributedDataParallel))
        self.process_group.broadcast_([*net.parameters(), *net.buffers()])
        self._backward = Backward((optimizer,), max_grad_norm, also=also)
        device = next(net.parameters()).device
        self._eager = reason_for_eager(engine if self.process_group.size == 1 else "eager", optimizer, device)
        self._steps = None
        if self._eager is not None:
            optimizer.register_load_state_dict_post_hook(unfuse)
        else:
            losses = torch.zeros(1, dtype=torch.float64, device=device)
            subject = _Subject(net)
            self._steps = Steps(subject, self._backward, losses, fuse)
            optimizer.register_load_state_dict_post_hook(subject.exchanged)

    def step(self, loss_fn: LossFunction, *batch: Any) -> Any:
        """One step of gradient descent; returns the detached loss.

        Raises:
            NonFiniteLossError: with graphs, a step or two after a loss that was not finite, with no change since. Eager
                steps do not check.
        """
        self._check()
        kind = None if self._steps is None else self._steps.find(loss_fn, batch)
        self.num_steps += 1
        self.num_examples = num_examples(batch)
        if self._steps is None or kind is None:
            return self._run_eagerly(loss_fn, self.net, batch, self.process_group)[0]
        return self._steps.run(kind, batch)


class _Subject:
    """A network without references, as the subject of captured steps."""

    static_references: Sequence[tuple[Callable[[], None], nn.Module]] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version, self.padding = model, 0, PaddingGradients({})

    def exchanged(self, optimizer: Optimizer) -> None:
        """Hook for an optimizer that has loaded a state dict: its tensors are new, its settings those of the dict."""
        fuse_optimizer(optimizer)
        self.version += 1

    @property
    def statistics(self) -> Sequence[Tensor]:
        return [buffer for m in self.model.modules() if isinstance(m, _NormBase) for buffer in m.buffers()]
