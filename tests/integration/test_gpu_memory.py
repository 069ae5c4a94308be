"""Lack of memory on a GPU: the training goes on, or is as before, and nothing is leaked. Run by hand: pytest -m gpu.

Every error is one of PyTorch's allocator: a loss function asks for more memory than any device has, or the allocator
may take no more from the device while all that it has cached is in use (`memory_left`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart import SparseTraining
from tests.engine_cases import captures, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
POLICIES: dict[str, dict[str, Any]] = {
    "equal_worth": {"policy": "equal_worth", "resample_every": 3, "total_steps": 100},
    "paper": {"policy": "paper", "resample_every": 3},
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Differences = Callable[[Any, Any], list[str]]


@pytest.fixture
def device() -> Iterator[str]:
    before = torch.cuda.get_per_process_memory_fraction()
    yield "cuda"
    torch.cuda.set_per_process_memory_fraction(before)
    gc.collect()
    torch.cuda.empty_cache()


# --- memory that is scarce, and memory that is held -------------------------------------------------------------------


def take_too_much() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # a pebibyte


def limit(num_bytes: int) -> None:
    """Limit what the allocator may take from the device."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


@contextmanager
def memory_left(num_bytes: int) -> Iterator[None]:
    """A context with so many bytes for further tensors.

    Up to a mebibyte they are one gap among tensors that fill the allocator's cache. More is what the allocator may take
    from the device, which it does in blocks of 2 MiB and more.
    """
    before = torch.cuda.get_per_process_memory_fraction()
    reserved()
    gap = torch.empty(min(num_bytes, MIB), dtype=torch.uint8, device="cuda")
    limit(0)
    held = []
    try:
        for power in range(36, 8, -1):  # the smallest block is of 512 bytes
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda"))
        if num_bytes > MIB:
            limit(torch.cuda.memory_reserved() + num_bytes)
        del gap
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(before)


def allocated() -> int:
    """The size of all tensors on the device."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def reserved() -> int:
    """What the allocator holds with an empty cache."""
    allocated()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def left_over() -> int:
    """The size of what trainings have left on the device, once all of them are deleted."""
    allocated()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream and thread that has multiplied matrices
    return allocated()


def check_leaks(run: Callable[[bool], None]) -> None:
    """Run a training with a lack of memory and without, and look for what it leaves on the device.

    Args:
        run: the training, which ends with its deletion; with True, memory is scarce at some time.
    """
    run(True)  # what is made once for the whole process is made here
    size, held = left_over(), reserved()
    torch.cuda.reset_peak_memory_stats()
    run(False)
    needed = torch.cuda.max_memory_reserved() - held
    assert left_over() == size
    run(True)
    assert left_over() == size
    before = torch.cuda.get_per_process_memory_fraction()
    reserved()
    limit(held + needed + needed // 8 + 16 * MIB)
    try:
        run(False)
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
    assert left_over() == size


# --- trainings --------------------------------------------------------------------------------------------------------


class Greedy:
    """A loss function that asks for more memory than any device has.

    Args:
        where: "forward", "backward" or "reference"; "" for nowhere.
        when: further condition.
        times: how often at most.
    """

    def __init__(self, where: str = "", when: Callable[[], bool] = lambda: True, times: int = 1000) -> None:
        self.where, self.when, self.times = where, when, times
        self.num_errors = 0

    def __call__(self, net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        logits = net(images)
        self.meet("forward" if torch.is_grad_enabled() else "reference")
        return F.cross_entropy(Greed.apply(logits, self), labels)  # type: ignore[no-untyped-call]

    def meet(self, where: str) -> None:
        if where == self.where and self.num_errors < self.times and self.when():
            self.num_errors += 1
            take_too_much()


class Greed(torch.autograd.Function):
    """The identity, in whose backward a `Greedy` may ask for memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, greedy: Greedy) -> Tensor:
        ctx.greedy = greedy
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.greedy.meet("backward")
        return gradient, None


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def examples(device: str) -> tuple[Tensor, Tensor]:
    """A batch whose activations take most of the memory of a training."""
    torch.manual_seed(1)
    number = 256 if device == "cuda" else 8
    images, labels = torch.randn(number, 3, 32, 32), torch.randint(0, 10, (number,))
    return images.to(device), labels.to(device)


def training(device: str, policy: str, engine: str) -> SparseTraining:
    return small(device, dtype=torch.float32, engine=engine, **POLICIES[policy])


def state_of(sparse: SparseTraining) -> dict[str, Any]:
    """The state dict, on the host, but for running statistics: a forward updates those, layer by layer."""
    state = sparse.state_dict()
    state["model"] = {name: t for name, t in state["model"].items() if not name.endswith(STATISTICS)}
    copied: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)
    return copied


def structure_of(sparse: SparseTraining) -> tuple[Any, ...]:
    return sparse.mask.tolist(), [tuple(p.shape) for p in sparse.model.parameters()], sparse.graph.removed


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def is_lack_of_memory(error: RuntimeError) -> bool:
    """Also cuDNN's: PyTorch tries its algorithms until one has enough memory, and says that none has worked."""
    return isinstance(error, torch.OutOfMemoryError) or "unable to find an engine" in str(error)


def fails(function: Callable[[], Any]) -> bool:
    """Whether memory is too scarce for a function; nothing of its error is kept."""
    try:
        function()
    except RuntimeError as error:
        if not is_lack_of_memory(error):
            raise
        return True
    return False


def check_whole(sparse: SparseTraining, weights: list[Tensor], structure: tuple[Any, ...]) -> None:
    """After an error at any place: the structure is as before, and the optimizer has updated all weights or none."""
    assert structure_of(sparse) == structure
    moved = [not torch.equal(*pair) for pair in zip(weights, weights_of(sparse.model), strict=True)]
    assert all(moved) or not any(moved), moved


def check_goes_on(
    sparse: SparseTraining, start: Callable[[], SparseTraining], path: Path, differences: Differences
) -> None:
    """The training takes steps, is saved, is loaded by another one and by itself, and is finished."""
    loss_fn, batch = Greedy(), examples(next(sparse.model.parameters()).device.type)
    steps = sparse.num_steps
    assert all(bool(torch.isfinite(sparse.step(loss_fn, *batch))) for _ in range(4))
    sparse.save(path)
    saved, other = state_of(sparse), start()
    other.load(path)
    assert differences(state_of(other), saved) == []
    sparse.load(path)
    assert differences(state_of(sparse), saved) == []
    for one in (sparse, other):
        assert bool(torch.isfinite(one.step(loss_fn, *batch)))
        assert one.num_steps == steps + 5
        model = one.finish()
        assert bool(torch.isfinite(model(batch[0])).all())


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "where"),
    [("equal_worth", "forward"), ("equal_worth", "backward"), ("paper", "forward"), ("paper", "reference")],
)
@pytest.mark.parametrize("how", ["once", "in captures", "in the step too"])
def test_a_capture_lacks_memory(
    device: str, policy: str, where: str, how: str, tmp_path: Path, differences: Differences
) -> None:
    """It is tried again; then steps run eagerly; and where these have no memory either, nothing changes."""

    def run(scarce: bool) -> None:
        sparse, batch = training(device, policy, "graphs"), examples(device)

        def when() -> bool:  # never in the runs before a capture, so that the capture begins
            return is_capturing() or (how == "in the step too" and not sparse._hooks.capturing)

        loss_fn, first = Greedy(), Greedy()
        for one in (loss_fn, first, first):  # a step is captured when it is met for the second time
            sparse.step(one, *batch)
        before, captured = state_of(sparse), captures(sparse)
        assert captured > 0
        if scarce:
            loss_fn.where, loss_fn.when, loss_fn.times = where, when, 1 if how == "once" else 1000
        if scarce and how == "in the step too":
            with pytest.raises(torch.OutOfMemoryError):
                sparse.step(loss_fn, *batch)
            assert differences(state_of(sparse), before) == []
            loss_fn.where = ""
        assert bool(torch.isfinite(sparse.step(loss_fn, *batch)))
        assert sparse.num_steps == 4
        assert (loss_fn.num_errors > 0) == scarce
        is_eager = scarce and how != "once"
        assert ("OutOfMemoryError" in str(sparse.reason)) == is_eager, sparse.reason
        assert captures(sparse) == captured + (not is_eager)
        check_goes_on(sparse, lambda: training(device, policy, "graphs"), tmp_path / "training.pt", differences)

    check_leaks(run)


@pytest.mark.parametrize("engine", ["graphs", "eager"])
@pytest.mark.parametrize(
    ("policy", "where"),
    [
        ("equal_worth", "forward"),
        ("equal_worth", "backward"),
        ("paper", "forward"),
        ("paper", "backward"),
        ("paper", "reference"),
    ],
)
def test_a_forward_takes_too_much(
    device: str, policy: str, where: str, engine: str, tmp_path: Path, differences: Differences
) -> None:
    def run(scarce: bool) -> None:
        sparse, batch = training(device, policy, engine), examples(device)
        for number in range(2):  # the first step, without optimizer state, and the first of the second window
            loss_fn = Greedy(where if scarce else "", times=1)
            before, found = state_of(sparse), structure_of(sparse)
            if scarce:
                with pytest.raises(torch.OutOfMemoryError):
                    sparse.step(loss_fn, *batch)
                assert differences(state_of(sparse), before) == []
                assert structure_of(sparse) == found
            for _ in range(3):
                assert bool(torch.isfinite(sparse.step(loss_fn, *batch)))
            assert sparse.num_steps == 3 * (number + 1)
            assert loss_fn.num_errors == scarce
        check_goes_on(sparse, lambda: training(device, policy, engine), tmp_path / "training.pt", differences)

    check_leaks(run)


@pytest.mark.parametrize("engine", ["graphs", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_with_little_memory(
    device: str, policy: str, engine: str, tmp_path: Path, differences: Differences
) -> None:
    """A step that is met for the first time, one that is captured, and one that is known, at many sizes of memory.

    An error may come at any place. The optimizer has updated all weights then, or none.
    """

    def run(scarce: bool) -> None:
        sparse, batch = training(device, policy, engine), examples(device)
        sparse.step(Greedy(), *batch)
        failed = []
        for num_mib in (0, 1, 16, 64, 160, 2048) if scarce else (2048,):
            loss_fn = Greedy()
            for is_little in (True, True, False, True, False):  # eager, captured, and known or captured again
                before, found, steps = weights_of(sparse.model), structure_of(sparse), sparse.num_steps
                if not (scarce and is_little):
                    assert bool(torch.isfinite(sparse.step(loss_fn, *batch)))
                    continue
                with memory_left(num_mib * MIB):
                    failed.append(fails(partial(sparse.step, loss_fn, *batch)))
                if failed[-1]:
                    check_whole(sparse, before, found)
                    assert sparse.num_steps == steps, num_mib
        assert not scarce or (failed[0] and not any(failed[-3:])), failed
        check_goes_on(sparse, lambda: training(device, policy, engine), tmp_path / "training.pt", differences)

    check_leaks(run)


@pytest.mark.parametrize("engine", ["graphs", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_change_of_structure_lacks_memory(
    device: str, policy: str, engine: str, tmp_path: Path, differences: Differences
) -> None:
    def run(scarce: bool) -> None:
        sparse, loss_fn, batch = training(device, policy, engine), Greedy(), examples(device)
        failed = []
        for size in (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, MIB, 256 * MIB) if scarce else (MIB,):
            for _ in range(2):
                sparse.step(loss_fn, *batch)
            if scarce:
                before, found = state_of(sparse), structure_of(sparse)
                with memory_left(size):
                    failed.append(fails(sparse.resample))
                if failed[-1]:
                    after = state_of(sparse)
                    if engine == "graphs" and policy == "paper":  # masks are drawn on the device, with other numbers
                        for state in (before, after):
                            del state["policy"], state["pending"]
                    assert differences(after, before) == [], size
                    assert structure_of(sparse) == found
            sparse.resample()
        assert not scarce or not failed[-1], failed
        assert not scarce or failed[0] or (engine, policy) == ("graphs", "paper"), failed
        check_goes_on(sparse, lambda: training(device, policy, engine), tmp_path / "training.pt", differences)

    check_leaks(run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loop_by_hand_takes_too_much(
    device: str, policy: str, where: str, tmp_path: Path, differences: Differences
) -> None:
    def run(scarce: bool) -> None:
        sparse, batch = training(device, policy, "auto"), examples(device)

        def step(loss_fn: Greedy) -> None:
            loss = loss_fn(sparse.model, *batch)
            sparse.optimizer.zero_grad()  # type: ignore[union-attr]
            loss.backward()
            with torch.no_grad():
                others = [loss_fn(network, *batch) for network in sparse.references()]
            sparse.optimizer.step()  # type: ignore[union-attr]
            if policy == "paper":
                sparse.update(loss, others or None)

        for number in range(7):  # two changes of structure
            loss_fn = Greedy(where if scarce else "", times=1)
            before, found = state_of(sparse), structure_of(sparse)
            if scarce:
                with pytest.raises(torch.OutOfMemoryError):
                    step(loss_fn)
                assert differences(state_of(sparse), before) == []
                assert structure_of(sparse) == found
            step(loss_fn)
            assert sparse.num_steps == number + 1
        check_goes_on(sparse, lambda: training(device, policy, "auto"), tmp_path / "training.pt", differences)

    check_leaks(run)


def test_a_change_in_an_optimizer_step_by_hand_lacks_memory(
    device: str, tmp_path: Path, differences: Differences
) -> None:
    """The optimizer's update is made or not; the structure is as before, and changes at the next step."""

    def run(scarce: bool) -> None:
        sparse, loss_fn, batch = training(device, "equal_worth", "eager"), Greedy(), examples(device)
        optimizer, failed = sparse.optimizer, []
        assert isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups:
            group["foreach"], group["weight_decay"] = False, 0.0  # no temporary tensors
        for number in range(10):
            size = (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, MIB, 0, 1 << 15, 1 << 17)[number]
            for is_last in (False, False, True):
                optimizer.zero_grad()
                loss_fn(sparse.model, *batch).backward()
                if not is_last or not scarce:
                    optimizer.step()
                    continue
                before, found, steps = weights_of(sparse.model), structure_of(sparse), sparse.num_steps
                with memory_left(size):
                    failed.append(fails(optimizer.step))
                if failed[-1]:
                    check_whole(sparse, before, found)
                    assert sparse.num_steps == steps
                    optimizer.zero_grad()
                    loss_fn(sparse.model, *batch).backward()
                    optimizer.step()
                    assert sparse.num_steps == steps + 1
        assert not scarce or (failed[0] and not all(failed)), failed
        check_goes_on(sparse, lambda: training(device, "equal_worth", "eager"), tmp_path / "training.pt", differences)

    check_leaks(run)
