"""Provable filter pruning: sensitivities against nested loops, widths against the bound written out, dead channels."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import trace
from slimstart.lab import models
from slimstart.lab.methods import provable
from slimstart.policies import Channels, Flops
from tests import trained_networks

trained = functools.partial(trained_networks.trained, num_images=2)


def share(parts: list[float], c: int) -> float:
    return parts[c] / sum(parts) if sum(parts) > 0 else 0.0


def shares_of_conv(layer: nn.Conv2d, x: Tensor) -> list[float]:
    """Slow and obvious: for each sign, image, position and filter, each channel's part of the sum."""
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    x = F.pad(x, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]))
    best = [0.0] * layer.in_channels
    for w_sign, a_sign, image, f in itertools.product((1, -1), (1, -1), x, range(layer.out_channels)):
        for top in range(0, x.shape[2] - dh * (kh - 1), sh):
            for left in range(0, x.shape[3] - dw * (kw - 1), sw):
                parts = [0.0] * layer.in_channels
                for c, i, j in itertools.product(range(layer.in_channels), range(kh), range(kw)):
                    weight = w_sign * float(layer.weight[f, c, i, j])
                    activation = a_sign * float(image[c, top + i * dh, left + j * dw])
                    parts[c] += max(weight, 0) * max(activation, 0)
                best = [max(best[c], share(parts, c)) for c in range(layer.in_channels)]
    return best


def shares_of_linear(layer: nn.Linear, x: Tensor, num_units: int) -> list[float]:
    """The same, for features that are the pixels of channels one after the other."""
    best = [0.0] * num_units
    per_unit = layer.in_features // num_units
    for w_sign, a_sign, row, f in itertools.product((1, -1), (1, -1), x, range(layer.out_features)):
        parts = [0.0] * num_units
        for feature in range(layer.in_features):
            weight, activation = w_sign * float(layer.weight[f, feature]), a_sign * float(row[feature])
            parts[feature // per_unit] += max(weight, 0) * max(activation, 0)
        best = [max(best[c], share(parts, c)) for c in range(num_units)]
    return best


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("chunk", [provable.CHUNK, 100])
def test_sensitivities_against_nested_loops(
    activation: Callable[[], nn.Module], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provable, "CHUNK", chunk)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), activation(), nn.Conv2d(4, 3, (3, 2), (2, 1), (1, 0), (1, 2)), activation(), nn.Flatten(),
        nn.Linear(36, 3),
    ).double()  # fmt: skip
    given = trained(net, Channels(0.5), 8, num_batches=2)
    found, outcomes = provable.sensitivities(given)
    expected = [0.0] * 7
    with torch.no_grad():
        for images, _ in given.batches:
            first = net[:2](images)
            second = net[2:5](first)
            seen = shares_of_conv(net[2], first) + shares_of_linear(net[5], second, 3)
            expected = [max(pair) for pair in zip(expected, seen, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert outcomes.tolist() == 4 * [(3 * 4 + 1) * 6] + 3 * [2]


def test_a_unit_has_the_largest_share_of_all_its_readers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2), nn.Conv2d(4, 2, 1, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return torch.cat([self.a(x).flatten(1), self.b(x).flatten(1)], 1)

    net = Two().double()
    given = trained(net, Channels(0.5), 6)
    found, outcomes = provable.sensitivities(given)
    with torch.no_grad():
        x = net.stem(given.batches[0][0]).relu()
        expected = [max(pair) for pair in zip(shares_of_conv(net.a, x), shares_of_conv(net.b, x), strict=True)]
    torch.testing.assert_close(found[:4], torch.tensor(expected, dtype=torch.float64))
    assert outcomes[:4].tolist() == 4 * [(3 * 3 + 1) * 4]


def expected_distinct(probabilities: list[float], draws: int) -> float:
    """By enumeration of all sequences."""
    total = 0.0
    for sequence in itertools.product(range(len(probabilities)), repeat=draws):
        total += len(set(sequence)) * math.prod(probabilities[c] for c in sequence)
    return total


def test_widths_are_the_expected_number_of_different_draws() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    graph = trace(net, torch.zeros(1, 3, 4, 4), "stream")
    sensitivity = torch.tensor([0.9, 0.3, 0.0, 0.6], dtype=torch.float64)
    outcomes = torch.tensor([5.0, 17.0, 2.0, 2.0], dtype=torch.float64)
    seen = set()
    for error in [10.0**exponent for exponent in (1, 2, 2.6, 2.8, 3, 3.2, 3.4, 4, 5, 30)]:
        bound = 3 * (6 + 2 * error) * 2 * 3 * 1.8 * math.log(8 * 17 / 1e-16) / error**2
        draws = math.ceil(bound)
        expected = expected_distinct([0.5, 1 / 6, 0, 1 / 3], draws) if draws < 7 else 3
        (width,) = provable.widths_for(error, sensitivity, outcomes, graph).tolist()
        if draws < 7:
            assert width == math.ceil(expected - 1e-9)
        seen.add(width)
    assert seen == {1, 2, 3}  # never the one without any share


def test_one_error_for_all_groups_the_least_that_the_budget_allows() -> None:
    given = trained(models.build("resnet20", num_classes=10, width=0.5), Flops(0.3), 16)
    graph, (sensitivity, outcomes) = given.graph, provable.sensitivities(given)
    groups = [slice(group.units.start, group.units.stop) for group in graph.groups]

    def of(error: float) -> Tensor:  # slow and obvious
        kept = torch.zeros(graph.num_units, dtype=torch.bool)
        for units in groups:
            s = sensitivity[units].tolist()
            log = math.log(8 * max(outcomes[units].tolist()) / 1e-16)
            draws = math.ceil(18 * (6 + 2 * error) / error**2 * sum(s) * log)
            width = math.ceil(sum(1 - (1 - value / sum(s)) ** draws for value in s) - 1e-9)
            best = sorted(range(len(s)), key=lambda c: -s[c])[: max(width, 1)]
            kept[[units.start + c for c in best]] = True
        return kept

    mask = provable.choose(given)
    cost = given.budget.cost(mask)
    assert cost <= given.budget.limit
    least = min(e for e in range(-20, 80) if given.budget.cost(of(10 ** (e / 10))) <= given.budget.limit) / 10
    masks = [of(10 ** (least - i / 1000)) for i in range(100)]
    assert any(torch.equal(mask, other) for other in masks)
    assert cost == max(c for c in map(given.budget.cost, masks) if c <= given.budget.limit)


def test_dead_channels_go_first() -> None:
    dead = [1, 4, 5, 9]
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 10, 3), nn.Flatten(1))
    with torch.no_grad():
        net[0].weight[dead] = 0
        net[0].bias[dead] = 0
    for protocol in ("original", "uniform"):
        given = trained(net, Channels(8 / 12), 5, protocol=protocol)
        assert (~provable.choose(given)).nonzero().squeeze(1).tolist() == dead
    # There is nothing to gain from them, whatever the budget.
    assert (~provable.choose(trained(net, Channels(1.0), 5))).nonzero().squeeze(1).tolist() == dead
