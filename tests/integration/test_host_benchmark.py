"""benchmarks/resident.py and inventory.py: predicted memory, and the records that they write."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import resident as benchmark
import torch
import torch.nn.functional as F
from inventory import Peak, inventory
from torch import Tensor, nn

from slimstart import Flops, SparseTraining
from slimstart.lab import models

ROOT = Path(__file__).parents[2]


def held(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_the_inventory_equals_that_of_a_training(policy: str) -> None:
    """Kind by kind, against the tensors of a training, before its structure changes."""
    model, images = benchmark.build(0.125, "cpu"), torch.randn(4, 3, 32, 32)
    known = inventory(model, images, 0.05, policy, total_steps=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sparse = SparseTraining(
        model, optimizer, images[:1], Flops(0.05), policy=policy, total_steps=1000, full_model_device="cpu"
    )
    references = [held([*net.parameters(), *net.buffers()]) for net in sparse.references()]
    given: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda _, inputs, output: given.extend([inputs[0], output]))
    F.cross_entropy(model(images), torch.zeros(4, dtype=torch.int64)).backward()
    gradients = held(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    momentum = held(state["momentum_buffer"] for state in optimizer.state.values())
    weights = held([*model.parameters(), *model.buffers()])
    expected = {"weights": weights, "gradients": gradients, "momentum": momentum, "next": weights + momentum}
    expected |= {"reference": max(references)} if references else {}
    assert {kind: known.get(kind) for kind in expected} == expected
    assert known["cublas"] == 5 * (2 * 4096 + 8 * 16) * 1024
    # What a backward keeps is at least what every batch norm is given, and the ReLU after it; the last gradients take
    # the place of the first activations that are no longer needed.
    assert held(given) - gradients < known["activations"] < 1.5 * held(given)
    assert known.keys() - expected.keys() == {"activations", "convolutions", "cublas"} | (
        set() if references else {"last step"}
    )


def test_bytes_are_counted_while_tensors_live() -> None:
    with torch.device("meta"), Peak() as counted:
        a = torch.zeros(100)
        b = a.view(10, 10) * 2
        del a
        assert (counted.now, counted.most) == (400, 800)
        b.add_(1)
        c = torch.cat([b, b.double()])
        assert (counted.now, counted.most) == (400 + 1600, 400 + 800 + 1600)
        del b, c
        assert counted.now == 0
        weight = nn.Parameter(torch.zeros(10, 10))
        weight.square().sin().sum().backward()
        assert counted.now == 2 * 400, "the weight and its gradient"


@pytest.mark.slow
def test_a_row_that_runs_out_of_memory_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(policy: str, home: str | None, *_: Any) -> dict[str, Any]:
        if (policy, home) == ("paper", "cpu"):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        return {"policy": policy, "full_model_device": home, "step_s": 3.0 if home else 2.0}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["policy"] for row in record["rows"]] == 2 * ["paper", "equal_worth"]
    assert ["out_of_memory" in row for row in record["rows"]] == [True, False, False, False]
    failed = record["rows"][0]
    assert failed["out_of_memory"] == "Tried to allocate 2.00 MiB"
    assert failed["known_bytes"]["cublas"] == 5 * 8 * 16 * 1024
    assert record["slower"] == {"equal_worth": 0.5}
    for wrong in (["--windows", "14"], ["--resample-every", "2"]):
        with pytest.raises(SystemExit):
            benchmark.main([*wrong, "--device", "cpu"])
        assert "equal_worth settles after 16 draws" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_the_networks_of_the_benchmark_fit_within_the_limit(policy: str) -> None:
    limit = 5 * 2**30
    with torch.device("meta"):
        model = models.build("vgg19", num_classes=10, width=benchmark.width_of(4 * limit))
        images = torch.zeros(16, 3, 32, 32)
    assert 8 * sum(p.numel() for p in model.parameters()) >= 4 * limit
    assert sum(inventory(model, images, 0.05, benchmark.settings_of(policy)).values()) < 0.7 * limit


@pytest.mark.slow
def test_the_benchmark_writes_a_record(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "resident.py"), "--tiny", "--device", "cpu"]
    subprocess.run([*command, "--out", str(tmp_path / "record.json")], check=True, cwd=ROOT)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["rows"]) == 4
    for host, device in zip(record["rows"][:2], record["rows"][2:], strict=True):
        assert all(host[key] == device[key] for key in ("policy", "parameters", "narrow_parameters", "width"))
        assert host["narrow_parameters"] < 0.2 * host["parameters"]
        assert record["slower"][host["policy"]] == pytest.approx(host["step_s"] / device["step_s"] - 1)
