"""A policy over widths: budgets that are filled exactly, nested masks, and the mean of its gradient by enumeration."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD

from slimstart import Channels, Flops, Params, SparseTraining, models, trace
from slimstart.errors import CheckpointError
from slimstart.policies import NestedWidths
from slimstart.policies.fitting import Fit
from slimstart.policies.policies import DevicePolicy

GRAPH = trace(models.build("vgg16", num_classes=10, width=0.125), torch.zeros(1, 3, 32, 32))
RESIDUAL = trace(models.build("resnet20", num_classes=10), torch.zeros(1, 3, 16, 16), "filter")
BUDGETS = [Flops(0.3), Params(0.2), Channels(0.4)]


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(BUDGETS), st.sampled_from([GRAPH, RESIDUAL]))
def test_widths_fill_the_budget_and_never_exceed_it(seed, budget, graph):
    generator = torch.Generator().manual_seed(seed)
    bound = budget.bind(graph.costs)
    fit = Fit(bound, graph.costs)
    wanted = 3 * torch.randn(2, len(graph.groups), generator=generator, dtype=torch.float64)
    found = fit(wanted)
    for before, after in zip(wanted, found, strict=True):
        assert bound.cost(fit.masks(after.exp())) <= bound.limit
        free = (after > 0) & (after < fit.sizes.double().log())
        shift = (after - before)[free]
        assert torch.allclose(shift, shift.mean().expand_as(shift))  # all by the same number
        more = torch.minimum((before + float(shift.mean()) + 1e-3).clamp(min=0), fit.sizes.double().log())
        same = torch.equal(fit.masks(more.exp()), fit.masks(after.exp()))
        assert same or bound.cost(fit.masks(more.exp())) > bound.limit


@pytest.mark.parametrize("graph", [GRAPH, RESIDUAL], ids=["vgg", "resnet"])
def test_a_draw_keeps_the_first_units_of_every_group(graph):
    policy = NestedWidths(graph.costs, Flops(0.3), seed=4)
    for _ in range(5):
        for mask in policy.draw():
            for group in graph.groups:
                own = mask[group.units.start : group.units.stop].tolist()
                assert own[0]
                assert own == sorted(own, reverse=True)
            assert policy.budget.cost(mask) <= policy.budget.limit


def test_it_starts_from_equal_shares():
    policy = NestedWidths(GRAPH.costs, Flops(0.3))
    shares = policy.widths / torch.tensor([len(group.units) for group in GRAPH.groups])
    assert float(shares.max() - shares.min()) < 0.2  # rounding of widths from 4 on
    assert 0.99 < policy.expected_cost / 0.3 <= 1


def test_the_mean_of_the_gradient_over_all_signs_is_that_of_a_linear_loss():
    policy = NestedWidths(GRAPH.costs, Flops(0.5), sigma=0.1, lr=1.0)
    slopes = torch.randn(len(GRAPH.groups), dtype=torch.float64)
    gradients = []

    def note(s, gradient, state):
        gradients.append(gradient)
        return s, state

    policy._adam.step = note
    few = 6  # groups whose signs are enumerated; the others' add up to nothing in pairs
    for signs in itertools.product((-1.0, 1.0), repeat=few):
        for rest in (-1.0, 1.0):
            numbers = torch.full((len(slopes),), rest, dtype=torch.float64)
            numbers[:few] = torch.tensor(signs)
            policy.draw_with(numbers)
            change = 0.1 * float(slopes[:few] @ numbers[:few])
            policy.update(torch.tensor([2.0 + change, 2.0 - change], dtype=torch.float64))
    mean = torch.stack(gradients).mean(0)
    assert torch.allclose(mean[:few], slopes[:few])
    assert torch.allclose(mean[few:], torch.zeros_like(mean[few:]), atol=1e-12)


def test_it_finds_the_layer_that_matters():
    policy = NestedWidths(GRAPH.costs, Flops(0.3), lr=0.05, seed=1)
    before = policy.widths
    noise = torch.Generator().manual_seed(0)
    for _ in range(150):
        masks = policy.draw()
        units = GRAPH.groups[2].units
        widths = masks[:, units.start : units.stop].sum(1).double()
        policy.update(-0.1 * widths + 0.1 * torch.randn(2, generator=noise, dtype=torch.float64))
    assert policy.widths[2] > 1.3 * before[2]
    assert 0.98 < policy.expected_cost / 0.3 <= 1


@pytest.mark.parametrize("drawn", [False, True], ids=["between", "within"])
def test_a_saved_policy_goes_on_bit_for_bit(drawn):
    first, second = NestedWidths(GRAPH.costs, Flops(0.3), seed=1), NestedWidths(GRAPH.costs, Flops(0.3), seed=2)
    for _ in range(3):
        first.draw()
        first.update(torch.tensor([1.0, 1.1]))
    if drawn:
        first.draw()
    second.load_state_dict(first.state_dict())
    for policy in (first, second):
        if not drawn:
            policy.draw()
        policy.update(torch.tensor([1.2, 1.1]))
    assert torch.equal(first.draw(), second.draw())
    assert torch.equal(first.keep_probs, second.keep_probs)


def test_a_whole_search_with_it():
    torch.manual_seed(0)
    model = models.build("resnet20", num_classes=10, width=0.5)
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    sparse = SparseTraining(
        model,
        SGD(model.parameters(), lr=0.05, momentum=0.9),
        images[:1],
        policy=partial(NestedWidths, budget=Flops(0.3), total_steps=6),
    )
    assert isinstance(sparse.policy, DevicePolicy)

    def loss_fn(net, images, labels):
        return F.cross_entropy(net(images), labels)

    for _ in range(6):
        sparse.step(loss_fn, images, labels)
    sparse.settle([(images, labels)], loss_fn)
    sparse.step(loss_fn, images, labels)
    bound = Flops(0.3).bind(sparse.graph.costs)
    assert 0.95 * bound.limit < bound.cost(sparse.mask) <= bound.limit


def test_errors():
    for changes, message in (({"sigma": 0.0}, "`sigma` is 0.0"), ({"lr": float("nan")}, "`lr` is nan")):
        with pytest.raises(ValueError, match=message):
            NestedWidths(GRAPH.costs, Flops(0.3), **changes)
    with pytest.raises(ValueError, match="`total_steps` is 0"):
        NestedWidths(GRAPH.costs, Flops(0.3), total_steps=0)
    policy = NestedWidths(GRAPH.costs, Flops(0.3))
    with pytest.raises(RuntimeError, match="call `draw` before it"):
        policy.update(torch.tensor([1.0, 2.0]))
    policy.draw()
    with pytest.raises(ValueError, match="two finite numbers"):
        policy.update(torch.tensor([1.0, float("nan")]))
    with pytest.raises(CheckpointError, match="lacks signs"):
        policy.load_state_dict({name: value for name, value in policy.state_dict().items() if name != "signs"})
    with pytest.raises(CheckpointError, match="groups"):
        policy.load_state_dict(NestedWidths(RESIDUAL.costs, Flops(0.3)).state_dict())
