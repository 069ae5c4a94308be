"""Common code around a training loop must work, or be refused with an error; never be silently wrong.

Every test is a piece of a user's program: validation, averages of weights, clipping, copies, other precisions.
"""

import copy
import gc
import io
import logging
import pickle
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import slimstart
from slimstart import Channels, CheckpointError, EqualWorth, Flops, Paper, Params, SparseTraining
from slimstart.narrow import recalibrate
from slimstart.narrow.stream_ports import StreamPort
from slimstart.policies import Budget
from tests.settings import arguments
from tests.zoo import ZOO

_RANDOM = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(8, 3, 8, 8, generator=_RANDOM), torch.randint(0, 4, (8,), generator=_RANDOM)
QUICK = EqualWorth(align=1, resample_every=2, rounds=4, rate=1.0, pull=0.0)  # after steps 2, 4, 6, 8


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def make_training(model: Any = None, **settings: Any) -> tuple[Any, torch.optim.Optimizer, SparseTraining]:
    """With the paper's policy, if no other is named."""
    model = model or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"budget": Flops(0.5), **settings}
    return model, optimizer, SparseTraining(model, optimizer, IMAGES[:2], **arguments(**settings))


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One iteration of a loop that knows nothing of slimstart."""
    loss = loss_fn(model, IMAGES, LABELS)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def steps(sparse: SparseTraining, optimizer: torch.optim.Optimizer, n: int) -> Iterator[bool]:
    """So many iterations; after each, whether the structure has changed."""
    for _ in range(n):
        before = sparse.mask
        if isinstance(sparse.policy, EqualWorth):
            iterate(sparse.model, optimizer)
        else:
            sparse.step(loss_fn, IMAGES, LABELS)
        yield not torch.equal(before, sparse.mask)


def outputs(net: nn.Module, images: Tensor = IMAGES) -> Tensor:
    """In evaluation mode; the network is left as it was."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    with torch.no_grad():
        found = net(images)
    for module, training in modes.items():
        module.training = training
    return found


POLICIES = pytest.mark.parametrize("policy", [QUICK, Paper(resample_every=2)], ids=["equal_worth", "paper"])


# --------------------------------------------------------------------------- the loop as it was


@pytest.mark.parametrize("budget", [Channels(0.5), Params(0.4), Flops(0.4)], ids=str)
def test_a_plain_loop_trains_and_changes_the_structure(budget: Budget) -> None:
    """The default policy, and nothing of ours is called between the constructor and `finish`."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1, stride=2), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
    sparse = SparseTraining(model, optimizer, IMAGES[:1], budget, total_steps=40)
    losses, structures = [], []
    for _ in range(40):
        losses.append(float(iterate(model, optimizer)))
        scheduler.step()
        structures.append(tuple(sparse.mask.tolist()))
        if isinstance(budget, Flops):
            assert slimstart.flops(model, IMAGES[:1]) <= 0.4 * slimstart.flops(whole, IMAGES[:1])
        elif isinstance(budget, Params):
            assert sum(p.numel() for p in model.parameters()) <= 0.4 * sum(p.numel() for p in whole.parameters())
        else:
            assert sum(model[layer].out_channels for layer in (0, 3, 6)) <= 0.5 * (32 + 48 + 64)
    assert losses[-1] < 0.5 * losses[0]
    assert len(set(structures)) > 1, "the structure has not been learned"
    assert len(set(structures[8:])) == 1, "the search takes a fifth of the training"
    assert sparse.settled
    assert sparse.num_steps == 40
    assert sparse.finish() is model


def test_the_loop_and_step_are_the_same(differences: Any) -> None:
    torch.manual_seed(0)
    first, second = (make_training(policy=QUICK) for _ in range(2) if torch.manual_seed(0))
    for _ in range(9):
        loss = iterate(first[0], first[1])
        assert torch.equal(loss, second[2].step(loss_fn, IMAGES, LABELS))
    assert first[2].settled
    assert differences(first[2].state_dict(), second[2].state_dict()) == []


@POLICIES
def test_validating_the_model_validates_the_network_that_is_trained(policy: Any) -> None:
    model, _, sparse = make_training(policy=policy)
    trained: list[nn.Module] = []

    def spying(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        trained.append(net)
        return loss_fn(net, images, labels)

    changes = 0
    for _ in range(9):
        expected = outputs(slimstart.compact(sparse.dense_copy(), sparse.graph.select(sparse.mask)))
        assert torch.equal(outputs(model), expected)
        if policy is QUICK:
            snapshot = sparse.snapshot()
            assert torch.equal(outputs(snapshot), expected)
            assert (outputs(snapshot).argmax(1) == LABELS).sum() == (outputs(model).argmax(1) == LABELS).sum()
        before = sparse.mask
        sparse.step(spying, IMAGES, LABELS)
        changes += not torch.equal(before, sparse.mask)
        assert trained[0] is model
        trained.clear()
        assert model.training
    assert changes > 1


@POLICIES
def test_clipping_sees_all_gradients_and_zero_grad_clears_them(policy: Any) -> None:
    model, optimizer, sparse = make_training(policy=policy)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in steps(sparse, optimizer, 5):
        loss_fn(model, IMAGES, LABELS).backward()
        assert all(p.grad is not None for p in held)
        expected = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        clipped = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt()
        assert float(clipped) == pytest.approx(1e-3, rel=1e-3)
        model.zero_grad()
        assert all(p.grad is None for p in held)
        loss_fn(model, IMAGES, LABELS).backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


class Heads(nn.Module):
    """Attention of a user's own, which counts its heads in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 3
        self.stem, self.qkv, self.out = nn.Linear(6, 8), nn.Linear(8, 36), nn.Linear(12, 8)
        self.first, self.second = nn.Linear(8, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, self.num_heads * self.head_dim)
        x = x + self.out(y)
        return self.second(self.first(x).relu()).mean(1)


@POLICIES
@pytest.mark.parametrize("kind", ["convolutions", "heads"])
def test_parameters_keep_their_identity_and_attributes_follow(kind: str, policy: Any) -> None:
    model = make_model() if kind == "convolutions" else Heads()
    inputs = IMAGES if kind == "convolutions" else torch.randn(8, 5, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, inputs[:2], Params(0.6), policy=policy)
    before, groups = dict(model.named_parameters()), list(optimizer.param_groups)
    shapes, num_heads = set(), set()
    for _ in range(8):
        mask = sparse.mask
        sparse.step(loss_fn, inputs, LABELS)
        now = dict(model.named_parameters())
        assert list(now) == list(before)
        assert all(now[name] is before[name] for name in before)
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
        assert all(a is b for a, b in zip(groups[0]["params"], before.values(), strict=True))
        assert set(map(id, optimizer.state)) == set(map(id, before.values()))
        assert all(optimizer.state[p][key].shape == p.shape for p in now.values() for key in ("exp_avg", "exp_avg_sq"))
        if not torch.equal(mask, sparse.mask):
            assert all(p.grad is None for p in model.parameters())
        shapes.add(tuple(p.shape for p in model.parameters()))
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.weight.shape == module.running_var.shape == (module.num_features,)
            elif isinstance(module, nn.Linear):
                assert module.weight.shape == (module.out_features, module.in_features)
            elif isinstance(module, Heads):
                assert module.qkv.out_features == 3 * module.num_heads * module.head_dim
                assert module.out.in_features == module.num_heads * module.head_dim
                num_heads.add(module.num_heads)
    assert len(shapes) > 1
    assert kind == "convolutions" or min(num_heads) < 4


# --------------------------------------------------------------------------- averages of weights


@POLICIES
def test_an_average_of_weights_follows_the_structure(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As an average that is kept by hand, dense, in which only channels of the present network move."""
    model, optimizer, sparse = make_training(policy=policy)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    sparse.follow(average)
    parameters = list(average.parameters())
    by_hand = {name: sparse.state_dict()["model"][name].clone() for name, _ in model.named_parameters()}
    changes = 0
    for step in range(8):
        # With the structure that was trained: a change comes at the end of an iteration, and the average with it.
        sparse_before = sparse.mask
        if policy is QUICK:
            iterate(model, optimizer)
        else:
            sparse.step(loss_fn, IMAGES, LABELS)
        changes += not torch.equal(sparse_before, sparse.mask)
        average.update_parameters(model)
        selection, now = sparse.graph.select(sparse.mask), sparse.state_dict()["model"]
        for name, mean in by_hand.items():
            narrow = selection.gather(name, now[name])
            kept = selection.gather(name, mean)
            selection.scatter_(name, mean, narrow if step == 0 else kept.lerp(narrow, 0.2))
            assert torch.allclose(average.module.get_parameter(name), selection.gather(name, mean), atol=1e-6), name
    assert changes > 1
    assert all(a is b for a, b in zip(parameters, average.parameters(), strict=True))
    assert not caplog.records
    update_bn([(IMAGES, LABELS)], average)
    assert outputs(average).shape == (8, 4)
    sparse.settle()
    sparse.finish()
    assert [p.shape for p in average.parameters()] == [p.shape for p in model.parameters()]
    assert not any(hooks_of(average.module))
    average.update_parameters(model)


@POLICIES
def test_a_training_resumes_with_its_average(policy: Any) -> None:
    """The average of channels that are not in the network is in the training's state, and returns with them."""

    def fresh() -> tuple[Any, Any, Any, Any]:
        model, optimizer, sparse = make_training(policy=policy)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        sparse.follow(average)
        return model, optimizer, sparse, average

    def run(training: tuple[Any, Any, Any, Any], steps: int) -> None:
        model, optimizer, sparse, average = training
        for _ in range(steps):
            if policy is QUICK:
                iterate(model, optimizer)
            else:
                sparse.step(loss_fn, IMAGES, LABELS)
            average.update_parameters(model)

    training = fresh()
    run(training, 2)
    state, averaged = copy.deepcopy(training[2].state_dict()), copy.deepcopy(training[3].state_dict())
    run(training, 8)
    again = fresh()
    again[2].load_state_dict(state)
    again[3].load_state_dict(averaged)
    run(again, 8)
    assert not torch.equal(again[2].mask, state["masks"][0])
    for one, other in zip(training[3].parameters(), again[3].parameters(), strict=True):
        assert torch.equal(one, other)
    alone = make_training(policy=policy)[2]
    with pytest.raises(CheckpointError, match="call `follow` as often before loading as before saving"):
        alone.load_state_dict(state)


@POLICIES
def test_an_average_that_does_not_follow_causes_a_warning(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, sparse = make_training(policy=policy)
    followed, left = AveragedModel(model), AveragedModel(model)
    sparse.follow(followed)
    shapes = [p.shape for p in left.parameters()]
    changed = next(number for number, changed in enumerate(steps(sparse, optimizer, 8)) if changed)
    assert changed == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "sparse.follow" in caplog.text
    assert [p.shape for p in left.parameters()] == shapes
    assert sum(steps(sparse, optimizer, 6)) > 0
    assert len(caplog.records) == 1, "one warning for one copy"
    another = copy.deepcopy(model)
    assert sum(steps(sparse, optimizer, 4)) > 0 or policy is QUICK
    assert len(caplog.records) == (1 if sparse.settled else 2)
    del another


def test_a_deleted_copy_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, sparse = make_training(policy=QUICK)
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    sparse.snapshot()
    sparse.dense_copy()
    assert sum(steps(sparse, optimizer, 4)) > 0
    assert not caplog.records


def test_only_copies_of_the_model_can_follow() -> None:
    model, _, sparse = make_training()
    for foreign in (make_model(), nn.Linear(2, 2), model):
        with pytest.raises(ValueError, match="no copy of the model as it is now"):
            sparse.follow(foreign)


# --------------------------------------------------------------------------- the end


def hooks_of(model: nn.Module) -> Iterator[Any]:
    """Whatever is registered on modules and parameters."""
    for module in model.modules():
        for attribute, value in vars(module).items():
            if attribute.endswith("hooks"):
                yield from value.values()
    for parameter in model.parameters():
        yield from (parameter._backward_hooks or {}).values()
        yield from (parameter._post_accumulate_grad_hooks or {}).values()


@pytest.mark.parametrize(
    "policy", [QUICK, Paper(), Paper(align=4)], ids=["equal_worth", "paper", "paper with capacity to spare"]
)
@pytest.mark.parametrize("name", ["vgg_bn", "resnet_basic"])
def test_finish_returns_the_same_plain_object(name: str, policy: Any) -> None:
    model = ZOO[name].factory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(4, 3, 16, 16)
    modules = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    sparse = SparseTraining(model, optimizer, images[:1], Flops(0.4), policy=policy)
    removed = sparse.graph.removed
    assert bool(removed) == (policy is QUICK and name == "vgg_bn")
    for _ in range(5):
        sparse.step(loss_fn, images, LABELS[:4])
    assert any(hooks_of(model))
    sparse.settle()
    finished = sparse.finish()
    assert finished is model
    left = {key: one for key, one in parameters.items() if not any(layer.has(key) for layer in removed)}
    assert all(a is left[key] for key, a in model.named_parameters())
    assert left.keys() == dict(model.named_parameters()).keys()
    for key, module in model.named_modules():
        cls, known = modules[key]
        if any(layer.has(key) for layer in removed):
            assert type(module) is nn.Identity
        elif isinstance(module, StreamPort):
            assert policy is not QUICK
            assert name == "resnet_basic"
            assert isinstance(module, cls)
        else:
            assert type(module) is cls
            assert set(vars(module)) - known <= {"_slimstart_record"}
    assert len(list(model.modules())) == len(modules)  # the layers that can go in these networks have no parts
    assert not any(hooks_of(model))
    assert not any(value for key, value in vars(optimizer).items() if key.endswith("hooks"))
    expected = outputs(model, images)
    pickled = pickle.loads(pickle.dumps(model))
    assert torch.equal(outputs(pickled, images), expected)


@pytest.mark.parametrize("policy", [QUICK, Paper()], ids=["equal_worth", "paper"])
def test_a_narrow_state_dict_is_read_without_a_training(policy: Any, differences: Any) -> None:
    model = ZOO["resnet_basic"].factory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(4, 3, 16, 16)
    sparse = SparseTraining(model, optimizer, images[:1], Flops(0.4), policy=policy)
    for _ in range(3):
        sparse.step(loss_fn, images, LABELS[:4])
    sparse.settle()
    sparse.finish(plain=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = slimstart.shrink_to(ZOO["resnet_basic"].factory(), state)
    other.load_state_dict(state, strict=True)
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    assert torch.equal(outputs(other, images), outputs(model, images))
    assert [type(a) for a in other.modules()] == [type(b) for b in model.modules()]


def test_attributes_come_with_the_state_dict_of_a_training() -> None:
    """`num_heads` is no shape; the state dict of a model in training knows it all the same."""
    model, inputs = Heads(), torch.randn(4, 5, 6)
    sparse = SparseTraining(model, torch.optim.AdamW(model.parameters()), inputs[:1], Params(0.5), policy=QUICK)
    assert model.num_heads < 4
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = slimstart.shrink_to(Heads(), torch.load(file, weights_only=True))
    assert other.num_heads == model.num_heads
    assert torch.equal(outputs(other, inputs), outputs(model, inputs))
    sparse.settle()
    sparse.finish()
    traced = slimstart.shrink_to(Heads(), model.state_dict(), example_inputs=inputs[:1])
    assert traced.num_heads == model.num_heads
    assert torch.equal(outputs(traced, inputs), outputs(model, inputs))


def test_methods_after_finish_are_refused() -> None:
    model, _, sparse = make_training(ZOO["resnet_basic"].factory())
    sparse.finish(plain=True)
    for asked in (sparse.snapshot, sparse.dense_copy, sparse.state_dict, sparse.settle, sparse.resample):
        with pytest.raises(RuntimeError, match="this training is finished; `model` is a plain module"):
            asked()
    with pytest.raises(RuntimeError, match="this training is finished"):
        sparse.follow(copy.deepcopy(model))
    again = SparseTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), IMAGES[:2], Flops(0.6), policy=QUICK)
    again.step(loss_fn, IMAGES, LABELS)


# --------------------------------------------------------------------------- copies and files


@POLICIES
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_made_during_a_search_are_plain_modules(how: str, policy: Any, differences: Any) -> None:
    torch.manual_seed(0)
    model, optimizer, sparse = make_training(policy=policy)
    torch.manual_seed(0)
    _, other_optimizer, undisturbed = make_training(policy=policy)
    list(steps(sparse, optimizer, 3))
    list(steps(undisturbed, other_optimizer, 3))
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(model)
    assert torch.equal(outputs(twin), outputs(model))
    state = copy.deepcopy(dict(twin.state_dict()))
    mask, weights = sparse.mask, copy.deepcopy(dict(model.state_dict()))
    own = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        iterate(twin, own)
    twin.load_state_dict(state)
    assert torch.equal(sparse.mask, mask)
    assert differences(weights, dict(model.state_dict())) == []
    list(steps(sparse, optimizer, 4))
    list(steps(undisturbed, other_optimizer, 4))
    assert differences(undisturbed.state_dict(), sparse.state_dict()) == []
    assert differences(state, dict(twin.state_dict())) == []
    twin.half()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    narrower = SparseTraining(twin.float(), own, IMAGES[:2], Flops(0.7), policy=policy)
    narrower.step(loss_fn, IMAGES, LABELS)
    assert differences(undisturbed.state_dict(), sparse.state_dict()) == []


def test_copies_of_a_padded_network() -> None:
    model, optimizer, sparse = make_training(policy=Paper(align=4))
    list(steps(sparse, optimizer, 3))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(twin), outputs(model))
        assert not [hook for p in twin.parameters() for hook in (p._post_accumulate_grad_hooks or {})]
    exact = slimstart.shrink_to(make_model(), model.state_dict())
    assert torch.allclose(outputs(exact), outputs(model), atol=1e-5)
    assert exact[0].out_channels == int(sparse.mask[:16].sum())


def test_a_stored_state_dict_does_not_change(differences: Any) -> None:
    """`best = deepcopy(model.state_dict())`, and back to it after changes of structure."""
    model, optimizer, sparse = make_training(policy=QUICK)
    list(steps(sparse, optimizer, 1))
    best, mask, expected = copy.deepcopy(model.state_dict()), sparse.mask, outputs(model)
    assert sum(steps(sparse, optimizer, 8)) > 0
    assert sparse.settled
    assert not torch.equal(sparse.mask, mask)
    model.load_state_dict(best)
    assert torch.equal(sparse.mask, mask)
    assert torch.equal(outputs(model), expected)
    assert differences(dict(best), dict(model.state_dict())) == []
    assert sparse.finish() is model
    assert torch.equal(outputs(model), expected)


def test_loading_a_few_tensors_keeps_the_rest() -> None:
    model, optimizer, sparse = make_training(resample_every=100)
    list(steps(sparse, optimizer, 3))
    learned = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({"8.bias": torch.ones(4)}, strict=False)
    now = model.state_dict()
    assert torch.equal(now["8.bias"], torch.ones(4))
    assert all(torch.equal(now[k], v) for k, v in learned.items() if k != "8.bias")


def test_references_have_what_was_loaded() -> None:
    """The other network of a pair shares weights with the model, also those that were loaded a moment ago."""
    model, _, sparse = make_training()
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    mask, reference_mask = sparse.state_dict()["masks"][:, :16]
    shared = mask[reference_mask]
    assert bool(shared.any())
    assert not bool(shared.all())
    weight = sparse.reference[0].weight
    assert not bool(weight[shared].any())
    assert bool(weight[~shared].all())


@pytest.mark.parametrize("assign", [True, False])
def test_replacing_parameters_is_refused(assign: bool, differences: Any) -> None:
    model, _, sparse = make_training()
    state = model.state_dict() if assign else make_model().state_dict()
    before = sparse.state_dict()
    with pytest.raises(CheckpointError, match="`assign=True`" if assign else "does not fit the narrow model"):
        model.load_state_dict(state, assign=assign)
    assert differences(before, sparse.state_dict()) == []


@pytest.mark.parametrize("after", ["a step", "the search"])
@pytest.mark.parametrize("what", ["layer", "block", "parameter"])
def test_replacing_a_layer_is_refused(what: str, after: str) -> None:
    whole = make_model()
    model, optimizer, sparse = make_training(nn.Sequential(whole[:6], whole[6:]), policy=QUICK)
    list(steps(sparse, optimizer, 1 if after == "a step" else 9))
    head = model[1][2]
    if what == "layer":
        model[1][2] = nn.Linear(head.in_features, 7)
    elif what == "block":
        model[1] = nn.Sequential(*model[1])
    else:
        head.weight = nn.Parameter(head.weight.detach().clone())
    optimizer.add_param_group(
        {"params": [p for p in model[1].parameters() if id(p) not in set(map(id, optimizer.state))]}
    )
    name = {"layer": r"'1\.8' of the model is another layer", "block": "'1' of the model is another layer"}
    message = name.get(what, r"'1\.8\.weight' of the model is another parameter")
    if after == "a step":
        with pytest.raises(RuntimeError, match=message):
            iterate(model, optimizer)
    for asked in (sparse.finish, sparse.snapshot, sparse.state_dict):
        with pytest.raises(RuntimeError, match=message):
            asked()


# --------------------------------------------------------------------------- precisions


KINDS = pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)


def in_own_precision(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images.to(next(net.parameters()).dtype)).float(), labels)


@POLICIES
@KINDS
@pytest.mark.parametrize("when", ["from the start", "in mid-search"])
def test_parameters_of_any_precision_survive_changes(kind: torch.dtype, policy: Any, when: str) -> None:
    model = make_model()
    if when == "from the start":
        model.to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    example = IMAGES[:2].to(next(model.parameters()).dtype)
    sparse = SparseTraining(model, optimizer, example, Flops(0.5), policy=policy)
    average = AveragedModel(model)
    sparse.follow(average)
    losses, changes = [], 0
    for step in range(12):
        if when == "in mid-search" and step == 4:  # just after a change, when references are needed
            _ = model.half() if kind == torch.float16 else model.double() if kind == torch.float64 else model.to(kind)
            average.to(kind)
        mask = sparse.mask
        losses.append(float(sparse.step(in_own_precision, IMAGES, LABELS)))
        changes += not torch.equal(mask, sparse.mask)
        average.update_parameters(model)
    assert changes > 1
    assert losses[-1] < losses[0]
    dense = sparse.state_dict()["model"]
    for network in (model, average.module, sparse.snapshot(), sparse.dense_copy()):
        assert {t.dtype for t in [*network.parameters(), *network.buffers()]} == {kind, torch.int64}
    assert {tensor.dtype for tensor in dense.values()} == {kind, torch.int64}
    sparse.settle()
    sparse.finish([(IMAGES, LABELS)], in_own_precision)
    assert {p.dtype for p in model.parameters()} == {kind}
    assert bool(outputs(model, IMAGES.to(kind)).isfinite().all())


# --------------------------------------------------------------------------- what is refused, by name


def of_class(name: str, module: str) -> nn.Module:
    """A module of a class that is only known by its name."""
    cls: Any = type(name, (nn.Module,), {"__module__": module, "forward": lambda self, x: self.inner(x)})
    model = cls()
    model.inner = make_model()
    return model


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel"),
        ("FSDPModule", "torch.distributed.fsdp"),
        ("DeepSpeedEngine", "deepspeed.runtime.engine"),
        ("DataParallel", "torch.nn.parallel.data_parallel"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_wrappers_that_cannot_follow_are_refused_by_name(name: str, module: str, inside: bool) -> None:
    model = of_class(name, module)
    model = nn.Sequential(model, nn.Identity()) if inside else model
    with pytest.raises(TypeError, match=rf"`model` is a {name}, which cannot be narrowed: \w+"):
        make_training(model, policy=QUICK)


def test_a_user_class_with_the_name_of_a_wrapper_is_accepted() -> None:
    _, optimizer, sparse = make_training(of_class("DataParallel", "mine"), policy=QUICK)
    assert sum(steps(sparse, optimizer, 4)) > 0


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_parametrized_modules_are_refused_by_name(make: Any) -> None:
    model = make_model()
    make(model[3])
    with pytest.raises(TypeError, match=r"'3' of `model` has parametrizations \(weight\).*remove_parametrizations"):
        make_training(model, policy=QUICK)
    nn.utils.parametrize.remove_parametrizations(model[3], "weight")
    make_training(model, policy=QUICK)


@POLICIES
def test_layers_under_weight_norm_are_narrowed(policy: Any) -> None:
    torch.manual_seed(0)
    model = make_model()
    parametrizations.weight_norm(model[3])
    dense = model[3].weight.shape
    _, optimizer, sparse = make_training(model, policy=policy, budget=Flops(0.2))
    list(steps(sparse, optimizer, 4))
    length, direction = (p.shape for p in model[3].parametrizations["weight"].parameters())
    assert model[3].weight.shape == direction
    assert direction[0] == length[0] < dense[0]
    assert direction[1] < dense[1]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Packed(torch.Tensor):
    """As libraries of quantised weights make them."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["Parameter in torch.int8", "Parameter in torch.qint8", "Packed in torch.float32"])
def test_quantised_parameters_are_refused_by_name(kind: str) -> None:
    model = make_model()
    weight = model[3].weight.detach()
    if "qint8" in kind:
        weight = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    elif "int8" in kind:
        weight = (100 * weight).to(torch.int8)
    else:
        weight = weight.as_subclass(Packed)
    model[3].weight = nn.Parameter(weight, requires_grad=False)
    before = copy.deepcopy([p.shape for p in model.parameters()])
    with pytest.raises(TypeError, match=rf"'3\.weight' of `model` is a {kind}, which cannot be narrowed"):
        make_training(model, policy=QUICK)
    assert [p.shape for p in model.parameters()] == before


# --------------------------------------------------------------------------- loss functions


@POLICIES
def test_a_loss_function_may_return_more(policy: Any, differences: Any) -> None:
    def with_logits(net: nn.Module, images: Tensor, labels: Tensor) -> Any:
        logits = net(images)
        return F.cross_entropy(logits, labels), {"logits": logits, "correct": int((logits.argmax(1) == labels).sum())}

    torch.manual_seed(0)
    first, second = (make_training(policy=policy)[2] for _ in range(2) if torch.manual_seed(0))
    for _ in range(4):
        loss, more = first.step(with_logits, IMAGES, LABELS)
        assert torch.equal(loss, second.step(loss_fn, IMAGES, LABELS))
        assert not loss.requires_grad
        assert not more["logits"].requires_grad
        assert torch.equal(F.cross_entropy(more["logits"], LABELS), loss)
        assert more["correct"] == int((more["logits"].argmax(1) == LABELS).sum())
    data = [(IMAGES, LABELS)]
    assert differences(first.state_dict(), second.state_dict()) == []
    found = [sparse.snapshot(data, loss).state_dict() for sparse, loss in ((first, with_logits), (second, loss_fn))]
    assert differences(dict(found[0]), dict(found[1])) == []
    first.settle(data, with_logits)
    second.settle(data, loss_fn)
    assert differences(first.state_dict(), second.state_dict()) == []
    first.finish(data, with_logits)
    second.finish(data, loss_fn)
    assert differences(dict(first.model.state_dict()), dict(second.model.state_dict())) == []


@pytest.mark.parametrize("more", [None, (), "text", [1, torch.ones(2)]], ids=str)
def test_outputs_returned_with_the_loss_are_returned(more: Any) -> None:
    _, _, sparse = make_training(policy=QUICK)
    loss, found = sparse.step(lambda net, x, y: (loss_fn(net, x, y), more), IMAGES, LABELS)
    assert loss.shape == ()
    assert found is more or str(found) == str(more)


@pytest.mark.parametrize("result", [lambda loss: float(loss), lambda loss: (loss, 1, 2), lambda loss: loss.repeat(3)])
def test_other_objects_than_losses_are_refused(result: Any, differences: Any) -> None:
    _, _, sparse = make_training(policy=QUICK)
    before = copy.deepcopy(dict(sparse.model.named_parameters()))
    with pytest.raises(TypeError, match=r"`loss_fn` returned a .*; it must return a scalar tensor"):
        sparse.step(lambda net, x, y: result(loss_fn(net, x, y).detach()), IMAGES, LABELS)
    assert differences(before, dict(sparse.model.named_parameters())) == []
    assert sparse.num_steps == 0


# --------------------------------------------------------------------------- modes and freezing


def test_train_and_eval_modes_are_kept() -> None:
    model, _, sparse = make_training(make_model().eval())
    assert not any(module.training for module in model.modules())
    model.train()
    sparse.step(loss_fn, IMAGES, LABELS)
    assert model[1].num_batches_tracked == 1
    model[1].eval()
    modes: list[list[bool]] = []

    def spying(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        modes.append([module.training for module in net.modules()])
        return loss_fn(net, images, labels)

    sparse.step(spying, IMAGES, LABELS)
    assert len(modes) == 2, "the reference too"
    assert modes[0] == modes[1] == [module.training for module in model.modules()]
    assert not model[1].training
    assert model[4].training
    assert (model[1].num_batches_tracked, model[4].num_batches_tracked) == (1, 2)


@pytest.mark.parametrize("training", [True, False])
@POLICIES
def test_a_cache_of_evaluation_mode_is_left_to_the_user(policy: Any, training: bool) -> None:
    """The bias of each head is cached in evaluation mode, until the user calls `train()`."""
    torch.manual_seed(0)
    model, tokens = ZOO["cached_bias"].factory().train(training), torch.randn(4, 6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings = arguments(policy=policy, budget=Flops(0.7), total_steps=12)
    sparse = SparseTraining(model, optimizer, tokens[:2], **settings)
    assert model.attention.cached == {}
    for _ in range(12):
        model.train()
        sparse.step(lambda net, x: net(x).square().mean(), tokens)
        model.eval()
        with torch.no_grad():
            found = model(tokens)
        slimstart.flops(model, tokens)
        model.train()
        assert model.attention.cached == {}
        with torch.no_grad():
            assert torch.equal(copy.deepcopy(model).eval()(tokens), found)
    assert sparse.finish() is model
    assert model.attention.heads == len(model.attention.attention_biases)


@POLICIES
def test_a_layer_frozen_during_training_does_not_change(policy: Any) -> None:
    model, optimizer, sparse = make_training(policy=policy)
    list(steps(sparse, optimizer, 3))
    model[0].requires_grad_(False)
    before = sparse.state_dict()["model"]
    list(steps(sparse, optimizer, 5))
    after = sparse.state_dict()["model"]
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["3.weight"], after["3.weight"])
    assert not model[0].weight.requires_grad
    assert model[3].weight.requires_grad
    assert [p.requires_grad for p in sparse.snapshot().parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_snapshot_in_inference_mode_leaves_no_inference_tensors() -> None:
    model, optimizer, sparse = make_training(resample_every=2)
    list(steps(sparse, optimizer, 1))
    with torch.inference_mode():
        sparse.snapshot()
    list(steps(sparse, optimizer, 4))
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


# --------------------------------------------------------------------------- odds and ends


@POLICIES
def test_training_continues_when_the_object_is_deleted(policy: Any) -> None:
    """A user who keeps no name for it trains on: its hooks keep it alive."""
    model, optimizer, sparse = make_training(policy=policy)
    parameters, known = list(model.parameters()), sparse.learner
    before = [p.detach().clone() for p in parameters]
    step = sparse.step
    del sparse
    for _ in range(3):
        _ = iterate(model, optimizer) if policy is QUICK else step(loss_fn, IMAGES, LABELS)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    if policy is QUICK:
        assert known.num_rounds == 1


def test_an_optimizer_of_something_else_is_refused() -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`optimizer` holds none of the model's parameters"):
        SparseTraining(make_model(), optimizer, IMAGES[:2], budget=Flops(0.5), policy="paper")
    model, optimizer, _ = make_training()
    with pytest.raises(ValueError, match="`model` is in a SparseTraining already"):
        SparseTraining(model, optimizer, IMAGES[:2], budget=Flops(0.5), policy="paper")


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_an_optimizer_that_runs_the_model_itself_is_refused(policy: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS, which cannot step without a closure"):
        SparseTraining(model, torch.optim.LBFGS(model.parameters()), IMAGES[:2], budget=Flops(0.5), policy=policy)


def test_it_is_not_copied_without_its_hooks() -> None:
    """A copy would train on, and learn nothing of its structure."""
    _, _, sparse = make_training(policy="equal_worth")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(sparse)
    _, _, second = make_training(policy="equal_worth")
    second.load_state_dict(sparse.state_dict())
    assert torch.equal(second.mask, sparse.mask)


def test_parameter_groups_may_be_added_later() -> None:
    _, optimizer, sparse = make_training()
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    for _ in range(3):
        sparse.step(loss_fn, IMAGES, LABELS)
    assert torch.equal(extra.detach(), torch.ones(3))


def test_a_missing_reference_is_refused() -> None:
    _, _, sparse = make_training(estimator="pge")
    with pytest.raises(RuntimeError, match="check `needs_reference` first"):
        _ = sparse.reference


def test_a_checkpoint_of_other_units_or_another_budget() -> None:
    _, _, first = make_training(keep=["0"])
    _, _, other = make_training(keep=["3"])
    with pytest.raises(CheckpointError, match="structure="):
        other.load_state_dict(first.state_dict())
    _, _, wide = make_training(budget=Flops(0.8))
    _, _, narrow = make_training(budget=Flops(0.3))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.expected_cost <= 0.3 + 1e-12


def test_keep_may_be_a_generator_and_a_layer_by_size_is_not_prunable() -> None:
    class BySize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.again = nn.Conv2d(8, 8, 1, groups=8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.conv(x)
            if x.shape[1] >= 6:
                x = self.again(x)
            return self.fc(x.mean((2, 3)))

    assert "used as a number" in slimstart.trace(BySize(), IMAGES).not_prunable["conv"]
    _, _, sparse = make_training(keep=(name for name in ["0"]))
    assert sparse.graph.not_prunable["0"] == "asked for by `keep`"


def test_unreached_layers_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
            self.yes, self.no, self.auxiliary = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            x = self.norm(self.stem(x)).relu()
            out = self.yes(x) if x.sum().item() >= 0 else self.no(x)
            return (out, self.auxiliary(x)) if self.training else out

    with caplog.at_level(logging.WARNING):
        graph = slimstart.trace(Branches(), torch.randn(1, 6))
    assert not caplog.records
    assert graph.not_prunable["no"] == "not reached with `example_inputs`"
    assert "auxiliary.weight" in graph.tensors


def test_tracing_does_not_touch_the_model() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.code = nn.Conv2d(3, 4, 1), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            if self.training:
                self.code.data.mul_(0.9)
            return self.conv(x).mean((2, 3)) * self.code

    model = Codebook()
    state = torch.get_rng_state()
    slimstart.trace(model, IMAGES)
    assert torch.equal(model.code.detach(), torch.ones(1))
    assert torch.equal(state, torch.get_rng_state())


def test_batches_that_are_single_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    batches = [torch.randn(8, 4) for _ in range(3)]

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    assert recalibrate(model, batches, loss) == 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, batches[0], budget=Params(0.6), policy="paper")
    for ended in (sparse.snapshot, sparse.settle, sparse.finish):
        with pytest.raises(ValueError, match="`batches` is empty"):
            ended([], loss)
    assert sparse.finish(iter(batches), loss)(batches[0]).shape == (8, 2)


def test_large_constant_buffers_are_not_copied_in_a_step() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
            self.register_buffer("table", torch.ones(1000, 4))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            if self.training:
                self.count += 1
            return self.second(self.first(x * self.table[: len(x)]).relu())

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    sparse = SparseTraining(model, optimizer, x, budget=Params(0.6), policy="paper")
    tables = [model.table, sparse.reference.table]
    before = [table._version for table in tables]
    for _ in range(3):
        sparse.step(lambda net, x: net(x).square().mean(), x)
        assert [table._version for table in tables] == before
        assert sparse.reference.table is tables[1]
    assert model.count == 3  # the reference's forwards do not count


def test_two_optimizers_cannot_share_parameters() -> None:
    model = make_model()
    both = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (1e-2, 1e-3)]
    with pytest.raises(slimstart.OptimizerStateError, match="two optimizers hold the same parameter"):
        SparseTraining(model, both, IMAGES[:2], Flops(0.5), policy=QUICK)


def test_a_half_loaded_training_makes_no_checkpoint() -> None:
    model, optimizer, sparse = make_training(policy=QUICK)
    early, whole = copy.deepcopy(model.state_dict()), sparse.state_dict()
    for _ in steps(sparse, optimizer, 5):
        pass
    assert not torch.equal(sparse.mask, whole["masks"][0])
    model.load_state_dict(early)
    with pytest.raises(RuntimeError, match="load the state dict of SparseTraining"):
        sparse.state_dict()  # with the mask of the model and the learner of another one
    sparse.load_state_dict(whole)
    assert sparse.state_dict()["num_steps"] == 0


@pytest.mark.parametrize("order", ["seldom first", "seldom last"])
def test_no_gradient_is_lost_between_the_steps_of_two_optimizers(order: str) -> None:
    model = make_model()
    names = dict(model.named_parameters())
    often = torch.optim.SGD([names["0.weight"], names["3.weight"]], lr=1e-2)
    seldom = torch.optim.SGD([p for n, p in names.items() if n not in ("0.weight", "3.weight")], lr=1e-2)
    sparse = SparseTraining(model, [often, seldom], IMAGES[:2], Flops(0.5), policy=QUICK)
    for number in range(30):
        model.zero_grad()
        loss_fn(model, IMAGES, LABELS).backward()
        steps = [often] if number % 3 else ([seldom, often] if order == "seldom first" else [often, seldom])
        for optimizer in steps:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(p.grad is not None for p in held)
            optimizer.step()
    assert sparse.settled


def test_an_optimizer_belongs_to_one_training() -> None:
    models = [make_model(), make_model()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-2)
    SparseTraining(models[0], optimizer, IMAGES[:2], Flops(0.5), policy=QUICK)
    with pytest.raises(ValueError, match="`optimizer` is in a SparseTraining already"):
        SparseTraining(models[1], optimizer, IMAGES[:2], Flops(0.5), policy=QUICK)


@POLICIES
def test_an_optimizer_made_in_mid_training_is_refused(policy: Any) -> None:
    model, optimizer, sparse = make_training(policy=policy)
    for _ in steps(sparse, optimizer, 3):
        pass
    again = torch.optim.SGD(model.parameters(), lr=0.1)  # a cell of a notebook is run once more
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="another SGD than the SparseTraining was given"):
        iterate(model, again)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if "weight" in key)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    other.step()  # of another model
    for _ in steps(sparse, optimizer, 1):
        pass
    sparse.finish()
    iterate(model, again)


def test_an_optimizer_of_some_layers_that_was_not_given_is_refused() -> None:
    model = make_model()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
    rest = torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1)
    SparseTraining(model, matrices, IMAGES[:2], Flops(0.5), policy=QUICK)
    loss_fn(model, IMAGES, LABELS).backward()
    with pytest.raises(RuntimeError, match="give a list of all optimizers"):
        rest.step()


def test_a_training_that_was_dropped_leaves_nothing_behind() -> None:
    model, optimizer, sparse = make_training(policy=QUICK)
    before = len(_global_optimizer_pre_hooks)  # with one for all trainings
    model, optimizer, sparse = make_training(policy=QUICK)
    iterate(model, optimizer)
    dropped = [weakref.ref(one) for one in (model, optimizer, sparse)]
    del model, optimizer, sparse
    gc.collect()
    assert [one() for one in dropped] == [None, None, None]
    assert len(_global_optimizer_pre_hooks) == before


def test_a_training_may_be_collected_during_a_step_of_another_model() -> None:
    """PyTorch iterates over hooks on all optimizers then, of which none may go."""
    trainings = [make_training(policy=QUICK)]
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)

    def collect(*_: Any) -> None:
        trainings.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        other.step()
    finally:
        for handle in handles:
            handle.remove()
    assert not trainings


@POLICIES
def test_the_constructor_works_in_inference_mode(policy: Any) -> None:
    masks = []
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context():
            example = IMAGES[:2].clone()
            sparse = SparseTraining(model, optimizer, example, Flops(0.5), policy=policy)
        for _ in steps(sparse, optimizer, 6):
            pass
        masks.append((sparse.mask, outputs(sparse.finish())))
    for mask, output in masks[1:]:
        assert torch.equal(mask, masks[0][0])
        assert torch.equal(output, masks[0][1])


def test_a_lazy_layer_without_a_shape_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(TypeError, match=r"'2\.weight' of `model` has no shape yet; call the model once on a batch"):
        make_training(model, policy=QUICK)
    model(IMAGES)
    _, _, sparse = make_training(model, policy=QUICK)
    assert sparse.finish()[2].in_features < 8 * 6 * 6


@POLICIES
def test_an_optimizer_that_steps_within_backward_is_refused_while_the_structure_changes(policy: Any) -> None:
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    sparse = SparseTraining(model, list(optimizers.values()), IMAGES[:2], **arguments(policy=policy, budget=Flops(0.5)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(RuntimeError, match=r"SGD steps within `backward`.*at least until `sparse\.settled`"):
        loss_fn(model, IMAGES, LABELS).backward()
    model.zero_grad()
    sparse.settle()
    before = model[0].weight.detach().clone()
    loss_fn(model, IMAGES, LABELS).backward()
    assert not torch.equal(before, model[0].weight)


def test_no_rounds_keep_the_widths_of_the_start() -> None:
    torch.manual_seed(0)
    model, optimizer, sparse = make_training(policy=EqualWorth(rounds=0), total_steps=10)
    start = [p.shape for p in model.parameters()]
    assert not sparse.settled
    for _ in range(10):
        iterate(model, optimizer)
        assert sparse.settled
        assert [p.shape for p in model.parameters()] == start
    _, _, uniform = make_training(policy=EqualWorth(rounds=0, tilt=0))
    _, _, searching = make_training(policy=EqualWorth(tilt=0))
    assert uniform.mask.tolist() == searching.mask.tolist()
    assert sparse.finish() is model
