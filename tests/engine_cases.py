"""Tests of steps as CUDA graphs, run on a GPU and on a simulated one (`tests/simulated_gpu.py`).

`test_gpu_engine.py` and `test_graph_engine.py` import them, each with its own fixture `device`.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

from slimstart import Flops, NonFiniteLossError, Paper, SparseTraining, trace
from slimstart.kernels.depthwise import Window
from slimstart.lab import models
from slimstart.lab.methods.gated_network import RELAXATIONS, Gated, make_gates
from slimstart.lab.methods.gates import Gates
from slimstart.steps import PlainTraining
from slimstart.steps.captured import CapturedStep
from tests.settings import arguments
from tests.zoo import ZOO

# The projection on the device ends within 1e-7 of the budget, and fused optimizers have learning rates in float32.
TOLERANCE = 1e-6
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adam": lambda parameters: Adam(parameters, lr=1e-3),
}
Batches = list[tuple[Tensor, Tensor]]


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(
    device: str, number: int, shape: tuple[int, ...] = (3, 16, 16), dtype: torch.dtype = torch.float64
) -> Batches:
    torch.manual_seed(1)
    made = [(torch.randn(8, *shape, dtype=dtype), torch.randint(0, 10, (8,))) for _ in range(number)]
    return [(images.to(device), labels.to(device)) for images, labels in made]


def small(device: str, optimizer: str = "sgd", dtype: torch.dtype = torch.float64, **settings: Any) -> SparseTraining:
    torch.manual_seed(0)
    model = models.build("resnet20", num_classes=10, width=0.5).to(device, dtype)
    example = torch.zeros(1, 3, 16, 16, device=device, dtype=dtype)
    settings = {"budget": Flops(0.4), "engine": "graphs", **settings}
    return SparseTraining(model, OPTIMIZERS[optimizer](model.parameters()), example, **arguments(**settings))


def captures(sparse: SparseTraining) -> int:
    assert sparse._steps is not None
    return sparse._steps.num_captures


def dense(sparse: SparseTraining) -> dict[str, Tensor]:
    """Weights and optimizer state of all channels, by name."""
    state, names = sparse.state_dict(), [name for name, _ in sparse.dense_copy().named_parameters()]
    found = dict(state["model"])
    for index, entries in state["optimizers"][0]["state"].items():
        found |= {f"{names[index]}, {key}": value for key, value in entries.items() if isinstance(value, Tensor)}
    return found


def both(device: str, data: Batches, step: Callable[..., Tensor] | None = None, **settings: Any) -> SparseTraining:
    """Train with graphs and eagerly; the losses must agree. Returns the training with graphs."""
    runs = [small(device, engine=engine, **settings) for engine in ("graphs", "eager")]
    losses = [[float(sparse.step(step or loss_fn, *batch)) for batch in data] for sparse in runs]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    return runs[0]


def trained(device: str, name: str, coupling: str, engine: str, resample_every: int) -> tuple[list[float], Any]:
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.factory().double().to(device)
    data = batches(device, 9, tuple(entry.example_inputs().shape[1:]))
    sparse = SparseTraining(
        model,
        OPTIMIZERS["sgd"](model.parameters()),
        data[0][0][:1],
        Flops(0.4),
        coupling=coupling,
        policy=Paper(resample_every=resample_every),
        engine=engine,
    )
    assert sparse.engine == engine
    losses = [sparse.step(loss_fn, *batch) for batch in data]
    if engine == "graphs":
        assert captures(sparse) > 0
        assert sparse.reason is None
    return [float(loss) for loss in losses], {**sparse.state_dict()["model"], "s": sparse.keep_probs}


@pytest.mark.parametrize(
    ("name", "coupling", "resample_every"),
    [
        ("vgg_bn", "filter", 1),
        ("resnet_basic", "filter", 3),
        *(
            pytest.param(name, coupling, every, marks=pytest.mark.slow)
            for name in ("vgg_bn", "resnet_basic", "wide_resnet", "mobilenet_v1", "densenet")
            for coupling in ("filter", "stream")
            for every in (1, 3)
        ),
    ],
)
def test_graphs_equal_eager_steps_on_changing_batches(
    device: str, name: str, coupling: str, resample_every: int
) -> None:
    graphs, eager = (trained(device, name, coupling, engine, resample_every) for engine in ("graphs", "eager"))
    assert graphs[0] == pytest.approx(eager[0], abs=TOLERANCE)
    for key, value in eager[1].items():
        torch.testing.assert_close(graphs[1][key], value, rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam"},
        {"max_grad_norm": 0.1},
        {"estimator": "leave_one_out"},
        {"estimator": "pge"},
        {"sampling": "bernoulli", "resample_every": 2},
    ],
    ids=str,
)
def test_clipping_optimizers_and_estimators(device: str, settings: dict[str, Any]) -> None:
    assert captures(both(device, batches(device, 6), **settings)) > 0


@pytest.mark.slow
def test_learning_rates_and_short_batches_take_effect(device: str) -> None:
    data = batches(device, 12)
    data[5] = data[5][0][:3], data[5][1][:3]
    found = []
    for engine in ("graphs", "eager"):
        sparse, losses = small(device, engine=engine, resample_every=2), []
        for number, batch in enumerate(data):
            sparse.optimizer.param_groups[0]["lr"] = 0.1 if number % 3 else 0.01 * number
            losses.append(float(sparse.step(loss_fn, *batch)))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE)


@pytest.mark.slow
def test_capacity_that_changes_is_captured_again_and_fused_again(device: str) -> None:
    data = batches(device, 8)
    sparse = small(device, resample_every=2)
    for batch in data[:4]:
        sparse.step(loss_fn, *batch)
    state, before = sparse.state_dict(), captures(sparse)
    groups = sparse.graph.costs.unit_group
    kept = [torch.bincount(groups[mask], minlength=len(sparse.graph.groups)) for mask in state["masks"]]
    state["capacity"]["units"] = torch.stack(kept).amax(0)  # just enough for this draw
    eager = small(device, resample_every=2, engine="eager")
    for training in (sparse, eager):
        training.load_state_dict(state)
    flops = sparse.executed_flops
    for batch in data:
        losses = [float(training.step(loss_fn, *batch)) for training in (sparse, eager)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert sparse.executed_flops > flops
    assert captures(sparse) >= before + 2  # of what was loaded, and with more capacity
    assert sparse._steps is not None
    fused = [kind.is_fused for kind in sparse._steps._kinds.values() if kind is not None]
    assert fused == [True] * len(fused) != []


@pytest.mark.slow
def test_a_warning_names_steps_that_always_need_a_new_capture(device: str, caplog: pytest.LogCaptureFixture) -> None:
    ((images, labels),) = batches(device, 1)
    sparse = small(device)
    for _ in range(22):
        sparse.step(lambda net, x, y: F.cross_entropy(net(x), y), images, labels)
    assert "the loss function (define it once, outside of the loop) never stay" in str(sparse.reason)
    sparse = small(device)
    for number in range(22):
        sparse.optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * number
        sparse.step(loss_fn, images, labels)
    assert "settings of the optimizer other than the learning rate" in str(sparse.reason)
    assert "steps run eagerly" in caplog.text
    for _ in range(3):
        sparse.step(loss_fn, images, labels)
    assert sparse.reason is None  # it has become regular


def test_batches_may_contain_other_values_than_tensors(device: str) -> None:
    def mixed(net: nn.Module, images: Tensor, labels: Tensor, extra: Any) -> Tensor:
        return F.cross_entropy(net(images), labels) * (extra if isinstance(extra, float) else 1.0)

    (batch,) = batches(device, 1)
    sparse, losses = small(device, resample_every=100), []
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
        losses.append(float(sparse.step(mixed, *batch, factor)))
    assert losses[3] > 1.5 * losses[2]  # another value is another kind of step
    sparse.step(mixed, *batch, object())
    assert "neither a tensor nor a plain value" in str(sparse.reason)
    assert sparse.engine == "eager"
    sparse.step(mixed, *batch, 2.0)
    assert (sparse.engine, sparse.reason) == ("graphs", None)


@pytest.mark.parametrize("resample_every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_loss_that_is_not_finite_changes_nothing(device: str, resample_every: int) -> None:
    sparse, data = small(device, resample_every=resample_every), batches(device, 6)
    for batch in data:
        sparse.step(loss_fn, *batch)
    before, s, steps = dense(sparse), sparse.keep_probs, sparse.num_steps
    bad = torch.full_like(data[0][0], float("nan"))

    def go_on() -> None:
        for _ in range(20):
            sparse.step(loss_fn, bad, data[0][1])
            if device == "cuda":
                torch.cuda.synchronize()

    with pytest.raises(NonFiniteLossError, match=f"at step {steps}"):
        go_on()
    assert sparse.num_steps == steps
    torch.testing.assert_close(sparse.keep_probs, s, rtol=0, atol=0)
    for key, value in dense(sparse).items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert all(torch.isfinite(sparse.step(loss_fn, *batch)) for batch in data)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("resample_every", [1, 3])
def test_checkpoints_move_between_engines_and_devices(device: str, resample_every: int, elsewhere: bool) -> None:
    data = batches(device, 8)
    whole = small(device, resample_every=resample_every)
    for batch in data[:5]:
        whole.step(loss_fn, *batch)
    state = whole.state_dict()
    rest = [float(whole.step(loss_fn, *batch)) for batch in data[5:]]
    for engine, place in (("graphs", device), ("eager", device), ("eager", "cpu")):
        other = small(place, resample_every=resample_every, engine=engine)
        if elsewhere:
            other.step(loss_fn, *(tensor.to(place) for tensor in data[0]))
        other.load_state_dict(state)
        losses = [float(other.step(loss_fn, *(tensor.to(place) for tensor in batch))) for batch in data[5:]]
        assert losses == pytest.approx(rest, abs=TOLERANCE)


@pytest.mark.slow
def test_a_settled_network_is_trained_in_graphs(device: str) -> None:
    data, found = batches(device, 6), []
    for engine in ("graphs", "eager"):
        sparse = small(device, engine=engine)
        losses = [float(sparse.step(loss_fn, *batch)) for batch in data]
        sparse.settle(data, loss_fn)
        losses += [float(sparse.step(loss_fn, *batch)) for batch in data]
        net = sparse.finish(data, loss_fn)
        found.append((losses, float(loss_fn(net, *data[0]).detach())))
    assert found[0][0] == pytest.approx(found[1][0], abs=TOLERANCE)
    assert found[0][1] == pytest.approx(found[1][1], abs=TOLERANCE)


@pytest.mark.slow
def test_a_model_may_be_loaded_within_a_window(device: str) -> None:
    data = batches(device, 9)

    def train(reload: bool) -> list[float]:
        sparse, losses = small(device, resample_every=3), []
        for number, batch in enumerate(data):
            losses.append(float(sparse.step(loss_fn, *batch)))
            if reload and number in (4, 6):
                sparse.model.load_state_dict(sparse.model.state_dict())  # changes nothing
        return losses

    assert train(True) == pytest.approx(train(False), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vgg16", "resnet20"])
def test_plain_training_equals_eager(device: str, model: str) -> None:
    data, found = batches(device, 6, (3, 32, 32)), []
    for engine in ("graphs", "eager"):
        torch.manual_seed(0)
        net = models.build(model, num_classes=10, width=0.25).double().to(device)
        plain = PlainTraining(net, SGD(net.parameters(), lr=2**-4, momentum=0.9), engine=engine)
        losses = [float(plain.step(loss_fn, *batch)) for batch in data]
        plain._backward.optimizer.load_state_dict(plain._backward.optimizer.state_dict())  # other tensors
        found.append(losses + [float(plain.step(loss_fn, *batch)) for batch in data])
        assert (plain.engine, plain.num_steps) == (engine, 12)
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE)


def gated(device: str, name: str, engine: str = "graphs") -> tuple[PlainTraining, Gates]:
    """A dense network with gates, which learn from the same backward."""
    torch.manual_seed(0)
    model = models.build("resnet20", num_classes=10, width=0.25).double().to(device)
    graph = trace(model, torch.zeros(1, 3, 16, 16, device=device, dtype=torch.float64), "stream")
    gates = make_gates(name, model, graph, Flops(0.4), None, total_steps=20, seed=0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    plain = PlainTraining(Gated(model, graph, gates), optimizer, engine=engine, also=gates.learn_)
    assert plain.engine == engine
    return plain, gates


def take_steps(plain: PlainTraining, gates: Gates, data: Batches) -> list[float]:
    losses = []
    for batch in data:
        if plain.num_steps % 4 == 0:
            gates.begin_epoch(plain.num_steps // 4)
        gates.begin_step(plain.num_steps / 20)
        losses.append(float(plain.step(loss_fn, *batch)))
    return losses


def everything(plain: PlainTraining, gates: Gates) -> dict[str, Tensor]:
    weights = {name: tensor.clone() for name, tensor in plain.net.state_dict().items()}
    return {**weights, **{f"of gates: {name}": buffer.clone() for name, buffer in gates.named_buffers()}}


@pytest.mark.parametrize(
    "name",
    [
        "grow_efficient",
        "soft_threshold",
        *(pytest.param(name, marks=pytest.mark.slow) for name in RELAXATIONS if name != "soft_threshold"),
    ],
)
def test_gates_learn_in_graphs_as_they_do_eagerly(device: str, name: str) -> None:
    data, found = batches(device, 10), []
    for engine in ("graphs", "eager"):
        plain, gates = gated(device, name, engine)
        start = gates.s.clone()
        torch.manual_seed(5)
        losses = take_steps(plain, gates, data)
        found.append((losses, everything(plain, gates)))
        assert not torch.equal(gates.s, start)
        if engine == "graphs":
            assert plain.reason is None
            assert plain._steps is not None
            assert plain._steps.num_captures > 0
    assert found[0][0] == pytest.approx(found[1][0], abs=TOLERANCE)
    for key, value in found[1][1].items():
        # Gates are float32.
        torch.testing.assert_close(found[0][1][key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_gates_learn_nothing_from_a_loss_that_is_not_finite(device: str) -> None:
    data = batches(device, 5)
    plain, gates = gated(device, "soft_threshold")
    take_steps(plain, gates, data)
    before, steps = everything(plain, gates), plain.num_steps
    bad = torch.full_like(data[0][0], float("nan"))

    def go_on() -> None:
        for _ in range(20):
            plain.step(loss_fn, bad, data[0][1])
            if device == "cuda":
                torch.cuda.synchronize()

    with pytest.raises(NonFiniteLossError, match=f"at step {steps}"):
        go_on()
    before.pop("of gates: gradient")  # of the backward that failed; which is never read
    after = everything(plain, gates)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert all(map(math.isfinite, take_steps(plain, gates, data)))


@pytest.mark.slow
def test_loaded_gates_and_weights_are_used_by_graphs(device: str) -> None:
    data = batches(device, 9)
    plain, gates = gated(device, "grow_efficient")
    take_steps(plain, gates, data[:6])
    optimizer = plain._backward.optimizer
    state = copy.deepcopy((plain.net.state_dict(), gates.state_dict(), optimizer.state_dict()))
    rest = take_steps(plain, gates, data[6:7])
    for engine in ("graphs", "eager"):
        other, its = gated(device, "grow_efficient", engine)
        take_steps(other, its, data[7:])  # elsewhere
        other.net.load_state_dict(state[0])
        its.load_state_dict(state[1])
        other._backward.optimizer.load_state_dict(copy.deepcopy(state[2]))
        other.num_steps = 6
        assert take_steps(other, its, data[6:7]) == pytest.approx(rest, abs=TOLERANCE)


@pytest.mark.parametrize("engine", ["graphs", "eager"])
def test_other_learners_receive_every_step(device: str, engine: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 10))
    net = net.double().to(device)
    good, seen = torch.zeros((), dtype=torch.int64, device=device), []

    def also(ok: Tensor) -> None:
        seen.append(net[0].weight.detach().clone())  # after the optimizer's step
        good.add_(ok)

    before = net[0].weight.detach().clone()
    plain = PlainTraining(net, OPTIMIZERS["sgd"](net.parameters()), engine=engine, also=also)
    for number, batch in enumerate(batches(device, 6), start=1):
        plain.step(loss_fn, *batch)
        assert int(good) == number
    assert (plain.reason is None) == (engine == "graphs")
    assert not torch.equal(seen[0], before)


@pytest.mark.slow
def test_methods_called_by_hand_work_between_graph_steps(device: str) -> None:
    by_hand, by_step = small(device), small(device)
    for batch in batches(device, 6):
        loss = loss_fn(by_hand.model, *batch)
        with torch.no_grad():
            reference = loss_fn(by_hand.reference, *batch)
        by_hand.optimizer.zero_grad()
        loss.backward()
        by_hand.optimizer.step()
        by_hand.update(loss.detach(), float(reference))
        assert float(loss.detach()) == pytest.approx(float(by_step.step(loss_fn, *batch)), abs=TOLERANCE)


def test_graphs_need_padding(device: str) -> None:
    with pytest.raises(ValueError, match="`engine` is 'graphs', but `align` is 1"):
        small(device, align=1)
    sparse = small(device, engine="auto", align=1)
    assert sparse.engine == "eager"
    assert "`align` is 1" in str(sparse.reason)


@pytest.mark.parametrize("scarce", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equal_worth_learns_the_widths_of_eager_steps(
    device: str, scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimstart.steps.graphs.is_scarce", lambda: scarce)
    settings: dict[str, Any] = {"policy": "equal_worth", "resample_every": 8, "total_steps": 160}  # four windows
    graphs, eager = (small(device, engine=engine, **settings) for engine in ("graphs", "eager"))
    before, steps = eager.mask, graphs._steps
    assert steps is not None
    pools, masks = steps._pools, [eager.mask]
    for batch in batches(device, 33):
        masks += [eager.mask] if not torch.equal(eager.mask, masks[-1]) else []
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in (graphs, eager)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
        assert torch.equal(graphs.mask, eager.mask)
    assert graphs.settled
    assert graphs.executed_flops == eager.executed_flops  # nothing is padded
    assert graphs.reason is None
    assert not torch.equal(eager.mask, before)
    assert len(masks) > 1
    assert captures(graphs) <= len(masks) + 1  # once for each structure, and once more without observing
    assert (steps._pools is pools) != scarce  # memory of shapes that are gone is given back where it is needed


@pytest.mark.parametrize("fuse", [True, False])
def test_one_depthwise_kernel_serves_all_widths(device: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured or not, while widths are learned and when they are found; and so does a plain training."""
    done = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        done.append(x.shape[1])
        return F.conv2d(x, weight, bias, *window, x.shape[1])

    monkeypatch.setattr("slimstart.kernels.depthwise.use_triton", lambda tensor: True)
    monkeypatch.setattr("slimstart.steps.depthwise_mode.depthwise_conv2d", noted)
    images = torch.randn(8, 3, 6, 6).contiguous(memory_format=torch.channels_last).to(device)
    labels = torch.arange(8, device=device)

    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    ).to(device, memory_format=torch.channels_last)
    settings = arguments(policy="equal_worth", resample_every=3, total_steps=60, engine="graphs")
    net = copy.deepcopy(model)
    sparse = SparseTraining(model, SGD(model.parameters(), 0.01), images, Flops(0.5), **settings)
    plain = PlainTraining(net, SGD(net.parameters(), 0.01), engine="graphs", fuse=fuse)
    assert sparse._steps is not None
    sparse._steps._fuse = fuse

    def calls(training: SparseTraining | PlainTraining, size: int) -> int:
        done.clear()
        training.step(loss_fn, images[:size], labels[:size])
        return len(done)

    for training in (sparse, plain):
        assert calls(training, 4) == 1  # eagerly
        assert calls(training, 4) >= 2  # recorded, as planned, and captured; a simulated GPU captures nothing
        assert calls(training, 5) == 1  # another kind of step, eagerly again
    done.clear()
    sparse.snapshot([(images, labels)], loss_fn)
    assert len(done) == 1
    while not sparse.settled:
        sparse.step(loss_fn, images[:4], labels[:4])
    assert calls(sparse, 4) >= 2  # captured again
    assert calls(sparse, 6) == 1
    assert sparse.reason is None
    paper = SparseTraining(net, SGD(net.parameters(), 0.01), images, Flops(0.5), policy="paper", engine="graphs")
    done.clear()
    paper.settle([(images, labels)], loss_fn, num_samples=3)
    assert len(done) == 4  # what it might have been, and what it is
    paper.finish([(images, labels)], loss_fn)
    assert len(done) == 5


def check_padding(sparse: SparseTraining, name: str) -> None:
    """A padded parameter, and its optimizer state, hold the numbers of the exact network, and zeros."""
    parameter, selection, state = sparse.model.get_parameter(name), sparse.graph.select(sparse.mask), dense(sparse)
    assert parameter.numel() > selection.gather(name, state[name]).numel()
    held = {key: value for key, value in sparse.optimizer.state[parameter].items() if value.dim() > 0}
    assert held
    for key, padded in ((name, parameter.detach()), *((f"{name}, {key}", value) for key, value in held.items())):
        exact = selection.gather(name, state[key])
        assert torch.equal(padded[padded != 0].sort().values, exact[exact != 0].sort().values), key


@pytest.mark.slow
def test_state_created_by_an_eager_step_moves_with_the_next_structure(device: str) -> None:
    sparse, data = small(device, "adam", resample_every=4, align=4), batches(device, 10)
    frozen = sparse.model.get_parameter("stage2.1.conv1.weight").requires_grad_(False)
    for number, batch in enumerate(data):
        if number == 6:
            frozen.requires_grad_(True)
        sparse.step(loss_fn, *batch)
    check_padding(sparse, "stage2.1.conv1.weight")


@pytest.mark.slow
def test_a_parameter_may_be_unfrozen(device: str) -> None:
    runs, name = [small(device, engine=engine, resample_every=4) for engine in ("graphs", "eager")], "stage2.1.conv1"
    frozen = [sparse.model.get_parameter(f"{name}.weight").requires_grad_(False) for sparse in runs]
    before = dense(runs[0])[f"{name}.weight"]
    for number, batch in enumerate(batches(device, 10)):
        for parameter in frozen:
            parameter.requires_grad_(number >= 6)
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in runs]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
        assert torch.equal(dense(runs[0])[f"{name}.weight"], before) == (number < 6)


@pytest.mark.slow
def test_padding_is_invisible_to_the_user(device: str) -> None:
    sparse, data = small(device, align=4), batches(device, 5)
    exact = small(device, engine="eager")
    for batch in data:
        losses = [float(training.step(loss_fn, *batch)) for training in (sparse, exact)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert sum(p.numel() for p in sparse.model.parameters()) > sum(p.numel() for p in exact.model.parameters())
    found = [
        (training.model.state_dict(), training.snapshot().state_dict(), training.finish(data, loss_fn).state_dict())
        for training in (sparse, exact)
    ]
    for mine, its in zip(*found, strict=True):
        assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in its.items()}
        for name, value in mine.items():
            torch.testing.assert_close(value, its[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_steps_are_counted_once_and_return_what_the_loss_function_does(device: str, policy: str) -> None:
    def with_logits(net: nn.Module, images: Tensor, labels: Tensor) -> Any:
        logits = net(images)
        return F.cross_entropy(logits, labels), {"logits": logits}

    settings: dict[str, Any] = {"policy": policy, "resample_every": 3, "total_steps": 100}
    graphs, eager = (small(device, engine=engine, **settings) for engine in ("graphs", "eager"))
    kept = []
    for number, batch in enumerate(batches(device, 8), start=1):
        (loss, more), (its, its_more) = (sparse.step(with_logits, *batch) for sparse in (graphs, eager))
        kept.append((more["logits"], its_more["logits"]))
        assert float(loss) == pytest.approx(float(its), abs=TOLERANCE)
        assert graphs.num_steps == eager.num_steps == number
        assert torch.equal(graphs.mask, eager.mask)
    for mine, its in kept:  # no later step has written over them
        assert not mine.requires_grad
        torch.testing.assert_close(mine, its, rtol=0, atol=TOLERANCE)
    assert captures(graphs) > 0
    assert graphs.reason is None


@pytest.mark.slow
def test_widths_are_learned_with_a_scaler_and_with_clipping(device: str) -> None:
    settings: dict[str, Any] = {"policy": "equal_worth", "resample_every": 3, "total_steps": 80, "max_grad_norm": 0.1}
    runs = []
    for engine in ("graphs", "eager"):
        # Exact in float64, where nothing overflows.
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=4)
        runs.append((small(device, "adam", engine=engine, scaler=scaler, **settings), scaler))
    for batch in batches(device, 14):
        losses = [float(sparse.step(loss_fn, *batch)) for sparse, _ in runs]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
        assert torch.equal(runs[0][0].mask, runs[1][0].mask)
    assert runs[0][1].get_scale() == runs[1][1].get_scale() == 2.0**11
    assert runs[0][0].reason is None


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_nothing_is_captured_more_often_than_necessary(device: str, policy: str) -> None:
    settings: dict[str, Any] = {"policy": policy, "resample_every": 100}
    sparse, data = small(device, **settings), batches(device, 3)
    for batch in data:
        sparse.step(loss_fn, *batch)
    kinds = 2 if policy == "paper" else 1  # the first step of a window runs references too
    assert captures(sparse) <= kinds
    before = captures(sparse)
    sparse.optimizer.load_state_dict(sparse.optimizer.state_dict())  # other tensors
    for batch in data * 2:
        sparse.step(loss_fn, *batch)
    assert captures(sparse) == before + 1
    assert sparse.reason is None


@pytest.mark.parametrize("policy", [pytest.param("paper", marks=pytest.mark.slow), "equal_worth"])
def test_replaced_weight_storage_is_used(device: str, policy: str) -> None:
    settings: dict[str, Any] = {"policy": policy, "resample_every": 4, "total_steps": 100}
    graphs, eager = (small(device, engine=engine, **settings) for engine in ("graphs", "eager"))
    for number, batch in enumerate(batches(device, 12)):
        for sparse in (graphs, eager):
            if number == 0:  # later, fused optimizers would find their state in another layout
                sparse.model.to(memory_format=torch.channels_last)
            if number in (5, 7):
                for parameter in sparse.model.parameters():
                    parameter.data = parameter.data.clone()
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in (graphs, eager)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE), number
    for name, value in dense(eager).items():
        torch.testing.assert_close(dense(graphs)[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_a_finished_training_keeps_no_graphs(device: str, policy: str) -> None:
    sparse, data = small(device, policy=policy, resample_every=3), batches(device, 5)
    for batch in data:
        sparse.step(loss_fn, *batch)
    assert sparse._steps is not None
    kinds = [weakref.ref(kind) for kind in sparse._steps._kinds.values() if isinstance(kind, CapturedStep)]
    assert kinds
    model = sparse.finish(data, loss_fn)
    gc.collect()
    assert all(kind() is None for kind in kinds)
    before = copy.deepcopy(model.state_dict())
    loss_fn(model, *data[0]).backward()
    sparse.optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_state_changed_by_a_forward_is_the_same_for_both_networks(device: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.build("resnet20", num_classes=10, width=0.5)
            self.register_buffer("num_forwards", torch.zeros(()))
            self.register_buffer("offset", torch.linspace(-1, 1, 10))

        def forward(self, images: Tensor) -> Tensor:
            self.num_forwards.add_(1)
            return self.net(images) * (1 + self.num_forwards / 10) + self.offset

    runs = []
    for engine in ("graphs", "eager"):
        torch.manual_seed(0)
        model = Counting().to(device, torch.float64)
        example = torch.zeros(1, 3, 16, 16, device=device, dtype=torch.float64)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        policy = Paper(resample_every=3)
        runs.append(SparseTraining(model, optimizer, example, Flops(0.4), policy=policy, engine=engine))
    for number, batch in enumerate(batches(device, 11), start=1):
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in runs]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
        assert [float(sparse.model.num_forwards) for sparse in runs] == [number, number]
        torch.testing.assert_close(runs[0].keep_probs, runs[1].keep_probs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_loss_that_cannot_be_captured_runs_eagerly_with_a_reason(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def curious(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(images), labels)
        assert loss.item() < 1e9
        return loss

    data = batches(device, 5)
    sparse = both(device, data, curious, resample_every=3)
    assert "cannot be captured" in str(sparse.reason)
    assert "run eagerly" in caplog.text
    assert captures(sparse) == 0
    for batch in data:
        sparse.step(loss_fn, *batch)
    assert captures(sparse) > 0  # graphs are still possible
    assert sparse.engine == "graphs"
    sparse.step(curious, *data[0])
    assert sparse.engine == "eager"
    assert "cannot be captured" in str(sparse.reason)


def test_a_forward_that_changes_every_time_is_not_captured(device: str) -> None:
    def moody(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        logits = net(images)
        for _ in range(random.randrange(1000)):
            logits = logits + 0.0
        return F.cross_entropy(logits, labels)

    sparse = small(device, resample_every=3)
    for batch in batches(device, 4):
        sparse.step(moody, *batch)
    assert captures(sparse) == 0
    assert "DivergedError" in str(sparse.reason)


def test_a_failed_capture_does_not_change_the_scaler(device: str) -> None:
    settings: dict[str, Any] = {"policy": "equal_worth", "resample_every": 3, "max_grad_norm": 0.1}
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    sparse, read = small(device, scaler=scaler, **settings), []
    weight = next(sparse.model.parameters())
    sparse.optimizer.register_step_pre_hook(lambda *_: read.append(float(weight.grad.norm())))  # type: ignore[union-attr]
    for number, batch in enumerate(batches(device, 4), start=1):
        sparse.step(loss_fn, *batch)
        assert (len(read), sparse.num_steps) == (number, number)
    assert "cannot be captured" in str(sparse.reason)
    assert captures(sparse) == 0
