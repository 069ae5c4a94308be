"""Losses that are tensors of one element, and gradients that are not finite although the loss is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import EqualWorth, Flops, NonFiniteLossError, Paper, SparseTraining

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4
POLICIES = {"equal_worth": EqualWorth(resample_every=2), "paper": Paper(seed=3)}


def make(policy: str, **settings: Any) -> SparseTraining:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return SparseTraining(model, optimizer, IMAGES[:2], Flops(0.5), policy=POLICIES[policy], total_steps=40, **settings)


def scalar(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def one_element(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return scalar(net, images, labels)[None]


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def nan_gradient(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return _NanGradient.apply(scalar(net, images, labels))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_with_one_element_is_a_scalar(policy: str, differences: Any) -> None:
    first, second = make(policy), make(policy)
    for _ in range(6):
        losses = first.step(scalar, IMAGES, LABELS), second.step(one_element, IMAGES, LABELS)
        assert losses[0].shape == losses[1].shape == ()
    assert differences(first.state_dict(), second.state_dict()) == []


def test_update_takes_losses_with_one_element(differences: Any) -> None:
    first, second = make("paper"), make("paper")
    for sparse, shape in ((first, ()), (second, (1,))):
        for _ in range(4):
            with torch.no_grad():
                reference = scalar(sparse.reference, IMAGES, LABELS)
            loss = scalar(sparse.model, IMAGES, LABELS)
            sparse.optimizer.zero_grad()
            loss.backward()
            sparse.optimizer.step()
            sparse.update(loss.reshape(shape), reference.reshape(shape))
    assert differences(first.state_dict(), second.state_dict()) == []
    with pytest.raises(TypeError, match=r"`loss` has the shape \(2,\)"):
        first.update(torch.ones(2), torch.ones(()))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_that_are_not_finite_change_nothing_where_they_are_clipped(policy: str, differences: Any) -> None:
    sparse = make(policy, max_grad_norm=1.0)
    for _ in range(3):
        sparse.step(scalar, IMAGES, LABELS)
    before = sparse.state_dict()
    with pytest.raises(NonFiniteLossError, match=r"the norm of the gradients is nan at step 3; weights .* as before"):
        sparse.step(nan_gradient, IMAGES, LABELS)
    assert differences(before, sparse.state_dict()) == []
    other = make(policy, max_grad_norm=1.0)
    other.load_state_dict(before)
    for one in (sparse, other):
        one.step(scalar, IMAGES, LABELS)
    assert differences(sparse.state_dict(), other.state_dict()) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_without_clipping_the_next_error_says_that_weights_are_not_finite(policy: str) -> None:
    sparse = make(policy)
    sparse.step(nan_gradient, IMAGES, LABELS)
    with pytest.raises(NonFiniteLossError, match="because weights are not finite since an earlier step"):
        sparse.step(scalar, IMAGES, LABELS)
