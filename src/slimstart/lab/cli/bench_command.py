"""`slimstart bench`: what a training step takes, beside the dense network at its best and the narrow one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimstart.errors import ConfigError
from slimstart.lab.cli.display import console, show_table
from slimstart.lab.cli.options import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slimstart.lab.bench.bench_records import Row


def add_to(app: typer.Typer) -> None:
    app.command("bench", epilog="Example: slimstart bench --model vgg19 --budget flops=0.25,flops=0.1 --out bench")(
        bench
    )


def bench(
    out: Annotated[Path, typer.Option(help="Folder for record.json and speedup.svg.")],
    model: Annotated[str, typer.Option(help="A name of ours, timm:NAME, or your own module:factory.")] = "vgg19",
    budget: Annotated[str, typer.Option(help="One budget, or several: flops=0.25,flops=0.10.")] = "flops=0.10",
    batch_size: Annotated[int, typer.Option(help="Images per step; they are random.")] = 64,
    resample_every: Annotated[str, typer.Option(help="Steps that a sub-network is held; or several: 1,50.")] = "10",
    structure: Annotated[
        str, typer.Option(help="s at the start of a search, in the middle of one, or both.")
    ] = "start,middle",
    keep_probs: Annotated[
        Path | None, typer.Option(help="Take the middle from a run's folder or a checkpoint; noise if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.")] = "auto",
    precision: Annotated[str, typer.Option(help="Of products: float32, tf32, bfloat16.")] = "float32",
    coupling: Annotated[str, typer.Option(help="filter or stream.")] = "filter",
    align: Annotated[int | None, typer.Option(help="Room for units in multiples of this; chosen if not given.")] = None,
    channels_last: Annotated[bool, typer.Option(help="Ours in channels-last; plain networks in both.")] = True,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Plain networks by torch.compile, too; on a GPU if not given."),
    ] = None,
    image_size: Annotated[int, typer.Option(help="Side of the images.")] = 32,
    classes: Annotated[int, typer.Option(help="Classes.")] = 10,
    rounds: Annotated[int, typer.Option(help="Turns of each contender.")] = 20,
    seconds: Annotated[float, typer.Option(help="No new round of a row begins after so much time.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of weights, images and masks.")] = 0,
) -> None:
    """Time of a training step: ours, the dense network's at its best, and the narrow network's, which is the limit.

    All take turns in one process. Ours has everything in it: drawing, both forwards, the learning of s.
    """
    from slimstart.lab.bench import bench_records
    from slimstart.lab.bench.bench_settings import Settings
    from slimstart.lab.bench.benchmark import run

    settings = Settings(
        budgets=split(budget),
        resample_every=_numbers("resample_every", resample_every),
        structures=split(structure),
        keep_probs=None if keep_probs is None else str(keep_probs),
        model=model,
        batch_size=batch_size,
        image_size=image_size,
        num_classes=classes,
        coupling=coupling,
        precision=precision,
        align=align,
        channels_last=channels_last,
        compiled=compiled,
        rounds=rounds,
        seconds=seconds,
        seed=seed,
    )
    for row in run(settings, device, out):
        console.print(
            f"{row.budget} {row.structure} resample_every={row.resample_every}: {row.ours_ms:.3g} ms, "
            f"{row.speedup:.2f}x dense, {row.of_limit:.2f} of the limit ({row.num_turns} turns)",
            markup=False,
        )
    record = bench_records.read(out)
    _show(record.rows)
    try:
        from slimstart.lab.bench import bench_plot
    except ImportError as error:  # a machine that only trains may do without matplotlib
        console.print(f"no plot is drawn: {error}", markup=False)
        return
    bench_plot.write(record, out / "speedup.svg")
    console.print(f"record: {out / 'record.json'}, plot: {out / 'speedup.svg'}", markup=False)


def _show(rows: Sequence[Row]) -> None:
    from slimstart.lab.reports.tables import number

    titles = ["budget", "s", "resample every", "FLOPs, %", "executed, %", "dense, ms", "narrow, ms", "ours, ms"]
    cells = [
        [
            *(row.budget, row.structure, str(row.resample_every)),
            *(number(100 * ratio) for ratio in (row.flops_ratio, row.executed_flops_ratio)),
            f"{number(row.dense_ms)} ({row.dense_engine})",
            f"{number(row.narrow_ms)} ({row.narrow_engine})",
            f"{number(row.ours_ms)} ({row.our_engine})",
            *(f"{number(row.speedup, '×')}", number(row.of_limit)),
            number(None if row.peak_memory is None else row.peak_memory / 2**20),
        ]
        for row in rows
    ]
    console.print(f"{rows[0].model}, batches of {rows[0].batch_size}, {rows[0].precision}", markup=False)
    show_table([*titles, "against dense", "of the limit", "memory, MiB"], cells)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in split(text))
    except ValueError as error:
        raise ConfigError(f"`{name}` is {text!r}; it must be a number, or several with commas between them") from error
