"""The uniform network: one share for all widths, the largest that fits, initialised for its size."""

import math
from dataclasses import replace

import pytest
import torch

from slimstart import SparseTraining, trace
from slimstart.errors import BudgetError
from slimstart.flop_counter import flops
from slimstart.lab import models
from slimstart.lab.methods import front_heavy, uniform, uniform_mask
from slimstart.policies import Budget, Channels, EqualWorth, Flops, Params
from tests.traced import traced
from tests.zoo import ZOO

WIDTHS = EqualWorth(depth=0, tilt=0)  # all layers, and equal fractions at the start


@pytest.mark.parametrize("budget", [Flops(0.1), Flops(0.5), Params(0.2), Channels(0.3), Flops(1.0)], ids=str)
@pytest.mark.parametrize("coupling", ["stream", pytest.param("filter", marks=pytest.mark.slow)])
def test_the_share_is_the_largest_that_fits(budget: Budget, coupling: str) -> None:
    graph = traced("resnet20", 16, coupling)
    mask = uniform_mask(graph, budget, align=1)
    bound = budget.bind(graph.costs)

    def of(share: float) -> torch.Tensor:  # slow and obvious
        kept = torch.zeros(graph.num_units, dtype=torch.bool)
        for group in graph.groups:
            number = max(1, round(share * len(group.units)))
            kept[group.units.start : group.units.start + number] = True
        return kept

    shares = [i / 2000 for i in range(2001)]
    best = max(share for share in shares if bound.cost(of(share)) <= bound.limit)
    assert bound.cost(of(best)) <= bound.cost(mask) <= bound.limit  # the rest of the budget is given out
    widths, rounded = (torch.bincount(graph.costs.unit_group[some]) for some in (mask, of(best)))
    assert bool(((widths - rounded).abs() <= 1).all())


def test_it_equals_a_network_built_by_hand() -> None:
    dense = models.build("vgg16", num_classes=10)
    graph = trace(dense, torch.zeros(1, 3, 32, 32), "stream")
    by_hand = models.build("vgg16", num_classes=10, width=0.25)
    small = uniform(
        dense,
        graph,
        Flops(flops(by_hand, torch.zeros(1, 3, 32, 32)) / flops(dense, torch.zeros(1, 3, 32, 32))),
        align=1,
    )
    shapes = {name: parameter.shape for name, parameter in by_hand.named_parameters()}
    assert {name: parameter.shape for name, parameter in small.named_parameters()} == shapes


def test_weights_are_scaled_for_their_fan_in() -> None:
    dense = models.build("vgg19", num_classes=10)
    for module in dense.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.reset_parameters()  # PyTorch's own: uniform, with variance 1 / (3 fan_in)
    graph = trace(dense, torch.zeros(1, 3, 32, 32), "stream")
    for name, weight in uniform(dense, graph, Flops(0.1)).named_parameters():
        if weight.dim() == 4 and weight.numel() > 5000:
            assert float(weight.detach().var() * 3 * weight[0].numel()) == pytest.approx(1, rel=0.1), name


def test_an_impossible_budget_is_refused() -> None:
    graph = trace(models.build("resnet20", num_classes=10), torch.zeros(1, 3, 16, 16))
    with pytest.raises(BudgetError, match="feasible from"):
        uniform_mask(graph, Flops(1e-5))


@pytest.mark.parametrize("align", [1, 8])
def test_a_front_heavy_network_is_wider_at_its_front_and_fills_the_same_budget(align: int) -> None:
    graph = trace(models.build("vgg16", num_classes=10), torch.zeros(1, 3, 32, 32))
    budget, profile = Flops(0.1), front_heavy(graph)
    bound = budget.bind(graph.costs)
    masks = [uniform_mask(graph, budget, align, some) for some in (None, profile)]
    assert all(0.95 * bound.limit < bound.cost(mask) <= bound.limit for mask in masks)
    even, front = (torch.bincount(graph.costs.unit_group[mask]).double() for mask in masks)
    ratio = front / even
    assert float(profile[0] / profile[-1]) == pytest.approx(4)
    slack = 0.1 if align == 1 else 0.5
    assert torch.allclose((ratio / ratio[-1]).log(), (profile / profile[-1]).log(), atol=slack)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if (entry.min_coverage or 0) > 0.9])
def test_any_network_can_be_narrowed(name: str) -> None:
    model, inputs = ZOO[name].factory(), ZOO[name].example_inputs()
    graph = trace(model, inputs, "stream")
    bound = Flops(1.0).bind(graph.costs)
    budget = Flops((0.5 * bound.minimum + 0.5 * bound.dense) / bound.dense)
    assert flops(uniform(model, graph, budget), inputs) <= budget.fraction * flops(model, inputs)


@pytest.mark.parametrize("align", [4, 8])
def test_widths_in_multiples_where_the_budget_allows_them(align: int) -> None:
    graph = trace(models.build("vgg16", num_classes=10, width=0.5), torch.zeros(1, 3, 32, 32))
    budget = Flops(0.2)
    mask = uniform_mask(graph, budget, align)
    widths = [int(mask[group.units.start : group.units.stop].sum()) for group in graph.groups]
    sizes = [len(group.units) for group in graph.groups]
    assert all(width % align == 0 for width, size in zip(widths, sizes, strict=True) if size >= 8 * align)
    assert all(width % (2 * align) == 0 for width, size in zip(widths, sizes, strict=True) if size >= 32 * align)
    bound = budget.bind(graph.costs)
    assert 0.97 * bound.limit < bound.cost(mask) <= bound.limit
    assert torch.equal(
        uniform_mask(graph, Flops(0.003), align), uniform_mask(graph, Flops(0.003), 1)
    )  # too few for that


@pytest.mark.parametrize("name", ["vgg19", "resnet32", "mobilenet_v1", "small"])
@pytest.mark.parametrize("budget", [Flops(0.1), Flops(0.018), Params(0.2), Channels(0.3)], ids=str)
def test_a_search_starts_from_the_uniform_network(name: str, budget: Budget) -> None:
    graph = trace(models.build(name, num_classes=10), torch.zeros(1, 3, 32, 32), "stream")
    if budget.fraction < Flops(1.0).bind(graph.costs).minimum / Flops(1.0).bind(graph.costs).dense:
        pytest.skip("no sub-network is so small")
    assert torch.equal(uniform_mask(graph, budget), WIDTHS.start(graph.costs, budget).best_guess())
    for align in (1, 4):
        expected = replace(WIDTHS, align=align).start(graph.costs, budget).best_guess()
        assert torch.equal(uniform_mask(graph, budget, align), expected)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if (entry.min_coverage or 0) > 0.9][::6])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_any_search_starts_from_the_uniform_network(name: str, share: float) -> None:
    graph = trace(ZOO[name].factory(), ZOO[name].example_inputs(), "stream")
    bound = Flops(1.0).bind(graph.costs)
    budget = Flops(((1 - share) * bound.minimum + share * bound.dense) / bound.dense)
    assert torch.equal(uniform_mask(graph, budget), WIDTHS.start(graph.costs, budget).best_guess())


def test_a_training_starts_from_the_uniform_network() -> None:
    model = models.build("small", num_classes=10, width=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparse = SparseTraining(model, optimizer, torch.zeros(1, 3, 28, 28), Flops(0.2), policy=WIDTHS)
    assert torch.equal(sparse.mask, uniform_mask(sparse.graph, Flops(0.2)))


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1e3, 1e9])
def test_any_profile_keeps_to_the_budget(spread: float, align: int) -> None:
    graph = traced("resnet20", 16)
    profile = torch.logspace(0, math.log10(spread), len(graph.groups), dtype=torch.float64)
    bound = Flops(0.2).bind(graph.costs)
    assert bound.cost(uniform_mask(graph, Flops(0.2), align, profile)) <= bound.limit


def test_a_narrow_network_lies_in_memory_like_its_dense_one() -> None:
    dense = models.build("resnet20", num_classes=10).to(memory_format=torch.channels_last)
    small = uniform(dense, trace(dense, torch.zeros(1, 3, 16, 16), "stream"), Flops(0.3))
    assert small.stage1[0].conv1.weight.shape[1] < 16
    assert small.stage1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not small.stage1[0].conv1.weight.is_contiguous()
