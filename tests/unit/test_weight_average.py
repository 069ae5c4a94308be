"""Averages of weights: a slow reference by hand, also while channels leave and come back, and through a checkpoint."""

import copy
import io

import pytest
import torch
from torch import nn

from slimstart.errors import CheckpointError
from slimstart.graph import trace
from slimstart.lab.run.weight_average import WeightAverage
from slimstart.narrow import compact


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


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
    found = average.network(network)
    assert expected.keys() == floats(found).keys() >= {"1.running_mean", "7.weight"}
    for name, tensor in floats(found).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
        assert not torch.equal(tensor, floats(network)[name])
    assert average.write_to(network) is network
    assert all(torch.equal(tensor, floats(found)[name]) for name, tensor in floats(network).items())


def test_channels_that_leave_keep_their_average_also_through_a_checkpoint() -> None:
    dense = make()
    graph = trace(dense, torch.zeros(1, 3, 12, 12), "stream")
    average, expected = WeightAverage(0.9, dense, graph), {name: t.clone() for name, t in floats(dense).items()}
    random = torch.Generator().manual_seed(1)
    masks = [torch.ones(graph.num_units, dtype=torch.bool)]
    masks += [graph.costs.at_least_one(torch.rand(graph.num_units, generator=random) < 0.5) for _ in range(4)]
    for step in range(15):
        mask = masks[step // 3]
        selection, network = graph.select(mask), compact(make(), graph.select(mask))
        changed(network, step)
        average.update(network, mask)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in floats(network).items():
            narrow = decay * selection.gather(name, expected[name]) + (1 - decay) * tensor
            selection.scatter_(name, expected[name], narrow)
        for name, tensor in floats(average.write_to(copy.deepcopy(network), mask)).items():
            assert torch.allclose(tensor, selection.gather(name, expected[name]), atol=1e-6), name
        file = io.BytesIO()
        torch.save(average.state_dict(), file)
        file.seek(0)
        another = WeightAverage(0.9, make(seed=5), graph)
        another.load_state_dict(torch.load(file))
        if step % 2:  # continue with the one that was read, and with the one that was written
            average = another
    state = average.state_dict()["tensors"]
    assert all(torch.allclose(state[name], tensor, atol=1e-6) for name, tensor in expected.items())


def test_averages_of_another_network_are_refused() -> None:
    with pytest.raises(CheckpointError, match="those of another network"):
        WeightAverage(0.9, make()).load_state_dict(WeightAverage(0.9, nn.Linear(2, 3)).state_dict())
