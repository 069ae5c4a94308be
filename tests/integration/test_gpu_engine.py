"""Steps as CUDA graphs: the numbers of eager steps, without synchronisation. Run by hand: pytest -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import NonFiniteLossError
from tests.engine_cases import *  # noqa: F403
from tests.engine_cases import batches, dense, loss_fn, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> str:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return "cuda"


@pytest.mark.parametrize("settings", [{}, {"policy": "equal_worth", "resample_every": 100}], ids=str)
def test_the_host_waits_for_nothing(device: str, settings: dict[str, Any]) -> None:
    sparse, data = small(device, dtype=torch.float32, **settings), batches(device, 4, dtype=torch.float32)
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


def test_a_scaler_with_learned_widths(device: str) -> None:
    data, runs = batches(device, 24, dtype=torch.float32), []
    for engine in ("graphs", "eager"):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        settings: dict[str, Any] = {"policy": "equal_worth", "resample_every": 4, "total_steps": 100}
        sparse = small(device, dtype=torch.float32, engine=engine, scaler=scaler, **settings)
        runs.append(([float(sparse.step(half, *batch)) for batch in data], sparse))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=0.05)
    assert runs[0][1].settled
    assert runs[0][1].reason is None


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_graph_memory_does_not_grow_with_structure_changes(device: str, policy: str) -> None:
    settings: dict[str, Any] = {"policy": policy, "resample_every": 4, "total_steps": 400}
    sparse, data, taken = small(device, dtype=torch.float32, **settings), batches(device, 4, dtype=torch.float32), []
    for _ in range(12):
        for batch in data:
            sparse.step(loss_fn, *batch)
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved())
    assert taken[-1] < 1.5 * taken[3]
    sparse.finish(data, loss_fn)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < taken[-1]


def test_a_loss_of_a_loop_by_hand_may_be_kept(device: str) -> None:
    """Its gradient accumulators belong to the stream of that loop, and captures run on another one."""
    sparse, data = small(device, policy="equal_worth", resample_every=100), batches(device, 6)
    kept = loss_fn(sparse.model, *data[0])
    sparse.optimizer.zero_grad()
    kept.backward()
    sparse.optimizer.step()
    for batch in data[1:]:
        sparse.step(loss_fn, *batch)
    assert sparse.reason is None
    assert bool(torch.isfinite(kept))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_skips_nan_gradients(device: str, enabled: bool) -> None:
    data = batches(device, 5, dtype=torch.float32)
    sparse = small(
        device, dtype=torch.float32, scaler=torch.amp.GradScaler("cuda", enabled=enabled), resample_every=100
    )
    for batch in data:
        sparse.step(half, *batch)
    before = dense(sparse)
    sparse.step(half, torch.full_like(data[0][0], float("nan")), data[0][1])
    with pytest.raises(NonFiniteLossError):
        sparse.state_dict()  # waits for the device
    for key, value in dense(sparse).items():
        assert torch.equal(value, before[key]), key
