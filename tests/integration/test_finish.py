"""Finished networks: plain modules that can be copied, exported, saved and loaded."""

import copy
import io
import json
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import Channels, CheckpointError, Flops, SparseTraining
from slimstart.narrow.stream_ports import StreamPort
from tests.saved_networks import sealed, structure_of, with_structure
from tests.zoo import ZOO, call, shake, tensors

NETWORKS = ["vgg_bn", "resnet_basic", "mobilenet_v1"]


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(n: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8)) for _ in range(n)]


def trained(name: str, num_steps: int = 4) -> SparseTraining:
    torch.manual_seed(0)
    model = shake(ZOO[name].factory())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = SparseTraining(model, optimizer, torch.zeros(1, 3, 16, 16), Flops(0.4), policy="paper")
    for batch in batches(num_steps):
        sparse.step(loss_fn, *batch)
    return sparse


def settled(name: str) -> SparseTraining:
    """A training at the end of its search; for one name always in the same state."""
    sparse = trained(name)
    sparse.settle(batches(2), loss_fn, num_samples=3)
    sparse.step(loss_fn, *batches(1)[0])
    return sparse


@cache
def finished(name: str, plain: bool = False) -> nn.Module:
    """A finished network in evaluation mode, which tests must not change."""
    return settled(name).finish(batches(3), loss_fn, plain=plain).eval()


IMAGES = batches(1, seed=5)[0][0]


def outputs(net: nn.Module, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return net(images)


# --------------------------------------------------------------------------- the module


@pytest.mark.parametrize("name", NETWORKS)
def test_a_finished_network_is_a_plain_module_of_its_class(name: str) -> None:
    dense, small = ZOO[name].factory(), finished(name)
    assert type(small) is type(dense)
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in dense.named_parameters()]
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in dense.parameters())
    assert slimstart.flops(small, IMAGES) <= 0.4 * slimstart.flops(dense, IMAGES)
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in small.parameters())
    for module in small.modules():  # what a module says of itself is true
        if isinstance(module, nn.Conv2d):
            shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
            assert module.weight.shape == shape
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.shape == module.running_var.shape == (module.num_features,)
        elif isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_hooks_are_left(name: str) -> None:
    sparse = trained(name, 1)
    for module in (finished(name), finished(name, plain=True), sparse.snapshot(), sparse.dense_copy()):
        assert all(p._backward_hooks is None and not p._post_accumulate_grad_hooks for p in module.parameters())
        for part in module.modules():
            for attribute, value in vars(part).items():
                if attribute.endswith("hooks"):
                    assert not value, attribute


@pytest.mark.parametrize("name", ["vgg_bn", "resnet_basic"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_finished_network_is_trained_by_a_plain_loop(name: str, plain: bool, differences: Any) -> None:
    """The same object with the same optimizer, whose state fits: as a copy of both that has never known a training."""
    sparse = settled(name)
    model, optimizer, parameters = sparse.model, sparse.optimizer, list(sparse.model.parameters())
    assert sparse.finish(plain=plain) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(s["momentum_buffer"].shape == p.shape for p, s in other.state.items())
    steps = sparse.num_steps
    for batch in batches(3):
        for net, its in ((model, optimizer), (twin, other)):
            loss = loss_fn(net, *batch)
            its.zero_grad()
            loss.backward()
            its.step()
    assert differences(dict(model.state_dict()), dict(twin.state_dict())) == []
    assert differences(optimizer.state_dict()["state"], other.state_dict()["state"]) == []
    assert sparse.num_steps == steps
    assert sparse.finish() is model, "once more changes nothing"
    assert differences(dict(model.state_dict()), dict(twin.state_dict())) == []
    with pytest.raises(RuntimeError, match="this training is finished"):
        sparse.step(loss_fn, *batches(1)[0])


def test_a_snapshot_shares_no_memory() -> None:
    """Nothing is shared with the training: it can continue, and the snapshot does not change."""
    sparse = trained("vgg_bn")
    small = sparse.snapshot(batches(2), loss_fn).eval()
    before, state = outputs(small), copy.deepcopy(small.state_dict())
    for batch in batches(2):
        sparse.step(loss_fn, *batch)
    assert torch.equal(outputs(small), before)
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items())
    whole = sparse.state_dict()["model"]
    loss_fn(small.train(), *batches(1)[0]).backward()
    torch.optim.SGD(small.parameters(), lr=1.0).step()
    small.load_state_dict(state)
    assert all(torch.equal(whole[name], tensor) for name, tensor in sparse.state_dict()["model"].items())


def test_best_of_several_by_loss() -> None:
    """The loss of a candidate is that of its own network on all batches: the least one wins."""
    sparse, twin = trained("vgg_bn"), trained("vgg_bn")
    data = batches(3, seed=2)
    candidates, dense = twin.learner.candidates(6), twin.dense_copy()
    losses = []
    for mask in candidates:
        net = slimstart.compact(dense, twin.graph.select(mask)).train()
        with torch.no_grad():
            losses.append(sum(float(loss_fn(net, *batch)) for batch in data))
    best, worst = min(losses), max(losses)
    assert best < worst
    expected = slimstart.compact(dense, twin.graph.select(candidates[losses.index(best)]))
    small = sparse.finish(iter(data), loss_fn, num_samples=6)
    for (name, a), b in zip(small.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_no_more_batches_are_read_than_needed() -> None:
    taken = []

    def endless() -> Any:
        while True:
            taken.append(None)
            yield batches(1)[0]

    trained("vgg_bn", 1).finish(endless(), loss_fn, num_samples=1, max_batches=3)
    assert len(taken) == 3


def test_an_interrupted_measurement_leaves_the_statistics_of_training() -> None:
    sparse, calls = settled("vgg_bn"), []

    def interrupted(net: nn.Module, *batch: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss_fn(net, *batch)

    before = {name: buffer.clone() for name, buffer in sparse.model.named_buffers()}
    with pytest.raises(KeyboardInterrupt):
        sparse.finish(batches(3), interrupted)
    assert all(torch.equal(buffer, before[name]) for name, buffer in sparse.model.named_buffers())
    assert sparse.finish() is sparse.model


@pytest.mark.parametrize("name", ["vgg_bn", "resnet_basic"])
@pytest.mark.parametrize("plain", [False, True])
def test_statistics_are_plain_averages_over_the_batches(name: str, plain: bool) -> None:
    data = batches(4, seed=3)
    small = settled(name).finish(data, loss_fn, plain=plain)
    assert small.training
    seen: dict[str, list[Tensor]] = {}

    def see(layer_name: str, layer: nn.Module, x: Tensor) -> None:
        read = getattr(layer, "stream_read", None)
        seen.setdefault(layer_name, []).append(x if read is None else x[:, read])

    twin = copy.deepcopy(small).train()
    for layer_name, layer in twin.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda layer, args, layer_name=layer_name: see(layer_name, layer, args[0]))
    for images, _ in data:
        outputs(twin, images)
    layers = {n: m for n, m in small.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert layers.keys() == seen.keys()
    for layer_name, layer in layers.items():
        mean = torch.stack([x.mean((0, 2, 3)) for x in seen[layer_name]]).mean(0)
        var = torch.stack([x.var((0, 2, 3)) for x in seen[layer_name]]).mean(0)
        assert torch.allclose(layer.running_mean, mean, atol=1e-5), layer_name
        assert torch.allclose(layer.running_var, var, rtol=1e-4, atol=1e-5), layer_name
        assert int(layer.num_batches_tracked) == 4
        assert layer.momentum == 0.1


def test_without_recalibration_statistics_are_those_of_training() -> None:
    sparse = trained("vgg_bn")
    small = sparse.snapshot()
    mask = sparse.learner.best_guess()
    selection = sparse.graph.select(mask)
    dense = sparse.state_dict()["model"]
    for name, buffer in small.named_buffers():
        assert torch.equal(buffer, selection.gather(name, dense[name])), name


# --------------------------------------------------------------------------- copies


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("plain", [False, True])
def test_copies_and_pickles(name: str, plain: bool, differences: Any) -> None:
    small = finished(name, plain)
    expected = outputs(small)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    others = [copy.deepcopy(small), pickle.loads(pickle.dumps(small)), torch.load(file, weights_only=False)]
    for other in others:
        assert type(other) is type(small)
        assert [type(m) for m in other.modules()] == [type(m) for m in small.modules()]
        assert torch.equal(outputs(other), expected)
        assert differences(dict(small.state_dict()), dict(other.state_dict())) == []
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    assert torch.equal(outputs(small), expected)


def test_ports_are_what_the_copies_above_contain() -> None:
    """On a residual stream, filter by filter, layers do read and write parts of it."""
    ports = [m for m in finished("resnet_basic").modules() if isinstance(m, StreamPort)]
    assert any(m.stream_read is not None for m in ports)
    assert any(m.stream_write is not None for m in ports)
    assert all(isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear) for m in ports)
    assert not any(isinstance(m, StreamPort) for name in ("vgg_bn", "mobilenet_v1") for m in finished(name).modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_plain_layers_compute_the_same(name: str) -> None:
    small, plain = finished(name), finished(name, plain=True)
    assert {type(m) for m in plain.modules()} <= {type(m) for m in ZOO[name].factory().modules()}
    assert type(plain) is type(small)
    assert torch.allclose(outputs(small), outputs(plain), atol=1e-5)
    assert float(outputs(small).std()) > 0.01


def test_a_finished_network_trains_on() -> None:
    net = copy.deepcopy(finished("resnet_basic")).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = loss_fn(net, *batches(1)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


# --------------------------------------------------------------------------- export


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_export(name: str) -> None:
    small = finished(name)
    program = torch.export.export(small, (IMAGES,))
    assert torch.allclose(outputs(program.module()), outputs(small), atol=1e-5)


@pytest.mark.slow  # the command line exports a network to ONNX, too
@pytest.mark.parametrize("name", NETWORKS)
def test_onnx(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    small, path = finished(name), tmp_path / "small.onnx"
    torch.onnx.export(small, (IMAGES,), path, dynamo=True, verbose=False)
    runtime = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = runtime.run(None, {runtime.get_inputs()[0].name: IMAGES.numpy()})
    assert torch.allclose(torch.from_numpy(found), outputs(small), atol=1e-4)


# --------------------------------------------------------------------------- save and load


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("plain", [False, True])
def test_save_and_load(name: str, plain: bool, tmp_path: Path, differences: Any) -> None:
    small = finished(name, plain)
    slimstart.save(small, tmp_path / "small")
    assert os.listdir(tmp_path) == ["small.safetensors"]
    again = slimstart.load(tmp_path / "small", ZOO[name].factory).eval()
    assert type(again) is type(small)
    assert [type(m) for m in again.modules()] == [type(m) for m in small.modules()]
    assert differences(dict(small.state_dict()), dict(again.state_dict())) == []
    assert torch.equal(outputs(again), outputs(small))
    for a, b in zip(again.modules(), small.modules(), strict=True):
        assert {k: v for k, v in vars(a).items() if type(v) is int} == {
            k: v for k, v in vars(b).items() if type(v) is int
        }

    slimstart.save(again, str(tmp_path / "again.v2.safetensors"))  # what was loaded can be saved
    third = slimstart.load(tmp_path / "again.v2", ZOO[name].factory).eval()
    assert torch.equal(outputs(third), outputs(small))
    optimizer = torch.optim.SGD(third.parameters(), lr=0.1)
    loss_fn(third.train(), *batches(1)[0]).backward()
    optimizer.step()
    assert not torch.equal(outputs(third.eval()), outputs(small))


def narrow_copy(name: str) -> nn.Module:
    """A narrow network of the zoo under a random mask, without training."""
    torch.manual_seed(0)
    model = shake(ZOO[name].factory())
    graph = slimstart.trace(model, ZOO[name].example_inputs())
    return slimstart.compact(model, graph.select(torch.rand(graph.num_units) < 0.5)).eval()


def survives_files_and_copies(name: str, folder: Path) -> None:
    small, inputs = narrow_copy(name), ZOO[name].example_inputs()
    slimstart.save(small, folder / name)
    torch.manual_seed(1)
    loaded = slimstart.load(folder / name, ZOO[name].factory).eval()
    for other in (loaded, copy.deepcopy(small)):
        torch.manual_seed(2)
        expected = tensors(call(small, inputs))
        torch.manual_seed(2)
        found = tensors(call(other, inputs))
        assert len(found) == len(expected) > 0
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
        assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize(
    "name", ["densenet", "resnext", "tied_autoencoder", "nanogpt", "decoder_expand", "unet_transposed"]
)
def test_other_kinds_of_networks_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    survives_files_and_copies(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_every_network_of_the_zoo_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    survives_files_and_copies(name, tmp_path)


def test_saving_a_foreign_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`finish`"):
        slimstart.save(ZOO["vgg_bn"].factory(), tmp_path / "dense")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    slimstart.save(finished("resnet_basic"), path)
    assert isinstance(slimstart.load(path, ZOO["resnet_basic"].factory), nn.Module)
    return path


def test_a_missing_file(saved: Path) -> None:
    saved.unlink()
    with pytest.raises(CheckpointError, match=f"'{saved}' cannot be read"):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file(saved: Path, part: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match=f"'{saved}' cannot be read"):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


def test_a_changed_weight(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match="has been modified"):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_file_of_others(saved: Path, metadata: Any) -> None:
    """Also the tensors of a network whose structure is in a file of its own, as it was before the first release."""
    saved.write_bytes(safetensors.torch.save(safetensors.torch.load(saved.read_bytes()), metadata))
    with pytest.raises(CheckpointError, match=r"structure in a \.json file was written before the first release"):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


def a_port(structure: dict[str, Any], side: str) -> dict[str, Any]:
    return next(port for port in structure["ports"].values() if port[side] is not None)


def _format(structure: Any) -> None:
    structure["format"] = "slimstart.network/99"


def _digest(structure: Any) -> None:
    structure["sha256"] = "0" * 64


def _no_digest(structure: Any) -> None:
    del structure["sha256"]


def _no_attributes(structure: Any) -> None:
    del structure["attributes"]


def _unknown_module(structure: Any) -> None:
    structure["attributes"][0][0] = "conv99"


def _attribute_is_no_number(structure: Any) -> None:
    structure["attributes"][0][2] = "many"


def _attribute_is_wrong(structure: Any) -> None:
    structure["attributes"][0][2] += 1


def _no_ports(structure: Any) -> None:
    del structure["ports"]


def _a_port_less(structure: Any) -> None:
    structure["ports"].popitem()


def _unknown_port(structure: Any) -> None:
    structure["ports"]["conv99"] = a_port(structure, "write")


def _port_beyond_the_stream(structure: Any) -> None:
    port = a_port(structure, "write")
    port["write"][-1] = port["width"]


def _port_is_short(structure: Any) -> None:
    a_port(structure, "read")["read"].pop()


def _dims_are_short(structure: Any) -> None:
    a_port(structure, "write")["dims"] = []


def _width_is_wrong(structure: Any) -> None:
    a_port(structure, "write")["width"] -= 1


@pytest.mark.parametrize(
    "edit",
    [
        _format, _digest, _no_digest, _no_attributes, _unknown_module, _attribute_is_no_number, _attribute_is_wrong,
        _no_ports, _a_port_less, _unknown_port, _port_beyond_the_stream, _port_is_short, _dims_are_short,
        _width_is_wrong,
    ],
)  # fmt: skip
def test_an_edited_structure(saved: Path, edit: Callable[[Any], None]) -> None:
    structure = structure_of(saved.read_bytes())
    edit(structure)
    saved.write_bytes(with_structure(saved.read_bytes(), json.dumps(structure)))
    with pytest.raises(CheckpointError):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


def _attribute_is_a_method(structure: Any) -> None:
    structure["attributes"].append(["", "forward", 7])


def _attribute_is_internal(structure: Any) -> None:
    structure["attributes"].append(["", "_modules", 7])


def _attribute_is_a_flag(structure: Any) -> None:
    structure["attributes"].append(["", "training", 0])


def _attribute_is_large(structure: Any) -> None:
    structure["attributes"][0][2] = 1 << 40


def _width_is_large(structure: Any) -> None:
    a_port(structure, "write")["width"] = 1 << 40


def _port_is_negative(structure: Any) -> None:
    a_port(structure, "read")["read"][0] = -1


def _port_of_the_network(structure: Any) -> None:
    structure["ports"][""] = a_port(structure, "write")


def _many_results(structure: Any) -> None:
    structure["removed"] = {"bn1": 1 << 40}


@pytest.mark.parametrize(
    "edit",
    [
        _attribute_is_a_method, _attribute_is_internal, _attribute_is_a_flag, _attribute_is_large, _width_is_large,
        _port_is_negative, _port_of_the_network, _many_results, _port_beyond_the_stream,
    ],
)  # fmt: skip
def test_an_edited_structure_with_the_right_digest(saved: Path, edit: Callable[[Any], None]) -> None:
    """The digest is no secret: a file may change numbers of channels, and nothing else about a module."""
    structure = structure_of(saved.read_bytes())
    edit(structure)
    saved.write_bytes(sealed(with_structure(saved.read_bytes(), json.dumps(structure))))
    with pytest.raises(CheckpointError, match=f"'{saved}' does not fit what `model_factory` builds"):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000])
def test_a_file_without_a_structure(saved: Path, text: str) -> None:
    saved.write_bytes(with_structure(saved.read_bytes(), text))
    with pytest.raises(CheckpointError, match=saved.name):
        slimstart.load(saved, ZOO["resnet_basic"].factory)


@pytest.mark.parametrize(
    "factory",
    [
        ZOO["vgg_bn"].factory,
        lambda: nn.Linear(3, 3),
        lambda: ZOO["resnet_basic"].factory(num_classes=12),
        lambda: None,
    ],
    ids=["another class", "a layer", "another number of classes", "no module"],
)
def test_the_wrong_factory(saved: Path, factory: Any) -> None:
    with pytest.raises(CheckpointError):
        slimstart.load(saved, factory)


# --------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.zeros(2, 3, 8, 8), 2 * (4 * 4) * 8 * (3 * 9)),
        (nn.Conv2d(8, 16, 3, groups=4), torch.zeros(1, 8, 6, 6), (4 * 4) * 16 * (2 * 9)),
        (nn.Conv1d(4, 6, 5), torch.zeros(1, 4, 12), 8 * 6 * (4 * 5)),
        (nn.Linear(12, 7), torch.zeros(5, 12), 5 * 7 * 12),
        (nn.Linear(12, 7), (torch.zeros(2, 3, 12),), 6 * 7 * 12),
        (nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), torch.zeros(3, 4), 3 * 30),
    ],
    ids=["conv", "grouped", "conv1d", "linear", "tuple", "uncounted"],
)  # fmt: skip
def test_flops_by_arithmetic(model: nn.Module, inputs: Any, expected: int) -> None:
    assert slimstart.flops(model, inputs) == expected


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_flops_of_recurrent_layers(packed: bool, fused: bool) -> None:
    x = torch.randn(5, 2, 6)
    tokens = 5 + 3 if packed else 5 * 2
    inputs = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    with torch.backends.mkldnn.flags(enabled=fused):
        for kind, gates in ((nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)):
            layer = kind(6, 8, num_layers=2, bidirectional=True)
            expected = tokens * gates * 8 * 2 * ((6 + 8) + (16 + 8))
            assert slimstart.flops(layer, (inputs,)) == expected, kind
            if not packed:
                ahead = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), layer)
                graph = slimstart.trace(ahead, x)
                everything = torch.ones(graph.num_units, dtype=torch.bool)
                assert Flops(1.0).bind(graph.costs).cost(everything) == expected + 2 * tokens * 6 * 6


def test_flops_of_attention() -> None:
    query, key, value = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 4)
    expected = 2 * 3 * (5 * 7 * 4 + 5 * 7 * 4)  # for every head: scores, then their sums over values
    assert slimstart.flops(Attention(), {"query": query, "key": key, "value": value}) == expected


def test_flops_with_a_class_token() -> None:
    """A view of a parameter is given to a module, and still says that it requires gradients."""
    model = ZOO["class_token"].factory()
    model.head.weight.requires_grad_(False)
    layer = 12 * 12 + 2 * 7 * 12 * 12 + 2 * 7 * 12 + 12 * 12  # queries, keys and values, two products, projection
    assert slimstart.flops(model, torch.randn(2, 6, 5)) == 2 * (6 * 5 * 12 + 2 * layer + 12 * 3)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


def test_flops_of_pytorchs_attention_layer() -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.zeros(2, 6, 16)
    projections = 4 * (2 * 6) * 16 * 16
    assert slimstart.flops(layer, (x, x, x)) == projections + 2 * 4 * (6 * 6 * 4) * 2


def test_counting_does_not_change_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3)).train()
    model[2].eval()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    slimstart.flops(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_the_cost_table_agrees_with_the_count() -> None:
    """What the budget calls FLOPs is what the finished network is counted to do."""
    model = ZOO["resnet_basic"].factory()
    example = torch.zeros(1, 3, 16, 16)
    dense = copy.deepcopy(model)
    sparse = SparseTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), example, Channels(0.5), policy="paper")
    assert slimstart.flops(model, example) == Flops(1.0).bind(sparse.graph.costs).cost(sparse.mask)
    for mask in torch.rand(3, sparse.graph.num_units) < 0.5:
        narrow = slimstart.compact(dense, sparse.graph.select(mask))
        assert slimstart.flops(narrow, example) == Flops(1.0).bind(sparse.graph.costs).cost(mask)


class PostNorm(nn.Module):
    """Its last layer writes some channels of a stream that keeps its width."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.back(self.wide(x).relu()))


def test_a_snapshot_with_ports_is_saved_and_loaded(tmp_path: Path) -> None:
    model = PostNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = slimstart.SparseTraining(model, optimizer, torch.randn(2, 16), slimstart.Flops(0.5), total_steps=50)
    small = sparse.snapshot()
    assert any(isinstance(module, StreamPort) for module in small.modules())
    slimstart.save(small, tmp_path / "small")
    x = torch.randn(4, 16)
    assert torch.equal(slimstart.load(tmp_path / "small", PostNorm)(x), model(x))


def test_equal_networks_have_equal_files(tmp_path):
    model, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.zeros(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network, contents = SparseTraining(model, optimizer, images, Flops(0.5)).finish(), set()
    for number in range(20):
        slimstart.save(network, tmp_path / f"network{number}.safetensors")
        contents.add((tmp_path / f"network{number}.safetensors").read_bytes())
    assert len(contents) == 1
