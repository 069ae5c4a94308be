"""SparseTraining in loops of Accelerate."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.accelerate_cases import STEPS, batches, prepared, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
Differences = Callable[[Any, Any], list[str]]


def trained(before: bool, **options: Any) -> Any:
    accelerator, model, optimizer, sparse = prepared(before, **options)
    train(accelerator, model, optimizer, batches())
    return sparse.finish()


def test_before_or_after_prepare(differences: Differences) -> None:
    first, second = (trained(before) for before in (True, False))
    assert differences(dict(first.state_dict()), dict(second.state_dict())) == []
    assert first[0].out_channels < 16


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_resuming_is_exact(before: bool, safe: bool, tmp_path: Path, differences: Differences) -> None:
    accelerator, model, optimizer, whole = prepared(before)
    train(accelerator, model, optimizer, batches()[:13])
    accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    train(accelerator, model, optimizer, batches()[13:])
    accelerator, model, optimizer, resumed = prepared(before, seed=5)
    accelerator.load_state(tmp_path / "state")
    assert resumed.num_steps == 13
    assert not resumed.settled
    train(accelerator, model, optimizer, batches()[13:])
    assert differences(resumed.state_dict()["model"], whole.state_dict()["model"]) == []
    assert differences(dict(resumed.finish().state_dict()), dict(whole.finish().state_dict())) == []


def test_gradients_are_accumulated_and_clipped() -> None:
    accelerator, model, optimizer, sparse = prepared(gradient_accumulation_steps=4)
    before = [p.detach().clone() for p in model.parameters()]
    train(accelerator, model, optimizer, batches()[:4], clip=1e-3)
    moved = torch.cat([(p - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
    assert sparse.num_steps == 1
    assert float(moved.norm().detach()) == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the learning rate times the norm


def test_mixed_precision() -> None:
    accelerator, model, optimizer, sparse = prepared(mixed_precision="bf16")
    model.float()
    train(accelerator, model, optimizer, [(images.float(), labels) for images, labels in batches()])
    assert sparse.num_steps == STEPS
    assert sparse.finish()[0].out_channels < 16


@pytest.mark.parametrize("order", ["before", "after"])
def test_two_processes_equal_one(order: str, tmp_path: Path, differences: Differences) -> None:
    folders = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["tests/accelerate_cases.py", str(tmp_path), order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert differences(dict(first), dict(second)) == []
    for name, value in trained(order == "before").state_dict().items():
        torch.testing.assert_close(first[name], value)


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import accelerate_training

    tiny = ["--width", "0.25", "--batch-size", "300", "--out", str(tmp_path)]
    accelerate_training.main([*tiny, "--epochs", "1"])
    accuracy, share = map(float, re.findall(r"finished: (\S+) % at (\S+)%", capsys.readouterr().out)[0])
    assert share <= 25
    assert accuracy > 15  # chance is 10
    accelerate_training.main([*tiny, "--epochs", "2", "--resume"])
    assert re.findall(r"epoch (\d)", capsys.readouterr().out) == ["2"]
