"""The size of the code, from the record of `benchmarks/architecture.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages.stored import Results
from slimstart.lab.reports.tables import MISSING, markdown_table

COUNTS = {
    "modules": "modules",
    "lines": "lines",
    "entries": "files and folders at the root",
    "longest_chain": "longest chain of imports",
}
STEPS = {
    "files": "files of a step",
    "crossings": "calls between folders in it",
    "most_files": "files of a step that changes the structure",
    "most_crossings": "calls between folders in it",
}
POLICIES = {"equal_worth": "default policy", "paper": "policy paper"}


def table(results: Results) -> str:
    """One column for each code base, and one for our library alone."""
    record = results.benchmarks["architecture.json"]
    before, now, opacus = record["rows"]
    columns: list[Mapping[str, Any]] = [before, now, now["library"], opacus]
    lines = [["", f"before ({record['before']})", "now", "of it the library", f"opacus {opacus['version']}"]]
    lines += [[title, *(f"{column[name]:,}" for column in columns)] for name, title in COUNTS.items()]
    arguments = [before["arguments"], now["arguments"], now["arguments"], opacus["arguments"]]
    lines.append(["arguments of the front door", *map(str, arguments)])
    for policy, about in POLICIES.items():
        # A step of the paper's policy may change the structure each time.
        for name, title in list(STEPS.items())[: 4 if policy == "equal_worth" else 2]:
            ours = [str(one["steps"][policy][name]) for one in (before, now, now)]
            only = policy == "equal_worth" and not name.startswith("most")  # opacus has one kind of step
            lines.append([f"{title}, {about}", *ours, str(opacus["steps"][""][name]) if only else MISSING])
    return "\n".join(markdown_table(lines, lines[0][:1]))
