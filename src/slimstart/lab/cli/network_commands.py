"""`slimstart evaluate`, `export`, `inspect` and `bench`: commands about one network."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimstart.errors import ConfigError
from slimstart.lab.cli.display import console, show_table
from slimstart.lab.cli.options import split

if TYPE_CHECKING:
    from torch import nn

    from slimstart.lab.recipes.recipe import Recipe

OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="module:factory of your own network, if the run used one: no file alone makes it run."
    ),
]


Network = Annotated[str, typer.Argument(help="Network: one of ours, timm:NAME, or your own code as module:factory.")]
Image = Annotated[str, typer.Option(help="Shape of an image: CHANNELSxHEIGHTxWIDTH.")]
Classes = Annotated[int, typer.Option("--num-classes", help="Number of classes.")]
OwnData = Annotated[str | None, typer.Option("--data", help="module:factory of your own data, if the run used one.")]


class Format(StrEnum):
    onnx = "onnx"
    torch = "torch"
    python = "python"
    safetensors = "safetensors"


def add_to(app: typer.Typer) -> None:
    app.command("evaluate", epilog="Example: slimstart evaluate runs/fashion")(evaluate)
    app.command("export", epilog="Example: slimstart export runs/fashion --format onnx --out fashion.onnx")(export)
    app.command("inspect", epilog="Example: slimstart inspect resnet20 --budget flops=0.25")(inspect)
    app.command("bench", epilog="Example: slimstart bench vgg19 --budget flops=0.25,flops=0.1")(bench)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    data_dir: Annotated[Path | None, typer.Option(help="Folder or file of the data set; data by default.")] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, ...; auto chooses a GPU if there is one.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode the images of an image_folder.")] = 4,
    model: OwnModel = None,
    data: OwnData = None,
) -> None:
    """Measure the accuracy of a finished network on the test images."""
    import torch

    from slimstart.flop_counter import flops
    from slimstart.lab.run.environment import Place, find_device, load_data, set_precision
    from slimstart.lab.run.evaluation import evaluate as accuracy_of
    from slimstart.lab.run.run_folder import Run

    recipe = Run(run).recipe(model, data)
    on = find_device(device)
    set_precision(recipe.precision)
    images = load_data(recipe, Place(device, data_dir, workers), on)
    network = _finished(run, recipe).to(on)
    loss, accuracy = accuracy_of(network, images, recipe.precision)
    cost = flops(network, torch.zeros(1, *images.image_shape, device=on))
    rows = [[f"{accuracy:.2f} %", f"{loss:.4f}", f"{cost:,}", str(images.test.num_images)]]
    show_table(["accuracy", "loss", "FLOPs per image", "images"], rows)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    format: Annotated[
        Format,
        typer.Option(
            help="Kind of file: onnx, torch (torch.export), python (with its weights) or safetensors (weights and "
            "structure)."
        ),
    ],
    model: OwnModel = None,
    data: OwnData = None,
) -> None:
    """Export a finished network; ONNX, torch.export and Python files are run and compared with it."""
    import torch

    from slimstart.io import export as exporting
    from slimstart.io import network_files as files
    from slimstart.io import python_file
    from slimstart.lab import records
    from slimstart.lab.run.run_folder import Run

    record = records.read(run)
    example = torch.zeros(1, *record.image_shape)
    network = _finished(run, Run(run).recipe(model, data))
    if format is Format.safetensors:
        out = out.with_name(out.name.removesuffix(".safetensors") + ".safetensors")
        files.save(network, out)
        console.print(f"{out}, with its structure")
        return
    writers = {
        Format.onnx: exporting.to_onnx,
        Format.torch: exporting.to_torch,
        Format.python: python_file.to_python,
    }
    difference = writers[format](network, out, example)
    verdict = (
        "not checked: onnxruntime is not installed" if difference is None else f"differs by {difference:.1e} at most"
    )
    console.print(f"{out}: {verdict}")


def inspect(
    model: Network,
    image: Image = "3x32x32",
    num_classes: Classes = 10,
    coupling: Annotated[
        str,
        typer.Option(
            help="Layers that write into the same residual stream share one mask (stream) or have one each (filter)."
        ),
    ] = "stream",
    budget: Annotated[
        str | None, typer.Option(help="Show the uniform network at this budget, or several, too.")
    ] = None,
) -> None:
    """Show which channels of a network are removed together, which layers are not prunable, and what it all costs."""
    import torch

    from slimstart.graph import COUPLINGS, trace
    from slimstart.lab.methods import uniform_mask
    from slimstart.lab.recipes.recipe import make_model, parse_budget
    from slimstart.policies import Channels, Flops, Params

    if coupling not in COUPLINGS:
        raise ConfigError(f"`coupling` is {coupling!r}; it must be one of {', '.join(COUPLINGS)}")
    shape = _shape(image)
    network = make_model(model, num_classes=num_classes, in_channels=shape[0])
    graph = trace(network, torch.zeros(1, *shape), coupling)
    mask = uniform_mask(graph, parse_budget(budget)) if budget is not None else None
    columns = ["group", "layers", "units", "filters"] + ([] if mask is None else ["kept"])
    rows = []
    for group in graph.groups:
        row = [group.name, str(len(group.layers)), str(len(group.units)), str(group.num_filters)]
        rows.append(row if mask is None else [*row, str(int(mask[group.units.start : group.units.stop].sum()))])
    show_table(columns, rows)
    if graph.not_prunable:
        console.print()
        show_table(["not prunable", "reason"], [[name, reason] for name, reason in graph.not_prunable.items()])
    console.print()
    costs = []
    for kind in (Flops, Params, Channels):
        bound = kind(1.0).bind(graph.costs)
        row = [kind.__name__.lower(), f"{bound.dense:,}", f"{bound.minimum / bound.dense:.4f}"]
        costs.append(row if mask is None else [*row, f"{bound.cost(mask) / bound.dense:.4f}"])
    show_table(["cost", "dense", "least fraction"] + ([] if mask is None else ["uniform at the budget"]), costs)
    console.print(f"{graph.coverage:.1%} of the FLOPs can shrink")


def bench(
    model: Network,
    budget: Annotated[str, typer.Option(help="Budget, or several as in flops=0.25,flops=0.10.")] = "flops=0.10",
    policy: Annotated[str, typer.Option(help="Policy of slimstart: equal_worth or paper.")] = "equal_worth",
    batch_size: Annotated[int, typer.Option(help="Number of images per step; they are random.")] = 64,
    image: Image = "3x32x32",
    num_classes: Classes = 10,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, ...; auto chooses a GPU if there is one.")] = "auto",
    engine: Annotated[
        str, typer.Option(help="How steps run: eager, graphs (CUDA graphs), or auto for the faster of them.")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="Compute precision: float32, tf32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Number of measurements of each network.")] = 20,
) -> None:
    """Measure a training step: of the dense network, the uniform network of each budget, and slimstart.

    The networks take turns, on random images, and medians are shown. With equal_worth, one column has steps in which
    the structure is learned, and one has the steps after that; with paper, all steps include both forwards.
    """
    from slimstart.lab.recipes.recipe import Recipe
    from slimstart.lab.reports.tables import number
    from slimstart.lab.run.step_times import bench as measure

    if rounds < 1:
        raise ConfigError(f"`rounds` is {rounds}; it must be at least 1")
    shape, budgets = _shape(image), split(budget)
    if not budgets:
        raise ConfigError("`budget` is empty; give one value, or several with commas between them")
    # A small learning rate: labels are random, and a loss that is not finite would end the measurement.
    recipes = [
        Recipe(model, budget=one, policy=policy, batch_size=batch_size, precision=precision, lr=0.01) for one in budgets
    ]
    rows = []
    for recipe in recipes:
        ratio, times = measure(recipe, shape, num_classes, device, engine, rounds)
        cells = [times.dense, times.narrow, times.learning, times.total]
        rows.append([recipe.budget or "", number(100 * ratio), *(number(cell) for cell in cells)])
    columns = ["budget", "FLOPs, %", "dense, ms", "uniform, ms", "slimstart learning, ms", "slimstart, ms"]
    show_table(columns, rows)


def _finished(run: Path, recipe: Recipe) -> nn.Module:
    """The finished network of a run."""
    import torch

    from slimstart.graph import trace
    from slimstart.io import network_files as files
    from slimstart.lab import records
    from slimstart.lab.methods import wide_sibling
    from slimstart.lab.recipes.recipe import make_model
    from slimstart.lab.run.run_folder import Run

    if not Run(run).finished:
        raise ConfigError(f"{run} is not finished; continue it with: slimstart train --resume --out {run}")
    record = records.read(run)
    stages = recipe.stages if record.choosing is None else record.choosing.chosen
    make = partial(make_model, recipe.model, num_classes=record.num_classes, in_channels=record.image_shape[0])

    def factory() -> nn.Module:
        dense, budget = make(width=recipe.width), recipe.parsed_budget
        if stages is None or budget is None:
            return dense
        example = torch.zeros(1, *record.image_shape)
        graph = trace(dense, example, "stream")
        return wide_sibling(lambda width: make(width=width, stages=stages), graph, budget, example)[0]

    return files.load(Run(run).network, factory)


def _shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(part) for part in text.lower().split("x"))
    except ValueError as error:
        raise ConfigError(f"`image` is {text!r}; it must be CHANNELSxHEIGHTxWIDTH, such as 3x32x32") from error
    if min(channels, height, width) < 1:
        raise ConfigError(f"`image` is {text!r}; every size must be at least 1")
    return channels, height, width
