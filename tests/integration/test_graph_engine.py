"""Decisions of the graph engine, on a simulated GPU: the numbers of eager steps."""

from typing import Any

import pytest
import torch

from slimstart import EqualWorth, Flops
from slimstart.steps import graphs
from slimstart.steps.captured import CapturedStep
from tests.engine_cases import *  # noqa: F403
from tests.engine_cases import batches, both, loss_fn, small
from tests.simulated_gpu import simulate_gpu


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
