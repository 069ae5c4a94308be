"""Custom policies: objects with a coupling, observations to learn from and a start; wrong objects are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import Flops, SparseTraining
from slimstart.costs import CostTable
from slimstart.policies import (
    POLICIES,
    Budget,
    EqualWorth,
    GradientLearner,
    Learner,
    Padding,
    Paper,
    Policy,
    get_policy,
)

BUDGET = Flops(0.4)


@dataclass
class HalfOfEach:
    """A learner by hand: two masks that keep every second unit, and, once the second has won, only that."""

    costs: CostTable
    window: int = 2
    padding: Padding | None = None
    num_masks: int = 2
    losses: list[list[float]] = field(default_factory=list)
    wins: int = 0

    @property
    def keep_probs(self) -> Tensor:
        return self.best_guess().double()

    @property
    def expected_cost(self) -> float:
        bound = Flops(1.0).bind(self.costs)
        return bound.cost(self.best_guess()) / bound.dense

    @property
    def is_done(self) -> bool:
        return len(self.losses) >= 3

    def _half(self, odd: bool) -> Tensor:
        return torch.arange(self.costs.num_units) % 2 == int(odd)

    def draw(self) -> Tensor:
        return torch.stack([self._half(odd) for odd in (False, True)][: self.num_masks])

    def update(self, losses: Tensor) -> None:
        self.losses.append(losses.tolist())
        self.wins += int(losses[0] < losses[-1])

    def best_guess(self) -> Tensor:
        return self._half(odd=2 * self.wins < len(self.losses))

    def candidates(self, n: int) -> Tensor:
        return self.best_guess().expand(n, -1)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "wins": self.wins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self.wins = [list(pair) for pair in state["losses"]], state["wins"]


@dataclass
class MostGradient(HalfOfEach):
    """One that sees gradients: after a window another unit of its group takes the place of that with the least."""

    num_masks: int = 1
    rounds: int = 0

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.costs.num_units, dtype=torch.float64)
        self.frozen = torch.zeros(self.costs.num_units, dtype=torch.bool)
        self.mask = self._half(odd=False)
        self.observed = 0

    @property
    def is_done(self) -> bool:
        return self.rounds > 1

    def freeze(self, units: Tensor) -> None:
        self.frozen = units

    def to(self, device: torch.device | str) -> None:
        self.sums = self.sums.to(device)

    def observe_(self, gradients: Tensor) -> None:
        self.sums += gradients.abs()
        self.observed += 1

    def draw(self) -> Tensor:
        if self.observed:
            least = int(torch.where(self.mask & ~self.frozen, self.sums, torch.inf).argmin())
            others = ~self.mask & (self.costs.unit_group == self.costs.unit_group[least])
            self.mask = self.mask.clone()
            self.mask[[least, int(others.nonzero()[0])]] = torch.tensor([False, True])
        self.rounds += 1
        return self.mask[None]

    def best_guess(self) -> Tensor:
        return self.mask


@dataclass(frozen=True)
class Own:
    """The settings of either."""

    learner: type[HalfOfEach] = HalfOfEach
    learns_from: Any = "losses"
    coupling: str = "stream"
    started: list[Any] = field(default_factory=list)

    def start(self, costs: CostTable, budget: Budget, total_steps: int | None) -> Learner:
        self.started.append((budget, total_steps, self.learner(costs)))
        return self.started[-1][-1]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def training(policy: str | Policy, **settings: Any) -> tuple[SparseTraining, tuple[Tensor, Tensor]]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))
    return SparseTraining(model, optimizer, batch[0][:1], BUDGET, policy=policy, **settings), batch


def test_a_policy_that_learns_from_losses() -> None:
    own = Own()
    sparse, batch = training(own, total_steps=9)
    assert sparse.policy is own
    assert own.started == [(BUDGET, 9, sparse.learner)]
    assert (sparse.graph.coupling, sparse.learner.num_masks) == ("stream", 2)
    needed = []
    for _ in range(8):
        needed.append(sparse.needs_reference)
        sparse.step(loss_fn, *batch)
    # A structure is kept for two steps and learned from in the first; after the third it is final.
    assert needed == [True, False, True, False, True, False, False, False]
    assert [len(pair) for pair in sparse.learner.losses] == [2, 2, 2]  # type: ignore[attr-defined]
    assert sparse.settled
    assert torch.equal(sparse.keep_probs, sparse.learner.keep_probs)
    assert sparse.expected_cost == sparse.learner.expected_cost


def test_a_policy_that_learns_from_gradients() -> None:
    own = Own(MostGradient, "gradients")
    sparse, batch = training(own)
    learner = sparse.learner
    assert isinstance(learner, MostGradient)
    assert isinstance(learner, GradientLearner)
    assert not sparse.needs_reference
    before = sparse.mask
    for _ in range(4):
        sparse.step(loss_fn, *batch)
    assert learner.observed == 2  # a window; then the structure is final by itself
    assert sparse.settled
    assert int((sparse.mask != before).sum()) == 2
    gone = int((before & ~sparse.mask).nonzero())
    assert float(learner.sums[gone]) == float(learner.sums[before].min())
    assert learner.losses == []


def test_settings_serve_two_trainings() -> None:
    own = Own()
    (first, batch), (second, _) = training(own), training(own)
    first.step(loss_fn, *batch)
    assert first.learner is not second.learner
    assert second.learner.losses == []  # type: ignore[attr-defined]


def test_an_explicit_coupling_takes_precedence() -> None:
    assert training(Own(), coupling="filter")[0].graph.coupling == "filter"


def test_names_mean_default_policies() -> None:
    assert get_policy("paper") == Paper()
    assert get_policy("equal_worth") == EqualWorth()
    assert get_policy(own := Paper(seed=3)) is own
    assert training("paper")[0].policy is POLICIES["paper"]
    assert training("equal_worth")[0].policy is POLICIES["equal_worth"]
    with pytest.raises(TypeError):
        POLICIES["own"] = Own()  # type: ignore[index]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("papers", ValueError, "`policy` is 'papers'; it must be one of 'equal_worth', 'paper', or an object such as"),
        (Paper, TypeError, "`policy` is the class Paper; it must be an object, such as Paper"),
        (3, TypeError, "`policy` is 3, without coupling, learns_from, start; it must be one of"),
        (Own(learns_from="both"), ValueError, "`learns_from` of .* is 'both'; it must be 'losses' or 'gradients'"),
    ],
)
def test_other_objects_than_policies_are_refused(policy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_policy(policy)
    with pytest.raises(error, match=message):
        training(policy)


def test_gradients_need_a_learner_that_observes_them() -> None:
    with pytest.raises(TypeError, match="`observe_`"):
        training(Own(learns_from="gradients"))
