"""A change of structure is a transaction: an interrupt at any line leaves the state before it or after it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import EqualWorth, Flops, Paper, SparseTraining
from tests.layer_policy import Rounds

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(8, 3, 6, 6, generator=GENERATOR)
LABELS = torch.randint(0, 4, (8,), generator=GENERATOR)
PARTS = 10  # of the longest test, for processes that share it
PACKAGE = os.path.dirname(slimstart.__file__)
POLICIES: dict[str, Any] = {
    "equal_worth": EqualWorth(resample_every=2, rounds=8, align=1, pull=0.0, depth=0),
    "paper": Paper(resample_every=1, seed=3),
    "paper, padded": Paper(resample_every=1, seed=3, align=4),
    "layers": Rounds((), (0,), (1,), (1,), (0, 1), (0, 1), window=2),
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.residual = Residual()
        self.last = nn.Conv2d(16, 24, 3)
        self.even, self.act = nn.Conv2d(24, 24, 1), nn.ReLU()
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.inner(x)
        return self.head(self.act(self.even(F.relu(self.last(self.residual(x))))).mean((2, 3)))


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def make(policy: str) -> tuple[nn.Module, SparseTraining]:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sparse = SparseTraining(model, optimizer, IMAGES[:2], Flops(0.4), policy=POLICIES[policy], total_steps=1000)
    for _ in range(3):
        sparse.step(loss_fn, IMAGES, LABELS)
    return model, sparse


def structure(model: nn.Module, sparse: SparseTraining) -> tuple[Any, ...]:
    """All that a change of structure changes together."""
    state = sparse.state_dict()
    learned = [value.tolist() for value in state["policy"].values() if isinstance(value, Tensor)]
    shapes = [tuple(p.shape) for p in model.parameters()]
    moments = [tuple(v.shape) for s in sparse.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    sizes = [model.stem.out_channels, model.norm.num_features, model.inner.in_channels, model.head.in_features]
    layers = [type(module).__name__ for module in model.modules()], state["removed"]
    return sparse.num_steps, sparse.mask.tolist(), layers, shapes, moments, sizes, learned


class Interrupted:
    """Raise KeyboardInterrupt at the n-th line that slimstart runs within."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def run(self, function: Callable[[], Any]) -> bool:
        gc.collect()  # earlier trainings look at every optimizer's step, which are lines too
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def check(policy: str, tmp_path: Any, number: int, part: int = 0, parts: int = 1) -> None:
    """Interrupt a change at so many random lines; of these, one of several equal parts."""
    make(policy)  # imports what is imported on demand
    gc.collect()
    gc.freeze()  # there is a collection for every interrupt, which looks at what is made from here on only
    _, other = make(policy)  # made once, which takes a third of the time; it loads one structure after another
    model, sparse = make(policy)
    before = structure(model, sparse)
    count = Interrupted(0)
    count.run(lambda: sparse.step(loss_fn, IMAGES, LABELS))
    after = structure(model, sparse)
    assert before[1] != after[1]  # the structure changes in this step
    generator = random.Random(number)
    lines = sorted(generator.sample(range(1, count.count + 1), min(number, count.count)))
    for at in lines[part::parts]:
        model, sparse = make(policy)
        assert structure(model, sparse) == before
        assert Interrupted(at).run(lambda training=sparse: training.step(loss_fn, IMAGES, LABELS))
        assert torch.isfinite(model(IMAGES)).all()  # before anything of ours has run again
        found = structure(model, sparse)
        observed = found[:-1] == before[:-1] and policy in (
            "equal_worth",
            "layers",
        )  # gradients of the step may have been seen
        assert found in (before, after) or observed, f"half a change after an interrupt at line {at}"
        sparse.step(loss_fn, IMAGES, LABELS)
        sparse.save(tmp_path / "training.pt")
        other.load(tmp_path / "training.pt")
        assert structure(other.model, other) == structure(model, sparse)
        sparse.load(tmp_path / "training.pt")
        sparse.step(loss_fn, IMAGES, LABELS)
        assert sparse.finish() is model
        assert torch.isfinite(model(IMAGES)).all()


# "paper, padded" covers what "paper" does.
@pytest.mark.parametrize(
    "policy", [*(name for name in POLICIES if name != "paper"), pytest.param("paper", marks=pytest.mark.slow)]
)
def test_some_interrupts_leave_no_partial_change(policy: str, tmp_path: Any) -> None:
    check(policy, tmp_path, 13)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("policy", POLICIES)
def test_all_interrupts_leave_no_partial_change(policy: str, part: int, tmp_path: Any) -> None:
    check(policy, tmp_path, 500, part, PARTS)


@pytest.mark.parametrize("policy", POLICIES)
def test_out_of_memory_leaves_the_last_state(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sparse = make(policy)
    before = structure(model, sparse)
    gather, calls = slimstart.Selection.gather, itertools.count()

    def scarce(*args: Any) -> Tensor:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        return gather(*args)

    monkeypatch.setattr(slimstart.Selection, "gather", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        sparse.resample()
    monkeypatch.undo()
    assert structure(model, sparse) == before
    sparse.step(loss_fn, IMAGES, LABELS)
    assert sparse.finish() is model
