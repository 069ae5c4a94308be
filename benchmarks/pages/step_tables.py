"""Tables of times, from the records of `run_paper_steps.py`, `cpu_time.py`, `latency.py` and `scaling.py`.

Those of whole trainings are from runs that had the machine to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import scaling as scaling_benchmark

from pages.naming import data_title, model_title
from pages.stored import Results
from slimstart.lab.reports.rows import Row
from slimstart.lab.reports.tables import MISSING, markdown_table

GPU = ("bench-h200/vgg19-2048.json", "bench-h200/vgg19-256.json", "bench-h200/resnet32-256.json")
GPU += ("bench-h200/wrn28_10-256.json",)
CPU = ("bench-cpu/vgg19-64.json",)
LATENCY = ("latency_cpu.json", "latency_cpu_training.json", "latency_cpu_training_vgg19.json")
TIMED = ("-time", "-time-first-run")  # ends of the names of such experiments
PAPER = "vgg19-cifar10-60"


def gpu(results: Results) -> str:
    return _steps(row for file in GPU for row in results.benchmarks[file]["rows"])


def cpu(results: Results) -> str:
    return _steps(row for file in CPU for row in results.benchmarks[file]["rows"])


def settled_cpu(results: Results) -> str:
    """Times after the search, of `cpu_time.py`."""
    lines = [["network, batch size", "threads", "dense step, ms", "narrow, ms", "slimstart, ms", "against dense"]]
    lines[0] += ["against narrow", "dense inference, ms", "slimstart, ms", "dense in ONNX Runtime, ms", "slimstart, ms"]
    for row in results.benchmarks["cpu_time.json"]["rows"]:
        ms, speed = row["ms"], row["speed"]
        steps = [_milliseconds(ms[f"step: {side}"]) for side in ("dense", "plain", "slimstart")]
        sides = [f"{side}{where}" for where in ("", ", ONNX Runtime") for side in ("dense", "slimstart")]
        cells = [f"{model_title(row['network'])}, {row['batch']}", str(row["threads"]), *steps]
        cells += [f"{speed['step, of dense']:.2f}×", f"{speed['step, of plain']:.2f}×"]
        lines.append([*cells, *(_milliseconds(ms[f"inference: {side}"]) for side in sides)])
    return "\n".join(markdown_table(lines, lines[0][:1]))


def latency(results: Results) -> str:
    """What networks that were trained for a budget of time take of it, of `latency.py`."""
    lines = [["network", "mode", "budget", "taken of the budget", "10th to 90th percentile", "in the search"]]
    lines[0] += ["removable layers", "FLOPs, %", "error of the table, %"]
    for row in (row for file in LATENCY if file in results.benchmarks for row in results.benchmarks[file]["rows"]):
        low, high = row["spread_of_budget"]
        cells = [model_title(row["network"]), row["mode"], f"Latency({row['fraction']:g})", f"{row['of_budget']:.3f}"]
        search = row["of_budget_in_the_search"]
        cells += [f"{low:.3f} to {high:.3f}", f"{min(search):.2f} to {max(search):.2f}"]
        cells += [f"{row['num_left']} of {row['num_layers']}", f"{100 * row['flops_ratio']:.1f}"]
        cells += [f"{100 * row['error']:.0f}"]
        lines.append(cells)
    return "\n".join(markdown_table(lines, lines[0][:3]))


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _steps(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [["network, batch size", "FLOPs, %", "executed, %", "dense, ms", "narrow, ms", "slimstart, ms"]]
    lines[0] += ["against dense", "against narrow", "steps per network", "memory against narrow"]
    for row in rows:
        coupling = ", stream coupling" if row["coupling"] == "stream" else ""
        memory = [row[name] for name in ("peak_memory", "narrow_peak_memory")]
        cells = [f"{model_title(row['model'])}, {row['batch_size']}{coupling}"]
        cells += [f"{100 * row[name]:.1f}" for name in ("flops_ratio", "executed_flops_ratio")]
        cells += [_milliseconds(row[name]) for name in ("dense_ms", "narrow_ms", "ours_ms")]
        cells += [f"{row['speedup']:.2f}×", f"{row['of_limit']:.2f}×", str(row["resample_every"])]
        lines.append([*cells, MISSING if None in memory else f"{memory[0] / memory[1]:.2f}×"])
    columns = [column for column in zip(*lines, strict=True) if set(column[1:]) != {MISSING}]
    return "\n".join(markdown_table(list(zip(*columns, strict=True)), lines[0][:1]))


def gains(results: Results) -> str:
    """What each part of the captured step gains."""
    rows = results.benchmarks["bench-h200/wrn28_10-256.json"]["rows"]
    wide = min(rows, key=lambda row: (row["flops_ratio"], row["ours_ms"]))
    large = results.benchmarks["bench-h200/vgg19-2048.json"]["rows"][0]
    share = f"{100 * wide['flops_ratio']:.0f} %"
    narrow = f"{model_title(wide['model'])} with the widths of a draw at {share}, batch {wide['batch_size']}"
    dense = f"{model_title(large['model'])}, dense, batch {large['batch_size']}"
    eager, graphs, fused = (f"{kind}, channels-last" for kind in ("eager", "graphs", "fused"))
    lines = [["part", "network", "without, ms", "with, ms"]]
    for part, network, times, before, after in (
        ("CUDA graphs", narrow, wide["narrow_engines"], eager, graphs),
        ("fusion, in graphs", narrow, wide["narrow_engines"], graphs, fused),
        ("fusion, in graphs", dense, large["dense_engines"], graphs, fused),
        ("widths in multiples of 8 and 16", f"{model_title(wide['model'])} at {share}", wide, "narrow_ms", "ours_ms"),
    ):
        lines.append([part, network, f"{times[before]:.1f}", f"{times[after]:.1f}"])
    return "\n".join(markdown_table(lines, lines[0][:2]))


def scaling(results: Results) -> str:
    return "\n".join(scaling_benchmark.measured(results.benchmarks["scaling_cpu.json"]["rows"]))


def scaling_expected(results: Results) -> str:
    return "\n".join(scaling_benchmark.expected(results.benchmarks["scaling_cpu.json"]["rows"]))


def _seconds(row: Row) -> str:
    return f"{row.mean(lambda run: run.train_seconds):.1f}"


def trainings(results: Results) -> str:
    """A row for each experiment with runs `uniform` and `slimstart`."""
    lines = [["network, FLOPs", "epochs", "uniform, s", "slimstart, s", "of it rebuilding, s", "runs", "hardware"]]
    for experiment in sorted(results.experiments.values(), key=lambda one: one.name, reverse=True):
        if experiment.is_archived or not experiment.name.endswith(TIMED):
            continue
        uniform, slimstart = experiment.rows["uniform"], experiment.rows["slimstart"]
        first = slimstart.first
        title = f"{model_title(first.model)}, {data_title(first.data)}, {100 * slimstart.flops:.0f} %"
        title += ", first run on a machine" if experiment.name.endswith("first-run") else ""
        building = slimstart.mean(lambda run: run.building_seconds)
        cells = [title, str(first.epochs), _seconds(uniform), _seconds(slimstart), f"{building:.1f}"]
        lines.append([*cells, str(len(slimstart.runs)), first.hardware])
    return "\n".join(markdown_table(lines, ("network, FLOPs", "hardware")))


def paper_trainings(results: Results) -> str:
    """Accuracy, cost and time of the paper's algorithm, of the uniform network and of the dense one."""
    texts = {
        "dense": "dense",
        "uniform": "uniform",
        "paper-settled": "the paper's algorithm, structure fixed after half of the epochs",
        "paper": "the paper's algorithm",
    }
    rows = results.experiments[PAPER].rows
    lines = [["network", "accuracy, %", "FLOPs, %", "train cost saved", "step, ms", "training, s"]]
    for label, text in texts.items():
        run = rows[label].first
        cells = [f"{run.accuracy:.2f}", f"{100 * run.flops_ratio:.1f}", f"{run.executed_saving:.2f}×"]
        lines.append([text, *cells, f"{run.step_ms:.1f}", f"{run.train_seconds:.1f}"])
    return "\n".join(markdown_table(lines, lines[0][:1]))
