"""What trainings of both kinds say of their steps: captured ones where there are some, eager ones otherwise."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from slimstart.steps.depthwise_mode import AllWidths
from slimstart.steps.eager import not_finite
from slimstart.steps.graphs import Steps


class Stepping:
    """A training whose steps may be captured.

    Attributes:
        num_steps: that have been taken.
    """

    num_steps: int
    _steps: Steps | None
    _eager: str | None  # why there are no captured steps
    _unchanged: str  # what a loss that is not finite leaves as it was, for the message

    @property
    def reason(self) -> str | None:
        """Why steps run eagerly, where they do; in graphs, why the last one did."""
        return self._eager if self._steps is None else self._steps.reason

    @property
    def engine(self) -> str:
        """What steps run with: "graphs", or "eager", also where the last one could not be captured."""
        return "graphs" if self.reason is None else "eager"

    @property
    def _kernels(self) -> AbstractContextManager[object]:
        """Outside of captured steps: those that they have, so that no others are built."""
        return nullcontext() if self._steps is None else AllWidths()

    def _check(self, wait: bool = False) -> None:
        """Find out whether a captured step has met a loss that is not finite."""
        if self._steps is not None:
            if wait:
                torch.cuda.synchronize()
            if self._steps.failed:
                self.num_steps -= self._steps.reset()
                raise not_finite("loss", math.nan, self.num_steps, self._unchanged)
