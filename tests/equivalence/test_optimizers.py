"""Training narrow equals training the masked dense network, for every optimizer with element-wise state."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import slimstart
from slimstart.io.training_state import dense_state
from slimstart.narrow import Networks
from slimstart.policies import EqualWorthSearch
from tests import network_reference as reference
from tests.zoo import shake

IMAGE = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """A residual block with normalisation: parameters with one and two sliced dimensions, and with none."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv1, self.bn1 = nn.Conv2d(6, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 6, 1)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.conv2(F.relu(self.bn1(self.conv1(x))))
        return self.fc(F.relu(x).mean([2, 3]))


class Lion(Optimizer):
    """Sign of a momentum; a foreign optimizer whose state is shaped like the parameter, with a count in Python."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                p.sub_(torch.tanh(state["average"].lerp(p.grad, 0.2)), alpha=group["lr"])
                state["average"].lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "sgd, weight decay": partial(SGD, lr=0.1, weight_decay=0.05),
    "sgd, momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.05),
    "sgd, nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam": partial(Adam, lr=0.01, weight_decay=0.05),
    "adamw, amsgrad": partial(AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": partial(RMSprop, lr=0.01),
    "rmsprop, centered": partial(RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.05),
    "adagrad": partial(Adagrad, lr=0.05, initial_accumulator_value=0.3, lr_decay=0.01),
    "adadelta": partial(Adadelta, lr=1.0),
    "nadam": partial(NAdam, lr=0.01),
    "rprop": partial(Rprop, lr=0.01),
    "lion": Lion,
}


def make():
    torch.manual_seed(0)
    return shake(Net()).double()


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(4, 3, 5, 5, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 1])


def loss_of(net, number):
    images, labels = batch(number)
    return F.cross_entropy(net(images), labels)


def masks_of(graph):
    """Two masks: some units are in both, some only in the second."""
    first = torch.arange(graph.num_units) % 3 != 0
    second = torch.arange(graph.num_units) % 2 == 0
    assert bool((first & second).any())
    assert bool((second & ~first).any())
    assert bool((first & ~second).any())
    return [first, second]


class NarrowRun:
    """The library's way: the model becomes the network of a mask, and the optimizer's state follows."""

    def __init__(self, make_optimizer):
        self.model = make()
        self.graph = slimstart.trace(self.model, IMAGE, coupling="filter")
        self.optimizer = make_optimizer(self.model.parameters())
        self.start()

    def start(self):
        self.networks = Networks(self.model, [self.optimizer], self.graph)

    def window(self, mask, numbers, after_step=lambda: None):
        self.networks.prepare(mask[None]).apply()
        self.model.train()
        for number in numbers:
            self.optimizer.zero_grad()
            loss_of(self.model, number).backward()
            self.optimizer.step()
            after_step()

    @property
    def weights(self):
        self.networks.flush()
        return {**self.model.state_dict(), **self.networks.store.tensors}

    @property
    def state(self):
        self.networks.flush()
        return state_by_name(self.model, dense_state(self.optimizer, self.networks), self.optimizer)


class MaskedRun:
    """The slow way: the dense network with hooks; whatever is absent is put back after every step."""

    def __init__(self, make_optimizer, coupling="filter"):
        self.model = make()
        self.graph = slimstart.trace(self.model, IMAGE, coupling)
        self.optimizer = make_optimizer(self.model.parameters())

    def window(self, mask, numbers, after_step=lambda: None):
        for number in numbers:
            self.step(mask, lambda net, number=number: plain(net, self.optimizer, number, None))
            after_step()

    def step(self, mask, train):
        """Let `train` make a step of the optimizer, with the masked network."""
        layers = reference.liveness(self.model, IMAGE, self.graph.filters, self.graph.select(mask).mask)
        kept = {name: reference.kept_entries(self.model, layers, name) for name in self.model.state_dict()}
        hooked = reference.masked(self.model, layers).train()
        for mine, its in zip(hooked.modules(), self.model.modules(), strict=True):
            mine._parameters, mine._buffers = its._parameters, its._buffers
        weights, state = copy.deepcopy((self.model.state_dict(), self.state))
        train(hooked)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                assert not parameter.grad[~kept[name]].any(), name
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(torch.where(kept[name], tensor, weights[name]))
            for name, entries in self.state.items():
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor) and value.shape == kept[name].shape:
                        rest = state.get(name, {}).get(key, self.initial(key, weights[name]))
                        value.copy_(torch.where(kept[name], value, rest))

    def initial(self, key, weights):
        """What the optimizer starts from."""
        if key in ("step_size", "exp_inf"):  # Rprop's; and Adamax's, for which no gradient is one of `eps`
            return torch.full_like(weights, self.optimizer.param_groups[0]["lr" if key == "step_size" else "eps"])
        return weights if key == "ax" else torch.zeros_like(weights)  # ASGD's average

    @property
    def weights(self):
        return self.model.state_dict()

    @property
    def state(self):
        return state_by_name(self.model, self.optimizer.state_dict(), self.optimizer)


def state_by_name(model, state_dict, optimizer):
    """{parameter: its state}, from an optimizer over `model.parameters()` in their order or in groups of it."""
    order = getattr(optimizer, "names_in_order", [name for name, _ in model.named_parameters()])
    return {order[index]: entries for index, entries in state_dict["state"].items()}


def assert_same(narrow, dense):
    for name, tensor in narrow.weights.items():
        torch.testing.assert_close(tensor, dense.weights[name], rtol=1e-10, atol=1e-10, msg=name)
    mine, its = narrow.state, dense.state
    assert mine.keys() == its.keys()
    for name, entries in mine.items():
        assert entries.keys() == its[name].keys(), name
        for key, value in entries.items():
            expected = its[name][key]
            if isinstance(value, torch.Tensor):
                assert value.shape == expected.shape, (name, key)
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=f"{key} of {name}")
            else:
                assert value == expected, (name, key)


def assert_absent_is_untouched(run, mask, weights, state):
    """Weights, statistics and state of what the mask drops are the very bits they were."""
    dense, compared = make(), 0
    layers = reference.liveness(dense, IMAGE, run.graph.filters, run.graph.select(mask).mask)
    for name, tensor in run.weights.items():
        absent = ~reference.kept_entries(dense, layers, name)
        assert torch.equal(tensor[absent], weights[name][absent]), name
        assert not torch.equal(tensor[~absent], weights[name][~absent]), name
        compared += int(absent.sum())
        for key, value in run.state.get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == absent.shape and key in state.get(name, {}):
                assert torch.equal(value[absent], state[name][key][absent]), (name, key)
    assert compared > 100


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_windows(name):
    narrow, dense = NarrowRun(OPTIMIZERS[name]), MaskedRun(OPTIMIZERS[name])
    for number, mask in enumerate(masks_of(narrow.graph)):
        steps = range(5 * number, 5 * number + 5)
        before = copy.deepcopy((narrow.weights, narrow.state))
        narrow.window(mask, steps)
        dense.window(mask, steps)
        assert_same(narrow, dense)
        assert_absent_is_untouched(narrow, mask, *before)


def test_optimizers_have_state_when_it_moves():
    """The comparison above would pass for an optimizer that forgets, if its twin did: it does not."""
    run = NarrowRun(OPTIMIZERS["sgd, momentum"])
    first, second = masks_of(run.graph)
    run.window(first, range(3))
    buffer = run.state["conv1.weight"]["momentum_buffer"]
    assert buffer.shape == (5, 6, 3, 3)
    rows = first[run.graph.filters["conv1"]]
    assert bool(buffer[rows].abs().amax(dim=(1, 2, 3)).gt(0).all())
    assert not buffer[~rows].any()
    run.window(second, range(3))
    again = run.state["conv1.weight"]["momentum_buffer"]
    gone = rows & ~second[run.graph.filters["conv1"]]
    assert bool(gone.any())
    assert torch.equal(again[gone], buffer[gone])


@pytest.mark.parametrize("name", ["sgd, momentum", "adam", "adagrad"])
def test_state_of_a_dense_training_is_reused(name):
    def warm(run):
        for number in range(2):
            run.optimizer.zero_grad()
            loss_of(run.model.train(), 50 + number).backward()
            run.optimizer.step()

    narrow, dense = NarrowRun(OPTIMIZERS[name]), MaskedRun(OPTIMIZERS[name])
    warm(narrow)
    warm(dense)
    narrow.start()
    for number, mask in enumerate(masks_of(narrow.graph)):
        narrow.window(mask, range(number, number + 3))
        dense.window(mask, range(number, number + 3))
        assert_same(narrow, dense)


def test_parameter_groups_and_schedules_survive():
    def grouped(parameters):
        one, *rest = parameters  # the stem learns slowly, vectors do not decay
        matrices, vectors = [p for p in rest if p.dim() > 1], [p for p in rest if p.dim() == 1]
        optimizer = SGD(
            [
                {"params": [one], "lr": 0.01, "name": "stem"},
                {"params": matrices, "weight_decay": 0.1},
                {"params": vectors, "lr": 0.2, "momentum": 0.5},
            ],
            lr=0.1,
            momentum=0.9,
        )
        model = make()
        names = [(n, p.dim()) for n, p in model.named_parameters()]
        optimizer.names_in_order = [
            names[0][0], *[n for n, d in names[1:] if d > 1], *[n for n, d in names[1:] if d == 1]
        ]  # fmt: skip
        return optimizer

    runs = NarrowRun(grouped), MaskedRun(grouped)
    for run in runs:
        groups = list(run.optimizer.param_groups)
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=4, gamma=0.5)
        for number, mask in enumerate(masks_of(run.graph)):
            run.window(mask, range(5 * number, 5 * number + 5), schedule.step)
        assert all(a is b for a, b in zip(run.optimizer.param_groups, groups, strict=True))
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.01 / 4, 0.1 / 4, 0.2 / 4]
        assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0, 0.1, 0]
        assert [group["momentum"] for group in run.optimizer.param_groups] == [0.9, 0.9, 0.5]
        assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 3, 6]
        assert run.optimizer.param_groups[0]["name"] == "stem"
    assert_same(*runs)


def test_the_optimizer_keeps_the_same_parameters():
    run = NarrowRun(OPTIMIZERS["adam"])
    before = list(run.model.parameters())
    for mask in (*masks_of(run.graph), torch.ones(run.graph.num_units, dtype=torch.bool)):
        run.window(mask, range(1))
        held = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert all(one is other for one, other in zip(held, before, strict=True))
        assert all(one is other for one, other in zip(run.model.parameters(), before, strict=True))
        for parameter, state in run.optimizer.state.items():
            assert state["exp_avg"].shape == parameter.shape


# --- the user's own loop, under the default policy -------------------------------------------------------------------


def plain(net, optimizer, number, scaler):
    optimizer.zero_grad()
    loss_of(net, number).backward()
    optimizer.step()


def closure(net, optimizer, number, scaler):
    def loss():
        optimizer.zero_grad()
        found = loss_of(net, number)
        found.backward()
        return found

    assert optimizer.step(loss).requires_grad


def accumulation(net, optimizer, number, scaler):
    optimizer.zero_grad()
    for part in range(2):
        (loss_of(net, 1000 * part + number) / 2).backward()
    optimizer.step()


def clipping(net, optimizer, number, scaler):
    optimizer.zero_grad()
    loss_of(net, number).backward()
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05) > 0.05
    optimizer.step()


def scaling(net, optimizer, number, scaler):
    optimizer.zero_grad()
    scaler.scale(loss_of(net, number)).backward()
    scaler.step(optimizer)
    scaler.update()


LOOPS = {loop.__name__: loop for loop in (plain, closure, accumulation, clipping, scaling)}
USUAL = {
    "sgd": partial(SGD, lr=0.1),
    "sgd, momentum, nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam": partial(Adam, lr=0.01, weight_decay=0.05),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "nadam": partial(NAdam, lr=0.01),
    "radam": partial(RAdam, lr=0.01),
    "adamax": partial(Adamax, lr=0.01),
    "adagrad": partial(Adagrad, lr=0.05, initial_accumulator_value=0.3, lr_decay=0.01),
    "adadelta": partial(Adadelta, lr=1.0, weight_decay=0.01),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "rprop": partial(Rprop, lr=0.01),
    "asgd": partial(ASGD, lr=0.05, weight_decay=0.01),
}
FEW = {
    ("sgd, momentum, nesterov", "plain"),
    ("adamw", "closure"),
    ("radam", "accumulation"),
    ("adadelta", "clipping"),
    ("adam", "scaling"),
    ("asgd", "plain"),
}
NUM_STEPS = 14  # in windows of three


DRAWS = [  # of the six channels of the stream, and of the five within the block: some leave, and some of them return
    [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0],
    [0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0],
    [1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0],
    [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1],
]


class Prescribed(EqualWorthSearch):
    """Learns as the default policy does, but what it draws is written above."""

    def draw(self):
        super().draw()
        self._mask = torch.tensor(DRAWS[self.num_rounds]) > 0
        return self._mask[None].clone()


class PrescribedPolicy(slimstart.EqualWorth):
    def start(self, costs, budget, total_steps=None):
        return Prescribed(self, costs, budget, total_steps)


class OwnLoop:
    """A `SparseTraining` with the default policy, in the user's own loop."""

    def __init__(self, make_optimizer):
        self.model = make()
        self.optimizer = make_optimizer(self.model.parameters())
        policy = PrescribedPolicy(rounds=len(DRAWS) - 1, align=1, resample_every=3)
        self.sparse = slimstart.SparseTraining(
            self.model, self.optimizer, IMAGE, slimstart.Flops(0.9), policy=policy, pretrained=True
        )

    def train(self, loop):
        """Returns the mask of every step."""
        self.model.train()
        masks, scaler = [], torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        for number in range(NUM_STEPS):
            masks.append(self.sparse.mask)
            loop(self.model, self.optimizer, number, scaler)
        return masks

    @property
    def weights(self):
        return self.sparse.state_dict()["model"]

    @property
    def state(self):
        return state_by_name(self.model, self.sparse.state_dict()["optimizers"][0], self.optimizer)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        pytest.param(name, loop, marks=[] if (name, loop) in FEW else pytest.mark.slow)
        for name in USUAL
        for loop in LOOPS
    ],
)
def test_a_user_loop_equals_that_of_the_masked_network(name, loop):
    ours, dense = OwnLoop(USUAL[name]), MaskedRun(USUAL[name], "stream")
    masks = ours.train(LOOPS[loop])
    assert [one for one, _ in itertools.groupby(mask.int().tolist() for mask in masks)] == DRAWS
    assert ours.sparse.settled
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    for number, mask in enumerate(masks):
        dense.step(mask, lambda net, number=number: LOOPS[loop](net, dense.optimizer, number, scaler))
    assert_same(ours, dense)


# --- state that cannot follow ----------------------------------------------------------------------------------------


def refused(make_optimizer):
    """What a training says in which the structure changes."""
    with pytest.raises(slimstart.OptimizerStateError) as told:
        OwnLoop(make_optimizer).train(plain)
    return str(told.value)


def test_factored_state_is_refused():
    said = refused(partial(torch.optim.Adafactor, lr=0.01))
    assert "Adafactor keeps 'row_var' for conv1.weight, a tensor of shape" in said
    assert "Use an optimizer with element-wise state, or protect the layer by naming it in `keep`" in said


def test_factored_state_from_before_is_refused():
    model = make()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    loss_of(model.train(), 0).backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(slimstart.OptimizerStateError, match=r"'row_var' .*element-wise state, .*naming it in `keep`"):
        slimstart.SparseTraining(model, optimizer, IMAGE, slimstart.Flops(0.5))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_layers_that_are_not_pruned_may_have_any_state():
    run = NarrowRun(OPTIMIZERS["sgd"])
    run.graph = slimstart.trace(run.model, IMAGE, keep=["stem", "conv1", "conv2"])
    run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=0.01)
    run.start()
    before = run.model.stem.weight.detach().clone()
    run.window(torch.ones(0, dtype=torch.bool), range(2))
    assert not torch.equal(run.model.stem.weight, before)


class KeepsHistory(SGD):
    """State in a list cannot be cut either."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("history", []).append(float(p.grad.norm()))


def test_state_in_a_list_is_refused():
    assert "KeepsHistory keeps 'history' for conv1.weight, a list: it is neither" in refused(
        partial(KeepsHistory, lr=0.1)
    )


def test_optimizers_that_run_the_model_several_times_are_refused():
    model = make()
    with pytest.raises(ValueError, match="`optimizer` is LBFGS, which cannot step without a closure"):
        slimstart.SparseTraining(model, torch.optim.LBFGS(model.parameters()), IMAGE, slimstart.Flops(0.5))
