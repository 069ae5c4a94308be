r"""Keep-probabilities: drawing masks from them, and the score of a draw.

Every unit has its own keep-probability, :math:`m_u \sim \mathrm{Bernoulli}(s_u)` independently, so

.. math:: \nabla_s \ln p(m|s) = \frac{m - s}{s (1 - s)}.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(keep_probs: Tensor, num_masks: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw independent masks :math:`m_k \sim p(m|s)`.

    The draw is raw: a group of units may come out empty. Keeping one unit of it all the same is part of the loss (and
    of the cost), not of the draw, so that the score below is the draw's own.

    Args:
        keep_probs: s, of shape (U,).
        num_masks: how many to draw.
        generator: source of randomness, on the device of `keep_probs`; torch's global one by default.

    Returns:
        A bool tensor of shape (num_masks, U). Where s is 0 or 1, every mask agrees with it.
    """
    return uniform_numbers(num_masks, keep_probs.numel(), generator, keep_probs.device) < keep_probs


def uniform_numbers(
    num_masks: int, num_units: int, generator: torch.Generator | None, device: torch.device | str = "cpu"
) -> Tensor:
    """(num_masks, num_units) numbers in [0, 1): a unit is kept where its number is below its keep-probability."""
    # Double precision for any s: a float32 uniform is a multiple of 2^-24, and would never keep a unit below that.
    return torch.rand(num_masks, num_units, generator=generator, dtype=torch.float64, device=device)


def score(mask: Tensor, s: Tensor, alpha: float) -> Tensor:
    r"""The preconditioned score of raw draws,

    .. math:: h = H^\alpha(s) \nabla_s \ln p(m|s) = (m - s) \, (s (1 - s))^{\alpha - 1}, \qquad
              H^\alpha(s) = \mathrm{diag}(s \circ (1 - s))^\alpha.

    With alpha = 0 there is no preconditioner. Where s is 0 or 1 the draw is certain and tells nothing: h is 0 there, so
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
    return torch.where(variance > 0, torch.add(mask, s, alpha=-1) * power, 0.0)  # `-` would refuse a bool mask
