"""Records to tables, figures, one HTML page and one page of Markdown. torch is not needed for any of it.

Here: finding records and joining the seeds of one setting (`rows`), what is shown of a row (`tables`), how it looks
(`series`), figures (`points`, `curves`, `panels`) on a canvas that takes its colours from the page around it
(`canvas`), and the page (`page` with its template `page.html`). Not here: what a record holds and how it is read
(`slimstart.lab.records`), and what fills it (`slimstart.lab.run`).

Open `rows` first. `page` alone loads the figures, and with them matplotlib, so that a table in a terminal does not
wait for it: import it as `slimstart.lab.reports.page`.
"""

from slimstart.lab.reports.rows import Row, by_network, find, summarise
from slimstart.lab.reports.tables import COLUMNS, Column, markdown, shown

__all__ = ["COLUMNS", "Column", "Row", "by_network", "find", "markdown", "shown", "summarise"]
