"""Trainings whose policy removes layers, from the first step or in the middle."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from slimstart import (
    CheckpointError,
    EqualWorth,
    Flops,
    Paper,
    Params,
    SparseTraining,
    flops,
    load,
    save,
    shrink_to,
    trace,
    verify,
)
from slimstart.lab import models
from slimstart.policies.base import Padding
from tests.layer_policy import Rounds, RoundsSearch

BATCH = 8


def make(name="vgg16", seed=0, width=0.125):
    torch.manual_seed(seed)
    return models.build(name, num_classes=4, in_channels=3, width=width)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(4, (BATCH,), generator=generator)


def training(model, policy, optimizer=None, budget=0.3, **settings):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    images, _ = batch(0)
    return SparseTraining(model, optimizer, images[:2], Flops(budget), policy=policy, **settings), optimizer


def run(sparse, optimizer, steps, start=0):
    for step in range(start, start + steps):
        images, labels = batch(step)
        loss = F.cross_entropy(sparse.model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- the rule for depth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [EqualWorth(depth=0, tilt=0), EqualWorth(), Paper()], ids=["widths", "depth", "paper"]
)
def test_several_budgets_hold_at_every_step(policy):
    """What PyTorch counts on the narrow network itself; for the paper's policy, in expectation until it is finished."""
    torch.manual_seed(0)
    model, (images, _) = make(), batch(0)
    limits = 0.2 * flops(model, images[:2]), 0.12 * sum(p.numel() for p in model.parameters())
    budget = [Flops(0.2), Params(0.12)]

    def within(model):
        return flops(model, images[:2]) <= limits[0] and sum(p.numel() for p in model.parameters()) <= limits[1]

    def start(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return SparseTraining(model, optimizer, images[:2], budget, total_steps=40, policy=policy), optimizer

    sparse, _ = start(model)
    for step in range(12):
        sparse.step(lambda net, images, labels: F.cross_entropy(net(images), labels), *batch(step))
        assert isinstance(policy, Paper) or within(model)
        for one in budget:
            bound = one.bind(sparse.graph.costs)
            assert float(bound.expected(sparse.keep_probs)) <= bound.limit
        assert 0.11 < sparse.expected_cost <= 0.2
    resumed, _ = start(make(seed=1))
    resumed.load_state_dict(sparse.state_dict())
    assert torch.equal(resumed.keep_probs, sparse.keep_probs)
    for one in (sparse, resumed):
        assert within(one.finish())


def test_layers_go_at_the_start_and_widths_fill_the_budget():
    model = make()
    sparse, optimizer = training(model, EqualWorth(depth=0.5, align=1), budget=0.1, total_steps=40)
    removed = [layer.name for layer in sparse.graph.removed]
    # Of 9 layers, in stages of 1, 1, 2, 2 and 3, 9 * 0.1 ** 0.5 / 2 = 1.4 would remain. Two must: at 16 x 16 and at
    # 1 x 1 pixels, where no other layer has weights between two channels that can shrink.
    assert removed == [f"features.{number}" for number in (10, 17, 20, 27, 30, 37, 40)]
    assert 0.09 < sparse.executed_flops / flops(make(), batch(0)[0][:2]) <= 0.1
    for name in removed:
        assert isinstance(model.get_submodule(name), nn.Identity)
    run(sparse, optimizer, 20)
    assert sparse.settled
    assert [layer.name for layer in sparse.graph.removed] == removed
    small = sparse.finish()
    assert small is model
    assert all(isinstance(small.get_submodule(name), nn.Identity) for name in removed)
    assert flops(small, batch(0)[0]) <= 0.1 * flops(make(), batch(0)[0])


@pytest.mark.parametrize(
    ("name", "budget", "kept"),
    [
        # blocks or convolutions that can go, by stage
        ("vgg19", 0.1, (1, 1, 1, 0, 1)),  # at the resolution of the last stage, one layer with weights remains
        ("vgg19", 0.02, (1, 0, 0, 0, 1)),
        ("resnet32", 0.1, (2, 1, 1)),
        ("resnet32", 0.25, (2, 2, 2)),
        ("resnet32", 1.0, (5, 4, 4)),
    ],
)
def test_layers_that_the_rule_keeps(name, budget, kept):
    model = make(name, width=0.25)
    sparse, _ = training(model, EqualWorth(depth=0.5, align=1), budget=budget)
    names = [layer.name for layer in sparse.graph.layers]
    if name == "vgg19":
        pools = [i for i, layer in enumerate(model.features) if isinstance(layer, nn.MaxPool2d)]
        stage = [sum(int(one.split(".")[1]) > pool for pool in pools) for one in names]
    else:
        stage = [int(one[len("stage")]) - 1 for one in names]
    assert tuple(stage.count(i) for i in range(len(kept))) == kept


def test_a_network_without_layers_trains_as_one_that_never_had_them():
    """Same weights, same loss, same weights after each step, without momentum or scale that would tell them apart."""
    whole = make().double()
    optimizer = torch.optim.SGD(whole.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    sparse = SparseTraining(
        whole, optimizer, batch(0)[0][:2].double(), Flops(0.2), total_steps=1000, policy=EqualWorth(depth=0.5, align=1)
    )
    reference = copy.deepcopy(sparse.snapshot())
    other = torch.optim.SGD(reference.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    for step in range(5):
        images, labels = batch(step)
        for model, one in ((whole, optimizer), (reference, other)):
            loss = F.cross_entropy(model(images.double()), labels)
            one.zero_grad()
            loss.backward()
            one.step()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(dict(whole.named_parameters())[name], parameter, rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["statistics", "optimizer", "argument"])
def test_a_pretrained_network_keeps_all_layers(how):
    model, optimizer = make("resnet20", width=0.5), None
    if how != "argument":
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        if how == "optimizer":
            model.eval()
        loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
        if how == "optimizer":
            loss.backward()
            optimizer.step()
    before = [name for name, _ in model.named_parameters()]
    settings = {"pretrained": True} if how == "argument" else {}
    sparse, optimizer = training(model, "equal_worth", optimizer, budget=0.3, total_steps=100, **settings)
    assert not sparse.graph.removed
    assert not sparse.dense_graph.removed
    run(sparse, optimizer, 3)
    assert [name for name, _ in sparse.finish().named_parameters()] == before
    fresh, _ = training(make("resnet20", width=0.5), "equal_worth", budget=0.3, total_steps=100)
    assert fresh.graph.removed


# --- layers that go in the middle ------------------------------------------------------------------------------------


def test_layers_go_and_return_during_training():
    model = make("resnet20", width=0.5)
    parameters = dict(model.named_parameters())
    sparse, optimizer = training(model, Rounds((), (0, 3), (3,), (3,)))
    modules = [model.stage1[0], model.stage2[1]]
    run(sparse, optimizer, 2)
    assert isinstance(model.stage1[0], nn.Identity)
    assert isinstance(model.stage2[1], nn.Identity)
    assert "stage1.0.conv1.weight" not in dict(model.named_parameters())
    run(sparse, optimizer, 2, start=2)
    assert model.stage1[0] is modules[0]
    assert isinstance(model.stage2[1], nn.Identity)
    run(sparse, optimizer, 6, start=4)
    assert sparse.settled
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(parameters)
    small = sparse.finish()
    assert isinstance(small.stage2[1], nn.Identity)


def test_weights_of_a_layer_that_returns_are_those_that_it_left_with():
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((), (0,), (), (), window=2), budget=0.6)
    run(sparse, optimizer, 1)
    images, labels = batch(1)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()  # which ends the window: the weights of this step are stored
    stored = sparse.dense_copy().stage1[0].conv1.weight.clone()
    assert isinstance(model.stage1[0], nn.Identity)
    run(sparse, optimizer, 2, start=2)
    torch.testing.assert_close(sparse.dense_copy().stage1[0].conv1.weight, stored, rtol=0, atol=0)
    assert not isinstance(model.stage1[0], nn.Identity)


def test_the_loss_when_a_residual_block_goes_is_that_without_its_branch():
    model = make("resnet20", width=0.5).eval()
    sparse, optimizer = training(model, Rounds((), (1,), (1,), window=3), budget=0.9)
    run(sparse, optimizer, 3)
    images, _ = batch(9)
    dense = sparse.dense_copy().eval()
    nn.init.zeros_(dense.stage1[1].bn2.weight)
    nn.init.zeros_(dense.stage1[1].bn2.bias)
    from slimstart.narrow.compact import compact

    expected = compact(dense, sparse._networks.dense_graph.select(sparse.mask)).eval()
    torch.testing.assert_close(model.eval()(images), expected(images), rtol=1e-4, atol=1e-5)


def test_gradients_of_layers_that_are_gone_are_not_seen():
    model = make("resnet20", width=0.5)
    gone = dict(model.named_parameters())["stage1.0.conv1.weight"]
    sparse, optimizer = training(model, Rounds((0,), (0,), (0,)))
    before = gone.detach().clone()
    run(sparse, optimizer, 6)
    assert gone.grad is None
    assert torch.equal(gone, before)
    assert gone not in optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizer_state_of_layers_that_go_is_dropped(kind):
    model = make("resnet20", width=0.5)
    optimizer = kind(model.parameters(), 1e-3)
    weight = model.stage1[0].conv1.weight
    sparse, _ = training(model, Rounds((), (0,), (), ()), optimizer)
    run(sparse, optimizer, 1)
    run(sparse, optimizer, 1, start=1)
    assert weight not in optimizer.state
    kept = {key.name for key in sparse._networks.store if key.state is not None}
    assert not any(name.startswith("stage1.0.") for name in kept), "stored channels would return with it"
    run(sparse, optimizer, 3, start=2)
    for value in optimizer.state[weight].values():
        assert not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == weight.shape


def test_several_optimizers():
    model = make("resnet20", width=0.5)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(vectors, 1e-3)]
    images, _ = batch(0)
    sparse = SparseTraining(model, optimizers, images[:2], Flops(0.4), policy=Rounds((), (0, 1), (1,)))
    for step in range(8):
        images, labels = batch(step)
        loss = F.cross_entropy(model(images), labels)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
    assert [layer.name for layer in sparse.graph.removed] == ["stage1.1"]


def test_step_does_the_same_as_the_loop_by_hand():
    results = []
    for by_hand in (True, False):
        model = make("resnet20", width=0.5)
        sparse, optimizer = training(model, Rounds((), (0, 3), (3,)))
        if by_hand:
            run(sparse, optimizer, 8)
        else:
            for step in range(8):
                sparse.step(lambda net, x, y: F.cross_entropy(net(x), y), *batch(step))
        results.append(sparse.finish().state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


class Scaled(nn.Module):
    """A residual block with a parameter that cannot shrink."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.scale * self.down(F.relu(self.up(x)))


class ScaledBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.Sequential(Scaled(), Scaled(), Scaled())

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def test_a_parameter_that_cannot_shrink_is_not_trained_without_its_layer():
    """Not even in a loop that clears the gradients of the model after a step, and so not those of removed layers."""
    torch.manual_seed(0)
    model = ScaledBlocks()
    scale = model.blocks[0].scale
    _, optimizer = training(model, Rounds((), (0,), (0,)))
    for step in range(4):
        images, labels = batch(step)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        model.zero_grad()
        if step == 1:
            assert isinstance(model.blocks[0], nn.Identity)
            assert scale.grad is None
            before = scale.item()
    assert scale.item() == before
    assert scale not in optimizer.state


def test_a_layer_returns_in_the_type_of_the_model():
    torch.manual_seed(0)
    model = ScaledBlocks()
    sparse, optimizer = training(model, Rounds((), (0,), (), ()))
    run(sparse, optimizer, 2)
    model.double()
    assert {p.dtype for p in sparse.dense_copy().parameters()} == {torch.float64}
    for step in range(2, 6):
        images, labels = batch(step)
        loss = F.cross_entropy(model(images.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert isinstance(model.blocks[0], Scaled)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_frozen_statistics_remain_frozen_while_their_layer_is_removed():
    model = make("resnet20", width=0.5)
    norm = model.stage1[0].bn1
    sparse, optimizer = training(model, Rounds((), (0,), (), ()))
    norm.eval()
    run(sparse, optimizer, 2)
    assert isinstance(model.stage1[0], nn.Identity)
    run(sparse, optimizer, 2, start=2)
    assert model.stage1[0].bn1 is norm
    assert not norm.training


class PaddedSearch(RoundsSearch):
    padding = Padding(align=4, spread=0.0)


class PaddedRounds(Rounds):
    def start(self, costs, budget, total_steps):
        return PaddedSearch(self, costs, budget)


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
def test_networks_with_spare_capacity_lose_layers_too(name):
    losses, executed = [], []
    for policy in (Rounds, PaddedRounds):
        model = make(name, width=0.25).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        examples = batch(0)[0][:2].double()
        sparse = SparseTraining(model, optimizer, examples, Flops(0.4), policy=policy((1,), (0, 3), (3,), (3,)))
        for step in range(8):
            images, labels = batch(step)
            losses.append(F.cross_entropy(model(images.double()), labels))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
            executed.append(sparse.executed_flops)
            assert policy is Rounds or executed[-1] == flops(model, examples)
    assert [float(one) for one in losses[:8]] == pytest.approx([float(one) for one in losses[8:]], abs=1e-9)


# --- state -----------------------------------------------------------------------------------------------------------


def test_a_training_resumes_bit_for_bit(tmp_path, differences):
    """With the optimizer state of channels that are not in the network, too."""

    def fresh():
        model = make("resnet20", width=0.5)
        return training(model, Rounds((), (0, 3), (3,), (3,), window=3))

    sparse, optimizer = fresh()
    run(sparse, optimizer, 4)  # layers 0 and 3 are gone
    sparse.save(tmp_path / "state")
    run(sparse, optimizer, 10, start=4)
    again, second = fresh()
    again.load(tmp_path / "state")
    assert [layer.name for layer in again.graph.removed] == ["stage1.0", "stage2.1"]
    run(again, second, 10, start=4)
    assert differences(again.state_dict(), sparse.state_dict()) == []
    expected, found = sparse.finish().state_dict(), again.finish().state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_checkpoint_of_another_depth_is_refused():
    sparse, _ = training(make(), EqualWorth(depth=0.5, align=1), budget=0.1)
    other, optimizer = training(make(), EqualWorth(align=1, depth=0), budget=0.1)
    before = {name: p.clone() for name, p in other.model.named_parameters()}
    with pytest.raises(CheckpointError, match="give `EqualWorth` the same `depth`"):
        other.load_state_dict(sparse.state_dict())
    assert all(torch.equal(p, before[name]) for name, p in other.model.named_parameters())
    run(other, optimizer, 1)


@pytest.mark.parametrize("removed", ["nothing", ["features.0"], [3], None])
def test_a_checkpoint_without_unknown_layers_is_refused(removed):
    sparse, _ = training(make(), EqualWorth(align=1))
    state = sparse.state_dict() | {"removed": removed}
    with pytest.raises(CheckpointError):
        sparse.load_state_dict(state)


def test_a_narrow_state_dict_brings_its_layers_along():
    policy = Rounds((), (0, 3), (3,), window=3)
    sparse, optimizer = training(make("resnet20", width=0.5), policy)
    run(sparse, optimizer, 4)
    images, _ = batch(9)
    expected = sparse.model.eval()(images)
    state, momentum = copy.deepcopy(sparse.model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other, second = training(make("resnet20", seed=1, width=0.5), policy)
    other.model.load_state_dict(state)
    assert isinstance(other.model.stage1[0], nn.Identity)
    assert torch.equal(other.model.eval()(images), expected)
    second.load_state_dict(momentum)
    with pytest.raises(RuntimeError, match="SparseTraining"):
        run(other, second, 1)
    assert torch.equal(other.finish().eval()(images), expected)


def test_a_narrow_state_dict_of_unknown_layers_is_refused():
    sparse, _ = training(make("resnet20", width=0.5), Rounds((), ()))
    state = sparse.model.state_dict()
    state._metadata[""]["slimstart"]["removed"] = ["stem"]
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        sparse.model.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("removed", [["stage1.0"]]),
        ("removed", "stage1.0"),
        ("removed", 3),
        ("removed", ["stem"]),
        ("removed", None),
        ("mask", None),
        ("mask", torch.ones(3, dtype=torch.bool)),
        ("structure", 1),
    ],
)
def test_state_dicts_of_a_strange_structure_are_refused(key, value):
    sparse, optimizer = training(make("resnet20", width=0.5), Rounds((0,), (0,)))
    run(sparse, optimizer, 1)
    weights = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    state, momentum = sparse.model.state_dict(), optimizer.state_dict()
    for found in (state._metadata[""], momentum):
        found["slimstart"] = found["slimstart"] | {key: value}
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        sparse.model.load_state_dict(state)
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        optimizer.load_state_dict(momentum)
    run(sparse, optimizer, 1)
    assert sparse.model.state_dict().keys() == weights.keys()


@pytest.mark.parametrize("identities", [["stage1.0"], {"stage9": None}, {"": None}, {"stage1.0": "one"}, 3])
def test_shrinking_to_a_state_dict_of_strange_identities_is_refused(identities):
    sparse, _ = training(make("resnet20", width=0.5), Rounds((0,), (0,)))
    state = sparse.model.state_dict()
    state._metadata[""]["slimstart"]["identities"] = identities
    model = make("resnet20", seed=1, width=0.5)
    with pytest.raises(CheckpointError, match="names modules"):
        shrink_to(model, state)
    assert isinstance(model.stage1[0].conv1, nn.Conv2d)


def test_a_dense_copy_has_all_layers():
    model = make("resnet20", width=0.5)
    original = copy.deepcopy(model)
    sparse, _ = training(model, Rounds((0, 3), (0, 3)))
    whole, initial = sparse.dense_copy(), dict(original.named_parameters())
    assert [name for name, _ in whole.named_parameters()] == list(initial)
    for name, p in whole.named_parameters():  # scaled to the fan-in of the narrow network
        ratio = p.norm() / initial[name].norm() if initial[name].any() else torch.tensor(1.0)
        torch.testing.assert_close(p, ratio * initial[name])
        assert 1 <= ratio < 3, name
    assert isinstance(model.stage1[0], nn.Identity)
    model.eval()
    assert not any(module.training for module in sparse.dense_copy().modules())


def test_layers_that_are_removed_from_the_start_are_part_of_the_state():
    def fresh():
        return training(make("resnet20", width=0.5), Rounds((0,), (0,), (), ()), budget=0.6)

    sparse, optimizer = fresh()
    run(sparse, optimizer, 3)
    state, weight = sparse.state_dict(), sparse.dense_copy().stage1[0].conv1.weight
    assert torch.equal(state["model"]["stage1.0.conv1.weight"], weight)
    run(sparse, optimizer, 6, start=3)
    again, second = fresh()
    again.load_state_dict(state)
    assert torch.equal(again.dense_copy().stage1[0].conv1.weight, weight)
    run(again, second, 6, start=3)
    expected, found = sparse.finish().state_dict(), again.finish().state_dict()
    assert "stage1.0.conv1.weight" in found
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_snapshot_is_the_network_that_finish_returns():
    sparse, optimizer = training(make("resnet20", width=0.5), Rounds((), (0,), (0,)))
    run(sparse, optimizer, 7)
    small, images = sparse.snapshot().eval(), batch(9)[0]
    assert torch.equal(small(images), sparse.finish().eval()(images))


def test_a_finished_network_is_saved_loaded_and_shrunk_to(tmp_path):
    sparse, optimizer = training(make(), EqualWorth(depth=0.5, align=1), budget=0.1, total_steps=20)
    run(sparse, optimizer, 20)
    small, images = sparse.finish().eval(), batch(9)[0]
    save(small, tmp_path / "small")
    assert torch.equal(load(tmp_path / "small", make).eval()(images), small(images))
    again = shrink_to(make(seed=1), small.state_dict(), images[:2]).eval()
    assert torch.equal(again(images), small(images))
    with pytest.raises(CheckpointError, match="give `example_inputs`"):
        shrink_to(make(seed=1), small.state_dict())


def test_a_state_dict_of_a_training_needs_no_example_inputs_to_be_shrunk_to():
    sparse, optimizer = training(make(), EqualWorth(depth=0.5, align=1), budget=0.1, total_steps=20)
    run(sparse, optimizer, 3)
    images = batch(9)[0]
    again = shrink_to(make(seed=1), sparse.model.state_dict()).eval()
    assert torch.equal(again(images), sparse.model.eval()(images))
    assert isinstance(again.features[20], nn.Identity)


# --- what surrounds a model ------------------------------------------------------------------------------------------


def test_copies_follow():
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((), (0, 3), (0, 3)))
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    sparse.follow(average)
    for step in range(8):
        run(sparse, optimizer, 1, start=step)
        average.update_parameters(model)
    assert isinstance(average.module.stage1[0], nn.Identity)
    sparse.finish()
    average.module.eval()(batch(0)[0])


def test_a_layer_that_a_copy_lacks_cannot_return():
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((0,), (0,), ()))
    run(sparse, optimizer, 1)
    sparse.follow(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match="make the copy again"):
        run(sparse, optimizer, 6, start=1)


def test_training_mode_is_that_of_the_model_when_a_layer_returns():
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((), (0,), (), ()))
    run(sparse, optimizer, 2)
    model.eval()
    run(sparse, optimizer, 2, start=2)
    assert not model.stage1[0].training
    assert not model.stage1[0].bn1.training


def test_a_layer_that_the_user_replaces_is_refused():
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((), (0,), (0,)))
    model.stage1[0] = nn.Identity()
    with pytest.raises(RuntimeError, match="another layer"):
        run(sparse, optimizer, 3)


def test_an_interrupted_change_of_layers_is_completed(monkeypatch):
    model = make("resnet20", width=0.5)
    sparse, optimizer = training(model, Rounds((), (0, 3), (3,), (3,)))
    from slimstart.narrow import change

    calls, swap = iter(range(10_000)), change.swap_

    def interrupted(tensor, value):
        if next(calls) == 20:
            raise KeyboardInterrupt
        swap(tensor, value)

    monkeypatch.setattr(change, "swap_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sparse, optimizer, 4)
    run(sparse, optimizer, 8, start=4)
    assert [layer.name for layer in sparse.graph.removed] == ["stage2.1"]
    assert sparse.finish()(batch(0)[0]).shape == (BATCH, 4)


class ReadsWeights(nn.Module):
    """A network that reads a weight in some of its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x.to(block.up.weight.dtype) if i % 2 else x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def test_layers_without_which_the_forward_fails_are_kept(caplog):
    torch.manual_seed(0)
    model, x = ReadsWeights(), torch.randn(4, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparse = SparseTraining(model, optimizer, x, Flops(0.3), total_steps=4)
    assert {layer.name for layer in sparse.graph.removed} == {"blocks.2", "blocks.4"}
    assert "has no attribute 'weight'" in sparse.graph.not_removable["blocks.5"]
    assert "blocks.5 cannot be removed" in caplog.text
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert isinstance(sparse.finish().blocks[2], nn.Identity)


class SharedActivation(nn.Module):
    """One activation that writes in place after every convolution, as in the bottlenecks of torchvision."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 3)
        self.second, self.third = (nn.Conv2d(12, 12, 3, padding=1) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.first(x)).sigmoid()
        x = self.relu(self.second(x))
        return self.last(self.relu(self.third(x)).mean((2, 3)))


def test_layers_without_which_the_backward_fails_are_kept(caplog):
    """An identity before an activation in place lets it overwrite what `sigmoid` saves for its backward."""
    torch.manual_seed(0)
    model, x = SharedActivation(), torch.randn(4, 3, 8, 8)
    assert [layer.name for layer in trace(model, x).layers] == ["second", "third"]
    assert verify(model, x).max_error < 1e-10
    assert "second cannot be removed: the network without it is not right: its backward fails" in caplog.text
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparse = SparseTraining(model, optimizer, x, Flops(0.02), total_steps=4, policy=EqualWorth(depth=5))
    assert not sparse.graph.removed
    assert "writes in place; use `inplace=False` there" in sparse.graph.not_removable["second"]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
