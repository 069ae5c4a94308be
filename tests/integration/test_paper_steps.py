"""benchmarks/run_paper_steps.py: a row is the arithmetic of its times."""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_paper_steps
import torch
from paper_steps import benchmark as bench
from paper_steps import contenders as bench_contenders
from paper_steps import structures as bench_structure
from paper_steps.benchmark import Benchmark
from paper_steps.turns import Turn, spread, take_turns
from torch import nn

from slimstart.graph import trace
from slimstart.lab.models import build
from slimstart.narrow import Change, Networks
from slimstart.policies import Flops, Paper

OWN = "tests.tiny_networks:with_dropout"
RESIDUAL = "tests.integration.test_paper_steps:residual"
CPU = torch.device("cpu")


class Residual(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, stride=4), nn.Conv2d(12, 12, 3, padding=1)
        self.last = nn.Linear(12, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.first(images).relu()
        return self.last((images + self.second(images)).mean((2, 3)))


def residual(num_classes: int) -> nn.Module:
    return Residual(num_classes)


def tiny(**changes: Any) -> argparse.Namespace:
    given = {"budgets": ["flops=0.5"], "model": OWN, "batch_size": 4, "rounds": 2, "seconds": 0.05}
    given |= {"resample_every": [10], "precision": "float32", "coupling": "filter", "align": None, "seed": 0}
    given |= {"channels_last": True, "compile": False, "image_size": 32, "classes": 10}
    return argparse.Namespace(**given | changes)


# --------------------------------------------------------------------------- taking turns


def test_turns_are_times_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("slimstart.lab.run.step_times.time.perf_counter", lambda: clock[0])

    def lasting(name: str, seconds: float) -> Callable[[], None]:
        return lambda: (calls.append(name), clock.append(clock.pop() + seconds))[1]

    turns = {"a": Turn(lasting("a", 0.02), 2), "b": Turn(lasting("b", 0.01), 1)}
    times = take_turns(turns, CPU, rounds=3, seconds=10)
    assert calls == ["a", "a", "b"] * 3
    assert times["a"] == pytest.approx([20] * 3)
    assert times["b"] == pytest.approx([10] * 3)
    assert len(take_turns(turns, CPU, rounds=100, seconds=0.01)["a"]) == 2  # and then no more
    assert spread(range(11)) == (1, 9)


@pytest.fixture
def at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure at the start of a search, because its middle takes many updates."""
    monkeypatch.setattr(bench, "to_the_middle", lambda *_: None)


Taken = dict[tuple[str, str], tuple[float, ...]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, at_the_start: None) -> list[dict[tuple[str, str], Turn]]:
    """Nothing is timed: every contender has one turn, and times that are known; returns the turns."""
    known: Taken = {
        ("ours", ""): (2.0, 2.0, 5.0),
        ("dense", "eager"): (9.0, 8.0, 7.0),
        ("dense", "eager, channels-last"): (5.0, 7.0, 6.0),
        ("narrow", "eager"): (1.5, 1.4, 1.6),
        ("narrow", "eager, channels-last"): (1.8, 1.8, 1.8),
    }
    seen: list[dict[tuple[str, str], Turn]] = []

    def turns_of(turns: dict[tuple[str, str], Turn], *_: Any) -> Taken:
        seen.append(turns)
        for turn in turns.values():
            for _ in range(turn.num_steps):
                turn.step()
        return {name: known[name] for name in turns}

    monkeypatch.setattr(bench, "take_turns", turns_of)
    return seen


@pytest.mark.parametrize(("every", "window", "draws"), [(1, 20, 20), (3, 3, 1)])
def test_a_row_is_the_arithmetic_of_its_times(
    taken: list[Any], every: int, window: int, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    original = Networks.prepare

    def counted(self: Networks, *args: Any, **options: Any) -> Change:
        drawn.append(len(taken))
        return original(self, *args, **options)

    monkeypatch.setattr(Networks, "prepare", counted)
    (found,) = Benchmark(tiny(resample_every=[every], model=RESIDUAL), CPU).rows()
    assert (found["dense_ms"], found["dense_spread_ms"]) == (6, (5.2, 6.8))
    assert found["narrow_ms"] == 1.5
    assert found["narrow_engines"] == {"eager": 1.5, "eager, channels-last": 1.8}
    assert (found["ours_ms"], found["speedup"], found["of_limit"]) == (2, 3, 0.75)
    assert (found["num_turns"], found["our_engine"]) == (3, "eager, channels-last")
    assert taken[0]["ours", ""].num_steps == window
    # In the turn: as many draws as a training makes. Behind it, draws to see what is executed.
    assert drawn.count(1) == draws + bench_structure.NUM_DRAWS


def test_turns_are_of_similar_length(taken: list[Any]) -> None:
    benchmark = Benchmark(tiny(resample_every=[1]), CPU)
    list(benchmark.rows())
    (turns,) = taken
    assert turns["ours", ""].num_steps == 20
    assert all(1 <= turn.num_steps <= 50 for turn in turns.values())
    assert turns["narrow", "eager"].num_steps > 1  # a step of ours takes far longer on so small a network


def test_the_flops_are_those_of_what_runs(taken: list[Any]) -> None:
    (found,) = Benchmark(tiny(), CPU).rows()
    dense = 64 * 8 * 27 + 16 * 16 * 72 + 160  # places x filters x inputs, twice, and the classifier
    widths = [(a, b) for a in range(1, 9) for b in range(1, 17)]
    assert found["flops_ratio"] in [(64 * a * 27 + 16 * b * 9 * a + 10 * b) / dense for a, b in widths]
    assert found["flops_ratio"] == pytest.approx(0.5, rel=0.25)
    assert found["executed_flops_ratio"] == pytest.approx(0.5, rel=0.25)


# --------------------------------------------------------------------------- structures


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.15, 0.03])
def test_the_middle_is_half_decided_and_at_the_budget(fraction: float) -> None:
    graph = trace(build("small", num_classes=10), torch.zeros(1, 3, 28, 28), "filter")
    learner = Paper(sampling="bernoulli").start(graph.costs, Flops(fraction))
    before = learner.keep_probs
    bench_structure.to_the_middle(learner, seed=0)
    s = learner.keep_probs
    assert sum(1 for one in s.tolist() if one < 0.05 or one > 0.95) >= s.numel() / 2
    assert float((s * (1 - s)).sum()) <= 0.5 * float((before * (1 - before)).sum())
    assert learner.expected_cost == pytest.approx(fraction, rel=0.05)


# --------------------------------------------------------------------------- contenders


def test_what_cannot_be_compiled_is_left_out(
    taken: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: nn.Module, **_: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(nn.Module, "compile", fail)
    (found,) = Benchmark(tiny(compile=True), CPU).rows()
    assert set(found["dense_engines"]) == {"eager", "eager, channels-last"}
    assert "torch.compile is left out, because it does not work here: no compiler" in caplog.messages


def test_what_cannot_be_captured_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    work = Benchmark(tiny(), CPU).work

    class Uncaptured(bench_contenders.Plain):
        def __init__(self, *_: Any) -> None:
            self.training, self._engine = SimpleNamespace(reason="the loss asks the host"), "graphs"

    monkeypatch.setattr(bench_contenders, "Plain", Uncaptured)
    assert bench_contenders.every_way(residual(10), work, compiled=False) == {}
    assert "eager is left out: the loss asks the host" in caplog.messages


def test_a_way_that_must_work_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Benchmark(tiny(), CPU).work
    with pytest.raises(RuntimeError, match="shape"):
        bench_contenders.every_way(nn.Linear(2, 2), work, compiled=False)


def test_strided_shortcuts_keep_a_cpu_from_channels_last(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        benchmark = Benchmark(tiny(model="resnet20"), CPU)
    assert not benchmark.work.channels_last
    assert "nothing is measured in channels-last: on a CPU, convolutions of 1 x 1 with strides" in caplog.text
    assert Benchmark(tiny(), CPU).work.channels_last


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_compete_and_memory_is_known() -> None:
    settings = tiny(model="small", batch_size=64, seconds=1.0, precision="bfloat16")
    for found in Benchmark(settings, torch.device("cuda")).rows():
        assert {name.partition(",")[0] for name in found["dense_engines"]} == {"eager", "graphs", "fused"}
        assert found["our_engine"] == "graphs, channels-last"
        assert found["peak_memory"] is not None
        assert found["narrow_peak_memory"] is not None
        assert found["executed_flops_ratio"] >= 0.9 * found["flops_ratio"]


# --------------------------------------------------------------------------- the command


def test_the_command_measures_writes_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_the_start: None
) -> None:
    options = ["--model", OWN, "--budgets", "flops=0.5", "params=0.6", "--batch-size", "4", "--seconds", "0.05"]
    options += ["--resample-every", "2", "3", "--rounds", "3", "--device", "cpu"]
    run_paper_steps.main([*options, "--out", str(tmp_path / "record.json")])
    output = capsys.readouterr().out
    found = json.loads((tmp_path / "record.json").read_text())
    assert [(one["budget"], one["resample_every"]) for one in found["rows"]] == [
        *(("flops=0.5", 2), ("flops=0.5", 3)),
        *(("params=0.6", 2), ("params=0.6", 3)),
    ]
    assert (found["settings"]["batch_size"], found["device"], found["torch"]) == (4, "cpu", torch.__version__)
    for one in found["rows"]:
        assert 2 <= one["num_turns"] <= 3
        assert f"{one['speedup']:.2f}x dense, {one['of_limit']:.2f}x narrow" in output
        assert one["peak_memory"] is None


def test_rows_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(self: Benchmark) -> Iterator[dict[str, Any]]:
        yield {"budget": "flops=0.5", "resample_every": 2, "ours_ms": 1, "speedup": 1, "of_limit": 1, "num_turns": 2}
        raise RuntimeError("the second row")

    monkeypatch.setattr(Benchmark, "rows", rows)
    with pytest.raises(RuntimeError, match="the second row"):
        run_paper_steps.main(["--model", OWN, "--device", "cpu", "--out", str(tmp_path / "record.json")])
    assert len(json.loads((tmp_path / "record.json").read_text())["rows"]) == 1
