"""Equal worth: its fixed point by enumeration, and the structures that it chooses."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import nn

from slimstart import Channels, Flops, Params, trace
from slimstart.errors import CheckpointError
from slimstart.policies import EqualWorth, EqualWorthSearch, GradientLearner
from slimstart.policies.equal_worth import FEWEST, SEEN, WINDOW, neighbours
from slimstart.policies.widths import steps
from tests.traced import traced

CHAIN = partial(traced, "vgg16", 32, width=0.25)
RESIDUAL = partial(traced, "resnet20", 16)
BUDGETS = [Flops(0.3), Params(0.2), Channels(0.4)]


SIZES = torch.tensor([24, 40, 32])
UNIFORM = partial(EqualWorth, depth=0, tilt=0)  # all layers, and equal fractions at the start


def chain() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 40, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(40, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


def observe(policy: EqualWorthSearch, worth: torch.Tensor) -> None:
    """One window with these mean squares, in which every unit of a group, up to 64 of them, says something else."""
    signs = torch.from_numpy(hadamard(64)).repeat(1, len(worth) // 64 + 1)[:, : len(worth)]
    for step, sign in enumerate(signs):
        policy.observe_((0.5 + step % 2) ** 0.5 * sign * worth.sqrt())


@pytest.mark.parametrize("values", [(1.0, 1.0, 1.0), (9.0, 1.0, 0.3), (0.2, 5.0, 2.0)])
@pytest.mark.parametrize(
    ("pull", "rounds", "within"),
    [(0, 60, 1.02), (0.5, 60, 1.02), (1, 100, 1.02), (2, 100, 1.02), (EqualWorth().pull, 150, 1.07)],
)
def test_it_finds_the_widths_of_least_loss(values, pull, rounds, within):
    """With the loss a_1 / w_1 + a_2 / w_2 + a_3 / w_3, a unit of group g is worth a_g / w_g^2.

    With a pull it is found from worths that lack what this adds: units beside wider neighbours are worth more. It takes
    longer then, since neighbours move only together.
    """
    graph = trace(chain(), torch.zeros(1, 3, 32, 32), "stream")
    policy = UNIFORM(align=1, rounds=rounds, pull=pull).start(graph.costs, Flops(0.2))
    a = torch.tensor(values, dtype=torch.float64)
    group = graph.costs.unit_group
    start, beside = policy._start, neighbours(policy.budget, group, policy._start.exp() / SIZES)
    assert beside[0].tolist() == [0, pytest.approx(0.53, abs=0.01), 0]  # of a chain, the first has one neighbour
    while not policy.is_done:
        mask = policy.draw()[0]
        wider = policy._log_widths - start
        lacking = (pull * (wider * beside.sum(1) - beside @ wider)).exp()
        observe(policy, mask * (a / policy.widths**2 * lacking)[group])
    found = float((a / policy.widths).sum())
    bound, rank = Flops(0.2).bind(graph.costs), torch.cat([torch.arange(n) for n in SIZES.tolist()])
    every = torch.tensor(list(itertools.product(range(1, 25), range(1, 41), range(1, 33, 2))))
    costs = torch.cat([bound.expected((rank < some[:, group]).double()) for some in every.split(1000)])
    best = float((a / every[costs <= bound.limit]).sum(1).min())
    assert found < within * best


def test_the_last_gradients_of_a_window_are_kept():
    """And none that is not finite."""
    policy = EqualWorth().start(CHAIN().costs, Flops(0.3))
    for number in range(250):
        gradients = torch.full((CHAIN().num_units,), float(number))
        policy.observe_(gradients / 0 if number % 50 == 7 else gradients)
    kept = [number for number in range(250) if number % 50 != 7][-SEEN:]
    assert sorted(policy._seen[:, 0].tolist()) == kept
    state = policy.state_dict()
    assert state["seen"].shape == (SEEN, CHAIN().num_units)
    policy.draw()
    policy.draw()
    assert policy.state_dict()["seen"].shape == (0, CHAIN().num_units)  # nothing to keep between windows
    policy.load_state_dict(state)
    assert sorted(policy._seen[:, 0].tolist()) == kept
    with pytest.raises(CheckpointError, match="gradients"):
        policy.load_state_dict({**state, "seen": state["seen"][1:]})


def test_few_gradients_give_no_redundancy_estimate():
    policies = [EqualWorth().start(CHAIN().costs, Flops(0.3)) for _ in range(2)]
    for policy, alike in zip(policies, (True, False), strict=True):
        policy.draw()
        for sign in torch.from_numpy(hadamard(2048))[: FEWEST - 1, : CHAIN().num_units]:
            policy.observe_(torch.ones(CHAIN().num_units) if alike else sign)
        policy.draw()
    assert torch.equal(policies[0].best_guess(), policies[1].best_guess())


def test_redundant_units_are_less_important():
    """Two trainings with the same worths; in one the last group says one thing with all its units."""
    graph, found = trace(chain(), torch.zeros(1, 3, 32, 32), "stream"), []
    same = (graph.costs.unit_group == 2).double()
    for part in (0, same):
        policy = EqualWorth(align=1, pull=1).start(graph.costs, Flops(0.2))
        for _ in range(4):
            mask = policy.draw()[0]
            for sign in torch.from_numpy(hadamard(64)).repeat(1, 2)[:, : graph.num_units]:
                policy.observe_(mask * (sign * (1 - part) + sign[:1] * part))
        found.append(policy.widths.tolist())
    assert found[1][2] < found[0][2], found
    assert found[1][1] > found[0][1], found


@pytest.mark.parametrize("make", [CHAIN, RESIDUAL], ids=["chain", "residual"])
def test_neighbours_share_what_their_products_cost(make):
    graph = make()
    """By the arithmetic of convolutions: FLOPs of a layer are in width x out width x what does not change."""
    group, num_groups = graph.costs.unit_group, len(graph.groups)
    sizes = torch.bincount(group).double()
    shares = torch.linspace(0.7, 0.95, num_groups, dtype=torch.float64)  # so that no group ever comes out empty
    bound = Flops(0.5).bind(graph.costs)

    def cost(widths):
        rank = torch.cat([torch.arange(int(n)) for n in sizes])
        return bound.cost(rank < widths[group])

    found = neighbours(bound, group, shares)
    whole, pairs = cost(sizes), torch.zeros(num_groups, num_groups, dtype=torch.float64)
    ones = [torch.where(torch.arange(num_groups) == g, sizes - 1, sizes) for g in range(num_groups)]
    for g, h in itertools.combinations(range(num_groups), 2):  # what is lost with one unit each, and not with one alone
        both = torch.minimum(ones[g], ones[h])
        pairs[g, h] = pairs[h, g] = whole - cost(ones[g]) - cost(ones[h]) + cost(both)
    alone = torch.tensor([whole - cost(one) for one in ones], dtype=torch.float64) - pairs @ sizes
    widths = sizes * shares
    expected = pairs * widths / (pairs @ widths + alone)[:, None]
    assert torch.allclose(found, expected, atol=1e-5)
    assert 0.5 < float(found.sum(1).min()) < float(found.sum(1).max()) < 1 + 1e-6


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS), st.booleans(), st.sampled_from([1, 8]))
def test_every_structure_fills_the_budget_with_the_most_important_units(seed, budget, residual, align):
    graph = RESIDUAL() if residual else CHAIN()
    generator = torch.Generator().manual_seed(seed)
    policy = EqualWorth(align=align, rounds=4).start(graph.costs, budget)
    assert policy.removed
    bound = budget.bind(graph.costs.without(policy.removed))
    sizes = torch.bincount(graph.costs.unit_group)
    before = policy.draw()[0]
    for _ in range(4):
        worth = before * torch.rand(graph.num_units, generator=generator, dtype=torch.float64).pow(4)
        observe(policy, worth)
        (mask,) = policy.draw()
        assert bound.cost(mask) <= bound.limit
        wider = [mask.clone() for _ in graph.groups]
        for one, group, step in zip(wider, graph.groups, steps(sizes, align), strict=True):
            own = slice(group.units.start, group.units.stop)
            absent = (~one[own]).nonzero().squeeze(1)[: int(step)]
            one[own.start + absent] = True
            assert bool(mask[own].any())
            if bool((mask[own] & ~before[own]).any()):  # it has grown: all of its units stay
                assert bool(mask[own][before[own]].all())
            elif bool((before[own] & ~mask[own]).any()):
                assert worth[own][mask[own]].min() >= worth[own][before[own] & ~mask[own]].max()
        wanted = policy._log_widths.exp()
        room = torch.bincount(graph.costs.unit_group[mask]) <= wanted  # a step more is not too much
        costs = [bound.cost(one) for one in wider]
        at_most = [bool(torch.equal(one, mask)) or not bool(r) for one, r in zip(wider, room, strict=True)]
        assert all(cost > bound.limit or full for cost, full in zip(costs, at_most, strict=True))
        before = mask
    assert policy.is_done
    observe(policy, torch.ones(graph.num_units))
    assert torch.equal(policy.draw()[0], before)  # settled


def test_without_gradients_it_keeps_start():
    policy = UNIFORM(align=1).start(CHAIN().costs, Flops(0.3))
    assert isinstance(policy, GradientLearner)
    shares = policy.widths / torch.bincount(CHAIN().costs.unit_group)
    assert float(shares.max() - shares.min()) < 0.1
    first = policy.draw()
    policy.observe_(torch.full((CHAIN().num_units,), torch.nan))  # of a step that was skipped
    assert torch.equal(policy.draw(), first)
    observe(policy, torch.zeros(CHAIN().num_units))  # no unit is read
    assert torch.equal(policy.draw(), first)
    while not policy.is_done:  # and the search ends all the same
        policy.draw()
    assert torch.equal(policy.draw(), first)


def test_a_frozen_group_keeps_its_width():
    policy, group = UNIFORM(align=1).start(CHAIN().costs, Flops(0.3)), CHAIN().costs.unit_group
    policy.freeze(group == 3)
    before = policy.widths.double()
    values = torch.ones(len(before), dtype=torch.float64)
    values[4:6] = 30
    policy.draw()
    while not policy.is_done:
        observe(policy, policy.best_guess() * (values / policy.widths**2)[group])
        policy.draw()
    change = (policy.widths / before).log()
    assert abs(int(policy.widths[3] - before[3])) <= 1  # what rounding leaves of the budget is given out
    assert float(change[4]) > 0.3
    assert float(change.min()) < -0.1


def test_a_group_without_importance_does_not_stop_the_others():
    policy, group = UNIFORM(align=1).start(CHAIN().costs, Flops(0.3)), CHAIN().costs.unit_group
    policy.draw()
    worth = torch.logspace(0, 1, len(policy.widths), dtype=torch.float64)
    worth[3] = 1e-12
    observe(policy, policy.best_guess() * worth[group])
    before = policy.widths.double()
    policy.draw()
    change = (policy.widths / before).log()
    others = torch.arange(len(change)) != 3
    assert float(change[others].max() - change[others].min()) > 0.3


def test_a_saved_policy_resumes_exactly_within_a_window():
    first, second = (EqualWorth().start(CHAIN().costs, Flops(0.3)) for _ in range(2))
    worth = torch.rand(CHAIN().num_units, dtype=torch.float64)
    observe(first, worth * first.draw()[0])
    first.draw()
    first.observe_(worth)
    second.load_state_dict(first.state_dict())
    for policy in (first, second):
        policy.observe_(worth.flip(0))
    assert torch.equal(first.draw(), second.draw())
    assert torch.equal(first.draw(), first.candidates(3))
    assert torch.equal(first.keep_probs.bool(), second.best_guess())
    assert first.expected_cost == second.expected_cost
    assert first.num_rounds == 3
    assert second.num_rounds == 2  # it was asked for one draw less


@pytest.mark.parametrize(
    ("settings", "total_steps", "window", "rounds"),
    [
        ({}, None, WINDOW, 16),
        ({}, 8000, 100, 16),  # a fifth of the training, in 16 rounds
        ({}, 30, 1, 6),
        ({}, 1, 1, 1),
        ({"resample_every": 7}, None, 7, 16),
        ({"resample_every": 7}, 350, 7, 10),
        ({"resample_every": 1000}, 350, 1000, 1),
        ({"search_steps": 320}, None, 20, 16),
        ({"search_steps": 320}, 400, 20, 16),
        ({"search_steps": 320, "rounds": 4}, 8000, 80, 4),
        ({"search_steps": 320, "resample_every": 100}, 8000, 100, 3),
    ],
)
def test_how_long_a_search_is(settings, total_steps, window, rounds):
    policy = EqualWorth(**settings).start(CHAIN().costs, Flops(0.3), total_steps)
    assert (policy.window, policy.rounds) == (window, rounds)
    assert policy.padding is None
    policy.draw()
    for number in range(rounds):
        assert not policy.is_done, number
        policy.draw()
    assert policy.is_done


def test_settings_serve_several_trainings_and_do_not_change():
    settings = EqualWorth(align=1, rounds=2)
    first, second = (settings.start(CHAIN().costs, Flops(0.3)) for _ in range(2))
    start = second.best_guess()
    observe(first, torch.logspace(0, 2, CHAIN().num_units, dtype=torch.float64) * first.draw()[0])
    assert not torch.equal(first.draw()[0], start)
    assert torch.equal(second.draw()[0], start)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.rounds = 3
    assert settings == EqualWorth(align=1, rounds=2)
    assert len({settings, EqualWorth(align=1, rounds=2), EqualWorth()}) == 2


def test_a_structure_update_without_gradients_is_skipped_with_a_warning(caplog):
    policy = EqualWorth().start(CHAIN().costs, Flops(0.3))
    first = policy.draw()
    assert torch.equal(policy.draw(), first)
    assert "observed inside `optimizer.step()`" in caplog.text
    caplog.clear()
    policy.freeze(torch.ones(CHAIN().num_units, dtype=torch.bool))  # nothing could be observed
    policy.draw()
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": -1}, "`rounds` is -1; it must be a whole number, at least 0$"),
        ({"align": 0}, "`align` is 0; it must be a whole number, at least 1$"),
        ({"align": None}, "`align` is None; it must be a whole number, at least 1$"),
        ({"rate": 2.0}, r"`rate` is 2.0; it must be in \(0, 1\]"),
        ({"pull": -1.0}, "`pull` is -1.0; it must be finite and at least 0"),
        ({"pull": float("inf")}, "`pull` is inf; it must be finite and at least 0"),
        ({"depth": -0.1}, "`depth` is -0.1; it must be finite and at least 0, which keeps all layers"),
        ({"depth": float("inf")}, "`depth` is inf; it must be finite and at least 0, which keeps all layers"),
        ({"tilt": 1.1}, r"`tilt` is 1.1; it must be in \[-1, 1\], and 0 means equal fractions"),
        ({"tilt": -1.1}, r"`tilt` is -1.1; it must be in \[-1, 1\], and 0 means equal fractions"),
        ({"tilt": float("nan")}, r"`tilt` is nan; it must be in \[-1, 1\], and 0 means equal fractions"),
        ({"resample_every": 0}, "`resample_every` is 0; it must be a whole number, at least 1, or None"),
        ({"search_steps": 2.5}, "`search_steps` is 2.5; it must be a whole number, at least 1, or None"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EqualWorth(**changes)


def test_foreign_states_are_refused():
    policy = EqualWorth().start(CHAIN().costs, Flops(0.3))
    with pytest.raises(CheckpointError, match="lacks sums"):
        policy.load_state_dict({name: value for name, value in policy.state_dict().items() if name != "sums"})
    with pytest.raises(CheckpointError, match="budget"):
        policy.load_state_dict(EqualWorth().start(CHAIN().costs, Flops(0.2)).state_dict())
    with pytest.raises(CheckpointError, match="units"):
        policy.load_state_dict(EqualWorth().start(RESIDUAL().costs, Flops(0.3)).state_dict())
