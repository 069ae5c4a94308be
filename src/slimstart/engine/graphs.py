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
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from slimstart.engine import fusion
from slimstart.engine.backward import Backward
from slimstart.engine.capture import capture
from slimstart.engine.eager import LossFunction
from slimstart.engine.optimizers import CapturedRates, has_begun, settings
from slimstart.kernels import Move, Moves

logger = logging.getLogger(__name__)

MOST_KINDS = 8  # graphs that are kept; all share one pool of memory
MOST_STRANGERS = 20  # steps in a row of which each was the first of its kind, before we say something

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_PARTS = (
    "the loss function (define it once, outside of the loop)",
    "the structure of the batch",
    "shapes, types or plain values in the batch",
    "training modes or frozen parameters",
    "settings of the optimizer other than the learning rate",
    "autocast",
)  # of a key


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
        self._pools = _Pool(device), _Pool(device)  # for the network, and for what runs beside it
        self.side, self._forwarded = torch.cuda.Stream(device), torch.cuda.Event()
        self._met: OrderedDict[Any, None] = OrderedDict()  # kinds of steps that have run eagerly, with any shapes
        self._kinds: OrderedDict[Any, _Kind | None] = OrderedDict()  # and those with the present ones
        self._num_strangers = 0
        self._modules, self._parameters = _walk(subject.module)
        self._version = -1
        self.reason: str | None = None
        self.num_captures = 0

    def find(self, loss_fn: LossFunction, batch: Sequence[Any]) -> _Kind | None:
        """The captured step for such a batch; None where the caller has to run it eagerly."""
        if self._version != self._subject.version:
            self._kinds.clear()
            self._version = self._subject.version
            # To walk the tree at every step would take longer than a small network's forward.
            self._modules, self._parameters = _walk(self._subject.module)
        leaves, tree = tree_flatten(list(batch))
        if any(isinstance(leaf, Tensor) and leaf.device != self.losses.device for leaf in leaves):
            self._refuse("a tensor of the batch is not on the network's device")
            return None
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            self._refuse("the batch holds something that is neither a tensor nor a plain value")
            return None
        specs = tuple(
            (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )
        modes = tuple(m.training for m in self._modules), tuple(p.requires_grad for p in self._parameters)
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        key = (_Same(loss_fn), tree, specs, modes, settings(self._backward.optimizer), autocast)
        if key not in self._kinds and key not in self._met:
            self._meet(key)
            return None
        self._kinds.setdefault(key, None)
        self._kinds.move_to_end(key)
        self._num_strangers = 0
        kind = self._kinds[key]
        if kind is None:
            if not has_begun(self._backward.optimizer):
                return None
            kind = self._kinds[key] = self._capture(loss_fn, leaves, tree)
        if kind is _FAILED:
            return None
        self.reason = None
        return kind

    def _capture(self, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any) -> _Kind:
        problem: Exception | None = None
        for fuse in (True, False) if self._fuse else (False,):
            try:
                kind = _Kind(self, loss_fn, leaves, tree, fuse)
            except Exception as error:  # whatever a user's function does that a graph cannot hold
                torch.cuda.synchronize()
                self._pools = _Pool(self.losses.device), _Pool(self.losses.device)  # the old ones may be spoilt
                problem = error
                if isinstance(error, fusion.DivergedError):
                    break  # a forward that is another one every time: a graph would hold one of them for ever
                if fuse:  # a second derivative, say
                    logger.warning("steps are captured without fusion: %s: %s", type(error).__name__, error)
            else:
                self.num_captures += 1
                return kind
        self._refuse(f"the step cannot be captured: {type(problem).__name__}: {problem}")
        failed: _Kind = _FAILED
        return failed

    def _meet(self, key: tuple[Any, ...]) -> None:
        last = next(reversed(self._met), key)
        self._met[key] = None
        for known in (self._met, self._kinds):
            if len(known) > MOST_KINDS:
                known.popitem(last=False)
        self._num_strangers += 1
        if self._num_strangers == MOST_STRANGERS:
            changes = [what for what, mine, its in zip(_PARTS, key, last, strict=True) if mine != its]
            self._refuse(f"every step is a new kind of step: {' and '.join(changes)} never stay the same")

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
        self._launched += 1
        main = torch.cuda.current_stream()
        if learn is not None:
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for reference in kind.references:
                    reference.replay()
        if learn is not None and kind.is_random:
            main.wait_stream(self.side)  # two graphs that run at once would read the same place in the sequence
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


class _Pool:
    """Memory for graphs. PyTorch gives a pool up for ever with its last graph, so one small graph stays in it."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = capture(partial(torch.zeros, 1, device=device), self.handle)


class _Kind:
    """One captured step."""

    def __init__(self, steps: Steps, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any, fuse: bool) -> None:
        self._steps, self._fuse = steps, fuse
        self.is_random = False  # whether a forward takes random numbers on the device
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
        main, beside = (pool.handle for pool in steps._pools)
        run = self._planned(subject.module, loss_fn, batch)
        steps._backward.optimizer.zero_grad(set_to_none=True)
        self.forward = capture(partial(self._forward, run), main)
        with steps.rates.in_groups():
            self.behind = capture(self._behind, main)
        vars(self).pop("_loss", None)  # with its activations; the graphs have their memory
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

        def fused() -> Tensor:
            with fusion.fused(plan):
                return run()

        # Kernels are built when they first run, which must not be while a graph is captured.
        device = self._steps.losses.device
        self._backups.gather_(self._places)
        try:
            with torch.random.fork_rng(devices=[device]):
                generator = torch.cuda.default_generators[device.index or 0]
                before = generator.get_offset()
                plan = fusion.record(run)
                self.is_random |= generator.get_offset() != before
                loss = fused() if self._fuse else run()
                if not no_grad:
                    loss.backward()
        finally:
            self._backups.scatter_(self._places)
        return fused if self._fuse else run

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
        # With a scaler it is the gradients that tell: not finite, the step is skipped.
        loss = self._loss if backward.scaler is None else self._loss / (1 - steps._found_inf)
        with steps._subject.without_hooks():
            backward.gradients(loss)
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

    def __init__(self, it: Any) -> None:
        # A bound method is a new object whenever it is asked for.
        self._its = (it.__self__, it.__func__) if isinstance(it, MethodType) else (it,)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._its)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and list(map(id, self._its)) == list(map(id, other._its))


def _walk(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    return list(module.modules()), list(module.parameters())


_FAILED: Any = object()
