"""Progress callbacks of a run: their protocol, and the default, which ignores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slimstart.lab.records import Epoch


@dataclass(frozen=True)
class Status:
    """Progress after a step, for a display."""

    epoch: int
    phase: str
    steps_done: int
    total_steps: int
    loss: float
    accuracy: float | None
    flops_ratio: float
    images_per_second: float
    seconds_left: float


class Watcher(Protocol):
    """Callbacks of a display, which may ask to stop."""

    @property
    def stop_requested(self) -> bool:
        """Whether the run should save and stop; read after every step."""

    def status(self, status: Status) -> None:
        """Called a few times per second."""

    def epoch(self, epoch: Epoch) -> None:
        """Called after every epoch."""

    def downloading(self, done: int, total: int | None) -> None:
        """Called with the bytes of a download that are done, and their total."""

    def resumed(self, epoch: int, batch: int) -> None:
        """Called when the run continues in this epoch, after this number of its batches."""


class Unwatched:
    """Callbacks that do nothing."""

    stop_requested = False

    def status(self, status: Status) -> None: ...

    def epoch(self, epoch: Epoch) -> None: ...

    def downloading(self, done: int, total: int | None) -> None: ...

    def resumed(self, epoch: int, batch: int) -> None: ...


class Interrupted(Exception):  # noqa: N818  not an error: the user asked for it
    """Training stopped on request, with everything saved."""
