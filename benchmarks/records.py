"""What every record of a benchmark carries besides its rows."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def write(path: Path, benchmark: str, rows: list[dict[str, Any]], device: str = "cpu", **settings: Any) -> None:
    """Write a record: name, commit of the code, command, hardware, PyTorch's version, settings, rows."""
    on_cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {
        "benchmark": benchmark,
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else on_cpu,
        "torch": torch.__version__,
        **settings,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
