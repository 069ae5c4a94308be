"""The operations of a step, counted: nothing dense is multiplied or allocated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from slimstart import Channels, SparseTraining
from tests.zoo import LARGE


class Allocations(TorchDispatchMode):
    """Remembers the size of every storage that an operation makes and that was not among its inputs or seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operation = 0, ""
        self._known: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if self._see(tensor) and self._elements(tensor) > self.largest:
                self.largest, self.operation = self._elements(tensor), str(func)
        return outputs

    def _see(self, tensor: Any) -> bool:
        """Whether this is a tensor on a storage that has not been seen yet."""
        if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in self._known:
            return False
        self._known[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return True

    @staticmethod
    def _elements(tensor: Tensor) -> int:
        return tensor.untyped_storage().nbytes() // tensor.element_size()


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def first_convolution(net: nn.Module, images: Tensor) -> int:
    convolution = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    return counted(lambda: convolution(images))


def test_the_count_of_allocations_includes_backward() -> None:
    weight = torch.ones(5, 7, requires_grad=True)
    with Allocations() as allocations:
        weight.detach().t().add_(1)
        weight[:2].sum()
    assert 0 < allocations.largest < 35
    with Allocations() as allocations:
        weight[:2].sum().backward()
    assert allocations.largest == 35


@pytest.mark.slow
def test_one_step_costs_four_narrow_forwards() -> None:
    """Full-width VGG-19, a quarter of its channels, batch 64.

    A forward and a backward of the trained network are three of its forwards, less the first layer's gradient with
    respect to the images, which nobody asks for; the reference is one forward more.
    """
    torch.manual_seed(0)
    model = LARGE["vgg19_bn"].factory()
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    largest_weight = max(p.numel() for p in model.parameters())
    assert largest_weight == 512 * 512 * 9
    with torch.no_grad():
        dense = counted(lambda: model(images))
    sparse = SparseTraining(model, optimizer, images[:2], Channels(0.25), policy="paper")
    sparse.step(loss_fn, images, labels)  # the dense momentum is made here, once

    with torch.no_grad():
        trained, reference = counted(lambda: model(images)), counted(lambda: sparse.reference(images))
    first = first_convolution(model, images)
    with Allocations() as allocations:
        step = counted(lambda: sparse.step(loss_fn, images, labels))

    assert step <= 1.02 * (3 * trained + reference)
    assert step == 3 * trained - first + reference
    assert 0.04 < trained / dense < 0.09, "about a quarter of the inputs times a quarter of the outputs"
    assert 0 < allocations.largest < largest_weight, allocations.operation
