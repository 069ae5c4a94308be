"""SparseTraining: the paper's Algorithm 1 as an object in the user's own loop.

    sparse = SparseTraining(model, optimizer, example_inputs, budget=Flops(0.10))
    for images, labels in loader:
        loss = sparse.step(loss_fn, images, labels)
    small = sparse.finish(loader, loss_fn)

`step` is Algorithm 1: two forwards and one backward on narrow tensors, then both updates. Everything it does can also
be done by hand with the verbs below it (`net`, `reference`, `update`, ...), for loops with a gradient scaler, clipping
or accumulation. What is learned sits behind `slimstart.structure.Policy`; how tensors move, in `slimstart.subnet`.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart import checkpoints
from slimstart.engine import check_finite, forward_without_trace, undoing_statistics
from slimstart.engine.eager import LossFunction
from slimstart.errors import TraceError
from slimstart.finishing import finished, first_batches, least_loss
from slimstart.graph import ChannelGraph
from slimstart.structure import BernoulliUnits, Budget, Estimator, Policy
from slimstart.subnet import OptimizerLink, Subnet, recalibrate, trace_verified
from slimstart.subnet.slots import Slots
from slimstart.subnet.state_hooks import keep_dense


class SparseTraining:
    """Train a model narrow from the first step.

    The dense `model` keeps all weights; each step runs only on `net`, a physically small network drawn from the
    keep-probabilities, and the user's optimizer updates that one. The model's and the optimizer's own `state_dict` are
    dense and up to date whenever they are asked for.

    Args:
        model: any module whose forward can be followed; its training and evaluation modes count in every step.
        optimizer: over the model's parameters.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        budget: `Channels`, `Params` or `Flops`, as a fraction of the dense model's.
        coupling: "filter" (the paper) or "stream"; see `slimstart.trace`.
        estimator: of the gradient of s: "vr_pge" (the paper), "pge", "vr_pge_symmetric", "leave_one_out".
        alpha: exponent of the preconditioner H; the paper: 1/2.
        structure_lr: Adam's learning rate for s; the paper: 12e-3.
        resample_every: steps for which a sub-network is held. Only the first of them updates s: after it the weights
            have been trained for this mask, and the two losses no longer compare.
        align: room for units is made in multiples of this, so that shapes survive a draw; what is left of it is filled
            with zeros that stay zero. 1: no padding.
        total_steps: if given, `structure_lr` falls to 0 over so many steps along a cosine.
        seed: of the masks.
        keep: names of modules or parameters to leave whole.
        policy: called with the graph's cost table, in place of the paper's policy; `budget`, `estimator`, `alpha`,
            `structure_lr`, `total_steps` and `seed` then mean nothing.

    Raises:
        TraceError: the forward fails on `example_inputs`, or nothing in the model can shrink.
        BudgetError: no sub-network is so small.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Any,
        budget: Budget | None = None,
        coupling: str = "filter",
        estimator: str | Estimator = "vr_pge",
        alpha: float = 0.5,
        structure_lr: float = 12e-3,
        resample_every: int = 1,
        align: int = 1,
        total_steps: int | None = None,
        seed: int = 0,
        *,
        keep: Iterable[str] = (),
        policy: Callable[..., Policy] | None = None,
    ) -> None:
        if resample_every < 1:
            raise ValueError(f"`resample_every` is {resample_every}; it must be at least 1")
        if align < 1:
            raise ValueError(f"`align` is {align}; it must be at least 1")
        if (budget is None) == (policy is None):
            raise ValueError("give either a `budget`, such as slimstart.Flops(0.10), or a `policy` of your own")
        self.graph: ChannelGraph = trace_verified(model, example_inputs, coupling, keep)
        if self.graph.num_units == 0:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(self.graph.left_whole.items(), 5))
            raise TraceError(f"nothing in the model can shrink ({reasons or 'it has no layers that are followed'})")
        self.policy: Policy
        if policy is not None:
            self.policy = policy(self.graph.costs)
        else:
            assert budget is not None
            updates = None if total_steps is None else max(1, math.ceil(total_steps / resample_every))
            self.policy = BernoulliUnits(
                self.graph.costs, budget, estimator, alpha=alpha, lr=structure_lr, total_steps=updates, seed=seed
            )
        self.model, self.optimizer, self.resample_every = model, optimizer, resample_every
        self.num_steps = 0
        self.settled = False
        self._held_steps = 0  # since the last draw
        self._net, self._reference = Subnet(model, self.graph), Subnet(model, self.graph)
        self._slots = Slots(self.graph.costs, align)
        named = dict(model.named_parameters())
        self._link = OptimizerLink(optimizer, {name: named[name] for name in self.graph.tensors if name in named})
        self._masks = self.policy.draw()
        self._point()
        keep_dense(
            model, optimizer, sync=self.sync, reload=self._reload, adopt=self._adopt, dense=self._dense_optimizer_state
        )

    # --- Algorithm 1 -------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, *batch: Any) -> Tensor:
        """One step of Algorithm 1; returns the detached loss.

        Args:
            loss_fn: called as `loss_fn(net, *batch)`, returns a scalar. It takes the network because two of them see
                the same batch.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; weights, statistics and keep-probabilities are those of the
                step before.
        """
        self._net.follow_modes()
        with undoing_statistics(self._net.statistics):
            loss = loss_fn(self.net, *batch)
            reference_losses = [forward_without_trace(loss_fn, net, batch) for net in self.references()]
            check_finite(self.num_steps, loss, *reference_losses, unchanged="weights and keep-probabilities are")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.update(loss, reference_losses)
        return loss.detach()

    # --- the verbs, for loops written by hand ------------------------------------------------------------------------

    @property
    def net(self) -> nn.Module:
        """The narrow network to train: ask for it after every draw. Its modes follow those of `model`."""
        return self._net.module

    @property
    def reference(self) -> nn.Module:
        """The second network of the pair: run it forward on the same batch, before the optimizer's step."""
        found = next(self.references(), None)
        if found is None:
            raise RuntimeError("there is no reference network now; ask `needs_reference` before")
        return found

    def references(self) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other; none where no reference is needed."""
        if not self.needs_reference:
            return
        for mask, frame in zip(self._masks[1:], self._frames[1:], strict=True):
            self._reference.load(self.graph.select_within(mask, frame))
            yield self._reference.module

    @property
    def needs_reference(self) -> bool:
        """Whether this step's `update` needs the loss of `reference`: on the first step after a draw."""
        return self._learns and self.policy.num_masks > 1

    @property
    def _learns(self) -> bool:
        return not self.settled and self._held_steps == 0

    def update(
        self, loss: Tensor | float, reference_loss: Tensor | float | Sequence[Tensor | float] | None = None
    ) -> None:
        """Tell that a step has been taken: learn the keep-probabilities from its losses, and draw when it is time.

        Args:
            loss: of `net`, unscaled.
            reference_loss: of `reference` on the same batch (a list, if there are several); needed if
                `needs_reference`, ignored otherwise.
        """
        if self._learns:
            losses = [loss]
            if self.policy.num_masks > 1:
                several = isinstance(reference_loss, Sequence)
                losses += list(reference_loss) if several else [reference_loss]  # type: ignore[arg-type,list-item]
            if len(losses) != self.policy.num_masks or any(one is None for one in losses):
                raise ValueError(
                    f"`needs_reference` is true, so `update` needs the losses of {self.policy.num_masks - 1} reference "
                    "network(s) too, in the order of `references()`"
                )
            check_finite(self.num_steps, *losses, unchanged="keep-probabilities are")
            self.policy.update(torch.stack([torch.as_tensor(one).detach().double().cpu() for one in losses]))
        self.num_steps += 1
        self._held_steps += 1
        if not self.settled and self._held_steps >= self.resample_every:
            self.resample()

    def resample(self) -> None:
        """Draw new masks now; `net` and the optimizer hold another network afterwards."""
        if not self.settled:
            self.sync()
            self._masks = self.policy.draw()
            self._point()

    def sync(self) -> None:
        """Write what `net` and the optimizer have learned into the dense model and state.

        Asking for a state dict does it by itself; before `copy.deepcopy(model)` in mid-window, do it by hand.
        """
        assert self._net.selection is not None
        self._net.store()
        self._link.store(self._net.selection)

    def _point(self) -> None:
        self._frames = self._slots.frames(self._masks)
        selection = self.graph.select_within(self._masks[0], self._frames[0])
        self._net.load(selection)
        self._link.point(self._net.parameters, selection)
        self._held_steps = 0

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def keep_probs(self) -> Tensor:
        """s: one keep-probability per unit."""
        return self.policy.keep_probs

    @property
    def mask(self) -> Tensor:
        """m: which units `net` has."""
        return self.graph.costs.at_least_one(self._masks[0])

    @property
    def frame(self) -> Tensor:
        """Which units `net` has room for: those of `mask` and, with `align` > 1, others that are zero in it."""
        return self._frames[0].clone()

    @property
    def reference_masks(self) -> Tensor:
        """m': the other masks of the draw, one row each, as they were drawn; none where no reference is needed."""
        return self._masks[1:].clone() if self.needs_reference else self._masks[:0]

    @property
    def reference_frames(self) -> Tensor:
        """The frames of the reference networks; see `frame`."""
        return self._frames[1:].clone() if self.needs_reference else self._frames[:0]

    @property
    def expected_cost(self) -> float:
        """What the budget limits, in expectation over masks, as a fraction of the dense model's."""
        return self.policy.expected_cost

    # --- the end of the search ---------------------------------------------------------------------------------------

    def settle(
        self, batches: Iterable[tuple[Any, ...]], loss_fn: LossFunction, num_samples: int = 10, max_batches: int = 20
    ) -> None:
        """End the search: fix the structure, and train on.

        Args:
            batches: tuples of what `loss_fn` takes behind the network; training data.
            num_samples: masks to draw; all are within the budget, and the one of least loss is taken.
            max_batches: how many of the batches to look at.
        """
        if self.settled:
            return
        seen = first_batches(batches, max_batches)
        self.sync()
        self._masks = self._best_mask(seen, loss_fn, num_samples)[None]
        self.settled = True
        self._point()
        recalibrate(self.net, seen, loss_fn)

    def snapshot(
        self,
        batches: Iterable[tuple[Any, ...]] | None = None,
        loss_fn: LossFunction | None = None,
        max_batches: int = 20,
    ) -> nn.Module:
        """A finished copy for validation, from the likeliest mask; training goes on untouched.

        Args:
            batches, loss_fn: to measure normalisation statistics anew; without them those of training are used.
            max_batches: how many of the batches to look at.
        """
        self.sync()
        mask = self._masks[0] if self.settled else self.policy.best_guess()
        seen = None if batches is None else first_batches(batches, max_batches)
        return finished(self.model, self.graph.select(mask), seen, loss_fn, plain=False)

    def finish(
        self,
        batches: Iterable[tuple[Any, ...]],
        loss_fn: LossFunction,
        num_samples: int = 10,
        max_batches: int = 20,
        plain: bool = False,
    ) -> nn.Module:
        """The trained narrow network: a plain module of the user's own class, within the budget, statistics measured.

        Args:
            batches: tuples of what `loss_fn` takes behind the network; training data.
            num_samples: masks to choose from by loss, if the structure has not been settled.
            max_batches: how many of the batches to look at.
            plain: do without `StreamPort` on residual streams, at the price of rows of zeros. They cost multiply-adds
                of their own: the budget holds for the network without them.
        """
        seen = first_batches(batches, max_batches)
        self.sync()
        mask = self._masks[0] if self.settled else self._best_mask(seen, loss_fn, num_samples)
        return finished(self.model, self.graph.select(mask), seen, loss_fn, plain)

    def _best_mask(self, batches: Sequence[tuple[Any, ...]], loss_fn: LossFunction, num_samples: int) -> Tensor:
        drawn = [self.graph.select(mask) for mask in self.policy.candidates(num_samples)]
        return least_loss(drawn, self._reference, batches, loss_fn)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything: dense weights, optimizer, s, masks, generators. One dict resumes, also within a window.

        Tensors, numbers, strings and containers only, so that `torch.load(weights_only=True)` reads it back.
        """
        return {
            "format": checkpoints.FORMAT,
            "coupling": self.graph.coupling,
            "structure": self.graph.digest,
            "num_steps": self.num_steps,
            "held_steps": self._held_steps,
            "settled": self.settled,
            "masks": self._masks.clone(),
            "room": self._slots.room.clone(),
            "policy": self.policy.state_dict(),
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; also sets PyTorch's global generator, for dropout.

        Raises:
            CheckpointError: the dict is not ours, or belongs to another network; nothing is changed then.
        """
        checkpoints.check(state, own=self.state_dict(), parameter_shapes=self._link.dense_shapes)
        self.policy.load_state_dict(state["policy"])
        self._masks, self.settled = state["masks"].clone(), bool(state["settled"])
        self._slots.room = state["room"].clone()
        self.model.load_state_dict(state["model"])
        self._point()
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.num_steps, self._held_steps = int(state["num_steps"]), int(state["held_steps"])
        torch.set_rng_state(state["random"].cpu())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file, atomically."""
        checkpoints.write(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote; no code in it is ever executed.

        Raises:
            CheckpointError: the file is missing, truncated, foreign, or of another network.
        """
        self.load_state_dict(checkpoints.read(path))

    # --- small print -------------------------------------------------------------------------------------------------

    def _reload(self) -> None:
        """The dense model has been loaded: `net` takes the new values over."""
        assert self._net.selection is not None
        self._net.load(self._net.selection)
        self._link.point(self._net.parameters, self._net.selection)

    def _adopt(self) -> None:
        assert self._net.selection is not None
        self._link.adopt(self._net.parameters, self._net.selection)

    def _dense_optimizer_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._link.dense_state_dict(state_dict)
