"""Steps as CUDA graphs: the same numbers as eager steps, and no waiting. Run by hand: pytest -m gpu."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine_cases import *  # noqa: F403
from tests.engine_cases import batches, both, captures, loss_fn, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> str:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return "cuda"


def test_the_host_waits_for_nothing(device: str) -> None:
    sparse, data = small(device, dtype=torch.float32), batches(device, 4, dtype=torch.float32)
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


def half(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        return F.cross_entropy(net(images), labels)


def test_a_scaler_is_captured(device: str) -> None:
    data, runs = batches(device, 8, dtype=torch.float32), []
    for engine in ("graphs", "eager"):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)  # too much: the first steps are skipped
        sparse = small(device, dtype=torch.float32, engine=engine, scaler=scaler, resample_every=100)
        runs.append(([float(sparse.step(half, *batch)) for batch in data], scaler.get_scale(), sparse.reason))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=0.05)
    assert runs[0][1] == runs[1][1] < 2.0**30
    assert runs[0][2] is None


@pytest.mark.parametrize("enabled", [True, False])
def test_nan_does_not_pass_a_scaler(device: str, enabled: bool) -> None:
    data = batches(device, 5, dtype=torch.float32)
    sparse = small(
        device, dtype=torch.float32, scaler=torch.amp.GradScaler("cuda", enabled=enabled), resample_every=100
    )
    for batch in data:
        sparse.step(half, *batch)
    before = {k: v.clone() for k, v in sparse.model.state_dict().items()}
    sparse.step(half, torch.full_like(data[0][0], float("nan")), data[0][1])
    torch.cuda.synchronize()
    assert sparse._steps is not None
    assert sparse._steps.failed
    sparse._steps.forgive()
    for key, value in sparse.model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_loss_that_cannot_be_captured_runs_eagerly_and_says_why(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    def curious(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(images), labels)
        assert loss.item() < 1e9
        return loss

    data = batches(device, 5)
    sparse = both(device, data, curious)
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


def test_a_forward_that_is_another_one_every_time_is_not_captured(device: str) -> None:
    def moody(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        logits = net(images)
        for _ in range(random.randrange(1000)):
            logits = logits + 0.0
        return F.cross_entropy(logits, labels)

    sparse = small(device)
    for batch in batches(device, 4):
        sparse.step(moody, *batch)
    assert captures(sparse) == 0
    assert "DivergedError" in str(sparse.reason)
