"""Progress callbacks of a run."""

from __future__ import annotations

from dataclasses import dataclass

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


class Watcher:
    """Callbacks of a display, which may ask to stop. These do nothing."""

    @property
    def stop_requested(self) -> bool:
        """Whether the run should save and stop; read after every step."""
        return False

    def status(self, status: Status) -> None:
        """Called a few times per second."""

    def epoch(self, epoch: Epoch) -> None:
        """Called after every epoch."""

    def downloading(self, done: int, total: int | None) -> None:
        """Called with the bytes of a download that are done, and their total."""

    def resumed(self, epoch: int, batch: int) -> None:
        """Called when the run continues in this epoch, after this number of its batches."""


class Interrupted(Exception):  # noqa: N818  not an error: the user asked for it
    """Training stopped on request, with everything saved."""
