"""The paper's policy: its budget, updates, masks and state."""

import dataclasses
import io
import math

import pytest
import torch
from torch import Tensor

from slimstart.costs import CostTable
from slimstart.errors import CheckpointError
from slimstart.policies import (
    Budget,
    Channels,
    Estimator,
    Flops,
    Learner,
    Padding,
    Paper,
    PaperSearch,
    Params,
    leave_one_out_of,
)
from slimstart.policies.masks import SPREAD
from slimstart.policies.paper import UNCAPPED_SPREAD
from tests.cost_tables import chain, cost_table, factor, search

BUDGETS = [Channels(0.3), Params(0.3), Flops(0.3)]


def random_losses(policy: PaperSearch, generator: torch.Generator) -> Tensor:
    return torch.randn(policy.num_masks, generator=generator)


def advance(policy: PaperSearch, num_updates: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_updates):
        policy.draw()
        policy.update(random_losses(policy, generator))


def always(value: float) -> Estimator:
    """An estimator whose gradient is constant: Adam then moves every unit by exactly its learning rate."""
    return Estimator("constant", 1, lambda losses, masks, s, alpha: torch.full_like(s, value))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("estimator", ["pge", "vr_pge", "vr_pge_symmetric", leave_one_out_of(3)], ids=[*"1234"])
def test_the_budget_holds_after_every_update(budget: Budget, estimator: str | Estimator) -> None:
    policy = search(chain([6, 8, 5]), budget, estimator=estimator, structure_lr=0.05)
    generator = torch.Generator().manual_seed(1)
    start = policy.keep_probs
    for _ in range(50):
        assert policy.draw().shape == (policy.num_masks, 19)
        policy.update(random_losses(policy, generator))
        s = policy.keep_probs
        assert bool(((s >= 0) & (s <= 1)).all())
        assert policy.budget.expected(s) <= policy.budget.limit
        assert policy.expected_cost == float(policy.budget.expected(s)) / policy.budget.dense
    assert not torch.allclose(s, start, atol=0.05)


def test_the_papers_constraint_holds_over_200_updates() -> None:
    policy = search(chain([40, 60]), Channels(0.4))
    assert policy.keep_probs.tolist() == pytest.approx([0.4] * 100, rel=1e-15)
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        policy.draw()
        policy.update(random_losses(policy, generator))
        assert float(policy.keep_probs.sum()) <= 40
    assert policy.num_updates == 200


def test_first_update_by_hand() -> None:
    """Adam's first step is lr * sign(g); then what the sum has gained goes off all units alike."""
    policy = search(chain([4]), Channels(0.5), estimator="pge", structure_lr=0.01)
    (mask,) = policy.draw()
    policy.update(torch.tensor([2.0]))
    # g = L h: positive for kept units, which therefore go down; then clip(z - v).
    z = 0.5 - 0.01 * (2 * mask.double() - 1)
    expected = z - max(float(z.sum()) - 2, 0) / 4
    torch.testing.assert_close(policy.keep_probs, expected, rtol=0, atol=1e-9)


def test_it_learns_the_useful_units() -> None:
    worth = torch.tensor([1.0, -1, 2, -2, 0.5, -0.5, 1.5, -1.5])
    policy = search(chain([4, 4]), Channels(0.5), estimator="vr_pge_symmetric", structure_lr=0.05)
    for _ in range(300):
        masks = policy.draw()
        policy.update(-(masks.float() * worth).sum(1))
    assert policy.keep_probs.round().tolist() == (worth > 0).double().tolist()
    assert policy.best_guess().tolist() == (worth > 0).tolist()


@pytest.mark.parametrize(("search_steps", "every"), [(4, 1), (None, 2), (12, 3), (10, 3)])
def test_learning_rate_follows_a_cosine_over_the_updates_of_a_search(search_steps: int | None, every: int) -> None:
    """Four of them: by default over the whole training, of eight steps."""
    policy = search(
        chain([6]),
        Channels(0.9),
        8,
        estimator=always(1.0),
        structure_lr=0.01,
        search_steps=search_steps,
        resample_every=every,
    )
    moved = 0.0
    for step in range(6):
        policy.draw()
        policy.update(torch.zeros(1))
        moved += 0.01 * (1 + math.cos(math.pi * min(step / 4, 1))) / 2
        assert policy.keep_probs.tolist() == pytest.approx([0.9 - moved] * 6, abs=1e-8)


def test_learning_rate_is_constant_without_any_length() -> None:
    policy = search(chain([6]), Channels(0.9), estimator=always(1.0), structure_lr=0.01)
    for step in range(1, 4):
        policy.draw()
        policy.update(torch.zeros(1))
        assert policy.keep_probs.tolist() == pytest.approx([0.9 - 0.01 * step] * 6, abs=1e-8)


@pytest.mark.parametrize("total_steps", [None, 30])
def test_adam_is_torchs(total_steps: int | None) -> None:
    """Over 40 gradients of all sizes, with torch's own schedule; the budget is the whole network and never binds."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(9, dtype=torch.float64, generator=generator) * 10.0 ** (i % 5 - 3) for i in range(40)]
    left = iter(gradients)
    estimator = Estimator("given", 1, lambda losses, masks, s, alpha: next(left))
    policy = search(chain([4, 5]), Channels(1.0), total_steps, estimator=estimator, structure_lr=0.003)
    s = torch.full((9,), 0.5, dtype=torch.float64)
    policy._s.copy_(s)
    adam = torch.optim.Adam([s.requires_grad_()], lr=0.003)
    for step, gradient in enumerate(gradients):
        s.grad = gradient
        if total_steps is not None:
            adam.param_groups[0]["lr"] = 0.003 * (1 + math.cos(math.pi * min(step / total_steps, 1))) / 2
        adam.step()
        policy.draw()
        policy.update(torch.zeros(1))
        assert bool(((s > 0) & (s < 1)).all())  # nothing is clipped
        torch.testing.assert_close(policy.keep_probs, s.detach(), rtol=1e-12, atol=0)
    moments, reference = policy.state_dict()["adam"], adam.state[s]
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(moments[key], reference[key], rtol=1e-12, atol=1e-300)


def test_alpha_reaches_the_maths_and_all_units_are_lowered_alike() -> None:
    seen: list[float] = []

    def gradient(losses: Tensor, masks: Tensor, s: Tensor, alpha: float) -> Tensor:
        seen.append(alpha)
        return torch.full_like(s, -1.0)

    policy = search(chain([6, 6]), Flops(0.3), estimator=Estimator("probe", 1, gradient), alpha=0.7)
    policy.draw()
    policy.update(torch.zeros(1))
    assert seen == [0.7]
    assert float(policy.keep_probs.max() - policy.keep_probs.min()) < 1e-12


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("pending", [False, True])
def test_a_restored_policy_continues_bit_exactly(budget: Budget, pending: bool) -> None:
    table = chain([6, 8, 5])
    policy = search(table, budget, 50, seed=3)
    advance(policy, 10)
    if pending:
        policy.draw()
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    restored = search(table, budget, 50, seed=99)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for one in (policy, restored):
        if pending:
            one.update(torch.tensor([1.0, 2.0]))
        advance(one, 10, seed=5)
    assert torch.equal(policy.keep_probs, restored.keep_probs)
    assert torch.equal(policy.draw(), restored.draw())
    assert policy.num_updates == restored.num_updates == 20 + pending


def test_a_state_dict_does_not_change_with_the_policy() -> None:
    policy = search(chain([6]), Channels(0.5), seed=1)
    advance(policy, 3)
    state = policy.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    advance(policy, 3)
    file.seek(0)
    before = torch.load(file, weights_only=True)
    assert torch.equal(state["keep_probs"], before["keep_probs"])
    moments = state["adam"]
    assert all(torch.equal(moments[key], before["adam"][key]) for key in ("exp_avg", "exp_avg_sq"))
    # Nor does loading tie the policy to the dict.
    policy.load_state_dict(state)
    advance(policy, 3)
    assert torch.equal(moments["exp_avg"], before["adam"]["exp_avg"])


def test_keep_probs_and_masks_are_copies() -> None:
    policy = search(chain([6]), Channels(0.5))
    policy.keep_probs.zero_()
    assert policy.keep_probs.tolist() == [0.5] * 6
    kept = policy.state_dict()["keep_probs"]
    policy.draw().zero_()
    assert bool(policy.state_dict()["masks"].any())
    assert torch.equal(kept, policy.keep_probs)


def test_masks_are_reproducible_from_the_seed() -> None:
    first, again, other = (search(chain([30]), Channels(0.5), seed=seed) for seed in (4, 4, 5))
    masks = first.draw()
    assert torch.equal(masks, again.draw())
    assert not torch.equal(masks, other.draw())
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_candidates_and_best_guess_are_within_the_budget(budget: Budget) -> None:
    table = chain([12, 16, 9])
    policy = search(table, budget, structure_lr=0.05)
    advance(policy, 30)
    masks = policy.candidates(40)
    assert masks.shape == (40, 37)
    for mask in [*masks, policy.best_guess()]:
        assert policy.budget.cost(mask) <= policy.budget.limit
        assert torch.equal(table.at_least_one(mask), mask)
    assert len({tuple(mask.tolist()) for mask in masks}) > 20
    assert torch.equal(policy.best_guess(), policy.best_guess())


def settled(table: CostTable, budget: Budget, s: list[float]) -> PaperSearch:
    policy = search(table, budget)
    with torch.no_grad():  # also where the budget does not allow it
        policy._s.copy_(torch.tensor(s, dtype=torch.float64))
    return policy


def test_candidates_lose_their_least_probable_units_and_no_more() -> None:
    # Every unit is kept with near certainty, six filters are allowed: the two least probable of eight go.
    s = [0.99, 0.98, 0.999, 0.97, 0.96, 0.995, 0.9999, 0.993]
    policy = settled(chain([4, 4]), Channels(0.75), [1 - (1 - p) * 1e-9 for p in s])
    (mask,) = policy.candidates(1)
    assert mask.tolist() == [True, True, True, False, False, True, True, True]


def test_cutting_equals_makes_equally_narrow_layers() -> None:
    policy = settled(chain([10, 20, 30]), Channels(0.5), [1 - 1e-12] * 60)
    (mask,) = policy.candidates(1)
    for part, width in zip(mask.split([10, 20, 30]), (5, 10, 15), strict=True):
        assert part.tolist() == [True] * width + [False] * width


def test_cutting_spares_the_best_unit_of_each_group() -> None:
    # The first group's units are all less probable than the second's; one of them stays, and it is not the first.
    policy = settled(chain([2, 6]), Channels(0.5), [1 - 3e-9, 1 - 2e-9] + [1 - 1e-10] * 6)
    (mask,) = policy.candidates(1)
    assert mask[:2].tolist() == [False, True]
    assert int(mask.sum()) == 4


def test_cutting_falls_back_to_the_first_units() -> None:
    """Unit 1 brings 4 filters, unit 0 one: with room for two filters, only the first unit of each group is left."""
    table = cost_table([0, 0, 1], [[0], [1], [2]], [factor([0, 1, 2])], [(1, (0,))], filters=[1, 4, 1])
    policy = settled(table, Channels(0.4), [0.0, 1.0, 1.0])
    assert policy.best_guess().tolist() == [True, False, True]


def test_best_guess_at_the_start_is_the_uniformly_narrow_network() -> None:
    mask = search(chain([10, 20, 30]), Channels(0.2)).best_guess()
    assert [int(part.sum()) for part in mask.split([10, 20, 30])] == [2, 4, 6]


def test_best_guess_keeps_the_most_probable_units_of_each_group() -> None:
    # Expected widths 2 and 1: the mask with s > 1/2 would have none of the second group.
    policy = settled(chain([4, 4]), Channels(0.5), [0.9, 0.1, 0.2, 0.8, 0.2, 0.3, 0.4, 0.1])
    assert policy.best_guess().tolist() == [True, False, False, True, False, False, True, False]


def test_best_guess_keeps_the_most_probable_unit_of_a_group_that_is_mostly_empty() -> None:
    policy = settled(chain([3, 3]), Channels(0.5), [0.0, 0.05, 0.1, 0.9, 0.0, 0.9])
    assert policy.best_guess().tolist() == [False, False, True, True, False, True]


def test_candidates_do_not_change_pending_masks() -> None:
    policy = search(chain([6]), Channels(0.5))
    policy.draw()
    before = policy.state_dict()["masks"]
    policy.candidates(3)
    assert torch.equal(policy.state_dict()["masks"], before)


def test_it_never_ends_by_itself_and_keeps_a_network_for_a_window() -> None:
    policy: Learner = search(chain([6]), Channels(0.5), 3, sampling=None, resample_every=7, align=4)
    assert (policy.num_masks, policy.window, policy.padding) == (2, 7, Padding(4, SPREAD))
    assert search(chain([6]), Channels(0.5), sampling="bernoulli").padding == Padding(None, UNCAPPED_SPREAD)
    advance(policy, 5)
    assert not policy.is_done


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_change_nothing(bad: float) -> None:
    policy = search(chain([6]), Channels(0.5))
    advance(policy, 2)
    policy.draw()
    before = policy.state_dict()
    with pytest.raises(ValueError, match=r"`losses` is \[.*(nan|inf).*\]; all must be finite"):
        policy.update(torch.tensor([1.0, bad]))
    after = policy.state_dict()
    assert torch.equal(before["keep_probs"], after["keep_probs"])
    assert torch.equal(before["masks"], after["masks"])
    assert before["num_updates"] == after["num_updates"] == 2
    assert torch.equal(before["adam"]["exp_avg"], after["adam"]["exp_avg"])
    policy.update(torch.tensor([1.0, 2.0]))  # and it continues


def test_update_needs_fresh_masks_and_one_loss_for_each() -> None:
    policy = search(chain([6]), Channels(0.5))
    with pytest.raises(RuntimeError, match="call `draw` before it"):
        policy.update(torch.zeros(2))
    policy.draw()
    with pytest.raises(ValueError, match=r"`losses` has shape \(1,\); vr_pge needs \(2,\)"):
        policy.update(torch.zeros(1))
    policy.update(torch.zeros(2))
    with pytest.raises(RuntimeError, match="call `draw` before it"):
        policy.update(torch.zeros(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": -0.1}, r"`alpha` is -0.1; it must be in \[0, 1\]"),
        ({"alpha": math.nan}, r"`alpha` is nan; it must be in \[0, 1\]"),
        ({"structure_lr": 0.0}, "`structure_lr` is 0.0; it must be positive and finite"),
        ({"structure_lr": math.inf}, "`structure_lr` is inf; it must be positive and finite"),
        ({"estimator": "best"}, "`estimator` is 'best'; it must be one of 'pge', 'vr_pge'"),
        ({"sampling": "poisson"}, "`sampling` is 'poisson'; it must be one of 'bernoulli', 'capped'"),
        ({"sampling": "capped", "estimator": "pge"}, "`sampling` is 'capped', which biases 'pge'"),
        ({"resample_every": 0}, "`resample_every` is 0; it must be a whole number, at least 1$"),
        ({"resample_every": None}, "`resample_every` is None; it must be a whole number, at least 1$"),
        ({"align": 2.0}, "`align` is 2.0; it must be a whole number, at least 1, or None"),
        ({"search_steps": 0}, "`search_steps` is 0; it must be a whole number, at least 1, or None"),
        ({"seed": -1}, r"`seed` is -1; it must be a whole number in \[0, 2\*\*63\)"),
        ({"seed": 0.5}, "`seed` is 0.5; it must be a whole number"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Paper(**arguments)  # type: ignore[arg-type]


def test_candidates_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="`n` is 0; it must be at least 1"):
        search(chain([6]), Channels(0.5)).candidates(0)


def test_settings_serve_several_trainings_and_do_not_change() -> None:
    settings = Paper(seed=3)
    first, second = (settings.start(chain([6]), Channels(0.5)) for _ in range(2))
    masks = first.draw()
    advance(first, 4)
    assert torch.equal(second.draw(), masks)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 4  # type: ignore[misc]
    assert settings == Paper(seed=3) == dataclasses.replace(Paper(), seed=3)
    assert hash(settings) == hash(Paper(seed=3))


def test_foreign_states_are_refused() -> None:
    policy = search(chain([6]), Channels(0.5))
    state = policy.state_dict()
    with pytest.raises(CheckpointError, match="`state` lacks adam, masks"):
        policy.load_state_dict({key: state[key] for key in state if key not in ("adam", "masks")})
    with pytest.raises(CheckpointError, match="`state` lacks exp_avg; it is not a state of the paper's policy"):
        policy.load_state_dict({**state, "adam": {"exp_avg_sq": torch.zeros(6)}})
    with pytest.raises(CheckpointError, match="`state` has 5 exp_avg_sq and this network 6 units"):
        policy.load_state_dict({**state, "adam": {"exp_avg": torch.zeros(6), "exp_avg_sq": torch.zeros(5)}})
    with pytest.raises(CheckpointError, match="`state` has 7 keep-probabilities and this network 6 units"):
        policy.load_state_dict(search(chain([7]), Channels(0.5)).state_dict())
    other = search(chain([6]), Channels(0.5), estimator=leave_one_out_of(3))
    other.draw()
    with pytest.raises(CheckpointError, match=r"`state` has masks of shape \(3, 6\); vr_pge draws 2"):
        policy.load_state_dict(other.state_dict())


def test_a_network_without_units() -> None:
    table = cost_table([], [], [factor([], offset=4)], [(5, (0, 0))])
    policy = search(table, Flops(1.0))
    assert policy.draw().shape == (2, 0)
    policy.update(torch.tensor([1.0, 2.0]))
    assert policy.best_guess().shape == (0,)
    assert policy.candidates(2).shape == (2, 0)
    assert policy.expected_cost == 1.0  # 80 of 80
