"""The queue of the paper's rows: sound recipes, the paper's FLOPs, and records that are where `make results` reads."""

import subprocess
import sys
from pathlib import Path

import paper_queue
import pytest
from paper_queue import Run

from slimstart.lab import records
from slimstart.lab.recipes.contradictions import problems

RUNS = {run.name: run for run in paper_queue.queue()}
VGG16 = "paper-vgg16-cifar10-8.7"


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_run_has_a_sound_recipe(run: Run) -> None:
    assert list(problems(run.recipe)) == []


def test_a_row_and_what_it_is_compared_with_have_equal_flops_and_epochs() -> None:
    rows = {run.row: run.recipe for run in RUNS.values() if run.experiment == VGG16 and run.seed == 0}
    assert rows.keys() == {"paper", "paper-channels", "uniform", "slimstart", "shallow"}
    assert {recipe.budget for row, recipe in rows.items() if row != "paper-channels"} == {"flops=0.087"}
    assert rows["paper-channels"].budget == "channels=0.293"
    assert {recipe.total_epochs for recipe in rows.values()} == {340}
    assert (rows["paper"].epochs, rows["paper"].finetune_epochs, rows["paper"].policy) == (300, 40, "paper")
    assert (rows["slimstart"].epochs, rows["slimstart"].policy) == (340, "equal_worth")


# Table 1 of the paper; a figure of network slimming's own.
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("paper-vgg16-cifar10-rivals/l1-seed0", "flops=0.199"),
        ("paper-resnet20-cifar10-rivals/soft-seed0", "flops=0.506"),
        ("paper-wrn28_10-cifar10-rivals/grow-efficient-seed0", "flops=0.283"),
        ("paper-vgg19-cifar10-rivals/slimming-seed0", "channels=0.3"),
    ],
)
def test_methods_have_the_budget_of_their_own_row(name: str, budget: str) -> None:
    assert RUNS[name].recipe.budget == budget


def test_runs_with_a_record_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / f"{VGG16}/uniform-seed0.json"
    record.parent.mkdir(parents=True)
    record.touch()
    asked = ["--out", str(tmp_path / "runs"), "--records", str(tmp_path), "--only", f"{VGG16}/uniform", "--list"]
    assert paper_queue.main(asked) == 0
    assert capsys.readouterr().out.split() == [f"{VGG16}/uniform-seed1"]


@pytest.mark.slow
def test_the_queue_stops_in_time_and_continues(tmp_path: Path) -> None:
    script = Path(paper_queue.__file__)
    folders = ["--out", str(tmp_path / "runs"), "--records", str(tmp_path / "results")]
    tiny = ["--model", "small", "--data", "fashion", "--batch-size", "256", "--epochs", "1", "--device", "cpu"]
    command = [sys.executable, str(script), *folders, "--only", f"{VGG16}/uniform", "--workers", "2", *tiny]
    stopped = subprocess.run([*command, "--hours", "0"], capture_output=True, text=True, check=True)
    assert stopped.stdout == "0 of 2 missing runs are done; failed: none\n"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 of 2 missing runs are done; failed: none\n"
    seeds = {file.name: records.read(file).seed for file in (tmp_path / "results" / VGG16).iterdir()}
    assert seeds == {"uniform-seed0.json": 0, "uniform-seed1.json": 1}
    failing = subprocess.run([*command, "--records", str(tmp_path / "others"), "--lr", "-1"], capture_output=True)
    assert failing.returncode == 1
    assert "`lr` is -1.0" in (tmp_path / "runs" / VGG16 / "uniform-seed0.log").read_text()
