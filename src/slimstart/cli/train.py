"""`slimstart train`, `slimstart recipes` and `slimstart report`."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstart.cli.display import TrainingDisplay, console, show_records, show_table
from slimstart.errors import ConfigError
from slimstart.recipes.recipe import Recipe

if TYPE_CHECKING:
    from slimstart.recipes.runs import Run
    from slimstart.recipes.surroundings import Place
    from slimstart.records import Record

RECIPE_PANEL = "What is trained (each overrides the recipe)"


def add_to(app: typer.Typer) -> None:
    app.command("train", epilog="Example: slimstart train --model vgg16 --data cifar10 --budget flops=0.1 --epochs 60")(
        _with_recipe_options(train)
    )
    app.command("recipes", epilog="Example: slimstart recipes")(list_recipes)
    app.command("report", epilog="Example: slimstart report runs/fashion runs/fashion-2 --out report.html")(report)


def _with_recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of `Recipe`: names, types and help are written once, there."""
    hints = typing.get_type_hints(Recipe)
    parameters = []
    for field in dataclasses.fields(Recipe):
        kind = next(
            one for one in (str, int, float) if one is hints[field.name] or one in typing.get_args(hints[field.name])
        )
        flag = "--" + field.name.replace("_", "-")
        option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=RECIPE_PANEL, show_default=False)
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*kept, *parameters])  # type: ignore[attr-defined]
    return command


def train(
    *,
    recipe: Annotated[
        str | None, typer.Option(help="Name of a preset (see `slimstart recipes`) or a TOML file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME if not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out; start it, if there is none.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set is.")] = None,
    download: Annotated[bool, typer.Option(help="Download CIFAR where it is missing.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode image folders.")] = 4,
    checkpoint_seconds: Annotated[float, typer.Option(help="Least time between two checkpoints.")] = 60.0,
    timing_rounds: Annotated[int, typer.Option(help="Steps to measure at the end; 0: no step times.")] = 20,
    engine: Annotated[str, typer.Option(help="eager, graphs (CUDA graphs), or auto: what is best here.")] = "auto",
    **options: Any,
) -> None:
    """Train a network, and keep everything about the run in one folder.

    A recipe says what is trained; any of its settings can be given here too. Ctrl-C saves and stops.
    """
    from slimstart import records
    from slimstart.recipes.program import Program
    from slimstart.recipes.runs import Run
    from slimstart.recipes.surroundings import Place
    from slimstart.recipes.watching import Interrupted

    given = {name: value for name, value in options.items() if value is not None}
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to go on with")
    run = Run(out) if out is not None else _new_run(recipe, _chosen(recipe, given))
    with run.locked():
        going_on = resume and run.exists
        if going_on:
            chosen = run.recipe(given.get("model"))
            _refuse_changes(chosen, given, recipe)
        else:
            chosen = _chosen(recipe, given)
            run.refuse_existing()
        if run.finished:
            console.print(f"{run.folder} is finished already", markup=False)
            record = records.read(run.record)
        else:
            display = TrainingDisplay(chosen.total_epochs)
            place = Place(device, data_dir, workers, download, checkpoint_seconds, timing_rounds, engine)
            try:
                with display:
                    program = Program(chosen, run, place, display)
                    if not going_on:  # only now: whatever can be refused has been
                        run.create(chosen)
                    what = f"training {chosen.model} on {chosen.data} ({chosen.method}) in {run.folder}"
                    console.print(what, markup=False)
                    with display.stoppable():
                        record = program.train()
            except Interrupted:
                console.print(f"saved; to go on: {_resume_command(run, given, place)}", markup=False)
                raise typer.Exit(130) from None
        show_records([record])
        _write_report([record], run.report)


def _resume_command(run: Run, given: dict[str, Any], place: Place) -> str:
    """What to type to go on: the folder, and what no file remembers."""
    from slimstart.models import is_factory

    model = given.get("model", "")
    options = {"--model": model if is_factory(model) else None, "--data-dir": place.data_dir, "--device": place.device}
    words = [word for flag, value in options.items() if value not in (None, "auto") for word in (flag, str(value))]
    return shlex.join(["slimstart", "train", "--resume", "--out", str(run.folder), *words])


def _chosen(name: str | None, given: dict[str, Any]) -> Recipe:
    """The recipe that is asked for: a preset, a file, or the defaults, and what was given on top."""
    from slimstart.recipes.presets import preset
    from slimstart.recipes.recipe import merged, read

    if name is None:
        base = Recipe()
    elif name.endswith(".toml"):
        base = read(name, given.get("model"))
    else:
        base = preset(name)
    return merged(base, given)


def _new_run(name: str | None, recipe: Recipe) -> Run:
    from slimstart.recipes.runs import claim

    stem = f"{recipe.model}-{recipe.data}" if name is None else Path(name).name.removesuffix(".toml")
    suffix = "" if recipe.method == "slimstart" else f"-{recipe.method}"
    return claim(Path("runs") / f"{stem}{suffix}".replace(":", "-").replace("/", "-"))


def _refuse_changes(recipe: Recipe, given: dict[str, Any], name: str | None) -> None:
    """A run goes on as it was begun."""
    asked = _chosen(name, given) if name is not None else None
    fields = {field.name for field in dataclasses.fields(recipe)} if asked is not None else set(given)
    wanted = {f: getattr(asked, f) if asked is not None else given[f] for f in sorted(fields)}
    if changed := [f"--{f.replace('_', '-')} {v}" for f, v in wanted.items() if v != getattr(recipe, f)]:
        raise ConfigError(
            f"the run was begun with other settings; leave out {', '.join(changed)}, or choose another --out"
        )


def list_recipes() -> None:
    """List the presets: one for every row of the paper's tables."""
    from slimstart.recipes.presets import PRESETS

    rows = []
    for name, entry in PRESETS.items():
        paper = entry.paper
        numbers = f"{paper.accuracy:g} % at {paper.flops:g} % FLOPs, {paper.train_cost_saving:g}x" if paper else ""
        rows.append([name, entry.recipe.model, entry.recipe.data, entry.recipe.budget or "", entry.about, numbers])
    show_table(["recipe", "model", "data", "budget", "what", "the paper reports"], rows)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, record files, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Compare finished runs: a table, and one self-contained HTML page with plots. Seeds are joined."""
    from slimstart.reports import find

    found = find(runs)
    show_records(found)
    _write_report(found, out)


def _write_report(records: Sequence[Record], path: Path) -> None:
    try:
        from slimstart.reports import page
    except ImportError as error:  # a machine that only trains may do without matplotlib
        console.print(f"no report page is written: {error}", markup=False)
        return
    page.write(records, path)
    console.print(f"report: {path}", markup=False)
