"""Policies by name, with the settings that a training has for all of them."""

from __future__ import annotations

import math

from slimstart.costs import CostTable
from slimstart.structure.bernoulli import BernoulliUnits
from slimstart.structure.budgets import Budget
from slimstart.structure.equal_worth import ROUNDS, EqualWorth
from slimstart.structure.estimators import Estimator, get_estimator
from slimstart.structure.policies import Policy

POLICIES = ("paper", "equal_worth")
COUPLING = {"paper": "filter", "equal_worth": "stream"}
SEARCH = 0.1  # of the training, for all rounds of "equal_worth"


def make_policy(
    name: str,
    table: CostTable,
    budget: Budget,
    *,
    estimator: str | Estimator,
    alpha: float,
    lr: float,
    total_steps: int | None,
    resample_every: int,
    seed: int,
    sampling: str | None,
    align: int | None,
) -> Policy:
    """One of `POLICIES`; arguments as for `SparseTraining`, those that mean nothing to it included."""
    if name == "equal_worth":
        return EqualWorth(table, budget) if align is None else EqualWorth(table, budget, align=align)
    estimator = get_estimator(estimator)
    return BernoulliUnits(
        table,
        budget,
        estimator,
        alpha=alpha,
        lr=lr,
        total_steps=None if total_steps is None else max(1, math.ceil(total_steps / resample_every)),
        seed=seed,
        sampling=sampling or ("capped" if estimator.centred else "bernoulli"),
    )


def default_window(name: str, total_steps: int | None) -> int:
    """Steps between two draws where nobody has said how many."""
    if name == "paper":
        return 1
    return 50 if total_steps is None else max(1, round(SEARCH * total_steps / ROUNDS))
