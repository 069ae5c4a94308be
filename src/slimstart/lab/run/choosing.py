"""The choice of a shallower sibling: each candidate is trained, and judged on images held out of the training set.

Each trial is a run of its own, in a folder below that of the run: it can be stopped and resumed, and its record says
what it reached and what it took. Test images have no part in the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimstart.errors import BudgetError
from slimstart.lab.models import siblings
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.records import Candidate, Choosing, Record
from slimstart.lab.run.callbacks import Status, Watcher
from slimstart.lab.run.run_folder import Run

HELD_OUT = 10  # one of this many training images is held out

Trial = Callable[[Recipe, Run, Watcher], Record]


def choose(recipe: Recipe, folder: Path, num_images: int, trial: Trial, watcher: Watcher) -> Choosing:
    """Train all siblings of the network, and return what they reached.

    Args:
        folder: folder of the trials.
        num_images: number of training images.
        trial: trains one candidate, from its last checkpoint if there is one, or reads its record.

    Raises:
        BudgetError: no sibling can meet the budget.
    """
    held, names = max(1, num_images // HELD_OUT), siblings(recipe.model)
    found: list[Candidate] = []
    seconds, refused = 0.0, None
    epochs = recipe.trial_epochs or recipe.epochs
    for number, stages in enumerate(names, 1):
        own: dict[str, Any] = {"stages": stages, "trial_epochs": None, "validation": held}
        own |= {"epochs": epochs, "finetune_epochs": 0, "eval_every": epochs}
        own["warmup_epochs"] = recipe.warmup_epochs * epochs / recipe.epochs
        run = Run(folder / stages.replace(",", "-").replace(":", "-"))
        try:
            record = trial(merged(recipe, own), run, TrialProgress(watcher, f"structure {number}/{len(names)}"))
        except BudgetError as error:  # even one channel for each layer is too much
            refused = error
            continue
        found.append(Candidate(stages, record.accuracy, record.flops, record.params, record.train_flops))
        seconds += record.train_seconds
    if not found:
        assert refused is not None
        raise refused
    best = max(found, key=lambda one: one.accuracy)  # the first of equals, which has the fewest layers
    return Choosing(
        chosen=best.stages,
        held_out_images=held,
        epochs=epochs * len(found),
        train_flops=sum(one.train_flops for one in found),
        train_seconds=seconds,
        candidates=tuple(found),
    )


class TrialProgress(Watcher):
    """Progress of a trial: it shows the number of the trial, and no lines for epochs."""

    def __init__(self, watcher: Watcher, phase: str) -> None:
        self._watcher, self._phase = watcher, phase

    @property
    def stop_requested(self) -> bool:
        return self._watcher.stop_requested

    def status(self, status: Status) -> None:
        self._watcher.status(dataclasses.replace(status, phase=self._phase))

    def downloading(self, done: int, total: int | None) -> None:
        self._watcher.downloading(done, total)
