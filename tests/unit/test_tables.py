"""Rows and tables: which runs are joined, what their numbers are, what is found on a disk."""

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest

from slimstart.errors import RecordError
from slimstart.lab import records
from slimstart.lab.records import Layer, Record
from slimstart.lab.reports import COLUMNS, Row, by_network, find, markdown, summarise
from slimstart.lab.reports.tables import duration, number
from tests.records import make, study

CELL = {column.title: column.cell for column in COLUMNS}


def test_seeds_are_joined_by_mean_and_sample_deviation() -> None:
    runs = [make(seed=seed, accuracy=accuracy) for seed, accuracy in ((2, 93.0), (0, 91.0), (1, 92.0))]
    (row,) = summarise(runs)
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert row.mean(lambda run: run.accuracy) == pytest.approx((93 + 91 + 92) / 3)
    assert row.spread(lambda run: run.accuracy) == pytest.approx(((1 + 1 + 0) / 2) ** 0.5)
    assert CELL["accuracy, %"](row) == "92.00 ± 1.00"
    assert CELL["seeds"](row) == "3"


def test_one_seed_has_no_spread() -> None:
    (row,) = summarise([make(accuracy=92.345)])
    assert row.spread(lambda run: run.accuracy) is None
    assert CELL["accuracy, %"](row) == "92.34"  # 92.345 in binary is a little less


def test_a_repeated_seed_is_said() -> None:
    (row,) = summarise([make(seed=1), make(seed=1), make(seed=2)])
    assert CELL["seeds"](row) == "2 (3 runs)"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"config_hash": "0123456789abcdef"}, "config 0123456789abcdef"),
        ({"epochs": 31}, "epochs 31"),
        ({"hardware": "CPU"}, "hardware CPU"),
        ({"device": "cpu"}, "device cpu"),
        ({"method": "uniform"}, ""),
        ({"budget": "flops=0.2"}, ""),
        ({"model": "resnet20"}, ""),
        ({"data": "cifar100"}, ""),
    ],
)
def test_other_settings_are_other_rows_with_names_of_their_own(change: dict[str, object], note: str) -> None:
    one, other = make(), dataclasses.replace(make(), **change)  # type: ignore[arg-type]
    rows = summarise([one, other])
    assert len(rows) == 2
    assert len({(row.network, row.label) for row in rows}) == 2
    assert next(row.note for row in rows if row.first is other) == note


def variant(method: str = "slimstart", budget: str | None = "flops=0.1", **settings: object) -> Record:
    config = {"method": method, "budget": budget, "estimator": "vr_pge", "seed": 0, **settings}
    return dataclasses.replace(
        make(method, epochs=1), budget=budget, config=config, config_hash=records.digest(config), epochs=30
    )


def test_a_row_says_which_settings_tell_it_from_others_of_its_method() -> None:
    """Under all budgets the same ones, and not what another method has set."""
    runs = [
        variant(lr=1, num_masks=4),  # from before there was another policy
        variant(estimator="ste", lr=1, num_masks=4, policy="paper"),
        variant(budget="flops=0.05", lr=2, num_masks=7, policy="equal_worth"),
        variant("l1", protocol="uniform", lr=1),
        variant("l1", lr=1, settle_at=None),
        variant("dense", None, lr=3),
    ]
    expected = {
        "slimstart (lr 1, num_masks 4, policy paper) flops=0.1",
        "slimstart (estimator ste, lr 1, num_masks 4, policy paper) flops=0.1",
        "slimstart (lr 2, policy equal_worth) flops=0.05",
        "l1 (protocol uniform) flops=0.1",
        "l1 flops=0.1",
        "dense",
    }
    assert {row.label for row in summarise(runs)} == expected


def test_epochs_of_fine_tuning_are_told() -> None:
    runs = [variant(epochs=30 - tuning, finetune_epochs=tuning) for tuning in (0, 5)] + [variant(finetune_epochs="no")]
    assert {row.note for row in summarise(runs)} == {
        *("epochs 25 + 5", f"epochs 30, config {runs[0].config_hash}", f"epochs 30, config {runs[2].config_hash}")
    }


@pytest.mark.parametrize("seed", range(3))
def test_no_two_rows_look_alike(seed: int) -> None:
    """Whatever settings are drawn, and also where records do not say them."""
    choice = random.Random(seed).choice
    runs = []
    for _ in range(60):
        said = {
            name: choice(values)
            for name, values in {
                "lr": (1, 2),
                "schedule": ("cosine", "constant"),
                "finetune_schedule": ("cosine", "constant"),
                "finetune_epochs": (0, 3),
                "policy": (None, "widths"),
            }.items()
            if choice((True, True, False))
        }
        runs.append(
            dataclasses.replace(
                variant(choice(("slimstart", "l1")), choice(("flops=0.1", "flops=0.2")), **said),
                device=choice(("cuda", "cpu")),
                epochs=choice((30, 31)),
            )
        )
    rows = summarise(runs)
    assert len({row.label for row in rows}) == len(rows) > 40


def test_markdown_has_every_row_and_no_empty_column() -> None:
    runs = [make("dense", timed=False, model="a|b"), make(timed=False, model="a|b", accuracy=91.5)]
    lines = markdown(runs).splitlines()
    assert lines[0] == "## a\\|b on cifar10"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2
    assert "step" not in table[0]
    assert table[1].startswith("| --- | --- | ---: |")
    assert len({re.sub(r"\\\|", "", line).count("|") for line in table}) == 1
    assert table[3].startswith("| slimstart | flops=0.1 | 1 | 91.50 | 10.0 | 8.00 |")


def test_order_is_dense_first_then_falling_flops_then_falling_accuracy_and_no_matter_of_input() -> None:
    runs = study(epochs=2)
    expected = ["dense"] + [f"{method} flops={r:g}" for r in (0.4, 0.1, 0.03) for method in ("slimstart", "uniform")]
    assert [row.label for row in summarise(runs)] == expected
    random.Random(0).shuffle(runs)
    assert [row.label for row in summarise(runs)] == expected


def test_rows_of_one_budget_stand_together_also_if_some_have_missed_it() -> None:
    taken = {"flops=0.4": (0.4, 0.03), "channels=0.5": (0.3, 0.29), "flops=0.2": (0.2, 0.1)}
    runs = [make(f"m{i}", budget=b, flops_ratio=ratio) for b, ratios in taken.items() for i, ratio in enumerate(ratios)]
    # By the means 0.295, 0.215 and 0.15.
    assert [row.label for row in summarise(runs)] == [
        *("m0 channels=0.5", "m1 channels=0.5", "m0 flops=0.4", "m1 flops=0.4", "m0 flops=0.2", "m1 flops=0.2")
    ]


def test_networks_have_tables_of_their_own() -> None:
    runs = [make(model=model, method=method) for model in ("b", "a") for method in ("slimstart", "dense")]
    tables = by_network(summarise(runs))
    assert {name: [row.first.method for row in rows] for name, rows in tables.items()} == {
        "a on cifar10": ["dense", "slimstart"],
        "b on cifar10": ["dense", "slimstart"],
    }
    assert list(tables) == ["a on cifar10", "b on cifar10"]


def test_cells() -> None:
    run = make(
        ratio=0.1428,
        flops_ratio=0.1428,
        params_ratio=0.1668,
        train_cost_saving=5.28,
        executed_saving=5.4321,
        step_ms=8.0,
        step_forward_ms=3.0,
        step_backward_ms=4.25,
        dense_step_ms=20.0,
        narrow_step_ms=6.0,
        train_seconds=5400.0,
        peak_memory_bytes=3 * 2**19,
        budget="flops=0.145",
    )
    assert {title: cell(Row((run,))) for title, cell in CELL.items()} == {
        "method": "slimstart",
        "budget": "flops=0.145",
        "seeds": "1",
        "accuracy, %": f"{run.accuracy:.2f}",
        "FLOPs, %": "14.3",
        "params, %": "16.7",
        "cost saving, formula": "5.28×",
        "cost saving, executed": "5.43×",
        "step, ms": "8.00 (3.00 / 4.25)",
        "step against dense": "2.50×",  # 20 / 8
        "step against uniform": "0.75×",  # 6 / 8
        "training time": "90.0 min",
        "peak memory": "1.50 MiB",
    }


def test_what_is_missing_is_a_dash() -> None:
    row = Row((make("dense", timed=False, peak_memory_bytes=0),))
    for title in ("budget", "step, ms", "step against dense", "step against uniform", "peak memory"):
        assert CELL[title](row) == "–"
    row = Row(
        (dataclasses.replace(make(), narrow_step_ms=None, step_forward_ms=None, step_backward_ms=None, step_ms=2.0),)
    )
    assert CELL["step, ms"](row) == "2.00"
    assert CELL["step against uniform"](row) == "–"


@pytest.mark.parametrize(
    ("budget", "taken", "cell"),
    [
        ("flops=0.1", {"flops_ratio": 0.1019}, "flops=0.1"),
        ("flops=0.1", {"flops_ratio": 0.1021}, "flops=0.1 (missed: 0.102)"),
        ("flops=0.1", {"flops_ratio": 0.136}, "flops=0.1 (missed: 0.136)"),
        ("flops=0.1", {"flops_ratio": 0.0981}, "flops=0.1"),
        ("flops=0.1", {"flops_ratio": 0.0979}, "flops=0.1"),
        ("params=0.5", {"flops_ratio": 0.9, "params_ratio": 0.5}, "params=0.5"),
        ("params=0.5", {"flops_ratio": 0.5, "params_ratio": 0.4}, "params=0.5"),
        ("filters=0.1", {"flops_ratio": 0.9}, "filters=0.1"),  # whoever wrote that: nothing can be said
        ("flops=few", {"flops_ratio": 0.9}, "flops=few"),
        ("flops=0.1+params=0.5", {"flops_ratio": 0.1, "params_ratio": 0.4}, "flops=0.1+params=0.5"),
        (
            "flops=0.1+params=0.5",
            {"flops_ratio": 0.1, "params_ratio": 0.6},
            "flops=0.1+params=0.5 (missed: params=0.6)",
        ),
    ],
)
def test_a_budget_that_is_exceeded_is_marked(budget: str, taken: dict[str, float], cell: str) -> None:
    assert CELL["budget"](Row((make(budget=budget, **taken),))) == cell


@pytest.mark.parametrize(
    ("widths", "missed"),
    [
        ((30, 20, 10), None),  # 50 of 100, and the last layer, which cannot be cut
        ((36, 24, 10), 0.6),
        ((26, 20, 10), None),  # 46 of 100, or 56 of 110 if the last one counts
        ((20, 14, 10), None),  # less than the budget
        ((60, 20, 10), None),  # 80 of 100, or 20 of 40 if the first one could not be cut either
        ((60, 21, 10), 21 / 40),
    ],
)
def test_channels_are_exceeded_only_if_the_layers_that_lost_some_exceed_them(
    widths: tuple[int, ...], missed: float | None
) -> None:
    layers = tuple(
        Layer(f"{i}", dense, width) for i, (dense, width) in enumerate(zip((60, 40, 10), widths, strict=True))
    )
    row = Row((make(budget="channels=0.5", layers=layers),))
    assert row.missed.get("channels") == missed


def test_the_mean_over_seeds_counts_for_a_budget() -> None:
    runs = [make(seed=seed, budget="flops=0.1", flops_ratio=ratio) for seed, ratio in enumerate((0.099, 0.103, 0.099))]
    assert Row(tuple(runs)).missed == {}
    assert Row(tuple(runs[1:2])).missed == {"flops": 0.103}


def test_ratios_are_taken_run_by_run() -> None:
    row = Row((make(seed=0, step_ms=1.0, dense_step_ms=2.0), make(seed=1, step_ms=4.0, dense_step_ms=4.0)))
    assert CELL["step against dense"](row) == "1.50×"  # (2/1 + 4/4) / 2; of the means it would be 1.2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.074, "0.07"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (2e12, "2e+12"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.5, "1.50 s"), (119, "119 s"), (150, "2.50 min"), (9000, "2.50 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Runs and records at every depth, among other files."""
    for seed, place in enumerate(
        ("record.json", "runs/a/record.json", "runs/b/record.json", "records/c.json", "deep/er/still/record.json")
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        records.write(make(seed=seed, epochs=2), tmp_path / place)
    (tmp_path / "runs" / "a" / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "records" / "step_time.json").write_text(json.dumps({"benchmark": "step_time", "rows": []}))
    (tmp_path / "runs" / "unfinished").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("places", "seeds"),
    [
        ([""], [0]),  # a run's folder; what lies in it is its own
        (["record.json"], [0]),
        (["runs"], [1, 2]),
        (["runs/a", "runs/b/record.json"], [1, 2]),
        (["records"], [3]),
        (["deep"], [4]),
        (["runs", "runs/a", "runs/../runs/a/record.json"], [1, 2]),  # once
    ],
)
def test_find(disk: Path, places: list[str], seeds: list[int]) -> None:
    assert [run.seed for run in find(disk / place for place in places)] == seeds


def test_find_looks_two_folders_down(disk: Path) -> None:
    (disk / "record.json").unlink()
    assert sorted(run.seed for run in find([disk])) == [1, 2, 3]


def test_nothing_found(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"`paths`: no record in .*; give folders of finished runs"):
        find([tmp_path])
    with pytest.raises(RecordError, match="no record in an empty list"):
        find([])
    with pytest.raises(RecordError, match="does not exist"):
        find([tmp_path / "nowhere"])


def test_one_bad_record_is_not_passed_over(disk: Path) -> None:
    bad = disk / "runs" / "b" / "record.json"
    for content in ("{", "{}", '{"schema": "slimstart.record/9"}'):
        bad.write_text(content)
        with pytest.raises(RecordError, match=r"b/record\.json"):
            find([disk / "runs"])
    (disk / "records" / "old.json").write_text('{"schema": "slimstart.record/0"}')
    with pytest.raises(RecordError, match=r"old\.json is not a record of a run: its schema is 'slimstart.record/0'"):
        find([disk / "records"])
    (disk / "records" / "old.json").write_text("{")
    with pytest.raises(RecordError, match=r"old\.json cannot be read as JSON"):
        find([disk / "records"])
