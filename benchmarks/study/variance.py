"""Variance of the structure gradient by layer, for several estimators on the same masks.

The paper plots this for VR-PGE and PGE. Here it is the total variance, over masks and batches: for every unit that of
its entry of the estimate, then the mean over the units of a layer. Units with s at 0 or 1 have no gradient, and are not
counted. Estimators share masks, losses and batches, so that their ratio is known better than each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.errors import ConfigError
from slimstart.graph import ChannelGraph
from slimstart.lab.run.make_method import Batch, Method
from slimstart.policies import get_estimator, sample
from study.dispersion import jackknife_error, leave_one_out_variances, total_variance
from study.losses import MaskedLosses, search_in
from study.records import VarianceRow

RARE = 10  # masks
PLAIN = "_plain"  # suffix of the name of an estimator: without the preconditioner, alpha = 0

Part = tuple[str | None, Tensor]
"""A layer, and its units with s between 0 and 1; None means all layers."""


@dataclass(frozen=True)
class VarianceSettings:
    """Settings of `run_study.py variance`; variances are divided by that of the first estimator."""

    estimators: tuple[str, ...] = ("vr_pge", "pge", "pge_plain")
    batches: int = 16  # at least 3
    draws: int = 64  # masks on each batch
    seed: int = 0  # of masks and batches


def variance_rows(method: Method, batches: Iterable[Batch], settings: VarianceSettings) -> tuple[VarianceRow, ...]:
    """Measure with the current weights and s of a search: rows of all layers together, then of every layer.

    Each estimator takes the masks of a batch in turns, as many at a time as it needs, so that its estimates are
    independent of each other.

    Raises:
        ConfigError: there is no search, it is over, or every s is 0 or 1.
    """
    search, learner = search_in(method)
    s = learner.keep_probs
    parts = _parts(search.graph, (s > 0) & (s < 1))
    losses, generator = MaskedLosses(search), torch.Generator().manual_seed(settings.seed)
    # For every estimator and batch, the mean of the estimates and of their squares.
    moments: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in settings.estimators}
    num_masks = 0
    for number, batch in enumerate(batches):
        masks = sample(s, settings.draws, generator)
        found = losses(masks, batch, seed=settings.seed + number)
        num_masks += len(masks)
        for name in settings.estimators:
            gradients = _gradients(name, found, masks, s, learner.settings.alpha)
            moments[name].append((gradients.mean(0), gradients.square().mean(0)))
    rare = torch.minimum(s, 1 - s) * num_masks < RARE
    return tuple(_rows(parts, rare, {name: _statistics(parts, found) for name, found in moments.items()}))


def _gradients(name: str, losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
    """(R, U): independent estimates, each from its own masks."""
    estimator = get_estimator(name.removesuffix(PLAIN))
    n, alpha = estimator.num_masks, 0.0 if name.endswith(PLAIN) else alpha
    starts = range(0, len(losses) - n + 1, n)
    return torch.stack([estimator.gradient(losses[k : k + n], masks[k : k + n], s, alpha) for k in starts])


def _statistics(parts: Sequence[Part], moments: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean variance in every part (P,), and the same without one batch each (B, P)."""
    means, squares = (torch.stack(each) for each in zip(*moments, strict=True))
    every, without_one = total_variance(means, squares), leave_one_out_variances(means, squares)
    return (
        torch.stack([every[units].mean() for _, units in parts]),
        torch.stack([without_one[:, units].mean(1) for _, units in parts], 1),
    )


def _rows(parts: Sequence[Part], rare: Tensor, found: dict[str, tuple[Tensor, Tensor]]) -> Iterator[VarianceRow]:
    first, first_without_one = next(iter(found.values()))
    known = (first > 0) & (first_without_one > 0).all(0)
    for i, (layer, units) in enumerate(parts):
        for name, (variance, without_one) in found.items():
            ratios = without_one[:, i] / first_without_one[:, i]
            yield VarianceRow(
                layer=layer,
                estimator=name,
                num_units=units.numel(),
                num_rare=int(rare[units].sum()),
                variance=float(variance[i]),
                standard_error=float(jackknife_error(without_one[:, i])),
                ratio=float(variance[i] / first[i]) if known[i] else None,
                ratio_error=float(jackknife_error(ratios)) if known[i] else None,
            )


def _parts(graph: ChannelGraph, free: Tensor) -> list[Part]:
    units = free.nonzero().squeeze(1)
    if not units.numel():
        raise ConfigError("every keep-probability is 0 or 1, and has no gradient; give a run that is still searching")
    inside = [(group.name, units[(units >= group.units.start) & (units < group.units.stop)]) for group in graph.groups]
    return [(None, units), *((name, own) for name, own in inside if own.numel())]
