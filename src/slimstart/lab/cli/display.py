"""Display of the commands on a terminal; without one, plain lines."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from slimstart.lab.control_characters import visible
from slimstart.lab.run.callbacks import Status, Watcher

if TYPE_CHECKING:
    from slimstart.lab.records import Epoch, Record


class _SafeConsole(Console):
    """A console that prints text literally, with control characters as escapes: names and messages come from files."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **settings)


class SafeFormatter(logging.Formatter):
    """The same for log messages."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Console(_SafeConsole):
    """A console that becomes quiet when its pipe is closed: a training does not end because `| head` does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Into a file or a pipe, lines are as long as they need to be.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
console = _Console(width=_WIDTH)
errors = _SafeConsole(stderr=True)


class TrainingDisplay(Watcher):
    """A live line for the step and one line for every epoch; Ctrl-C asks to stop."""

    def __init__(self, total_epochs: int) -> None:
        self.total_epochs = total_epochs
        self._stop = False
        self._task: TaskID | None = None
        self._progress = Progress(
            BarColumn(24),
            TextColumn("{task.percentage:>3.0f} %  {task.description}", markup=False),
            console=console,
            transient=True,
            auto_refresh=console.is_terminal,
            disable=not console.is_terminal,
        )
        self._download = Progress(
            "downloading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
        )
        self._download_task: TaskID | None = None

    @property
    def stop_requested(self) -> bool:
        return self._stop

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._download.stop()

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """The first Ctrl-C, or polite kill, asks to stop; a second one stops at once."""

        def ask(number: int, _: Any) -> None:
            self._stop = True
            for asked, handler in before.items():
                signal.signal(asked, handler)
            with suppress(RuntimeError):  # the signal may come while something is written, and that is not reentrant
                console.print("stopping after this step; once more to stop at once")

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def status(self, status: Status) -> None:
        text = (
            f"epoch {status.epoch}/{self.total_epochs} {status.phase}  loss {status.loss:.3f}  "
            f"accuracy {_percent(status.accuracy)}  FLOPs {100 * status.flops_ratio:.1f} %  "
            f"{status.images_per_second:,.0f} images/s  {_clock(status.seconds_left)} left"
        )
        if self._task is None:
            self._task = self._progress.add_task(text, total=status.total_steps)
        self._progress.update(self._task, completed=status.steps_done, total=status.total_steps, description=text)

    def epoch(self, epoch: Epoch) -> None:
        self._progress.console.print(
            f"epoch {epoch.epoch:>{len(str(self.total_epochs))}}/{self.total_epochs} {epoch.phase:<8}  "
            f"loss {epoch.train_loss:.3f}  accuracy {_percent(epoch.test_accuracy)}  "
            f"FLOPs {100 * epoch.flops_ratio:5.1f} %  cost {100 * epoch.train_flops / epoch.dense_train_flops:5.1f} %"
            f"  {epoch.images_per_second:,.0f} images/s  {_clock(epoch.seconds)}",
        )

    def downloading(self, done: int, total: int | None) -> None:
        if self._download_task is None:
            self._download.start()
            self._download_task = self._download.add_task("", total=total)
        self._download.update(self._download_task, completed=done, total=total)
        if done == total:
            self._download.stop()

    def resumed(self, epoch: int, batch: int) -> None:
        console.print(f"going on in epoch {epoch}, after {batch} of its batches")


class ComparisonDisplay(TrainingDisplay):
    """The same for many runs: a live line more for all of them, and one line left by each run instead of each epoch."""

    def __init__(self, names: Sequence[str], total_epochs: int) -> None:
        super().__init__(total_epochs)
        self.names, self._number = names, 0
        self._all = self._progress.add_task("", total=len(names))

    def begin(self) -> None:
        """The next run."""
        self._number += 1
        self._advance(0.0)
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def end(self, record: Record) -> None:
        console.print(
            f"{self._head}  accuracy {_percent(record.accuracy)}  FLOPs {100 * record.flops_ratio:5.1f} %  "
            f"cost {100 * record.train_flops / record.dense_train_flops:5.1f} %  {_clock(record.train_seconds)}",
        )

    def fail(self, reason: str) -> None:
        console.print(f"{self._head}  failed: {reason}", soft_wrap=True)

    def _advance(self, share: float) -> None:
        """Show all runs, with this share of the present one done."""
        self._progress.update(self._all, completed=self._number - 1 + share, description=self._head)

    @property
    def _head(self) -> str:
        total, widest = len(self.names), max(map(len, self.names))
        return f"run {self._number:>{len(str(total))}}/{total} {self.names[self._number - 1]:<{widest}}"

    def status(self, status: Status) -> None:
        self._advance(status.steps_done / status.total_steps)
        super().status(status)

    def epoch(self, epoch: Epoch) -> None:
        """The run's own files have its epochs."""

    def resumed(self, epoch: int, batch: int) -> None:
        console.print(f"{self._head}  goes on in epoch {epoch}, after {batch} of its batches")


def show_records(records: Sequence[Record]) -> None:
    """A comparison table for each network; a few runs are shown as columns, which fits a narrow terminal."""
    from slimstart.lab.reports import by_network, shown, summarise

    for network, rows in by_network(summarise(records)).items():
        console.print(network)
        cells = shown(rows)
        if len(rows) > 3 and _width(cells) > console.width:
            cells = shown(rows, essential=True)
        if len(rows) <= 3:
            cells = [list(row) for row in zip(*cells, strict=True)]
        show_table(cells[0], cells[1:])


def show_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(visible(title), overflow="fold")  # half a name is none
    for row in rows:
        table.add_row(*map(visible, row))
    console.print(table)


def _width(lines: Sequence[Sequence[str]]) -> int:
    """Of a table whose titles may be broken between words, and whose cells may not."""
    titles, *cells = lines
    words = [max(title.split(), key=len) for title in titles]
    return sum(2 + max(map(len, column)) for column in zip(words, *cells, strict=True))


def _percent(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.2f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
