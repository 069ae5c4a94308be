r"""How many different things a group of units says: the participation ratio of the gradients of their gates.

With :math:`F = \mathbb{E}[g g^\top]` for the gradients g of n gates,

.. math:: r = (\mathrm{tr} F)^2 / \mathrm{tr} F^2, \qquad 1 \le r \le n,

is n if all gates change the loss alike strongly and each in its own way, and 1 if all change it in the same way. The
traces, though not their ratio, are estimated without bias: that of the square from pairs of different samples,
:math:`\mathrm{tr} F^2 = \mathbb{E}[(g \cdot g')^2]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def participation(samples: Tensor) -> Tensor:
    """The ratio, from independent gradients (num_samples, n); n itself where nothing tells, as with one sample."""
    num_samples, n = samples.shape
    products = samples @ samples.T
    own = products.diagonal().clone()
    of_pairs = products.fill_diagonal_(0).square().sum()
    ratio = own.mean().square() * (num_samples * (num_samples - 1)) / of_pairs
    return torch.where(of_pairs > 0, ratio, n).clamp(1, n)
