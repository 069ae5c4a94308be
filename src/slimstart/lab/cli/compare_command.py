"""`slimstart compare`: several methods, each with the same epochs, budgets and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstart.lab.cli.display import ComparisonDisplay, console, errors, show_records
from slimstart.lab.cli.options import RecipeName, chosen, given, split, where, with_training_options
from slimstart.lab.cli.train_commands import write_report
from slimstart.lab.recipes.recipe import METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slimstart.lab.run.comparison import Outcome, Trial
    from slimstart.lab.run.place import Place

RETRAINING = ("finetune_epochs", "finetune_lr", "finetune_schedule", "rounds", "trial_epochs")


def add_to(app: typer.Typer) -> None:
    example = "slimstart compare --model resnet32 --data cifar10 --methods uniform,slimstart --epochs 40 --seeds 3"
    app.command("compare", epilog=f"Example: {example}")(
        with_training_options(compare, without=("method", "seed", "stages", "batch_norm"))
    )


def compare(
    *,
    methods: Annotated[
        str,
        typer.Option(
            help=f"Methods to compare, with commas between them: {', '.join(METHODS)}. METHOD:VARIANT is a variant "
            "of a method: slimstart:paper (the paper's policy), slimstart:ESTIMATOR (the same with another estimator), "
            "l1:uniform (and soft, thinet, provable, slimming: the same share of every layer), uniform:front_heavy "
            "(shares that fall from the first layer to the last)."
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(help="Budget, or several as in flops=0.1,flops=0.05; by default that of the recipe."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each method, with its fine-tuning; by default those of the recipe.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs of each method, with the seeds 0, 1, ...")] = 1,
    recipe: RecipeName = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison; runs/compare-MODEL-DATA by default.")
    ] = None,
    **options: Any,
) -> None:
    """Train a network with several methods, and write a table and an HTML page that compare the results.

    Ctrl-C saves and stops. The same command continues, also with more methods, budgets or seeds.
    """
    from slimstart.lab.run.callbacks import Interrupted
    from slimstart.lab.run.comparison import refuse_changes, trials
    from slimstart.lab.run.environment import command

    asked, place = given(options), where(**options)
    retraining = {name: asked.pop(name) for name in RETRAINING if name in asked}
    base = chosen(recipe, asked)
    budgets = split(budget or base.budget or "")
    planned = trials(base, split(methods), budgets, num_seeds=seeds, total_epochs=epochs, retraining=retraining)
    folder = out or Path("runs") / f"compare-{base.model}-{base.data}".replace(":", "-").replace("/", "-")
    refuse_changes(planned, folder, asked.get("model"), asked.get("data"))
    try:
        outcomes = _run(planned, folder, place)
    except Interrupted:
        console.print(f"saved; to go on: {command()}", soft_wrap=True)
        raise typer.Exit(130) from None
    _report(outcomes, folder)


def _run(planned: Sequence[Trial], folder: Path, place: Place) -> list[Outcome]:
    from slimstart.lab.run.callbacks import Interrupted
    from slimstart.lab.run.comparison import carry_out

    outcomes = []
    console.print(f"comparing in {folder}: {len(planned)} runs")
    with (
        ComparisonDisplay([trial.name for trial in planned], planned[0].recipe.total_epochs) as display,
        display.stoppable(),
    ):
        for trial in planned:
            if display.stop_requested:  # the last run was ending when the wish came
                raise Interrupted
            display.begin()
            outcome = carry_out(trial, folder, place, display)
            display.end(outcome.record) if outcome.record else display.fail(outcome.failure)
            outcomes.append(outcome)
    return outcomes


def _report(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Table, page, and what has failed."""
    from slimstart.io import atomic
    from slimstart.lab.reports import markdown

    if found := [outcome.record for outcome in outcomes if outcome.record is not None]:
        show_records(found)
        atomic.write(folder / "table.md", markdown(found).encode())
        console.print(f"table: {folder / 'table.md'}")
        write_report(found, folder / "report.html")
    if failed := [outcome for outcome in outcomes if outcome.record is None]:
        for outcome in failed:
            errors.print(f"failed: {outcome.trial.name}: {outcome.failure}", style="red", soft_wrap=True)
        raise typer.Exit(1)
