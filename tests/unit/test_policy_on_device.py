"""Policies without the host: operations that CUDA graphs can capture, on the CPU and on "meta", without values."""

import io
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimstart.costs import CostTable
from slimstart.graph import trace
from slimstart.lab.models import resnet20, vgg19
from slimstart.policies import ESTIMATORS, Budget, Channels, DeviceLearner, Estimator, Flops, PaperSearch, Params
from tests.cost_tables import chain, cost_table, factor, search

BUDGETS = [Channels(0.5), Params(0.5), Flops(0.5)]
YES, NO = torch.tensor(True), torch.tensor(False)
# A stream whose channels two groups write and one of them reads: dependent pairs, products of several atoms.
STREAM = cost_table(
    [0, 0, 0, 1, 1, 1],
    [*([unit] for unit in range(6)), [0, 3], [1, 4], [2, 5]],
    [factor([0, 1, 2]), factor([3, 4, 5]), factor([6, 7, 8])],
    [(9, (2, 1)), (4, (0,))],
    constant=3,
)

# These ask for a value, or have a shape that depends on one; `lift_fresh` is a tensor made of the host's numbers.
ASKING = set(
    "_local_scalar_dense item is_nonzero equal nonzero masked_select bincount repeat_interleave lift_fresh".split()
)
ASKING |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
# These launch nothing.
VIEWS = set("view expand slice select unbind split split_with_sizes unsqueeze squeeze squeeze_ alias detach t".split())
VIEWS |= {"_unsafe_view", "empty", "transpose", "permute", "as_strided"}


class WithoutHost(TorchDispatchMode):
    """Refuses what a captured graph must not do, and counts kernels."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.kernels = device, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        assert name not in ASKING, f"{name} asks for a value"
        assert {tensor.device.type for tensor in tensors} <= {self.device}, f"{name} goes to another device"
        if name in ("index", "index_put", "index_put_"):
            by_mask = any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
            assert not by_mask, f"{name} by a mask depends on values"
        self.kernels[name] += name not in VIEWS
        return result


def stepped(policy: PaperSearch, generator: torch.Generator, ok: Tensor = YES) -> None:
    policy.learn_(torch.randn(policy.num_masks, generator=generator, dtype=torch.float64), ok)
    policy.draw_with(policy.random_numbers())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_value_is_read_on_the_host(device: str, budget: Budget, estimator: str) -> None:
    for table, total_steps in ((chain([6, 8, 5]), None), (STREAM, 20)):
        policy = search(table, budget, total_steps, estimator=estimator)
        assert policy.capturable
        policy.to(device)
        losses = torch.zeros(policy.num_masks, dtype=torch.float64, device=device)
        numbers, ok = policy.random_numbers().to(device), torch.ones((), dtype=torch.bool, device=device)
        table.at_least_one(policy.draw_with(numbers))  # the rule's tables go to the device once
        with WithoutHost(device):
            policy.learn_(losses, ok)
            table.at_least_one(policy.draw_with(numbers))


def test_reading_a_value_on_the_host_is_detected() -> None:
    gradient = ESTIMATORS["pge"].gradient
    peeking = Estimator("peeking", 1, lambda l, m, s, a: gradient(l, m, s, a) * float(l.sum()), capturable=True)
    policy = search(chain([6]), Flops(0.5), estimator=peeking)
    with WithoutHost("cpu"), pytest.raises(AssertionError, match="_local_scalar_dense asks for a value"):
        policy.learn_(torch.ones(1).double(), YES)
    with WithoutHost("cpu"), pytest.raises(AssertionError, match="goes to another device"):
        torch.zeros(3).to("meta")
    with WithoutHost("cpu"), pytest.raises(AssertionError, match="depends on values"):
        torch.zeros(3)[torch.zeros(3, dtype=torch.bool)]


@pytest.mark.parametrize(
    ("network", "budget", "most"),
    [(vgg19, Flops(0.2), 118), (vgg19, Channels(0.2), 82), (resnet20, Flops(0.2), 127)],
    ids=["vgg19, Flops", "vgg19, Channels", "resnet20, Flops"],
)
def test_number_of_kernels(network: Any, budget: Budget, most: int) -> None:
    """Each takes 2 to 4 microseconds in a graph, whatever the size."""
    table = trace(network(num_classes=10), torch.zeros(1, 3, 32, 32)).costs
    policy = search(table, budget, 100)
    numbers, losses = policy.random_numbers(), torch.tensor([1.0, 2.0]).double()
    policy.draw_with(numbers)
    with WithoutHost("cpu") as mode:
        policy.learn_(losses, YES)
        policy.draw_with(numbers)
    assert mode.kernels.total() <= most


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("table", [chain([6, 8, 5]), STREAM], ids=["chain", "stream"])
def test_it_learns_what_update_learns(budget: Budget, table: CostTable) -> None:
    """Kernels in a fixed number find what the adaptive projection finds, and draw the same masks."""
    ours, reference = (search(table, budget, 40, structure_lr=0.02, seed=5) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    ours.draw_with(ours.random_numbers())
    reference.draw()
    for _ in range(30):
        losses = torch.randn(2, generator=generator, dtype=torch.float64)
        ours.learn_(losses, YES)
        reference.update(losses)
        assert ours.budget.expected(ours.keep_probs) <= ours.budget.limit
        torch.testing.assert_close(ours.keep_probs, reference.keep_probs, rtol=0, atol=1e-5)
        assert torch.equal(ours.draw_with(ours.random_numbers()), reference.draw())
    assert ours.num_updates == reference.num_updates == 30
    assert float((ours.keep_probs - ours.keep_probs.mean()).abs().max()) > 0.05  # it went somewhere


def test_failed_steps_change_nothing(differences: Any) -> None:
    policy = search(chain([6, 8]), Flops(0.4), 9)
    generator = torch.Generator().manual_seed(0)
    policy.draw_with(policy.random_numbers())
    for _ in range(3):
        stepped(policy, generator)
    before = policy.state_dict()
    for losses in ([1.0, 2.0], [torch.nan, 1.0], [torch.inf, -torch.inf]):
        policy.learn_(torch.tensor(losses, dtype=torch.float64), NO)
    policy.draw_with(torch.zeros(2, 14).double())
    after = policy.state_dict()
    for key in ("keep_probs", "num_updates", "adam"):
        assert differences(before[key], after[key]) == []
    policy.learn_(torch.tensor([1.0, 2.0]).double(), YES)
    assert differences(before["keep_probs"], policy.keep_probs) != []


def test_everything_happens_in_place() -> None:
    """A graph replays on the same storage: through steps, a load, and moves to where it is."""
    policy = search(chain([6, 8]), Flops(0.4))
    masks = policy.draw_with(policy.random_numbers())

    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (policy._s, *policy._moments, policy._masks)]

    before = places()
    generator = torch.Generator().manual_seed(0)
    stepped(policy, generator)
    drawn = masks.clone()
    numbers = policy.random_numbers()
    assert policy.draw_with(numbers) is masks
    assert torch.equal(masks, numbers < policy.keep_probs)
    assert not torch.equal(masks, drawn)
    policy.update(torch.tensor([1.0, 2.0]))
    policy.load_state_dict(policy.state_dict())
    policy.to("cpu")
    policy.to(torch.device("cpu"))
    stepped(policy, generator)
    assert places() == before


def test_masks_use_the_random_numbers_of_the_policy() -> None:
    """`draw` is `draw_with(random_numbers())`, and the numbers are the CPU's."""
    first, again = (search(chain([30]), Channels(0.5), seed=4) for _ in range(2))
    numbers = again.random_numbers()
    assert torch.equal(numbers, torch.rand(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(first.draw(), numbers < 0.5)
    assert torch.equal(first.draw(), again.draw())
    again.to("meta")
    assert torch.equal(again.random_numbers(), first.random_numbers())


def test_states_do_not_know_devices() -> None:
    """What is pending is known after `draw_with` too, as an engine leaves it."""
    policy = search(chain([6, 8]), Flops(0.4), 20)
    policy.draw_with(policy.random_numbers())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        stepped(policy, generator)
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["num_updates"] == 3
    restored = search(chain([6, 8]), Flops(0.4), 20, seed=9)
    restored.load_state_dict(state)
    for one in (policy, restored):
        for _ in range(3):
            stepped(one, torch.Generator().manual_seed(1))
    assert torch.equal(policy.keep_probs, restored.keep_probs)
    restored.update(torch.tensor([0.5, 1.0]))  # masks are there
    with pytest.raises(RuntimeError, match="call `draw` before it"):
        restored.update(torch.tensor([0.5, 1.0]))


def test_which_policies_run_without_the_host() -> None:
    table = chain([6])
    own = Estimator("own", 1, lambda losses, masks, s, alpha: torch.zeros_like(s))
    assert isinstance(search(table, Flops(0.5)), DeviceLearner)
    assert not isinstance(table, DeviceLearner)
    assert search(table, Flops(0.5)).capturable
    assert not search(table, Flops(0.5), estimator=own).capturable
    assert not search(cost_table([], [], [factor([], offset=4)], [(5, (0, 0))]), Flops(1.0)).capturable


def test_wrong_arguments_are_refused() -> None:
    policy = search(chain([6]), Flops(0.5))
    with pytest.raises(
        ValueError, match=r"`numbers` has shape \(6,\); it must be that of `random_numbers\(\)`, \(2, 6\)"
    ):
        policy.draw_with(torch.zeros(6))
    with pytest.raises(ValueError, match=r"`losses` has shape \(1,\); vr_pge needs \(2,\)"):
        policy.learn_(torch.zeros(1), YES)
    own = search(chain([6]), Flops(0.5), estimator=Estimator("own", 1, lambda losses, masks, s, alpha: s))
    with pytest.raises(RuntimeError, match="which 'own' is not; where `capturable` is false"):
        own.learn_(torch.zeros(1), YES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("table", [chain([6, 8, 5]), STREAM], ids=["chain", "stream"])
def test_a_captured_graph_equals_the_cpu(budget: Budget, table: CostTable) -> None:
    ours, reference = (search(table, budget, 40, structure_lr=0.02, seed=5) for _ in range(2))
    for policy in (ours, reference):
        policy.draw_with(policy.random_numbers())
    ours.to("cuda")
    losses, ok = torch.zeros(2, dtype=torch.float64, device="cuda"), torch.zeros((), dtype=torch.bool, device="cuda")
    numbers = torch.zeros(2, table.num_units, dtype=torch.float64, device="cuda")
    start = ours.state_dict()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # cuBLAS makes itself ready; nothing changes
        ours.learn_(losses, ok)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        ours.learn_(losses, ok)
        masks = ours.draw_with(numbers)
    ours.load_state_dict(start)
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        drawn = torch.randn(2, generator=generator, dtype=torch.float64)
        losses.copy_(drawn)
        ok.fill_(step % 7 != 3)
        numbers.copy_(ours.random_numbers())
        graph.replay()
        reference.learn_(drawn, torch.tensor(step % 7 != 3))
        assert ours.budget.expected(ours.keep_probs) <= ours.budget.limit
        torch.testing.assert_close(ours.keep_probs, reference.keep_probs, rtol=0, atol=1e-9)
        assert torch.equal(masks.cpu(), reference.draw_with(reference.random_numbers()))
    resumed = search(table, budget, 40, structure_lr=0.02)
    resumed.load_state_dict(ours.state_dict())
    assert torch.equal(resumed.keep_probs, ours.keep_probs)
    assert resumed.num_updates == ours.num_updates == reference.num_updates
