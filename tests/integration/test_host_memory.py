"""Networks larger than the device: with dense weights on the host, a training is bit for bit the same.

On the CPU host and device have the same memory, but must share no tensors. The last tests need a GPU.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slimstart import Channels, EqualWorth, Flops, Params, SparseTraining
from slimstart.lab import models
from slimstart.policies import joined
from slimstart.steps import host_memory as memory
from tests.settings import arguments
from tests.simulated_gpu import simulate_gpu

Differences = Callable[[Any, Any], list[str]]
SLOW = pytest.mark.slow


class Net(nn.Module):
    """With everything that moves: a residual stream, normalisation, a whole parameter, buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.b_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c, self.c_norm = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 4)
        self.register_buffer("num_forwards", torch.zeros(()))  # a forward changes it, and reads it
        self.register_buffer("offset", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards.add_(1)
        x = F.relu(self.a_norm(self.a(x)))
        x = F.relu(x + self.b_norm(self.b(x)))
        x = F.relu(self.c_norm(self.c(x))).mean((2, 3))
        return self.head(x) * (1 + self.num_forwards / 100) + self.offset


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(number: int, seed: int = 0, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator))
        for _ in range(number)
    ]
    return [(images.to(device), labels.to(device)) for images, labels in made]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def start(home: str | None, optimizer: str = "sgd", device: str = "cpu", **options: Any) -> SparseTraining:
    """A training on a device, with its dense weights there, or at home."""
    torch.manual_seed(0)
    model = Net().to(home or device)
    options = {"budget": Channels(0.5), "policy": "paper", "resample_every": 2, **options}
    return SparseTraining(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        batches(1, device=device)[0][0][:1],
        full_model_device=home,
        **arguments(**options),
    )


def both(**options: Any) -> tuple[SparseTraining, SparseTraining]:
    return start(None, **options), start("cpu", **options)


def train(sparse: SparseTraining, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    return [float(sparse.step(loss_fn, *batch)) for batch in data]


WIDTHS = {"policy": EqualWorth(pull=0), "budget": Flops(0.4), "total_steps": 200}  # nothing pulls its widths together
CASES = [
    {"align": 1},
    WIDTHS,
    pytest.param({**WIDTHS, "optimizer": "adamw", "resample_every": 3}, marks=SLOW),
    pytest.param({"align": 4, "optimizer": "adamw", "resample_every": 3}, marks=SLOW),
    pytest.param({"align": 1, "optimizer": "adamw", "resample_every": 1, "estimator": "leave_one_out"}, marks=SLOW),
    pytest.param({"align": 1, "coupling": "stream", "estimator": "pge"}, marks=SLOW),
    pytest.param({"align": 2, "optimizer": "adamw", "resample_every": 1}, marks=SLOW),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_training_from_the_host_is_the_same_bit_for_bit(options: dict[str, Any], differences: Differences) -> None:
    """Weights, statistics, optimizer state, s, masks; snapshots, checkpoints, the settled and the finished network."""
    data, (plain, hosted) = batches(9), both(**options)
    first = plain.mask
    assert train(plain, data[:4]) == train(hosted, data[:4])
    assert differences(plain.state_dict(), hosted.state_dict()) == []
    assert train(plain, data[4:7]) == train(hosted, data[4:7])  # also in mid-window
    assert not torch.equal(plain.mask, first)
    assert differences(plain.snapshot().state_dict(), hosted.snapshot().state_dict()) == []
    assert hosted.stored_bytes == plain.stored_bytes > 0

    state = plain.state_dict()
    assert differences(state, hosted.state_dict()) == []
    other = start("cpu", **options)
    train(other, data[:2])  # elsewhere
    other.load_state_dict(state)
    assert train(plain, data) == train(hosted, data) == train(other, data)
    back = start(None, **options)
    back.load_state_dict(other.state_dict())
    assert differences(back.state_dict(), other.state_dict()) == []

    for sparse in (plain, hosted):
        sparse.settle(data, loss_fn, num_samples=3, max_batches=2)
    assert torch.equal(plain.mask, hosted.mask)
    assert train(plain, data[:3]) == train(hosted, data[:3])
    assert differences(plain.state_dict(), hosted.state_dict()) == []
    small = [sparse.finish(data, loss_fn).state_dict() for sparse in (plain, hosted)]
    assert differences(*small) == []


@pytest.mark.parametrize("options", [{"align": 1}, WIDTHS], ids=str)
def test_a_loop_by_hand(options: dict[str, Any], differences: Differences) -> None:
    data, pair = batches(5), both(**options)
    for batch in data:
        losses = []
        for sparse in pair:
            loss = loss_fn(sparse.model, *batch)
            reference = None
            if sparse.needs_reference:
                with torch.no_grad():
                    reference = loss_fn(sparse.reference, *batch)
            sparse.optimizer.zero_grad()
            loss.backward()
            sparse.optimizer.step()
            if sparse.policy.learns_from == "losses":
                sparse.update(loss, reference)
            losses.append((float(loss.detach()), reference))
        assert losses[0] == losses[1]
    assert differences(*(sparse.state_dict() for sparse in pair)) == []


def test_in_graphs_widths_are_learned_from_the_host_too(
    monkeypatch: pytest.MonkeyPatch, differences: Differences
) -> None:
    simulate_gpu(monkeypatch)
    data, pair = batches(11), both(engine="graphs", resample_every=3, **{**WIDTHS, "total_steps": 100})
    first = pair[0].mask
    for batch in data:
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in pair]
        assert losses[0] == losses[1]
    assert not torch.equal(first, pair[0].mask)
    assert [sparse.reason for sparse in pair] == [None, None]
    assert differences(*(sparse.state_dict() for sparse in pair)) == []


def test_the_papers_policy_runs_eagerly_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpu(monkeypatch)
    sparse = start("cpu", engine="auto")
    assert sparse.engine == "eager"
    assert "dense weights are on the host" in str(sparse.reason)
    with pytest.raises(ValueError, match="`engine` is 'graphs', but dense weights are on the host"):
        start("cpu", engine="graphs")


@pytest.mark.parametrize("options", [{"align": 1}, {"align": 4}, WIDTHS], ids=str)
def test_the_model_shares_no_memory_with_the_stored_weights(options: dict[str, Any]) -> None:
    sparse = start("cpu", "adamw", **options)
    train(sparse, batches(3))
    dense = storages(sparse._networks.store[key] for key in sparse._networks.store)
    states = [v for state in sparse.optimizer.state.values() for v in state.values() if v.dim() > 0]
    assert len(states) == 2 * len(list(sparse.model.parameters()))
    assert not dense & storages([*sparse.model.parameters(), *sparse.model.buffers(), *states])
    for net in sparse.references():
        assert not dense & storages([*net.parameters(), *net.buffers()])


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "per_weight"),
    [(lambda p: torch.optim.SGD(p, lr=0.1), 0), (OPTIMIZERS["sgd"], 4), (OPTIMIZERS["adamw"], 8)],
    ids=["sgd without momentum", "sgd", "adamw"],
)
def test_needs_are_counted_from_shapes(optimizer: Any, per_weight: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    weights = 10 * 20 + 20 + 2 * 20
    made = optimizer(model.parameters())
    needs = memory.estimate(model, made, Params(0.25))
    assert (needs.weights, needs.state) == (4 * weights + 2 * 20 * 4 + 8, per_weight * weights)
    assert needs.subnet == int(0.25 * (4 * needs.weights + 2 * needs.state))
    assert memory.estimate(model, made, Channels(0.5)).subnet == needs.subnet  # of inputs and of outputs
    assert memory.estimate(model, made, Flops(0.5)).subnet == 2 * needs.subnet
    assert memory.estimate(model, made).subnet == 4 * needs.subnet
    assert memory.estimate(model, made, joined([Flops(0.5), Params(0.25), Channels(0.6)])).subnet == needs.subnet
    assert needs.verification == 2 * 8 * weights  # two copies in float64
    assert needs.host == needs.weights + max(needs.state, needs.verification)
    assert not made.state, "nothing was made"


def test_a_network_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = models.build("vgg19", num_classes=10, width=100.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    monkeypatch.setattr(memory, "free_on_host", lambda: 10**9)
    with pytest.raises(
        MemoryError,
        match=r"does not fit on the host: it needs 3\d{3}\.\d+ GiB more, and 0.93 GiB are free.*"
        r"dense weights 7\d{2}\.\d+ GiB and optimizer state 7\d{2}\.\d+ GiB",
    ):
        SparseTraining(model, optimizer, torch.zeros(1, 3, 32, 32), Flops(0.05), full_model_device="cpu")
    monkeypatch.setattr(memory, "free_on_host", lambda: 2**43)
    with pytest.raises(ValueError, match=r"`model` is on the meta device.* needs dense weights 7.*to_empty"):
        SparseTraining(model, optimizer, torch.zeros(1, 3, 32, 32), Flops(0.05), full_model_device="cpu")


def test_networks_that_do_not_fit_on_the_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monkeypatch.setattr(memory, "free_on_device", lambda device: 1000)
    with FakeTensorMode():
        example = torch.zeros(1, 1, 8, 8, device="cuda")
    with pytest.raises(
        MemoryError, match=r"do not fit on cuda.*: they need about 0.0\d MiB without activations, and 0.00 MiB are"
    ):
        SparseTraining(model, OPTIMIZERS["sgd"](model.parameters()), example, Flops(0.5), full_model_device="cpu")


def test_devices_that_are_not_possible_are_refused() -> None:
    model = Net()
    optimizer, example = OPTIMIZERS["sgd"](model.parameters()), torch.zeros(1, 1, 8, 8)
    with pytest.raises(ValueError, match="`full_model_device` is 'cuda:1'; it must be 'cpu'"):
        SparseTraining(model, optimizer, example, Flops(0.5), full_model_device="cuda:1")
    with pytest.raises(ValueError, match="`example_inputs` holds no tensor"):
        SparseTraining(model, optimizer, {"size": 3}, Flops(0.5), full_model_device="cpu")
    with FakeTensorMode():
        there = nn.Module()
        there.weight = nn.Parameter(torch.empty(2, 2, device="cuda"))
    with pytest.raises(ValueError, match="`full_model_device` is 'cpu', but `model` is on cuda; build it on the CPU"):
        memory.place(there, [OPTIMIZERS["sgd"](there.parameters())], example, Flops(0.5), "cpu")


def test_free_memory_is_a_part_of_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free_on_host() <= total
    monkeypatch.setattr(memory, "Path", lambda name: (_ for _ in ()).throw(OSError))
    assert 0 < memory.free_on_host() <= total


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [{"engine": "eager", "align": 1}, {"engine": "eager", "align": 4}, {**WIDTHS, "engine": "graphs"}],
    ids=str,
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_training_with_dense_weights_on_the_host(
    optimizer: str, options: dict[str, Any], differences: Differences
) -> None:
    torch.backends.cudnn.deterministic = True
    data = batches(12, device="cuda")
    plain, hosted = (start(home, optimizer, "cuda", resample_every=3, **options) for home in (None, "cpu"))
    assert {tensor.device.type for tensor in (*hosted.model.parameters(), *hosted.model.buffers())} == {"cuda"}
    assert train(plain, data) == train(hosted, data)
    assert hosted.engine == plain.engine == options["engine"]
    states = [sparse.state_dict() for sparse in (plain, hosted)]
    for name in hosted.graph.tensors:
        assert states[1]["model"][name].device.type == "cpu"
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor.cpu(), states[1]["model"][name].cpu()), name
    for sparse in (plain, hosted):
        sparse.load_state_dict(states[1])
    assert train(plain, data) == train(hosted, data)
    for sparse in (plain, hosted):
        sparse.settle(data, loss_fn)
    assert train(plain, data[:4]) == train(hosted, data[:4])
    small = hosted.finish(data, loss_fn)
    assert {tensor.device.type for tensor in small.state_dict().values()} == {"cuda"}
    assert differences(plain.finish(data, loss_fn).state_dict(), small.state_dict()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_dense_weights_never_come_to_the_gpu(engine: str) -> None:
    """They take 160 MB, with optimizer state three times that; the device has workspaces of about 100 MB, too."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(2000, 2000), nn.ReLU())), nn.Linear(2000, 4))
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    images = torch.randn(8, 2000, device="cuda")
    labels = torch.zeros(8, dtype=torch.int64, device="cuda")
    began = torch.cuda.memory_allocated()
    sparse = SparseTraining(
        model,
        OPTIMIZERS["adamw"](model.parameters()),
        images[:1],
        Flops(0.05),
        engine=engine,
        policy=EqualWorth(resample_every=2),
        full_model_device="cpu",
    )
    train(sparse, [(images, labels)] * 8)
    assert sparse.engine == engine
    sparse.load_state_dict(sparse.state_dict())
    train(sparse, [(images, labels)] * 4)
    sparse.finish([(images, labels)], loss_fn)
    assert torch.cuda.max_memory_allocated() - began < 1.5 * dense
