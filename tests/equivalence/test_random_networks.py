"""Generated networks: verified, compared with the network with hooks, and their cost tables counted."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slimstart
from slimstart.narrow.verify import prove
from slimstart.policies import Flops, Params
from tests import network_reference as reference
from tests.zoo.random_nets import build, example_input, networks

TOLERANCE = 1e-10


def check(net, coupling, seed):
    inputs = example_input(seed)
    graph = slimstart.trace(net, inputs, coupling)
    report = prove(net, graph, inputs, num_masks=3 if graph.layers else 1, layers=graph.layers, seed=seed)
    assert report.max_error < TOLERANCE, report.worst
    assert report.num_comparisons > 0
    mask = torch.rand(graph.num_units, generator=torch.Generator().manual_seed(seed)) < 0.5
    for layers in (graph.layers, graph.layers[::2], ()) if graph.layers else ((),):
        derived = graph.without(layer.name for layer in layers)
        selection = derived.select(mask)
        narrow = slimstart.compact(net, selection)
        assert Flops(1.0).bind(derived.costs).cost(mask) == slimstart.flops(narrow, inputs)
        assert Params(1.0).bind(derived.costs).cost(mask) == sum(p.numel() for p in narrow.parameters())
    check_against_hooks(net, graph, selection, narrow, inputs)


def check_against_hooks(net, graph, selection, narrow, inputs):
    """The masked dense network that knows nothing of slices has the same outputs, and the same entries are there."""
    layers = reference.liveness(net, inputs, graph.filters, selection.mask)
    for name, tensor in narrow.state_dict().items():
        assert torch.equal(tensor, reference.cut(net, layers, name, net.state_dict()[name])), name
    dense = reference.masked(copy.deepcopy(net).double(), layers)
    narrow = copy.deepcopy(narrow).double()
    with torch.no_grad():
        for training in (True, False):  # the statistics of the first are used in the second
            expected, actual = dense.train(training)(inputs.double()), narrow.train(training)(inputs.double())
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from(("filter", "stream")))
def test_networks_drawn_by_hypothesis(net, coupling):
    check(net, coupling, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_networks(first, coupling):
    for seed in range(first, first + 20):
        net = build(seed)
        try:
            check(net, coupling, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, coupling {coupling!r}: {error}\n{net.program}") from error


def test_random_networks_are_mostly_prunable():
    """Else the tests above would say little."""
    graphs = [slimstart.trace(build(seed), example_input(seed), "filter") for seed in range(40)]
    assert sum(graph.coverage for graph in graphs) / len(graphs) > 0.8
    assert sum(bool(graph.writes) for graph in graphs) >= 5  # streams with several masks
    assert sum(bool(graph.layers) for graph in graphs) >= 20
