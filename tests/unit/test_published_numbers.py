"""Numbers in the documents come from records under results/."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slimstart import trace
from slimstart.lab import models, records
from slimstart.lab.bench import bench_records
from slimstart.lab.methods import uniform
from slimstart.lab.recipes.recipe import parse_budget

REPOSITORY = Path(__file__).parents[2]
WIDTHS = "-all-widths"  # of runs with kernels that do for all of them
TWICE = "spread, at 9.5 %"  # of which there is one at 10 % too
RUNS = {
    "dense": "dense",
    "narrow": "uniform",
    "settled": "the paper's algorithm, settled at half",
    "paper": "the paper's algorithm",
}


def cells(document: str, label: str) -> list[list[str]]:
    """The cells behind the first, of the lines of tables that begin with a label."""
    lines = (REPOSITORY / document).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines if line.startswith(f"| {label} |")]


def text(document: str) -> str:
    """All of it in one line."""
    return " ".join((REPOSITORY / document).read_text(encoding="utf-8").split())


def accuracies(folder: str, method: str) -> list[float]:
    """Of the seeds, percent."""
    return [records.read(file).accuracy for file in (REPOSITORY / "results" / folder).glob(f"{method}-seed*.json")]


@pytest.mark.parametrize("name", RUNS)
def test_tables_of_runs_are_those_of_the_records(name: str) -> None:
    record = records.read(REPOSITORY / "results" / "vgg19-cifar10-60" / f"{name}.json")
    assert record.step_ms is not None
    end = [f"{record.executed_saving:.2f}x", f"{record.step_ms:.1f}", f"{record.train_seconds:.1f}"]
    ratio = f"{100 * record.flops_ratio:.1f}"
    assert cells("docs/performance.md", RUNS[name]) == [[f"{record.accuracy:.2f}", ratio, *end]]


@pytest.mark.parametrize(
    ("folder", "label"),
    [
        ("vgg19-cifar10-10", "VGG-19, CIFAR-10, 10 %"),
        ("vgg19-cifar10-2", "VGG-19, CIFAR-10, 1.8 %"),
        ("resnet32-cifar10-10", "ResNet-32, CIFAR-10, 10 %"),
        ("mobilenet_v1-tiny-25", "MobileNetV1, 16 classes of Tiny ImageNet, 25 %"),
    ],
)
def test_means_over_seeds_are_those_of_the_records(folder: str, label: str) -> None:
    expected, seeds = [], []
    for part, method in (
        ("-start", "narrow"),
        ("", "narrow"),
        ("", "narrow-single"),
        ("", "narrow-front_heavy"),
        ("", "slimstart"),
    ):
        found = accuracies(f"{folder}{part}", method)
        expected.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}" if found else "")
        seeds += [len(found)] if found else []
    fewest, most = min(seeds), max(seeds)
    assert cells("README.md", label) == [[*expected, str(most) if fewest == most else f"{fewest} to {most}"]]


@pytest.mark.parametrize(
    ("folder", "size"),
    [("vgg19-cifar10-10", 32), ("vgg19-cifar10-2", 32), ("resnet32-cifar10-10", 32), ("mobilenet_v1-tiny-25", 64)],
)
def test_uniform_networks_have_the_widths_that_are_given_now(folder: str, size: int) -> None:
    """Those whose records are of the former protocol "start"; others by hand were rounded as up to commit 88606c2."""
    found = {
        part: records.read(next((REPOSITORY / "results" / f"{folder}{part}").glob("narrow-seed*.json")))
        for part in ("-start", "")
    }
    config = found["-start"].config
    model = models.build(config["model"], num_classes=10)
    graph = trace(model, torch.zeros(1, 3, size, size), "stream")
    network = uniform(model, graph, parse_budget(config["budget"]))
    widths = {name: len(layer.weight) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d)}
    differ = {
        part: [layer.name for layer in record.layers if widths.get(layer.name, layer.width) != layer.width]
        for part, record in found.items()
    }
    assert differ["-start"] == []
    assert differ[""] != []


def mean(folder: str, method: str) -> float:
    return statistics.mean(accuracies(folder, method))


def test_sentences_say_what_the_records_say() -> None:
    how, readme = text("docs/how-it-works.md"), text("README.md")
    better = {
        folder: mean(folder, "slimstart") - mean(folder, "narrow")
        for folder in ("vgg19-cifar10-10", "vgg19-cifar10-2", "resnet32-cifar10-10", "mobilenet_v1-tiny-25")
    }
    ten, two, residual, tiny = better.values()
    assert f"of the one in multiples of 8 {ten:.2f} and {two:.2f} ([results]" in how
    assert f"ResNet-32 at 10 % is {-residual:.2f} behind uniform with its former rounding" in text("docs/widths.md")
    assert f"MobileNetV1 at 25 %, {tiny:.2f} of the one with the former rounding" in how
    singles = [mean(folder, "slimstart") - mean(folder, "narrow-single") for folder in better]
    starts = [mean(folder, "slimstart") - mean(f"{folder}-start", "narrow") for folder in better]
    assert f"{starts[0]:.2f} and {starts[1]:.2f} points ahead of the uniform network, its own start" in how
    assert f"it is {starts[3]:.2f} ahead of the uniform MobileNetV1" in how
    assert f"of the one in single units it is {singles[0]:.1f} and {singles[1]:.1f} ahead" in how
    least = [min(three) for three in zip(better.values(), singles, starts, strict=True)]
    assert (
        f"For VGG-19, it is {least[0]:.1f} and {least[1]:.1f} points ahead of the best network of equal shares"
        in readme
    )
    assert f"for MobileNetV1, {least[3]:.1f} points ahead of the best one" in readme
    assert f"it gains nothing, {-least[2]:.1f} points behind the best one" in readme
    widths = text("docs/widths.md")
    assert f"Of its own start it is {-starts[2]:.2f} behind on test images" in widths
    assert f"has them all) it is {starts[0]:.2f} and {starts[1]:.2f} ahead, eight seeds" in widths
    assert f"MobileNetV1 the start is {starts[3] - tiny:.2f} points behind the network with the former" in widths
    front = [mean(f"{folder}{part}", "narrow-front_heavy") for part in ("-start", "") for folder in list(better)[:2]]
    assert "has {:.2f} and {:.2f} % in place of {:.2f} and {:.2f} %".format(*front) in widths
    fronts = [mean(folder, "slimstart") - mean(folder, "narrow-front_heavy") for folder in better]
    assert f"is {fronts[0]:.2f} points behind at 10 % and {fronts[1]:.2f} at 1.8 %" in how
    assert f"with the former rounding, and {fronts[3]:.2f} of that profile" in how
    assert f"and {min(fronts[1:]):.1f} to {max(fronts[1:]):.1f} points behind elsewhere" in readme
    for folder, seeds in zip(better, (8, 8, 5, 8), strict=True):
        for part, method in (("", "slimstart"), ("", "narrow"), ("-start", "narrow")):
            assert len(accuracies(f"{folder}{part}", method)) == seeds
    paper = records.read(REPOSITORY / "results" / "vgg16-cifar10-paper" / "slimstart-seed0.json")
    assert f"ends at {paper.accuracy:.2f} % with {100 * paper.flops_ratio:.1f} % of the FLOPs" in readme


def ablation_rows(benchmark: str) -> Iterator[dict[str, Any]]:
    """Of all its records, with their models."""
    for file in (REPOSITORY / "results" / "ablation").glob("*.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["benchmark"] == benchmark:
            yield from ({**row, "model": record["model"]} for row in record["rows"])


def ablation(benchmark: str) -> dict[tuple[str, str, str], list[float]]:
    """Accuracies of all seeds, by variant, model and budget."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in ablation_rows(benchmark):
        found.setdefault((row["variant"], row["model"], row["budget"]), []).append(row["accuracy"])
    return found


def test_how_long_a_training_takes_is_what_was_measured() -> None:
    readme, time = text("README.md"), text("docs/performance.md")

    def seconds(folder: str, method: str) -> tuple[float, float]:
        """Of training, and of building in it; means over runs."""
        runs = [records.read(file) for file in (REPOSITORY / "results" / folder).glob(f"{method}*.json")]
        training, building = ([run.train_seconds for run in runs], [run.building_seconds or 0.0 for run in runs])
        return statistics.mean(training), statistics.mean(building)

    narrow, _ = seconds("vgg19-cifar10-10-alone", "narrow")
    ours, building = seconds("vgg19-cifar10-10-alone", "slimstart")
    assert f"takes {narrow:.1f} s to train as a uniform network and {ours:.1f} s with slimstart" in readme
    assert f"take {ours:.1f} s, of which {building:.1f} s are building" in time
    assert f"the uniform network takes {narrow:.1f} s (" in time
    tiny = "mobilenet_v1-tiny-25-alone"
    narrow, _ = seconds(tiny, "narrow")
    ours, building = seconds(tiny, "slimstart")
    assert f"took {ours:.1f} s, of which {building:.1f} s were building" in time
    first = records.read(REPOSITORY / "results" / tiny / "narrow-seed0.json").history[0].seconds
    assert f"the uniform network takes {narrow:.1f} s, of which its first epoch takes {first:.1f} s" in time
    narrow, _ = seconds(f"{tiny}{WIDTHS}", "narrow")
    ours, building = seconds(f"{tiny}{WIDTHS}", "slimstart")
    assert f"40 epochs take {ours:.1f} s, of which {building:.1f} s are building, and those of the uniform" in time
    assert f"the uniform network {narrow:.1f} s ([records]" in time
    (narrow, _), (ours, _) = (seconds(f"{tiny}{WIDTHS}-first", method) for method in ("narrow", "slimstart"))
    assert f"the first training there took {ours:.1f} s, and that of the uniform network" in time
    assert f"with an empty cache again, {narrow:.1f} s" in time


def test_kernels_for_all_widths_are_as_fast_as_is_said() -> None:
    rows = json.loads((REPOSITORY / "results" / "depthwise_h200.json").read_text(encoding="utf-8"))["rows"]
    whole = sum(row["ours_ms"] for row in rows) / sum(row["torch_ms"] for row in rows)
    time = text("docs/performance.md")
    assert f"images of 64 to 2 pixels, take {whole:.2f} times as long in all as with cuDNN's" in time
    assert len(rows) == 11
    assert (max(row["size"] for row in rows), min(row["size"] for row in rows)) == (64, 2)
    ratios = [row["ours_ms"] / row["torch_ms"] for row in rows]
    assert f"from {min(ratios):.2f} times to {max(ratios):.2f} times, least where" in time
    assert "two of the layers are slower" in time
    assert sum(ratio > 1 for ratio in ratios) == 2
    assert not any(row["channels"] % 8 for row in rows)


def ahead(variant: str, model: str, budget: str, of: str = "narrow") -> float:
    """By how many points a variant is ahead of another on validation images."""
    found = ablation("ablation")
    return statistics.mean(found[variant, model, budget]) - statistics.mean(found[of, model, budget])


def test_what_may_be_rounding_is_what_the_start_of_a_search_is_ahead() -> None:
    budgets, widths = ("flops=0.1", "flops=0.018"), text("docs/widths.md")
    start = [ahead("frozen", "vgg19", budget) for budget in budgets]
    ours = [ahead("equal_worth", "vgg19", budget, "frozen") for budget in budgets]
    assert (
        f"that start is {start[0]:.2f} points ahead of it at 10 %, less than seeds differ, and {start[1]:.2f}" in widths
    )
    assert f"so ours is {ours[0]:.2f} and {ours[1]:.2f} ahead of its own start on validation images" in widths
    behind = ahead("frozen", "resnet32", "flops=0.1", "equal_worth")
    assert f"and {behind:.2f} behind on validation images, three seeds each" in widths
    assert {len(ablation("ablation")["frozen", "vgg19", budget]) for budget in budgets} == {5}
    first = {
        row["variant"]: row["widths"][:2]
        for row in ablation_rows("ablation")
        if (row["model"], row["budget"]) == ("vgg19", "flops=0.1") and row["variant"] in ("narrow", "frozen")
    }
    assert first == {"narrow": [24, 16], "frozen": [16, 24]}


def test_a_larger_network_at_first_gains_what_is_said() -> None:
    shrinking, widths = ("first=2+share=0.3", "first=1.7+share=0.4", "first=1.5+share=0.6"), text("docs/widths.md")
    two, ten, residual = (
        [ahead(name, *where, "equal_worth") for name in shrinking]
        for where in (("vgg19", "flops=0.018"), ("vgg19", "flops=0.1"), ("resnet32", "flops=0.1"))
    )
    places = (("vgg19", "flops=0.1"), ("vgg19", "flops=0.018"), ("resnet32", "flops=0.1"))
    narrow = [ahead("narrow+epochs=47", *where) for where in places]
    ours = [ahead("equal_worth+epochs=47", *where, "equal_worth") for where in places]
    assert f"gains {narrow[0]:.1f} points, nothing, and {narrow[2]:.1f} with ResNet-32" in widths
    assert abs(narrow[1]) < 0.05
    assert "as much longer gains {:.1f}, {:.1f} and {:.1f}, so at 10 %".format(*ours) in widths
    assert {f"gains {gain:.1f} points at 1.8 %, and only if" in widths for gain in two} == {True}
    assert f"at 10 % it gains {max(ten):.1f} at most, and nothing with ResNet-32" in widths
    assert statistics.mean(residual) < 0
    assert ahead("frozen_first=2+share=0.3", "vgg19", "flops=0.018", "frozen") < 0
    rows = [row for row in ablation_rows("ablation") if row["variant"] in shrinking]
    costs = [100 * (row["train_cost"] / row["flops_ratio"] - 1) for row in rows]
    assert f"costs {min(costs):.0f} to {max(costs):.0f} % more training" in widths


def test_forms_with_other_widths_are_alike() -> None:
    """All that were tried but for those that count less of step 3, or nothing, or have another budget at first."""
    others = ("narrow", "redundant", "half", "fourfold", "anew", "frozen", "first=", "equal_worth+epochs")
    found = [name for name, model, budget in ablation("ablation") if (model, budget) == ("vgg19", "flops=0.1")]
    forms = [name for name in found if not name.startswith(others)]
    gains = [ahead(name, "vgg19", "flops=0.1") for name in forms]
    assert len(forms) >= 10
    assert "are within 0.3 points of each other" in text("docs/widths.md")
    assert max(gains) - min(gains) < 0.3
    narrow = statistics.mean(ablation("ablation")["narrow", "vgg19", "flops=0.1"])
    by_hand = ablation("profiles").items()
    best, seeds = max((statistics.mean(v) - narrow, len(v)) for (_, model, _), v in by_hand if model == "vgg19")
    default = ahead("equal_worth", "vgg19", "flops=0.1")
    assert f"are {best:.2f} ahead of uniform, four seeds; the default is {default:.2f} ahead" in text("docs/widths.md")
    assert seeds == 4


def test_to_round_to_the_nearest_is_no_better() -> None:
    ten, two = (ahead("nearest", "vgg19", budget, "equal_worth") for budget in ("flops=0.1", "flops=0.018"))
    residual = ahead("nearest", "resnet32", "flops=0.1", "equal_worth")
    assert abs(ten) < 0.1
    assert f"and {-two:.1f} and {-residual:.1f} points worse at 1.8 % and with ResNet-32" in text("docs/widths.md")


def test_step_3_adds_what_is_said() -> None:
    pairs = (("equal_worth", "redundant"), ("pull=2", "redundant+pull=2"), ("pull=1", "redundant+pull=1"))
    ten, two = ([ahead(a, "vgg19", budget, b) for a, b in pairs] for budget in ("flops=0.1", "flops=0.018"))
    assert f"Step 3 adds {min(ten):.1f} to {max(ten):.1f} points at 10 %" in text("docs/widths.md")
    assert max(map(abs, two)) < 0.2


def test_a_wide_first_layer_before_a_thin_one_is_worse() -> None:
    rows = [row for row in ablation_rows("ablation") if (row["model"], row["budget"]) == ("vgg19", "flops=0.018")]
    worse, better = (
        statistics.mean(row["accuracy"] for row in rows if row["widths"][:2] in widths)
        for widths in ([[16, 8], [16, 9], [16, 10]], [[8, 16]])
    )
    document = text("docs/widths.md")
    assert "networks with 16 and 8 to 10 of them are worse than those with 8 and 16" in document
    assert f"by {better - worse:.1f} points in the mean" in document


def test_no_profile_by_hand_is_much_better() -> None:
    narrow = statistics.mean(ablation("ablation")["narrow", "resnet32", "flops=0.1"])
    found = {name: values for (name, model, _), values in ablation("profiles").items() if model == "resnet32"}
    better = [statistics.mean(values) - narrow for name, values in found.items() if name not in ("uniform", TWICE)]
    widths = text("docs/widths.md")
    assert "of sixteen profiles" in widths
    assert len(better) == 16
    assert f"the best is {max(better):.1f} ahead on validation images" in widths
    assert sum(abs(one) < 0.3 for one in better) > len(better) / 2


@pytest.mark.parametrize(
    ("variant", "label"),
    [
        ("equal_worth", "the default: a pull of 8, a fifth of the training"),
        ("equal_worth+epochs=47", "the default for 47 epochs"),
        ("nearest", "multiples of 8 that are nearest to what is wanted"),
        ("pull=2", "a pull of 2"),
        ("pull=1", "a pull of 1"),
        ("centred", "of gradients less their mean in step 3"),
        ("centred+pull=2", "of gradients less their mean in step 3, a pull of 2"),
        ("align=1", "single units, not multiples of 8"),
        ("fine_search", "single units until the last round"),
        ("finer", "single units until the last round, and finer steps for thin groups"),
        ("staying", "widths remain while they are less than a step away"),
        ("clipped_behind", "a round is clipped after step 5, not before"),
        ("front_heavy+align=1", "by hand: front-heavy in single units"),
        ("redundant", "without step 3"),
        ("redundant+pull=2", "without step 3, a pull of 2"),
        ("redundant+pull=1", "without step 3, a pull of 1"),
        ("redundant+pull=0", "without steps 3 and 5"),
        ("redundant+pull=2+cost_blind", "without step 3, a pull of 2, and without the cost of a unit"),
        ("redundant+pull=2+any_unit", "without step 3, a pull of 2, and any unit leaves"),
        ("frozen", "the start of the search, trained to the end"),
        ("first=2+share=0.3", "twice the budget at first, through 30 % of the training"),
        ("first=1.7+share=0.4", "1.7 times the budget at first, through 40 %"),
        ("first=1.5+share=0.6", "1.5 times the budget at first, through 60 %"),
        ("frozen_first=2+share=0.3", "twice the budget at first, through 30 %, in equal shares"),
        ("first=0.4+share=0.5+epochs=47", "0.4 times the budget at first, through 50 % of 47 epochs"),
        ("narrow+epochs=47", "by hand: uniform for 47 epochs"),
        ("narrow+align=1", "by hand: uniform in single units"),
        ("redundant+share=0.4+pull=1", "without step 3, a pull of 1, two fifths of the training"),
        ("redundant+share=0.1+pull=1", "without step 3, a pull of 1, a tenth"),
        ("anew+share=0.036+pull=1", "256 steps, a pull of 1, and training starts again with new weights"),
    ],
)
def test_the_choice_of_settings_is_that_of_the_records(variant: str, label: str) -> None:
    found = ablation("ablation")
    expected = []
    for model, budget in (("vgg19", "flops=0.1"), ("vgg19", "flops=0.018"), ("resnet32", "flops=0.1")):
        own, narrow = found.get((variant, model, budget)), found["narrow", model, budget]
        expected.append(f"{statistics.mean(own) - statistics.mean(narrow):+.2f}".replace("-", "−") if own else "")
    assert cells("docs/widths.md", label) == [expected]


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("bench-h200/vgg19-2048.json", "VGG-19, 2048"),
        ("bench-h200/vgg19-256.json", "VGG-19, 256"),
        ("bench-h200/resnet32-256.json", "ResNet-32, 256, stream coupling"),
        ("bench-h200/wrn28_10-256.json", "WRN-28-10, 256, stream coupling"),
        ("bench-cpu/vgg19-64.json", "VGG-19, 64"),
    ],
)
def test_tables_of_steps_are_those_of_the_records(file: str, label: str) -> None:
    found = bench_records.read(REPOSITORY / "results" / file)
    assert [line[:7] for line in cells("docs/performance.md", label)] == [
        [
            f"{100 * row.flops_ratio:.1f}",
            f"{100 * row.executed_flops_ratio:.1f}",
            *(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in (row.dense_ms, row.narrow_ms, row.ours_ms)),
            f"{row.speedup:.2f}x",
            f"{row.of_limit:.2f}",
        ]
        for row in found.rows
    ]


def test_the_front_door_costs_what_is_said() -> None:
    record = json.loads((REPOSITORY / "results" / "front_door_cpu.json").read_text(encoding="utf-8"))
    assert len(record["settled_step_ms"]) == 2
    assert all(times["ratio"] < 1.02 for times in record["settled_step_ms"].values())
    (change,) = record["change_of_structure"].values()
    assert change["seconds"] < 0.1
    assert change["stored_weights"] <= 1
    assert "differ by less than 2 %" in text("docs/performance.md")
    assert "VGG-19 takes less than 0.1 s" in text("docs/performance.md")
