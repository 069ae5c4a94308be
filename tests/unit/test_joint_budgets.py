"""Several budgets at once: each of them holds, by enumeration and against each budget alone."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slimstart.costs import CostTable
from slimstart.errors import BudgetError, CheckpointError
from slimstart.graph import trace
from slimstart.policies import (
    BoundBudget,
    Budget,
    Channels,
    EqualWorth,
    Flops,
    JointBudget,
    Paper,
    Params,
    joined,
    project,
    uniform_start,
)
from slimstart.policies.projection import Multisection
from slimstart.policies.widths import Fit
from tests import reference
from tests.cost_tables import chain, cost_table, cost_tables, factor, search
from tests.traced import traced

REALS = st.floats(-2, 3)
KINDS = (Flops, Params, Channels)
VGG, RESIDUAL = partial(traced, "vgg16", 32, width=0.125), partial(traced, "resnet20", 16, "filter")
PAIRS = [[Flops(0.3), Params(0.2)], [Flops(0.2), Channels(0.5)], [Flops(0.3), Params(0.25), Channels(0.45)]]


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def some_budgets(table: CostTable, shares: list[float]) -> list[Budget]:
    """Feasible budgets of several kinds, each between the least and the dense cost."""
    found: list[Budget] = []
    for kind, share in zip(KINDS, shares, strict=False):
        whole = kind(1.0).bind(table)
        assume(whole.dense > 0)
        found.append(kind(min(1.0, (whole.minimum + share * (whole.dense - whole.minimum)) / whole.dense + 1e-12)))
    return found


def exact_costs(table: CostTable, mask: Tensor) -> list[int]:
    """FLOPs, parameters and filters of a mask, term by term."""
    kept = reference.at_least_one(mask, table.unit_group)
    costs = [reference.cost_of_mask(table, polynomial, mask) for polynomial in (table.flops, table.params)]
    return [*costs, sum(table.unit_filters[kept].tolist())]


def limits(table: CostTable, budgets: list[Budget]) -> list[float]:
    """By definition: a fraction of what all units cost."""
    dense = exact_costs(table, torch.ones(table.num_units, dtype=torch.bool))
    return [b.smallest * dense[KINDS.index(type(b))] for b in budgets]


# --- costs -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(cost_tables(), st.lists(st.floats(0, 1), min_size=2, max_size=3))
def test_a_mask_is_within_if_it_is_within_each(table: CostTable, shares: list[float]) -> None:
    budgets = some_budgets(table, shares)
    bound, allowed = joined(budgets).bind(table), limits(table, budgets)
    assert bound.limits == pytest.approx(allowed)
    for mask in reference.all_masks(table.num_units):
        costs = exact_costs(table, mask)[: len(budgets)]
        assert (bound.cost(mask) <= bound.limit) == all(c <= k for c, k in zip(costs, bound.limits, strict=True))
        largest = max(c / k for c, k in zip(costs, allowed, strict=True))
        assert bound.cost(mask) == pytest.approx(largest)


@settings(max_examples=25, deadline=None)
@given(cost_tables(), st.lists(st.floats(0, 1), min_size=2, max_size=2), st.data())
def test_an_expectation_is_within_if_it_is_within_each(
    table: CostTable, shares: list[float], data: st.DataObject
) -> None:
    budgets = some_budgets(table, shares)
    bound = joined(budgets).bind(table)
    s = f64(data.draw(st.lists(st.floats(0, 1), min_size=table.num_units, max_size=table.num_units)))
    means = [float(reference.expected_cost(table, p, s)) for p in (table.flops, table.params)]
    multiples = [mean / limit for mean, limit in zip(means, limits(table, budgets), strict=True)]
    assert float(bound.expected(s)) == pytest.approx(max(multiples), rel=1e-12)
    nearest = multiples.index(max(multiples))
    if abs(multiples[0] - multiples[1]) > 1e-9:
        assert bound.share(s) == pytest.approx(multiples[nearest] * budgets[nearest].smallest, rel=1e-9)


def test_costs_by_hand() -> None:
    """Widths (2, 1), 3 inputs, 10 outputs: FLOPs 36 n1 + 10 + 10 of 92, parameters 4 n1 + 1 + 10 of 19."""
    bound = joined([Flops(0.8), Params(0.9)]).bind(chain([2, 1]))
    assert bound.limits == (0.8 * 92, 0.9 * 19)
    assert bound.cost(torch.tensor([True, True, True])) == 92 / (0.8 * 92)  # both are too much, FLOPs by more
    assert bound.cost(torch.tensor([True, False, True])) == 15 / (0.9 * 19)  # of FLOPs 56 / 73.6, which is less
    assert bound.share(f64([1, 0, 1])) == 15 / 19
    assert (bound.limit, bound.dense) == (1, 92 / (0.8 * 92))


def test_one_multiply_add_too_many_is_seen() -> None:
    """Where they are 2^52."""
    table = cost_table(
        [0, 0], [[0], [1]], [factor([0], offset=1), factor([1], offset=1)], [(2**51 - 1, (0,)), (2, (1,))]
    )
    most = 2 * (2**51 - 1) + 2  # with the first unit, without the second
    bound = joined([Flops(most / Flops(1.0).bind(table).dense), Params(1.0)]).bind(table)
    first, both = torch.tensor([True, False]), torch.tensor([True, True])
    assert (bound.cost(first) <= 1) == (most <= bound.limits[0])
    assert bound.cost(both) > 1


def test_the_cost_of_a_unit_is_that_in_the_tightest_budget() -> None:
    """Widths (8, 4) and (8, 1): 554 and 308 of 277 multiply-adds, 70 and 43 of 36.75 parameters."""
    table = chain([8, 4])
    flops, params = Flops(0.5).bind(table), Params(0.525).bind(table)
    bound = joined([Flops(0.5), Params(0.525)]).bind(table)
    for s, tightest in ((f64([1] * 12), flops), (f64([1] * 8 + [0] * 4), params)):
        torch.testing.assert_close(bound.gradient(s), tightest.gradient(s) / tightest.limit)
        assert bound.share(s) == float(tightest.expected(s)) / tightest.dense


def test_on_a_device_no_value_is_read_on_the_host() -> None:
    bound = joined([Flops(0.5), Params(0.5), Channels(0.6)]).bind(chain([8, 4]))
    cost = bound.to("meta").expected(torch.zeros(3, 12, device="meta"))
    assert (cost.shape, cost.dtype, cost.device.type) == ((3,), torch.float64, "meta")
    assert bound.expected(torch.zeros(12)).device.type == "cpu"


# --- projection ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    table=cost_tables(max_units=5, every_unit_costs=True),
    shares=st.lists(st.floats(0, 0.99), min_size=2, max_size=3),
    size=st.sampled_from([1.0, 0.1, 1e-3]),
    data=st.data(),
)
def test_projections_are_within_each_budget_and_raise_nothing(
    table: CostTable, shares: list[float], size: float, data: st.DataObject
) -> None:
    """By the mean over all masks; of filters, the paper's sum."""
    budgets = some_budgets(table, shares)
    bound = joined(budgets).bind(table)
    reals = st.lists(REALS, min_size=table.num_units, max_size=table.num_units)
    before = project(f64(data.draw(reals)), bound)
    z = before + size * f64(data.draw(reals))
    inside = z.clamp(0, 1)
    for s in (project(z, bound), Multisection(bound)(z, before)):
        assert bool(((s >= 0) & (s <= inside)).all())
        means = [float(reference.expected_cost(table, p, s)) for p in (table.flops, table.params)]
        means.append(float((table.unit_filters * s).sum()))
        for mean, limit in zip(means, bound.limits, strict=False):
            assert mean <= limit * (1 + 1e-12)
    s = project(z, bound)
    assert torch.equal(project(s, bound), s)
    if float(bound.expected(inside)) > bound.limit:
        assert float(bound.expected(s)) == pytest.approx(1, rel=1e-9)  # the tightest is met
    else:
        assert torch.equal(s, inside)


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    shares=st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2),
    data=st.data(),
)
def test_the_projection_is_the_lower_one_of_each_alone(
    widths: list[int], shares: list[float], data: st.DataObject
) -> None:
    """Of FLOPs and parameters each lowers all units by one number, and in a chain both costs fall with it."""
    table = chain(widths)
    budgets = some_budgets(table, shares)
    z = f64(data.draw(st.lists(REALS, min_size=table.num_units, max_size=table.num_units)))
    alone = [project(z, budget.bind(table)) for budget in budgets]
    torch.testing.assert_close(project(z, joined(budgets).bind(table)), torch.minimum(*alone), rtol=0, atol=1e-7)


@pytest.mark.parametrize("budgets", PAIRS, ids=str)
def test_the_uniform_start_is_the_lowest_of_each_alone(budgets: list[Budget]) -> None:
    table = chain([40, 60, 30])
    start = uniform_start(joined(budgets).bind(table))
    assert float(start.min()) == float(start.max())
    lowest = min(float(uniform_start(budget.bind(table))[0]) for budget in budgets)
    assert float(start[0]) == pytest.approx(lowest, abs=1e-9)


@pytest.mark.parametrize("budgets", PAIRS, ids=str)
def test_multisection_meets_the_tightest_limit(budgets: list[Budget]) -> None:
    """In steps of a search, while the tightest budget changes: as exact as for one budget but at those changes."""
    table = chain([64, 64, 128, 128])
    bound = joined(budgets).bind(table)
    projection, s = Multisection(bound), uniform_start(bound)
    generator, drift = torch.Generator().manual_seed(0), torch.linspace(-1, 1, table.num_units).double()
    tightest = set()
    for step in range(40):
        z = s + 0.03 * (0.3 + torch.randn(table.num_units, dtype=torch.float64, generator=generator))
        exact, s = (
            project(z + 0.02 * drift * (-1) ** (step // 20), bound),
            projection(z + 0.02 * drift * (-1) ** (step // 20), s),
        )
        assert all(float(b.bind(table).expected(s)) <= b.bind(table).limit for b in budgets)
        assert float(bound.expected(s)) >= 1 - 1e-4
        torch.testing.assert_close(s, exact, rtol=0, atol=1e-4)
        tightest.add(int(torch.stack([b.bind(table).expected(s) / b.bind(table).limit for b in budgets]).argmax()))
    assert tightest


def test_the_papers_policy_holds_every_budget_after_every_update() -> None:
    table, budgets = chain([6, 8, 5]), [Flops(0.5), Params(0.6), Channels(0.62)]
    policy = search(table, joined(budgets), structure_lr=0.05)
    bounds = [budget.bind(table) for budget in budgets]
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        losses = policy.draw().double() @ torch.linspace(-1, 1, 19).double()
        policy.update(losses + torch.randn(2, generator=generator, dtype=torch.float64))
        s = policy.keep_probs
        assert all(float(bound.expected(s)) <= bound.limit for bound in bounds)
        assert policy.expected_cost in [pytest.approx(float(b.expected(s)) / b.dense, rel=1e-9) for b in bounds]
    for mask in (policy.best_guess(), *policy.candidates(20)):
        assert all(bound.cost(mask) <= bound.limit for bound in bounds)


# --- widths ----------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(PAIRS), st.sampled_from([VGG, RESIDUAL]))
def test_widths_are_the_narrower_ones_of_each_alone(seed, budgets, make) -> None:
    """Each shifts all log-widths by one number, and the costs rise with it."""
    costs = make().costs
    generator = torch.Generator().manual_seed(seed)
    before = 3 * torch.randn(len(make().groups), generator=generator, dtype=torch.float64)
    together = Fit(joined(budgets).bind(costs), costs)(before)
    alone = torch.stack([Fit(budget.bind(costs), costs)(before) for budget in budgets])
    torch.testing.assert_close(together, alone.amin(0), rtol=0, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(PAIRS), st.booleans(), st.sampled_from([1, 8]), st.sampled_from([0, 0.5]))
def test_every_structure_holds_every_budget(seed, budgets, residual, align, depth) -> None:
    """With layers removed too: their cost is gone, and limits are those of the whole network."""
    graph = RESIDUAL() if residual else VGG()
    policy = EqualWorth(align=align, rounds=4, depth=depth).start(graph.costs, joined(budgets))
    assert bool(policy.removed) == bool(depth)
    left = graph.without(graph.layers[i].name for i in policy.removed).costs
    generator = torch.Generator().manual_seed(seed)
    while not policy.is_done:
        (mask,) = policy.draw()
        multiples = []
        for budget in budgets:
            limit = budget.fraction * budget.scaled(1e9).bind(graph.costs).dense
            multiples.append(budget.scaled(1e9).bind(left).cost(mask) / limit)
        assert max(multiples) <= 1
        assert max(multiples) > 0.9  # and one of them is full
        assert policy.expected_cost <= max(budget.fraction for budget in budgets)
        worth = mask * torch.rand(graph.num_units, generator=generator, dtype=torch.float64).pow(4)
        for sign in (1, -1) * 8:
            policy.observe_(sign * worth.sqrt())


def test_a_budget_that_is_never_full_changes_nothing() -> None:
    graph = VGG()
    alone = EqualWorth(rounds=6).start(graph.costs, Flops(0.1))
    slack = EqualWorth(rounds=6).start(graph.costs, joined([Flops(0.1), Params(1.0)]))
    generator = torch.Generator().manual_seed(0)
    while not alone.is_done:
        mask = alone.draw()[0]
        assert torch.equal(slack.draw()[0], mask)
        worth = torch.rand(graph.num_units, generator=generator, dtype=torch.float64).pow(4)
        for sign in (1, -1) * 8:
            for policy in (alone, slack):
                policy.observe_(sign * (mask * worth).sqrt())


SIZES = (24, 40, 32)


@pytest.mark.parametrize(
    ("values", "params"),
    [((1.0, 1.0, 1.0), 0.15), ((9.0, 1.0, 0.3), 0.1), ((0.2, 5.0, 2.0), 0.15)],
    ids=["both are full", "FLOPs are full", "parameters are full"],
)
def test_it_finds_the_widths_of_least_loss_under_both(values, params) -> None:
    """With the loss a_1 / w_1 + a_2 / w_2 + a_3 / w_3, against all widths within both budgets.

    Early layers have larger images, so FLOPs and parameters ask for different widths.
    """
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(24, 40, 3, padding=1), nn.MaxPool2d(4)]
    model = nn.Sequential(*layers, nn.Conv2d(40, 32, 3, padding=1), nn.Flatten(), nn.Linear(128, 10))
    graph = trace(model, torch.zeros(1, 3, 32, 32), "stream")
    budgets: list[Budget] = [Flops(0.3), Params(params)]
    policy = EqualWorth(align=1, rounds=30, pull=0).start(graph.costs, joined(budgets))
    a, group = f64(values), graph.costs.unit_group
    generator = torch.Generator().manual_seed(0)
    while not policy.is_done:
        mask = policy.draw()[0]
        for _ in range(16):  # independent gates, so that no unit counts as redundant
            sign = 2.0 * torch.randint(2, mask.shape, generator=generator) - 1
            policy.observe_(sign * (mask * (a / policy.widths**2)[group]).sqrt())
    found = float((a / policy.widths).sum())
    every = torch.tensor(list(itertools.product(range(1, 25), range(1, 41), range(1, 33, 2))))
    rank = torch.cat([torch.arange(n) for n in SIZES])
    masks = [(rank < some[:, group]).double() for some in every.split(2000)]
    fits = [torch.cat([b.expected(m) for m in masks]) <= b.limit for b in (b.bind(graph.costs) for b in budgets)]
    best = float((a / every[fits[0] & fits[1]]).sum(1).min())
    assert 0.99 * best < found < 1.03 * best  # of every other width of the last group


# --- what is refused -------------------------------------------------------------------------------------------------


def test_infeasible_budgets_are_all_named_with_their_ranges() -> None:
    table = chain([8, 4])  # least 56 of 554 multiply-adds, 15 of 70 parameters
    with pytest.raises(BudgetError, match=r"`Params\(0.2\)` .*feasible from 0.2143 to 1$") as caught:
        joined([Flops(0.5), Params(0.2)]).bind(table)
    assert "Flops" not in str(caught.value)
    with pytest.raises(
        BudgetError, match=r"`Flops\(0.1\)` .*feasible from 0.1011 to 1; `Params\(0.2\)` .* 0.2143 to 1"
    ):
        joined([Flops(0.1), Params(0.2)]).bind(table)
    bound = joined([Flops(0.1011), Params(0.2143)]).bind(table)  # the numbers in the message work together
    assert bound.cost(torch.zeros(12, dtype=torch.bool)) == bound.minimum <= 1


@settings(max_examples=25, deadline=None)
@given(cost_tables(every_unit_costs=True), st.lists(st.floats(0.05, 1), min_size=2, max_size=3))
def test_budgets_are_refused_if_the_narrowest_network_exceeds_one(table: CostTable, fractions: list[float]) -> None:
    budgets = [kind(fraction) for kind, fraction in zip(KINDS, fractions, strict=False)]
    least = exact_costs(table, torch.zeros(table.num_units, dtype=torch.bool))
    feasible = all(cost <= limit for cost, limit in zip(least, limits(table, budgets), strict=False))
    try:
        bound: BoundBudget | None = joined(budgets).bind(table)
    except BudgetError:
        bound = None
    assert (bound is not None) == feasible


def test_what_is_no_list_of_budgets_is_refused() -> None:
    assert joined(Flops(0.1)) == Flops(0.1) == joined([Flops(0.1)])
    assert joined((Flops(0.1), Params(0.2))) == JointBudget((Flops(0.1), Params(0.2)))
    with pytest.raises(BudgetError, match="`budget` has several of Flops; give the smallest of a kind"):
        joined([Flops(0.1), Params(0.1), Flops(0.2)])
    for wrong in ([], 0.1, "flops=0.1", [Flops(0.1), 0.1], None, Flops):
        with pytest.raises(TypeError, match=r"it must be a budget, such as slimstart.Flops\(0.10\), or a list of sev"):
            joined(wrong)  # type: ignore[arg-type]


def test_a_search_resumes_with_the_same_budgets_only() -> None:
    costs = VGG().costs
    state = EqualWorth().start(costs, joined([Flops(0.3), Params(0.2)])).state_dict()
    EqualWorth().start(costs, joined([Flops(0.3), Params(0.2)])).load_state_dict(state)
    for other in (Flops(0.3), joined([Flops(0.3), Params(0.21)]), joined([Flops(0.3), Channels(0.5)])):
        with pytest.raises(CheckpointError, match="`state` has budgets of"):
            EqualWorth().start(costs, other).load_state_dict(state)


def test_a_scaled_budget_has_all_its_fractions_scaled() -> None:
    assert joined([Flops(0.1), Params(0.4)]).scaled(2) == joined([Flops(0.2), Params(0.8)])
    assert joined([Flops(0.1), Params(0.4)]).scaled(5) == joined([Flops(0.5), Params(1.0)])
    assert math.isclose(joined([Flops(0.1), Params(0.4)]).smallest, 0.1)
    assert Paper().start(chain([4]), Flops(0.9)).budget.limits == (0.9 * Flops(1.0).bind(chain([4])).dense,)
