"""Variants of equal worth: each one behaves differently, and all are within the budget."""

import dataclasses
import functools

import ablation
import pytest
import torch
from torch import nn

from slimstart import Flops, trace
from slimstart.policies import get_policy

NETWORK = nn.Sequential(
    *(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 256, 3, stride=2), nn.ReLU(), nn.Conv2d(256, 128, 3), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
)
GRAPH = trace(NETWORK, torch.zeros(1, 3, 16, 16), "stream")
BUDGET = Flops(0.15)
FIRST = {  # times the budget
    name: float(variant.settings["first"]) for name, variant in ablation.VARIANTS.items() if "first" in variant.settings
}
SEARCHES = [
    *("frozen", "cost_blind", "any_unit", "clipped_behind", "fine_search", "steady", "redundant", "centred", "half"),
    *("fourfold", *FIRST, "pull=0", "pull=1", "pull=2", "rate=0.25", "share=0.1", "fine_search+pull=1"),
]


@functools.cache
def search(name: str) -> list[list[int]]:
    """The widths of all structures, from gradients with a mean that units of late groups share more."""
    generator = torch.Generator().manual_seed(0)
    scale = (0.5 + torch.rand(GRAPH.num_units, generator=generator)) * torch.logspace(0.5, -0.5, GRAPH.num_units)
    bound, same = BUDGET.bind(GRAPH.costs), torch.linspace(0, 3, GRAPH.num_units)
    change = ablation.change_of(name)
    with change.in_place():
        settings = get_policy("equal_worth")
        policy = dataclasses.replace(
            settings, **{name: change.recipe[name] for name in ("align",) if name in change.recipe}
        ).start(GRAPH.costs, BUDGET, 1600)
        found = []
        while True:
            mask = policy.draw()[0]
            first = FIRST.get(name, 1.0)
            most = (first + (1 - first) * len(found) / 16) * bound.limit
            assert 0.97 * most < bound.cost(mask) <= most
            found.append([int(mask[group.units.start : group.units.stop].sum()) for group in GRAPH.groups])
            if policy.is_done:
                return found
            for _ in range(policy.window):
                shared, own = (torch.randn(n, generator=generator) for n in (1, GRAPH.num_units))
                policy.observe_(scale * (0.5 + same * shared + own))


@pytest.mark.parametrize("name", SEARCHES)
def test_variants_search_differently(name):
    assert search(name) != search("equal_worth")


def test_a_fine_search_is_coarse_in_the_end():
    fine, single, coarse = (search(name) for name in ("fine_search", "align=1", "equal_worth"))
    assert fine[:-1] == single[:-1]
    assert fine[-1] != single[-1]
    assert fine[0] != coarse[0]


def test_in_start_another_budget_at_first_ends_where_the_start_is() -> None:
    assert search("frozen_first=2")[-1] == search("frozen")[-1]


def test_two_policies_in_one_run_are_refused():
    with pytest.raises(AssertionError, match="a run has one"):
        ablation.variant_of("frozen+steady")
