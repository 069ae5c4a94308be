"""Profiles of widths written by hand: within the budget, with the stated factors."""

from functools import partial

import profiles
import pytest
import torch

from slimstart import Flops
from tests.traced import traced

GRAPH = partial(traced, "resnet20", 32, "filter", width=2)
BUDGET = Flops(0.1)


def widths(mask: torch.Tensor) -> dict[str, int]:
    return {group.name: int(mask[group.units.start : group.units.stop].sum()) for group in GRAPH().groups}


def test_all_of_them_fill_the_budget():
    bound = BUDGET.bind(GRAPH().costs)
    for name, profile in profiles.PROFILES.items():
        mask = profiles.mask_of(profile, GRAPH(), BUDGET)
        assert 0.98 * bound.limit < bound.cost(mask) <= bound.limit, name


def test_factors_are_those_of_widths():
    found = {name: widths(profiles.mask_of(profile, GRAPH(), BUDGET)) for name, profile in profiles.PROFILES.items()}
    uniform = found["uniform"]
    for name, size in uniform.items():
        whole = next(len(group.units) for group in GRAPH().groups if group.name == name)
        assert size / whole == pytest.approx(uniform["stem.0"] / 32, abs=0.05)
    assert found["front"]["stage1.1.conv1"] > uniform["stage1.1.conv1"] > found["back"]["stage1.1.conv1"]
    assert found["front"]["stage3.1.conv1"] < uniform["stage3.1.conv1"] < found["back"]["stage3.1.conv1"]
    assert found["no_first_stage"]["stage1.1.conv1"] < 0.4 * found["no_first_stage"]["stage1.1.conv2"]
    assert found["every_other"]["stage2.1.conv1"] < 0.4 * found["every_other"]["stage2.2.conv1"]


def test_saved_profiles_are_written_once():
    mask = profiles.mask_of(profiles.PROFILES["spread_fifth"], GRAPH(), BUDGET)
    for stage in ("stage1", "stage2", "stage3"):
        blocks = [group.units for group in GRAPH().groups if group.name.startswith(stage) and "conv2" in group.name]
        written = [mask[units.start : units.stop] for units in blocks]
        assert int(torch.stack(written).sum(0).max()) == 1


def test_widths_are_taken_as_they_are():
    sizes = [1 + number % 5 for number in range(len(GRAPH().groups))]
    mask = profiles.mask_of_widths(sizes, GRAPH())
    assert list(widths(mask).values()) == sizes
    with pytest.raises(ValueError, match="zip"):
        profiles.mask_of_widths(sizes[1:], GRAPH())
