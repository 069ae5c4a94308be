"""Decisions of the graph engine, on a simulated GPU: the numbers of eager steps."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimstart import EqualWorth, Flops
from slimstart.steps import graphs
from slimstart.steps.captured import CapturedStep
from tests.engine_cases import *  # noqa: F403
from tests.engine_cases import TOLERANCE, batches, both, loss_fn, small
from tests.simulated_gpu import is_capturing, simulate_gpu


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    simulate_gpu(monkeypatch)
    return "cpu"


def test_a_capture_that_runs_out_of_memory_is_tried_again_without_a_cache(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[bool] = []
    emptied: list[None] = []

    def scarce(*args: Any) -> CapturedStep:
        attempts.append(args[-1])
        if len(emptied) < len(attempts):
            raise torch.OutOfMemoryError
        return CapturedStep(*args)

    monkeypatch.setattr(graphs, "CapturedStep", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.extend([None, None]))
    sparse = small(device, resample_every=3)
    for batch in batches(device, 3):
        sparse.step(loss_fn, *batch)
    assert (attempts, sparse.reason) == ([True, True], None), "fused, both times"


def test_a_network_without_some_layers_is_captured(device: str) -> None:
    policy = EqualWorth(depth=0.5, resample_every=3, align=1)
    sparse = both(device, batches(device, 12), policy=policy, total_steps=60, budget=Flops(0.2))
    assert sparse.graph.removed
    assert sparse.reason is None


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["capture", "forward in a capture", "forward"])
def test_a_lack_of_memory_leaves_a_training_that_goes_on(
    where: str, device: str, monkeypatch: pytest.MonkeyPatch, differences: Callable[[Any, Any], list[str]]
) -> None:
    """In a capture, steps become eager; elsewhere, the step fails and changes nothing. Nothing is kept in memory."""
    scarce = False

    def allocate(now: bool) -> None:
        if scarce and now:
            raise torch.OutOfMemoryError("no memory")

    def loss_of(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        allocate(where == "forward" or (where == "forward in a capture" and is_capturing()))
        return loss_fn(net, images, labels)

    class Scarce(CapturedStep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            allocate(where == "capture")

    def train() -> list[float]:
        nonlocal scarce
        sparse, losses, failed = small(device, resample_every=4), [], False
        for number, batch in enumerate(batches(device, 12)):
            scarce = False
            before = copy.deepcopy(sparse.state_dict())
            scarce = "capture" in where or (number == 0 and not failed)  # the first step is eager
            try:
                losses.append(float(sparse.step(loss_of, *batch)))
            except torch.OutOfMemoryError:
                assert where == "forward"
                assert differences(sparse.state_dict(), before) == []
                scarce, failed = False, True
                losses.append(float(sparse.step(loss_of, *batch)))
        scarce = False
        assert failed == ("capture" not in where)
        assert ("OutOfMemoryError" in (sparse.reason or "")) == ("capture" in where)
        assert sparse.num_steps == 12
        sparse.finish()
        return losses

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "CapturedStep", Scarce)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        train()
        before = num_tensors()
        losses = train()
        assert num_tensors() <= before
    eager = small(device, engine="eager", resample_every=4)
    expected = [float(eager.step(loss_fn, *batch)) for batch in batches(device, 12)]
    assert losses == pytest.approx(expected, abs=TOLERANCE)
