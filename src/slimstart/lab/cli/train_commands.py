"""`slimstart train`, `slimstart recipes` and `slimstart report`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstart.errors import ConfigError
from slimstart.lab.cli.display import TrainingDisplay, console, show_records, show_table
from slimstart.lab.cli.options import RecipeName, chosen, given, where, with_training_options

if TYPE_CHECKING:
    from slimstart.distributed.process_group import ProcessGroup
    from slimstart.lab.recipes.recipe import Recipe
    from slimstart.lab.records import Record
    from slimstart.lab.run.place import Place
    from slimstart.lab.run.run_folder import Run


def add_to(app: typer.Typer) -> None:
    app.command("train", epilog="Example: slimstart train --model vgg16 --data cifar10 --budget flops=0.1 --epochs 60")(
        with_training_options(train)
    )
    app.command("recipes", epilog="Example: slimstart recipes")(list_recipes)
    app.command("report", epilog="Example: slimstart report runs/fashion runs/fashion-2 --out report.html")(report)


def train(
    *,
    recipe: RecipeName = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out; start one if there is none.")
    ] = False,
    rank_timeout: Annotated[
        float, typer.Option(help="Seconds without an answer after which another process counts as lost.")
    ] = 600.0,
    **options: Any,
) -> None:
    """Train a network, and write everything about the run into one folder.

    Settings come from the recipe, and each of them can be given as an option. Ctrl-C saves and stops. On several GPUs:
    torchrun --nproc-per-node 8 -m slimstart train --out FOLDER ...; each process trains on its share of every batch.
    """
    from slimstart.distributed.launch import joined, own_device, restarted, started_by_torchrun

    place = where(**options)
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    if started_by_torchrun():
        if out is None:
            raise ConfigError("several processes need --out, the folder of the run, so that all of them know it")
        place = dataclasses.replace(place, device=own_device(place.device))
    resume = resume or (restarted() and out is not None)
    with joined(rank_timeout) as ranks:
        if ranks.rank > 0:
            console.quiet = True
        _train(recipe, out, resume, given(options), place, ranks)


def _train(
    name: str | None, out: Path | None, resume: bool, asked: dict[str, Any], place: Place, ranks: ProcessGroup
) -> None:
    """Train in a folder that no other program writes to; of several processes, only the first one writes."""
    from slimstart.lab import records
    from slimstart.lab.run.callbacks import Interrupted
    from slimstart.lab.run.program import Program
    from slimstart.lab.run.run_folder import Run

    run = Run(out) if out is not None else _new_run(name, chosen(name, asked))
    with contextlib.ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(run.locked()))
        settings, going_on, finished = ranks.first(lambda: _opened(run, name, resume, asked))
        if finished:
            console.print(f"{run.folder} is finished already")
            record = ranks.first(lambda: records.read(run.record))
        else:
            display = TrainingDisplay(settings.total_epochs)
            try:
                with display:
                    program = Program(settings, run, place, display, ranks)
                    if not going_on:  # after everything that can be refused
                        ranks.first(lambda: run.create(settings))
                    what = f"training {settings.model} on {settings.data} ({settings.method}) in {run.folder}"
                    console.print(what + (f" on {ranks.size} ranks" if ranks.size > 1 else ""))
                    with display.stoppable():
                        record = program.train()
            except Interrupted:
                console.print(f"saved; to go on: {_resume_command(run, asked, place)}", soft_wrap=True)
                raise typer.Exit(130) from None
        if ranks.rank == 0:
            show_records([record])
            write_report([record], run.report)


def _opened(run: Run, name: str | None, resume: bool, asked: dict[str, Any]) -> tuple[Recipe, bool, bool]:
    """The recipe of a run, whether it is continued, and whether it is finished."""
    going_on = resume and (run.exists or not (name or "model" in asked))  # a new run names its network
    if going_on:
        settings = run.recipe(asked.get("model"), asked.get("data"))
        _refuse_changes(settings, asked, name)
    else:
        settings = chosen(name, asked)
        run.refuse_existing()
    return settings, going_on, run.finished


def _resume_command(run: Run, asked: dict[str, Any], place: Place) -> str:
    """The command that continues a run: its folder, and the options that no file keeps."""
    from slimstart.lab.own_code import is_factory

    options = {f"--{name}": asked[name] for name in ("model", "data") if is_factory(asked.get(name, ""))}
    options |= {"--data-dir": place.data_dir, "--device": place.device}
    timing = ["--step-times"] if place.step_times else []
    words = [word for flag, value in options.items() if value not in (None, "auto") for word in (flag, str(value))]
    return shlex.join(["slimstart", "train", "--resume", "--out", str(run.folder), *words, *timing])


def _new_run(name: str | None, recipe: Recipe) -> Run:
    from slimstart.lab.run.run_folder import claim

    stem = f"{recipe.model}-{recipe.data}" if name is None else Path(name).name.removesuffix(".toml")
    suffix = "" if recipe.method == "slimstart" else f"-{recipe.method}"
    return claim(Path("runs") / f"{stem}{suffix}".replace(":", "-").replace("/", "-"))


def _refuse_changes(recipe: Recipe, asked: dict[str, Any], name: str | None) -> None:
    """Raise a ConfigError where an option differs from the recipe that the run began with."""
    wanted = asked if name is None else dataclasses.asdict(chosen(name, asked))
    if changed := [f"--{f.replace('_', '-')} {v}" for f, v in sorted(wanted.items()) if v != getattr(recipe, f)]:
        raise ConfigError(f"the run began with other settings; leave out {', '.join(changed)}, or choose another --out")


def list_recipes() -> None:
    """List the presets: the rows of the paper's tables, and the methods that it compares with."""
    from slimstart.lab.recipes.presets import PRESETS

    rows = []
    for name, entry in PRESETS.items():
        recipe = entry.recipe
        rows.append([name, recipe.model, recipe.data, recipe.budget or "", entry.about, str(entry.paper or "")])
    show_table(["recipe", "model", "data", "budget", "about", "the paper reports"], rows)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, record files, or folders that contain them.")],
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
) -> None:
    """Compare finished runs in a table and a self-contained HTML page. Runs that differ in the seed are averaged."""
    from slimstart.lab.reports import find

    found = find(runs)
    show_records(found)
    write_report(found, out)


def write_report(records: Sequence[Record], path: Path) -> None:
    try:
        from slimstart.lab.reports import page
    except ImportError as error:  # matplotlib is not needed for training
        console.print(f"no report page is written: {error}")
        return
    page.write(records, path)
    console.print(f"report: {path}")
