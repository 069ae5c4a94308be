"""Relaxations: gates and their gradients, the budget, learning, and exact resumption."""

import copy
import io
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import slimstart
from slimstart.errors import TraceError
from slimstart.lab.methods.gated_network import RELAXATIONS as BUDGETED
from slimstart.lab.methods.gated_network import Gated, make_gates
from slimstart.lab.methods.grow_efficient import LAST_BETA, MOMENTUM, PENALTY
from slimstart.lab.methods.sampled_gates import hard_concrete
from slimstart.lab.methods.thresholded_gates import Cutoff, LogNorms
from slimstart.policies import Channels, Flops, Params
from tests.cost_tables import chain
from tests.unit.test_policy_on_device import STREAM, WithoutHost

YES, NO = torch.tensor(True), torch.tensor(False)
RELAXATIONS = (*BUDGETED, "grow_efficient")
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(5))


def small():
    """Three groups, of 6, 8 and 5 units."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3),
        nn.Conv2d(5, 5, 3, groups=5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4),
    )  # fmt: skip
    return model, slimstart.trace(model, X[:1], coupling="stream")


def made(name, budget=None, lr=None, total_steps=50):
    model, graph = small()
    return make_gates(name, model, graph, budget or Flops(0.5), lr, total_steps, seed=7), model, graph


def stirred(gates, steps=6):
    """Gates that are no longer where they started."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        gates.gradient.copy_(torch.randn(gates.s.shape, generator=generator))
        gates.learn_(YES)
    return gates


def gradient_of(gates, slope):
    """What s gets from the loss sum(slope * gates)."""
    torch.manual_seed(3)
    value = gates()
    (value * slope).sum().backward()
    return value.detach(), gates.gradient.clone()


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELAXATIONS)
def test_one_gate_per_unit_without_autograd_state(name):
    gates, _, graph = made(name)
    value, gradient = gradient_of(gates, torch.ones(graph.num_units))
    assert value.shape == (graph.num_units,)
    assert value.dtype == torch.float32
    assert bool(((value >= 0) & (value <= 1)).all())
    assert gates.s.grad is None
    assert not gates.s.requires_grad
    assert not list(gates.parameters())
    _, again = gradient_of(gates, 2 * torch.ones(graph.num_units))  # a second backward takes the place of the first
    torch.testing.assert_close(again, 2 * gradient)


def test_straight_through_is_the_gradient_of_the_gates():
    gates, _, graph = made("ste", Flops(0.3))
    slope = torch.linspace(-1, 2, graph.num_units)
    value, gradient = gradient_of(gates, slope)
    assert set(value.tolist()) == {0.0, 1.0}
    torch.testing.assert_close(gradient, slope.double())  # also where the gate is 0


def test_ste_draws_with_probability_s():
    gates = stirred(made("ste")[0])
    s, n = gates.s, 4000
    mean = gates.gates(s.expand(n, -1)).mean(0)
    at_least_one = {group.units.start for group in small()[1].groups}  # what these have more
    for unit in set(range(s.numel())) - at_least_one:
        p = float(s[unit])
        assert float(mean[unit]) == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n) + 1e-9)


def test_sigmoid_ste():
    gates = stirred(made("sigmoid_ste", lr=0.3)[0])
    slope = torch.linspace(-1, 2, gates.s.numel())
    value, gradient = gradient_of(gates, slope)
    assert torch.equal(value.bool(), gates.mask)
    kept, gone = gates.s[gates.mask], gates.s[~gates.mask]
    assert gone.numel()
    assert kept.numel()
    for unit, (s, t) in enumerate(zip(gates.s.tolist(), gates.threshold.tolist(), strict=True)):
        assert (s > t) == bool(gates.mask[unit])
        e = math.exp(t - s)
        assert float(gradient[unit]) == pytest.approx(float(slope[unit]) * e / (1 + e) ** 2, rel=1e-6)


@pytest.mark.parametrize("name", ["gumbel", "hard_concrete", "soft_threshold"])
def test_relaxed_gates_by_finite_differences(name):
    gates = stirred(made(name)[0])
    gates.begin_step(0.4)
    slope = torch.linspace(1, 2, gates.budget.num_units).double()
    value, gradient = gradient_of(gates, slope.float())

    def loss(s):
        torch.manual_seed(3)  # the same noise
        return float((gates.gates(s) * slope).sum().detach())

    compared = 0
    for index in range(gates.s.numel()):
        step = torch.zeros_like(gates.s)
        step[index] = 1e-6
        if name == "soft_threshold" or 0.01 < float(gates.s[index]) < 0.99:  # further out is the margin
            # From above: below lies the kink of the unit at the threshold.
            difference = (loss(gates.s + step) - loss(gates.s)) / 1e-6
            assert float(gradient[index]) == pytest.approx(difference, rel=1e-4, abs=1e-6)
            compared += difference != 0
    assert compared >= 2
    assert bool(((value > 0) & (value < 1)).any())


def test_units_at_zero_and_one_may_come_back():
    gates, _, _ = made("gumbel")
    gates.s.copy_(torch.tensor([0.0, 1.0]).repeat(10)[: gates.s.numel()])
    _, gradient = gradient_of(gates, torch.ones(gates.s.numel()))
    assert bool((gradient > 0).all())
    assert bool(torch.isfinite(gradient).all())


# --- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0.05, 0.3, 0.7, 0.95])
def test_hard_concrete_distribution(s):
    """P(g = 0) and E[g], against the formulas of the paper for its own parameter, log alpha."""
    n, b, low, high = 200_000, 2 / 3, -0.1, 1.1
    torch.manual_seed(0)
    draws = hard_concrete(torch.full((n,), s).double(), torch.rand(n).double())
    error = 5 / math.sqrt(n)
    assert float((draws == 0).double().mean()) == pytest.approx(1 - s, abs=error)
    log_alpha = math.log(s / (1 - s)) + b * math.log(-low / high)
    # E[g] is the integral over x of P(g > x), which is sigmoid(log alpha - b logit(y)) with y = (x - low)/(high - low)
    y = ((torch.arange(20_000).double() + 0.5) / 20_000 - low) / (high - low)
    mean = float(torch.sigmoid(log_alpha - b * torch.logit(y)).mean())
    assert float(draws.mean()) == pytest.approx(mean, abs=error)
    gates, _, _ = made("hard_concrete")
    gates.s.fill_(s)
    torch.testing.assert_close(gates.values(), torch.full((gates.s.numel(),), mean / s), rtol=2e-3, atol=0)


def test_gumbel_becomes_bernoulli():
    gates, _, _ = made("gumbel")
    gates.s.copy_(torch.linspace(0.05, 0.95, gates.s.numel()))
    n, inside = 4000, []
    for progress, temperature in ((0.0, 1.0), (0.5, 0.515), (1.0, 0.03)):
        gates.begin_step(progress)
        assert float(gates.temperature) == pytest.approx(temperature)
        drawn = gates.gates(gates.s.expand(n, -1))
        torch.testing.assert_close((drawn > 0.5).double().mean(0), gates.s, rtol=0, atol=5 * 0.5 / math.sqrt(n))
        inside.append(float(((drawn > 0.01) & (drawn < 0.99)).double().mean()))
    assert inside[0] > 0.8
    assert inside[2] < 0.1
    torch.testing.assert_close(drawn.mean(0), gates.s, rtol=0, atol=5 * 0.5 / math.sqrt(n))


# --- thresholds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [chain([6, 8, 5]), chain([1, 30, 2, 40]), STREAM], ids=["chain", "uneven", "stream"])
@pytest.mark.parametrize("budget", [Channels(0.55), Params(0.6), Flops(0.4), Flops(1.0)], ids=str)
def test_cutoff_against_trying_every_length(table, budget):
    bound = budget.bind(table)
    cutoff = Cutoff(bound, table)
    for seed in range(3):
        scores = torch.randn(table.num_units, generator=torch.Generator().manual_seed(seed)).double()
        by_group = {}
        for unit in sorted(range(table.num_units), key=lambda u: -float(scores[u])):
            by_group.setdefault(int(table.unit_group[unit]), []).append(unit)
        best = {units[0] for units in by_group.values()}
        order = sorted(range(table.num_units), key=lambda u: (u not in best, -float(scores[u])))
        expected = None
        for length in range(table.num_units + 1):
            mask = torch.zeros(table.num_units, dtype=torch.bool)
            mask[order[:length]] = True
            if bound.cost(mask) <= bound.limit:
                expected = table.at_least_one(mask)
            else:
                break
        mask, threshold = cutoff(scores)
        assert torch.equal(mask, expected)
        if int(mask.sum()) >= len(best):  # or not even the best of every group have room
            assert torch.equal(scores > threshold, mask)


def test_soft_threshold_is_that_of_filters():
    gates, model, graph = made("soft_threshold")
    stirred(gates)
    norms = LogNorms(model, graph)().detach().exp()
    for group in graph.groups:
        for unit in group.units:
            total = 0.0
            for layer in group.layers:
                weight = model.get_submodule(layer).weight.detach().double()
                weight = (
                    weight.transpose(0, 1) if isinstance(model.get_submodule(layer), nn.ConvTranspose2d) else weight
                )
                total += float(weight[graph.filters[layer] == unit].square().sum())
            assert float(norms[unit]) == pytest.approx(math.sqrt(total))
            theta = math.exp(float(gates.s[graph.costs.unit_group[unit]] + gates.threshold[unit]))
            soft = max(0.0, 1 - theta / math.sqrt(total))
            assert float(gates.values()[unit]) == pytest.approx(soft, abs=1e-6)
            assert (soft > 1e-9) == bool(gates.mask[unit])
    value = gates()
    assert torch.equal(value.detach(), gates.values())
    weight = model[0].weight
    (gradient,) = torch.autograd.grad(value.sum(), weight)  # weights learn how large they are worth being
    kept = gates.mask[graph.filters["0"]]
    assert bool((gradient.flatten(1).abs().sum(1) > 0).eq(kept).all())
    assert bool(((gradient * weight).flatten(1).sum(1)[kept] > 0).all())


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [Channels(0.4), Params(0.4), Flops(0.08)], ids=str)
@pytest.mark.parametrize("name", BUDGETED)
def test_the_budget_holds_after_every_step(name, budget):
    gates, model, graph = made(name, budget, lr=0.2)
    bound = budget.bind(graph.costs)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        gates.gradient.copy_(torch.randn(gates.s.shape, generator=generator))
        gates.learn_(YES)
        assert float(bound.expected(gates.keep_probs)) <= bound.limit
    masks = [gates.best_guess(), *gates.candidates(5)]
    assert all(bound.cost(mask) <= bound.limit for mask in masks)


@pytest.mark.parametrize("name", RELAXATIONS)
def test_a_step_that_failed_changes_nothing(name, differences):
    gates = stirred(made(name)[0])
    before = copy.deepcopy(gates.state_dict())
    gates.gradient.fill_(1.0)
    gates.learn_(NO)
    assert differences(gates.state_dict(), before) == []
    gates.gradient[0] = math.nan
    gates.learn_(YES)
    assert differences(gates.state_dict(), before) == []
    gates.gradient.fill_(1.0)
    gates.learn_(YES)
    assert differences(gates.state_dict(), before) != []


@pytest.mark.parametrize(
    ("name", "device"),
    # What grows measures its draw when it is made, which takes values.
    [*((name, "cpu") for name in RELAXATIONS), *((name, "meta") for name in BUDGETED)],
)
def test_no_value_is_read_on_the_host(name, device):
    """As a CUDA graph needs it, forward, backward and `learn_`."""
    model, graph = small()
    gates = make_gates(name, model.to(device), graph, Flops(0.5), None, 10, 0)
    ok, x = YES.to(device), X.to(device)
    net = Gated(model, graph, gates)
    net(x).sum().backward()  # tables go to the device once
    with WithoutHost(device):
        net(x).sum().backward()
        gates.learn_(ok)


class Planted(nn.Module):
    """Two layers side by side; some of their twelve units make the target, the rest only disturb."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(12, 2)
        with torch.no_grad():
            for layer in (self.left, self.right):
                layer.weight.copy_(nn.functional.normalize(torch.randn(6, 5), dim=1))
            self.out.weight.copy_(torch.randn(2, 12).sign())

    def forward(self, x):
        return self.out(torch.cat([self.left(x), self.right(x)], 1).relu())


@pytest.mark.parametrize("name", RELAXATIONS)
def test_useless_units_are_dropped(name):
    torch.manual_seed(2)
    model, x, num_steps = Planted(), torch.randn(64, 5), 100
    graph = slimstart.trace(model, x, coupling="stream")
    # A soft threshold is one for a whole group; and a group keeps one unit, whatever comes.
    useful = torch.arange(12) % 2 == 1 if name != "soft_threshold" else torch.arange(12) >= 5
    with torch.no_grad():
        target = Gated(model, graph, lambda: useful.float())(x)
    gates = make_gates(name, model, graph, Channels(float(useful.float().mean()) + 1e-6), 0.1, num_steps, 0)
    net = Gated(model, graph, gates)
    for step in range(num_steps):
        if step % 5 == 0:
            gates.begin_epoch(step // 5)
        gates.begin_step(step / num_steps)
        (net(x) - target).square().mean().backward()
        gates.learn_(YES)
    kept = gates.best_guess()
    if name == "soft_threshold":
        assert kept.tolist()[6:] == [True] * 6
        assert int(kept[:6].sum()) == 1
    else:
        assert int((kept == useful).sum()) >= 11


@pytest.mark.parametrize("name", RELAXATIONS)
def test_resume_is_exact(name, differences):
    """Through a file, in the middle of an epoch, with fresh objects on the other side."""

    def trained(net, optimizer, steps):
        losses = []
        for step in steps:
            if step % 4 == 0:
                net.gates.begin_epoch(step // 4)
            net.gates.begin_step(step / 12)
            optimizer.zero_grad()
            loss = net(X).square().mean()
            loss.backward()
            optimizer.step()
            net.gates.learn_(YES)
            losses.append(float(loss.detach()))
        return losses

    def fresh():
        gates, model, graph = made(name, lr=0.05, total_steps=12)
        net = Gated(model, graph, gates)
        return net, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    net, optimizer = fresh()
    torch.manual_seed(11)
    trained(net, optimizer, range(6))
    net.gates.candidates(2)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict(), torch.get_rng_state()), file)
    losses, masks = trained(net, optimizer, range(6, 12)), net.gates.candidates(3)

    file.seek(0)
    state, optimizer_state, random_state = torch.load(file, weights_only=True)
    again, optimizer = fresh()
    stirred(again.gates)
    again.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    torch.set_rng_state(random_state)
    assert again.gates.forward_flops == net.gates.forward_flops
    assert trained(again, optimizer, range(6, 12)) == losses
    assert torch.equal(again.gates.candidates(3), masks)
    assert differences(again.state_dict(), net.state_dict()) == []


@pytest.mark.parametrize("name", RELAXATIONS)
def test_flops(name):
    gates, model, graph = made(name)
    stirred(gates, 2)
    gates.begin_epoch(0)
    if name == "grow_efficient":
        assert gates.forward_flops == slimstart.flops(slimstart.compact(model, graph.select(gates.q)), X[:1])
    else:
        assert gates.forward_flops == slimstart.flops(model, X[:1])


# --- grow efficient --------------------------------------------------------------------------------------------------


def test_grow_efficient_draws_once_an_epoch():
    gates, _, graph = made("grow_efficient", Flops(0.5))
    seen = []
    for epoch in range(6):
        gates.begin_epoch(epoch)
        q = gates.q.clone()
        seen.append(q)
        slope = torch.linspace(-1, 2, graph.num_units)
        for _ in range(3):
            s, beta = gates.s.clone(), gates.beta.clone()
            value, gradient = gradient_of(gates, slope)
            opened = 1 / (1 + torch.exp(-beta * s))
            torch.testing.assert_close(value, (opened * q).float())
            torch.testing.assert_close(gradient, slope * beta * opened * (1 - opened))  # also where q = 0
            gates.learn_(YES)
            assert torch.equal(gates.q, q)
            assert torch.equal(gates.beta > beta, q)  # only what is drawn hardens
    assert any(not torch.equal(a, b) for a, b in pairwise(seen))
    steps = torch.stack(seen).double().sum(0) * 3
    torch.testing.assert_close(gates.beta, LAST_BETA ** (steps / 50))


@pytest.mark.parametrize("all_on", [True, False])
def test_grow_efficient_grows_and_prunes(all_on):
    gates, _, graph = made("grow_efficient", Flops(0.5))
    gates.s.fill_(50.0 if all_on else -50.0)
    gates.begin_epoch(0)
    cost = Flops(1.0).bind(graph.costs).cost(gates.q) / Flops(1.0).bind(graph.costs).dense
    assert (cost > 0.5) == all_on
    assert float(gates.penalty) == pytest.approx(PENALTY * (cost / 0.5 - 1))
    gates.s.fill_(0.1)
    gates.gradient.zero_()
    gates.learn_(YES)
    opened = 1 / (1 + math.exp(-0.1))
    move = -0.1 * float(gates.penalty) * opened * (1 - opened)
    torch.testing.assert_close(gates.s, torch.full_like(gates.s, 0.1 + move))
    assert (move < 0) == all_on
    gates.learn_(YES)
    assert float(gates.momentum[0]) != pytest.approx(MOMENTUM * -move / 0.1)  # the penalty is still applied


def test_grow_efficient_learning_rate_drops():
    gates, _, _ = made("grow_efficient", total_steps=16)
    gates.penalty.zero_()
    rates = []
    for _ in range(16):
        before = gates.s.clone()
        gates.momentum.zero_()
        gates.gradient.fill_(1.0)
        gates.learn_(YES)
        rates.append(float((before - gates.s).mean()))
    assert rates == pytest.approx([0.1] * 8 + [0.01] * 4 + [0.001] * 4)


def test_grow_efficient_may_miss_the_budget():
    gates, _, graph = made("grow_efficient", Flops(0.1))
    gates.s.fill_(1.0)
    gates.s[0] = -1.0
    expected = torch.arange(graph.num_units) > 0
    assert torch.equal(gates.best_guess(), expected)
    assert torch.equal(gates.candidates(2), expected.expand(2, -1))
    assert Flops(0.1).bind(graph.costs).cost(expected) > Flops(0.1).bind(graph.costs).limit
    gates.s.fill_(-1.0)
    assert int(gates.best_guess().sum()) == len(graph.groups)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_network_without_prunable_channels_is_refused():
    line = nn.Linear(3, 2)
    with pytest.raises(TraceError, match="no channel of this network can go"):
        make_gates("ste", line, slimstart.trace(line, torch.zeros(1, 3), coupling="stream"), Flops(0.5), None, 10, 0)
