"""What `make results` writes: it is up to date, and its numbers are those of records."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import make_results
import pytest
import torch
from pages import accuracy, blocks, experiment_pages, figures, inline, markers, stored
from pages.compared import published
from study import records as study_records
from study import tables as study_tables
from study.records import FlipRow, Study, VarianceRow
from torch import nn

from slimstart import trace
from slimstart.errors import RecordError
from slimstart.lab import models, records
from slimstart.lab.methods import uniform
from slimstart.lab.recipes.recipe import parse_budget
from slimstart.lab.records import Record
from tests.records import make

REPOSITORY = Path(__file__).parents[2]


def test_documents_are_those_of_the_records() -> None:
    wanted = make_results.outputs(REPOSITORY)
    differ = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    differ += make_results.stale(REPOSITORY, wanted)
    assert differ == [], "run `make results`"


@pytest.mark.parametrize(
    ("experiment", "size"),
    [("vgg19-cifar10-10", 32), ("vgg19-cifar10-2", 32), ("resnet32-cifar10-10", 32), ("mobilenet_v1-tiny-25", 64)],
)
def test_uniform_networks_have_the_widths_that_are_given_now(experiment: str, size: int) -> None:
    found = [records.read(file) for file in (REPOSITORY / "results" / experiment).glob("uniform-seed*.json")]
    config = found[0].config
    model = models.build(config["model"], num_classes=10)
    graph = trace(model, torch.zeros(1, 3, size, size), "stream")
    network = uniform(model, graph, parse_budget(config["budget"]))
    widths = {name: len(layer.weight) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d)}
    assert len(found) >= 5
    for record in found:
        own = {layer.name: layer.width for layer in record.layers if layer.name in widths}
        assert own == {name: widths[name] for name in own} != {}


# --------------------------------------------------------------------------- markers


def shout(name: str) -> str:
    return name.upper()


def test_numbers_and_tables_are_filled() -> None:
    text = "It is <!-- results:a -->old<!-- /results --> s.\n\n<!-- results:b -->\n\nold\n<!-- /results -->\nEnd.\n"
    filled = markers.fill(text, shout)
    assert filled == (
        "It is <!-- results:a -->A<!-- /results --> s.\n\n<!-- results:b -->\n\nB\n\n<!-- /results -->\nEnd.\n"
    )
    assert markers.fill(filled, shout) == filled
    assert markers.names(filled) == ["a", "b"]
    assert markers.fill("No markers.", shout) == "No markers."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("is <!-- results:a --> 1", "'a' is not closed"),
        ("one\n1 <!-- /results -->", "line 2: .* has no partner"),
        ("It is <!-- results:a --><!-- results:b --><!-- /results -->", "line 1: .*results:b.* has no partner"),
        ("It is\n<!-- results:a -->1<!-- /results --> s", "line 2: .* begins a line"),
        ("It is\n- <!-- results:a -->1<!-- /results --> s", "line 2: .* begins a line"),
    ],
)
def test_markers_that_would_break_a_document_are_refused(text: str, message: str) -> None:
    with pytest.raises(markers.MarkerError, match=message):
        markers.fill(text, shout)


# --------------------------------------------------------------------------- made-up records


def run(method: str, accuracy: float, flops: float, seed: int = 0, **changes: Any) -> Record:
    """A run of 300 + 40 epochs on VGG-16, with numbers that are easily recognised."""
    config = {"finetune_epochs": 40, "precision": "bfloat16", **changes.pop("config", {})}
    fields = {"epochs": 340, "params_ratio": 0.05, "train_cost_saving": 8.5, "executed_saving": 7.25}
    fields |= {"accuracy": accuracy, "flops_ratio": flops, "budget": "flops=0.087", "train_seconds": 600.0}
    fields |= {"config": config, "config_hash": records.digest(config), "building_seconds": 30.0}
    return dataclasses.replace(make(method, flops, seed, epochs=2), **fields | changes)


def write(folder: Path, files: dict[str, Record]) -> stored.Results:
    for place, record in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        records.write(record, folder / place)
    return stored.read(folder)


def table(text: str) -> dict[str, dict[str, str]]:
    """The first table of a page: the cells of every row by title, by its first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


SEEDS = {"uniform": (90.0, 90.25, 90.5), "slimstart": (91.0, 92.0, 93.0), "front-heavy": (91.25, 91.5, 91.75)}
FILES = {
    f"vgg/{label}-seed{seed}.json": run(label.split("-")[0].replace("front", "uniform"), accuracy, 0.087, seed)
    for label, accuracies in SEEDS.items()
    for seed, accuracy in enumerate(accuracies)
}


def test_the_main_tables(tmp_path: Path) -> None:
    results = write(tmp_path, FILES)
    assert table(accuracy.headline(results)) == {
        "VGG-16, CIFAR-10, 8.7 %": {
            "network, FLOPs": "VGG-16, CIFAR-10, 8.7 %",
            "uniform": "90.2 ± 0.2",  # 90.25, and sqrt((0.25^2 + 0.25^2) / 2) = 0.25
            "slimstart": "92.0 ± 1.0",
            "seeds": "3",
        }
    }
    names = {"shallow": 85.0, "shallow-late": 86.0}
    results = write(
        tmp_path,
        {f"vgg/{n}-seed{seed}.json": run("shallow", a, 0.087, seed) for n, a in names.items() for seed in range(2)},
    )
    (row,) = table(accuracy.headline(results)).values()
    assert (row["best shallower"], row["seeds"]) == ("86.0 ± 0.0", "2 to 3")
    (row,) = table(accuracy.table(results)).values()
    assert row["front-heavy"] == "91.50 ± 0.25"
    assert (row["slimstart − uniform"], row["seeds"]) == ("+1.75", "2 to 3")


def test_the_figure_is_drawn_to_scale(tmp_path: Path) -> None:
    results = write(tmp_path, FILES)
    for theme, colors in figures.THEMES.items():
        text = figures.accuracies(results, theme)
        root = ElementTree.fromstring(text)
        circles = [(float(c.get("cx", 0)), c.get("fill")) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
        (zero, _), (own, _) = circles[2:]  # after those of the legend
        assert [color for _, color in circles[2:]] == [colors["uniform"], colors["slimstart"]]
        texts = {t.text: float(t.get("x", 0)) for t in root.iter("{http://www.w3.org/2000/svg}text")}
        assert texts["0"] == zero
        assert own - zero == pytest.approx(1.75 * (texts["+1"] - texts["0"]), abs=0.2)  # 92 against 90.25
        assert "90.2 → 92.0 %" in texts
    results = write(tmp_path, {"vgg/shallow.json": run("shallow", 91.0, 0.087)})
    assert "best shallower network" in figures.accuracies(results, "dark")


def test_few_seeds_other_labels_and_the_archive_are_not_in_the_main_tables(tmp_path: Path) -> None:
    files = {place.replace("vgg/", "archive/vgg/"): record for place, record in FILES.items()}
    files |= {place.replace("vgg/", "few/"): record for place, record in FILES.items() if "seed2" not in place}
    files |= {place.replace("vgg/", "other/"): record for place, record in FILES.items() if "uniform" not in place}
    assert accuracy.comparisons(write(tmp_path, files)) == []


def test_numbers_of_sentences(tmp_path: Path) -> None:
    results = write(tmp_path, FILES)
    assert inline.number("vgg/slimstart accuracy", results) == "92.00"
    assert inline.number("vgg/slimstart accuracy - uniform", results) == "1.75"
    assert inline.number("vgg/uniform accuracy - slimstart .1", results) == "−1.8"
    assert inline.number("vgg/uniform accuracy - uniform", results) == "0.00"
    assert inline.number("vgg/uniform flops", results) == "8.7"
    assert inline.number("vgg/uniform seconds .0", results) == "600"
    assert inline.number("vgg/uniform building", results) == "30.0"
    assert inline.number("vgg/uniform seeds", results) == "3"
    archived = write(tmp_path, {"archive/old/uniform.json": run("uniform", 89.0, 0.087)})
    assert inline.number("vgg/uniform accuracy - archive/old/uniform .1", archived) == "1.2"  # 90.25 - 89
    assert inline.number("archive/old/uniform accuracy - vgg/uniform", archived) == "−1.25"
    for name in ("vgg/slimstart luck", "vgg/nobody accuracy", "nowhere/uniform accuracy", "vgg/uniform accuracy - it"):
        with pytest.raises(markers.MarkerError):
            inline.number(name, results)
    with pytest.raises(markers.MarkerError, match="no table 'other'"):
        blocks.value("other", results)


def page(tmp_path: Path, **runs: Record) -> dict[str, dict[str, str]]:
    results = write(tmp_path, {f"some/{label}.json": record for label, record in runs.items()})
    return table(experiment_pages.page(results.experiments["some"], published()))


def test_cells_by_hand(tmp_path: Path) -> None:
    found = page(
        tmp_path,
        dense=run("dense", 93.5, 1.0, budget=None),
        paper=run("slimstart", 91.5, 0.087),
        uniform=run("uniform", 90.5, 0.086),
        random=run("random", 89.0, 0.0888),
        l1=run("l1", 90.0, 0.1, epochs=60, config={"finetune_epochs": 30, "protocol": "uniform"}),
    )
    assert found["paper"] == {
        "run": "paper",
        "budget": "flops=0.087",
        "accuracy, %": "91.50",
        "against uniform": "+1.00",  # 8.6 is within 2 % of 8.7
        "paper, %": "92.5",
        "against paper": "−1.00",
        "FLOPs, %": "8.70 (paper: 8.7)",
        "params, %": "5.00 (paper: 4.4)",
        "saving, formula": "8.50× (paper: 8.69×)",
        "saving, executed": "7.25×",
        "epochs": "300 + 40",
        "seeds": "1",
        "training time": "10.0 min",
    }
    assert list(found) == ["dense", "paper", "uniform", "l1", "random"]  # dense first, then from the best to the worst
    assert found["dense"]["against paper"] == "+0.60"  # 93.5 - 92.9
    assert (found["dense"]["FLOPs, %"], found["dense"]["against uniform"]) == ("100", "–")
    assert (found["uniform"]["paper, %"], found["uniform"]["epochs"]) == ("–", "300 + 40")
    assert found["random"]["budget"] == "flops=0.087 (missed: 0.0888)"  # 0.0888 / 0.087 = 1.0207
    assert found["random"]["against uniform"] == "−1.50 (at 8.60 % FLOPs)"  # 0.0888 / 0.086 = 1.033
    l1 = found["l1"]  # the uniform network had other epochs; the retraining of the study is 150 epochs
    assert (l1["against uniform"], l1["paper, %"], l1["FLOPs, %"]) == ("–", "91.8", "10.0 (paper: 19.9)")
    assert l1["epochs"] == "30 + 30 (paper: 300 + 150)"
    assert l1["saving, formula"] == "8.50×"  # the paper does not report it


def test_rows_of_the_paper_are_those_of_full_length(tmp_path: Path) -> None:
    files = {
        "vgg/paper.json": run("slimstart", 91.5, 0.087),
        "vgg/uniform.json": run("uniform", 90.5, 0.086),  # the paper does not have it
        "short/paper.json": run("slimstart", 88.0, 0.087, epochs=60),
        "archive/vgg/paper.json": run("slimstart", 91.0, 0.087),
    }
    assert table(experiment_pages.paper_rows(write(tmp_path, files))) == {
        "[VGG-16, CIFAR-10](results/vgg.md)": {
            "network": "[VGG-16, CIFAR-10](results/vgg.md)",
            "method": "slimstart",
            "accuracy, %": "91.50",
            "against uniform": "+1.00",
            "paper, %": "92.5",
            "against paper": "−1.00",
            "FLOPs, %": "8.70 (paper: 8.7)",
            "saving, formula": "8.50× (paper: 8.69×)",
            "saving, executed": "7.25×",
            "epochs": "300 + 40",
            "seeds": "1",
        }
    }


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"policy": "equal_worth"}},
        {"config": {"estimator": "gumbel"}},
        {"config": {"width": 0.5}},
        {"config": {"validation": 5000}},
        {"data": "cifar100"},
        {"method": "random"},
    ],
)
def test_other_things_are_not_compared_with_the_paper(change: dict[str, Any], tmp_path: Path) -> None:
    (cells,) = page(tmp_path, a=run(**{"method": "slimstart", "accuracy": 91.5, "flops": 0.087} | change)).values()
    assert "paper, %" not in cells
    assert cells["FLOPs, %"] == "8.70"


@pytest.mark.parametrize(("flops", "accuracy"), [(0.02, "87.97"), (0.045, "90.82"), (0.12, "92.23"), (0.5, "93.46")])
def test_of_several_rows_of_the_paper_the_nearest_counts(flops: float, accuracy: str, tmp_path: Path) -> None:
    assert page(tmp_path, a=run("slimstart", 90.0, flops, model="vgg19"))["a"]["paper, %"] == accuracy


def test_the_uniform_network_of_equal_flops_is_the_nearest_and_then_the_best(tmp_path: Path) -> None:
    def against(**runs: Record) -> str:
        return page(tmp_path, a=run("slimstart", 90.0, 0.1), **runs)["a"].get("against uniform", "–")

    assert (
        against(far=run("uniform", 91.0, 0.106), hand=run("uniform", 80.0, 0.1, config={"protocol": "front_heavy"}))
        == "–"
    )
    assert against(b=run("uniform", 90.5, 0.104)) == "−0.50 (at 10.4 % FLOPs)"
    assert against(c=run("uniform", 88.0, 0.097)) == "+2.00 (at 9.70 % FLOPs)"  # nearer
    assert against(d=run("uniform", 89.0, 0.097)) == "+1.00 (at 9.70 % FLOPs)"  # as near, and better
    assert against(e=run("uniform", 87.0, 0.1), f=run("uniform", 87.5, 0.099)) == "+2.50"  # equal, within 2 %


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 341},
        {"batch_size": 128},
        {"config": {"precision": "float32"}},
        {"config": {"width": 0.5}},
        {"config": {"validation": 5000}},
    ],
)
def test_uniform_networks_with_another_training_are_not_compared(change: dict[str, Any], tmp_path: Path) -> None:
    assert (
        page(tmp_path, l1=run("l1", 90.0, 0.1), uniform=run("uniform", 91.0, 0.1))["l1"]["against uniform"] == "−1.00"
    )
    found = page(tmp_path, l1=run("l1", 90.0, 0.1), uniform=run("uniform", 91.0, 0.1, **change))
    assert "against uniform" not in found["l1"]


def test_everything_in_a_folder_is_read(tmp_path: Path) -> None:
    files = {
        "a/uniform-seed1.json": run("uniform", 90.0, 0.087, 1),
        "a/uniform-seed0.json": run("uniform", 91.0, 0.087),
    }
    files |= {
        "a/uniform-seed0-again.json": run("uniform", 92.0, 0.087),
        "archive/b/paper.json": run("slimstart", 90, 0.087),
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text(
        "Quick: see [log](log.txt), [b](../archive/b), a [GPU](https://gpu.org).\n"
    )
    (tmp_path / "other.json").write_text('{"benchmark": "trace_time"}')
    (tmp_path / "list.json").write_text("[1]")
    study_records.write(study(variance=VARIANCE), tmp_path / "v.json")
    found = write(tmp_path, files)
    assert {run.accuracy for run in found.experiments["a"].rows["uniform"].runs[:2]} == {91.0, 92.0}
    assert list(found.experiments) == ["a", "archive/b"]
    assert [one.is_archived for one in found.experiments.values()] == [False, True]
    assert (list(found.studies), list(found.benchmarks)) == (["v.json"], ["list.json", "other.json"])
    text = experiment_pages.page(found.experiments["a"], [])
    assert "[log](../../results/a/log.txt), [b](../../results/archive/b), a [GPU](https://gpu.org)." in text
    assert "Records: [results/a](../../results/a), budget flops=0.087, bfloat16, NVIDIA H200." in text


def test_a_record_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": "slimstart.record/0"}))
    with pytest.raises(RecordError, match="its schema is"):
        stored.read(tmp_path)


# --------------------------------------------------------------------------- studies and variants


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


def test_variances_by_hand() -> None:
    found = study(variance=VARIANCE)
    assert next(study_tables.findings(found)) == (
        "pge has 40 ± 2 times the variance of vr_pge, at most 12,000 (conv_1)"
    )
    assert study_tables.cells(found) == [
        ["layer", "channels", "rarely drawn", "vr_pge", "pge", "ratio"],
        ["all", "8", "2", "0.5 ± 0.05", "20 ± 2", "40 ± 2"],
        ["conv_1", "8", "2", "0.25 ± 0.025", "3,000 ± 300", "12,000 ± 600"],
        ["conv2", "8", "2", "0 ± 0", "1 ± 0.1", "–"],
    ]


def test_flips_by_hand() -> None:
    assert next(study_tables.findings(study(flip=FLIPS))) == "E[L²] is 400 to 2,000 times V, V max 1.5 times"
    assert study_tables.cells(study(flip=FLIPS))[1] == [
        *("5", "4 of 9", "4 ± 0.4", "0.01 ± 0.001", "0.015 ± 0.002", "0.02", "0.005 ± 0.00125")
    ]
    still = tuple(dataclasses.replace(row, dispersion=0.0) for row in FLIPS)
    assert not any("times V" in sentence for sentence in study_tables.findings(study(flip=still)))


def test_variants_are_compared_with_uniform(tmp_path: Path) -> None:
    def add(name: str, seed: int, kind: str = "ablation", budget: str = "flops=0.1", **accuracies: float) -> None:
        rows = [{"variant": v, "budget": budget, "seed": seed, "accuracy": a} for v, a in accuracies.items()]
        if kind == "ablation":
            rows.append({"variant": "half", "budget": budget, "seed": seed, "failure": "it failed"})
        settings = {"model": "vgg19", "data": "cifar10", "epochs": 40, "validation": 5000}
        texts = {"narrow": "by hand", "equal_worth": "as it is", "half": "by chance", "tried": f"a {kind}"}
        record = {"benchmark": kind, **settings, "texts": texts, "rows": rows}
        (tmp_path / "ablation").mkdir(exist_ok=True)
        (tmp_path / "ablation" / name).write_text(json.dumps(record))

    def rows(kind: str) -> list[str]:
        text = make_results.study_pages.variants(stored.read(tmp_path), kind)
        return [line for line in text.splitlines() if line.startswith("| ")][2:]

    add("a.json", 0, tried=87.0, narrow=88.0, equal_worth=90.0)  # `narrow` is the former name
    add("b.json", 1, narrow=89.0, equal_worth=89.5)
    assert rows("ablation") == [
        "| uniform | uniform network: the same fraction of every group | 88.50 ± 0.71 | 2 |",  # as the script says now
        "| equal\\_worth | the default | 89.75 ± 0.35 (+1.25) | 2 |",
        "| tried | a ablation | 87.00 (−1.50) | 1 |",  # which the script does not know
        "| half | redundancy counts half | – | 0 |",
    ]
    add("c.json", 0, "profiles", tried=88.7)
    assert rows("profiles") == ["| tried | a profiles | 88.70 (+0.20) | 1 |"]
    place = "ablation:vgg19:flops=0.1"
    found = stored.read(tmp_path)
    assert inline.number(f"{place}/equal_worth accuracy - uniform", found) == "1.25"
    assert inline.number(f"{place}/tried accuracy", found) == "87.00"  # not that of the profile of this name
    with pytest.raises(markers.MarkerError):
        inline.number(f"{place}/nothing accuracy", found)
    add("d.json", 0, budget="flops=0.02", equal_worth=80.0)
    assert rows("ablation")[1] == "| equal\\_worth | the default | 89.75 ± 0.35 (+1.25) | 80.00 | 2, 1 |"
    add("e.json", 1, equal_worth=89.5)
    with pytest.raises(ValueError, match="two rows of seed 1"):
        rows("ablation")
