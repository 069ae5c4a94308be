"""The training program: results, files, and exact resumption."""

import csv
import dataclasses
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimstart import flops
from slimstart.errors import BudgetError, CheckpointError, ConfigError, NonFiniteLossError
from slimstart.io import checkpoints
from slimstart.io import network_files as files
from slimstart.lab import records
from slimstart.lab.models import siblings
from slimstart.lab.recipes.recipe import Recipe, make_model, merged
from slimstart.lab.run import program as program_module
from slimstart.lab.run.callbacks import Interrupted, Watcher
from slimstart.lab.run.environment import Place, suited
from slimstart.lab.run.evaluation import evaluate
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run, claim
from slimstart.lab.run.search import Search

OWN = "tests.tiny_networks:with_dropout"
TINY = Recipe(
    model=OWN,
    policy="paper",
    budget="flops=0.4",
    epochs=3,
    batch_size=1000,
    lr=0.05,
    settle_at=0.67,
    finetune_epochs=1,
    num_masks=2,
)
QUICK = Place(device="cpu", checkpoint_seconds=0.0)
SELDOM = dataclasses.replace(QUICK, checkpoint_seconds=1e9)


def started(folder: Path, recipe: Recipe = TINY, **kwargs: Any) -> Program:
    run = Run(folder)
    if not run.exists:
        run.create(recipe)
    return Program(recipe, run, **{"place": QUICK, **kwargs})


def outcome(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Everything that must not depend on where a run was stopped."""
    record = dataclasses.asdict(records.read(folder))
    for epoch in record["history"]:
        del epoch["seconds"], epoch["images_per_second"]
    for name in ("name", "started", "finished", "train_seconds", "peak_memory_bytes", "command"):
        del record[name]
    return record, Run(folder).network.read_bytes()


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


class Killer(Watcher):
    """Kills after `steps` steps: every step reads `stop_requested`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def stop_requested(self) -> bool:  # type: ignore[override]
        self.steps -= 1
        if self.steps < 0:
            raise Killed
        return False


@pytest.mark.slow
def test_a_full_model_on_the_cpu_changes_nothing(tmp_path: Path, differences: Callable[[Any, Any], list[str]]) -> None:
    """Stopped and resumed, it ends as a run does that keeps everything in one place and was never stopped."""
    recipe = merged(TINY, {"full_model_device": "cpu", "resample_every": 2, "epochs": 2, "finetune_epochs": 0})
    recipe = merged(recipe, {"settle_at": 0.5, "eval_every": 2, "batch_size": 300, "validation": 5000})
    started(tmp_path / "together", merged(recipe, {"full_model_device": None}), place=SELDOM).train()
    for steps in (1, 4):  # in the search, within a window; and with the structure fixed
        with pytest.raises(Killed):
            started(tmp_path / "apart", recipe, watcher=Killer(steps)).train()
    program = started(tmp_path / "apart", recipe, place=dataclasses.replace(QUICK, step_times=True))
    assert isinstance(program.method, Search)
    record = program.train()
    assert record.config["full_model_device"] == "cpu"
    assert record.dense_step_ms is None  # of a network that may not fit
    assert record.narrow_step_ms is not None
    (together, network), (apart, same) = outcome(tmp_path / "together"), outcome(tmp_path / "apart")
    assert network == same
    others = [name for name in apart if name.endswith("step_ms") or name.startswith(("step_", "config"))]
    assert differences(together, apart | {name: together[name] for name in others}) == []


def test_a_full_model_on_the_cpu_has_the_format_of_the_device() -> None:
    home, gpu = torch.device("cpu"), torch.device("cuda")
    network = suited(make_model("small", num_classes=10, in_channels=3), home, gpu)
    assert {tensor.device for tensor in network.state_dict().values()} == {home}
    weights = [p for p in network.parameters() if p.dim() == 4 and p[0, 0].numel() > 1]
    assert weights
    assert all(weight.stride(1) == 1 for weight in weights)  # channels are adjacent in memory
    plain = suited(make_model("small", num_classes=10, in_channels=3), home, home)
    assert all(p.is_contiguous() for p in plain.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_model_on_the_cpu_never_comes_to_the_gpu(tmp_path: Path) -> None:
    recipe = Recipe(
        model="small", width=32.0, budget="flops=0.02", epochs=1, batch_size=20, num_masks=2, resample_every=20
    )
    recipe = merged(recipe, {"full_model_device": "cpu"})
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # by other tests
    place = Place(device="cuda", checkpoint_seconds=1.0, step_times=True)
    record = started(tmp_path / "run", recipe, place=place).train()
    assert record.device == "cuda"
    assert record.dense_step_ms is None
    assert torch.cuda.max_memory_allocated() - before < 4 * record.dense_params  # and momentum would be as much again
    network = files.load(
        Run(tmp_path / "run").network, lambda: make_model("small", num_classes=10, in_channels=1, width=32.0)
    )
    assert sum(p.numel() for p in network.parameters()) == record.params


@pytest.mark.slow
def test_a_requested_stop_saves_a_checkpoint(tmp_path: Path, differences: Callable[[Any, Any], list[str]]) -> None:
    class Stopper(Watcher):
        asked = 0

        @property
        def stop_requested(self) -> bool:  # type: ignore[override]
            self.asked += 1
            return self.asked == 10  # nine steps, and the end of an epoch

    with pytest.raises(Interrupted):
        started(tmp_path / "parts", place=SELDOM, watcher=Stopper()).train()
    assert [path.name for path in Run(tmp_path / "parts").checkpoints()] == ["step-000000009.pt"]
    started(tmp_path / "parts", place=SELDOM).train()
    started(tmp_path / "whole", place=SELDOM).train()
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "parts")) == []


def test_the_record_describes_the_run(tmp_path: Path) -> None:
    program = started(tmp_path / "run", place=dataclasses.replace(QUICK, step_times=True))
    record = program.train()
    assert record == records.read(tmp_path / "run")
    assert [epoch.phase for epoch in record.history] == ["search", "search", "train", "finetune"]
    assert [epoch.epoch for epoch in record.history] == [1, 2, 3, 4]
    assert record.history[-1].lr == TINY.finetune_lr
    # 28 x 28 with stride 4, then 2: 7 x 7 and 4 x 4
    dense = 9 * 8 * 49 + 9 * 8 * 16 * 16 + 160
    assert record.dense_flops == dense
    assert record.dense_params == (9 * 8 + 8 + 16) + (9 * 8 * 16 + 16 + 32) + 170
    assert record.dense_train_flops == 4 * 6 * 1000 * (3 * dense - 9 * 8 * 49)
    a, b, c = (layer.width for layer in record.layers)
    assert ([layer.name for layer in record.layers], c) == (["0", "3", "9"], 10)
    assert record.flops == 9 * a * 49 + 9 * a * b * 16 + 10 * b <= 0.4 * dense
    assert record.params == (10 * a + 2 * a) + (9 * a * b + 3 * b) + 10 * b + 10
    assert record.flops_ratio == record.flops / dense
    assert [layer.dense_flops for layer in record.layers] == [9 * 8 * 49, 9 * 8 * 16 * 16, 160]
    assert [layer.flops for layer in record.layers] == [9 * a * 49, 9 * a * b * 16, 10 * b]
    assert sum(epoch.train_flops for epoch in record.history) <= record.train_flops
    search = record.history[:2]
    expected = [epoch.expected_cost for epoch in search]  # of FLOPs, as the budget is in FLOPs
    assert record.train_cost_saving == pytest.approx(3 / (4 * sum(expected) / 2))  # type: ignore[arg-type]
    assert (record.engine, record.building_seconds) == ("eager", None)
    for epoch in search:
        assert sum(epoch.keep_probs or ()) == 24  # filters that have a keep-probability
        assert epoch.expected_cost == pytest.approx(0.4, abs=1e-3)
    assert record.executed_saving == record.dense_train_flops / record.train_flops
    assert record.step_ms is not None
    assert record.step_forward_ms is not None
    assert record.step_backward_ms is not None
    assert 0 < record.step_forward_ms + record.step_backward_ms < record.step_ms
    assert record.dense_step_ms is not None
    assert record.narrow_step_ms is not None
    assert record.config_hash == merged(TINY, {"seed": 5}).hash != merged(TINY, {"lr": 0.06}).hash

    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert [float(row["train_loss"]) for row in rows] == [epoch.train_loss for epoch in record.history]
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))

    network = files.load(Run(tmp_path / "run").network, lambda: make_model(OWN, num_classes=10, in_channels=1))
    assert flops(network, program.task.example) == record.flops
    assert evaluate(network, program.task.data, "float32") == (record.test_loss, record.accuracy)


def test_the_record_has_the_widths_of_a_search(tmp_path: Path) -> None:
    """Equal worth: equal shares at first, and from the last change on the widths of the finished network."""
    recipe = merged(TINY, {"policy": "equal_worth", "epochs": 20, "finetune_epochs": 0, "settle_at": 1.0})
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert record.structures is not None
    first, *changes = record.structures
    assert (first.start, first.removed_layers) == (0.0, ())
    # 9 * 5 * 49 + 9 * 5 * 9 * 16 + 10 * 9 = 8775 FLOPs of 22120; with 10 filters it would be 9505, above 0.4
    assert first.widths == {"0": 5, "3": 9, "9": 10}
    assert changes
    assert changes[-1].start <= 4  # a fifth of the training
    assert changes[-1].widths == {layer.name: layer.width for layer in record.layers}
    assert all(one.widths != other.widths for one, other in itertools.pairwise(record.structures))


def test_a_structure_that_changes_in_every_step_is_recorded_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "MAX_STRUCTURES", 4)
    record = started(tmp_path / "run", merged(TINY, {"sampling": "bernoulli"}), place=SELDOM).train()
    assert record.structures is not None
    starts = [structure.start for structure in record.structures]
    assert all(after - before > 4 / 4 for before, after in itertools.pairwise(starts))  # four epochs
    assert 2 <= len(starts) <= 4
    uniform = merged(TINY, {"method": "uniform", "epochs": 1, "finetune_epochs": 0})
    assert started(tmp_path / "uniform", uniform, place=SELDOM).train().structures is None


@pytest.mark.slow
def test_training_learns(tmp_path: Path) -> None:
    recipe = merged(TINY, {"model": "small", "width": 0.25, "batch_size": 100, "settle_at": 0.34, "lr": 0.1})
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert record.accuracy > 50  # of ten classes
    assert record.history[-1].train_loss < 0.7 * record.history[0].train_loss


def test_dense_and_uniform_have_the_structure_of_their_name(tmp_path: Path) -> None:
    base = merged(TINY, {"epochs": 1, "finetune_epochs": 0})
    dense = started(tmp_path / "dense", merged(base, {"method": "dense"})).train()
    assert (dense.flops_ratio, dense.params_ratio, dense.executed_saving, dense.train_cost_saving) == (1, 1, 1, 1)
    narrow = started(tmp_path / "uniform", merged(base, {"method": "uniform"})).train()
    assert (narrow.step_ms, narrow.dense_step_ms, narrow.narrow_step_ms) == (None, None, None)  # not asked for
    assert [epoch.phase for epoch in narrow.history] == ["train"]
    a, b, _ = (layer.width for layer in narrow.layers)
    assert abs(a / 8 - b / 16) <= 1 / 16  # one share for all, up to rounding
    assert 0.3 < narrow.flops_ratio <= 0.4
    # no second forward: 3 f_D over 3 f, but for the images' gradient, which neither computes
    assert narrow.train_cost_saving == narrow.dense_flops / narrow.flops
    assert narrow.executed_saving == pytest.approx(narrow.train_cost_saving, rel=0.1)


# --------------------------------------------------------------------------- what can go wrong


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    for method in ("slimstart", "uniform"):
        recipe = merged(TINY, {"method": method, "lr": 1e18, "weight_decay": 1e18})
        with pytest.raises(NonFiniteLossError, match=r"the loss is (nan|inf)"):
            started(tmp_path / method, recipe).train()
        state = Run(tmp_path / method).latest()
        if state is not None:
            assert torch.isfinite(torch.tensor(state["progress"]["loss_sum"]))
        assert not Run(tmp_path / method).finished


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, differences: Callable[[Any, Any], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        started(tmp_path / "parts", watcher=Killer(9)).train()
    newest, _ = Run(tmp_path / "parts").checkpoints()
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    started(tmp_path / "parts").train()
    assert "checksum is wrong" in caplog.text
    started(tmp_path / "whole").train()
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "parts")) == []
    with pytest.raises(Killed):
        started(tmp_path / "lost", watcher=Killer(9)).train()
    for path in Run(tmp_path / "lost").checkpoints():
        path.write_bytes(b"")
    for _ in range(2):  # and not from the beginning the second time
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
            started(tmp_path / "lost").train()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        started(tmp_path / "run", watcher=Killer(3)).train()
    other = merged(TINY, {"lr": 0.5})
    with pytest.raises(ConfigError, match="another recipe"):
        Program(other, Run(tmp_path / "run"), QUICK).train()
    newest = Run(tmp_path / "run").checkpoints()[0]
    for foreign in ({"format": "slimstart.program/0"}, {"format": "slimstart.program/1"}, {}):
        checkpoints.write(foreign, newest)
        with pytest.raises(CheckpointError, match="not of this version"):
            started(tmp_path / "run").train()


def test_an_impossible_budget_or_device_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="feasible from"):
        started(tmp_path / "a", merged(TINY, {"budget": "flops=0.0001"}))
    with pytest.raises(ConfigError, match="cannot be used here"):
        started(tmp_path / "b", place=Place(device="cuda:77"))
    with pytest.raises(ConfigError, match="cannot be used here"):
        started(tmp_path / "c", place=Place(device="toaster"))


def test_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        started(tmp_path / "run", watcher=Killer(3)).train()
    program = started(tmp_path / "run")
    program.task.data = dataclasses.replace(program.task.data, digest="other")
    with pytest.raises(ConfigError, match="began with other data"):
        program.train()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    class Poisoner(Killer):
        program: Program

        @property
        def stop_requested(self) -> bool:  # type: ignore[override]
            self.steps -= 1
            if self.steps == 0:
                next(self.program.method.sparse.model.parameters()).data.fill_(float("nan"))  # type: ignore[attr-defined]
            return False

    watcher = Poisoner(4)
    watcher.program = started(tmp_path / "run", watcher=watcher)
    with pytest.raises(NonFiniteLossError, match="weights are not finite after batch 4 of epoch 1"):
        watcher.program.train()
    assert [path.stem for path in Run(tmp_path / "run").checkpoints()] == ["step-000000003", "step-000000002"]


def test_step_times_that_need_too_much_memory_do_not_cost_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("slimstart.lab.run.step_times.step_times", too_large)
    place = dataclasses.replace(SELDOM, step_times=True)
    record = started(tmp_path / "run", merged(TINY, {"epochs": 1}), place=place).train()
    assert (record.step_ms, record.dense_step_ms) == (None, None)
    assert "step times are not measured" in caplog.text


@pytest.mark.parametrize("settle_at", [0.0, 0.1])
def test_a_search_of_no_epochs_settles_before_the_first_step(tmp_path: Path, settle_at: float) -> None:
    recipe = merged(TINY, {"settle_at": settle_at, "epochs": 2, "finetune_epochs": 0})
    record = started(tmp_path / "run", recipe, place=SELDOM).train()
    assert [epoch.phase for epoch in record.history] == ["train", "train"]
    assert record.flops_ratio <= 0.4


def test_a_resumed_run_keeps_the_command_that_began_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/slimstart", "train", "--lr", "0.1"])
    with pytest.raises(Killed):
        started(tmp_path / "run", watcher=Killer(3)).train()
    monkeypatch.setattr("sys.argv", ["slimstart", "train", "--resume"])
    assert started(tmp_path / "run").train().command == "slimstart train --lr 0.1"


def test_impossible_places_are_refused() -> None:
    for wrong in ({"workers": -1}, {"checkpoint_seconds": float("nan")}):
        with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}` is"):
            Place(**wrong)  # type: ignore[arg-type]


def test_two_processes_cannot_write_into_one_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create(TINY)
    with run.locked(), pytest.raises(ConfigError, match="another process"), Run(tmp_path / "run").locked():
        pass
    with run.locked():  # free again
        pass


def test_empty_run_folders_are_removed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Run(tmp_path / "a" / "run").locked():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), claim(tmp_path / "a" / "run").locked():
        raise ZeroDivisionError
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    with Run(tmp_path / "empty").locked():
        pass
    assert (tmp_path / "empty").exists()  # it was there before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep me")
    with Run(tmp_path / "mine").locked():
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_names_are_claimed_once(tmp_path: Path) -> None:
    names = [claim(tmp_path / "runs" / "x").folder.name for _ in range(3)]
    assert names == ["x", "x-2", "x-3"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        claim(tmp_path / "file" / "x")


def test_links_in_a_run_are_not_followed(tmp_path: Path) -> None:
    """A folder that somebody sent may hold links to files of the user."""
    run, home = Run(tmp_path / "run"), tmp_path / "home"
    run.create(TINY)
    home.mkdir()
    precious = home / "precious"
    precious.write_bytes(b"mine")
    (run.folder / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match=r"is a link, .*run/\.lock'"), run.locked():
        pass
    (run.folder / ".lock").unlink()
    for name in ("metrics.csv", "record.json", "checkpoints/step-000000003.pt"):
        for partial in ("", ".partial"):
            (run.folder / f"{name}{partial}").symlink_to(precious)
    with run.locked():
        run.write_metrics([])
        run.save({"step": 3}, 3)
    assert run.latest() == {"step": 3}
    assert precious.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "trials"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    run, home = Run(tmp_path / "run"), tmp_path / "home"
    run.create(TINY)
    home.mkdir()
    for step in range(4):
        (home / f"step-00000000{step}.pt").write_bytes(b"mine")
    (run.folder / "checkpoints").rmdir()
    (run.folder / name).symlink_to(home)
    with pytest.raises(ConfigError, match=f"{name} is a link"), run.locked():
        pass
    if name == "checkpoints":
        with pytest.raises(CheckpointError, match="is a link"):
            run.save({}, 10)
    assert len(list(home.iterdir())) == 4


def test_a_lock_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / ".lock")
    with pytest.raises(ConfigError, match="not a regular file"), Run(tmp_path / "run").locked():
        pass


def test_only_the_last_checkpoints_of_the_run_are_kept(tmp_path: Path) -> None:
    """A folder may hold files of the user, checkpoints of another, longer run, and half a file of an older version."""
    run = Run(tmp_path / "run")
    run.create(TINY)
    folder = run.folder / "checkpoints"
    own = ["best.pt", "step-1.pt", "step-000000001-before.pt", "z.pt", "best.pt.partial"]
    later = [f"step-00000009{number}.pt" for number in range(3)]
    for name in (*own, *later, "step-000000001.pt.partial"):
        (folder / name).write_bytes(b"not ours, or damaged")
    for step in (1, 2, 3, 10):
        run.save({"step": step}, step)
        assert run.checkpoints()[3].name == f"step-{step:09}.pt"
    kept = ["step-000000003.pt", "step-000000010.pt"]
    assert {path.name for path in folder.iterdir()} == {*own, *later, *kept}
    assert [path.name for path in run.checkpoints()] == [*later[::-1], *kept[::-1]]
    assert run.latest() == {"step": 10}


def test_trials_are_not_written_through_a_link(tmp_path: Path) -> None:
    recipe = merged(Recipe(), {"method": "shallow", "model": "vgg16", "width": 0.1, "epochs": 1, "budget": "flops=0.5"})
    program = started(tmp_path / "run", recipe, place=SELDOM)
    (tmp_path / "home").mkdir()
    stages = siblings(recipe.model)[0].replace(",", "-").replace(":", "-")
    (tmp_path / "home" / "checkpoints").mkdir()
    (tmp_path / "run" / "trials" / stages).mkdir(parents=True)
    (tmp_path / "run" / "trials" / stages / "checkpoints").symlink_to(tmp_path / "home" / "checkpoints")
    with pytest.raises(ConfigError, match="is a link, which is not followed"):
        program.train()
    assert list((tmp_path / "home" / "checkpoints").iterdir()) == []
