"""Tables of times in JSON files."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from slimstart.costs import PARTS, LatencyTable
from slimstart.errors import CheckpointError
from slimstart.io import atomic
from slimstart.io.files import read_bytes

MAX_BYTES = 2**26
LONGEST = 10**6  # milliseconds; of more, femtoseconds would not be int64


def save_table(table: LatencyTable, path: str | os.PathLike[str]) -> None:
    """Write a table as JSON, without its timer."""
    content = {field.name: getattr(table, field.name) for field in fields(table) if field.compare}
    atomic.write(path, (json.dumps(content, indent=1) + "\n").encode())


def load_table(path: str | os.PathLike[str]) -> LatencyTable:
    """Read a table that `save_table` wrote. To time the networks of a training too, give it to `measure_latency`.

    Raises:
        CheckpointError: the file cannot be read, or is of another kind or version.
    """
    try:
        content = json.loads(read_bytes(path, MAX_BYTES))
        if content["version"] != LatencyTable.version:
            raise CheckpointError(f"{os.fspath(path)} is of version {content['version']}; measure again")
        if content.keys() != {field.name for field in fields(LatencyTable) if field.compare}:
            raise ValueError("it has other entries")
        table = LatencyTable(**content)
        if table.parts.keys() != set(PARTS):
            raise ValueError(f"its parts are not {', '.join(PARTS)}")
        numbers: list[Any] = [table.dense_ms, table.error, *table.parts.values()]
        for number in numbers:
            if not (isinstance(number, int | float) and 0 <= number < LONGEST) or not table.dense_ms:
                raise ValueError("it has a number that is out of range, or no number")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a table of latencies: {error}") from error
    return table
