"""`torch.compile` around a model whose structure changes: compiled once per structure, with the same results."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import EqualWorth, Flops, Paper, SparseTraining
from tests.layer_policy import Rounds

WAYS = ["before", "after", "method"]
WIDTHS = EqualWorth(resample_every=1, align=1, pull=0.0, depth=0)


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    """Empty caches, and an error where Dynamo would fall back to eager execution."""
    torch._dynamo.reset()
    limits = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "accumulated_recompile_limit")}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, **limits):
        yield


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = itertools.pairwise((6, 16, 16, 3))
        self.first, self.inner, self.last = (nn.Linear(*pair, dtype=torch.float64) for pair in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(torch.relu(self.first(x)))))


class Residual(nn.Module):
    """Layers that read from, and write into, a stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 8, dtype=torch.float64), nn.BatchNorm1d(8, dtype=torch.float64)
        self.inner, self.last = (nn.Linear(8, width, dtype=torch.float64) for width in (8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.relu(x + self.inner(x)))


def counting(backend: str = "") -> Any:
    """A backend that counts how often it compiles."""
    from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend  # takes a second

    return CompileCounterWithBackend(backend) if backend else CompileCounter()


def loss_fn(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(inputs), labels)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator))
        for _ in range(num)
    ]


def train(
    model: nn.Module,
    how: str,
    backend: Any,
    policy: Any,
    num: int = 12,
    by_hand: bool = True,
    evaluate: bool = False,
    part: str = "",
) -> dict[str, Any]:
    """A search, settled after `num` steps, and three steps more; and how often it has been compiled by each step."""
    target: Any = model.get_submodule(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net: Any = model
    if how == "method":
        target.compile(backend=backend)
    if how == "before":
        net = torch.compile(model, backend=backend)
    examples = torch.zeros(1, 6, dtype=torch.float64)
    sparse = SparseTraining(net, optimizer, examples, Flops(0.4), policy=policy, total_steps=5 * num)
    given = net
    assert getattr(backend, "frame_count", 0) == 0  # the model is looked at uncompiled
    if how == "after":
        net = torch.compile(model, backend=backend)
    shapes, counts, losses, outputs = [], [], [], []

    def step(inputs: Tensor, labels: Tensor) -> None:
        shapes.append(tuple(parameter.shape for parameter in model.parameters()))
        if by_hand:
            loss = loss_fn(net, inputs, labels)
            references = [loss_fn(one, inputs, labels) for one in sparse.references()]
            optimizer.zero_grad()
            loss.backward()
            if evaluate:
                net.eval()
                with torch.no_grad():
                    outputs.append(net(inputs))
                net.train()
            optimizer.step()
            if isinstance(policy, Paper):
                sparse.update(loss, references)
        else:
            loss = sparse.step(loss_fn, inputs, labels)
        losses.append(loss.detach())
        counts.append(getattr(backend, "frame_count", 0))

    for batch in batches(num):
        step(*batch)
    sparse.settle()
    for batch in batches(3):
        step(*batch)
    found = {"losses": losses, "outputs": outputs, "dense": sparse.state_dict()["model"]}
    assert sparse.finish() is given
    found["finished"] = net(batches(1)[0][0]).detach()
    return {"found": found, "counts": counts, "shapes": shapes}


def num_structures(shapes: list[Any]) -> list[int]:
    """Different ones so far, at every step: what a cache of compiled code has seen."""
    return [len(set(shapes[: number + 1])) for number in range(len(shapes))]


@pytest.mark.parametrize("how", WAYS)
def test_a_model_is_compiled_once_per_structure(how: str, differences: Callable[[Any, Any], list[str]]) -> None:
    compiled = train(Perceptron(), how, counting(), Paper())
    assert compiled["counts"] == num_structures(compiled["shapes"])
    assert compiled["counts"][-1] > 8  # more than Dynamo compiles a module by default
    assert len(set(compiled["counts"][-3:])) == 1  # nothing after the search
    assert differences(train(Perceptron(), "not", None, Paper())["found"], compiled["found"]) == []


@pytest.mark.parametrize("how", WAYS)
def test_compiled_code_follows_layers_that_are_removed(how: str, differences: Callable[[Any, Any], list[str]]) -> None:
    policy = Rounds((), (0,), (), (0,), (0,))
    compiled = train(Perceptron(), how, counting(), policy)
    assert compiled["counts"][-1] == 2  # with the layer and without it
    assert len(set(compiled["counts"][-3:])) == 1
    assert differences(train(Perceptron(), "not", None, policy)["found"], compiled["found"]) == []


@pytest.mark.parametrize("how", ["before", "method"])
def test_step_runs_the_compiled_model(how: str, differences: Callable[[Any, Any], list[str]]) -> None:
    compiled = train(Perceptron(), how, counting(), WIDTHS, by_hand=False)
    assert compiled["counts"] == num_structures(compiled["shapes"])
    assert compiled["counts"][-1] > 2
    plain = train(Perceptron(), "not", None, WIDTHS, by_hand=False)
    assert differences(plain["found"], compiled["found"]) == []


@pytest.mark.slow
def test_every_structure_may_be_compiled_for_evaluation_too(differences: Callable[[Any, Any], list[str]]) -> None:
    compiled = train(Perceptron(), "after", counting(), Paper(), evaluate=True)
    assert compiled["counts"] == [2 * num for num in num_structures(compiled["shapes"])]
    plain = train(Perceptron(), "not", None, Paper(), evaluate=True)
    assert differences(plain["found"], compiled["found"]) == []


def test_layers_on_streams_are_compiled_in_one_piece(differences: Callable[[Any, Any], list[str]]) -> None:
    compiled = train(Residual(), "after", counting(), Paper(), num=5)
    changes = 1 + sum(a != b for a, b in itertools.pairwise(compiled["shapes"]))
    assert compiled["counts"][-1] in (changes, changes + 1)  # the same shapes may be other channels of a stream
    assert differences(train(Residual(), "not", None, Paper(), num=5)["found"], compiled["found"]) == []


def test_a_layer_may_be_compiled_by_itself(differences: Callable[[Any, Any], list[str]]) -> None:
    """The reference network has a layer of its own, which is not the compiled one."""
    counter = counting()
    compiled = train(Residual(), "method", counter, Paper(), num=5, part="inner")
    assert counter.frame_count > 1
    assert differences(train(Residual(), "not", None, Paper(), num=5)["found"], compiled["found"]) == []


def test_a_copy_of_a_compiled_layer_on_a_stream_is_a_copy() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SparseTraining(model, optimizer, torch.zeros(1, 6, dtype=torch.float64), Flops(0.4), policy="paper")
    model.inner.compile(backend="eager")
    twin = copy.deepcopy(model)
    for parameter in twin.inner.parameters():
        parameter.data.zero_()
    inputs = batches(1)[0][0]
    stream = torch.relu(twin.norm(twin.first(inputs)))
    assert twin.inner(stream).abs().max() == 0


def test_compiled_backwards_follow_too(differences: Callable[[Any, Any], list[str]]) -> None:
    counter = counting("aot_eager")
    compiled = train(Perceptron(), "after", counter, WIDTHS, num=6)
    assert compiled["counts"] == num_structures(compiled["shapes"])
    assert compiled["counts"][-1] > 1
    plain = train(Perceptron(), "not", None, WIDTHS, num=6)["found"]
    for name, value in plain["dense"].items():
        assert torch.allclose(value, compiled["found"]["dense"][name], rtol=1e-10)


@pytest.mark.slow
def test_inductor_follows() -> None:
    counter = counting("inductor")
    try:
        compiled = train(Perceptron(), "after", counter, WIDTHS, num=4)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"there is no compiler: {error}")
    assert compiled["counts"][-1] > 1
    plain = train(Perceptron(), "not", None, WIDTHS, num=4)["found"]
    for name, value in plain["dense"].items():
        assert torch.allclose(value, compiled["found"]["dense"][name], rtol=1e-8)


def test_the_step_of_an_optimizer_may_be_compiled() -> None:
    weights = []
    for how in ("plain", "compiled"):
        model, generator = Perceptron(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        sparse = SparseTraining(model, optimizer, x, Flops(0.4), policy=WIDTHS, total_steps=10)
        step = torch.compile(optimizer.step, backend="eager") if how == "compiled" else optimizer.step
        for _ in range(10):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            step()
        assert sparse.settled
        assert sparse.num_steps == 10
        weights.append(model.first.weight)
    assert torch.allclose(*weights, rtol=1e-10)
