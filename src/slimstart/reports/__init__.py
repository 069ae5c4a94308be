"""Records to tables, figures, one HTML page and one page of Markdown. torch is not needed for any of it.

Here: finding records and joining the seeds of one setting (`rows`), what is shown of a row (`tables`), how it looks
(`series`), figures (`points`, `curves`, `panels`) on a canvas that takes its colours from the page around it
(`drawing`), and the page (`page` with its template `page.html`); runs beside the paper's numbers (`results`, which is
docs/results.md) and beside each other (`rivals`); studies (`study_tables`, `study_plot`) and benchmarks (`bench_plot`).
Not here: what a record holds and how it is read (`slimstart.records`, `bench_records`, `study_records`), and what fills
it (`slimstart.recipes`).

Open `rows` first. `page` alone loads the figures, and with them matplotlib, so that a table in a terminal does not
wait for it: import it as `slimstart.reports.page`.
"""

from slimstart.reports.rows import Row, by_network, find, summarise
from slimstart.reports.tables import COLUMNS, Column, markdown, shown

__all__ = ["COLUMNS", "Column", "Row", "by_network", "find", "markdown", "shown", "summarise"]
