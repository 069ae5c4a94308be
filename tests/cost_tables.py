"""Small cost tables, written by hand or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from slimstart.costs import CostTable, Factor, Polynomial, Term
from slimstart.policies import Budget, Paper, PaperSearch


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def factor(events: Sequence[int], weights: Sequence[int] | int = 1, offset: int = 0) -> Factor:
    return Factor(offset, ints(events), ints([weights] * len(events) if isinstance(weights, int) else weights))


def cost_table(
    groups: Sequence[int],
    events: Sequence[Sequence[int]],
    factors: Sequence[Factor],
    terms: Sequence[tuple[int, tuple[int, ...]]],
    constant: int = 0,
    filters: Sequence[int] | None = None,
) -> CostTable:
    """A table whose FLOPs are the polynomial given, and whose parameters are that with all coefficients 1."""
    width = max((len(event) for event in events), default=1)
    padded = ints([unit for event in events for unit in [*event, *[-1] * (width - len(event))]]).reshape(-1, width)
    return CostTable(
        unit_group=ints(groups),
        unit_filters=ints(filters if filters is not None else [1] * len(groups)),
        events=padded,
        factors=tuple(factors),
        flops=Polynomial(constant, tuple(Term(coefficient, used) for coefficient, used in terms)),
        params=Polynomial(constant, tuple(Term(1, used) for _, used in terms)),
    )


def chain(widths: Sequence[int], inputs: int = 3, outputs: int = 10) -> CostTable:
    """A plain network: every layer reads the one before; 3x3 kernels that count 9, a classifier that is not cut."""
    groups = [layer for layer, width in enumerate(widths) for _ in range(width)]
    factors = [factor([], offset=inputs)]
    start = 0
    for width in widths:
        factors.append(factor(range(start, start + width)))
        start += width
    terms: list[tuple[int, tuple[int, ...]]] = [(9, (layer, layer + 1)) for layer in range(len(widths))]
    terms.append((outputs, (len(widths),)))
    return cost_table(groups, [[unit] for unit in range(start)], factors, terms, constant=outputs)


@st.composite
def cost_tables(draw: st.DrawFn, max_units: int = 6, every_unit_costs: bool = False) -> CostTable:
    """Anything goes: groups of any size in any order, events that share units, factors that share events."""
    num_units = draw(st.integers(1, max_units))
    labels = draw(st.lists(st.integers(0, 2), min_size=num_units, max_size=num_units))
    names = sorted(set(labels))
    units = st.integers(0, num_units - 1)
    events = draw(st.lists(st.lists(units, min_size=1, max_size=4), min_size=1, max_size=6))
    entries = st.lists(st.tuples(st.integers(0, len(events) - 1), st.integers(1, 5)), max_size=5)
    factors = [
        factor([event for event, _ in chosen], [weight for _, weight in chosen], offset)
        for chosen, offset in draw(st.lists(st.tuples(entries, st.integers(0, 3)), min_size=1, max_size=4))
    ]
    index = st.integers(0, len(factors) - 1)
    terms = draw(
        st.lists(st.tuples(st.integers(1, 9), st.one_of(st.tuples(index), st.tuples(index, index))), max_size=5)
    )
    if every_unit_costs:
        terms.append((draw(st.integers(1, 9)), (len(factors),)))
        factors.append(factor(range(len(events), len(events) + num_units)))
        events += [[unit] for unit in range(num_units)]
    filters = draw(st.lists(st.integers(1, 4), min_size=num_units, max_size=num_units))
    return cost_table(
        [names.index(label) for label in labels], events, factors, terms, draw(st.integers(0, 5)), filters
    )


def search(costs: CostTable, budget: Budget, total_steps: int | None = None, **settings: Any) -> PaperSearch:
    """A learner of the paper's policy whose draws have no cap."""
    return Paper(**{"sampling": "bernoulli", **settings}).start(costs, budget, total_steps)
