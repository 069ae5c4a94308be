"""Static slots: a padded training equals the unpadded one, passengers stay zero, and shapes survive draws."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam

from slimstart import Flops, SparseTraining, flops, models, trace
from slimstart.graph import PaddedSelection
from slimstart.subnet.slots import SHRINK, Slots
from tests.cost_tables import chain
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
        coupling,
        align=align,
        resample_every=3,
        seed=1,
    )
    losses = [float(sparse.step(loss_fn, inputs)) for _ in range(steps)]
    return losses, {**model.state_dict(), "s": sparse.keep_probs}


def agree(name: str, coupling: str, optimizer: str) -> None:
    entry = ZOO[name]
    plain, padded = (trained(entry, coupling, align, optimizer) for align in (1, 4))
    assert padded[0] == pytest.approx(plain[0], rel=1e-10, abs=1e-10)
    if optimizer == "adam":  # it makes steps of rounding errors where a gradient is zero, as in front of batch norm
        return
    for key, value in plain[1].items():
        torch.testing.assert_close(padded[1][key], value, rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


SHRINKABLE = [name for name, entry in ZOO.items() if (entry.min_coverage or 0) > 0 and name not in RANDOM]
FEW = [name for name in SHRINKABLE if name in {"vgg_bn", "resnet_basic", "wide_resnet", "mobilenet_v1", "densenet"}]
FEW += [
    name
    for name in SHRINKABLE
    if name in {"resnet_group_norm", "nanogpt", "vit_separate", "mlp_mixer", "pixel_shuffle"}
]


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
def test_passengers_stay_zero_while_a_network_is_held(activation: type[nn.Module], optimizer: str) -> None:
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
    sparse = SparseTraining(model, optim, inputs, Flops(0.5), align=4, resample_every=100)
    for _ in range(5):
        sparse.step(loss_fn, inputs)
    selection = sparse._net.selection
    assert isinstance(selection, PaddedSelection)
    seen = 0
    for name, parameter in sparse._net.parameters.items():
        for dim, places in selection.absent(name).items():
            seen += places.numel()
            for tensor in (parameter.detach(), *optim.state[parameter].values()):
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    assert torch.count_nonzero(tensor.index_select(dim, places)) == 0
    assert seen > 0


# --------------------------------------------------------------------------- room


@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 3))
def test_frames_have_room_in_multiples_and_change_it_seldom(seed: int, align: int, num_masks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = chain(torch.randint(1, 40, (4,), generator=generator).tolist())
    slots = Slots(table, align)
    size = torch.bincount(table.unit_group)
    for _ in range(6):
        masks = torch.rand(num_masks, table.num_units, generator=generator) < torch.rand((), generator=generator)
        room_before = slots.room.clone()
        frames = slots.frames(masks)
        kept = torch.stack([table.at_least_one(mask) for mask in masks])
        assert bool((frames | ~kept).all())  # nobody is left outside
        for group in range(size.numel()):
            members = table.unit_group == group
            counts = frames[:, members].sum(1)
            assert set(counts.tolist()) == {int(slots.room[group])}  # the same shape for all networks of a draw
            room, needed = int(slots.room[group]), int(kept[:, members].sum(1).max())
            assert room % align == 0 or room == int(size[group])
            least = min(-(-needed // align) * align, int(size[group]))
            before = int(room_before[group])
            if before >= needed and (before <= SHRINK * least or before - least <= align):
                assert room == before
            else:
                assert room == least
        assert torch.equal(slots.frames(masks), frames)  # asked again, nothing changes


def test_shapes_survive_draws_and_cost_what_the_table_says() -> None:
    images = torch.randn(2, 3, 16, 16)
    shapes: dict[int, set[Any]] = {}
    for align in (1, 8):
        model = models.build("resnet20", num_classes=10, width=2.0)
        sparse = SparseTraining(
            model, SGD(model.parameters(), lr=0.1), images, Flops(0.3), "stream", align=align, seed=3
        )
        shapes[align] = set()
        cost = Flops(1.0).bind(sparse.graph.costs).cost
        for _ in range(12):
            sparse.resample()
            shapes[align].add(tuple(tuple(p.shape) for p in sparse.net.parameters()))
            assert flops(sparse.net, images) == cost(sparse.frame)
            assert cost(sparse.mask) <= cost(sparse.frame)
            assert bool((sparse.frame | ~sparse.mask).all())
    assert len(shapes[1]) == 12
    assert len(shapes[8]) <= 6


def test_a_frame_that_leaves_somebody_out_is_refused() -> None:
    graph = trace(models.build("resnet20", num_classes=10), torch.zeros(1, 3, 16, 16))
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    with pytest.raises(ValueError, match="`frame` must keep every unit"):
        graph.select_within(mask, mask & (torch.arange(graph.num_units) > 3))


def test_what_is_not_kept_is_neither_read_nor_written() -> None:
    graph = trace(models.build("resnet20", num_classes=10), torch.zeros(1, 3, 16, 16))
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(graph.num_units, generator=generator) < 0.4
    frame = mask | (torch.rand(graph.num_units, generator=generator) < 0.3)
    inner, padded = graph.select(mask), graph.select_within(mask, graph.costs.at_least_one(frame))
    assert isinstance(padded, PaddedSelection)
    for name, parameter in models.build("resnet20", num_classes=10).named_parameters():
        dense = parameter.detach().clone()
        narrow = padded.gather(name, dense)
        assert narrow.count_nonzero() == inner.gather(name, dense).count_nonzero()
        assert torch.equal(padded.scatter_(name, dense.clone(), narrow), dense)
        marked = padded.scatter_(name, dense.clone(), torch.full_like(narrow, 7.0))
        assert torch.equal(marked, inner.scatter_(name, dense.clone(), torch.full_like(inner.gather(name, dense), 7.0)))


def test_a_padded_training_resumes_exactly(differences: Any) -> None:
    def fresh() -> SparseTraining:
        torch.manual_seed(0)
        model = models.build("resnet20", num_classes=10, width=0.5)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        return SparseTraining(model, optimizer, torch.zeros(1, 3, 16, 16), Flops(0.3), align=4, resample_every=2)

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
