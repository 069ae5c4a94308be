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
    Latency,
    Params,
    SparseTraining,
    load_table,
    measure_latency,
    save_table,
    trace,
)
from slimstart.costs import CostTable, LatencyTable
from slimstart.lab import models
from slimstart.narrow import compact
from slimstart.policies import Paper
from slimstart.policies.latency import AIM, PICOSECONDS, non_negative

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


class Device:
    """A clock, and networks whose runs take 3 ms, 2 us for a pair of channels, 30 us for a filter; late layers half."""

    def __init__(self) -> None:
        self.now = 0.0

    @staticmethod
    def milliseconds(network: nn.Module) -> float:
        layers = [m.weight.shape for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        factors = np.linspace(1, 0.5, 14)
        return 3.0 + sum(
            float(f) * (0.002 * shape[0] * shape[1] + 0.03 * shape[0])
            for f, shape in zip(factors, layers, strict=False)
        )

    def __call__(self, network: nn.Module) -> Any:
        def run() -> None:
            self.now += 1e-3 * self.milliseconds(network)

        return run

    def clock(self) -> float:
        return self.now


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("vgg16", num_classes=4, width=0.125)


@pytest.fixture(scope="module")
def table() -> LatencyTable:
    device = Device()
    return measure_latency(make(), IMAGES, 0.5, device, num_networks=60, repeats=1, clock=device.clock)


def costs() -> CostTable:
    return trace(make(), IMAGES[:2], "stream", norms="shrink").costs


def test_times_of_other_networks_are_estimated(table: LatencyTable) -> None:
    assert table.error < 1e-3
    assert table.dense_ms == pytest.approx(Device.milliseconds(make()))
    graph = trace(make(), IMAGES[:2], "stream", norms="shrink")
    bound = Latency(1.0, table).bind(graph.costs)
    generator = torch.Generator().manual_seed(1)
    for share in (0.2, 0.5, 0.8):
        mask = torch.rand(graph.num_units, generator=generator) < share
        network = compact(make(), graph.select(mask))
        assert bound.cost(mask) / PICOSECONDS == pytest.approx(Device.milliseconds(network), rel=0.02)


def train(sparse: SparseTraining, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    seen = []
    while not sparse.settled:
        F.cross_entropy(sparse.model(IMAGES), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(sparse.snapshot())
    return seen


@pytest.mark.parametrize("budget", ["a fraction", "milliseconds", "with parameters"])
def test_the_network_takes_as_long_as_it_may_in_every_step(table: LatencyTable, budget: str) -> None:
    model = make()
    dense_params = sum(p.numel() for p in model.parameters())
    latency = Latency.of(0.5 * table.dense_ms, table) if budget == "milliseconds" else Latency(0.5, table)
    given = [latency, Params(0.3)] if budget == "with parameters" else latency
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = EqualWorth(resample_every=1, search_steps=4)
    sparse = SparseTraining(model, optimizer, IMAGES[:2], given, policy=policy)
    for network in [*train(sparse, optimizer), sparse.finish()]:
        of_the_budget = Device.milliseconds(network) / (0.5 * table.dense_ms)
        params = sum(p.numel() for p in network.parameters()) / dense_params
        assert of_the_budget < 1
        if budget == "with parameters":
            assert params <= 0.3
            assert of_the_budget > 0.9 or params > 0.28
        else:
            assert of_the_budget > 0.97 * AIM


def test_layers_that_are_removed_take_no_time(table: LatencyTable) -> None:
    """But their part of the constant, which is not known."""
    graph = trace(make(), IMAGES[:2], "stream", norms="shrink")
    names = [layer.name for layer in graph.layers[:2]]
    short = graph.without(names)
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    whole, less = (Latency(1.0, table).bind(one.costs).cost(mask) / PICOSECONDS for one in (graph, short))
    widths = [make().get_submodule(name).weight.shape for name in names]
    positions = [name for name, m in make().named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    factors = np.linspace(1, 0.5, 14)
    gone = sum(
        float(factors[positions.index(name)]) * (0.002 * shape[0] * shape[1] + 0.03 * shape[0])
        for name, shape in zip(names, widths, strict=True)
    )
    assert whole - less == pytest.approx(gone, rel=0.1)


def test_most_networks_are_measured_at_the_budget() -> None:
    device, seen = Device(), []

    def prepare(network: nn.Module) -> Any:
        seen.append(device.milliseconds(network))
        return device(network)

    table = measure_latency(make(), IMAGES, 0.4, prepare, num_networks=60, repeats=1, clock=device.clock)
    dense = device.milliseconds(make())
    narrow = [time / dense for time in seen if time != dense]
    assert len(narrow) == table.num_networks == 60
    assert max(narrow[:20]) > 0.6  # the first third is of any size
    assert all(0.9 * 0.4 < share < 0.4 for share in narrow[30:])  # once the estimates are good, at the budget


def test_a_table_of_another_network_is_refused(table: LatencyTable) -> None:
    with pytest.raises(BudgetError, match="`table` was measured on another network, or with another coupling"):
        Latency(0.5, table).bind(trace(models.build("resnet20", num_classes=4), IMAGES[:2]).costs)
    with pytest.raises(BudgetError, match=r"`Latency\(0.001\)` allows .* picoseconds, .*feasible from 0\.\d+ to 1"):
        Latency(0.001, table).bind(costs())
    with pytest.raises(BudgetError, match=r"`fraction` of `Latency` is 2.0; it must be in \(0, 1\]"):
        Latency.of(2 * table.dense_ms, table)


def test_the_papers_policy_uses_the_same_estimate(table: LatencyTable) -> None:
    search = Paper().start(costs(), Latency(0.5, table))
    bound = Latency(0.5, table).bind(costs())
    assert float(bound.expected(search.keep_probs)) <= bound.limit
    assert bound.cost(search.best_guess()) <= bound.limit


WRONG = [("number", {"dense_ms": value}) for value in ("5", -1.0, float("nan"), float("inf"), None)]
WRONG += [("term", {"terms": [[[0], value]]}) for value in (-1, float("inf"), 2**70, "few")]


def test_a_table_is_kept_in_a_file(table: LatencyTable, tmp_path: Path) -> None:
    save_table(table, tmp_path / "table.json")
    assert load_table(tmp_path / "table.json") == table
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["batch"] == "(4, 3, 16, 16)"
    assert (content["precision"], content["near"]) == ("float32", 0.5)
    assert content["mode"] == "Device"
    for name, change in (("newer", {"version": 2}), ("other", {"terms": 3}), ("more", {"colour": "red"}), *WRONG):
        (tmp_path / name).write_text(json.dumps(content | change))
        with pytest.raises(CheckpointError, match=name):
            load_table(tmp_path / name)
    (tmp_path / "list").write_text("[]")
    for name in ("list", "missing"):
        with pytest.raises(CheckpointError, match="cannot be read as a table of latencies"):
            load_table(tmp_path / name)
    assert replace(table, version=1) == table


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 1024), nn.Linear(1024, 128)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_real_networks_are_timed_and_left_alone(mode: str) -> None:
    model = Two()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = measure_latency(model, torch.randn(64, 128), 0.9, mode, num_networks=8, repeats=2)
    assert table.dense_ms > 0
    assert table.constant + sum(time for _, time in table.terms) > 0
    assert (table.mode, table.batch) == (mode, "(64, 128)")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`mode` is 'fast'; it must be one of 'inference', 'training', or a function"):
        measure_latency(Two(), torch.randn(4, 128), 0.5, "fast")
    with pytest.raises(ValueError, match="`num_networks` is 0; it must be a whole number"):
        measure_latency(Two(), torch.randn(4, 128), 0.5, num_networks=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(8, 30))
def test_the_fit_is_that_of_a_general_solver(seed: int, num_features: int, num_rows: int) -> None:
    generator = np.random.default_rng(seed)
    features, times = generator.uniform(0.1, 5, (num_rows, num_features)), generator.uniform(1, 10, num_rows)
    weights = generator.uniform(0.1, 1, num_rows)
    expected, _ = nnls(features * (weights / times)[:, None], weights)
    np.testing.assert_allclose(non_negative(features, times, weights), expected, rtol=0, atol=1e-5 * expected.max())
