"""The structure of a training: how it is learned step by step, and when it changes.

A window is the time between two draws of masks, in steps. At its end the learner draws the next masks, and the networks
change to them: as a whole or not at all, in all processes or in none.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup, process_group
from slimstart.narrow import Change, Networks, Transactions
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.hooks import hooks_in
from slimstart.policies import GradientLearner, Learner
from slimstart.policies.base import removed_layers
from slimstart.steps.drawing import Draw, Drawing
from slimstart.steps.optimizers import StepHooks
from slimstart.steps.unit_gradients import UnitGradients
from slimstart.steps.wrappers import allow_recompilation, check_data_parallel, data_parallel_around, rebuild

logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """The progress of a training.

    Attributes:
        num_steps: number of steps taken.
        held_steps: number of steps since the last draw.
        settled: whether the structure is fixed.
    """

    num_steps: int = 0
    held_steps: int = 0
    settled: bool = False


class Structure:
    """The learner, the networks of its last draw, and the progress of a training.

    Args:
        networks: the model and its references.
        drawing: source of masks, which learns from losses.
        gradients: unit gradients, for a policy that learns from gradients; None for one that learns from losses.

    Attributes:
        process_group: the processes that train together, from `join` on.
        transaction: context of everything that changes together with the networks.
    """

    def __init__(self, networks: Networks, learner: Learner, drawing: Drawing, gradients: UnitGradients | None) -> None:
        self.networks, self.learner, self.drawing, self.gradients = networks, learner, drawing, gradients
        # Once: before Python 3.12 this evaluates all properties of the learner.
        self._observer = learner if isinstance(learner, GradientLearner) else None
        self.progress = Progress()
        self.process_group: ProcessGroup = SINGLE_PROCESS
        self.transaction = Transactions(self._state, self._restore)
        self.has_joined = False
        self.num_unreported = 0  # steps whose losses have not been given to `update`
        self._known_copies: weakref.WeakSet[Any] = weakref.WeakSet()  # copies of the model that were warned of

    def _state(self) -> Any:
        """The small state that changes together with the networks."""
        return self.drawing.state(), self.progress

    def _restore(self, state: Any) -> None:
        self.drawing.restore(state[0])
        self.progress = state[1]

    # --- learning ----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self.progress.settled

    @property
    def learns_from_losses(self) -> bool:
        """Whether the losses of the next step are learned from: those of the first step after a draw."""
        return self.gradients is None and not self.settled and self.progress.held_steps == 0

    @property
    def needs_reference(self) -> bool:
        return self.learns_from_losses and self.learner.num_masks > 1

    def before_step(self, optimizer: Optimizer, hooks: StepHooks) -> None:
        """Observe the gradients of an optimizer that is about to step."""
        if self.settled:
            return
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within `backward`, in a hook on a parameter's gradient, where the "
                "structure cannot change; call `optimizer.step()` after `backward`, at least until `sparse.settled`"
            )
        if self.gradients is None:
            if self.num_unreported > 1:  # an interrupt may leave one
                raise RuntimeError(
                    "the policy learns from losses: call `sparse.update(loss, reference_loss)` after every "
                    "`optimizer.step()`, or let `sparse.step(loss_fn, *batch)` do everything"
                )
            return
        if hooks.is_first:
            self.gradients.take()  # drops those of an interrupted iteration
        self.gradients.add(optimizer, self.networks)
        if hooks.is_last:
            self._observe()

    def _observe(self) -> None:
        found = None if self.gradients is None else self.gradients.take()
        if found is not None and self._observer is not None:
            self._observer.observe_(found)

    def end_iteration(self, may_change: bool) -> None:
        """Count a step of all optimizers. A policy that learns from losses counts it with its losses, in `learn`."""
        if self.gradients is None and not self.settled:
            self.num_unreported += 1
        else:
            self._observe()
            self.count_step(may_change)

    def change_if_due(self) -> None:
        """Make a change that had to wait because some gradients were still unused."""
        if self.gradients is not None and not self.settled and self.progress.held_steps >= self.learner.window:
            self.advance()

    def learn(self, losses: Sequence[Tensor]) -> None:
        """Learn from the losses of a step, and count it."""
        if self.settled:  # the hooks have counted it
            return
        with self.transaction():
            if self.learns_from_losses:
                self.drawing.learn(torch.stack([one.detach().double().cpu() for one in losses]))
            self._count(may_change=True)
        self.num_unreported = 0

    def count_step(self, may_change: bool = True) -> None:
        """Count a step, and change the structure at the end of a window."""
        window_ends = not self.settled and self.progress.held_steps + 1 >= self.learner.window
        with self.transaction() if window_ends else nullcontext():  # its cost is spared in most steps
            self._count(may_change)

    def _count(self, may_change: bool) -> None:
        num_steps, held_steps, settled = self.progress
        taken = Progress(num_steps + 1, held_steps + 1, settled)
        if may_change and not settled and taken.held_steps >= self.learner.window:
            self._advance(taken)
        else:
            self.progress = taken

    def advance(self) -> None:
        """Change to the next draw now."""
        with self.transaction():
            self._advance(self.progress)

    def _advance(self, progress: Progress) -> None:
        draw = self.drawing.advance()
        done = self.learner.is_done
        progress = Progress(progress.num_steps, 0, done)
        if draw is None:  # the device has already moved to it
            self.progress = progress
        else:
            self.change(draw, progress)
        if done:
            self.end_search()
            logger.info("the structure is final after %d steps", self.progress.num_steps)
        if self.process_group.debugging:
            self.process_group.check_equal(
                self._fingerprint | tensor_names(self.networks.model), f"after {self.progress.num_steps} steps"
            )

    def settle(self, mask: Tensor) -> None:
        """Change to the network of a mask (U,), and fix the structure. Within a transaction."""
        self.change(Draw(mask[None], True), Progress(self.progress.num_steps, 0, True))

    def end_search(self) -> None:
        """Draw no further masks."""
        self.drawing.end()
        self.networks.version += 1  # captured steps contain the observation of gradients: capture them again

    # --- changes -----------------------------------------------------------------------------------------------------

    def change(self, draw: Draw, progress: Progress) -> None:
        """Change to the networks of a draw."""
        networks = self.networks
        keep_probs = None if progress.settled else self.learner.keep_probs
        if self.gradients is not None:  # otherwise they are averaged together with the losses
            self.process_group.average_statistics(networks.model, training=True)
        removed = [networks.dense_graph.layers[i].name for i in removed_layers(self.learner)]
        change = self.process_group.all_or_none(
            lambda: networks.prepare(draw.masks, keep_probs, draw.look, removed=removed)
        )
        self._warn_of_copies()
        self.commit(change, progress)

    def commit(self, change: Change, progress: Progress) -> None:
        """Make a prepared change, and tell the wrappers of the model."""
        wrappers = data_parallel_around(self.networks.model)
        if wrappers and self.process_group.reference is None:
            change.set(self, "has_joined", False)  # a wrapper was made after the first step
        if change.reshapes:
            for ddp in wrappers:
                change.call(rebuild, ddp)
            change.call(allow_recompilation)
        change.set(self, "progress", progress)
        self.transaction.commit(change)

    def _warn_of_copies(self) -> None:
        followed = {hook for network, _ in self.networks.followers for hook in hooks_in(network.module)}
        copies = {twin for hook in hooks_in(self.networks.model) for twin in hook.copies}
        copies -= followed | set(self._known_copies)
        if copies:
            self._known_copies.update(copies)
            logger.warning(
                "the structure of the model changes, and copies of it (an average of weights?) keep theirs: call "
                "`sparse.follow(copy)` once for each that should change with the model"
            )

    # --- processes ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Find the processes that train together, and give all of them the weights of rank 0."""
        networks = self.networks
        wrappers = data_parallel_around(networks.model, search=True)
        for ddp in wrappers:
            check_data_parallel(ddp)
        self.process_group = process_group(wrappers)
        if self.process_group.size > 1:
            held = [*networks.store.tensors.values(), *networks.model.parameters(), *networks.model.buffers()]
            self.process_group.check_reach(held)
            # Before the broadcast, which needs equal shapes.
            self.process_group.check_equal(self._fingerprint, "at the start")
            self.process_group.broadcast_(held)
        self.has_joined = True

    @property
    def _fingerprint(self) -> dict[str, Tensor]:
        """Values on which all processes must agree."""
        return {
            "keep-probabilities": self.learner.keep_probs,
            "masks": self.networks.masks,
            "numbers of steps": torch.tensor(self.progress[:2]),
        }
