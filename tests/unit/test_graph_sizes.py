"""Sizes that a forward computes from attributes: the narrow network gets attributes for its sizes.

One network, with its attention written in many ways. In each, a mask drops whole heads, and the narrow network equals
the masked one; `slimstart.verify` compares them in both modes, with gradients.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.graph.reshapes import countings
from slimstart.graph.sizes import Attribute, Size
from tests.zoo import ZOO

COUPLINGS = ("filter", "stream")


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def attend_by_hand(q, k, v):
    return (((q @ k.transpose(-2, -1)) * 0.4).softmax(-1) @ v).transpose(1, 2)


class Attention(nn.Module):
    """`heads` of width `width`, keys and values in `groups` heads; the forward is given."""

    def __init__(self, forward, heads, groups, width):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width
        self.repeats = heads // groups
        self.dim = heads * width
        self.q = nn.Linear(12, heads * width)
        self.k = nn.Linear(12, groups * width)
        self.v = nn.Linear(12, groups * width)
        self.qkv = nn.Linear(12, (heads + 2 * groups) * width)
        self.proj = nn.Linear(heads * width, 12)
        self.written = forward

    def forward(self, x):
        return self.proj(self.written(self, x))


class Network(nn.Module):
    def __init__(self, forward, heads=4, groups=None, width=3):
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.attention = Attention(forward, heads, groups or heads, width)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = self.inp(x)
        return self.out(F.gelu(x + self.attention(x)))


def product(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, m.heads, m.width).permute(2, 0, 3, 1, 4)
    return attend(q, k, v).reshape(b, n, m.heads * m.width)


def product_by_hand(m, x):
    b, n, _ = x.shape
    q, k, v = (layer(x).view(b, n, m.heads, m.width).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return attend_by_hand(q, k, v).contiguous().view(b, n, m.heads * m.width)


def product_alone(m, x):
    """Nothing but the product names the number of heads, and the other way round."""
    b, n, _ = x.shape
    q, k, v = (layer(x).view(b, n, -1, m.width).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return attend_by_hand(q, k, v).reshape(b, n, m.width * m.heads)


def three_factors(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3 * m.heads * m.width).unflatten(-1, (3, m.heads, m.width)).unbind(2)
    return attend(*(t.transpose(1, 2) for t in (q, k, v))).reshape(b, n, m.heads * m.width)


def three_times(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3 * m.dim).chunk(3, -1)
    q, k, v = (t.view(b, n, m.heads, m.width).transpose(1, 2) for t in (q, k, v))
    return attend(q, k, v).reshape(b, n, m.dim)


def quotient(m, x):
    b, n, _ = x.shape
    q, k, v = (layer(x).view(b, n, m.heads, m.dim // m.heads).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return attend(q, k, v).reshape(b, n, m.dim)


def quotient_by_hand(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3, m.heads, m.dim // m.heads).permute(2, 0, 3, 1, 4)
    return attend_by_hand(q, k, v).reshape(b, n, m.dim)


def slices(m, x):
    b, n, _ = x.shape
    y, width = m.qkv(x), m.heads * m.width
    q, k, v = y[..., :width], y[..., width : 2 * width], y[..., 2 * width :]
    q, k, v = (t.view(b, n, m.heads, m.width).transpose(1, 2) for t in (q, k, v))
    return attend(q, k, v).reshape(b, n, width)


def in_the_batch(m, x):
    b, n, _ = x.shape
    q, k, v = (
        layer(x).view(b, n, m.heads, m.width).transpose(1, 2).reshape(b * m.heads, n, m.width)
        for layer in (m.q, m.k, m.v)
    )
    y = torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(-1), v)
    return y.view(b, m.heads, n, m.width).transpose(1, 2).reshape(b, n, m.heads * m.width)


def width_as_number(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, m.heads, m.width).permute(2, 0, 3, 1, 4)
    return attend_by_hand(q * m.width**-0.5, k, v).reshape(b, n, m.heads * m.width)


def grouped(m, x, qkv):
    b, n, _ = x.shape
    q, k, v = qkv.split([m.heads * m.width, m.groups * m.width, m.groups * m.width], dim=-1)
    q = q.view(b, n, m.heads, m.width).transpose(1, 2)
    k, v = (t.view(b, n, m.groups, m.width).transpose(1, 2).repeat_interleave(m.repeats, 1) for t in (k, v))
    return attend(q, k, v).reshape(b, n, m.heads * m.width)


def grouped_split(m, x):
    return grouped(m, x, m.qkv(x))


def grouped_sum(m, x):
    return grouped(m, x, m.qkv(x).view(*x.shape[:2], (m.heads + 2 * m.groups) * m.width))


def grouped_heads(m, x):
    b, n, _ = x.shape
    qkv = m.qkv(x).view(b, n, m.heads + 2 * m.groups, m.width).transpose(1, 2)
    q, k, v = qkv.split([m.heads, m.groups, m.groups], dim=1)
    k, v = (t.repeat_interleave(m.repeats, 1) for t in (k, v))
    return attend(q, k, v).reshape(b, n, m.heads * m.width)


def asserted(m, x):
    """Sizes are compared with attributes that nothing else reads, as a whole shape and one by one."""
    y = product_by_hand(m, x)
    if y.size() != (*x.shape[:2], m.dim):
        raise ValueError("an unexpected shape")
    assert m.q(x).shape[-1] == m.heads * m.width
    assert m.dim == y.shape[2]
    return y


FOLLOWED = [
    (product, {}, {"heads"}),
    (product, {"heads": 2, "width": 7}, {"heads"}),
    (product_by_hand, {"heads": 6, "width": 2}, {"heads"}),
    (product_alone, {"heads": 6, "width": 2}, {"heads"}),
    (product_alone, {"heads": 3, "width": 3}, {"heads"}),
    (three_factors, {}, {"heads"}),
    (three_times, {}, {"heads", "dim"}),
    (quotient, {}, {"heads", "dim"}),
    (quotient_by_hand, {"heads": 6, "width": 2}, {"heads", "dim"}),
    (slices, {}, {"heads"}),
    (in_the_batch, {}, {"heads"}),
    (width_as_number, {}, {"heads"}),
    (grouped_split, {"groups": 2}, {"heads", "groups"}),
    (grouped_split, {}, {"heads", "groups"}),
    (grouped_sum, {"groups": 2}, {"heads", "groups"}),
    (grouped_heads, {"groups": 2}, {"heads", "groups"}),
    (asserted, {}, {"heads", "dim"}),
]


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("forward", "options", "changed"), FOLLOWED)
def test_attention_heads_are_dropped_as_a_whole(forward, options, changed, coupling):
    torch.manual_seed(0)
    model, inputs = Network(forward, **options), torch.randn(2, 5, 5)
    report = slimstart.verify(model, inputs, coupling, num_masks=2)
    assert report.max_error < 1e-10, report.worst
    graph, dense = report.graph, model.attention
    units = graph.filters["attention.qkv" if "attention.qkv" in graph.filters else "attention.q"]
    assert int(units.min()) >= 0
    assert len(units.unique()) == dense.groups
    assert {name for module, name in graph.attributes if module == "attention"} == changed
    # one head of keys less, also in the attribute that counts heads
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    mask[units[0]] = False
    narrow = slimstart.compact(model, graph.select(mask)).attention
    assert narrow.groups == dense.groups - ("groups" in changed)
    assert narrow.heads == dense.heads - dense.repeats
    assert narrow.width == dense.width
    assert narrow.dim == (narrow.heads * narrow.width if "dim" in changed else dense.dim)
    assert narrow.proj.in_features == narrow.heads * narrow.width


def test_a_configuration_of_several_layers_changes_in_the_layer_that_needs_it():
    torch.manual_seed(0)
    entry = ZOO["configured_heads"]
    model, inputs = entry.factory(), entry.example_inputs()
    graph = slimstart.trace(model, inputs)
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    mask[graph.filters["attention.0.qkv"][0]] = False
    narrow = slimstart.compact(model, graph.select(mask))
    assert [layer.config.heads for layer in narrow.attention] == [2, 4]
    assert [layer.config.heads for layer in model.attention] == [4, 4]
    trained = entry.factory()
    optimizer = torch.optim.SGD(trained.parameters(), 0.01)
    sparse = slimstart.SparseTraining(trained, optimizer, inputs, budget=slimstart.Flops(0.4), total_steps=4)
    assert trained.attention[0].config.heads < 4
    fresh = slimstart.shrink_to(entry.factory(), sparse.finish().state_dict(), inputs)
    torch.testing.assert_close(fresh(inputs), trained(inputs))
    assert [layer.config.heads for layer in fresh.attention] == [layer.config.heads for layer in trained.attention]


# --- what cannot follow ----------------------------------------------------------------------------------------------


def heads_as_number(m, x):
    return product(m, x) / m.heads


def heads_as_integer(m, x):
    return product(m, x) / int(m.heads)


def heads_rounded(m, x):
    return product(m, x) / round(m.heads)


def heads_compared(m, x):
    return product(m, x) if m.heads == 4 else x


def literal(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, -1, m.width).permute(2, 0, 3, 1, 4)
    return attend(q, k, v).reshape(b, n, 4 * m.width)


def rounded(m, x):
    b, n, _ = x.shape
    q, k, v = (layer(x).view(b, n, m.heads, (m.dim + 1) // m.heads).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return attend(q, k, v).flatten(2)


def of_a_constant(m, x):
    """What has no channels cannot follow the attribute, and is not even near the channels."""
    bias = torch.linspace(0, 1, m.dim, device=x.device, dtype=x.dtype).softmax(0).view(m.heads, m.width)
    return product(m, x) + bias.sum()


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    "forward", [heads_as_number, heads_as_integer, heads_rounded, heads_compared, literal, rounded, of_a_constant]
)
def test_layers_with_fixed_sizes_are_not_pruned_and_named(forward, coupling):
    torch.manual_seed(0)
    model, inputs = Network(forward), torch.randn(2, 5, 5)
    report = slimstart.verify(model, inputs, coupling)
    assert report.max_error < 1e-10
    assert not any(module == "attention" for module, _ in report.graph.attributes)
    reason = report.graph.not_prunable["attention.qkv" if "attention.qkv" in report.graph.filters else "attention.q"]
    assert reason.startswith("it is reshaped to fixed sizes in attention (write -1 for the size that shrinks, or take")


class SameAttributeTwice(nn.Module):
    """`size` says in two places how many channels there are."""

    def __init__(self):
        super().__init__()
        self.size = 6
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)
        self.out, self.too = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        first, second = (layer(x).relu().view(x.shape[0], 1, self.size).amax(1) for layer in (self.first, self.second))
        return self.out(first) + self.too(second)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("keep", [[], ["first"], ["second"]])
def test_an_attribute_has_one_value(keep, coupling):
    """What it counts goes together, and stays if one of the places does."""
    torch.manual_seed(0)
    report = slimstart.verify(SameAttributeTwice(), torch.randn(3, 4), coupling, keep)
    assert report.max_error < 1e-10
    units = [report.graph.filters[layer].tolist() for layer in ("first", "second")]
    assert units == [[-1] * 6] * 2 if keep else units[0] == units[1] == list(range(6))
    assert (("", "size") in report.graph.attributes) == (not keep)


class OnlyLookedAt(nn.Module):
    """One layer is used by its weight, one runs, and of one only the shape is read."""

    def __init__(self):
        super().__init__()
        self.by_weight, self.runs, self.looked_at = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        assert self.looked_at.weight.shape[1] == 6
        return self.runs(F.linear(x, self.by_weight.weight).relu())


def test_a_layer_is_reached_if_its_weight_is_used():
    not_prunable = slimstart.trace(OnlyLookedAt(), torch.randn(3, 4)).not_prunable
    unreached = {name for name, reason in not_prunable.items() if reason == "not reached with `example_inputs`"}
    assert unreached == {"looked_at"}


# --- what an attribute could count -----------------------------------------------------------------------------------


def test_countings_of_a_product_and_a_sum():
    a, b = (Size(value, Attribute("m", name, value), lambda _: None) for name, value in (("a", 2), ("b", 3)))
    rows = [[node] for node in range(10, 16)]
    found = [(attribute.name, counted) for attribute, counted in countings((a * b).expression, rows)]
    assert ("a", [[10, 11, 12], [13, 14, 15]]) in found
    assert ("a", [[10, 12, 14], [11, 13, 15]]) in found
    assert ("b", [[10, 11], [12, 13], [14, 15]]) in found
    assert ("b", [[10, 13], [11, 14], [12, 15]]) in found
    assert len(found) == 4
    found = [(attribute.name, counted) for attribute, counted in countings((b + a + 1).expression, rows)]
    assert found == [("b", [[10], [11], [12]]), ("a", [[13], [14]])]
    assert list(countings((a * b).expression, rows[:5])) == []
    assert list(countings((a * b - 1).expression, rows[:5])) == []
    assert list(countings(6, rows)) == list(countings(None, rows)) == []
