"""The folder of one run: config, metrics, checkpoints, TensorBoard events, record, the finished network.

runs/NAME/
  config.toml             the recipe; `slimstart train --recipe` reads it
  metrics.csv             one row per epoch
  checkpoints/*.pt        the last two, checksummed; named by the step
  tensorboard/            events
  trials/                 folders like this one, of the networks that the method shallow tries
  network.safetensors     the finished network, with its structure
  record.json             the record (docs/records.md); there once the run is finished
  report.html
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from slimstart.errors import CheckpointError, ConfigError
from slimstart.io import atomic, checkpoints
from slimstart.io.files import Folder
from slimstart.lab import records
from slimstart.lab.recipes import recipe as recipes
from slimstart.lab.recipes.recipe import Recipe

logger = logging.getLogger(__name__)
NUM_CHECKPOINTS = 2
_CHECKPOINT = re.compile(r"step-\d{9,}\.pt")
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


class Run:
    """One run's folder. Every file is written atomically, and links in the folder are not followed.

    What a killed process leaves of a file is removed when the file is written again.
    """

    def __init__(self, folder: str | os.PathLike[str], made: Sequence[Path] = ()) -> None:
        self.folder = Path(folder)
        self._made = list(made)  # folders that were made for this run, innermost first
        self.config = self.folder / "config.toml"
        self.metrics = self.folder / "metrics.csv"
        self.record = self.folder / "record.json"
        self.network = self.folder / "network.safetensors"
        self.report = self.folder / "report.html"
        self.tensorboard = self.folder / "tensorboard"
        self.trials = self.folder / "trials"  # of the method shallow
        self._checkpoints = self.folder / "checkpoints"

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        return self.record.is_file()

    def refuse_existing(self) -> None:
        """Raise a ConfigError if there is a run already."""
        if self.exists:
            raise ConfigError(
                f"{self.folder} holds a run already; add --resume to continue it, or choose another --out"
            )

    def refuse_links(self) -> None:
        """Raise a ConfigError if a folder in the folder is a link."""
        for folder in (self._checkpoints, self.tensorboard, self.trials):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link, which is not followed; remove it, or choose another --out")

    def create(self, recipe: Recipe) -> None:
        """Make the folder, with the recipe in it; where several processes may try, do it within `locked`.

        Raises:
            ConfigError: there is a run already, or the folder cannot be written to.
        """
        self.refuse_existing()
        try:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            atomic.write(self.config, recipes.as_toml(recipe).encode())
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error}; choose another --out") from error

    def recipe(self, own_model: str | None = None, own_data: str | None = None) -> Recipe:
        """The recipe that the run was made with; arguments as for `recipe.read`."""
        if not self.exists:
            raise ConfigError(f"{self.folder} holds no run (there is no {self.config.name})")
        return recipes.read(self.config, own_model, own_data)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes until the block or the process ends.

        Makes the folder, and removes it again if no run was created.

        Raises:
            ConfigError: another process has locked it, or it cannot be written to, or has links in it.
        """
        self.refuse_links()
        self._made += _make(self.folder)
        with self._lock_file() as lock:
            try:
                yield
            finally:
                if not self.exists:
                    lock.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # the folder is not empty
                        for folder in self._made:
                            folder.rmdir()

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[Path]:
        lock = self.folder / ".lock"
        while True:
            try:
                with Folder(self.folder) as folder:
                    file = folder.open(lock.name, os.O_RDWR | os.O_CREAT, "rb+")
            except OSError as error:
                raise ConfigError(f"{self.folder} cannot be written to: {error}; choose another --out") from error
            with file:
                if not atomic.lock(file.fileno(), wait=False, without=True):
                    raise ConfigError(f"another process is writing to {self.folder}; wait for it, or stop it")
                if _is(file, lock):
                    yield lock
                    return
                # The last holder has removed the file in the meantime: another process would make a new one.

    def write_metrics(self, history: Sequence[records.Epoch]) -> None:
        """Write all rows: after a resume, rows of epochs that are repeated are gone."""
        columns = [field.name for field in dataclasses.fields(records.Epoch) if field.name != "keep_probs"]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(epoch) for epoch in history)
        atomic.write(self.metrics, text.getvalue().encode())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path]:
        """The newest first. Other files in their folder are not ours."""
        try:
            with Folder(self._checkpoints, is_link_allowed=False) as folder:
                names = folder.names()
        except FileNotFoundError:
            return []
        return [self._checkpoints / name for name in reversed(names) if _CHECKPOINT.fullmatch(name)]

    def save(self, state: Mapping[str, Any], step: int) -> Path:
        """Write a checkpoint, and then remove all but the last few."""
        path = self._checkpoints / f"step-{step:09d}.pt"
        checkpoints.write(state, path, is_link_allowed=False)
        with Folder(self._checkpoints, is_link_allowed=False) as folder:
            before = [one for one in self.checkpoints() if one.name < path.name]  # later ones are of another run
            for old in before[NUM_CHECKPOINTS - 1 :]:
                folder.remove(old.name)
            atomic.remove_partials(folder, _CHECKPOINT.pattern)
            for name in folder.names():
                if _CHECKPOINT.fullmatch(name.removesuffix(".partial")) and name.endswith(".partial"):
                    folder.remove(name)  # of an older version
        return path

    def latest(self) -> Mapping[str, Any] | None:
        """The newest checkpoint that can be read; None if there never was one.

        Raises:
            CheckpointError: there are some, and all are damaged.
        """
        damaged: list[Path] = []
        first: CheckpointError | None = None
        for path in self.checkpoints():
            try:
                state = checkpoints.read(path)
            except CheckpointError as error:
                logger.warning("%s; using the one before it", error)
                damaged.append(path)
                first = first or error
                continue
            with Folder(self._checkpoints, is_link_allowed=False) as folder:
                for one in damaged:  # only now, when there is a good one: it must not count among the last few
                    folder.replace(one.name, one.with_suffix(".damaged").name)
            return state
        if first is not None:
            raise CheckpointError(f"no checkpoint in {self._checkpoints} can be read; {first}")
        return None


def claim(folder: Path) -> Run:
    """A run in this folder, or in the first free one of folder-2, folder-3, ...

    Raises:
        ConfigError: it cannot be made.
    """
    parents = _make(folder.parent)
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()
            return Run(candidate, made=[candidate, *parents])
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{candidate} cannot be made: {error}; choose another --out") from error


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it; returns the ones that were not there, from the inside out."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}; choose another --out") from error
    return missing


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


class Events:
    """TensorBoard events: scalars of every epoch. Without the package tensorboard there are none, with one warning.

    Args:
        folder: folder to write to; None writes nothing.
        first_step: events of epochs from this one on, which a killed run has left, are dropped.
    """

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

    def write(self, epoch: records.Epoch) -> None:
        if self._writer is None:
            return
        for field, tag in _SCALARS.items():
            if (value := getattr(epoch, field)) is not None:
                self._writer.add_scalar(tag, value, epoch.epoch)
        self._writer.flush()
