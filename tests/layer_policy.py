"""A policy for tests that removes layers, and brings them back, by number of structure updates."""

import torch

from slimstart import EqualWorth
from slimstart.policies import Budget
from slimstart.policies.equal_worth import EqualWorthSearch


class Rounds:
    """Settings: positions of removed layers, for each structure update; widths are learned as in `EqualWorth`."""

    coupling, learns_from = "stream", "gradients"

    def __init__(self, *removed, window=2):
        self.rounds, self.window = removed, window

    def start(self, costs, budget, total_steps):
        return RoundsSearch(self, costs, budget)


class RoundsSearch(EqualWorthSearch):
    def __init__(self, settings, costs, budget: Budget):
        widths = EqualWorth(rounds=len(settings.rounds), resample_every=settings.window, align=1, depth=0, tilt=0)
        super().__init__(widths, costs, budget, None)
        self._policy, self._all, self._wanted = settings, costs, budget
        self._use(settings.rounds[0])

    def _use(self, removed):
        self.removed = tuple(removed)
        costs = self._all.without(self.removed)
        self.budget = self._wanted.bind(costs)
        self._fit._budget = self.budget
        self._log_widths = self._fit(self._log_widths)
        self._mask = self._wide(-torch.arange(costs.num_units).double())

    def draw(self):
        mask = super().draw()
        number = min(self.num_rounds, len(self._policy.rounds) - 1)
        if self.removed != tuple(self._policy.rounds[number]):
            self._use(self._policy.rounds[number])
            return self._mask[None].clone()
        return mask

    def load_state_dict(self, state):
        self._use(state["removed"])
        super().load_state_dict(state)
