"""Which convolutions use the depthwise kernel for all widths, and with which arguments."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import depthwise_time
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from slimstart.kernels import depthwise
from slimstart.kernels.depthwise import Window, depthwise_conv2d
from slimstart.lab import models
from slimstart.lab.data import load
from slimstart.lab.run.evaluation import evaluate
from slimstart.steps import depthwise_mode as swapping
from slimstart.steps import fusion

CL = torch.channels_last


@pytest.fixture
def swapped(monkeypatch):
    """Without a GPU torch does the kernel's work; what is noted is the windows that it would have got."""
    windows = []

    def noted(x, weight, bias, window):
        windows.append(window)
        return F.conv2d(x, weight, bias, window.stride, window.padding, window.dilation, x.shape[1])

    monkeypatch.setattr(depthwise, "use_triton", lambda tensor: True)
    monkeypatch.setattr(swapping, "depthwise_conv2d", noted)
    return windows


def results(forward, net, plan=None):
    net.zero_grad(set_to_none=True)
    if plan is None:
        y = forward()
    else:
        with fusion.fused(plan):
            y = forward()
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


def assert_same(forward, net):
    """Whether a forward gives the same with and without; what `record` returns is not looked at."""
    expected = results(forward, net)
    with swapping.AllWidths():
        found = results(forward, net, fusion.record(forward))
    for ours, its in zip(found, expected, strict=True):
        assert ours.dtype == its.dtype
        assert torch.equal(ours, its)


IMAGES = torch.randn(2, 6, 9, 8).contiguous(memory_format=CL)
ONE, TWO = (1, 1), (2, 2)


@pytest.mark.parametrize(
    ("conv", "window"),
    [
        (nn.Conv2d(6, 6, 3, groups=6), Window(ONE, (0, 0), ONE)),
        (nn.Conv2d(6, 6, 3, 2, 1, groups=6, bias=False), Window(TWO, ONE, ONE)),
        (nn.Conv2d(6, 6, (3, 2), (2, 1), (0, 1), (1, 2), 6), Window((2, 1), (0, 1), (1, 2))),
        (nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect", groups=6), Window(ONE, (0, 0), ONE)),
    ],
    ids=["plain", "halving", "oblong", "reflecting"],
)
def test_depthwise_layers_are(conv, window, swapped):
    assert_same(lambda: conv(IMAGES), conv)
    assert swapped == [window] * 2  # as it was recorded, and fused


@pytest.mark.parametrize("stride", [2, (2,), [2, 2], torch.Size([2, 2]), np.int64(2), torch.tensor(2)], ids=repr)
def test_settings_in_all_the_ways_of_torch(stride, swapped):
    weight = nn.Parameter(torch.randn(6, 1, 3, 3))
    try:
        F.conv2d(IMAGES, weight=weight, stride=stride, groups=6)
    except RuntimeError:
        pytest.skip("this version of PyTorch refuses it")
    assert_same(lambda: F.conv2d(IMAGES, weight=weight, stride=stride, groups=6), nn.ParameterList([weight]))
    assert swapped == [Window(TWO, (0, 0), ONE)] * 2


@pytest.mark.parametrize(
    ("conv", "images"),
    [
        (nn.Conv2d(6, 6, 3), IMAGES),
        (nn.Conv2d(6, 6, 3, groups=3), IMAGES),
        (nn.Conv2d(6, 12, 3, groups=6), IMAGES),
        (nn.Conv2d(6, 6, 3, padding="same", groups=6), IMAGES),
        (nn.Conv2d(6, 6, 5, groups=6), IMAGES),
        (nn.Conv2d(6, 6, 3, groups=6), IMAGES.contiguous()),
        (nn.Conv2d(6, 6, 3, groups=6), IMAGES[0]),
        (nn.Conv2d(6, 6, 3, groups=6).double(), IMAGES.double()),
        (nn.Conv2d(6, 6, 3, groups=6), IMAGES[:0]),
        (nn.Conv1d(6, 6, 3, groups=6), IMAGES[..., 0]),
    ],
    ids=["dense", "grouped", "wider", "same", "many taps", "other layout", "no batch", "float64", "no images", "1d"],
)
def test_other_convolutions_are_not(conv, images, swapped):
    assert_same(lambda: conv(images), conv)
    assert swapped == []


def test_checkpointed_convolutions_are_not(swapped):
    conv = nn.Conv2d(6, 6, 3, groups=6)
    images = IMAGES.clone(memory_format=torch.preserve_format).requires_grad_()
    assert_same(lambda: checkpoint(conv, images, use_reentrant=False), conv)
    assert swapped == []


class Marked(torch.Tensor):
    """Somebody's own kind of tensor."""


def test_convolutions_of_other_tensors_are_not(swapped):
    conv = nn.Conv2d(6, 6, 3, groups=6)
    assert_same(lambda: conv(IMAGES.as_subclass(Marked)).as_subclass(torch.Tensor), conv)
    assert swapped == []


def test_convolutions_under_other_differentiation_are_not(swapped):
    conv = nn.Conv2d(6, 6, 3, groups=6, bias=False)

    def of_functions():
        return torch.func.jvp(conv, (IMAGES,), (IMAGES,))[1]

    def of_tensors():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(conv(forward_ad.make_dual(IMAGES, IMAGES))).tangent

    assert_same(of_functions, conv)
    assert_same(of_tensors, conv)
    assert swapped == []


@pytest.mark.usefixtures("swapped")
def test_compiled_graphs_are_not_split(monkeypatch):
    monkeypatch.setattr(depthwise, "use_triton", lambda tensor: not torch.compiler.is_compiling())
    conv = nn.Conv2d(6, 6, 3, groups=6)
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    with swapping.AllWidths():
        ours = compiled(IMAGES)
    assert torch.equal(ours, conv(IMAGES))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": torch.zeros(3)}, "bias"),
        ({"stride": 0}, "stride"),
        ({"dilation": 0}, "dilation"),
        ({"padding": -1}, "negative padding"),
        ({"weight": torch.randn(6, 1, 3)}, "convolution dimensions"),
        ({"weight": torch.randn(6)}, "weight"),
    ],
)
def test_inputs_that_torch_refuses_are_refused(settings, message, swapped):
    with pytest.raises(RuntimeError, match=message), swapping.AllWidths():
        F.conv2d(IMAGES, **{"weight": torch.randn(6, 1, 3, 3), "groups": 6} | settings)


def test_types_are_those_of_autocast(swapped):
    conv = nn.Conv2d(6, 6, 3, groups=6)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return conv(IMAGES)

    assert forward().dtype == torch.bfloat16
    assert_same(forward, conv)
    assert len(swapped) == 2


def test_types_that_do_not_agree_are_refused_as_by_torch(swapped):
    conv = nn.Conv2d(6, 6, 3, groups=6)
    with pytest.raises(RuntimeError, match="should be the same"), swapping.AllWidths():
        conv(IMAGES.bfloat16())
    with pytest.raises(RuntimeError, match=r"expected scalar type BFloat16 but found Float|should be the same"):
        depthwise_conv2d(IMAGES.bfloat16(), conv.weight, None, swapped[0])


def test_all_of_a_network(swapped):
    net = models.mobilenet_v1(width=0.25).to(memory_format=CL)
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=CL)
    with swapping.AllWidths():
        plan = fusion.record(lambda: net(images))
    assert len(swapped) == 13
    with fusion.fused(plan):
        net(images)
    assert len(swapped) == 13  # nothing outside of the context


def test_traced_networks_have_them(swapped):
    net = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.Conv2d(6, 6, 3, 4, groups=6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = nn.Sequential(net, nn.Linear(6, 10)).to(memory_format=CL)
    data = load("fashion", batch_size=500)
    loss, _ = evaluate(net, data, "float32")
    assert len(swapped) == len(list(data.test.epoch(0)))
    images, labels = (torch.cat(parts) for parts in zip(*data.test.epoch(0), strict=True))
    with torch.no_grad():
        assert loss == pytest.approx(float(F.cross_entropy(net(images), labels)), rel=1e-5)


def test_without_kernels_torch_does_it():
    weight, window = torch.randn(6, 1, 3, 3), Window((2, 1), (1, 0), (1, 2))
    assert not depthwise.supports(IMAGES, weight, None, window, 6)
    expected = F.conv2d(IMAGES, weight, None, (2, 1), (1, 0), (1, 2), 6)
    assert torch.equal(depthwise_conv2d(IMAGES, weight, None, window), expected)


def test_the_benchmark_has_both_sides_of_every_layer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(depthwise_time, "LAYERS", (depthwise_time.Layer(8, 4, 1), depthwise_time.Layer(6, 5, 2)))
    arguments = ["--device", "cpu", "--batch", "1", "--rounds", "2", "--out", str(tmp_path / "record.json")]
    monkeypatch.setattr(sys, "argv", ["depthwise_time.py", *arguments])
    depthwise_time.main()
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [(row["channels"], row["size"], row["stride"]) for row in rows] == [(8, 4, 1), (6, 5, 2)]
    assert all(row[f"{name}{when}"] > 0 for row in rows for name in ("torch", "ours") for when in ("_first_ms", "_ms"))
    ratio = sum(row["ours_ms"] for row in rows) / sum(row["torch_ms"] for row in rows)
    assert f"all of them: {ratio:.2f} times the time of torch" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.depthwise_reference"], env=environment, check=True, timeout=300)
