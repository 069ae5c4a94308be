"""V, V_max and variances of estimators, against enumeration over all masks and against sampling."""

import itertools
import math

import pytest
import torch
from study.dispersion import (
    flip_dispersion,
    jackknife_error,
    largest,
    leave_one_out_variances,
    mean_and_error,
    pair_dispersion,
    total_variance,
)
from torch import Tensor

from slimstart.policies import ESTIMATORS, sample
from tests.reference import all_masks, mask_probability

S = torch.tensor([0.2, 0.5, 0.7, 0.9], dtype=torch.float64)
MASKS = all_masks(4)
PROBABILITIES = torch.stack([mask_probability(mask, S) for mask in MASKS])


def toy(masks: Tensor, batch: float = 0.0) -> Tensor:
    """A loss of four units that is neither linear nor additive; a batch shifts and bends it."""
    m = masks.double()
    return (
        2.0
        + batch
        + m @ torch.tensor([0.3, -0.2, 0.5, -0.4]).double()
        + (0.4 + batch) * m[..., 0] * m[..., 2]
        - m[..., 1] * m[..., 3]
    )


LOSSES = toy(MASKS)


def exact_flip(unit: int, value: int) -> float:
    """E (L(m) - L(m'))^2 with m_j held, over all pairs of masks."""
    total = 0.0
    for i, j in itertools.product(range(16), repeat=2):
        if MASKS[i, unit] == value:
            own = PROBABILITIES[i] / (S[unit] if value else 1 - S[unit])
            total += float(own * PROBABILITIES[j] * (LOSSES[i] - LOSSES[j]) ** 2)
    return total


EXACT_V = float(PROBABILITIES @ (LOSSES[:, None] - LOSSES) ** 2 @ PROBABILITIES)
EXACT_FLIPS = torch.tensor([exact_flip(unit, value) for value in (0, 1) for unit in range(4)], dtype=torch.float64)


def held(masks: Tensor, unit: int, value: int) -> Tensor:
    """Losses of the masks with one unit set."""
    masks = masks.clone()
    masks[..., unit] = bool(value)
    return toy(masks)


@pytest.mark.parametrize("num_masks", [2, 3])
def test_both_dispersions_are_unbiased(num_masks: int) -> None:
    """Their mean over all tuples of masks that can be drawn."""
    chosen = torch.tensor(list(itertools.product(range(16), repeat=num_masks)))
    weights, losses = PROBABILITIES[chosen].prod(1), LOSSES[chosen]
    assert float(weights @ pair_dispersion(losses)) == pytest.approx(EXACT_V, rel=1e-12)
    for unit, value in itertools.product(range(4), (0, 1)):
        found = float(weights @ flip_dispersion(losses, held(MASKS[chosen], unit, value)))
        assert found == pytest.approx(exact_flip(unit, value), rel=1e-12)
    assert EXACT_FLIPS.max() > 1.2 * EXACT_V  # or holding a unit would show nothing


def test_dispersions_are_means_over_pairs() -> None:
    losses, changed = torch.randn(5).double(), torch.randn(2, 3, 5).double()
    pairs = [(k, other) for k in range(5) for other in range(5) if k != other]
    assert float(pair_dispersion(losses)) == pytest.approx(
        sum(float(losses[k] - losses[o]) ** 2 for k, o in pairs) / 20
    )
    found = flip_dispersion(losses + 1e6, changed + 1e6)  # large losses that hardly differ
    for place in itertools.product(range(2), range(3)):
        expected = sum(float(changed[place][k] - losses[o]) ** 2 for k, o in pairs) / 20
        assert float(found[place]) == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(flip_dispersion(losses, losses), pair_dispersion(losses))


def test_sampling_agrees_with_enumeration() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs, flips = [], []
    for _ in range(400):
        masks = sample(S, 8, generator)
        losses = toy(masks)
        changed = [held(masks, unit, value) for value in (0, 1) for unit in range(4)]
        pairs.append(pair_dispersion(losses))
        flips.append(flip_dispersion(losses, torch.stack(changed)))
    mean, error = mean_and_error(torch.stack(pairs))
    assert abs(float(mean) - EXACT_V) < 4 * error < 0.2 * EXACT_V
    of_flips = torch.stack(flips)
    most = largest(of_flips)
    assert abs(float(most.value - EXACT_FLIPS.max())) < 4 * most.error < 0.2 * EXACT_V
    # The excess over V, from the same masks, is known better than either.
    excess = largest(of_flips - torch.stack(pairs)[:, None])
    assert float(most.value - mean) == pytest.approx(float(excess.value), rel=1e-9)
    assert abs(float(excess.value) - float(EXACT_FLIPS.max() - EXACT_V)) < 4 * excess.error
    assert excess.error < 0.8 * most.error


def test_the_maximum_of_noise_is_too_large_and_its_judge_is_not() -> None:
    """Eight rows of forty quantities that are all 1: the naive maximum is above, the judged one is not."""
    generator = torch.Generator().manual_seed(0)
    found = [largest(1 + torch.randn(8, 40, generator=generator, dtype=torch.float64)) for _ in range(500)]
    value, error = mean_and_error(torch.stack([one.value for one in found]))
    assert abs(float(value) - 1) < 4 * error < 0.1
    naive = torch.stack([one.naive for one in found]).mean()
    assert float(naive) == pytest.approx(1 + 2.16 / math.sqrt(8), abs=0.03)  # E max of 40 standard normals is 2.16
    # The standard error is that of the mean of eight values of variance one.
    assert float(torch.stack([one.error for one in found]).mean()) == pytest.approx(1 / math.sqrt(8), rel=0.1)


def test_the_maximum_is_that_of_one_column_where_it_is_clear() -> None:
    values = torch.tensor([[0.0, 5.0], [1.0, 6.0], [0.0, 8.0], [1.0, 9.0]], dtype=torch.float64)
    most = largest(values)
    # Halves 5, 8 and 6, 9: means 6.5 and 7.5, each with a standard error of 3 / sqrt(2) / sqrt(2).
    assert (float(most.value), float(most.naive)) == (7.0, 7.0)
    assert float(most.error) == pytest.approx(math.hypot(1.5, 1.5) / 2)


# --- variances -------------------------------------------------------------------------------------------------------


def exact_variance(name: str, alpha: float, batches: tuple[float, ...]) -> Tensor:
    """Var g over equally likely batches and all tuples of masks, as E g^2 - (E g)^2."""
    estimator = ESTIMATORS[name]
    first, second = torch.zeros(4).double(), torch.zeros(4).double()
    for batch in batches:
        losses = toy(MASKS, batch)
        for chosen in itertools.product(range(16), repeat=estimator.num_masks):
            rows = list(chosen)
            weight = PROBABILITIES[rows].prod() / len(batches)
            g = estimator.gradient(losses[rows], MASKS[rows], S, alpha)
            first, second = first + weight * g, second + weight * g**2
    return second - first**2


@pytest.mark.parametrize(("name", "alpha"), [("pge", 0.0), ("pge", 0.5), ("vr_pge", 0.5), ("vr_pge_symmetric", 0.5)])
def test_variances_of_estimators_agree_with_enumeration(name: str, alpha: float) -> None:
    generator, estimator, kinds = torch.Generator().manual_seed(1), ESTIMATORS[name], (-0.5, 0.1, 0.8)
    means, squares = [], []
    for _ in range(300):
        batch = kinds[int(torch.randint(3, (), generator=generator))]
        masks = sample(S, 4 * estimator.num_masks, generator)
        groups = masks.view(4, estimator.num_masks, 4)
        gradients = torch.stack([estimator.gradient(toy(one, batch), one, S, alpha) for one in groups])
        means.append(gradients.mean(0))
        squares.append(gradients.square().mean(0))
    moments = torch.stack(means), torch.stack(squares)
    found, errors = total_variance(*moments), jackknife_error(leave_one_out_variances(*moments))
    exact = exact_variance(name, alpha, kinds)
    assert ((found - exact).abs() < 4 * errors).all()
    assert (errors < 0.25 * exact).all()


def test_total_variance_is_half_the_squared_difference_between_batches() -> None:
    estimates = torch.randn(4, 3, 2).double()  # 4 batches, 3 estimates each, 2 units
    found = total_variance(estimates.mean(1), estimates.square().mean(1))
    expected, count = torch.zeros(2).double(), 0
    for (b, k), (c, other) in itertools.product(itertools.product(range(4), range(3)), repeat=2):
        if b != c:
            expected, count = expected + (estimates[b, k] - estimates[c, other]) ** 2 / 2, count + 1
    torch.testing.assert_close(found, expected / count)


def test_the_jackknife_estimate_of_a_mean_equals_its_standard_error() -> None:
    values = torch.randn(7).double()
    without_one = torch.stack([values[[k for k in range(7) if k != left]].mean() for left in range(7)])
    torch.testing.assert_close(jackknife_error(without_one), mean_and_error(values)[1])


def test_wrong_shapes_are_refused() -> None:
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(ValueError, match=r"`losses` has shape \(1,\); it needs the losses of at least 2 masks"):
        pair_dispersion(one)
    with pytest.raises(ValueError, match=r"`losses` has shape \(\); it needs"):
        flip_dispersion(torch.ones(()), two)
    with pytest.raises(ValueError, match=r"`changed` has shape \(3, 1\); it needs one loss for each of the 2 masks"):
        flip_dispersion(two, torch.ones(3, 1))
    for shape in ((3, 2), (5, 2), (2, 2), (4,)):
        with pytest.raises(ValueError, match="it needs an even number of rows, at least 4"):
            largest(torch.ones(shape))
    with pytest.raises(ValueError, match=r"have shapes \(1, 2\) and \(1, 2\); they need one and the same"):
        total_variance(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"have shapes \(3, 2\) and \(3, 1\)"):
        total_variance(torch.ones(3, 2), torch.ones(3, 1))
