"""The two studies, from a run's folder or a recipe to a record.

    study = variance(Run("runs/resnet32"), VarianceSettings(), Place(), Path("variance"))
    study = flip(recipe, FlipSettings(every=10), Place(), Path("flip"))

`study.variance` and `study.flip` measure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slimstart.errors import ConfigError
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.callbacks import Watcher
from slimstart.lab.run.environment import Place
from slimstart.lab.run.make_method import Batch
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from slimstart.policies import Paper, get_policy
from study import records as study_records
from study.flip import FlipSettings, FlipWatcher
from study.losses import search_in, training_batches
from study.records import FlipRow, Study
from study.variance import VarianceSettings, variance_rows


def variance(
    run: Run,
    settings: VarianceSettings,
    place: Place,
    out: Path,
    own_model: str | None = None,
    looked_on: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Study:
    """Measure the variance of gradients at a run's last checkpoint; the run is left as it is.

    Args:
        run: stopped during its search, or finished without a fixed structure.
        place: where to compute.
        out: folder for `record.json`.
        own_model: see `recipe.read`.
        looked_on: wraps the iteration over batches, to show progress.

    Raises:
        ConfigError, CheckpointError, DataError: before anything is measured.
    """
    started, file = surroundings.now(), out / "record.json"
    if file.exists():
        raise ConfigError(f"{out} already holds a record; choose another --out")
    recipe = run.recipe(own_model)
    _check(recipe)
    program = Program(recipe, run, place)
    if not run.checkpoints():
        raise ConfigError(f"{run.folder} holds no checkpoint; train with a smaller --checkpoint-seconds")
    program.resume()
    search_in(program.method)
    out.mkdir(parents=True, exist_ok=True)  # after everything that may be refused
    batches = looked_on(training_batches(program, settings.batches, settings.seed))
    rows = variance_rows(program.method, batches, settings)
    study_records.write(_study(program, settings, started, variance=rows), file)
    return study_records.read(file)


def flip(recipe: Recipe, settings: FlipSettings, place: Place, out: Path, watcher: Watcher | None = None) -> Study:
    """Train by a recipe and measure V and V_max meanwhile; the run is in `out/run`, the record in `out/record.json`.

    The record is written after each measurement. Called again, an interrupted study continues.

    Raises:
        ConfigError: the folder holds another study, the recipe does not search, or nothing could be measured.
        Interrupted: the watcher asked to stop; the state is saved.
    """
    _check(recipe)
    if recipe.search_epochs < settings.every:
        raise ConfigError(
            f"`every` is {settings.every}, and the search of method {recipe.method} has {recipe.search_epochs} epochs; "
            "take a smaller one, or search longer"
        )
    file, run, started = out / "record.json", Run(out / "run"), surroundings.now()
    known: tuple[FlipRow, ...] = ()
    if file.exists():
        before = study_records.read(file)
        if before.settings != dataclasses.asdict(settings):
            raise ConfigError(f"{out} holds another study, with settings {before.settings}; choose another --out")
        known, started = before.flip, before.started

    def keep(rows: tuple[FlipRow, ...]) -> None:
        study_records.write(_study(program, settings, started, flip=rows), file)

    with run.locked():
        if run.exists and run.recipe(recipe.model) != recipe:
            raise ConfigError(
                f"{run.folder} was begun with other settings; give the same ones, or choose another --out"
            )
        if not run.finished:
            watching = FlipWatcher(settings, watcher or Watcher(), keep, known)
            program = watching.program = Program(recipe, run, place, watching)
            search_in(program.method)
            if not run.exists:  # after everything that may be refused
                run.create(recipe)
            program.train()
    if not file.exists():
        raise ConfigError("nothing was measured: all keep-probabilities were 0 or 1 too early; take a smaller --every")
    return study_records.read(file)


def _study(program: Program, settings: VarianceSettings | FlipSettings, started: str, **rows: Any) -> Study:
    return Study(
        command=surroundings.command(),
        **surroundings.facts(program.task.device),
        started=started,
        finished=surroundings.now(),
        config=dataclasses.asdict(program.recipe),
        settings=dataclasses.asdict(settings),
        epoch=program.progress.epoch,
        **rows,
    )


def _check(recipe: Recipe) -> None:
    if not isinstance(get_policy(recipe.policy), Paper):
        raise ConfigError(
            f"`policy` is {recipe.policy!r}, but a study is about masks that are drawn; give --policy paper, or a run "
            "that was trained with it"
        )
    if recipe.full_model_device is not None:
        raise ConfigError(
            f"`full_model_device` is {recipe.full_model_device!r}, but a study runs the dense network, masked, on the "
            "device; leave it out, or give a run that was trained without"
        )
