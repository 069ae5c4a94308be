"""Time of `trace`, and of one forward, on full-size networks. Run from the repository root.

python benchmarks/trace_time.py --out results/trace_time_cpu.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import benchmark_record
import torch

import slimstart

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.zoo import LARGE  # the networks that the tests use too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name, entry in LARGE.items():
        model, inputs = entry.factory().eval(), entry.example_inputs()[:1]
        for coupling in ("filter", "stream"):
            forwards, traces = [], []
            for _ in range(args.rounds):
                began = time.perf_counter()
                with torch.no_grad():
                    model(inputs)
                middle = time.perf_counter()
                graph = slimstart.trace(model, inputs, coupling=coupling)
                forwards.append(middle - began)
                traces.append(time.perf_counter() - middle)
            row = {"model": name, "coupling": coupling, "num_units": graph.num_units, "coverage": graph.coverage}
            rows.append({**row, "forward_s": min(forwards), "trace_s": min(traces), "rounds": args.rounds})
            print(f"{name}, {coupling}: trace {min(traces):.2f} s, one forward {min(forwards):.2f} s", flush=True)
    if args.out:
        benchmark_record.write(args.out, "trace_time", rows)


if __name__ == "__main__":
    main()
