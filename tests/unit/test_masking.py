"""A masked network that changes in place equals the narrow networks of its masks."""

import copy

import pytest
import torch
from study.masked_network import MaskedNetwork
from torch import Tensor, nn

import slimstart
from slimstart.graph import ChannelGraph
from tests.zoo import ZOO, call, cast, shake, tensors

FEW = ("vgg_bn", "resnet_option_a", "mobilenet_v2", "tied_autoencoder")
SLOW = set(ZOO) - {*FEW, "dropout2d"}  # whose forward is random by itself


def prepared(name: str, coupling: str) -> tuple[nn.Module, object, ChannelGraph]:
    model = shake(ZOO[name].factory()).double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    inputs = cast(ZOO[name].example_inputs(), torch.float64)
    return model, inputs, slimstart.trace(model, inputs, coupling)


def outputs(model: nn.Module, inputs: object) -> list[Tensor]:
    with torch.no_grad():
        return [tensor for tensor in tensors(call(model, inputs)) if tensor.is_floating_point()]


@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(SLOW))])
def test_one_mask_after_the_other_is_the_narrow_network(name: str, coupling: str) -> None:
    model, inputs, graph = prepared(name, coupling)
    if not graph.num_units:
        pytest.skip("nothing can shrink")
    before = copy.deepcopy(model.state_dict())
    masked = MaskedNetwork(model, graph)
    # An empty mask, for the at-least-one rule; units that come back. Evaluation first: then nothing counts running
    # statistics any more, and the copy keeps its own.
    for ratio, training in [(0.6, False), (0.0, False), (0.6, True), (0.0, True), (1.0, True), (0.3, True)]:
        mask = torch.rand(graph.num_units) < ratio
        masked.set_(mask)
        expected = outputs(slimstart.compact(model, graph.select(mask)).train(training), inputs)
        actual = outputs(masked.module.train(training), inputs)
        assert expected
        for a, b in zip(actual, expected, strict=True):
            tolerance = 1e-6 if name == "upcast_norm" else 1e-10  # its norm computes in float32
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key  # the model itself has not been touched


def test_it_is_a_copy_of_the_model() -> None:
    model, inputs, graph = prepared("vgg_bn", "filter")
    masked = MaskedNetwork(model, graph)
    full = torch.ones(graph.num_units, dtype=torch.bool)
    expected = outputs(copy.deepcopy(model), inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    masked.set_(full)
    torch.testing.assert_close(outputs(masked.module, inputs), expected, rtol=0, atol=1e-12)


def test_hooks_of_a_training_are_not_in_it() -> None:
    model, inputs, graph = prepared("vgg_bn", "filter")
    dense = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = slimstart.SparseTraining(model, optimizer, inputs, slimstart.Channels(0.5), policy="paper")
    masked = MaskedNetwork(sparse.dense_copy(), graph)
    masked.set_(sparse.mask)
    torch.testing.assert_close(outputs(masked.module, inputs), outputs(model, inputs), rtol=1e-10, atol=1e-10)
    masked.module.load_state_dict(dense.state_dict())  # which a narrow model refuses
    with pytest.raises(slimstart.CheckpointError):
        model.load_state_dict(dense.state_dict())


def test_tensors_keep_their_memory() -> None:
    model, _, graph = prepared("resnet_basic", "filter")
    masked = MaskedNetwork(model.to(memory_format=torch.channels_last), graph)
    places = {name: (p.data_ptr(), p.stride()) for name, p in masked.module.named_parameters()}
    masked.set_(torch.rand(graph.num_units) < 0.5)
    assert {name: (p.data_ptr(), p.stride()) for name, p in masked.module.named_parameters()} == places


def test_a_mask_of_another_network_is_refused() -> None:
    model, _, graph = prepared("vgg_bn", "filter")
    with pytest.raises(ValueError, match=r"`mask` has shape \(3,\); it needs one entry per unit"):
        MaskedNetwork(model, graph).set_(torch.ones(3, dtype=torch.bool))
