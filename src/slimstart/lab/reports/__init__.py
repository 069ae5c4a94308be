"""Records to tables, figures, one HTML page and one page of Markdown. torch is not needed for any of it.

`rows` finds records and joins the seeds of one setting, `tables` has the columns of all tables, `series` gives rows
their colours and markers. `plots`, `panels` and `structures_over_time` are the figures; they draw on a
`canvas` that takes its colours from the page. `page` fills the template `page.html`. The record itself is in
`slimstart.lab.records`, and is filled by `slimstart.lab.run`.

Open `rows` first. Only `page` imports matplotlib, so tables in a terminal do not wait for it: import it as
`slimstart.lab.reports.page`.
"""

from slimstart.lab.reports.rows import Row, by_network, find, summarise
from slimstart.lab.reports.tables import COLUMNS, Column, markdown, shown

__all__ = ["COLUMNS", "Column", "Row", "by_network", "find", "markdown", "shown", "summarise"]
