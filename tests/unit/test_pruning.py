"""Pruning of trained networks: norms, shares, curves and thresholds, each against a slow and obvious reference."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimstart import trace
from slimstart.errors import BudgetError, TraceError
from slimstart.graph import ChannelGraph
from slimstart.graph.readers import readers
from slimstart.lab import models
from slimstart.lab.methods import (
    PRUNERS,
    l1_filter,
    provable,
    random_mask,
    slimming,
    soft_filter,
    thinet,
)
from slimstart.lab.methods.pruning import Choose, Trained, even_rounds, filter_norms, filter_rows
from slimstart.lab.methods.shares import keep_best, keep_share, largest_within
from slimstart.lab.methods.thresholded_gates import LogNorms
from slimstart.narrow import compact, compact_fresh
from slimstart.policies import Budget, Channels, Flops, Params
from slimstart.policies.masks import places
from tests.tiny_networks import with_dropout
from tests.trained_networks import loss_fn
from tests.trained_networks import trained as trained_with
from tests.zoo import ZOO, call, shake

BUDGETS: list[Budget] = [Flops(0.3), Params(0.5), Channels(0.4), Flops(1.0)]


def trained(model: nn.Module, budget: Budget, **more: Any) -> Trained:
    return trained_with(model.eval(), budget, num_images=8, num_batches=6, **more)


def plain() -> nn.Module:
    """Three groups of 10, 20 and 15 units, each with a normalisation."""
    torch.manual_seed(0)
    return shake(
        nn.Sequential(
            nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(),
            nn.Conv2d(10, 20, 3, stride=2), nn.BatchNorm2d(20), nn.ReLU(),
            nn.Conv2d(20, 15, 1), nn.BatchNorm2d(15), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(15, 4),
        )
    )  # fmt: skip


def by_group(mask: Tensor, graph: ChannelGraph) -> list[list[int]]:
    """The kept units of every group, counted from its first."""
    return [[u - g.units.start for u in g.units if mask[u]] for g in graph.groups]


# --------------------------------------------------------------------------- norms of filters


class Mixed(nn.Module):
    """Writers of all kinds: several into one stream, transposed and functional weights, square ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.up, self.same = nn.ConvTranspose2d(6, 5, 2, stride=2), nn.ConvTranspose2d(5, 5, 1)
        self.mix, self.again = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 7))
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (x + self.block(x.relu())).relu()
        x = self.up(x)
        x = (x + self.same(x.relu())).mean((2, 3))
        x = x @ self.mix
        return self.head((x + x.relu() @ self.again).relu())


# In which group the filters are, and along which dimension of the weight.
FILTERS = {
    "stem.weight": (0, 0),
    "block.weight": (0, 0),
    "up.weight": (1, 1),
    "same.weight": (1, 1),
    "mix": (2, 1),
    "again": (2, 1),
}


@pytest.mark.parametrize("p", [1, 2])
def test_norms_against_a_loop_over_all_weights(p: int) -> None:
    model = Mixed()
    graph = trace(model, torch.zeros(1, 3, 6, 6), "stream")
    assert [len(group.units) for group in graph.groups] == [6, 5, 7]
    powers = [0.0] * graph.num_units
    for name, (group, dim) in FILTERS.items():
        weight = model.get_parameter(name).detach()
        for index in itertools.product(*map(range, weight.shape)):
            powers[graph.groups[group].units.start + index[dim]] += abs(float(weight[index])) ** p
    wanted = torch.tensor([power ** (1 / p) for power in powers], dtype=torch.float64)
    torch.testing.assert_close(filter_norms(model, graph, p), wanted)
    if p == 2:
        torch.testing.assert_close(LogNorms(model, graph)().detach().exp(), wanted)


def test_only_filters_are_zeroed() -> None:
    model = Mixed()
    graph = trace(model, torch.zeros(1, 3, 6, 6), "stream")
    kept = torch.rand(graph.num_units) < 0.5
    wanted = copy.deepcopy(model.state_dict())
    for name, (group, dim) in FILTERS.items():
        for i in range(wanted[name].shape[dim]):
            if not kept[graph.groups[group].units.start + i]:
                wanted[name].select(dim, i).mul_(0.0)
    soft_filter.zero_(model, graph, kept, "original")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert {layer for layer, _ in filter_rows(model, graph)} == {name.removesuffix(".weight") for name in FILTERS}


# --------------------------------------------------------------------------- places, shares, rounds


def best_of_each(scores: Tensor, widths: list[int], graph: ChannelGraph) -> list[list[int]]:
    """Slow and obvious: sort by falling score, the first among equals first."""
    kept = []
    for group, width in zip(graph.groups, widths, strict=True):
        own = [float(scores[u]) for u in group.units]
        order = sorted(range(len(own)), key=lambda i: (-own[i], i))
        kept.append(sorted(order[: max(1, width)]))
    return kept


def test_places_and_the_best_of_every_group_with_ties() -> None:
    graph = trace(plain(), torch.zeros(1, 3, 8, 8), "stream")
    scores = torch.randint(0, 4, (graph.num_units,)).double()
    for widths in ([10, 20, 15], [3, 7, 1], [0, 0, 0], [1, 19, 4]):
        found = by_group(keep_best(scores, torch.tensor(widths), graph), graph)
        assert found == best_of_each(scores, widths, graph)
    place = places(scores, graph.costs.unit_group)
    for group in graph.groups:
        own = place[group.units.start : group.units.stop].tolist()
        assert sorted(own) == list(range(len(group.units)))
        for i, j in itertools.combinations(range(len(own)), 2):
            higher = scores[group.units.start + j] > scores[group.units.start + i]
            assert (own[j] < own[i]) == bool(higher)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_one_share_of_every_group_is_the_largest_that_fits(budget: Budget) -> None:
    given = trained(plain(), budget)
    scores = torch.rand(given.graph.num_units)
    found = by_group(keep_share(scores, given.graph, given.budget), given.graph)

    def cost(kept: list[list[int]]) -> int:
        mask = torch.zeros(given.graph.num_units, dtype=torch.bool)
        for group, own in zip(given.graph.groups, kept, strict=True):
            mask[[group.units.start + i for i in own]] = True
        return given.budget.cost(mask)

    shares = [[round(i / 500 * len(group.units)) for group in given.graph.groups] for i in range(501)]
    fitting = [widths for widths in shares if cost(best_of_each(scores, widths, given.graph)) <= given.budget.limit]
    assert found == best_of_each(scores, fitting[-1], given.graph)


def test_the_largest_of_a_family() -> None:
    graph = trace(plain(), torch.zeros(1, 3, 8, 8), "stream")

    def found(budget: Budget, least: int) -> int:
        """How many stay, of masks in which all groups grow by one at a time, from this many."""
        turn = places(-torch.arange(45), graph.costs.unit_group)
        bound = budget.bind(graph.costs)
        return int(largest_within(bound, lambda share: turn < least + math.floor(share * 20)).sum())

    # n of every group: min(n, 10) + min(n, 20) + min(n, 15) <= 22.5
    assert found(Channels(0.5), 1) == 7 * 3
    assert found(Channels(0.9), 1) == 10 + 15 + 15
    assert found(Channels(1.0), 1) == 45
    assert found(Channels(0.1), 3) == 9  # too much, and the caller's business


def test_every_round_takes_away_the_same_share() -> None:
    graph = trace(plain(), torch.zeros(1, 3, 8, 8), "stream")
    assert even_rounds(graph, Flops(0.125).bind(graph.costs), 3) == pytest.approx([0.5, 0.25, 0.125])
    assert even_rounds(graph, Channels(0.3).bind(graph.costs), 1) == pytest.approx([0.3])


@pytest.mark.parametrize("method", ["l1", "soft", "slimming"])
@pytest.mark.parametrize("budget", BUDGETS[:3], ids=str)
def test_the_uniform_protocol_is_one_share(method: str, budget: Budget) -> None:
    model = plain()
    given = trained(model, budget, protocol="uniform")
    scores = torch.zeros(given.graph.num_units, dtype=torch.float64)
    for (conv, norm), group in zip([(0, 1), (3, 4), (6, 7)], given.graph.groups, strict=True):
        for i, u in enumerate(group.units):
            weight = model.get_parameter(f"{conv}.weight")[i].detach().double()
            scale = float(model.get_parameter(f"{norm}.weight")[i].detach())
            scores[u] = {"l1": weight.abs().sum(), "soft": weight.norm(), "slimming": abs(scale)}[method]
    bound, sizes = budget.bind(given.graph.costs), [len(group.units) for group in given.graph.groups]
    shares = ([max(1, round(i / 2000 * size)) for size in sizes] for i in range(2001))
    widths = max(
        (
            widths
            for widths in shares
            if bound.cost(keep_best(scores, torch.tensor(widths), given.graph)) <= bound.limit
        ),
        key=sum,
    )
    assert by_group(PRUNERS[method](given), given.graph) == best_of_each(scores, widths, given.graph)


# --------------------------------------------------------------------------- L1


def test_curves_are_those_of_networks_that_are_cut_out() -> None:
    model = plain()
    given = trained(model, Flops(0.5))
    norms = filter_norms(model, given.graph, 1)
    with torch.no_grad():
        curves = l1_filter.sensitivity(given, norms)
        whole = sum(float(loss_fn(model, *batch)) for batch in given.batches[:4]) / 4
        for number, (size, row) in enumerate(zip((10, 20, 15), curves, strict=True)):
            highest = 0.0
            for fraction, found in zip(l1_filter.FRACTIONS, row, strict=True):
                widths = [10, 20, 15]
                widths[number] = max(1, round(fraction * size))
                mask = torch.zeros(given.graph.num_units, dtype=torch.bool)
                for group, own in zip(given.graph.groups, best_of_each(norms, widths, given.graph), strict=True):
                    mask[[group.units.start + i for i in own]] = True
                small = compact(model, given.graph.select(mask)).eval()
                loss = sum(float(loss_fn(small, *batch)) for batch in given.batches[:4]) / 4
                highest = max(highest, loss - whole)
                slope = 1e-6 * (1 - widths[number] / size)
                assert float(found) == pytest.approx(highest + slope, abs=1e-6)
    assert float(curves.max()) > 0.01


def test_widths_are_the_inverse_of_the_curves() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([20, 7, 64, 1, 3])
    rises = torch.rand(len(sizes), len(l1_filter.FRACTIONS), generator=generator, dtype=torch.float64)
    rises[:, 0] = 0
    rises[0, 3], rises[1, -2] = 0, 1e-9  # parts that do not rise
    curves = rises.cumsum(1)
    for tolerance in [0.0, *torch.linspace(0, 1.1 * float(curves.max()), 60).tolist(), *curves.flatten().tolist()]:
        widths = l1_filter.widths_within(curves, tolerance, sizes).tolist()
        for size, curve, width in zip(sizes.tolist(), curves.tolist(), widths, strict=True):
            points = [max(1, round(fraction * size)) for fraction in l1_filter.FRACTIONS]

            def rise(width: int, points: list[int] = points, curve: list[float] = curve) -> float:
                """Straight between two points; where several have one width, the least of them."""
                if width in points:
                    return curve[points.index(width)]
                k = next(k for k, point in enumerate(points) if point < width)
                part = (points[k - 1] - width) / (points[k - 1] - points[k])
                return curve[k - 1] + part * (curve[k] - curve[k - 1])

            assert width == min(w for w in range(1, size + 1) if rise(w) <= tolerance + 1e-12)


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.2, 0.07])
@pytest.mark.parametrize("kind", [Flops, Params, Channels])
def test_l1_keeps_to_the_budget_and_drops_a_dead_filter_first(kind: Any, budget: float) -> None:
    model = plain()
    with torch.no_grad():
        for conv, norm, unit in ((0, 1, 4), (3, 4, 0), (6, 7, 14)):
            for name in (f"{conv}.weight", f"{norm}.weight", f"{norm}.bias"):
                model.get_parameter(name)[unit] = 0
    given = trained(model, kind(budget))
    with torch.no_grad():
        mask = l1_filter.choose(given)
    assert given.budget.cost(mask) <= given.budget.limit
    for group, dead in zip(given.graph.groups, (4, 0, 14), strict=True):
        kept = mask[group.units.start : group.units.stop]
        assert bool(kept.any())
        assert bool(kept.all()) or not bool(kept[dead])
    assert not bool(mask.all())


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_l1_is_uniform_when_no_loss_rises(budget: Budget) -> None:
    def unmoved(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return torch.zeros(())

    given = trained(plain(), budget, loss_fn=unmoved)
    mask = l1_filter.choose(given)
    assert 0.8 * given.budget.limit < given.budget.cost(mask) <= given.budget.limit
    a, b, c = (len(own) / size for own, size in zip(by_group(mask, given.graph), (10, 20, 15), strict=True))
    assert max(a, b, c) - min(a, b, c) <= 0.1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_l1_treats_a_non_finite_loss_as_a_large_one(value: float) -> None:
    def fragile(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        loss = loss_fn(net, images, labels)
        lost = (net.get_parameter("3.weight").flatten(1).abs().sum(1) == 0).sum()
        return torch.where(lost > 5, torch.full_like(loss, value), loss)

    for fraction, least in ((0.6, 16), (0.06, 1)):  # 16: the last point of the curve with less than six lost
        given = trained(plain(), Flops(fraction), loss_fn=fragile)
        with torch.no_grad():
            mask = l1_filter.choose(given)
        assert given.budget.cost(mask) <= given.budget.limit
        assert len(by_group(mask, given.graph)[1]) == least


# --------------------------------------------------------------------------- soft pruning, slimming


def test_soft_pruning_zeroes_the_smallest_folded_filters_of_every_group() -> None:
    model = plain()
    given = dataclasses.replace(trained(model, Flops(0.4)), protocol="folded")
    kept = soft_filter.choose(given)
    assert given.budget.cost(kept) <= given.budget.limit
    state = model.state_dict()
    folded = [
        float(state[f"{conv}.weight"][i].norm() * state[f"{conv + 1}.weight"][i].abs())
        / math.sqrt(float(state[f"{conv + 1}.running_var"][i]) + 1e-5)
        for conv in (0, 3, 6)
        for i in range(len(state[f"{conv}.weight"]))
    ]
    assert by_group(kept, given.graph) == best_of_each(
        torch.tensor(folded), [len(o) for o in by_group(kept, given.graph)], given.graph
    )
    before = copy.deepcopy(state)
    soft_filter.zero_(model, given.graph, kept, "folded")
    for norm, group in zip((1, 4, 7), given.graph.groups, strict=True):
        for i, u in enumerate(group.units):
            for row in ("weight", "bias"):
                old, new = before[f"{norm}.{row}"][i], model.get_parameter(f"{norm}.{row}")[i].detach()
                assert torch.equal(new, old) if kept[u] else abs(float(new)) <= 2e-6 * abs(float(old))
    for name in set(before) - {f"{norm}.{row}" for norm in (1, 4, 7) for row in ("weight", "bias")}:
        assert torch.equal(model.state_dict()[name], before[name])
    assert torch.equal(soft_filter.choose(given), kept)  # what is zero is smallest
    uniform = soft_filter.choose(dataclasses.replace(given, protocol="uniform"))
    assert torch.equal(uniform, keep_share(filter_norms(model, given.graph, 2), given.graph, given.budget))


def test_zeroed_filters_return_within_an_epoch_at_an_ordinary_learning_rate() -> None:
    model = plain().train()
    given = trained(copy.deepcopy(model), Flops(0.4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = soft_filter.mask(model, given.graph, given.budget, "original")
    soft_filter.zero_(model, given.graph, kept, "original")
    assert not bool(filter_norms(model, given.graph, 2)[~kept].any())
    for _ in range(20):
        optimizer.zero_grad()
        loss_fn(model, *given.batches[0]).backward()
        optimizer.step()
    assert bool((filter_norms(model, given.graph, 2)[~kept] > 0).any())
    assert bool((soft_filter.mask(model, given.graph, given.budget, "original") & ~kept).any())


def test_a_zeroed_folded_filter_has_a_gradient_and_may_return() -> None:
    model = plain().train()
    given = trained(copy.deepcopy(model), Flops(0.4))
    kept = soft_filter.mask(model, given.graph, given.budget, "folded")
    soft_filter.zero_(model, given.graph, kept, "folded")
    small = soft_filter.folded_norms(model, given.graph)[~kept]
    optimizer = torch.optim.SGD(model.parameters(), lr=200.0)
    loss_fn(model, *given.batches[0]).backward()
    optimizer.step()
    assert bool((soft_filter.folded_norms(model, given.graph)[~kept] > 1e3 * small).all())
    returned = soft_filter.mask(model, given.graph, given.budget, "folded") & ~kept
    assert bool(returned.any())


@pytest.mark.parametrize("budget", [Flops(0.5), Flops(0.06), Params(0.2), Channels(0.1)], ids=str)
def test_one_threshold_for_the_scales_of_all_layers(budget: Budget) -> None:
    model = plain()
    with torch.no_grad():  # a layer that goes but for one unit, and negative scales
        model.get_parameter("4.weight").mul_(0.01)
        model.get_parameter("7.weight").mul_(-1)
    given = trained(model, budget)
    values = [abs(v) for norm in (1, 4, 7) for v in model.get_parameter(f"{norm}.weight").tolist()]
    mask = slimming.choose(given)
    leaders = {max(group.units, key=lambda u: values[u]) for group in given.graph.groups}
    order = sorted(leaders) + sorted(set(range(len(values))) - leaders, key=lambda u: -values[u])
    best = []
    for length in range(len(leaders), len(order) + 1):
        tried = torch.zeros(len(values), dtype=torch.bool)
        tried[order[:length]] = True
        if given.budget.cost(tried) <= given.budget.limit:
            best = sorted(order[:length])
    assert mask.nonzero().squeeze(1).tolist() == best
    dropped = [values[u] for u in range(len(values)) if not mask[u]]
    assert all(values[u] > max(dropped) for u in best if u not in leaders)


class Residual(nn.Module):
    """A stream that is normalised by its two writers and by its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.stem(x))
        x = self.norms[2](x + self.norms[1](self.block(x))).relu()
        return self.last(x).mean((2, 3))


def test_a_unit_has_the_largest_of_its_scales() -> None:
    model = Residual()
    values = torch.randn(3, 6)
    with torch.no_grad():
        for norm, own in zip(model.norms, values, strict=True):
            norm.weight.copy_(own)  # type: ignore[operator, union-attr]
    found = slimming.scales(model, trace(model, torch.zeros(1, 3, 8, 8), "stream"))
    assert found.tolist() == pytest.approx([max(abs(v) for v in column) for column in values.T.tolist()])


def test_slimming_needs_normalisations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)
    )
    graph = trace(model, torch.zeros(1, 3, 8, 8), "stream")
    with pytest.raises(TraceError, match="needs a batch norm after every layer that can shrink, and 3 has none"):
        slimming.scales(model, graph)
    model[1] = nn.BatchNorm2d(4, affine=False)
    with pytest.raises(TraceError, match="and 0 has none; choose another method"):
        slimming.scales(model, graph)


# --------------------------------------------------------------------------- a random structure


@pytest.mark.parametrize("budget", [Flops(0.3), Params(0.1), Channels(0.5)], ids=str)
def test_random_widths_meet_the_budget(budget: Budget) -> None:
    graph = trace(models.build("vgg16", num_classes=10, width=0.25), torch.zeros(1, 3, 32, 32), "stream")
    bound, seen = budget.bind(graph.costs), set()
    for seed in range(8):
        mask = random_mask(graph, budget, torch.Generator().manual_seed(seed))
        assert 0.9 * bound.limit < bound.cost(mask) <= bound.limit
        kept = by_group(mask, graph)
        assert all(own == list(range(len(own))) != [] for own in kept)
        shares = torch.rand(len(graph.groups), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sizes = [len(group.units) for group in graph.groups]
        # One scale for all of them: there is a number between those that each width allows.
        lowest, highest = 0.0, float("inf")
        for own, size, share in zip(map(len, kept), sizes, shares.tolist(), strict=True):
            lowest = max(lowest, (own - 0.5) / size / share if own > 1 else 0.0)
            highest = min(highest, (own + 0.5) / size / share if own < size else float("inf"))
        assert lowest <= highest + 1e-9
        seen.add(tuple(map(len, kept)))
    assert len(seen) == 8
    whole = random_mask(graph, type(budget)(1.0), torch.Generator())
    assert bool(whole.all())
    with pytest.raises(BudgetError, match="feasible from"):
        random_mask(graph, type(budget)(1e-6), torch.Generator())


def test_a_random_structure_is_initialised_for_its_size() -> None:
    model = plain()
    graph = trace(model, torch.zeros(1, 3, 8, 8), "stream")
    mask = random_mask(graph, Flops(0.4), torch.Generator().manual_seed(2))
    small = compact_fresh(model, graph.select(mask))
    a, b, _ = map(len, by_group(mask, graph))
    wanted = model.get_parameter("3.weight")[:b, :a] * (10 / a) ** 0.5
    torch.testing.assert_close(small.get_parameter("3.weight"), wanted)
    assert torch.equal(small.get_parameter("4.bias"), model.get_parameter("4.bias")[:b])


# --------------------------------------------------------------------------- every method

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, Budget]] = {
    "with_dropout": (lambda: with_dropout(10, 3), 16, Params(0.4)),
    "vgg16": (lambda: models.build("vgg16", num_classes=10, width=0.25), 32, Flops(0.1)),
    "resnet20": (lambda: models.build("resnet20", num_classes=10, width=0.5), 16, Channels(0.3)),
    "mobilenet_v1": (lambda: models.build("mobilenet_v1", num_classes=10, width=0.25), 32, Flops(0.2)),
}
SLOW = {("l1", "vgg16"), *((method, "mobilenet_v1") for method in PRUNERS)}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, marks=pytest.mark.slow if (method, name) in SLOW else ())
        for method in PRUNERS
        for name in NETWORKS
    ],
)
def test_masks_are_within_the_budget_and_networks_unchanged(
    method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinet, "NUM_SAMPLES", 200)
    make, size, budget = NETWORKS[name]
    net = make()
    given = trained_with(net, budget, size, num_images=2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():  # as in a run
        masks = [PRUNERS[method](dataclasses.replace(given, protocol=protocol)) for protocol in ("original", "uniform")]
    for mask in masks:
        assert (mask.dtype, mask.device.type) == (torch.bool, "cpu")
        assert given.budget.cost(mask) <= given.budget.limit
        assert all(bool(mask[group.units.start : group.units.stop].any()) for group in given.graph.groups)
    uniform = by_group(keep_share(torch.zeros(given.graph.num_units), given.graph, given.budget), given.graph)
    assert list(map(len, by_group(masks[1], given.graph))) == list(map(len, uniform))
    assert all(module.training and not module._forward_hooks for module in net.modules())
    scaled = {reader.weight for reader in readers(given.graph, net)} if method == "thinet" else set()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items() if key not in scaled)


@pytest.mark.parametrize("choose", [thinet.choose, provable.choose])
@pytest.mark.parametrize(
    "name",
    [
        *("conv3d", "shared_conv", "non_local"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet_transposed", "densenet", "pixel_shuffle")),
    ],
)
def test_methods_that_read_activations_on_other_networks(
    choose: Choose, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinet, "NUM_SAMPLES", 200)
    net, inputs = shake(ZOO[name].factory()), ZOO[name].example_inputs()
    graph = trace(net, inputs, "stream")
    given = Trained(net, graph, Flops(0.4).bind(graph.costs), [(inputs,)], call)
    mask = choose(given)
    assert given.budget.cost(mask) <= given.budget.limit
    if name == "non_local":  # these are read by a product of two activations only: filter norms decide
        (group,) = (group for group in graph.groups if group.name == "theta")
        assert group.layers == ("theta", "phi")
        kept = mask[group.units.start : group.units.stop]
        norms = net.theta.weight.flatten(1).square().sum(1) + net.phi.weight.flatten(1).square().sum(1)
        assert norms[kept].min() > norms[~kept].max()
        if choose is provable.choose:
            found = provable.sensitivities(given)[0][group.units.start : group.units.stop]
            torch.testing.assert_close(found, (norms / norms.max()).sqrt().detach().double())
