"""The program, stopped at random points: it resumes, loses no checkpoint, and ends as if it had not been stopped.

SLIMSTART_STOPS is the number of runs that are stopped, 16 by default; releases are tested with 200.
"""

import functools
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slimstart.lab.cli import main
from slimstart.lab.reports import page  # noqa: F401  # imported before the processes are forked
from slimstart.lab.run.run_folder import Run
from tests.integration.test_program import outcome
from tests.lines import AtLine

CONTEXT = multiprocessing.get_context("fork")  # everything is imported already
STOPS = int(os.environ.get("SLIMSTART_STOPS", "16"))
SHARED = "--data tests.own_data:pairs --batch-size 10 --epochs 4 --lr 0.05 --device cpu --checkpoint-seconds 0".split()
POLICIES = {
    "paper": "--model tests.tiny_networks:with_dropout --policy paper --budget flops=0.4 --settle-at 0.75",
    "equal_worth": (
        "--model tests.tiny_networks:with_blocks --budget flops=0.4 --resample-every 1 --align 1 --depth 0.5"
    ),
}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
WAYS = ("kill", "kill later", "terminate", "terminate later", "interrupt", "interrupt later", "full disk", "no memory")


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


def result(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What a run has computed; the code may be committed in the meantime."""
    record, network = outcome(folder)
    del record["commit"]
    return record, network


def expected(way: str) -> tuple[int, ...]:
    """Exit statuses; 0 if it comes after the end or is undone: in a place where errors are ignored."""
    status = {"kill": (-signal.SIGKILL,), "terminate": (130, 143, -signal.SIGTERM), "interrupt": (130, 1)}
    return (0, *status.get(way.removesuffix(" later"), (1,)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_stopped_runs_end_like_others(
    policy: str, tmp_path: Path, differences: Callable[[Any, Any], list[str]]
) -> None:
    status, output, num_lines, _ = run(tmp_path / "whole", policy, Stop("count"))
    assert status == 0, output
    whole = result(tmp_path / "whole")
    _, _, _, seconds = run(tmp_path / "again", policy)
    assert differences(result(tmp_path / "again"), whole) == []
    generator, stopped = random.Random(policy), 0
    for number in range(STOPS // len(POLICIES)):
        stop = Stop(
            WAYS[number % len(WAYS)],
            line=generator.randrange(1, num_lines),
            seconds=generator.uniform(0, seconds),
            num_bytes=generator.randrange(20_000),
        )
        folder = tmp_path / f"stopped-{number}"
        status, output, _, _ = run(folder, policy, stop)
        assert status in expected(stop.way), (stop, output)
        if stop.way in ("terminate", "full disk", "no memory"):
            assert "Traceback" not in output, (stop, output)
        stopped += status != 0
        checkpoints = Run(folder).checkpoints()
        assert Run(folder).latest() is not None or not checkpoints, stop
        assert checkpoints == Run(folder).checkpoints(), (stop, "a checkpoint is damaged")
        status, output, _, _ = run(folder, policy)
        assert status == 0, (stop, output)
        assert ("going on in epoch" in output or "finished already" in output) == bool(checkpoints), (stop, output)
        assert differences(result(folder), whole) == [], stop
        assert not list(folder.rglob("*.partial")), stop
    assert stopped >= STOPS // len(POLICIES) // 2
