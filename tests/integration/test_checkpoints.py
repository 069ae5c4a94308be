"""Checkpoints of a training: exact resumption, and refusal without side effects."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import Channels, CheckpointError, EqualWorth, Flops, Params, SparseTraining, shrink_to
from slimstart.io import checkpoints
from tests.settings import arguments
from tests.zoo.transformers import ProductAttention, SeparateAttention, ViT


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
    options = {"policy": "paper", "budget": Flops(0.4), "resample_every": 4, "total_steps": 40, **options}
    if options["policy"] == "paper":
        options["seed"] = seed
    else:
        options |= {"align": 1, "pull": 0.1, "rate": 1.0, "total_steps": 80}  # small networks change too
    return SparseTraining(
        model, OPTIMIZERS[optimizer](model), torch.zeros(2, 3, 6, 6), coupling=coupling, **arguments(**options)
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
    """The dense state, and what the user sees of it: the narrow model and the narrow optimizer state."""
    model = {name: t.detach() for name, t in [*sparse.model.named_parameters(), *sparse.model.named_buffers()]}
    optimizers = sparse.optimizer if isinstance(sparse.optimizer, list) else [sparse.optimizer]
    narrow = [optimizer.state_dict() for optimizer in optimizers]
    return copy.deepcopy({"state": sparse.state_dict(), "model": model, "mask": sparse.mask, "optimizers": narrow})


# --------------------------------------------------------------------------- resuming


POLICIES = [("paper", "filter"), ("paper", "stream"), ("equal_worth", "stream")]


@pytest.mark.parametrize("settled", [False, True], ids=["searching", "settled"])
@pytest.mark.parametrize(("policy", "coupling"), POLICIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_in_the_middle_of_a_window(
    optimizer: str, policy: str, coupling: str, settled: bool, tmp_path: Path, differences: Any
) -> None:
    sparse = advanced(settled=settled, optimizer=optimizer, policy=policy, coupling=coupling)
    assert sparse.settled == settled
    sparse.save(tmp_path / "run.pt")
    mask = sparse.mask
    expected, end = run_on(sparse), everything(sparse)
    assert settled == torch.equal(mask, sparse.mask)  # the search continues, or is over

    fresh = training(optimizer, coupling, seed=9, policy=policy)
    fresh.load(tmp_path / "run.pt")
    assert fresh.settled == settled
    assert fresh.num_steps == (8 if settled else 6)
    assert differences(expected, run_on(fresh)) == []
    assert differences(end, everything(fresh)) == []


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 7])
def test_resumed_anywhere_in_a_window(num_steps: int, policy: str, differences: Any) -> None:
    options = {"policy": policy, "coupling": "stream"}
    sparse = advanced(num_steps, **options)
    state = copy.deepcopy(sparse.state_dict())
    needs_reference = sparse.needs_reference
    expected = run_on(sparse)
    fresh = training(seed=9, **options)
    fresh.load_state_dict(state)
    assert fresh.needs_reference == needs_reference
    assert differences(expected, run_on(fresh)) == []


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_a_loop_by_hand_is_resumed_in_the_middle_of_a_window(policy: str, differences: Any) -> None:
    def by_hand(sparse: SparseTraining, some: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        optimizer, losses = sparse.optimizer, []
        for images, labels in some:
            loss = loss_fn(sparse.model, images, labels)
            with torch.no_grad():
                references = [loss_fn(net, images, labels) for net in sparse.references()]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if policy == "paper":
                sparse.update(loss, references)
            losses.append(loss.detach())
        return losses

    sparse = (
        training(policy=policy, coupling="stream", align=4)
        if policy == "paper"
        else training(policy=policy, coupling="stream")
    )
    by_hand(sparse, batches(6))
    state = copy.deepcopy(sparse.state_dict())
    expected, end = by_hand(sparse, batches(6)), everything(sparse)
    fresh = training(policy=policy, coupling="stream", seed=9, **({"align": 4} if policy == "paper" else {}))
    fresh.load_state_dict(state)
    assert differences(expected, by_hand(fresh, batches(6))) == []
    assert differences(end, everything(fresh)) == []


def test_resumed_with_several_optimizers(differences: Any) -> None:
    def made(seed: int) -> SparseTraining:
        torch.manual_seed(seed)
        model = Residual()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
        policy = EqualWorth(resample_every=4, depth=0)
        return SparseTraining(model, optimizers, torch.zeros(2, 3, 6, 6), Flops(0.4), total_steps=40, policy=policy)

    sparse, fresh = made(0), made(9)
    for batch in batches(6):
        sparse.step(loss_fn, *batch)
    state = copy.deepcopy(sparse.state_dict())
    assert [len(one["state"]) for one in state["optimizers"]] == [6, 10]
    expected, end = run_on(sparse), everything(sparse)
    fresh.load_state_dict(state)
    assert differences(expected, run_on(fresh)) == []
    assert differences(end, everything(fresh)) == []
    refused(fresh, {**state, "optimizers": state["optimizers"][:1]}, differences, match="2 optimizer")
    refused(fresh, {**state, "optimizers": state["optimizers"][::-1]}, differences)


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_may_be_made_before_or_after_loading(before: bool, differences: Any) -> None:
    """It adds entries to the optimizer's groups."""

    def scheduled(sparse: SparseTraining) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(sparse.optimizer, 0.2, total_steps=40)

    sparse = training()
    scheduler = scheduled(sparse)
    for batch in batches(6):
        sparse.step(loss_fn, *batch)
        scheduler.step()
    state, rates = copy.deepcopy(sparse.state_dict()), copy.deepcopy(scheduler.state_dict())
    expected = run_on(sparse, 3)
    fresh = training(seed=9)
    if before:
        theirs = scheduled(fresh)
    fresh.load_state_dict(state)
    if not before:
        theirs = scheduled(fresh)
        fresh.load_state_dict(state)  # a new scheduler has set the rate
    theirs.load_state_dict(rates)
    assert differences(expected, run_on(fresh, 3)) == []


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
    """A dict in memory does not change: while its own training continues, and while a training resumes from it."""
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


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_state_is_taken_between_forward_and_backward(policy: str, differences: Any) -> None:
    """Which must not count as a change of the weights that the backward needs."""
    asked, left_alone = (advanced(policy=policy, coupling="stream") for _ in range(2))
    for sparse in (asked, left_alone):
        torch.manual_seed(1)
        loss = loss_fn(sparse.model, *batches(1)[0])
        if sparse is asked:
            sparse.state_dict()
            sparse.model.state_dict()
            sparse.optimizer.state_dict()
            sparse.dense_copy()
            sparse.snapshot()
        sparse.optimizer.zero_grad()
        loss.backward()
        sparse.optimizer.step()
        if policy == "paper":
            sparse.update(loss)
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


def test_the_malicious_file_is_effective_elsewhere(tmp_path: Path) -> None:
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
    "format coupling structure num_steps held_steps settled masks capacity pending policy model optimizers "
    "random".split(),
)
def test_a_missing_key(key: str, differences: Any) -> None:
    state = advanced().state_dict()
    del state[key]
    refused(training(seed=3), state, differences, match=key)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        *(("policy", key) for key in ("keep_probs", "num_updates", "adam", "generator", "masks")),
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
        "format", "coupling", "structure", "num_steps", "held_steps", "settled", "masks", "removed",
        "capacity", "pending", "followers", "policy", "model", "optimizers", "random",
    }  # fmt: skip


# --------------------------------------------------------------------------- wrong dicts, systematically

MISSING = object()
Where = tuple[Any, ...]


def places(value: Any, path: Where = ()) -> Iterator[Where]:
    """Every key of every dict, and every index of every list, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: Where, wrong: Any) -> Any:
    """A copy of a nest, as deep as needed, with something else in one place."""
    (key, *rest) = path
    new = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        new[key] = changed(value[key], tuple(rest), wrong)
    elif wrong is MISSING:
        del new[key]
    else:
        new[key] = wrong
    return new


def wrong_values(value: Any) -> Iterator[Any]:
    """In place of a value: nothing, something of another type, of another shape, or of another dtype."""
    yield MISSING
    yield from (wrong for wrong in (None, "wrong", 2.5, -1, True, [], {}, (), b"") if type(wrong) is not type(value))
    if isinstance(value, Tensor):
        yield from (value[None], value.reshape(-1), value.new_zeros(0), torch.zeros(2, 2, 2, 2, 2))
        if value.numel() > 1:
            yield from (value[:-1], torch.cat([value, value[:1]]))
        for dtype in (torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64):
            if dtype != value.dtype:
                yield value.to(dtype)
    elif isinstance(value, dict):
        yield {**value, "odd": 1}
    elif isinstance(value, list):
        yield value * 2
        if len(value) > 1:
            yield value[::-1]
    elif isinstance(value, str):
        yield value + "x"
    elif type(value) is int:
        yield float(value)


def legal(path: Where, wrong: Any) -> bool:
    """Whether a dict with this in this place is that of another training, and no wrong one."""
    match path:
        case ("optimizers", _, "state", _) | ("optimizers", _, "state", _, "momentum_buffer") if wrong is MISSING:
            return True  # a parameter that has had no gradient yet
        case ("optimizers", _, "param_groups", _, "foreach" | "fused"):
            return wrong is None or isinstance(wrong, bool)
        case ("optimizers", _, "param_groups", _, _):
            return isinstance(wrong, int | float) and not isinstance(wrong, bool)  # another learning rate, say
        case ("capacity",):
            return wrong is None  # of a training without padding
        case ("policy", "masks"):
            return wrong is None  # of a learner that has drawn nothing
    return False


def wrong_dicts(state: dict[str, Any]) -> Iterator[tuple[Where, Any]]:
    for path in places(state):
        value = state
        for key in path:
            value = value[key]
        yield from ((path, wrong) for wrong in wrong_values(value) if not legal(path, wrong))


def all_are_refused_or_harmless(options: dict[str, Any], every: int, differences: Any) -> tuple[int, int]:
    """Try one part of the wrong dicts; returns how many were refused, and how many made no difference."""
    state = advanced(**options).state_dict()
    well = training(seed=4, **options)
    well.load_state_dict(state)
    expected, num_refused, num_harmless = everything(well), 0, 0
    sparse = training(seed=3, **options)
    before = everything(sparse)
    for path, wrong in islice(wrong_dicts(state), 0, None, every):
        try:
            sparse.load_state_dict(changed(state, path, wrong))
        except CheckpointError:
            num_refused += 1
            assert differences(before, everything(sparse)) == [], f"{path} as {wrong!r} left a trace"
        else:
            num_harmless += 1
            assert differences(expected, everything(sparse)) == [], f"{path} as {wrong!r} was taken"
            sparse = training(seed=3, **options)
            before = everything(sparse)
    return num_refused, num_harmless


MUTATED: list[dict[str, Any]] = [
    {"policy": "paper", "coupling": "filter"},
    {"policy": "paper", "coupling": "stream", "align": 4, "optimizer": "adamw"},
    {"policy": "equal_worth", "coupling": "stream"},
]
SOME = [pytest.param(MUTATED[0], marks=pytest.mark.slow), *MUTATED[1:]]


@pytest.mark.parametrize("options", SOME, ids=lambda options: " ".join(map(str, options.values())))
def test_refused_state_dicts_change_nothing(options: dict[str, Any], differences: Any) -> None:
    num_refused, num_harmless = all_are_refused_or_harmless(options, every=10, differences=differences)
    assert num_refused >= 130
    assert num_harmless < num_refused / 10


@pytest.mark.slow
@pytest.mark.parametrize("options", MUTATED, ids=lambda options: " ".join(map(str, options.values())))
def test_all_refused_state_dicts_change_nothing(options: dict[str, Any], differences: Any) -> None:
    num_refused, num_harmless = all_are_refused_or_harmless(options, every=1, differences=differences)
    assert num_refused >= 1390  # one layer is gone, so its parameters have no optimizer state
    assert num_harmless < num_refused / 10


OTHER_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "without memory": lambda tensor: tensor.to("meta"),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "of shared entries": lambda tensor: tensor.flatten()[:1].expand(tensor.shape),
}


def repeated(depth: int = 60) -> Any:
    """A list that contains another one twice, and so on: it has no end for whoever follows it."""
    value: Any = [1]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_tensors_of_other_kinds_are_refused(kind: str, differences: Any) -> None:
    sparse, change = advanced(optimizer="adamw"), OTHER_KINDS[kind]
    state = sparse.state_dict()
    for path in (
        ("model", "head.weight"), ("model", "first.0.weight"), ("masks",), ("random",), ("policy", "keep_probs"),
        ("optimizers", 0, "state", 0, "exp_avg"),
    ):  # fmt: skip
        value = state
        for key in path:
            value = value[key]
        refused(sparse, changed(state, path, change(value)), differences, "of another kind")
    many = torch.zeros(1, dtype=torch.bool).expand(1 << 40, state["masks"].shape[1])
    refused(sparse, {**state, "masks": many}, differences, "of another kind")
    assert differences(run_on(sparse), run_on(advanced(optimizer="adamw"))) == []


def test_lists_without_end_are_refused(differences: Any) -> None:
    sparse = advanced()
    state = sparse.state_dict()
    for path in (
        *((key,) for key in ("format", "coupling", "structure", "num_steps", "removed", "policy", "capacity")),
        *(("optimizers", 0, "param_groups", 0, key) for key in ("lr", "initial_lr")),
        *(("optimizers", 0, "state", 0), ("policy", "keep_probs")),
    ):
        refused(sparse, changed(state, path, repeated()), differences, "more values, or deeper ones")
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    refused(sparse, {**state, "policy": {"x": deep}}, differences, "deeper")
    groups = state["optimizers"][0]["param_groups"]
    groups[0]["initial_lr"] = "wrong"
    refused(sparse, state, differences, "initial_lr='wrong'")


@pytest.mark.parametrize("wrong", [None, [], "slimstart.training/2", torch.zeros(3), {}, 5, {"format": None}])
def test_other_objects_than_state_dicts_are_refused(wrong: Any, differences: Any) -> None:
    refused(training(seed=3), wrong, differences, match="no state dict of SparseTraining")


def test_a_finished_training_loads_nothing(differences: Any) -> None:
    sparse, state = advanced(), advanced().state_dict()
    sparse.finish()
    before = copy.deepcopy(sparse.model.state_dict())
    with pytest.raises(CheckpointError, match="this training is finished"):
        sparse.load_state_dict(state)
    assert differences(before, sparse.model.state_dict()) == []


# --------------------------------------------------------------------------- foreign networks


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


@pytest.mark.parametrize(
    "other",
    [{"policy": "equal_worth"}, {"policy": "paper"}],
    ids=["paper in equal_worth", "equal_worth in paper"],
)
def test_the_state_of_another_policy(other: dict[str, Any], differences: Any) -> None:
    policy = "paper" if other["policy"] == "equal_worth" else "equal_worth"
    state = advanced(policy=policy, coupling="stream").state_dict()
    refused(training(seed=3, coupling="stream", **other), state, differences)


def test_the_state_of_another_keep(differences: Any) -> None:
    refused(training(seed=3), advanced(keep=("first",)).state_dict(), differences, match="structure")


def test_the_state_of_another_optimizer(differences: Any) -> None:
    """An SGD with AdamW's groups and moments would fail at its next step, or worse, not fail."""
    refused(training("sgd", seed=3), advanced(optimizer="adamw").state_dict(), differences)


def test_the_optimizer_of_another_network(differences: Any) -> None:
    state = advanced().state_dict()
    state["optimizers"] = advanced(model=Residual(width=10)).state_dict()["optimizers"]
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
    """The budget is not part of the state: a training resumes from a checkpoint under a tighter one."""
    sparse = training(budget=Channels(0.3))
    sparse.load_state_dict(advanced(budget=Channels(0.6), num_steps=4).state_dict())
    for batch in batches(5):
        sparse.step(loss_fn, *batch)
    assert sparse.expected_cost <= 0.3


# --------------------------------------------------------------------------- narrow state dicts of model and optimizer


def through_a_file(state: Any) -> Any:
    """Saved, and read without executing code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def parts_of(sparse: SparseTraining) -> dict[str, Any]:
    """The three state dicts that a user may have in a checkpoint of their own."""
    parts = {"model": sparse.model, "optimizer": sparse.optimizer, "sparse": sparse}
    return {name: through_a_file(part.state_dict()) for name, part in parts.items()}


def load_part(sparse: SparseTraining, parts: dict[str, Any], name: str) -> None:
    {"model": sparse.model, "optimizer": sparse.optimizer, "sparse": sparse}[name].load_state_dict(parts[name])


def masks_differ(one: SparseTraining, other: SparseTraining) -> bool:
    return not torch.equal(one.mask, other.mask)


CONFIGURATIONS: list[dict[str, Any]] = [*MUTATED, {"policy": "paper", "coupling": "stream", "optimizer": "adamw"}]


IN_ALL_ORDERS = [
    one if one["policy"] == "equal_worth" else pytest.param(one, marks=pytest.mark.slow) for one in CONFIGURATIONS
]


@pytest.mark.parametrize("options", IN_ALL_ORDERS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("order", list(permutations(["model", "optimizer", "sparse"])), ids=" ".join)
def test_the_three_dicts_are_loaded_in_any_order(
    order: tuple[str, ...], options: dict[str, Any], differences: Any
) -> None:
    sparse, fresh = advanced(num_steps=10, **options), training(seed=9, **options)
    assert masks_differ(sparse, fresh)
    parts = parts_of(sparse)
    random = parts["sparse"]["random"]
    expected, end = run_on(sparse), everything(sparse)
    for name in order:
        load_part(fresh, parts, name)
    torch.set_rng_state(random)
    assert differences(through_a_file(fresh.model.state_dict()), parts["model"]) == []
    assert differences(through_a_file(fresh.optimizer.state_dict()), parts["optimizer"]) == []
    assert differences(fresh.state_dict(), parts["sparse"]) == []
    torch.set_rng_state(random)
    assert differences(expected, run_on(fresh)) == []
    assert differences(end, everything(fresh)) == []


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("settled", [False, True], ids=["searching", "settled"])
def test_a_model_state_dict_suffices_for_evaluation_and_finish(
    settled: bool, options: dict[str, Any], differences: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sparse, fresh = advanced(num_steps=10, settled=settled, **options), training(seed=9, **options)
    assert masks_differ(sparse, fresh)
    images, labels = batches(1)[0]
    narrow, mask = through_a_file(sparse.model.state_dict()), sparse.mask
    with torch.no_grad():
        expected = sparse.model.eval()(images)
    parameters = list(fresh.model.parameters())
    fresh.model.load_state_dict(narrow)
    assert all(one is other for one, other in zip(parameters, fresh.model.parameters(), strict=True))
    assert torch.equal(fresh.mask, mask)
    assert differences(dict(narrow), dict(fresh.model.state_dict())) == []
    with torch.no_grad():
        torch.testing.assert_close(fresh.model.eval()(images), expected)
        torch.testing.assert_close(fresh.snapshot().eval()(images), expected)

    weights = copy.deepcopy(fresh.model.state_dict())
    message = r"another structure was loaded without that of SparseTraining and the optimizer.*`finish` works without"
    loss_fn(fresh.model.train(), images, labels).backward()
    with pytest.raises(RuntimeError, match=message):
        fresh.optimizer.step()
    fresh.optimizer.zero_grad()
    before = fresh.num_steps
    for refuse in (lambda: fresh.step(loss_fn, images, labels), fresh.resample, fresh.settle):
        with pytest.raises(RuntimeError, match=message):
            refuse()
    statistics = [name for name in weights if "running" in name or "num_batches" in name]
    weights |= {name: fresh.model.state_dict()[name] for name in statistics}  # of the forward above
    assert differences(dict(weights), dict(fresh.model.state_dict())) == []
    assert fresh.num_steps == before

    fresh.model.load_state_dict(narrow)
    finished = fresh.finish().eval()
    assert finished is fresh.model
    assert torch.equal(fresh.mask, mask)
    with torch.no_grad():
        torch.testing.assert_close(finished(images), expected)
    assert "finished after" not in caplog.text
    finished.train()(images).sum().backward()  # a plain module
    fresh.optimizer.step()


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_an_optimizer_state_of_another_structure_is_refused(options: dict[str, Any], differences: Any) -> None:
    sparse, fresh = advanced(num_steps=10, **options), training(seed=9, **options)
    assert masks_differ(sparse, fresh)  # though shapes may be the same: those of padded networks are here
    images, labels = batches(1)[0]
    before, mask = copy.deepcopy(fresh.model.state_dict()), fresh.mask
    with torch.no_grad():
        expected = fresh.model.eval()(images)
    fresh.optimizer.load_state_dict(through_a_file(sparse.optimizer.state_dict()))
    assert differences(dict(before), dict(fresh.model.state_dict())) == []
    with torch.no_grad():
        assert torch.equal(fresh.model.eval()(images), expected)
    loss_fn(fresh.model.train(), images, labels).backward()
    message = r"another structure was loaded without that of SparseTraining\. .* load the state dict of SparseTraining"
    with pytest.raises(RuntimeError, match=message):
        fresh.optimizer.step()
    fresh.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        fresh.step(loss_fn, images, labels)
    assert torch.equal(fresh.mask, mask)
    bound = Flops(0.4).bind(fresh.graph.costs)
    finished = fresh.finish()
    assert bound.cost(fresh.mask) <= bound.limit
    assert finished(images).shape == (8, 5)


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_partial_load_can_be_followed_by_a_full_one(name: str, differences: Any) -> None:
    sparse, fresh = advanced(num_steps=10), training(seed=9)
    parts = parts_of(sparse)
    expected = run_on(sparse)
    load_part(fresh, parts, name)
    with pytest.raises(RuntimeError, match="without that of"):
        run_on(fresh)
    load_part(fresh, parts, "sparse")
    assert differences(expected, run_on(fresh)) == []


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_narrow_dicts_of_the_present_structure_are_loaded_like_any_other(
    options: dict[str, Any], differences: Any
) -> None:
    """To go back to the best epoch, say, once the structure is final."""
    sparse = advanced(settled=True, **options)
    parts, random = parts_of(sparse), torch.get_rng_state()
    expected = run_on(sparse)
    load_part(sparse, parts, "model")
    load_part(sparse, parts, "optimizer")
    torch.set_rng_state(random)
    assert differences(expected, run_on(sparse)) == []


def test_metadata_of_a_narrow_state_dict_survive_a_file() -> None:
    sparse = advanced()
    state = through_a_file(sparse.model.state_dict())
    found = state._metadata[""]["slimstart"]
    assert torch.equal(found["mask"], sparse.mask)
    assert found["structure"] == sparse.graph.digest
    assert found["attributes"]["first.0", "out_channels"] == sparse.model.first[0].out_channels
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in sparse.model.state_dict().items()
    }
    plain = dict(state)  # without metadata: fits its own structure, and no other
    sparse.model.load_state_dict(plain)
    with pytest.raises(CheckpointError, match=r"does not fit the narrow model .*nothing was loaded"):
        training(seed=9).model.load_state_dict(plain)


def wrong_narrow_dicts() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    def without(state: Any) -> Any:
        del state["first.0.weight"]
        return state

    def with_more(state: Any) -> Any:
        state["odd"] = torch.zeros(1)
        return state

    def wider(state: Any) -> Any:
        state["head.bias"] = torch.zeros(6)
        return state

    def no_tensor(state: Any) -> Any:
        state["first.0.weight"] = 5
        return state

    def of_another_network(state: Any) -> Any:
        return advanced(model=Residual(inner=7)).model.state_dict()

    def of_another_coupling(state: Any) -> Any:
        return advanced(coupling="stream").model.state_dict()

    def without_its_mask(state: Any) -> Any:
        state._metadata[""]["slimstart"]["mask"] = None
        return state

    def with_another_mask(state: Any) -> Any:
        state._metadata[""]["slimstart"]["mask"] = torch.ones(3, dtype=torch.bool)
        return state

    def dense(state: Any) -> Any:
        return Residual().state_dict()

    def of_another_kind(change: Callable[[Tensor], Tensor], key: str) -> Callable[[Any], Any]:
        def made(state: Any) -> Any:
            state[key] = change(state[key])
            return state

        return made

    yield from (
        (f"{key} {kind}", of_another_kind(change, key))
        for kind, change in OTHER_KINDS.items()
        for key in ("first.0.weight", "head.weight")
    )
    made = (
        *(without, with_more, wider, no_tensor, of_another_network, of_another_coupling),
        *(without_its_mask, with_another_mask, dense),
    )
    yield from ((one.__name__, one) for one in made)


@pytest.mark.parametrize("make", [pytest.param(one, id=name) for name, one in wrong_narrow_dicts()])
def test_refused_narrow_state_dicts_change_nothing(make: Callable[[Any], Any], differences: Any) -> None:
    state = make(through_a_file(advanced(num_steps=10).model.state_dict()))
    sparse = training(seed=9)
    before = everything(sparse)
    with pytest.raises((CheckpointError, ValueError, RuntimeError)):
        sparse.model.load_state_dict(state)
    assert differences(before, everything(sparse)) == []
    run_on(sparse, 2)


def test_parameters_are_not_exchanged() -> None:
    sparse = advanced()
    with pytest.raises(CheckpointError, match="`assign=True` would replace parameters"):
        sparse.model.load_state_dict(sparse.model.state_dict(), assign=True)


# --------------------------------------------------------------------------- shrink_to


class Flat(nn.Sequential):
    """Batch norm; depthwise, grouped and transposed convolutions; a layer after a flattened map."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.PReLU(16)),
            *(nn.Conv2d(16, 32, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(32, 24, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(24, 16, 2, groups=2), nn.ReLU(), nn.ConvTranspose2d(16, 12, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)),
        )


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(8, 16), nn.ReLU()),
            *(
                nn.Conv2d(16, 12, 3),
                nn.GroupNorm(12, 12),
                nn.ReLU(),
                nn.Conv2d(12, 12, 3),
                nn.InstanceNorm2d(12, affine=True),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
        )


def wide_vit(attention: type[nn.Module] = ProductAttention) -> nn.Module:
    return ViT(attention=attention, num_heads=8, mlp_dim=256, depth=1)


IMAGES = (torch.zeros(2, 3, 6, 6), lambda: torch.randn(4, 3, 6, 6))
SHRUNK: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Callable[[], Tensor]]]] = {
    "batch norm, depthwise, grouped, transposed": (Flat, IMAGES),
    "group norm": (Normed, IMAGES),
    "residual": (Residual, IMAGES),
    "heads": (wide_vit, (torch.zeros(2, 3, 16, 16), lambda: torch.randn(4, 3, 16, 16))),
    "heads in layers of their own": (
        lambda: wide_vit(SeparateAttention),
        (torch.zeros(2, 3, 16, 16), lambda: torch.randn(4, 3, 16, 16)),
    ),
}


def shrunk_training(name: str) -> tuple[SparseTraining, Callable[[], nn.Module], Callable[[], Tensor]]:
    make, (example, draw) = SHRUNK[name]
    torch.manual_seed(0)
    model = make()
    policy = EqualWorth(resample_every=1, align=1, depth=0)
    sparse = SparseTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), example, Params(0.5), policy=policy, total_steps=15
    )
    for _ in range(3):
        sparse.step(lambda net, x: net(x).square().mean(), draw())
    return sparse, make, draw


def counted(model: nn.Module) -> dict[str, int]:
    """The whole numbers that modules have as attributes."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and name not in ("stream_width",)
    }


@pytest.mark.parametrize("how", ["metadata", "examples"])
@pytest.mark.parametrize("name", SHRUNK)
def test_a_dense_module_becomes_as_narrow_as_a_state_dict(name: str, how: str) -> None:
    sparse, make, draw = shrunk_training(name)
    dense_size = sum(p.numel() for p in make().parameters())
    assert sum(p.numel() for p in sparse.model.parameters()) < 0.6 * dense_size
    x, example = draw(), SHRUNK[name][1][0]
    if how == "metadata":
        state = through_a_file(sparse.model.state_dict())
        found = shrink_to(make(), state)
    else:
        sparse.finish()
        state = through_a_file(dict(sparse.model.state_dict()))
        found = shrink_to(make(), state, example)
    model = sparse.model
    assert counted(found) == counted(model)
    heads = {name for name, value in counted(make()).items() if "num_heads" in name and counted(found)[name] < value}
    assert bool(heads) == ("heads" in name)
    assert [p.shape for p in found.parameters()] == [p.shape for p in model.parameters()]
    outputs = []
    for training_mode, net in product((True, False), (found, model)):
        torch.manual_seed(1)  # of dropout
        with torch.no_grad():
            outputs.append(net.train(training_mode)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert {key: tensor.tolist() for key, tensor in found.state_dict().items()} == {
        key: tensor.tolist() for key, tensor in model.state_dict().items()
    }
    # It is a module like any other: it trains, copies, is loaded again, and begins a sparse training of its own.
    found.train()(x).sum().backward()
    torch.optim.SGD(found.parameters(), lr=0.1).step()
    again = shrink_to(copy.deepcopy(found), state)
    found.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), found.eval()(x))


@pytest.mark.parametrize("name", ["batch norm, depthwise, grouped, transposed", "group norm", "residual"])
def test_layers_of_pytorch_need_neither_metadata_nor_examples(name: str) -> None:
    sparse, make, draw = shrunk_training(name)
    model, x = sparse.finish().eval(), draw()
    found = shrink_to(make(), dict(model.state_dict())).eval()
    assert counted(found) == counted(model)
    with torch.no_grad():
        assert torch.equal(found(x), model(x))


def test_networks_with_stream_ports_cannot_be_shrunk(differences: Any) -> None:
    """Under the coupling of filters, layers may read other channels than a stream carries."""
    sparse, x = advanced(num_steps=10), batches(1)[0][0]
    dense = Residual()
    before = copy.deepcopy(dense.state_dict())
    with pytest.raises(CheckpointError, match=r"ports on residual streams; .*`finish\(plain=True\)`"):
        shrink_to(dense, sparse.model.state_dict())
    assert differences(dict(before), dict(dense.state_dict())) == []
    snapshot = sparse.snapshot()  # as from `finish`
    with pytest.raises(CheckpointError, match=r"ports on residual streams; .*`finish\(plain=True\)`"):
        shrink_to(dense, through_a_file(snapshot.state_dict()))
    model = sparse.finish(plain=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(shrink_to(dense, model.state_dict()).eval()(x), model(x))


@pytest.mark.parametrize(
    "entries",
    [
        {"attributes": {("1", "num_groups"): 1, ("0", "forward"): 3}},
        {"attributes": {("0", "_modules"): 3}},
        {"attributes": {("0", "training"): 0}},
        {"attributes": {("0", "out_channels"): 17}},
        {"attributes": {("0", "out_channels"): -1}},
        {"attributes": {("9", "out_channels"): 1}},
        {"attributes": {("0", 5): 1}},
        {"attributes": {0: 1}},
        {"identities": {"2": 1 << 40}},
        {"identities": {"2": -1}},
        [],
        5,
    ],
)
def test_metadata_change_numbers_of_channels_only(entries: Any) -> None:
    sparse, make, _ = shrunk_training("group norm")
    state = sparse.model.state_dict()
    state._metadata[""]["slimstart"] = entries
    model = make()
    before = counted(model)
    with pytest.raises(CheckpointError, match=r"nothing was changed|is 17 in the state dict and 16 in the model"):
        shrink_to(model, state)
    assert counted(model) == before
    model(torch.zeros(2, 3, 6, 6))


@pytest.mark.parametrize("metadata", [5, [1], {"": 5}, {"": None}])
def test_metadata_of_other_types_are_refused(metadata: Any) -> None:
    sparse, make, _ = shrunk_training("group norm")
    state = sparse.model.state_dict()
    state._metadata = metadata
    with pytest.raises(CheckpointError, match="not those of a module"):
        shrink_to(make(), state)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_module_is_not_shrunk_to_tensors_of_other_kinds(kind: str) -> None:
    sparse, make, _ = shrunk_training("group norm")
    state = sparse.model.state_dict()
    state["0.weight"] = OTHER_KINDS[kind](state["0.weight"])
    model = make()
    before = counted(model)
    with pytest.raises(CheckpointError, match="of another kind"):
        shrink_to(model, state)
    assert counted(model) == before


def test_copies_whose_layers_need_no_ports_are_saved_and_loaded(tmp_path: Path) -> None:
    sparse = advanced()
    assert any(name.endswith("stream_read") for name, _ in sparse.model.named_buffers())
    copied, x = sparse.dense_copy().eval(), batches(1)[0][0]
    slimstart.save(copied, tmp_path / "network")
    loaded = slimstart.load(tmp_path / "network", Residual).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), copied(x))


@pytest.mark.parametrize("padded", [False, True])
def test_a_finished_network_with_ports_refuses_weights_of_other_channels(padded: bool) -> None:
    """Residual writes two layers into one stream; with equal widths, only the positions in the stream differ."""
    found = []
    for kept in ([1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]):
        sparse = training(align=4 if padded else 1)
        mask = torch.ones_like(sparse.mask)
        mask[sparse.graph.filters["second.3"]] = torch.tensor(kept, dtype=torch.bool)
        sparse._structure.settle(mask)
        found.append((through_a_file(sparse.model.state_dict()), sparse.finish()))
    (state, model), (other, _) = found
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in other.items()}
    model.load_state_dict(state)  # the best weights of this training
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"second\.4 is of a network in which this layer reads or writes other"):
        model.load_state_dict(other)


def test_state_dicts_that_do_not_fit_the_module_are_refused(differences: Any) -> None:
    sparse, _, _ = shrunk_training("group norm")
    state = sparse.model.state_dict()
    few = {key: tensor for key, tensor in state.items() if key != "0.weight"}
    for wrong, message in (
        (few, r"differ in 0\.weight"),
        ({**state, "odd": torch.zeros(1)}, "differ in odd"),
        ({**state, "0.weight": torch.zeros(17, 3, 3, 3)}, r"0\.weight is \(17, 3, 3, 3\) in the state dict and \(16, "),
        ({**state, "0.weight": torch.zeros(4)}, r"0\.weight is \(4,\)"),
        ({**state, "0.weight": "wrong"}, r"0\.weight is no tensor"),
        (Flat().state_dict(), "differ in"),
    ):
        model = Normed()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=message):
            shrink_to(model, wrong)
        assert differences(dict(before), dict(model.state_dict())) == []
        assert counted(model) == counted(Normed())
    with pytest.raises(ValueError, match="`model` is in a SparseTraining"):
        shrink_to(sparse.model, state)
    with pytest.raises(CheckpointError, match="differ in"):
        slimstart.shrink_to(Normed(), {})


def test_state_dicts_of_modules_can_be_part_of_a_checkpoint(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict()  # an OrderedDict with metadata
    checkpoints.write({"module": state}, tmp_path / "some.pt")
    found = checkpoints.read(tmp_path / "some.pt")["module"]
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found._metadata == state._metadata  # type: ignore[attr-defined]  # that of PyTorch's state dicts
