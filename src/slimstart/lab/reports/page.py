"""One HTML page from records: one file, without scripts, for small screens and dark mode, too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from importlib import resources

import jinja2
from markupsafe import Markup

from slimstart.errors import RecordError
from slimstart.io import atomic
from slimstart.lab.control_characters import visible
from slimstart.lab.records import Record
from slimstart.lab.reports import panels, plots, structures_over_time
from slimstart.lab.reports.canvas import short
from slimstart.lab.reports.rows import by_network, summarise
from slimstart.lab.reports.series import series_of
from slimstart.lab.reports.tables import COLUMNS, MISSING, duration, number

FIGURES = (
    plots.accuracy_by_train_cost,
    plots.accuracy_by_flops,
    plots.train_cost_by_flops,
    plots.train_cost_per_epoch,
    plots.accuracy_per_epoch,
    panels.step_time,
    panels.training_time,
    structures_over_time.widths_over_time,
    panels.widths,
    panels.flops,
    panels.keep_probs,
)


def render(records: Sequence[Record]) -> str:
    """The page as text. The same records in any order give the same bytes."""
    if not records:
        raise RecordError("`records` is empty: a report needs at least one finished run")
    rows = summarise(records)
    looks = {one.row: one for one in series_of(rows)}
    networks = []
    for name, group in by_network(rows).items():
        figures = [figure for paint in FIGURES if (figure := paint([looks[row] for row in group])) is not None]
        columns = [column for column in COLUMNS if any(column.cell(row) != MISSING for row in group)]
        networks.append({"name": name, "rows": group, "columns": columns, "figures": figures})
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"svg": Markup, "json": _json, "number": number, "duration": duration}
    source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        networks=networks,
        runs=[run for row in rows for run in row.runs],
        looks=looks,
        facts=_facts(records),
    )
    return visible(page)


def write(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Write the page, atomically."""
    atomic.write(path, render(records).encode())


def _facts(records: Sequence[Record]) -> dict[str, str]:
    """Facts about all runs, for the head of the page."""
    days = sorted(datetime.fromisoformat(moment).date() for run in records for moment in (run.started, run.finished))
    seeds = len({run.seed for run in records})
    return {
        "runs": f"{len(records)}, with {seeds} seed{'s' * (seeds > 1)}" if len(records) > 1 else "1",
        "methods": _listed(run.method for run in records),
        "when": " to ".join(dict.fromkeys((_shown(days[0]), _shown(days[-1])))),
        "hardware": _listed(run.hardware for run in records),
        "torch": _listed(run.torch for run in records),
        "commit": _listed((run.commit or "unknown")[:10] for run in records),
    }


def _listed(names: Iterable[str]) -> str:
    found = sorted({short(name, 40) for name in names})
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def _shown(day: date) -> str:
    return f"{day.day} {day:%b %Y}"


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
