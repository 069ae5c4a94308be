"""docs/results/zoo.md: what shrinks in models of torchvision, timm and transformers, from the record of `zoo.py`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pages.experiment_pages import GENERATED
from pages.stored import Results
from slimstart.lab.reports.tables import MISSING, escaped, markdown_table

PLACE = "zoo.json"
PACKAGES = ("torchvision", "timm", "transformers")
TEXTS = ("model", "of", "heads", "trains", "Torch-Pruning")
BACK = "[What works](../what-works.md). [All results](../results.md)."
Row = Mapping[str, Any]
INTRODUCTION = (
    "Small forms of {models} models with random weights and small inputs ({versions}), traced as",
    '`SparseTraining` does for new models (`norms="shrink"`). Coverage is the part of the FLOPs that can shrink, the',
    "smallest budget that with one unit in every group. Heads can go in a layer if the narrowest network has fewer of",
    "them there. A training is {steps} steps of AdamW at `Flops({budget})`; it counts if all losses are finite and the",
    "network is within the budget. The structure changed in {changed} of them; in the others, widths are so small that",
    "they remained as they were rounded first. `verify` passes for {proven} models, with errors up to {error}",
    "({single} where the network runs in float32 only).",
    "",
    "Torch-Pruning cuts by magnitude and one share for all layers, as in its examples: the classifier stays, and it is",
    "told the number of heads. Then a forward and a backward must work, with fewer FLOPs. It was ended after 8 to 15",
    "seconds of processor time. With care for one model more is possible: its examples also rewrite the forward of",
    "timm's attention, which was not done here. [Record](../../results/{place}).",
)


def summary(results: Results) -> str:
    """One line for each package, and one for all."""
    rows: list[Row] = results.benchmarks[PLACE]["rows"]
    lines = [
        ["models of", "number", "train at half the FLOPs", "median coverage", "heads can go", "Torch-Pruning trains"]
    ]
    for name, own in (*((p, [row for row in rows if row["package"] == p]) for p in PACKAGES), ("all", rows)):
        attention = [row for row in own if row.get("attention_layers")]
        lines.append([
            name, str(len(own)), str(sum(map(_trains, own))),
            _percent(statistics.median(row.get("coverage", 0.0) for row in own)),
            f"{sum(map(_all_heads, attention))} of {len(attention)}",
            str(sum(bool(row.get("torch_pruning_trains")) for row in own)),
        ])  # fmt: skip
    return "\n".join(["", *markdown_table(lines, ("models of",)), ""])


def page(results: Results) -> str:
    """All models, then the reasons for what cannot shrink, and the messages of what failed."""
    record = results.benchmarks[PLACE]
    rows: Sequence[Row] = record["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    proven = [row["verify_error"] for row in rows if isinstance(row.get("verify_error"), float)]
    double = [error for error in proven if error < 1e-8]
    facts = {
        "models": len(rows), "versions": escaped(versions), "steps": record["steps"], "budget": record["budget"],
        "proven": len(proven), "error": f"{max(double):.0e}", "single": f"{max(proven):.0e}", "place": PLACE,
        "changed": sum(row.get("structures", 1) > 1 for row in rows),
    }  # fmt: skip
    lines = [
        GENERATED,
        "",
        "# Models of torchvision, timm and transformers",
        "",
        *(line.format(**facts) for line in INTRODUCTION),
        summary(results),
        *markdown_table([list(_TITLES), *map(_cells, rows)], TEXTS),
        "",
        "## What cannot shrink, and why",
        "",
        "Models of which less than 97 % can shrink, or that keep heads, with the most frequent reasons. The output of",
        "a network is always kept.",
        "",
        *(
            f"- {escaped(row['model'])}: {_reasons(row)}."
            for row in rows
            if row.get("coverage", 0) < 0.97 or _keeps(row)
        ),
    ]
    if failed := [row for row in rows if not _trains(row) or not isinstance(row.get("verify_error"), float)]:
        lines += ["", "## What fails", ""]
        lines += [f"- {escaped(row['model'])}: {escaped(_failure(row))}" for row in failed]
    return "\n".join([*lines, "", BACK]) + "\n"


_TITLES = (
    "model", "of", "coverage", "smallest budget", "heads", "trains", "FLOPs left", "verify's error", "Torch-Pruning",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    layers = row.get("attention_layers")
    error, left = row.get("verify_error"), row.get("flops_left")
    return [
        row["model"],
        row["package"],
        _percent(row.get("coverage")),
        _percent(row.get("least_budget")),
        f"{row['with_fewer_heads']} of {layers} layers" if layers else MISSING,
        "yes" if _trains(row) else "no",
        _percent(left),
        f"{error:.0e}" if isinstance(error, float) else "fails",
        _other(row),
    ]


def _trains(row: Row) -> bool:
    return bool(row.get("trained")) and row["flops_left"] <= 0.5


def _all_heads(row: Row) -> bool:
    return bool(row["with_fewer_heads"] == row["attention_layers"])


def _keeps(row: Row) -> bool:
    return bool(row.get("attention_layers")) and not _all_heads(row)


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def _other(row: Row) -> str:
    """How Torch-Pruning fared."""
    if row.get("torch_pruning_trains"):
        return f"trains, {100 * row['torch_pruning_flops_left']:.0f} % left"
    if "exit code" in row.get("torch_pruning_error", ""):
        return "ended"
    if "torch_pruning_error" in row:
        return "fails: " + row["torch_pruning_error"].partition(":")[0]
    return "cuts nothing" if "torch_pruning_flops_left" in row else MISSING


def _reasons(row: Row) -> str:
    found = [re.sub(r" \(write -1.*\)$", "", reason) for reason in row.get("reasons", {})]
    found = [reason for reason in found if reason != "it is an output of the network"] or found
    return "; ".join(escaped(reason) for reason in found[:2])


def _failure(row: Row) -> str:
    """The message of what failed, as the user sees it."""
    errors = [str(row[key]) for key in ("tried_error", "trace_error", "train_error", "verify_error") if key in row]
    return next((error for error in errors if not error[0].isdigit()), "")
