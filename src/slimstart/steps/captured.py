"""One training step as CUDA graphs: the forward, the forward of every reference, and everything behind them.

Its batch has storage of its own that every batch is copied into. Capturing executes nothing, but before it each forward
runs as it is, once to be planned (`fusion.py`) and once as planned, with its backward: kernels are built when they
first run, which must not be while a graph is captured. What that changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from slimstart.kernels import Move, Moves
from slimstart.narrow.change import swap_
from slimstart.steps import fusion
from slimstart.steps.backward import Backward
from slimstart.steps.capture import Pool, capture
from slimstart.steps.eager import NOTHING, LossFunction, detached, loss_of
from slimstart.steps.optimizers import CapturedRates


class Subject(Protocol):
    """What is trained."""

    @property
    def version(self) -> int:
        """Another one whenever tensors have been exchanged for others."""

    @property
    def module(self) -> nn.Module:
        """The network."""

    @property
    def statistics(self) -> Sequence[Tensor]:
        """Buffers that a forward changes, to be put back where the loss is not finite."""

    @property
    def static_references(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """Networks that run forward beside it, each with what fills it before."""

    def without_hooks(self) -> AbstractContextManager[None]:
        """Gradients are left as they come, until `zero_padding`."""

    def zero_padding(self) -> None:
        """Clear the gradients of padding."""


@dataclass
class Board:
    """What all captured steps of one network write to and read from; tensors are on the device.

    Attributes:
        losses: float64, of the network and of its references.
        ok: bool, whether all losses so far have been finite; where it is false, a step changes nothing.
        found_inf: the same, as a fused optimizer wants it.
        num_good: int64, how many steps have had an effect.
        seen: int64, in the host's own memory: `num_good`, a step or two ago; -1 after a loss that was not finite.
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
    def of(cls, subject: Subject, backward: Backward, losses: Tensor) -> Board:
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

    def clean(self) -> None:
        """Forget a loss that was not finite."""
        self.ok.fill_(True)
        for tensor in (self.num_good, self.seen, self.losses):
            tensor.zero_()


class CapturedStep:
    """The graphs of one kind of step.

    Args:
        board: shared with other kinds.
        pools: memory for the network's graphs, and for those that run beside them.
        loss_fn: of the network and the batch.
        leaves, tree: of a batch, by pytree; it is not used up.
        fuse: join operations where that is possible.

    Attributes:
        forward, behind, references: graphs, in the order in which they must run; references may run beside the forward.
        is_fused: whether operations were joined.
        is_random: whether a forward takes random numbers on the device.

    Raises:
        Exception: whatever the loss function does that a graph cannot hold.
    """

    def __init__(
        self,
        board: Board,
        pools: tuple[Pool, Pool],
        loss_fn: LossFunction,
        leaves: Sequence[Any],
        tree: Any,
        fuse: bool,
    ) -> None:
        self._board, self.is_fused, self.is_random = board, fuse, False
        self._static = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor) and its.requires_grad:
                mine.requires_grad_()
        batch = tree_unflatten(self._static, tree)
        subject = board.subject
        statistics = [tensor.view(-1) for tensor in subject.statistics]
        longest = max(map(len, statistics), default=0)
        self._places = torch.arange(longest, dtype=torch.int32, device=board.losses.device)
        self._backups = Moves([Move(tensor, tensor.clone(), {0: 0}) for tensor in statistics])
        self._backups.gather_(self._places)
        self._backups.scatter_(torch.full_like(self._places, -1))  # nothing is written, but its kernel is built
        main, beside = (pool.handle for pool in pools)
        run = self._planned(subject.module, loss_fn, batch)
        board.backward.optimizer.zero_grad(set_to_none=True)
        for parameter in subject.module.parameters():
            # A loss that somebody keeps from a loop by hand keeps gradient accumulators, and with them its stream.
            if parameter.requires_grad:
                swap_(parameter, parameter.data)
        self.forward = capture(partial(self._forward, run), main)
        with board.rates.in_groups():
            self.behind = capture(self._behind, main)
        vars(self).pop("_loss", None)  # with its activations; the graphs have their memory
        self._more = detached(vars(self).pop("_more", NOTHING))
        self.references = []
        for number, (fill, module) in enumerate(subject.static_references, start=1):
            fill()
            run = self._planned(module, loss_fn, batch, no_grad=True)
            self.references.append(capture(partial(self._reference, run, fill, number), beside))

    def _planned(
        self, module: nn.Module, loss_fn: LossFunction, batch: Sequence[Any], no_grad: bool = False
    ) -> Callable[[], Any]:
        """The forward, with everything fused that can be."""

        def run() -> Any:
            with torch.set_grad_enabled(not no_grad):
                return loss_fn(module, *batch)

        def fused() -> Any:
            with fusion.fused(plan):
                return run()

        device = self._board.losses.device
        # Of references, too: not all are filled again before they run.
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
                if not torch.equal(buffer, value):  # to write to a constant would make it one that changes
                    buffer.copy_(value)
        return fused if self.is_fused else run

    def _forward(self, run: Callable[[], Any]) -> None:
        self._backups.gather_(self._places)
        self._loss, self._more = loss_of(run())
        self._dtype = self._loss.dtype
        self._board.losses[0].copy_(self._loss.detach())

    def _reference(self, run: Callable[[], Any], fill: Callable[[], None], number: int) -> None:
        fill()
        self._board.losses[number].copy_(loss_of(run())[0])

    def _behind(self) -> None:
        board, backward = self._board, self._board.backward
        board.ok.logical_and_(torch.isfinite(board.losses).all())
        board.found_inf.copy_(~board.ok)
        # With a scaler it is the gradients that tell: not finite, the step is skipped.
        loss = self._loss if backward.scaler is None else self._loss / (1 - board.found_inf)
        with board.subject.without_hooks():
            backward.gradients(loss)
        board.subject.zero_padding()
        optimizer: Any = backward.optimizer
        if backward.scaler is None:
            optimizer.found_inf = board.found_inf
        try:
            backward.step(board.ok)
        finally:
            optimizer.__dict__.pop("found_inf", None)
        self._backups.scatter_(torch.where(board.ok, -1, self._places))
        board.num_good.add_(board.ok)
        board.seen.copy_(torch.where(board.ok, board.num_good, -1), non_blocking=True)

    def result(self) -> Any:
        """What the loss function returned in the last step: the loss, or (loss, anything), as tensors of their own."""
        loss = self._board.losses[0].to(self._dtype, copy=True)
        return loss if self._more is NOTHING else (loss, detached(self._more, copy=True))

    def load(self, batch: Sequence[Any]) -> None:
        """Take a batch over."""
        leaves, _ = tree_flatten(list(batch))
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor):
                mine.detach().copy_(its)
