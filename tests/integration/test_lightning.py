"""Slimming, the callback for Lightning, in real trainings."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import EqualWorth, Flops, SparseTraining, flops
from slimstart.errors import CheckpointError

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging  # noqa: E402

from slimstart.integrations.lightning import Slimming, load_from_checkpoint  # noqa: E402
from tests.integration.test_tasks import Detector, scenes  # noqa: E402
from tests.lightning_tasks import SEARCHING, STEPS, Task, loader, trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

ROOT = Path(__file__).parents[2]
IMAGES = torch.zeros(1, 3, 8, 8)
Differences = Callable[[Any, Any], list[str]]


def ratio(task: Any) -> float:
    return flops(task.float().net, IMAGES) / flops(Task().net, IMAGES)


def weights(task: Any) -> dict[str, Tensor]:
    return dict(task.state_dict())


class Saving(ModelCheckpoint):
    """One checkpoint for every epoch, and one in the middle of each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, filename="{step}", save_top_k=-1, every_n_train_steps=STEPS // 2)


def test_the_callback_does_what_the_loop_does(tmp_path: Path, differences: Differences) -> None:
    torch.manual_seed(0)
    task = Task()
    trainer(tmp_path).fit(task, loader())
    torch.manual_seed(0)
    model = Task().net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    example = next(iter(loader()))[0][:2]
    sparse = SparseTraining(model, optimizer, example, Flops(0.25), total_steps=4 * STEPS, policy=SEARCHING)
    for images, labels in 4 * list(loader()):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert differences(dict(task.net.state_dict()), dict(sparse.finish().state_dict())) == []
    assert ratio(task) <= 0.25
    assert type(task.net[0]) is nn.Conv2d


def test_validation_checkpoints_and_test(tmp_path: Path, differences: Differences) -> None:
    best = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=3)
    task, run = Task(), trainer(tmp_path, best)
    run.fit(task, loader(shuffle=True), loader())
    assert run.global_step == 4 * STEPS
    assert len(best.best_k_models) == 3
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    (found,) = run.test(task, loader(), ckpt_path="best", verbose=False)
    assert found["loss"] == pytest.approx(float(best.best_model_score), rel=1e-5)
    other = trainer(tmp_path)
    fresh = Task()
    assert other.test(fresh, loader(), ckpt_path=best.best_model_path, verbose=False) == [found]
    assert ratio(fresh) <= 0.25


def test_a_checkpoint_is_read_with_one_call(tmp_path: Path, differences: Differences) -> None:
    task, run = Task(width=12), trainer(tmp_path, Saving(tmp_path))
    run.fit(task, loader())
    run.save_checkpoint(tmp_path / "finished.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in (f"step={4 * STEPS}", "finished", "weights"):
        read = load_from_checkpoint(Task, tmp_path / f"{name}.ckpt")
        assert type(read) is Task
        assert read.hparams.width == 12
        assert differences(weights(read), weights(task)) == []
    during = load_from_checkpoint(Task, tmp_path / f"step={STEPS // 2}.ckpt")
    assert during.net[0].out_channels != task.net[0].out_channels
    with pytest.raises(RuntimeError, match="size mismatch"):
        Task.load_from_checkpoint(tmp_path / "finished.ckpt")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_resuming_is_exact(epochs: int, shuffle: bool, tmp_path: Path, differences: Differences) -> None:
    torch.manual_seed(0)
    whole, slimming = Task(), Slimming(Flops(0.25), SEARCHING)
    trainer(tmp_path, Saving(tmp_path), slimming=slimming).fit(whole, loader(shuffle), loader())
    saved = torch.load(tmp_path / f"step={epochs * STEPS}.ckpt", weights_only=True)["callbacks"][slimming.state_key]
    assert saved["sparse"]["settled"] is (epochs == 3)  # the first two are in the search
    torch.manual_seed(5)  # another process starts with other weights
    resumed = Task()
    run = trainer(tmp_path)
    run.fit(resumed, loader(shuffle), loader(), ckpt_path=tmp_path / f"step={epochs * STEPS}.ckpt")
    assert run.global_step == 4 * STEPS
    assert differences(weights(resumed), weights(whole)) == []


class Positioned:
    """A loader whose position is in the checkpoints."""

    def __init__(self) -> None:
        self.batches, self.position, self.start = list(loader()), 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        begin, self.start = self.start, 0
        for number in range(begin, len(self.batches)):
            self.position = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"] % len(self.batches)


@pytest.mark.parametrize("step", [5, 15, 35])
def test_resuming_in_an_epoch_is_exact_with_a_loader_that_has_a_state(
    step: int, tmp_path: Path, differences: Differences
) -> None:
    torch.manual_seed(0)
    whole = Task()
    trainer(tmp_path, Saving(tmp_path)).fit(whole, Positioned())
    torch.manual_seed(5)
    resumed = Task()
    run = trainer(tmp_path)
    run.fit(resumed, Positioned(), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert run.global_step == 4 * STEPS
    assert differences(weights(resumed), weights(whole)) == []


def test_a_finished_network_is_trained_on(tmp_path: Path) -> None:
    task, run = Task(), trainer(tmp_path)
    run.fit(task, loader())
    shapes = [p.shape for p in task.parameters()]
    run.save_checkpoint(tmp_path / "finished.ckpt")
    run.fit_loop.max_epochs = 5
    run.fit(task, loader())
    other = Task()
    longer = trainer(tmp_path, max_epochs=5)
    longer.fit(other, loader(), ckpt_path=tmp_path / "finished.ckpt")
    assert run.global_step == longer.global_step == 5 * STEPS
    assert [p.shape for p in task.parameters()] == [p.shape for p in other.parameters()] == shapes


def test_resuming_from_weights_alone_is_refused(tmp_path: Path) -> None:
    class SaveWeights(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    trainer(tmp_path, SaveWeights()).fit(Task(), loader())
    with pytest.raises((ValueError, KeyError), match="cannot be resumed"):
        trainer(tmp_path).fit(Task(), loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_changed_checkpoints_are_refused(tmp_path: Path) -> None:
    """Lightning opens the file; what the callback gets from it is checked."""
    slimming = Slimming(Flops(0.25), SEARCHING)
    trainer(tmp_path, Saving(tmp_path), slimming=slimming).fit(Task(), loader())
    path, key = tmp_path / f"step={STEPS // 2}.ckpt", slimming.state_key

    def changed(change: Callable[[Any, Any], Any]) -> Path:
        content = torch.load(path, weights_only=True)
        change(content["state_dict"]._metadata, content["callbacks"][key])
        torch.save(content, tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    def structure(metadata: Any) -> Any:
        return metadata["net"]["slimstart"]

    for change in (
        lambda metadata, _: structure(metadata)["attributes"].update({("0", "forward"): 3}),
        lambda metadata, _: structure(metadata)["attributes"].update({("0", "_modules"): 3}),
        lambda metadata, _: structure(metadata).update(identities={"0": 1 << 40}),
        lambda metadata, _: metadata.update(evil=metadata.pop("net")),
        lambda metadata, _: metadata.update(net=5),
    ):
        with pytest.raises(CheckpointError):
            load_from_checkpoint(Task, changed(change))
    for change in (
        lambda _, state: state.update(odd=5),
        lambda _, state: state.update(total_steps="many"),
        lambda _, state: state.update(total_steps=-5),
        lambda _, state: state.update(sparse=[]),
        lambda _, state: state["sparse"].update(masks=torch.zeros(1, dtype=torch.bool).expand(1 << 40, 1)),
        lambda _, state: state.update(examples=(torch.zeros(1).expand(2, 3, 1 << 20, 1 << 20),)),
    ):
        with pytest.raises(CheckpointError):
            trainer(tmp_path).fit(Task(), loader(), ckpt_path=changed(change))


def test_another_structure_does_not_fit_a_finished_network(tmp_path: Path) -> None:
    task, run = Task(), trainer(tmp_path, Saving(tmp_path))
    run.fit(task, loader())
    with pytest.raises(CheckpointError, match="in the state dict and"):
        run.test(task, loader(), ckpt_path=tmp_path / f"step={STEPS // 2}.ckpt")


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},  # which Lightning replaces by bf16-mixed on a CPU
        {"precision": "64-true"},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"max_epochs": -1, "max_steps": 30},
        {"fast_dev_run": True},
        {"detect_anomaly": True},
        {"overfit_batches": 2},
        {"inference_mode": False},
    ],
    ids=str,
)
def test_flags_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    task = Task()
    run = trainer(tmp_path, **options)
    run.fit(task, loader(), loader())
    assert run.global_step > 0
    assert ratio(task) <= 0.25


def test_gradients_are_clipped_and_accumulated(tmp_path: Path) -> None:
    class Norms(Task):
        norms: list[float]

        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if grads:
                self.norms.append(float(nn.utils.get_total_norm(grads)))

    task = Norms()
    task.norms = []
    slimming = Slimming(Flops(0.25), SEARCHING)
    trainer(tmp_path, slimming=slimming, gradient_clip_val=1e-3, accumulate_grad_batches=5).fit(task, loader())
    assert slimming.sparse is not None
    assert slimming.sparse.num_steps == 4 * STEPS // 5
    assert max(task.norms) <= 1e-3 * 1.001
    assert min(task.norms[-3:]) == pytest.approx(1e-3, rel=1e-3)


def test_early_stopping_ends_with_a_plain_network(tmp_path: Path) -> None:
    task = Task()
    stopping = EarlyStopping("loss", patience=1, min_delta=1e6)
    run = trainer(tmp_path, stopping)
    run.fit(task, loader(), loader())
    assert run.global_step == 2 * STEPS
    assert ratio(task) <= 0.25


def test_the_progress_bar_has_the_flops_and_the_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, enable_progress_bar=True)
    seen = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module))

    run.callbacks.append(Look())
    run.fit(Task(), loader())
    assert [(metrics["flops"][-1], metrics["phase"]) for metrics in (seen[0], seen[-1])] == [
        ("%", "search"),
        ("%", "fixed"),
    ]
    assert float(run.callback_metrics["flops_ratio"]) <= 0.25
    assert "fixed" in "".join(capsys.readouterr())


class Adversaries(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.judge = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.maker, self.judge)]

    def training_step(self, batch: Tensor, number: int) -> None:
        made = self.maker(torch.randn(len(batch), 4))
        for net, optimizer, sign in zip((self.maker, self.judge), self.optimizers(), (-1, 1), strict=True):
            inputs = made if net is self.maker else made.detach()
            optimizer.zero_grad()
            loss = sign * self.judge(inputs).mean() - (sign > 0) * self.judge(batch).mean()
            self.manual_backward(loss)
            optimizer.step()


def test_two_networks_with_an_optimizer_each(tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.randn(80, 8), batch_size=8)
    both = [Slimming(Flops(0.5), SEARCHING, module=name) for name in ("maker", "judge")]
    run = trainer(tmp_path, both[1], slimming=both[0])
    task = Adversaries()
    run.fit(task, data)
    assert task.maker[0].out_features <= 16
    assert task.judge[0].out_features <= 16
    assert len({one.state_key for one in both}) == 2


def test_a_teacher_next_to_the_network(tmp_path: Path, differences: Differences) -> None:
    class Distillation(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.student.parameters(), lr=0.1)

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return F.mse_loss(self.student(batch), self.teacher(batch))

    task = Distillation()
    teacher = copy.deepcopy(task.teacher.state_dict())
    data = torch.utils.data.DataLoader(torch.randn(80, 8), batch_size=8)
    trainer(tmp_path, slimming=Slimming(Flops(0.5), SEARCHING, module="student")).fit(task, data)
    assert task.student[0].out_features <= 16
    assert differences(dict(task.teacher.state_dict()), dict(teacher)) == []


def test_a_detector_that_takes_lists(tmp_path: Path) -> None:
    """The first call of the network has lists of images, which are not cut along their channels."""

    class Detection(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = Detector()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return torch.stack(list(self.net(*batch).values())).sum()

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("best", max(float(one["scores"].max()) for one in self.net(batch[0])), batch_size=6)

    task, run = Detection(), trainer(tmp_path)
    data = torch.utils.data.DataLoader(scenes(STEPS), batch_size=None)  # type: ignore[arg-type]
    run.fit(task, data, data)
    assert flops(task.net.eval(), (scenes(1)[0][0],)) <= 0.25 * flops(Detector().eval(), (scenes(1)[0][0],))
    assert 0 < float(run.callback_metrics["best"]) <= 1


def test_two_optimizers_of_one_network(tmp_path: Path) -> None:
    class Split(Task):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            both = ([p for p in self.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
            return [torch.optim.SGD(parameters, lr=0.05) for parameters in both]

        def training_step(self, batch: list[Tensor], number: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            for optimizer in self.optimizers():
                optimizer.step()

    task, slimming = Split(), Slimming(Flops(0.25), SEARCHING)
    trainer(tmp_path, slimming=slimming).fit(task, loader())
    assert slimming.sparse is not None
    assert slimming.sparse.num_steps == 4 * STEPS
    assert ratio(task) <= 0.25


class Layers(lightning.LightningModule):
    """Layers of its own, and a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images).relu().mean((2, 3)))

    configure_optimizers, training_step = Task.configure_optimizers, Task.training_step

    @property
    def net(self) -> Any:
        return self


def test_a_module_with_layers_of_its_own(tmp_path: Path, differences: Differences) -> None:
    whole = Layers()
    run = trainer(tmp_path, Saving(tmp_path))
    run.fit(whole, loader())
    assert whole.first.out_channels <= 8
    assert whole.trainer is run
    resumed = Layers()
    trainer(tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / f"step={STEPS}.ckpt")
    assert differences(weights(resumed), weights(whole)) == []
    read = load_from_checkpoint(Layers, tmp_path / f"step={4 * STEPS}.ckpt")
    assert differences(weights(read), weights(whole)) == []


def test_a_schedule_and_a_data_module(tmp_path: Path) -> None:
    class Scheduled(Task):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    task = Scheduled()
    run = trainer(tmp_path)
    run.fit(task, datamodule=Data())
    assert run.optimizers[0].param_groups[0]["lr"] < 1e-3
    assert ratio(task) <= 0.25


# --- refusals ------------------------------------------------------------------------------------------------------


def test_a_policy_that_learns_from_losses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sparse\.update\(loss, reference\)"):
        Slimming(Flops(0.25), "paper")


def test_the_lines_for_the_papers_policy(tmp_path: Path) -> None:
    """What the error says to write."""

    class Paper(Task):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self) -> None:
            settings = {"total_steps": 4 * STEPS, "policy": "paper"}
            example = next(iter(loader()))[0][:2]
            self.sparse = SparseTraining(self.net, self.trainer.optimizers[0], example, Flops(0.5), **settings)

        def training_step(self, batch: list[Tensor], number: int) -> None:  # type: ignore[override]
            (images, labels), sparse, optimizer = batch, self.sparse, self.optimizers()
            loss = F.cross_entropy(self.net(images), labels)
            reference = F.cross_entropy(sparse.reference(images), labels) if sparse.needs_reference else None
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            sparse.update(loss, reference)

        def on_train_end(self) -> None:
            self.sparse.finish()

    task = Paper()
    lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).fit(task, loader())
    assert task.sparse.num_steps == 4 * STEPS
    assert ratio(task) <= 0.5


def test_averages_made_by_lightning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="copy of the dense network"):
        trainer(tmp_path, WeightAveraging()).fit(Task(), loader())


def test_an_average_that_follows(tmp_path: Path) -> None:
    slimming = Slimming(Flops(0.25), SEARCHING)

    class Averaging(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.averaged = torch.optim.swa_utils.AveragedModel(pl_module.net)
            assert slimming.sparse is not None
            slimming.sparse.follow(self.averaged)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.averaged.update_parameters(pl_module.net)

    averaging, task = Averaging(), Task()
    trainer(tmp_path, averaging, slimming=slimming).fit(task, loader())
    assert [p.shape for p in averaging.averaged.module.parameters()] == [p.shape for p in task.net.parameters()]


def test_processes_that_are_spawned_are_refused(tmp_path: Path) -> None:
    script = "import sys; sys.argv.pop(0)\nfrom tests.lightning_tasks import *\n"
    script += "trainer(Path(sys.argv[0]), strategy='ddp_fork', devices=1).fit(Task(), loader())"
    done = in_process("-c", script, str(tmp_path))
    assert done.returncode != 0
    assert "use strategy='ddp'" in done.stderr


def test_a_module_must_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="maker, judge with parameters"):
        trainer(tmp_path).fit(Adversaries(), torch.utils.data.DataLoader(torch.randn(80, 8), batch_size=8))


def test_an_endless_training_needs_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="total_steps"):
        trainer(tmp_path, max_epochs=-1).fit(Task(), loader())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import lightning_training

    tiny = ["--width", "0.25", "--epochs", "1", "--batch-size", "300", "--out", str(tmp_path)]
    lightning_training.main(tiny)
    accuracy, share = map(float, re.findall(r"best: (\S+) % at (\S+)%", capsys.readouterr().out)[0])
    assert share <= 25
    assert accuracy > 15  # chance is 10


# --- two processes -------------------------------------------------------------------------------------------------


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    folders = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_two_processes_equal_one(tmp_path: Path, differences: Differences) -> None:
    done = in_process("tests/lightning_tasks.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert differences(dict(first), dict(second)) == []
    torch.manual_seed(0)
    task = Task(norm=False)
    trainer(tmp_path, precision="64-true").fit(task, loader())
    for name, value in weights(task).items():
        torch.testing.assert_close(first[name], value)


def test_the_default_policy_needs_no_settings(tmp_path: Path) -> None:
    task = Task()
    trainer(tmp_path, slimming=Slimming(Flops(0.3), EqualWorth())).fit(task, loader())
    assert ratio(task) <= 0.3
