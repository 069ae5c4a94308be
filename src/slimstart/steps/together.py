r"""Losses of a draw over several ranks: what the structure learns from is the same on all of them.

**Shared references** (the paper's method on more examples): every rank runs all masks on its own examples, and the loss
of a mask is the mean over the examples of all ranks.

**Spread references**: each rank runs the trained mask :math:`m_1` and references of its own. With :math:`L_k(r)` the
loss of mask k on the examples of rank r and :math:`w_r` its share of all examples times the number of ranks, a
reference of rank r counts with

.. math:: \tilde L_k = \bar L_1 + w_r (L_k(r) - L_1(r)).

The differences compare two masks on the same examples. The correction :math:`\bar L_1 - w_r L_1(r)` does not depend on
:math:`m_k`, and cancels in the mean over ranks, so estimators that compare each mask with the mean of others stay
unbiased: enumerated in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimstart.ranks import Averages, Ranks, running_statistics


@dataclass(frozen=True)
class Together:
    """How the ranks share the masks of a draw.

    Attributes:
        ranks: which may be one process alone.
        num_masks: of a draw, the trained one included.
        spread: whether each rank has references of its own.
    """

    ranks: Ranks
    num_masks: int
    spread: bool

    def __post_init__(self) -> None:
        if self.spread and (self.num_masks < 2 or (self.num_masks - 1) % self.ranks.size):
            raise ValueError(
                f"`spread_references` gives each of {self.ranks.size} ranks as many references, and the estimator has "
                f"{self.num_masks - 1}; use `leave_one_out_of({self.ranks.size + 1})`"
            )

    @property
    def num_references(self) -> int:
        """That this rank runs."""
        return (self.num_masks - 1) // (self.ranks.size if self.spread else 1)

    @property
    def own(self) -> slice:
        """Which masks of a draw are this rank's references."""
        return slice(1 + self.ranks.rank, None, self.ranks.size) if self.spread else slice(1, None)

    def average(self, losses: Sequence[Tensor], count: float, net: nn.Module) -> Averages:
        """The losses of all masks over the examples of all ranks; see `Ranks.average`.

        Args:
            losses: of the trained network and, on steps that have some, of this rank's references.
            count: of this rank's examples.
            net: the trained network, whose running statistics are averaged with them.
        """
        statistics = running_statistics(net) if self.ranks.size > 1 else ()
        found = self.ranks.average(losses, count, statistics)
        if not self.spread or len(losses) == 1:
            return found
        behind = torch.zeros(self.num_masks, dtype=torch.float64)
        own = torch.stack([loss.detach().double().cpu() for loss in losses])
        behind[self.own] = found.weight * (own[1:] - own[0])
        loss = found.losses[0]
        return found._replace(losses=(float(loss) + self.ranks.total(behind)).to(loss).unbind())
