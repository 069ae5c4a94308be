"""Training with a policy that watches: what it is told, in every engine, and that nothing else changes."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from slimstart import Flops, SparseTraining, models, trace
from slimstart.graph.readers import readers
from slimstart.narrow import compact
from slimstart.policies import EqualWorth, EqualWorthSearch
from slimstart.steps.watching import Watch
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
    options = {"budget": Flops(0.4), "resample_every": 3, "policy": "equal_worth", **options}
    return SparseTraining(model, optimizer, batch(0, device)[0][:1], **arguments(**options))


def gates_by_autograd(sparse: SparseTraining, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the loss with respect to gates at the inputs of all layers, on a copy that has no slots."""
    sparse.sync()
    mask = sparse.mask
    small = compact(sparse.model, sparse.graph.select(mask)).train()
    graph = trace(small, images[:1], "stream")
    gates = torch.ones(graph.num_units, dtype=torch.float64, requires_grad=True)
    modules = dict(small.named_modules())
    for reader in readers(graph, small):
        every = torch.where(reader.units < 0, torch.ones(()), gates[reader.units.clamp(min=0)])

        def gated(layer: nn.Module, inputs: tuple[Tensor], every: Tensor = every) -> Tensor:
            (x,) = inputs
            return x * (every.view(1, -1, 1, 1) if x.dim() == 4 else every)

        modules[reader.layer].register_forward_pre_hook(gated)
    (found,) = torch.autograd.grad(loss_fn(small, images, labels), gates)
    gradients = torch.zeros(len(mask), dtype=torch.float64)
    gradients[mask] = found
    return gradients


class Notes:
    """A policy that only takes notes."""

    def __init__(self) -> None:
        self.told: list[Tensor] = []

    def freeze(self, units: Tensor) -> None:
        self.held = units

    def to(self, device: torch.device) -> None:
        pass

    def observe_(self, gradients: Tensor) -> None:
        self.told.append(gradients.clone())


@pytest.mark.parametrize(
    ("name", "align"), [("vgg16", 1), ("resnet20", 4), pytest.param("mobilenet_v1", 4, marks=pytest.mark.slow)]
)
def test_gradients_of_units_are_those_of_gates(name: str, align: int) -> None:
    sparse, notes = start(name, policy="paper", coupling="stream", resample_every=1, align=align), Notes()
    before = SGD(sparse.model.parameters(), lr=0.1)  # as the optimizer was before it was given narrow parameters
    watch = Watch(notes, sparse.graph, sparse.model, before, batch(0)[0][:1])  # type: ignore[arg-type]
    watch._optimizer = sparse.optimizer
    watch.start(sparse._networks)
    for number in range(2):  # of two random networks, with passengers where there is room to spare
        expected = gates_by_autograd(sparse, *batch(number))
        sparse.step(loss_fn, *batch(number))
        assert torch.allclose(notes.told[-1], expected, rtol=1e-9, atol=1e-12)
        assert float(expected.abs().max()) > 1e-3


def test_it_starts_as_a_narrow_network_would() -> None:
    """With weights of the scale that its own initialisation would give them; a model that has learned is left alone."""
    for fresh in (True, False):
        model = models.build("resnet20", num_classes=10, width=0.25)
        before, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
        images = batch(0)[0].float()
        sparse = SparseTraining(model, optimizer, images[:1], Flops(0.4), policy="equal_worth", fresh=fresh)
        small = compact(before, sparse.graph.select(sparse.mask))
        sparse.sync()
        for name, parameter in small.named_parameters():
            gain = (before.get_parameter(name)[0].numel() / parameter[0].numel()) ** 0.5 if fresh else 1.0
            assert torch.allclose(gain * parameter, sparse.net.get_parameter(name))


@pytest.mark.parametrize("optimizer", [SGD, pytest.param(AdamW, marks=pytest.mark.slow)])
def test_a_draw_changes_widths_and_nothing_else(
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
            assert (
                differences([before[key] for key in ("model", "optimizer")], [after["model"], after["optimizer"]]) == []
            )

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


def test_weights_that_are_loaded_in_a_search_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    sparse = start(resample_every=1)
    sparse.step(loss_fn, *batch(0))
    sparse.load_state_dict(sparse.state_dict())  # which is no loading of weights alone
    assert caplog.text == ""
    sparse.model.load_state_dict(sparse.model.state_dict())
    assert "weights were loaded while widths are learned" in caplog.text
    caplog.clear()
    sparse.settle([batch(1)], loss_fn)
    sparse.model.load_state_dict(sparse.model.state_dict())
    assert caplog.text == ""


@pytest.mark.parametrize("sign", ["state", "batches", "none"])
def test_signs_of_learning_keep_the_weights_as_they_are(sign: str) -> None:
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
    SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.4))
    after = model.state_dict()
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
    mask = sparse.mask
    sparse.step(loss_fn, *batch(18))
    assert torch.equal(sparse.mask, mask)
    small = sparse.finish([batch(19)], loss_fn)
    assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in sparse.net.parameters())


def test_a_loop_by_hand_is_the_same() -> None:
    first, second = start(), start()
    for number in range(8):
        images, labels = batch(number)
        loss = float(first.step(loss_fn, images, labels))
        second.optimizer.zero_grad()
        own = loss_fn(second.net, images, labels)
        own.backward()
        second.optimizer.step()
        second.update(own)
        assert float(own.detach()) == loss
        assert torch.equal(first.mask, second.mask)


@pytest.mark.parametrize("steps", [5, 17], ids=["searching", "settled"])
def test_a_checkpoint_goes_on_bit_for_bit(steps: int) -> None:
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
    assert len(second.optimizer._optimizer_step_pre_hooks) == (steps == 5)


def chain(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()),
        *(*more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    ).double()


def widths(sparse: SparseTraining) -> list[int]:
    return torch.bincount(sparse.graph.costs.unit_group[sparse.mask]).tolist()


@pytest.mark.parametrize("how", ["frozen", "left out", "frozen later"])
def test_a_group_of_which_too_little_is_known_keeps_its_width(how: str) -> None:
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
    assert (after[1:] == before[1:]) == (how == "frozen later")  # half of the truth would be none
    assert sparse.settled


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
def test_a_weight_that_reads_and_writes_says_nothing_of_its_group(head_first: bool) -> None:
    for tied in (False, True):
        model, notes = Tied(tied, head_first), Notes()
        example = torch.zeros(1, 4, dtype=torch.int64)
        graph = trace(model, example, "stream")
        Watch(notes, graph, model, SGD(model.parameters(), lr=0.1), example)  # type: ignore[arg-type]
        held = {group.name: bool(notes.held[group.units.start]) for group in graph.groups}
        assert held["up"] is False
        assert len(held) == 2
        assert any(held.values()) == tied


def test_a_matrix_that_is_no_layer_holds_what_it_may_read(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 16))
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(F.linear(torch.relu(self.first(x)), self.weight)))  # type: ignore[no-any-return]

    model, notes = Own(), Notes()
    graph = trace(model, torch.zeros(1, 8), "stream")
    optimizer = SGD(model.parameters(), lr=0.1)
    Watch(notes, graph, model, optimizer, torch.zeros(1, 8))  # type: ignore[arg-type]
    assert bool(notes.held.all())
    assert caplog.text == ""  # the training may still be refused
    SparseTraining(model, optimizer, torch.zeros(1, 8), Flops(0.5))
    assert "widths stay at equal shares" in caplog.text


class Twice(nn.Module):
    """Linear layers behind a stream that stays whole; the first may also read, transposed."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.tied = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), tied

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        back = F.linear(hidden, self.up.weight.T) if self.tied else 0.0
        return x + self.down(hidden) + back  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_that_only_writes_is_no_reason_to_hold_its_group(tied: bool) -> None:
    model, notes, example = Twice(tied).train(), Notes(), torch.zeros(1, 8)
    Watch(notes, trace(model, example, "stream"), model, SGD(model.parameters(), lr=0.1), example)  # type: ignore[arg-type]
    assert bool(notes.held.all()) == bool(notes.held.any()) == tied
    assert model.training


def test_a_scale_that_a_fused_optimizer_takes_out_itself_is_taken_out() -> None:
    sparse, notes = start(policy="paper", coupling="stream", align=1), Notes()
    fresh = start(policy="paper", coupling="stream", align=1)
    for one, scale in ((sparse, None), (fresh, torch.tensor(8.0))):
        model = one.model
        watch = Watch(notes, one.graph, model, SGD(model.parameters(), lr=0.1), batch(0)[0][:1])  # type: ignore[arg-type]
        watch.start(one._networks)
        (loss_fn(one.net, *batch(0)) * (1 if scale is None else scale)).backward()
        one.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        watch._before_step(one.optimizer, (one.optimizer,), {})
    assert torch.allclose(*notes.told, rtol=1e-6)


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
def test_its_search_is_a_fifth_of_the_run(total: int | None, given: int | None, window: int, rounds: int) -> None:
    sparse = start(resample_every=given, total_steps=total)
    assert isinstance(sparse.learner, EqualWorthSearch)
    assert (sparse.learner.window, sparse.learner.rounds) == (window, rounds)


@pytest.mark.parametrize("mistake", [None, "another network is trained", "no step", "not finite"])
def test_a_loop_from_which_nothing_can_be_learned_is_told_of(
    mistake: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    sparse = start(resample_every=2, total_steps=100)
    for number in range(4):
        net = sparse.model if mistake == "another network is trained" else sparse.net
        sparse.optimizer.zero_grad()
        loss = loss_fn(net, *batch(number)) * (float("inf") if mistake == "not finite" else 1)
        loss.backward()
        if mistake != "no step":
            sparse.optimizer.step()
        sparse.update(loss)
    assert caplog.text.count("a structure update is skipped: no finite gradients were observed") == (
        0 if mistake is None else 2
    )


def test_where_no_width_can_be_learned_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "widths stay at equal shares" in caplog.text


def test_a_network_that_is_finished_too_early_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sparse = start(total_steps=10, resample_every=None)
    for number in range(3):
        sparse.step(loss_fn, *batch(number))
        sparse.finish([batch(0)], loss_fn)
        assert ("finished after 1 steps, while its widths are still being learned" in caplog.text) == (number == 0)
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
    with pytest.raises(ValueError, match="`fresh` is True, but the optimizer has state"):
        SparseTraining(chain(), used, batch(0)[0][:1], Flops(0.4), fresh=True)
    sparse = start()
    with pytest.raises(ValueError, match="got a closure"):
        sparse.optimizer.step(lambda: 0.0)
    sparse.optimizer.step(None)  # as wrappers do
    model = chain()
    optimizer = SGD(model.parameters(), lr=0.1)
    for coupling in ("filter", "stream"):  # a refusal leaves the optimizer as it was
        with pytest.raises(ValueError, match=r"'filter'; .* needs 'stream'") if coupling == "filter" else nullcontext():
            SparseTraining(model, optimizer, batch(0)[0][:1], Flops(0.3), coupling=coupling)
