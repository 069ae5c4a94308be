"""Training steps as CUDA graphs: one for the forward, one per reference forward, one for all behind them.

A step is captured for one loss function and one kind of batch, whose tensors have storage of their own that every batch
is copied into. The first step of a kind runs eagerly, by the caller, and warms up; the second is captured. What cannot
be captured runs eagerly for ever, and `reason` says why.

The host never waits. A loss that is not finite is seen on the device: from there on no step changes anything, and the
host finds a flag in its own memory a step or two later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from slimstart.engine import fusion
from slimstart.engine.backward import Backward
from slimstart.engine.capture import capture
from slimstart.engine.eager import LossFunction
from slimstart.engine.optimizers import CapturedRates, settings
from slimstart.kernels import Move, Moves

logger = logging.getLogger(__name__)

MOST_KINDS = 8  # graphs that are kept; all share one pool of memory
MOST_STRANGERS = 20  # loss functions that came once and never again, before we say something


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
    def companions(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """Networks that run forward beside it, each with what fills it before."""

    def without_hooks(self) -> AbstractContextManager[None]:
        """Gradients are left as they come, until `silence`."""

    def silence(self) -> None:
        """Clear those gradients that are not meant to be."""


class Steps:
    """Captured training steps of one network.

    Args:
        subject: the network.
        backward: with an optimizer whose step can be captured (`optimizers.fuse`).
        losses: float64, on the device: of the network and of its references.

    Attributes:
        ok: bool, on the device: whether all losses since `forgive` have been finite.
        reason: why steps run eagerly, or None.
        num_captures: how often something was captured.
    """

    def __init__(self, subject: Subject, backward: Backward, losses: Tensor, fuse: bool = True) -> None:
        self._subject, self._backward, self.losses, self._fuse = subject, backward, losses, fuse
        device = losses.device
        self.rates = CapturedRates(backward.optimizer, device)
        self.ok = torch.ones((), dtype=torch.bool, device=device)
        self._found_inf = torch.zeros((), device=device)
        self._done = torch.zeros((), dtype=torch.int64, device=device)
        self._seen_done = torch.zeros((), dtype=torch.int64).pin_memory()
        self._launched = 0
        self._pools = _pools()
        self.side, self._forwarded = torch.cuda.Stream(device), torch.cuda.Event()
        self._kinds: OrderedDict[Any, _Kind | None] = OrderedDict()
        self._strangers: list[Any] = []
        self._modules: list[nn.Module] = []
        self._version = -1
        self.reason: str | None = None
        self.num_captures = 0

    def find(self, loss_fn: LossFunction, batch: Sequence[Any]) -> _Kind | None:
        """The captured step for such a batch; None where the caller has to run it eagerly."""
        if self._version != self._subject.version:
            self._kinds.clear()
            self._version = self._subject.version
            self._modules = list(self._subject.module.modules())  # to walk the tree at every step would take longer
        leaves, tree = tree_flatten(list(batch))
        if any(isinstance(leaf, Tensor) and leaf.device != self.losses.device for leaf in leaves):
            self._refuse("a tensor of the batch is not on the network's device")
            return None
        specs = tuple(
            (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in leaves
        )
        modes = tuple(module.training for module in self._modules)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = (_Same(loss_fn), tree, specs, modes, settings(self._backward.optimizer), autocast)
        if key not in self._kinds:
            self._meet(key, loss_fn)
            return None
        self._kinds.move_to_end(key)
        kind = self._kinds[key]
        if kind is None:
            kind = self._kinds[key] = self._capture(loss_fn, leaves, tree)
        return None if kind is _FAILED else kind

    def _capture(self, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any) -> _Kind:
        problem: Exception | None = None
        # A forward that is not the same every time, or is differentiated twice, cannot be fused.
        for fuse in (True, False) if self._fuse else (False,):
            try:
                kind = _Kind(self, loss_fn, leaves, tree, fuse)
            except Exception as error:  # whatever a user's function does that a graph cannot hold
                torch.cuda.synchronize()
                self._pools = _pools()  # the old ones may be spoilt
                problem = error
                logger.info("a step with%s fusion is not captured: %s", "" if fuse else "out", error)
            else:
                self.num_captures += 1
                return kind
        self._refuse(f"the step cannot be captured: {type(problem).__name__}: {problem}")
        failed: _Kind = _FAILED
        return failed

    def _meet(self, key: Any, loss_fn: Any) -> None:
        self._kinds[key] = None
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        if len(self._strangers) < MOST_STRANGERS and all(loss_fn is not other for other in self._strangers):
            self._strangers.append(loss_fn)
            if len(self._strangers) == MOST_STRANGERS:
                self._refuse("`loss_fn` is a new function at every step; define it once, outside of the loop")

    def _refuse(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("steps run eagerly, without CUDA graphs: %s", reason)
        self.reason = reason

    def launch(self, kind: _Kind, learn: Callable[[], None] | None = None) -> None:
        """Run a captured step on what it was loaded with.

        Args:
            learn: called on the stream `side`, behind all forwards; what it launches runs beside the backward.
        """
        self.rates.follow()
        main = torch.cuda.current_stream()
        if learn is not None:
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for reference in kind.references:
                    reference.replay()
        kind.forward.replay()
        if learn is not None:
            main.wait_stream(self.side)
            self._forwarded.record(main)
        kind.behind.replay()
        if learn is not None:
            self.side.wait_event(self._forwarded)
            with torch.cuda.stream(self.side):
                learn()
            main.wait_stream(self.side)  # before anybody writes other losses
        self._launched += 1

    @property
    def failed(self) -> bool:
        """Whether a loss was seen not to be finite; may be true only a step or two later. Waits for nothing."""
        return int(self._seen_done) < 0

    def forgive(self) -> int:
        """Go on after a loss that was not finite; returns how many steps have changed nothing since."""
        torch.cuda.synchronize()
        lost = self._launched - int(self._done)
        self.ok.fill_(True)
        self._done.zero_()
        self._seen_done.zero_()
        self._launched = 0
        self.losses.zero_()
        return lost


def _pools() -> tuple[Any, Any]:
    """Memory for the main network's graphs, and for those that run beside them."""
    return torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()


class _Kind:
    """One captured step."""

    def __init__(self, steps: Steps, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any, fuse: bool) -> None:
        self._steps, self._fuse = steps, fuse
        self._static = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor) and its.requires_grad:
                mine.requires_grad_()
        batch = tree_unflatten(self._static, tree)
        subject = steps._subject
        self._statistics = list(subject.statistics)
        self._before = [tensor.clone() for tensor in self._statistics]
        longest = max((tensor.numel() for tensor in self._statistics), default=0)
        self._places = torch.arange(longest, dtype=torch.int32, device=steps.losses.device)
        pairs = zip(self._statistics, self._before, strict=True)
        self._backups = Moves([Move(now.view(-1), before.view(-1), {0: 0}) for now, before in pairs])

        self._backups.scatter_(torch.full_like(self._places, -1))  # nothing is written, but its kernel is built
        main, beside = steps._pools
        run = self._planned(subject.module, loss_fn, batch)
        steps._backward.optimizer.zero_grad(set_to_none=True)
        self.forward = capture(partial(self._forward, run), main)
        with steps.rates.in_groups():
            self.behind = capture(self._behind, main)
        del self._loss
        self.references = []
        for number, (fill, module) in enumerate(subject.companions, start=1):
            fill()
            run = self._planned(module, loss_fn, batch, no_grad=True)
            self.references.append(capture(partial(self._reference, run, fill, number), beside))

    def _planned(
        self, module: nn.Module, loss_fn: LossFunction, batch: Sequence[Any], no_grad: bool = False
    ) -> Callable[[], Tensor]:
        """The forward, with everything fused that can be."""

        def run() -> Tensor:
            with torch.set_grad_enabled(not no_grad):
                return loss_fn(module, *batch)

        if not self._fuse:
            return run

        def fused() -> Tensor:
            with fusion.fused(plan):
                return run()

        # Kernels are built when they first run, which must not be while a graph is captured.
        self._backups.gather_(self._places)
        try:
            with torch.random.fork_rng(devices=[self._steps.losses.device]):
                plan = fusion.record(run)
                loss = fused()
                if not no_grad:
                    loss.backward()
        finally:
            self._backups.scatter_(self._places)
        return fused

    def _forward(self, run: Callable[[], Tensor]) -> None:
        self._backups.gather_(self._places)
        self._loss = run()
        self._dtype = self._loss.dtype
        self._steps.losses[0].copy_(self._loss.detach())

    def _reference(self, run: Callable[[], Tensor], fill: Callable[[], None], number: int) -> None:
        fill()
        self._steps.losses[number].copy_(run())

    def _behind(self) -> None:
        steps, backward = self._steps, self._steps._backward
        steps.ok.logical_and_(torch.isfinite(steps.losses).all())
        steps._found_inf.copy_(~steps.ok)
        with steps._subject.without_hooks():
            backward.gradients(self._loss)
        steps._subject.silence()
        optimizer: Any = backward.optimizer
        if backward.scaler is None:
            optimizer.found_inf = steps._found_inf
        try:
            backward.step()
        finally:
            optimizer.__dict__.pop("found_inf", None)
        self._backups.scatter_(torch.where(steps.ok, -1, self._places))
        steps._done.add_(steps.ok)
        steps._seen_done.copy_(torch.where(steps.ok, steps._done, -1), non_blocking=True)

    def loss(self) -> Tensor:
        """Of the last step, as a tensor of its own."""
        return self._steps.losses[0].to(self._dtype, copy=True)

    def load(self, batch: Sequence[Any]) -> None:
        """Take a batch over."""
        leaves, _ = tree_flatten(list(batch))
        for mine, its in zip(self._static, leaves, strict=True):
            if isinstance(its, Tensor):
                mine.detach().copy_(its)


class _Same:
    """Stands for an object in a key, by its identity; the object lives as long as the key."""

    def __init__(self, it: object) -> None:
        self._it = it

    def __hash__(self) -> int:
        return id(self._it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._it is other._it


_FAILED: Any = object()
