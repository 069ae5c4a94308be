"""Checkpoints of a training: resumed bit for bit, refused without a trace."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import Channels, CheckpointError, Flops, SparseTraining
from tests.settings import arguments


class Residual(nn.Module):
    """Two residual blocks with batch norm, dropout, and a head whose bias can not shrink."""

    def __init__(self, width: int = 8, inner: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first = self.block(width, inner)
        self.second = self.block(width, inner)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, 5)

    @staticmethod
    def block(width: int, inner: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.first(x))
        x = F.relu(x + self.second(x))
        return self.head(self.dropout(x.mean((2, 3))))


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 6, 6, generator=generator), torch.arange(8) % 5) for _ in range(n)]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def training(
    optimizer: str = "sgd", coupling: str = "filter", seed: int = 0, model: nn.Module | None = None, **options: Any
) -> SparseTraining:
    """A training whose weights and masks depend on the seed."""
    torch.manual_seed(seed)
    model = Residual() if model is None else model
    options = {"budget": Flops(0.4), "resample_every": 4, "total_steps": 40, **options}
    return SparseTraining(
        model,
        OPTIMIZERS[optimizer](model),
        torch.zeros(2, 3, 6, 6),
        coupling=coupling,
        **arguments(seed=seed, **options),
    )


def advanced(num_steps: int = 6, settled: bool = False, **options: Any) -> SparseTraining:
    """Some steps into a training; six are in the middle of the second window."""
    sparse = training(**options)
    for batch in batches(num_steps):
        sparse.step(loss_fn, *batch)
    if settled:
        sparse.settle(batches(2), loss_fn, num_samples=3)
        for batch in batches(2):
            sparse.step(loss_fn, *batch)
    return sparse


def run_on(sparse: SparseTraining, num_steps: int = 6) -> list[Tensor]:
    return [sparse.step(loss_fn, *batch) for batch in batches(num_steps + 3)[3:]]


def everything(sparse: SparseTraining) -> dict[str, Any]:
    net = {name: t.detach() for name, t in [*sparse.net.named_parameters(), *sparse.net.named_buffers()]}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in sparse.optimizer.param_groups]
    return copy.deepcopy({"state": sparse.state_dict(), "net": net, "mask": sparse.mask, "groups": groups})


# --------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("settled", [False, True], ids=["searching", "settled"])
@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_in_the_middle_of_a_window(
    optimizer: str, coupling: str, settled: bool, tmp_path: Path, differences: Any
) -> None:
    sparse = advanced(settled=settled, optimizer=optimizer, coupling=coupling)
    sparse.save(tmp_path / "run.pt")
    expected, end = run_on(sparse), everything(sparse)

    fresh = training(optimizer, coupling, seed=9)
    fresh.load(tmp_path / "run.pt")
    assert fresh.settled == settled
    assert fresh.num_steps == (8 if settled else 6)
    assert differences(expected, run_on(fresh)) == []
    assert differences(end, everything(fresh)) == []


@pytest.mark.parametrize("num_steps", [0, 1, 4, 7])
def test_resumed_anywhere_in_a_window(num_steps: int, differences: Any) -> None:
    sparse = advanced(num_steps)
    state = copy.deepcopy(sparse.state_dict())
    needs_reference = sparse.needs_reference
    expected = run_on(sparse)
    fresh = training(seed=9)
    fresh.load_state_dict(state)
    assert fresh.needs_reference == needs_reference
    assert differences(expected, run_on(fresh)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),  # its state is there before the first step
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.NAdam(p, lr=0.01),
    ],
    ids=["sgd without momentum", "rmsprop", "adagrad", "amsgrad", "nadam"],
)
def test_resumed_with_other_optimizers(make: Any, monkeypatch: pytest.MonkeyPatch, differences: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "other", lambda model: make(model.parameters()))
    sparse = advanced(optimizer="other")
    state = copy.deepcopy(sparse.state_dict())
    expected, end = run_on(sparse), everything(sparse)
    fresh = training("other", seed=9)
    fresh.load_state_dict(state)
    assert differences(expected, run_on(fresh)) == []
    assert differences(end, everything(fresh)) == []


def test_resumed_in_the_same_object(differences: Any) -> None:
    """Back from a later state, settled meanwhile, to an earlier one."""
    sparse = advanced()
    state = copy.deepcopy(sparse.state_dict())
    expected, end = run_on(sparse), everything(sparse)
    sparse.settle(batches(2), loss_fn, num_samples=2)
    run_on(sparse, 3)
    sparse.load_state_dict(state)
    assert not sparse.settled
    assert differences(expected, run_on(sparse)) == []
    assert differences(end, everything(sparse)) == []


def test_loading_copies_nothing_of_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, other = training(seed=9), advanced()
    state = other.state_dict()

    def never(self: SparseTraining) -> None:
        raise AssertionError("a second dense training")

    monkeypatch.setattr(SparseTraining, "state_dict", never)
    sparse.load_state_dict(state)
    assert torch.equal(sparse.keep_probs, other.keep_probs)
    assert (sparse.num_steps, sparse.settled) == (other.num_steps, other.settled)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_dict_is_a_copy(optimizer: str, differences: Any) -> None:
    """Kept in memory, it stays what it was: while its own training goes on, and while a training goes on from it."""
    sparse = advanced(optimizer=optimizer)
    state = sparse.state_dict()
    kept = copy.deepcopy(state)
    run_on(sparse)
    assert differences(kept, state) == []
    sparse.load_state_dict(state)
    first = run_on(sparse)
    assert differences(kept, state) == []
    sparse.load_state_dict(state)
    assert differences(first, run_on(sparse)) == []


def test_taking_a_state_dict_changes_nothing(differences: Any) -> None:
    asked, left_alone = advanced(), advanced()
    random = torch.get_rng_state()
    for batch in batches(5):
        asked.state_dict()
        asked.step(loss_fn, *batch)
    torch.set_rng_state(random)
    for batch in batches(5):
        left_alone.step(loss_fn, *batch)
    assert differences(everything(asked), everything(left_alone)) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_dict_has_tensors_and_plain_values_only(optimizer: str, differences: Any) -> None:
    state = advanced(optimizer=optimizer).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert differences(state, torch.load(file, weights_only=True)) == []


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differences: Any) -> None:
    sparse = advanced()
    path = tmp_path / "run.pt"
    sparse.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    saved = copy.deepcopy(sparse.state_dict())
    run_on(sparse, 2)

    def fails_half_way(state: Any, where: Any, **_: Any) -> None:
        where.write(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fails_half_way)
        with pytest.raises(CheckpointError, match="no space left"):
            sparse.save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    fresh = training()
    fresh.load(path)
    assert differences(saved, fresh.state_dict()) == []
    sparse.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


# --------------------------------------------------------------------------- refusing


class Malicious:
    """Unpickled by plain pickle, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def truncated(path: Path) -> None:
    advanced().save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing(path: Path) -> None:
    assert not path.exists()


def random_bytes(path: Path) -> None:
    path.write_bytes(bytes(torch.randint(256, (4096,), dtype=torch.uint8)))


def empty(path: Path) -> None:
    path.touch()


def malicious_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Malicious(path.with_suffix(".marker")), protocol=2))


def malicious_torch_file(path: Path) -> None:
    torch.save({**advanced().state_dict(), "policy": Malicious(path.with_suffix(".marker"))}, path)


def weights_of_a_model(path: Path) -> None:
    torch.save(Residual().state_dict(), path)


def list_of_tensors(path: Path) -> None:
    torch.save([torch.zeros(3)], path)


def another_format(path: Path) -> None:
    torch.save({**advanced().state_dict(), "format": "slimstart.training/99"}, path)


@pytest.mark.parametrize(
    "make",
    [
        truncated, missing, random_bytes, empty, malicious_pickle, malicious_torch_file, weights_of_a_model,
        list_of_tensors, another_format,
    ],
)  # fmt: skip
def test_files_that_are_refused(make: Callable[[Path], None], tmp_path: Path, differences: Any) -> None:
    path = tmp_path / "run.pt"
    make(path)
    undisturbed, sparse = advanced(), advanced()
    before = everything(sparse)
    with pytest.raises(CheckpointError):
        sparse.load(path)
    assert not path.with_suffix(".marker").exists(), "code in the file has been executed"
    assert differences(before, everything(sparse)) == []
    random = torch.get_rng_state()
    expected = run_on(undisturbed)
    torch.set_rng_state(random)
    assert differences(expected, run_on(sparse)) == []


def test_the_malicious_file_would_bite(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Malicious(tmp_path / "marker"))).close()
    assert (tmp_path / "marker").exists()


def refused(sparse: SparseTraining, state: Any, differences: Any, match: str | None = None) -> None:
    """The state must be refused by name, and leave no trace."""
    before = everything(sparse)
    with pytest.raises(CheckpointError, match=match):
        sparse.load_state_dict(state)
    assert differences(before, everything(sparse)) == []


@pytest.mark.parametrize(
    "key",
    "format coupling structure num_steps held_steps settled masks room pending policy model optimizer random".split(),
)
def test_a_missing_key(key: str, differences: Any) -> None:
    state = advanced().state_dict()
    del state[key]
    refused(training(seed=3), state, differences, match=key)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        *(("policy", key) for key in ("keep_probs", "num_updates", "adam", "generator", "masks")),
        *(("optimizer", key) for key in ("state", "param_groups")),
        *(("model", key) for key in ("stem.weight", "first.1.running_var")),
    ],
)
def test_a_missing_key_within(part: str, key: str, differences: Any) -> None:
    state = advanced().state_dict()
    state[part] = {k: v for k, v in state[part].items() if k != key}
    refused(training(seed=3), state, differences)


def test_a_key_of_another_version(differences: Any) -> None:
    state = {**advanced().state_dict(), "beginning": {}}
    refused(training(seed=3), state, differences)
    with pytest.raises(CheckpointError, match="has beginning too; it was written by another version"):
        training(seed=3).load_state_dict(state)


def test_every_key_is_expected() -> None:
    """The list above is whole."""
    assert set(training().state_dict()) == {
        "format", "coupling", "structure", "num_steps", "held_steps", "settled", "masks", "room", "pending", "policy",
        "model", "optimizer", "random",
    }  # fmt: skip


class Other(Residual):
    """As many units and parameters as `Residual`, and a name that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = self.head
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["head"] = self.tail
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [lambda: Residual(width=6), lambda: Residual(inner=7), lambda: Residual(width=6, inner=7), Other],
    ids=["width", "inner", "both", "names"],
)
def test_the_state_of_another_network(make: Callable[[], nn.Module], differences: Any) -> None:
    state = advanced(model=make(), coupling="stream").state_dict()
    refused(training(seed=3, coupling="stream"), state, differences)


def test_the_state_of_another_head(differences: Any) -> None:
    """As many units, and another number of classes: only the shapes tell."""
    model = Residual()
    model.head = nn.Linear(8, 6)
    refused(training(seed=3), advanced(model=model).state_dict(), differences, match="shapes")


def test_the_state_of_another_coupling(differences: Any) -> None:
    refused(training(coupling="stream"), advanced(coupling="filter").state_dict(), differences, match="coupling")


def test_the_state_of_another_optimizer(differences: Any) -> None:
    """An SGD with AdamW's groups and moments would fail at its next step, or worse, not fail."""
    refused(training("sgd", seed=3), advanced(optimizer="adamw").state_dict(), differences)


def test_the_optimizer_of_another_network(differences: Any) -> None:
    state = advanced().state_dict()
    state["optimizer"] = advanced(model=Residual(width=10)).optimizer.state_dict()
    refused(training(seed=3), state, differences)


def test_the_state_of_another_estimator(differences: Any) -> None:
    state = advanced(num_steps=4, estimator="leave_one_out").state_dict()
    refused(training(seed=3, estimator="vr_pge"), state, differences)


def test_the_state_of_another_split_in_groups(differences: Any) -> None:
    sparse = training(seed=3)
    model = Residual()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1, momentum=0.9)
    other = SparseTraining(model, optimizer, torch.zeros(2, 3, 6, 6), Flops(0.4), policy="paper")
    refused(sparse, other.state_dict(), differences, match="groups")


def test_budgets_may_change() -> None:
    """What a budget allows is no part of the state: a training goes on from a checkpoint under a tighter one."""
    sparse = training(budget=Channels(0.3))
    sparse.load_state_dict(advanced(budget=Channels(0.6), num_steps=4).state_dict())
    for batch in batches(5):
        sparse.step(loss_fn, *batch)
    assert sparse.expected_cost <= 0.3
