"""Chains that are fused give what the calls one by one give, and only chains that can be are."""

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
from torch.utils.checkpoint import checkpoint

from slimstart import models
from slimstart.engine import fusion
from slimstart.kernels import norm
from tests.zoo import ZOO, call, cast, shake, tensors

RELU, ADD, ADD_RELU = "relu", "add", "add+relu"


@pytest.fixture(autouse=True)
def chains(monkeypatch):
    """Without a GPU the chains are computed by torch, in float64: what is tested is which they are, and how often."""
    done = Counter()

    def noted(x, residual, *rest):
        done[(RELU if residual is None else ADD_RELU) if rest[-1] else ADD] += 1
        return norm.batch_norm_act(x, residual, *rest)

    monkeypatch.setattr(fusion, "supports", lambda x, *rest: x.dim() == 4)
    monkeypatch.setattr(fusion, "batch_norm_act", noted)
    return done


def kinds(plan):
    name = {(False, True): RELU, (True, False): ADD, (True, True): ADD_RELU}
    return Counter(name[f.add is not None, f.relu is not None] for f in plan.fusions)


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
        (models.resnet20, {RELU: 1 + 9, ADD_RELU: 9}),
        (models.resnet32, {RELU: 1 + 15, ADD_RELU: 15}),  # three shortcuts have a norm: one of the two is fused
        (models.wrn28_10, {RELU: 12 * 2 + 1}),
        (models.mobilenet_v1, {RELU: 1 + 13 * 2}),
        (models.resnet50, {RELU: 1 + 16 * 2, ADD_RELU: 16}),
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


@body({ADD_RELU: 1})
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


@body({})
def residual_comes_later(net, x, r):
    out = net.bn(x)
    return F.relu(out + torch.cos(x))


@body({})
def residual_written_through_a_view(net, x, r):
    out = net.bn(x)
    r.narrow(0, 0, 1).mul_(2.0)
    return F.relu(out + r)


@body({})
def residual_written_by_index(net, x, r):
    out = net.bn(x)
    r[0] = 1.0
    return F.relu(out + r)


@body({})
def added_into_the_residual(net, x, r):
    out = net.bn(x)
    r += out
    return F.relu(r)


@body({})
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


@body({})
def used_twice(net, x, r):
    out = net.bn(x)
    return F.relu(out), out + r


@body({})
def returned(net, x, r):
    out = net.bn(x)
    return F.relu(out), out


@body({})
def stored(net, x, r):
    out = net.bn(x)
    net.kept.append(out)
    return F.relu(out)


@body({ADD: 1})
def sum_stored(net, x, r):
    s = net.bn(x) + r
    net.kept = [s]
    return F.relu(s)


@body({})
def in_a_list(net, x, r):
    out = net.bn(x)
    return torch.cat([F.relu(out), *torch.stack([out, r])])


@body({})
def written_in_place(net, x, r):
    out = net.bn(x)
    out[:, 0] = 1.0
    return F.relu(out)


@body({})
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


@body({})
def hook_on_the_gradient(net, x, r):
    out = net.bn(x)
    out.register_hook(lambda gradient: 2 * gradient)
    return F.relu(out)


@body({})
def broadcast(net, x, r):
    return F.relu(net.bn(x) + r[:, :1])


@body({})
def scalar(net, x, r):
    return F.relu(net.bn(x) + 1.0)


@body({})
def scaled(net, x, r):
    return F.relu(torch.add(net.bn(x), r, alpha=0.5))


@body({})
def added_to_itself(net, x, r):
    out = net.bn(x)
    return F.relu(out + out)


@body({})
def other_activations(net, x, r):
    return F.relu6(net.bn(x)), F.leaky_relu(net.bn(x)), F.gelu(net.bn(x))


@body({})
def in_eval_mode(net, x, r):
    net.bn.eval()
    return F.relu(net.bn(x))


@body({})
def checkpointed(net, x, r):
    return checkpoint(lambda x: F.relu(net.bn(x)), x, use_reentrant=False)


@body({})
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
def test_what_is_a_chain(function, expected, layout, chains):
    CACHE.clear()
    net = shake(Net(function).double())
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64).contiguous(memory_format=layout)
    assert found(net, lambda net: loss(net(images)), chains) == expected


def test_sums_with_out_are_left_alone():
    net, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)

    def forward():
        with torch.no_grad():
            return F.relu(torch.add(net(x), x, out=torch.empty_like(x)))

    assert fusion.record(forward).fusions == ()


def test_without_gradient(chains):
    net = models.resnet20(width=0.25).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        plan = fusion.record(lambda: net(images))
        expected = net(images)
        with fusion.fused(plan):
            ours = net(images)
    assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-10)
    assert chains == {RELU: 10, ADD_RELU: 9}


def test_under_autocast_as_it_is(chains):
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


def test_nor_is_its_memory():
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.norm_reference"], env=environment, check=True, timeout=300)
