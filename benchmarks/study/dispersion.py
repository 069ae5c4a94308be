r"""Unbiased estimates of the dispersion of losses of sampled masks, and of the variance of gradients of s.

The appendix of the paper uses two numbers, for independent :math:`m, m' \sim p(\cdot|s)` and the loss L on a batch:

.. math:: V(s) = \mathbb{E}\,(L(m) - L(m'))^2, \qquad
          V_{\max}(s) = \max_{j,\,v \in \{0,1\}} V_{jv}(s), \quad V_{jv}(s) = \mathbb{E}\,[(L(m) - L(m'))^2 | m_j = v].

`pair_dispersion` and `flip_dispersion` estimate :math:`V` and :math:`V_{jv}` from the losses of n masks on one batch;
`largest` takes the maximum over noisy means; `total_variance` is that of a gradient over masks and batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def pair_dispersion(losses: Tensor) -> Tensor:
    r"""V(s) from the losses of n independent masks on one batch, as the mean over all pairs of different masks:

    .. math:: \frac{1}{n (n - 1)} \sum_{k \ne l} (L_k - L_l)^2,

    which is twice the sample variance. Masks of a pair are independent, so it is unbiased.

    Args:
        losses: (..., n), n >= 2.
    """
    _check("losses", losses)
    return 2 * losses.var(-1)


def flip_dispersion(losses: Tensor, changed: Tensor) -> Tensor:
    r"""V_jv(s) from the same masks, in which unit j was then set to v: losses :math:`L'_k` in place of :math:`L_k`.

    .. math:: \frac{1}{n (n - 1)} \sum_{k \ne l} (L'_k - L_l)^2

    Where a mask already has :math:`m_j = v`, :math:`L'_k = L_k`. So the difference to `pair_dispersion` of the same
    losses is due to the unit: most of the noise is common to both.

    Args:
        losses: (n,), of the masks as they were drawn, n >= 2.
        changed: (..., n), of the same masks with one unit set.
    """
    _check("losses", losses)
    n = losses.shape[-1]
    if changed.shape[-1:] != (n,):
        raise ValueError(f"`changed` has shape {tuple(changed.shape)}; it needs one loss for each of the {n} masks")
    centre = losses.mean(-1, keepdim=True)  # subtracted before squaring, for precision
    own, other = losses - centre, changed - centre
    every = n * (own.square().sum(-1) + other.square().sum(-1)) - 2 * own.sum(-1) * other.sum(-1)
    return (every - (other - own).square().sum(-1)) / (n * (n - 1))


class Largest(NamedTuple):
    """The maximum of several means, from noisy values.

    Attributes:
        value: mean of the column that the other half of the rows chooses; in expectation at most the true maximum.
        error: standard error of `value`.
        naive: the largest mean; in expectation at least the true maximum.
    """

    value: Tensor
    error: Tensor
    naive: Tensor


def largest(values: Tensor) -> Largest:
    """The largest of the means of columns: each half of the rows chooses a column, the other half estimates its mean.

    Args:
        values: (B, A), independent rows of A quantities; B is even and at least 4.
    """
    if values.dim() != 2 or len(values) < 4 or len(values) % 2:
        raise ValueError(f"`values` has shape {tuple(values.shape)}; it needs an even number of rows, at least 4")
    halves = values[0::2], values[1::2]
    judged = [half[:, other.mean(0).argmax()] for half, other in (halves, halves[::-1])]
    means, errors = zip(*map(mean_and_error, judged), strict=True)
    return Largest(torch.stack(means).mean(), torch.stack(errors).norm() / 2, values.mean(0).max())


def mean_and_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of independent values (n,), n >= 2, and its standard error."""
    return values.mean(), values.std() / len(values) ** 0.5


def total_variance(means: Tensor, squares: Tensor) -> Tensor:
    r"""Variance of an estimate over masks and batches, from independent batches on which it was made several times.

    .. math:: \mathrm{Var}\, g = \mathbb{E}\, g^2 - (\mathbb{E}\, g)^2

    where the last square is the mean product of the means of two different batches, so the estimate is unbiased. It is
    the mean of :math:`(g - g')^2 / 2` over all pairs of estimates from different batches, and never negative.

    Args:
        means: (B, ...), for every batch the mean of its estimates, B >= 2.
        squares: (B, ...), the mean of their squares.
    """
    num_batches = len(means)
    if num_batches < 2 or means.shape != squares.shape:
        raise ValueError(
            f"`means` and `squares` have shapes {tuple(means.shape)} and {tuple(squares.shape)}; they need one and the "
            "same, with 2 batches or more"
        )
    products = (means.sum(0).square() - means.square().sum(0)) / (num_batches * (num_batches - 1))
    return squares.mean(0) - products


def leave_one_out_variances(means: Tensor, squares: Tensor) -> Tensor:
    """`total_variance` without the first batch, without the second, ...: (B, ...), for `jackknife_error`; B >= 3."""
    others = [[k for k in range(len(means)) if k != left_out] for left_out in range(len(means))]
    return torch.stack([total_variance(means[rows], squares[rows]) for rows in others])


def jackknife_error(leave_one_out: Tensor) -> Tensor:
    r"""Standard error of a statistic from its values :math:`\theta_{-b}` (B, ...) without one batch each,

    .. math:: \sqrt{\tfrac{B - 1}{B} \sum_b (\theta_{-b} - \bar\theta)^2}.

    Also of ratios and of means over channels, whose parts were measured with the same masks and are not independent.
    """
    return ((len(leave_one_out) - 1) * leave_one_out.var(0, correction=0)).sqrt()


def _check(name: str, losses: Tensor) -> None:
    if losses.dim() < 1 or losses.shape[-1] < 2:
        raise ValueError(f"`{name}` has shape {tuple(losses.shape)}; it needs the losses of at least 2 masks")
