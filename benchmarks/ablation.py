"""Ablation of equal worth: the training program with one part of the policy replaced.

    python benchmarks/ablation.py --model vgg19 --budget flops=0.1 --data-dir DIR --device cuda \
        --precision bfloat16 --seeds 0,1,2 --out results/ablation-vgg19.json

Settings are chosen with this script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import variants
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.policies import POLICIES, Budget, EqualWorth, EqualWorthSearch
from slimstart.policies.equal_worth import MOST, participation


class Frozen(EqualWorthSearch):
    """Equal shares to the end: what the search starts from."""

    def _learn(self, importance: Tensor) -> None:
        pass


class CostBlind(EqualWorthSearch):
    """Units that are worth the same, whatever they cost."""

    def _mean_cost(self) -> Tensor:
        return torch.full_like(super()._mean_cost(), self.budget.dense)


class AnyUnit(EqualWorthSearch):
    """Widths as always; which units leave is left to chance."""

    def _wide(self, preference: Tensor) -> Tensor:
        chance = torch.rand(len(preference), generator=torch.Generator().manual_seed(self.num_rounds))
        return super()._wide(torch.where(preference >= 0, chance.double(), preference))


class ClippedBehind(EqualWorthSearch):
    """A round is clipped when neighbours have been drawn together, not before."""

    def _moved(self, drive: Tensor, rate: float, known: Tensor) -> Tensor:
        moved = self._pulled(self._log_widths + rate * drive, rate, known)
        return self._log_widths + (moved - self._log_widths).clamp(-MOST, MOST)


class FineSearch(EqualWorthSearch):
    """Widths are multiples in the last round only."""

    def _wide(self, preference: Tensor) -> Tensor:
        align = self.align
        self.align = align if self.num_rounds >= self.rounds - 1 else 1
        found = super()._wide(preference)
        self.align = align
        return found


class Gradual(EqualWorthSearch):
    """Another budget at first, and the one that is asked for from the last round on."""

    settings: Ablated

    def _wide(self, preference: Tensor) -> Tensor:
        with self._as_far_as_now():
            self._log_widths = self._fit(self._log_widths)
            return super()._wide(preference)

    def _learn(self, importance: Tensor) -> None:
        with self._as_far_as_now():
            super()._learn(importance)

    @contextlib.contextmanager
    def _as_far_as_now(self) -> Iterator[None]:
        first, in_the_end, way = self.settings.first, self.budget.limit, (self.num_rounds + self._begun) / self.rounds
        self.budget.limit = in_the_end * (first + (1 - first) * way)
        try:
            yield
        finally:
            self.budget.limit = in_the_end


class GradualFrozen(Gradual, Frozen):
    """The same in equal shares."""


class Steady(EqualWorthSearch):
    """The rate does not fall."""

    def _learn(self, importance: Tensor) -> None:
        done, self.num_rounds = self.num_rounds, 0
        super()._learn(importance)
        self.num_rounds = done


@dataclasses.dataclass(frozen=True)
class Ablated(EqualWorth):
    """Settings of a search with one piece replaced.

    Attributes:
        search: the learner.
        first: of `Gradual`, the budget at first, in multiples of the final one.
    """

    search: type[EqualWorthSearch] = EqualWorthSearch
    first: float = 1.0

    def start(self, costs: CostTable, budget: Budget, total_steps: int | None = None) -> EqualWorthSearch:
        return self.search(self, costs, budget, total_steps)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a row of the table is about; several are joined by a plus.

    Attributes:
        text: for the table.
        search: in the place of `EqualWorthSearch`.
        settings: of the policy, other than it is given.
        recipe: other settings of the training.
        constants: other values of them, by module and name.
    """

    text: str
    search: type[EqualWorthSearch] = EqualWorthSearch
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Variant) -> Variant:
        assert EqualWorthSearch in (self.search, other.search), "two of these are learners; a run has one"
        return Variant(
            f"{self.text}; {other.text}",
            self.search if other.search is EqualWorthSearch else other.search,
            {**self.settings, **other.settings},
            {**self.recipe, **other.recipe},
            {**self.constants, **other.constants},
        )


def _all_of_them(samples: Tensor) -> Tensor:
    return torch.tensor(float(samples.shape[1]))


def _half_of_it(samples: Tensor) -> Tensor:
    return (samples.shape[1] * participation(samples)).sqrt()


def _centred(samples: Tensor) -> Tensor:
    return participation(samples - samples.mean(0))


def _four_to_each(samples: Tensor) -> Tensor:
    return (4 * participation(samples)).clamp(max=samples.shape[1])


UNIFORM = {"method": "uniform"}
PARTICIPATION = "slimstart.policies.equal_worth.participation"
SHARE, SMALL = "slimstart.policies.equal_worth.SEARCHED", "slimstart.policies.widths.SMALL"
VARIANTS = {
    "uniform": Variant("uniform network: the same fraction of every group", recipe=UNIFORM),
    "front_heavy": Variant(
        "fractions set by hand that fall from the first layer to the last",
        recipe={**UNIFORM, "protocol": "front_heavy"},
    ),
    "equal_worth": Variant("the default"),
    "frozen": Variant("the first structure until the end", Frozen),
    "cost_blind": Variant("importance is not divided by the cost of a unit", CostBlind),
    "any_unit": Variant("random units are removed, not the least important ones", AnyUnit),
    "clipped_behind": Variant("changes of width are limited after the pull, not before", ClippedBehind),
    "fine_search": Variant("widths are multiples of 8 in the last round only", FineSearch),
    **{f"first={f:g}": Variant(f"{f:g} times the budget at first", Gradual, {"first": f}) for f in (0.4, 1.5, 1.7, 2)},
    "frozen_first=2": Variant("twice the budget at first, uniform widths", GradualFrozen, {"first": 2}),
    "epochs=47": Variant("47 epochs", recipe={"epochs": 47}),
    "steady": Variant("the rate does not fall", Steady),
    "pull=0": Variant("no pull", settings={"pull": 0}),
    **{f"pull={p:g}": Variant(f"a pull of {p:g}", settings={"pull": p}) for p in (0.5, 1, 2, 4, 16)},
    "redundant": Variant("redundant units count in full", constants={PARTICIPATION: _all_of_them}),
    "centred": Variant("redundancy of gradients less their mean", constants={PARTICIPATION: _centred}),
    "half": Variant("redundancy counts half", constants={PARTICIPATION: _half_of_it}),
    "fourfold": Variant("up to four redundant units count in full", constants={PARTICIPATION: _four_to_each}),
    "rate=0.25": Variant("a first rate of 0.25", settings={"rate": 0.25}),
    **{
        f"share={s:g}": Variant(f"a search of {100 * s:g} % of the training", constants={SHARE: s})
        for s in (0.036, 0.1, 0.3, 0.4, 0.5, 0.6)
    },
    **{f"align={a}": Variant(f"widths in steps of {a}", recipe={"align": a}) for a in (1, 4)},
    "small=4": Variant("multiples of 8 also in groups of 32", constants={SMALL: 4}),
}


def variant_of(name: str) -> Variant:
    """One of `VARIANTS`, or a combination, with plus signs."""
    return functools.reduce(operator.add, (VARIANTS[part] for part in name.split("+")))


def change_of(name: str) -> variants.Change:
    """The change of a variant, by its name."""
    variant = variant_of(name)
    policy = Ablated(search=variant.search, **variant.settings)
    pieces = {"slimstart.policies.named.POLICIES": {**POLICIES, "equal_worth": policy}, **variant.constants}
    return variants.Change(variant.text, {"policy": "equal_worth", **variant.recipe}, pieces)


if __name__ == "__main__":
    about = f"Variants, separated by commas; combinations with +. Known are {', '.join(VARIANTS)}."
    variants.main("ablation", __doc__, change_of, "uniform,equal_worth", about, model="vgg19")
