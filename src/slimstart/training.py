"""SparseTraining: training that is narrow from step one, as an object in the user's own loop.

    sparse = SparseTraining(model, optimizer, example_inputs, budget=Flops(0.10))
    for images, labels in loader:
        loss = sparse.step(loss_fn, images, labels)
    small = sparse.finish(loader, loss_fn)

`step` is a training step on narrow tensors; in the paper's Algorithm 1 with a second forward. Everything it does can
also be done by hand with the verbs below it (`net`, `reference`, `update`, ...), for loops with a gradient scaler,
clipping or accumulation. What is learned sits behind `slimstart.policies.Policy`; how tensors move, in
`slimstart.narrow`.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from slimstart import checkpoints, memory
from slimstart.errors import TraceError
from slimstart.finishing import finished, first_batches, least_loss
from slimstart.graph import ChannelGraph
from slimstart.narrow import Executed, Traffic, has_learned, recalibrate, suit_, trace_verified
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.state_hooks import keep_dense
from slimstart.policies import Budget, GradientLearner, Learner, Policy, get_policy
from slimstart.ranks import gradient_bytes, num_examples, ranks_of, reporting, running_statistics
from slimstart.steps import (
    Backward,
    LossFunction,
    assemble,
    check_finite,
    forward_without_trace,
    undoing_statistics,
)
from slimstart.steps.optimizers import fuse, unfuse
from slimstart.steps.stepping import Stepping
from slimstart.steps.together import Together
from slimstart.steps.watching import Watch
from slimstart.steps.wrapping import Wrap, Wrapping

logger = logging.getLogger(__name__)


class SparseTraining(Stepping):
    """Train a model narrow from the first step.

    The dense `model` keeps all weights; each step runs only on `net`, a physically small network that the policy has
    chosen, and the user's optimizer updates that one. The model's and the optimizer's own `state_dict` are
    dense and up to date whenever they are asked for.

    Args:
        model: any module whose forward can be followed; its training and evaluation modes count in every step.
        optimizer: over the model's parameters.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        budget: `Channels`, `Params` or `Flops`, as a fraction of the dense model's.
        total_steps: of the whole training.
        policy: what learns the structure: "equal_worth" or "paper" with their defaults, or an object with settings:
            `EqualWorth(...)`, `Paper(...)`, or one of your own (`slimstart.policies.Policy`).
        coupling: "filter" (the paper) or "stream"; see `slimstart.trace`. By default that of the policy.
        engine: "eager", "graphs" (CUDA graphs), or "auto": graphs where the model is on a GPU and the optimizer allows
            it. Both give the same results.
        max_grad_norm: `step` clips the norm of all gradients together at this.
        scaler: `step` scales the loss with it, for float16.
        keep: names of modules or parameters to leave whole.
        wrap: called with the narrow network; what it returns runs in its place, as `net`: `torch.compile`, or
            `DistributedDataParallel` (better `integrations.data_parallel`), which makes several processes train as one.
            Called again when parameters have been exchanged. Steps run eagerly then.
        spread_references: of several ranks, each runs its part of the references, on its own part of the batch: more
            masks per update for the same time, such as `leave_one_out_of(1 + ranks)`.
        full_model_device: "cpu" for a model that is larger than the device it is trained on. The dense model and its
            optimizer state stay on the CPU, where they must be already; narrow networks are on the device of
            `example_inputs`, and at a draw only what changes is exchanged (`traffic`).
        fresh: for policies that learn from gradients: the model has just been
            initialised, so its weights are scaled to the fan-in of the network that it starts with, as if that had been
            initialised by itself. False for a model that has learned: by default where the optimizer has state, or a
            batch norm has counted batches. Say it where neither tells.

    Attributes:
        graph: what belongs together in the model; `graph.select(mask)` is the structure of a network.
        policy: the settings of what learns the structure.
        learner: its running state.
        settled: whether the structure is fixed.
        num_steps: that have been taken.
        building_seconds: in which graphs were captured, networks built anew, and steps ran eagerly before.

    Raises:
        TraceError: the forward fails on `example_inputs`, or nothing in the model can shrink.
        BudgetError: no sub-network is so small.
        MemoryError: with `full_model_device`, there is not enough memory; found out before any is taken.
    """

    _unchanged = "weights and keep-probabilities are"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        example_inputs: Any,
        budget: Budget,
        *,
        total_steps: int | None = None,
        policy: str | Policy = "equal_worth",
        coupling: str | None = None,
        engine: str = "auto",
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        keep: Iterable[str] = (),
        fresh: bool | None = None,
        wrap: Wrap | None = None,
        spread_references: bool = False,
        full_model_device: str | torch.device | None = None,
    ) -> None:
        policy = get_policy(policy)
        if total_steps is not None and not (isinstance(total_steps, Integral) and total_steps >= 1):
            raise ValueError(f"`total_steps` is {total_steps!r}; it must be a whole number, at least 1")
        if not isinstance(budget, Budget):
            raise TypeError(f"`budget` is {budget!r}; it must be a budget, such as slimstart.Flops(0.10)")
        if wrap is not None and engine == "graphs":
            raise ValueError("`engine` is 'graphs', which cannot hold what `wrap` returns; leave one of them out")
        if fresh and optimizer.state:
            raise ValueError("`fresh` is True, but the optimizer has state; make a new one, or leave `fresh` out")
        fresh = not has_learned(model, optimizer) if fresh is None else fresh
        self._place = memory.place(model, optimizer, example_inputs, budget, full_model_device)
        examples = example_inputs if self._place is None else memory.on_host(example_inputs)
        self.graph: ChannelGraph = trace_verified(model, examples, coupling or policy.coupling, keep)
        if self.graph.num_units == 0:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(self.graph.left_whole.items(), 5))
            raise TraceError(f"nothing in the model can shrink ({reasons or 'it has no layers that are followed'})")
        self.policy: Policy = policy
        self.learner: Learner = policy.start(self.graph.costs, budget, total_steps)
        self.model, self.optimizer = model, optimizer
        self.num_steps = 0
        self.num_examples: float = 0  # of the last step, over all ranks
        self.settled = False
        self.building_seconds = 0.0
        self._held_steps = 0  # since the last draw
        self._backward = Backward(optimizer, max_grad_norm, scaler)
        self._wrapping = Wrapping(wrap)
        self._watch: Watch | None = None
        if policy.learns_from == "gradients":
            if not isinstance(self.learner, GradientLearner):
                raise TypeError(
                    f"the learner of {policy!r} lacks `freeze`, `to` or `observe_`, with which it would "
                    "learn from gradients"
                )
            self._watch = Watch(self.learner, self.graph, model, optimizer, examples)
        parts = assemble(
            model, optimizer, self.graph, self.learner, self._backward, engine, self._place, wrap is not None
        )
        self._networks, self._search, self._steps, self._eager = parts.networks, parts.search, parts.steps, parts.eager
        self._watch_on(True)
        if fresh and self._watch is not None:  # only now: whatever can be refused has been
            suit_(model, self.graph.select(self.mask))
            self._networks.reload()
        keep_dense(
            model,
            optimizer,
            sync=self.sync,
            reload=self._reload,
            release=self._networks.release,
            adopt=self._adopt,
            dense=self._dense_optimizer_state,
        )
        self.ranks = ranks_of(self.net)
        self._together = Together(self.ranks, self.learner.num_masks, spread_references and self.ranks.size > 1)
        if self.ranks.size > 1:  # all begin with the weights of rank 0
            self.ranks.broadcast_([*model.parameters(), *model.buffers()])
            self._networks.reload()
            self._check_ranks("at the start")

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, *batch: Any, count: float | None = None) -> Tensor:
        """One step of training; returns the detached loss, of several ranks their mean.

        Args:
            loss_fn: called as `loss_fn(net, *batch)`, returns a scalar. It takes the network because that changes, and
                because in Algorithm 1 two of them see the same batch. In CUDA graphs Python runs only while a step is
                captured: what may change from step to step must be a tensor in the batch.
            count: of examples that the loss is a mean over, where ranks may have more or fewer; by default, the length
                of the first tensor of the batch.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; weights, statistics and keep-probabilities are those of the
                step before.
        """
        self.num_examples = num_examples(batch) if count is None else count
        if self._steps is None:
            return self._step_eagerly(loss_fn, batch)
        self._check()
        began, before = time.perf_counter(), (self._networks.version, self._steps.num_captures)
        self._networks.net.follow_modes()
        captured = self._steps.find(loss_fn, batch)
        if captured is None:
            loss = self._step_eagerly(loss_fn, batch)
        else:
            captured.load(batch)
            learn = partial(self._search.learn, self._steps.losses)
            self._steps.launch(captured, learn if self._learns else None)
            self._count()
            loss = captured.loss()
        if captured is None or before != (self._networks.version, self._steps.num_captures):
            self.building_seconds += time.perf_counter() - began
        return loss

    def _step_eagerly(self, loss_fn: LossFunction, batch: Sequence[Any]) -> Tensor:
        self._networks.net.follow_modes()
        with undoing_statistics(self._networks.net.statistics), reporting():
            with self._kernels:
                loss = loss_fn(self.net, *batch)
                reference_losses = [forward_without_trace(loss_fn, net, batch) for net in self.references()]
            found = self._together.average([loss, *reference_losses], self.num_examples, self._networks.net.module)
            check_finite(self.num_steps, *found.losses, unchanged=self._unchanged)
        with reporting():
            self._backward(loss if found.weight == 1 else found.weight * loss)
        self.num_examples = found.num_examples
        self._learn(found.losses)
        return found.losses[0].detach()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SparseTraining can be neither copied nor pickled: its hooks are on your model and your optimizer. Load "
            "its `state_dict()` into another one, with a model and an optimizer of its own"
        )

    # --- the verbs, for loops written by hand ------------------------------------------------------------------------

    @property
    def net(self) -> nn.Module:
        """The narrow network to train, wrapped: ask for it after every draw. Its modes follow those of `model`."""
        return self._wrapping(self._networks.net.module)

    @property
    def reference(self) -> nn.Module:
        """The second network of the pair: run it forward on the same batch, before the optimizer's step."""
        found = next(self.references(), None)
        if found is None:
            raise RuntimeError("there is no reference network now; ask `needs_reference` before")
        return found

    def references(self) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other; none where no reference is needed."""
        if self.needs_reference and self._together.spread:
            yield from self._networks.of_masks(self._networks.masks[self._together.own])
        elif self.needs_reference:
            yield from self._networks.references()

    @property
    def needs_reference(self) -> bool:
        """Whether this step's `update` needs the loss of `reference`: on the first step after a draw."""
        return self._learns and self.learner.num_masks > 1

    @property
    def _learns(self) -> bool:
        return not self.settled and self._held_steps == 0 and self._watch is None

    def update(
        self,
        loss: Tensor | float,
        reference_loss: Tensor | float | Sequence[Tensor | float] | None = None,
        count: float = 1,
    ) -> None:
        """Tell that a step has been taken: learn the keep-probabilities from its losses, and draw when it is time.

        Args:
            loss: of `net`, unscaled.
            reference_loss: of `reference` on the same batch (a list, if there are several); needed if
                `needs_reference`, ignored otherwise.
            count: of examples that the losses are means over, where ranks may have more or fewer. Their gradients are
                then the caller's to weigh.
        """
        losses = [loss]
        if self.needs_reference:
            several = isinstance(reference_loss, Sequence)
            losses += list(reference_loss) if several else [reference_loss]  # type: ignore[arg-type,list-item]
            needed = self._together.num_references
            if len(losses) != 1 + needed or any(one is None for one in losses):
                raise ValueError(
                    f"`needs_reference` is true, so `update` needs the losses of {needed} reference network(s) too, in "
                    "the order of `references()`"
                )
        means = [torch.as_tensor(one).detach() for one in losses]
        found = self._together.average(means, count, self._networks.net.module)
        if self._learns:
            check_finite(self.num_steps, *found.losses, unchanged="keep-probabilities are")
        self.num_examples = found.num_examples
        self._learn(found.losses)

    def _learn(self, losses: Sequence[Tensor]) -> None:
        if self._learns:
            self._search.learn(torch.stack([one.detach().double().cpu() for one in losses]))
        self._count()

    def _count(self) -> None:
        self.num_steps += 1
        self._held_steps += 1
        if not self.settled and self._held_steps >= self.learner.window:
            self.resample()

    def resample(self) -> None:
        """Go on to the next draw now; `net` and the optimizer hold another network afterwards."""
        if not self.settled:
            self._search.advance()
            self._held_steps = 0
            if self.learner.is_done:
                self._end_search()
                logger.info("widths are found after %d steps", self.num_steps)
            if self.ranks.debugging:
                self._check_ranks(f"after {self.num_steps} steps")

    def _end_search(self) -> None:
        self.settled = True
        self._search.end()
        self._watch_on(False)

    def _watch_on(self, active: bool) -> None:
        if self._watch is not None:
            self._watch.start(self._networks) if active else self._watch.stop()
            self._networks.version += 1  # captured steps do as before: they are captured anew

    @property
    def _watches(self) -> bool:
        """Whether widths are being learned from gradients now."""
        return self._watch is not None and self._watch.is_on

    def sync(self) -> None:
        """Write what `net` and the optimizer have learned into the dense model and state.

        Asking for a state dict does it by itself; before `copy.deepcopy(model)` in mid-window, do it by hand.
        """
        self._check(wait=True)
        self._networks.store()

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def keep_probs(self) -> Tensor:
        """s: one keep-probability per unit."""
        return self.learner.keep_probs

    @property
    def mask(self) -> Tensor:
        """m: which units `net` has."""
        return self.graph.costs.at_least_one(self._networks.masks[0].cpu())

    @property
    def executed(self) -> Executed:
        """What the next step runs, zeros of padding included."""
        found = self._networks.executed
        return found if self.needs_reference else replace(found, reference_flops=())

    @property
    def executed_flops(self) -> int:
        """FLOPs of one example through `net` as it is, zeros of padding included."""
        return self._networks.executed.flops

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of a step, which is what ranks exchange: those of the narrow network."""
        return gradient_bytes(self._networks.net.module.parameters())

    @property
    def dense_gradient_bytes(self) -> int:
        """The same for the dense model."""
        return gradient_bytes(self.model.parameters())

    @property
    def traffic(self) -> Traffic:
        """Bytes of weights and optimizer state that have crossed the bus, with `full_model_device`."""
        return self._networks.traffic

    @property
    def expected_cost(self) -> float:
        """What the budget limits, in expectation over masks, as a fraction of the dense model's."""
        return self.learner.expected_cost

    # --- the end of the search ---------------------------------------------------------------------------------------

    def settle(
        self, batches: Iterable[tuple[Any, ...]], loss_fn: LossFunction, num_samples: int = 10, max_batches: int = 20
    ) -> None:
        """End the search: fix the structure, and train on with the weights that there are.

        The paper's policy searches until it is told to end; "equal_worth" ends by itself.

        Args:
            batches: tuples of what `loss_fn` takes behind the network; training data.
            num_samples: masks to draw; all are within the budget, and the one of least loss is taken.
            max_batches: how many of the batches to look at.
        """
        if self.settled:
            return
        seen = first_batches(batches, max_batches)
        self.sync()
        mask = self._best_mask(seen, loss_fn, num_samples)
        self._end_search()
        self._networks.enter(mask[None], None)
        self._held_steps = 0
        with self._kernels:
            recalibrate(self._networks.net.module, seen, loss_fn)
        self._average_statistics(self._networks.net.module)

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
        mask = self.mask if self.settled else self.learner.best_guess()
        seen = None if batches is None else first_batches(batches, max_batches)
        return self._finished(mask, seen, loss_fn, plain=False)

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
        if self._watches:
            logger.warning(
                "the network is finished after %d steps, while its widths are still being learned", self.num_steps
            )
        seen = first_batches(batches, max_batches)
        self.sync()
        mask = self.mask if self.settled else self._best_mask(seen, loss_fn, num_samples)
        return self._finished(mask, seen, loss_fn, plain)

    def _best_mask(self, batches: Sequence[tuple[Any, ...]], loss_fn: LossFunction, num_samples: int) -> Tensor:
        masks = self.learner.candidates(num_samples)

        def over_ranks(net: nn.Module, *batch: Any) -> Tensor:
            return self.ranks.average([loss_fn(net, *batch)], num_examples(batch)).losses[0]

        with self._kernels:
            best = least_loss(self._networks.of_masks(masks), batches, over_ranks)
        return self.graph.costs.at_least_one(masks[best])

    def _finished(
        self,
        mask: Tensor,
        batches: Sequence[tuple[Any, ...]] | None,
        loss_fn: LossFunction | None,
        plain: bool,
    ) -> nn.Module:
        with self._kernels:
            small = finished(self.model, self.graph.select(mask), batches, loss_fn, plain, self._place)
        if batches is not None:
            self._average_statistics(small)
        return small

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
            "masks": self._networks.masks.to("cpu", copy=True),
            "room": self._networks.room,
            "pending": self._search.pending,
            "policy": self.learner.state_dict(),
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; also sets PyTorch's global generator, for dropout.

        Raises:
            CheckpointError: the dict is not ours, or belongs to another network; nothing is changed then.
        """
        own = {  # as in `state_dict`, but nothing is copied: the dense training may be as large as memory allows
            "coupling": self.graph.coupling,
            "structure": self.graph.digest,
            "masks": self._networks.masks,
            "room": self._networks.room,
            "model": self.model.state_dict(),
            "optimizer": {"param_groups": self.optimizer.param_groups},
        }
        checkpoints.check(state, own, parameter_shapes=self._networks.link.dense_shapes)
        self.learner.load_state_dict(state["policy"])
        self.settled = bool(state["settled"])
        self._watch_on(False)
        self.model.load_state_dict(state["model"])
        keep_probs = None if self.settled else self.learner.keep_probs
        self._networks.restore(state["masks"], state["room"], keep_probs)
        self._search.pending = state["pending"]
        self._watch_on(not self.settled)
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
        self._networks.reload()
        if self._watches:
            logger.warning(
                "weights were loaded while widths are learned; the search goes on with them. To resume a training, "
                "load the state dict of SparseTraining, which has the structure too"
            )

    def _adopt(self) -> None:
        self._networks.adopt()
        (unfuse if self._steps is None else fuse)(self.optimizer)  # settings came with the state dict

    def _dense_optimizer_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._networks.link.dense_state_dict(state_dict)

    def _check_ranks(self, when: str) -> None:
        """See whether all ranks hold the same."""
        if self._place is not None:  # a draw leaves behind what both networks have, and the rest may be on its way home
            self.sync()
        structure = {"keep-probabilities": self.keep_probs, "masks": self._networks.masks}
        self.ranks.check_equal(structure | tensor_names(self.model), when)

    def _average_statistics(self, net: nn.Module) -> None:
        """Those that each rank has measured on its own batches."""
        self.ranks.average([torch.zeros(())], 1, running_statistics(net, training=False))
