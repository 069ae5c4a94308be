"""Slow, obvious implementations to test the fast ones against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from slimstart.costs import CostTable, Polynomial

# --- structure: enumeration over all masks ---------------------------------------------------------------------------


def all_masks(num_units: int) -> Tensor:
    """Every mask over `num_units` units, shape (2^U, U)."""
    return torch.tensor(list(itertools.product([False, True], repeat=num_units)), dtype=torch.bool).reshape(
        -1, num_units
    )


def mask_probability(mask: Tensor, s: Tensor) -> Tensor:
    """p(m|s), one unit after the other."""
    probability = torch.ones((), dtype=torch.float64)
    for kept, keep_prob in zip(mask.tolist(), s, strict=True):
        probability = probability * (keep_prob if kept else 1 - keep_prob)
    return probability


def at_least_one(mask: Tensor, unit_group: Tensor) -> Tensor:
    """The first unit of every empty group is kept."""
    kept = mask.tolist()
    for group in set(unit_group.tolist()):
        units = [unit for unit, its_group in enumerate(unit_group.tolist()) if its_group == group]
        if not any(kept[unit] for unit in units):
            kept[units[0]] = True
    return torch.tensor(kept, dtype=torch.bool)


def cost_of_mask(table: CostTable, polynomial: Polynomial, mask: Tensor) -> int:
    """The polynomial, literally, after the at-least-one rule."""
    kept = at_least_one(mask, table.unit_group).tolist()

    def count(index: int) -> int:
        factor = table.factors[index]
        total = factor.offset
        for event, weight in zip(factor.events.tolist(), factor.weights.tolist(), strict=True):
            if any(kept[unit] for unit in table.events[event].tolist() if unit >= 0):
                total += weight
        return total

    cost = polynomial.constant
    for term in polynomial.terms:
        product = term.coefficient
        for index in term.factors:
            product *= count(index)
        cost += product
    return cost


def expected_cost(table: CostTable, polynomial: Polynomial, s: Tensor) -> Tensor:
    """The mean of the cost over all masks; differentiable in s."""
    total = torch.zeros((), dtype=torch.float64)
    for mask in all_masks(table.num_units):
        total = total + mask_probability(mask, s) * cost_of_mask(table, polynomial, mask)
    return total


def expected_loss(loss: Callable[[Tensor], float], s: Tensor) -> Tensor:
    """The mean of a loss over all masks; differentiable in s."""
    total = torch.zeros((), dtype=torch.float64)
    for mask in all_masks(s.numel()):
        total = total + mask_probability(mask, s) * loss(mask)
    return total


def estimator_moments(
    gradient: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    loss: Callable[[Tensor], float],
    s: Tensor,
    alpha: float,
    num_masks: int,
) -> tuple[Tensor, Tensor]:
    """Mean (U,) and total second moment E||g||^2 of an estimator, over all tuples of masks."""
    masks = all_masks(s.numel())
    losses = torch.tensor([loss(mask) for mask in masks], dtype=torch.float64)
    probabilities = torch.stack([mask_probability(mask, s) for mask in masks])
    mean, second = torch.zeros_like(s), torch.zeros((), dtype=torch.float64)
    for chosen in itertools.product(range(len(masks)), repeat=num_masks):
        rows = list(chosen)
        g = gradient(losses[rows], masks[rows], s, alpha)
        weight = probabilities[rows].prod()
        mean += weight * g
        second += weight * g.square().sum()
    return mean, second


# --- structure: projection -------------------------------------------------------------------------------------------


def nearest_by_qp(z: Sequence[float], filters: Sequence[int], limit: float) -> np.ndarray:
    """min ||s - z||^2 subject to 0 <= s <= 1 and filters @ s <= limit, by a general solver.

    With x = s - z it is a least-distance problem, min ||x|| subject to G x >= h, which Lawson and Hanson (1974, ch. 23)
    solve as one of non-negative least squares. That solver stumbles over entries of 1e-16 among those of 1.
    """
    target, normal, identity = (
        np.round(np.asarray(z, dtype=float), 12),
        np.asarray(filters, dtype=float),
        np.eye(len(z)),
    )
    G = np.vstack([identity, -identity, -normal])
    h = np.concatenate([-target, target - 1, [normal @ target - limit]])
    E = np.vstack([G.T, h])
    f = np.zeros(len(target) + 1)
    f[-1] = 1
    multipliers, _ = nnls(E, f)
    residual = E @ multipliers - f
    return target - residual[:-1] / residual[-1]


def nearest_by_breakpoints(z: Sequence[float], filters: Sequence[int], limit: float) -> np.ndarray:
    """The same, from the optimality conditions: s = clip(z - v f, 0, 1), v >= 0, by trying every linear piece."""
    target, normal = np.asarray(z, dtype=float), np.asarray(filters, dtype=float)
    if normal @ np.clip(target, 0, 1) <= limit:
        return np.clip(target, 0, 1)
    ends = sorted({0.0, *(v for v in np.concatenate([(target - 1) / normal, target / normal]) if v > 0)})
    for low, high in itertools.pairwise(ends):
        middle = target - (low + high) / 2 * normal
        free, full = (middle > 0) & (middle < 1), middle >= 1
        if not free.any():
            continue
        v = (normal[free] @ target[free] + normal[full].sum() - limit) / np.sum(normal[free] ** 2)
        if low - 1e-12 <= v <= high + 1e-12:
            return np.clip(target - v * normal, 0, 1)
    raise AssertionError("no piece has the root")
