"""Options that `train` and `compare` share: where a run computes, and every setting of a recipe."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimstart.lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from slimstart.lab.run.environment import Place

RECIPE_PANEL = "Settings of the recipe"
RecipeName = Annotated[str | None, typer.Option(help="Preset (see `slimstart recipes`) or TOML file with settings.")]


def where(
    *,
    data_dir: Annotated[Path | None, typer.Option(help="Folder or file of the data set; data by default.")] = None,
    download: Annotated[bool, typer.Option(help="Download CIFAR if it is not in the data folder.")] = True,
    device: Annotated[
        str, typer.Option(help="Device that trains: cpu, cuda, cuda:1, ...; auto chooses a GPU if there is one.")
    ] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode the images of an image_folder.")] = 4,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Save a checkpoint once this many seconds have passed since the last one.")
    ] = 60.0,
    step_times: Annotated[
        bool, typer.Option("--step-times", help="Measure the time of a training step at the end of the run.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="How steps run: eager, graphs (CUDA graphs), or auto for the faster of them.")
    ] = "auto",
    **_: Any,
) -> Place:
    """Device, folders and the like, from all options of a command."""
    from slimstart.lab.run.environment import Place

    return Place(device, data_dir, workers, download, checkpoint_seconds, step_times, engine)


def with_training_options(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Give a command the options of `where`, and one for every field of `Recipe` that is not its own.

    Names, types and help are written once: there.
    """
    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    # What it returns is not known here: it would load PyTorch.
    places = inspect.signature(where, eval_str=True, locals={"Place": Any}).parameters.values()
    names = {parameter.name for parameter in parameters}
    parameters += [p for p in places if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name not in names]
    taken = {parameter.name for parameter in parameters} | set(without)
    parameters += [parameter for parameter in _settings() if parameter.name not in taken]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _settings() -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(Recipe)
    for field in dataclasses.fields(Recipe):
        kind = next(
            one
            for one in (str, bool, int, float)
            if one is hints[field.name] or one in typing.get_args(hints[field.name])
        )
        flag = "--" + field.name.replace("_", "-")
        if kind is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=RECIPE_PANEL, show_default=False)
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe among the options that the user has given."""
    fields = {field.name for field in dataclasses.fields(Recipe)}
    return {name: value for name, value in options.items() if name in fields and value is not None}


def chosen(name: str | None, changes: dict[str, Any]) -> Recipe:
    """The recipe that the user has asked for: a preset, a file or the defaults, with the given changes."""
    from slimstart.lab.recipes.presets import preset
    from slimstart.lab.recipes.recipe import merged, read

    if name is None:
        base = Recipe()
    elif name.endswith(".toml"):
        base = read(name, changes.get("model"), changes.get("data"))
    else:
        base = preset(name)
    return merged(base, changes)


def split(text: str) -> tuple[str, ...]:
    """The parts of a text between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
