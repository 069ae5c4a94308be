"""The table of structures: networks of equal FLOPs that differ in their number of layers (`structures/`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pages.naming import data_title
from pages.stored import Results
from slimstart.lab.reports.tables import markdown_table

FAMILIES = {"vgg": "VGG-19", "residual": "ResNet-32", "inverted": "MobileNetV2", "separable": "MobileNetV1"}

HELD_OUT = {  # of `held_out.py`: the network, and its data where these have another name
    "vgg": "VGG of 3 stages, Fashion-MNIST",
    "vgg_cifar10": "VGG of 3 stages, CIFAR-10",
    "wide_resnet": "WRN-28-1, CIFAR-10",
    "bottlenecks": "ResNet-50 at a quarter of the width, Tiny ImageNet",
    "mobilenet_v1": "MobileNetV1, Fashion-MNIST",
    "mobilenet_v2": "MobileNetV2 at half of the width, CIFAR-10",
    "mobilenet_v2, longer": "the same, CIFAR-100, 4,500 steps",
    "convnext": "ConvNeXt of 12 blocks, CIFAR-10",
    "vit": "ViT of 8 blocks, CIFAR-10",
    "gpt": "GPT of 8 blocks, bytes",
    "mlp": "MLP of 9 layers, Fashion-MNIST, 3,000 steps",
    "mlp_bn": "the same with batch norm",
}
GPT = "gpt-cpu/"
RULES = {  # of `structures/regret.py`, in words
    "default": "the rule for depth, widths learned",
    "shallow": "a few shallower networks, trained to the end; the best on held-out images",
    "loss after 1": "all networks for 1 epoch; the one of least training loss",
    "loss after 2": "the same after 2 epochs",
    "loss after 4": "the same after 4 epochs",
    "halving from 0.25": "a few shallower networks, halved by training loss after 1/4 epoch, 1/2, ...",
    "halving from 1": "the same after 1 epoch, 2, ...",
}


@dataclass(frozen=True)
class Structure:
    """One structure in one setting: means over its seeds.

    Attributes:
        name: layers of each stage, then the tilt of the widths.
        learned: whether widths were learned.
    """

    name: str
    learned: bool
    layers: int
    validation: float
    test: float

    @property
    def depths(self) -> str:
        return ",".join(self.name.partition("-")[0])


def settings(results: Results) -> dict[str, list[Structure]]:
    """The structures of each family, data set and budget, by its title."""
    found: dict[str, dict[tuple[str, Any], list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in results.structures:
        title = f"{FAMILIES[record['family']]}, {data_title(record['data'])}, {100 * record['budget']:g} %"
        found[title][record["structure"], record["tilt"]].append(record)
    return {title: [_structure(runs) for runs in table.values()] for title, table in sorted(found.items())}


def _structure(runs: list[Mapping[str, Any]]) -> Structure:
    return Structure(
        runs[0]["structure"],
        runs[0]["tilt"] is not None,
        runs[0]["layers"],
        fmean(run["validation_accuracy"] for run in runs),
        fmean(run["test_accuracy"] for run in runs),
    )


def table(results: Results) -> str:
    """For each setting the deepest structure, and the best on held-out images, without and with a search for widths."""
    names, score = (
        ("family, data, FLOPs", "deepest tried", "best, widths set by hand", "best, widths learned"),
        "test, %",
    )
    lines = [[names[0], "networks", names[1], score, names[2], score, names[3], score]]
    for title, structures in settings(results).items():
        deepest = max(structures, key=lambda one: (one.layers, not one.learned))
        cells = [title, str(len(structures)), deepest.depths, f"{deepest.test:.1f}"]
        for learned in (False, True):
            some = [one for one in structures if one.learned is learned]
            best = max(some, key=lambda one: one.validation, default=None)
            tilt = " (late)" if best and best.name.endswith("late") else ""
            cells += ["–", "–"] if best is None else [best.depths + tilt, f"{best.test:.1f}"]
        lines.append(cells)
    return "\n".join(markdown_table(lines, names))


def held_out(results: Results) -> str:
    """Test accuracy of each contender; of the shallower networks the one that is best on held-out images."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for run in results.held_out:
        found[run["network"]][run["contender"]].append(run)
    lines = [["network, data", "FLOPs, %", "uniform", "best shallower", "slimstart", "widths not learned", "seeds"]]
    for name, title in HELD_OUT.items():
        runs = found[name]
        siblings = [own for contender, own in runs.items() if contender.startswith("shallow")]
        best = max(siblings, key=lambda own: fmean(run["validation_accuracy"] for run in own))
        contenders = [runs["uniform"], best, runs["slimstart"], runs["slimstart, widths not learned"]]
        seeds = sorted({len(own) for own in contenders if own})
        cells = [title, f"{100 * best[0]['budget']:g}", *map(_accuracy_and_layers, contenders)]
        lines.append([*cells, " to ".join(map(str, (seeds[0], seeds[-1]) if len(seeds) > 1 else seeds))])
    return "\n".join(markdown_table(lines, lines[0][:1]))


def _accuracy_and_layers(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return "–"
    return f"{fmean(run['test_accuracy'] for run in runs):.1f} ({runs[0]['num_left']})"


def regret(results: Results) -> str:
    """What rules for choosing a structure lose to the best one of each setting."""
    rows = {row["rule"]: row for row in results.benchmarks["structures_regret.json"]["rows"]}
    lines = [["choice", "settings", "mean loss", "largest loss", "trained in addition"]]
    for rule, text in RULES.items():
        row = rows[rule]
        cells = [str(len(row["choices"])), f"{row['mean']:.1f}", f"{row['largest']:.1f}", f"{row['extra']:.0%}"]
        lines.append([text, *cells])
    return "\n".join(markdown_table(lines, lines[0][:1]))


def transformers(results: Results) -> str:
    """Small GPTs of equal FLOPs with different numbers of blocks, trained on a CPU (`train_transformers.py`)."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for name, record in results.benchmarks.items():
        if name.startswith(GPT):
            (row,) = record["rows"]
            found[row["method"], len(row["heads"])].append(row)
    lines = [["method", "blocks", "width", "validation loss, nats per byte", "seeds"]]
    for (method, blocks), rows in sorted(found.items(), key=lambda item: (item[0][0] != "uniform", -item[0][1])):
        losses = ", ".join(f"{row['loss']:.3f}" for row in sorted(rows, key=lambda row: row["seed"]))
        lines.append([method, str(blocks), str(rows[0]["dim"]), losses, str(len(rows))])
    return "\n".join(markdown_table(lines, lines[0][:1]))
