"""Options that `train` and `compare` share: where a run computes, and every setting of a recipe."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.place import Place

RECIPE_PANEL = "Settings of the recipe"
RecipeName = Annotated[str | None, typer.Option(help="Preset (see `slimstart recipes`) or TOML file with settings.")]


def where(**options: Any) -> Place:
    """Device, folders and the like, from all options of a command."""
    return Place(**{field.name: options[field.name] for field in dataclasses.fields(Place) if field.name in options})


def with_training_options(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Give a command an option for every field of `Place` and `Recipe` that is not its own.

    Names, types and help are written once: there.
    """
    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {parameter.name for parameter in parameters} | set(without)
    options = (*_options(Place), *_options(Recipe, RECIPE_PANEL))
    parameters += [option for option in options if option.name not in taken]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _options(settings: type[Place | Recipe], panel: str | None = None) -> Iterator[inspect.Parameter]:
    """Options of the fields; in a panel they have no default, which stands for what a preset or a file says."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))
        kind = next(one for one in (str, bool, int, float, Path) if one in kinds)
        default = None if panel else field.default
        flag = "--" + field.name.replace("_", "-")
        if kind is bool and default is not False:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        option = typer.Option(flag, help=field.metadata["help"], rich_help_panel=panel, show_default=not panel)
        annotation = Annotated[kind if default is not None else kind | None, option]  # type: ignore[valid-type]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
