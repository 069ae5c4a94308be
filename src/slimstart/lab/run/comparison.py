"""Comparisons: several methods on one network with the same epochs, budgets and seeds; each run can be resumed.

    for trial in trials(recipe, ["uniform", "l1", "slimstart"], ["flops=0.1"], num_seeds=3, total_epochs=40):
        outcome = carry_out(trial, folder)

All contenders have the same number of epochs, and spend them as `plan` says:

| contender | epochs |
|---|---|
| slimstart, dense, uniform, shallow, random, soft | all in one schedule; shallow tries its networks in others |
| slimstart:paper or another estimator, grow-efficient | 300 of 340 search, the rest fine-tunes, as in the release |
| l1, thinet, provable, slimming; soft:uniform | half train the dense network, half retrain the pruned one |
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimstart.errors import BudgetError, ConfigError, NonFiniteLossError, TraceError
from slimstart.lab import records
from slimstart.lab.methods import OWN_PROTOCOLS, PRUNERS, RELAXATIONS
from slimstart.lab.recipes.recipe import METHODS, Recipe, merged, parse_budget, present_name
from slimstart.lab.records import Record
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.callbacks import Watcher
from slimstart.lab.run.environment import Place
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from slimstart.policies import POLICIES, get_policy

SEARCHING = ("slimstart", "grow-efficient")
FINETUNE_SHARE = 40 / 340
# Errors by which one run may fail without ending the comparison; see `_concerns_one_run`.
FAILURES = (BudgetError, NonFiniteLossError, TraceError, MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Contender:
    """A method, and its variant if it is not that of the recipe: an estimator or a policy of slimstart, a protocol of
    another."""

    method: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.method if self.variant is None else f"{self.method}:{self.variant}"

    @property
    def changes(self) -> dict[str, str]:
        """The changes of a recipe that make it this contender."""
        if self.variant is None:
            return {"method": self.method}
        if self.method != "slimstart":
            return {"method": self.method, "protocol": self.variant}
        if self.variant in POLICIES:
            return {"method": self.method, "policy": self.variant}
        return {"method": self.method, "policy": "paper", "estimator": self.variant}


def contender(text: str) -> Contender:
    """`NAME` or `NAME:VARIANT`.

    Raises:
        ConfigError: there is no such method, or it has no variants. The recipe refuses unknown variants.
    """
    method, colon, variant = (part.strip() for part in text.partition(":"))
    method = present_name(method)
    if method not in METHODS:
        raise ConfigError(f"`methods` has {text!r}; there are {', '.join(METHODS)}")
    with_protocols = tuple(dict.fromkeys((*PRUNERS, *OWN_PROTOCOLS.values())))
    if colon and method != "slimstart" and method not in with_protocols:
        raise ConfigError(
            f"`methods` has {text!r}, but {method} has no variants; slimstart has (its estimators and policies), "
            f"and so have {', '.join(with_protocols)} (their protocols)"
        )
    return Contender(method, variant if colon else None)


def plan(entrant: Contender, recipe: Recipe, total_epochs: int, finetune_epochs: int | None = None) -> dict[str, Any]:
    """The schedule of a contender, as changes of the recipe.

    Args:
        total_epochs: all that it has.
        finetune_epochs: takes the place of the share that would be retraining, for contenders that have one.
    """
    # Soft pruning prunes while it trains; its variant `uniform` cuts once, like the others.
    soft = entrant.method == "soft" and entrant.changes.get("protocol", recipe.protocol) != "uniform"
    pruning_trained = entrant.method in PRUNERS and not soft
    policy = get_policy(entrant.changes.get("policy", recipe.policy))
    settles_early = entrant.method == "slimstart" and policy.learns_from == "gradients"
    if settles_early or (not pruning_trained and entrant.method not in SEARCHING):
        return {"epochs": total_epochs, "finetune_epochs": 0}
    if finetune_epochs is None:
        finetune_epochs = total_epochs // 2 if pruning_trained else round(FINETUNE_SHARE * total_epochs)
    split = {"epochs": total_epochs - finetune_epochs, "finetune_epochs": finetune_epochs}
    return split | ({"finetune_lr": recipe.lr, "finetune_schedule": recipe.schedule} if pruning_trained else {})


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: its name, which is that of its folder, and its recipe."""

    name: str
    recipe: Recipe


def trials(
    recipe: Recipe,
    methods: Sequence[str],
    budgets: Sequence[str],
    *,
    num_seeds: int = 1,
    total_epochs: int | None = None,
    retraining: Mapping[str, Any] | None = None,
) -> list[Trial]:
    """All runs of a comparison, seed by seed, so that those that are done can be compared.

    Args:
        recipe: settings that all runs share.
        methods: methods in the notation of `contender`.
        budgets: budgets of each contender; dense has none and runs once for each seed.
        total_epochs: of each contender; those of the recipe, with fine-tuning, if not given.
        retraining: `finetune_epochs`, `finetune_lr` or `finetune_schedule` to take the place of the plan's,
            `rounds` of contenders that prune, and `trial_epochs` of shallow.

    Raises:
        ConfigError: an unknown name, a setting that cannot be meant, or the same run twice.
    """
    for name, values in (("methods", methods), ("budgets", budgets)):
        if not values:
            raise ConfigError(f"`{name}` is empty; a comparison needs at least one")
    if num_seeds < 1:
        raise ConfigError(f"`seeds` is {num_seeds}; it must be at least 1")
    entrants = [contender(text) for text in methods]
    limits = [_plain(budget) for budget in budgets]
    total = recipe.total_epochs if total_epochs is None else total_epochs
    found: dict[Recipe, Trial] = {}
    for seed in range(num_seeds):
        for i, budget in enumerate(limits):
            for entrant in entrants:
                if entrant.method == "dense" and i:
                    continue
                trial = _trial(recipe, entrant, budget, seed, total, retraining or {})
                if other := found.get(trial.recipe):
                    raise ConfigError(
                        f"{trial.name} and {other.name} are the same run; name each method and budget once"
                    )
                found[trial.recipe] = trial
    return list(found.values())


def _plain(budget: str) -> str:
    """One spelling for one budget."""
    parse_budget(budget)
    return "+".join(f"{kind}={float(number):.12g}" for kind, number in records.budget_parts(budget))


def _trial(
    recipe: Recipe, entrant: Contender, budget: str, seed: int, total_epochs: int, retraining: Mapping[str, Any]
) -> Trial:
    epochs = plan(entrant, recipe, total_epochs, retraining.get("finetune_epochs"))
    own = {name: value for name, value in retraining.items() if name != "finetune_epochs"}
    if entrant.method not in PRUNERS:
        own["rounds"] = 1
    if entrant.method != "shallow":
        own.pop("trial_epochs", None)
    if entrant.method == "grow-efficient" or entrant.variant in RELAXATIONS:  # settings chosen for our method
        own |= {"structure_lr": None, "settle_at": 1.0}
    limit = None if entrant.method == "dense" else budget
    try:
        recipe = merged(recipe, {**entrant.changes, **epochs, **own, "budget": limit, "seed": seed})
    except ConfigError as error:
        raise ConfigError(f"{entrant} in `methods`: {error}") from error
    parts = [entrant.method, entrant.variant, limit and re.sub(r"[=+]", "-", limit), f"seed{seed}"]
    return Trial("-".join(filter(None, parts)), recipe)


def refuse_changes(
    planned: Iterable[Trial], folder: Path, own_model: str | None = None, own_data: str | None = None
) -> None:
    """Raise a ConfigError if a run in the folder began with another recipe than the planned one.

    Args:
        own_model, own_data: as for `recipe.read`.
    """
    for trial in planned:
        run = Run(folder / trial.name)
        if run.exists:
            begun, wanted = dataclasses.asdict(run.recipe(own_model, own_data)), dataclasses.asdict(trial.recipe)
            changed = [
                f"`{name}` was {begun[name]} and is {wanted[name]}" for name in begun if begun[name] != wanted[name]
            ]
            if changed:
                raise ConfigError(f"{run.folder} began with other settings: {', '.join(changed)}; choose another --out")


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: its record, or why there is none."""

    trial: Trial
    record: Record | None = None
    failure: str = ""


def carry_out(trial: Trial, folder: Path, place: Place | None = None, watcher: Watcher | None = None) -> Outcome:
    """Run a trial in its folder, resume it, or read its record if it is finished.

    A failure that concerns this run only (`FAILURES`) is an outcome; others are raised.

    Raises:
        Interrupted: the watcher asked to stop; the state is saved.
        ConfigError: another process is at work on it.
    """
    run, place = Run(folder / trial.name), place or Place()
    with run.locked():
        if run.finished:
            return Outcome(trial, records.read(run.record))
        _forget_the_last(place)
        try:
            program = Program(trial.recipe, run, place, watcher)
            if not run.exists:  # after everything that can be refused
                run.create(trial.recipe)
            return Outcome(trial, program.train())
        except Exception as error:
            if not _concerns_one_run(error):
                raise
            # Only the text is kept: the error itself would keep the network in memory.
            return Outcome(trial, failure=" ".join(str(error).split()) or type(error).__name__)


def _forget_the_last(place: Place) -> None:
    """Free the GPU memory of the last run, so that the next one has it, and does not count it as its own."""
    device = surroundings.find_device(place.device)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _concerns_one_run(error: Exception) -> bool:
    return isinstance(error, FAILURES) or (type(error) is RuntimeError and "alloc" in str(error).lower())
