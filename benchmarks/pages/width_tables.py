"""Tables of how the settings of equal worth were chosen, from the records of `benchmarks/ablation.py`."""

from __future__ import annotations

import statistics
from collections import defaultdict

from pages.naming import model_title
from pages.stored import Results
from slimstart.lab.reports.tables import MISSING, markdown_table

PLACES = {  # model and budget, as documents write them
    ("vgg19", "flops=0.1"): "VGG-19, 10 %",
    ("vgg19", "flops=0.018"): "VGG-19, 1.8 %",
    ("resnet32", "flops=0.1"): "ResNet-32, 10 %",
}
FORMS = {  # the variants of the table, in words
    "equal_worth": "the default: a pull of 8, a fifth of the training",
    "equal_worth+epochs=47": "the default for 47 epochs",
    "pull=2": "a pull of 2",
    "pull=1": "a pull of 1",
    "centred": "of gradients less their mean in step 3",
    "centred+pull=2": "of gradients less their mean in step 3, a pull of 2",
    "align=1": "single units, not multiples of 8",
    "fine_search": "single units until the last round",
    "finer": "single units until the last round, and finer steps for thin groups",
    "nearest": "multiples of 8 that are nearest to what is wanted",
    "staying": "widths remain while they are less than a step away",
    "clipped_behind": "a round is clipped after step 5, not before",
    "redundant": "without step 3",
    "redundant+pull=2": "without step 3, a pull of 2",
    "redundant+pull=1": "without step 3, a pull of 1",
    "redundant+pull=0": "without steps 3 and 5",
    "redundant+pull=2+cost_blind": "without step 3, a pull of 2, and without the cost of a unit",
    "redundant+pull=2+any_unit": "without step 3, a pull of 2, and any unit leaves",
    "frozen": "the start of the search, trained to the end",
    "redundant+share=0.4+pull=1": "without step 3, a pull of 1, two fifths of the training",
    "redundant+share=0.1+pull=1": "without step 3, a pull of 1, a tenth",
    "anew+share=0.036+pull=1": "256 steps, a pull of 1, and training starts again with new weights",
    "first=2+share=0.3": "twice the budget at first, through 30 % of the training",
    "first=1.7+share=0.4": "1.7 times the budget at first, through 40 %",
    "first=1.5+share=0.6": "1.5 times the budget at first, through 60 %",
    "frozen_first=2+share=0.3": "twice the budget at first, through 30 %, in equal shares",
    "first=0.4+share=0.5+epochs=47": "0.4 times the budget at first, through 50 % of 47 epochs",
    "uniform+epochs=47": "by hand: uniform for 47 epochs",
    "uniform+align=1": "by hand: uniform in single units",
    "front_heavy+align=1": "by hand: front-heavy in single units",
}


def forms(results: Results) -> str:
    """Accuracy of each form less that of the uniform network, on validation images."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in results.benchmarks.values():
        if record.get("benchmark") == "ablation":
            for row in record["rows"]:
                if "accuracy" in row:
                    found[row["variant"], record["model"], row["budget"]].append(row["accuracy"])
    lines = [["form", *PLACES.values()]]
    for variant, text in FORMS.items():
        cells = []
        for place in PLACES:
            own, uniform = found.get((variant, *place)), found["uniform", *place]
            difference = f"{statistics.mean(own) - statistics.mean(uniform):+.2f}" if own else MISSING
            cells.append(difference.replace("-", "−"))
        lines.append([text, *cells])
    return "\n".join(markdown_table(lines, lines[0][:1]))


def removal(results: Results) -> str:
    """The test loss around the removal of a layer: the range over the layers of each network."""
    record = results.benchmarks["removal_cpu.json"]
    titles = ["network", "before", "right after", f"{record['more']} steps later", "with the layer"]
    lines = [titles]
    for network in dict.fromkeys(row["network"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["network"] == network]
        after, later = ([row[name] for row in own] for name in ("loss_right_after", "loss_later"))
        ranges = [f"{min(losses):.2f} to {max(losses):.2f}" for losses in (after, later)]
        stayed = f"{own[0]['loss_later_with_it']:.2f}"
        lines.append([model_title(network), f"{own[0]['loss_before']:.2f}", *ranges, stayed])
    return "\n".join(markdown_table(lines, titles[:1]))


def late_waking(results: Results) -> str:
    """Accuracy of three ways to treat weights that are trained late, by learning rate."""
    rows = results.benchmarks["late_waking.json"]["rows"]
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    lines = [["variant", *(f"lr {rate:g}" for rate in rates)]]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        cells = [f"{statistics.mean(row['accuracies']):.1f} ± {row['spread']:.1f}" for row in own]
        lines.append([variant, *cells])
    return "\n".join(markdown_table(lines, lines[0][:1]))
