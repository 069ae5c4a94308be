"""The examples, with less data and fewer steps."""

import copy
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import slimstart
from examples import larger_than_the_card, own_data, own_model, training_loop
from slimstart.lab import data, models, records
from slimstart.lab.cli import main
from tests.datasets import random_arrays, small_cifar

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.chdir(ROOT)  # `examples.own_model` is found in the current folder
    monkeypatch.setattr(sys, "argv", ["slimstart", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_own_model_runs_as_its_docstring_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inspect, train = (shlex.split(line) for line in re.findall(r"^ +slimstart (.*)", own_model.__doc__ or "", re.M))
    assert run(monkeypatch, *inspect) == 0
    assert "100.0% of the FLOPs can shrink" in capsys.readouterr().out
    np.savez(tmp_path / "cifar10.npz", **random_arrays(small_cifar("cifar10")))
    tiny = ["--epochs", "2", "--batch-size", "25", "--num-masks", "2", "--device", "cpu"]
    tiny += ["--data", "cifar10", "--data-dir", str(tmp_path)]
    assert run(monkeypatch, *train, *tiny, "--out", str(tmp_path / "run")) == 0
    record = records.read(tmp_path / "run")
    assert (record.model, record.budget) == ("examples.own_model:make", "flops=0.2")
    assert record.flops_ratio <= 0.2
    small = slimstart.load(tmp_path / "run" / "network", lambda: own_model.make(10, 3))
    assert slimstart.flops(small, torch.zeros(1, 3, 32, 32)) == record.flops


@pytest.mark.slow
def test_own_data_trains_as_its_docstring_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (line,) = re.findall(r"^ +slimstart (.*)", own_data.__doc__ or "", re.M)
    tiny = ["--width", "0.25", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run(monkeypatch, *shlex.split(line), *tiny) == 0
    record = records.read(tmp_path / "run")
    assert (record.data, record.num_classes, record.image_shape) == ("examples.own_data:make", 4, (1, 28, 28))
    assert record.accuracy > 50  # of four classes


def test_a_network_larger_than_the_device_is_trained_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--model", "small", "--width", "0.5", "--steps", "6", "--print-every", "3", "--batch-size", "8"]
    larger_than_the_card.main([*tiny, "--budget", "0.3", "--device", "cpu"])
    output = capsys.readouterr().out
    assert "needs dense weights 0.14 MiB and optimizer state 0.14 MiB" in output
    assert len(re.findall(r"step [36]  loss \d", output)) == 2
    (weights,) = re.findall(r"finished: .* with (\d+) weights", output)
    dense = models.build("small", num_classes=10, in_channels=1, width=0.5)
    assert int(weights) < 0.5 * sum(p.numel() for p in dense.parameters())


def test_the_training_loop_gives_a_network_within_its_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny = ["--width", "0.25", "--epochs", "2", "--batch-size", "150", "--budget", "0.3"]
    training_loop.main([*tiny, "--out", str(tmp_path / "small")])
    output = capsys.readouterr().out
    accuracy, ratio = map(float, re.findall(r"finished: (\S+) % at (\S+)% of the FLOPs", output)[0])
    assert ratio <= 30
    assert accuracy > 25  # chance is 10

    dense = models.build("small", num_classes=10, in_channels=1, width=0.25)
    small = slimstart.load(tmp_path / "small", lambda: copy.deepcopy(dense)).eval()
    example = torch.zeros(1, 1, 28, 28)
    assert 100 * slimstart.flops(small, example) / slimstart.flops(dense, example) == pytest.approx(ratio, abs=0.01)
    with torch.no_grad():
        told = [
            small(images).argmax(1) == labels for images, labels in data.load("fashion", batch_size=9).test.epoch(0)
        ]
    assert 100 * float(torch.cat(told).double().mean()) == pytest.approx(accuracy, abs=0.01)
