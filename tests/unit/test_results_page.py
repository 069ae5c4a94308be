"""docs/results.md: it is that of the committed records, and its cells and sentences are those of made-up ones."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from results_of_records import Experiment, page
from results_page import make_page, published
from study import records as study_records
from study.records import FlipRow, Study, VarianceRow

from slimstart.errors import RecordError
from slimstart.lab import records
from slimstart.lab.records import Record
from slimstart.policies import ESTIMATORS
from tests.records import make

REPOSITORY = Path(__file__).parents[2]
DEFAULTS = {"precision": "float32", "estimator": "vr_pge", "protocol": "original"}


def test_the_page_is_that_of_the_committed_records() -> None:
    written = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert written == make_page(REPOSITORY / "results"), "docs/results.md is not that of results/: run `make results`"


def run(method: str, accuracy: float, flops: float, seed: int = 0, **changes: Any) -> Record:
    """A run of 300 + 40 epochs on VGG-16, with numbers that are easily recognised."""
    config = {"finetune_epochs": 40, "precision": "bfloat16", **changes.pop("config", {})}
    fields = {"epochs": 340, "params_ratio": 0.05, "train_cost_saving": 8.5, "executed_saving": 7.25}
    fields |= {"accuracy": accuracy, "flops_ratio": flops, "budget": "flops=0.087", "train_seconds": 600.0}
    fields |= {"config": config, "config_hash": records.digest(config)}
    return dataclasses.replace(make(method, flops, seed, epochs=2), **fields | changes)


def table(runs: list[Record]) -> dict[str, dict[str, str]]:
    """The first table of the page: the cells of every method, by title."""
    lines = [line for line in shown(runs).splitlines() if line.startswith("| ")]
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def shown(runs: list[Record], text: str = "") -> str:
    return page([Experiment("../results/some", runs, text)], {}, [], published(), DEFAULTS, ESTIMATORS)


def test_cells_by_hand() -> None:
    runs = [
        run("dense", 93.5, 1.0, budget=None),
        run("slimstart", 91.0, 0.087),
        run("slimstart", 92.0, 0.087, seed=1),
        run("uniform", 90.25, 0.086),
        run("uniform", 90.75, 0.086, seed=1),
        run("random", 89.0, 0.0888),
        run("l1", 90.0, 0.1, epochs=60, config={"finetune_epochs": 30, "protocol": "uniform"}),
    ]
    found = table(runs)
    assert found["slimstart"] == {
        "method": "slimstart",
        "budget": "flops=0.087",
        "accuracy, %": "91.50 ± 0.71",  # sqrt((0.5^2 + 0.5^2) / 1)
        "uniform, %": "90.50 (+1.00)",  # 8.6 is within 2 % of 8.7
        "paper, %": "92.5",
        "difference": "−1.00",
        "FLOPs, %": "8.70 (paper: 8.7)",
        "params, %": "5.00 (paper: 4.4)",
        "saving, formula": "8.50× (paper: 8.69×)",
        "saving, executed": "7.25×",
        "epochs": "300 + 40",
        "seeds": "2",
        "training time": "10.0 min",
        "hardware": "NVIDIA H200",
    }
    assert found["dense"]["difference"] == "+0.60"  # 93.5 - 92.9
    assert (found["dense"]["FLOPs, %"], found["dense"]["uniform, %"]) == ("100", "–")
    assert (found["uniform"]["paper, %"], found["uniform"]["epochs"]) == ("–", "300 + 40")
    assert found["random"]["budget"] == "flops=0.087 (missed: 0.0888)"  # 0.0888 / 0.087 = 1.0207
    assert found["random"]["uniform, %"] == "90.50 (−1.50 at 8.60 % FLOPs)"  # 0.0888 / 0.086 = 1.033
    l1 = found["l1"]  # its uniform network has had other epochs; the retraining of the study is 150 epochs
    assert (l1["uniform, %"], l1["paper, %"], l1["FLOPs, %"]) == ("–", "91.8", "10.0 (paper: 19.9)")
    assert l1["epochs"] == "30 + 30; the paper: 300 + 150"
    assert l1["saving, formula"] == "8.50×"  # of which the paper says nothing


def test_a_policy_of_ours_is_not_held_against_the_papers_row() -> None:
    own = run("slimstart", 91.0, 0.087, config={"policy": "equal_worth"})
    (found,) = table([own]).values()
    assert "paper, %" not in found  # nor does any other column have it
    assert found["FLOPs, %"] == "8.70"


def test_where_we_fall_short_a_sentence_says_so() -> None:
    text = shown([run("slimstart", 91.5, 0.087), run("uniform", 92.0, 0.09)])
    assert (
        "- **slimstart flops=0.087** falls short of the paper by 1.00 points: 91.50 % against 92.5 %. It is 0.50 "
        "points behind the uniform network at 9.00 % FLOPs.\n" in text
    )
    assert "Fewer epochs" not in text
    text = shown([run("slimstart", 93.0, 0.07, epochs=60, config={"finetune_epochs": 0}), run("uniform", 92.0, 0.07)])
    assert (
        "- **slimstart flops=0.087** is above the paper by 0.50 points: 93.00 % against 92.5 %, at 7.00 % of the FLOPs "
        "against 8.7 %, after 60 epochs; the paper: 300 + 40.\n" in text
    )
    assert "**Fewer epochs than the paper's recipes:**" in text


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"estimator": "gumbel"}},
        {"config": {"width": 0.5}},
        {"config": {"validation": 5000}},
        {"data": "cifar100"},
        {"method": "random"},
    ],
)
def test_other_things_are_not_compared_with_the_paper(change: dict[str, Any]) -> None:
    (cells,) = table([run(**{"method": "slimstart", "accuracy": 91.5, "flops": 0.087} | change)]).values()
    assert "paper, %" not in cells
    assert cells["FLOPs, %"] == "8.70"


@pytest.mark.parametrize(("flops", "accuracy"), [(0.02, "87.97"), (0.045, "90.82"), (0.12, "92.23"), (0.5, "93.46")])
def test_of_several_rows_the_nearest_counts(flops: float, accuracy: str) -> None:
    assert table([run("slimstart", 90.0, flops, model="vgg19")])["slimstart"]["paper, %"] == accuracy


def test_uniform_networks_far_away_say_nothing() -> None:
    runs = [run("slimstart", 90.0, 0.1), run("uniform", 91.0, 0.106), run("uniform", 89.0, 0.095, budget="flops=0.095")]
    assert "uniform, %" not in table(runs)["slimstart"]
    runs += [run("uniform", 90.5, 0.104, budget="flops=0.104"), run("l1", 80.0, 0.12)]
    found = table(runs)
    assert found["slimstart"]["uniform, %"] == "90.50 (−0.50 at 10.4 % FLOPs)"
    assert found["l1"]["uniform, %"] == "–"
    runs.append(run("uniform", 88.0, 0.097, budget="flops=0.097"))  # nearer
    assert table(runs)["slimstart"]["uniform, %"] == "88.00 (+2.00 at 9.70 % FLOPs)"
    runs.append(run("uniform", 89.0, 0.097, budget="flops=0.0971"))  # as near, and better
    assert table(runs)["slimstart"]["uniform, %"] == "89.00 (+1.00 at 9.70 % FLOPs)"
    runs += [run("uniform", 87.0, 0.1), run("uniform", 87.5, 0.099, budget="flops=0.099")]  # of equal FLOPs, within 2 %
    assert table(runs)["slimstart"]["uniform, %"] == "87.50 (+2.50)"


def test_a_profile_by_hand_is_not_the_uniform_network() -> None:
    """It is one of the others, and is itself compared with one share of all widths."""
    runs = [run("slimstart", 90.0, 0.1), run("uniform", 89.0, 0.1)]
    runs.append(run("uniform", 91.0, 0.1, config={"protocol": "front_heavy"}))
    found = table(runs)
    assert found["slimstart"]["uniform, %"] == "89.00 (+1.00)"
    assert found["uniform (protocol front\\_heavy)"]["uniform, %"] == "89.00 (+2.00)"
    text = shown(runs)
    assert "is 1.00 points ahead of uniform and is 1.00 points behind the only other, uniform (protocol front" in text


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 341},
        {"batch_size": 128},
        {"config": {"precision": "float32"}},
        {"config": {"width": 0.5}},
        {"config": {"validation": 5000}},
        {"model": "vgg19"},
        {"data": "cifar100"},
    ],
)
def test_uniform_networks_that_were_trained_otherwise_say_nothing(change: dict[str, Any]) -> None:
    assert table([run("l1", 90.0, 0.1), run("uniform", 91.0, 0.1)])["l1"]["uniform, %"] == "91.00 (−1.00)"
    text = shown([run("l1", 90.0, 0.1), run("uniform", 91.0, 0.1, **change)])
    assert "| uniform, % |" not in text
    assert "91.00" in text


def test_a_setting_that_a_record_lacks_is_the_default() -> None:
    lacking = run("uniform", 91.0, 0.1, config={"precision": "float32"})
    del lacking.config["precision"]
    runs = [run("l1", 90.0, 0.1, config={"precision": "float32", "protocol": "uniform"}), lacking]
    assert table(runs)["l1"]["uniform, %"] == "91.00 (−1.00)"


def standing(*runs: Record) -> str:
    """The sentences above the table."""
    (text,) = re.findall(r"^At equal FLOPs, within 2 %: (.*)\.\n\n\| method", shown(list(runs)), re.MULTILINE)
    return str(text)


def test_how_ours_stands_is_said() -> None:
    ours, narrow, l1 = run("slimstart", 90.0, 0.1), run("uniform", 91.0, 0.1019), run("l1", 89.5, 0.0985)
    assert standing(ours, run("uniform", 95.0, 0.103)) == "**slimstart flops=0.087** has nothing beside it"
    assert standing(ours, run("dense", 95.0, 0.1)).endswith("has nothing beside it")
    assert standing(ours, run("l1", 95.0, 0.1, batch_size=128)).endswith("has nothing beside it")
    assert standing(ours, narrow, run("l1", 95.0, 0.103)) == (
        "**slimstart flops=0.087** is 1.00 points behind uniform and has no other method beside it"
    )
    assert standing(ours, l1) == (
        "**slimstart flops=0.087** has no uniform network beside it and is 0.50 points ahead of the only other, "
        "l1 flops=0.087"
    )
    better, relaxed = (run("slimstart", a, 0.1, config={"estimator": e}) for a, e in ((91.0, "pge"), (92.5, "ste")))
    assert standing(ours, narrow, l1, better, relaxed) == (
        "**slimstart (estimator pge) flops=0.087**, the best of 2 of ours, is level with uniform and is 1.50 points "
        "behind the best of 2 others, slimstart (estimator ste) flops=0.087"
    )
    far = run("slimstart", 94.0, 0.2)  # it has missed its budget: nothing is there to compare it with
    assert standing(far, dataclasses.replace(ours, config_hash="x"), narrow).endswith(
        " is 1.00 points behind uniform and has no other method beside it"
    )
    small = [run(method, 80.0, 0.02, budget="flops=0.02") for method in ("uniform", "slimstart")]
    assert standing(ours, *small, narrow) == (
        "**slimstart flops=0.087** is 1.00 points behind uniform and has no other method beside it; "
        "**slimstart flops=0.02** is level with uniform and has no other method beside it"
    )
    assert "At equal FLOPs" not in shown([narrow, l1, relaxed])


def test_a_difference_that_seeds_have_too_is_said() -> None:
    ours = [run("slimstart", accuracy, 0.1, seed) for seed, accuracy in enumerate((89.0, 91.0))]  # deviation 1.41
    narrow = [run("uniform", accuracy, 0.1, seed) for seed, accuracy in enumerate((91.2, 91.3))]
    assert "is 1.25 points (less than seeds differ) behind uniform" in standing(*ours, *narrow)
    narrow = [run("uniform", accuracy, 0.1, seed) for seed, accuracy in enumerate((91.4, 91.5))]
    assert "is 1.45 points behind uniform" in standing(*ours, *narrow)


def test_rows_are_sorted_for_the_reader() -> None:
    runs = [
        *(run(name, accuracy, 0.05, budget="flops=0.05") for name, accuracy in (("uniform", 80.0), ("l1", 81.0))),
        *(run(name, accuracy, 0.1) for name, accuracy in (("soft", 70.0), ("slimstart", 90.0), ("random", 91.0))),
        run("dense", 60.0, 1.0, budget=None),
    ]
    rows = [line.split("|")[1].strip() for line in shown(runs).splitlines() if line.startswith("| ")][2:]
    assert rows == ["dense", "random", "slimstart", "soft", "l1", "uniform"]


def test_the_order_of_records_does_not_matter() -> None:
    runs = [run(method, 90 + seed, 0.087, seed) for method in ("slimstart", "uniform", "l1") for seed in range(3)]
    first = shown(runs)
    random.Random(0).shuffle(runs)
    assert shown(runs) == first


# --------------------------------------------------------------------------- what lies in the folder


def study(**rows: Any) -> Study:
    facts = dict.fromkeys("command commit version device torch python started finished".split(), "x")
    config = {"model": "resnet32", "data": "cifar10"}
    return Study(**facts, hardware="a GPU", config=config, settings={}, epoch=7, **rows)


VARIANCE = tuple(
    VarianceRow(layer, name, 8, 2, variance, variance / 10, ratio, ratio and ratio / 20)
    for layer, name, variance, ratio in (
        (None, "vr_pge", 0.5, 1.0),
        (None, "pge", 20.0, 40.0),
        ("conv_1", "vr_pge", 0.25, 1.0),
        ("conv_1", "pge", 3000.0, 12000.0),
        ("conv2", "vr_pge", 0.0, None),
        ("conv2", "pge", 1.0, None),
    )
)
FLIPS = tuple(
    FlipRow(epoch, 9, 4, 4.0, 0.4, v, v / 10, 1.5 * v, v / 5, 2 * v, 0.5 * v, v / 8)
    for epoch, v in ((5, 0.01), (10, 0.002))
)


def test_everything_in_a_folder_has_its_place(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for name, one in (("a", run("slimstart", 91.5, 0.087)), ("compare-b/x", run("uniform", 90.0, 0.087))):
        (results / name).mkdir(parents=True)
        records.write(one, results / name / "record.json")
    (results / "a" / "README.md").write_text("# Quick\n\nThe runs [shared](log.txt) a [GPU](https://gpu.org).\n")
    (results / "README.md").write_text("Not of a folder.")
    (results / "studies").mkdir()
    study_records.write(study(variance=VARIANCE), results / "studies" / "v.json")
    study_records.write(study(flip=FLIPS), results / "studies" / "f.json")
    (results / "other.json").write_text('{"benchmark": "trace_time"}')
    (results / "list.json").write_text("[1]")
    text = make_page(results)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        *("# Results", "## vgg16 on cifar10", "### a", "#### Quick", "### compare-b"),
        *("## Variance of the structure gradient", "## V and V max"),
    ]
    assert (
        "### a\n\n#### Quick\n\nThe runs [shared](../results/a/log.txt) a [GPU](https://gpu.org).\n\n"
        "Records: [results/a](../results/a), in bfloat16.\n" in text
    )
    assert "### compare-b\n\nRecords: [results/compare-b](../results/compare-b), in bfloat16.\n" in text
    assert "Not of a folder" not in text
    assert "![resnet32 on cifar10](../results/studies/v.svg)" in text


def test_variances_by_hand() -> None:
    text = page([], {"v.svg": study(variance=VARIANCE)}, [], [])
    assert (
        "resnet32 on cifar10, 7 epochs, a GPU. pge has 40 ± 2 times the variance of vr\\_pge, at most 12,000 "
        "(conv\\_1). The paper reports up to three orders of magnitude" in text
    )
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| layer | channels | rarely drawn | vr\\_pge | pge | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| all | 8 | 2 | 0.5 ± 0.05 | 20 ± 2 | 40 ± 2 |",
        "| conv\\_1 | 8 | 2 | 0.25 ± 0.025 | 3,000 ± 300 | 12,000 ± 600 |",
        "| conv2 | 8 | 2 | 0 ± 0 | 1 ± 0.1 | – |",
    ]


def test_flips_by_hand() -> None:
    text = page([], {"f.svg": study(flip=FLIPS)}, [], [])
    assert "E\\[L²\\] is 400 to 2,000 times V, V max 1.5 times. The paper reports four orders of magnitude" in text
    assert "| 5 | 4 of 9 | 4 ± 0.4 | 0.01 ± 0.001 | 0.015 ± 0.002 | 0.02 | 0.005 ± 0.00125 |" in text
    still = tuple(dataclasses.replace(row, dispersion=0.0) for row in FLIPS)
    assert "times" not in page([], {"f.svg": study(flip=still)}, [], [])


def test_without_records_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert "##" not in make_page(tmp_path / "results")
    assert page([], {}, ["../results/b.json"], []).endswith(
        "## Step times\n\nIn [performance.md](performance.md), from [results/b.json](../results/b.json).\n"
    )


def test_a_record_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": "slimstart.record/0"}))
    with pytest.raises(RecordError, match="its schema is"):
        make_page(tmp_path)


def test_what_ingredients_add_and_profiles_are(tmp_path: Path) -> None:
    def write(name: str, seed: int, kind: str = "ablation", budget: str = "flops=0.1", **accuracies: float) -> None:
        rows = [{"variant": v, "budget": budget, "seed": seed, "accuracy": a} for v, a in accuracies.items()]
        if kind == "ablation":
            rows.append({"variant": "random", "budget": budget, "seed": seed, "failure": "it failed"})
        settings = {"model": "vgg19", "data": "cifar10", "epochs": 40, "validation": 5000}
        texts = {"narrow": "by hand", "equal_worth": "as it is", "random": "by chance", "half": f"of {kind}"}
        record = {"benchmark": kind, **settings, "texts": texts, "rows": rows}
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / name).write_text(json.dumps(record))

    def rows(title: str) -> list[str]:
        section = make_page(tmp_path / "results").split(f"## {title}")[1].split("\n## ")[0]
        return [line for line in section.splitlines() if line.startswith("| ")][2:]

    ingredients = "What each ingredient of equal worth adds"
    assert ingredients not in make_page(tmp_path / "results")
    write("a.json", 0, half=87.0, narrow=88.0, equal_worth=90.0)
    write("b.json", 1, narrow=89.0, equal_worth=89.5)
    found = make_page(tmp_path / "results")
    assert "Profiles by hand" not in found
    assert "Accuracy on 5,000 training images that were left out for it" in found
    assert "[results/a.json](../results/a.json), [results/b.json](../results/b.json)" in found
    assert rows(ingredients) == [
        "| narrow | by hand | 88.50 ± 0.71 | 2 |",
        "| equal\\_worth | as it is | 89.75 ± 0.35 (+1.25) | 2 |",
        "| half | of ablation | 87.00 (−1.50) | 1 |",
        "| random | by chance | – | 0 |",
    ]
    write("c.json", 0, "profiles", half=88.7)
    assert rows("Profiles by hand") == ["| half | of profiles | 88.70 (+0.20) | 1 |"]
    write("d.json", 0, budget="flops=0.02", equal_worth=80.0)
    assert rows(ingredients)[1] == "| equal\\_worth | as it is | 89.75 ± 0.35 (+1.25) | 80.00 | 2, 1 |"
    write("e.json", 1, equal_worth=89.5)
    with pytest.raises(ValueError, match="two rows of seed 1"):
        make_page(tmp_path / "results")
