"""`slimstart compare`: its files, resumption, and failures of single runs."""

import dataclasses
import os
import re
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from slimstart.errors import DataError
from slimstart.lab import records
from slimstart.lab.cli.display import ComparisonDisplay, console, show_records
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run import comparison
from slimstart.lab.run.callbacks import Status
from slimstart.lab.run.comparison import Outcome, Trial, carry_out, trials
from slimstart.lab.run.environment import Place
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from tests.integration import test_command_line
from tests.integration.test_command_line import OWN, Slimstart
from tests.records import make

slimstart = test_command_line.slimstart  # a fixture

TINY = Recipe(model=OWN, batch_size=1000, num_masks=2, lr=0.05)
QUICK = Place(device="cpu")
COMMON = ["--model", OWN, "--batch-size", 1000, "--num-masks", 2, "--device", "cpu"]


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of the one table in a Markdown file, by their titles."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    titles, _, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(titles, cells, strict=True)) for cells in found]


def test_the_table_is_that_of_the_records_and_one_failure_ends_nothing(slimstart: Slimstart, tmp_path: Path) -> None:
    methods: list[Any] = ["--methods", "uniform,slimstart", "--budget", "flops=0.4,flops=0.0001"]
    methods += ["--epochs", 1, "--out", "both"]
    status, output, errors = slimstart("compare", *methods, *COMMON, "--seeds", 2)
    assert status == 1
    assert re.findall(r"^run (\d/8) (\S+) ", output, re.MULTILINE) == [
        (f"{i + 1}/8", f"{method}-flops-{budget}-seed{seed}")
        for i, (seed, budget, method) in enumerate(
            (s, b, m) for s in (0, 1) for b in ("0.4", "0.0001") for m in ("uniform", "slimstart")
        )
    ]
    assert "epoch 1/1" not in output
    failed = re.findall(r"^failed: (\S+): `Flops\(0.0001\)` allows .* feasible from", errors, re.MULTILINE)
    assert failed == [f"{method}-flops-0.0001-seed{seed}" for seed in (0, 1) for method in ("uniform", "slimstart")]
    made = sorted(path.name for path in (tmp_path / "both").iterdir())
    names = [f"{method}-flops-0.4-seed{seed}" for method in ("uniform", "slimstart") for seed in (0, 1)]
    assert made == sorted([*names, "report.html", "table.md"])

    found = {row["method"]: row for row in rows(tmp_path / "both" / "table.md")}
    assert found.keys() == {"uniform", "slimstart"}
    for method, row in found.items():
        runs = [records.read(tmp_path / "both" / f"{method}-flops-0.4-seed{seed}") for seed in (0, 1)]
        one, other = (run.accuracy for run in runs)
        assert row["accuracy, %"] == f"{(one + other) / 2:.2f} ± {abs(one - other) / 2**0.5:.2f}"
        assert row["seeds"] == "2"
        assert float(row["FLOPs, %"]) == pytest.approx(50 * sum(r.flops / r.dense_flops for r in runs), abs=0.05)
        assert float(row["params, %"]) == pytest.approx(50 * sum(r.params / r.dense_params for r in runs), abs=0.05)
        executed = statistics.fmean(run.dense_train_flops / run.train_flops for run in runs)
        assert float(row["cost saving, executed"].strip("×")) == pytest.approx(executed, abs=0.005)
        taken = statistics.fmean(run.flops_ratio for run in runs) / 0.4
        assert ("missed" in row["budget"]) == (not 1 / 1.02 <= taken <= 1.02)
        assert f"{row['accuracy, %']}" in output
    assert (tmp_path / "both" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_only_new_runs_are_carried_out(slimstart: Slimstart, tmp_path: Path) -> None:
    arguments = ["--budget", "flops=0.4", "--epochs", 1, "--out", "both", *COMMON]
    assert slimstart("compare", "--methods", "uniform", *arguments)[0] == 0
    file, table = tmp_path / "both" / "uniform-flops-0.4-seed0" / "record.json", tmp_path / "both" / "table.md"
    before, first = file.stat().st_mtime_ns, table.read_text()
    assert slimstart("compare", "--methods", "uniform", *arguments)[0] == 0
    assert table.read_text() == first
    assert slimstart("compare", "--methods", "dense,uniform", *arguments)[0] == 0
    assert [row["method"] for row in rows(table)] == ["dense", "uniform"]
    assert file.stat().st_mtime_ns == before


def test_changed_settings_and_locked_runs_are_refused(slimstart: Slimstart, tmp_path: Path) -> None:
    (trial,) = trials(dataclasses.replace(TINY, lr=0.1), ["uniform"], ["flops=0.4"], total_epochs=3)
    run = Run(tmp_path / "both" / trial.name)
    run.create(trial.recipe)
    arguments = ["--methods", "uniform", "--budget", "flops=0.4", "--epochs", 3, "--out", "both", *COMMON]
    status, _, errors = slimstart("compare", *arguments, "--lr", 0.3)
    assert status == 2
    assert "uniform-flops-0.4-seed0 began with other settings: `lr` was 0.1 and is 0.3; choose another" in errors
    with run.locked():
        status, _, errors = slimstart("compare", *arguments)
    assert status == 2
    assert f"another process is writing to {Path('both') / trial.name}" in errors


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[...] can't allocate memory: 9 bytes")],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_recorded_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: Program) -> None:
        raise error

    (trial,) = trials(TINY, ["uniform"], ["flops=0.4"], total_epochs=1)
    monkeypatch.setattr(comparison.Program, "train", fail)
    assert carry_out(trial, tmp_path, QUICK).failure == (str(error) or "MemoryError")


def test_a_non_finite_loss_is_recorded_but_missing_data_raises(tmp_path: Path) -> None:
    wild = dataclasses.replace(TINY, lr=1e18, weight_decay=1e18)
    (trial,) = trials(wild, ["slimstart"], ["flops=0.4"], total_epochs=1)
    found = carry_out(trial, tmp_path, QUICK)
    assert found.record is None
    assert re.search("loss is (nan|inf)", found.failure)
    (trial,) = trials(dataclasses.replace(TINY, data="cifar10"), ["uniform"], ["flops=0.4"], total_epochs=1)
    with pytest.raises(DataError):
        carry_out(trial, tmp_path / "cifar", dataclasses.replace(QUICK, data_dir=tmp_path, download=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "`methods` has 'magic'; there are slimstart"),
        (["--methods", "uniform", "--recipe", "vgg61"], "there is no recipe 'vgg61'"),
        (["--methods", "uniform", "--method", "dense"], "--method"),
        ([], "--methods"),
    ],
)
def test_wrong_usage_has_status_2(slimstart: Slimstart, arguments: list[str], message: str, tmp_path: Path) -> None:
    status, _, errors = slimstart("compare", *arguments)
    assert (status, message in errors) == (2, True), errors
    assert not list(tmp_path.iterdir())


def test_ctrl_c_at_the_end_of_a_run_stops_the_comparison(
    slimstart: Slimstart, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = []

    def fail(trial: Trial, *_: Any) -> Outcome:
        begun.append(trial.name)
        os.kill(os.getpid(), signal.SIGINT)
        return Outcome(trial, failure="so it is")

    monkeypatch.setattr(comparison, "carry_out", fail)
    arguments = ["compare", "--methods", "uniform,slimstart", "--epochs", 3, *COMMON]
    status, output, _ = slimstart(*arguments)
    assert status == 130
    assert begun == ["uniform-flops-0.1-seed0"]
    assert f"saved; to go on: slimstart {' '.join(map(str, arguments))}\n" in output


def test_help_has_the_common_settings(slimstart: Slimstart) -> None:
    _, output, _ = slimstart("compare", "--help")
    assert {"--structure-lr", "--device", "--step-times", "--methods", "--seeds"} <= set(output.split())
    assert not {"--method", "--seed"} & set(output.split())


def test_the_display_shows_all_runs_and_the_present_one() -> None:
    display = ComparisonDisplay(["uniform-seed0", "slimstart-seed0"], total_epochs=5)
    status = Status(2, "train", 30, 100, 1.5, 60.0, 0.1, 1000.0, 9.0)
    display.begin()
    display.status(status)
    display.begin()
    display.status(status)
    everything, present = display._progress.tasks
    assert (everything.completed, everything.total) == (1.3, 2)  # the first, and 30 of 100 steps of the second
    assert everything.description == "run 2/2 slimstart-seed0"
    assert (present.completed, present.total) == (30, 100)
    assert present.description.startswith("epoch 2/5 train  loss 1.500  accuracy 60.00  FLOPs 10.0 %")


@pytest.mark.parametrize(("width", "timed"), [(200, True), (100, False)])
def test_columns_depend_on_the_width_of_the_terminal(
    width: int, timed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", width)
    show_records([make("dense"), *(make(ratio=ratio) for ratio in (0.4, 0.2, 0.1))])
    output = capsys.readouterr().out
    assert ("step," in output) == timed
    rows = re.findall(r"^slimstart +flops=(\S+) +1 +[\d.]+ +([\d.]+) ", output, re.MULTILINE)
    assert rows == [("0.4", "40.0"), ("0.2", "20.0"), ("0.1", "10.0")]


@pytest.mark.slow
def test_ctrl_c_stops_a_comparison_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    arguments = ["compare", "--methods", "uniform,slimstart", "--budget", "flops=0.4", "--epochs", 12, "--seeds", 2]
    arguments += [*COMMON, "--out", tmp_path / "both"]
    process = test_command_line.command(*arguments)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("run 1/4"):
            break
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "run 2/4" not in output
    (again,) = re.findall(r"to go on: slimstart (.*)", output)
    assert again.split() == [str(one) for one in arguments]
    process = test_command_line.command(*again.split())
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    assert "run 4/4" in output
    assert len(list((tmp_path / "both").glob("*/record.json"))) == 4
