"""Finished networks in the hands of PyTorch's own tools, without slimstart: plain and residual, of both policies."""

import copy
import importlib.util
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import EqualWorth, ExportError, Flops, Paper, SparseTraining
from slimstart.io.export import to_onnx, to_torch
from slimstart.io.python_file import to_python
from tests.lines import stopped_at_every_line

IMAGES = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


class Plain(nn.Module):
    """A chain, with its widths as arguments."""

    def __init__(self, widths: tuple[int, int] = (16, 24)) -> None:
        super().__init__()
        first, second = widths
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(second, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class Block(nn.Module):
    """Its annotations are strings, as those of every module with `from __future__ import annotations`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: "Tensor") -> "Tensor":
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.blocks = nn.Sequential(Block(24), Block(24))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))

    def forward(self, images: "Tensor") -> "Tensor":
        return self.head(self.blocks(self.stem(images)))


POLICIES = {"equal_worth": EqualWorth(search_steps=6, align=1), "paper": Paper()}
CLASSES: dict[str, Callable[[], nn.Module]] = {"plain": Plain, "residual": Residual}
NETWORKS = [(kind, policy) for kind in CLASSES for policy in POLICIES]


@cache
def _finished(kind: str, policy: str, plain: bool) -> nn.Module:
    torch.manual_seed(0)
    model = CLASSES[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = SparseTraining(model, optimizer, IMAGES[:2], Flops(0.4), policy=POLICIES[policy], total_steps=12)
    for _ in range(12):
        sparse.step(lambda net, images, labels: F.cross_entropy(net(images), labels), IMAGES, LABELS)
    sparse.settle()
    return sparse.finish(plain=plain).eval()


@pytest.fixture(params=NETWORKS, ids="-".join)
def small(request: pytest.FixtureRequest) -> nn.Module:
    """A finished network, narrower than its class."""
    kind, policy = request.param
    found = copy.deepcopy(_finished(kind, policy, plain=True))
    assert sum(p.numel() for p in found.parameters()) < 0.7 * sum(p.numel() for p in CLASSES[kind]().parameters())
    return found


def outputs(net: Any, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return net(images)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether outputs differ as eight bits do."""
    return 0 < float((found - expected).abs().max()) < 0.1 * float(expected.abs().max())


def imported(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------- files


def test_torch_export(small: nn.Module, tmp_path: Path) -> None:
    program = torch.export.export(small, (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, tmp_path / "small.pt2")
    again = torch.export.load(tmp_path / "small.pt2").module()
    for images in (IMAGES, IMAGES[:3]):
        torch.testing.assert_close(outputs(again, images), outputs(small, images))


@pytest.mark.slow
def test_onnx(small: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "small.onnx"
    torch.onnx.export(small, (IMAGES,), path, dynamo=True, verbose=False)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = runtime.run(None, {runtime.get_inputs()[0].name: IMAGES.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), outputs(small), atol=1e-4, rtol=1e-4)


def test_a_python_file(small: nn.Module, tmp_path: Path) -> None:
    assert to_python(small, tmp_path / "small.py", IMAGES[:1]) == 0
    source = (tmp_path / "small.py").read_text()
    assert f"class {type(small).__name__}(nn.Module)" in source
    assert "slimstart" not in source.split('"""', 2)[2]
    again = imported(tmp_path / "small.py").load()
    assert {type(part).__module__.split(".")[0] for part in again.modules()} <= {"torch", "small"}
    assert torch.equal(outputs(again), outputs(small))


def test_a_chain_is_a_function(tmp_path: Path) -> None:
    """Modules of other arguments than whole numbers, and in nested chains."""
    chain = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 5, (3, 1), stride=(1, 2), bias=False), nn.GroupNorm(5, 5), nn.LeakyReLU(0.2)),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(5, 10, 1, groups=5, padding_mode="reflect"), nn.Tanh(),
        nn.Dropout(0.3), nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(2), nn.Linear(12, 2, bias=False), nn.GELU("tanh"),
    )  # fmt: skip
    assert to_python(chain, tmp_path / "chain.py", IMAGES[:1]) == 0
    source = (tmp_path / "chain.py").read_text()
    assert "def make():\n    return nn.Sequential(\n        nn.Sequential(\n" in source
    assert "            nn.Conv2d(3, 5, (3, 1), stride=(1, 2), bias=False),\n" in source
    assert torch.equal(outputs(imported(tmp_path / "chain.py").load()), outputs(chain.eval()))


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_python_file_and_its_weights_are_replaced_together(is_killed: bool, tmp_path: Path) -> None:
    path, found = tmp_path / "small.py", []

    def write(width: int) -> None:
        to_python(Plain((width, 6)), path, IMAGES[:1])

    with torch.enable_grad():  # an interrupt may come between the last line of a block without gradients and its end
        for _ in stopped_at_every_line(lambda: write(5), lambda: write(4), is_killed, every=7):
            shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # of a file that is as old
            found.append(imported(path).load().features[0].out_channels)
    assert found == sorted(found)
    assert set(found) == {4, 5}
    (tmp_path / "small-own.pt").touch()
    write(4)
    (weights,) = {file.name for file in tmp_path.glob("*.p*")} - {"small.py", "small-own.pt"}
    assert repr(weights) in path.read_text()


@pytest.mark.parametrize(
    ("write", "name"), [(to_torch, "net.pt2"), pytest.param(to_onnx, "net.onnx", marks=pytest.mark.slow)]
)
def test_a_file_that_computes_something_else_replaces_no_other(
    write: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    if write is to_onnx:
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")

    class Noisy(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + torch.rand(4)

    (tmp_path / name).write_text("old")
    with pytest.raises(ExportError, match="does not compute the same"):
        write(Noisy(), tmp_path / name, IMAGES[:1])
    assert (tmp_path / name).read_text() == "old"


class Branching(Plain):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.sum() > 0 else -images)


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * super().forward(images)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Branching, "torch.fx cannot trace Branching"),
        (Scaled, "uses 'scale' outside of PyTorch's layers"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (36, 12)), nn.LSTM(12, 3)), "is a LSTM"),
        (lambda: _finished("residual", "paper", plain=False), r"finish\(plain=True\)"),
    ],
    ids=["branch", "parameter", "lstm", "ports"],
)
def test_networks_that_cannot_be_written_as_python(make: Callable[[], nn.Module], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=reason):
        to_python(make(), tmp_path / "small.py", IMAGES[:1])
    assert list(tmp_path.iterdir()) == []


def test_a_state_dict_and_the_dense_class(small: nn.Module, tmp_path: Path) -> None:
    torch.save(small.state_dict(), tmp_path / "small.pt")
    state = torch.load(tmp_path / "small.pt", weights_only=True)
    again = slimstart.shrink_to(type(small)(), state, IMAGES[:1]).eval()
    assert torch.equal(outputs(again), outputs(small))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_dict_and_a_class_with_narrow_arguments(policy: str) -> None:
    small = _finished("plain", policy, plain=True)
    widths = small.features[0].out_channels, small.features[4].out_channels  # type: ignore[index,union-attr]
    again = Plain(widths)  # type: ignore[arg-type]
    again.load_state_dict(small.state_dict())
    assert torch.equal(outputs(again.eval()), outputs(small))


# --------------------------------------------------------------------------- TorchScript and quantisation


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(small: nn.Module, tmp_path: Path) -> None:
    for made in (torch.jit.trace(small, IMAGES), torch.jit.script(small)):
        made.save(tmp_path / "small.pt")
        again = torch.jit.load(tmp_path / "small.pt")
        for images in (IMAGES, IMAGES[:3]):
            torch.testing.assert_close(outputs(again, images), outputs(small, images))


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation(small: nn.Module) -> None:
    quantised = torch.ao.quantization.quantize_dynamic(small, {nn.Linear}, dtype=torch.qint8)
    assert any(type(part) is torch.ao.nn.quantized.dynamic.Linear for part in quantised.modules())
    assert is_close(outputs(quantised), outputs(small))


@pytest.mark.filterwarnings("ignore")
def test_fx_quantisation(small: nn.Module) -> None:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    prepared = quantize_fx.prepare_fx(copy.deepcopy(small), get_default_qconfig_mapping("onednn"), (IMAGES,))
    outputs(prepared)
    quantised = quantize_fx.convert_fx(prepared)
    assert not any(type(part) in (nn.Conv2d, nn.BatchNorm2d, nn.Linear) for part in quantised.modules())
    assert is_close(outputs(quantised), outputs(small))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pt2e_quantisation(small: nn.Module) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(small, (IMAGES,)).module(), quantizer)
    outputs(prepared)
    quantised = convert_pt2e(prepared)
    layers = sum(isinstance(part, nn.Conv2d | nn.Linear) for part in small.modules())
    assert sum("quantize_per_channel" in str(node.target) for node in quantised.graph.nodes) >= layers
    assert is_close(outputs(quantised), outputs(small))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ports_and_scripts() -> None:
    """With ports, a network can be exported and traced; for scripts and FX they are to be removed."""
    small = copy.deepcopy(_finished("residual", "paper", plain=False))
    assert any("Streamed" in type(part).__name__ for part in small.modules())
    for made in (torch.export.export(small, (IMAGES,)).module(), torch.jit.trace(small, IMAGES)):
        torch.testing.assert_close(outputs(made), outputs(small))
    with pytest.raises(ValueError, match="Unknown type annotation"):
        torch.jit.script(small)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(small)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from examples import deployment

    deployment.main(["--width", "0.5", "--epochs", "2", "--batch-size", "150", "--out", str(tmp_path)])
    found = dict(re.findall(r"^(.+): (\S+) %$", capsys.readouterr().out, re.MULTILINE))
    assert len(found) == 6
    assert all(float(one) == pytest.approx(float(found["finished"]), abs=1.0) for one in found.values())
    assert float(found["finished"]) > 25  # chance is 10
