"""Fused operations on a GPU: norms and depthwise convolutions against float64; casts and counters.

Run: pytest -m gpu.
"""

import copy
import itertools
import time
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from slimstart.kernels import depthwise, norm
from slimstart.lab import models
from slimstart.steps import fusion
from slimstart.steps.depthwise_mode import AllWidths
from tests import depthwise_reference
from tests.norm_reference import CL, check, check_packed, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    (256, 16, 32, 32),
    (64, 8, 32, 32),
    (64, 24, 32, 32),
    (33, 40, 17, 15),
    (9, 13, 31, 7),
    (64, 160, 16, 16),
    (64, 320, 8, 8),
    (128, 640, 8, 8),
    (16, 1100, 20, 20),
    (256, 512, 4, 4),
    (256, 72, 2, 2),
    (64, 2048, 1, 1),
]


@pytest.fixture(autouse=True)
def _unwritten_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape, dtype):
    for residual, relu in itertools.product((False, True), repeat=2):
        check(shape, dtype=dtype, residual=residual, relu=relu, device="cuda")
    check(shape, dtype=dtype, affine=False, device="cuda")


@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_no_cancellation(shape):
    check(shape, mean=10.0, std=0.1, device="cuda")


@pytest.mark.parametrize("shape", [(64, 24, 32, 32), (64, 72, 4, 4)], ids=str)
def test_same_bits_every_time(shape):
    x, r, dy = (torch.randn(shape, device="cuda").contiguous(memory_format=CL) for _ in range(3))
    weight, bias = torch.randn(2, shape[1], device="cuda").unbind()

    def run():
        inputs = [t.clone().requires_grad_() for t in (x, r, weight, bias)]
        y = norm.batch_norm_act(*inputs, None, None, 0.1, 1e-5, True)
        return y.detach(), *torch.autograd.grad(y, inputs, dy)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_what_has_kernels():
    x = torch.randn(4, 8, 6, 6, device="cuda").contiguous(memory_format=CL)
    nothing = (None,) * 5
    assert norm.supports(x, *nothing)
    assert norm.supports(x, x.clone(), *nothing[1:])
    assert not norm.supports(x.contiguous(), *nothing)
    assert not norm.supports(x.double(), *nothing)
    assert not norm.supports(x[:, :, 0], *nothing)
    assert not norm.supports(x[:1, :, :1, :1], *nothing)
    assert not norm.supports(x, x.bfloat16(), *nothing[1:])
    assert not norm.supports(x, x[:1], *nothing[1:])
    assert not norm.supports(x, None, torch.ones(8, device="cuda", dtype=torch.bfloat16), *nothing[2:])
    assert not norm.supports(x.cpu(), *nothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", depthwise_reference.WINDOWS, ids=str)
def test_depthwise_convolutions_equal_float64(window, dtype):
    for shape in [(64, 24, 32, 32), (9, 13, 31, 7)]:
        depthwise_reference.check(shape, *window, dtype=dtype, device="cuda")


@pytest.mark.parametrize("window", depthwise_reference.WINDOWS[:2], ids=str)
def test_depthwise_convolutions_of_small_images_and_many_channels(window):
    for shape in [(64, 136, 8, 8), (256, 520, 2, 2), (3, 1000, 1, 1)]:
        depthwise_reference.check(shape, *window, dtype=torch.bfloat16, bias=False, device="cuda")


def test_depthwise_convolutions_are_differentiated_twice():
    depthwise_reference.check_twice((4, 24, 9, 8), *depthwise_reference.WINDOWS[4], device="cuda")


def test_saved_tensors_may_come_back_in_another_layout():
    torch.backends.cudnn.allow_tf32 = False
    depthwise_reference.check_packed((4, 24, 9, 8), *depthwise_reference.WINDOWS[1], device="cuda")
    depthwise_reference.check_scattered((4, 24, 9, 8), *depthwise_reference.WINDOWS[4], device="cuda")
    for shape in [(64, 24, 32, 32), (4, 24, 9, 8)]:
        check_packed(shape, device="cuda")


@pytest.mark.parametrize("shape", [(64, 24, 32, 32), (256, 72, 2, 2)], ids=str)
def test_depthwise_convolutions_have_the_same_bits_every_time(shape):
    x, dy = (torch.randn(shape, device="cuda").contiguous(memory_format=CL) for _ in range(2))
    weight, bias = torch.randn(shape[1], 1, 3, 3, device="cuda"), torch.randn(shape[1], device="cuda")

    def run():
        inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = depthwise.depthwise_conv2d(*inputs, depthwise_reference.SAME)
        return y.detach(), *torch.autograd.grad(y, inputs, dy)

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_other_widths_need_no_other_kernels():
    """cuDNN compiles half a second for each."""

    def seconds(channels):
        x = torch.randn(64, channels, 16, 16, device="cuda").contiguous(memory_format=CL).requires_grad_()
        weight = torch.randn(channels, 1, 3, 3, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        depthwise.depthwise_conv2d(x, weight, None, depthwise_reference.SAME).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for channels in (32, 33, 34, 36):
        seconds(channels)
    assert max(seconds(channels) for channels in range(37, 1000, 29)) < 0.1


NETWORKS = {"vgg19": (16, 0), "resnet32": (16 + 2, 15), "wrn28_10": (25, 0), "mobilenet_v1": (27, 0)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_captured_step_is_as_close_to_float64_as_without(name, autocast):
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    net = getattr(models, name)(width=0.25, num_classes=10).cuda().to(memory_format=CL)
    images = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=CL)
    labels = torch.randint(0, 10, (64,), device="cuda")
    start = copy.deepcopy(net.state_dict())

    def loss_fn(net, images):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return F.cross_entropy(net(images), labels)

    exact = copy.deepcopy(net).double()
    loss_fn_exact = F.cross_entropy(exact(images.double()), labels)
    loss_fn_exact.backward()

    with AllWidths():
        plan = fusion.record(lambda: loss_fn(net, images))
    sums = sum(chain.add is not None for chain in plan.chains)
    assert (len(plan.chains) - sums, sums) == NETWORKS[name]

    def step(fused):
        net.zero_grad(set_to_none=True)
        if fused:
            with AllWidths(), fusion.fused(plan):
                loss = loss_fn(net, images)
        else:
            loss = loss_fn(net, images)
        loss.backward()
        return loss.detach()

    def captured(fused):
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step(fused)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(fused)
        net.load_state_dict(start)
        graph.replay()
        torch.cuda.synchronize()
        kept = [error(p.grad, q.grad) for p, q in zip(net.parameters(), exact.parameters(), strict=True)]
        buffers = [
            error(p, q.double()) for p, q in zip(net.buffers(), exact.buffers(), strict=True) if p.is_floating_point()
        ]
        return abs(float(loss) - float(loss_fn_exact)), max(kept), max(buffers)

    plain, fused = captured(False), captured(True)
    floor = 1e-2 if autocast else 1e-5
    # A ReLU at a value next to zero may turn by a rounding, which every gradient before it feels.
    for ours, theirs, least in zip(fused, plain, (floor, 2e-2, floor), strict=True):
        assert ours < 2 * theirs + least, (fused, plain)


def layers(num):
    """Convolutions followed by counters, without any chain."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(num)]).cuda().to(memory_format=CL)
    counters = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(num)]
    images = torch.randn(16, 8, 16, 16, device="cuda").contiguous(memory_format=CL)

    def forward():
        x = images
        with torch.autocast("cuda", torch.bfloat16):
            for layer, counter in zip(net, counters, strict=True):
                x = layer(x)
                counter.add_(1)
        return x.float().square().mean()

    return net, counters, forward


def test_casts_have_the_bits_of_autocast():
    net, counters, forward = layers(6)
    plan = fusion.record(forward)
    expected = torch.autograd.grad(forward(), list(net.parameters()))
    with fusion.fused(plan):
        loss = forward()
    assert [int(counter) for counter in counters] == [3] * 6
    for ours, theirs in zip(torch.autograd.grad(loss, list(net.parameters())), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_casts_and_counters_take_one_kernel_each():
    torch.use_deterministic_algorithms(False)  # with them, every tensor that is made is filled, by a kernel
    num = 10
    net, _, forward = layers(num)
    plan = fusion.record(forward)

    def num_kernels(context):
        def step():
            with context():
                loss = forward()
            return torch.autograd.grad(loss, list(net.parameters()))

        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        names = [event.key for event in profiler.key_averages() for _ in range(event.count)]
        return len([name for name in names if not name.startswith(("Mem", "cuda"))])

    # A weight and a bias for each layer, both ways, and its counter; then two casts of many, and one sum.
    assert num_kernels(nullcontext) - num_kernels(lambda: fusion.fused(plan)) >= 5 * num - 3
