"""ThiNet: contributions are parts of outputs, greedy removal against brute force, scales against least squares."""

import copy
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart.graph import ChannelGroup
from slimstart.graph.readers import Reader, readers
from slimstart.lab import models
from slimstart.lab.methods import thinet
from slimstart.lab.methods.activations import Reading, observe
from slimstart.lab.methods.pruning import Trained
from slimstart.lab.methods.shares import keep_share
from slimstart.narrow.compact import compact
from slimstart.policies import Channels, Flops
from tests.trained_networks import trained


def widths(mask: Tensor, groups: tuple[ChannelGroup, ...]) -> list[int]:
    return [int(mask[group.units.start : group.units.stop].sum()) for group in groups]


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), (4, 7)),
    "linear on sequences": (lambda: nn.Linear(7, 5), (4, 3, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, stride=2, padding=2, dilation=2), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 7, 6)),
    "conv2d same": (lambda: nn.Conv2d(3, 5, 3, padding="same", dilation=2), (2, 3, 7, 6)),
    "conv2d circular": (lambda: nn.Conv2d(3, 5, 3, padding=(2, 1), padding_mode="circular"), (2, 3, 5, 6)),
    "conv2d one image": (lambda: nn.Conv2d(3, 5, 3), (3, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 3, 2), padding=(0, 1, 1), bias=False), (2, 2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_patches_times_weights_are_the_layer(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    seen: list[Reading] = []
    reader = Reader("0", "0.weight", 1, 0, torch.arange(shape[0 if "one image" in name else 1]))
    observe(nn.Sequential(layer), [reader], [(x,)], lambda net, x: net(x), lambda _, reading: seen.append(reading))
    (reading,) = seen
    patches = reading.patches(torch.arange(reading.num_positions))
    found = torch.einsum("pck,fck->pf", patches, reading.weight)
    y = layer(x)
    y = y if "linear" in name else y.movedim(0 if "one image" in name else 1, -1)
    bias = 0 if layer.bias is None else layer.bias
    torch.testing.assert_close(found, (y - bias).reshape(-1, found.shape[1]))


def test_half_precision_activations_are_read_in_float32() -> None:
    def forward(net: nn.Module, x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            net(input=x)

    def look(_: Reader, reading: Reading) -> None:
        seen.append((reading.patches(torch.arange(2)).dtype, torch.is_autocast_enabled("cpu")))

    seen: list[tuple[torch.dtype, bool]] = []
    net = nn.Linear(3, 2)
    observe(net, [Reader("", "weight", 1, 0, torch.arange(3))], [(torch.randn(2, 3).bfloat16(),)], forward, look)
    assert seen == [(torch.float32, False)]


@pytest.mark.parametrize("flat", [False, True])
def test_contributions_sum_to_sampled_outputs(flat: bool) -> None:
    layer = nn.Linear(12, 5).double() if flat else nn.Conv2d(4, 5, 3, padding=1).double()
    net = nn.Sequential(nn.Flatten() if flat else nn.Identity(), layer)
    x = torch.randn(6, 3, 2, 2, dtype=torch.float64) if flat else torch.randn(6, 4, 5, 5, dtype=torch.float64)
    # Flattened, a unit has four features. The other units belong to another group, or are always there.
    units = torch.arange(3).repeat_interleave(4) + 7 if flat else torch.tensor([7, -1, 8, 2])
    group = ChannelGroup("", range(7, 10), (), 0)
    seen: list[Tensor] = []

    def look(_: Reader, reading: Reading) -> None:
        seen.append(thinet.contributions(reading, group, torch.Generator().manual_seed(3)))

    observe(net, [Reader("1", "1.weight", 1, 0, units)], [(x,)], lambda net, x: net(x), look)
    with torch.no_grad():
        inside = (units >= 7).view(1, -1, *[1] * (layer.weight.dim() - 2))
        layer.weight.mul_(inside)  # what the group's own units give
        y = (net(x) - net(0 * x)).movedim(1, -1).reshape(-1, 5)
    generator = torch.Generator().manual_seed(3)
    positions, filters = (torch.randint(high, (thinet.NUM_SAMPLES,), generator=generator) for high in y.shape)
    assert seen[0].shape == (thinet.NUM_SAMPLES, 3)
    torch.testing.assert_close(seen[0].sum(1), y[positions, filters])


def error(x: Tensor, gone: tuple[int, ...]) -> float:
    return float(x[:, list(gone)].sum(1).square().sum())


@pytest.mark.parametrize("seed", range(4))
def test_greedy_removal_against_brute_force(seed: int) -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order = thinet.removal_order(x.T @ x)
    assert sorted(order.tolist()) == list(range(6))
    gone: tuple[int, ...] = ()
    for number in range(1, 7):
        # slow and obvious: try each, sum its columns
        best = min((c for c in range(6) if c not in gone), key=lambda c: error(x, (*gone, c)))
        gone = (*gone, best)
        assert int(order[best]) == number - 1
        least = min(error(x, chosen) for chosen in itertools.combinations(range(6), number))
        assert error(x, gone) >= least - 1e-9
        assert number > 1 or error(x, gone) == pytest.approx(least)


def test_greedy_removal_is_exact_where_contributions_are_orthogonal() -> None:
    q, _ = torch.linalg.qr(torch.randn(20, 7, dtype=torch.float64))
    x = q * torch.tensor([3.0, 0.5, 2.0, 0.1, 5.0, 1.0, 4.0])
    order = thinet.removal_order(x.T @ x)
    for number in range(1, 7):
        best = min(itertools.combinations(range(7), number), key=lambda chosen: error(x, chosen))
        assert set((order < number).nonzero().squeeze(1).tolist()) == set(best)


def test_scales_are_those_of_least_squares() -> None:
    x = torch.randn(50, 8, dtype=torch.float64)
    x[:, 3] += 0.7 * x[:, 5]
    x[:, 6] = 0  # a dead one that is kept: any scale would do, and it keeps its own
    kept = torch.tensor([True, False, True, False, True, True, True, False])
    found = thinet.scales(x.T @ x, kept)
    alive = [0, 2, 4, 5]
    y = x.sum(1)
    expected = torch.linalg.lstsq(x[:, alive], y[:, None]).solution[:, 0]
    torch.testing.assert_close(found[alive], expected)
    assert found[[1, 3, 6, 7]].tolist() == [1, 1, 1, 1]
    before, after = (y - x[:, kept].sum(1)).norm(), (y - x[:, kept] @ found[kept]).norm()
    assert after < 0.99 * before


def planted(dead: list[int]) -> nn.Sequential:
    """Twelve filters, some of them dead."""
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 3, stride=2), nn.Flatten(),
        nn.Linear(36, 10),
    )  # fmt: skip
    with torch.no_grad():
        net[0].weight[dead] = 0
        net[0].bias[dead] = 0
    return net


def test_dead_channels_go_first() -> None:
    dead = [1, 4, 5, 9]
    net = planted(dead)
    given = trained(net, Channels(12 / 16), 8)
    graph = given.graph
    assert [len(group.units) for group in graph.groups] == [12, 4]
    ((_, gram),) = thinet.gram_matrices(given, graph.groups[0], _all(given))
    assert (thinet.removal_order(gram) < 4).nonzero().squeeze(1).tolist() == dead
    mask = thinet.choose(given)  # nine of twelve stay, and three of four
    assert widths(mask, graph.groups) == [9, 3]
    assert set((~mask[:12]).nonzero().squeeze(1).tolist()) < set(dead)


def _all(given: Trained) -> Tensor:
    return torch.ones(given.graph.num_units, dtype=torch.bool)


def test_the_scale_of_a_duplicate_channel_includes_the_removed_one() -> None:
    net = planted([]).double()
    twins = {2: 7, 3: 8, 10: 11}
    with torch.no_grad():
        for a, b in twins.items():
            net[0].weight[b], net[0].bias[b] = 2 * net[0].weight[a], 2 * net[0].bias[a]
            # Of the same reading, too, and of a weak one: so they are the first to go.
            net[3].weight[:, a] *= 1e-3
            net[3].weight[:, b] = 3 * net[3].weight[:, a]
        net[1].running_mean.zero_()
    given = trained(net.eval(), Channels(13 / 16), 8)
    (_, gram), *_ = thinet.gram_matrices(given, given.graph.groups[0], _all(given))
    kept = thinet.removal_order(gram) >= 3
    assert all(bool(kept[a] ^ kept[b]) for a, b in twins.items())
    found = thinet.scales(gram, kept)
    # x_b = 6 x_a, so x_a + x_b is 7/6 of x_b, or 7 of x_a.
    torch.testing.assert_close(found[list(twins.values())], torch.full((3,), 7 / 6, dtype=torch.float64))


def test_scales_are_multiplied_into_the_readers() -> None:
    net = planted([]).double().eval()
    given = trained(net, Channels(10 / 16), 8, num_images=32)
    before = copy.deepcopy(net)
    mask = thinet.choose(given)
    assert widths(mask, given.graph.groups) == [8, 2]  # of 12 and 4: 0.625 of each, rounded
    changed = {name for name, value in net.named_parameters() if not torch.equal(value, before.get_parameter(name))}
    assert changed == {reader.weight for reader in readers(given.graph, net)}
    kept = mask[:12]
    assert torch.equal(net[3].weight[:, ~kept], before[3].weight[:, ~kept])
    with torch.no_grad():
        inputs, weight = before[:3](given.batches[0][0]), before[3].weight
        found = (net[3].weight / weight)[0, kept, 0, 0]
        torch.testing.assert_close(net[3].weight[:, kept], weight[:, kept] * found[:, None, None])
        # All outputs in place of samples, channel after channel, and least squares for those that stay.
        x = torch.stack([F.conv2d(inputs[:, [c]], weight[:, [c]], stride=2).flatten() for c in range(12)], 1)
        best = torch.linalg.lstsq(x[:, kept], x.sum(1, keepdim=True)).solution[:, 0]
    errors = [float((x.sum(1) - x[:, kept] @ w).norm()) for w in (best, found, torch.ones_like(best))]
    assert errors[0] < errors[1] < 1.01 * errors[0] < errors[2]


def test_rounds_cut_group_after_group_to_the_same_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinet, "NUM_SAMPLES", 200)
    net = models.build("small", num_classes=10, in_channels=3)
    final = trained(net, Flops(0.3), 16)
    once = widths(keep_share(torch.zeros(final.graph.num_units), final.graph, final.budget), final.graph.groups)
    dense = [len(group.units) for group in final.graph.groups]
    fractions = thinet.round_fractions(final.graph, final.budget, 2)
    assert fractions == sorted(fractions, reverse=True)
    left = 1.0
    for turn, fraction in enumerate(fractions, 1):
        given = trained(net, Flops(fraction / left), 16, round=turn, num_rounds=2)
        mask = thinet.choose(given)
        done = len(dense) * turn // 2
        assert widths(mask, given.graph.groups) == once[:done] + dense[done:]
        left *= given.budget.cost(mask) / given.budget.dense
        net = compact(net, given.graph.select(mask))


def test_all_groups_are_cut_when_those_of_a_round_do_not_suffice() -> None:
    net = models.build("resnet20", num_classes=10, width=0.5)
    given = trained(net, Flops(0.2), 16, round=2, num_rounds=4)
    one_round = dataclasses.replace(given, round=1, num_rounds=1)
    assert thinet.group_widths(given).tolist() == thinet.group_widths(one_round).tolist()
    mask = _all(given)
    for group in given.graph.groups[3:6]:
        mask[group.units.start + 1 : group.units.stop] = False
    assert given.budget.cost(mask) > given.budget.limit  # indeed
