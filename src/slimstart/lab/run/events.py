"""TensorBoard events of a run, one set of scalars per epoch. Without the package there are none, said once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slimstart.lab.records import Epoch

logger = logging.getLogger(__name__)
_SCALARS = {
    "train_loss": "train/loss",
    "lr": "train/lr",
    "images_per_second": "train/images_per_second",
    "flops_ratio": "structure/flops_ratio",
    "expected_cost": "structure/expected_cost",
    "certain": "structure/certain",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy",
}


class Events:
    """Writes into a folder, or nowhere; events of epochs from `first_step` on, left by a killed run, are dropped."""

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            logger.warning("no TensorBoard events are written, because the package tensorboard is not installed")
            return
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, epoch: Epoch) -> None:
        if self._writer is None:
            return
        for field, tag in _SCALARS.items():
            if (value := getattr(epoch, field)) is not None:
                self._writer.add_scalar(tag, value, epoch.epoch)
        self._writer.flush()
