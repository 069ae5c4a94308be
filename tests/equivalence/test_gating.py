"""Gated networks: equal to the masked one for gates of 0 and 1, otherwise with inputs of layers times the gates."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.errors import TraceError
from slimstart.lab.methods.gated_network import Gated, fold_, verify_gating
from slimstart.narrow.compact import masked
from tests.tiny_networks import with_dropout
from tests.zoo import ZOO, Entry, call, cast, shake, tensors

NETWORKS = {**ZOO, "with_dropout": Entry(partial(with_dropout, 10, 1), partial(torch.randn, 2, 1, 16, 16))}
REFUSED = {  # by the layer that the error names; no layer reads it
    "non_local": "theta",
    "scaled_head": "attention.q",
    "encoder_decoder": "transformer.decoder.layers.0.linear2",
    "batched_experts": "attention.up",
    "mlp_mixer": "blocks.0.channel_mix.2",
    "gpt2_conv1d": "c_fc.weight",
    "functional_linear": "weight",
    "einsum_ffn": "w_in",
    "einsum_contraction": "a",
    "tied_autoencoder": "enc2",
    "unread_conv": "unread",
    "learned_queries": "q",
    "learned_queries_read_first": "q",
    "listed_mixer": "channels.0.3",
    "weight_norm": "conv1.parametrizations.weight.original1",
    "noise_buffer": "conv1",
    "narrow_channels": "conv1",
}
QUICK = (
    "with_dropout vgg_bn resnet_basic resnext unet_transposed resnet_se_linear shared_conv text_classifier "
    "pixel_shuffle where_branches lstm_head"
).split()
RANDOM = {"dropout2d", "summed_gpt"}  # in training mode
UNEQUAL = {"normalise_channels"}  # a norm over channels is before the gates of these channels


def network(name):
    torch.manual_seed(0)
    entry = NETWORKS[name]
    model, inputs = shake(entry.factory()), entry.example_inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    graph = slimstart.trace(model, inputs, coupling="stream")
    return model.double(), cast(inputs, torch.float64), graph


def random_selection(graph, seed=3):
    return graph.select(torch.rand(graph.num_units, generator=torch.Generator().manual_seed(seed)) < 0.5)


def run(net, inputs, training):
    net.train(training).zero_grad()
    outputs = [t for t in tensors(call(net, inputs)) if t.is_floating_point()]
    if any(t.requires_grad for t in outputs):
        sum((t * torch.linspace(-1, 2, t.numel()).view(t.shape)).sum() for t in outputs).backward()
    return [t.detach() for t in outputs]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NETWORKS if n not in {*REFUSED, *UNEQUAL}],
)
def test_zoo_with_gates_of_zero_and_one(name):
    model, inputs, graph = network(name)
    selection = random_selection(graph)
    gates = selection.mask.double()
    for training in (False, True) if name not in RANDOM else (False,):
        net, reference = copy.deepcopy(model), masked(model, selection)
        actual, expected = run(Gated(net, graph, lambda: gates), inputs, training), run(reference, inputs, training)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        wanted = dict(reference.named_parameters())
        for parameter_name, parameter in net.named_parameters():
            assert (parameter.grad is None) == (wanted[parameter_name].grad is None)
            if parameter.grad is not None:
                one, other = (selection.gather(parameter_name, p.grad) for p in (parameter, wanted[parameter_name]))
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        for buffer_name, buffer in reference.named_buffers():
            other = dict(net.named_buffers())[buffer_name]
            torch.testing.assert_close(
                *(selection.gather(buffer_name, b) for b in (other, buffer)), rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layer_reads_is_refused(name):
    model, _, graph = network(name)
    with pytest.raises(TraceError, match=f"'{REFUSED[name]}' writes channels that no convolution and no linear layer"):
        Gated(model, graph, lambda: torch.ones(graph.num_units))


@pytest.mark.parametrize("name", UNEQUAL)
def test_gates_that_are_not_masks_are_refused(name):
    model, inputs, graph = network(name)
    with pytest.raises(TraceError, match="gates change an output of the network"):
        verify_gating(model, graph, inputs)


def test_coupling_by_filters_is_refused():
    model = with_dropout(10, 1)
    graph = slimstart.trace(model, torch.zeros(2, 1, 16, 16), coupling="filter")
    with pytest.raises(ValueError, match="coupling 'filter'"):
        Gated(model, graph, lambda: torch.ones(graph.num_units))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x)))).mean((2, 3))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)).mean(1))


def gated_by_hand(model, x, g):
    if isinstance(model, Words):
        return model.out(torch.tanh(model.embed(x)).mean(1) * g)
    return model.second(F.relu(model.norm(model.first(x))) * g[:, None, None]).mean((2, 3))


@pytest.mark.parametrize("kind", [TwoLayers, Words])
def test_gates_between_zero_and_one(kind):
    """They act once, after the normalisation: outputs, gradients of weights and of gates; also when folded in."""
    model = shake(kind().double())
    inputs = torch.randint(0, 11, (4, 5)) if kind is Words else torch.randn(4, 2, 7, 7).double()
    graph = slimstart.trace(model, inputs, coupling="stream")
    g = torch.tensor([0.0, 0.3, 1.0, 0.9, 0.0, 1.7]).double().requires_grad_()
    net = Gated(model, graph, lambda: g)
    results = []
    for forward in (net, lambda x: gated_by_hand(model, x, g)):
        y = forward(inputs)
        gradients = torch.autograd.grad((y * torch.linspace(-1, 1, 3)).square().sum(), [g, *model.parameters()])
        results.append((y, *gradients))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    model.eval()
    expected = net(inputs)
    assert fold_(model, graph, g.detach()) is model
    torch.testing.assert_close(model(inputs), expected, rtol=1e-10, atol=1e-12)


def test_gradient_of_gates_by_finite_differences():
    """Also of a gate at 0, in a network with a residual stream."""
    model, inputs, graph = network("resnet_basic")
    model.eval()
    g = random_selection(graph).mask.double().requires_grad_()

    def loss(gates):
        return F.cross_entropy(Gated(model, graph, lambda: gates)(inputs), torch.tensor([1, 3]))

    (gradient,) = torch.autograd.grad(loss(g), g)
    assert bool((g == 0).any())
    for unit in range(0, graph.num_units, 7):
        step = torch.zeros(graph.num_units).double()
        step[unit] = 1e-5
        difference = (loss(g.detach() + step) - loss(g.detach() - step)).detach() / 2e-5
        assert float(gradient[unit]) == pytest.approx(float(difference), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["resnet_basic", "shared_conv", "siamese"])
def test_gating_does_not_replace_parameters(name):
    """Also those of a layer that is reached by two names."""
    model, inputs, graph = network(name)
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters(remove_duplicate=False)}
    net = Gated(model, graph, lambda: torch.full((graph.num_units,), 0.5))
    call(net, inputs)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    for parameter_name, (parameter, values) in before.items():
        assert after[parameter_name] is parameter
        assert torch.equal(parameter, values)
    assert {id(p) for p in net.parameters()} == {id(p) for p in model.parameters()}
    assert net.state_dict().keys() == {f"model.{key}" for key in model.state_dict()}


class TiedHeads(nn.Module):
    """One weight in two layers, and one layer by two paths."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        x = self.body(x).relu()
        return self.a(x) + 2 * self.b(x) + self.again(x)


def test_tied_weights_are_gated_in_all_places():
    model, x = shake(TiedHeads().double()), torch.randn(5, 4).double()
    graph = slimstart.trace(model, x, coupling="stream")
    weight, g = model.a.weight, torch.rand(6).double()
    y = Gated(model, graph, lambda: g)(x)
    h = model.body(x).relu() * g
    torch.testing.assert_close(y, 4 * h @ weight.T + 2 * model.a.bias + 2 * model.b.bias)
    assert model.a.weight is model.b.weight is model.again.weight is weight


class MixesByItself(nn.Module):
    """Channels are multiplied with each other, without a weight, before a layer reads them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = self.a(x).relu()
        flat = x.flatten(2)
        attention = (flat.transpose(1, 2) @ flat).softmax(-1)
        return self.b((flat @ attention).view_as(x)).mean((2, 3))


def test_verify_gating():
    x = torch.randn(2, 3, 8, 8)
    model = MixesByItself()
    graph = slimstart.trace(model, x, coupling="stream")
    assert graph.num_units
    with pytest.raises(TraceError, match=r"gates change an output of the network by 0\.\d+ against masks"):
        verify_gating(model, graph, x)
    for name in ("resnet_basic", "dict_io"):
        model, inputs, graph = network(name)
        before = copy.deepcopy(model.state_dict())
        verify_gating(model.float(), graph, cast(inputs, torch.float32))
        torch.testing.assert_close(model.state_dict(), before, check_dtype=False)
