"""Averages of weights: a slow reference by hand, also while channels leave and come back, and through a checkpoint."""

import copy
import io

import pytest
import torch
from torch import nn

from slimstart import Flops, Paper, SparseTraining
from slimstart.errors import CheckpointError
from slimstart.lab.run.weight_average import WeightAverage


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 12, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


def changed(network: nn.Module, seed: int) -> None:
    """Other weights, and other running statistics."""
    random = torch.Generator().manual_seed(seed)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.detach().copy_(torch.rand(tensor.shape, generator=random))


def floats(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}


def test_the_average_is_that_of_a_loop() -> None:
    network = make()
    average, expected = WeightAverage(0.5, network), {name: t.clone() for name, t in floats(network).items()}
    for step in range(12):
        changed(network, step)
        average.update(network)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, tensor in floats(network).items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor
    found = average.write_to(copy.deepcopy(network))
    assert expected.keys() == floats(found).keys() >= {"1.running_mean", "7.weight"}
    for name, tensor in floats(found).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
        assert not torch.equal(tensor, floats(network)[name])
    assert average.write_to(network) is network
    assert all(torch.equal(tensor, floats(found)[name]) for name, tensor in floats(network).items())


def started() -> tuple[SparseTraining, WeightAverage]:
    """A training that draws other channels at every step, and an average that follows."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    example, policy = torch.zeros(1, 3, 12, 12), Paper(align=1, seed=1)
    sparse = SparseTraining(model, optimizer, example, Flops(0.5), policy=policy, coupling="stream", total_steps=99)
    average = WeightAverage(0.9, model)
    sparse.follow(average.network)
    return sparse, average


def test_channels_that_leave_keep_their_average_also_through_a_checkpoint() -> None:
    sparse, average = started()
    graph, expected = sparse.graph, floats(sparse.dense_copy())
    random, masks = torch.Generator().manual_seed(1), set()
    for step in range(8):
        images, labels = torch.randn(8, 3, 12, 12, generator=random), torch.randint(5, (8,), generator=random)
        sparse.step(lambda net, x, y: nn.functional.cross_entropy(net(x), y), images, labels)
        average.update(sparse.model)
        selection = graph.select(sparse.mask)
        masks.add(tuple(sparse.mask.tolist()))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in floats(sparse.model).items():
            narrow = decay * selection.gather(name, expected[name]) + (1 - decay) * tensor
            selection.scatter_(name, expected[name], narrow)
        for name, tensor in floats(average.network).items():
            assert torch.allclose(tensor, selection.gather(name, expected[name]), atol=1e-6), name
        if step % 5 == 2:
            file = io.BytesIO()
            torch.save({"sparse": sparse.state_dict(), "average": average.state_dict()}, file)
            file.seek(0)
            sparse, average = started()
            state = torch.load(file)
            sparse.load_state_dict(state["sparse"])
            average.load_state_dict(state["average"])
    assert len(masks) > 5


def test_averages_of_another_network_are_refused() -> None:
    with pytest.raises(CheckpointError, match="those of another network"):
        WeightAverage(0.9, make()).load_state_dict(WeightAverage(0.9, nn.Linear(2, 3)).state_dict())
