"""Tables of times in JSON files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from slimstart.costs import LatencyTable
from slimstart.errors import CheckpointError
from slimstart.io import atomic
from slimstart.io.files import read_bytes

MAX_BYTES = 2**26
LARGEST = 2**62  # picoseconds; coefficients are int64


def save_table(table: LatencyTable, path: str | os.PathLike[str]) -> None:
    """Write a table as JSON."""
    atomic.write(path, (json.dumps(asdict(table), indent=1) + "\n").encode())


def load_table(path: str | os.PathLike[str]) -> LatencyTable:
    """Read a table that `save_table` wrote.

    Raises:
        CheckpointError: the file cannot be read, or is of another kind or version.
    """
    try:
        content = json.loads(read_bytes(path, MAX_BYTES))
        terms = tuple((tuple(int(factor) for factor in factors), int(time)) for factors, time in content.pop("terms"))
        table = LatencyTable(terms=terms, **content)
        numbers: list[Any] = [
            table.dense_ms,
            table.near,
            table.error,
            table.constant,
            *(time for _, time in table.terms),
        ]
        if not all(isinstance(number, int | float) and 0 <= number < LARGEST for number in numbers):
            raise ValueError("it has a number that is out of range, or no number")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a table of latencies: {error}") from error
    if table.version != LatencyTable.version:
        raise CheckpointError(f"{os.fspath(path)} is of version {table.version}; measure again")
    return table
