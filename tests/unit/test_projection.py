"""Projections on a budget: feasible, idempotent, and equal to a quadratic program."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.graph import trace
from slimstart.lab.models import mobilenet_v1, resnet20
from slimstart.policies import BoundBudget, Budget, Channels, Flops, Params, project, uniform_start
from slimstart.policies.projection import Multisection
from tests import reference
from tests.cost_tables import chain, cost_table, cost_tables

REALS = st.floats(-1.5, 2.5, allow_nan=False)


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def filters_table(filters: list[int]) -> CostTable:
    """One group, so that almost any number of filters is feasible."""
    return cost_table([0] * len(filters), [[0]], [], [], filters=filters)


@st.composite
def linear_problems(draw: st.DrawFn) -> tuple[list[float], list[int], float]:
    """z, filters, fraction; the first unit has one filter, so that fractions from 1/sum are feasible."""
    size = draw(st.integers(2, 7))
    z = draw(st.lists(REALS, min_size=size, max_size=size))
    filters = [1, *draw(st.lists(st.integers(1, 4), min_size=size - 1, max_size=size - 1))]
    return z, filters, 1 / sum(filters) + draw(st.floats(1e-12, 1)) * (1 - 1 / sum(filters))


@settings(max_examples=50, deadline=None)
@given(linear_problems())
def test_channels_is_the_euclidean_projection(problem: tuple[list[float], list[int], float]) -> None:
    z, filters, fraction = problem
    bound = Channels(fraction).bind(filters_table(filters))
    s = project(f64(z), bound)
    assert float(bound.expected(s)) <= bound.limit
    np.testing.assert_allclose(s, reference.nearest_by_qp(z, filters, bound.limit), rtol=0, atol=1e-9)
    np.testing.assert_allclose(s, reference.nearest_by_breakpoints(z, filters, bound.limit), rtol=0, atol=1e-12)


def test_channels_by_hand() -> None:
    """clip(z - v, 0, 1) with sum 2: v = 0.25 leaves 1 (clipped), 0.65, 0.35, 0."""
    bound = Channels(0.5).bind(chain([4]))
    s = project(f64([1.5, 0.9, 0.6, -0.3]), bound)
    assert s.tolist() == pytest.approx([1, 0.65, 0.35, 0], abs=1e-15)


@pytest.mark.parametrize("num_units", [10, 1000, 50_000])
def test_channels_meets_the_limit_to_the_last_bits_and_never_exceeds_it(num_units: int) -> None:
    bound = Channels(0.3).bind(filters_table([1] * num_units))
    generator = torch.Generator().manual_seed(num_units)
    for scale in (1.0, 1e-3, 1e-9):
        s = project(0.3 + scale * torch.randn(num_units, dtype=torch.float64, generator=generator).abs(), bound)
        assert float(s.sum()) <= bound.limit
        assert float(s.sum()) == pytest.approx(bound.limit, rel=1e-14)


def test_channels_at_corners() -> None:
    bound = Channels(0.5).bind(chain([4]))
    assert project(torch.ones(4), bound).tolist() == [0.5] * 4  # every entry leaves its bound at once
    assert project(f64([5.0, 5.0, 5.0, 5.0]), bound).tolist() == pytest.approx([0.5] * 4, abs=1e-15)
    assert project(f64([3.0, 2.0, 0.0, -1.0]), bound).tolist() == [1, 1, 0, 0]  # v = 1 at the end of a piece, or less
    assert project(f64([0.2, -1.0, 0.3, 1.5]), bound).tolist() == [0.2, 0, 0.3, 1]  # feasible: clipped only
    full = Channels(1.0).bind(chain([4]))
    assert project(torch.full((4,), 9.0), full).tolist() == [1] * 4


def bind(budget: type[Budget], table: CostTable, share: float) -> BoundBudget:
    """A budget between the least and the dense cost."""
    whole = budget(1.0).bind(table)
    assume(whole.dense > whole.minimum)
    return budget((whole.minimum + share * (whole.dense - whole.minimum)) / whole.dense * (1 + 1e-12)).bind(table)


@settings(max_examples=25, deadline=None)
@given(
    table=cost_tables(every_unit_costs=True),
    budget=st.sampled_from([Params, Flops]),
    share=st.floats(0, 0.99),
    data=st.data(),
)
def test_polynomial_budgets_are_met_tightly(
    table: CostTable, budget: type[Budget], share: float, data: st.DataObject
) -> None:
    bound = bind(budget, table, share)
    z = f64(data.draw(st.lists(REALS, min_size=table.num_units, max_size=table.num_units)))
    s = project(z, bound)
    inside = z.clamp(0, 1)
    assert bool(((s >= 0) & (s <= 1)).all())
    assert float(bound.expected(s)) <= bound.limit
    assert bool((s <= inside).all())  # nothing is raised
    if float(bound.expected(inside)) <= bound.limit:
        assert torch.equal(s, inside)
    else:
        assert float(bound.expected(s)) == pytest.approx(bound.limit, rel=1e-9)
    assert torch.equal(project(s, bound), s)  # idempotent


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    shares=st.tuples(st.floats(0, 0.98), st.floats(0, 0.98)),
    data=st.data(),
)
def test_a_smaller_budget_gives_no_larger_entry(
    widths: list[int], shares: tuple[float, float], data: st.DataObject
) -> None:
    assume(abs(shares[0] - shares[1]) > 1e-6)
    table = chain(widths)
    z = f64(data.draw(st.lists(REALS, min_size=table.num_units, max_size=table.num_units)))
    smaller, larger = (project(z, bind(Flops, table, share)) for share in sorted(shares))
    assert bool((smaller <= larger).all())


def test_all_units_are_lowered_alike() -> None:
    bound = Flops(0.4).bind(chain([8, 8]))
    z = torch.linspace(0.35, 0.85, 16, dtype=torch.float64)
    step = z - project(z, bound)
    assert float(step.min()) > 0.01
    torch.testing.assert_close(step, torch.full_like(step, float(step[0])), rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [Channels, Params, Flops])
@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0])
def test_uniform_start_is_the_largest_level(budget: type[Budget], fraction: float) -> None:
    bound = budget(fraction).bind(chain([16, 32, 32]))
    s = uniform_start(bound)
    assert s.dtype == torch.float64
    level = float(s[0])
    assert s.tolist() == [level] * 80
    assert float(bound.expected(s)) <= bound.limit
    if fraction == 1:
        assert level == 1
    else:
        assert float(bound.expected(s + 1e-9)) > bound.limit


def test_uniform_start_of_channels_is_the_papers() -> None:
    for fraction in (0.1, 0.3, 0.7):
        s = uniform_start(Channels(fraction).bind(filters_table([1, 3, 2, 1, 5])))
        assert s.tolist() == pytest.approx([fraction] * 5, rel=1e-15)
    for num_units in range(10, 200):  # sums of many equal numbers sometimes round up
        bound = Channels(0.1).bind(chain([num_units]))
        assert float(bound.expected(uniform_start(bound))) <= bound.limit


@pytest.mark.parametrize(
    "bound",
    [
        Flops(0.2).bind(chain([64, 64, 128, 128, 256, 256])),
        Channels(0.2).bind(filters_table([1, 2, 4, 8] * 100)),
    ],
)
def test_a_training_step_needs_few_evaluations(bound: BoundBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    s = project(torch.rand(bound.num_units, dtype=torch.float64, generator=generator), bound)
    z = s + 0.012 + 0.012 * torch.randn(bound.num_units, dtype=torch.float64, generator=generator)
    calls = 0
    evaluate = bound.expected

    def counted(point: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return evaluate(point)

    monkeypatch.setattr(bound, "expected", counted)
    projected = project(z, bound)
    assert float(evaluate(projected)) == pytest.approx(bound.limit, rel=1e-9)
    assert calls <= 12


def test_the_tightest_budget_empties_everything() -> None:
    """At a limit of exactly the minimum, only the at-least-one rule is left."""
    table = chain([2, 2])  # least 27 + 9 + 10 + 10 = 56, dense 54 + 36 + 20 + 10 = 120
    bound = Flops(math.nextafter(56 / 120, 1)).bind(table)
    s = project(torch.ones(4), bound)
    assert float(bound.expected(s)) <= bound.limit
    assert float(s.max()) < 1e-4


def test_wrong_arguments_are_refused() -> None:
    bound = Flops(0.5).bind(chain([4]))
    with pytest.raises(ValueError, match="`z` has 2 entries that are NaN or infinite"):
        project(f64([0.5, math.nan, math.inf, 0.1]), bound)


# --- in a fixed number of kernels ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    table=cost_tables(),
    budget=st.sampled_from([Channels, Params, Flops]),
    share=st.floats(1e-6, 0.99),
    size=st.sampled_from([1.0, 0.1, 1e-3, 1e-8]),
    data=st.data(),
)
def test_multisection_is_feasible_and_raises_nothing(
    table: CostTable, budget: type[Budget], share: float, size: float, data: st.DataObject
) -> None:
    """On any table, those included whose first units cost so much that lowering s raises the cost."""
    bound = bind(budget, table, share)
    reals = st.lists(REALS, min_size=table.num_units, max_size=table.num_units)
    before = project(f64(data.draw(reals)), bound)
    z = before + size * f64(data.draw(reals))
    s = Multisection(bound)(z, before)
    inside = z.clamp(0, 1)
    assert bool(((s >= 0) & (s <= inside)).all())
    assert float(bound.expected(s)) <= bound.limit
    if float(bound.expected(inside)) <= bound.limit * (1 - 1e-14):  # many at once, sums may round otherwise
        assert torch.equal(s, inside)
    lowered = (inside - s)[(s > 0) & (inside < 1)]  # as far as 0 and 1 let one see, all by the same, or by filters
    filters = table.unit_filters.double()[(s > 0) & (inside < 1)] if budget is Channels else torch.ones_like(lowered)
    if lowered.numel():
        torch.testing.assert_close(lowered / filters, (lowered / filters).max().expand_as(filters), rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    budget=st.sampled_from([Channels, Params, Flops]),
    share=st.floats(0.01, 0.99),
    size=st.sampled_from([0.1, 1e-2, 1e-4]),
    data=st.data(),
)
def test_multisection_agrees_with_project(
    widths: list[int], budget: type[Budget], share: float, size: float, data: st.DataObject
) -> None:
    """On networks of a few units, where every one that meets 0 or 1 is a kink: to 1e-3 of the step."""
    table = chain(widths)
    bound = bind(budget, table, share)
    reals = st.lists(REALS, min_size=table.num_units, max_size=table.num_units)
    before = project(f64(data.draw(reals)), bound)
    z = before + size * f64(data.draw(reals))
    s = Multisection(bound)(z, before)
    np.testing.assert_allclose(s, project(z, bound), rtol=0, atol=1e-3 * size)
    assert bool((s <= project(z, bound) + 1e-9).all())  # and never on the dear side


NETWORKS = {
    "plain": lambda: chain([64, 64, 128, 128, 256, 256]),
    "residual": lambda: trace(resnet20(num_classes=10), torch.zeros(1, 3, 32, 32)).costs,
    "residual, one mask per stream": lambda: (
        trace(resnet20(num_classes=10), torch.zeros(1, 3, 32, 32), coupling="stream").costs
    ),
    "depthwise": lambda: trace(mobilenet_v1(num_classes=10, width=0.25), torch.zeros(1, 3, 64, 64)).costs,
}


@pytest.mark.parametrize("budget", [Flops(0.05), Flops(0.3), Params(0.1), Channels(0.3)], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.slow
def test_multisection_meets_the_limit_on_networks(network: str, budget: Budget) -> None:
    """Steps as Adam makes them, up and down, large and small: within 1e-7 of the limit, and never above."""
    table = NETWORKS[network]()
    bound = budget.bind(table)
    projection, s = Multisection(bound), uniform_start(bound)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        lr = (0.012, 0.05, 1e-4, 1e-9)[step % 4]
        z = s + lr * (0.3 + torch.randn(table.num_units, dtype=torch.float64, generator=generator))
        exact, before, s = project(z, bound), s, projection(z, s)
        assert float(bound.expected(s)) <= bound.limit
        if not torch.equal(exact, z.clamp(0, 1)):
            assert float(bound.expected(s)) >= (1 - 1e-7) * bound.limit
        torch.testing.assert_close(s, exact, rtol=0, atol=1e-7)
        assert torch.equal(projection(s, before), s)  # idempotent


def test_multisection_where_all_units_rise_alike() -> None:
    """Then the point before is the answer, at the end of the bracket."""
    bound = Flops(0.3).bind(chain([16, 16]))
    before = uniform_start(bound)
    for size in (1.0, 1e-3, 1e-12):
        torch.testing.assert_close(Multisection(bound)(before + size, before), before, rtol=0, atol=1e-9)


def test_multisection_from_a_point_that_helps_nothing() -> None:
    """`before` may be anything: then the bracket is the whole way down."""
    bound = Flops(0.3).bind(chain([16, 16]))
    z = torch.linspace(0.3, 1.2, 32, dtype=torch.float64)
    s = Multisection(bound)(z, torch.ones(32).double())
    assert float(bound.expected(s)) <= bound.limit
    torch.testing.assert_close(s, project(z, bound), rtol=0, atol=1e-4)


def test_multisection_at_the_tightest_budget() -> None:
    bound = Flops(math.nextafter(56 / 120, 1)).bind(chain([2, 2]))  # the least possible; see above
    s = Multisection(bound)(torch.ones(4).double(), torch.zeros(4).double())
    assert float(bound.expected(s)) <= bound.limit
    assert float(s.max()) < 1e-3
