"""The table of structures: networks at equal FLOPs, the queue of runs, and the regret of rules on made-up records."""

import json
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import regret
import run
import torch
from regret import Choice, Entry, Setting
from run import Run
from torch import nn

from slimstart import flops
from slimstart.lab.data import cifar

CIFAR = (3, 32, 32)


# --- networks --------------------------------------------------------------------------------------------------------


def built(family: str, structure: str, budget: float) -> nn.Module:
    widths = families.solve(family, structure, budget, 10, CIFAR)
    return families.network(family, structure, widths, num_classes=10, in_channels=3)


# Dense multiply-adds of VGG-19 and of ResNet-32, twice as wide as usual: 398.136 M and 275.613 M.
@pytest.mark.parametrize(
    ("family", "structure", "budget", "target", "layers"),
    [
        ("vgg", "22222-late", 0.1, 39.81e6, 10 + 1),
        ("vgg", "11110-front", 0.018, 7.166e6, 4 + 1),
        ("residual", "112-late", 0.018, 4.961e6, 1 + 2 * 4 + 2 + 1),
        ("residual", "321-even", 0.018, 4.961e6, 1 + 2 * 6 + 2 + 1),
    ],
)
def test_structures_have_equal_flops(family: str, structure: str, budget: float, target: float, layers: int) -> None:
    network = built(family, structure, budget)
    assert flops(network, torch.zeros(1, *CIFAR)) == pytest.approx(target, rel=0.01)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in network.modules()) == layers


@pytest.mark.parametrize("family", ["inverted", "separable"])
def test_budgets_are_fractions_of_the_reference_of_a_family(family: str) -> None:
    reference = families.FAMILIES[family].make(10, 3)
    whole = flops(reference, torch.zeros(1, *CIFAR))
    assert flops(built(family, "11111-own", 0.25), torch.zeros(1, *CIFAR)) == pytest.approx(whole / 4, rel=0.01)


def test_an_inverted_residual_costs_its_three_convolutions() -> None:
    block = families.InvertedResidual(8, 12, stride=2)
    # 48 = 6 x 8 inner channels, on 10 x 10 pixels and then on 5 x 5.
    assert flops(block, torch.zeros(1, 8, 10, 10)) == 8 * 48 * 100 + 9 * 48 * 25 + 48 * 12 * 25
    assert not block.has_shortcut
    same = families.InvertedResidual(8, 8, stride=1).eval()
    nn.init.zeros_(same.branch[-1].weight)
    x = torch.randn(1, 8, 5, 5)
    assert torch.equal(same(x), x)


def test_a_tilt_is_a_power_of_the_ratio_of_stages() -> None:
    own, late = (families.solve("vgg", f"22222-{tilt}", 0.1, 10, CIFAR) for tilt in ("own", "late"))
    assert own[3] / own[0] == pytest.approx(8, rel=0.05)
    assert late[3] / late[0] == pytest.approx(8**1.3, rel=0.05)  # 14.9


def test_a_budget_below_the_smallest_network_is_refused() -> None:
    with pytest.raises(ValueError, match="vgg 22444-own at 1e-06: the closest widths miss the budget by"):
        families.solve("vgg", "22444-own", 1e-6, 10, CIFAR)


def test_depths_by_the_rule_of_the_library() -> None:
    # Of the 1 + 1 + 3 + 3 + 4 removable layers of VGG-19, round(12 * 0.1 ** 0.5) = 4 remain. The last stage, which has
    # no other layer, keeps one.
    assert families.depths_by_rule("vgg", 0.1, 0.5) == (2, 2, 2, 1, 1)
    # Of the 5 + 4 + 4 removable blocks of ResNet-32, round(13 * 0.1 ** 0.25) = 7 remain, and two that change the shape.
    assert families.depths_by_rule("residual", 0.1, 0.25) == (3, 3, 3)
    assert families.nearest("vgg", (2, 2, 2, 2, 0)) == "22222-own"  # differs by 2


# --- queue and runs --------------------------------------------------------------------------------------------------


def test_the_queue_has_every_run_once_and_the_most_informative_first() -> None:
    assert sum(len(family.structures) for family in families.FAMILIES.values()) == 95  # as the README says
    parts = run.queue()
    # 8 and 9 depths with two tilts, on two data sets, at two budgets; then the other tilts, and 21 inverted residuals.
    assert [len(part) for part in parts[:3]] == [
        2 * 2 * 2 * (8 + 9),
        2 * (2 * (2 * 8 + 9) + 21),
        2 * (32 + 27) + 21 + 15,
    ]
    assert len(parts[3]) == 2 * 2 * (8 + 10)  # lengths, data sets, candidates
    runs = [one for part in parts for one in part]
    assert len({one.name for one in runs}) == len(runs)
    assert {one.seed for one in parts[4]} == {1}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 80), ("test", 20)):
        arrays[f"{part}_images"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = random.integers(0, 10, count)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    return tmp_path


def test_a_record_of_a_run(data_dir: Path) -> None:
    arrays = cifar.read(cifar.FORMATS["cifar10"], data_dir)
    record = run.train(
        Run("residual", "112-late", "cifar10", 0.018, epochs=2), arrays, torch.device("cpu"), "float32", batch_size=8
    )
    assert record["layers"] == 1 + 2 * 4 + 2 + 1
    assert record["flops"] == pytest.approx(4.961e6, rel=0.01)
    assert (record["held_out_images"], record["losses_per_epoch"]) == (8, 4)  # a tenth of 80; 9 steps in an epoch
    assert len(record["losses"]) == 8
    first = sum(record["losses"][:4]) / 4
    assert record["train_loss"][0] == pytest.approx(first, abs=1e-4)
    assert record["validation"][-1] == record["validation_accuracy"]
    assert record["test_accuracy"] % 5 == 0  # of 20 images
    assert json.loads(json.dumps(record)) == record


def test_a_name_says_which_run_it_is() -> None:
    runs = [one for part in run.queue() for one in part]
    assert [Run.named(one.name) for one in runs] == runs
    learned = Run("vgg", "22444-own", "cifar10", 0.018, 40, 2, tilt=0.15)
    assert Run.named(learned.name) == learned


@pytest.mark.slow
def test_a_call_continues_where_the_last_one_ended(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, long = (
        Run("vgg", f"11110-{tilt}", "cifar10", 0.018, epochs)
        for tilt, epochs in (("own", 1), ("late", 1), ("even", 10**6))
    )
    monkeypatch.setattr(run, "queue", lambda: [[first], [second, long]])
    out, records = data_dir / "out", data_dir / "records"
    folders = ["--out", str(out), "--records", str(records), "--data-dir", str(data_dir)]
    command = [*folders, "--device", "cpu", "--batch-size", "16", "--workers", "1"]
    assert run.main([*command, "--only", first.structure]) == 0
    content = (records / f"{first.name}.json").read_text()
    assert run.main([*command, "--hours", "1"]) == 0  # the last one would not end in this time
    assert "1 of 2 missing runs are done; failed: none" in capsys.readouterr().out
    assert (records / f"{first.name}.json").read_text() == content
    assert {file.name for file in records.iterdir()} == {f"{one.name}.json" for one in (first, second)}
    assert run.main([*command, "--only", "even", "--data-dir", str(out)]) == 1
    assert "cifar10 is not in" in (out / f"{long.name}.log").read_text()


# --- regret ----------------------------------------------------------------------------------------------------------

VGG = Setting("vgg", "cifar10", 0.1, 40)


def record(structure: str, validation: float, test: float, losses: list[float]) -> dict[str, Any]:
    """A made-up record with one loss for each epoch."""
    return {
        **VGG._asdict(),
        "structure": structure,
        "validation_accuracy": validation,
        "test_accuracy": test,
        "losses": losses + [losses[-1]] * (40 - len(losses)),
        "losses_per_epoch": 1,
        "held_out_images": 5000,
        "batch_size": 256,
    }


RECORDS = [
    record("22444-own", 88.0, 88.5, [2.2, 1.9]),  # the deepest
    record("22222-own", 90.0, 89.0, [2.0, 1.5]),  # the fixed sibling
    record("11222-own", 91.0, 90.0, [2.1, 1.2]),  # the best on validation images
    record("11111-late", 89.0, 90.5, [1.9, 1.6]),  # the best on test images, which no rule may see
    record("11111-front", 90.5, 89.5, [1.8, 1.4]),  # not one of the few
]


def chosen(rule: regret.Rule) -> Choice | None:
    everything = regret.tables(RECORDS)
    return rule(VGG, everything[VGG])


def test_each_rule_chooses_by_what_it_may_see() -> None:
    assert regret.best(regret.tables(RECORDS)[VGG]) == "11222-own"
    assert chosen(regret.deepest) == Choice("22444-own")
    assert chosen(regret.fixed) == Choice("22222-own")
    assert chosen(regret.shallow) == Choice("11222-own", 3)  # three of the four candidates are trained in addition
    assert chosen(regret.default) is None  # the network without a search is not the one with it
    learned = {**record("22111-own", 91.0, 90.2, [2.0]), "tilt": 0.15}
    everything = regret.tables([*RECORDS, learned])
    # 40 * 176 steps of 256 images: of 12 layers 12 * 0.1 ** 0.6 * (7040 / 8000) ** 0.3 = 2.9 remain, and four more.
    assert everything[VGG]["22111-own_learned0.15"].steps == 7040
    assert regret.default(VGG, everything[VGG]) == Choice("22111-own_learned0.15")
    assert chosen(regret.early(1)) == Choice("11111-front", 4 * 1 / 40)
    assert chosen(regret.early(2)) == Choice("11222-own", 4 * 2 / 40)
    assert chosen(regret.early(40)) is None


def test_halving_counts_the_epochs_of_those_that_go() -> None:
    # After 1 epoch 22444 and 11222 go, with losses 2.2 and 2.1. After 2, 11111-late goes: 1.6 against 1.5.
    assert chosen(regret.halving(1)) == Choice("22222-own", (2 * 1 + 1 * 2) / 40)
    # After 2 epochs 22444 (1.9) and 11111-late (1.6) go; losses stay as they are, so 22222 goes after 4.
    assert chosen(regret.halving(2)) == Choice("11222-own", (2 * 2 + 1 * 4) / 40)


def test_seeds_are_averaged_and_losses_are_those_of_the_last_epoch() -> None:
    other = record("22222-own", 92.0, 90.0, [1.0, 1.1])
    entry = regret.tables([RECORDS[1], other])[VGG]["22222-own"]
    assert (entry.validation, entry.test) == (91.0, 89.5)
    assert entry.losses[:2] == pytest.approx([1.5, 1.3])
    parts = Entry(losses=[4.0, 3.0, 2.0, 1.0], per_epoch=2, validation=0, test=0)
    assert [parts.loss(epochs) for epochs in (0.5, 1, 1.5, 2)] == [4.0, 3.5, 2.5, 1.5]


def test_the_exponent_is_fitted_to_other_data_and_other_families(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rule with two outcomes: exponents below one half keep "deep". One half is the smallest of the others.
    monkeypatch.setattr(regret, "by_exponent", lambda setting, exponent: "deep" if exponent < 0.5 else "flat")

    def table(deep: float, flat: float) -> dict[str, Entry]:
        return {"deep": Entry([], 1, deep, deep), "flat": Entry([], 1, flat, flat)}

    everything = {
        VGG: table(deep=91, flat=90),
        VGG._replace(data="cifar100"): table(deep=60, flat=50),
        VGG._replace(family="residual"): table(deep=90, flat=70),
        VGG._replace(family="residual", data="cifar100"): table(deep=60, flat=65),
    }
    # Only the last setting has another family and other data than the first.
    assert regret.fitted_exponent(everything, left_out=VGG) == 0.5
    assert regret.compound(everything)(VGG, everything[VGG]) == Choice("flat")
    assert regret.fitted_exponent(everything) == 0.0  # mean regret 5 / 4, against (1 + 10 + 20) / 4
    assert regret.fitted_exponent({VGG: everything[VGG]}, left_out=VGG) is None


def test_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, one in enumerate(RECORDS):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    regret.main([str(tmp_path)])
    text = capsys.readouterr().out
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    regret.main([str(tmp_path / "all.jsonl"), "--out", str(tmp_path / "record.json")])
    assert text == capsys.readouterr().out
    rows = {row["rule"]: row for row in json.loads((tmp_path / "record.json").read_text())["rows"]}
    choices = {rule: row["choices"].get(str(VGG)) for rule, row in rows.items()}
    assert choices["deepest"] == ["22444-own", 1.5]  # 90.0 - 88.5
    assert choices["fixed"] == ["22222-own", 1.0]  # 90.0 - 89.0
    assert choices["loss after 1"] == ["11111-front", 0.5]  # 90.0 - 89.5
    assert choices["loss after 2"] == ["11222-own", 0.0]
    assert choices["compound"] is None  # there is no other family
    assert (rows["shallow"]["extra"], rows["halving from 1"]["extra"]) == (3, 0.1)
