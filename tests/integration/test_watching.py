"""Training with a policy that watches: what it is told, in every engine, and that nothing else changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from slimstart import Flops, SparseTraining, models, trace
from slimstart.engine.watching import Watch
from slimstart.graph.readers import readers
from slimstart.subnet import compact


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64)
    return images.to(device), torch.randint(0, 10, (8,), generator=generator).to(device)


def start(name: str = "resnet20", device: str = "cpu", **options: Any) -> SparseTraining:
    torch.manual_seed(0)
    model = models.build(name, num_classes=10, width=0.5).double().to(device)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    options = {"resample_every": 3, "policy": "equal_worth", **options}
    return SparseTraining(model, optimizer, batch(0, device)[0][:1], Flops(0.4), **options)


def gates_by_autograd(sparse: SparseTraining, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the loss with respect to gates at the inputs of all layers, on a copy that has no slots."""
    sparse.sync()
    mask = sparse.mask
    small = compact(sparse.model, sparse.graph.select(mask)).train()
    graph = trace(small, images[:1], "stream")
    gates = torch.ones(graph.num_units, dtype=torch.float64, requires_grad=True)
    modules = dict(small.named_modules())
    for reader in readers(graph, small):
        every = torch.where(reader.units < 0, torch.ones(()), gates[reader.units.clamp(min=0)])

        def gated(layer: nn.Module, inputs: tuple[Tensor], every: Tensor = every) -> Tensor:
            (x,) = inputs
            return x * (every.view(1, -1, 1, 1) if x.dim() == 4 else every)

        modules[reader.layer].register_forward_pre_hook(gated)
    (found,) = torch.autograd.grad(loss_fn(small, images, labels), gates)
    gradients = torch.zeros(len(mask), dtype=torch.float64)
    gradients[mask] = found
    return gradients


class Notes:
    """A policy that only takes notes."""

    def __init__(self) -> None:
        self.told: list[Tensor] = []

    def to(self, device: torch.device) -> None:
        pass

    def watch_(self, gradients: Tensor) -> None:
        self.told.append(gradients.clone())


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("name", ["vgg16", "resnet20", "mobilenet_v1"])
def test_gradients_of_units_are_those_of_gates(name: str, align: int) -> None:
    sparse, notes = start(name, policy="paper", coupling="stream", resample_every=1, align=align), Notes()
    Watch(notes, sparse._networks, sparse.graph, sparse.model, sparse.optimizer)  # type: ignore[arg-type]
    for number in range(3):  # of three random networks, with passengers where there is room to spare
        expected = gates_by_autograd(sparse, *batch(number))
        sparse.step(loss_fn, *batch(number))
        assert torch.allclose(notes.told[-1], expected, rtol=1e-9, atol=1e-12)
        assert float(expected.abs().max()) > 1e-3


def test_it_settles_by_itself_and_costs_no_second_forward() -> None:
    sparse = start(resample_every=1)
    assert not sparse.needs_reference
    assert sparse.executed.reference_flops == ()
    bound = Flops(0.4).bind(sparse.graph.costs)
    for number in range(18):
        assert sparse.settled == (number >= 16)
        sparse.step(loss_fn, *batch(number))
        assert bound.cost(sparse.mask) <= bound.limit
    mask = sparse.mask
    sparse.step(loss_fn, *batch(18))
    assert torch.equal(sparse.mask, mask)
    small = sparse.finish([batch(19)], loss_fn)
    assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in sparse.net.parameters())


def test_a_loop_by_hand_is_the_same() -> None:
    first, second = start(), start()
    for number in range(8):
        images, labels = batch(number)
        loss = float(first.step(loss_fn, images, labels))
        second.optimizer.zero_grad()
        own = loss_fn(second.net, images, labels)
        own.backward()
        second.optimizer.step()
        second.update(own)
        assert float(own.detach()) == loss
        assert torch.equal(first.mask, second.mask)


@pytest.mark.parametrize("steps", [4, 50], ids=["searching", "settled"])
def test_a_checkpoint_goes_on_bit_for_bit(steps: int) -> None:
    first, second = start(), start()
    for number in range(steps):
        first.step(loss_fn, *batch(number % 7))
    assert first.settled == (steps == 50)
    for number in range(5):
        second.step(loss_fn, *batch(number))
    second.load_state_dict(first.state_dict())
    for number in range(6):
        losses = [float(sparse.step(loss_fn, *batch(number))) for sparse in (first, second)]
        assert losses[0] == losses[1]
    assert torch.equal(first.mask, second.mask)


def test_a_settled_training_can_be_taken_back_to_its_search() -> None:
    sparse = start(resample_every=1)
    state = sparse.state_dict()
    for number in range(16):
        sparse.step(loss_fn, *batch(number))
    found = sparse.mask
    assert sparse.settled
    sparse.load_state_dict(state)
    assert not sparse.settled
    for number in range(16):
        sparse.step(loss_fn, *batch(number))
    assert torch.equal(sparse.mask, found)


def test_frozen_weights_say_nothing() -> None:
    torch.manual_seed(0)
    model = models.build("vgg16", num_classes=10, width=0.25).double()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    images, labels = batch(0)
    sparse = SparseTraining(model, optimizer, images[:1], Flops(0.3), policy="equal_worth", resample_every=1)
    mask = sparse.mask
    sparse.step(loss_fn, images, labels)
    assert torch.equal(sparse.mask, mask)


def test_its_window_follows_the_length_of_the_run() -> None:
    assert start(resample_every=None).resample_every == 50
    assert start(resample_every=None, total_steps=100).resample_every == 4
    assert start(resample_every=None, total_steps=160_000).resample_every == 1000


def test_errors() -> None:
    with pytest.raises(ValueError, match="`policy` is 'best'; it must be one of paper, equal_worth"):
        start(policy="best")
    with pytest.raises(ValueError, match="a channel has one unit only with 'stream'"):
        start(coupling="filter")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mobilenet_v1", "resnet20"])
def test_captured_steps_tell_the_same(name: str) -> None:
    eager, graphs = (start(name, "cuda", engine=engine) for engine in ("eager", "graphs"))
    assert graphs.engine == "graphs"
    for number in range(60):
        losses = [float(sparse.step(loss_fn, *batch(number % 5, "cuda"))) for sparse in (eager, graphs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert torch.equal(eager.mask, graphs.mask)
    assert graphs.settled
    assert graphs.reason is None
    assert graphs.executed_flops == eager.executed_flops  # nothing is padded
