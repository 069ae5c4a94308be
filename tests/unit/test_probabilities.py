"""Sampling of masks and the score of a draw."""

import math

import pytest
import torch

from slimstart.policies import sample, score


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sample_has_the_right_shape_and_frequencies() -> None:
    s = f64(0.0, 0.1, 0.5, 1.0)
    masks = sample(s, 20_000, torch.Generator().manual_seed(1))
    assert masks.shape == (20_000, 4)
    assert masks.dtype == torch.bool
    frequency = masks.double().mean(0)
    assert frequency[0] == 0
    assert frequency[3] == 1
    # Five standard deviations of a mean of 20,000 draws.
    assert abs(frequency[1] - 0.1) < 5 * math.sqrt(0.1 * 0.9 / 20_000)
    assert abs(frequency[2] - 0.5) < 5 * math.sqrt(0.25 / 20_000)


def test_sampled_units_and_masks_are_independent() -> None:
    masks = sample(torch.full((2,), 0.5, dtype=torch.float64), 20_000, torch.Generator().manual_seed(2)).double()
    both = (masks[:, 0] * masks[:, 1]).mean()
    consecutive = (masks[:-1, 0] * masks[1:, 0]).mean()
    tolerance = 5 * math.sqrt(0.25 * 0.75 / 20_000)
    assert abs(both - 0.25) < tolerance
    assert abs(consecutive - 0.25) < 2 * tolerance  # overlapping pairs: a little more spread


def test_sample_is_reproducible_from_its_generator() -> None:
    s = torch.full((50,), 0.5, dtype=torch.float64)
    first = sample(s, 3, torch.Generator().manual_seed(7))
    again = sample(s, 3, torch.Generator().manual_seed(7))
    other = sample(s, 3, torch.Generator().manual_seed(8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("alpha", "kept", "dropped"),
    [
        (0.0, 0.8 / 0.16, -0.2 / 0.16),  # (m - s) / (s (1 - s)) at s = 0.2
        (0.5, 0.8 / 0.4, -0.2 / 0.4),
        (1.0, 0.8, -0.2),
    ],
)
def test_score_values(alpha: float, kept: float, dropped: float) -> None:
    masks = torch.tensor([[True], [False]])
    torch.testing.assert_close(score(masks, f64(0.2), alpha), f64(kept, dropped)[:, None])


def test_score_without_preconditioner_is_the_gradient_of_the_log_probability() -> None:
    s = f64(0.3, 0.9, 0.01).requires_grad_()
    mask = torch.tensor([True, False, False])
    log_p = torch.where(mask, s.log(), torch.log1p(-s)).sum()
    (expected,) = torch.autograd.grad(log_p, s)
    torch.testing.assert_close(score(mask, s.detach(), 0.0), expected)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_score_is_zero_at_certain_units_and_finite_next_to_them(alpha: float) -> None:
    s = f64(0.0, 1.0, 5e-324, 1e-300, 1 - 2**-53)
    for mask in (torch.zeros(5), torch.ones(5)):
        h = score(mask.bool(), s, alpha)
        assert torch.isfinite(h).all()
        assert h[:2].tolist() == [0, 0]
    assert score(torch.ones(5), s, alpha)[3] > 0
