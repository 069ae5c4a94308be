"""Steps as CUDA graphs: the same numbers as eager steps, and no waiting. Run by hand: pytest -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

from slimstart import Flops, NonFiniteLossError, SparseTraining, models
from slimstart.engine import PlainTraining
from tests.zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# The projection on the device ends within 1e-7 of the budget, and fused optimizers have learning rates in float32.
TOLERANCE = 1e-6
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adam": lambda parameters: Adam(parameters, lr=1e-3),
}


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, *shape, dtype=dtype).cuda(), torch.randint(0, 10, (8,)).cuda()) for _ in range(number)]


def small(optimizer: str = "sgd", dtype: torch.dtype = torch.float64, **settings: Any) -> SparseTraining:
    torch.manual_seed(0)
    model = models.build("resnet20", num_classes=10).to("cuda", dtype)
    example = torch.zeros(1, 3, 16, 16, device="cuda", dtype=dtype)
    settings = {"budget": Flops(0.4), **settings}
    return SparseTraining(model, OPTIMIZERS[optimizer](model.parameters()), example, **settings)


def train(name: str, coupling: str, engine: str, resample_every: int, optimizer: str) -> tuple[list[float], Any]:
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.factory().double().cuda()
    data = batches(9, tuple(entry.example_inputs().shape[1:]))
    sparse = SparseTraining(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        data[0][0][:1],
        Flops(0.4),
        coupling,
        resample_every=resample_every,
        engine=engine,
    )
    assert sparse.engine == engine
    losses = [sparse.step(loss_fn, *batch) for batch in data]
    if engine == "graphs":
        assert sparse._steps is not None
        assert sparse._steps.num_captures > 0
        assert sparse.reason is None
    return [float(loss) for loss in losses], {**model.state_dict(), "s": sparse.keep_probs}


@pytest.mark.parametrize("resample_every", [1, 3])
@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("name", ["vgg_bn", "resnet_basic", "wide_resnet", "mobilenet_v1", "densenet"])
def test_graphs_equal_eager_steps_on_changing_batches(name: str, coupling: str, resample_every: int) -> None:
    graphs, eager = (train(name, coupling, engine, resample_every, "sgd") for engine in ("graphs", "eager"))
    assert graphs[0] == pytest.approx(eager[0], abs=TOLERANCE)
    for key, value in eager[1].items():
        torch.testing.assert_close(graphs[1][key], value, rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_adam_is_captured_too() -> None:
    graphs, eager = (train("vgg_bn", "filter", engine, 1, "adam") for engine in ("graphs", "eager"))
    assert graphs[0] == pytest.approx(eager[0], abs=1e-6)


def test_the_host_waits_for_nothing() -> None:
    sparse = small(dtype=torch.float32)
    data = batches(4, (3, 16, 16), torch.float32)
    for batch in data * 3:
        sparse.step(loss_fn, *batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data:
            sparse.step(loss_fn, *batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sparse.reason is None


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.1}, {"estimator": "leave_one_out"}, {"estimator": "pge"}])
def test_clipping_and_other_estimators(settings: dict[str, Any]) -> None:
    data = batches(6, (3, 16, 16))
    runs = [small(engine=engine, **settings) for engine in ("graphs", "eager")]
    losses = [[float(sparse.step(loss_fn, *batch)) for batch in data] for sparse in runs]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)


def test_a_scaler_is_captured() -> None:
    def half(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return F.cross_entropy(net(images), labels)

    data = batches(8, (3, 16, 16), torch.float32)
    runs = []
    for engine in ("graphs", "eager"):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)  # too much: the first steps are skipped
        sparse = small(dtype=torch.float32, engine=engine, scaler=scaler, resample_every=100)
        runs.append(([float(sparse.step(half, *batch)) for batch in data], scaler.get_scale(), sparse.reason))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=0.05)
    assert runs[0][1] == runs[1][1] < 2.0**30
    assert runs[0][2] is None


def test_learning_rates_and_short_batches_take_effect() -> None:
    data = batches(12, (3, 16, 16))
    data[5] = data[5][0][:3], data[5][1][:3]
    runs = [small(engine=engine, resample_every=2) for engine in ("graphs", "eager")]
    found = []
    for sparse in runs:
        losses = []
        for number, batch in enumerate(data):
            sparse.optimizer.param_groups[0]["lr"] = 0.1 if number % 3 else 0.01 * number
            losses.append(float(sparse.step(loss_fn, *batch)))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE)


def test_a_loss_that_cannot_be_captured_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def curious(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(images), labels)
        assert loss.item() < 1e9
        return loss

    data = batches(5, (3, 16, 16))
    runs = [small(engine=engine) for engine in ("graphs", "eager")]
    losses = [[float(sparse.step(curious, *batch)) for batch in data] for sparse in runs]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert "cannot be captured" in str(runs[0].reason)
    assert "run eagerly" in caplog.text
    assert runs[0]._steps is not None
    assert runs[0]._steps.num_captures == 0
    more = [[float(sparse.step(loss_fn, *batch)) for batch in data] for sparse in runs]
    assert runs[0]._steps.num_captures > 0  # graphs are still possible
    assert more[0] == pytest.approx(more[1], abs=TOLERANCE)


def test_functions_that_are_new_at_every_step_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sparse = small()
    ((images, labels),) = batches(1, (3, 16, 16))
    for _ in range(22):
        sparse.step(lambda net, x, y: F.cross_entropy(net(x), y), images, labels)
    assert "define it once" in str(sparse.reason)


@pytest.mark.parametrize("resample_every", [1, 4])
def test_a_loss_that_is_not_finite_changes_nothing(resample_every: int) -> None:
    sparse = small(resample_every=resample_every)
    data = batches(6, (3, 16, 16))
    for batch in data:
        sparse.step(loss_fn, *batch)
    before = {k: v.clone() for k, v in sparse.model.state_dict().items()}
    s, steps = sparse.keep_probs, sparse.num_steps
    bad = torch.full_like(data[0][0], float("nan"))

    def go_on() -> None:
        for _ in range(20):
            sparse.step(loss_fn, bad, data[0][1])
            torch.cuda.synchronize()

    with pytest.raises(NonFiniteLossError, match=f"at step {steps}"):
        go_on()
    assert sparse.num_steps == steps
    torch.testing.assert_close(sparse.keep_probs, s, rtol=0, atol=0)
    for key, value in sparse.model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert all(torch.isfinite(sparse.step(loss_fn, *batch)) for batch in data)


@pytest.mark.parametrize("resample_every", [1, 3])
def test_checkpoints_go_between_engines_and_devices(resample_every: int) -> None:
    data = batches(8, (3, 16, 16))
    whole = small(resample_every=resample_every)
    for batch in data[:5]:
        whole.step(loss_fn, *batch)
    state = whole.state_dict()
    rest = [float(whole.step(loss_fn, *batch)) for batch in data[5:]]
    for engine in ("graphs", "eager"):
        other = small(resample_every=resample_every, engine=engine)
        other.step(loss_fn, *data[0])
        other.load_state_dict(state)
        assert [float(other.step(loss_fn, *batch)) for batch in data[5:]] == pytest.approx(rest, abs=TOLERANCE)
    model = models.build("resnet20", num_classes=10).double()
    here = SparseTraining(
        model,
        SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        torch.zeros(1, 3, 16, 16, dtype=torch.float64),
        Flops(0.4),
        resample_every=resample_every,
    )
    here.load_state_dict(state)
    losses = [float(here.step(loss_fn, x.cpu(), y.cpu())) for x, y in data[5:]]
    assert losses == pytest.approx(rest, abs=TOLERANCE)


def test_a_settled_network_goes_on_in_graphs() -> None:
    data = batches(6, (3, 16, 16))
    found = []
    for engine in ("graphs", "eager"):
        sparse = small(engine=engine)
        losses = [float(sparse.step(loss_fn, *batch)) for batch in data]
        sparse.settle(data, loss_fn)
        losses += [float(sparse.step(loss_fn, *batch)) for batch in data]
        net = sparse.finish(data, loss_fn)
        found.append((losses, float(loss_fn(net, *data[0]))))
    assert found[0][0] == pytest.approx(found[1][0], abs=TOLERANCE)
    assert found[0][1] == pytest.approx(found[1][1], abs=TOLERANCE)


@pytest.mark.parametrize("model", ["vgg16", "resnet20"])
def test_plain_training_equals_eager(model: str) -> None:
    data = batches(6, (3, 32, 32))
    found = []
    for engine in ("graphs", "eager"):
        torch.manual_seed(0)
        net = models.build(model, num_classes=10, width=0.25).double().cuda()
        plain = PlainTraining(net, SGD(net.parameters(), lr=0.05, momentum=0.9), engine=engine)
        found.append([float(plain.step(loss_fn, *batch)) for batch in data])
        assert plain.engine == engine
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE)


def test_verbs_by_hand_work_beside_graphs() -> None:
    data = batches(6, (3, 16, 16))
    by_hand, by_step = small(), small()
    for batch in data:
        loss = loss_fn(by_hand.net, *batch)
        with torch.no_grad():
            reference = loss_fn(by_hand.reference, *batch)
        by_hand.optimizer.zero_grad()
        loss.backward()
        by_hand.optimizer.step()
        by_hand.update(loss, reference)
        assert float(loss) == pytest.approx(float(by_step.step(loss_fn, *batch)), abs=TOLERANCE)
