"""Relative errors of `kernels.depthwise` to float64, in the Frobenius norm, on any device.

As a program, with TRITON_INTERPRET=1, it checks the kernels on a CPU.
"""

import itertools

import torch
import torch.nn.functional as F

from slimstart.kernels import depthwise
from slimstart.kernels.depthwise import Window, depthwise_conv2d
from tests.norm_reference import CL, ROUNDING, check_saved, error

SAME, HALF = Window((1, 1), (1, 1), (1, 1)), Window((2, 2), (1, 1), (1, 1))
WINDOWS = [  # with the size of the filter
    (SAME, (3, 3)),
    (HALF, (3, 3)),
    (Window((1, 1), (0, 0), (1, 1)), (1, 1)),
    (Window((1, 1), (4, 0), (1, 1)), (9, 1)),
    (Window((2, 1), (2, 0), (1, 2)), (3, 3)),
    (Window((3, 3), (2, 2), (2, 1)), (2, 3)),  # some pixels are read by nothing
    (Window((1, 2), (4, 5), (1, 1)), (3, 2)),  # some results read nothing but padding
]


def errors(shape, window, taps, dtype=torch.float32, bias=True, device="cpu"):
    """Of the output and of every gradient, by name."""
    inputs = {
        "x": torch.randn(shape, device=device).to(dtype).contiguous(memory_format=CL),
        "weight": torch.randn(shape[1], 1, *taps, device=device).to(dtype),
    }
    if bias:
        inputs["bias"] = torch.randn(shape[1], device=device).to(dtype)
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}

    def arguments(named):
        return [named.get(name) for name in ("x", "weight", "bias")]

    assert depthwise.supports(*arguments(inputs), window, shape[1])
    y = depthwise_conv2d(*arguments(inputs), window)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=CL)
    expected = F.conv2d(*arguments(exact), *window, shape[1])
    assert y.shape == expected.shape
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream.double())
    return {"y": error(y, expected)} | {name: error(t.grad, exact[name].grad) for name, t in inputs.items()}


def check(*args, **kwargs):
    """float32 within 2e-5, shorter ones within half a unit of their last place."""
    found = errors(*args, **kwargs)
    rounding = ROUNDING[kwargs.get("dtype", torch.float32)]
    assert all(value < rounding for value in found.values()), (args, kwargs, found)  # not NaN either


def check_twice(shape, window, taps, device="cpu"):
    """The gradient of what a gradient gives, as in a gradient penalty, against float64."""

    def penalty(function, x, weight):
        (dx,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, weight))

    x = torch.randn(shape, device=device).contiguous(memory_format=CL).requires_grad_()
    weight = torch.randn(shape[1], 1, *taps, device=device, requires_grad=True)
    ours = penalty(lambda x, weight: depthwise_conv2d(x, weight, None, window), x, weight)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = penalty(lambda x, weight: F.conv2d(x, weight, None, *window, shape[1]), *exact)
    assert max(map(error, ours, expected)) < 2e-5


def check_scattered(shape, window, taps, device="cpu"):
    """Filters, biases and gradients of results lie in memory in any way, and so do filters that were saved."""
    x = torch.randn(shape, device=device).contiguous(memory_format=CL).requires_grad_()
    weight = torch.randn(*taps, 1, shape[1], device=device).permute(3, 2, 0, 1).requires_grad_()
    bias = torch.randn(3 * shape[1], device=device)[::3].detach().requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous(), lambda t: t.mT):
        y = depthwise_conv2d(x, weight, bias, window)
    expected = F.conv2d(*exact, *window, shape[1])
    upstream = torch.randn(expected.shape, device=device)
    y.backward(upstream)
    expected.backward(upstream.double())
    assert error(y, expected) < ROUNDING[torch.float32]
    for own, its in zip((x, weight, bias), exact, strict=True):
        assert error(own.grad, its.grad) < ROUNDING[torch.float32]


def check_packed(shape, window, taps, device="cpu"):
    """`check_saved` of a convolution."""
    x = torch.randn(shape, device=device).contiguous(memory_format=CL).requires_grad_()
    weight = torch.randn(shape[1], 1, *taps, device=device, requires_grad=True)
    check_saved(
        lambda x, weight: depthwise_conv2d(x, weight, None, window),
        lambda x, weight: F.conv2d(x, weight, None, *window, shape[1]),
        (x, weight),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    for channels, (window, taps) in itertools.product((2, 13, 40), WINDOWS):
        check((3, channels, 6, 5), window, taps)
    for window, taps in WINDOWS[:2]:
        check((2, 104, 9, 7), window, taps, bias=False)
        check((5, 24, 2, 2), window, taps, dtype=torch.bfloat16)
        check((2, 24, 1, 1), window, taps)
        check((70, 8, 3, 3), window, taps, dtype=torch.float16)
    depthwise.PARTIALS = 1000
    check((5, 8, 40, 40), SAME, (3, 3))  # many programs, each with one image
    check_twice((2, 6, 5, 6), *WINDOWS[4])
    check_packed((2, 6, 5, 6), *WINDOWS[1])
    check_scattered((2, 6, 5, 6), *WINDOWS[4])
