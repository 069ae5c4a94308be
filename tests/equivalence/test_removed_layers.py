"""Removed layers: derived graphs are those of networks without them, and narrow networks equal gated ones."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slimstart import TraceError, compact, flops, load, save, trace, verify
from slimstart.lab import models
from slimstart.narrow.compact import masked
from slimstart.narrow.removed_layers import PassThrough, modules_of, replacement
from slimstart.policies import Channels, Flops, Params
from slimstart.policies.expected_cost import ExpectedCost
from tests.zoo import ZOO, call, shake

WITH_LAYERS = [
    "vgg_bn", "resnet_basic", "resnet_bottleneck", "resnet_option_a", "wide_resnet", "resnext", "mobilenet_v1",
    "mobilenet_v2", "convnext", "vit_fused", "nanogpt", "decoder_expand", "encoder_stack_prenorm", "listed_vit",
    "summed_conv_net", "summed_gpt",
]  # fmt: skip


def shortened(model, layers):
    model = copy.deepcopy(model)
    for name, num_results in modules_of(layers):
        model.set_submodule(name, replacement(model.get_submodule(name), num_results))
    return model


def subsets(layers):
    names = [layer.name for layer in layers]
    return [names, *[[name] for name in names[:3]], *map(list, itertools.islice(itertools.combinations(names, 2), 2))]


@pytest.mark.parametrize("coupling", ["stream", "filter"])
@pytest.mark.parametrize("name", WITH_LAYERS)
def test_costs_without_layers_are_those_of_a_network_that_never_had_them(name, coupling):
    torch.manual_seed(0)
    entry = ZOO[name]
    model, inputs = entry.factory(), entry.example_inputs()
    graph = trace(model, inputs, coupling)
    assert graph.layers
    generator = torch.Generator().manual_seed(1)
    for names in subsets(graph.layers):
        derived = graph.without(names)
        direct = trace(shortened(model, derived.removed), inputs, coupling)
        assert derived.filters.keys() == direct.filters.keys()
        for number in range(4):
            # The masks of both graphs, from one mask for every filter of the shortened network.
            kept = torch.rand(direct.num_units, generator=generator) < (1.0, 0.7, 0.3, 0.0)[number]
            for layer, units in direct.filters.items():  # what the whole network always keeps, this one could drop
                always = units[derived.filters[layer] < 0]
                kept[always[always >= 0]] = True
            kept = direct.costs.at_least_one(kept)
            mask = torch.zeros(graph.num_units, dtype=torch.bool)
            for layer, units in direct.filters.items():
                own = derived.filters[layer]
                mask[own[own >= 0]] = torch.cat([kept, torch.ones(1, dtype=torch.bool)])[units[own >= 0]]  # -1: always
            one, other = derived.select(mask), direct.select(kept)
            assert derived.flops_within(one.happens[:-1]) == direct.flops_within(other.happens[:-1])
            for tensor in direct.tensors:
                dense = dict(model.state_dict())[tensor].shape
                assert one.shape(tensor, dense) == other.shape(tensor, dense), tensor


@pytest.mark.parametrize("coupling", ["stream", "filter"])
@pytest.mark.parametrize("name", WITH_LAYERS)
def test_narrow_networks_without_layers_equal_gated_ones(name, coupling):
    torch.manual_seed(0)
    entry = ZOO[name]
    report = verify(entry.factory(), entry.example_inputs(), coupling, num_masks=3)
    assert report.max_error < 1e-10


# --- exact costs, by enumeration -------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Linear layers of equal width, and a residual block; one of them writes into its stream."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second, self.act2 = nn.Linear(2, 2), nn.ReLU()
        self.third, self.act3 = nn.Linear(2, 2), nn.ReLU()
        self.stem, self.block = nn.Linear(2, 2), Branch()
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        x = self.act2(self.second(torch.relu(self.first(x))))
        return self.head(self.block(self.stem(self.act3(self.third(x)))))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def all_masks(n):
    return torch.tensor(list(itertools.product([False, True], repeat=n)))


@pytest.mark.parametrize("coupling", ["stream", "filter"])
def test_cost_of_every_mask_and_every_set_of_layers_is_what_the_narrow_network_has(coupling):
    model, x = Chain(), torch.randn(1, 3)
    graph = trace(model, x, coupling)
    assert [layer.modules for layer in graph.layers] == [("second", "act2"), ("third", "act3"), ("block",)]
    for number in range(8):
        derived = graph.without(layer.name for i, layer in enumerate(graph.layers) if number >> i & 1)
        budgets = [budget(1.0).bind(derived.costs) for budget in (Flops, Params)]
        for mask in all_masks(graph.num_units)[::61]:
            selection = derived.select(mask)
            small = compact(model, selection)
            assert budgets[0].cost(mask) == flops(small, x) == derived.flops_within(selection.happens[:-1])
            assert budgets[1].cost(mask) == sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("coupling", ["stream", "filter"])
def test_expected_cost_without_layers_is_the_mean_over_all_masks(coupling):
    graph = trace(Chain(), torch.randn(1, 3), coupling)
    s = torch.linspace(0.2, 0.9, graph.num_units, dtype=torch.float64)
    masks = all_masks(graph.num_units)
    chances = torch.where(masks, s, 1 - s).prod(1)
    for number in (2, 5, 7):
        table = graph.without(layer.name for i, layer in enumerate(graph.layers) if number >> i & 1).costs
        for polynomial in (table.flops, table.params):
            cost = ExpectedCost(table, polynomial)
            mean = sum(float(p) * cost.of_mask(mask) for p, mask in zip(chances, masks, strict=True))
            assert float(cost.mean(s)) == pytest.approx(mean, rel=1e-12)


def test_filters_of_removed_layers_are_not_counted():
    graph = trace(Chain(), torch.randn(1, 3), "filter")
    everything = torch.ones(graph.num_units, dtype=torch.bool)
    assert Channels(1.0).bind(graph.costs).cost(everything) == 2 + 2 + 2 + 2 + 2 + 2
    assert Channels(1.0).bind(graph.without(["third", "block"]).costs).cost(everything) == 2 + 2 + 2


def test_layers_can_be_removed_one_after_the_other_or_at_once():
    model, x = Chain(), torch.randn(2, 3)
    graph = trace(model, x)
    one, other = graph.without(["second"]).without(["block", "third"]), graph.without(["block", "second", "third"])
    for mask in all_masks(graph.num_units)[::7]:
        assert torch.equal(one.select(mask).happens, other.select(mask).happens)
        assert torch.equal(compact(model, one.select(mask))(x), compact(model, other.select(mask))(x))
    assert not one.layers


# --- what is removed, and what is not --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet20", "vgg16", "mobilenet_v1", "wrn28_10"])
def test_removable_layers_of_the_networks_of_the_paper(name):
    with torch.device("meta"):
        model = models.build(name, num_classes=10, in_channels=3, width=0.1)
    model = model.to_empty(device="cpu")
    graph = trace(model, torch.randn(2, 3, 32, 32))
    expected = {
        "resnet20": [f"stage{s}.{b}" for s, b in [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]],
        "vgg16": [f"features.{i}" for i in (3, 10, 17, 20, 27, 30, 34, 37, 40)],
        "mobilenet_v1": [f"features.{i}" for i in (15, 27, 39, 45, 51, 57, 63, 75)],
        "wrn28_10": [f"stage{s}.{b}" for s in (1, 2, 3) for b in (1, 2, 3)],
    }[name]
    assert [layer.name for layer in graph.layers] == expected


def test_a_layer_that_cannot_go_is_named_with_the_reason():
    graph = trace(ZOO["vgg_bn"].factory(), ZOO["vgg_bn"].example_inputs())
    with pytest.raises(ValueError, match=r"'features.4' cannot be removed: its input is \(2, 8, 8, 8\) and its output"):
        graph.without(["features.4"])
    with pytest.raises(ValueError, match="'nothing' cannot be removed: no layer of that name can"):
        graph.without(["nothing"])
    assert "layers that can go as a whole:\n  features.8, features.9, features.10\n" in str(graph)


@pytest.mark.parametrize("kept", ["features.9", "features.8.weight", "features"])
def test_keep_protects_layers(kept):
    graph = trace(ZOO["vgg_bn"].factory(), ZOO["vgg_bn"].example_inputs(), keep=[kept])
    assert "features.8" not in [layer.name for layer in graph.layers]
    assert graph.not_removable["features.8"] == "asked for by `keep`"


class Odd(nn.Module):
    """Layers of equal width that cannot go, each for another reason."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.one, self.other = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.other.weight = self.one.weight
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.strided = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.twice(self.twice(self.stem(x)).relu()).relu()
        x = self.other(self.one(x).relu()).relu()
        return self.head(self.strided(self.first(x).relu() + self.second(x).relu()))


def test_reasons_why_layers_cannot_go():
    assert dict(trace(Odd(), torch.randn(2, 3, 8, 8)).not_removable) == {
        "stem": "its input is (2, 3, 8, 8) and its output (2, 4, 8, 8)",
        "twice": "it is called more than once, or has several names",
        "one": "one.weight is used in another place, too",
        "first": "other layers write to its output, or are tied to it",
        "second": "other layers write to its output, or are tied to it",
        "strided": "its input is (2, 4, 8, 8) and its output (2, 4, 4, 4)",
        "head": "its input is (2, 4, 4, 4) and its output (2, 2, 4, 4)",
    }


class UsedTwice(nn.Module):
    """Flat chains of which a tensor within the chain begins a stream, to which scaled branches are added."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.depthwise, self.up = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1)
        self.down, self.conv = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm, self.more, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.depthwise(self.stem(x))
        x = torch.add(x, self.down(torch.relu(self.up(x))), alpha=0.5)
        x = self.conv(x.relu())
        return self.head(torch.add(x, self.more(self.norm(x)), alpha=0.5))


@pytest.mark.parametrize("coupling", ["stream", "filter"])
def test_a_chain_ends_where_its_tensors_are_used_in_a_stream(coupling):
    report = verify(UsedTwice(), torch.randn(2, 3, 8, 8), coupling)
    assert report.max_error < 1e-10
    chains = [layer.modules for layer in report.graph.layers]
    # With one mask for all writers, both sides of the depthwise convolution have the same channels.
    assert chains == ([("depthwise", "up")] if coupling == "stream" else [("up",)])


@pytest.mark.parametrize("name", ["resnet_basic", "wide_resnet", "mobilenet_v2"])
def test_networks_without_layers_are_the_same_without_ports(name):
    torch.manual_seed(0)
    model, x = shake(ZOO[name].factory()).double().eval(), ZOO[name].example_inputs().double()
    graph = trace(model, x, "filter")
    mask = torch.rand(graph.num_units) < 0.5
    for names in subsets(graph.layers):
        selection = graph.without(names).select(mask)
        expected, found = compact(model, selection)(x), compact(model, selection, plain=True)(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Late(nn.Module):
    """A layer whose output meets a stream only after a normalisation: without ports it is as wide as the stream."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.more, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.norm2(torch.relu(self.conv(torch.relu(self.norm1(self.stem(x))))))
        return self.head(y + self.more(x))


def test_a_layer_whose_channels_are_those_of_a_stream_without_ports_cannot_go():
    graph = trace(Late(), torch.randn(2, 3, 8, 8), "filter")
    assert not graph.layers
    assert "belongs to a residual stream" in graph.not_removable["conv"]


class Aliased(nn.Module):
    """An activation with two names."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.act = self.other_name = nn.ReLU()

    def forward(self, x):
        return self.fc(self.other_name(self.conv(self.stem(x))))


def test_modules_with_two_names_and_modules_with_hooks_cannot_go():
    assert [layer.modules for layer in trace(Aliased(), torch.randn(2, 3, 4, 4)).layers] == [("conv",)]
    model = Kinds()
    model.blocks[1].register_forward_hook(lambda *_: None)
    assert [layer.name for layer in trace(model, torch.randn(2, 5)).layers][:1] == ["blocks.0"]
    assert "blocks.1" not in [layer.name for layer in trace(model, torch.randn(2, 5)).layers]


class Kinds(nn.Module):
    """A network that reads settings of blocks that are called with one tensor, and of modules in them."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(5, 6), nn.ModuleList([Kind(), Kind()]), nn.Linear(6, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            full = block.kind == "full" and block.config.kind == "full" and block.kinds[0] == block.act.kind == "full"
            x = block(x if full else x.relu())
        return self.head(x)


class Kind(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.kinds, self.config = "full", ["full"], SimpleNamespace(kind="full")
        self.up, self.act, self.down = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)
        self.act.kind = "full"

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def test_the_identity_has_the_settings_of_the_block_that_it_replaces():
    report = verify(Kinds(), torch.randn(2, 5))
    assert [layer.name for layer in report.graph.layers] == ["blocks.0", "blocks.1"]


class Several(nn.Module):
    """Blocks that return a second tensor, which is read for some of them."""

    def __init__(self, read=(), returned=()):
        super().__init__()
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([Gated() for _ in range(3)])
        self.read, self.returned = read, returned

    def forward(self, x):
        x, extra, returned = self.embed(x), 0.0, []
        for i, block in enumerate(self.blocks):
            x, gate = block(x)
            extra = extra + gate.mean() if i in self.read else extra
            returned += [gate] if i in self.returned else []
        return self.head(x) + extra, returned


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid()), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        gate = self.gate(x)
        return x + self.down(gate * self.up(x)), gate


def test_a_block_can_go_if_its_other_results_are_not_used():
    report = verify(Several(read=[1]), torch.randn(2, 5))
    assert {layer.name: layer.num_results for layer in report.graph.layers} == {"blocks.0": (2,), "blocks.2": (2,)}
    assert report.graph.not_removable["blocks.1.down"] == "another of its results is used"
    returned = verify(Several(returned=[0, 1]), torch.randn(2, 5)).graph
    assert [layer.name for layer in returned.layers] == ["blocks.2"]


class Standardised(nn.Module):
    """A residual block whose convolution computes its weight (BiT, NFNet)."""

    def __init__(self):
        super().__init__()
        self.conv = StandardisedConv(6, 6, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x.relu())


class StandardisedConv(nn.Conv2d):
    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, self.weight - mean, self.bias, padding=1)


def test_a_residual_block_with_computed_weights_can_go():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Standardised(), nn.Conv2d(6, 2, 1))
    assert [layer.name for layer in verify(model, torch.randn(2, 3, 6, 6)).graph.layers] == ["1"]


@pytest.mark.parametrize("coupling", ["stream", "filter"])
def test_a_residual_block_without_its_branch_is_the_identity(coupling):
    """Behind a ReLU, to zero the branch is to remove the block: a reference that knows nothing of removed layers."""
    torch.manual_seed(0)
    model = shake(models.build("resnet20", num_classes=10, in_channels=3, width=0.5)).double().eval()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    graph = trace(model, x, coupling)
    mask = torch.rand(graph.num_units) < 0.6
    gone = ["stage1.0", "stage2.2", "stage3.1"]
    selection = graph.without(gone).select(mask)
    expected = masked(model, graph.select(selection.mask))
    for name in gone:
        nn.init.zeros_(expected.get_submodule(name).bn2.weight)
        nn.init.zeros_(expected.get_submodule(name).bn2.bias)
    if coupling == "filter":  # there, channels that only removed branches write are missing elsewhere, too
        expected = masked(expected, selection)
    torch.testing.assert_close(compact(model, selection)(x), expected(x), rtol=0, atol=1e-10)


# --- the module that results -----------------------------------------------------------------------------------------


def narrow_vgg():
    torch.manual_seed(0)
    model = shake(ZOO["vgg_bn"].factory()).eval()
    graph = trace(model, ZOO["vgg_bn"].example_inputs())
    mask = torch.rand(graph.num_units, generator=torch.Generator().manual_seed(0)) < 0.6
    return compact(model, graph.without(["features.8", "features.18"]).select(mask))


def test_identities_take_the_place_of_removed_layers():
    small = narrow_vgg()
    gone = {*range(8, 11), *range(18, 21)}
    assert {i for i, layer in enumerate(small.features) if isinstance(layer, nn.Identity)} == gone
    names = {name for name, _ in small.named_parameters()}
    assert not any(name.startswith(("features.8.", "features.9.", "features.18.")) for name in names)


def test_an_exported_network_is_shorter():
    small, x = narrow_vgg(), ZOO["vgg_bn"].example_inputs()
    program = torch.export.export(small, (x,))
    torch.testing.assert_close(program.module()(x), small(x))
    count = sum("conv2d" in str(node.target) for node in program.graph.nodes)
    whole = torch.export.export(ZOO["vgg_bn"].factory().eval(), (x,))
    assert count == sum("conv2d" in str(node.target) for node in whole.graph.nodes) - 2


def test_a_network_without_layers_is_saved_and_loaded(tmp_path):
    small, x = narrow_vgg(), ZOO["vgg_bn"].example_inputs()
    save(small, tmp_path / "small")
    again = load(tmp_path / "small", ZOO["vgg_bn"].factory).eval()
    assert torch.equal(again(x), small(x))
    assert copy.deepcopy(again).state_dict().keys() == small.state_dict().keys()


def test_blocks_with_more_arguments_pass_their_first_one_on():
    layer = PassThrough(2)
    x = torch.randn(2, 3)
    found = layer(x, torch.ones(1), mask=None)
    assert found[0] is x
    assert found[1:] == (None,)
    assert PassThrough()(x, mask=None) is x


class Masked(nn.Module):
    """A block with a second argument, which returns a tuple and has a setting that the model reads."""

    def __init__(self):
        super().__init__()
        self.kind, self.scale = "full", 2.0
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, mask=None):
        return (x + self.down(torch.relu(self.up(x))) * mask, None)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(5, 6), nn.ModuleList([Masked(), Masked()]), nn.Linear(6, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask=1.0 if block.kind == "full" else 0.0)[0]
        return self.head(x)


def test_blocks_that_return_tuples_can_go():
    assert verify(Blocks(), torch.randn(2, 5)).max_error < 1e-10
    model, x = Blocks(), torch.randn(2, 5)
    graph = trace(model, x)
    assert [layer.num_results for layer in graph.layers] == [(2,), (2,)]
    small = compact(model, graph.without(["blocks.0"]).select(torch.ones(graph.num_units, dtype=torch.bool)))
    assert torch.equal(small(x), model.head(model.blocks[1](model.embed(x), 1.0)[0]))


def test_verify_finds_a_tie_that_is_missing(monkeypatch):
    """Without the tie between input and output, a narrow network without the layer has other channels than it needs."""
    from slimstart.graph import removable

    monkeypatch.setattr(removable._Search, "_ties", lambda *_: ())
    with pytest.raises(TraceError, match=r"fails|differs"):
        verify(ZOO["vgg_bn"].factory(), ZOO["vgg_bn"].example_inputs())


def test_calls_of_the_zoo_still_work_without_all_their_layers():
    for name in WITH_LAYERS:
        entry = ZOO[name]
        model, inputs = entry.factory().eval(), entry.example_inputs()
        graph = trace(model, inputs)
        whole = torch.ones(graph.num_units, dtype=torch.bool)
        small = compact(model, graph.without(layer.name for layer in graph.layers).select(whole))
        call(small, inputs)
        assert flops(small, inputs) < flops(model, inputs)
