"""benchmarks/held_out.py: short trainings of networks that the rule for depth was not fitted to, and their table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import held_out
from pages import structure_tables
from pages.stored import Results


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in held_out.SETTINGS.items():
        monkeypatch.setitem(held_out.SETTINGS, name, replace(setting, steps=20))


def test_a_queue_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"network": "mlp", "contender": "uniform", "seed": 0}
    out = tmp_path / "rows.jsonl"
    out.write_text(json.dumps(done) + "\n")
    held_out.main(["--out", str(out), "--networks", "mlp", "--contenders", "uniform", "--seeds", "0"])
    assert [json.loads(line) for line in out.read_text().splitlines()] == [done]
    held_out.main(["--one", "--networks", "mlp", "--contenders", "shallow-1.0", "--seeds", "3"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["seed"] == 3


def test_contenders_have_equal_flops_and_other_depths() -> None:
    rows = {name: held_out.train("mlp", name, 0, Path()) for name in ("uniform", "shallow-1.0", "slimstart")}
    assert [rows[name]["num_left"] for name in rows] == [7, 1, 1]
    assert all(0.09 < row["flops_ratio"] <= 0.1 for row in rows.values())
    assert all(len(row["train_loss"]) == 20 for row in rows.values())


def row(network: str, contender: str, validation: float, test: float, left: int) -> dict[str, object]:
    accuracies = {"validation_accuracy": validation, "test_accuracy": test}
    return {"network": network, "contender": contender, "budget": 0.1, "num_left": left, **accuracies}


def test_the_best_shallower_network_is_chosen_on_held_out_images() -> None:
    rows = [
        one
        for network in structure_tables.HELD_OUT
        for one in (
            row(network, "uniform", 50, 50, 9),
            row(network, "shallow-0.3", 61, 60, 5),
            row(network, "shallow-0.6", 60, 64, 3),
            row(network, "slimstart", 62, 61, 4),
            row(network, "slimstart", 62, 62, 4),
        )
    ]
    lines = structure_tables.held_out(Results({}, {}, {}, {}, held_out=rows)).splitlines()
    assert len(lines) == 2 + len(structure_tables.HELD_OUT)
    assert lines[2].split(" | ")[1:] == ["10", "50.0 (9)", "60.0 (5)", "61.5 (4)", "–", "1 to 2 |"]
