"""The methods in the program: when they prune and settle, the FLOPs that they execute, and exact resumption."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimstart.errors import BudgetError, CheckpointError, TraceError
from slimstart.lab import models, records
from slimstart.lab.data import fashion
from slimstart.lab.data.arrays import ArraySet
from slimstart.lab.methods import RELAXATIONS, soft_filter
from slimstart.lab.methods.gated_network import Gated
from slimstart.lab.methods.soft_filter import folded_norms
from slimstart.lab.recipes.recipe import METHODS, Recipe, merged
from slimstart.lab.records import Record
from slimstart.lab.run.environment import Place
from slimstart.lab.run.make_method import Batch, Method, make_method
from slimstart.lab.run.pruned import Pruned
from slimstart.lab.run.relaxed import Relaxed
from tests.integration.test_program import QUICK, SELDOM, Killed, Killer, outcome, started
from tests.tiny_networks import with_dropout

NUM_IMAGES, BATCH, STEPS = 96, 32, 3
TINY = Recipe(
    model="tests.tiny_networks:with_dropout",
    method="l1",
    budget="flops=0.4",
    epochs=2,
    finetune_epochs=2,
    batch_size=BATCH,
    lr=0.05,
    num_masks=3,
)
# 28 x 28 with stride 4, then 2: 7 x 7 and 4 x 4; 8 and 16 filters.
DENSE = 9 * 8 * 49 + 9 * 8 * 16 * 16 + 160
RELAXED = [{"method": "slimstart", "policy": "paper", "estimator": name} for name in RELAXATIONS] + [
    {"method": "grow-efficient"}
]
PRUNED = [{"method": name} for name in ("l1", "soft", "thinet", "provable", "slimming")]


@functools.cache
def _few() -> ArraySet:
    whole = fashion.read()
    train, test = (tuple(part[:number] for part in parts) for parts, number in ((whole.train, 96), (whole.test, 40)))
    return dataclasses.replace(whole, train=train, test=test)


_few()  # read before the fixture replaces `fashion.read`


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the embedded images so few that an epoch has three steps."""
    monkeypatch.setattr(fashion, "read", _few)


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


def flops_of(a: int, b: int) -> int:
    return 9 * a * 49 + 9 * a * b * 16 + 10 * b


def step_flops(a: int, b: int) -> int:
    """A forward and a backward as two, but for the gradient of the images."""
    return BATCH * (3 * flops_of(a, b) - 9 * a * 49)


def widths(record: Record) -> tuple[int, int]:
    a, b, _ = (layer.width for layer in record.layers)
    return a, b


def trained(folder: Path, **settings: Any) -> Record:
    return started(folder, merged(TINY, settings), place=SELDOM).train()


def batches(number: int = 4, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 1, 28, 28, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for _ in range(number)
    ]


def made(steps_per_epoch: int = STEPS, **settings: Any) -> Method:
    """A method around the tiny network, without a program; no dropout, so that networks can be compared."""
    torch.manual_seed(0)
    model = with_dropout(10, 1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return make_method(merged(TINY, settings), model, torch.zeros(1, 1, 28, 28), steps_per_epoch)


def test_the_start_of_a_search_is_the_uniform_network() -> None:
    start = made(method="uniform", budget="flops=0.3")
    search = made(method="slimstart", policy="equal_worth", budget="flops=0.3").sparse  # type: ignore[attr-defined]
    shapes = [[parameter.shape for parameter in net.parameters()] for net in (start.snapshot([]), search.model)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"epochs": 80, "finetune_epochs": 20}, 0.2 * 100 * 10),
        ({"epochs": 100, "settle_at": 0.1}, 0.1 * 100 * 10),
        ({"epochs": 10, "finetune_epochs": 90}, 10 * 10),
    ],
)
def test_an_equal_worth_search_ends_before_the_structure_is_fixed(settings: dict[str, Any], steps: float) -> None:
    sparse = made(steps_per_epoch=10, method="slimstart", policy="equal_worth", **settings).sparse  # type: ignore[attr-defined]
    assert sparse.learner.window * sparse.learner.rounds == pytest.approx(steps, rel=0.05)


# --------------------------------------------------------------------------- stopped and resumed

STOPPED = [
    {"method": "slimstart", "policy": "paper", "estimator": "ste"},
    *(
        pytest.param(settings, marks=pytest.mark.slow)
        for settings in (
            *({"method": name} for name in ("l1", "soft", "slimming", "provable", "random", "grow-efficient")),
            *({"method": name, "rounds": 2} for name in ("l1", "slimming", "thinet", "provable")),
            {"method": "uniform"},
            {"method": "slimstart", "policy": "equal_worth"},
            {"method": "slimstart", "policy": "paper", "settle_at": 0.5, "epochs": 2},
            {"method": "slimstart", "policy": "paper", "estimator": "leave_one_out", "resample_every": 4, "align": 4},
            *({"method": "slimstart", "policy": "paper", "estimator": name} for name in RELAXATIONS if name != "ste"),
            *({"method": name, "finetune_epochs": 0} for name in ("soft", "slimming", "grow-efficient")),
            {"method": "grow-efficient", "epochs": 2, "settle_at": 0.5},
            {"method": "l1", "protocol": "uniform"},
        )
    ),
]


@pytest.mark.parametrize("settings", STOPPED, ids=name_of)
def test_a_run_killed_in_every_other_step_resumes_exactly(
    tmp_path: Path, settings: dict[str, Any], differences: Callable[[Any, Any], list[str]]
) -> None:
    """Every step and every cut runs twice: once before a kill, and once after resuming from a checkpoint."""
    recipe = merged(TINY, {"epochs": 1, "batch_size": 48, **settings})
    started(tmp_path / "whole", recipe, place=SELDOM).train()
    stops = 0
    while True:
        torch.manual_seed(stops)  # whatever another process has drawn
        try:
            started(tmp_path / "parts", recipe, watcher=Killer(steps=1), place=QUICK).train()
            break
        except Killed:
            stops += 1
    assert stops >= recipe.total_epochs * 2
    assert differences(outcome(tmp_path / "whole"), outcome(tmp_path / "parts")) == []


@pytest.mark.parametrize(
    "settings", [{"method": "random"}, {"method": "l1"}, {"method": "grow-efficient"}], ids=name_of
)
def test_a_checkpoint_of_another_method_or_network_is_refused(settings: dict[str, Any]) -> None:
    method = made(**settings)
    with pytest.raises(CheckpointError, match="of another method"):
        method.load_state_dict({**method.state_dict(), "more": 0})
    state = method.state_dict()
    state["network"] = nn.Linear(2, 2).state_dict()
    with pytest.raises(CheckpointError, match="of another network"):
        method.load_state_dict(state)


# --------------------------------------------------------------------------- train, cut, train on


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_cuts_are_spread_over_the_epochs_of_fine_tuning(tmp_path: Path, rounds: int) -> None:
    record = trained(tmp_path / "run", method="slimming", budget="flops=0.2", rounds=rounds, finetune_epochs=6)
    assert [epoch.phase for epoch in record.history] == ["train"] * 2 + ["finetune"] * 6
    ratios = [epoch.flops_ratio for epoch in record.history]
    assert ratios[:2] == [1, 1]
    for number in range(rounds):
        first, end = 2 + 6 * number // rounds, 2 + 6 * (number + 1) // rounds
        wanted = 0.2 ** ((number + 1) / rounds)
        assert len(set(ratios[first:end])) == 1
        assert 0.75 * wanted < ratios[first] <= wanted
    assert ratios[-1] == pytest.approx(record.flops_ratio)
    assert [epoch.formula_ratio for epoch in record.history] == pytest.approx(ratios)
    assert record.train_cost_saving == pytest.approx(8 / sum(ratios))


@pytest.mark.parametrize(
    ("method", "budget", "rounds"),
    [
        ("l1", "params=0.3", 2),
        ("slimming", "channels=0.5", 1),
        ("thinet", "flops=0.5+params=0.3", 2),
        *(
            pytest.param(settings["method"], budget, rounds, marks=pytest.mark.slow)
            for settings in PRUNED
            for budget in ("flops=0.3", "params=0.3", "channels=0.5")
            for rounds in (1, 2)
            if (settings["method"], budget, rounds) not in {("l1", "params=0.3", 2), ("slimming", "channels=0.5", 1)}
        ),
    ],
)
def test_the_pruned_network_is_within_the_budget(tmp_path: Path, method: str, budget: str, rounds: int) -> None:
    record = trained(tmp_path / "run", method=method, budget=budget, rounds=rounds, epochs=1)
    a, b = widths(record)
    assert record.flops == flops_of(a, b)
    params = [(9 * a + 3 * a) + (9 * a * b + 3 * b) + 10 * b + 10 for a, b in ((a, b), (8, 16))]
    ratio = {"flops": flops_of(a, b) / DENSE, "params": params[0] / params[1], "channels": (a + b) / 24}
    taken = [ratio[kind] / float(fraction) for kind, fraction in records.budget_parts(budget)]
    assert 0.7 < max(taken) <= 1


def test_the_ledger_counts_training_before_and_after_pruning(tmp_path: Path) -> None:
    record = trained(tmp_path / "run", finetune_epochs=3)
    a, b = widths(record)
    # Curves: the whole network, and each of two layers at six widths, masked, on the three batches there are.
    selection = (1 + 6 + 6) * NUM_IMAGES * DENSE
    dense, small = STEPS * step_flops(8, 16), STEPS * step_flops(a, b)
    assert [epoch.train_flops for epoch in record.history] == [dense, dense, selection + small, small, small]
    assert record.train_flops == 2 * dense + selection + 3 * small
    assert record.dense_train_flops == 5 * dense
    assert record.train_cost_saving == pytest.approx(5 / (2 + 3 * flops_of(a, b) / DENSE))


@pytest.mark.parametrize("method", ["slimming", "soft"])
def test_without_fine_tuning_pruning_comes_last(tmp_path: Path, method: str) -> None:
    record = trained(tmp_path / "run", method=method, finetune_epochs=0)
    a, b = widths(record)
    assert [epoch.phase for epoch in record.history] == ["train", "train"]
    assert [epoch.flops_ratio for epoch in record.history] == [1, 1]
    assert record.flops == flops_of(a, b) <= 0.4 * DENSE
    # Statistics are measured again on the three batches of the data.
    assert record.train_flops == 2 * STEPS * step_flops(8, 16) + NUM_IMAGES * flops_of(a, b)


def test_the_penalty_adds_the_sign_of_every_scale_to_the_gradient() -> None:
    settings = {"method": "slimming", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0}
    after = []
    for penalty in (0.0, 0.01):
        method = made(penalty=penalty, **settings)
        network = method.snapshot([])
        scales = torch.linspace(-1, 1, 8), torch.linspace(-2, 0, 16)  # and one that is zero: it has no sign
        with torch.no_grad():
            network.get_parameter("1.weight").copy_(scales[0])
            network.get_parameter("4.weight").copy_(scales[1])
        loss = method.step(*batches(1)[0])
        after.append((float(loss), {name: p.detach().clone() for name, p in network.named_parameters()}))
    assert after[1][0] - after[0][0] == pytest.approx(0.01 * float(scales[0].abs().sum() + scales[1].abs().sum()))
    for name, plain in after[0][1].items():
        signs = {"1.weight": scales[0].sign(), "4.weight": scales[1].sign()}.get(name, torch.zeros_like(plain))
        torch.testing.assert_close(after[1][1][name], plain - 0.5 * 0.01 * signs, rtol=0, atol=1e-6)


def test_the_penalty_ends_with_pruning() -> None:
    found = []
    for penalty in (0.0, 1.0):
        method = made(method="slimming", penalty=penalty)
        method.begin_epoch(2, batches())
        found.append(float(method.step(*batches(1)[0])))
    assert found[0] == found[1]


def zeroed(network: nn.Module) -> dict[str, list[int]]:
    """Filters of each layer that are zero: their normalisation is."""
    return {
        name: [i for i, row in enumerate(network.get_parameter(f"{norm}.weight")) if abs(row.item()) < 1e-4]
        for name, norm in (("0", "1"), ("3", "4"))
    }


def test_soft_pruning_epoch_by_epoch(differences: Callable[[Any, Any], list[str]]) -> None:
    method, data = made(method="soft", protocol="folded", epochs=8, lr=2.0, finetune_epochs=1), batches(3)
    assert isinstance(method, Pruned)
    network, gone, returned = method._stage.network, [], 0
    for epoch in range(8):
        norms = folded_norms(network, method.graph).tolist()
        method.begin_epoch(epoch, data)
        now = zeroed(network)
        if epoch == 0:
            assert now == {"0": [], "3": []}
        else:
            a, b = 8 - len(now["0"]), 16 - len(now["3"])
            assert flops_of(a, b) <= 0.4 * DENSE < flops_of(a, b + 1)
            assert abs(a / 8 - b / 16) <= 1 / 16
            assert now["0"] == sorted(sorted(range(8), key=lambda i: norms[i])[: 8 - a])
            assert now["3"] == sorted(sorted(range(16), key=lambda i: norms[8 + i])[: 16 - b])
            gone.append(now)
        for batch in data:
            method.step(*batch)
        assert epoch == 0 or zeroed(network) != now  # what was zero has moved
        before = copy.deepcopy(method.state_dict())
        shown = method.snapshot(data)
        assert differences(before, method.state_dict()) == []
        assert sum(map(len, zeroed(shown).values())) >= 24 - 16
    for then, later in itertools.pairwise(gone):
        returned += len(set(then["3"]) - set(later["3"])) + len(set(then["0"]) - set(later["0"]))
    assert returned > 0
    method.begin_epoch(8, data)  # the last time, and what is zero then is cut out
    assert method.flops <= 0.4 * DENSE
    left = [i for i in range(16) if i not in zeroed(network)["3"]]
    rows = [i for i in range(8) if i not in zeroed(network)["0"]]
    wanted = network.get_parameter("3.weight")[left][:, rows]
    assert torch.equal(method.finish(data).get_parameter("3.weight"), wanted)


def test_the_uniform_protocol_of_soft_pruning_zeroes_nothing_while_training() -> None:
    method = made(method="soft", protocol="uniform")
    assert isinstance(method, Pruned)
    network = method._stage.network
    method.begin_epoch(1, batches())
    assert zeroed(network) == zeroed(method.snapshot([])) == {"0": [], "3": []}
    kept = soft_filter.mask(network, method.graph, method._bound, "uniform")
    wanted = network.get_parameter("0.weight")[kept[:8]]
    method.begin_epoch(2, batches())
    assert torch.equal(method.snapshot([]).get_parameter("0.weight"), wanted)


def test_impossible_settings_are_refused_before_training(tmp_path: Path) -> None:
    for settings in (*PRUNED, *RELAXED, {"method": "random"}):
        with pytest.raises(BudgetError, match="feasible from"):
            made(**settings, budget="flops=0.0001")
    bare = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    with pytest.raises(TraceError, match="network slimming needs a batch norm"):
        make_method(merged(TINY, {"method": "slimming"}), bare, torch.zeros(1, 1, 28, 28), 3)


# --------------------------------------------------------------------------- gates on the dense network


@pytest.mark.parametrize("settings", RELAXED, ids=name_of)
def test_the_pruned_network_equals_the_gated_one(settings: dict[str, Any]) -> None:
    method, data = made(**settings, lr=0.2), batches()
    assert isinstance(method, Relaxed)
    network = method._stage.network
    for epoch in range(2):
        method.begin_epoch(epoch, data)
        for batch in data[:STEPS]:
            method.step(*batch)
    assert method.searching
    values = method.gates.values()
    method.begin_epoch(2, data)
    assert not method.searching
    mask = method.keep_probs
    assert mask is not None
    assert set(mask.tolist()) <= {0.0, 1.0}
    gated = Gated(network, method.graph, lambda: mask.float() * values).train()
    images, _ = data[0]
    left = copy.deepcopy(method.finish(data)).train()
    torch.testing.assert_close(left(images), gated(images), rtol=1e-4, atol=1e-5)
    a, b = int(mask[:8].sum()), int(mask[8:].sum())
    assert method.flops == flops_of(a, b)
    assert method.expected_cost == pytest.approx(flops_of(a, b) / DENSE)
    if settings["method"] != "grow-efficient":
        assert method.flops <= 0.4 * DENSE
    method.step(*data[0])  # plain steps from here on


@pytest.mark.parametrize("settings", RELAXED, ids=name_of)
def test_a_snapshot_does_not_change_a_search(
    settings: dict[str, Any], differences: Callable[[Any, Any], list[str]]
) -> None:
    method, data = made(**settings), batches()
    method.begin_epoch(0, data)
    method.step(*data[0])
    before, random = copy.deepcopy(method.state_dict()), torch.get_rng_state()
    total = method.ledger.total
    shown = method.snapshot(data)
    assert differences(before, method.state_dict()) == []
    assert torch.equal(random, torch.get_rng_state())
    assert method.ledger.total == total  # validation is no part of training
    assert sum(p.numel() for p in shown.parameters()) < sum(p.numel() for p in with_dropout(10, 1).parameters())


def test_gates_receive_the_progress_of_the_search() -> None:
    method, data = made(method="slimstart", policy="paper", estimator="gumbel", epochs=4, settle_at=0.5), batches(STEPS)
    assert isinstance(method, Relaxed)
    temperatures = []
    for epoch in range(2):
        method.begin_epoch(epoch, data)
        for batch in data:
            method.step(*batch)
            temperatures.append(float(method.gates.temperature))  # type: ignore[arg-type]
    assert temperatures == pytest.approx([1 - 0.97 * k / 6 for k in range(6)])
    method.begin_epoch(2, data)
    method.step(*data[0])
    assert float(method.gates.temperature) == pytest.approx(temperatures[-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["ste", "soft_threshold"])
def test_a_search_with_gates_executes_the_dense_network(tmp_path: Path, estimator: str) -> None:
    record = trained(tmp_path / "run", method="slimstart", policy="paper", estimator=estimator, settle_at=0.5, epochs=4)
    assert [epoch.phase for epoch in record.history] == ["search"] * 2 + ["train"] * 2 + ["finetune"] * 2
    a, b = widths(record)
    dense, small = STEPS * step_flops(8, 16), STEPS * step_flops(a, b)
    found = [epoch.train_flops for epoch in record.history]
    assert found[:2] == [dense] * 2
    assert found[3:] == [small] * 3
    choosing = found[2] - small  # the candidates, as narrow as they are, and statistics on the three batches there are
    assert NUM_IMAGES * flops_of(a, b) <= choosing <= 4 * NUM_IMAGES * 0.4 * DENSE
    assert [epoch.flops_ratio for epoch in record.history] == [1] * 2 + [record.flops_ratio] * 4
    assert [epoch.formula_ratio for epoch in record.history] == [1] * 2 + [None] * 4
    assert record.train_cost_saving == 1
    assert flops_of(a, b) <= 0.4 * DENSE


def test_the_formula_of_grow_efficient_by_hand() -> None:
    method, data = made(method="grow-efficient", epochs=6), batches()
    assert isinstance(method, Relaxed)
    seen = set()
    for epoch in range(6):
        method.begin_epoch(epoch, data)
        drawn: Tensor = method.gates.q  # type: ignore[assignment]
        a, b = int(drawn[:8].sum()), int(drawn[8:].sum())
        method.step(*data[0])
        assert method.formula_flops == flops_of(a, b) + 2 * DENSE
        assert method.flops == DENSE  # as executed
        seen.add((a, b))
    assert len(seen) > 1
    assert method.ledger.total == 6 * 8 * (3 * DENSE - 9 * 8 * 49)
    method.begin_epoch(6, data)
    assert method.formula_flops is None


# --------------------------------------------------------------------------- every method on every network

EVERY = [{"method": name} for name in METHODS if name != "grow-efficient"] + RELAXED


def _pairs() -> Iterator[Any]:
    for model in models.MODELS:
        for settings in EVERY:
            if settings["method"] == "shallow" and model == "small":  # which has no siblings
                continue
            quick = (model, name_of(settings)) in {("resnet20", "slimming"), ("small", "slimstart-soft_threshold")}
            yield pytest.param(
                model, settings, marks=() if quick else pytest.mark.slow, id=f"{model}-{name_of(settings)}"
            )


def run_on(folder: Path, model: str, settings: dict[str, Any], place: Place) -> None:
    narrow = {"resnet50": 0.0625, "wrn28_10": 0.0125, "resnet20": 0.25, "resnet32": 0.25}
    few = {"validation": 64, "epochs": 1, "finetune_epochs": 1}  # 32 images are left: an epoch is one step
    recipe = merged(TINY, {"model": model, "width": narrow.get(model, 0.125), "budget": "flops=0.5", **few})
    if settings["method"] == "shallow":  # one sibling, for a choice needs validation images of its own
        settings = settings | {"stages": models.siblings(model)[1]}
    record = started(folder, merged(recipe, settings), place=place).train()
    assert [epoch.epoch for epoch in record.history] == [1, 2]
    assert 0 <= record.accuracy <= 100
    if settings["method"] == "dense":
        assert record.flops_ratio == 1
    elif settings["method"] == "grow-efficient":
        assert 0 < record.flops_ratio < 1
    else:
        assert 0.2 < record.flops_ratio <= 0.5


@pytest.mark.parametrize(("model", "settings"), list(_pairs()))
def test_every_method_trains_every_network(tmp_path: Path, model: str, settings: dict[str, Any]) -> None:
    run_on(tmp_path / "run", model, settings, SELDOM)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", EVERY, ids=name_of)
def test_every_method_on_a_gpu(tmp_path: Path, settings: dict[str, Any]) -> None:
    run_on(tmp_path / "run", "resnet20", settings, dataclasses.replace(SELDOM, device="cuda"))
