"""Every network of the zoo runs, forward and backward, in training and in evaluation mode."""

import collections
import copy

import pytest
import torch
from hypothesis import given, settings

from tests.zoo import LARGE, ZOO, call, cast, shake, tensors
from tests.zoo.random_nets import ACTIVATIONS, CLASSES, INPUT_SHAPE, build, example_input, networks


def backward(model, inputs):
    outputs = [t for t in tensors(call(model, inputs)) if t.is_floating_point()]
    assert outputs
    assert all(torch.isfinite(t).all() for t in outputs)
    sum((t * t).sum() for t in outputs).backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name
    return outputs


def missing_grads(model):
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize("name", ZOO)
def test_trains(name):
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.factory().train()
    backward(model, entry.example_inputs())
    missing = missing_grads(model)
    assert {n for n in missing if not n.startswith(entry.without_grad)} == set()
    for prefix in entry.without_grad:
        assert any(n.startswith(prefix) for n in missing), prefix
    assert set(entry.whole) <= set(dict(model.named_modules()))


@pytest.mark.parametrize("name", ZOO)
def test_evaluates_in_double(name):
    entry = ZOO[name]
    torch.manual_seed(0)
    model = shake(entry.factory()).double().eval()
    inputs = cast(entry.example_inputs(), torch.float64)
    copied = copy.deepcopy(model)  # before a run, in which a network may store tensors with gradients
    outputs = backward(model, inputs)
    assert all(t.dtype == torch.float64 for t in outputs)
    with torch.no_grad():
        again = [t for t in tensors(call(copied, inputs)) if t.is_floating_point()]
    assert [t.shape for t in again] == [t.shape for t in outputs]
    for a, b in zip(again, outputs, strict=True):
        torch.testing.assert_close(a, b.detach())


def test_example_inputs_are_repeatable_batches_of_two():
    for name, entry in ZOO.items():
        first, second = tensors(entry.example_inputs()), tensors(entry.example_inputs())
        assert first[0].shape[0] == 2, name
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), name


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet50", 25_557_032), ("vit_large", 304_326_632), ("vgg19_bn", 20_040_522)]
)
def test_large_networks_have_their_published_size(name, parameters):
    with torch.device("meta"):
        model = LARGE[name].factory()
    assert sum(p.numel() for p in model.parameters()) == parameters
    classes = 10 if name == "vgg19_bn" else 1000
    assert model(LARGE[name].example_inputs().to("meta")).shape == (2, classes)


def test_random_networks_run():
    kinds = collections.Counter()
    for seed in range(100):
        net = build(seed)
        kinds.update(op.kind for op in net.program.ops)
        for mode in (True, False):
            net.train(mode).zero_grad()
            (out,) = backward(net, example_input(seed))
            assert out.shape == (INPUT_SHAPE[0], CLASSES), str(net.program)
            assert not missing_grads(net), str(net.program)
    assert min(kinds.values()) >= 5
    assert len(kinds) == 17


def test_random_networks_are_repeatable():
    for seed in (0, 7):
        state = torch.get_rng_state()
        first, second = build(seed), build(seed)
        assert torch.equal(torch.get_rng_state(), state)
        assert first.program == second.program
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert build(1).program != build(2).program


@settings(max_examples=15, deadline=None)
@given(networks())
def test_strategy_gives_networks_that_run(net):
    assert 3 <= len(net.program.ops) <= 9
    assert all((op.settings.get("act") or "none") in ACTIVATIONS for op in net.program.ops)
    for op, (c, s) in zip(net.program.ops, net.program.shapes[1:], strict=True):
        assert 1 <= c <= 24, str(op)
        assert 1 <= s <= 16, str(op)
    net.double()
    backward(net, example_input(dtype=torch.float64))
    assert not missing_grads(net)
