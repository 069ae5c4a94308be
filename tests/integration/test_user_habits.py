"""What people do around a training loop must not lose or spoil anything."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.narrow import recalibrate
from tests.settings import arguments

IMAGES, LABELS = torch.randn(8, 3, 8, 8), torch.randint(0, 4, (8,))


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def loss_fn(net, images, labels):
    return F.cross_entropy(net(images), labels)


def make_training(model=None, **settings):
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"budget": slimstart.Flops(0.5), **settings}
    return model, optimizer, slimstart.SparseTraining(model, optimizer, IMAGES[:2], **arguments(**settings))


def by_hand(sparse, net, optimizer):
    loss = loss_fn(net, IMAGES, LABELS)
    reference = loss_fn(sparse.reference, IMAGES, LABELS) if sparse.needs_reference else None
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sparse.update(loss, reference)


def test_a_network_kept_in_a_variable_is_stored():
    model, optimizer, sparse = make_training(resample_every=2)
    net = sparse.net
    for _ in range(5):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        by_hand(sparse, net, optimizer)
        after = model.state_dict()
        assert not torch.equal(before["0.weight"], after["0.weight"])


def test_training_survives_the_object():
    model, _, sparse = make_training(resample_every=100)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(3):
        sparse.step(loss_fn, IMAGES, LABELS)
    del sparse
    after = model.state_dict()
    assert all(not torch.equal(before[k], after[k]) for k in ("0.weight", "3.weight", "1.running_mean"))


def test_loading_a_few_tensors_keeps_the_rest():
    model, _, sparse = make_training(resample_every=100)
    for _ in range(3):
        sparse.step(loss_fn, IMAGES, LABELS)
    learned = {k: v.clone() for k, v in sparse.net.state_dict().items()}
    model.load_state_dict({"8.bias": torch.ones(4)}, strict=False)
    now = sparse.net.state_dict()
    assert torch.equal(now["8.bias"], torch.ones(4))
    assert all(torch.equal(now[k], v) for k, v in learned.items() if k != "8.bias")


def test_modes_follow_the_model():
    model = make_model().eval()
    _, _, sparse = make_training(model)
    model.train()
    sparse.step(loss_fn, IMAGES, LABELS)
    assert model.state_dict()["1.num_batches_tracked"] == 1
    model[1].eval()
    sparse.step(loss_fn, IMAGES, LABELS)
    assert not sparse.net[1].training
    assert sparse.net[4].training
    assert model.state_dict()["1.num_batches_tracked"] == 1


def test_a_snapshot_in_inference_mode_leaves_no_inference_tensors():
    model, _, sparse = make_training(resample_every=2)
    sparse.step(loss_fn, IMAGES, LABELS)
    with torch.inference_mode():
        sparse.snapshot()
    for _ in range(4):
        sparse.step(loss_fn, IMAGES, LABELS)
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


def test_an_optimizer_of_something_else_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`optimizer` holds none of the model's parameters"):
        slimstart.SparseTraining(make_model(), optimizer, IMAGES[:2], budget=slimstart.Flops(0.5), policy="paper")
    model, optimizer, _ = make_training()
    with pytest.raises(ValueError, match="anew if another SparseTraining has used it"):
        slimstart.SparseTraining(model, optimizer, IMAGES[:2], budget=slimstart.Flops(0.5), policy="paper")


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_an_optimizer_that_runs_the_model_itself_is_refused(policy):
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS, which cannot step without a closure"):
        slimstart.SparseTraining(
            model, torch.optim.LBFGS(model.parameters()), IMAGES[:2], budget=slimstart.Flops(0.5), policy=policy
        )


def test_it_is_not_copied_without_its_hooks():
    """A copy would train on, and learn nothing of its structure."""
    _, _, sparse = make_training(policy="equal_worth")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copied(sparse)
    _, _, second = make_training(policy="equal_worth")
    second.load_state_dict(sparse.state_dict())
    assert torch.equal(second.mask, sparse.mask)


def test_parameter_groups_may_be_added_later():
    _, optimizer, sparse = make_training()
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    for _ in range(3):
        sparse.step(loss_fn, IMAGES, LABELS)
    assert torch.equal(extra.detach(), torch.ones(3))


def test_a_reference_that_is_not_there():
    _, _, sparse = make_training(estimator="pge")
    with pytest.raises(RuntimeError, match="ask `needs_reference` before"):
        _ = sparse.reference


def test_a_checkpoint_of_other_units_or_another_budget():
    _, _, first = make_training(keep=["0"])
    _, _, other = make_training(keep=["3"])
    with pytest.raises(slimstart.CheckpointError, match="structure="):
        other.load_state_dict(first.state_dict())
    _, _, wide = make_training(budget=slimstart.Flops(0.8))
    _, _, narrow = make_training(budget=slimstart.Flops(0.3))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.expected_cost <= 0.3 + 1e-12


def test_keep_may_be_a_generator_and_a_layer_by_size_is_left_whole():
    class BySize(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.again = nn.Conv2d(8, 8, 1, groups=8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            x = self.conv(x)
            if x.shape[1] >= 6:
                x = self.again(x)
            return self.fc(x.mean((2, 3)))

    assert "used as a number" in slimstart.trace(BySize(), IMAGES).left_whole["conv"]
    _, _, sparse = make_training(keep=(name for name in ["0"]))
    assert sparse.graph.left_whole["0"] == "asked for by `keep`"


def test_what_is_not_reached_is_reported_and_single_examples_are_traced_in_training(caplog):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
            self.yes, self.no, self.auxiliary = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x):
            x = self.norm(self.stem(x)).relu()
            out = self.yes(x) if x.sum().item() >= 0 else self.no(x)
            return (out, self.auxiliary(x)) if self.training else out

    with caplog.at_level(logging.WARNING):
        graph = slimstart.trace(Branches(), torch.randn(1, 6))
    assert not caplog.records
    assert graph.left_whole["no"] == "not reached with `example_inputs`"
    assert "auxiliary.weight" in graph.tensors


def test_tracing_does_not_touch_the_model():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.code = nn.Conv2d(3, 4, 1), nn.Parameter(torch.ones(1))

        def forward(self, x):
            if self.training:
                self.code.data.mul_(0.9)
            return self.conv(x).mean((2, 3)) * self.code

    model = Codebook()
    state = torch.get_rng_state()
    slimstart.trace(model, IMAGES)
    assert torch.equal(model.code.detach(), torch.ones(1))
    assert torch.equal(state, torch.get_rng_state())


def test_batches_that_are_single_tensors():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    batches = [torch.randn(8, 4) for _ in range(3)]

    def loss(net, x):
        return net(x).square().mean()

    assert recalibrate(model, batches, loss) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = slimstart.SparseTraining(model, optimizer, batches[0], budget=slimstart.Params(0.6), policy="paper")
    assert sparse.finish(iter(batches), loss)(batches[0]).shape == (8, 2)
    with pytest.raises(ValueError, match="`batches` is empty"):
        sparse.finish([], loss)


def test_large_constant_buffers_are_not_copied_in_a_step():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
            self.register_buffer("table", torch.ones(1000, 4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.count += 1
            return self.second(self.first(x * self.table[: len(x)]).relu())

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    sparse = slimstart.SparseTraining(model, optimizer, x, budget=slimstart.Params(0.6), policy="paper")
    before = sparse.net.table._version
    for _ in range(3):
        sparse.step(lambda net, x: net(x).square().mean(), x)
    assert sparse.net.table._version == before
    assert model.state_dict()["count"] == 3  # the reference's forwards do not count
