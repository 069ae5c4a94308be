"""The rule for depth, and tilted widths at the start: by arithmetic on small networks."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import BudgetError, Channels, EqualWorth, Flops, Params, trace
from slimstart.graph import ChannelGraph
from slimstart.lab import models
from slimstart.policies import joined
from slimstart.policies.depth import GAMMA, LENGTH, LONG, SHORT, STEPS, layers_to_remove
from tests.traced import traced


def convolutions(*depths: int, width: int = 8) -> nn.Sequential:
    """A stem, then stages of equal convolutions, each at a quarter of the positions of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for stage, depth in enumerate(depths):
        layers += [nn.MaxPool2d(2)] if stage else []
        layers += [part for _ in range(depth) for part in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def linear_layers(number: int) -> nn.Sequential:
    inner = [part for _ in range(number) for part in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *inner, nn.Linear(16, 4))


def graph_of(model: nn.Module, shape: tuple[int, ...] = (3, 16, 16)) -> ChannelGraph:
    return trace(model, torch.zeros(1, *shape), "stream")


def kept(graph: ChannelGraph, removed: tuple[int, ...]) -> list[str]:
    return [layer.name for number, layer in enumerate(graph.layers) if number not in removed]


def per_stage(graph: ChannelGraph, depths: tuple[int, ...], removed: tuple[int, ...]) -> list[list[int]]:
    """The layers that remain, by their number in their stage."""
    assert len(graph.layers) == sum(depths)
    ends = list(itertools.accumulate(depths, initial=0))
    return [[i - a for i in range(a, b) if i not in removed] for a, b in itertools.pairwise(ends)]


# --- how many --------------------------------------------------------------------------------------------------------


def test_the_constants_of_the_rule() -> None:
    assert (GAMMA, LENGTH, STEPS, SHORT, LONG) == (0.6, 0.3, 8000, 0.5, 2.0)
    assert EqualWorth().depth == GAMMA


@pytest.mark.parametrize(
    ("budget", "total_steps", "remain"),
    [
        (0.5, None, 13),  # 20 * 0.5 ** 0.6 = 13.2
        (0.2, None, 8),  # 20 * 0.2 ** 0.6 = 7.6
        (0.1, None, 5),  # 20 * 0.1 ** 0.6 = 5.02
        (0.1, 8000, 5),
        (0.1, 4000, 4),  # times 0.5 ** 0.3 = 0.812: 4.08
        (0.1, 1000, 3),  # times 0.125 ** 0.3 = 0.536: 2.69
        (0.1, 500, 3),  # times 1 / 2, as 0.0625 ** 0.3 = 0.435 is less: 2.51
        (0.1, 1, 3),
        (0.1, 16000, 6),  # times 2 ** 0.3 = 1.231: 6.18
        (0.1, 64000, 9),  # times 8 ** 0.3 = 1.866: 9.37
        (0.1, 10**6, 10),  # times 2, as 125 ** 0.3 = 4.26 is more: 10.05
        (0.5, 64000, 20),  # 13.2 * 1.866 = 24.6 are more than there are
        (1.0, None, 20),
    ],
)
def test_number_of_layers_for_a_budget_and_a_length(budget: float, total_steps: int | None, remain: int) -> None:
    depths = (12, 8)
    graph = traced_convolutions(depths)
    removed = layers_to_remove(graph.costs, Flops(budget), total_steps=total_steps)
    assert list(removed) == sorted(set(removed))
    assert sum(map(len, per_stage(graph, depths, removed))) == remain
    assert EqualWorth().start(graph.costs, Flops(budget), total_steps).removed == removed


_GRAPHS: dict[tuple[int, ...], ChannelGraph] = {}


def traced_convolutions(depths: tuple[int, ...]) -> ChannelGraph:
    if depths not in _GRAPHS:
        _GRAPHS[depths] = graph_of(convolutions(*depths), (3, 8, 8))  # of which few convolutions see all
    return _GRAPHS[depths]


def test_of_several_budgets_the_smallest_counts() -> None:
    costs = traced_convolutions((12, 8)).costs
    both = layers_to_remove(costs, joined([Params(0.5), Flops(0.1)]))
    assert both == layers_to_remove(costs, Flops(0.1))
    assert len(both) == 15


@pytest.mark.parametrize(("exponent", "remain"), [(5, 3), (0.6, 4), (0.2, 5)])
def test_enough_layers_remain_to_fill_the_budget(exponent: float, remain: int) -> None:
    """Six layers of 16 x 16 = 256 multiply-adds, and 8 x 16 + 16 x 4 = 192 around them: 1728 in all; half of it is 864.

    The rule would keep 6 * 0.5 ** 5 = 0.2 layers. With two, the network costs 704 at its full widths, with three 960.
    """
    graph = graph_of(linear_layers(6), (8,))
    assert Flops(1.0).bind(graph.costs).dense == 1728
    removed = layers_to_remove(graph.costs, Flops(0.5), exponent)
    assert kept(graph, removed) == [f"{2 + 2 * number}" for number in range(remain)]
    policy = EqualWorth(depth=exponent, align=1).start(graph.costs, Flops(0.5))
    assert 0.45 < policy.expected_cost <= 0.5


def test_depth_0_keeps_all_layers() -> None:
    costs = traced_convolutions((12, 8)).costs
    assert layers_to_remove(costs, Flops(0.05), 0) == ()
    assert EqualWorth(depth=0).start(costs, Flops(0.05), 100).removed == ()


def test_a_network_without_removable_layers_keeps_them() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    graph = graph_of(nn.Sequential(*layers, nn.Linear(16, 4)))
    assert not graph.layers
    assert layers_to_remove(graph.costs, Flops(0.1)) == ()
    assert EqualWorth().start(graph.costs, Flops(0.1), 100).removed == ()


# --- which -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "remain"),
    [
        (0.7, [[0, 1, 2, 3], [0, 1, 2]]),  # 9 * 0.7 ** 0.6 = 7.3: the largest stage loses two
        (0.55, [[0, 1, 2], [0, 1, 2]]),  # 6.3
        (0.4, [[0, 1, 2], [0, 1]]),  # 5.2: of two stages of three, the last loses a layer first
        (0.3, [[0, 1], [0, 1]]),  # 4.4
        (0.15, [[0, 1], [0]]),  # 2.9
        (0.05, [[0], [0]]),  # 1.5, so 2
    ],
)
def test_the_largest_stage_loses_a_layer_first_and_of_equals_the_last(budget: float, remain: list[list[int]]) -> None:
    graph = traced_convolutions((6, 3))
    assert per_stage(graph, (6, 3), layers_to_remove(graph.costs, Flops(budget))) == remain


def test_layers_of_one_stage_go_from_its_end_and_stages_take_turns() -> None:
    graph = traced_convolutions((2, 2, 2))
    number = len(graph.layers)
    found = []
    for exponent in torch.linspace(0, 4, 200).tolist():
        removed = layers_to_remove(graph.costs, Flops(0.3), exponent)
        if not found or found[-1] != removed:
            found.append(removed)
    # Layers 0 and 1, 2 and 3, 4 and 5 are stages. The second of each goes, from the last stage on; then each stage
    # has the only layer at its number of positions.
    assert found[:4] == [(), (5,), (3, 5), (1, 3, 5)]
    assert number == 6


def test_the_last_layer_with_weights_between_channels_stays_at_its_number_of_positions() -> None:
    """Not counted: a stem, which reads the image, and a depthwise layer, whose weights have one factor."""
    layers = [
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()),  # 2
        nn.MaxPool2d(2),
        *(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()),  # 6
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU()),
    ]
    graph = graph_of(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)))
    assert [layer.name for layer in graph.layers] == ["2", "6"]
    assert kept(graph, layers_to_remove(graph.costs, Flops(0.1), 4)) == ["2", "6"]


def test_a_layer_that_cannot_go_lets_the_last_one_of_its_resolution_go() -> None:
    """The second stage begins with more channels, in a layer that changes the shape."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    graph = graph_of(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)))
    assert [layer.name for layer in graph.layers] == ["2", "7"]
    assert kept(graph, layers_to_remove(graph.costs, Flops(0.1), 4)) == ["2"]


def test_vgg19_at_a_tenth_of_its_flops() -> None:
    """12 of 16 convolutions can go: 12 * 0.1 ** 0.6 = 3.01 of them remain, and the four that change the shape."""
    graph = traced("vgg19", 32, width=0.25)
    model = models.build("vgg19", num_classes=10, width=0.25)
    removed = layers_to_remove(graph.costs, Flops(0.1), total_steps=8000)
    gone, stages = {graph.layers[i].name for i in removed}, [0]
    for name, module in model.named_modules():
        stages += [0] if isinstance(module, nn.MaxPool2d) else []
        stages[-1] += isinstance(module, nn.Conv2d) and name not in gone
    assert stages[:5] == [2, 2, 1, 1, 1]
    assert len(gone) == 12 - 3


def test_convolutions_within_a_first_block_go_before_whole_blocks() -> None:
    """ResNet-50: of 2 + 3 + 5 + 2 blocks and two convolutions of the very first one, 14 * 0.1 ** 0.6 = 3.5 remain."""
    graph = traced("resnet50", 64, width=0.125)
    assert len(graph.layers) == 14
    removed = layers_to_remove(graph.costs, Flops(0.1), total_steps=8000)
    remain = [layer.modules for i, layer in enumerate(graph.layers) if i not in removed]
    modules = dict(models.build("resnet50", num_classes=10, width=0.125).named_modules())
    blocks = [name for (name,) in remain if list(modules[name].children())]
    assert len({name.rpartition(".")[0] for name in blocks}) == len(remain) == 4  # a block of each stage


def test_more_layers_go_where_one_unit_per_group_exceeds_the_budget() -> None:
    """Twelve layers of 64 positions, and two around them.

    With one unit in the only group the network costs (3 + 12) * 9 * 64 + 4 = 8644 multiply-adds. The rule would keep 6,
    which cost 5188. With two, 2884 are left.
    """
    layers = [part for _ in range(12) for part in (nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())]
    stem, head = [nn.Conv2d(3, 2, 3, padding=1)], [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 4)]
    graph = graph_of(nn.Sequential(*stem, *layers, *head), (3, 8, 8))
    dense = int(Flops(1.0).bind(graph.costs).dense)
    assert dense == (3 * 2 + 12 * 2 * 2) * 9 * 64 + 2 * 4
    with pytest.raises(BudgetError, match="8644"):
        Flops(2900 / dense).bind(graph.costs)
    removed = layers_to_remove(graph.costs, Flops(2900 / dense), 0.2)
    assert len(removed) == 10
    with pytest.raises(BudgetError, match="one unit per group already costs 2308"):  # with the last layer
        layers_to_remove(graph.costs, Flops(2300 / dense), 0.2)


class Block(nn.Module):
    """Attention and two linear layers, each on a shortcut of its own."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(20, 16), nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x))))


@pytest.mark.parametrize(
    ("budget", "total_steps", "remain"),
    [
        (0.8, None, 5),  # 6 * 0.8 ** 0.6 = 5.2
        (0.3, None, 3),  # 2.9
        (0.1, None, 2),  # 1.5
        (0.3, 500, 3),  # the same: layers with a shortcut learn in short trainings, too
        (0.3, 80_000, 6),  # times 10 ** 0.3 = 2.0: 5.8
    ],
)
def test_transformers_lose_whole_blocks_from_the_end(budget: float, total_steps: int | None, remain: int) -> None:
    graph = trace(Transformer(6), torch.zeros(1, 8, dtype=torch.int64), "stream", norms="shrink")
    assert [layer.modules for layer in graph.layers] == [(f"blocks.{number}",) for number in range(6)]
    removed = layers_to_remove(graph.costs, Flops(budget), total_steps=total_steps)
    assert kept(graph, removed) == [f"blocks.{number}" for number in range(remain)]


# --- tilted widths ---------------------------------------------------------------------------------------------------

SIZES = (200, 160, 240)


def narrowing() -> ChannelGraph:
    """Groups at 64, 16 and 4 positions, each in the layer at its positions and in the one after."""
    a, b, c = SIZES
    layers = [nn.Conv2d(3, a, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Conv2d(a, b, 3, padding=1, bias=False)]
    layers += [nn.MaxPool2d(2), nn.Conv2d(b, c, 3, padding=1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return graph_of(nn.Sequential(*layers, nn.Linear(c, 10)), (3, 8, 8))


@pytest.mark.parametrize("tilt", [0.15, 0.5, -0.3, 0])
@pytest.mark.parametrize("budget", [0.1, 0.3])
def test_fractions_at_the_start_follow_the_cost_of_a_weight(tilt: float, budget: float) -> None:
    a, b, c = SIZES
    cost_of_a_weight = (
        (3 * 9 * 64 + 9 * b * 16) / (3 * 9 + 9 * b),
        (9 * a * 16 + 9 * c * 4) / (9 * a + 9 * c),
        (9 * b * 4 + 10) / (9 * b + 10),
    )
    policy = EqualWorth(tilt=tilt, align=1).start(narrowing().costs, Flops(budget))
    profile = torch.tensor(cost_of_a_weight) ** -tilt
    wanted = torch.tensor(SIZES) * profile
    assert bool((policy.widths < torch.tensor(SIZES)).all())
    # What remains of the budget after rounding goes to the group whose units cost least.
    torch.testing.assert_close(policy.widths.float(), wanted * policy.widths[0] / wanted[0], rtol=0, atol=5)
    assert (0.99 * budget) < policy.expected_cost <= budget


@pytest.mark.parametrize("budget", [Params(0.1), Params(0.4)], ids=str)
@pytest.mark.parametrize("align", [1, 8])
def test_with_a_budget_of_parameters_all_fractions_are_equal(budget: Params, align: int) -> None:
    """Every weight costs the same, whatever the tilt."""
    costs = narrowing().costs
    uniform = EqualWorth(tilt=0, align=align).start(costs, budget).best_guess()
    for tilt in (0.15, 1, -1):
        assert torch.equal(EqualWorth(tilt=tilt, align=align).start(costs, budget).best_guess(), uniform)


@pytest.mark.parametrize("budget", [Flops(0.1), Params(0.2), Channels(0.3)], ids=str)
def test_tilted_starts_fill_the_budget_without_some_layers(budget: Flops | Params | Channels) -> None:
    graph = traced_convolutions((6, 3))
    policy = EqualWorth(tilt=1, align=1).start(graph.costs, budget, 8000)
    assert policy.removed
    bound = budget.bind(graph.costs.without(policy.removed))
    wider = [policy.best_guess() for _ in range(len(policy.widths))]
    for number, mask in enumerate(wider):
        own = (graph.costs.unit_group == number).nonzero().flatten()
        mask[own[: int(policy.widths[number]) + 1]] = True
    assert bound.cost(policy.best_guess()) <= bound.limit
    costs = [bound.cost(mask) for mask in wider if not torch.equal(mask, policy.best_guess())]
    assert min(costs) > 0.9 * bound.limit


@pytest.mark.parametrize("tilt", [1.01, -1.01, float("nan")])
def test_tilts_outside_of_their_range_are_refused(tilt: float) -> None:
    with pytest.raises(ValueError, match=r"it must be in \[-1, 1\], and 0 means equal fractions"):
        EqualWorth(tilt=tilt)


# --- what the convolutions see ---------------------------------------------------------------------------------------


def test_the_reach_of_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),  # 4 of 32 pixels
        nn.Conv2d(8, 8, 3, dilation=2, padding=2),  # 4 of 16
        *(nn.Conv2d(8, 8, 1), nn.AvgPool2d(2)),
        *(nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), nn.ReLU()),  # 0 of 8 and 2 of 8
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)),  # 2 of 8
        *(nn.Flatten(), nn.Linear(512, 4)),
    )
    costs = graph_of(model, (3, 32, 32)).costs
    assert costs.reach == 4 / 32 + 4 / 16 + (0 + 2 / 8) / 2 + 2 / 8
    # Removable are the dilated one, the two 1 x 1 (the second with the depthwise one), and the one of 1 x 3.
    assert [layer.reach for layer in costs.layers] == [4 / 16, 0, 1 / 8, 2 / 8]
    assert costs.without((0, 3)).reach == pytest.approx(4 / 32 + 1 / 8)


def test_a_convolution_that_runs_twice_widens_what_is_seen_twice() -> None:
    twice = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), twice, nn.ReLU(), twice, nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert graph_of(model, (3, 16, 16)).costs.reach == 2 * 2 / 16


@pytest.mark.parametrize(
    ("depths", "size", "remain"),
    [
        # 12 * 0.1 ** 0.6 * 0.536 = 1.6, so two layers (one in each of the first stages) would remain, with the stem.
        ((4, 4, 4), 16, [1, 1, 1]),  # 2/16 * (1 + 1) + 2/8 + 2/4 = 1; without the last stage 0.5
        ((4, 4, 4), 32, [2, 2, 2]),  # 2/32 * (1 + 2) + 2/16 * 2 + 2/8 * 2 = 0.94; with [2, 2, 1] 0.69
        ((3, 3, 3, 3), 16, [1, 1, 1, 1]),  # nothing changes: the last stage sees it all
    ],
)
def test_the_convolutions_that_remain_see_most_of_the_image(
    depths: tuple[int, ...], size: int, remain: list[int]
) -> None:
    graph = graph_of(convolutions(*depths), (3, size, size))
    removed = layers_to_remove(graph.costs, Flops(0.1), total_steps=1000)
    assert [len(stage) for stage in per_stage(graph, depths, removed)] == remain
    assert graph.costs.without(removed).reach >= 0.75


def test_a_budget_that_many_layers_would_exceed_counts_more_than_what_they_see() -> None:
    """The least feasible budget leaves the stem and one layer at every size of the feature map."""
    graph = graph_of(convolutions(4, 4, 4), (3, 32, 32))
    for share in (thousandth / 1000 for thousandth in range(1, 1000)):
        with contextlib.suppress(BudgetError):
            removed = layers_to_remove(graph.costs, Flops(share))
            break
    assert graph.costs.without(removed).reach < 0.75
    assert [len(stage) for stage in per_stage(graph, (4, 4, 4), removed)] == [1, 1, 1]


def test_linear_layers_have_no_reach() -> None:
    assert trace(linear_layers(6), torch.zeros(2, 8)).costs.reach == 0


# --- residual sums in the forward around the branches ----------------------------------------------------------------


class Summed(nn.Module):
    """Stages of branches, which modules of their own add to their inputs, or the forward of the network."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(width, 8, 3, padding=1) for width in (3, 8))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                Added() if blocks else nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
                for _ in range(depth)
            )
            for depth in (5, 3)
        )
        self.blocks, self.head = blocks, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stem, stage in zip(self.stems, self.stages, strict=True):
            x = F.max_pool2d(torch.relu(stem(x)), 2)
            for branch in stage:
                x = branch(x) if self.blocks else x + branch(x)
        return self.head(x.mean((2, 3)))


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("total_steps", [None, 1000, 30000])
def test_the_same_branches_go_wherever_the_sum_is(budget: float, total_steps: int | None) -> None:
    block, summed = graph_of(Summed(blocks=True)), graph_of(Summed(blocks=False))
    assert [layer.name for layer in summed.layers] == [layer.name for layer in block.layers]
    assert all(layer.added for layer in summed.layers)
    assert not any(layer.added for layer in block.layers)
    found = [layers_to_remove(graph.costs, Flops(budget), total_steps=total_steps) for graph in (block, summed)]
    assert found[0] == found[1]
    assert found[0] or budget > 0.25
