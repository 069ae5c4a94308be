"""Training steps as CUDA graphs: which of them are captured, and how they are launched.

A step is captured (`captured.py`) for one loss function, one kind of batch, and whatever else a graph holds for ever.
The first step of a kind runs eagerly, by the caller, and the optimizer makes its state; the second is captured. When
the network's tensors are exchanged, kinds that are known are captured anew at once. What cannot be captured runs
eagerly for ever, and `reason` says why.

The host never waits. A loss that is not finite is seen on the device: from there on no step changes anything, and the
host finds a flag in its own memory a step or two later.
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
from slimstart.steps.backward import Backward
from slimstart.steps.capture import Pool, is_scarce
from slimstart.steps.captured import Board, CapturedStep, Subject
from slimstart.steps.depthwise_mode import AllWidths
from slimstart.steps.eager import LossFunction
from slimstart.steps.optimizers import has_begun, settings

logger = logging.getLogger(__name__)

MOST_KINDS = 8  # graphs that are kept; all share one pool of memory
MOST_NEW_KINDS = 20  # steps in a row of which each was the first of its kind, before we say something

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_PARTS = (
    "the loss function (define it once, outside of the loop)",
    "the structure of the batch",
    "shapes, types or plain values in the batch",
    "training modes or frozen parameters",
    "settings of the optimizer other than the learning rate",
    "autocast",
)  # of a key


class Steps:
    """Captured training steps of one network.

    Args:
        subject: the network.
        backward: with an optimizer whose step can be captured (`optimizers.fuse`).
        losses: float64, on the device: of the network and of its references.

    Attributes:
        ok: bool, on the device: whether all losses since `reset` have been finite.
        reason: why the last step ran eagerly, or None.
        num_captures: how often something was captured.
    """

    def __init__(self, subject: Subject, backward: Backward, losses: Tensor, fuse: bool = True) -> None:
        self._subject, self._optimizer, self._fuse = subject, backward.optimizer, fuse
        self._board, self._num_launched = Board.of(subject, backward, losses), 0
        self.losses, self.ok, self._device = losses, self._board.ok, losses.device
        self._pools: tuple[Pool, Pool] | None = (Pool(self._device), Pool(self._device))
        self.side, self._forwarded = torch.cuda.Stream(self._device), torch.cuda.Event()
        self._met: OrderedDict[Any, None] = OrderedDict()  # kinds of steps that have run eagerly, with any shapes
        self._kinds: OrderedDict[Any, CapturedStep | _Failed | None] = OrderedDict()  # and those with the present ones
        self._num_new_kinds = 0
        self._modules, self._parameters = _walk(subject.module)
        self._version, self._addresses = -1, [0]
        self.reason: str | None = None
        self.num_captures = 0

    def find(self, loss_fn: LossFunction, batch: Sequence[Any]) -> CapturedStep | None:
        """The captured step for such a batch; None where the caller has to run it eagerly."""
        # Addresses too: `model.to(...)`, or weights that are swapped, give parameters other memory.
        if self._version != self._subject.version or self._addresses != [p.data_ptr() for p in self._parameters]:
            self._kinds.clear()
            if is_scarce():  # steps of other shapes hardly fit into what these have left
                self._renew_pools()
            self._version = self._subject.version
            # To walk the tree at every step would take longer than a small network's forward.
            self._modules, self._parameters = _walk(self._subject.module)
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
            if not has_begun(self._optimizer):
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
                    kind = self._in_what_is_free(loss_fn, leaves, tree, fuse)
            except Exception as error:  # whatever a user's function does that a graph cannot hold
                self._renew_pools()
                self._board.backward.break_off()
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, fusion.DivergedError):
                    break  # a forward that is another one every time: a graph would hold one of them for ever
                if fuse:  # a second derivative, say
                    logger.warning("steps are captured without fusion: %s", problem)
            else:
                self.num_captures += 1
                return kind
        failed = _Failed(f"the step cannot be captured: {problem}")
        self._refuse(failed.reason)
        return failed

    def _in_what_is_free(self, loss_fn: LossFunction, leaves: Sequence[Any], tree: Any, fuse: bool) -> CapturedStep:
        """While a graph is captured, PyTorch gives back nothing that it has cached for eager steps."""
        with suppress(torch.OutOfMemoryError):
            return CapturedStep(self._board, self._pools or self._renew_pools(), loss_fn, leaves, tree, fuse)
        pools = self._renew_pools()
        self._board.backward.break_off()
        torch.cuda.empty_cache()
        return CapturedStep(self._board, pools, loss_fn, leaves, tree, fuse)

    def _renew_pools(self) -> tuple[Pool, Pool]:
        """After a capture that broke off, which may have spoilt them, or where their memory is needed."""
        torch.cuda.synchronize()
        self._optimizer.zero_grad(set_to_none=True)  # gradients of a capture lie in its pool
        self._pools = pools = Pool(self._device), Pool(self._device)
        return pools

    def _meet(self, key: tuple[Any, ...]) -> None:
        last = next(reversed(self._met), key)
        self._met[key] = None
        for known in (self._met, self._kinds):
            if len(known) > MOST_KINDS:
                known.popitem(last=False)
        self._num_new_kinds += 1
        if self._num_new_kinds == MOST_NEW_KINDS:
            changes = [what for what, mine, its in zip(_PARTS, key, last, strict=True) if mine != its]
            self._refuse(f"every step is a new kind of step: {' and '.join(changes)} never stay the same")

    def _refuse(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("steps run eagerly, without CUDA graphs: %s", reason)
        self.reason = reason

    def launch(self, kind: CapturedStep, learn: Callable[[], None] | None = None) -> None:
        """Run a captured step on what it was loaded with.

        Args:
            learn: called on the stream `side`, behind all forwards; what it launches runs beside the backward.
        """
        self._board.rates.follow()
        self._num_launched += 1
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

    def release(self) -> None:
        """Give the memory of all graphs back; there will be no other step."""
        self._kinds.clear()
        self._optimizer.zero_grad(set_to_none=True)  # gradients of a capture lie in its pool
        self._pools = None

    @property
    def failed(self) -> bool:
        """Whether a loss was seen not to be finite; may be true only a step or two later. Waits for nothing."""
        return int(self._board.seen) < 0

    def reset(self) -> int:
        """Go on after a loss that was not finite; returns how many steps have changed nothing since."""
        torch.cuda.synchronize()
        lost = self._num_launched - int(self._board.num_good)
        self._num_launched = 0
        self._board.clean()
        return lost


class _Failed(NamedTuple):
    """In the place of a step that could not be captured."""

    reason: str


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
