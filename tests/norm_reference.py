"""Relative errors of `kernels.norm` to float64, in the Frobenius norm, on any device.

As a program, with TRITON_INTERPRET=1, it checks the kernels on a CPU.
"""

import itertools

import torch
import torch.nn.functional as F

from slimstart.kernels import norm

CL = torch.channels_last
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-5}


def error(ours, reference):
    ours, reference = ours.detach().double(), reference.detach()
    return float(torch.linalg.vector_norm(ours - reference) / torch.linalg.vector_norm(reference))


def errors(shape, dtype=torch.float32, residual=True, relu=True, affine=True, mean=0.0, std=1.0, device="cpu"):
    """Of the output, of every gradient, and of the running statistics, by name."""
    channels = shape[1]

    def image(mean=0.0, std=1.0):
        return (torch.randn(shape, device=device) * std + mean).to(dtype).contiguous(memory_format=CL)

    inputs = {"x": image(mean, std)}
    if residual:
        inputs["residual"] = image()
    if affine:
        inputs |= {"weight": torch.randn(channels, device=device), "bias": torch.randn(channels, device=device)}
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    statistics = [torch.randn(channels, device=device), torch.rand(channels, device=device)]
    exact_statistics = [t.double() for t in statistics]
    upstream = image()

    def arguments(named):
        return [named.get(name) for name in ("x", "residual", "weight", "bias")]

    assert norm.supports(*arguments(inputs), *statistics)
    y = norm.batch_norm_act(*arguments(inputs), *statistics, 0.3, 1e-5, relu)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=CL)
    y.backward(upstream)

    x, r, weight, bias = arguments(exact)
    expected = F.batch_norm(x, *exact_statistics, weight, bias, True, 0.3, 1e-5) + (0 if r is None else r)
    # Where the sum is zero but for rounding, both signs are right: the gradient passes where y says so.
    expected.backward(upstream.double() * (y > 0) if relu else upstream.double())
    found = {"y": error(y, expected.relu() if relu else expected)}
    found |= {name: error(t.grad, exact[name].grad) for name, t in inputs.items()}
    names = ("running_mean", "running_var")
    return found | {n: error(*pair) for n, *pair in zip(names, statistics, exact_statistics, strict=True)}


def check(*args, **kwargs):
    """float32 within 2e-5, shorter ones within half a unit of their last place; statistics are float32 anyway."""
    found = errors(*args, **kwargs)
    rounding = ROUNDING[kwargs.get("dtype", torch.float32)]
    for name, value in found.items():
        assert value < (rounding if name in ("y", "x", "residual") else 2e-5), (args, kwargs, found)  # not NaN either


def check_saved(ours, theirs, inputs):
    """Gradients are right where saved tensors come back in another layout, as from torch's `save_on_cpu`."""
    found = []
    for function in (ours, theirs):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
            y = function(*inputs)
        found.append(torch.autograd.grad(y.square().sum(), inputs))
    for own, expected in zip(*found, strict=True):
        assert error(own, expected.double()) < ROUNDING[torch.float32]


def check_packed(shape, device="cpu"):
    """`check_saved` of a norm with all that may follow it."""
    x, residual = (torch.randn(shape, device=device).contiguous(memory_format=CL).requires_grad_() for _ in range(2))
    check_saved(
        lambda x, r: norm.batch_norm_act(x, r, None, None, None, None, 0.1, 1e-5, True),
        lambda x, r: (F.batch_norm(x, None, None, training=True) + r).relu(),
        (x, residual),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    chains = [{"residual": residual, "relu": relu} for residual, relu in itertools.product((False, True), repeat=2)]
    for norm.SMALL_ROWS, channels, chain in itertools.product((0, 4096), (8, 13, 24, 72), chains):
        check((3, channels, 5, 7), **chain)
    for norm.SMALL_ROWS in (0, 4096):
        check((2, 24, 29, 31), mean=10.0, std=0.1)
        check((2, 24, 5, 7), affine=False)
        check((2, 40, 5, 7), dtype=torch.bfloat16)
        check((2, 3, 5, 7), dtype=torch.float16)
        check((2, 640, 2, 3))
        check((64, 16, 1, 1))
        check_packed((2, 24, 5, 7))
    norm.SMALL_ROWS = 0
    check((2, 1100, 2, 2))  # more than half of the widest tile
