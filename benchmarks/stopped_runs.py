"""Stops runs of the program at random points, resumes them, and compares them with runs that were not stopped.

python benchmarks/stopped_runs.py --out results/stopped_runs_cpu.json

Half of the runs learn with each policy; those with equal worth are without some layers. A row is a policy and a way of
stopping: by signals, a full disk, a lack of memory, or, of runs in two processes, the kill of one of them. A run is
"lost" if a checkpoint is damaged, or not found when it is resumed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import benchmark_record
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.stopped_runs import (  # as in the tests
    KILLED_PROCESS,
    POLICIES,
    WAYS,
    Outcome,
    killed_processes,
    stopped_runs,
)


def rows(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    found = []
    for policy in POLICIES:
        for way in (*WAYS, KILLED_PROCESS):
            some = [one for one in outcomes if (one.policy, one.way) == (policy, way)]
            row = {"policy": policy, "way": way, "runs": len(some), "stopped": sum(one.is_stopped for one in some)}
            row |= {kind: sum(bool(getattr(one, kind)) for one in some) for kind in ("lost", "unequal", "other")}
            found.append({**row, "faults": [fault for one in some for fault in one.faults]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=200, help="runs in one process")
    parser.add_argument("--kills", type=int, default=50, help="runs in two processes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    outcomes, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for make, number in ((stopped_runs, args.stops), (killed_processes, args.kills)):
            for policy in POLICIES:
                for outcome in make(policy, number // len(POLICIES), Path(folder) / f"{make.__name__}-{policy}"):
                    outcomes.append(outcome)
                    print(f"{len(outcomes)} {outcome.policy}, {outcome.way}: {outcome.faults or 'fine'}", flush=True)
    if args.out:
        seconds = round(time.monotonic() - began)
        benchmark_record.write(args.out, "stopped_runs", rows(outcomes), seconds=seconds)


if __name__ == "__main__":
    main()
