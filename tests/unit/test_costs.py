"""Cost tables: the at-least-one rule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimstart.costs import CostTable, Polynomial
from tests import reference


def table_of(unit_group: list[int]) -> CostTable:
    nothing = Polynomial(0, ())
    group = torch.tensor(unit_group, dtype=torch.int64)
    return CostTable(group, torch.ones_like(group), torch.zeros(0, 1, dtype=torch.int64), (), nothing, nothing)


def test_an_empty_group_keeps_its_first_unit() -> None:
    table = table_of([1, 0, 1, 0, 2])
    mask = torch.tensor([False, False, True, False, False])
    assert table.at_least_one(mask).tolist() == [False, True, True, False, True]
    assert mask.tolist() == [False, False, True, False, False]  # the input is not changed


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
def test_agrees_with_the_slow_rule_and_is_idempotent(units: list[tuple[int, bool]]) -> None:
    labels = sorted({label for label, _ in units})
    group = [labels.index(label) for label, _ in units]  # groups are numbered without gaps
    mask = torch.tensor([kept for _, kept in units])
    table = table_of(group)
    kept = table.at_least_one(mask)
    assert torch.equal(kept, reference.at_least_one(mask, table.unit_group))
    assert torch.equal(table.at_least_one(kept), kept)


def test_many_masks_at_once() -> None:
    table = table_of([1, 0, 1, 0, 2, 1])
    masks = torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    kept = table.at_least_one(masks)
    assert kept.shape == masks.shape
    for one, its_mask in zip(kept.view(-1, 6), masks.view(-1, 6), strict=True):
        assert torch.equal(one, reference.at_least_one(its_mask, table.unit_group))
    assert not torch.equal(kept, masks)  # or this would show nothing
    assert table.at_least_one(masks[:0]).shape == (0, 3, 6)


def test_no_value_is_read_on_the_host() -> None:
    """Tensors on "meta" have shapes and no values."""
    kept = table_of([1, 0, 1]).at_least_one(torch.zeros(2, 3, dtype=torch.bool, device="meta"))
    assert (kept.shape, kept.device.type) == ((2, 3), "meta")


def test_a_network_without_units() -> None:
    table = table_of([])
    assert table.num_units == 0
    assert table.at_least_one(torch.zeros(0, dtype=torch.bool)).tolist() == []


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mask` has shape \(3,\); it needs one entry per unit, \(2,\)"):
        table_of([0, 1]).at_least_one(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`mask` has shape \(2, 3\); it needs one entry per unit, \(2,\)"):
        table_of([0, 1]).at_least_one(torch.ones(2, 3, dtype=torch.bool))
