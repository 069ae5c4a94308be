r"""Estimators of the structure gradient: losses of sampled masks in, a gradient of s out.

The objective is :math:`\Phi(s) = \mathbb{E}_{p(m|s)} L(m)`. With masks :math:`m_k \sim p(m|s)`, their losses
:math:`L_k = L(m_k)` **on one batch** and their scores :math:`h_k = H^\alpha(s) (m_k - s) / (s (1 - s))`, every
estimator here has the expectation :math:`H^\alpha(s) \nabla \Phi(s)`. They differ in variance and in the number of
forwards they need:

- `pge`: :math:`L_1 h_1`; one forward per step.
- `vr_pge` (paper): :math:`(L_1 - L_2) h_1`; two forwards.
- `vr_pge_symmetric`: :math:`(L_1 - L_2) (h_1 - h_2) / 2`; two forwards.
- `leave_one_out`: :math:`\sum_k (L_k - \bar L) h_k / (n - 1)`; n forwards, 4 by name, others by `leave_one_out_of(n)`.

`vr_pge` has less variance than `pge` where :math:`\mathbb{E}[L]^2` is large against :math:`\mathrm{Var}(L)`, as in deep
networks, but not always. The first mask is the one that is trained; the others are references that only run forward.

The arguments of all are the losses (n,), the raw draws (n, U), s (U,), and the exponent alpha of the preconditioner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


def score(mask: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""The preconditioned score of raw draws,

    .. math:: h = H^\alpha(s) \nabla_s \ln p(m|s) = (m - s) \, (s (1 - s))^{\alpha - 1}, \qquad
              H^\alpha(s) = \mathrm{diag}(s \circ (1 - s))^\alpha.

    With alpha = 0 there is no preconditioner. Where s is 0 or 1, the draw is certain and h is defined as 0, so that
    every entry is finite.

    Args:
        mask: raw draws, of shape (U,) or (n, U).
        s: keep-probabilities, of shape (U,).
        alpha: exponent of the preconditioner, in [0, 1]; the paper's is 1/2.

    Returns:
        h, of the shape of `mask` and the type of `s`.
    """
    variance = s * (1 - s)
    # The clamp is for s below the smallest normal number, whose inverse is infinite.
    power = variance.clamp(min=torch.finfo(s.dtype).tiny) ** (alpha - 1)
    return torch.where(variance > 0, torch.add(mask, s, alpha=-1) * power, 0.0)  # `mask - s` fails for a bool mask


def pge(losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""The policy gradient estimator :math:`L_1 h_1`; alpha = 0 is the textbook one, without the preconditioner."""
    _check("pge", losses, masks, s, 1, 1)
    return losses[0].to(s) * score(masks[0], s, alpha)


def vr_pge(losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""The paper's variance-reduced estimator :math:`(L_1 - L_2) h_1`.

    The loss of the reference mask is a baseline. It is independent of :math:`m_1`, whose score has mean zero, so the
    baseline adds no bias. For alpha in [1/2, 1) the variance is bounded for every s in (0, 1)^U (Theorem 1).
    """
    _check("vr_pge", losses, masks, s, 2, 2)
    return (losses[0] - losses[1]).to(s) * score(masks[0], s, alpha)


def vr_pge_symmetric(losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""Both masks' scores, :math:`(L_1 - L_2) (h_1 - h_2) / 2`: the mean of `vr_pge` and `vr_pge` with roles swapped.

    Never more variance than `vr_pge`, at no further cost. `leave_one_out` with n = 2.
    """
    _check("vr_pge_symmetric", losses, masks, s, 2, 2)
    h = score(masks, s, alpha)
    return (losses[0] - losses[1]).to(s) * (h[0] - h[1]) / 2


def leave_one_out(losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""Every mask against the mean of the others, :math:`\sum_k (L_k - \bar L) h_k / (n - 1)`.

    Equal to :math:`\frac1n \sum_k (L_k - b_k) h_k` with :math:`b_k` the mean loss of the n - 1 >= 1 other masks.
    """
    _check("leave_one_out", losses, masks, s, 2, None)
    centred = (losses - losses.mean()).to(s) / (losses.numel() - 1)
    return torch.mv(score(masks, s, alpha).mT, centred)


@dataclass(frozen=True)
class Estimator:
    """A gradient estimator and the number of masks it needs.

    Attributes:
        name: for errors and records.
        num_masks: forwards per step; the first mask is the trained one.
        gradient: (losses (n,), masks (n, U), s (U,), alpha) -> gradient (U,).
        centred: whether losses of several masks are compared, so that a constant added to all scores does not change
            the expectation.
        capturable: whether a CUDA graph can hold `gradient`: shapes are fixed, and no value is read on the host.
    """

    name: str
    num_masks: int
    gradient: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    centred: bool = False
    capturable: bool = False


def leave_one_out_of(n: int) -> Estimator:
    """The `leave_one_out` estimator over n masks: n - 1 reference forwards per step."""
    if n < 2:
        raise ValueError(f"`n` is {n}; `leave_one_out` compares masks with one another and needs n >= 2")
    return Estimator(f"leave_one_out_of({n})", n, leave_one_out, centred=True, capturable=True)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "pge": Estimator("pge", 1, pge, capturable=True),
        "vr_pge": Estimator("vr_pge", 2, vr_pge, centred=True, capturable=True),
        "vr_pge_symmetric": Estimator("vr_pge_symmetric", 2, vr_pge_symmetric, centred=True, capturable=True),
        # Four masks: the baseline's own noise falls like 1/(n-1), and four forwards are twice those of vr_pge.
        "leave_one_out": Estimator("leave_one_out", 4, leave_one_out, centred=True, capturable=True),
    }
)


def get_estimator(estimator: str | Estimator) -> Estimator:
    """The estimator of that name (a key of `ESTIMATORS`), or the one given."""
    if isinstance(estimator, Estimator):
        return estimator
    if estimator not in ESTIMATORS:
        names = ", ".join(repr(name) for name in ESTIMATORS)
        raise ValueError(
            f"`estimator` is {estimator!r}; it must be one of {names}, or an `Estimator` such as `leave_one_out_of(8)`"
        )
    return ESTIMATORS[estimator]


def _check(name: str, losses: Tensor, masks: Tensor, s: Tensor, fewest: int, most: int | None) -> None:
    """Raise a ValueError for shapes that broadcasting would accept with a wrong meaning."""
    n = losses.numel()
    if losses.dim() != 1 or n < fewest or (most is not None and n > most):
        rule = f"{fewest}" if most == fewest else f"{fewest} or more"
        raise ValueError(f"`losses` has shape {tuple(losses.shape)}; `{name}` needs one loss per mask, {rule} of them")
    if masks.shape != torch.Size((n, s.numel())):
        raise ValueError(
            f"`masks` has shape {tuple(masks.shape)}; {n} losses and {s.numel()} units need {(n, s.numel())}"
        )
