"""Calls in a process of their own, with their time and their memory measured and limited."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("fork")
LIMIT = 3 << 30  # bytes on top of what the process has already: a mistake must not take all memory of the machine


@dataclass(frozen=True)
class Measured:
    """The end of a call.

    Attributes:
        error: name of the class of the exception, or "" if there was none.
        message: of the exception.
        is_ours: whether the exception is of slimstart's family.
        seconds: duration.
        num_bytes: memory at the peak, above that at the start.
    """

    error: str
    message: str
    is_ours: bool
    seconds: float
    num_bytes: int


def measure(call: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> Measured:
    """Run a call in a forked process; a TimeoutError is in the result if it has not ended in time."""
    ours, theirs = CONTEXT.Pipe()
    worker = CONTEXT.Process(target=_run, args=(theirs, call, arguments), daemon=True)
    worker.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            return Measured("TimeoutError", f"no end after {timeout} s", False, timeout, 0)
        found: Measured = ours.recv()
        return found
    except EOFError:
        return Measured("Killed", "the process has died", False, 0.0, 0)
    finally:
        worker.kill()
        worker.join()


def _run(answer: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from slimstart.errors import SlimstartError

    now = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT, now + LIMIT))
    before, began, error = _status("VmRSS"), time.monotonic(), None
    try:
        call(*arguments)
    except BaseException as found:
        error = found
    seconds, peak = time.monotonic() - began, _status("VmHWM")
    name, ours = "" if error is None else type(error).__name__, isinstance(error, SlimstartError)
    answer.send(Measured(name, str(error or ""), ours, seconds, max(0, peak - before)))


def _status(field: str) -> int:
    """A number of bytes about this process."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{field}:"))
