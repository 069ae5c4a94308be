"""README.md and docs/ on the program: command lines are valid, and tables agree with the code."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import slimstart
from slimstart.lab import data, models
from slimstart.lab.cli import app
from slimstart.lab.recipes.presets import preset
from slimstart.lab.recipes.recipe import Recipe, merged, read
from slimstart.lab.run.comparison import trials

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
SHOWN = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "examples" / f"own_{name}.py" for name in ("model", "data")),
)


def command_lines(text: str) -> list[str]:
    """Lines that begin with `slimstart` in blocks of shell and in docstrings, and inline code that does."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^slimstart .*|^    slimstart .*", "".join(blocks) or text, re.MULTILINE)
    return [line.strip() for line in lines] + re.findall(r"`(slimstart [a-z][^`\n]*)`", text)


def parse(line: str) -> dict[str, Any]:
    """The arguments that a command would be called with; an error, as the user would see it, where it refuses."""
    command, rest = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    given: dict[str, Any] = command.make_context(line, rest).params
    return given


SETTINGS = {field.name for field in dataclasses.fields(Recipe)}
MENTIONED = {
    "slimstart train --recipe",
    "slimstart train --method NAME",
    *(f"slimstart {name}" for name in ("bench", "compare", "evaluate", "export", "inspect", "report")),
}
LINES = sorted({line for path in SHOWN for line in command_lines(path.read_text(encoding="utf-8"))} - MENTIONED)


def test_command_lines_are_found() -> None:
    text = "`slimstart train --lr 1`\nslimstart is\n```sh\nslimstart report a b  # why\nmake train\n```\n"
    assert command_lines(text) == ["slimstart report a b  # why", "slimstart train --lr 1"]
    assert parse("slimstart report a b  # why") == {"runs": [Path("a"), Path("b")], "out": Path("report.html")}
    for wrong in ("trian", "train --learning-rate 1", "train --lr fast", "export runs/a", "evaluate"):
        with pytest.raises(Exception, match=r"trian|No such option|valid|Missing"):
            parse(f"slimstart {wrong}")
    shown = {line.split()[1] for line in LINES}
    assert shown == {
        "train",
        "compare",
        "recipes",
        "evaluate",
        "export",
        "inspect",
        "report",
        "bench",
    }  # every command has its line


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(shlex.split(line, comments=True)))
def test_command_lines_are_valid(line: str, tmp_path: Path) -> None:
    """Options exist and have values of the right kind, settings make a recipe, networks are known."""
    given = parse(line)
    model = given.get("model")
    assert model is None or model in models.MODELS or models.is_factory(model)
    if line.split()[1] == "train":
        name = given["recipe"]
        if name == "mine.toml":  # the one that the page shows
            (tmp_path / name).write_text(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
            base = read(tmp_path / name)
        else:
            base = Recipe() if name is None else preset(name)
        merged(base, {key: value for key, value in given.items() if key in SETTINGS and value is not None})
    if line.split()[1] == "compare":
        base = Recipe() if given["recipe"] is None else preset(given["recipe"])
        assert trials(base, given["methods"].split(","), (given["budget"] or "flops=0.1").split(","))


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table whose first column has this heading."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None, f"no table of {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_sizes_of_the_networks_are_right() -> None:
    shown = rows("`--model`")
    assert {row[0].strip("`") for row in shown} == set(models.MODELS)
    for name, params, flops, what in shown:
        channels, height, width, num_classes = map(int, re.findall(r"\d+", what))
        with torch.device("meta"):
            network = models.build(name.strip("`"), num_classes=num_classes, in_channels=channels)
            assert f"{sum(p.numel() for p in network.parameters()):,}" == params, name
            assert f"{slimstart.flops(network, torch.zeros(1, channels, height, width)):,}" == flops, name


def test_every_data_set_is_described() -> None:
    named = {name for row in rows("`--data`") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(data.NAMES)
    images = data.load("fashion", batch_size=100)
    (row,) = (row for row in rows("`--data`") if row[0] == "`fashion`")
    assert row[2:4] == [f"{images.train.num_images:,}", f"{images.test.num_images:,}"]
    assert row[1] == f"{' x '.join(map(str, images.image_shape))}, {images.num_classes} classes"
