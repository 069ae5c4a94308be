"""Capped sampling, against enumeration of all masks of small groups."""

import itertools

import pytest
import torch
from torch import Tensor

from slimstart import Flops
from slimstart.policies import Padding, Paper, get_estimator
from slimstart.policies.masks import SPREAD, TRIES, Cap
from tests.cost_tables import chain

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1])
S = torch.tensor([0.3, 0.6, 0.2, 0.45, 0.7, 0.35, 0.5], dtype=torch.float64)


def all_masks() -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=7)))


def probability(masks: Tensor, s: Tensor) -> Tensor:
    return torch.where(masks, s, 1 - s).prod(-1)


def within(masks: Tensor) -> Tensor:
    """By hand: floor(1.55 + 1.5 * 0.95) = 2 of the first four, floor(1.55 + 1.5 * 0.83) = 2 of the other three."""
    return (masks[..., :4].sum(-1) <= 2) & (masks[..., 4:].sum(-1) <= 2)


def test_the_cap_is_a_number_of_standard_deviations_above_the_mean() -> None:
    assert SPREAD == 1.5
    assert Cap(GROUPS).of(S).tolist() == [2, 2]
    certain = torch.tensor([1.0, 1, 1, 0, 1, 0, 0], dtype=torch.float64)
    assert Cap(GROUPS).of(certain).tolist() == [3, 1]


def test_only_groups_above_the_cap_are_resampled() -> None:
    generator = torch.Generator().manual_seed(0)
    tries = torch.rand(TRIES, 500, 7, generator=generator, dtype=torch.float64) < S
    found = Cap(GROUPS).first_within(tries, S)
    again = 0
    for number in range(500):
        for units in (slice(0, 4), slice(4, 7)):
            options = [tries[k, number, units] for k in range(TRIES)]
            expected = next((one for one in options if int(one.sum()) <= 2), options[-1])
            assert torch.equal(found[number, units], expected)
            again += not torch.equal(expected, options[0])
    assert again > 50


@pytest.mark.parametrize("name", ["vr_pge", "vr_pge_symmetric"])
@pytest.mark.parametrize("alpha", [0.5])
def test_estimators_that_compare_losses_are_exact_for_the_capped_objective(name: str, alpha: float) -> None:
    masks = all_masks()
    masks = masks[within(masks)]
    losses = torch.randn(len(masks), generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 3
    s = S.clone().requires_grad_()
    capped = probability(masks, s) / probability(masks, s).sum()
    (exact,) = torch.autograd.grad((capped * losses).sum(), s)
    exact = exact * (S * (1 - S)) ** alpha
    estimator, p = get_estimator(name), capped.detach()
    mean = torch.zeros_like(S)
    for i, j in itertools.product(range(len(masks)), repeat=2):
        gradient = estimator.gradient(losses[[i, j]], masks[[i, j]], S, alpha)
        mean += p[i] * p[j] * gradient
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-12)
    lone = sum(p[i] * get_estimator("pge").gradient(losses[[i]], masks[[i]], S, alpha) for i in range(len(masks)))
    assert not torch.allclose(lone, exact, rtol=0.01)  # one mask alone has nothing to compare with


def test_a_capped_policy_is_within_its_cap_and_reproducible() -> None:
    table = chain([40, 60])
    policy = Paper(sampling="capped", seed=3).start(table, Flops(0.3))
    assert policy.padding == Padding(None, SPREAD)
    cap = Cap(table.unit_group).of(policy.keep_probs)
    counts = []
    for _ in range(100):
        masks = policy.draw()
        counts.append(torch.stack([masks[:, table.unit_group == g].sum(1) for g in range(2)], 1))
        policy.update(torch.tensor([1.0, 1.0]))  # nothing to learn: s stays
    assert bool((torch.cat(counts) <= cap).float().mean() > 0.999)
    assert float((torch.cat(counts) == cap).double().mean()) > 0.02  # the cap is reached, so it is not too high
    state = policy.state_dict()
    other = Paper(sampling="capped", seed=4).start(table, Flops(0.3))
    other.load_state_dict(state)
    assert torch.equal(policy.draw(), other.draw())


@pytest.mark.parametrize(("estimator", "tries"), [("vr_pge", TRIES), ("leave_one_out", TRIES), ("pge", None)])
def test_sampling_is_capped_by_default_for_estimators_that_compare_losses(estimator: str, tries: int | None) -> None:
    policy = Paper(estimator=estimator).start(chain([4, 4]), Flops(0.5))
    assert policy.numbers_shape == (*(() if tries is None else (tries,)), policy.num_masks, 8)


@pytest.mark.parametrize("sampling", ["bernoulli", "capped"])
def test_random_numbers_drawn_in_advance_are_the_same(sampling: str) -> None:
    """Also where a checkpoint is taken, or candidates are drawn, in between."""

    def draws(prepare: bool) -> list[Tensor]:
        policy = Paper(sampling=sampling, seed=2).start(chain([9, 7]), Flops(0.4))
        found = []
        for number in range(6):
            found.append(policy.draw())
            if prepare:
                policy.prepare()
            if number == 2:
                found.append(policy.candidates(3))
            if number == 4:
                state = policy.state_dict()
                policy = Paper(sampling=sampling, seed=5).start(chain([9, 7]), Flops(0.4))
                policy.prepare()
                policy.load_state_dict(state)
        return found

    assert all(torch.equal(one, other) for one, other in zip(draws(True), draws(False), strict=True))
