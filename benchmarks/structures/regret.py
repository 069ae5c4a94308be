"""How much accuracy each rule for choosing a structure loses to the best structure of the table.

    PYTHONPATH=src python benchmarks/structures/regret.py RECORDS --out results/structures_regret.json

A setting is a family, a data set, a budget and a length of training. Its best structure is that of the highest
accuracy on validation images. The regret of a rule is the difference on test images, in points, between that structure
and the one that the rule chooses; it can be negative. No rule reads test images.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import families

sys.path.append(str(Path(__file__).parents[1]))
import benchmark_record

from slimstart.policies import EqualWorth

EXPONENTS = tuple(step / 10 for step in range(11))
EARLY = (1, 2, 4, 8)  # epochs
FIRST_CUTS = (0.25, 1)  # of successive halving, in epochs


class Setting(NamedTuple):
    family: str
    data: str
    budget: float
    epochs: int

    def __str__(self) -> str:
        return f"{self.family}, {self.data}, {100 * self.budget:g} %, {self.epochs} epochs"


@dataclass(frozen=True)
class Entry:
    """Means of one structure over its seeds.

    Attributes:
        losses: training loss of every part of an epoch.
        per_epoch: number of parts.
        steps: of a training.
    """

    losses: Sequence[float]
    per_epoch: int
    validation: float
    test: float
    steps: int = 0

    def loss(self, epochs: float) -> float:
        """The mean training loss of the last epoch, or part of one, before a moment."""
        end = round(epochs * self.per_epoch)
        return fmean(self.losses[max(0, end - self.per_epoch) : end])


class Choice(NamedTuple):
    """What a rule chooses, and what it trains in addition, in trainings of the full length."""

    structure: str
    extra: float = 0.0


Table = Mapping[str, Entry]  # of a setting, by structure
Rule = Callable[[Setting, Table], Choice | None]  # None: not enough records, or not enough epochs


def tables(records: Iterable[Mapping[str, Any]]) -> dict[Setting, Table]:
    """Records by setting and structure; one whose widths are learned is another structure than one of fixed widths."""
    found: dict[Setting, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        setting = Setting(record["family"], record["data"], record["budget"], record["epochs"])
        tilt = record.get("tilt")
        name = record["structure"] + ("" if tilt is None else f"_learned{tilt:g}")
        found[setting][name].append(record)
    return {
        setting: {structure: _entry(found[setting][structure]) for structure in sorted(found[setting])}
        for setting in sorted(found)
    }


def _entry(seeds: list[Mapping[str, Any]]) -> Entry:
    return Entry(
        losses=[fmean(part) for part in zip(*(seed["losses"] for seed in seeds), strict=True)],
        per_epoch=seeds[0]["losses_per_epoch"],
        validation=fmean(seed["validation_accuracy"] for seed in seeds),
        test=fmean(seed["test_accuracy"] for seed in seeds),
        # Nine times as many images are trained on as are held out.
        steps=seeds[0]["epochs"] * math.ceil(9 * seeds[0]["held_out_images"] / seeds[0]["batch_size"]),
    )


# --- rules -----------------------------------------------------------------------------------------------------------


def best(table: Table) -> str:
    """The structure of the highest accuracy on validation images."""
    return max(table, key=lambda name: table[name].validation)


def deepest(setting: Setting, table: Table) -> Choice | None:
    """The reference network with all widths multiplied by one number."""
    return _known(families.FAMILIES[setting.family].deepest, table)


def fixed(setting: Setting, table: Table) -> Choice | None:
    """One shallower sibling, whatever the data and the budget."""
    return _known(families.FAMILIES[setting.family].fixed, table)


def shallow(setting: Setting, table: Table) -> Choice | None:
    """The best of a few on validation images, all of them trained to the end."""
    few = _few(setting, table)
    if not few:
        return None
    return Choice(max(few, key=lambda name: table[name].validation), len(few) - 1)


def early(epochs: int) -> Rule:
    """The least training loss of all structures after some epochs."""

    def rule(setting: Setting, table: Table) -> Choice | None:
        if epochs >= setting.epochs:
            return None
        chosen = min(table, key=lambda name: table[name].loss(epochs))
        return Choice(chosen, (len(table) - 1) * epochs / setting.epochs)

    return rule


def halving(first: float) -> Rule:
    """Successive halving of a few by training loss, after `first` epochs, twice as many, and so on."""

    def rule(setting: Setting, table: Table) -> Choice | None:
        left, epochs, spent = _few(setting, table), first, 0.0
        while len(left) > 1:
            if epochs >= setting.epochs or epochs * table[left[0]].per_epoch < 1:
                return None
            left = sorted(left, key=lambda name: table[name].loss(epochs))
            kept = (len(left) + 1) // 2
            spent += (len(left) - kept) * epochs  # the epochs of those that go; the others continue
            left, epochs = left[:kept], 2 * epochs
        return Choice(left[0], spent / setting.epochs) if left else None

    return rule


def default(setting: Setting, table: Table) -> Choice | None:
    """What the library does without any settings. Its constants are fitted to these settings."""
    policy, steps = EqualWorth(), next(iter(table.values())).steps
    depths = families.depths_by_rule(setting.family, setting.budget, policy.depth, steps)
    return _known(f"{''.join(map(str, depths))}-own_learned{policy.tilt:g}", table)


def compound(everything: Mapping[Setting, Table]) -> Rule:
    """The rule of `slimstart.policies.depth`; its exponent is fitted to settings of other data and other families."""

    def rule(setting: Setting, table: Table) -> Choice | None:
        exponent = fitted_exponent(everything, setting)
        return None if exponent is None else _known(by_exponent(setting, exponent), table)

    return rule


def fitted_exponent(everything: Mapping[Setting, Table], left_out: Setting | None = None) -> float | None:
    """The exponent of the least mean regret on validation images; of equals, the smallest."""
    others = [
        (setting, table)
        for setting, table in everything.items()
        if (left_out is None or (setting.data != left_out.data and setting.family != left_out.family))
        and all(by_exponent(setting, exponent) in table for exponent in EXPONENTS)
    ]

    def mean_regret(exponent: float) -> float:
        return fmean(table[best(table)].validation - table[by_exponent(s, exponent)].validation for s, table in others)

    return min(EXPONENTS, key=mean_regret) if others else None


def by_exponent(setting: Setting, exponent: float) -> str:
    return _by_exponent(setting.family, setting.budget, exponent)


@cache
def _by_exponent(family: str, budget: float, exponent: float) -> str:
    return families.nearest(family, families.depths_by_rule(family, budget, exponent))


def _known(name: str, table: Table) -> Choice | None:
    return Choice(name) if name in table else None


def _few(setting: Setting, table: Table) -> list[str]:
    return [name for name in families.FAMILIES[setting.family].candidates if name in table]


# --- regrets ---------------------------------------------------------------------------------------------------------


def rules(everything: Mapping[Setting, Table]) -> dict[str, Rule]:
    """All rules, by name."""
    return {
        "deepest": deepest,
        "fixed": fixed,
        "shallow": shallow,
        "default": default,
        "compound": compound(everything),
        **{f"loss after {epochs}": early(epochs) for epochs in EARLY},
        **{f"halving from {first:g}": halving(first) for first in FIRST_CUTS},
    }


def regrets(everything: Mapping[Setting, Table]) -> list[dict[str, Any]]:
    """A row for each rule: its mean and largest regret, mean cost, and its choice and regret in every setting."""
    rows = []
    for name, rule in rules(everything).items():
        found = {setting: rule(setting, table) for setting, table in everything.items()}
        choices = {
            str(setting): (choice.structure, table[best(table)].test - table[choice.structure].test)
            for setting, table in everything.items()
            if (choice := found[setting])
        }
        values, extras = [regret for _, regret in choices.values()], [c.extra for c in found.values() if c]
        means = {"mean": fmean(values), "largest": max(values), "extra": fmean(extras)} if choices else {}
        rows.append({"rule": name, **means, "choices": choices})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of run.py, or one file with a record on each line")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    args = parser.parse_args(arguments)
    files = sorted(args.records.glob("*.json")) if args.records.is_dir() else [args.records]
    everything = tables(json.loads(line) for file in files for line in file.read_text().splitlines())
    rows = regrets(everything)
    for row in rows:
        print(json.dumps(row))
    print(f"Exponent of the compound rule that fits all settings best: {fitted_exponent(everything)}.")
    if args.out:
        benchmark_record.write(args.out, "regret", rows, num_settings=len(everything))


if __name__ == "__main__":
    main()
