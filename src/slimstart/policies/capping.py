r"""Draws with a cap on how many units of a group they keep, so that networks need room for little more than the mean.

The number of kept units of a group g has mean :math:`\mu_g = \sum s_u` and variance :math:`\sigma_g^2 = \sum s_u (1 -
s_u)`. A group that comes out with more than :math:`\lfloor \mu_g + 1.5 \sigma_g \rfloor` units is drawn again: its
units have the distribution :math:`p(m | s, \text{within the cap})`, and a little less than one draw in ten is repeated.

**The score stays as it is.** That of the capped distribution differs from that of the raw one by
:math:`\nabla \ln P(\text{within})`, which is the same for all masks, and estimators that compare losses of several
masks (`Estimator.centred`) lose it: :math:`\mathbb{E}[(L_1 - L_2) c] = 0` for any constant c. So they estimate the
gradient of the capped objective, without bias, but for groups that are above the cap `TRIES` times in a row (fewer than
one in ten thousand), which stay as they are. The expected cost is computed without the cap; draws cost a little less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimstart.policies.tables import Tables

SPREAD = 1.5  # standard deviations from the mean to the cap
TRIES = 4


class Cap(Tables):
    """The cap on every group.

    Args:
        unit_group: (U,) int64, the group of each unit.
    """

    def __init__(self, unit_group: Tensor) -> None:
        labels, self._group = torch.unique(unit_group.cpu(), return_inverse=True)
        self._zeros = torch.zeros(labels.numel(), dtype=torch.float64)

    def of(self, s: Tensor) -> Tensor:
        """(num_groups,) float64: the most units that a draw should keep of each group."""
        mean = self._zeros.index_add(0, self._group, s)
        variance = self._zeros.index_add(0, self._group, s * (1 - s))
        return torch.floor(mean + SPREAD * variance.clamp(min=0).sqrt() + 1e-9)  # whole means may have rounded down

    def first_within(self, tries: Tensor, s: Tensor) -> Tensor:
        """Of several independent draws (TRIES, n, U) the first within the cap, group by group; else the last: (n, U).

        No value is asked for, so a CUDA graph can hold it.
        """
        counts = torch.zeros(*tries.shape[:-1], self._zeros.numel(), dtype=torch.float64, device=s.device)
        within = counts.index_add_(-1, self._group, tries.double()) <= self.of(s)
        within[-1] = True
        chosen = within.byte().argmax(0)  # the first of equals
        return tries.gather(0, chosen.index_select(-1, self._group)[None]).squeeze(0)
