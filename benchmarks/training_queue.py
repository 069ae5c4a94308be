"""Trainings, several processes in parallel, with one record for each.

Runs that have a record are not repeated, and those of `slimstart train` continue from their last checkpoint, so the
same command continues after an interruption. Records are copied to `RECORDS/EXPERIMENT/ROW-seedN.json`, where `make
results` finds them. `paper_queue.py`, `main_queue.py` and `structures/run.py` have lists of runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slimstart.io import atomic
from slimstart.lab.recipes.presets import preset
from slimstart.lab.recipes.recipe import Recipe, merged

Settings = Mapping[str, str | float | int]


class Job(Protocol):
    """What a queue needs of a training.

    Attributes:
        name: of its record, below the folder of records.
        lost: epochs that are lost if it is stopped; 0 if it continues from a checkpoint.
    """

    @property
    def name(self) -> str: ...

    @property
    def lost(self) -> int: ...

    def command(self, out: Path, more: Sequence[str]) -> list[str]:
        """The command line that trains, and writes `record.json` below `out / name`."""
        ...


@dataclass(frozen=True)
class Run:
    """One training by `slimstart train`.

    Attributes:
        experiment: folder of its record.
        row: row of the experiment's table.
        preset: name of the preset that it starts from; empty for the program's own defaults.
        settings: what differs from the preset.
    """

    experiment: str
    row: str
    preset: str
    settings: Settings = field(default_factory=dict)
    seed: int = 0

    lost = 0

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.row}-seed{self.seed}"

    @property
    def recipe(self) -> Recipe:
        return merged(preset(self.preset) if self.preset else Recipe(), {**self.settings, "seed": self.seed})

    def command(self, out: Path, more: Sequence[str]) -> list[str]:
        named = {"recipe": self.preset} if self.preset else {}
        settings = {**named, **self.settings, "seed": self.seed, "out": out / self.name}
        options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [sys.executable, "-m", "slimstart", "train", "--resume", *options, *more]


def work_off(runs: Sequence[Job], description: str | None, arguments: list[str] | None = None) -> int:
    """Train what is missing, as the command line says; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--records", type=Path, default=Path("results"), help="folder that records are copied to")
    parser.add_argument("--workers", type=int, default=8, help="processes in parallel")
    parser.add_argument("--hours", type=float, default=24.0, help="all processes are asked to stop after this time")
    parser.add_argument("--only", default="", help="regular expression that the names of runs must match")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing, and train nothing")
    args, more = parser.parse_known_args(arguments)  # what is left goes to the trainings
    missing = [
        run for run in runs if re.search(args.only, run.name) and not (args.records / f"{run.name}.json").exists()
    ]
    if args.list:
        print("\n".join(run.name for run in missing))
        return 0
    end, waiting, failed = time.monotonic() + 3600 * args.hours, list(missing), list[str]()
    active: dict[subprocess.Popen[bytes], tuple[Job, float]] = {}
    slowest = 0.0  # seconds of an epoch
    while active or (waiting and time.monotonic() < end):
        while waiting and len(active) < args.workers and time.monotonic() < end:
            run, began = waiting.pop(0), time.monotonic()
            if began + run.lost * slowest > end:
                continue
            (args.out / run.name).parent.mkdir(parents=True, exist_ok=True)
            with (args.out / f"{run.name}.log").open("ab") as log:
                # One thread each: there is a process for every core, and torch's own threads would fight for them.
                environment = {"OMP_NUM_THREADS": "1", **os.environ}
                process = subprocess.Popen(run.command(args.out, more), stdout=log, stderr=log, env=environment)
                active[process] = run, began
        time.sleep(0.2)
        if time.monotonic() >= end:
            for process in active:
                process.terminate()  # it writes a checkpoint, and the next call continues from there
        for process in [one for one in active if one.poll() is not None]:
            run, began = active.pop(process)
            slowest = max(slowest, (time.monotonic() - began) / run.lost if run.lost else 0.0)
            record = args.out / run.name / "record.json"
            if process.returncode == 0 and record.exists():
                place = args.records / f"{run.name}.json"
                place.parent.mkdir(parents=True, exist_ok=True)
                atomic.write(place, record.read_bytes())
            elif time.monotonic() < end:
                failed.append(run.name)
    done = sum((args.records / f"{run.name}.json").exists() for run in missing)
    print(f"{done} of {len(missing)} missing runs are done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0
