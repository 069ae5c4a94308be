"""Step times: totals without synchronisation in between, shares by part, structure changes as often as in training."""

import time
from typing import Any

import pytest
import torch

from slimstart.lab import models
from slimstart.lab.recipes.recipe import Recipe, merged
from slimstart.lab.run.step_times import Step, Stopwatch, bench, compare, step_times
from slimstart.narrow import Change, Networks
from slimstart.training import SparseTraining


def sleeping(first: float, second: float) -> Step:
    def step(watch: Stopwatch) -> None:
        time.sleep(first)
        watch.lap("a")
        time.sleep(second)
        watch.lap("b")

    return step


def test_medians_and_parts() -> None:
    times = compare({"x": sleeping(0.01, 0.03), "y": sleeping(0.02, 0.0)}, torch.device("cpu"), rounds=5, seconds=10)
    assert times["x"]["total"] == pytest.approx(40, rel=0.3)
    assert times["x"]["a"] + times["x"]["b"] == pytest.approx(times["x"]["total"])
    assert times["x"]["b"] / times["x"]["a"] == pytest.approx(3, rel=0.3)
    assert times["x"]["total"] / times["y"]["total"] == pytest.approx(2, rel=0.3)


def test_measuring_stops_in_time() -> None:
    began = time.perf_counter()
    compare({"x": sleeping(0.05, 0.0)}, torch.device("cpu"), rounds=1000, seconds=0.3)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("resample_every", [1, 2, 3])
def test_a_step_within_a_window_changes_no_structure(resample_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = []
    original = Networks.prepare

    def counted(self: Networks, *args: Any, **options: Any) -> Change:
        draws.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(Networks, "prepare", counted)
    recipe = Recipe(model="small", policy="paper", width=0.125, budget="flops=0.3", resample_every=resample_every)

    def make() -> torch.nn.Module:
        return models.build("small", num_classes=10, in_channels=1, width=0.125)

    batch = torch.randn(4, 1, 28, 28), torch.randint(0, 10, (4,))
    times = step_times(recipe, make, batch, own_flops=30, dense_flops=100, rounds=2)
    # To begin, to warm up, and two for each of three rounds: one for the total, one for the parts.
    assert len(draws) == 1 + 3 + 6
    assert times.forward + times.backward < times.total
    assert times.dense is not None
    assert times.narrow is not None


def test_bench_measures_the_networks_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uniform network of half of the FLOPs, and the dense one of the same class."""
    recipe = Recipe(model="tests.tiny_networks:with_dropout", budget="flops=0.5", batch_size=4, lr=0.01)
    settled: list[bool] = []
    original = SparseTraining.step

    def counted(self: SparseTraining, *args: Any, **options: Any) -> Any:
        settled.append(self.settled)
        return original(self, *args, **options)

    monkeypatch.setattr(SparseTraining, "step", counted)
    ratio, times = bench(recipe, (3, 32, 32), 10, "cpu", "eager", rounds=2)
    dense = 64 * 8 * 27 + 16 * 16 * 72 + 160  # places x filters x inputs, twice, and the classifier
    widths = [(a, b) for a in range(1, 9) for b in range(1, 17)]
    possible = [(64 * a * 27 + 16 * b * 9 * a + 10 * b) / dense for a, b in widths]
    assert ratio in possible
    assert 0.4 < ratio <= 0.5
    # Three to warm up, and one total in each of three rounds: while learning, and after it.
    assert settled.count(False) == settled.count(True) == 3 + 3
    assert times.learning is not None
    assert times.dense is not None
    assert times.narrow is not None
    _, times = bench(merged(recipe, {"policy": "paper"}), (3, 32, 32), 10, "cpu", "eager", rounds=1)
    assert times.learning is None  # every step of Algorithm 1 learns
