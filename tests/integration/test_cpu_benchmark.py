"""The benchmark of times on a CPU, on a small network."""

import statistics

import pytest

pytest.importorskip("onnxruntime", exc_type=ImportError)
pytest.importorskip("onnxscript", exc_type=ImportError)

import cpu_time


def test_sides_take_turns_and_the_first_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter(range(1000))
    monkeypatch.setattr(cpu_time.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(cpu_time.time, "process_time", lambda: 0.25 * len(order))
    found = cpu_time.take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, seconds=1e9)
    assert "".join(order) == "ab" + "ba" + "ab" + "ba"
    assert found == {side: [(1000.0, 250.0)] * 3 for side in "ab"}


@pytest.mark.slow
def test_ratios_are_those_of_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_time.NETWORKS, "resnet20", (16, 10))
    row = cpu_time.measured("resnet20", batch=2, threads=1, rounds=2, seconds=60)
    assert 0.09 < row["flops_ratio"] <= 0.1
    assert row["speed"]["step, of plain"] == row["ms"]["step: plain"] / row["ms"]["step: slimstart"]
    assert row["cpu_speed"]["step, of dense"] == row["cpu_ms"]["step: dense"] / row["cpu_ms"]["step: slimstart"]
    assert statistics.fmean(row["spread_ms"]["step: dense"]) == pytest.approx(row["ms"]["step: dense"])  # of two turns
