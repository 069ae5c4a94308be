"""Shallower siblings: their layers and widths by arithmetic, and networks that fill the budget of the dense one."""

import pytest
import torch
from torch import nn

from slimstart import flops
from slimstart.errors import BudgetError, ConfigError
from slimstart.graph import trace
from slimstart.lab.methods import uniform, wide_sibling
from slimstart.lab.models import build, parse_stages, siblings
from slimstart.lab.models.siblings import DEPTHS, STAGES
from slimstart.policies import Channels, Flops, Params


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize("model", STAGES)
def test_a_network_is_its_own_sibling(model: str) -> None:
    own = ",".join(map(str, STAGES[model].depths))
    assert own in DEPTHS[model]
    with torch.device("meta"):
        one, other = build(model, num_classes=7), build(model, num_classes=7, stages=own)
    assert [(n, t.shape) for n, t in one.state_dict().items()] == [(n, t.shape) for n, t in other.state_dict().items()]


# Convolutions of a layer or block, of a shortcut, and others.
CONVOLUTIONS = {"vgg": (1, 0, 0), "res": (2, 1, 1), "wrn": (2, 1, 1), "resnet50": (3, 1, 1), "mob": (2, 0, 1)}


@pytest.mark.parametrize("model", STAGES)
def test_siblings_have_the_layers_of_their_stages(model: str) -> None:
    in_block, in_shortcut, others = CONVOLUTIONS.get(model) or CONVOLUTIONS[model[:3]]
    assert len(siblings(model)) == 2 * len(DEPTHS[model])
    for text in siblings(model):
        with torch.device("meta"):
            network = build(model, num_classes=7, stages=text)
            assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
        depths = [int(part) for part in text.partition(":")[0].split(",")]
        # The first stage of a CIFAR ResNet has the channels of its stem, and no shortcut.
        shortcuts = len(depths) - (model in ("resnet20", "resnet32"))
        assert len(convolutions(network)) == in_block * sum(depths) + in_shortcut * shortcuts + others


def test_late_stages_are_wide() -> None:
    assert parse_stages("resnet32", "1,2,3").channels == (32, 64, 128)
    assert parse_stages("resnet32", "1,2,3:late").channels == (
        32,
        79,
        194,
    )  # 32 * 2 ** 1.3 = 78.8, 32 * 4 ** 1.3 = 194.0
    assert parse_stages("vgg19", "1,1,1,1,1:late").channels == (64, 158, 388, 955, 955)


@pytest.mark.parametrize("text", ["1,2", "1,2,3,4", "a,b,c", "1,2,0", "1,2,3:early", ""])
def test_stages_that_the_network_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it must be 3 numbers of layers, such as 1,1,2, or 1,1,2:late"):
        parse_stages("resnet20", text)
    with pytest.raises(ConfigError, match="`model` is 'small', which has no siblings; choose one of vgg16"):
        siblings("small")


@pytest.mark.parametrize("budget", [Flops(0.3), Flops(0.9), Params(0.2), Channels(0.4)], ids=str)
@pytest.mark.parametrize("stages", ["1,1,2:late", "1,1,2", "3,3,3"])
def test_a_sibling_fills_the_budget_of_the_dense_network(budget: Flops | Params | Channels, stages: str) -> None:
    example = torch.zeros(1, 3, 32, 32)
    dense = build("resnet20", num_classes=10)
    graph = trace(dense, example, "stream")
    sibling, own = wide_sibling(
        lambda width: build("resnet20", num_classes=10, width=width, stages=stages), graph, budget, example
    )
    network = uniform(sibling, own, budget)
    limit = budget.bind(graph.costs).limit
    traced = trace(network, example, "stream")
    cost = type(budget)(1.0).bind(traced.costs).dense
    assert 0.9 * limit < cost <= limit
    if isinstance(budget, Flops):
        assert flops(network, example) <= budget.fraction * flops(dense, example)
    channels = [c.out_channels for c in convolutions(network) if c.kernel_size == (3, 3)]
    factor = 6.1 if stages.endswith("late") else 4
    assert channels[-1] / channels[0] == pytest.approx(factor, rel=0.35)


def test_a_budget_that_no_sibling_meets_is_refused() -> None:
    example = torch.zeros(1, 3, 32, 32)
    graph = trace(build("resnet20", num_classes=10), example, "stream")

    def make(width: float) -> nn.Module:
        return build("resnet20", num_classes=10, width=width, stages="1,1,2")

    with pytest.raises(BudgetError):
        uniform(*wide_sibling(make, graph, Flops(1e-5), example), Flops(1e-5))
