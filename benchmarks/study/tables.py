"""Tables of studies, in a terminal and in Markdown, and their findings in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from slimstart.lab.reports.tables import MISSING
from study.records import FlipRow, Study, VarianceRow


def cells(study: Study) -> list[list[str]]:
    """Titles and cells: a line for each layer, or for each epoch that was measured."""
    return _variance(study.variance) if study.variance else _flip(study.flip)


def findings(study: Study) -> Iterator[str]:
    """The findings and what the paper reports, as sentences without full stops."""
    return _variance_findings(study.variance) if study.variance else _flip_findings(study.flip)


def with_error(value: float | None, error: float | None) -> str:
    return MISSING if value is None or error is None else f"{short(value)} ± {short(error)}"


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _variance(rows: tuple[VarianceRow, ...]) -> list[list[str]]:
    """Variances of the estimators, and their ratios to that of the first one."""
    first, *others = dict.fromkeys(row.estimator for row in rows)
    titles = ["layer", "channels", "rarely drawn", first]
    for name in others:
        titles += [name, "ratio"]
    lines: dict[str | None, list[str]] = {}
    for row in rows:
        line = lines.setdefault(row.layer, [row.layer or "all", str(row.num_units), str(row.num_rare)])
        line.append(with_error(row.variance, row.standard_error))
        if row.estimator != first:
            line.append(with_error(row.ratio, row.ratio_error))
    return [titles, *lines.values()]


def _flip(rows: tuple[FlipRow, ...]) -> list[list[str]]:
    titles = ["epoch", "channels", "E[L²]", "V", "V max", "V max, biased upwards", "V max − V"]
    return [
        titles,
        *(
            [
                *(str(row.epoch), f"{row.num_tried} of {row.num_units}"),
                with_error(row.squared_loss, row.squared_loss_error),
                with_error(row.dispersion, row.dispersion_error),
                with_error(row.max_dispersion, row.max_dispersion_error),
                short(row.max_dispersion_naive),
                with_error(row.excess, row.excess_error),
            ]
            for row in rows
        ),
    ]


def _variance_findings(rows: tuple[VarianceRow, ...]) -> Iterator[str]:
    """Variances of estimators divided by that of the first one, over all layers and at most."""
    first, *others = dict.fromkeys(row.estimator for row in rows)
    for name in others:
        known = [row for row in rows if row.estimator == name and row.ratio is not None]
        most = max(known, key=lambda row: row.ratio or 0.0, default=None)
        for row in known:
            if row.layer is None and most is not None:
                times, where = with_error(row.ratio, row.ratio_error), most.layer or "all layers together"
                yield f"{name} has {times} times the variance of {first}, at most {short(most.ratio or 0)} ({where})"
    yield "The paper reports up to three orders of magnitude between PGE and VR-PGE, for VGG-19"


def _flip_findings(rows: tuple[FlipRow, ...]) -> Iterator[str]:
    """Ratios of E[L^2] and V_max to V, from the smallest to the largest."""
    known = [row for row in rows if row.dispersion > 0]
    if known:
        losses = _span([row.squared_loss / row.dispersion for row in known])
        yield f"E[L²] is {losses} times V, V max {_span([row.max_dispersion / row.dispersion for row in known])} times"
    yield "The paper reports four orders of magnitude, and a V max that is very close to V, for ResNet-32"


def _span(values: list[float]) -> str:
    return " to ".join(dict.fromkeys(map(short, (min(values), max(values)))))
