"""Who looks on while a run trains: a protocol, and the one who does not care."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slimstart.lab.records import Epoch


@dataclass(frozen=True)
class Status:
    """What a progress display shows after a step."""

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
    """A display; it may ask to stop."""

    @property
    def stop_requested(self) -> bool:
        """Asked after every step."""

    def status(self, status: Status) -> None:
        """A few times per second."""

    def epoch(self, epoch: Epoch) -> None:
        """After every epoch."""

    def downloading(self, done: int, total: int | None) -> None:
        """Bytes of a download."""

    def resumed(self, epoch: int, batch: int) -> None:
        """The run goes on in this epoch, behind so many batches."""


class Unwatched:
    """Nobody looks on."""

    stop_requested = False

    def status(self, status: Status) -> None: ...

    def epoch(self, epoch: Epoch) -> None: ...

    def downloading(self, done: int, total: int | None) -> None: ...

    def resumed(self, epoch: int, batch: int) -> None: ...


class Interrupted(Exception):  # noqa: N818  no error: a wish of the user's
    """Training stopped on request, with everything saved."""
