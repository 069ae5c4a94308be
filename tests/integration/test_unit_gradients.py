"""Gradients of units: the observations of a policy in every kind of loop, without other effects."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from slimstart import Flops, SparseTraining, trace
from slimstart.graph.readers import functional_readers, readers
from slimstart.lab import models
from slimstart.narrow import compact
from slimstart.policies import EqualWorth, EqualWorthSearch
from slimstart.policies.base import LearnsFrom, Padding
from slimstart.steps.unit_gradients import UnitGradients
from tests.settings import arguments


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64)
    return images.to(device), torch.randint(0, 10, (8,), generator=generator).to(device)


def start(name: str = "resnet20", device: str = "cpu", **options: Any) -> SparseTraining:
    torch.manual_seed(0)
    model = models.build(name, num_classes=10, width=0.25).double().to(device)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    options = {"budget": Flops(0.4), "policy": "equal_worth", **options}
    if options["policy"] == "equal_worth":
        options = {"resample_every": 3, **options}
    return SparseTraining(model, optimizer, batch(0, device)[0][:1], **arguments(**options))


def gates_by_autograd(sparse: SparseTraining, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the loss with respect to gates at the inputs of all layers, on a copy without padding."""
    mask = sparse.mask
    small = compact(sparse.dense_copy(), sparse.graph.select(mask)).train()
    graph = trace(small, images[:1], "stream")
    gates = torch.ones(graph.num_units, dtype=torch.float64, requires_grad=True)
    modules = dict(small.named_modules())
    for reader in (*readers(graph, small), *functional_readers(graph, small)):
        every = torch.where(reader.units < 0, torch.ones(()), gates[reader.units.clamp(min=0)])

        def gated(layer: nn.Module, inputs: tuple[Tensor], every: Tensor = every) -> Tensor:
            (x,) = inputs
            return x * (every.view(1, -1, 1, 1) if x.dim() == 4 else every)

        modules[reader.layer.partition(".parametrizations")[0]].register_forward_pre_hook(gated)
    (found,) = torch.autograd.grad(loss_fn(small, images, labels), gates)
    gradients = torch.zeros(len(mask), dtype=torch.float64)
    gradients[mask] = found
    return gradients


class NotesLearner:
    """Random networks, and notes of what is observed."""

    num_masks, is_done, expected_cost = 1, False, 0.5

    def __init__(self, num_units: int, padding: Padding | None, window: int) -> None:
        self.padding, self.window, self._num_units = padding, window, num_units
        self.observed: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    @property
    def keep_probs(self) -> Tensor:
        return torch.full((self._num_units,), 0.5, dtype=torch.float64)

    def draw(self) -> Tensor:
        return torch.rand(1, self._num_units, generator=self._generator) < 0.5

    def update(self, losses: Tensor) -> None:
        raise AssertionError("it learns from gradients")

    def best_guess(self) -> Tensor:
        return self.draw()[0]

    def candidates(self, n: int) -> Tensor:
        return self.draw()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self._generator.set_state(state["generator"])

    def freeze(self, units: Tensor) -> None:
        self.frozen = units

    def to(self, device: torch.device | str) -> None:
        pass

    def observe_(self, gradients: Tensor) -> None:
        self.observed.append(gradients.clone())


@dataclass(frozen=True)
class Notes:
    """A policy of a user's own that only takes notes."""

    align: int = 1
    window: int = 1

    coupling: ClassVar[str] = "stream"
    learns_from: ClassVar[LearnsFrom] = "gradients"

    def start(self, costs: Any, budget: Any, total_steps: int | None) -> NotesLearner:
        padding = Padding(self.align, 1.0) if self.align > 1 else None
        return NotesLearner(costs.num_units, padding, self.window)


@pytest.mark.parametrize(
    ("name", "align"), [("vgg16", 1), ("resnet20", 4), pytest.param("mobilenet_v1", 4, marks=pytest.mark.slow)]
)
def test_gradients_of_units_are_those_of_gates(name: str, align: int) -> None:
    sparse = start(name, policy=Notes(align))
    for number in range(3):  # of random networks, one with padding
        expected = gates_by_autograd(sparse, *batch(number))
        sparse.step(loss_fn, *batch(number))
        assert len(sparse.learner.observed) == number + 1
        assert torch.allclose(sparse.learner.observed[-1], expected, rtol=1e-9, atol=1e-12)
        assert float(expected.abs().max()) > 1e-3


def test_it_starts_like_the_uniform_network() -> None:
    """With weights of the scale that its own initialisation would give them; a pretrained model is left alone."""
    for pretrained in (True, False):
        model = models.build("resnet20", num_classes=10, width=0.25)
        before, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
        images = batch(0)[0].float()
        sparse = SparseTraining(model, optimizer, images[:1], Flops(0.4), pretrained=pretrained)
        small = compact(before, sparse.graph.select(sparse.mask))
        for name, parameter in small.named_parameters():
            gain = 1.0 if pretrained else (before.get_parameter(name)[0].numel() / parameter[0].numel()) ** 0.5
            assert torch.allclose(gain * parameter, model.get_parameter(name))


@pytest.mark.parametrize("optimizer", [SGD, pytest.param(AdamW, marks=pytest.mark.slow)])
def test_a_structure_change_changes_widths_only(
    optimizer: Any, differences: Callable[[Any, Any], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Dense weights and state stay as they are, at the end of the search too; one that is resumed ends likewise."""

    def begin() -> SparseTraining:
        torch.manual_seed(0)
        model = models.build("resnet20", num_classes=10, width=0.25).double()
        options = {"lr": 0.02, "weight_decay": 1e-3} | ({"momentum": 0.9} if optimizer is SGD else {})
        return SparseTraining(
            model,
            optimizer(model.parameters(), **options),
            batch(0)[0][:1],
            Flops(0.4),
            policy=EqualWorth(resample_every=1000),
        )

    def train(sparse: SparseTraining, rounds: Iterable[int]) -> None:
        for number in rounds:
            for each in (2 * number, 2 * number + 1):
                sparse.step(loss_fn, *batch(each))
            before = sparse.state_dict()
            sparse.resample()
            after = sparse.state_dict()
            assert differences(*([one["model"], one["optimizers"]] for one in (before, after))) == []

    sparse = begin()
    start_widths, groups = widths(sparse), list(sparse.optimizer.param_groups)
    train(sparse, range(7))
    resumed = begin()
    resumed.load_state_dict(sparse.state_dict())
    for one in (sparse, resumed):
        assert not one.settled
        train(one, range(7, 16))
        assert one.settled
    assert widths(sparse) != start_widths
    assert all(one is other for one, other in zip(sparse.optimizer.param_groups, groups, strict=True))  # the user's own
    for one in (sparse, resumed):
        one.step(loss_fn, *batch(99))
    assert differences(sparse.state_dict(), resumed.state_dict()) == []
    assert caplog.text == ""


@pytest.mark.parametrize("sign", ["state", "batches", "none"])
def test_pretrained_weights_are_not_rescaled(sign: str) -> None:
    model = models.build("resnet20", num_classes=10, width=0.25).double()
    model.get_parameter("stage1.0.conv1.weight").requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)
    if sign == "batches":
        model(batch(0)[0])
    if sign == "state":
        loss_fn(model.eval(), *batch(0)).backward()
        optimizer.step()
        model.train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="needs 'stream'"):
        SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4), coupling="filter")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    sparse = SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4))
    after = sparse.dense_copy().state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert bool(changed) == (sign == "none")
    assert "stage1.0.conv1.weight" not in changed
    if changed:  # once, and not once more for the training that was refused
        weight = "stage1.0.conv2.weight"
        assert float(after[weight].std() / before[weight].std()) < 2


def test_it_settles_by_itself_and_costs_no_second_forward() -> None:
    sparse = start(resample_every=1)
    assert not sparse.needs_reference
    assert sparse.executed.reference_flops == ()
    bound = Flops(0.4).bind(sparse.graph.costs)
    for number in range(18):
        assert sparse.settled == (number >= 16)
        sparse.step(loss_fn, *batch(number))
        assert bound.cost(sparse.mask) <= bound.limit
    mask, size = sparse.mask, sum(p.numel() for p in sparse.model.parameters())
    sparse.step(loss_fn, *batch(18))
    assert torch.equal(sparse.mask, mask)
    small = sparse.finish([batch(19)], loss_fn)
    assert sum(p.numel() for p in small.parameters()) == size


# --------------------------------------------------------------------------- every kind of loop


def by_hand(sparse: SparseTraining, numbers: Iterable[int]) -> list[float]:
    """The user's plain loop."""
    optimizers = sparse.optimizer if isinstance(sparse.optimizer, list) else [sparse.optimizer]
    losses = []
    for number in numbers:
        loss = loss_fn(sparse.model, *batch(number))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same_end(one: SparseTraining, other: SparseTraining, differences: Any, but: Sequence[str] = ()) -> None:
    states = [{key: value for key, value in sparse.state_dict().items() if key not in but} for sparse in (one, other)]
    assert differences(*states) == []


def test_a_loop_by_hand_is_the_same(differences: Any) -> None:
    first, second = start(), start()
    before = first.mask
    losses = [float(first.step(loss_fn, *batch(number))) for number in range(8)]
    assert by_hand(second, range(8)) == losses
    assert not torch.equal(first.mask, before)
    same_end(first, second, differences)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_the_plain_loop(by_name: bool, differences: Any) -> None:
    plain, sparse = start(), start()
    losses = by_hand(plain, range(8))
    found = []
    for number in range(8):

        def closure(number: int = number) -> Tensor:
            sparse.optimizer.zero_grad()
            loss = loss_fn(sparse.model, *batch(number))
            loss.backward()
            return loss

        returned = sparse.optimizer.step(closure=closure) if by_name else sparse.optimizer.step(closure)
        found.append(float(returned.detach()))
    assert found == losses
    same_end(plain, sparse, differences)


def test_the_first_gradients_of_a_repeated_closure_count() -> None:
    """An optimizer that tries several points takes one step: that of the weights it began with."""

    class Twice(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            closure()
            super().step()
            return loss

    model = models.build("resnet20", num_classes=10, width=0.25).double()
    optimizer = Twice(model.parameters(), lr=0.01)
    sparse = SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4), policy=Notes(window=100))
    expected, number = gates_by_autograd(sparse, *batch(0)), [0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, *batch(number[0]))
        number[0] += 1
        loss.backward()
        return loss

    optimizer.step(closure)
    assert number == [2]
    (seen,) = sparse.learner.observed
    assert torch.allclose(seen, expected, rtol=1e-9, atol=1e-12)
    assert sparse.num_steps == 1


def scaled(make: Callable[[list[nn.Parameter]], Optimizer], policy: Any) -> tuple[SparseTraining, Any]:
    torch.manual_seed(0)
    model = chain()
    sparse = SparseTraining(model, make(list(model.parameters())), batch(0)[0][:1], Flops(0.4), policy=policy)
    return sparse, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "fused sgd": lambda p: SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "fused adamw": lambda p: AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_scaler_changes_nothing_but_its_scale(name: str, clipped: bool, differences: Any) -> None:
    """What is observed is unscaled, wherever the scale is taken out: by `unscale_`, by the scaler, or by the kernel."""
    plain, _ = scaled(MAKERS[name], Notes(window=2))
    sparse, scaler = scaled(MAKERS[name], Notes(window=2))
    for number in range(6):
        loss = loss_fn(plain.model, *batch(number))
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()
        own = loss_fn(sparse.model, *batch(number))
        sparse.optimizer.zero_grad()
        scaler.scale(own).backward()
        if clipped:
            scaler.unscale_(sparse.optimizer)
            nn.utils.clip_grad_norm_(sparse.model.parameters(), 1e9)
        scaler.step(sparse.optimizer)
        scaler.update()
        assert torch.allclose(own, loss, rtol=1e-12)
    assert scaler.get_scale() > 1024
    assert len(plain.learner.observed) == len(sparse.learner.observed) == 6
    for one, other in zip(plain.learner.observed, sparse.learner.observed, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-15)
    assert torch.equal(plain.mask, sparse.mask)
    assert plain.num_steps == sparse.num_steps == 6


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_that_the_scaler_skips_is_no_step(name: str, unscaled: bool, differences: Any) -> None:
    sparse, scaler = scaled(MAKERS[name], EqualWorth(resample_every=2))
    undisturbed, other = scaled(MAKERS[name], EqualWorth(resample_every=2))

    def step(one: SparseTraining, own: Any, number: int, spoiled: bool = False) -> None:
        loss = loss_fn(one.model, *batch(number))
        one.optimizer.zero_grad()
        own.scale(loss).backward()
        if spoiled:
            next(one.model.parameters()).grad[0] = float("inf")
        if unscaled:
            own.unscale_(one.optimizer)
        own.step(one.optimizer)
        own.update(None if not spoiled else own.get_scale())

    for number in range(7):
        step(sparse, scaler, number)
        step(undisturbed, other, number)
        before = copy.deepcopy(sparse.state_dict())
        for again in range(3):  # more often than there are steps in a window
            step(sparse, scaler, 50 + again, spoiled=True)
        assert sparse.num_steps == number + 1
        assert differences(before, sparse.state_dict()) == []
    assert differences(sparse.state_dict(), undisturbed.state_dict()) == []


def test_step_with_a_scaler_is_the_loop_with_one(differences: Any) -> None:
    torch.manual_seed(0)
    trainings = []
    for _ in range(2):
        model, scaler = chain(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = AdamW(model.parameters(), lr=0.01)
        policy = EqualWorth(resample_every=2)
        sparse = SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4), policy=policy, scaler=scaler)
        trainings.append((sparse, scaler))
    (first, _), (second, scaler) = trainings
    for number in range(6):
        first.step(loss_fn, *batch(number))
        loss = loss_fn(second.model, *batch(number))
        second.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(second.optimizer)
        scaler.update()
    same_end(first, second, differences)


# --------------------------------------------------------------------------- several optimizers


def split(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return parameters[::2], parameters[1::2]


def with_two(policy: Any, layers: bool = False) -> SparseTraining:
    """Weights are in one optimizer and biases in another, or every other layer is."""
    torch.manual_seed(0)
    model = chain()
    parameters = list(model.parameters())
    one, other = split(parameters) if not layers else (parameters[:4], parameters[4:])
    optimizers = [SGD(one, lr=0.02, momentum=0.9), SGD(other, lr=0.02, momentum=0.9)]
    return SparseTraining(model, optimizers, batch(0)[0][:1], Flops(0.4), policy=policy)


def with_one(policy: Any) -> SparseTraining:
    torch.manual_seed(0)
    model = chain()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4), policy=policy)


@pytest.mark.parametrize("layers", [False, True], ids=["weights and biases", "layers"])
@pytest.mark.parametrize("by_step", [False, True])
def test_two_optimizers_equal_one(layers: bool, by_step: bool, differences: Any) -> None:
    """If they are of one kind; an iteration is over when both have stepped, in any order."""
    policy = EqualWorth(resample_every=2)
    one, two = with_one(policy), with_two(policy, layers)
    assert isinstance(two.optimizer, list)
    losses = by_hand(one, range(6))
    if by_step:
        found = [float(two.step(loss_fn, *batch(number))) for number in range(6)]
    else:
        found = []
        for number in range(6):
            loss = loss_fn(two.model, *batch(number))
            for optimizer in two.optimizer:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in two.optimizer[:: 1 if number % 2 else -1]:
                optimizer.step()
            found.append(float(loss.detach()))
    assert found == pytest.approx(losses, rel=1e-12)
    assert torch.equal(one.mask, two.mask)
    assert (one.num_steps, two.num_steps) == (6, 6)
    same = one.state_dict()["model"]
    for key, value in two.state_dict()["model"].items():
        assert torch.allclose(value, same[key], rtol=1e-9)


def test_the_structure_does_not_change_between_two_optimizers_of_an_iteration() -> None:
    sparse = with_two(Notes(), layers=True)
    for number in range(4):
        loss = loss_fn(sparse.model, *batch(number))
        for optimizer in sparse.optimizer:
            optimizer.zero_grad()
        expected = gates_by_autograd(sparse, *batch(number))
        loss.backward()
        mask, shapes = sparse.mask, [p.shape for p in sparse.model.parameters()]
        sparse.optimizer[0].step()
        assert torch.equal(sparse.mask, mask)
        assert [p.shape for p in sparse.model.parameters()] == shapes
        assert sparse.num_steps == number
        sparse.optimizer[1].step()
        assert not torch.equal(sparse.mask, mask)
        assert torch.allclose(sparse.learner.observed[-1], expected, rtol=1e-9, atol=1e-12)
        assert sparse.num_steps == number + 1
    assert len(sparse.learner.observed) == 4


def test_one_optimizer_steps_in_every_second_iteration() -> None:
    sparse = with_two(Notes(), layers=True)
    often, seldom = sparse.optimizer
    masks = [sparse.mask]
    for number in range(7):
        often.zero_grad()
        loss_fn(sparse.model, *batch(number)).backward()
        has_gradients = {id(p): p.grad is not None for p in sparse.model.parameters()}
        often.step()
        if number % 2:
            assert all(has_gradients.values())
            seldom.step()
            seldom.zero_grad()
        masks.append(sparse.mask)
        # Where only one has stepped, the iteration ends with the next one's beginning.
        assert sparse.num_steps == (number + 1 if number % 2 else number)
    changes = [not torch.equal(*pair) for pair in itertools.pairwise(masks)]
    assert changes == [False, True] * 3 + [False]  # only where no gradient is waiting for its step
    assert len(sparse.learner.observed) == 6


def test_pending_gradients_survive_a_structure_change() -> None:
    """The optimizer that steps seldom gets the sum of two batches, as it would without a search."""
    sparse = with_two(EqualWorth(resample_every=1), layers=True)
    often, seldom = sparse.optimizer
    waiting = seldom.param_groups[0]["params"]
    seen = 0
    for number in range(8):
        often.zero_grad()
        before = [None if p.grad is None else p.grad.clone() for p in waiting]
        loss_fn(sparse.model, *batch(number)).backward()
        if number % 2:
            for parameter, earlier in zip(waiting, before, strict=True):
                assert earlier is not None
                assert earlier.shape == parameter.shape
                seen += 1
        often.step()
        if number % 2:
            seldom.step()
            seldom.zero_grad()
    assert seen == 4 * len(waiting)


def test_a_list_of_one_optimizer_is_accepted(differences: Any) -> None:
    first = with_one(EqualWorth(resample_every=2))
    torch.manual_seed(0)
    model = chain()
    optimizers = [SGD(model.parameters(), lr=0.02, momentum=0.9)]
    second = SparseTraining(model, optimizers, batch(0)[0][:1], Flops(0.4), policy=EqualWorth(resample_every=2))
    assert second.optimizer is optimizers
    assert by_hand(first, range(6)) == by_hand(second, range(6))
    same_end(first, second, differences)


class Wrapped:
    """As libraries wrap optimizers: not an `Optimizer`, with the real one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class WrappedOptimizer(Optimizer):
    """One that is an `Optimizer` itself, with steps and hooks of its own, around the real one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.base_optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


class Slow(SGD):
    """A subclass, and so with the hooks of its own class and of SGD's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_subclass_that_calls_the_step_of_its_base_makes_one_step(differences: Any) -> None:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on PyTorch calls hooks in both
    first = with_one(EqualWorth(resample_every=2))
    torch.manual_seed(0)
    model = chain()
    optimizer = Slow(model.parameters(), lr=0.02, momentum=0.9)
    second = SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4), policy=EqualWorth(resample_every=2))
    assert by_hand(first, range(3)) == by_hand(second, range(3))
    with pytest.raises(TypeError):  # an error in the middle of a step does not make later ones steps within it
        optimizer.step(lambda: None + 1)
    assert by_hand(first, range(3)) == by_hand(second, range(3))
    same_end(first, second, differences)
    assert second.num_steps == 6


@pytest.mark.parametrize("wrap", [Wrapped, WrappedOptimizer])
@pytest.mark.parametrize("in_list", [False, True])
def test_the_optimizer_inside_a_wrapper_is_found(wrap: Callable[[Any], Any], in_list: bool, differences: Any) -> None:
    first = with_one(EqualWorth(resample_every=2))
    torch.manual_seed(0)
    model = chain()
    wrapped = wrap(SGD(model.parameters(), lr=0.02, momentum=0.9))
    given = [wrapped] if in_list else wrapped
    second = SparseTraining(model, given, batch(0)[0][:1], Flops(0.4), policy=EqualWorth(resample_every=2))
    assert by_hand(first, range(6)) == by_hand(second, range(6))
    same_end(first, second, differences)


def test_other_objects_than_optimizers_are_refused() -> None:
    model = chain()
    for wrong in (None, object(), [SGD(model.parameters(), lr=0.1), "adam"], Wrapped(None)):
        with pytest.raises(
            TypeError, match=r"`optimizer` is a \w+, which is no torch\.optim\.Optimizer and wraps none"
        ):
            SparseTraining(model, wrong, batch(0)[0][:1], Flops(0.4))
    with pytest.raises(ValueError, match="cannot step without a closure"):
        SparseTraining(model, torch.optim.LBFGS(model.parameters()), batch(0)[0][:1], Flops(0.4))


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("steps", [5, 17], ids=["searching", "settled"])
def test_a_checkpoint_resumes_exactly(steps: int) -> None:
    """Also in a training that has settled meanwhile, and searches again then."""
    every = 2 if steps == 5 else 1
    first, second = start(resample_every=every), start(resample_every=every)
    for number in range(steps):
        first.step(loss_fn, *batch(number % 7))
    assert first.settled == (steps == 17)
    state = first.state_dict()
    if steps == 5:
        second.settle([batch(0)], loss_fn)
    second.load_state_dict(state)
    assert first.settled == second.settled
    for number in range(3):
        losses = [float(sparse.step(loss_fn, *batch(number))) for sparse in (first, second)]
        assert losses[0] == losses[1]
    assert torch.equal(first.mask, second.mask)


# --------------------------------------------------------------------------- which units can be observed


def chain(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()),
        *(*more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    ).double()


def widths(sparse: SparseTraining) -> list[int]:
    return torch.bincount(sparse.graph.costs.unit_group[sparse.mask]).tolist()


def test_gates_under_weight_norm() -> None:
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        *(normed(nn.Conv2d(3, 12, 3)), nn.ReLU(), normed(nn.Conv2d(12, 12, 3)), nn.ReLU()),
        *(normed(nn.ConvTranspose2d(12, 12, 3)), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        normed(nn.Linear(12, 10)),
    ).double()
    optimizer = SGD(model.parameters(), lr=0.02)
    sparse = SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.6), policy=Notes())
    assert isinstance(sparse.learner, NotesLearner)
    assert not sparse.learner.frozen.any()
    for number in range(3):
        expected = gates_by_autograd(sparse, *batch(number))
        sparse.step(loss_fn, *batch(number))
        assert expected.abs().max() > 1e-4
        assert torch.allclose(sparse.learner.observed[-1], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", ["frozen", "left out", "frozen later"])
def test_a_group_with_unobserved_readers_keeps_its_width(how: str) -> None:
    model = chain()
    reader = model[2].weight  # which reads the first group
    reader.requires_grad_(how != "frozen")
    parameters = [p for p in model.parameters() if p is not reader or how == "frozen later"]
    policy = EqualWorth(resample_every=1)
    sparse = SparseTraining(model, AdamW(parameters, lr=1e-2), batch(0)[0][:1], Flops(0.3), policy=policy)
    before = widths(sparse)
    if how == "frozen later":
        reader.requires_grad_(False)
    for number in range(16):
        sparse.step(loss_fn, *batch(number))
    after = widths(sparse)
    assert abs(after[0] - before[0]) <= 1  # what rounding leaves of the budget is given out
    assert after[1:] != before[1:]  # the other groups are learned
    assert sparse.settled


def test_layers_of_another_optimizer_may_be_frozen_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    model = chain()
    halves = [list(model[:2].parameters()), list(model[2:].parameters())]
    optimizers = [AdamW(half, lr=1e-2) for half in halves]
    policy = EqualWorth(resample_every=1)
    sparse = SparseTraining(model, optimizers, batch(0)[0][:1], Flops(0.3), policy=policy)
    before = widths(sparse)
    for number in range(16):  # as in GANs: each in turn
        loss_fn(model, *batch(number)).backward()
        for optimizer, others in zip(optimizers, reversed(halves), strict=True):
            for parameter in others:
                parameter.requires_grad_(False)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in others:
                parameter.requires_grad_(True)
    assert sparse.settled
    assert widths(sparse) != before
    assert "frozen" not in caplog.text


class Tied(nn.Module):
    """A language model whose embedding is its last layer, too; or two matrices."""

    def __init__(self, tied: bool, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(32, 20, bias=False)
        self.embed = nn.Embedding(20, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        if not head_first:
            self.head = nn.Linear(32, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(torch.relu(self.up(x)))).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("head_first", [False, True])
def test_a_weight_that_reads_and_writes_one_group_is_not_observed(head_first: bool) -> None:
    for tied in (False, True):
        model, example = Tied(tied, head_first), torch.zeros(1, 4, dtype=torch.int64)
        graph = trace(model, example, "stream")
        unknown = UnitGradients(graph, model, [SGD(model.parameters(), lr=0.1)], example).unobservable
        frozen = {group.name: bool(unknown[group.units.start]) for group in graph.groups}
        assert frozen["up"] is False
        assert len(frozen) == 2
        assert any(frozen.values()) == tied


class Own(nn.Module):
    """A matrix of its own, or a function of it, is the weight of a layer, transposed as in GPT-2."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 12))
        self.bias, self.last, self.computed = nn.Parameter(torch.zeros(12)), nn.Linear(12, 4), computed

    def forward(self, x: Tensor, gate: Tensor | float = 1.0) -> Tensor:
        weight = self.weight.tanh() if self.computed else self.weight
        return self.last(torch.relu(torch.addmm(self.bias, torch.relu(self.first(x)) * gate, weight)))  # type: ignore[no-any-return]


def test_a_matrix_that_is_no_layer_freezes_what_it_may_read(caplog: pytest.LogCaptureFixture) -> None:
    model = Own(computed=True)
    graph = trace(model, torch.zeros(2, 8), "stream")
    optimizer = SGD(model.parameters(), lr=0.1)
    unknown = UnitGradients(graph, model, [optimizer], torch.zeros(2, 8)).unobservable
    assert bool(unknown[graph.filters["first"]].all())
    assert caplog.text == ""  # the training may still be refused
    for parameter in model.last.parameters():
        parameter.requires_grad_(False)
    SparseTraining(model, optimizer, torch.zeros(2, 8), Flops(0.5))
    assert "no width can be learned" in caplog.text


def test_a_matrix_that_is_the_weight_of_a_layer_only_is_observed() -> None:
    torch.manual_seed(0)
    model, x, gates = Own(computed=False).double(), torch.randn(5, 8).double(), torch.ones(16).double().requires_grad_()
    graph = trace(model, x, "stream")
    assert not UnitGradients(graph, model, [SGD(model.parameters(), lr=0.1)], x).unobservable.any()
    (reader,) = functional_readers(graph, model)
    assert (reader.weight, reader.dim) == ("weight", 0)
    assert reader.units.equal(graph.filters["first"])
    model(x, gates).square().sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close((model.weight * model.weight.grad).sum(1), gates.grad)


class Twice(nn.Module):
    """Linear layers after a stream that stays whole; the first may also read, transposed."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.tied = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), tied

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        back = F.linear(hidden, self.up.weight.T) if self.tied else 0.0
        return x + self.down(hidden) + back  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_that_only_writes_is_no_reason_to_freeze_its_group(tied: bool) -> None:
    model, example = Twice(tied).train(), torch.zeros(1, 8)
    graph, optimizer = trace(model, example, "stream"), SGD(model.parameters(), lr=0.1)
    unknown = UnitGradients(graph, model, [optimizer], example).unobservable
    assert bool(unknown.all()) == bool(unknown.any()) == tied
    assert model.training


def test_units_of_both_optimizers_are_observed() -> None:
    model = chain()
    graph, example = trace(model, batch(0)[0][:1], "stream"), batch(0)[0][:1]
    one, other = split(list(model.parameters()))  # weights, biases
    assert not UnitGradients(graph, model, [SGD(one, lr=0.1), SGD(other, lr=0.1)], example).unobservable.any()
    assert UnitGradients(graph, model, [SGD(other, lr=0.1)], example).unobservable.all()


# --------------------------------------------------------------------------- how long, and what is said


@pytest.mark.parametrize(
    ("total", "given", "window", "rounds"),
    [
        (None, None, 50, 16),
        (160_000, None, 2000, 16),
        (1000, None, 12, 16),
        (1000, 30, 30, 7),
        (120, None, 2, 12),
        (20, None, 1, 4),
        (3, None, 1, 1),
        (100, 1000, 1000, 1),
    ],
)
def test_the_search_takes_a_fifth_of_the_run(total: int | None, given: int | None, window: int, rounds: int) -> None:
    sparse = start(resample_every=given, total_steps=total)
    assert isinstance(sparse.learner, EqualWorthSearch)
    assert (sparse.learner.window, sparse.learner.rounds) == (window, rounds)


@pytest.mark.parametrize("mistake", [None, "another network is trained", "not finite"])
def test_a_loop_without_gradients_is_reported(mistake: str | None, caplog: pytest.LogCaptureFixture) -> None:
    sparse = start(resample_every=2, total_steps=100)
    for number in range(4):
        net = sparse.dense_copy() if mistake == "another network is trained" else sparse.model
        sparse.optimizer.zero_grad()
        loss = loss_fn(net, *batch(number)) * (float("inf") if mistake == "not finite" else 1)
        loss.backward()
        sparse.optimizer.step()
    assert caplog.text.count("a structure update is skipped: no finite gradients were observed") == (
        0 if mistake is None else 2
    )


def test_networks_without_learnable_widths_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = chain()
    first = list(model[0].parameters())
    for parameter in set(model.parameters()) - set(first):
        parameter.requires_grad_(False)
    sparse = SparseTraining(model, SGD(first, lr=0.1), batch(0)[0][:1], Flops(0.4), policy=EqualWorth(resample_every=1))
    before = widths(sparse)
    for number in range(3):
        sparse.step(loss_fn, *batch(number))
    assert widths(sparse) == before
    assert len(caplog.messages) == 1
    assert "no width can be learned" in caplog.text


def test_finishing_before_the_search_ends_warns(caplog: pytest.LogCaptureFixture) -> None:
    for num_steps in (1, 2, 3):
        sparse = start(total_steps=10, resample_every=None)
        for number in range(num_steps):
            sparse.step(loss_fn, *batch(number))
        sparse.finish([batch(0)], loss_fn)
        assert ("finished after 1 steps, while its structure is still learned" in caplog.text) == (num_steps == 1)
        caplog.clear()


def test_errors() -> None:
    with pytest.raises(ValueError, match="`policy` is 'best'; it must be one of 'equal_worth', 'paper'"):
        start(policy="best")
    for wrong in ({"total_steps": 0}, {"total_steps": 2.5}, {"resample_every": "50"}, {"align": -1}):
        with pytest.raises(ValueError, match=r"`\w+` is .*; it must be a whole number, at least 1"):
            start(**wrong)
    with pytest.raises(TypeError, match=r"`budget` is 0\.2; it must be a budget, such as slimstart\.Flops"):
        start(budget=0.2)
    used = AdamW(chain().parameters())
    used.state[used.param_groups[0]["params"][0]] = {"step": torch.zeros(())}
    with pytest.raises(ValueError, match="`pretrained` is False, but the optimizer has state"):
        SparseTraining(chain(), used, batch(0)[0][:1], Flops(0.4), pretrained=False)
    sparse = start()
    with pytest.raises(RuntimeError, match=r"learns from gradients, inside `optimizer.step.*leave `update` out"):
        sparse.update(torch.ones(()))
    sparse.optimizer.step(None)  # as wrappers do
    model = chain()
    optimizer = SGD(model.parameters(), lr=0.1)
    for coupling in ("filter", "stream"):  # a refusal leaves the optimizer as it was
        with pytest.raises(ValueError, match=r"'filter'; .* needs 'stream'") if coupling == "filter" else nullcontext():
            SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.3), coupling=coupling)
        assert bool(optimizer._optimizer_step_pre_hooks) == (coupling == "stream")
