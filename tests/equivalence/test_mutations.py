"""Mutations of a correct graph: `verify` must notice every one."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.graph.constraints import Constraints
from slimstart.graph.rules.norms import per_channel_layer
from slimstart.graph.rules.register import RULES
from slimstart.narrow import trace_verified
from slimstart.narrow.compact import masked
from slimstart.narrow.verify import prove
from tests import network_reference as reference
from tests.zoo import ZOO, shake

IMAGE = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A residual block, a depthwise convolution and a group norm, all of different widths."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.point = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 10, 1)
        self.gn, self.fc = nn.GroupNorm(5, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        x = F.relu(self.gn(self.point(self.deep(x))))
        return self.fc(x.mean([2, 3]))


def make():
    torch.manual_seed(0)
    return Net()


GRAPH = slimstart.trace(make(), IMAGE, "filter")
SLICES = [(name, number) for name, slices in GRAPH.tensors.items() for number in range(len(slices))]


def rolled(graph, axis):
    """The graph with one more axis: another one, shifted by one position."""
    return replace(graph, axes=(*graph.axes, graph.axes[axis].roll(1))), len(graph.axes)


def is_caught(graph, num_masks=1):
    with pytest.raises(
        slimstart.TraceError, match=r"the narrow network (fails|is not the masked dense one)|cannot be cut out"
    ):
        prove(make(), graph, IMAGE, num_masks)


def test_the_unbroken_graph_is_right():
    assert prove(make(), GRAPH, IMAGE).max_error < 1e-10
    # the mutations below mean something: every kind of entry is there
    assert {"stem.weight", "bn1.running_var", "deep.weight", "gn.bias", "fc.weight"} <= GRAPH.tensors.keys()
    assert GRAPH.reads.keys() == {"conv1"}
    assert GRAPH.writes.keys() == {"bn", "bn2"}
    assert {("deep", "groups"), ("gn", "num_groups")} <= GRAPH.attributes.keys()


# --- wrong tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number"), SLICES)
def test_indices_shifted_by_one(name, number):
    slices = list(GRAPH.tensors[name])
    graph, axis = rolled(GRAPH, slices[number].axis)
    slices[number] = replace(slices[number], axis=axis)
    is_caught(replace(graph, tensors={**graph.tensors, name: tuple(slices)}))


@pytest.mark.parametrize("examples", [1, 2])
def test_one_example_is_a_reason_for_doubt(examples):
    """PyTorch 2.13 on a CPU computes wrong gradients of batch norm for a batch of one, in some layouts."""
    (first,) = GRAPH.tensors["fc.weight"]
    graph, axis = rolled(GRAPH, first.axis)
    wrong = replace(graph, tensors={**graph.tensors, "fc.weight": (replace(first, axis=axis),)})
    with pytest.raises(slimstart.TraceError, match="are not removed") as told:
        prove(make(), wrong, IMAGE[:examples])
    assert ("give `example_inputs` with two" in str(told.value)) == (examples == 1)


@pytest.mark.parametrize(("name", "number"), SLICES)
def test_forgotten_slice(name, number):
    slices = list(GRAPH.tensors[name])
    del slices[number]
    is_caught(replace(GRAPH, tensors={**GRAPH.tensors, name: tuple(slices)}))


@pytest.mark.parametrize("name", ["conv1.weight", "conv2.weight", "point.weight"])
def test_wrong_dimension(name):
    out, into = GRAPH.tensors[name]
    swapped = (replace(out, dim=into.dim), replace(into, dim=out.dim))
    is_caught(replace(GRAPH, tensors={**GRAPH.tensors, name: swapped}))


def test_wrong_dimension_of_a_square_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
    graph = slimstart.trace(model, IMAGE, "filter")
    out, into = graph.tensors["2.weight"]
    swapped = (replace(out, dim=into.dim), replace(into, dim=out.dim))
    with pytest.raises(slimstart.TraceError, match="the narrow network"):
        prove(model, replace(graph, tensors={**graph.tensors, "2.weight": swapped}), IMAGE, num_masks=3)


@pytest.mark.parametrize("side", ["reads", "writes"])
@pytest.mark.parametrize("mistake", ["forgotten", "shifted", "wrong dimension"])
def test_wrong_port(side, mistake):
    for name, port in getattr(GRAPH, side).items():
        ports, graph = dict(getattr(GRAPH, side)), GRAPH
        if mistake == "forgotten":
            del ports[name]
        elif mistake == "shifted":
            graph, axis = rolled(GRAPH, port.live)
            ports[name] = replace(port, live=axis)
        else:
            ports[name] = replace(port, dim=port.dim + 1)
        is_caught(replace(graph, **{side: ports}), num_masks=8)  # some masks need no port


@pytest.mark.parametrize("attribute", [("deep", "groups"), ("gn", "num_groups")])
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_attribute(attribute, change):
    counter = GRAPH.attributes[attribute]
    wrong = replace(counter, dense=counter.dense + change)
    is_caught(replace(GRAPH, attributes={**GRAPH.attributes, attribute: wrong}))


def test_wrong_user_attribute():
    entry = ZOO["decoder_expand"]
    torch.manual_seed(0)
    model, tokens = entry.factory(), entry.example_inputs()
    graph = slimstart.trace(model, tokens, "filter")
    counter = graph.attributes["blocks.0.attention", "n_kv_heads"]
    wrong = {**graph.attributes, ("blocks.0.attention", "n_kv_heads"): replace(counter, dense=counter.dense + 1)}
    with pytest.raises(slimstart.TraceError, match="the narrow network fails"):
        prove(model, replace(graph, attributes=wrong), tokens)


def test_mixed_up_axes():
    """Two layers of the same width that trade their masks."""
    first, second = GRAPH.tensors["bn.weight"][0], GRAPH.tensors["bn2.weight"][0]
    assert first.axis != second.axis
    is_caught(replace(GRAPH, tensors={**GRAPH.tensors, "bn.weight": (second,), "bn2.weight": (first,)}))


# --- wrong rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet_se_conv", "multiplicative_residual", "decoder_expand"])
def test_product_that_is_not_tied(name, monkeypatch):
    monkeypatch.setattr(Constraints, "multiplied", lambda self, first, second: max(first, second))
    torch.manual_seed(0)
    with pytest.raises(slimstart.TraceError, match="the narrow network"):
        slimstart.verify(ZOO[name].factory(), ZOO[name].example_inputs(), "filter")


def test_addition_with_differing_masks(monkeypatch):
    monkeypatch.setattr(Constraints, "_added", lambda self, first, second: max(first, second))
    with pytest.raises(slimstart.TraceError, match="the narrow network fails"):
        slimstart.verify(make(), IMAGE, "filter")


def free_group_norm(tracer, call):
    """As if every channel were normalised by itself."""
    found = per_channel_layer(tracer, call["input"], call.result, 1, [call["weight"], call["bias"]])
    tracer.constraints.counts_channels(tracer.modules[-1], "num_channels", found[1])


def small_group_norm(tracer, call):
    """As if there were twice as many groups."""
    call.arguments["num_groups"] *= 2
    right_group_norm(tracer, call)


right_group_norm = RULES["group_norm"]


@pytest.mark.parametrize("wrong", [free_group_norm, small_group_norm])
@pytest.mark.parametrize("coupling", ["filter", "stream"])
def test_group_norm_with_wrong_groups(wrong, coupling, monkeypatch):
    monkeypatch.setitem(RULES, "group_norm", wrong)
    with pytest.raises(slimstart.TraceError, match="the narrow network"):
        slimstart.verify(make(), IMAGE, coupling)


def test_layer_norm_taken_for_a_layer_within_channels(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2))
    inputs = torch.randn(4, 3)
    assert slimstart.verify(model, inputs, "filter").graph.num_units == 0
    monkeypatch.setitem(RULES, "layer_norm", RULES["pointwise"])
    with pytest.raises(slimstart.TraceError, match="the narrow network"):
        slimstart.verify(model, inputs, "filter")


class SigmoidBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.last = nn.Conv2d(3, 5, 1), nn.Conv2d(5, 5, 1), nn.Conv2d(5, 3, 1)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + torch.sigmoid(self.conv(x))
        return self.fc(self.last(x).mean([2, 3]))


def test_errors_that_only_the_masked_network_shows(monkeypatch):
    """Without its tie a dropped filter adds one half to the stream, in the narrow network and in zeroed parameters.

    Both agree, so the proof is content, but a dropped channel is not zero where it is added. The network with hooks
    knows what dropping means.
    """

    def error():
        torch.manual_seed(0)
        model, image = shake(SigmoidBranch()).double().eval(), IMAGE.double()
        graph = slimstart.trace(model, image, "filter")
        assert prove(model, graph, image, num_masks=3).max_error < 1e-10
        mask = torch.ones(graph.num_units, dtype=torch.bool)
        mask[graph.filters["conv"][1]] = False
        dense = reference.masked(model, reference.liveness(model, image, graph.filters, mask))
        # Zero after the sigmoid, too.
        dense.conv.register_forward_hook(lambda _, args, y: y.index_fill(1, torch.tensor([1]), -1e9))
        narrow = slimstart.compact(model, graph.select(mask))
        with torch.no_grad():
            return float((dense(image) - narrow(image)).abs().max())

    assert error() < 1e-10
    monkeypatch.setattr(Constraints, "_tie_if_exact", lambda self, node: None)
    assert error() > 1e-3


# --- why parameters are randomised -----------------------------------------------------------------------------------


def test_a_fresh_network_hides_mistakes():
    model = make().double()
    nn.init.zeros_(model.bn2.weight)  # as residual networks are often initialised
    out, into = GRAPH.tensors["conv2.weight"]
    graph, axis = rolled(GRAPH, into.axis)
    graph = replace(graph, tensors={**graph.tensors, "conv2.weight": (out, replace(into, axis=axis))})
    mask = torch.ones(graph.num_units, dtype=torch.bool)
    mask[graph.filters["conv1"][[0, 2]]] = False
    selection = graph.select(mask)
    dense, narrow = masked(model, selection), slimstart.compact(model, selection)
    for training in (True, False):
        with torch.no_grad():
            difference = dense.train(training)(IMAGE.double()) - narrow.train(training)(IMAGE.double())
        assert float(difference.abs().max()) == 0.0  # although another feature is read than is there
    with pytest.raises(slimstart.TraceError, match="is not the masked dense one"):
        prove(model, graph, IMAGE)
    nn.init.ones_(model.bn2.weight)
    dense, narrow = masked(model, selection).eval(), slimstart.compact(model, selection).eval()
    with torch.no_grad():
        assert float((dense(IMAGE.double()) - narrow(IMAGE.double())).abs().max()) > 1e-3


# --- trace_verified --------------------------------------------------------------------------------------------------


def reversed_rows(monkeypatch, module):
    """The rule of batch normalisation, wrong for one module: its bias is taken in reverse order."""
    right = RULES["batch_norm"]

    def wrong(tracer, call):
        right(tracer, call)
        if tracer.modules[-1] == module:
            indices, presences = tracer.constraints.entries[f"{module}.bias", 0][-1]  # the one just noted
            tracer.constraints.entries[f"{module}.bias", 0] = [(indices, presences[::-1])]

    monkeypatch.setitem(RULES, "batch_norm", wrong)


@pytest.mark.parametrize(("module", "layer"), [("bn", "stem"), ("bn1", "conv1"), ("bn2", "conv2")])
def test_exactly_the_broken_group_is_not_prunable(module, layer, monkeypatch, caplog):
    model = make()
    right = trace_verified(model, IMAGE, "filter")
    assert [group.layers for group in right.groups] == [("stem",), ("conv1",), ("conv2",), ("point",)]
    reversed_rows(monkeypatch, module)
    with pytest.raises(slimstart.TraceError, match="is not the masked dense one"):
        slimstart.verify(model, IMAGE, "filter")
    with caplog.at_level(logging.WARNING, logger="slimstart"):
        graph = trace_verified(model, IMAGE, "filter")
    assert [group.name for group in graph.groups] == [n for n in ("stem", "conv1", "conv2", "point") if n != layer]
    assert graph.not_prunable.keys() == {layer, "fc"}
    assert graph.not_prunable[layer].startswith("its slices could not be proven right: the narrow network")
    assert f"{layer} is not prunable: its slices could not be proven right" in caplog.text
    assert len(caplog.records) == 1
    assert prove(model, graph, IMAGE).max_error < 1e-10


def test_everything_broken_is_not_prunable(monkeypatch):
    right = RULES["convolution"]

    def wrong(tracer, call):
        right(tracer, call)
        bias = (f"{tracer.modules[-1]}.bias", 0)
        indices, presences = tracer.constraints.entries[bias][-1]
        tracer.constraints.entries[bias] = [(indices, presences[::-1])]

    for name in ("conv2d", "convolution"):
        monkeypatch.setitem(RULES, name, wrong)
    model = make()
    graph = trace_verified(model, IMAGE, "filter")
    assert graph.num_units == 0
    assert {"stem", "conv1", "conv2", "point"} <= graph.not_prunable.keys()
    assert graph.groups == ()
    assert slimstart.flops(slimstart.compact(model, graph.select(torch.ones(0))), IMAGE) == slimstart.flops(
        model, IMAGE
    )


def test_a_reader_that_forgets_earlier_writers(monkeypatch):
    """The masked dense network has the same zeros in the reader, so only a look at what is left unread can tell."""
    added = Constraints._added

    def forgetful(self, first, second):
        node = added(self, first, second)
        if node not in (first, second) and self.live[node] is not None:
            self.live[node] = self.live[second]
        return node

    monkeypatch.setattr(Constraints, "_added", forgetful)
    with pytest.raises(slimstart.TraceError, match="leaves unread"):
        slimstart.verify(ZOO["resnet_basic"].factory(), ZOO["resnet_basic"].example_inputs(), "filter", num_masks=5)
