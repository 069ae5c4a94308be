"""The participation ratio, against known covariances."""

import itertools

import pytest
import torch
from scipy.linalg import hadamard

from slimstart.policies.equal_worth import participation


def test_independent_units_count_fully_and_identical_units_once():
    signs = torch.from_numpy(hadamard(32)).double()
    assert float(participation(signs[:, :8])) == 8
    assert float(participation(signs[:, [3] * 8])) == pytest.approx(1)
    assert float(participation(signs[:, [3, 3, 3, 3, 5, 5, 5, 5]])) == pytest.approx(2, rel=0.05)
    assert float(participation(1e-12 * signs[:, [3, 3, 5, 5]])) == pytest.approx(2, rel=0.05)


def test_too_few_samples_give_no_ratio():
    assert float(participation(torch.ones(1, 5))) == 5
    assert float(participation(torch.zeros(0, 5))) == 5
    assert float(participation(torch.zeros(9, 5))) == 5


def test_the_trace_of_the_square_has_no_bias():
    """Over all pairs that can be drawn of a distribution on four vectors, by enumeration."""
    vectors = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 1.0], [3.0, 0.0, 1.0], [-1.0, 1.0, 2.0]], dtype=torch.float64)
    covariance = vectors.T @ vectors / 4
    inverse = []
    for pair in itertools.product(vectors, repeat=2):
        samples = torch.stack(pair)
        # Padded by gates that say nothing, so that no bound is met; the mean trace comes from all samples.
        ratio = participation(torch.cat([samples, torch.zeros(2, 1000)], 1))
        inverse.append(samples.square().sum(1).mean().square() / ratio)
    assert float(torch.stack(inverse).mean()) == pytest.approx(float((covariance @ covariance).trace()), rel=1e-3)


def test_many_samples_of_a_normal_distribution():
    scales = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    samples = scales * torch.randn(4000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    variances = scales.square()
    assert float(participation(samples)) == pytest.approx(
        float(variances.sum().square() / variances.square().sum()), rel=0.05
    )
