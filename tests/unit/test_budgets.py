"""Budgets: expected costs against enumeration and finite differences, and wrong arguments."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimstart.costs import CostTable
from slimstart.errors import BudgetError
from slimstart.policies import BoundBudget, Budget, Channels, Flops, Params
from tests import reference
from tests.cost_tables import chain, cost_table, cost_tables, factor

# Units 0-2 write a stream, units 3-5 add to it; channel c exists if 0+c or 3+c is kept.
STREAM = [[0, 3], [1, 4], [2, 5]]
SINGLE = [[unit] for unit in range(6)]
TWO_WRITERS = [0, 0, 0, 1, 1, 1]

TABLES = {
    "plain": chain([3, 2, 1]),
    "stream read by a layer of its own units": cost_table(
        TWO_WRITERS, [*SINGLE, *STREAM], [factor([0, 1, 2]), factor([3, 4, 5]), factor([6, 7, 8])], [(9, (2, 1))]
    ),
    "x + conv(x): one mask reads and writes": cost_table([0] * 4, SINGLE[:4], [factor([0, 1, 2, 3])], [(9, (0, 0))]),
    "the same units in two factors": cost_table(
        [0] * 4, SINGLE[:4], [factor([0, 1, 2, 3], 2), factor([1, 2, 3, 0], [1, 2, 3, 4], 1)], [(5, (0, 1))]
    ),
    "the square of a stream": cost_table(TWO_WRITERS, STREAM, [factor([0, 1, 2], [1, 2, 3])], [(4, (0, 0))]),
    "groups of one": cost_table([0, 1, 2], SINGLE[:3], [factor([0, 1]), factor([1, 2])], [(7, (0, 1)), (2, (0,))]),
    "a group that one event covers": cost_table(
        [0, 0, 1, 1], [[0, 1], [2], [2, 3, 0]], [factor([0, 1, 2])], [(3, (0, 0))]
    ),
    "several units of a group in an event": cost_table(
        TWO_WRITERS, [[0, 1, 3], [2], [1, 2, 4, 5], [5]], [factor([0, 1]), factor([2, 3])], [(3, (0, 1)), (2, (1, 1))]
    ),
    "groups interleaved, events and entries repeated": cost_table(
        [1, 0, 1, 0, 1], [[0, 0, 1], [1, 0], [4], [3, 2]], [factor([0, 0, 1]), factor([2, 3, 2], 3, 2)], [(1, (0, 1))]
    ),
    "an event without units never happens": cost_table([0, 0], [[], [0], [1]], [factor([0, 1, 2])], [(2, (0, 0))], 1),
    "terms of opposite sign": cost_table([0] * 3, SINGLE[:3], [factor([0, 1, 2])], [(5, (0, 0)), (-2, (0,))]),
}
KEEP_PROBS = [0.3, 0.05, 0.9, 0.5, 0.7, 0.2]


def f64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_expectation(table: CostTable, s: torch.Tensor) -> None:
    """Value and gradient against enumeration over all masks."""
    s = s.clone().requires_grad_()
    for budget, polynomial in ((Flops(1.0), table.flops), (Params(1.0), table.params)):
        bound = budget.bind(table)
        expected = reference.expected_cost(table, polynomial, s)
        if expected.requires_grad:  # or the cost is a constant
            (gradient,) = torch.autograd.grad(expected, s)
        else:
            gradient = torch.zeros_like(s)
        torch.testing.assert_close(bound.expected(s).detach(), expected.detach(), rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(bound.gradient(s), gradient, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", TABLES)
def test_expectation_agrees_with_enumeration(name: str) -> None:
    table = TABLES[name]
    assert_expectation(table, f64(KEEP_PROBS[: table.num_units]))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("pattern", [[0, 0], [1, 1], [0, 1], [1, 0.4], [0.4, 0], [1e-17, 0.5]])
def test_expectation_and_gradient_at_certain_units(name: str, pattern: list[float]) -> None:
    table = TABLES[name]
    assert_expectation(table, f64((pattern * 3)[: table.num_units]))


@settings(max_examples=40, deadline=None)
@given(cost_tables(), st.data())
def test_expectation_agrees_with_enumeration_on_random_tables(table: CostTable, data: st.DataObject) -> None:
    probability = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    s = data.draw(st.lists(probability, min_size=table.num_units, max_size=table.num_units))
    assert_expectation(table, f64(s))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("budget", [Channels(1.0), Params(1.0), Flops(1.0)], ids=str)
def test_many_keep_probabilities_at_once(name: str, budget: Budget) -> None:
    table = TABLES[name]
    bound = budget.bind(table)
    s = torch.rand(2, 5, table.num_units, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s[0, 0], s[1, 1] = 0, 1
    costs = bound.expected(s)
    assert costs.shape == (2, 5)
    for row, cost in zip(s.view(10, -1), costs.view(-1), strict=True):
        if isinstance(budget, Channels):
            expected = sum(f * p for f, p in zip(table.unit_filters.tolist(), row.tolist(), strict=True))
        else:
            polynomial = table.flops if isinstance(budget, Flops) else table.params
            expected = float(reference.expected_cost(table, polynomial, row))
        assert float(cost) == pytest.approx(expected, rel=1e-12, abs=1e-10)


@pytest.mark.parametrize("budget", [Channels(1.0), Params(1.0), Flops(1.0)], ids=str)
def test_a_budget_on_a_device_reads_no_value_on_the_host(budget: Budget) -> None:
    """Tensors on "meta" have shapes and no values. The budget on the CPU stays there."""
    table = TABLES["the square of a stream"]
    bound = budget.bind(table)
    moved = bound.to("meta")
    cost = moved.expected(torch.zeros(3, 6, device="meta"))
    assert (cost.shape, cost.dtype, cost.device.type) == ((3,), torch.float64, "meta")
    assert (moved.dense, moved.limit, moved.num_units) == (bound.dense, bound.limit, bound.num_units)
    assert (moved.device.type, bound.device.type) == ("meta", "cpu")
    assert bound.cost(torch.ones(6, dtype=torch.bool)) == bound.dense


def test_sums_over_several_chunks_of_events() -> None:
    """Two weights in one factor, 200 units: 3 n1 + 5 n2 + 7, and its square."""
    table = cost_table([0] * 200, [[u] for u in range(200)], [factor(range(200), [3, 5] * 100, 7)], [(1, (0, 0))])
    bound = Flops(1.0).bind(table)
    mask = torch.arange(200) % 4 < 3  # three of four: 100 of weight 3, 50 of weight 5
    assert bound.cost(mask) == (3 * 100 + 5 * 50 + 7) ** 2
    # Independent but for the empty draw, whose chance is 0.4^200: variance of the count, and the square of its mean.
    mean, variance = 0.6 * 800 + 7, 0.6 * 0.4 * 100 * (9 + 25)
    assert float(bound.expected(torch.full((200,), 0.6, dtype=torch.float64))) == pytest.approx(
        mean**2 + variance, rel=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(cost_tables())
def test_cost_of_every_mask(table: CostTable) -> None:
    flops, params, channels = Flops(1.0).bind(table), Params(1.0).bind(table), Channels(1.0).bind(table)
    for mask in reference.all_masks(table.num_units):
        assert flops.cost(mask) == reference.cost_of_mask(table, table.flops, mask)
        assert params.cost(mask) == reference.cost_of_mask(table, table.params, mask)
        kept = reference.at_least_one(mask, table.unit_group)
        assert channels.cost(mask) == sum(table.unit_filters[kept].tolist())


def test_gradient_agrees_with_finite_differences() -> None:
    bound = Flops(1.0).bind(TABLES["stream read by a layer of its own units"])
    s, step = f64(KEEP_PROBS), 1e-6
    for unit, slope in enumerate(bound.gradient(s).tolist()):
        shift = torch.zeros_like(s)
        shift[unit] = step
        difference = (bound.expected(s + shift) - bound.expected(s - shift)) / (2 * step)
        assert slope == pytest.approx(float(difference), rel=1e-7, abs=1e-7)


def test_plain_network_by_hand() -> None:
    """Widths (2, 1), 3 inputs, 10 outputs: 9 * 3 * n1 + 9 * n1 * n2 + 10 * n2 + 10."""
    table = chain([2, 1])
    bound = Flops(0.9).bind(table)
    assert bound.dense == 54 + 18 + 10 + 10
    assert bound.minimum == 27 + 9 + 10 + 10
    assert bound.limit == 0.9 * 92
    # E[n1] = s1 + s2 + (1 - s1)(1 - s2), and the only unit of the second layer is always there.
    n1 = 0.5 + 0.25 + 0.5 * 0.75
    assert float(bound.expected(f64([0.5, 0.25, 0.1]))) == pytest.approx(27 * n1 + 9 * n1 + 20, rel=1e-14)
    assert Params(1.0).bind(table).dense == 6 + 2 + 1 + 10


def test_covariance_by_hand() -> None:
    """E[n^2], three units in one group, s = 1/2: counts 1 (the empty draw), 1, 2, 3 with weights 1, 3, 3, 1 of 8."""
    table = cost_table([0] * 3, SINGLE[:3], [factor([0, 1, 2])], [(1, (0, 0))])
    assert float(Flops(1.0).bind(table).expected(f64([0.5] * 3))) == pytest.approx((1 + 3 * 1 + 3 * 4 + 9) / 8)


def test_channels_is_the_papers_linear_constraint() -> None:
    table = cost_table([0, 0, 1], SINGLE[:3], [], [], filters=[2, 2, 3])
    bound = Channels(0.75).bind(table)
    assert (bound.dense, bound.minimum, bound.limit) == (7, 5, 5.25)
    s = f64([0.5, 0.1, 0.2])
    assert float(bound.expected(s)) == pytest.approx(2 * 0.5 + 2 * 0.1 + 3 * 0.2)
    assert bound.gradient(s).tolist() == [2, 2, 3]
    assert float(bound.expected(torch.zeros(3))) == 0  # no at-least-one term: the constraint is the paper's
    assert bound.cost(torch.zeros(3, dtype=torch.bool)) == 5  # but a mask costs what is there


def test_costs_beyond_float_precision_are_exact() -> None:
    table = cost_table([0, 0, 0], SINGLE[:3], [factor([0, 1, 2])], [(2**60 + 1, (0, 0))], constant=1)
    assert Flops(1.0).bind(table).cost(torch.ones(3, dtype=torch.bool)) == 9 * (2**60 + 1) + 1


def test_a_network_without_units() -> None:
    table = cost_table([], [], [factor([], offset=4)], [(5, (0, 0))], constant=1)
    bound = Flops(1.0).bind(table)
    assert (bound.dense, bound.minimum) == (81, 81)
    assert float(bound.expected(torch.zeros(0))) == 81
    assert bound.gradient(torch.zeros(0)).shape == (0,)


def test_expected_has_a_gradient_and_keeps_float64() -> None:
    bound: BoundBudget = Params(1.0).bind(chain([4, 4]))
    s = torch.full((8,), 0.5, requires_grad=True)  # float32 in, float64 out
    value = bound.expected(s)
    assert value.dtype == torch.float64
    value.backward()
    assert s.grad is not None
    assert bool((s.grad > 0).all())


@pytest.mark.parametrize("budget", [Channels, Params, Flops])
@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, math.nan, math.inf])
def test_fractions_outside_0_1_are_refused(budget: type[Flops], fraction: float) -> None:
    with pytest.raises(BudgetError, match=rf"`fraction` of `{budget.__name__}` is {fraction}; it must be in \(0, 1\]"):
        budget(fraction)


def test_infeasible_budgets_name_the_feasible_range() -> None:
    table = chain([8, 4])  # dense 9*3*8 + 9*8*4 + 10*4 + 10 = 554, least 27 + 9 + 10 + 10 = 56
    with pytest.raises(
        BudgetError, match=r"`Flops\(0.1\)` allows 55.4 of 554 multiply-adds, .* 56; feasible from 0.1011"
    ):
        Flops(0.1).bind(table)
    assert Flops(0.1011).bind(table).minimum == 56  # the number in the message works
    # Parameters with all coefficients 1: 24 + 32 + 4 + 10 = 70, least 3 + 1 + 1 + 10 = 15.
    with pytest.raises(BudgetError, match=r"`Params\(0.2\)` allows 14 of 70 parameters, .*feasible from 0.2143 to 1"):
        Params(0.2).bind(table)
    with pytest.raises(
        BudgetError, match=r"`Channels\(0.1\)` allows 1.2 of 12 filters, .* costs 2; feasible from 0.1667"
    ):
        Channels(0.1).bind(table)


def test_wrong_shapes_and_tables_are_refused() -> None:
    for bound in (Flops(1.0).bind(chain([3])), Channels(1.0).bind(chain([3]))):
        with pytest.raises(ValueError, match=r"`s` has shape \(2,\); it needs one entry per unit, \(3,\)"):
            bound.expected(torch.zeros(2))
        with pytest.raises(ValueError, match=r"`mask` has shape \(2,\); it needs one entry per unit, \(3,\)"):
            bound.cost(torch.zeros(2, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"`s` has shape \(3, 2\); it needs one entry per unit, \(3,\)"):
            bound.expected(torch.zeros(3, 2))
        with pytest.raises(ValueError, match=r"`mask` has shape \(2, 3\); it needs one entry per unit, \(3,\)"):
            bound.cost(torch.zeros(2, 3, dtype=torch.bool))
    table = cost_table([0], SINGLE[:1], [factor([0])], [(1, (0, 0, 0))])
    with pytest.raises(ValueError, match="multiplies 3 factors; it must be one or two"):
        Flops(1.0).bind(table)


def test_wide_tied_streams_bind_to_linear_tables() -> None:
    """A stream of n channels that its own units read and write has n + (n - 1) dependent pairs, not n^2."""
    n = 3000
    table = cost_table([0] * n, [[unit] for unit in range(n)], [factor(range(n))], [(1, (0, 0))])
    s = 0.25
    # n(m) is binomial but for the empty draw, whose chance of 0.75^3000 is nothing: E[n^2] = n s (1 - s) + (n s)^2.
    expected = float(Flops(1.0).bind(table).expected(torch.full((n,), s, dtype=torch.float64)))
    assert expected == pytest.approx(n * s * (1 - s) + (n * s) ** 2, rel=1e-12)
