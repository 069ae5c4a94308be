"""One training step as CUDA graphs: the forward, the backward with the update, and the forward of every reference.

The batch is copied into tensors at fixed addresses. Before the capture, which executes nothing, every forward runs
twice: once to plan its fusion (`fusion.py`) and once fused, with its backward. Triton and cuDNN compile or choose
kernels when those first run, which is not possible during a capture. The effects of these runs are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from slimstart.kernels import Move, Moves
from slimstart.narrow.change import swap_
from slimstart.narrow.padding import PaddingGradients
from slimstart.steps import fusion
from slimstart.steps.cuda_graph import Pool, capture
from slimstart.steps.eager import NOTHING, Backward, LossFunction, as_returned, loss_of
from slimstart.steps.optimizers import CapturedRates


class Subject(Protocol):
    """The network that captured steps train."""

    @property
    def version(self) -> int:
        """A number that changes whenever tensors are replaced by others."""

    @property
    def model(self) -> nn.Module:
        """The network."""

    @property
    def statistics(self) -> Sequence[Tensor]:
        """Buffers that a forward changes; they are restored if the loss is not finite."""

    @property
    def static_references(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """Reference networks, each with the function that fills it before its forward."""

    @property
    def padding(self) -> PaddingGradients:
        """Hooks that set the gradients of padding to zero."""


@dataclass
class SharedState:
    """Tensors on the device that all captured steps of one network read and write.

    Attributes:
        losses: float64, losses of the network and of its references.
        ok: bool, whether all losses so far have been finite; where it is false, a step changes nothing.
        found_inf: the inverse of `ok` as a float, which is the format of fused optimizers.
        num_good: int64, number of steps that had an effect.
        seen: int64 in pinned host memory: `num_good` with a delay of a step or two; -1 after a non-finite loss.
    """

    subject: Subject
    backward: Backward
    rates: CapturedRates
    losses: Tensor
    ok: Tensor
    found_inf: Tensor
    num_good: Tensor
    seen: Tensor

    @classmethod
    def of(cls, subject: Subject, backward: Backward, losses: Tensor) -> SharedState:
        device = losses.device
        return cls(
            subject,
            backward,
            CapturedRates(backward.optimizer, device),
            losses,
            ok=torch.ones((), dtype=torch.bool, device=device),
            found_inf=torch.zeros((), device=device),
            num_good=torch.zeros((), dtype=torch.int64, device=device),
            seen=torch.zeros((), dtype=torch.int64).pin_memory(),
        )

    def reset(self) -> None:
        """Start again after a loss that was not finite."""
        self.ok.fill_(True)
        for tensor in (self.num_good, self.seen, self.losses):
            tensor.zero_()


class CapturedStep:
    """The graphs of one kind of step.

    Args:
        shared: state that all kinds share.
        pools: memory for the network's graphs, and for graphs that run in parallel with them.
        loss_fn: function of the network and the batch.
        leaves, tree: a batch, flattened by pytree, as an example of shapes and values.
        fuse: whether to fuse operations.

    Attributes:
        forward, update, references: the graphs. `update` (backward and optimizer) must run last; references may run in
            parallel with the forward, except where `is_random`.
        is_fused: whether operations are fused.
        is_random: whether a forward uses random numbers on the device.

    Raises:
        Exception: any error of an operation that a graph cannot hold.
    """

    def __init__(
        self,
        shared: SharedState,
        pools: tuple[Pool, Pool],
        loss_fn: LossFunction,
        leaves: Sequence[Any],
        tree: Any,
        fuse: bool,
    ) -> None:
        self._shared, self.is_fused, self.is_random = shared, fuse, False
        # A graph reads fixed addresses: these tensors, which `load` fills.
        self._static = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor) and its.requires_grad:
                mine.requires_grad_()
        batch = tree_unflatten(self._static, tree)
        subject = shared.subject
        statistics = [tensor.view(-1) for tensor in subject.statistics]
        longest = max(map(len, statistics), default=0)
        self._positions = torch.arange(longest, dtype=torch.int32, device=shared.losses.device)
        self._backups = Moves([Move(tensor, tensor.clone(), {0: 0}) for tensor in statistics])
        self._backups.gather_(self._positions)
        self._backups.scatter_(torch.full_like(self._positions, -1))  # writes nothing, but compiles its kernel
        main, side = (pool.handle for pool in pools)
        run = self._warmed_up(subject.model, loss_fn, batch)
        shared.backward.optimizer.zero_grad(set_to_none=True)  # the capture allocates gradients in its own pool
        for parameter in subject.model.parameters():
            # A loss that the user keeps from an eager step keeps gradient accumulators alive, and these run on the
            # stream on which they were created. The swap drops them, so that the capture creates them on its own.
            if parameter.requires_grad:
                swap_(parameter, parameter.data)
        self.forward = capture(partial(self._forward, run), main)
        with shared.rates.in_groups():
            self.update = capture(self._update, main)
        vars(self).pop("_loss", None)  # frees the autograd graph and its activations; the graphs keep the memory
        self._more = tree_map_only(Tensor, Tensor.detach, vars(self).pop("_more", NOTHING))
        self.references = []
        for number, (fill, module) in enumerate(subject.static_references, start=1):
            fill()
            run = self._warmed_up(module, loss_fn, batch, no_grad=True)
            self.references.append(capture(partial(self._reference, run, fill, number), side))

    def _warmed_up(
        self, module: nn.Module, loss_fn: LossFunction, batch: Sequence[Any], no_grad: bool = False
    ) -> Callable[[], Any]:
        """The forward, fused where possible, after runs that compile its kernels and whose effects are undone."""

        def run() -> Any:
            with torch.set_grad_enabled(not no_grad):
                return loss_fn(module, *batch)

        def fused() -> Any:
            with fusion.fused(plan):
                return run()

        device = self._shared.losses.device
        # References too: some of their buffers are not filled again before the next forward.
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        try:
            with torch.random.fork_rng(devices=[device]):
                generator = torch.cuda.default_generators[device.index or 0]
                before = generator.get_offset()
                plan = fusion.record(run)
                self.is_random |= generator.get_offset() != before
                loss, _ = loss_of(fused() if self.is_fused else run())
                if not no_grad:
                    loss.backward()
        finally:
            for buffer, value in buffers:
                # Only where it has changed: a write to a constant buffer makes references copy it at every step.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return fused if self.is_fused else run

    def _forward(self, run: Callable[[], Any]) -> None:
        self._backups.gather_(self._positions)
        self._loss, self._more = loss_of(run())
        self._dtype = self._loss.dtype
        self._shared.losses[0].copy_(self._loss.detach())

    def _reference(self, run: Callable[[], Any], fill: Callable[[], None], number: int) -> None:
        fill()
        self._shared.losses[number].copy_(loss_of(run())[0])

    def _update(self) -> None:
        shared, backward = self._shared, self._shared.backward
        # A graph has no branches. After a non-finite loss the optimizer skips its update on the device (`found_inf`),
        # and the statistics are written back from their backups.
        shared.ok.logical_and_(torch.isfinite(shared.losses).all())
        shared.found_inf.copy_(~shared.ok)
        # A gradient scaler looks at gradients instead: a division by zero makes them infinite, and it skips the step.
        loss = self._loss if backward.scaler is None else self._loss / (1 - shared.found_inf)
        with shared.subject.padding.without_hooks():
            backward.gradients(loss)
        shared.subject.padding.zero()
        optimizer: Any = backward.optimizer
        if backward.scaler is None:
            optimizer.found_inf = shared.found_inf
        try:
            backward.step(shared.ok)
        finally:
            optimizer.__dict__.pop("found_inf", None)
        self._backups.scatter_(torch.where(shared.ok, -1, self._positions))
        shared.num_good.add_(shared.ok)
        shared.seen.copy_(torch.where(shared.ok, shared.num_good, -1), non_blocking=True)

    def result(self) -> Any:
        """The result of the loss function in the last step, the loss or (loss, anything), in new tensors."""
        return as_returned(self._shared.losses[0].to(self._dtype, copy=True), self._more, copy=True)

    def load(self, batch: Sequence[Any]) -> None:
        """Copy a batch into the tensors that the graphs read."""
        leaves, _ = tree_flatten(list(batch))
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor):
                mine.detach().copy_(its)
