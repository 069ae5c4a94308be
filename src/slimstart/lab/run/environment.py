"""The environment of a run: device, precision switches, generators, memory, and the facts for its record."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimstart import __version__
from slimstart.errors import ConfigError
from slimstart.lab import data
from slimstart.lab.data.augmentation import RandAugment
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.place import Place as Place


def now() -> str:
    """The present time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """The command line of this process."""
    name = Path(sys.argv[0]).name
    return shlex.join(["slimstart" if name == "__main__.py" else name, *sys.argv[1:]])


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("it is neither a CPU nor a CUDA device")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`device` is {name!r}, which cannot be used here ({reason}); try cpu") from error
    return device


def load_data(
    recipe: Recipe,
    place: Place,
    device: torch.device,
    progress: Callable[[int, int | None], None] | None = None,
    share: data.Share = data.WHOLE,
) -> data.ImageData:
    """The data that a recipe names, from this place, with batches, or a share of each, on the device."""
    return data.load(
        recipe.data,
        data_dir=place.data_dir,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        device=device,
        validation=recipe.validation,
        image_size=recipe.image_size,
        num_workers=place.workers,
        download=place.download,
        progress=progress,
        share=share,
        augment=RandAugment(recipe.rand_augment, recipe.rand_augment_magnitude or 0.0) if recipe.rand_augment else None,
    )


def suited(model: nn.Module, home: torch.device, device: torch.device) -> nn.Module:
    """The model on its home device, in the memory format that is fastest on the device that trains."""
    model = model.to(home)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model  # type: ignore[call-overload]


def set_precision(precision: str) -> None:
    """Allow TF32 only where the recipe does; by default cuDNN would use it for float32."""
    allowed = precision != "float32"
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of PyTorch's generators, which dropout uses; `set_random_state` is the inverse."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on the GPU, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def facts(device: torch.device) -> dict[str, Any]:
    """The fields of a record about software and hardware."""
    on_cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "commit": _commit(),
        "version": __version__,
        "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """The commit of the code, with a "+" where files have been changed since.

    For code that was copied without its history, the variable SLIMSTART_COMMIT says which commit it is.
    """
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)  # this clone, not one that we are installed in
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SLIMSTART_COMMIT")


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
