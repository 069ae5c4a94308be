"""SparseTraining: the user's model is the narrow network, and the user's loop stays as it is.

    sparse = SparseTraining(model, optimizer, images[:2], budget=Flops(0.10), total_steps=steps)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()            # the structure is learned, and changed, in here
    model = sparse.finish()

`sparse.step(loss_fn, images, labels)` does the same in one call, and as CUDA graphs on a GPU. What is learned is the
business of a `slimstart.policies.Policy`; how tensors move, of `slimstart.narrow`; how a step runs, of
`slimstart.steps`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from slimstart.devices import device_of
from slimstart.distributed.process_group import (
    ProcessGroup,
    gradient_bytes,
    num_examples,
    reporting,
    running_statistics,
)
from slimstart.errors import CheckpointError, ProcessGroupError, TraceError
from slimstart.flop_counter import flops as count_flops
from slimstart.graph import ChannelGraph
from slimstart.io import checkpoints
from slimstart.narrow import Change, Executed, Transactions, is_pretrained, recalibrate, suit_, trace_verified
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.hooks import hooks_in, remove_hooks
from slimstart.narrow.optimizer_state import held_by, unwrapped
from slimstart.narrow.state_dicts import ModelState, PartialLoads
from slimstart.policies import Budget, GradientLearner, Learner, Policy, get_policy
from slimstart.policies.base import check_count
from slimstart.steps import Backward, LossFunction, Steps, check_finite, forward_without_trace, undoing_statistics
from slimstart.steps import host_memory as memory
from slimstart.steps.assembly import assemble
from slimstart.steps.captured import CapturedStep
from slimstart.steps.drawing import Draw
from slimstart.steps.eager import NOTHING, detached, loss_of
from slimstart.steps.iterations import Iterations, is_observed
from slimstart.steps.least_loss import as_loss, first_batches, least_loss
from slimstart.steps.optimizers import fuse, unfuse
from slimstart.steps.stepping import Stepping
from slimstart.steps.unit_gradients import UnitGradients
from slimstart.steps.wrappers import (
    allow_recompilation,
    check_data_parallel,
    check_model,
    data_parallel_around,
    process_group,
    rebuild,
    uncompiled,
    unwrapped_model,
)

logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """How far a training is.

    Attributes:
        num_steps: that have been taken.
        held_steps: of them, since the last draw.
        settled: whether the structure is fixed.
    """

    num_steps: int = 0
    held_steps: int = 0
    settled: bool = False


class SparseTraining(Stepping):
    """Train a model at a budget from the first step.

    From the constructor on, `model` is the narrow network: its parameters are the same objects, with fewer channels.
    Weights that are not in the network are stored here, with their optimizer state, and come back with it. The
    structure changes only at the end of an optimizer's step, and as a whole or not at all.

    Args:
        model: any module whose forward can be traced; also in `DistributedDataParallel` or `torch.compile`.
        optimizer: over the model's parameters; or a list of optimizers, all of which step in an iteration.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        budget: `Channels`, `Params` or `Flops`, as a fraction of the dense model's.
        total_steps: steps of the whole training, which policies plan with.
        policy: what learns the structure: "equal_worth" (widths, from the gradients of ordinary steps), "paper"
            (Algorithm 1), or an object with settings: `EqualWorth(...)`, `Paper(...)`, or one of your own
            (`slimstart.policies.Policy`).
        coupling: "filter" or "stream", see `slimstart.trace`; by default the policy's.
        keep: names of modules or parameters that are not narrowed.
        engine: how `step` runs: "eager", "graphs" (CUDA graphs), or "auto": graphs where the model is on a GPU and the
            optimizer allows it. Both give the same results.
        max_grad_norm: `step` clips the norm of all gradients together at this.
        scaler: `step` scales the loss with it, for float16.
        pretrained: whether the model has been trained. The weights of a new model are scaled to the fan-in of the
            narrow network, as if that had been initialised by itself. By default a model is taken for pretrained if the
            optimizer has state, or a batch norm has counted batches. For policies that learn from gradients.
        full_model_device: "cpu" for a model that is larger than the device it is trained on. Dense weights and their
            optimizer state stay on the CPU, where the model must be; the narrow network is on the device of
            `example_inputs`.

    Attributes:
        model: the user's module, without what wraps it.
        optimizer: what the user gave.
        graph: which channels belong together; `graph.select(mask)` is the structure of a network.
        policy: the settings of what learns the structure.
        learner: its running state.
        num_examples: of the last `step`, over all processes.
        building_seconds: time that `step` has spent on graph capture, changes of structure and warm-up.

    Raises:
        TraceError: the forward fails on `example_inputs`, or nothing in the model can shrink.
        BudgetError: no sub-network is so small.
        TypeError: the model, or the optimizer, is wrapped in something that cannot follow a change of shapes.
        MemoryError: with `full_model_device`, there is not enough memory; found out before any is taken.
    """

    _unchanged = "weights and the structure are"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        example_inputs: Any,
        budget: Budget,
        *,
        total_steps: int | None = None,
        policy: str | Policy = "equal_worth",
        coupling: str | None = None,
        keep: Iterable[str] = (),
        engine: str = "auto",
        max_grad_norm: float | None = None,
        scaler: GradScaler | None = None,
        pretrained: bool | None = None,
        full_model_device: str | torch.device | None = None,
    ) -> None:
        if not isinstance(budget, Budget):
            raise TypeError(f"`budget` is {budget!r}; it must be a budget, such as slimstart.Flops(0.10)")
        check_count("total_steps", total_steps, optional=True)
        self._given, self.model, self._examples = model, unwrapped_model(model), example_inputs
        check_model(self.model)
        for ddp in data_parallel_around(self.model, search=True):
            check_data_parallel(ddp)
        if any(not hook.is_inert for hook in hooks_in(self.model)):
            raise ValueError("`model` is in a SparseTraining already; call its `finish` first, or make a new model")
        self.policy, self._budget, self._total_steps = get_policy(policy), budget, total_steps
        self.optimizer, self._optimizers = optimizer, unwrapped(optimizer)
        if any(is_observed(one) for one in self._optimizers):
            raise ValueError(
                "`optimizer` is in a SparseTraining already; give every model an optimizer of its own, or put the "
                "models into one module"
            )
        if pretrained is False and any(one.state for one in self._optimizers):
            raise ValueError(
                "`pretrained` is False, but the optimizer has state; make a new one, or leave `pretrained` out"
            )
        pretrained = is_pretrained(self.model, self._optimizers) if pretrained is None else pretrained
        device = memory.place(self.model, self._optimizers, example_inputs, budget, full_model_device)
        examples = example_inputs if device is None else memory.on_host(example_inputs)
        with uncompiled():
            self.graph: ChannelGraph = trace_verified(self.model, examples, coupling or self.policy.coupling, keep)
        if self.graph.num_units == 0:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(self.graph.not_prunable.items(), 5))
            raise TraceError(f"nothing in the model can shrink ({reasons or 'it has no layers that are followed'})")
        if not held_by(self._optimizers) & {id(p) for n, p in self.model.named_parameters() if n in self.graph.tensors}:
            raise ValueError(
                "`optimizer` holds none of the model's parameters that can shrink; build it from `model.parameters()`"
            )
        self.learner: Learner = self.policy.start(self.graph.costs, budget, total_steps)
        self._gradients: UnitGradients | None = None
        if self.policy.learns_from == "gradients":
            if not isinstance(self.learner, GradientLearner):
                raise TypeError("`policy` learns from gradients, but its learner has no `freeze`, `to` and `observe_`")
            with uncompiled():
                self._gradients = UnitGradients(self.graph, self.model, self._optimizers, examples)
            self.learner.freeze(self._gradients.unobservable)
            if bool(self._gradients.unobservable.all()):
                logger.warning(
                    "no width can be learned: every channel group is read by something other than a trained Conv or "
                    "Linear layer"
                )
            self.learner.to(device or device_of(self.model))
        self._progress = Progress()
        self.num_examples: float = 0
        self.building_seconds = 0.0
        self._transaction = Transactions(self._light_state, self._restore)
        self._finished = False
        self._joined = False
        self._known_copies: weakref.WeakSet[Any] = weakref.WeakSet()  # of which a warning has been given
        self._num_untold = 0  # steps whose losses have not been given to `update`
        self.process_group: ProcessGroup = process_group([])
        self._backward = Backward(self._optimizers, max_grad_norm, scaler)
        parts = assemble(
            self.model, self._optimizers, self.graph, self.policy, self.learner, self._backward, engine, device
        )
        self._networks, self._drawing = parts.networks, parts.drawing
        self._steps, self._eager = parts.steps, parts.eager
        masks = self.learner.draw()
        if not pretrained and self._gradients is not None:  # only now: whatever can be refused has been
            suit_(self.model, self.graph.select(masks[0]))
        self._change(Draw(masks, True), self._progress)
        remove_hooks(self.model)  # those of another training, of which the model is a copy
        self._state = ModelState(self._networks, self._take_structure)
        self._loads = PartialLoads(self._networks, self._optimizers, self._took_settings)
        self._iterations = Iterations(self._optimizers, self._before_step, self._end_iteration, self._catch_up)
        logger.info("%s", self.graph.summary)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, *batch: Any, count: float | None = None) -> Any:
        """One step of training; returns the detached loss, of several processes their mean.

        Args:
            loss_fn: called as `loss_fn(net, *batch)`, returns a scalar, or (scalar, anything), and `step` returns the
                same. In Algorithm 1 two networks see the same batch. In CUDA graphs Python runs only while a step is
                captured: what may change from step to step must be a tensor in the batch.
            count: of examples that the loss is a mean over, where processes may have more or fewer; by default, the
                length of the first tensor of the batch.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite; weights, statistics and the structure are those of the step
                before.
        """
        self._ready()
        self.num_examples = num_examples(batch) if count is None else count
        if self._steps is None:
            return self._step_eagerly(loss_fn, batch)
        self._check()
        began, before = time.perf_counter(), (self._networks.version, self._steps.num_captures)
        if self.needs_reference:
            self._networks.references.take_snapshot()
        captured = self._captured(self._steps, loss_fn, batch)
        if captured is None:
            result = self._step_eagerly(loss_fn, batch)
        else:
            captured.load(batch)
            learn = partial(self._drawing.learn, self._steps.losses)
            self._steps.launch(captured, learn if self._learns_from_losses else None)
            result = captured.result()
            self._end_window()
        if captured is None or before != (self._networks.version, self._steps.num_captures):
            self.building_seconds += time.perf_counter() - began
        return result

    def _captured(self, steps: Steps, loss_fn: LossFunction, batch: Sequence[Any]) -> CapturedStep | None:
        """The captured step for a batch; hooks of the optimizer run in a capture, and must not take it for a step."""
        if self._gradients is not None and not self.settled:
            self._gradients.prepare(self._networks)
        self._iterations.captured = True
        try:
            return steps.find(loss_fn, batch)
        finally:
            self._iterations.captured = False

    def _step_eagerly(self, loss_fn: LossFunction, batch: Sequence[Any]) -> Any:
        if self.needs_reference:
            self._networks.references.take_snapshot()
        with undoing_statistics(self._networks.statistics), reporting():
            with self._kernels:
                loss, more = loss_of(loss_fn(self._network, *batch))
                others = self._networks.references.of_draw(snapshot=False) if self.needs_reference else ()
                reference_losses = [forward_without_trace(loss_fn, net, batch) for net in others]
            found = self._average([loss, *reference_losses], self.num_examples)
            check_finite(self.num_steps, *found.losses, unchanged=self._unchanged)
        with reporting():
            self._backward(loss if found.weight == 1 else found.weight * loss)
        self.num_examples = found.num_examples
        if self._gradients is None:
            self._learn(found.losses)
        loss = found.losses[0].detach()
        return loss if more is NOTHING else (loss, detached(more))

    @property
    def _network(self) -> nn.Module:
        """What a loss function is given: the model, in what the user has put around it."""
        if unwrapped_model(self._given) is self.model and self._given is not self.model:
            return self._given
        if self.process_group.size == 1:
            return self.model
        for ddp in data_parallel_around(self.model):
            if unwrapped_model(ddp) is self.model:
                return ddp
        raise RuntimeError(
            "`step` finds no DistributedDataParallel around the model itself, so gradients would not be averaged; make "
            "one and keep it, or write the loop by hand"
        )

    def _before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, and its gradients are there."""
        self._ready()
        if self._gradients is None:
            if self._num_untold > 1 and not self.settled:  # one may be left by an interrupt
                raise RuntimeError(
                    "the policy learns from losses: call `sparse.update(loss, reference_loss)` after every "
                    "`optimizer.step()`, or let `sparse.step(loss_fn, *batch)` do everything"
                )
        elif not self.settled:
            if self._iterations.begins:
                self._gradients.take()  # what an interrupted iteration has left
            self._gradients.add(optimizer, self._networks)
            if self._iterations.others_have_stepped:
                self._observe()

    def _observe(self) -> None:
        found = None if self._gradients is None else self._gradients.take()
        if found is not None and isinstance(self.learner, GradientLearner):
            self.learner.observe_(found)

    def _end_iteration(self, may_change: bool) -> None:
        """All optimizers have stepped. A policy that learns from losses is told of them in `update`."""
        if self._gradients is None and not self.settled:
            self._num_untold += 1
        else:
            self._observe()
            self._end_window(may_change)

    def _catch_up(self) -> None:
        """A change that was due while gradients were waiting for another optimizer is made now."""
        if self._gradients is not None and not self.settled and self._progress.held_steps >= self.learner.window:
            with self._transaction():
                self._advance(self._progress)

    def update(
        self,
        loss: Tensor | float,
        reference_loss: Tensor | float | Sequence[Tensor | float] | None = None,
        count: float = 1,
    ) -> None:
        """For loops by hand under a policy that learns from losses: learn from those of a step, and draw when due.

        Args:
            loss: of `model`, unscaled.
            reference_loss: of `reference` on the same batch (a list, if there are several); needed if
                `needs_reference`, ignored otherwise.
            count: of examples that the losses are means over, where processes may have more or fewer. Their gradients
                are then the caller's to weigh.
        """
        self._ready()
        if self._gradients is not None:
            raise RuntimeError("this policy learns from gradients, inside `optimizer.step()`; leave `update` out")
        losses = [loss]
        if self.needs_reference:
            several = isinstance(reference_loss, Sequence)
            losses += list(reference_loss) if several else [reference_loss]  # type: ignore[arg-type,list-item]
            needed = self.learner.num_masks - 1
            if len(losses) != 1 + needed or any(one is None for one in losses):
                raise ValueError(
                    f"`needs_reference` is true, so `update` needs the losses of {needed} reference network(s) too, in "
                    "the order of `references()`"
                )
        found = self._average([torch.as_tensor(one).detach() for one in losses], count)
        if self._learns_from_losses:
            check_finite(self.num_steps, *found.losses, unchanged="keep-probabilities are")
        self.num_examples = found.num_examples
        self._learn(found.losses)

    def _learn(self, losses: Sequence[Tensor]) -> None:
        if self.settled:  # then the step has been counted when the optimizers made it
            return
        with self._transaction():
            if self._learns_from_losses:
                self._drawing.learn(torch.stack([one.detach().double().cpu() for one in losses]))
            self._count(may_change=True)
        self._num_untold = 0

    def _end_window(self, may_change: bool = True) -> None:
        window_ends = not self.settled and self._progress.held_steps + 1 >= self.learner.window
        with self._transaction() if window_ends else nullcontext():
            self._count(may_change)

    def _count(self, may_change: bool) -> None:
        """A step has been taken; at the end of a window, go on to the next draw."""
        num_steps, held_steps, settled = self._progress
        taken = Progress(num_steps + 1, held_steps + 1, settled)
        if may_change and not settled and taken.held_steps >= self.learner.window:
            self._advance(taken)
        else:
            self._progress = taken

    def resample(self) -> None:
        """Go on to the next draw now."""
        self._ready()
        if not self.settled:
            with self._transaction():
                self._advance(self._progress)

    def _advance(self, progress: Progress) -> None:
        draw = self._drawing.advance()
        done = self.learner.is_done
        progress = Progress(progress.num_steps, 0, done)
        if draw is None:  # the device has done it by itself
            self._progress = progress
        else:
            self._change(draw, progress)
        if done:
            self._end_search()
            logger.info("the structure is final after %d steps", self.num_steps)
        if self.process_group.debugging:
            self._check_processes(f"after {self.num_steps} steps")

    def _end_search(self) -> None:
        self._drawing.end()
        self._networks.version += 1  # captured steps observe no longer: they are captured again

    # --- changes of structure: as a whole or not at all --------------------------------------------------------------

    def _change(self, draw: Draw, progress: Progress) -> None:
        """Become the networks of a draw."""
        keep_probs = None if progress.settled else self.learner.keep_probs
        if self._gradients is not None:  # otherwise this has been done with the losses
            self._average_statistics(self.model, training=True)
        change = self._agreed(lambda: self._networks.prepare(draw.masks, keep_probs, draw.look))
        if not self._networks.version:
            ports = Change()
            self._networks.open_ports(ports)
            ports.apply()
        self._warn_of_copies()
        self._commit(change, progress)

    def _agreed(self, prepare: Callable[[], Change]) -> Change:
        """A change that all processes have prepared, or none makes it."""
        problem: BaseException | None = None
        change = Change()
        try:
            change = prepare()
        except Exception as error:
            problem = error
        (failed,) = self.process_group.any(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise ProcessGroupError("another process could not change its structure, so none did; look for its error")
        return change

    def _commit(self, change: Change, progress: Progress) -> None:
        wrappers = data_parallel_around(self.model)
        if wrappers and self.process_group.reference is None:
            change.set(self, "_joined", False)  # one was made after the first step
        if change.reshapes:
            for ddp in wrappers:
                change.call(rebuild, ddp)
            change.call(allow_recompilation)
        change.set(self, "_progress", progress)
        self._transaction.commit(change)

    def _light_state(self) -> Any:
        """What changes together with the networks, and is small."""
        return self._drawing.state(), self._progress

    def _restore(self, state: Any) -> None:
        self._drawing.restore(state[0])
        self._progress = state[1]

    def _check_unfinished(self) -> None:
        self._transaction.recover()
        if self._finished:
            raise RuntimeError(
                "this training is finished; `model` is a plain module, which can be trained on, copied and saved by "
                "itself"
            )

    def _ready(self) -> None:
        """Before anything is trained: a whole state, of one structure, on all processes."""
        self._check_unfinished()
        self._loads.check()
        if not self._joined:
            self._join()

    # --- other networks, and what is around the model ----------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """Whether this step's `update` needs the loss of `reference`: on the first step after a draw."""
        return self._learns_from_losses and self.learner.num_masks > 1

    @property
    def _learns_from_losses(self) -> bool:
        return self._gradients is None and not self.settled and self._progress.held_steps == 0

    @property
    def reference(self) -> nn.Module:
        """The second network of the pair: run it forward on the same batch, before the optimizer's step."""
        found = next(self.references(), None)
        if found is None:
            raise RuntimeError("there is no reference network now; ask `needs_reference` before")
        return found

    def references(self) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other; none where no reference is needed."""
        self._transaction.recover()
        if self.needs_reference:
            yield from self._networks.references.of_draw()

    def follow(self, copy: nn.Module) -> None:
        """Let a copy of the model change its structure with it: an `AveragedModel`, timm's `ModelEmaV3`, a deep copy.

        Args:
            copy: made from the model as it is now, or a module that holds such a copy as `module`.
        """
        self._check_unfinished()
        if self._networks.selection.padded:
            raise ValueError("a copy cannot follow a padded network; use `engine='eager'`, or a policy without padding")
        self._networks.follow(copy)

    def _warn_of_copies(self) -> None:
        followed = {hook for network, _ in self._networks.followers for hook in hooks_in(network.module)}
        copies = {twin for hook in hooks_in(self.model) for twin in hook.copies} - followed - set(self._known_copies)
        if copies:
            self._known_copies.update(copies)
            logger.warning(
                "the structure of the model changes, and copies of it (an average of weights?) keep theirs: call "
                "`sparse.follow(copy)` once for each that should change with the model"
            )

    def _join(self) -> None:
        """Find the processes that train together, and let all begin with the weights of the first."""
        wrappers = data_parallel_around(self.model, search=True)
        for ddp in wrappers:
            check_data_parallel(ddp)
        self.process_group = process_group(wrappers)
        if self.process_group.size > 1:
            if self._steps is not None:
                self._steps, self._eager = None, "several processes train together"
            held = [*self._networks.store.tensors.values(), *self.model.parameters(), *self.model.buffers()]
            self.process_group.check_reach(held)
            self.process_group.check_equal(self._structure, "at the start")  # which gives tensors their shapes
            self.process_group.broadcast_(held)
        self._joined = True

    def _average(self, losses: Sequence[Tensor], count: float) -> Any:
        """Losses, and running statistics, over the examples of all processes."""
        statistics = running_statistics(self.model) if self.process_group.size > 1 else ()
        return self.process_group.average(losses, count, statistics)

    def _check_processes(self, when: str) -> None:
        """See whether all processes hold the same."""
        self.process_group.check_equal(self._structure | tensor_names(self.model), when)

    @property
    def _structure(self) -> dict[str, Tensor]:
        return {
            "keep-probabilities": self.keep_probs,
            "masks": self._networks.masks,
            "numbers of steps": torch.tensor(self._progress[:2]),
        }

    def _average_statistics(self, net: nn.Module, training: bool = False) -> None:
        """Those that each process has measured on its own batches; `training`: only those that a forward changes."""
        if self.process_group.size > 1:
            self.process_group.average([torch.zeros(())], 1, running_statistics(net, training))

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps that have been taken."""
        return self._progress.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._progress = self._progress._replace(num_steps=value)

    @property
    def settled(self) -> bool:
        """Whether the structure is fixed."""
        return self._progress.settled

    @property
    def keep_probs(self) -> Tensor:
        """s: one keep-probability per unit."""
        return self.learner.keep_probs

    @property
    def mask(self) -> Tensor:
        """m: which units the model has."""
        return self.graph.costs.at_least_one(self._networks.masks[0].cpu())

    @property
    def executed(self) -> Executed:
        """What the next step runs, padding included."""
        found = self._networks.executed
        return found if self.needs_reference else replace(found, reference_flops=())

    @property
    def executed_flops(self) -> int:
        """FLOPs of one example through the model as it is, padding included."""
        return self._networks.executed.flops

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of a step, which is what processes exchange: those of the narrow network."""
        return gradient_bytes(self.model.parameters())

    @property
    def dense_gradient_bytes(self) -> int:
        """The same for the dense model."""
        dense = self._networks.store.tensors
        sizes = ((p, dense.get(name, p).numel()) for name, p in self.model.named_parameters())
        return sum(size * p.element_size() for p, size in sizes if p.requires_grad)

    @property
    def stored_bytes(self) -> int:
        """Size of the dense weights, statistics and optimizer state that are stored here."""
        return self._networks.store.num_bytes

    @property
    def expected_cost(self) -> float:
        """What the budget limits, in expectation over masks, as a fraction of the dense model's."""
        return self.learner.expected_cost

    # --- the end of the search ---------------------------------------------------------------------------------------

    def settle(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFunction | None = None,
        num_samples: int = 10,
        max_batches: int = 20,
    ) -> None:
        """End the search: fix the structure, and train on with the weights that there are.

        The paper's policy searches until it is told to end; "equal_worth" ends by itself.

        Args:
            batches: training data, tuples of what `loss_fn` takes after the network, to choose a mask by its loss and
                to measure statistics. Without them the likeliest mask is taken.
            loss_fn: as for `step`.
            num_samples: masks to draw; all are within the budget, and the one of least loss is taken.
            max_batches: how many of the batches to look at.
        """
        self._ready()
        if self.settled:
            return
        seen = None if batches is None else first_batches(batches, max_batches)
        with self._transaction():
            mask = self._final_mask(seen, loss_fn, num_samples)
            self._change(Draw(mask[None], True), Progress(self.num_steps, 0, True))
        self._end_search()
        self._measure(self.model, seen, loss_fn)

    def snapshot(
        self, batches: Iterable[Any] | None = None, loss_fn: LossFunction | None = None, max_batches: int = 20
    ) -> nn.Module:
        """The network that `finish` would return now, as a copy; training goes on untouched.

        Args:
            batches: training data, to measure normalisation statistics; without them those of training are used.
            loss_fn: as for `step`.
            max_batches: how many of the batches to look at.
        """
        self._check_unfinished()
        self._check(wait=True)
        seen = None if batches is None else first_batches(batches, max_batches)
        small = self._networks.copy_of(self.mask if self._is_final else self.learner.best_guess())
        self._measure(small, seen, loss_fn)
        return small

    def dense_copy(self) -> nn.Module:
        """A copy of the model with all its channels, those that are not in the network included."""
        self._check_unfinished()
        return self._networks.copy_of(torch.ones(self.graph.num_units, dtype=torch.bool))

    def finish(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFunction | None = None,
        num_samples: int = 10,
        max_batches: int = 20,
        plain: bool = False,
    ) -> nn.Module:
        """The model, as a plain module: the same object, within the budget, without hooks of ours.

        Args:
            batches: training data, as for `settle`: to measure statistics of normalisation, and, if the policy has not
                settled, to choose a mask by its loss.
            loss_fn: as for `step`.
            num_samples: as for `settle`.
            max_batches: as for `settle`.
            plain: remove the ports of layers on residual streams too, at the price of rows of zeros. They cost
                multiply-adds of their own: the budget holds for the network without them.
        """
        self._transaction.recover()
        self._check(wait=True)
        if self._finished:
            return self._given
        if self._gradients is not None and not self._is_final:
            logger.warning(
                "the network is finished after %d steps, while its structure is still learned", self.num_steps
            )
        seen = None if batches is None else first_batches(batches, max_batches)
        if not self._is_final and self._gradients is None:
            with self._transaction():
                mask = self._final_mask(seen, loss_fn, num_samples)
                self._change(Draw(mask[None], True), Progress(self.num_steps, 0, True))
        flops = self.graph.flops_within(self._networks.exact_selection.happens[:-1])
        self._average_statistics(self.model)
        change = self._agreed(partial(self._networks.finish, plain))
        change.reshapes = True
        change.call(self._iterations.remove)
        change.call(self._drawing.end)
        if self._steps is not None:
            change.call(self._steps.release)
        change.call(self._loads.remove)
        for network in (self.model, *(network.module for network, _ in self._networks.followers)):
            change.call(remove_hooks, network)
        change.set(self, "_finished", True)
        self._commit(change, self._progress._replace(settled=True))
        self._measure(self.model, seen, loss_fn)
        if plain and self.graph.coupling == "filter":
            logger.info(
                "the plain network has %d FLOPs; with ports on residual streams it would have %d",
                count_flops(self.model, self._examples),
                flops,
            )
        return self._given

    @property
    def _is_final(self) -> bool:
        """Whether the mask is the one to end with: fixed, or loaded with a model's state dict and no other."""
        return self.settled or self._loads.model_alone

    def _final_mask(self, batches: Sequence[Any] | None, loss_fn: LossFunction | None, num_samples: int) -> Tensor:
        if batches is None:
            return self.graph.costs.at_least_one(self.learner.best_guess())
        masks = self.learner.candidates(num_samples)
        measured = as_loss(loss_fn, needed=len(masks) > 1)

        def over_processes(net: nn.Module, *batch: Any) -> Tensor:
            loss, _ = loss_of(measured(net, *batch))
            return self.process_group.average([loss], num_examples(batch)).losses[0]

        with self._kernels:
            best = (
                least_loss(self._networks.references.of_masks(masks), batches, over_processes) if len(masks) > 1 else 0
            )
        return self.graph.costs.at_least_one(masks[best])

    def _measure(self, net: nn.Module, batches: Sequence[Any] | None, loss_fn: LossFunction | None) -> None:
        """Measure normalisation statistics on batches, over all processes."""
        if batches is not None:
            with self._kernels:
                recalibrate(net, batches, as_loss(loss_fn))
            self._average_statistics(net)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything: dense weights and optimizer state, what is learned, masks, generators. One dict resumes.

        Tensors, numbers, strings and containers only, so that `torch.load(weights_only=True)` reads it back.

        Raises:
            RuntimeError: the model has loaded a state dict of another structure, and the training has not.
        """
        self._check_unfinished()
        self._loads.check()  # otherwise whoever resumes would train what is refused here
        self._check(wait=True)
        capacity = self._networks.capacity
        return {
            "format": checkpoints.FORMAT,
            "coupling": self.graph.coupling,
            "structure": self.graph.digest,
            "num_steps": self.num_steps,
            "held_steps": self._progress.held_steps,
            "settled": self.settled,
            "masks": self._networks.masks.to("cpu", copy=True),
            "capacity": None if capacity is None else {"units": capacity.units, "streams": capacity.streams},
            "pending": self._drawing.pending,
            "policy": self.learner.state_dict(),
            "model": self._state.dense(),
            "optimizers": [checkpoints.dense_state(one, self._networks) for one in self._optimizers],
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; also sets PyTorch's global generator, for dropout.

        Raises:
            CheckpointError: the dict is not ours, or belongs to another network; nothing is changed then.
        """
        self._transaction.recover()
        if self._finished:
            raise CheckpointError("this training is finished; make a new SparseTraining to resume another one")
        try:
            saved = checkpoints.checked(state, self._networks, self._optimizers, self._state)
            trial = self.policy.start(self.graph.costs, self._budget, self._total_steps)
            checkpoints.check_masks(saved, trial.num_masks, self._gradients is None)
            trial.load_state_dict(saved.policy)
            change = self._networks.prepare(saved.masks, None, store=saved.store, capacity=saved.capacity)
            checkpoints.prepare(change, saved, self._networks, self._optimizers)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"the state dict does not fit this training: {error}") from error
        change.call(self.learner.load_state_dict, saved.policy)
        change.call(self._loaded, saved)
        change.call(torch.set_rng_state, saved.random)
        self._commit(change, Progress(saved.num_steps, saved.held_steps, saved.settled))

    def _loaded(self, saved: checkpoints.Saved) -> None:
        self._loads.clear()
        self._num_untold = 0
        self._drawing.end()
        self._drawing.pending = saved.pending
        for optimizer in self._optimizers:
            self._took_settings(optimizer)

    def _took_settings(self, optimizer: Optimizer) -> None:
        """Settings of an optimizer came with a state dict, perhaps from another device."""
        (unfuse if self._steps is None else fuse)(optimizer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file, atomically."""
        checkpoints.write(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote; no code in it is ever executed.

        Raises:
            CheckpointError: the file is missing, truncated, foreign, or of another network.
        """
        self.load_state_dict(checkpoints.read(path))

    def _take_structure(self, mask: Tensor) -> None:
        """`model.load_state_dict` is about to load tensors of another structure."""
        masks = mask[None].repeat(len(self._networks.masks), 1)
        keep_probs = None if self.settled else self.learner.keep_probs
        change = self._networks.prepare(masks, keep_probs)
        self._loads.model_takes(change)
        self._commit(change, self._progress)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SparseTraining cannot be copied or pickled: its hooks are on your model and your optimizer. Load "
            "its `state_dict()` into another one, with a model and an optimizer of its own"
        )
