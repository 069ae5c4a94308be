"""Trainings without branches whose residual sum is in the forward of the model, and the networks that they return."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slimstart import CheckpointError, Flops, SparseTraining, flops, load, save, shrink_to
from slimstart.io.export import to_onnx
from slimstart.io.python_file import to_python
from slimstart.narrow.removed_layers import Zero
from tests.layer_policy import Rounds
from tests.zoo import ZOO

BUDGETS = {"listed_vit": 0.25, "listed_mixer": 0.4, "summed_conv_net": 0.25, "summed_gpt": 0.25}
BATCH = 8


def make(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name].factory()


def batch(name, step):
    generator = torch.Generator().manual_seed(step)
    if name == "summed_gpt":
        tokens = torch.randint(30, (BATCH, 10), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(BATCH, 3, 16, 16, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def training(name, seed=0, **settings):
    model = make(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-3)
    settings = {"total_steps": 20} | settings
    return SparseTraining(model, optimizer, batch(name, 0)[0][:2], Flops(BUDGETS[name]), **settings), optimizer


def run(name, sparse, optimizer, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(step)  # for dropout
        inputs, labels = batch(name, step)
        loss = F.cross_entropy(sparse.model.train()(inputs).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def zeros(model):
    return [path for path, module in model.named_modules() if isinstance(module, Zero)]


@pytest.mark.parametrize("name", BUDGETS)
def test_a_training_by_default_loses_branches_and_remains_within_its_budget(name, tmp_path):
    sparse, optimizer = training(name)
    removed = [layer.modules[-1] for layer in sparse.graph.removed]
    assert zeros(sparse.model) == sorted(removed, key=zeros(sparse.model).index)
    assert 0 < len(removed) < len(sparse.dense_graph.layers)
    run(name, sparse, optimizer, 20)
    assert sparse.settled
    small, inputs = sparse.finish().eval(), batch(name, 99)[0]
    assert len(zeros(small)) == len(removed)
    assert flops(small, inputs) <= BUDGETS[name] * flops(make(name), inputs)
    expected = small(inputs)
    assert torch.equal(copy.deepcopy(small)(inputs), expected)
    save(small, tmp_path / "small")
    again = load(tmp_path / "small", partial(make, name, 1)).eval()
    assert torch.equal(again(inputs), expected)
    save(again, tmp_path / "again")  # what was loaded can be saved
    assert torch.equal(load(tmp_path / "again", partial(make, name, 2)).eval()(inputs), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (2, 0, 1)])
@pytest.mark.parametrize("name", ["listed_mixer", "summed_conv_net"])
def test_state_dicts_of_a_training_in_any_order(name, order):
    sparse, optimizer = training(name)
    run(name, sparse, optimizer, 3)
    states = list(map(copy.deepcopy, (sparse.model.state_dict(), optimizer.state_dict(), sparse.state_dict())))
    other, second = training(name, seed=1)
    for number in order:
        (other.model, second, other)[number].load_state_dict(states[number])
    inputs = batch(name, 99)[0]
    assert torch.equal(other.model.eval()(inputs), sparse.model.eval()(inputs))
    run(name, other, second, 1, start=3)


@pytest.mark.parametrize("name", ["listed_vit", "summed_gpt"])
def test_a_state_dict_of_a_training_is_shrunk_to(name):
    sparse, optimizer = training(name)
    run(name, sparse, optimizer, 1)
    inputs, small = batch(name, 99)[0], shrink_to(make(name, 1), sparse.model.state_dict())
    assert torch.equal(small.eval()(inputs), sparse.model.eval()(inputs))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_finished_network_is_shrunk_to_by_the_names_of_its_tensors(name):
    sparse, optimizer = training(name)
    run(name, sparse, optimizer, 20)
    small, inputs = sparse.finish(plain=True).eval(), batch(name, 99)[0]
    again = shrink_to(make(name, 1), small.state_dict(), inputs[:2]).eval()
    assert zeros(again) == zeros(small)
    assert torch.equal(again(inputs), small(inputs))


@pytest.mark.parametrize("policy", ["default", "rounds"])
@pytest.mark.parametrize("name", ["summed_conv_net", "summed_gpt"])
def test_a_training_resumes_bit_for_bit(name, policy, tmp_path, differences):
    settings = {} if policy == "default" else {"policy": Rounds((), (0, 2), (2,), (2,), window=3)}
    sparse, optimizer = training(name, **settings)
    run(name, sparse, optimizer, 4)
    assert zeros(sparse.model)
    sparse.save(tmp_path / "state")
    run(name, sparse, optimizer, 12, start=4)
    again, second = training(name, seed=1, **settings)
    again.load(tmp_path / "state")
    run(name, again, second, 12, start=4)
    assert differences(again.state_dict(), sparse.state_dict()) == []
    expected, found = sparse.finish().state_dict(), again.finish().state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_branches_go_and_return_during_training():
    sparse, optimizer = training("summed_gpt", policy=Rounds((), (0, 3), (3,), (3,)))
    model = sparse.model
    modules = {name: model.get_submodule(name) for name in ("ln_1.0", "attn.0", "ln_2.1", "mlp.1")}
    assert not zeros(model)
    run("summed_gpt", sparse, optimizer, 2)
    assert zeros(model) == ["attn.0", "mlp.1"]
    assert all(type(model.get_submodule(name)) is nn.Identity for name in ("ln_1.0", "ln_2.1"))
    run("summed_gpt", sparse, optimizer, 2, start=2)
    assert zeros(model) == ["mlp.1"]
    assert all(model.get_submodule(name) is modules[name] for name in ("ln_1.0", "attn.0"))
    assert zeros(sparse.finish()) == ["mlp.1"]


def test_a_file_with_another_replacement_is_refused():
    sparse, _ = training("summed_gpt")
    for instead in (["zero"], ["one", None], ("zero", -1), ("zero", 101), ("zero", 1.5)):
        state = sparse.model.state_dict()
        state._metadata[""]["slimstart"]["identities"]["attn.0"] = instead
        with pytest.raises(CheckpointError, match="names modules"):
            shrink_to(make("summed_gpt"), state)


# --- PyTorch's own tools ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BUDGETS)
def finished(request):
    sparse, optimizer = training(request.param)
    run(request.param, sparse, optimizer, 20)
    small = sparse.finish(plain=True).eval()
    assert zeros(small)
    return request.param, small, batch(request.param, 99)[0]


def test_exported_programs(finished):
    _, small, inputs = finished
    torch.testing.assert_close(torch.export.export(small, (inputs,)).module()(inputs), small(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("finished", ["summed_conv_net"], indirect=True)
def test_onnx(finished, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    _, small, inputs = finished
    assert to_onnx(small, tmp_path / "net.onnx", inputs) < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_programs(finished):
    _, small, inputs = finished
    torch.testing.assert_close(torch.jit.trace(small, inputs)(inputs), small(inputs))


@pytest.mark.slow
def test_compiled_networks(finished):
    _, small, inputs = finished
    compiled = torch.compile(copy.deepcopy(small), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), small(inputs))


def test_autocast(finished):
    _, small, inputs = finished
    with torch.autocast("cpu", torch.bfloat16):
        found = small(inputs)
    torch.testing.assert_close(found.float(), small(inputs), rtol=0.1, atol=0.1)


def test_a_python_file_without_branches(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)
            self.branches = nn.ModuleList(
                nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 1)) for _ in range(3)
            )

        def forward(self, x):
            x = self.stem(x)
            for branch in self.branches:
                x = x + branch(x)
            return self.head(x.mean((2, 3)))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = batch("summed_conv_net", 0)[0]
    small = SparseTraining(model, optimizer, images[:2], Flops(0.25), total_steps=20).finish(plain=True)
    assert zeros(small)
    assert to_python(small, tmp_path / "net.py", images) < 1e-5
