"""SparseTraining: the user's model is the narrow network, and the user's loop is unchanged.

    sparse = SparseTraining(model, optimizer, images[:2], budget=Flops(0.10), total_steps=steps)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()            # the structure is learned, and changed, in here
    model = sparse.finish()

`sparse.step(loss_fn, images, labels)` does the same in one call, and as CUDA graphs on a GPU. What is learned is up to
a policy (`slimstart.policies`), when the structure changes is in `slimstart.steps.structure`, and how tensors move
between the dense and the narrow model in `slimstart.narrow`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from slimstart.devices import device_of
from slimstart.distributed.process_group import ProcessGroup, gradient_bytes, num_examples
from slimstart.errors import CheckpointError, TraceError
from slimstart.flop_counter import flops as count_flops
from slimstart.graph import ChannelGraph
from slimstart.io import checkpoints, training_state
from slimstart.narrow import Change, Executed, recalibrate, sign_of_training, suit_, trace_verified, without_verified
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.optimizer_state import check_state, held_by, unwrapped
from slimstart.narrow.state_dicts import ModelState, PartialLoads
from slimstart.policies import Budget, Learner, Policy, get_policy, joined
from slimstart.policies.base import check_count, removed_layers
from slimstart.steps import host_memory as memory
from slimstart.steps.captured import CapturedStep
from slimstart.steps.drawing import Draw
from slimstart.steps.eager import Backward, LossFunction, Stepping, check_finite
from slimstart.steps.engine import assemble
from slimstart.steps.final_mask import as_loss, choose_mask, first_batches
from slimstart.steps.graphs import Steps
from slimstart.steps.optimizers import StepHooks, check_optimizers, fuse, unfuse
from slimstart.steps.structure import Progress
from slimstart.steps.unit_gradients import UnitGradients
from slimstart.steps.wrappers import check_model, network_of, uncompiled, unwrapped_model

logger = logging.getLogger(__name__)


class SparseTraining(Stepping):
    """Train a model at a budget from the first step.

    From the constructor on, `model` is the narrow network: its parameters are the same objects, with fewer channels.
    Weights that are not in the network are stored here, with their optimizer state, and come back with it. The
    structure changes only at the end of an optimizer's step, and as a whole or not at all.

    Args:
        model: module whose forward can be traced; it may be in `DistributedDataParallel` or `torch.compile`.
        optimizer: optimizer of the model's parameters, or a list of optimizers that all step in an iteration.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments for the model.
        budget: `Flops`, `Params`, `Channels`, `Latency` or `Memory`, a fraction of the dense model's; or several.
        total_steps: number of steps of the whole training, which policies plan with.
        policy: method that learns the structure: "equal_worth" (widths, from the gradients of ordinary steps), "paper"
            (Algorithm 1), or an object with settings: `EqualWorth(...)`, `Paper(...)`, or one of your own
            (`slimstart.policies.Policy`).
        coupling: "filter" or "stream", see `slimstart.trace`; by default the policy's.
        keep: names of modules or parameters that are not narrowed.
        engine: engine of `step`: "eager", "graphs" (CUDA graphs), or "auto": graphs where the model is on a GPU and the
            optimizer allows it. Both give the same results.
        max_grad_norm: maximum norm of all gradients together, to which `step` clips them.
        scaler: gradient scaler that `step` uses, for float16.
        pretrained: whether the model has been trained. By default it counts as pretrained if the optimizer has state,
            a batch norm has running statistics, or the weights of another norm differ. A pretrained model keeps all its
            layers. In a new one, norms and means over channels shrink with them (`norms="shrink"` of
            `slimstart.trace`); and for policies that learn from gradients, weights are scaled to the fan-in of the
            narrow network, as if that had been initialised directly.
        full_model_device: "cpu" for a model that is larger than the device it is trained on. Dense weights and their
            optimizer state stay on the CPU, where the model must be; the narrow network is on the device of
            `example_inputs`.

    Attributes:
        model: the user's module, without its wrappers.
        optimizer: the user's optimizer or optimizers.
        graph: groups of channels that belong together; `graph.select(mask)` is the structure of a network.
        policy: settings of the policy.
        learner: running state of the policy.
        num_examples: number of examples in the last `step`, over all processes.
        building_seconds: time that `step` has spent on graph capture, changes of structure and warm-up.

    Raises:
        TraceError: the forward fails on `example_inputs`, or nothing in the model can shrink.
        BudgetError: no sub-network is within the budget.
        TypeError: the model, or the optimizer, has a wrapper that cannot follow a change of shapes.
        MemoryError: with `full_model_device`, there is not enough memory; raised before any is allocated.
    """

    _unchanged = "weights and the structure are"

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        example_inputs: Any,
        budget: Budget | Sequence[Budget],
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
        budget = joined(budget)
        check_count("total_steps", total_steps, optional=True)
        # Of tensors that were made in inference mode, no gradients can be computed.
        example_inputs = tree_map_only(Tensor, lambda one: one.clone() if one.is_inference() else one, example_inputs)
        self._given, self.model, self._examples = model, unwrapped_model(model), example_inputs
        check_model(self.model)
        self.policy: Policy = get_policy(policy)
        self._budget, self._total_steps = budget, total_steps
        self.optimizer, self._optimizers = optimizer, unwrapped(optimizer)
        check_optimizers(self._optimizers, pretrained)
        if pretrained is None:
            reason = sign_of_training(self.model, self._optimizers)
            pretrained = bool(reason)
            if pretrained:
                logger.info("%s, so the model counts as pretrained and keeps all its layers (`pretrained`)", reason)
        device = memory.place(self.model, self._optimizers, example_inputs, budget, full_model_device)
        examples = example_inputs if device is None else tree_map_only(Tensor, lambda one: one.cpu(), example_inputs)
        with uncompiled():
            norms = "keep" if pretrained else "shrink"
            graph = trace_verified(self.model, examples, coupling or self.policy.coupling, keep, norms)
            if budget.has_table:
                graph = without_verified(self.model, graph, graph.layers, examples)
        self._check_prunable(graph)
        while True:
            # A trained network would be another one without a layer.
            self._costs = replace(graph.costs, layers=()) if pretrained else graph.costs
            self.learner: Learner = self.policy.start(self._costs, budget, total_steps)
            first = graph.without(graph.layers[i].name for i in removed_layers(self.learner))
            with uncompiled():
                verified = without_verified(self.model, graph, first.removed, examples)
            if len(verified.layers) == len(graph.layers):
                break
            graph = verified
        gradients = None
        if self.policy.learns_from == "gradients":
            place = device or device_of(self.model)
            gradients = UnitGradients.for_learner(self.learner, graph, self.model, self._optimizers, examples, place)
        self.num_examples = 0
        self.building_seconds = 0.0
        self._finished = False
        self._backward = Backward(self._optimizers, max_grad_norm, scaler)
        self._structure, self._steps, self._eager = assemble(
            self.model, self._optimizers, graph, self.learner, gradients, self._backward, engine, device
        )
        self._networks = self._structure.networks
        masks = self.learner.draw()
        if not pretrained and gradients is not None:  # only now: nothing can be refused any more
            suit_(self.model, first.select(masks[0]))
        self._structure.change(Draw(masks, True), Progress())
        remove_hooks(self.model)  # those of another training, of whose model this is a copy
        ModelState(self._networks, self._take_structure)  # hooks on the model keep it
        self._loads = PartialLoads(self._networks, self._optimizers, self._took_settings)
        self._hooks = StepHooks(
            self._optimizers,
            self._before_step,
            self._structure.end_iteration,
            self._structure.change_if_due,
            self._networks.network.parameters.values(),
        )
        logger.info("%s", self.graph.summary)

    def _check_prunable(self, graph: ChannelGraph) -> None:
        """Refuse a model of which nothing can shrink, and optimizers that do not hold it or cannot follow it."""
        if graph.num_units == 0:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(graph.not_prunable.items(), 5))
            raise TraceError(f"nothing in the model can shrink ({reasons or 'it has no layers that can be traced'})")
        prunable = {id(p): name for name, p in self.model.named_parameters() if name in graph.tensors}
        if not held_by(self._optimizers) & prunable.keys():
            raise ValueError(
                "`optimizer` holds none of the model's parameters that can shrink; build it from `model.parameters()`"
            )
        check_state(self._optimizers, prunable)

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, *batch: Any, count: float | None = None) -> Any:
        """One step of training; returns the detached loss, averaged over processes.

        Args:
            loss_fn: function, called as `loss_fn(net, *batch)`, that returns a scalar or (scalar, anything); `step`
                returns the same. In Algorithm 1 it is called for two networks on the same batch. In CUDA graphs it runs
                only while a step is captured: what may change from step to step must be a tensor in the batch.
            count: number of examples that the loss is a mean over, where processes may have different numbers; by
                default, the length of the first tensor or list in the batch, which may be in a dict or a dataclass.

        Raises:
            NonFiniteLossError: a loss is NaN or infinite, or, in eager steps with `max_grad_norm`, the norm of the
                gradients; weights, statistics and the structure are those before the step.
        """
        self._ready()
        self._check()
        self.num_examples = num_examples(batch) if count is None else count
        if self._steps is None:
            return self._step_eagerly(loss_fn, batch)
        began, before = time.perf_counter(), (self._networks.version, self._steps.num_captures)
        captured = self._find_captured(self._steps, loss_fn, batch)
        if captured is None:
            result = self._step_eagerly(loss_fn, batch)
        else:
            learn = partial(self._structure.drawing.learn, self._steps.losses)
            result = self._steps.run(captured, batch, learn if self._structure.learns_from_losses else None)
            self._structure.count_step()
        if captured is None or before != (self._networks.version, self._steps.num_captures):
            self.building_seconds += time.perf_counter() - began
        return result

    def _step_eagerly(self, loss_fn: LossFunction, batch: Sequence[Any]) -> Any:
        if self.needs_reference:
            self._networks.references.take_snapshot()
        # In there, hooks on the optimizers learn from the gradients, and change the structure.
        result, losses = self._run_eagerly(
            loss_fn,
            network_of(self._given, self.model, self.process_group),
            batch,
            self.process_group,
            self._networks.references.of_draw(snapshot=False) if self.needs_reference else (),
            self._networks.statistics,
        )
        if self._structure.gradients is None:
            self._structure.learn(losses)
        return result

    def _find_captured(self, steps: Steps, loss_fn: LossFunction, batch: Sequence[Any]) -> CapturedStep | None:
        if self.needs_reference:
            self._networks.references.take_snapshot()
        if self._structure.gradients is not None and not self.settled:
            self._structure.gradients.prepare(self._networks)
        self._hooks.capturing = True
        try:
            return steps.find(loss_fn, batch)
        finally:
            self._hooks.capturing = False

    def update(
        self,
        loss: Tensor | float,
        reference_loss: Tensor | float | Sequence[Tensor | float] | None = None,
        count: float = 1,
    ) -> None:
        """Learn from the losses of a step in a loop by hand, under a policy that learns from losses.

        Args:
            loss: loss of `model`, unscaled.
            reference_loss: loss of `reference` on the same batch (a list, if there are several); needed if
                `needs_reference`, ignored otherwise.
            count: number of examples that the losses are means over, where processes may have different numbers. The
                weights of their gradients are then up to the caller.
        """
        self._ready()
        if self._structure.gradients is not None:
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
        detached = [torch.as_tensor(one).detach() for one in losses]
        if any(one.numel() != 1 for one in detached):
            raise TypeError(f"`loss` has the shape {tuple(detached[0].shape)}; losses must be scalars")
        detached = [one.reshape(()) for one in detached]
        found = self.process_group.average_step(self.model, detached, count)
        if self._structure.learns_from_losses:
            check_finite(self.num_steps, *found.losses, unchanged="keep-probabilities are")
        self.num_examples = found.num_examples
        self._structure.learn(found.losses)

    def _before_step(self, optimizer: Optimizer) -> None:
        self._ready()
        self._structure.before_step(optimizer, self._hooks)

    def _ready(self) -> None:
        """Before any training: complete or undo what was interrupted, and join the other processes."""
        self._check_unfinished()
        self._loads.check()
        self._join()
        if self._steps is not None and self.process_group.size > 1:
            self._steps, self._eager = None, "several processes train together"

    def _join(self) -> None:
        if not self._structure.has_joined:
            self._structure.join()

    def _check_unfinished(self) -> None:
        self._structure.transaction.recover()
        if self._finished:
            raise RuntimeError(
                "this training is finished; `model` is a plain module, which can be trained, copied and saved directly"
            )

    def resample(self) -> None:
        """Change to the next draw now."""
        self._ready()
        if not self.settled:
            self._structure.advance()

    # --- other networks ----------------------------------------------------------------------------------------------

    @property
    def needs_reference(self) -> bool:
        """Whether this step's `update` needs the loss of `reference`: on the first step after a draw."""
        return self._structure.needs_reference

    @property
    def reference(self) -> nn.Module:
        """The second network of the pair: run its forward on the same batch, before the optimizer's step."""
        found = next(self.references(), None)
        if found is None:
            raise RuntimeError("there is no reference network now; check `needs_reference` first")
        return found

    def references(self) -> Iterator[nn.Module]:
        """The other networks of the draw, one after the other; none where no reference is needed."""
        self._structure.transaction.recover()
        if self.needs_reference:
            self._ready()  # in the first step, the other processes get the weights of the first one here
            yield from self._networks.references.of_draw()

    def follow(self, copy: nn.Module) -> None:
        """Let a copy of the model change its structure with it: an `AveragedModel`, timm's `ModelEmaV3`, a deep copy.

        Args:
            copy: copy of the model in its present structure, or a module that has such a copy as `module`.
        """
        self._check_unfinished()
        if self._networks.selection.padded:
            raise ValueError("a copy cannot follow a padded network; use `engine='eager'`, or a policy without padding")
        self._networks.follow(copy)

    def snapshot(
        self, batches: Iterable[Any] | None = None, loss_fn: LossFunction | None = None, max_batches: int = 20
    ) -> nn.Module:
        """A copy of the network that `finish` would return now; the training is not changed.

        Args:
            batches: training data for normalisation statistics; without them those of training are used.
            loss_fn: loss function, as for `step`.
            max_batches: maximum number of batches to use.
        """
        self._check_unfinished()
        self._check(wait=True)
        seen = first_batches(batches, max_batches)
        if seen is not None:
            self._join()  # a loaded training has taken no step yet
        small = self._networks.copy_of(self.mask if self._is_final else self.learner.best_guess())
        self._measure(small, seen, loss_fn)
        return small

    def dense_copy(self) -> nn.Module:
        """A copy of the model with all its channels and layers, including those that are not in the network."""
        self._check_unfinished()
        return self._networks.dense_copy()

    # --- the state of the training -----------------------------------------------------------------------------------

    @property
    def graph(self) -> ChannelGraph:
        """The channel graph of the present network; the layers that it is without are `graph.removed`."""
        return self._networks.graph

    @property
    def dense_graph(self) -> ChannelGraph:
        """The channel graph of the whole model."""
        return self._networks.dense_graph

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return self._structure.progress.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._structure.progress = self._structure.progress._replace(num_steps=value)

    def __repr__(self) -> str:
        state = "finished" if self._finished else "the structure is final" if self.settled else "searching"
        steps = self.num_steps if self._total_steps is None else f"{self.num_steps} of {self._total_steps}"
        layers = f"without {len(self.graph.removed)} of {len(self.dense_graph.layers)} removable layers"
        return f"SparseTraining({type(self.policy).__name__}, {self._budget}): {state}, step {steps}, {layers}"

    @property
    def settled(self) -> bool:
        """Whether the structure is fixed."""
        return self._structure.settled

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together, known from the first step on."""
        return self._structure.process_group

    @property
    def keep_probs(self) -> Tensor:
        """s: one keep-probability per unit."""
        return self.learner.keep_probs

    @property
    def mask(self) -> Tensor:
        """m: the units that are in the model."""
        return self.graph.costs.at_least_one(self._networks.masks[0].cpu())

    @property
    def executed(self) -> Executed:
        """FLOPs and filters of the next step on `example_inputs`, padding included."""
        found = self._networks.executed
        return found if self.needs_reference else replace(found, reference_flops=())

    @property
    def executed_flops(self) -> int:
        """FLOPs of a forward of the present model on `example_inputs`, padding included."""
        return self._networks.executed.flops

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradients of a step, which processes exchange: those of the narrow network."""
        return gradient_bytes(self.model.parameters())

    @property
    def dense_gradient_bytes(self) -> int:
        """Size of the gradients of a step of the dense model."""
        dense = self._networks.store.tensors
        sizes = ((p, dense.get(name, p).numel()) for name, p in self.model.named_parameters())
        return sum(size * p.element_size() for p, size in sizes if p.requires_grad)

    @property
    def stored_bytes(self) -> int:
        """Size of the dense weights, statistics and optimizer state that are stored here."""
        return self._networks.store.num_bytes

    @property
    def expected_cost(self) -> float:
        """The cost that the budget limits, in expectation over masks, as a fraction of the dense model's.

        Of several budgets, that of the one nearest to its limit.
        """
        return self.learner.expected_cost

    # --- the end of the search ---------------------------------------------------------------------------------------

    def settle(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFunction | None = None,
        num_samples: int = 10,
        max_batches: int = 20,
    ) -> None:
        """End the search: fix the structure, and continue training with the present weights.

        The paper's policy searches until this call; "equal_worth" ends by itself.

        Args:
            batches: training data, as tuples of the arguments of `loss_fn` after the network, to choose a mask by its
                loss and to measure statistics. Without them the likeliest mask is taken.
            loss_fn: loss function, as for `step`.
            num_samples: number of masks to draw within the budget; the one of least loss is taken.
            max_batches: maximum number of batches to use.
        """
        self._ready()
        if self.settled:
            return
        seen = first_batches(batches, max_batches)
        self._choose_final(seen, loss_fn, num_samples)
        self._structure.end_search()
        self._measure(self.model, seen, loss_fn)

    def finish(
        self,
        batches: Iterable[Any] | None = None,
        loss_fn: LossFunction | None = None,
        num_samples: int = 10,
        max_batches: int = 20,
        plain: bool = False,
    ) -> nn.Module:
        """The model as a plain module: the same object, within the budget, without our hooks.

        Args:
            batches: training data, as for `settle`: to measure normalisation statistics, and, if the policy has not
                settled, to choose a mask by its loss.
            loss_fn: loss function, as for `step`.
            num_samples: number of masks to draw, as for `settle`.
            max_batches: maximum number of batches to use.
            plain: whether to remove the ports of layers on residual streams too, at the price of rows of zeros. These
                cost multiply-adds of their own: the budget holds for the network without them.
        """
        self._structure.transaction.recover()
        self._check(wait=True)
        if self._finished:
            return self._given
        self._join()  # a loaded training has taken no step yet
        seen = first_batches(batches, max_batches)
        if not self._is_final and self._structure.gradients is None:
            self._choose_final(seen, loss_fn, num_samples)
        elif not self._is_final:
            logger.warning(
                "the network is finished after %d steps, while its structure is still learned", self.num_steps
            )
        flops = self.graph.flops_within(self._networks.exact_selection.happens[:-1])
        self.process_group.average_statistics(self.model)
        change = self.process_group.all_or_none(partial(self._networks.finish, plain))
        change.reshapes = True
        change.call(self._hooks.remove)
        change.call(self._structure.drawing.end)
        if self._steps is not None:
            change.call(self._steps.release)
        change.call(self._loads.remove)
        for network in (self.model, *(network.module for network, _ in self._networks.followers)):
            change.call(remove_hooks, network)
        change.set(self, "_finished", True)
        self._structure.commit(change, self._structure.progress._replace(settled=True))
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
        """Whether the mask is the final one: fixed, or loaded with the model's state dict alone."""
        return self.settled or self._loads.model_alone

    def _choose_final(self, batches: Sequence[Any] | None, loss_fn: LossFunction | None, num_samples: int) -> None:
        with self._structure.transaction():
            with self._kernels:
                mask = choose_mask(self._structure, batches, loss_fn, num_samples)
            self._structure.settle(mask)

    def _measure(self, net: nn.Module, batches: Sequence[Any] | None, loss_fn: LossFunction | None) -> None:
        """Measure normalisation statistics on batches, averaged over processes."""
        if batches is not None:
            with self._kernels:
                recalibrate(net, batches, as_loss(loss_fn))
            self.process_group.average_statistics(net)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole training: dense weights and optimizer state, the learner, masks, random generators.

        Tensors, numbers, strings and containers only, so that `torch.load(weights_only=True)` can read it.

        Raises:
            RuntimeError: the model has loaded a state dict of another structure, and the training has not.
        """
        self._check_unfinished()
        self._loads.check()  # a resumed training could not be trained either
        self._check(wait=True)
        structure = self._structure
        return training_state.state_dict_of(
            self._networks,
            self._optimizers,
            **structure.progress._asdict(),
            pending=structure.drawing.pending,
            policy=self.learner.state_dict(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where `state_dict` was called; also sets PyTorch's global generator, for dropout.

        Raises:
            CheckpointError: the dict is of another kind, or of another network; nothing is changed then.
            ProcessGroupError: another process that trains with this one could not load its dict.
        """
        self._load(lambda: state)

    def _load(self, read: Callable[[], Any]) -> None:
        self._structure.transaction.recover()
        if self._finished:
            raise CheckpointError("this training is finished; make a new SparseTraining to resume another one")

        def prepare() -> tuple[training_state.Saved, Change]:
            state = read()
            try:
                trial = self.policy.start(self._costs, self._budget, self._total_steps)
                from_losses = self._structure.gradients is None
                saved = training_state.checked(state, self._networks, self._optimizers, trial.num_masks, from_losses)
                trial.load_state_dict(saved.policy)
                own = {self._networks.dense_graph.layers[i].name for i in removed_layers(trial)}
                if own != set(saved.removed):
                    raise CheckpointError("the state dict's network and its policy are without different layers")
                return saved, training_state.prepare(saved, self._networks, self._optimizers)
            except CheckpointError:
                raise
            except Exception as error:  # a state dict from elsewhere may hold anything
                raise CheckpointError(f"the state dict does not fit this training: {error}") from error

        saved, change = self.process_group.all_or_none(prepare)
        change.call(self.learner.load_state_dict, saved.policy)
        change.call(self._loaded, saved)
        change.call(torch.set_rng_state, saved.random)
        self._structure.commit(change, Progress(saved.num_steps, saved.held_steps, saved.settled))

    def _loaded(self, saved: training_state.Saved) -> None:
        self._loads.clear()
        self._structure.num_unreported = 0
        self._structure.drawing.end()
        self._structure.drawing.pending = saved.pending
        for optimizer in self._optimizers:
            self._took_settings(optimizer)

    def _took_settings(self, optimizer: Optimizer) -> None:
        """Adapt the settings that an optimizer has loaded, which may come from another device."""
        (unfuse if self._steps is None else fuse)(optimizer)

    def _take_structure(self, mask: Tensor, removed: Sequence[str]) -> None:
        """Change to the structure of the tensors that `model.load_state_dict` is about to load."""
        masks = mask[None].repeat(len(self._networks.masks), 1)
        keep_probs = None if self.settled else self.learner.keep_probs
        change = self._networks.prepare(masks, keep_probs, removed=removed)
        self._loads.model_takes(change)
        self._structure.commit(change, self._structure.progress)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` to a file, atomically."""
        checkpoints.write(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote; no code in it is executed.

        Raises:
            CheckpointError: the file is missing, truncated, of another kind, or of another network.
        """
        self._load(lambda: checkpoints.read(path))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SparseTraining cannot be copied or pickled: its hooks are on your model and your optimizer. Load "
            "its `state_dict()` into another one, with a model and an optimizer of its own"
        )
