"""The captured steps of a training: which kinds of step are captured, and how they are launched.

A step is captured (`captured.py`) for one loss function, one kind of batch, and all else that a graph holds as a
constant. The first step of a kind runs eagerly, by the caller, and the optimizer creates its state; the second is
captured. When the network's tensors are replaced, known kinds are captured again at once. What cannot be captured runs
eagerly from then on, and `reason` says why.

The host never waits. A loss that is not finite is detected on the device: from there on no step changes anything, and
the host finds a flag in its own memory a step or two later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from slimstart.steps import fusion
from slimstart.steps.captured import CapturedStep, SharedState, Subject
from slimstart.steps.cuda_graph import Pool, is_scarce
from slimstart.steps.depthwise_mode import AllWidths
from slimstart.steps.eager import Backward, LossFunction
from slimstart.steps.optimizers import has_state, settings

logger = logging.getLogger(__name__)

MOST_KINDS = 8  # kinds of step that are kept; all share one pool of memory
MOST_NEW_KINDS = 20  # steps in a row that were all of new kinds, before a warning

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_KEY_PARTS = (
    "the loss function (define it once, outside of the loop)",
    "the structure of the batch",
    "shapes, types or plain values in the batch",
    "training modes or frozen parameters",
    "settings of the optimizer other than the learning rate",
    "autocast",
)


class Steps:
    """Captured training steps of one network.

    Args:
        subject: the network.
        backward: backward with an optimizer whose step can be captured (`optimizers.fuse`).
        losses: float64, on the device: losses of the network and of its references.
        fuse: whether to fuse operations.

    Attributes:
        ok: bool, on the device: whether all losses since `reset` have been finite.
        side: stream for work that runs in parallel with the network's forward and backward.
        reason: the reason for an eager last step, or None.
        num_captures: number of captures.
    """

    def __init__(self, subject: Subject, backward: Backward, losses: Tensor, fuse: bool = True) -> None:
        self._subject, self._optimizer, self._fuse = subject, backward.optimizer, fuse
        self._shared, self._num_launched = SharedState.of(subject, backward, losses), 0
        self.losses, self.ok, self._device = losses, self._shared.ok, losses.device
        self._pools: tuple[Pool, Pool] | None = (Pool(self._device), Pool(self._device))
        self.side, self._forwarded = torch.cuda.Stream(self._device), torch.cuda.Event()
        self._met: OrderedDict[Any, None] = OrderedDict()  # kinds that have run eagerly, for any shapes of the network
        self._kinds: OrderedDict[Any, CapturedStep | _Failed | None] = OrderedDict()  # kinds with the present shapes
        self._num_new_kinds = 0
        self._modules, self._parameters = _walk(subject.model)
        self._version, self._addresses = -1, [0]
        self.reason: str | None = None
        self.num_captures = 0

    def find(self, loss_fn: LossFunction, batch: Sequence[Any]) -> CapturedStep | None:
        """The captured step for such a batch; None where the caller has to run it eagerly."""
        # Addresses too: `model.to(...)`, or swapped weights, give parameters other memory.
        if self._version != self._subject.version or self._addresses != [p.data_ptr() for p in self._parameters]:
            self._kinds.clear()
            if is_scarce():  # blocks in the pools hardly fit the new shapes
                self._renew_pools()
            self._version = self._subject.version
            # Not at every step: a walk over the modules can take longer than a small network's forward.
            self._modules, self._parameters = _walk(self._subject.model)
            self._addresses = [p.data_ptr() for p in self._parameters]
        leaves, tree = tree_flatten(list(batch))
        if any(isinstance(leaf, Tensor) and leaf.device != self._device for leaf in leaves):
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
        key = (_Same(loss_fn), tree, specs, modes, settings(self._optimizer), autocast)
        if key not in self._kinds and key not in self._met:
            self._meet(key)
            return None
        self._kinds.setdefault(key, None)
        self._kinds.move_to_end(key)
        self._num_new_kinds = 0
        kind = self._kinds[key]
        if kind is None:
            if not has_state(self._optimizer):
                return None
            kind = self._kinds[key] = self._capture(loss_fn, leaves, tree)
        if isinstance(kind, _Failed):
            self.reason = kind.reason
            return None
        self.reason = None
        return kind

    def _capture(self, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any) -> CapturedStep | _Failed:
        problem = ""
        for fuse in (True, False) if self._fuse else (False,):
            try:
                with AllWidths():
                    kind = self._capture_in_free_memory(loss_fn, leaves, tree, fuse)
            except Exception as error:  # a user's function may do anything that a graph cannot hold
                self._renew_pools()
                self._shared.backward.reset_scaler()
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, fusion.DivergedError):
                    break  # the forward changes from step to step, and a graph would repeat one of them
                if fuse:  # a second derivative, for example
                    logger.warning("steps are captured without fusion: %s", problem)
            else:
                self.num_captures += 1
                return kind
        failed = _Failed(f"the step cannot be captured: {problem}")
        self._refuse(failed.reason)
        return failed

    def _capture_in_free_memory(
        self, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any, fuse: bool
    ) -> CapturedStep:
        """Capture, if need be with an empty cache: during a capture, PyTorch does not free what it has cached."""
        with suppress(torch.OutOfMemoryError):
            return CapturedStep(self._shared, self._pools or self._renew_pools(), loss_fn, leaves, tree, fuse)
        pools = self._renew_pools()
        self._shared.backward.reset_scaler()
        torch.cuda.empty_cache()
        return CapturedStep(self._shared, pools, loss_fn, leaves, tree, fuse)

    def _renew_pools(self) -> tuple[Pool, Pool]:
        """Replace the pools, after a failed capture, which may have corrupted them, or to free their memory."""
        torch.cuda.synchronize()
        self._optimizer.zero_grad(set_to_none=True)  # gradients of a captured step are in its pool
        self._pools = None  # so that the new ones do not lack the memory of the old ones
        self._pools = pools = Pool(self._device), Pool(self._device)
        return pools

    def _meet(self, key: tuple[Any, ...]) -> None:
        """Remember a new kind of step, and warn where every step is of a new kind."""
        last = next(reversed(self._met), key)
        self._met[key] = None
        for known in (self._met, self._kinds):
            if len(known) > MOST_KINDS:
                known.popitem(last=False)
        self._num_new_kinds += 1
        if self._num_new_kinds == MOST_NEW_KINDS:
            changes = [what for what, mine, its in zip(_KEY_PARTS, key, last, strict=True) if mine != its]
            self._refuse(f"every step is of a new kind: {' and '.join(changes)} never stay the same")

    def _refuse(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("steps run eagerly, without CUDA graphs: %s", reason)
        self.reason = reason

    def run(self, kind: CapturedStep, batch: Sequence[Any], learn: Callable[[], None] | None = None) -> Any:
        """Run a captured step; returns the result of the loss function, in new tensors.

        Args:
            kind: captured step for such a batch.
            batch: arguments of the loss function after the network.
            learn: function that learns from the losses of all networks; called on the stream `side`, so that what it
                launches runs in parallel with the backward.
        """
        kind.load(batch)
        self._shared.rates.follow()
        self._num_launched += 1
        main = torch.cuda.current_stream()
        if learn is not None:
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                for reference in kind.references:
                    reference.replay()
        if learn is not None and kind.is_random:
            # Graphs share the offset of the random generator: two that run at once would draw the same numbers.
            main.wait_stream(self.side)
        kind.forward.replay()
        result = kind.result()  # before the update: a lack of memory leaves the weights as they were
        if learn is not None:
            main.wait_stream(self.side)
            self._forwarded.record(main)
        kind.update.replay()
        if learn is not None:
            self.side.wait_event(self._forwarded)
            with torch.cuda.stream(self.side):
                learn()
            main.wait_stream(self.side)  # before the next step overwrites the losses
        return result

    def release(self) -> None:
        """Free the memory of all graphs; no further step may follow."""
        self._kinds.clear()
        self._optimizer.zero_grad(set_to_none=True)  # gradients of a captured step are in its pool
        self._pools = None

    @property
    def failed(self) -> bool:
        """Whether a loss was not finite, as far as the host knows: a step or two late, without waiting."""
        return int(self._shared.seen) < 0

    def reset(self) -> int:
        """Continue after a loss that was not finite; returns the number of steps that have had no effect since."""
        torch.cuda.synchronize()
        lost = self._num_launched - int(self._shared.num_good)
        self._num_launched = 0
        self._shared.reset()
        return lost


class _Failed(NamedTuple):
    """A step that could not be captured."""

    reason: str


class _Same:
    """Key that compares objects by identity, and keeps them alive."""

    def __init__(self, it: Any) -> None:
        # Every access to a bound method creates another object.
        self._its = (it.__self__, it.__func__) if isinstance(it, MethodType) else (it,)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._its)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and list(map(id, self._its)) == list(map(id, other._its))


def _walk(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    return list(module.modules()), list(module.parameters())
