"""Something that happens at a line of slimstart, counted as the lines run."""

import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import slimstart

CONTEXT = multiprocessing.get_context("fork")
PACKAGE = os.path.dirname(slimstart.__file__)


class AtLine:
    """A trace function, for `sys.settrace`, that counts lines of slimstart and calls a function at one of them."""

    def __init__(self, line: int = 0, happen: Callable[[], object] = lambda: None) -> None:
        self.line, self.happen, self.count = line, happen, 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                sys.settrace(None)
                self.happen()
        return self


def stopped_at_every_line(
    function: Callable[[], object], before: Callable[[], object], is_killed: bool, every: int = 1
) -> Iterator[int]:
    """Stop a function at every line of slimstart, or at every n-th, by a kill or an interrupt; yields the lines.

    Args:
        function: the function.
        before: called each time before the function.
        is_killed: whether it runs in a process that is killed at once; otherwise there is a KeyboardInterrupt.
        every: n.
    """

    def run(lines: AtLine) -> None:
        sys.settrace(lines)
        try:
            function()
        finally:
            sys.settrace(None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for line in itertools.count(1, every):
        before()
        if is_killed:
            worker = CONTEXT.Process(target=run, args=(AtLine(line, lambda: os._exit(9)),))
            worker.start()
            worker.join()
            if worker.exitcode == 0:  # it has fewer lines
                return
            assert worker.exitcode == 9
        else:
            with contextlib.suppress(KeyboardInterrupt):
                run(AtLine(line, interrupt))
                return
        yield line
