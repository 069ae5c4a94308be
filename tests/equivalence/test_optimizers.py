"""Training narrow is training the masked dense network, for every optimizer with element-wise state."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, Rprop

import slimstart
from slimstart.narrow import OptimizerLink, Subnet
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
    """The library's way: an optimizer over the model's parameters, pointed at a narrow network."""

    def __init__(self, make_optimizer):
        self.model = make()
        self.graph = slimstart.trace(self.model, IMAGE)
        self.optimizer = make_optimizer(self.model.parameters())
        self.start()

    def start(self):
        self.subnet = Subnet(self.model, self.graph)
        named = dict(self.model.named_parameters())
        moving = {name: named[name] for name in self.graph.tensors if name in named}
        self.link = OptimizerLink(self.optimizer, moving)

    def window(self, mask, numbers, after_step=lambda: None):
        selection = self.graph.select(mask)
        self.subnet.load(selection)
        self.link.point(self.subnet.parameters, selection)
        self.subnet.module.train()
        for number in numbers:
            self.optimizer.zero_grad()
            loss_of(self.subnet.module, number).backward()
            self.optimizer.step()
            after_step()
        self.subnet.store()
        self.link.store(selection)

    @property
    def state(self):
        return state_by_name(self.model, self.link.dense_state_dict(self.optimizer.state_dict()), self.optimizer)


class MaskedRun:
    """The slow way: the dense network with hooks; whatever is absent is put back after every step."""

    def __init__(self, make_optimizer):
        self.model = make()
        self.graph = slimstart.trace(self.model, IMAGE)
        self.optimizer = make_optimizer(self.model.parameters())

    def window(self, mask, numbers, after_step=lambda: None):
        layers = reference.liveness(self.model, IMAGE, self.graph.filters, self.graph.select(mask).mask)
        hooked = reference.masked(self.model, layers).train()
        kept = {name: reference.kept_entries(self.model, layers, name) for name in self.model.state_dict()}
        for number in numbers:
            hooked.load_state_dict(self.model.state_dict())
            hooked.zero_grad()
            loss_of(hooked, number).backward()
            weights, state = copy.deepcopy((self.model.state_dict(), self.state))
            for parameter, its_twin in zip(self.model.parameters(), hooked.parameters(), strict=True):
                parameter.grad = its_twin.grad
            self.optimizer.step()
            with torch.no_grad():
                for name, buffer in hooked.named_buffers():
                    self.model.get_buffer(name).copy_(buffer)
                for name, tensor in self.model.state_dict().items():
                    tensor.copy_(torch.where(kept[name], tensor, weights[name]))
                for name, entries in self.state.items():
                    for key, value in entries.items():
                        if isinstance(value, torch.Tensor) and value.shape == kept[name].shape:
                            rest = state.get(name, {}).get(key, torch.full_like(value, self.initial(key)))
                            value.copy_(torch.where(kept[name], value, rest))
            after_step()

    def initial(self, key):
        """What the optimizer starts from."""
        return self.optimizer.param_groups[0]["lr"] if key == "step_size" else 0.0  # Rprop's

    @property
    def state(self):
        return state_by_name(self.model, self.optimizer.state_dict(), self.optimizer)


def state_by_name(model, state_dict, optimizer):
    """{parameter: its state}, from an optimizer over `model.parameters()` in their order or in groups of it."""
    order = getattr(optimizer, "names_in_order", [name for name, _ in model.named_parameters()])
    return {order[index]: entries for index, entries in state_dict["state"].items()}


def assert_same(narrow, dense):
    for name, tensor in narrow.model.state_dict().items():
        torch.testing.assert_close(tensor, dense.model.state_dict()[name], rtol=1e-10, atol=1e-10, msg=name)
    assert narrow.state.keys() == dense.state.keys()
    for name, entries in narrow.state.items():
        assert entries.keys() == dense.state[name].keys(), name
        for key, value in entries.items():
            expected = dense.state[name][key]
            if isinstance(value, torch.Tensor):
                assert value.shape == expected.shape, (name, key)
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=f"{key} of {name}")
            else:
                assert value == expected, (name, key)


def assert_absent_is_untouched(run, mask, weights, state):
    """Weights, statistics and state of what the mask drops are the very bits they were."""
    layers = reference.liveness(run.model, IMAGE, run.graph.filters, run.graph.select(mask).mask)
    compared = 0
    for name, tensor in run.model.state_dict().items():
        absent = ~reference.kept_entries(run.model, layers, name)
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
        before = copy.deepcopy((narrow.model.state_dict(), narrow.state))
        narrow.window(mask, steps)
        dense.window(mask, steps)
        assert_same(narrow, dense)
        assert_absent_is_untouched(narrow, mask, *before)


def test_state_is_really_there():
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
def test_state_from_dense_training_is_taken_over(name):
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


def test_the_optimizer_holds_the_narrow_parameters_only():
    run = NarrowRun(OPTIMIZERS["adam"])
    for mask in (*masks_of(run.graph), torch.ones(run.graph.num_units, dtype=torch.bool)):
        run.window(mask, range(1))
        held = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in run.subnet.module.parameters()}
        assert {id(p) for p in run.optimizer.state} == {id(p) for p in held}
    assert run.subnet.module.fc.bias is run.model.fc.bias  # nothing of it can go


def test_equal_shapes_keep_parameters_and_storage():
    run = NarrowRun(OPTIMIZERS["adam"])
    mask = masks_of(run.graph)[0]
    run.window(mask, range(2))
    parameters = dict(run.subnet.parameters)
    storage = {name: run.optimizer.state[p]["exp_avg"].data_ptr() for name, p in parameters.items()}
    conv1 = run.graph.filters["conv1"]
    other = mask.clone()
    other[conv1] = mask[conv1].roll(1)  # as many filters, others
    assert not torch.equal(mask, other)
    run.window(other, range(2, 3))
    for name, parameter in run.subnet.parameters.items():
        assert parameter is parameters[name], name
        assert run.optimizer.state[parameter]["exp_avg"].data_ptr() == storage[name], name


# --- state that cannot follow ----------------------------------------------------------------------------------------


def test_factored_state_is_refused():
    run = NarrowRun(partial(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(slimstart.OptimizerStateError, match=r"Adafactor keeps 'row_var' for stem\.weight, a tensor of"):
        run.window(masks_of(run.graph)[0], range(1))


def test_factored_state_from_before_is_refused():
    run = NarrowRun(OPTIMIZERS["sgd"])
    run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=0.01)
    loss_of(run.model.train(), 0).backward()
    run.optimizer.step()
    with pytest.raises(slimstart.OptimizerStateError, match=r"'row_var' .*element-wise state, .*naming it in `keep`"):
        run.start()


def test_layers_that_are_kept_whole_may_have_any_state():
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
    run = NarrowRun(partial(KeepsHistory, lr=0.1))
    with pytest.raises(
        slimstart.OptimizerStateError, match=r"KeepsHistory keeps 'history' for .*, a list: it is neither"
    ):
        run.window(masks_of(run.graph)[0], range(1))
