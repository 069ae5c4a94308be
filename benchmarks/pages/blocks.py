"""Every generated table, by name; a document takes one in with `<!-- results:NAME -->` (see `markers`).

To add one: write a function from `Results` to Markdown in the module where it belongs, and name it in `BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Callable

from pages import (
    accuracy,
    code_size,
    experiment_pages,
    index,
    inline,
    step_tables,
    structure_tables,
    width_tables,
    zoo_page,
)
from pages.markers import MarkerError
from pages.stored import Results

BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": accuracy.headline,  # accuracy at equal FLOPs, short: the README's table
    "accuracy": accuracy.table,  # the same with front-heavy widths, FLOPs, and links to the experiments
    "times": step_tables.trainings,  # seconds that a whole training takes
    "paper-rows": experiment_pages.paper_rows,  # every row of the paper that was trained at its full length
    "paper-times": step_tables.paper_trainings,  # the paper's algorithm: accuracy, cost and time
    "steps-gpu": step_tables.gpu,  # milliseconds of a step of the paper's algorithm, on a GPU and on a CPU
    "steps-cpu": step_tables.cpu,
    "cpu-time": step_tables.settled_cpu,  # steps and inference on a CPU after the search, and with ONNX Runtime
    "latency": step_tables.latency,  # what networks take of a budget of time
    "gains": step_tables.gains,  # what CUDA graphs, fusion and rounded widths gain
    "scaling": step_tables.scaling,  # two processes on a CPU
    "scaling-expected": step_tables.scaling_expected,  # many GPUs, by arithmetic
    "late-waking": width_tables.late_waking,  # Adam and weights that join late
    "depth": accuracy.depth,  # layers removed by the rule, on a CPU
    "regret": structure_tables.regret,  # what rules lose to the best of these networks
    "held-out": structure_tables.held_out,  # networks and data that no constant was fitted to
    "structures": structure_tables.table,  # networks of equal FLOPs with different numbers of layers
    "transformers": structure_tables.transformers,  # small GPTs with different numbers of blocks
    "removal": width_tables.removal,  # the loss when a layer is removed in the middle of a training
    "widths": width_tables.forms,  # forms of equal worth, against uniform
    "code": code_size.table,  # modules, imports, and the files of one step
    "zoo": zoo_page.summary,  # models of torchvision, timm and transformers
    "experiments": index.experiments,  # links to the pages of all experiments
}


def value(name: str, results: Results) -> str:
    """The Markdown of a table, or the text of a number.

    Raises:
        MarkerError: there is no table and no number of this name.
    """
    if name in BLOCKS:
        return BLOCKS[name](results)
    if "/" in name:
        return inline.number(name, results)
    raise MarkerError(f"there is no table {name!r}; tables are {', '.join(BLOCKS)}")
