"""A narrow network equals the masked dense one: outputs, gradients, statistics and cost."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.narrow.stream_ports import StreamPort
from slimstart.policies import Flops, Params
from tests import network_reference as reference
from tests.network_reference import Live, live
from tests.zoo import ZOO, call, cast, shake, tensors

COUPLINGS = ("filter", "stream")
TOLERANCE = 1e-10


@functools.cache
def verified(name, coupling):
    """A float32 network of the zoo without random layers, its inputs and its graph, verified; read only."""
    torch.manual_seed(0)
    model = shake(ZOO[name].factory())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    inputs = ZOO[name].example_inputs()
    return model, inputs, slimstart.verify(model, inputs, coupling, num_masks=2 if coupling == "filter" else 1)


def traced(name, coupling):
    model, inputs, report = verified(name, coupling)
    return model, inputs, report.graph


def random_mask(graph, ratio, seed):
    return torch.rand(graph.num_units, generator=torch.Generator().manual_seed(seed)) < ratio


def run(model, inputs, training):
    """Outputs and gradients of one forward and backward."""
    model.train(training).zero_grad()
    outputs = [t for t in tensors(call(model, inputs)) if t.is_floating_point()]
    if any(t.requires_grad for t in outputs):
        sum((t * torch.linspace(-1, 2, t.numel()).view(t.shape)).sum() for t in outputs).backward()
    return [t.detach() for t in outputs], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(actual, expected, what):
    assert actual.shape == expected.shape, what
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")


def assert_is_masked_network(model, inputs, layers, narrow):
    """The narrow network against the hooked dense one, in both modes."""
    model, inputs = copy.deepcopy(model).double(), cast(inputs, torch.float64)
    dense, narrow = reference.masked(model, layers), copy.deepcopy(narrow).double()
    for name, tensor in narrow.state_dict().items():
        expected = reference.cut(model, layers, name, model.state_dict()[name])
        assert torch.equal(tensor, expected), f"{name}: {tuple(tensor.shape)}, not {tuple(expected.shape)}"
    for training in (False, True):
        expected, expected_gradients = run(dense, inputs, training)
        actual, gradients = run(narrow, inputs, training)
        assert expected
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, b, f"output {number}, training={training}")
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            assert_close(gradient, reference.cut(model, layers, name, expected_gradients[name]), f"gradient of {name}")
    statistics = dict(dense.named_buffers())
    for name, buffer in narrow.named_buffers():
        if name in statistics:
            assert_close(buffer, reference.cut(model, layers, name, statistics[name]), f"buffer {name}")


# --- the zoo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", ZOO)
def test_verify_passes_for_the_zoo(name, coupling):
    model, _, report = verified(name, coupling)
    assert report.max_error < TOLERANCE, report.worst
    assert report.num_comparisons >= len(list(model.parameters()))
    assert report.graph.coupling == coupling
    if coupling == "filter" and ZOO[name].min_coverage is not None:
        assert report.graph.coverage >= ZOO[name].min_coverage


# Layers that `Entry.whole` names because their stream is normalised over channels. Under filter coupling the stream
# itself stays whole, and one of its several writers may still write zeros there.
WRITERS_OF_WHOLE_STREAMS = {
    "vit_fused": {"patch_embed"},
    "vit_separate": {"patch_embed"},
    "vit_product": {"patch_embed"},
    "decoder_repeat_interleave": {"tok"},
    "decoder_expand": {"tok"},
    "nanogpt": {"transformer.wpe"},
    "nanogpt_loss": {"transformer.wpe"},
}


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.whole])
def test_layers_that_cannot_be_pruned_are_not(name, coupling):
    model, _, graph = traced(name, coupling)
    smallest = slimstart.compact(model, graph.select(torch.zeros(graph.num_units, dtype=torch.bool)))
    for layer in set(ZOO[name].whole) - (WRITERS_OF_WHOLE_STREAMS.get(name, set()) if coupling == "filter" else set()):
        assert not any(layer in group.layers for group in graph.groups), layer
        assert any(whole == layer or whole.startswith(layer + ".") for whole in graph.not_prunable), layer
        weights = [n for n, p in model.named_parameters() if n.startswith(layer + ".") and p.dim() > 1]
        assert weights
        dim = 1 if isinstance(model.get_submodule(layer), nn.Embedding) else 0
        for weight in weights:
            assert smallest.get_parameter(weight).shape[dim] == model.get_parameter(weight).shape[dim], weight


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow
def test_cost_table_is_exact(name, coupling):
    model, inputs, graph = traced(name, coupling)
    flops, params = Flops(1.0).bind(graph.costs), Params(1.0).bind(graph.costs)
    for seed, ratio in enumerate((0.2, 0.5, 0.8)):
        mask = random_mask(graph, ratio, seed)
        narrow = slimstart.compact(model, graph.select(mask))
        assert flops.cost(mask) == slimstart.flops(narrow, inputs)
        assert params.cost(mask) == sum(p.numel() for p in narrow.parameters())
    assert params.dense == sum(p.numel() for p in model.parameters())
    if coupling == "filter":
        assert flops.dense == slimstart.flops(model, inputs)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", ZOO)
def test_filters_groups_and_units_agree(name, coupling):
    _, _, graph = traced(name, coupling)
    assert [u for group in graph.groups for u in group.units] == list(range(graph.num_units))
    counted = torch.zeros(graph.num_units, dtype=torch.int64)
    for units in graph.filters.values():
        counted += torch.bincount(units[units >= 0], minlength=graph.num_units)
    assert counted.tolist() == graph.costs.unit_filters.tolist()
    for number, group in enumerate(graph.groups):
        assert graph.costs.unit_group[group.units.start : group.units.stop].tolist() == [number] * len(group.units)
        assert group.num_filters == int(graph.costs.unit_filters[group.units.start : group.units.stop].sum())
        for layer in group.layers:
            assert set(graph.filters[layer].tolist()) & set(group.units), layer
            assert layer not in graph.not_prunable
    for layer, units in graph.filters.items():
        assert (layer in graph.not_prunable) == bool((units < 0).all()), layer


# --- against the network with hooks ----------------------------------------------------------------------------------

# What the reference does not understand, and why.
NOT_IN_REFERENCE = {
    "position_constant": "ones are added in place of a bias that goes with its channel",
    "created_width": "ones are as wide as the channels, and go with them",
    "batched_experts": "one product for all experts has no module that a hook could watch",
    "outer_product": "a product of two layers goes with the channels of one, and is not zero without them",
    "pad_channels": "padded zeros are not live, but always there",
    "where_branches": "a parameter of the model itself goes with channels",
    "state_space": "a parameter of the model itself goes with channels",
    "fourier_channels": "ones cancel in a transform",
    "dropout2d": "random numbers in the forward",
    "summed_gpt": "random numbers in the forward",
    "summed_conv_net": "a parameter of the model itself goes with channels",
    "grouped_upsampling": "a transposed convolution of one filter per group goes with its input",
    "functional_batch_norm": "the layer is a function",
    "functional_linear": "the layers are functions",
    "gpt2_conv1d": "the layers are functions",
    "einsum_ffn": "the layers are functions",
    "joined_bias": "a layer is a function",
    "computed_bias": "a layer is a function",
    "standardised_convs": "weights are computed",
    "standardised_convs_gain": "weights are computed",
    "weight_norm": "weights are computed",
    "einsum_contraction": "a layer is a function",
    "tied_autoencoder": "two layers are functions",
}


@pytest.mark.parametrize("coupling", ["filter", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in ZOO if name not in NOT_IN_REFERENCE])
@pytest.mark.slow
def test_zoo_equals_the_network_with_hooks(name, coupling):
    model, inputs, graph = traced(name, coupling)
    selection = graph.select(random_mask(graph, 0.5, seed=3))
    layers = reference.liveness(model, inputs, graph.filters, selection.mask)
    assert_is_masked_network(model, inputs, layers, slimstart.compact(model, selection))


def test_masking_changes_what_is_compared():
    model, inputs, graph = traced("resnet_basic", "filter")
    selection = graph.select(random_mask(graph, 0.5, seed=3))
    layers = reference.liveness(model, inputs, graph.filters, selection.mask)
    with torch.no_grad():
        dense, hooked = model.eval()(inputs), reference.masked(model, layers).eval()(inputs)
    assert (dense - hooked).abs().max() > 0.01
    wrong = layers | {"conv1": Live(layers["conv1"].inputs, ~layers["conv1"].outputs)}
    with pytest.raises(AssertionError):
        assert_is_masked_network(model, inputs, wrong, slimstart.compact(model, selection))


# --- networks small enough to say by hand what stays -----------------------------------------------------------------


def conv(inputs, outputs, **options):
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def pooled(x):
    return x.mean([2, 3])


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 4), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = conv(4, 5), nn.BatchNorm2d(5)
        self.fc = nn.Linear(5, 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(pooled(F.relu(self.bn2(self.conv2(x)))))


class Residual(nn.Module):
    """A stem and a basic block: two layers write into one stream."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.conv1, self.bn1 = conv(4, 3), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = conv(3, 4), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        y = F.relu(self.bn1(self.conv1(x)))
        return self.fc(pooled(F.relu(x + self.bn2(self.conv2(y)))))


class PreActivation(nn.Module):
    """Normalisations read the stream itself: each has the rows that earlier layers write."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, 5)
        self.bn1, self.conv1 = nn.BatchNorm2d(5), conv(5, 5)
        self.bn2, self.conv2 = nn.BatchNorm2d(5), conv(5, 5)
        self.bn3, self.fc = nn.BatchNorm2d(5), nn.Linear(5, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.conv1(F.relu(self.bn1(x)))
        x = x + self.conv2(F.relu(self.bn2(x)))
        return self.fc(pooled(F.relu(self.bn3(x))))


class AddsToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.last = conv(3, 4), conv(4, 4), conv(4, 3)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.conv(x)
        return self.fc(pooled(F.relu(self.last(x))))


class SigmoidBranch(AddsToItsInput):
    """Half of an absent channel would be added to the stream, so both writers share a mask."""

    def forward(self, x):
        x = self.stem(x)
        x = x + torch.sigmoid(self.conv(x))
        return self.fc(pooled(F.relu(self.last(x))))


class Concat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 3), conv(3, 4)
        self.bn, self.last = nn.BatchNorm2d(7), conv(7, 3)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        x = F.relu(self.bn(torch.cat([self.a(x), self.b(x)], dim=1)))
        return self.fc(pooled(self.last(x)))


class Depthwise(nn.Module):
    """Two filters on every channel."""

    def __init__(self):
        super().__init__()
        self.conv, self.deep, self.bn = conv(3, 4), conv(4, 8, groups=4), nn.BatchNorm2d(8)
        self.point, self.fc = nn.Conv2d(8, 3, 1), nn.Linear(3, 2)

    def forward(self, x):
        x = F.relu(self.bn(self.deep(F.relu(self.conv(x)))))
        return self.fc(pooled(F.relu(self.point(x))))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = conv(3, 4), nn.Linear(4, 3), nn.Linear(3, 4)
        self.last, self.fc = conv(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        x = self.conv(x)
        gate = torch.sigmoid(self.fc2(F.relu(self.fc1(pooled(x)))))
        return self.fc(pooled(F.relu(self.last(x * gate[:, :, None, None]))))


class Flatten(nn.Module):
    """Four pixels of each channel become four features."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = conv(3, 3), nn.Linear(12, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = F.adaptive_max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class ChunkGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = conv(3, 6), conv(3, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, dim=1)
        return self.fc(pooled(F.relu(self.last(a * torch.sigmoid(b)))))


class GroupNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gn, self.last = conv(3, 6), nn.GroupNorm(3, 6), conv(6, 3)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(pooled(F.relu(self.last(F.relu(self.gn(self.conv(x)))))))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.w1, self.w3, self.w2 = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        x = pooled(x)[:, [0, 1, 2, 0]]
        x = self.norm(x)
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


@dataclass(frozen=True)
class Case:
    """A network, the filters to drop, and what every layer reads and writes then; layers not named stay whole."""

    factory: Callable[[], nn.Module]
    coupling: str
    drop: dict[str, list[int]]
    layers: dict[str, Live]
    num_units: int


CASES = {
    "plain": Case(
        Plain, "filter", {"conv1": [1], "conv2": [0, 4]},
        {
            "conv1": live((3, 4), None, [0, 2, 3]),
            "bn1": live((4, 4), [0, 2, 3], [0, 2, 3]),
            "conv2": live((4, 5), [0, 2, 3], [1, 2, 3]),
            "bn2": live((5, 5), [1, 2, 3], [1, 2, 3]),
            "fc": live((5, 2), [1, 2, 3], None),
        },
        4 + 5,
    ),
    "residual": Case(
        Residual, "filter", {"stem": [0, 1], "conv2": [1, 2]},
        {
            "stem": live((3, 4), None, [2, 3]),
            "bn": live((4, 4), [2, 3], [2, 3]),
            "conv1": live((4, 3), [2, 3], None),  # before the addition: the stem's channels only
            "conv2": live((3, 4), None, [0, 3]),
            "bn2": live((4, 4), [0, 3], [0, 3]),
            "fc": live((4, 2), [0, 2, 3], None),  # after it: the union
        },
        4 + 3 + 4,
    ),
    "residual, one mask for the stream": Case(
        Residual, "stream", {"stem": [0, 1], "conv1": [2]},
        {
            "stem": live((3, 4), None, [2, 3]),
            "bn": live((4, 4), [2, 3], [2, 3]),
            "conv1": live((4, 3), [2, 3], [0, 1]),
            "bn1": live((3, 3), [0, 1], [0, 1]),
            "conv2": live((3, 4), [0, 1], [2, 3]),
            "bn2": live((4, 4), [2, 3], [2, 3]),
            "fc": live((4, 2), [2, 3], None),
        },
        4 + 3,
    ),
    "pre-activation": Case(
        PreActivation, "filter", {"stem": [0, 1, 2], "conv1": [1, 2, 3], "conv2": [2, 3, 4]},
        {
            "stem": live((3, 5), None, [3, 4]),
            "bn1": live((5, 5), [3, 4], [3, 4]),
            "conv1": live((5, 5), [3, 4], [0, 4]),
            "bn2": live((5, 5), [0, 3, 4], [0, 3, 4]),
            "conv2": live((5, 5), [0, 3, 4], [0, 1]),
            "bn3": live((5, 5), [0, 1, 3, 4], [0, 1, 3, 4]),
            "fc": live((5, 2), [0, 1, 3, 4], None),
        },
        5 + 5 + 5,
    ),
    "adds to its input": Case(
        AddsToItsInput, "filter", {"stem": [3], "conv": [0, 3]},
        {
            "stem": live((3, 4), None, [0, 1, 2]),
            "conv": live((4, 4), [0, 1, 2], [1, 2]),
            "last": live((4, 3), [0, 1, 2], None),
        },
        4 + 4 + 3,
    ),
    "adds a sigmoid": Case(
        SigmoidBranch, "filter", {"stem": [3]},
        {
            "stem": live((3, 4), None, [0, 1, 2]),
            "conv": live((4, 4), [0, 1, 2], [0, 1, 2]),
            "last": live((4, 3), [0, 1, 2], None),
        },
        4 + 3,
    ),
    "concatenation": Case(
        Concat, "filter", {"a": [1], "b": [0, 3]},
        {
            "a": live((3, 3), None, [0, 2]),
            "b": live((3, 4), None, [1, 2]),
            "bn": live((7, 7), [0, 2, 3 + 1, 3 + 2], [0, 2, 3 + 1, 3 + 2]),
            "last": live((7, 3), [0, 2, 3 + 1, 3 + 2], None),
        },
        3 + 4 + 3,
    ),
    "depthwise": Case(
        Depthwise, "filter", {"conv": [0, 2], "point": [1]},
        {
            "conv": live((3, 4), None, [1, 3]),
            "deep": live((4, 8), [1, 3], [2, 3, 6, 7]),
            "bn": live((8, 8), [2, 3, 6, 7], [2, 3, 6, 7]),
            "point": live((8, 3), [2, 3, 6, 7], [0, 2]),
            "fc": live((3, 2), [0, 2], None),
        },
        4 + 3,
    ),
    "squeeze and excite": Case(
        SqueezeExcite, "filter", {"conv": [0], "fc1": [2]},
        {
            "conv": live((3, 4), None, [1, 2, 3]),
            "fc1": live((4, 3), [1, 2, 3], [0, 1]),
            "fc2": live((3, 4), [0, 1], [1, 2, 3]),  # the gate of an absent channel goes with it
            "last": live((4, 3), [1, 2, 3], None),
        },
        4 + 3 + 3,
    ),
    "flatten": Case(
        Flatten, "filter", {"conv": [1], "fc1": [0]},
        {
            "conv": live((3, 3), None, [0, 2]),
            "fc1": live((12, 4), [0, 1, 2, 3, 8, 9, 10, 11], [1, 2, 3]),
            "fc2": live((4, 2), [1, 2, 3], None),
        },
        3 + 4,
    ),
    "chunk gate": Case(
        ChunkGate, "filter", {"conv": [1]},
        {
            "conv": live((3, 6), None, [0, 2, 3, 5]),  # value 1 and gate 1, which is filter 4
            "last": live((3, 4), [0, 2], None),
        },
        3 + 4,
    ),
    "group norm": Case(
        GroupNormed, "filter", {"conv": [2]},
        {
            "conv": live((3, 6), None, [0, 1, 4, 5]),
            "gn": live((6, 6), [0, 1, 4, 5], [0, 1, 4, 5]),
            "last": live((6, 3), [0, 1, 4, 5], None),
        },
        3 + 3,
    ),
    "gated feed-forward": Case(
        SwiGLU, "filter", {"w1": [0, 3]},
        {
            "w1": live((4, 5), None, [1, 2, 4]),
            "w3": live((4, 5), None, [1, 2, 4]),
            "w2": live((5, 4), [1, 2, 4], None),
        },
        5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_networks_with_masks_written_by_hand(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = shake(case.factory())
    inputs = torch.randn(3, 3, 4, 4)
    graph = slimstart.trace(model, inputs, case.coupling)
    assert graph.num_units == case.num_units
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    for layer, indices in case.drop.items():
        mask[graph.filters[layer][indices]] = False
    selection = graph.select(mask)
    assert torch.equal(selection.mask, mask)
    assert_is_masked_network(model, inputs, case.layers, slimstart.compact(model, selection))
    # and the reference finds what is written here
    found = reference.liveness(model, inputs, graph.filters, mask)
    for layer, (reads, writes) in case.layers.items():
        for mine, its in ((reads, found[layer].inputs), (writes, found[layer].outputs)):
            assert torch.equal(mine, its) if mine is not None else bool(its.all()), layer


# --- what is a unit in a transformer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("name", "hidden", "layers"),
    [
        ("vit_fused", 32, ["blocks.{}.mlp.0"]),
        ("vit_separate", 32, ["blocks.{}.mlp.0"]),
        ("nanogpt", 48, ["transformer.h.{}.mlp.c_fc"]),
        ("decoder_expand", 20, ["blocks.{}.feed_forward.w1", "blocks.{}.feed_forward.w3"]),
        ("decoder_repeat_interleave", 20, ["blocks.{}.feed_forward.w1", "blocks.{}.feed_forward.w3"]),
    ],
)
def test_every_hidden_feature_is_a_unit(name, hidden, layers, coupling):
    _, _, graph = traced(name, coupling)
    seen = []
    for block in range(2):
        writers = [graph.filters[layer.format(block)].tolist() for layer in layers]
        assert all(units == writers[0] for units in writers)  # a gate goes with its value
        assert len(set(writers[0])) == len(writers[0]) == hidden
        assert min(writers[0]) >= 0
        assert graph.costs.unit_filters[writers[0]].tolist() == [len(layers)] * hidden
        seen += writers[0]
    assert len(set(seen)) == 2 * hidden


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", ["decoder_expand", "decoder_repeat_interleave"])
def test_heads_go_with_their_keys_and_values(name, coupling):
    model, inputs, graph = traced(name, coupling)
    for block in range(2):
        q, k, v = (graph.filters[f"blocks.{block}.attention.w{letter}"] for letter in "qkv")
        (group,) = [group for group in graph.groups if f"blocks.{block}.attention.wq" in group.layers]
        first, second = group.units  # 2 heads of keys and values, 4 heads of queries, 6 features each
        assert q.tolist() == [first] * 12 + [second] * 12
        assert k.tolist() == v.tolist() == [first] * 6 + [second] * 6
        assert group.layers == tuple(f"blocks.{block}.attention.w{letter}" for letter in "qkv")
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    mask[graph.filters["blocks.1.attention.wq"][0]] = False
    narrow = slimstart.compact(model, graph.select(mask))
    attention = narrow.blocks[1].attention
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim) == (2, 1, 6)
    assert attention.wo.weight.shape == (24, 12)
    assert narrow.blocks[0].attention.n_heads == 4
    assert narrow(inputs).shape == model(inputs).shape


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("name", "layer", "heads"),
    [
        ("compared_head_width", "attention.k_proj", 2),
        ("indexed_qkv", "attention.qkv", 4),
        ("key_value_cache", "attention.qkv", 4),
        ("cached_bias", "attention.qkv.linear", 4),
        ("input_width", "attention.qkv", 4),
        ("joined_bias", "attention.qkv.weight", 4),
        ("zero_bias", "attention.qkv", 4),
        ("class_token", "layers.0.q", 4),
        ("shifted_window", "attention.qkv", 4),
        ("computed_bias", "attention.qkv.weight", 4),
        ("computed_bias", "attention.bias.2", 4),
        ("channel_attention", "attention.qkv", 4),
        ("interleaved_rotation", "attention.qkv", 4),
        ("complex_rotation", "attention.q", 4),
        ("head_parameters", "attention.qkv", 4),
        ("interleaved_gate", "attention.up", 8),
        ("windows_after_heads", "attention.qkv", 4),
        ("bias_shape", "attention.qkv", 4),
        ("bias_table", "attention.qkv", 4),
        ("bias_table_fused", "attention.qkv", 4),
        ("bucket_embedding", "attention.qkv.1", 4),
    ],
)
def test_every_head_is_a_unit(name, layer, heads, coupling):
    _, _, graph = traced(name, coupling)
    units = graph.filters[layer]
    assert int(units.min()) >= 0
    assert len(units.unique()) == heads


def test_separate_heads_are_units():
    model, _, graph = traced("vit_separate", "stream")
    units = {letter: graph.filters[f"blocks.0.attn.to_{letter}"] for letter in "qkv"}
    assert torch.equal(units["q"], units["k"])
    assert torch.equal(units["q"], units["v"])
    assert torch.equal(units["q"], units["q"][::6].repeat_interleave(6))
    assert len(units["q"].unique()) == 4 == model.blocks[0].attn.num_heads


# --- without ports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_plain_network_is_the_same(name):
    model, inputs, graph = traced(name, "filter")
    model, inputs = copy.deepcopy(model).double().eval(), cast(inputs, torch.float64)
    selection = graph.select(random_mask(graph, 0.5, seed=5))
    ported, plain = slimstart.compact(model, selection), slimstart.compact(model, selection, plain=True)
    assert not any(isinstance(module, StreamPort) for module in plain.modules())
    assert [type(m) for m in plain.modules()] == [type(m) for m in model.modules()]
    with torch.no_grad():
        for a, b in zip(tensors(call(plain, inputs)), tensors(call(ported, inputs)), strict=True):
            assert_close(a, b, name)


def test_residual_networks_have_ports():
    model, _, graph = traced("resnet_basic", "filter")
    narrow = slimstart.compact(model, graph.select(random_mask(graph, 0.5, seed=5)))
    ports = [module for module in narrow.modules() if isinstance(module, StreamPort)]
    assert ports
    assert all(isinstance(port, nn.Conv2d | nn.BatchNorm2d | nn.Linear) for port in ports)
    _, _, stream = traced("resnet_basic", "stream")
    assert not stream.reads
    assert not stream.writes
    whole = slimstart.compact(model, graph.select(torch.ones(graph.num_units, dtype=torch.bool)))
    assert not any(isinstance(module, StreamPort) for module in whole.modules())


@pytest.mark.parametrize("name", ["encoder_stack", "encoder_stack_prenorm", "multihead_attention", "wide_resnet"])
def test_evaluation_without_gradients(name):
    """PyTorch's transformer layers then take a short cut past the modules inside them, ports included."""
    model, inputs, graph = traced(name, "filter")
    narrow = slimstart.compact(model, graph.select(random_mask(graph, 0.5, seed=5))).eval()
    (expected,) = tensors(call(narrow, inputs))
    assert expected.requires_grad
    with torch.no_grad():
        (actual,) = tensors(call(narrow, inputs))
    torch.testing.assert_close(actual, expected.detach())


# --- what is left whole, and why -------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("weight_standardised", "conv2", "a parameter is reduced before it is used"),
        ("lstm_head", "conv2", "it enters a recurrent layer (lstm)"),
        ("lstm_head", "rnn.weight_hh_l0", "recurrent layer (lstm)"),
        ("channel_softmax", "assign", "softmax runs over its channels"),
        ("softmax_inside", "first", "softmax runs over its channels"),
        ("cumsum_channels", "conv1", "cumsum runs over its channels"),
        ("sort_channels", "conv1", "sort runs over its channels"),
        ("cbam", "conv", "mean runs over its channels in spatial"),
        ("hard_coded_view", "conv2", "it is reshaped to fixed sizes"),
        ("hard_coded_flatten", "conv2", "it is reshaped to fixed sizes"),
        ("vit_fused", "blocks.0.attn.qkv", "in blocks.0.attn (write -1 for the size that shrinks, or take it from"),
        ("multihead_attention", "self_attn.out_proj.weight", "it is normalised over its channels in norm1"),
        ("size_as_number", "conv2", "its size is used as a number"),
        ("numpy_feedback", "conv1", "it leaves PyTorch (numpy)"),
        ("fourier_channels", "conv1", "operation _fft_r2c has no rule"),
        ("bilinear_layer", "left", "operation _trilinear has no rule"),
        ("fancy_index", "conv1", "fixed positions of it are taken"),
        ("vit_fused", "norm", "normalises over its channels"),
        ("mlp_mixer", "embed", "it is normalised over its channels in blocks.0.norm1"),
        ("returns_stream", "stem", "it is an output of the network"),
        ("vgg_bn", "classifier", "it is an output of the network"),
    ],
)
def test_reasons(name, layer, reason, coupling):
    _, _, graph = traced(name, coupling)
    assert reason in graph.not_prunable[layer]


@pytest.mark.parametrize("name", ["multihead_attention", "encoder_stack", "functional_linear"])
def test_a_module_counts_as_reached_when_its_parameters_are_used(name):
    _, _, graph = traced(name, "filter")
    assert not any("not reached" in reason for reason in graph.not_prunable.values())


def test_every_reason_names_something_of_the_model():
    for name, coupling in itertools.product(ZOO, COUPLINGS):
        model, _, graph = traced(name, coupling)
        known = {n for n, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
        assert graph.not_prunable.keys() <= known - {""}, name
        assert all(graph.not_prunable.values()), name


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("keep", "whole"),
    [
        (["conv1"], {"conv1"}),
        (["conv2.weight"], {"conv2"}),
        ("conv2", {"conv2"}),
        (["stem", "conv1"], {"stem", "conv1"}),
        ([""], {"stem", "conv1", "conv2"}),
    ],
)
def test_keep(keep, whole, coupling):
    torch.manual_seed(0)
    model, inputs = Residual(), torch.randn(2, 3, 4, 4)
    graph = slimstart.trace(model, inputs, coupling, keep)
    if coupling == "stream" and whole & {"stem", "conv2"}:
        whole = whole | {"stem", "conv2"}  # they share a mask
    for layer in ("stem", "conv1", "conv2"):
        units = graph.filters[layer]
        assert bool((units < 0).all()) == (layer in whole), layer
        if layer in whole:
            assert graph.not_prunable[layer] == "asked for by `keep`"
        else:
            assert layer not in graph.not_prunable
            assert int(units.min()) >= 0
    assert slimstart.verify(model, inputs, coupling, keep).max_error < TOLERANCE
    smallest = slimstart.compact(model, graph.select(torch.zeros(graph.num_units, dtype=torch.bool)))
    assert {n for n in ("stem", "conv1", "conv2") if smallest.get_submodule(n).out_channels > 1} >= whole


def test_keep_of_a_container():
    model, inputs, _ = traced("resnet_basic", "filter")
    graph = slimstart.trace(model, inputs, keep=["layers.1"])
    inside = [layer for layer in graph.filters if layer.startswith("layers.1.")]
    assert inside
    for layer, units in graph.filters.items():
        assert bool((units < 0).all()) == (layer in inside or layer == "fc"), layer


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [slimstart.trace, slimstart.verify])
def test_errors_of_arguments(function):
    model, inputs = Plain(), torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match="`coupling` is 'both'; it must be one of 'filter', 'stream'"):
        function(model, inputs, coupling="both")
    with pytest.raises(ValueError, match=r"`keep` names \['conv7', 'fc9'\], but the model has no module or parameter"):
        function(model, inputs, keep=["fc9", "conv1", "conv7"])
    with pytest.raises(TypeError, match="`example_inputs` is a str"):
        function(model, "image")
    with pytest.raises(slimstart.TraceError, match=r"forward fails on `example_inputs`: RuntimeError: .*channels"):
        function(model, torch.randn(2, 5, 4, 4))


def test_wrong_mask():
    graph = slimstart.trace(Plain(), torch.randn(2, 3, 4, 4))
    for shape in [(8,), (10,), (1, 9), ()]:
        with pytest.raises(ValueError, match=r"`mask` has shape .*; it needs one entry per unit, \(9,\)"):
            graph.select(torch.ones(shape, dtype=torch.bool))


class CannotBeCopied(Plain):
    def __deepcopy__(self, memo):
        raise TypeError("it holds a socket")


def test_model_that_cannot_be_copied():
    with pytest.raises(slimstart.TraceError, match="the model cannot be copied: it holds a socket"):
        slimstart.trace(CannotBeCopied(), torch.randn(2, 3, 4, 4))


def test_tracing_does_not_change_the_model():
    torch.manual_seed(0)
    model, inputs = Residual().train(), torch.randn(3, 3, 4, 4)
    before = copy.deepcopy(model.state_dict())
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    state = torch.get_rng_state()
    slimstart.verify(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(module.training for module in model.modules())
    assert torch.equal(model.fc.weight.grad, torch.ones(2, 4))
    assert model.stem.weight.grad is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
