"""The paper's analyses: what is measured is what enumeration over all masks gives, and training does not notice."""

import dataclasses
import itertools
import logging
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_study
import torch
import typer
from study import plot as study_plot
from study import records as study_records
from study import run as study
from study.flip import FlipSettings, FlipWatcher, flip_row
from study.losses import MaskedLosses, training_batches
from study.records import FlipRow, Study, VarianceRow
from study.variance import VarianceSettings, variance_rows
from torch import Tensor, nn

from slimstart.errors import ConfigError, NonFiniteLossError
from slimstart.lab.cli.display import console
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.run.callbacks import Interrupted, Watcher
from slimstart.lab.run.make_method import Batch, Loss, Search
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from slimstart.narrow import compact
from slimstart.policies import ESTIMATORS
from tests.integration.test_program import OWN, QUICK, SELDOM, outcome, started
from tests.reference import all_masks, mask_probability

TINY = Recipe(
    model=OWN, policy="paper", budget="flops=0.4", epochs=2, batch_size=1000, lr=0.05, num_masks=2, eval_every=2
)
FLIP = FlipSettings(every=1, batches=4, draws=2, channels=1)
S = torch.tensor([0.3, 1.0, 0.6, 0.0, 0.8, 0.5], dtype=torch.float64)  # two units of six are decided
FREE = [0, 2, 4, 5]


def six_units(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(in_channels, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(12, num_classes)),
    )


@pytest.fixture
def search() -> Search:
    """A search in its middle, on a network of six units."""
    recipe = Recipe(model=OWN, policy="paper", budget="channels=1.0", seed=3)
    found = Search(recipe, six_units(4, 1), torch.zeros(1, 1, 9, 9), steps_per_epoch=10)
    found.sparse.learner.load_state_dict(found.sparse.learner.state_dict() | {"keep_probs": S})
    torch.testing.assert_close(found.keep_probs, S, rtol=0, atol=0)
    return found


@pytest.fixture
def batch() -> Batch:
    return torch.randn(6, 1, 9, 9), torch.tensor([0, 1, 2, 3, 0, 1])


def losses_of_all_masks(search: Search, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Masks that can be drawn, their probabilities, and their losses, each by a narrow network of its own."""
    masks = torch.stack([mask for mask in all_masks(6) if mask_probability(mask, S) > 0])
    assert len(masks) == 16
    dense = search.sparse.dense_copy()
    losses = []
    for mask in masks:
        network = compact(dense, search.graph.select(mask)).train()
        losses.append(Loss(TINY)(network, *batch).item())
    probabilities = torch.stack([mask_probability(mask, S) for mask in masks])
    return masks, probabilities, torch.tensor(losses, dtype=torch.float64)


def test_v_and_its_maximum_agree_with_all_masks(search: Search, batch: Batch) -> None:
    masks, probabilities, losses = losses_of_all_masks(search, batch)
    apart = (losses[:, None] - losses) ** 2
    exact = float(probabilities @ apart @ probabilities)
    held = []
    for unit, value in itertools.product(FREE, (False, True)):
        own = probabilities * (masks[:, unit] == value)
        held.append(float(own @ apart @ probabilities / own.sum()))
    row = flip_row(search, [batch] * 12, FlipSettings(batches=12, draws=10), epoch=7, seed=0)
    assert row is not None
    assert (row.epoch, row.num_units, row.num_tried) == (7, 4, 4)
    assert abs(row.dispersion - exact) < 4 * row.dispersion_error < 0.7 * exact
    assert abs(row.max_dispersion - max(held)) < 4 * row.max_dispersion_error < 0.7 * exact
    assert abs(row.excess - (max(held) - exact)) < 4 * row.excess_error
    assert row.max_dispersion_naive >= row.max_dispersion
    square = float(probabilities @ losses**2)
    assert abs(row.squared_loss - square) < 4 * row.squared_loss_error < 0.1 * square
    assert max(held) > 1.1 * exact  # or the maximum would show nothing


def test_variances_agree_with_all_masks(search: Search, batch: Batch) -> None:
    masks, probabilities, losses = losses_of_all_masks(search, batch)
    names, layers = ("vr_pge", "pge", "pge_plain"), {None: FREE, "0": [0, 2], "3": [4, 5]}
    rows = variance_rows(search, [batch] * 12, VarianceSettings(names, draws=24))
    assert [(row.layer, row.estimator) for row in rows] == list(itertools.product(layers, names))
    by_name = {(row.layer, row.estimator): row for row in rows}
    for name, alpha in (("vr_pge", 0.5), ("pge", 0.5), ("pge_plain", 0.0)):
        estimator = ESTIMATORS[name.removesuffix("_plain")]
        first, second = torch.zeros(6).double(), torch.zeros(6).double()
        for chosen in map(list, itertools.product(range(16), repeat=estimator.num_masks)):
            g = estimator.gradient(losses[chosen], masks[chosen], S, alpha)
            first, second = first + probabilities[chosen].prod() * g, second + probabilities[chosen].prod() * g**2
        for layer, units in layers.items():
            row, exact = by_name[layer, name], float((second - first**2)[units].mean())
            assert (row.num_units, row.num_rare) == (len(units), 0)
            assert abs(row.variance - exact) < 4 * row.standard_error < 0.8 * exact
            assert row.ratio == pytest.approx(row.variance / by_name[layer, "vr_pge"].variance)
    assert by_name[None, "vr_pge"].ratio_error == 0
    assert by_name[None, "pge"].ratio > 1


def test_losses_are_those_of_narrow_networks_and_leave_no_trace(search: Search, batch: Batch) -> None:
    masks, _, expected = losses_of_all_masks(search, batch)
    before = {name: tensor.clone() for name, tensor in search.sparse.model.state_dict().items()}
    random = torch.get_rng_state()
    found = MaskedLosses(search)(masks, batch, seed=0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in search.sparse.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_else_is_random_is_the_same_for_all_masks(batch: Batch) -> None:
    model = nn.Sequential(six_units(4, 1), nn.Dropout(0.5), nn.Linear(4, 4))
    search = Search(Recipe(policy="paper", budget="channels=1.0"), model, torch.zeros(1, 1, 9, 9), steps_per_epoch=10)
    losses, same = MaskedLosses(search), torch.ones(3, 10, dtype=torch.bool)[:, : search.graph.num_units]
    found = losses(same, batch, seed=0)
    assert found[0] == found[1] == found[2] != losses(same, batch, seed=1)[0]


def test_units_that_are_hardly_ever_drawn_are_counted(search: Search, batch: Batch) -> None:
    nearly = torch.tensor([0.3, 1.0, 1 - 1e-3, 0.0, 1e-3, 0.5], dtype=torch.float64)
    search.sparse.learner.load_state_dict(search.sparse.learner.state_dict() | {"keep_probs": nearly})
    rows = variance_rows(search, [batch] * 5, VarianceSettings(("vr_pge",), draws=8))  # 40 masks: 12 and 20 expected
    assert [(row.layer, row.num_units, row.num_rare) for row in rows] == [(None, 4, 2), ("0", 2, 1), ("3", 2, 1)]


def test_a_decided_search_has_nothing_to_measure(search: Search, batch: Batch) -> None:
    decided = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.float64)
    search.sparse.learner.load_state_dict(search.sparse.learner.state_dict() | {"keep_probs": decided})
    assert flip_row(search, [batch] * 4, FLIP, epoch=1, seed=0) is None
    with pytest.raises(ConfigError, match="every keep-probability is 0 or 1, and has no gradient"):
        variance_rows(search, [batch] * 4, VarianceSettings())


def test_a_variance_of_nothing_has_no_ratio(search: Search, batch: Batch) -> None:
    model = search.sparse.model
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    rows = variance_rows(search, [batch] * 3, VarianceSettings(("vr_pge", "pge"), draws=4))
    found = {(row.estimator, row.variance > 0, row.ratio, row.ratio_error) for row in rows}
    assert found == {("vr_pge", False, None, None), ("pge", True, None, None)}


def test_losses_that_are_not_finite_are_refused(search: Search, batch: Batch) -> None:
    images, labels = batch
    with pytest.raises(NonFiniteLossError, match="a sampled network's loss is not finite"):
        MaskedLosses(search)(torch.ones(1, 6, dtype=torch.bool), (images * float("nan"), labels), seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_captured_forwards_give_the_same_losses(batch: Batch) -> None:
    on_gpu = batch[0].cuda(), batch[1].cuda()
    masks, found = torch.rand(8, 6) < 0.5, []
    for engine in ("eager", "graphs"):
        torch.manual_seed(0)
        model = six_units(4, 1).cuda()
        search = Search(
            Recipe(policy="paper", budget="channels=1.0"), model, torch.zeros(1, 1, 9, 9).cuda(), 10, engine
        )
        losses = MaskedLosses(search)
        found += [losses(masks, on_gpu, seed=0), losses(masks.flip(0), on_gpu, seed=0).flip(0)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)
    assert float(found[0].std()) > 1e-3  # masks count


# --------------------------------------------------------------------------- from a recipe, or a run, to a record


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of V along a whole training."""
    folder = tmp_path_factory.mktemp("studies") / "flip"
    study.flip(TINY, FLIP, SELDOM, folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.raises(Interrupted):
        started(folder, TINY, watcher=Stopping(after=8)).train()
    return folder


class Stopping(Watcher):
    """Asks to stop after so many questions: one after each step, one after each epoch."""

    def __init__(self, after: int) -> None:
        self.after = after

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        self.after -= 1
        return self.after < 0


@pytest.mark.slow
def test_a_flip_study_measures_and_its_training_does_not_notice(
    flipped: Path, tmp_path: Path, differences: Callable[[Any, Any], list[str]]
) -> None:
    found = study_records.read(flipped)
    assert [(row.epoch, row.num_tried) for row in found.flip] == [(1, 1), (2, 1)]
    assert (found.epoch, found.variance, found.settings) == (2, (), dataclasses.asdict(FLIP))
    assert (found.config, found.device, found.network) == (dataclasses.asdict(TINY), "cpu", f"{OWN} on fashion")
    for row in found.flip:
        assert 0 < row.dispersion < row.squared_loss  # losses are about 2.3
        assert row.excess == pytest.approx(row.max_dispersion - row.dispersion, abs=1e-12)
    started(tmp_path / "plain", TINY, place=SELDOM).train()
    assert differences(outcome(tmp_path / "plain"), outcome(flipped / "run")) == []
    assert study.flip(TINY, FLIP, SELDOM, flipped) == found  # it is done already


@pytest.mark.slow
@pytest.mark.parametrize("after", [4, 7, 10])  # with 6 steps in an epoch
def test_a_flip_study_that_was_stopped_goes_on(flipped: Path, tmp_path: Path, after: int) -> None:
    with pytest.raises(Interrupted):
        study.flip(TINY, FLIP, SELDOM, tmp_path, Stopping(after))
    assert (tmp_path / "record.json").exists() == (after > 6)
    assert study.flip(TINY, FLIP, SELDOM, tmp_path).flip == study_records.read(flipped).flip


@pytest.mark.slow
def test_rows_behind_the_checkpoint_are_measured_again(flipped: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        study.flip(TINY, FLIP, SELDOM, tmp_path, Stopping(7))
    later = dataclasses.replace(study_records.read(flipped), command="later")
    study_records.write(later, tmp_path / "record.json")  # as if it had come further, without a checkpoint
    found = study.flip(TINY, FLIP, SELDOM, tmp_path)
    assert (found.flip, found.command == "later") == (later.flip, False)


def watching(known: Sequence[FlipRow] = ()) -> tuple[FlipWatcher, list[tuple[FlipRow, ...]]]:
    """A watcher after the first of many epochs, and what it has kept."""
    kept: list[tuple[FlipRow, ...]] = []
    watcher = FlipWatcher(dataclasses.replace(FLIP, every=2), Watcher(), kept.append, known)
    watcher.program = SimpleNamespace(recipe=TINY, method=SimpleNamespace(searching=True))  # type: ignore[assignment]
    return watcher, kept


def test_the_watcher_measures_every_so_many_epochs_of_a_search(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []

    def row(_: object, __: object, ___: object, epoch: int, seed: int) -> FlipRow | None:
        found.append(epoch)
        return None if epoch == 4 else flip_record(epoch=epoch)

    monkeypatch.setattr("study.flip.flip_row", row)
    rows = [flip_record(epoch=epoch) for epoch in (2, 4, 6)]
    watcher, kept = watching(rows)
    watcher.resumed(4, 5)  # the fourth epoch has begun: what was measured after it is measured again
    assert watcher.rows == (rows[0],)
    with caplog.at_level(logging.WARNING):
        for epoch in (4, 5, 6):
            watcher.epoch(SimpleNamespace(epoch=epoch))  # type: ignore[arg-type]
    assert "nothing is measured after epoch 4: every keep-probability is 0 or 1" in caplog.text
    assert (found, kept) == ([4, 6], [(rows[0], rows[2])])
    watcher.program.method.searching = False  # type: ignore[misc]
    watcher.epoch(SimpleNamespace(epoch=8))  # type: ignore[arg-type]
    assert found == [4, 6]


def test_a_training_in_which_nothing_was_measured_is_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "train", lambda self: None)
    with pytest.raises(ConfigError, match="nothing was measured: all keep-probabilities were 0 or 1 too early"):
        study.flip(TINY, FLIP, SELDOM, tmp_path)


def test_the_variance_of_a_run_is_that_of_its_checkpoint(stopped: Path, tmp_path: Path) -> None:
    settings = VarianceSettings(("pge", "vr_pge"), batches=3, draws=4, seed=1)
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    found = study.variance(Run(stopped), settings, QUICK, tmp_path / "out", OWN)
    assert found == study_records.read(tmp_path / "out")
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    assert (found.epoch, found.flip, found.settings["estimators"]) == (1, (), ["pge", "vr_pge"])
    program = Program(TINY, Run(stopped), QUICK)
    program.resume()
    keep_probs = program.method.keep_probs
    assert keep_probs is not None
    assert float(keep_probs.std()) > 0.005  # it has learned something, so it is not a fresh one
    expected = variance_rows(program.method, training_batches(program, 3, seed=1), settings)
    assert found.variance == expected
    assert sum(row.num_units for row in expected if row.layer is not None and row.estimator == "pge") == 24


def test_batches_are_of_no_epoch_of_the_training(stopped: Path) -> None:
    program = Program(TINY, Run(stopped), QUICK)
    seen = [images for images, _ in training_batches(program, 7)]  # 6 in an epoch
    assert len(seen) == 7
    for epoch in range(TINY.total_epochs + 1):
        assert not any(torch.equal(images, seen[0]) for images, _ in program.task.data.train.epoch(epoch))
    other = next(training_batches(program, 1, seed=1))[0]
    assert torch.equal(other, seen[6])


# --------------------------------------------------------------------------- what is refused


def test_runs_without_a_search_are_refused(flipped: Path, stopped: Path, tmp_path: Path) -> None:
    settings = VarianceSettings(batches=3, draws=4)
    for folder, message in [
        (tmp_path / "none", "holds no run"),
        (flipped / "run", "holds no checkpoint; train with a smaller --checkpoint-seconds"),
    ]:
        with pytest.raises(ConfigError, match=message):
            study.variance(Run(folder), settings, QUICK, tmp_path / "out", OWN)
    for name, changes in (("settled", {"settle_at": 0.0}), ("dense", {"method": "dense"})):
        with pytest.raises(Interrupted):
            started(tmp_path / name, merged(TINY, changes), watcher=Stopping(after=0)).train()
    for name, message in [("settled", "the search is over at this checkpoint"), ("dense", "has no keep-probabilities")]:
        with pytest.raises(ConfigError, match=message):
            study.variance(Run(tmp_path / name), settings, QUICK, tmp_path / "out", OWN)
    assert not (tmp_path / "out").exists()
    (tmp_path / "record.json").touch()
    with pytest.raises(ConfigError, match="already holds a record; choose another --out"):
        study.variance(Run(stopped), settings, QUICK, tmp_path, OWN)


def test_a_study_needs_the_dense_network_on_the_device(tmp_path: Path) -> None:
    recipe, run = merged(TINY, {"full_model_device": "cpu"}), Run(tmp_path / "run")
    run.create(recipe)
    with pytest.raises(
        ConfigError, match=r"`full_model_device` is 'cpu', but a study .*a run that was trained without"
    ):
        study.variance(run, VarianceSettings(), QUICK, tmp_path / "out", OWN)
    with pytest.raises(ConfigError, match="`full_model_device` is 'cpu', but a study"):
        study.flip(recipe, FlipSettings(every=1), QUICK, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flip_studies_of_something_else_are_refused(flipped: Path, tmp_path: Path) -> None:
    for recipe, settings, folder, message in [
        (
            TINY,
            dataclasses.replace(FLIP, every=3),
            tmp_path,
            "`every` is 3, and the search of method slimstart has 2 epochs",
        ),
        (merged(TINY, {"method": "dense"}), FLIP, tmp_path, "the search of method dense has 0 epochs"),
        (TINY, dataclasses.replace(FLIP, draws=3), flipped, "holds another study, with settings {'every': 1,"),
        (merged(TINY, {"lr": 0.1}), FLIP, flipped, "was begun with other settings; give the same ones"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            study.flip(recipe, settings, SELDOM, folder)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- record and plot


def flip_record(**changes: Any) -> FlipRow:
    fields: dict[str, Any] = {"epoch": 3, "num_units": 9, "num_tried": 4, "excess": -1e-5, "excess_error": 1e-5}
    for name, value in (("squared_loss", 4.0), ("dispersion", 1e-4), ("max_dispersion", 9e-5)):
        fields |= {name: value, f"{name}_error": value / 10}
    return FlipRow(**fields | {"max_dispersion_naive": 2e-4} | changes)


def variance_record(**changes: Any) -> VarianceRow:
    fields = {"layer": "conv1", "estimator": "vr_pge", "num_units": 8, "num_rare": 1, "variance": 0.5}
    return VarianceRow(**fields | {"standard_error": 0.1, "ratio": 1.0, "ratio_error": 0.0} | changes)


def record(variance: Sequence[VarianceRow] = (), flip: Sequence[FlipRow] = ()) -> Study:
    facts = dict.fromkeys("command commit version device hardware torch python started finished".split(), "x")
    config = {"model": "resnet32", "data": "cifar10"}
    return Study(**facts, config=config, settings={}, epoch=3, variance=tuple(variance), flip=tuple(flip))


def test_records_come_back(tmp_path: Path) -> None:
    one = record(variance=[variance_record(), variance_record(layer=None, ratio=None, ratio_error=None)])
    for made in (one, record(flip=[flip_record(), flip_record(epoch=4)])):
        study_records.write(made, tmp_path / "record.json")
        assert study_records.read(tmp_path) == study_records.read(tmp_path / "record.json") == made


def texts(drawn: str) -> set[str | None]:
    return {element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")}


def test_the_plot_of_variances_has_a_line_for_each_estimator() -> None:
    layers = (None, "conv1", "conv2", "conv3")
    rows = [
        variance_record(layer=n, estimator=e, variance=v) for n in layers for e, v in (("vr_pge", 1), ("pge_plain", 9))
    ]
    rows[-1] = dataclasses.replace(rows[-1], variance=0.0)  # which no logarithm shows
    lines = {label: (places, values) for label, places, values, _ in study_plot._variances(rows, layers[1:])}
    assert lines == {"VR-PGE": ([1, 2, 3], [1, 1, 1]), "PGE without H": ([1, 2], [9, 9])}
    drawn = study_plot.draw(record(rows))
    assert drawn == study_plot.draw(record(rows))
    assert {"VR-PGE", "PGE without H", "layer", "resnet32 on cifar10", "1", "10"} <= texts(drawn)


def test_the_plot_of_flips_has_all_three() -> None:
    drawn = study_plot.draw(record(flip=[flip_record(), flip_record(epoch=4)]))
    assert {"E[L²]", "V", "V max", "V max, biased upwards", "epoch", "0.001"} <= texts(drawn)
    lines = {label: (values, errors) for label, _, values, errors in study_plot._flips([flip_record()])}
    assert lines["V max"] == ([9e-5], [9e-6])


# --------------------------------------------------------------------------- the commands

Slimstart = Callable[..., tuple[int, str]]


@pytest.fixture
def app() -> typer.Typer:
    found = typer.Typer()
    run_study.add_to(found)
    return found


@pytest.fixture
def slimstart(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Slimstart:
    """Run `run_study.py` in this process, in an empty folder: exit status and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 250)

    def run(*arguments: Any) -> tuple[int, str]:
        words = [*map(str, arguments), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["run_study.py", *words])
        return app(words, standalone_mode=False) or 0, capsys.readouterr().out

    return run


def test_the_command_variance(slimstart: Slimstart, stopped: Path, tmp_path: Path) -> None:
    status, output = slimstart("variance", stopped, "--model", OWN, "--batches", 3, "--draws", 4, "--out", "here")
    assert status == 0
    found = study_records.read(tmp_path / "here")
    assert found.command.startswith("run_study.py variance")
    for row in found.variance:
        assert f"{row.variance:.3g} ± {row.standard_error:.3g}" in output
        assert row.ratio is not None
        shown = f"{row.ratio:.3g}" if row.ratio < 1000 else f"{row.ratio:,.0f}"
        assert row.estimator == "vr_pge" or f" {shown} ± " in output
    assert re.search(r"layer +channels +rarely drawn +vr_pge +pge +ratio +pge_plain +ratio", output)
    assert "all" in output
    assert (tmp_path / "here" / "variance.svg").read_text().startswith("<svg xmlns=")


def test_the_command_flip(slimstart: Slimstart, flipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ("model", "budget", "epochs", "batch_size", "lr", "num_masks", "eval_every")
    given = [word for name in changed for word in (f"--{name.replace('_', '-')}", getattr(TINY, name))]
    given += ["--every", 1, "--batches", 4, "--draws", 2, "--channels", 1, "--out", flipped]
    status, output = slimstart("flip", *given)  # which was stopped when all was done
    assert status == 0
    assert re.search(r"epoch +channels +E\[L²\] +V +V max +V max, biased upwards +V max − V", output)
    for row in study_records.read(flipped).flip:
        assert f"{row.dispersion:.3g} ± {row.dispersion_error:.3g}" in output
        assert f"{row.epoch}      1 of {row.num_units}" in output
    assert (flipped / "flip.svg").read_text().startswith("<svg xmlns=")

    def interrupted(*_: Any) -> Study:
        raise Interrupted

    monkeypatch.setattr(study, "flip", interrupted)
    status, output = slimstart("flip", *given)
    assert (status, "saved; to go on, give the same command again" in output) == (130, True)


def test_the_lines_of_the_document_are_understood(app: typer.Typer) -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python benchmarks/run_study.py .*", text, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        _, _, name, *rest = line.split()
        parsed = typer.main.get_command(app).commands[name].make_context(name, rest)  # type: ignore[attr-defined]
        assert parsed.params["out"].name in line
