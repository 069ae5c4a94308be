"""E[L^2], V and V_max during a training: how much sampled networks differ, and how much one unit changes.

The bound on the variance of VR-PGE in the appendix of the paper assumes that both are small (Properties 1 and 2;
`study.dispersion` has the formulas). L is the loss on one training batch; all three are means over batches, each with
its own masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.lab.records import Epoch
from slimstart.lab.run.callbacks import Status, Watcher
from slimstart.lab.run.make_method import Batch, Method
from slimstart.lab.run.program import Program
from slimstart.policies import sample
from study.dispersion import flip_dispersion, largest, mean_and_error, pair_dispersion
from study.losses import MaskedLosses, search_in, training_batches
from study.records import FlipRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlipSettings:
    """Settings of `run_study.py flip`."""

    every: int = 10  # epochs between two measurements
    batches: int = 8  # an even number, at least 4
    draws: int = 16  # masks on each batch
    channels: int = 64  # each is flipped in every mask; all channels if there are fewer


class FlipWatcher(Watcher):
    """Measures after every N epochs of a search, and passes all events on to another watcher.

    Args:
        settings: what to measure.
        watcher: a display.
        keep: called with all rows after each measurement.
        known: rows of an interrupted training; those after its checkpoint are measured again.
    """

    program: Program  # set after the constructor, because a program needs its watcher first

    def __init__(
        self,
        settings: FlipSettings,
        watcher: Watcher,
        keep: Callable[[tuple[FlipRow, ...]], None],
        known: Iterable[FlipRow] = (),
    ) -> None:
        self._settings, self._watcher, self._keep, self._known = settings, watcher, keep, tuple(known)
        self.rows: tuple[FlipRow, ...] = ()

    @property
    def stop_requested(self) -> bool:
        return self._watcher.stop_requested

    def status(self, status: Status) -> None:
        self._watcher.status(status)

    def downloading(self, done: int, total: int | None) -> None:
        self._watcher.downloading(done, total)

    def resumed(self, epoch: int, batch: int) -> None:
        self.rows = tuple(row for row in self._known if row.epoch < epoch)
        self._watcher.resumed(epoch, batch)

    def epoch(self, epoch: Epoch) -> None:
        self._watcher.epoch(epoch)
        program, method = self.program, self.program.method
        if epoch.epoch % self._settings.every or not method.searching:
            return
        batches = training_batches(program, self._settings.batches)
        row = flip_row(method, batches, self._settings, epoch.epoch, program.recipe.seed)
        if row is None:
            logger.warning("nothing is measured after epoch %d: every keep-probability is 0 or 1", epoch.epoch)
            return
        self.rows = (*self.rows, row)
        self._keep(self.rows)


def flip_row(method: Method, batches: Iterable[Batch], settings: FlipSettings, epoch: int, seed: int) -> FlipRow | None:
    """Measure with the current weights and s of a search; None if every s is 0 or 1.

    V and V_max are estimated from the same masks, so most of their noise is common. All epochs use the same random
    numbers, so curves are smooth.

    Args:
        batches: `settings.batches` of them.
        epoch: for the row.
        seed: of masks and of the choice of units.
    """
    search, policy = search_in(method)
    s = policy.keep_probs
    generator = torch.Generator().manual_seed(seed)
    free = (s > 0) & (s < 1)
    order = torch.randperm(s.numel(), generator=generator)
    tried = order[free[order]][: settings.channels]
    if not tried.numel():
        return None
    losses = MaskedLosses(search)
    squares, pairs, flips = [], [], []
    for number, batch in enumerate(batches):
        masks = sample(s, settings.draws, generator)
        base = losses(masks, batch, seed + number)
        other = losses(_flipped(masks, tried), batch, seed + number).view(tried.numel(), -1)
        kept = masks[:, tried].mT
        set_to = torch.stack([torch.where(kept, other, base), torch.where(kept, base, other)])  # m_j = 0, m_j = 1
        squares.append(base.square().mean())
        pairs.append(pair_dispersion(base))
        flips.append(flip_dispersion(base, set_to).flatten())
    of_pairs, of_flips = torch.stack(pairs), torch.stack(flips)
    (square, square_error), (pair, pair_error) = mean_and_error(torch.stack(squares)), mean_and_error(of_pairs)
    most, excess = largest(of_flips), largest(of_flips - of_pairs[:, None])
    return FlipRow(
        epoch=epoch,
        num_units=int(free.sum()),
        num_tried=tried.numel(),
        squared_loss=float(square),
        squared_loss_error=float(square_error),
        dispersion=float(pair),
        dispersion_error=float(pair_error),
        max_dispersion=float(most.value),
        max_dispersion_error=float(most.error),
        max_dispersion_naive=float(most.naive),
        excess=float(excess.value),
        excess_error=float(excess.error),
    )


def _flipped(masks: Tensor, units: Tensor) -> Tensor:
    """(len(units) * n, U): all masks with the first unit flipped, then all with the second, ..."""
    changed = masks.repeat(len(units), 1, 1)
    index = units.view(-1, 1, 1).expand(-1, len(masks), 1)
    return changed.scatter(-1, index, ~changed.gather(-1, index)).flatten(0, 1)
