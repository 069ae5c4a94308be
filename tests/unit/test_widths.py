"""Widths that fill a budget: shares of all groups, rounded to whole numbers."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimstart import Channels, Flops, Params
from slimstart.policies.widths import FILLED, SMALL, Fit, steps, whole
from tests.traced import traced

CHAIN = partial(traced, "vgg16", 32, width=0.125)
RESIDUAL = partial(traced, "resnet20", 16, "filter")
BUDGETS = [Flops(0.3), Params(0.2), Channels(0.4)]


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS), st.sampled_from([CHAIN, RESIDUAL]), st.booleans())
def test_widths_fill_the_budget_and_never_exceed_it(seed, budget, make, freezing):
    graph = make()
    generator = torch.Generator().manual_seed(seed)
    bound = budget.bind(graph.costs)
    fit = Fit(bound, graph.costs)
    before = 3 * torch.randn(len(graph.groups), generator=generator, dtype=torch.float64)
    frozen = torch.zeros(len(before), dtype=torch.bool)
    frozen[2] = freezing
    before[2] = 0.0 if freezing else before[2]  # one unit
    after = fit(before, frozen)
    assert bound.cost(fit.masks(after.exp())) <= bound.limit
    free = (after > 0) & (after < fit.sizes.double().log()) & ~frozen
    shift = (after - before)[free]
    assert torch.allclose(shift, shift.mean().expand_as(shift))  # all by the same number
    assert not freezing or after[2] == before[2]
    more = torch.minimum((before + ~frozen * (float(shift.mean()) + 1e-3)).clamp(min=0), fit.sizes.double().log())
    same = torch.equal(fit.masks(more.exp()), fit.masks(after.exp()))
    assert same or bound.cost(fit.masks(more.exp())) > bound.limit


@pytest.mark.parametrize("make", [CHAIN, RESIDUAL], ids=["vgg", "resnet"])
def test_a_mask_keeps_the_first_units_of_every_group(make):
    graph = make()
    bound = Flops(0.3).bind(graph.costs)
    fit = Fit(bound, graph.costs)
    mask = fit.mask(fit.shares())
    for group in graph.groups:
        own = mask[group.units.start : group.units.stop].tolist()
        assert own[0]
        assert own == sorted(own, reverse=True)
    assert 0.99 * bound.limit < bound.cost(mask) <= bound.limit


@pytest.mark.parametrize("budget", [*BUDGETS, Flops(1.0)], ids=str)
def test_shares_are_equal_or_those_of_a_profile(budget):
    bound = budget.bind(CHAIN().costs)
    fit = Fit(bound, CHAIN().costs)
    shares = fit.shares().exp() / fit.sizes
    assert torch.allclose(shares, shares[0].expand_as(shares))
    profile = torch.linspace(2, 1, len(shares), dtype=torch.float64)
    shaped = fit.shares(profile).exp() / fit.sizes
    inside = (shaped < 1 - 1e-9) & (shaped * fit.sizes > 1 + 1e-9)
    ratios = (shaped / profile)[inside]
    assert torch.allclose(ratios, ratios.mean().expand_as(ratios))
    assert torch.equal(fit.shares(1000 * profile), fit.shares(profile))  # only ratios count
    extreme = fit.shares(torch.logspace(0, -30, len(shares), dtype=torch.float64)).exp() / fit.sizes
    assert float(extreme[0]) == pytest.approx(1)
    assert bound.cost(fit.masks(extreme * fit.sizes)) <= bound.limit
    assert budget.fraction < 1 or math.isclose(float(extreme.min()), 1)


@given(st.lists(st.floats(0.3, 60), min_size=4, max_size=4), st.integers(4, 150), st.sampled_from([1, 4, 8]))
def test_widths_are_rounded_to_whole_numbers(wanted, limit, align):
    sizes = torch.tensor([8, 32, 64, 256])
    found = whole(torch.tensor(wanted, dtype=torch.float64), sizes, align, lambda widths: float(widths.sum()), limit)
    left = limit - int(found.sum())
    assert left >= 0
    assert bool(((found >= 1) & (found <= sizes)).all())
    step = steps(sizes, align)
    if align > 1 and wanted[3] < SMALL * align:
        step[3] = align  # where few are wanted, steps are fine
    if int(torch.minimum(step, sizes).sum()) > limit:
        step[:] = 1
    want = torch.tensor(wanted, dtype=torch.float64)
    most = torch.minimum(torch.maximum(want + step, 1.25 * want).floor().long(), sizes)
    assert bool((found <= torch.maximum(most, step)).all())
    # No step fits any more; and if much is left all the same, then not even a unit.
    even = (found % step == 0) | (found == sizes)
    assert bool(((found + step > most) | (step > left))[even].all())
    if left > (1 - FILLED) * limit:
        assert bool((found >= most).all())


def test_widths_are_the_least_possible_where_nothing_fits():
    """As for a budget of time, after a measurement: its costs rise."""
    wanted, sizes = torch.tensor([100.0, 10.0], dtype=torch.float64), torch.tensor([256, 16])
    assert whole(wanted, sizes, 8, lambda widths: float(widths.sum()), 1.5).tolist() == [1, 1]
