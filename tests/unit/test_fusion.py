"""Fused operations give the results of the single ones, and only operations that may be fused are."""

import copy
import os
import subprocess
import sys
import weakref
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from slimstart.kernels import norm
from slimstart.lab import models
from slimstart.steps import chains as chains_module
from slimstart.steps import fusion
from tests.zoo import ZOO, call, cast, shake, tensors

NORM, RELU, ADD, ADD_RELU = "norm", "relu", "add", "add+relu"
NAMES = {(False, False): NORM, (False, True): RELU, (True, False): ADD, (True, True): ADD_RELU}


@pytest.fixture(autouse=True)
def chains(monkeypatch):
    """Without a GPU the chains are computed by torch, in float64: what is tested is which they are, and how often."""
    done = Counter()

    def noted(x, residual, *rest):
        done[NAMES[residual is not None, rest[-1]]] += 1
        return norm.batch_norm_act(x, residual, *rest)

    monkeypatch.setattr(chains_module, "supports", lambda x, *rest: x.dim() == 4)
    monkeypatch.setattr(chains_module, "batch_norm_act", noted)
    return done


def kinds(plan):
    return Counter(NAMES[chain.add is not None, chain.relu is not None] for chain in plan.chains)


def results(net, forward):
    """The loss, all gradients and all buffers after one forward and backward."""
    torch.manual_seed(1)
    loss = forward()
    loss.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(net.named_buffers())}


def found(net, loss_of, chains):
    """The chains of a network, after it has been checked that fusing them changes nothing but rounding."""
    plain, recorded = copy.deepcopy(net), copy.deepcopy(net)
    expected = results(plain, lambda: loss_of(plain))
    torch.manual_seed(1)
    plan = fusion.record(lambda: loss_of(recorded))
    assert not chains

    def forward():
        # The recorded module was another copy: a plan belongs to a forward, not to tensors.
        with fusion.fused(plan):
            return loss_of(net)

    ours = results(net, forward)
    assert chains == kinds(plan)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-10, atol=1e-10), name
    chains.clear()
    return kinds(plan)


def loss(outputs):
    return sum((t.square().mean() + t.sin().mean()) for t in tensors(outputs) if t.is_floating_point())


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (models.vgg16, {RELU: 13}),
        (models.vgg19, {RELU: 16}),
        (models.resnet20, {RELU: 1 + 9, ADD_RELU: 9, NORM: 2}),  # the norms of two shortcuts
        (models.resnet32, {RELU: 1 + 15, ADD_RELU: 15, NORM: 2}),
        (models.wrn28_10, {RELU: 12 * 2 + 1}),
        (models.mobilenet_v1, {RELU: 1 + 13 * 2}),
        (models.resnet50, {RELU: 1 + 16 * 2, ADD_RELU: 16, NORM: 4}),
    ],
)
def test_networks_of_the_paper(factory, expected, chains):
    net = shake(factory(width=0.1).double())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert found(net, lambda net: loss(net(images)), chains) == expected


WITH_NORM = [
    name for name, entry in ZOO.items() if any(isinstance(m, nn.BatchNorm2d) for m in entry.factory().modules())
]


@pytest.mark.parametrize("name", WITH_NORM)
def test_networks_of_the_zoo(name, chains):
    net, inputs = shake(ZOO[name].factory().double()), cast(ZOO[name].example_inputs(), torch.float64)
    found(net, lambda net: loss(call(net, copy.deepcopy(inputs))), chains)


class Net(nn.Module):
    """`body` on a convolution and a few norms; it returns what the loss sees."""

    def __init__(self, body):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.bn, self.bn2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.body, self.kept = body, []

    def forward(self, x):
        x = self.conv(x)
        return self.body(self, x, torch.sin(x))


def body(expected):
    def note(function):
        BODIES.append(pytest.param(function, expected, id=function.__name__))
        return function

    return note


BODIES = []


@body({RELU: 1})
def module_relu(net, x, r):
    return nn.ReLU()(net.bn(x))


@body({RELU: 5})
def every_relu(net, x, r):
    a, b = torch.relu(net.bn(x)), net.bn(x).relu()
    return a, b, net.bn(x).relu_(), torch.relu_(net.bn(x)), F.relu(net.bn(x), inplace=True)


@body({ADD_RELU: 5})
def every_add(net, x, r):
    in_place, method = net.bn(x), net.bn(x)
    in_place += r
    method.add_(r)
    return [F.relu(s) for s in (net.bn(x) + r, r + net.bn(x), torch.add(net.bn(x), r), in_place, method)]


@body({ADD_RELU: 1})
def in_place_chain(net, x, r):
    out = net.bn(x)
    net.kept = [out]  # the very tensor that the ReLU writes to
    out += r
    F.relu_(out)
    return out, out * 2, net.kept


@body({ADD: 1})
def add_without_relu(net, x, r):
    s = net.bn(x) + r
    return s, F.relu(s)


@body({NORM: 1, ADD_RELU: 1})
def two_norms(net, x, r):
    return F.relu(net.bn(x) + net.bn2(r))


@body({RELU: 1, ADD_RELU: 1})
def residual_is_a_chain(net, x, r):
    skip = F.relu(net.bn(x), inplace=True)
    return F.relu(net.bn2(skip) + skip)


@body({RELU: 1})
def shape_is_asked(net, x, r):
    out = net.bn(x)
    assert out.shape == x.shape
    assert out.size(0) == x.size(0)
    return F.relu(out)


@body({RELU: 2})
def shared_norm(net, x, r):
    return F.relu(net.bn(F.relu(net.bn(x))))


@body({RELU: 1})
def functional_norm(net, x, r):
    return F.relu(F.batch_norm(x, None, None, training=True, eps=1e-3))


@body({ADD: 1})
def residual_read_in_between(net, x, r):
    out = net.bn(x)
    return out + r, r.exp()


@body({NORM: 1})
def residual_comes_later(net, x, r):
    out = net.bn(x)
    return F.relu(out + torch.cos(x))


@body({NORM: 1})
def residual_written_through_a_view(net, x, r):
    out = net.bn(x)
    r.narrow(0, 0, 1).mul_(2.0)
    return F.relu(out + r)


@body({NORM: 1})
def residual_written_by_index(net, x, r):
    out = net.bn(x)
    r[0] = 1.0
    return F.relu(out + r)


@body({NORM: 1})
def added_into_the_residual(net, x, r):
    out = net.bn(x)
    r += out
    return F.relu(r)


@body({NORM: 1})
def norm_without_gradient(net, x, r):
    with torch.no_grad():
        out = net.bn(x)
    return F.relu(out + r)


@body({ADD: 1})
def relu_without_gradient(net, x, r):
    out = net.bn(x) + r
    with torch.no_grad():
        active = F.relu(out)
    return active * x


@body({NORM: 1})
def used_twice(net, x, r):
    out = net.bn(x)
    return F.relu(out), out + r


@body({NORM: 1})
def returned(net, x, r):
    out = net.bn(x)
    return F.relu(out), out


@body({NORM: 1})
def stored(net, x, r):
    out = net.bn(x)
    net.kept.append(out)
    return F.relu(out)


@body({ADD: 1})
def sum_stored(net, x, r):
    s = net.bn(x) + r
    net.kept = [s]
    return F.relu(s)


@body({NORM: 1})
def in_a_list(net, x, r):
    out = net.bn(x)
    return torch.cat([F.relu(out), *torch.stack([out, r])])


@body({NORM: 1})
def written_in_place(net, x, r):
    out = net.bn(x)
    out[:, 0] = 1.0
    return F.relu(out)


@body({NORM: 1})
def read_by_its_address(net, x, r):
    out = net.bn(x)
    assert out.data_ptr()
    return F.relu(out)


@body({RELU: 1})
def made_in_the_first_run(net, x, r):
    if "ready" not in CACHE:
        CACHE["ready"] = torch.empty(1)
    return F.relu(net.bn(x))


CACHE = {}


@body({NORM: 1})
def hook_on_the_gradient(net, x, r):
    out = net.bn(x)
    out.register_hook(lambda gradient: 2 * gradient)
    return F.relu(out)


@body({NORM: 1})
def broadcast(net, x, r):
    return F.relu(net.bn(x) + r[:, :1])


@body({NORM: 1})
def scalar(net, x, r):
    return F.relu(net.bn(x) + 1.0)


@body({NORM: 1})
def scaled(net, x, r):
    return F.relu(torch.add(net.bn(x), r, alpha=0.5))


@body({NORM: 1})
def added_to_itself(net, x, r):
    out = net.bn(x)
    return F.relu(out + out)


@body({NORM: 3})
def other_activations(net, x, r):
    return F.relu6(net.bn(x)), F.leaky_relu(net.bn(x)), F.gelu(net.bn(x))


@body({})
def in_eval_mode(net, x, r):
    net.bn.eval()
    return F.relu(net.bn(x))


@body({NORM: 1})
def beside_one_in_eval_mode(net, x, r):
    net.bn.eval()
    return net.bn(x) + net.bn2(x[:, :, 1:])[:, :, :1]


@body({RELU: 1})
def momentum_from_the_counter(net, x, r):
    net.bn.momentum = None
    return F.relu(net.bn(x))


@body({})
def checkpointed(net, x, r):
    return checkpoint(lambda x: F.relu(net.bn(x)), x, use_reentrant=False)


@body({NORM: 1})
def custom_function(net, x, r):
    out = net.bn(x)
    return F.relu(out), Doubled.apply(out)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("function", "expected"), BODIES)
def test_operations_that_form_a_chain(function, expected, layout, chains):
    CACHE.clear()
    net = shake(Net(function).double())
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=layout)
    assert found(net, lambda net: loss(net(images)), chains) == expected


def test_sums_with_out_are_not_fused():
    net, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)

    def forward():
        with torch.no_grad():
            return F.relu(torch.add(net(x), x, out=torch.empty_like(x)))

    assert kinds(fusion.record(forward)) == {NORM: 1}


def test_without_gradient(chains):
    net = models.resnet20(width=0.25).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        plan = fusion.record(lambda: net(images))
        expected = net(images)
        with fusion.fused(plan):
            ours = net(images)
    assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-10)
    assert chains == {RELU: 10, ADD_RELU: 9, NORM: 2}


def test_fusion_under_autocast(chains):
    net = models.resnet20(width=0.25)
    images = torch.randn(2, 3, 32, 32)
    dtypes = []
    net.stem[1].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return net(images)

    plan, expected = fusion.record(forward), forward()
    with fusion.fused(plan):
        ours = forward()
    assert dtypes == [torch.bfloat16] * 3
    assert torch.linalg.vector_norm(ours - expected) < 0.02 * torch.linalg.vector_norm(expected)


def test_residuals_are_not_kept():
    """A residual lives as long as the network holds it, not as long as the forward runs."""
    net, alive = Net(None).double(), []

    def forward():
        r = torch.sin(torch.ones(2, 6, 4, 4, dtype=torch.float64))
        alive.append(weakref.ref(r))
        with torch.no_grad():
            out = net.bn(torch.cos(r)) + r
            del r
            out = torch.exp(out)
        alive.append(alive[-1]())
        return out

    plan = fusion.record(forward)
    with fusion.fused(plan):
        forward()
    assert kinds(plan) == {ADD: 1}
    assert alive[1::2] == [None, None]


class Fickle(Net):
    def forward(self, x):
        return self.body(self, x, torch.sin(x))


def first_way(net, x, r):
    return F.relu(net.bn(x) + r)


@pytest.mark.parametrize(
    ("second_way", "message"),
    [
        (lambda net, x, r: torch.tanh(net.bn(x) + r), "call 4 is .*tanh"),
        (lambda net, x, r: net.bn(x) + r, "ended after 4 calls, 5 calls were recorded"),
        (lambda net, x, r: F.relu(net.bn(x) + r).exp(), "call 5 is"),
        (lambda net, x, r: F.relu(net.bn(x) + x), "call 3 does not read"),
        (lambda net, x, r: (net.bn(x) + r, F.relu(r))[1], "call 4 does not read"),
    ],
)
def test_another_forward_is_refused(second_way, message):
    net, x = Fickle(first_way), torch.randn(2, 6, 4, 4)
    plan = fusion.record(lambda: net(x))
    net.body = second_way
    with pytest.raises(fusion.DivergedError, match=message), fusion.fused(plan):
        net(x)


def test_a_result_is_not_read_before_its_chain_ends():
    net, x = nn.BatchNorm2d(6), torch.randn(2, 6, 4, 4)

    def forward(read):
        out = net(x)
        torch.exp(out if read is None else read)
        return F.relu(out)

    plan = fusion.record(lambda: forward(x))
    assert kinds(plan) == {RELU: 1}
    with pytest.raises(fusion.DivergedError, match="reads the result of a batch norm"), fusion.fused(plan):
        forward(None)


def test_memory_of_a_chain_is_not_read_before_its_end():
    net, x = nn.BatchNorm2d(6), torch.randn(2, 6, 4, 4)

    def forward(read):
        out = net(x)
        if read:
            out.data_ptr()
        return F.relu(out)

    plan = fusion.record(lambda: forward(False))
    with pytest.raises(fusion.DivergedError, match="memory of a batch norm's result"), fusion.fused(plan):
        forward(True)


def test_a_norm_stays_in_its_mode():
    x, statistics = torch.randn(2, 6, 4, 4), (torch.zeros(6), torch.ones(6))

    def forward(training):
        return F.relu(F.batch_norm(x, *statistics, training=training))

    plan = fusion.record(lambda: forward(True))
    with pytest.raises(fusion.DivergedError, match="call 0 is in eval mode"), fusion.fused(plan):
        forward(False)


def test_what_has_kernels():
    """On a CPU nothing has, and what is asked for is computed by torch."""
    x, r = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64).unbind()
    assert not norm.supports(x, r, None, None, None, None)
    ours = norm.batch_norm_act(x, r, None, None, None, None, 0.1, 1e-5, True)
    centred = x - x.mean((0, 2, 3), keepdim=True)
    expected = (centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt() + r).clamp(min=0)
    assert torch.allclose(ours, expected, atol=1e-12)


class Ops(TorchDispatchMode):
    """Counts what torch really computes: casts of single tensors, and tensors in operations on many."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("_foreach"):
            self.count[name] += 1
            self.count[name, "tensors"] += len(args[0])
        elif name == "_to_copy":
            self.count["cast", args[0].dtype, kwargs["dtype"]] += 1
        elif name == "add_" and not args[0].is_floating_point():
            self.count["increment"] += 1
        return func(*args, **(kwargs or {}))


def same_bits(net, loss_of):
    """What torch computes without and with fusion, after it has been checked that all results have the same bits."""
    plain, start = copy.deepcopy(net), copy.deepcopy(net.state_dict())
    torch.manual_seed(1)
    plan = fusion.record(lambda: loss_of(net))
    net.load_state_dict(start)

    def forward():
        with fusion.fused(plan):
            return loss_of(net)

    with Ops() as theirs:
        expected = results(plain, lambda: loss_of(plain))
    with Ops() as ours:
        found = results(net, forward)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
    return theirs.count, ours.count


DOWN, UP = ("cast", torch.float32, torch.bfloat16), ("cast", torch.bfloat16, torch.float32)
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)


def low(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("factory", [models.vgg16, models.resnet32, models.mobilenet_v1])
def test_casts_and_counters_of_networks(factory, layout):
    net = shake(factory(width=0.1)).to(memory_format=layout)
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=layout)

    def loss_of(net):
        with low():
            return loss(net(images))

    plain, ours = same_bits(net, loss_of)
    cast = sum(len(list(m.parameters())) for m in net.modules() if isinstance(m, LAYERS))
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert plain[DOWN] - ours[DOWN] == plain[UP] - ours[UP] == cast
    assert (ours["_foreach_copy_"], ours["_foreach_copy_", "tensors"]) == (2, 2 * cast)
    assert (plain["increment"], ours["increment"]) == (norms, 0)
    assert (ours["_foreach_add_"], ours["_foreach_add_", "tensors"]) == (1, norms)


NO_AUTOCAST = {"numpy_side", "numpy_feedback", "bilinear_layer"}  # torch itself cannot run them under it


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO.keys() - NO_AUTOCAST))
def test_casts_of_the_zoo(name):
    net, inputs = shake(ZOO[name].factory()), ZOO[name].example_inputs()

    def loss_of(net):
        with low():
            return loss(call(net, copy.deepcopy(inputs)))

    same_bits(net, loss_of)


class Low(nn.Module):
    """`body` on layers whose parameters autocast casts."""

    def __init__(self, body):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def low_body(expected, **options):
    """How many parameters are cast at once; `options` are those of autocast."""

    def note(function):
        LOW_BODIES.append(pytest.param(function, expected, options, id=function.__name__))
        return function

    return note


LOW_BODIES = []


@low_body(4)
def plain_layers(net, x):
    return net.second(net.first(x))


@low_body(4)
def shared_weights(net, x):
    x = net.first(x)
    return net.second(net.second(net.second(x)))


@low_body(4)
def inside_and_outside(net, x):
    x = net.first(x)
    with low(enabled=False):
        outside = net.second(x.float())
    return net.second(x), outside


@low_body(2)
def one_only_outside(net, x):
    x = net.first(x)
    with low(enabled=False):
        return net.second(x.float())


@low_body(4)
def tied_to_an_embedding(net, x):
    table = net.second.weight
    return F.embedding(torch.tensor([0, 2, 2]), table[:, :, 0, 0]), net.second(net.first(x))


@low_body(4)
def frozen(net, x):
    net.first.requires_grad_(False)
    x = net.first(x)
    assert not x.requires_grad
    return net.second(x)


@low_body(4)
def frozen_beside_one_without_gradient(net, x):
    net.first.requires_grad_(False)
    x = net.first(x)
    assert not x.requires_grad
    with torch.no_grad():
        return net.second.weight.sin(), net.second(x)


@low_body(4)
def one_frozen_of_a_layer(net, x):
    net.first.weight.requires_grad_(False)
    return net.second(net.first(x))


@low_body(2)
def computed_weight(net, x):
    return F.conv2d(net.first(x), net.second.weight * 2)


@low_body(2)
def computed_weight_without_gradient(net, x):
    x = net.first(x)
    with torch.no_grad():
        weight = torch.exp(net.second.weight)
        assert weight.is_leaf
    return F.conv2d(x, weight)


@low_body(4)
def result_not_used(net, x):
    net.second(net.first(x))
    return net.first(x)


@low_body(4)
def layer_without_gradient(net, x):
    with torch.no_grad():
        x = net.first(x)
    return net.second(x)


# With its cache, autocast would forget the gradient.
@low_body(8, cache_enabled=False)
def same_layers_without_and_with_gradient(net, x):
    with torch.no_grad():
        target = net.second(net.first(x))
    return net.second(net.first(x)) * target


@low_body(8, cache_enabled=False)
def another_type_within(net, x):
    a = net.second(net.first(x))
    with torch.autocast("cpu", torch.float16):
        return a, net.second(net.first(x))


@low_body(4)
def keywords(net, x):
    x = F.conv2d(weight=net.first.weight, bias=net.first.bias, input=x)
    return torch.conv2d(x, net.second.weight, bias=net.second.bias)


@low_body(3)
def parameter_as_the_input(net, x):
    return F.linear(net.first.bias, net.second.weight[:, :, 0, 0]), net.second(torch.cat([x, x], 1))


@low_body(4)
def written_before_it_is_used(net, x):
    x = net.first(x)
    with torch.no_grad():
        net.second.weight.mul_(0.3)
        net.second.bias[:3] = 1.0
    return net.second(x)


@low_body(3)
def written_through_data(net, x):
    x = net.first(x)
    net.second.weight.data.clamp_(-0.01, 0.01)
    return net.second(x)


@low_body(3)
def exchanged_through_data(net, x):
    x = net.first(x)
    net.second.weight.data = torch.full_like(net.second.weight, 0.1)
    return net.second(x)


@low_body(3)
def address_is_asked(net, x):
    x = net.first(x)
    assert net.second.weight.data_ptr()
    return net.second(x)


@low_body(4)
def checkpointed_layers(net, x):
    return checkpoint(lambda x: net.second(torch.tanh(net.first(x))), x, use_reentrant=False)


@low_body(4)
def checkpointed_reentrant(net, x):
    return net.second(checkpoint(torch.tanh, net.first(x), use_reentrant=True))


@low_body(4)
def gradient_within(net, x):
    out = torch.tanh(net.second(net.first(x)))
    gradients = torch.autograd.grad(out.float().square().sum(), [net.first.weight, net.second.bias], create_graph=True)
    return out, *gradients


@low_body(0)
def not_there_before(net, x):
    return F.conv2d(x, torch.ones(2, 3, 3, 3)), F.conv2d(x.double(), net.first.weight.double())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("function", "expected", "options"), LOW_BODIES)
def test_tensors_that_are_cast_together(function, expected, options, layout):
    net = Low(function).to(memory_format=layout)
    images = torch.randn(4, 3, 5, 5).contiguous(memory_format=layout)

    def loss_of(net):
        with low(**options):
            return loss(net(images)) + 0 * net.second.weight.sum()

    plan = fusion.record(lambda: loss_of(copy.deepcopy(net)))
    assert sum(map(len, plan.casts.values())) == expected
    same_bits(net, loss_of)


def test_every_layer_that_autocast_casts():
    layers = nn.ModuleList([getattr(nn, f"Conv{kind}{n}d")(4, 4, 3) for kind in ("", "Transpose") for n in (1, 2, 3)])
    layers.append(nn.Linear(5, 2))

    def loss_of(layers):
        with low():
            *convolutions, linear = layers
            images = [torch.ones(2, 4, *[5] * (layer.weight.dim() - 2)) for layer in convolutions]
            outputs = [layer(x) for layer, x in zip(convolutions, images, strict=True)]
            return loss([*outputs, linear(torch.ones(3, 5))])

    plain, ours = same_bits(layers, loss_of)
    assert plain[DOWN] - ours[DOWN] == ours["_foreach_copy_", "tensors"] / 2 == 14


def test_weight_norm():
    net = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))

    def loss_of(net):
        with low():
            return loss(net(torch.linspace(-1, 1, 12).view(3, 4)))

    _, ours = same_bits(net, loss_of)
    assert ours["_foreach_copy_", "tensors"] == 2 * 3  # two biases and the other weight


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_casts_without_gradient(mode):
    net, x = Low(plain_layers), torch.randn(2, 3, 5, 5)
    with mode(), low():
        plan, expected = fusion.record(lambda: net(x)), net(x)
        with Ops() as ours, fusion.fused(plan):
            found = net(x)
    assert torch.equal(found, expected)
    assert found.grad_fn is None
    assert ours.count["_foreach_copy_", "tensors"] == 4


def test_casts_follow_autocast_and_the_network():
    """A plan made under autocast does no harm without it, nor to another network."""
    net, other, x = Low(plain_layers), Low(plain_layers), torch.randn(2, 3, 5, 5)
    with low():
        plan, expected = fusion.record(lambda: net(x)), other(x)
        with fusion.fused(plan):
            found = other(x)
    assert torch.equal(found, expected)
    with fusion.fused(plan):
        found = net(x)
    assert torch.equal(found, net(x))


class Counting(nn.Module):
    """`body` on a norm and two counters."""

    def __init__(self, body):
        super().__init__()
        self.bn, self.weight, self.body = nn.BatchNorm2d(3), nn.Parameter(torch.ones(())), body
        self.register_buffer("a", torch.tensor(5))
        self.register_buffer("b", torch.tensor(7, dtype=torch.int32))
        self.alias = None

    def forward(self, x):
        return self.weight * sum(t.sum() for t in self.body(self, x))


def counting_body(expected):
    def note(function):
        COUNTING_BODIES.append(pytest.param(function, expected, id=function.__name__))
        return function

    return note


COUNTING_BODIES = []


@counting_body(1)
def norm_alone(net, x):
    yield net.bn(x)


@counting_body(3)
def functional_counters(net, x):
    net.a.add_(1)
    net.b += 1
    yield net.bn(x)


@counting_body(1)
def norm_called_twice(net, x):
    yield net.bn(x)
    yield net.bn(2 * x)


@counting_body(0)
def without_momentum(net, x):
    net.bn.momentum = None
    yield net.bn(x)


@counting_body(0)
def norm_in_eval_mode(net, x):
    net.bn.eval()
    yield net.bn(x)


@counting_body(1)
def read_before(net, x):
    yield net.a * x
    net.a.add_(1)


@counting_body(1)
def read_behind(net, x):
    net.a.add_(1)
    net.b.add_(1)
    yield net.a * x


@counting_body(0)
def result_read(net, x):
    yield net.a.add_(1) * x


@counting_body(0)
def read_through_an_alias(net, x):
    alias = net.a.detach().view(1)
    net.a.add_(1)
    yield alias * x


@counting_body(0)
def read_on_the_host(net, x):
    net.a.add_(1)
    yield x * int(net.a)


@counting_body(0)
def counter_of_known_address(net, x):
    net.a.add_(1)
    net.a.data_ptr()
    yield x


@counting_body(0)
def copied(net, x):
    net.a.add_(1)
    yield copy.deepcopy(net.a) * x


@counting_body(1)
def written_behind(net, x):
    net.a.add_(1)
    net.a.mul_(2)
    net.a.add_(1)
    yield x


@counting_body(0)
def no_increments(net, x):
    net.a.add_(2)
    net.a.add_(1, alpha=3)
    net.a.add_(True)
    net.bn.running_mean.add_(1)
    yield x + torch.zeros(2, dtype=torch.int64).add_(1).sum() + torch.zeros(()).add_(1)


@counting_body(0)
def made_for_inference(net, x):
    with torch.inference_mode():
        torch.zeros((), dtype=torch.int64).add_(1)
    yield x


@pytest.mark.parametrize(("function", "expected"), COUNTING_BODIES)
def test_counters_that_are_updated_together(function, expected):
    net, x = Counting(function), torch.randn(2, 3, 4, 4)
    plain, ours = same_bits(net, lambda net: net(x))
    assert ours["_foreach_add_", "tensors"] == expected
    assert plain["increment"] - ours["increment"] == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.norm_reference"], env=environment, check=True, timeout=300)
