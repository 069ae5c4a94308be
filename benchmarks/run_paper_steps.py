"""Step times of the paper's policy, compared with the dense network and a narrow one.

    python benchmarks/run_paper_steps.py --model vgg19 --budget flops=0.25,flops=0.1 --out results/bench-cpu

`slimstart bench` is shorter: it times a model of yours with either policy, and writes no record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimstart.lab.cli.display import console, show_table
from slimstart.lab.cli.options import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paper_steps.records import Row


def bench(
    out: Annotated[Path, typer.Option(help="Folder for record.json.")],
    model: Annotated[
        str, typer.Option(help="Network: one of ours, timm:NAME, or your own code as module:factory.")
    ] = "vgg19",
    budget: Annotated[str, typer.Option(help="One budget, or several as in flops=0.25,flops=0.10.")] = "flops=0.10",
    batch_size: Annotated[int, typer.Option(help="Images per step; random ones are used.")] = 64,
    resample_every: Annotated[
        str, typer.Option(help="Steps between two structure updates, or several as in 1,50.")
    ] = "10",
    device: Annotated[
        str, typer.Option(help="Device: cpu, cuda, cuda:1, ...; auto chooses a GPU if there is one.")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="Compute precision: float32, tf32 or bfloat16.")] = "float32",
    coupling: Annotated[
        str, typer.Option(help="Masks of layers that write into one stream: stream (shared) or filter (their own).")
    ] = "filter",
    align: Annotated[
        int | None, typer.Option(help="Pad the network to multiples of this number; chosen for the device by default.")
    ] = None,
    channels_last: Annotated[
        bool, typer.Option(help="Run slimstart in the channels-last format; the others run in both.")
    ] = True,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Measure the plain networks with torch.compile, too; by default on a GPU."
        ),
    ] = None,
    image_size: Annotated[int, typer.Option(help="Height and width of the images.")] = 32,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    rounds: Annotated[int, typer.Option(help="Measurements of each network.")] = 20,
    seconds: Annotated[float, typer.Option(help="Seconds after which no new round of measurements begins.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Random seed of the weights, the images and the masks.")] = 0,
) -> None:
    """Measure the time of a training step with the paper's policy, of the dense network, and of a narrow network.

    The narrow network has the widths of a draw and is the limit. All take turns in one process, each in its fastest
    form. The time of slimstart includes structure updates and both forwards.
    """
    from paper_steps import records
    from paper_steps.benchmark import Settings, run

    settings = Settings(
        budgets=split(budget),
        resample_every=tuple(map(int, split(resample_every))),
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
            f"{row.budget} resample_every={row.resample_every}: {row.ours_ms:.3g} ms, "
            f"{row.speedup:.2f}x dense, {row.of_limit:.2f}x narrow ({row.num_turns} turns)",
            markup=False,
        )
    _show(records.read(out).rows)
    console.print(f"record: {out / 'record.json'}", markup=False)


def _show(rows: Sequence[Row]) -> None:
    from slimstart.lab.reports.tables import number

    titles = ["budget", "resample every", "FLOPs, %", "executed, %", "dense, ms", "narrow, ms", "slimstart, ms"]
    cells = [
        [
            *(row.budget, str(row.resample_every)),
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
    show_table([*titles, "against dense", "against narrow", "memory, MiB"], cells)


if __name__ == "__main__":
    typer.run(bench)
