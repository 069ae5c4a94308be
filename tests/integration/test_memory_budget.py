"""`Memory` budgets: the bytes of narrow networks, predicted exactly, and held in every step of a training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slimstart import (
    BudgetError,
    EqualWorth,
    Flops,
    Memory,
    SparseTraining,
    compact,
    measure_latency,
    measure_memory,
    trace,
)
from slimstart.lab import models
from slimstart.lab.models.feed_forward import VGG
from slimstart.policies.memory import MemoryTable
from slimstart.steps.measuring import random_networks, traced
from tests.zoo.sums import SummedConvNet

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from train_transformers import Transformer

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Module:
    return VGG(((16, 16, 16), (24, 24, 24), (32, 32)), 4, 3, 1.0)


def transformer() -> nn.Module:
    return Transformer("vit", 64, [2] * 3, [96] * 3, 48, 16, 4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "residual": lambda: models.build("resnet20", num_classes=4),
    "bottlenecks": lambda: models.build("resnet50", num_classes=4, width=0.125),
    "depthwise": lambda: models.build("mobilenet_v1", num_classes=4, width=0.25),
    "transformer": transformer,
}


def reference(network: nn.Module, images: Tensor, tensors_per_parameter: int) -> int:
    """The bytes of a step: all tensors that the nodes of the autograd graph hold, each storage once."""
    network.train()
    parameters = list(network.parameters())
    storages = {value.untyped_storage().data_ptr() for value in (*parameters, *network.buffers())}
    # Buffers that the forward replaces are not saved, so those of before are enough.
    found, nodes, seen = 0, [network(images).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                for saved in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(saved, Tensor) and saved.untyped_storage().data_ptr() not in storages:
                        storages.add(saved.untyped_storage().data_ptr())
                        found += saved.untyped_storage().nbytes()
        nodes += [following for following, _ in node.next_functions]
    return found + sum(tensors_per_parameter * value.nbytes for value in parameters)


def assert_exact(model: nn.Module, table: MemoryTable, norms: str = "shrink") -> None:
    graph = traced(model, IMAGES, "stream", (), norms)
    assert table.dense_bytes == reference(model, IMAGES, 4)
    for mask, removed in random_networks(graph, 6, seed=1):
        bound = Memory(1.0, table).bind(graph.costs.without(removed))
        shorter = graph.without(graph.layers[i].name for i in removed)
        assert bound.cost(mask) == reference(compact(model, shorter.select(mask)), IMAGES, 4)


@pytest.fixture(scope="module", params=NETWORKS)
def measured(request: pytest.FixtureRequest) -> tuple[nn.Module, MemoryTable]:
    torch.manual_seed(0)
    model = NETWORKS[request.param]()
    return model, measure_memory(model, IMAGES, optimizer_states=2)


def test_the_bytes_of_random_networks_are_those_of_the_autograd_graph(measured: tuple[nn.Module, MemoryTable]) -> None:
    assert_exact(*measured)


@pytest.mark.parametrize("name", ["plain", "transformer"])
def test_copies_of_weights_under_autocast_are_counted(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    with torch.autocast("cpu", torch.bfloat16):
        table = measure_memory(model, IMAGES, optimizer_states=2)
        assert_exact(model, table)
    assert table.dense_bytes != measure_memory(model, IMAGES, optimizer_states=2).dense_bytes


def test_branches_that_leave_a_part_of_themselves_are_counted() -> None:
    torch.manual_seed(0)
    model = SummedConvNet()
    table = measure_memory(model, IMAGES, optimizer_states=2)
    assert len(table.layers) > 2
    assert_exact(model, table)


def test_a_batch_may_be_a_view_of_a_data_set() -> None:
    data = torch.randn(100, 3, 16, 16)
    assert measure_memory(plain(), data[:3]) == measure_memory(plain(), data[:3].clone())


@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_a_training_fills_the_budget_and_does_not_exceed_it(fraction: float) -> None:
    torch.manual_seed(0)
    model = plain()
    table = measure_memory(model, IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    policy = EqualWorth(rounds=4, resample_every=3, align=1, pull=0)
    budget = Memory.of(fraction * table.dense_bytes, table)
    sparse = SparseTraining(model, optimizer, IMAGES[:2], budget, total_steps=20, policy=policy)
    taken = [reference(model, IMAGES, 3)]
    for _ in range(15):
        optimizer.zero_grad()
        model(IMAGES).square().mean().backward()
        optimizer.step()
        taken.append(reference(model, IMAGES, 3))
    assert sparse.learner.removed, "the rule for depth removes layers at this budget"
    assert len(set(taken)) > 1, "the structure changes"
    assert all(0.9 * fraction < one / table.dense_bytes <= fraction for one in taken)
    assert reference(sparse.finish(), IMAGES, 3) == taken[-1]


def test_it_holds_together_with_a_budget_of_flops() -> None:
    torch.manual_seed(0)
    model = plain()
    table = measure_memory(model, IMAGES)
    graph = trace(model, IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sparse = SparseTraining(
        model, optimizer, IMAGES[:2], [Memory(0.4, table), Flops(0.3)], total_steps=20, policy=EqualWorth(depth=0)
    )
    assert Memory(0.4, table).bind(graph.costs).cost(sparse.mask) <= 0.4 * table.dense_bytes
    assert Flops(0.3).bind(graph.costs).share(sparse.mask.double()) <= 0.3


def test_expectations_are_those_of_all_masks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 144, 2))
    graph = trace(model, IMAGES)
    bound = Memory(1.0, measure_memory(model, IMAGES)).bind(graph.costs)
    s = torch.rand(graph.num_units, dtype=torch.float64)
    expected = 0.0
    for number in range(2**graph.num_units):
        mask = torch.tensor([number >> unit & 1 for unit in range(graph.num_units)]).bool()
        expected += float(torch.where(mask, s, 1 - s).prod()) * bound.cost(mask)
    assert float(bound.expected(s)) == pytest.approx(expected, rel=1e-12)


def test_of_a_compiled_model_the_module_within_is_counted_and_timed() -> None:
    def refuse(*_: object) -> Callable[..., object]:
        raise AssertionError("nothing needs to be compiled")

    model = plain()
    compiled, table = torch.compile(model, backend=refuse), measure_memory(model, IMAGES)
    assert measure_memory(compiled, IMAGES) == table
    assert measure_latency(compiled, IMAGES, num_networks=2, repeats=1).structure == table.structure


class Checkpointed(nn.Module):
    """Blocks of which only the inputs are kept: the first of them is kept by the ReLU before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


def test_layers_that_save_something_only_together_are_refused_by_name() -> None:
    with pytest.raises(BudgetError, match=r"without all of \['blocks.0', 'blocks.1', 'blocks.2'\]"):
        measure_memory(Checkpointed(), IMAGES)
    kept = measure_memory(Checkpointed(), IMAGES, keep=["blocks.0"])
    image, output, parameters = (
        4 * 3 * 3 * 256,
        4 * 3 * 8 * 256,
        3 * 4 * sum(p.numel() for p in Checkpointed().parameters()),
    )
    assert kept.dense_bytes == parameters + image + 3 * output + 4 * 3 * 8  # the input of the head is the last


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(BudgetError, match="not linear in its numbers of channels"):
        measure_memory(models.build("resnet20", num_classes=4), IMAGES, coupling="filter")
    with pytest.raises(BudgetError, match="nothing in the model can shrink"):
        measure_memory(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(BudgetError, match="several precisions"):
        measure_memory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).half()), torch.randn(2, 4))
    with pytest.raises(ValueError, match="`optimizer_states` is -1"):
        measure_memory(plain(), IMAGES, optimizer_states=-1)
    table = measure_memory(plain(), IMAGES)
    with pytest.raises(BudgetError, match="counted on another network"):
        Memory(0.5, table).bind(trace(models.build("resnet20", num_classes=4), IMAGES).costs)
    with pytest.raises(BudgetError, match=r"`Memory\(0.001\)` allows .* bytes, .*feasible from 0\.\d+ to 1"):
        Memory(0.001, table).bind(trace(plain(), IMAGES).costs)
