"""Selections: a resolved mask, and the two inverse moves between dense and narrow tensors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import slimstart
from slimstart.costs import CostTable, Polynomial
from slimstart.graph.channels import ChannelGraph, ChannelGroup, Slice


def hand_made_graph(group_sizes, axes, tensors, not_prunable=None):
    """A graph without a network: one event per unit; `axes` list units (-1: always there), `tensors` axes by dim."""
    units = sum(group_sizes)
    groups, start = [], 0
    for number, size in enumerate(group_sizes):
        groups.append(ChannelGroup(f"layer{number}", range(start, start + size), (f"layer{number}",), size))
        start += size
    costs = CostTable(
        unit_group=torch.repeat_interleave(
            torch.arange(len(group_sizes)), torch.tensor(group_sizes, dtype=torch.int64)
        ),
        unit_filters=torch.ones(units, dtype=torch.int64),
        events=torch.arange(units).view(units, 1),
        factors=(),
        flops=Polynomial(0, ()),
        params=Polynomial(0, ()),
    )
    return ChannelGraph(
        coupling="filter",
        groups=tuple(groups),
        tensors={name: tuple(Slice(dim, axis, axis) for dim, axis in dims.items()) for name, dims in tensors.items()},
        axes=tuple(torch.tensor(axis) for axis in axes),
        reads={},
        writes={},
        attributes={},
        filters={},
        not_prunable=not_prunable or {},
        costs=costs,
        coverage=0.5,
    )


# --- gather and scatter_ ---------------------------------------------------------------------------------------------


@st.composite
def sliced_tensors(draw):
    """A graph, a mask, and the shape of a tensor; none to three of its dimensions are sliced, not always adjacent."""
    group_sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    units = sum(group_sizes)
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    sliced = draw(st.lists(st.sampled_from(range(len(shape))), unique=True, max_size=3))
    axes = [draw(st.lists(st.integers(-1, units - 1), min_size=shape[d], max_size=shape[d])) for d in sliced]
    graph = hand_made_graph(group_sizes, axes, {"w": {dim: axis for axis, dim in enumerate(sliced)}})
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=units, max_size=units)))
    return graph, mask, tuple(shape)


def entries_that_stay(graph, mask, shape):
    """One entry after the other."""
    stays = torch.ones(shape, dtype=torch.bool)
    for piece in graph.tensors["w"]:
        for index, unit in enumerate(graph.axes[piece.axis].tolist()):
            if unit >= 0 and not mask[unit]:
                stays.select(piece.dim, index)[...] = False
    return stays


def numbered(shape, start=1.0):
    """A tensor in which every entry is different."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).view(shape)


@settings(max_examples=150, deadline=None)
@given(sliced_tensors())
def test_gather_and_scatter(drawn):
    graph, mask, shape = drawn
    selection = graph.select(mask)
    stays = entries_that_stay(graph, selection.mask, shape)
    dense = numbered(shape)
    before = dense.clone()
    narrow = selection.gather("w", dense)
    # what stays, in the order of the dense tensor
    assert narrow.flatten().tolist() == dense[stays].tolist()
    assert narrow.shape == selection.shape("w", dense.shape)
    assert torch.equal(dense, before)
    # writing it back changes nothing
    assert selection.scatter_("w", dense, narrow.clone()) is dense
    assert torch.equal(dense, before)
    # writing something else changes what stays, and only that
    fresh = numbered(narrow.shape, start=-1e6)
    selection.scatter_("w", dense, fresh)
    assert torch.equal(dense[~stays], before[~stays])
    assert dense[stays].tolist() == fresh.flatten().tolist()
    # the two are inverses
    assert torch.equal(selection.gather("w", dense), fresh)


@pytest.mark.parametrize("dims", [{0: 0}, {2: 0}, {0: 0, 1: 1}, {0: 0, 2: 1}, {1: 0, 3: 1}, {0: 0, 1: 1, 3: 0}])
def test_absent_entries_are_never_touched(dims):
    """Not even to write what is there: the bits of a NaN survive."""
    shape = (3, 3, 3, 3)
    graph = hand_made_graph([3, 3], [[0, 1, 2], [3, 4, 5]], {"w": dims})
    selection = graph.select(torch.tensor([True, False, True, False, True, True]))
    payload = torch.arange(81, dtype=torch.int32).view(shape) + 0x7FC00001  # every entry a NaN of its own
    dense = payload.clone().view(torch.float32)
    narrow = torch.zeros(selection.shape("w", dense.shape))
    selection.scatter_("w", dense, narrow)
    stays = entries_that_stay(graph, selection.mask, shape)
    assert bool((dense[stays] == 0).all())
    assert torch.equal(dense.view(torch.int32)[~stays], payload[~stays])
    assert 0 < int(stays.sum()) == narrow.numel() < 81


def test_tensors_outside_the_graph_are_not_cut():
    selection = hand_made_graph([2], [[0, 1]], {"w": {0: 0}}).select(torch.tensor([False, True]))
    dense = numbered((2, 3))
    assert torch.equal(selection.gather("other", dense), dense)
    selection.scatter_("other", dense, torch.zeros(2, 3))
    assert not dense.any()
    assert selection.indices("other") == {}


def test_counts_of_an_axis():
    graph = hand_made_graph([3], [[0, 1, 2], [-1, 0, 0, 2], [-1, -1]], {"w": {0: 1}})
    selection = graph.select(torch.tensor([False, True, True]))
    assert selection.positions(0).tolist() == [1, 2]
    assert selection.positions(1).tolist() == [0, 3]
    assert selection.positions(2) is None
    assert [selection.count(axis) for axis in range(3)] == [2, 2, 2]
    assert selection.present(1).tolist() == [True, False, False, True]
    everything = graph.select(torch.ones(3, dtype=torch.bool))
    assert everything.positions(1) is None
    assert everything.count(1) == 4


def test_an_event_happens_if_one_of_its_units_is_kept():
    graph = hand_made_graph([2, 2], [[0, 1, 2]], {"w": {0: 0}})
    events = torch.tensor([[0, 2], [1, 3], [1, -1]])  # a channel of a stream with two writers, and of one alone
    graph = ChannelGraph(**{**vars(graph), "costs": replace(graph.costs, events=events)})
    for mask, present in [
        ([True, False, True, False], [True, False, False]),
        ([True, False, False, True], [True, True, False]),
        ([False, True, True, False], [True, True, True]),
        ([False, True, False, True], [False, True, True]),
    ]:
        assert graph.select(torch.tensor(mask)).present(0).tolist() == present


# --- select ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1]),  # the first unit of each group
        ([0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1]),
        ([0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1]),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),
    ],
)
def test_every_group_keeps_one(mask, kept):
    graph = hand_made_graph([2, 3, 1], [[0, 1]], {"w": {0: 0}})
    given_mask = torch.tensor(mask, dtype=torch.bool)
    selection = graph.select(given_mask)
    assert selection.mask.int().tolist() == kept
    assert given_mask.int().tolist() == mask  # not changed
    assert graph.select(selection.mask).mask.int().tolist() == kept


def test_masks_of_other_types():
    graph = hand_made_graph([2, 2], [[0, 1]], {"w": {0: 0}})
    for mask in (torch.tensor([0, 1, 1, 0]), torch.tensor([0.0, 1.0, 1.0, 0.0], requires_grad=True)):
        assert graph.select(mask).mask.tolist() == [False, True, True, False]


def test_no_layer_is_ever_empty():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.Flatten(),
                          nn.Linear(5 * 4, 2))  # fmt: skip
    image = torch.randn(2, 3, 2, 2)
    graph = slimstart.trace(model, image)
    narrow = slimstart.compact(model, graph.select(torch.zeros(graph.num_units, dtype=torch.bool)))
    assert [tuple(p.shape) for p in narrow.parameters()] == [
        (1, 3, 1, 1), (1,), (1,), (1,), (1, 1, 1, 1), (1,), (2, 4), (2,)
    ]  # fmt: skip
    assert torch.equal(narrow[0].weight, model[0].weight[:1])
    assert (narrow[0].out_channels, narrow[1].num_features, narrow[3].in_channels) == (1, 1, 1)
    assert narrow(image).shape == (2, 2)


def test_wrong_shape():
    graph = hand_made_graph([2, 3], [[0, 1]], {"w": {0: 0}})
    with pytest.raises(ValueError, match=r"`mask` has shape \(4,\); it needs one entry per unit, \(5,\)"):
        graph.select(torch.ones(4, dtype=torch.bool))


# --- str -------------------------------------------------------------------------------------------------------------


def test_str():
    graph = hand_made_graph([2, 3], [[0, 1]], {"w": {0: 0}}, {"head": "it is an output of the network"})
    assert str(graph) == (
        "ChannelGraph: 5 units in 2 groups, coupling='filter', 50.0% of the FLOPs can shrink\n"
        "  layer0: units 0..1, 2 filters\n"
        "  layer1: units 2..4, 3 filters\n"
        "not prunable:\n"
        "  head: it is an output of the network"
    )


def test_str_of_a_network():
    model = nn.Sequential(nn.Linear(6, 4), nn.GLU(), nn.Linear(2, 3))
    described = str(slimstart.trace(model, torch.randn(2, 6), coupling="stream")).splitlines()
    assert described == [
        "ChannelGraph: 2 units in 1 groups, coupling='stream', 100.0% of the FLOPs can shrink",
        "  0: units 0..1, 4 filters",
        "not prunable:",
        "  2: it is an output of the network",
        "layers that cannot go as a whole:",
        "  0: its input is (2, 6) and its output (2, 4)",
        "  2: its input is (2, 2) and its output (2, 3)",
    ]


# --- tied tensors ----------------------------------------------------------------------------------------------------


class TiedAutoencoder(nn.Module):
    """One weight under two names, read along both of its dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.mid, self.again = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.again.weight = self.mid.weight
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        return self.last(torch.relu(self.again(torch.relu(self.mid(torch.relu(self.first(x)))))))


def test_tied_weights_stay_tied():
    torch.manual_seed(0)
    model, inputs = TiedAutoencoder(), torch.randn(4, 3)
    graph = slimstart.trace(model, inputs)
    assert graph.num_units == 5  # what the shared weight reads it also writes, twice over
    assert "again.weight" not in graph.tensors  # a tensor has one name
    selection = graph.select(torch.tensor([True, False, True, False, True]))
    narrow = slimstart.compact(model, selection)
    assert narrow.again.weight is narrow.mid.weight
    assert torch.equal(narrow.mid.weight, model.mid.weight[[0, 2, 4]][:, [0, 2, 4]])
    assert narrow.again.bias is not narrow.mid.bias
    assert model.again.weight is model.mid.weight
    assert slimstart.verify(model, inputs).max_error < 1e-10


def test_tied_weights_stay_tied_in_a_training():
    torch.manual_seed(0)
    model, inputs = TiedAutoencoder(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = slimstart.Paper(resample_every=1)
    sparse = slimstart.SparseTraining(model, optimizer, inputs, slimstart.Channels(0.5), policy=policy)
    seen = set()
    for _ in range(6):
        assert model.again.weight is model.mid.weight
        dense, kept = sparse.dense_copy(), sparse.mask
        seen.add(tuple(kept.tolist()))
        assert dense.again.weight is dense.mid.weight
        torch.testing.assert_close(model(inputs), slimstart.compact(dense, sparse.graph.select(kept))(inputs))
        with torch.no_grad():
            model.mid.weight.add_(1.0)
        after, both = sparse.dense_copy().mid.weight, kept[:, None] & kept
        assert torch.equal(after[~both], dense.mid.weight[~both])
        assert torch.equal(after[both], dense.mid.weight[both] + 1.0)
        sparse.resample()
    assert len(seen) > 1
