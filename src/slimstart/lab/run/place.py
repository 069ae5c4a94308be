"""Where a run computes. Nothing here imports PyTorch, because `--help` shows the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slimstart.errors import ConfigError
from slimstart.lab.recipes.recipe import setting

BATCH_NORMS = ("synchronised", "per-rank")


@dataclass(frozen=True)
class Place:
    """Device, folders and engine of a run; nothing here is meant to change a result, except batch norm per rank."""

    device: str = setting("auto", "Device that trains: cpu, cuda, cuda:1, ...; auto chooses a GPU if there is one.")
    data_dir: Path | None = field(default=None, metadata={"help": "Folder or file of the data set; data by default."})
    workers: int = setting(4, "Processes that decode the images of an image_folder.")
    download: bool = setting(True, "Download CIFAR if it is not in the data folder.")
    checkpoint_seconds: float = setting(
        60.0, "Save a checkpoint once this many seconds have passed since the last one."
    )
    step_times: bool = setting(False, "Measure the time of a training step at the end of the run.")
    engine: str = setting("auto", "How steps run: eager, graphs (CUDA graphs), or auto for the faster of them.")
    batch_norm: str = setting(
        "synchronised",
        "Batch norm with several processes: synchronised (the same as in one process) or per-rank (faster).",
    )

    def __post_init__(self) -> None:
        from slimstart.steps import ENGINES

        for name in ("workers", "checkpoint_seconds"):
            if not getattr(self, name) >= 0:  # NaN is not, either
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it must not be negative")
        if self.engine not in ENGINES:
            raise ConfigError(f"`engine` is {self.engine!r}; it must be one of {', '.join(ENGINES)}")
        if self.batch_norm not in BATCH_NORMS:
            raise ConfigError(f"`batch_norm` is {self.batch_norm!r}; it must be one of {', '.join(BATCH_NORMS)}")
