"""Rules of the user's own, for operations that slimstart does not know."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import slimstart
from slimstart.graph.rules.register import RULES
from slimstart.graph.tracer import Call, Tracer


@torch.library.custom_op("slimstart_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: 2 * grad)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(doubled(self.first(x)))


@pytest.fixture
def own_rule() -> Iterator[None]:
    @slimstart.register_rule("slimstart_tests::doubled")
    def rule(tracer: Tracer, call: Call) -> None:
        value = tracer.activation(call["x"])
        assert value is not None
        tracer.set(call.result, value.nodes)  # the same channels

    yield
    del RULES["slimstart_tests::doubled"]


def test_channels_before_an_unknown_operation_cannot_shrink() -> None:
    graph = slimstart.trace(Network(), torch.randn(1, 3, 9, 9))
    assert graph.num_units == 0
    assert "slimstart_tests::doubled has no rule (slimstart.register_rule adds one)" in graph.not_prunable["first"]


@pytest.mark.usefixtures("own_rule")
def test_channels_pass_an_operation_that_has_a_registered_rule() -> None:
    inputs = torch.randn(1, 3, 9, 9)
    graph = slimstart.trace(Network(), inputs)
    assert [group.name for group in graph.groups] == ["first"]
    assert graph.num_units == 8
    assert slimstart.verify(Network(), inputs).max_error < 1e-12
