"""The two analyses of the paper: `python benchmarks/run_study.py variance | flip`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstart.lab.cli.display import TrainingDisplay, console, show_table
from slimstart.lab.cli.options import RecipeName, chosen, given, split, where, with_training_options

if TYPE_CHECKING:
    from study.records import Study


def add_to(app: typer.Typer) -> None:
    app.command("variance", epilog="Example: run_study.py variance runs/resnet32-cifar10 --out variance")(variance)
    app.command(
        "flip", epilog="Example: run_study.py flip --model resnet32 --data cifar10 --budget flops=0.1 --out flip"
    )(with_training_options(flip, without=("batch_norm",)))


def variance(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is searching, at its last checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder for record.json and variance.svg.")] = Path("variance"),
    estimators: Annotated[
        str, typer.Option(help="Estimators; the first is compared with the others. NAME_plain has no preconditioner.")
    ] = "vr_pge,pge,pge_plain",
    batches: Annotated[int, typer.Option(help="Random training batches.", min=3)] = 16,
    draws: Annotated[int, typer.Option(help="Masks on each batch.", min=2)] = 64,
    seed: Annotated[int, typer.Option(help="Random seed of batches and masks.", min=0)] = 0,
    model: Annotated[str | None, typer.Option(help="Your module:factory, if the run used one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder or file of the data set.")] = None,
    device: Annotated[
        str, typer.Option(help="Device: cpu, cuda, cuda:1, ...; auto chooses a GPU if there is one.")
    ] = "auto",
    engine: Annotated[
        str, typer.Option(help="How steps run: eager, graphs (CUDA graphs), or auto for the faster of them.")
    ] = "auto",
) -> None:
    """Measure the variance of the structure gradient in each layer, over masks and batches: VR-PGE and PGE."""
    from rich.progress import track
    from study import run as study
    from study.variance import VarianceSettings

    from slimstart.lab.run.environment import Place
    from slimstart.lab.run.run_folder import Run

    names = split(estimators)
    settings = VarianceSettings(names, batches, draws, seed)
    place = Place(device, data_dir, engine=engine)
    looked_on = partial(
        track,
        description="measuring",
        total=batches,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    found = study.variance(Run(run), settings, place, out, model, looked_on)
    console.print(
        f"{found.network} after {found.epoch} epochs: mean variance of a gradient, ± its standard error; "
        f"ratios to {names[0]}",
        markup=False,
    )
    show_table(*_table(found))
    _write_plot(found, out, "variance.svg")


def flip(
    *,
    recipe: RecipeName = None,
    out: Annotated[Path, typer.Option(help="Folder for the run, record.json and flip.svg.")] = Path("flip"),
    every: Annotated[int, typer.Option(help="Epochs between two measurements.", min=1)] = 10,
    batches: Annotated[int, typer.Option(help="Random training batches; an even number.", min=4)] = 8,
    draws: Annotated[int, typer.Option(help="Masks on each batch.", min=2)] = 16,
    channels: Annotated[int, typer.Option(help="Random channels that are flipped in every mask.", min=1)] = 64,
    **options: Any,
) -> None:
    """Train, and measure how much sampled networks differ, and how much one channel changes.

    A study that was stopped goes on with the same command.
    """
    from study import run as study
    from study.flip import FlipSettings

    from slimstart.lab.run.callbacks import Interrupted

    settings = FlipSettings(every, batches, draws, channels)
    asked = chosen(recipe, {"policy": "paper", **given(options)})
    display = TrainingDisplay(asked.total_epochs)
    try:
        with display, display.stoppable():
            found = study.flip(asked, settings, where(**options), out, display)
    except Interrupted:
        console.print("saved; to go on, give the same command again", markup=False)
        raise typer.Exit(130) from None
    console.print(f"{found.network}: squared losses and differences, ± standard errors", markup=False)
    show_table(*_table(found))
    _write_plot(found, out, "flip.svg")


def _table(study: Study) -> tuple[list[str], list[list[str]]]:
    from study.tables import cells

    titles, *rows = cells(study)
    return titles, rows


def _write_plot(study: Study, out: Path, name: str) -> None:
    from study import plot

    plot.write(study, out / name)
    console.print(f"record: {out / 'record.json'}, plot: {out / name}", markup=False)


if __name__ == "__main__":
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    add_to(app)
    app()
