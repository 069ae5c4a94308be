"""Shared code of benchmarks that compare variants of one training: command line, runs, rows, record, tables.

A variant is a training of the program with other settings, or with parts of slimstart replaced while it runs.
Accuracy is that of a validation split by default, because settings are chosen by it. Finished runs in `--runs` are
not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import benchmark_record

from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.reports.tables import MISSING, markdown_table
from slimstart.lab.run.comparison import Trial, carry_out
from slimstart.lab.run.environment import Place, find_device

TEXTS = ("variant", "what is different")  # the columns that are no numbers


@dataclasses.dataclass(frozen=True)
class Change:
    """The difference between a variant and the default.

    Attributes:
        text: description for the table.
        recipe: other settings of the training.
        pieces: replacements in slimstart, by module and name.
    """

    text: str
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pieces: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the pieces are replaced."""
        with contextlib.ExitStack() as stack:
            for piece, value in self.pieces.items():
                stack.enter_context(patch(piece, value))
            yield


def run(name: str, change: Change, base: Recipe, folder: Path, place: Place) -> dict[str, Any]:
    """Train a variant, and return its row."""
    recipe = dataclasses.replace(base, **change.recipe)
    label = re.sub(r"[^\w.]+", "-", f"{name}-{recipe.budget}-seed{recipe.seed}")
    with change.in_place():
        outcome = carry_out(Trial(label, recipe), folder, place)
    row = {"variant": name, "budget": recipe.budget, "seed": recipe.seed}
    record = outcome.record
    if record is None:
        return {**row, "failure": outcome.failure}
    return {
        **row,
        "accuracy": record.accuracy,
        "flops_ratio": record.flops_ratio,
        "train_cost": 1 / record.executed_saving,
        "train_seconds": record.train_seconds,
        "building_seconds": record.building_seconds,
        "widths": [layer.width for layer in record.layers],
    }


def cells(
    rows: list[dict[str, Any]], texts: dict[str, str], uniform: list[dict[str, Any]] | None = None
) -> Iterator[list[str]]:
    """Titles, and a line for each variant: means and spreads over seeds, by budget.

    Args:
        uniform: rows to compare with; by default those of the variant uniform.
    """
    uniform = [row for row in rows if row["variant"] == "uniform"] if uniform is None else uniform
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    yield [*TEXTS, *budgets, "seeds"]
    found: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if "accuracy" in row:
            own = found[row["variant"], row["budget"]]
            if row["seed"] in own:
                raise ValueError(f"{row['variant']} at {row['budget']} has two rows of seed {row['seed']}")
            own[row["seed"]] = row["accuracy"]

    def cell(variant: str, budget: str) -> str:
        values = list(found[variant, budget].values())
        compared = [row["accuracy"] for row in uniform if row["budget"] == budget and "accuracy" in row]
        if not values:
            return MISSING
        mean = statistics.mean(values)
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        better = f" ({mean - statistics.mean(compared):+.2f})" if compared and variant != "uniform" else ""
        return f"{mean:.2f}{spread}{better.replace('-', '−')}"

    first = ("uniform", "equal_worth")
    for variant in sorted(dict.fromkeys(row["variant"] for row in rows), key=lambda name: name not in first):
        seeds = dict.fromkeys(str(len(found[variant, budget])) for budget in budgets if found[variant, budget])
        yield [variant, texts[variant], *(cell(variant, budget) for budget in budgets), ", ".join(seeds) or "0"]


def main(
    benchmark: str, doc: str | None, change_of: Callable[[str], Change], variants: str, about: str, model: str
) -> None:
    """Run the variants of the command line, and write the record after each row.

    Args:
        benchmark: name in the record.
        doc: docstring of the script, for --help.
        change_of: returns the change of a variant, by its name.
        variants: default of --variants.
        about: help text of --variants.
        model: default of --model.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=variants, help=about)
    parser.add_argument("--model", default=model)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--budget", default="flops=0.1", help="one or several, with commas")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--validation", type=int, default=5000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs") / benchmark)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    place = Place(device=args.device, data_dir=args.data_dir)
    settings = {name: getattr(args, name) for name in ("model", "data", "epochs", "validation")}
    changes = {name: change_of(name) for name in args.variants.split(",")}
    texts = {name: change.text for name, change in changes.items()}
    rows = []
    for seed in map(int, args.seeds.split(",")):
        for budget in args.budget.split(","):
            base = Recipe(
                **settings,
                budget=budget,
                batch_size=args.batch_size,
                precision=args.precision,
                eval_every=args.epochs,
                seed=seed,
            )
            for name, change in changes.items():
                rows.append(run(name, change, base, args.runs / args.model, place))
                print(rows[-1], flush=True)
                benchmark_record.write(
                    args.out, benchmark, rows, str(find_device(args.device)), texts=texts, **settings
                )
    print("\n".join(markdown_table(list(cells(rows, texts)), ())))
