"""Records of benchmarks: rows, and facts about the code and the machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from slimstart.io import atomic
from slimstart.lab.run import environment as surroundings


def write(path: Path, benchmark: str, rows: list[dict[str, Any]], device: str = "cpu", **settings: Any) -> None:
    """Write a record: name, command, facts about the code and the machine, settings, rows."""
    record = {
        "benchmark": benchmark,
        "command": shlex.join(["python", *sys.argv]),
        **surroundings.facts(torch.device(device)),
        **settings,
        "rows": rows,
    }
    atomic.write(path, (json.dumps(record, indent=1) + "\n").encode())
