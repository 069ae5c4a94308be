"""Thousands of changes of structure in one training: memory and time per change stay the same, and nothing drifts.

SLIMSTART_SOAK is the number of changes of each training, 400 by default; releases are tested with 10,000.
"""

import copy
import ctypes
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimstart import EqualWorth, Flops, Paper, SparseTraining
from tests.integration.test_interrupts import IMAGES, LABELS, Block, loss_fn
from tests.layer_policy import Rounds
from tests.simulated_gpu import simulate_gpu

CHANGES = int(os.environ.get("SLIMSTART_SOAK", "400"))
PARTS = 8
LAYERS = random.Random(0).choices([(), (0,), (1,), (0, 1)], k=4 * CHANGES + 100)
ENDLESS = 10**9  # rounds, so that the rate of `EqualWorth` does not fall
POLICIES: dict[str, Callable[[], Any]] = {
    "equal_worth": lambda: EqualWorth(resample_every=1, rounds=ENDLESS, align=1, pull=0.0, depth=0),
    "layers": lambda: Rounds(*LAYERS, window=1),
    "paper": lambda: Paper(resample_every=1, seed=3),
    "paper, padded": lambda: Paper(resample_every=1, seed=3, align=4),
    "paper, captured": lambda: Paper(resample_every=2, seed=3, align=8),
}


def training(policy: str) -> SparseTraining:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = "auto" if "captured" in policy else "eager"
    return SparseTraining(model, optimizer, IMAGES[:2], Flops(0.4), policy=POLICIES[policy](), engine=engine)


def structure(sparse: SparseTraining) -> tuple[Any, ...]:
    return tuple(sparse.mask.tolist()), tuple(layer.name for layer in sparse.graph.removed)


def memory() -> tuple[int, int]:
    """The number of tensors that are alive, and the bytes that this process holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
    tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
    with open("/proc/self/statm") as file:
        return tensors, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(sparse: SparseTraining, changes: int) -> list[float]:
    """Train until the structure has changed so often; returns the processor time of every step."""
    seconds, before = [], structure(sparse)
    while changes:
        began = time.process_time()
        sparse.step(loss_fn, IMAGES, LABELS)
        seconds.append(time.process_time() - began)
        assert len(seconds) < 10 * CHANGES, "the structure hardly changes"
        changes -= structure(sparse) != before
        before = structure(sparse)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_changes(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differences: Callable[[Any, Any], list[str]]
) -> None:
    if "captured" in policy:
        simulate_gpu(monkeypatch)
    sparse = training(policy)
    parts, held = [], []
    for _ in range(PARTS):
        parts.append(statistics.median(run(sparse, CHANGES // PARTS)))
        held.append(memory())
    tensors, sizes = zip(*held, strict=True)
    sys.stdout.write(f"{policy}: {sparse.num_steps} steps of {[f'{1e3 * part:.3g}' for part in parts]} ms; {held}\n")
    assert max(tensors[PARTS // 2 :]) <= 1.1 * max(tensors[: PARTS // 2]), tensors  # it varies with the layers
    assert sizes[-1] - sizes[PARTS // 2] < (2 << 20), sizes
    assert statistics.median(parts[-3:]) < 1.3 * statistics.median(parts[:3]), parts
    sparse.save(tmp_path / "last.pt")
    saved = copy.deepcopy(sparse.state_dict())
    fresh = training(policy)
    fresh.load(tmp_path / "last.pt")
    assert differences(fresh.state_dict(), saved) == []
    losses = []
    for one in (sparse, fresh):
        torch.set_rng_state(saved["random"])
        losses.append([one.step(loss_fn, IMAGES, LABELS) for _ in range(10)])
    assert differences(*losses) == []
    assert differences(fresh.state_dict(), sparse.state_dict()) == []
    assert structure(fresh) == structure(sparse)
