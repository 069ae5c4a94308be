"""Budgets of time, on a simulated device whose times are known; and that real networks are timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn

from slimstart import (
    BudgetError,
    CheckpointError,
    EqualWorth,
    Flops,
    Latency,
    Params,
    SparseTraining,
    load_table,
    measure_latency,
    save_table,
    trace,
)
from slimstart.costs import PARTS, CostTable, LatencyTable
from slimstart.graph import ChannelGraph
from slimstart.lab import models
from slimstart.narrow import compact
from slimstart.policies import Paper
from slimstart.policies.depth import layers_to_remove
from slimstart.policies.latency import non_negative
from tests.integration.test_training_without_layers import ReadsWeights
from tests.layer_policy import Rounds

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])
LAUNCH, PAIR, WEIGHT = 0.5, 2e-3, 1e-4  # milliseconds


class Device:
    """A clock, and networks whose runs take time for every layer, and for every pair of channels and position.

    Args:
        slower: factor of the times of narrow networks, which the dense one does not have.
        block: channels are computed in blocks of so many.
    """

    def __init__(self, slower: float = 1.0, block: int = 1, launch: float = LAUNCH) -> None:
        self.now, self.slower, self.block, self.launch = 0.0, slower, block, launch
        self.drift = 1.0

    def milliseconds(self, network: nn.Module) -> float:
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        filters = sum(m.weight.shape[0] for m in layers)
        pairs = sum(self._blocks(m.weight.shape[0]) * self._blocks(m.weight.shape[1]) for m in layers)
        own = self.launch * len(layers) + PAIR * pairs + WEIGHT * sum(m.weight.numel() for m in layers)
        return own * (self.slower if filters < 528 else 1.0)

    def _blocks(self, width: int) -> int:
        return self.block * -(-width // self.block)

    def __call__(self, network: nn.Module) -> Any:
        def run() -> None:
            self.now += 1e-3 * self.drift * self.milliseconds(network)

        return run

    def clock(self) -> float:
        return self.now


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("vgg16", num_classes=4, width=0.125)


def measured(device: Device, **settings: Any) -> LatencyTable:
    return measure_latency(make(), IMAGES, device, num_networks=60, repeats=1, clock=device.clock, **settings)


@pytest.fixture(scope="module")
def table() -> LatencyTable:
    return measured(Device())


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return trace(make(), IMAGES[:2], "stream", norms="shrink")


@pytest.fixture(scope="module")
def costs(graph: ChannelGraph) -> CostTable:
    return graph.costs


def test_times_of_other_networks_are_estimated(table: LatencyTable, graph: ChannelGraph) -> None:
    """Also without some layers."""
    device = Device()
    assert device.milliseconds(make()) == pytest.approx(table.dense_ms)
    generator = torch.Generator().manual_seed(1)
    for share in (0.2, 0.5, 0.8):
        for number in (0, 2, 6):
            shorter = graph.without(layer.name for layer in graph.layers[:number])
            mask = torch.rand(graph.num_units, generator=generator) < share
            estimate = Latency(1.0, table).bind(shorter.costs).cost(mask)
            truth = device.milliseconds(compact(make(), shorter.select(mask)))
            assert estimate == pytest.approx(truth, rel=max(0.06, 1.5 * table.error))
    assert table.error < 0.06


def train(sparse: SparseTraining, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    seen = []
    while not sparse.settled:
        F.cross_entropy(sparse.model(IMAGES), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sparse.snapshot())
    return seen


def networks(table: LatencyTable, budget: Any, **settings: Any) -> list[nn.Module]:
    """All networks of a short training."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = EqualWorth(resample_every=1, search_steps=4, **settings)
    sparse = SparseTraining(model, optimizer, IMAGES[:2], budget, policy=policy)
    return [sparse.snapshot(), *train(sparse, optimizer), sparse.finish()]


@pytest.mark.parametrize("budget", ["a fraction", "milliseconds", "with parameters"])
def test_the_network_takes_as_long_as_it_may_in_every_step(table: LatencyTable, budget: str) -> None:
    latency = Latency.of(0.5 * table.dense_ms, table) if budget == "milliseconds" else Latency(0.5, table)
    given = [latency, Params(0.3)] if budget == "with parameters" else latency
    dense_params = sum(p.numel() for p in make().parameters())
    for network in networks(table, given):
        of_the_budget = Device().milliseconds(network) / (0.5 * table.dense_ms)
        params = sum(p.numel() for p in network.parameters()) / dense_params
        assert of_the_budget <= 1
        if budget == "with parameters":
            assert params <= 0.3
            assert of_the_budget > 0.9 or params > 0.28
        else:
            assert of_the_budget > 0.9


@pytest.mark.parametrize("fraction", [pytest.param(0.7, marks=pytest.mark.slow), 0.4])
def test_wrong_estimates_are_corrected(fraction: float) -> None:
    """Narrow networks take half as long again as any sum of the parts says, and channels come in blocks."""
    device = Device(block=8)
    table = measured(device)
    device.slower = 1.5
    estimated = networks(replace(table, timer=None), Latency(fraction, table=replace(table, timer=None)), align=1)
    assert device.milliseconds(estimated[-1]) > 1.2 * fraction * table.dense_ms
    for network in networks(table, Latency(fraction, table), align=1):
        assert 0.85 < device.milliseconds(network) / (fraction * table.dense_ms) <= 1


def test_a_device_that_becomes_slower_does_not_look_like_a_slow_network(table: LatencyTable) -> None:
    device = Device()
    own = measured(device)
    assert own.parts == table.parts
    device.drift = 3.0
    for network in networks(own, Latency(0.5, own)):
        assert 0.9 < device.milliseconds(network) / (0.5 * own.dense_ms) <= 1


def test_the_rule_for_depth_sees_the_flops_that_a_budget_of_time_allows(costs: CostTable) -> None:
    """Where layers take most of the time, fewer remain: all of them would leave few FLOPs."""
    number = []
    for launch in (0.0, 10 * LAUNCH):
        table = measured(Device(launch=launch))
        budget = Latency(0.4, table)
        removed = layers_to_remove(costs, budget)
        left, count = costs.without(removed), len(costs.layers)
        share = budget.flops_share(left)
        assert count - len(removed) <= round(count * share**0.6)
        one_more = costs.without(removed[1:])
        assert len(one_more.layers) > round(count * budget.flops_share(one_more) ** 0.6)
        # The network with these layers fills the budget.
        whole = torch.ones(costs.num_units, dtype=torch.bool)
        bound = budget.bind(left)
        assert bound.cost(whole) >= bound.limit
        number.append(len(removed))
    assert number[0] < number[1]
    assert Flops(0.4).flops_share(costs) == 0.4


def test_a_table_of_another_network_is_refused(table: LatencyTable, costs: CostTable) -> None:
    with pytest.raises(BudgetError, match="`table` was measured on another network, or with another coupling"):
        Latency(0.5, table).bind(trace(models.build("resnet20", num_classes=4), IMAGES[:2]).costs)
    with pytest.raises(BudgetError, match=r"`Latency\(0.001\)` allows .* milliseconds, .*feasible from 0\.\d+ to 1"):
        Latency(0.001, table).bind(costs)
    with pytest.raises(BudgetError, match=r"`fraction` of `Latency` is 2.0; it must be in \(0, 1\]"):
        Latency.of(2 * table.dense_ms, table)


def test_the_papers_policy_uses_the_estimate(table: LatencyTable, costs: CostTable) -> None:
    def refuse(*_: Any) -> float:
        raise AssertionError("it draws a network every few steps")

    budget = Latency(0.5, replace(table, timer=refuse))
    search = Paper().start(costs, budget)
    bound = budget.bind(costs)
    search.draw()
    assert float(bound.expected(search.keep_probs)) <= bound.limit
    assert bound.cost(search.best_guess()) <= bound.limit


WRONG = [("number", {"dense_ms": value}) for value in ("5", -1.0, float("nan"), float("inf"), None)]
WRONG += [("number", {"dense_ms": value}) for value in (0, 1e30)]
WRONG += [("part", {"parts": {**dict.fromkeys(PARTS, 0.1), "layers": value}}) for value in (-1, 1e30, "few")]
WRONG += [("parts", {"parts": parts}) for parts in ({}, {"layers": 0.1}, dict.fromkeys((*PARTS, "more"), 0.1))]


def test_a_table_is_kept_in_a_file(table: LatencyTable, tmp_path: Path) -> None:
    save_table(table, tmp_path / "table.json")
    assert load_table(tmp_path / "table.json") == table
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["batch"] == "(4, 3, 16, 16)"
    assert (content["precision"], content["mode"]) == ("float32", "Device")
    for name, change in (("newer", {"version": 4}), ("other", {"parts": 3}), ("more", {"colour": "red"}), *WRONG):
        (tmp_path / name).write_text(json.dumps(content | change))
        with pytest.raises(CheckpointError, match=name):
            load_table(tmp_path / name)
    (tmp_path / "list").write_text("[]")
    for name in ("list", "missing"):
        with pytest.raises(CheckpointError, match="cannot be read as a table of latencies"):
            load_table(tmp_path / name)


def test_a_table_from_a_file_gets_its_timer_back(table: LatencyTable, tmp_path: Path) -> None:
    save_table(table, tmp_path / "table.json")
    saved = load_table(tmp_path / "table.json")
    assert saved.timer is None
    device = Device(slower=1.5)
    again = measure_latency(make(), IMAGES, device, repeats=1, clock=device.clock, table=saved)
    assert again == saved
    assert device.now == 0
    for network in networks(again, Latency(0.5, again)):
        assert device.milliseconds(network) <= 0.5 * table.dense_ms
    with pytest.raises(BudgetError, match="`table` was measured on another network, or in another `mode`"):
        measure_latency(make(), IMAGES, "inference", table=saved)


class ReadsNothing(ReadsWeights):
    """The same layers, all of which can go."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def test_table_and_training_count_the_same_layers() -> None:
    """Both without those that turn out not to be removable."""
    x, device = torch.randn(4, 12), Device()

    def measured_on(model: nn.Module) -> LatencyTable:
        return measure_latency(model, x, device, num_networks=20, repeats=1, clock=device.clock)

    def train(table: LatencyTable) -> SparseTraining:
        model = ReadsWeights()
        return SparseTraining(
            model, torch.optim.SGD(model.parameters(), 0.1), x, Latency(0.9, table), policy=Rounds((0,))
        )

    sparse = train(measured_on(ReadsWeights()))
    assert [layer.name for layer in sparse.graph.removed] == ["blocks.2"]
    assert [layer.name for layer in sparse.graph.layers] == ["blocks.4"]
    with pytest.raises(BudgetError, match="was measured on another network"):
        train(measured_on(ReadsNothing()))


@pytest.mark.parametrize("share", [0.48, 0.75])
def test_a_budget_that_is_never_met_is_reported(
    table: LatencyTable, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    always = replace(table, timer=lambda mask, removed: share)
    networks(always, Latency(0.5, always))
    assert ("the network takes 1.50 times its budget" in caplog.text) == (share == 0.75)


def test_a_budget_can_be_a_key(table: LatencyTable) -> None:
    assert {Latency(0.5, table): 1}[Latency(0.5, table)] == 1


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 1024), nn.Linear(1024, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.dropout(torch.relu(self.first(x)), 0.1, self.training))
        return out


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_real_networks_are_timed_and_left_alone(mode: str) -> None:
    model = Two()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    table = measure_latency(model, torch.randn(64, 128, generator=torch.Generator()), mode, num_networks=8, repeats=2)
    assert table.dense_ms > 0
    assert sum(table.parts.values()) > 0
    assert (table.mode, table.batch) == (mode, "(64, 128)")
    assert table.timer is not None
    with torch.no_grad():  # as within the step of an optimizer
        assert 0 < table.timer(torch.arange(1024) < 64, ()) < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_networks_are_not_timed_in_several_processes(table: LatencyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(BudgetError, match="the times of several processes differ, but their networks must not"):
        networks(table, Latency(0.5, table))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`mode` is 'fast'; it must be one of 'inference', 'training', or a function"):
        measure_latency(Two(), torch.randn(4, 128), "fast")
    with pytest.raises(ValueError, match="`num_networks` is 0; it must be a whole number"):
        measure_latency(Two(), torch.randn(4, 128), num_networks=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(8, 30))
def test_the_fit_is_that_of_a_general_solver(seed: int, num_parts: int, num_rows: int) -> None:
    generator = np.random.default_rng(seed)
    relative = generator.uniform(0.1, 5, (num_rows, num_parts)) / generator.uniform(1, 10, num_rows)[:, None]
    expected, _ = nnls(relative, np.ones(num_rows))
    np.testing.assert_allclose(non_negative(relative), expected, rtol=0, atol=1e-5 * expected.max())
