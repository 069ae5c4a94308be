"""Parts of the graph engine that need no GPU: learning rates, settings, keys."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop

from slimstart import Flops, SparseTraining
from slimstart.steps import Backward, PlainTraining, reason_for_eager
from slimstart.steps.cuda_graph import is_scarce
from slimstart.steps.graphs import _Same
from slimstart.steps.optimizers import CapturedRates, StepHooks, fuse, has_state, settings, unfuse


def parameters(n: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(n)]


def test_rates_follow_numbers_tensors_and_new_groups() -> None:
    first, second, third = parameters(3)
    optimizer = SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": torch.tensor(0.2)}], lr=1.0)
    rates = CapturedRates(optimizer, torch.device("cpu"))
    rates.follow()
    optimizer.add_param_group({"params": [third], "lr": 0.3})
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.param_groups[1]["lr"].fill_(0.4)
    with rates.in_groups():
        inside = [group["lr"] for group in optimizer.param_groups]
        assert all(isinstance(rate, torch.Tensor) for rate in inside)
        assert [float(rate) for rate in inside] == pytest.approx([0.05, 0.4, 0.3])
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.01
    rates.follow()
    assert float(inside[0]) == pytest.approx(0.01)  # the same tensor, which a graph has


def test_settings_are_all_but_the_learning_rate() -> None:
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9)
    before = settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert settings(optimizer) == before
    optimizer.param_groups[0]["momentum"] = 0.8
    assert settings(optimizer) != before
    assert hash(settings(Adam(parameters()))) is not None


def test_an_optimizer_has_state_when_it_has_state() -> None:
    used, unused = parameters()
    for optimizer in (SGD([used, unused], lr=0.1, momentum=0.9), Adam([used, unused])):
        assert not has_state(optimizer)
        used.grad = torch.ones(3)
        optimizer.step()
        assert has_state(optimizer)  # the other parameter may never get a gradient
    assert has_state(SGD([used], lr=0.1))


def test_only_a_gpu_has_fused_steps() -> None:
    assert not fuse(SGD(parameters(), lr=0.1))
    optimizer = Adam(parameters(), capturable=True)
    unfuse(optimizer)
    assert optimizer.param_groups[0]["capturable"] is False


def test_parameters_that_will_be_on_a_gpu_have_fused_steps() -> None:
    """Those of a model whose dense weights are on the host."""
    there = torch.device("cuda")
    optimizer = Adam(parameters())
    assert fuse(optimizer, there)
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], group["capturable"]) == (True, False, True)
    assert not fuse(RMSprop(parameters()), there)
    assert not fuse(SGD(parameters(), lr=0.1, maximize=True), there)
    assert not fuse(SGD([*parameters(), nn.Parameter(torch.ones(2, device="meta"))], lr=0.1), there)


def test_unavailable_engines_are_refused_or_explained() -> None:
    optimizer, cpu = SGD(parameters(), lr=0.1), torch.device("cpu")
    assert reason_for_eager("eager", optimizer, cpu) == "it was asked for"
    assert reason_for_eager("auto", optimizer, cpu) == "the model is on cpu, and CUDA graphs need a GPU"
    with pytest.raises(ValueError, match="`engine` is 'graphs', but the model is on cpu"):
        reason_for_eager("graphs", optimizer, cpu)
    with pytest.raises(ValueError, match="`engine` is 'fast'; it must be one of 'auto', 'eager', 'graphs'"):
        reason_for_eager("fast", optimizer, cpu)


def test_functions_are_the_same_by_identity_and_methods_by_owner() -> None:
    class Owner:
        def loss(self) -> None:
            pass

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    one, other = Owner(), Owner()
    assert one.loss is not one.loss  # a new object for every access
    assert _Same(one.loss) == _Same(one.loss)
    assert hash(_Same(one.loss)) == hash(_Same(one.loss))
    assert _Same(one.loss) != _Same(other.loss)
    assert _Same(one) == _Same(one)
    assert _Same(one) != _Same(other)


def test_a_scaler_that_is_not_enabled_is_none() -> None:
    optimizers = (SGD(parameters(), lr=0.1),)
    assert Backward(optimizers, scaler=torch.amp.GradScaler("cpu", enabled=False)).scaler is None
    assert Backward(optimizers, scaler=torch.amp.GradScaler("cpu")).scaler is not None


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: RMSprop(p, lr=0.01)])
def test_plain_training_is_plain_and_clips(make) -> None:  # type: ignore[no-untyped-def]
    def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    x = torch.randn(8, 4)
    nets = []
    for clip in (None, 0.01):
        torch.manual_seed(0)
        ours, reference = nn.Linear(4, 3), nn.Linear(4, 3)
        reference.load_state_dict(ours.state_dict())
        training, optimizer = (
            PlainTraining(ours, make(ours.parameters()), max_grad_norm=clip),
            make(reference.parameters()),
        )
        for _ in range(4):
            loss = training.step(loss_fn, x)
            optimizer.zero_grad()
            expected = loss_fn(reference, x)
            expected.backward()
            if clip is not None:
                norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
                for p in reference.parameters():
                    p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
            optimizer.step()
            assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
        assert training.num_steps == 4
        torch.testing.assert_close(ours.weight, reference.weight)
        nets.append(ours.weight.detach())
    assert not torch.allclose(nets[0], nets[1])


class Refusing:
    """Steps that cannot be captured."""

    num_captures, failed, reason = 0, False, "the step cannot be captured"

    def find(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("policy", ["equal_worth", "paper"])
def test_steps_that_cannot_be_captured_are_eager_and_count_their_examples(policy: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(6, 4)
    sparse = SparseTraining(model, SGD(model.parameters(), lr=0.1), x, Flops(0.5), policy=policy)
    sparse._steps = Refusing()  # type: ignore[assignment]
    for count in (None, 5):
        sparse.step(lambda net, x: net(x).square().mean(), x, count=count)
        assert sparse.num_examples == (count or 6)
    assert (sparse.engine, sparse.reason) == ("eager", Refusing.reason)


@pytest.mark.parametrize(
    ("free", "fraction", "scarce"), [(80, 1.0, False), (4, 1.0, True), (80, 0.25, False), (80, 0.24, True)]
)
def test_memory_is_scarce_when_more_is_cached_than_free(
    monkeypatch: pytest.MonkeyPatch, free: int, fraction: float, scarce: bool
) -> None:
    numbers = {"memory_reserved": 20, "memory_allocated": 15, "get_per_process_memory_fraction": fraction}
    for name, value in {**numbers, "mem_get_info": (free, 100)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert is_scarce() == scarce


def test_a_new_gradient_with_the_id_of_a_freed_one_is_unused() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [SGD([parameter], lr=0.1) for parameter in parameters]
    ends: list[object] = []
    hooks = StepHooks(optimizers, lambda _: None, ends.append, lambda: ends.append("no gradients wait"), ())
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    for optimizer in optimizers:
        optimizer.step()
    assert ends == [True]
    old, kept = id(parameters[1].grad), []
    parameters[1].grad = None
    for _ in range(10_000):  # usually the first one
        new = torch.ones(2)
        if id(new) == old:
            break
        kept.append(new)
    else:
        pytest.skip("this allocator does not reuse the id")
    parameters[1].grad = new
    parameters[0].grad = torch.ones(2)
    optimizers[0].step()
    assert ends == [True], "the gradient of the second optimizer waits for its step"
    optimizers[1].step()
    assert ends == [True, True]
    hooks.remove()
