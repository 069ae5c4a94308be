"""Padding: a padded training equals the unpadded one, padding stays zero, and shapes survive structure changes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam

from slimstart import Flops, Paper, SparseTraining, flops, trace
from slimstart.graph import ChannelGraph
from slimstart.lab import models
from slimstart.narrow.capacity import RENEW, Capacity, Placement, Planner, aligned
from tests.zoo import ZOO, Entry, call, cast, tensors

OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=1e-3, weight_decay=0.01),
}
# Random numbers are drawn by shape, so what drops out differs.
RANDOM = {"dropout2d"}


def loss_fn(net: nn.Module, inputs: Any) -> Tensor:
    outputs = [output for output in tensors(call(net, inputs)) if output.is_floating_point()]
    weights = [torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output) for output in outputs]
    return sum((w * y).sum() / 10 + y.square().mean() for w, y in zip(weights, outputs, strict=True))  # type: ignore[return-value]


def trained(entry: Entry, coupling: str, align: int, optimizer: str, steps: int = 7) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model, inputs = entry.factory().double(), cast(entry.example_inputs(), torch.float64)
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.p = 0.0  # type: ignore[assignment]
    bound = Flops(1.0).bind(trace(model, inputs, coupling).costs)
    budget = Flops((0.4 * bound.minimum + 0.6 * bound.dense) / bound.dense)
    sparse = SparseTraining(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        inputs,
        budget,
        coupling=coupling,
        policy=Paper(align=align, resample_every=3, seed=1),
    )
    losses = [float(sparse.step(loss_fn, inputs)) for _ in range(steps)]
    return losses, {**sparse.state_dict()["model"], "s": sparse.keep_probs}


def agree(name: str, coupling: str, optimizer: str) -> None:
    entry = ZOO[name]
    plain, padded = (trained(entry, coupling, align, optimizer) for align in (1, 4))
    assert padded[0] == pytest.approx(plain[0], rel=1e-10, abs=1e-10)
    if optimizer == "adam":  # it makes steps of rounding errors where a gradient is zero, as in front of batch norm
        return
    for key, value in plain[1].items():
        torch.testing.assert_close(padded[1][key], value, rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


SHRINKABLE = [name for name, entry in ZOO.items() if (entry.min_coverage or 0) > 0 and name not in RANDOM]
FEW = [name for name in SHRINKABLE if name in {"vgg_bn", "resnet_basic", "mobilenet_v1"}]
FEW += [name for name in SHRINKABLE if name in {"resnet_group_norm", "nanogpt", "pixel_shuffle"}]


@pytest.mark.parametrize("name", FEW)
def test_padded_training_equals_unpadded_training(name: str) -> None:
    agree(name, "filter", "sgd")


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("name", SHRINKABLE)
def test_padded_training_equals_unpadded_training_everywhere(name: str, coupling: str) -> None:
    agree(name, coupling, "sgd")
    agree(name, coupling, "adam")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Softplus])
def test_padding_stays_zero_while_a_network_is_held(activation: type[nn.Module], optimizer: str) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)
            self.act = activation()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(self.act(x + self.b(self.act(x))))

    model, inputs = Residual().double(), torch.randn(6, 5, dtype=torch.float64)
    optim = OPTIMIZERS[optimizer](model.parameters())
    sparse = SparseTraining(model, optim, inputs, Flops(0.5), policy=Paper(align=4, resample_every=100))
    for _ in range(5):
        sparse.step(loss_fn, inputs)
    selection, state, seen = sparse.graph.select(sparse.mask), sparse.state_dict(), 0
    for index, (name, parameter) in enumerate(model.named_parameters()):
        exact = {"weight": state["model"][name], **state["optimizers"][0]["state"][index]}
        held = {"weight": parameter.detach(), **optim.state[parameter]}
        for key, padded in held.items():
            if isinstance(padded, Tensor) and padded.shape == parameter.shape:
                kept = selection.gather(name, exact[key])
                seen += padded.numel() - kept.numel()
                assert torch.equal(padded[padded != 0].sort().values, kept[kept != 0].sort().values), (name, key)
    assert seen > 0


# --------------------------------------------------------------------------- capacity


def graph_of(coupling: str = "filter") -> ChannelGraph:
    return trace(models.build("resnet20", num_classes=10), torch.zeros(1, 3, 16, 16), coupling)


GRAPHS = {coupling: graph_of(coupling) for coupling in ("filter", "stream")}


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from(["filter", "stream"]), st.integers(1, 3))
def test_capacity_is_sufficient_aligned_and_rarely_changes(
    seed: int, align: int, coupling: str, num_masks: int
) -> None:
    generator, graph = torch.Generator().manual_seed(seed), GRAPHS[coupling]
    planner, table = Planner(graph, align, spread=4.0), graph.costs
    capacity: Capacity | None = None
    s = torch.rand(graph.num_units, generator=generator, dtype=torch.float64)
    s = torch.where(s < 0.3, 0.0, torch.where(s > 0.8, 1.0, s))
    changes = 0
    for _ in range(20):
        kept = table.at_least_one(torch.rand(num_masks, graph.num_units, generator=generator) < s)
        before, capacity = capacity, planner(capacity, kept, s)
        changes += capacity is not before
        for number, group in enumerate(graph.groups):
            units, most = int(capacity.units[number]), int(kept[:, group.units.start : group.units.stop].sum(1).max())
            assert most <= units
            assert units % (2 * align if units > 5 * align else align) == 0 or units == len(group.units)
        assert bool(Placement(graph, capacity, torch.device("cpu"))(kept).fits)
    assert changes <= 3


def test_large_widths_have_twice_the_alignment() -> None:
    widths = torch.tensor([1, 8, 9, 31, 32, 33, 49, 64, 65])
    assert aligned(widths, 8).tolist() == [8, 8, 16, 32, 32, 48, 64, 64, 80]
    assert aligned(widths, 1).tolist() == widths.tolist()


def test_padding_is_removed_when_keep_probabilities_are_certain() -> None:
    graph = GRAPHS["filter"]
    planner = Planner(graph, 4, spread=4.0)
    half = torch.full((graph.num_units,), 0.5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    mask = graph.costs.at_least_one(torch.rand(2, graph.num_units, generator=generator) < 0.5)
    wide = now = planner(None, mask, half)
    certain, seen = mask[:1].double()[0], set()
    for _ in range(100):
        now = planner(now, mask[:1], certain)
        seen.add(id(now))
    assert len(seen) == 1
    assert planner.flops(now) < planner.flops(wide) / RENEW
    fixed = planner(None, mask[:1], None)  # no other mask will come: no more capacity than this one needs
    assert torch.equal(fixed.units, now.units)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(["filter", "stream"]))
def test_the_placement_is_that_of_the_selection(seed: int, coupling: str) -> None:
    """Every position of every axis against the obvious: list the frame's indices, and write -1 for padding."""
    generator, graph = torch.Generator().manual_seed(seed), GRAPHS[coupling]
    s = torch.rand(graph.num_units, generator=generator, dtype=torch.float64) ** 3
    kept = graph.costs.at_least_one(torch.rand(2, graph.num_units, generator=generator) < s)
    planner = Planner(graph, 4, spread=4.0)
    capacity = planner(None, kept, s)
    layout = Placement(graph, capacity, torch.device("cpu"))
    positions = layout(kept)
    for number, mask in enumerate(kept):
        inner, padded = graph.select(mask), graph.select(mask, layout.frame(mask))
        for axis, (start, count) in enumerate(zip(layout.start, layout.count, strict=True)):
            there = padded.present(axis).nonzero().squeeze(1).tolist()
            expected = [i if bool(inner.present(axis)[i]) else -1 for i in there]
            assert positions.row[number, start : start + count].tolist() == expected
            host = padded.positions(axis)
            assert expected == (there if host is None else host.tolist())
        assert graph.flops_within(layout.frame(mask)) == planner.flops(capacity)
        for (name, is_write), (own, num_own, stream, num_stream) in layout.ports.items():
            port = (graph.writes if is_write else graph.reads)[name]
            lists = [padded.present(axis).nonzero().squeeze(1).tolist() for axis in (port.live, port.carried)]
            real = [set(inner.present(axis).nonzero().squeeze(1).tolist()) for axis in (port.live, port.carried)]
            for begin, size, mine, other in ((own, num_own, 0, 1), (stream, num_stream, 1, 0)):
                both = real[0] & real[1]
                expected = [lists[other].index(i) if i in both else -1 for i in lists[mine]]
                assert positions.ports[number, begin : begin + size].tolist() == expected
    full = torch.ones(1, graph.num_units, dtype=torch.bool)
    if any(int(units) < len(group.units) for units, group in zip(capacity.units, graph.groups, strict=True)):
        assert not bool(layout(full).fits)


@pytest.mark.slow
def test_shapes_survive_structure_changes_and_match_the_cost_table() -> None:
    images = torch.randn(2, 3, 16, 16)
    for coupling in ("filter", "stream"):
        shapes: dict[int, set[Any]] = {}
        for align in (1, 8):
            model = models.build("resnet20", num_classes=10)
            sparse = SparseTraining(
                model,
                SGD(model.parameters(), lr=0.1),
                images,
                Flops(0.3),
                coupling=coupling,
                policy=Paper(align=align, seed=3),
            )
            shapes[align] = set()
            cost = Flops(1.0).bind(sparse.graph.costs).cost
            for _ in range(6):
                sparse.resample()
                shapes[align].add(tuple(tuple(p.shape) for p in model.parameters()))
                assert flops(model, images) == sparse.executed_flops >= cost(sparse.mask)
                assert all(flops(one, images) == sparse.executed.reference_flops[0] for one in sparse.references())
        assert len(shapes[1]) == 6
        assert len(shapes[8]) == 1


def test_a_capacity_below_the_selection_is_refused() -> None:
    graph = GRAPHS["filter"]
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    with pytest.raises(ValueError, match="`frame` must have capacity"):
        graph.select(mask, torch.arange(len(graph.costs.events)) > 3)


def test_dropped_channels_are_neither_read_nor_written() -> None:
    graph = GRAPHS["filter"]
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(graph.num_units, generator=generator) < 0.4
    kept = graph.costs.at_least_one(mask)
    capacity = Planner(graph, 8, spread=4.0)(None, kept[None], None)
    frame = Placement(graph, capacity, torch.device("cpu")).frame(kept)
    inner, padded = graph.select(mask), graph.select(mask, frame)
    for name, parameter in models.build("resnet20", num_classes=10).named_parameters():
        dense = parameter.detach().clone()
        narrow = padded.gather(name, dense)
        assert narrow.count_nonzero() == inner.gather(name, dense).count_nonzero()
        assert torch.equal(padded.scatter_(name, dense.clone(), narrow), dense)
        marked = padded.scatter_(name, dense.clone(), torch.full_like(narrow, 7.0))
        assert torch.equal(marked, inner.scatter_(name, dense.clone(), torch.full_like(inner.gather(name, dense), 7.0)))


@pytest.mark.slow
def test_a_padded_training_resumes_exactly(differences: Any) -> None:
    def fresh() -> SparseTraining:
        torch.manual_seed(0)
        model = models.build("resnet20", num_classes=10, width=0.5)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        return SparseTraining(
            model, optimizer, torch.zeros(1, 3, 16, 16), Flops(0.3), policy=Paper(align=4, resample_every=2)
        )

    images = torch.randn(4, 3, 16, 16)
    whole = fresh()
    for _ in range(3):
        whole.step(loss_fn, images)
    again = fresh()
    again.load_state_dict(whole.state_dict())
    for sparse in (whole, again):
        for _ in range(5):
            sparse.step(loss_fn, images)
    assert differences(whole.state_dict(), again.state_dict()) == []


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["filter", "stream"])
def test_padding_does_not_change_the_final_structure(coupling: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(6, 3, 16, 16, dtype=torch.float64)
    found = []
    for align in (1, 4):
        torch.manual_seed(1)
        model = models.build("resnet20", num_classes=10, width=0.5).double()
        optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
        sparse = SparseTraining(model, optimizer, images[:1], Flops(0.4), coupling=coupling, policy=Paper(align=align))
        for _ in range(3):
            sparse.step(loss_fn, images)
        sparse.settle([(images,)], loss_fn)
        losses = [float(sparse.step(loss_fn, images)) for _ in range(3)]
        found.append((sparse.mask, losses, sparse.executed_flops))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-10)
    assert found[0][2] < found[1][2]


def test_references_are_in_the_modes_of_the_model() -> None:
    images = torch.randn(4, 3, 16, 16)
    model = models.build("resnet20", num_classes=10)
    sparse = SparseTraining(model, SGD(model.parameters(), lr=0.1), images, Flops(0.4), policy=Paper(align=4))
    for training in (False, True):
        model.train(training)
        assert all(module.training is training for module in sparse.reference.modules())


@pytest.mark.parametrize("align", [1, 4])
def test_freezing_and_unfreezing_takes_effect(align: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    model = models.build("resnet20", num_classes=10, width=0.5).double()
    sparse = SparseTraining(
        model, SGD(model.parameters(), lr=0.01), images, Flops(0.4), policy=Paper(align=align, resample_every=3)
    )

    def dense() -> Tensor:
        value: Tensor = sparse.state_dict()["model"]["stage1.0.conv1.weight"]
        return value

    weight = model.stage1[0].conv1.weight
    sparse.step(loss_fn, images)
    weight.requires_grad_(False)
    before = dense()
    for _ in range(4):
        sparse.step(loss_fn, images)
    assert torch.equal(dense(), before)
    weight.requires_grad_(True)
    for _ in range(4):
        sparse.step(loss_fn, images)
    assert not torch.equal(dense(), before)


def test_loading_a_model_within_a_window_keeps_the_pending_masks() -> None:
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)

    def train(reload: bool) -> Any:
        torch.manual_seed(0)
        model = models.build("resnet20", num_classes=10, width=0.5).double()
        sparse = SparseTraining(
            model,
            SGD(model.parameters(), lr=1e-3, momentum=0.9),
            images,
            Flops(0.4),
            policy=Paper(align=4, resample_every=3),
        )
        losses = []
        for number in range(8):
            losses.append(float(sparse.step(loss_fn, images)))
            if reload and number in (1, 4):
                model.load_state_dict(model.state_dict())  # changes nothing
        return losses, sparse.mask, sparse.keep_probs

    plain, again = train(False), train(True)
    assert plain[0] == again[0]
    assert torch.equal(plain[1], again[1])
    assert torch.equal(plain[2], again[2])
