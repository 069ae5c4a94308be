"""Estimators of the structure gradient: their mean and variance by enumeration over all masks."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slimstart.policies import ESTIMATORS, Estimator, get_estimator, leave_one_out_of
from slimstart.policies.estimators import leave_one_out, pge, vr_pge, vr_pge_symmetric
from tests import reference

Loss = Callable[[Tensor], float]
GROUPS = torch.tensor([0, 0, 1, 1])


class MaskedNet:
    """Two hidden layers of two units each, every unit with a mask; trained for a while on noisy labels."""

    def __init__(self, steps: int = 150) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
        noise = 0.5 * torch.randn(40, dtype=torch.float64, generator=generator)
        self.y = (self.x[:, 0] + noise > 0).double()
        shapes = [(3, 2), (2, 2), (2, 1)]
        self.weights = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for weight in self.weights:
            weight.requires_grad_()
        optimizer = torch.optim.SGD(self.weights, lr=0.3)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(torch.rand(4, generator=generator) < 0.7).backward()
            optimizer.step()

    def loss(self, mask: Tensor) -> Tensor:
        m = mask.double()
        hidden = torch.tanh(self.x @ self.weights[0]) * m[:2]
        hidden = torch.tanh(hidden @ self.weights[1]) * m[2:]
        logits = (hidden @ self.weights[2]).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, self.y)


@pytest.fixture(scope="module")
def raw_loss() -> Loss:
    net = MaskedNet()
    return lambda mask: net.loss(mask).item()


@pytest.fixture(scope="module")
def ruled_loss(raw_loss: Loss) -> Loss:
    """At least one unit per layer is part of the loss."""
    return lambda mask: raw_loss(reference.at_least_one(mask, GROUPS))


def keep_probs() -> Tensor:
    return torch.tensor([0.3, 0.6, 0.15, 0.8], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(
    "estimator", [*(ESTIMATORS[name] for name in ("pge", "vr_pge", "vr_pge_symmetric")), leave_one_out_of(3)]
)
@pytest.mark.parametrize("loss_name", ["raw_loss", "ruled_loss"])
def test_mean_over_all_masks_is_the_exact_preconditioned_gradient(
    estimator: Estimator, alpha: float, loss_name: str, request: pytest.FixtureRequest
) -> None:
    loss: Loss = request.getfixturevalue(loss_name)
    if estimator.num_masks == 3:
        # Triples are many: three units will do, the fourth always kept.
        loss = partial(lambda full, mask: full(torch.cat([mask, torch.ones(1, dtype=torch.bool)])), loss)
    s = keep_probs()[: 3 if estimator.num_masks == 3 else 4].requires_grad_()
    (gradient,) = torch.autograd.grad(reference.expected_loss(loss, s), s)
    s = s.detach()
    mean, _ = reference.estimator_moments(estimator.gradient, loss, s, alpha, estimator.num_masks)
    assert gradient.abs().max() > 1e-2  # or the comparison would show nothing
    torch.testing.assert_close(mean, (s * (1 - s)) ** alpha * gradient, rtol=0, atol=1e-10)


def test_the_rule_changes_the_expected_gradient(raw_loss: Loss, ruled_loss: Loss) -> None:
    s = keep_probs().requires_grad_()
    gradients = [torch.autograd.grad(reference.expected_loss(loss, s), s)[0] for loss in (raw_loss, ruled_loss)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [0.5, 0.75, 0.99])
@pytest.mark.parametrize("s", [[0.3, 0.6, 0.15, 0.8], [0.001, 0.999, 0.5, 0.02]])
def test_theorem_1_bounds_the_variance(ruled_loss: Loss, alpha: float, s: list[float]) -> None:
    r"""E||G||^2 <= V_max sum_j (s_j^{2a} (1-s_j)^{2a-1} + s_j^{2a-1} (1-s_j)^{2a}) <= |C| V_max."""
    probs = torch.tensor(s, dtype=torch.float64)
    masks = reference.all_masks(4)
    losses = torch.tensor([ruled_loss(mask) for mask in masks], dtype=torch.float64)
    p = torch.stack([reference.mask_probability(mask, probs) for mask in masks])
    squared = ((losses[:, None] - losses[None, :]).square() * p[None, :]).sum(1)  # over m', for every m
    v_max = max(
        float((squared[chosen] * p[chosen]).sum() / p[chosen].sum())
        for unit in range(4)
        for chosen in (masks[:, unit], ~masks[:, unit])
    )
    _, second = reference.estimator_moments(vr_pge, ruled_loss, probs, alpha, 2)
    q, a = 1 - probs, 2 * alpha
    bound = v_max * float((probs**a * q ** (a - 1) + probs ** (a - 1) * q**a).sum())
    assert 0 < float(second) <= bound * (1 + 1e-12)
    assert bound <= 4 * v_max * (1 + 1e-12)


def total_variance(estimator: Estimator, loss: Loss, s: Tensor, alpha: float = 0.5) -> float:
    mean, second = reference.estimator_moments(estimator.gradient, loss, s, alpha, estimator.num_masks)
    return float(second - mean.square().sum())


def test_variance_reduction_on_a_trained_network(ruled_loss: Loss) -> None:
    s = torch.full((4,), 0.7, dtype=torch.float64)
    plain, paper, symmetric = (
        total_variance(ESTIMATORS[name], ruled_loss, s) for name in ("pge", "vr_pge", "vr_pge_symmetric")
    )
    assert paper < plain / 2
    assert symmetric < paper


def test_the_preconditioner_reduces_variance_at_small_keep_probabilities(ruled_loss: Loss) -> None:
    s = torch.full((4,), 0.02, dtype=torch.float64)
    assert total_variance(ESTIMATORS["vr_pge"], ruled_loss, s, 0.5) < total_variance(
        ESTIMATORS["vr_pge"], ruled_loss, s, 0.0
    )


def test_vr_pge_is_not_always_better() -> None:
    """L = +-1 at s = 1/2: L h = 1 for both masks; (L - L') h is 0 or 2, each half of the time."""
    s = torch.tensor([0.5], dtype=torch.float64)
    loss: Loss = lambda mask: 1.0 if bool(mask[0]) else -1.0  # noqa: E731
    assert total_variance(ESTIMATORS["pge"], loss, s) == pytest.approx(0, abs=1e-15)
    assert total_variance(ESTIMATORS["vr_pge"], loss, s) == pytest.approx(1)


def test_values_by_hand() -> None:
    """At s = 0.2, alpha = 1/2 the score is 2 for a kept unit and -0.5 for a dropped one."""
    s = torch.full((2,), 0.2, dtype=torch.float64)
    masks = torch.tensor([[True, False], [False, False], [True, True]])
    losses = torch.tensor([3.0, 1.0, 5.0])
    assert pge(losses[:1], masks[:1], s, 0.5).tolist() == pytest.approx([6.0, -1.5])
    assert vr_pge(losses[:2], masks[:2], s, 0.5).tolist() == pytest.approx([4.0, -1.0])
    assert vr_pge_symmetric(losses[:2], masks[:2], s, 0.5).tolist() == pytest.approx([2.5, 0.0])
    # Losses less their mean, over n - 1: 0, -1, 1.
    assert leave_one_out(losses, masks, s, 0.5).tolist() == pytest.approx([-1 * -0.5 + 1 * 2, -1 * -0.5 + 1 * 2])


def test_leave_one_out_of_two_is_the_symmetric_estimator() -> None:
    generator = torch.Generator().manual_seed(3)
    s = torch.rand(6, dtype=torch.float64, generator=generator)
    masks = torch.rand(2, 6, generator=generator) < 0.5
    losses = torch.rand(2, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(leave_one_out(losses, masks, s, 0.5), vr_pge_symmetric(losses, masks, s, 0.5))


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_gradients_are_zero_and_finite_at_certain_units(name: str) -> None:
    estimator = get_estimator(name)
    s = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    masks = torch.tensor([[False, True, True], [False, True, False]] * 2)[: estimator.num_masks]
    losses = torch.tensor([2.0, 1.0, 4.0, 3.0])[: estimator.num_masks]
    for alpha in (0.0, 0.5):
        g = estimator.gradient(losses, masks, s, alpha)
        assert g[:2].tolist() == [0, 0]
        assert torch.isfinite(g).all()
        assert g[2] != 0


def test_registry() -> None:
    assert {name: (e.name, e.num_masks) for name, e in ESTIMATORS.items()} == {
        "pge": ("pge", 1),
        "vr_pge": ("vr_pge", 2),
        "vr_pge_symmetric": ("vr_pge_symmetric", 2),
        "leave_one_out": ("leave_one_out", 4),
    }
    assert get_estimator("vr_pge").gradient is vr_pge
    eight = leave_one_out_of(8)
    assert eight.num_masks == 8
    assert get_estimator(eight) is eight


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"`estimator` is 'reinforce'; .*'pge', 'vr_pge', .*leave_one_out"):
        get_estimator("reinforce")
    with pytest.raises(ValueError, match=r"`n` is 1; .* needs n >= 2"):
        leave_one_out_of(1)
    s, masks = torch.full((3,), 0.5), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"`losses` has shape \(1,\); `vr_pge` needs one loss per mask, 2 of them"):
        vr_pge(torch.ones(1), masks, s, 0.5)
    with pytest.raises(ValueError, match=r"`losses` has shape \(1,\); .* 2 or more of them"):
        leave_one_out(torch.ones(1), masks[:1], s, 0.5)
    with pytest.raises(ValueError, match=r"`masks` has shape \(2, 3\); 1 losses and 3 units need \(1, 3\)"):
        pge(torch.ones(1), masks, s, 0.5)
