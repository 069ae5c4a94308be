"""The program, stopped at random points and resumed: it loses no checkpoint, and ends as if it had not been stopped."""

import dataclasses
import functools
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slimstart.errors import ProcessGroupError
from slimstart.lab import records
from slimstart.lab.cli import main
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.reports import page  # noqa: F401  # imported before the processes are forked
from slimstart.lab.run.run_folder import Run
from tests import distributed_cases as cases
from tests.lines import AtLine
from tests.processes import on_ranks

CONTEXT = multiprocessing.get_context("fork")  # everything is imported already
SHARED = "--data tests.own_data:pairs --batch-size 10 --epochs 4 --lr 0.05 --device cpu --checkpoint-seconds 0".split()
POLICIES = {
    "paper": "--model tests.tiny_networks:with_dropout --policy paper --budget flops=0.4 --settle-at 0.75",
    "equal_worth": "--model tests.tiny_networks:with_blocks --budget flops=0.4 --resample-every 1 --align 1",
}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
WAYS = ("kill", "kill later", "terminate", "terminate later", "interrupt", "interrupt later", "full disk", "no memory")
KILLED_PROCESS = "kill one of two processes"


@dataclass(frozen=True)
class Stop:
    """What happens to a run.

    Attributes:
        way: one of `WAYS`, "count" (nothing happens, but lines are counted), or "nothing".
        line: the line of slimstart, counted as they run, at which it happens.
        seconds: the time after the start at which it happens, if it is "later": this may be within PyTorch's code.
        num_bytes: largest size of a file, once the disk is full.
    """

    way: str
    line: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


UNDISTURBED = Stop("nothing")


@dataclass
class Outcome:
    """What became of a run that was stopped and resumed.

    Attributes:
        policy: of the run.
        way: how it was stopped.
        is_stopped: whether it ended early; a stop may come after the end, or in a place where errors are ignored.
        lost: what is missing or damaged before it is resumed.
        unequal: where its result differs from that of a run that was not stopped.
        other: any other fault.
    """

    policy: str
    way: str
    is_stopped: bool = False
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [*self.lost, *self.unequal, *self.other]


def happening(stop: Stop) -> None:
    """Called at the line of a stop."""
    if stop.way == "no memory":
        raise MemoryError("no memory at this line")
    if stop.way == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (stop.num_bytes, resource.RLIM_INFINITY))
    elif stop.way in SIGNALS:
        os.kill(os.getpid(), SIGNALS[stop.way])


def program(arguments: list[str], stop: Stop, output: Any, answer: Any) -> None:
    """The program in a process of its own, which has imported everything already."""
    torch.set_num_threads(1)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv, lines = ["slimstart", *arguments], AtLine(stop.line, functools.partial(happening, stop))
    if "later" in stop.way:
        later = functools.partial(os.kill, os.getpid(), SIGNALS[stop.way.removesuffix(" later")])
        timer = threading.Timer(stop.seconds, later)
        timer.daemon = True
        timer.start()
    elif stop.way != "nothing":
        sys.settrace(lines)
    try:
        main()
    finally:
        sys.settrace(None)
        answer.send(lines.count)


def run(folder: Path, policy: str, stop: Stop = UNDISTURBED) -> tuple[int, str, int, float]:
    """Exit status, output, number of lines, and seconds of a run, which resumes if there is one in the folder."""
    ends, counts = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
    arguments = ["train", *SHARED, *POLICIES[policy].split(), "--resume", "--out", str(folder)]
    worker, began = CONTEXT.Process(target=program, args=(arguments, stop, ends[1], counts[1])), time.monotonic()
    worker.start()
    for end in (ends[1], counts[1]):
        end.close()
    output = b""
    while part := os.read(ends[0].fileno(), 1 << 16):
        output += part
    worker.join(60)
    assert worker.exitcode is not None, "it does not end"
    count = counts[0].recv() if worker.exitcode != -signal.SIGKILL and counts[0].poll() else 0
    return worker.exitcode, output.decode(), count, time.monotonic() - began


def result(folder: Path) -> dict[str, Any]:
    """Everything that must not depend on where a run was stopped; the code may be committed in the meantime."""
    found = dataclasses.asdict(records.read(folder))
    for epoch in found["history"]:
        del epoch["seconds"], epoch["images_per_second"]
    for name in ("name", "started", "finished", "train_seconds", "peak_memory_bytes", "command", "commit"):
        del found[name]
    return {**found, "network": Run(folder).network.read_bytes()}


def differing(found: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    return [f"{key} differs" for key in sorted(found.keys() | whole.keys()) if found.get(key) != whole.get(key)]


def statuses(way: str) -> tuple[int, ...]:
    """Exit statuses of a stopped run; 0 if it is stopped after its end, or where errors are ignored."""
    status = {"kill": (-signal.SIGKILL,), "terminate": (130, 143, -signal.SIGTERM), "interrupt": (130, 1)}
    return (0, *status.get(way.removesuffix(" later"), (1,)))


def check_checkpoints(folder: Path, outcome: Outcome) -> bool:
    """Whether a stopped run has checkpoints; all must be readable."""
    checkpoints = Run(folder).checkpoints()
    if checkpoints and Run(folder).latest() is None:
        outcome.lost.append("no checkpoint can be read")
    if checkpoints != Run(folder).checkpoints():
        outcome.lost.append("a checkpoint is damaged")
    return bool(checkpoints)


def stopped_runs(policy: str, number: int, root: Path) -> Iterator[Outcome]:
    """Stop runs at random points, resume each, and compare it with one that was not stopped."""
    status, output, num_lines, _ = run(root / "whole", policy, Stop("count"))
    assert status == 0, output
    whole = result(root / "whole")
    _, _, _, seconds = run(root / "again", policy)
    assert differing(result(root / "again"), whole) == []
    generator = random.Random(policy)
    for index in range(number):
        stop = Stop(
            WAYS[index % len(WAYS)],
            line=generator.randrange(1, num_lines),
            seconds=generator.uniform(0, seconds),
            num_bytes=generator.randrange(20_000),
        )
        folder, outcome = root / f"stopped-{index}", Outcome(policy, stop.way)
        status, output, _, _ = run(folder, policy, stop)
        if status not in statuses(stop.way):
            outcome.other.append(f"{stop}: status {status}: {output}")
        if stop.way in ("terminate", "full disk", "no memory") and "Traceback" in output:
            outcome.other.append(f"{stop}: {output}")
        outcome.is_stopped = status != 0
        has_checkpoints = check_checkpoints(folder, outcome)
        status, output, _, _ = run(folder, policy)
        if status != 0:
            outcome.lost.append(f"{stop}: it cannot be resumed: {output}")
        elif ("going on in epoch" in output or "finished already" in output) != has_checkpoints:
            outcome.lost.append(f"{stop}: it starts again: {output}")
        else:
            outcome.unequal += differing(result(folder), whole)
        outcome.other += [f"{path.name} remains" for path in folder.rglob("*.partial")]
        yield outcome


def failed(found: list[Any]) -> bool:
    return any(one is None or isinstance(one, Exception) for one in found)


def killed_processes(policy: str, number: int, root: Path) -> Iterator[Outcome]:
    """The same for runs in two processes, of which one is killed."""
    settings: dict[str, Any] = {"model": "tests.tiny_networks:with_dropout", "data": "tests.own_data:pairs"}
    settings |= {"budget": "flops=0.4", "epochs": 3, "batch_size": 10, "policy": policy, "lr": 0.05}
    own: dict[str, Any] = {"settle_at": 0.67, "num_masks": 2}
    if policy == "equal_worth":
        own = {"model": "tests.tiny_networks:with_blocks", "resample_every": 1, "align": 1}
    recipe = Recipe(**(settings | own))
    counts = [on_ranks(2, cases.killed_at, root / f"rank-{rank}", recipe, rank, 0)[rank] for rank in range(2)]
    assert not failed(counts), counts
    whole, generator = result(root / "rank-0"), random.Random(policy)
    for index in range(number):
        folder, rank, outcome = root / f"killed-{index}", index % 2, Outcome(policy, KILLED_PROCESS)
        found = on_ranks(2, cases.killed_at, folder, recipe, rank, generator.randrange(1, counts[rank]))
        outcome.is_stopped = found[rank] is None
        if not isinstance(found[1 - rank], ProcessGroupError | records.Record):
            outcome.other.append(f"the other process ended with {found[1 - rank]!r}")
        check_checkpoints(folder, outcome)
        found = on_ranks(2, cases.program, folder, recipe)
        if failed(found):
            outcome.lost.append(f"it cannot be resumed: {found}")
        else:
            outcome.unequal += differing(result(folder), whole)
        yield outcome
