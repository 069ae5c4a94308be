"""Policies by name, with the settings that a training has for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from slimstart.costs import CostTable
from slimstart.policies.bernoulli import ALPHA, STRUCTURE_LR, BernoulliUnits
from slimstart.policies.budgets import Budget
from slimstart.policies.equal_worth import ALIGN, ROUNDS, EqualWorth
from slimstart.policies.estimators import Estimator, get_estimator
from slimstart.policies.policies import Policy

POLICIES = ("equal_worth", "paper")
COUPLING = {"equal_worth": "stream", "paper": "filter"}
SEARCHED = 0.2  # share of a training that "equal_worth" searches
WINDOW = 50  # steps between two of its draws where nobody knows how long the training is


def make_policy(
    policy: str | Callable[[CostTable], Policy],
    table: CostTable,
    budget: Budget | None,
    *,
    resample_every: int,
    total_steps: int | None = None,
    seed: int = 0,
    align: int | None = None,
    estimator: str | Estimator | None = None,
    alpha: float | None = None,
    structure_lr: float | None = None,
    sampling: str | None = None,
) -> Policy:
    """One of `POLICIES`, or one of the user's own; arguments as for `SparseTraining`.

    Raises:
        ValueError: a setting of the paper's policy was given for another one.
    """
    if policy != "paper":
        of_the_paper = {"estimator": estimator, "alpha": alpha, "sampling": sampling, "structure_lr": structure_lr}
        for setting, value in of_the_paper.items():
            if value is not None:
                raise ValueError(
                    f"`{setting}` is {value!r}, a setting of the paper's policy; give policy='paper' with it, or leave "
                    "it out"
                )
    if callable(policy):
        return policy(table)
    assert budget is not None
    if policy == "equal_worth":
        rounds = ROUNDS if total_steps is None else _rounds(total_steps, resample_every)
        return EqualWorth(table, budget, align=ALIGN if align is None else align, rounds=rounds)
    estimator = get_estimator("vr_pge" if estimator is None else estimator)
    return BernoulliUnits(
        table,
        budget,
        estimator,
        alpha=ALPHA if alpha is None else alpha,
        lr=STRUCTURE_LR if structure_lr is None else structure_lr,
        total_steps=None if total_steps is None else max(1, math.ceil(total_steps / resample_every)),
        seed=seed,
        sampling=sampling or ("capped" if estimator.centred else "bernoulli"),
    )


def default_window(name: str, total_steps: int | None) -> int:
    """Steps between two draws where nobody has said how many."""
    if name == "paper":
        return 1
    return WINDOW if total_steps is None else max(1, round(SEARCHED * total_steps / ROUNDS))


def steps_to_give(policy: str, search_steps: float, all_steps: float) -> int:
    """The `total_steps` for a policy that is to search for so many steps, at most, of a training.

    The paper's policy takes them for the steps of the search; "equal_worth" for those of the whole training, of which
    it searches a share.
    """
    if policy == "equal_worth":
        search_steps = min(all_steps, search_steps / SEARCHED)
    return max(1, round(search_steps))


def _rounds(total_steps: int, window: int) -> int:
    """How many windows are about the share of a training that is searched."""
    return min(ROUNDS, max(1, round(SEARCHED * total_steps / window)))
