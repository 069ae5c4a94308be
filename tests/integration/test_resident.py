"""Networks larger than the device: a dense model that stays on the host is trained as one that does not, bit for bit.

On the CPU both sides of the bus are the same memory, and yet nothing is shared between them: what a draw needs must
have been moved. The last tests need a GPU.
"""

import copy
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import resident as benchmark
import torch
import torch.nn.functional as F
from inventory import Peak
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from examples import larger_than_the_card
from slimstart import Channels, Flops, Params, SparseTraining, memory, models
from slimstart.narrow import ResidentNetworks, ResidentSlotNetworks, resident_slots
from slimstart.narrow.page_locked import ALIGN, PAGE, PageLocked, pack_
from slimstart.policies import EqualWorth, _ragged
from slimstart.steps import DeviceSearch, graphs
from slimstart.steps.captured import CapturedStep
from tests.pretended_gpu import pretend
from tests.settings import arguments

Differences = Callable[[Any, Any], list[str]]
SLOW = pytest.mark.slow
ROOT = Path(__file__).parents[2]


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
    """A training on a device, with its dense model there, or at home."""
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


CASES = [
    {"align": 1},
    pytest.param({"align": 4, "optimizer": "adamw", "resample_every": 3}, marks=SLOW),
    pytest.param({"align": 1, "optimizer": "adamw", "resample_every": 1, "estimator": "leave_one_out"}, marks=SLOW),
    pytest.param({"align": 4, "estimator": "leave_one_out"}, marks=SLOW),
    pytest.param({"align": 1, "coupling": "stream", "estimator": "pge"}, marks=SLOW),
    pytest.param({"align": 4, "coupling": "stream", "estimator": "pge", "resample_every": 1}, marks=SLOW),
    pytest.param({"align": 2, "optimizer": "adamw", "resample_every": 1}, marks=SLOW),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_resident_training_is_the_same_bit_for_bit(options: dict[str, Any], differences: Differences) -> None:
    """Weights, statistics, optimizer state, s, masks; snapshots, checkpoints, the settled and the finished network."""
    data, (plain, resident) = batches(9), both(**options)
    expected = ResidentNetworks if options["align"] == 1 else ResidentSlotNetworks
    assert isinstance(resident._networks, expected)
    assert train(plain, data[:4]) == train(resident, data[:4])
    assert differences(plain.state_dict(), resident.state_dict()) == []  # also in mid-window
    assert train(plain, data[4:7]) == train(resident, data[4:7])
    assert differences(plain.snapshot().state_dict(), resident.snapshot().state_dict()) == []

    state = plain.state_dict()
    assert differences(state, resident.state_dict()) == []
    other = start("cpu", **options)
    train(other, data[:2])  # elsewhere
    other.load_state_dict(state)
    rest = train(plain, data)
    assert rest == train(resident, data) == train(other, data)
    back = start(None, **options)
    back.load_state_dict(other.state_dict())
    assert differences(back.state_dict(), other.state_dict()) == []

    for sparse in (plain, resident):
        sparse.settle(data, loss_fn, num_samples=3, max_batches=2)
    assert torch.equal(plain.mask, resident.mask)
    assert train(plain, data[:3]) == train(resident, data[:3])
    assert differences(plain.state_dict(), resident.state_dict()) == []
    small = [sparse.finish(data, loss_fn).state_dict() for sparse in (plain, resident)]
    assert differences(*small) == []


@pytest.mark.parametrize("align", [1, 4])
def test_finish_in_the_middle_leaves_the_search_alone(align: int) -> None:
    """It compares masks with the second network, which was being filled for the next draw."""
    data, (plain, resident) = batches(8), both(align=align, resample_every=3)
    for sparse in (plain, resident):
        train(sparse, data[:1])
    assert train(plain, data[:3]) == train(resident, data[:3])
    for sparse in (plain, resident):
        sparse.finish(data[:2], loss_fn, num_samples=3)
    assert train(plain, data) == train(resident, data)


@pytest.mark.parametrize("align", [1, 4])
def test_values_and_settings_that_are_loaded_in_mid_window(align: int, differences: Differences) -> None:
    data, (plain, resident) = batches(6), both(align=align, resample_every=3)
    weights = start(None).model.state_dict()
    for sparse in (plain, resident):
        train(sparse, data[:4])
        sparse.model.load_state_dict(weights)
        sparse.optimizer.load_state_dict(copy.deepcopy(sparse.optimizer.state_dict()))
    assert train(plain, data) == train(resident, data)
    assert differences(plain.state_dict(), resident.state_dict()) == []
    with pytest.raises(ValueError, match="parameter group"):
        resident.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    assert train(plain, data) == train(resident, data), "a state dict that is refused has changed nothing"


def test_a_loop_by_hand() -> None:
    data, (plain, resident) = batches(5), both(align=1)
    for batch in data:
        losses = []
        for sparse in (plain, resident):
            loss = loss_fn(sparse.net, *batch)
            with torch.no_grad():
                reference = loss_fn(sparse.reference, *batch) if sparse.needs_reference else None
            sparse.optimizer.zero_grad()
            loss.backward()
            sparse.optimizer.step()
            sparse.update(loss, reference)
            losses.append((float(loss.detach()), reference))
        assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"optimizer": "adamw", "estimator": "leave_one_out"}, marks=SLOW)], ids=str
)
def test_the_graph_engine_trains_a_resident_model_too(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, differences: Differences
) -> None:
    pretend(monkeypatch)
    data, (plain, resident) = batches(7), both(engine="graphs", resample_every=3, **options)
    assert isinstance(resident._search, DeviceSearch)
    assert isinstance(resident._networks, ResidentSlotNetworks)
    alike(plain, resident, data)
    state = plain.state_dict()
    assert differences(state, resident.state_dict()) == []
    for sparse in (plain, resident):
        sparse.load_state_dict(state)
    alike(plain, resident, data[:5])
    state = plain.state_dict()
    for sparse in (plain, resident):  # between two windows: the first step is captured anew, and runs references
        sparse.load_state_dict(state)
    alike(plain, resident, data[:4])
    for sparse in (plain, resident):
        sparse.settle(data, loss_fn)
    alike(plain, resident, data[:3])


@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_widths_that_change_with_every_draw(
    engine: str, monkeypatch: pytest.MonkeyPatch, differences: Differences
) -> None:
    pretend(monkeypatch)
    # Nothing pulls its widths together.
    data, pair = batches(11), both(engine=engine, policy=EqualWorth(pull=0), budget=Flops(0.4), resample_every=3)
    shapes = []
    for start in range(0, 11, 3):
        alike(*pair, data[start : start + 3])
        shapes.append([p.shape for p in pair[1].net.parameters()])
    assert any(one != shapes[0] for one in shapes[1:])
    assert isinstance(pair[1]._networks, ResidentSlotNetworks if engine == "graphs" else ResidentNetworks)
    assert differences(*(sparse.state_dict() for sparse in pair)) == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_any_share_may_be_fetched_ahead(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_slots, "AHEAD", share)
    plain, resident = both(align=4)
    alike(plain, resident, batches(5))
    networks = resident._networks
    assert isinstance(networks, ResidentSlotNetworks)
    assert (len(networks._exchanges[0].old) > 0, len(networks._turnover._parts) > 0) == (share > 0, share < 1)


def test_a_capture_that_runs_out_of_memory_is_tried_again_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    attempts, emptied = [], []

    def scarce(*args: Any) -> CapturedStep:
        attempts.append(args[-1])
        if len(emptied) < len(attempts):
            raise torch.OutOfMemoryError
        return CapturedStep(*args)

    monkeypatch.setattr(graphs, "CapturedStep", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.extend([None, None]))
    sparse = start("cpu", engine="graphs", resample_every=3)
    train(sparse, batches(3))
    assert (attempts, sparse.reason) == ([True, True], None), "fused, both times"


def alike(plain: SparseTraining, resident: SparseTraining, data: list[tuple[Tensor, Tensor]]) -> None:
    """Train both; after every step, all that they must have in common is compared, and named where it differs."""
    pair = plain, resident
    for number, batch in enumerate(data):
        losses = [float(sparse.step(loss_fn, *batch)) for sparse in pair]
        apart = how_far_apart(*(watched(sparse) for sparse in pair))
        captured = [None if sparse._steps is None else sparse._steps.num_captures for sparse in pair]
        assert (*losses[1:], apart) == (*losses[:1], []), (
            f"step {number} of {len(data)}: losses {losses}, captures {captured}, "
            f"reasons {[sparse.reason for sparse in pair]}\n" + "\n".join(apart)
        )
    assert plain.reason == resident.reason
    if plain._steps is not None and resident._steps is not None:
        assert plain._steps.num_captures > 0 < resident._steps.num_captures


def watched(sparse: SparseTraining) -> dict[str, Tensor]:
    """Losses of the network and its references, s, masks, and all that changes in the network and the optimizer."""
    net = sparse._networks.net
    found = {"s": sparse.keep_probs, "masks": sparse._networks.masks}
    if sparse._steps is not None:
        found["losses"] = sparse._steps.losses
    found |= {name: tensor.detach() for name, tensor in net.module.named_parameters()}
    found |= dict(net.module.named_buffers())
    for name, parameter in net.module.named_parameters():
        state = sparse.optimizer.state.get(parameter, {})
        found |= {f"{name}, {key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {name: tensor.cpu() for name, tensor in found.items()}


def how_far_apart(mine: dict[str, Tensor], its: dict[str, Tensor]) -> list[str]:
    assert mine.keys() == its.keys()
    found = []
    for name, tensor in mine.items():
        other = its[name]
        if tensor.shape != other.shape:
            found.append(f"{name}: shapes {tuple(tensor.shape)} and {tuple(other.shape)}")
        elif not torch.equal(tensor, other):
            distance = (tensor.double() - other.double()).abs()
            found.append(f"{name}: {int((tensor != other).sum())} of {tensor.numel()}, by {distance.max():.3g}")
    return found


# --- what is where ---------------------------------------------------------------------------------------------------


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


@pytest.mark.parametrize("align", [1, 4])
def test_the_device_shares_no_memory_with_the_dense_model(align: int) -> None:
    sparse = start("cpu", "adamw", align=align)
    train(sparse, batches(3))
    dense = storages([*sparse.model.parameters(), *sparse.model.buffers()])
    dense |= storages(v for s in sparse._networks.link._state.values() for v in s.values() if v.dim() > 0)
    for net in (sparse.net, sparse._networks.reference.module):
        assert not dense & storages([*net.parameters(), *net.buffers()])
    states = [v for s in sparse.optimizer.state.values() for v in s.values() if v.dim() > 0]
    assert len(states) == 2 * len(list(sparse.model.parameters()))
    assert not dense & storages(states)


@pytest.mark.parametrize("align", [1, 4])
def test_only_what_changes_crosses_the_bus(align: int) -> None:
    """Bytes, counted entry by entry; and an entry that stays is not read at home, where it is poisoned."""
    data, sparse = batches(9), start("cpu", align=align, resample_every=3)
    train(sparse, data[:3])  # the optimizer has state now
    twin = copy.deepcopy(sparse.state_dict())
    for number in range(2):
        now, before = present(sparse, sparse.mask), sparse.traffic
        for name, tensor in (*sparse.model.named_parameters(), *sparse.model.named_buffers()):
            if name in sparse.graph.tensors:
                tensor.data[now[name]] = torch.nan
        train(sparse, data[3 * number : 3 * number + 1])
        assert sparse._search.pending is not None
        following, reference = (present(sparse, mask) for mask in sparse._search.pending)
        train(sparse, data[3 * number + 1 : 3 * number + 3])
        up = size(sparse, following, now, copies=2) + size(sparse, reference, now, copies=1)
        assert sparse.traffic.up - before.up == up > 0
        assert sparse.traffic.down - before.down == size(sparse, now, following, copies=2) > 0
        assert up < size(sparse, following, None, copies=2) + size(sparse, reference, None, copies=1)
    other = start("cpu", align=align, resample_every=3)
    other.load_state_dict(twin)
    train(other, data[:6])
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, sparse.model.state_dict()[name]), name


def size(sparse: SparseTraining, there: dict[str, Tensor], but: dict[str, Tensor] | None, copies: int) -> int:
    """Bytes of float32 numbers; parameters have copies of their size, statistics are alone."""
    parameters = dict(sparse.model.named_parameters())
    return sum(
        4 * (copies if name in parameters else 1) * int((entries if but is None else entries & ~but[name]).sum())
        for name, entries in there.items()
    )


def present(sparse: SparseTraining, mask: Tensor) -> dict[str, Tensor]:
    """For every tensor that is cut, which of its entries a mask keeps."""
    selection, found = sparse.graph.select(mask), {}
    tensors = {**dict(sparse.model.named_parameters()), **dict(sparse.model.named_buffers())}
    for name in sparse.graph.tensors:
        whole = torch.zeros(tensors[name].shape, dtype=torch.bool)
        ones = torch.ones(selection.shape(name, whole.shape), dtype=torch.bool)
        found[name] = selection.scatter_(name, whole, ones)
    return found


@pytest.mark.parametrize("align", [1, 4])
def test_all_of_it_crosses_when_it_is_asked_for(align: int) -> None:
    sparse = start("cpu", align=align)
    assert start(None).traffic.up == start(None).traffic.down == 0
    train(sparse, batches(3))
    before, entries = sparse.traffic, present(sparse, sparse.mask)
    sparse.sync()
    whole = {name for name, _ in sparse.model.named_parameters()} - set(entries)
    assert whole == {"head.bias"}
    others = 2 * 4 * 4 + 3 * 8 + 4  # its momentum too; three counters of batches, one of forwards
    assert sparse.traffic.down - before.down == size(sparse, entries, None, copies=2) + others
    assert sparse.traffic.up == before.up


# --- memory ----------------------------------------------------------------------------------------------------------


def test_tensors_are_packed_with_their_strides() -> None:
    tensors = [
        nn.Parameter(torch.randn(3, 5)),
        torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.randn(6, 8)[:, ::2],
    ]
    values, strides = [tensor.detach().clone() for tensor in tensors], [tensor.stride() for tensor in tensors]
    buffer = pack_(tensors)
    assert len(storages(tensors)) == len(tensors)  # PyTorch saves and copies whole storages
    torch.save(dict(enumerate(tensors)), io.BytesIO())
    assert copy.deepcopy(tensors[1]).untyped_storage().nbytes() == 4 * 48
    assert (buffer.data_ptr() % PAGE, buffer.numel()) == (0, PAGE)
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert [tensor.stride() for tensor in tensors[:3]] == strides[:3]
    assert tensors[3].is_contiguous()
    assert [tensor.data_ptr() - buffer.data_ptr() for tensor in tensors] == [0, ALIGN, 2 * ALIGN, 3 * ALIGN]
    before = tensors[0].data_ptr()
    PageLocked(torch.device("cpu")).take_(tensors)
    assert tensors[0].data_ptr() == before


def test_memory_is_unlocked_when_nobody_needs_it_but_not_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}
    captures = [False]

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            assert not captures[0]
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])

    def is_pinned(tensor: Tensor) -> bool:
        first = tensor.untyped_storage().data_ptr()
        return any(address <= first < address + size for address, size in locked.items())

    monkeypatch.setattr(Tensor, "is_pinned", is_pinned)
    keeper, weights, state = PageLocked(torch.device("cuda")), torch.zeros(5), torch.zeros(6)
    keeper.take_([weights])
    keeper.take_([state])
    assert len(locked) == 2
    state = torch.zeros(6)  # another one was loaded
    keeper.take_([weights, state])
    assert len(locked) == 2, "that of the old state is free again"
    captures[0] = True
    del keeper
    assert len(locked) == 2
    captures[0] = False
    other = PageLocked(torch.device("cuda"))
    other.take_([torch.zeros(3)])
    assert len(locked) == 1
    del other
    assert not locked


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
    assert needs.proof == 2 * 8 * weights  # two copies in float64
    assert needs.host == needs.weights + max(needs.state, needs.proof)
    assert not made.state, "nothing was made"


def test_a_network_that_cannot_be_held_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = models.build("vgg19", num_classes=10, width=100.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    monkeypatch.setattr(memory, "free_on_host", lambda: 10**9)
    with pytest.raises(
        MemoryError,
        match=r"cannot be held dense: 3\d{3}\.\d+ GiB are still needed on the host and 0.93 GiB are free.*"
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
        MemoryError, match=r"about 0.0\d MiB are needed on cuda.*, without activations, and 0.00 MiB are"
    ):
        SparseTraining(model, OPTIMIZERS["sgd"](model.parameters()), example, Flops(0.5), full_model_device="cpu")


def test_places_that_cannot_be_meant() -> None:
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
        SparseTraining(there, OPTIMIZERS["sgd"](there.parameters()), example, Flops(0.5), full_model_device="cpu")


def test_free_memory_is_some_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free_on_host() <= total
    monkeypatch.setattr(memory, "Path", lambda name: (_ for _ in ()).throw(OSError))
    assert 0 < memory.free_on_host() <= total


# --- example and benchmark -------------------------------------------------------------------------------------------


def test_the_example_trains_a_network_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--model", "small", "--width", "0.5", "--steps", "6", "--resample-every", "3", "--batch-size", "8"]
    larger_than_the_card.main([*tiny, "--budget", "0.3", "--device", "cpu"])
    output = capsys.readouterr().out
    assert re.search(r"needs dense weights 0.14 MiB and optimizer state 0.14 MiB", output)
    assert len(re.findall(r"step [36]  loss \d", output)) == 2
    (weights,) = re.findall(r"finished: .* with (\d+) weights", output)
    dense = models.build("small", num_classes=10, in_channels=1, width=0.5)
    assert int(weights) < 0.5 * sum(p.numel() for p in dense.parameters())


@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_what_lies_on_the_device_is_known_beforehand(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind by kind, against the tensors of a training."""
    pretend(monkeypatch)
    model, example = benchmark.build(0.25, "cpu"), torch.randn(4, 3, 32, 32)
    known = benchmark.inventory(model, example, 0.05, policy)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = arguments(engine="graphs", resample_every=3, full_model_device="cpu", policy=policy)
    sparse = SparseTraining(model, optimizer, example[:1], Flops(0.05), **options)
    for _ in range(2):  # eagerly, and captured
        sparse.step(loss_fn, example, torch.zeros(4, dtype=torch.int64))
    networks = sparse._networks
    networks.refresh()
    assert isinstance(networks, ResidentSlotNetworks)
    parameters, states = networks.net.parameters.values(), sparse.optimizer.state.values()
    reference, is_paper = networks.reference, policy == "paper"
    expected = {
        "weights": held([*parameters, *networks.net.buffers.values()]),
        "gradients": held([p.grad for p in parameters if p.grad is not None]),
        "momentum": held([state["momentum_buffer"] for state in states]),
        "occupied": held(networks.occupied.values()),
        "ahead": held([new for _, _, new, _ in networks._exchanges[0]._tensors]),
        "scratch": held([networks._scratch]),
        "cublas": 5 * (2 * 4096 + 8 * 16) * 1024,
    }
    if is_paper:
        expected["reference"] = held([*reference.parameters.values(), *reference.buffers.values()])
    counted = {"activations", "convolutions"} | ({"reference activations", "policy"} if is_paper else {"last step"})
    assert known.keys() == expected.keys() | counted
    assert {kind: known[kind] for kind in expected} == expected
    # What a backward keeps is at least what every batch norm is given, and the ReLU behind it.
    given: list[Tensor] = []
    for layer in networks.net.module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda _, inputs, output: given.extend([inputs[0], output]))
    networks.net.module(example)
    # The last gradients take the place of the first activations that are done with.
    assert held(given) - known["gradients"] < known["activations"] < 1.5 * held(given)
    if is_paper:  # 63 points at once
        points = 63 * 8 * sparse.graph.num_units
        assert 3 * points < known["policy"] < 5 * points + 2**20


def test_bytes_are_counted_while_tensors_live() -> None:
    with torch.device("meta"), Peak() as counted:
        a = torch.zeros(100)
        b = a.view(10, 10) * 2
        del a
        assert (counted.now, counted.most) == (400, 800)
        b.add_(1)
        c = torch.cat([b, b.double()])
        assert (counted.now, counted.most) == (400 + 1600, 400 + 800 + 1600)
        del b, c
        assert counted.now == 0
        weight = nn.Parameter(torch.zeros(10, 10))
        weight.square().sin().sum().backward()
        assert counted.now == 2 * 400, "the weight and its gradient"


def test_members_are_forgotten_before_products_are_put_behind_them() -> None:
    sets = _ragged.Incidence(torch.zeros(64, dtype=torch.int64), torch.arange(64), 1)
    product, x = _ragged.RaggedProduct(sets, 65, 64), torch.rand(63, 65, dtype=torch.float64)
    x[:, 64] = 1
    with Peak() as counted:
        result = product(x)
    assert torch.allclose(result[:, 65], x.prod(1))
    assert counted.most == 63 * 8 * (1 + 66), "one product, and the result"


@pytest.mark.slow
def test_a_row_that_runs_out_of_memory_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(policy: str, home: str | None, *_: Any) -> dict[str, Any]:
        if (policy, home) == ("paper", "cpu"):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        return {"policy": policy, "full_model_device": home, "step_s": 3.0 if home else 2.0}

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["policy"] for row in record["rows"]] == 2 * ["paper", "equal_worth"]
    assert ["out_of_memory" in row for row in record["rows"]] == [True, False, False, False]
    failed = record["rows"][0]
    assert failed["out_of_memory"] == "Tried to allocate 2.00 MiB"
    assert failed["known_bytes"]["cublas"] == 5 * 8 * 16 * 1024
    assert record["slower"] == {"equal_worth": 0.5}
    for wrong in (["--windows", "14"], ["--resample-every", "2"]):
        with pytest.raises(SystemExit):
            benchmark.main([*wrong, "--device", "cpu"])
        assert "equal_worth settles after 16 draws" in capsys.readouterr().err


def test_who_has_the_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(graph: int, *sizes: int) -> dict[str, Any]:
        blocks = [
            {"requested_size": abs(size), "state": "active_allocated" if size > 0 else "inactive"} for size in sizes
        ]
        return {"segment_pool_id": (0, graph), "blocks": blocks}

    segments = [segment(0, 100, 30, -500), segment(0, 30, 30), segment(1, 30, 200)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 420)
    assert [tuple(one.values()) for one in benchmark.taken(torch.device("cuda"))["largest"]] == [
        (200, 1, True),
        (100, 1, False),
        (30, 3, False),
        (30, 1, True),
    ]
    assert benchmark.taken(torch.device("cpu")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["paper", "equal_worth"])
def test_the_networks_of_the_benchmark_need_seven_tenths_of_the_limit(policy: str) -> None:
    limit = 5 * 2**30
    with torch.device("meta"):
        model = models.build("vgg19", num_classes=10, width=benchmark.width_of(4 * limit))
        images = torch.zeros(16, 3, 32, 32)
    assert 8 * sum(p.numel() for p in model.parameters()) >= 4 * limit
    assert sum(benchmark.inventory(model, images, 0.05, policy).values()) < 0.7 * limit


def held(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
def test_the_benchmark_writes_a_record(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "resident.py"), "--tiny", "--device", "cpu"]
    subprocess.run([*command, "--out", str(tmp_path / "record.json")], check=True, cwd=ROOT)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["rows"]) == 4
    for resident, plain in zip(record["rows"][:2], record["rows"][2:], strict=True):
        assert all(resident[key] == plain[key] for key in ("policy", "parameters", "width"))
        assert resident["up_bytes_per_draw"] > 0 == plain["up_bytes_per_draw"]
        assert record["slower"][resident["policy"]] == pytest.approx(resident["step_s"] / plain["step_s"] - 1)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"engine": "eager"}, {"engine": "eager", "align": 4}, {"engine": "graphs"}], ids=str
)
@pytest.mark.parametrize("estimator", ["vr_pge", "leave_one_out"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_with_the_dense_model_at_home(
    optimizer: str, estimator: str, options: dict[str, Any], differences: Differences
) -> None:
    torch.backends.cudnn.deterministic = True
    data = batches(12, device="cuda")
    plain, resident = (
        start(home, optimizer, "cuda", estimator=estimator, resample_every=3, **options) for home in (None, "cpu")
    )
    assert resident.engine == plain.engine == options["engine"]
    assert {p.device.type for p in resident.net.parameters()} == {"cuda"}
    alike(plain, resident, data)
    states = [sparse.state_dict() for sparse in (plain, resident)]
    assert {tensor.device.type for tensor in states[1]["model"].values()} == {"cpu"}
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor.cpu(), states[1]["model"][name]), name
    for sparse in (plain, resident):
        sparse.load_state_dict(states[1])
    alike(plain, resident, data)
    for sparse in (plain, resident):
        sparse.settle(data, loss_fn)
    alike(plain, resident, data[:4])
    small = resident.finish(data, loss_fn)
    assert {tensor.device.type for tensor in small.state_dict().values()} == {"cuda"}
    expected = plain.finish(data, loss_fn).state_dict()
    assert differences(expected, small.state_dict()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_a_dense_model_never_comes_to_the_gpu(engine: str) -> None:
    """Its weights are 160 MB, with optimizer state three times that; the device has workspaces of about 100 MB, too."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(2000, 2000), nn.ReLU())), nn.Linear(2000, 4))
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    images = torch.randn(8, 2000, device="cuda")
    labels = torch.zeros(8, dtype=torch.int64, device="cuda")
    began = torch.cuda.memory_allocated()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sparse = SparseTraining(
        model,
        optimizer,
        images[:1],
        Flops(0.05),
        engine=engine,
        policy=EqualWorth(resample_every=2),
        full_model_device="cpu",
    )
    train(sparse, [(images, labels)] * 8)
    sparse.load_state_dict(sparse.state_dict())
    train(sparse, [(images, labels)] * 4)
    sparse.finish([(images, labels)], loss_fn)
    assert torch.cuda.max_memory_allocated() - began < 1.5 * dense
    assert all(p.is_pinned() for p in model.parameters())
    assert sparse.traffic.up > 0


@pytest.mark.gpu
def test_a_gpu_reaches_packed_tensors() -> None:
    tensors = [torch.randn(3, 5), torch.randn(70_000), nn.Parameter(torch.randn(4, 3, 2, 2))]
    keeper = PageLocked(torch.device("cuda"))
    keeper.take_(tensors)
    assert all(tensor.is_pinned() for tensor in tensors)
    before = [tensor.data_ptr() for tensor in tensors]
    keeper.take_(tensors)
    assert [tensor.data_ptr() for tensor in tensors] == before
