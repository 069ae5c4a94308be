"""Norms that shrink with their channels: narrow networks equal dense ones whose norms run over kept channels only."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slimstart import TraceError, compact, flops, load, save, shrink_to, trace, verify
from slimstart.narrow import kept_norms
from slimstart.policies import Flops
from tests.zoo import ZOO, call, shake
from tests.zoo.transformers import MLPMixer

COUPLINGS = ("stream", "filter")
SHRINKING = [
    "mlp_mixer", "vit_separate", "vit_fused", "vit_product", "nanogpt", "nanogpt_loss", "decoder_expand",
    "decoder_repeat_interleave", "convnext", "upcast_norm", "encoder_decoder", "encoder_stack",
    "encoder_stack_prenorm", "multihead_attention", "standardised_convs", "standardised_convs_gain", "one_head",
    "learned_queries", "learned_queries_read_first", "resized_positions",
]  # fmt: skip
COARSE = ("encoder_stack_prenorm", "standardised_convs", "standardised_convs_gain")  # two heads, or groups of filters
OTHERS = ["cbam", "resnet_basic"]
TOLERANCE = 1e-10


def smallest(graph):
    """The FLOPs with one unit in every group, as a fraction."""
    cost = Flops(1.0).bind(graph.costs)
    return cost.cost(torch.zeros(graph.num_units, dtype=torch.bool)) / cost.dense


def zoo(name):
    torch.manual_seed(0)
    return shake(ZOO[name].factory()), ZOO[name].example_inputs()


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", [*SHRINKING, *OTHERS])
def test_narrow_networks_equal_dense_ones_with_norms_over_kept_channels(name, coupling):
    report = verify(*zoo(name), coupling, norms="shrink")
    assert report.max_error < TOLERANCE, report.worst
    assert report.graph.norms == "shrink"
    assert report.graph.over_channels or name in OTHERS


@pytest.mark.parametrize("name", SHRINKING)
def test_all_of_a_network_can_shrink(name):
    """In GPTs, Llamas, vision transformers and ConvNeXts, with "keep" 0.3 to 0.95 of the FLOPs (see below)."""
    graph = trace(*zoo(name), norms="shrink")
    assert graph.coverage > 0.99
    assert smallest(graph) < (0.22 if name in COARSE else 0.11)


class UsesWeights(torch.nn.Module):
    """Tokens are pooled with the weights of attention, which are averages over heads."""

    def __init__(self, uses):
        super().__init__()
        self.inp, self.uses = torch.nn.Linear(5, 16), uses
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x):
        x = self.inp(x)
        y, weights = self.attention(x, x, x)
        return self.head((weights @ y if self.uses else y).mean(1))


@pytest.mark.parametrize("uses", [False, True])
def test_heads_whose_weights_are_used_remain(uses):
    """PyTorch's layer returns an average over its heads, which is another number where some are missing."""
    torch.manual_seed(0)
    model, x = UsesWeights(uses), torch.randn(2, 6, 5)
    report = verify(model, x, norms="shrink")
    assert report.max_error < TOLERANCE
    reasons = report.graph.not_prunable
    assert ("the weights of its attention are used" in reasons.get("attention.in_proj_weight", "")) == uses
    assert ("inp" in reasons) == uses
    assert type(model.attention.num_heads) is int
    assert "forward" not in vars(model.attention)
    narrow = compact(model, report.graph.select(torch.zeros(report.graph.num_units, dtype=torch.bool)))
    assert narrow.attention.num_heads == (4 if uses else 1)
    assert narrow.attention.embed_dim == 4 * narrow.attention.num_heads


# Coverage and smallest FLOPs under stream coupling: with "keep", and with "shrink".
GAINS = {
    "mlp_mixer": ((0.74, 1.0), (0.30, 0.05)),
    "vit_separate": ((0.89, 1.0), (0.27, 0.06)),
    "decoder_expand": ((0.91, 1.0), (0.39, 0.08)),
    "convnext": ((0.37, 1.0), (0.66, 0.08)),
}


@pytest.mark.parametrize("name", GAINS)
def test_embedding_and_residual_widths_shrink(name):
    model, inputs = zoo(name)
    keep, shrink = (trace(model, inputs, norms=norms) for norms in ("keep", "shrink"))
    (covered, all_covered), (floor, new_floor) = GAINS[name]
    assert keep.coverage == pytest.approx(covered, abs=0.01)
    assert shrink.coverage == pytest.approx(all_covered, abs=0.01)
    assert floor - 0.02 < smallest(keep) < floor
    assert smallest(shrink) < new_floor


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_lost_where_norms_cannot_shrink(name):
    model, inputs = zoo(name)
    for coupling in COUPLINGS:
        keep, shrink = (trace(model, inputs, coupling, norms=norms) for norms in ("keep", "shrink"))
        assert shrink.coverage >= keep.coverage
        assert smallest(shrink) <= smallest(keep)


# --- kinds of norms --------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    def __init__(self, dim, square):
        super().__init__()
        self.weight, self.square = nn.Parameter(torch.rand(dim)), square

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(self.square(x).mean(-1, keepdim=True) + 1e-6))


class Functional(nn.Module):
    """A norm that is written as a call of a function."""

    def __init__(self, dim, function):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))
        self.dim, self.function = dim, function

    def forward(self, x):
        return self.function(self, x)


class Whiten(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(dim))

    def forward(self, x):
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt() * self.scale / (1 + x.std(-1, unbiased=False, keepdim=True))


class Grn(nn.Module):
    """Global response normalisation."""

    def __init__(self, dim):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(1, 1, dim)), nn.Parameter(torch.rand(1, 1, dim))

    def forward(self, x):
        energy = torch.norm(x, p=2, dim=1, keepdim=True)
        return self.gamma * (x * energy / (energy.mean(dim=-1, keepdim=True) + 1e-6)) + self.beta + x


class Transposed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


NORMS = {
    "layer_norm": lambda d: nn.LayerNorm(d),
    "without_affine": lambda d: nn.LayerNorm(d, elementwise_affine=False),
    "without_bias": lambda d: nn.LayerNorm(d, bias=False),
    "rms_norm": lambda d: nn.RMSNorm(d),
    "over_tokens_too": lambda d: nn.LayerNorm((5, d)),
    "one_group": lambda d: Transposed(nn.GroupNorm(1, d)),
    "llama": lambda d: Rms(d, lambda x: x.pow(2)),
    "llama_product": lambda d: Rms(d, lambda x: x * x),
    "weight_shape": lambda d: Functional(d, lambda m, x: F.layer_norm(x, m.weight.shape, m.weight, m.bias, 1e-5)),
    "input_shape": lambda d: Functional(d, lambda m, x: F.layer_norm(x, x.shape[-1:], m.weight, m.bias)),
    "attribute": lambda d: Functional(d, lambda m, x: F.layer_norm(x, (m.dim,), weight=m.weight, bias=m.bias)),
    "size": lambda d: Functional(d, lambda m, x: F.rms_norm(x, [x.size(-1)], m.weight) + m.bias),
    "var_mean": Whiten,
    "grn": Grn,
}


class Net(nn.Module):
    """Tokens with learned positions, a class token, and pre-norm and post-norm branches around a norm."""

    def __init__(self, norm, dim=12):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.token, self.positions = nn.Parameter(torch.rand(1, 1, dim)), nn.Parameter(torch.rand(1, 5, dim))
        self.norm1, self.up, self.down = norm(dim), nn.Linear(dim, 9), nn.Linear(9, dim)
        self.norm2, self.mix, self.norm3 = norm(dim), nn.Linear(dim, dim), norm(dim)
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], dim=1) + self.positions
        x = x + self.down(torch.relu(self.up(self.norm1(x))))
        x = self.norm2(x + torch.tanh(self.mix(x)))
        return self.head(self.norm3(x)[:, 0])


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("kind", NORMS)
def test_kinds_of_norms(kind, coupling):
    torch.manual_seed(1)
    model, x = Net(NORMS[kind]), torch.randn(2, 4, 6)
    report = verify(model, x, coupling, norms="shrink")
    assert report.max_error < TOLERANCE, report.worst
    # The stream has one mask for all its writers, so no layer needs a port.
    groups = {group.name: group for group in report.graph.groups}
    writers = [layer for layer in groups["embed"].layers if not layer.startswith("norm")]  # but for biases of norms
    assert writers == ["embed", "token", "positions", "down", "mix"]
    assert len(groups["embed"].units) == 12
    assert not report.graph.reads
    assert not report.graph.writes
    small = compact(model, report.graph.select(torch.zeros(report.graph.num_units, dtype=torch.bool)))
    assert small(x).shape == (2, 3)
    assert small.positions.shape == (1, 5, 1)


def test_a_shape_that_is_written_as_a_number_keeps_the_width():
    model = Net(lambda d: Functional(d, lambda m, x: F.layer_norm(x, (12,), m.weight, m.bias)))
    graph = verify(model, torch.randn(2, 4, 6), norms="shrink").graph
    assert [group.name for group in graph.groups] == ["up"]
    assert graph.not_prunable["embed"].startswith("its size is given to")


def test_maxima_and_sizes_used_as_numbers_keep_the_width():
    class Scaled(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, x):
            return x * self.dim**-0.5 / x.norm(dim=-1, keepdim=True) * x.shape[-1] ** 0.5

    for norm in (Scaled, lambda d: Functional(d, lambda m, x: x / x.amax(-1, keepdim=True))):
        graph = verify(Net(norm), torch.rand(2, 4, 6), norms="shrink").graph
        assert [group.name for group in graph.groups] == ["up"]


def test_buffers_that_are_added_shrink_if_state_dicts_have_them():
    for persistent in (True, False):
        model = Net(nn.LayerNorm)
        del model.positions
        model.register_buffer("positions", torch.rand(1, 5, 12), persistent=persistent)
        graph = verify(model, torch.randn(2, 4, 6), norms="shrink").graph
        assert ("embed" in graph.filters and bool((graph.filters["embed"] >= 0).all())) == persistent


# --- references that know nothing of graphs --------------------------------------------------------------------------


def narrowed(model, inputs, name, keep, coupling="stream"):
    """The network without some units of one group, and its graph."""
    graph = trace(model, inputs, coupling, norms="shrink")
    group = next(group for group in graph.groups if name in group.layers)
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    mask[group.units.start : group.units.stop] = torch.tensor(keep, dtype=torch.bool)
    return compact(model, graph.select(mask)), graph


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_narrow_network_is_one_that_is_built_with_this_width(coupling):
    model, inputs = zoo("mlp_mixer")
    kept = [i % 3 != 1 for i in range(12)]
    small, _ = narrowed(model.eval(), inputs, "embed", kept, coupling)
    by_hand = MLPMixer(dim=8).eval()
    index = torch.tensor(kept).nonzero().squeeze(1)
    state = {}
    for name, tensor in model.state_dict().items():  # only channels of the stream have 12 entries
        for dim in range(tensor.dim()):
            if tensor.shape[dim] == 12:
                tensor = tensor.index_select(dim, index)
        state[name] = tensor
    by_hand.load_state_dict(state)
    assert torch.equal(by_hand(inputs), small(inputs))
    assert small.norm.normalized_shape == (8,)
    assert str(small.norm).startswith("LayerNorm((8,), ")


def test_channels_that_are_left_are_normalised_as_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    kept = [True, False, True, True, False, True]
    small, _ = narrowed(model, x, "0", kept)
    index = torch.tensor([0, 2, 3, 5])
    y = model[0](x)[:, index]
    y = (y - y.sum(1, keepdim=True) / 4) / (
        (y - y.mean(1, keepdim=True)).square().sum(1, keepdim=True) / 4 + 1e-5
    ) ** 0.5
    torch.testing.assert_close(small(x), y @ model[2].weight[:, index].T + model[2].bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("name", ["convnext", "decoder_expand", "vit_fused"])
def test_networks_without_ports_are_the_same(name, coupling):
    """Rows of zeros would count in a norm."""
    model, inputs = zoo(name)
    graph = trace(model.eval(), inputs, coupling, norms="shrink")
    mask = torch.rand(graph.num_units, generator=torch.Generator().manual_seed(0)) < 0.5
    expected, plain = (compact(model, graph.select(mask), plain=plain) for plain in (False, True))
    torch.testing.assert_close(call(plain, inputs), call(expected, inputs))


def test_writers_into_a_stream_of_inputs_can_still_drop_filters():
    class PostNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.back, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x + self.back(self.wide(x).relu()))

    graph = verify(PostNorm(), torch.randn(4, 6), norms="shrink").graph
    assert [group.name for group in graph.groups] == ["wide", "back"]


def test_verify_finds_a_norm_over_channels_that_are_dropped(monkeypatch):
    monkeypatch.setattr(sys.modules[compact.__module__], "over_kept_channels", lambda *_: None)
    with pytest.raises(TraceError, match="is not the masked dense one"):
        verify(*zoo("mlp_mixer"), norms="shrink")


def test_verify_finds_a_call_that_is_numbered_wrongly(monkeypatch):
    old = kept_norms._KeptNorms.enter
    monkeypatch.setattr(
        kept_norms._KeptNorms, "enter", lambda mode, name, *_: old(mode, name.replace("norm1", "norm2"))
    )
    with pytest.raises(TraceError, match="is not the masked dense one"):
        verify(*zoo("mlp_mixer"), norms="shrink")


# --- layers that can go ----------------------------------------------------------------------------------------------


def test_post_norm_blocks_can_go():
    model, inputs = zoo("encoder_stack")
    assert not trace(model, inputs).layers
    graph = trace(model, inputs, norms="shrink")
    assert [layer.name for layer in graph.layers] == ["encoder.layers.0", "encoder.layers.1"]
    small = compact(model.eval(), graph.without(["encoder.layers.0"]).select(torch.ones(graph.num_units).bool()))
    last = model.encoder.layers[1](model.inp(inputs))
    torch.testing.assert_close(small(inputs), model.head(last.mean(1)))


# --- files and state dicts -------------------------------------------------------------------------------------------


def test_shapes_follow_in_files_and_state_dicts(tmp_path):
    model, inputs = zoo("mlp_mixer")
    small, _ = narrowed(model.eval(), inputs, "embed", [i < 7 for i in range(12)])
    save(small, tmp_path / "small")
    again = load(tmp_path / "small", ZOO["mlp_mixer"].factory).eval()
    assert again.norm.normalized_shape == (7,)
    assert torch.equal(again(inputs), small(inputs))
    for example in (None, inputs):
        fitted = shrink_to(ZOO["mlp_mixer"].factory(), small.state_dict(), example).eval()
        assert fitted.blocks[1].norm2.normalized_shape == (7,)
        assert torch.equal(fitted(inputs), small(inputs))


def test_norms_without_affine_are_fitted_by_a_trace():
    torch.manual_seed(0)
    model, x = Net(NORMS["without_affine"]).eval(), torch.randn(2, 4, 6)
    small, _ = narrowed(model, x, "embed", [i % 2 == 0 for i in range(12)])
    fitted = shrink_to(Net(NORMS["without_affine"]), small.state_dict(), x).eval()
    assert fitted.norm1.normalized_shape == (6,)
    assert torch.equal(call(fitted, x), small(x))


def test_the_mode_belongs_to_the_graph():
    model, inputs = zoo("mlp_mixer")
    keep, shrink = (trace(model, inputs, norms=norms) for norms in ("keep", "shrink"))
    assert (keep.norms, shrink.norms) == ("keep", "shrink")
    assert keep.digest == trace(model, inputs).digest != shrink.digest
    assert not keep.over_channels
    with pytest.raises(ValueError, match="`norms` is 'both'; it must be one of 'keep', 'shrink'"):
        trace(model, inputs, norms="both")


class Experts(nn.Module):
    """A layer of experts, whose products are one operation (Mixtral)."""

    def __init__(self, dim=16, hidden=24, experts=2):
        super().__init__()
        self.inp, self.head = nn.Linear(5, dim), nn.Linear(dim, 3)
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) / hidden**0.5)

    def forward(self, x):
        x = self.inp(x)
        ends = torch.tensor([2, len(x)], dtype=torch.int32)  # the first two rows are for the first expert
        gate, up = F.grouped_mm(x, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        return self.head(x + F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_hidden_features_of_experts_go_eight_at_a_time():
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(6, 5)
    report = verify(model, x, norms="shrink")
    assert report.max_error < 1e-5  # the operation runs in float32 only
    graph = report.graph
    assert [len(group.units) for group in graph.groups] == [2, 3]
    assert graph.coverage == 1.0
    # By hand: 6 rows through 5 x 16, 16 x 48, 24 x 16 and 16 x 3; then with 8 channels and 8 hidden features.
    assert flops(model, x) == 6 * (5 * 16 + 16 * 48 + 24 * 16 + 16 * 3)
    narrow = compact(model, graph.select(torch.zeros(graph.num_units, dtype=torch.bool)))
    assert narrow.up.shape == (2, 16, 8)
    assert narrow.down.shape == (2, 8, 8)
    assert flops(narrow, x) == 6 * (5 * 8 + 8 * 16 + 8 * 8 + 8 * 3)
