"""The training program: one recipe, one run's folder, from the first step to the record.

    program = Program(recipe, run, place, watcher)
    record = program.train()        # continues from the last checkpoint, if there is one

Everything that the next step depends on is in the checkpoint or a pure function of the step (batches, learning rate),
so on the CPU, a run that was killed continues bit-exactly from its last checkpoint.

Several processes run the same program, each on its share of every batch, with the same weights. Only the first one
reads and writes the folder, and broadcasts what it reads.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimstart.distributed import data_parallel
from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup, gradient_bytes
from slimstart.errors import CheckpointError, ConfigError, NonFiniteLossError
from slimstart.flop_counter import flops
from slimstart.io import network_files as files
from slimstart.lab import records
from slimstart.lab.models import siblings
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.recipes.schedules import learning_rate
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.callbacks import Interrupted, Status, Watcher
from slimstart.lab.run.choosing import choose
from slimstart.lab.run.environment import Place
from slimstart.lab.run.evaluation import evaluate
from slimstart.lab.run.make_method import make_method
from slimstart.lab.run.method import Method
from slimstart.lab.run.recording import Progress, make_record, structure_of
from slimstart.lab.run.run_folder import Events, Run
from slimstart.lab.run.step_times import measured
from slimstart.lab.run.task import Task
from slimstart.lab.run.train_cost import formula_flops

FORMAT = "slimstart.program/1"
MAX_STRUCTURES = 100  # in a record; a policy that draws a network in every step has far more
_KEYS = {"format", "recipe", "seed", "data", "method", "progress", "random"}


class Program:
    """One run.

    Args:
        recipe: settings of the run.
        run: the folder, made by `Run.create`.
        place: device, folders and engine.
        watcher: progress callbacks.
        ranks: the process group; each of its processes has such a program.

    Raises:
        ConfigError, BudgetError, DataError, TraceError: before anything is trained.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        place: Place | None = None,
        watcher: Watcher | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.recipe, self.run, self.ranks = recipe, run, ranks
        self.place, self.watcher = place or Place(), watcher or Watcher()
        self.task = Task(recipe, self.place, ranks, self.watcher.downloading)
        self.choosing: records.Choosing | None = None
        self.method = self._make_method()
        self.progress = Progress()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.task.device)
        self._began = self._last_saved = self._last_shown = time.monotonic()

    # --- from the first step to the record ---------------------------------------------------------------------------

    def train(self) -> records.Record:
        """Train, from the last checkpoint if there is one, and write the record.

        Raises:
            Interrupted: the watcher asked to stop; the state is saved.
            NonFiniteLossError, CheckpointError: the last good checkpoint is intact.
        """
        self._choose()
        self.resume()
        folder = self.run.tensorboard if self.ranks.rank == 0 else None
        with Events(folder, first_step=self.progress.epoch + 1) as events:
            while self.progress.epoch < self.recipe.total_epochs:
                self._train_epoch()
                epoch = self._end_epoch()
                events.write(epoch)
                self.ranks.first(lambda: self.run.write_metrics(self.progress.history))
                self.watcher.epoch(epoch)
                self._began = time.monotonic()  # evaluation and writing are not training time
                self._save_if_due(stopping=self.watcher.stop_requested)
        return self._finish()

    def _make_method(self) -> Method:
        recipe, task, ranks = self.recipe, self.task, self.ranks
        wrap = data_parallel if ranks.size > 1 else None
        model, sibling = task.begin(), None
        if recipe.method == "shallow":
            # Before the choice, the shallowest: where it cannot meet the budget, none can.
            chosen = self.choosing.chosen if self.choosing else siblings(recipe.model)[0]
            sibling = partial(task.make_model, stages=recipe.stages or chosen)
        engine = self.place.engine
        method = make_method(recipe, model, task.example, task.steps_per_epoch, engine, wrap, sibling)
        if ranks.rank > 0:  # each process drops other activations
            torch.manual_seed(recipe.seed + ranks.rank)
        return method

    def _choose(self) -> None:
        """Choose the structure by trials, where the recipe leaves it open."""
        if self.recipe.method != "shallow" or self.recipe.stages is not None:
            return

        def trial(recipe: Recipe, run: Run, watcher: Watcher) -> records.Record:
            self.ranks.first(run.refuse_links)
            if not self.ranks.first(lambda: run.finished):
                self.ranks.first(lambda: None if run.exists else run.create(recipe))
                Program(recipe, run, self.place, watcher, self.ranks).train()
            return self.ranks.first(lambda: records.read(run.record))

        folder, num_images = self.run.trials, self.task.data.train.num_images
        self.choosing = choose(self.recipe, folder, num_images, trial, self.watcher)
        self.method = self._make_method()

    def _train_epoch(self) -> None:
        progress = self.progress
        self._began = time.monotonic()
        if progress.batch == 0:
            self.method.begin_epoch(progress.epoch, self.task.calibration_batches())
        for images, labels in self.task.train.epoch(progress.epoch, start=progress.batch):
            self._set_learning_rate()
            progress.flops_sum += self.method.flops
            if self.ranks.size > 1:
                groups = self.method.optimizer.param_groups
                progress.gradient_bytes += gradient_bytes(p for group in groups for p in group["params"])
            loss = self.method.step(images, labels)
            self._loss_sum += loss
            self._note_structure()
            progress.batch += 1
            if time.monotonic() - self._last_shown > 0.25:
                self._show(loss)
            self._save_if_due(stopping=self.watcher.stop_requested)
        self._stop_the_clock()

    def _stop_the_clock(self) -> None:
        """Add the time since `_began` to that of the epoch, including all work of the device."""
        self._check_finite()  # which waits for the device
        now = time.monotonic()
        self.progress.seconds += now - self._began
        self._began = now

    def _end_epoch(self) -> records.Epoch:
        """Evaluate, and make a row of the history."""
        progress, recipe, method = self.progress, self.recipe, self.method
        dense, num_steps = self.task.dense, self.task.steps_per_epoch
        phase = self._phase
        formula = method.formula_flops
        if formula is not None:
            progress.formula_flops += num_steps * formula
            progress.formula_steps += num_steps
        mean_loss = self._check_finite() / num_steps
        done = progress.epoch + 1
        loss = accuracy = None
        if done % recipe.eval_every == 0 or done == recipe.total_epochs:
            network = method.snapshot(self.task.calibration_batches())
            loss, accuracy = evaluate(network, self.task.data, recipe.precision, self.ranks)
            progress.accuracy = accuracy
        total = method.ledger.total
        images = num_steps * recipe.batch_size
        epoch = records.Epoch(
            epoch=done,
            phase=phase,
            lr=float(method.optimizer.param_groups[0]["lr"]),
            train_loss=mean_loss,
            test_loss=loss if loss is None or math.isfinite(loss) else None,
            test_accuracy=accuracy,
            flops_ratio=progress.flops_sum / num_steps / dense.flops,
            train_flops=total - progress.train_flops,
            dense_train_flops=num_steps * dense.step_flops,
            formula_ratio=None if formula is None else formula / formula_flops(dense.flops, dense.flops),
            seconds=progress.seconds,
            images_per_second=images / max(progress.seconds, 1e-9),
            **structure_of(method.keep_probs, method.expected_cost),
        )
        progress.history.append(epoch)
        progress.epoch, progress.batch, progress.train_flops = done, 0, total
        progress.flops_sum, progress.seconds = 0, 0.0
        self._loss_sum.zero_()
        return epoch

    def _finish(self) -> records.Record:
        """Write the finished network and the record."""
        self._began = time.monotonic()
        network = self.method.finish(self.task.calibration_batches())
        self._stop_the_clock()
        loss, accuracy = evaluate(network, self.task.data, self.recipe.precision, self.ranks)
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the finished network's loss on the test images is {loss}; lower --lr")
        self._note_memory()

        def write() -> records.Record:
            files.save(network, self.run.network)
            times = None if self.watcher.stop_requested else measured(self.task, flops(network, self.task.example))
            name, finished = self.run.folder.resolve().name, (network, loss, accuracy, times, self.choosing)
            record = make_record(name, self.task, self.method, self.progress, *finished)
            records.write(record, self.run.record)
            return record

        return self.ranks.first(write)

    # --- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _phase(self) -> str:
        if self.progress.epoch >= self.recipe.epochs:
            return "finetune"
        return "search" if self.method.searching else "train"

    @property
    def _num_steps(self) -> int:
        """Number of steps so far."""
        return self.progress.epoch * self.task.steps_per_epoch + self.progress.batch

    def _note_structure(self) -> None:
        """Keep the widths of this step where they are new: at most a hundred times in a training, evenly spread."""
        known, progress, widths = self.progress.structures, self.progress, self.method.widths
        if widths is None or (known and known[-1].widths == widths):
            return
        moment = progress.epoch + progress.batch / self.task.steps_per_epoch
        if not known or moment - known[-1].start > self.recipe.total_epochs / MAX_STRUCTURES:
            removed = tuple(name for name, width in widths.items() if width == 0)
            known.append(records.Structure(moment, dict(widths), removed))

    def _set_learning_rate(self) -> None:
        for group in self.method.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self._num_steps, self.task.steps_per_epoch)

    def _check_finite(self) -> float:
        """The sum of the losses so far; sparse steps are checked one by one, plain ones only here."""
        total = float(self._loss_sum)
        if not math.isfinite(total):
            raise NonFiniteLossError(
                f"the loss is {total} in epoch {self.progress.epoch + 1}; start again with a lower --lr. "
                f"The last good checkpoint is in {self.run.folder}"
            )
        return total

    def _show(self, loss: Tensor) -> None:
        progress = self.progress
        self._last_shown = time.monotonic()
        done, total = self._num_steps, self.recipe.total_epochs * self.task.steps_per_epoch
        value = float(loss)  # waits for the device, so that the time is right
        seconds_per_step = (progress.seconds + time.monotonic() - self._began) / max(progress.batch, 1)
        self.watcher.status(
            Status(
                epoch=progress.epoch + 1,
                phase=self._phase,
                steps_done=done,
                total_steps=total,
                loss=value,
                accuracy=progress.accuracy,
                flops_ratio=self.method.flops / self.task.dense.flops,
                images_per_second=self.recipe.batch_size / max(seconds_per_step, 1e-9),
                seconds_left=seconds_per_step * (total - done),
            )
        )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self, stopping: bool) -> None:
        """Save when it is time, or when the user wants to stop; all processes do so if one has to."""
        due = time.monotonic() - self._last_saved >= self.place.checkpoint_seconds
        stopping, due = self.ranks.any(stopping, due)
        if stopping or due:
            self._stop_the_clock()
            self._save()
            self._began = self._last_saved = time.monotonic()
        if stopping:
            raise Interrupted

    def _save(self) -> None:
        self.progress.loss_sum = self._check_finite()
        self._note_memory()
        random = self.ranks.gather(surroundings.random_state(self.task.device))
        self.ranks.first(lambda: self._write_checkpoint(random))

    def _write_checkpoint(self, random: Sequence[Mapping[str, Tensor]]) -> None:
        method = self.method.state_dict()
        if not _all_finite(method):
            raise NonFiniteLossError(
                f"weights are not finite after batch {self.progress.batch} of epoch {self.progress.epoch + 1}; start "
                f"again with a lower --lr. The last good checkpoint is in {self.run.folder}"
            )
        self.run.save(
            {
                "format": FORMAT,
                "recipe": self.recipe.hash,
                "seed": self.recipe.seed,
                "data": self.task.data.digest,
                "method": method,
                "progress": dataclasses.asdict(self.progress),
                "random": {**random[0], "others": random[1:]} if len(random) > 1 else random[0],
            },
            self._num_steps,
        )

    def _note_memory(self) -> None:
        self.progress.peak_memory = max(self.progress.peak_memory, surroundings.peak_memory(self.task.device))

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one, in all processes.

        Raises:
            CheckpointError, ConfigError: it cannot be read, or is of another run.
        """
        state = self.ranks.first(self.run.latest)
        if state is None:
            return
        if not hasattr(state, "keys") or state.keys() != _KEYS or state["format"] != FORMAT:
            raise CheckpointError(f"the checkpoint in {self.run.folder} is not of this version ({FORMAT})")
        if (state["recipe"], state["seed"]) != (self.recipe.hash, self.recipe.seed):
            raise ConfigError(f"the checkpoint in {self.run.folder} belongs to another recipe or another version")
        if state["data"] != self.task.data.digest:
            raise ConfigError(f"the run in {self.run.folder} began with other data; give the same --data-dir")
        self.method.load_state_dict(state["method"])
        self.progress = Progress.restored(state["progress"])
        self._loss_sum.fill_(self.progress.loss_sum)
        random = [state["random"], *state["random"].get("others", ())]
        if self.ranks.rank < len(random):  # with more processes than before, new ones have states of their own
            surroundings.set_random_state(random[self.ranks.rank], self.task.device)
        self.watcher.resumed(self.progress.epoch + 1, self.progress.batch)


def _all_finite(state: Any) -> bool:
    """Whether every number in a nest of tensors is finite."""
    if isinstance(state, Tensor):
        return not state.is_floating_point() or bool(state.isfinite().all())
    if isinstance(state, Mapping):
        return all(map(_all_finite, state.values()))
    return not isinstance(state, list | tuple) or all(map(_all_finite, state))
