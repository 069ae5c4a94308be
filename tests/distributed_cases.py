"""The code of the processes of the distributed tests; the tests compare the values that they return."""

import functools
import itertools
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DistributedDataParallel imports: here, once for all processes
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from slimstart import CheckpointError, EqualWorth, Flops, Paper, ProcessGroupError, SparseTraining
from slimstart.distributed import data_parallel, synchronise_batch_norm
from slimstart.distributed.process_group import ProcessGroup
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.run.environment import Place
from slimstart.lab.run.program import Program
from slimstart.lab.run.run_folder import Run
from slimstart.narrow import Networks
from slimstart.policies.estimators import vr_pge
from slimstart.steps import PlainTraining
from tests.layer_policy import Rounds
from tests.lines import AtLine
from tests.settings import arguments

EXAMPLE = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
WIDTHS = EqualWorth(resample_every=2, align=1, depth=0, tilt=0)  # of 60 steps, 12 are the search: six changes


class Residual(nn.Module):
    """Two layers that write into one stream, so that narrow networks have ports."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 8, 3, stride=2, padding=1), norm(8)
        self.inner, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), norm(8)
        self.last, self.norm3 = nn.Conv2d(8, 8, 3, padding=1), norm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(x + self.norm2(self.inner(x)))
        x = torch.relu(self.norm3(self.last(x)))
        return self.head(x.mean((2, 3)))


def network(norm: str, seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    model = Residual(nn.BatchNorm2d if norm == "batch" else lambda _: nn.Identity())
    return model.double()


def cross_entropy(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(ranks: ProcessGroup, num: int = 9, even: bool = False, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """One process's shares. Unless `even`, every third batch is short, and no process has as much as another."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(num):
        n = 5 if number % 3 == 2 and not even else 8
        images = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (n,), generator=generator)
        own = slice(n * ranks.rank // ranks.size, n * (ranks.rank + 1) // ranks.size)
        found.append((images[own], labels[own]))
    return found


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of options that newer versions have another name for
        return DistributedDataParallel(model, **options)


def structure(sparse: SparseTraining) -> dict[str, int]:
    return sparse.executed.num_filters


# --- many processes are one ------------------------------------------------------------------------------------------


def sparse_training(ranks: ProcessGroup, norm: str, **settings: Any) -> dict[str, Any]:
    """A search by `step`, settled, trained on, finished."""
    model = network(norm)
    if ranks.size > 1:
        model = synchronise_batch_norm(model)
        if ranks.rank > 0:  # all begin with the weights of the first
            model.head.weight.data.zero_()
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), **arguments(**settings))
    parallel = data_parallel(model) if ranks.size > 1 else None
    found: dict[str, Any] = {"losses": [], "masks": []}
    for batch in batches(ranks):
        found["masks"].append(sparse.mask)
        found["losses"].append(sparse.step(cross_entropy, *batch))
    found["keep_probs"], found["searched"] = sparse.keep_probs, sparse.state_dict()["model"]
    found["snapshot"] = state(sparse.snapshot(batches(ranks, 2), cross_entropy))
    sparse.settle(batches(ranks, 2), cross_entropy, num_samples=3)
    found["settled"] = sparse.mask
    found["losses"] += [sparse.step(cross_entropy, *batch) for batch in batches(ranks, 3)]
    found["momentum"] = {str(k): v["momentum_buffer"] for k, v in optimizer.state_dict()["state"].items()}
    found["finished"] = state(sparse.finish(batches(ranks, 2), cross_entropy))
    found["count"] = sparse.num_examples
    del parallel
    return found


def loaded(ranks: ProcessGroup) -> dict[str, Any]:
    """A search that is loaded, and finished without a further step: with the batches of all processes."""
    state_dict, found = None, dict[str, Any]()
    for _ in range(2):
        model = network("batch")
        if ranks.size > 1:
            model = synchronise_batch_norm(model)
        sparse = SparseTraining(model, sgd(model), EXAMPLE, Flops(0.4), **arguments())
        parallel = data_parallel(model) if ranks.size > 1 else None
        if state_dict is None:
            for batch in batches(ranks, 4):
                sparse.step(cross_entropy, *batch)
            state_dict = sparse.state_dict()
        else:
            sparse.load_state_dict(state_dict)
            found["snapshot"] = state(sparse.snapshot(batches(ranks, 2), cross_entropy))
            found["finished"] = state(sparse.finish(batches(ranks, 2), cross_entropy))
        del parallel
    return found


def plain_training(ranks: ProcessGroup, norm: str) -> dict[str, Any]:
    model = network(norm)
    runs = data_parallel(synchronise_batch_norm(model)) if ranks.size > 1 else model
    training = PlainTraining(runs, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [training.step(cross_entropy, *batch) for batch in batches(ranks)]
    return {"losses": losses, "model": state(model), "count": training.num_examples}


def by_hand(ranks: ProcessGroup) -> dict[str, Any]:
    """The paper's policy in a loop by hand; only even batches, whose gradients need no weights."""
    model = network("none", seed=ranks.rank)  # all begin with the weights of the first
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=Paper(resample_every=2))
    net = wrapped(model) if ranks.size > 1 else model
    masks = []
    for images, labels in batches(ranks, even=True):
        masks.append(sparse.mask)
        loss = cross_entropy(net, images, labels)
        losses = [cross_entropy(one, images, labels) for one in sparse.references()]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparse.update(loss, losses, count=len(labels))
    return {"model": state(model), "dense": sparse.state_dict()["model"], "s": sparse.keep_probs, "masks": masks}


CASES: dict[str, Callable[[ProcessGroup], dict[str, Any]]] = {
    "no norm": lambda ranks: sparse_training(ranks, "none"),
    "batch norm, padded": lambda ranks: sparse_training(ranks, "batch", align=4),
    "equal worth": lambda ranks: sparse_training(ranks, "batch", policy=WIDTHS, total_steps=45),
    "held, clipped": lambda ranks: sparse_training(ranks, "batch", resample_every=3, max_grad_norm=0.5),
    "dense model on the host": lambda ranks: sparse_training(ranks, "batch", resample_every=2, full_model_device="cpu"),
    "symmetric, one mask per stream": lambda ranks: sparse_training(
        ranks, "none", estimator="vr_pge_symmetric", coupling="stream"
    ),
    "loaded": loaded,
    "plain": lambda ranks: plain_training(ranks, "batch"),
    "by hand": lambda ranks: by_hand(ranks),
}


def several(ranks: ProcessGroup, names: Sequence[str]) -> dict[str, Any]:
    """One set of processes for many cases."""
    return {name: CASES[name](ranks) for name in names}


def in_float32(ranks: ProcessGroup, seeds: Sequence[int]) -> dict[str, Any]:
    """Losses and structures of short searches, by policy and seed."""
    found = {}
    for name, seed in itertools.product(("paper", "equal worth"), seeds):
        model = network("batch", seed).float()
        if ranks.size > 1:
            model = synchronise_batch_norm(model)
        policy = Paper(resample_every=2, seed=seed) if name == "paper" else WIDTHS
        sparse = SparseTraining(model, sgd(model), EXAMPLE.float(), Flops(0.4), policy=policy, total_steps=45)
        parallel = data_parallel(model) if ranks.size > 1 else None
        losses, kept = [], []
        for images, labels in batches(ranks, 12, seed=seed):
            losses.append(float(sparse.step(cross_entropy, images.float(), labels)))
            kept.append({"mask": sparse.mask, "keep_probs": sparse.keep_probs.clone()})
        found[f"{name}, seed {seed}"] = losses, kept
        del parallel
    return found


# --- DistributedDataParallel, before or after, inside or outside ----------------------------------------------------

WAYS = [
    (order, given, loop)
    for order, given in (("before", "wrapper"), ("before", "module"), ("after", "module"))
    for loop in ("own loop", "step")
]


def train_widths(
    ranks: ProcessGroup, order: str, given: str, loop: str, num: int = 14, policy: Any = WIDTHS, **options: Any
) -> dict[str, Any]:
    """Widths are learned from gradients, in the user's plain loop or by `step`."""
    model = network("batch")
    if ranks.size > 1:
        model = synchronise_batch_norm(model)
    optimizer = sgd(model)
    net: nn.Module = model
    if ranks.size > 1 and order == "before":
        net = wrapped(model, **options)
    sparse = SparseTraining(
        net if given == "wrapper" else model, optimizer, EXAMPLE, Flops(0.4), policy=policy, total_steps=60
    )
    if ranks.size > 1 and order == "after":
        net = wrapped(model, **options)
    before, losses, structures = net, [], [structure(sparse)]
    for images, labels in batches(ranks, num, even=True):
        if loop == "step":
            losses.append(sparse.step(cross_entropy, images, labels))
        else:
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(ranks.total(loss) / ranks.size)
        structures.append(structure(sparse))
    assert net is before
    found = {"losses": losses, "structures": structures, "settled": sparse.settled, "masks": sparse.mask}
    found |= {"dense": sparse.state_dict()["model"], "optimizer": optimizer.state_dict()["state"]}
    finished = sparse.finish()
    assert finished is (net if given == "wrapper" else model)
    optimizer.zero_grad()
    F.cross_entropy(net(images), labels).backward()  # from here on, plain data-parallel training
    found["gradients"] = [parameter.grad for parameter in model.parameters()]
    return found | {"model": state(model)}


def with_layers_removed(ranks: ProcessGroup) -> dict[str, Any]:
    """Layers go, return, and go for good: a branch that the forward adds, and a convolution."""
    policy = Rounds((), (0,), (), (0, 1), (0, 1))
    return {loop: train_widths(ranks, "before", "module", loop, policy=policy) for loop in ("own loop", "step")}


def compiled(ranks: ProcessGroup, order: str) -> dict[str, Any]:
    """`torch.compile` around the wrapper, or inside it."""
    model, counter = network("none"), CompileCounter()
    optimizer = sgd(model)
    if order == "alone":
        net: Any = model
    elif order == "outside":
        net = torch.compile(wrapped(model), backend=counter)
    else:
        net = wrapped(torch.compile(model, backend=counter))
    sparse = SparseTraining(net, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    for images, labels in batches(ranks, 6, even=True):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    dense = sparse.state_dict()["model"]
    return {"dense": dense, "processes": sparse.process_group.size, "compiled": counter.frame_count}


def all_ways(ranks: ProcessGroup) -> dict[str, Any]:
    return {" ".join(way): train_widths(ranks, *way) for way in WAYS}


def batch_norm_of_each(ranks: ProcessGroup) -> dict[str, Any]:
    """Plain batch norm in the plain loop: each process has statistics of its own, until they are stored."""
    found = {}
    for name, options in {"sync": {}, "no sync": {"broadcast_buffers": False}}.items():
        model = network("batch")
        optimizer = sgd(model)
        sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
        net = wrapped(model, **options)
        dist.set_debug_level(dist.DebugLevel.INFO)  # compare processes after every change
        for number, (images, labels) in enumerate(batches(ranks, 9, even=True)):
            if number == 8:  # after a change
                found[f"{name}, dense"] = sparse.state_dict()["model"]
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
        dist.set_debug_level(dist.DebugLevel.OFF)
        found[name] = {"changes": sparse.learner.num_rounds, "model": state(sparse.finish())}
    return found


# --- options and communication hooks ---------------------------------------------------------------------------------


class Partly(Residual):
    """With a layer that only odd steps use."""

    def __init__(self) -> None:
        super().__init__(lambda _: nn.Identity())
        self.extra = nn.Conv2d(8, 8, 1)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.inner(x))
        if self.use:
            x = x + self.extra(x)
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


def counting(net: DistributedDataParallel) -> list[int]:
    """Count the bytes of every bucket that is exchanged."""
    sent: list[int] = []

    def count(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / 2)

    net.register_comm_hook(None, count)
    return sent


def with_options(ranks: ProcessGroup, options: dict[str, Any], partly: bool = False) -> dict[str, Any]:
    """What is exchanged at every step over several changes, and what the wrapper says of itself."""
    torch.manual_seed(0)
    model: Any = Partly().double() if partly else network("none")
    optimizer = sgd(model, lr=1.0)  # so large that importances, and widths, keep changing
    net = wrapped(model, **options)
    sent = counting(net)
    sparse = SparseTraining(net, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    found: dict[str, Any] = {"sent": [], "said": [], "views": [], "masks": []}
    for number, (images, labels) in enumerate(batches(ranks, 12, even=True)):
        model.use = number % 2 == 1
        found["said"].append(sparse.gradient_bytes)
        found["masks"].append(sparse.mask.tolist())
        sent.clear()
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        found["views"].append(len(storages))
        optimizer.step()
        found["sent"].append(list(sent))
    names = "gradient_as_bucket_view static_graph find_unused_parameters bucket_cap_bytes broadcast_buffers".split()
    found["said of itself"] = {name: net._get_ddp_logging_data().get(name) for name in names}
    return found | {"model": state(model), "dense_bytes": sparse.dense_gradient_bytes}


def all_options(ranks: ProcessGroup) -> dict[str, Any]:
    return {
        "none": with_options(ranks, {}),
        "gradient_as_bucket_view": with_options(ranks, {"gradient_as_bucket_view": True}),
        "static_graph": with_options(ranks, {"static_graph": True}),
        "find_unused_parameters": with_options(ranks, {"find_unused_parameters": True}, partly=True),
        "broadcast_buffers": with_options(ranks, {"broadcast_buffers": False}),
        "bucket_cap_bytes": with_options(ranks, {"bucket_cap_mb": 0.001}),
    }


def hooks_of_pytorch(ranks: ProcessGroup) -> dict[str, Any]:
    """A built-in hook, whose gradients are rounded to float16, and PowerSGD, which keeps tensors of its own."""
    found: dict[str, Any] = {}
    for name in ("built in", "power"):
        model = network("none").float()
        optimizer = sgd(model)
        net = wrapped(model)  # one bucket: of several, PowerSGD over gloo exchanges parts in no fixed order
        power = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        if name == "power":
            net.register_comm_hook(power, powerSGD_hook)
        else:
            net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        policy = EqualWorth(resample_every=4, align=1, depth=0, tilt=0)
        sparse = SparseTraining(net, optimizer, EXAMPLE.float(), Flops(0.4), policy=policy, total_steps=100)
        found[name] = {"seen": [], "masks": []}
        for images, labels in batches(ranks, 14, even=True):
            found[name]["masks"].append(sparse.mask.tolist())
            optimizer.zero_grad()
            F.cross_entropy(net(images.float()), labels).backward()
            if name == "power":
                found[name]["seen"].append(len(power.error_dict) > 0)
            else:  # the mean of two numbers in float16: of all of them at once, by chance, hardly
                grads = [p.grad for p in model.parameters()]
                found[name]["seen"].append(all(torch.equal(2 * g, (2 * g).half().float()) for g in grads))
            optimizer.step()
        found[name] |= {"model": state(model), "hook": net._get_ddp_logging_data()["comm_hook"]}
    return found


def refused(ranks: ProcessGroup) -> dict[str, list[str]]:
    """Options that cannot follow, when the wrapper comes before, and when it comes after."""
    half = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    found: dict[str, list[str]] = {}
    for name in ("mixed_precision", "delay_all_reduce_named_params", "join()"):
        found[name] = []
        for order in ("before", "after"):
            model = network("none")
            optimizer = sgd(model)
            options: dict[str, Any] = {}
            if name == "mixed_precision":
                options = {name: half}
            elif name == "delay_all_reduce_named_params":
                options = {name: [("head.weight", model.head.weight)], "param_to_hook_all_reduce": model.head.weight}
            make = functools.partial(SparseTraining, model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS)
            sparse = make() if order == "after" else None
            net = wrapped(model, **options)
            if name == "join()":
                net._join_config = net._join_config._replace(enable=True)
            before = state(model)
            try:
                sparse = sparse or make()
                sparse.step(cross_entropy, *batches(ranks)[0])
            except ValueError as error:
                found[name].append(str(error))
            assert order == "after" or all(torch.equal(a, before[k]) for k, a in state(model).items())
    return found


def accumulated(ranks: ProcessGroup) -> dict[str, Any]:
    """Two halves of a batch; only the second exchanges gradients."""
    model = network("none")
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    net = wrapped(model) if ranks.size > 1 else None
    for images, labels in batches(ranks, 10, even=True):
        optimizer.zero_grad()
        with net.no_sync() if net is not None else torch.enable_grad():
            (F.cross_entropy((net or model)(images[::2]), labels[::2]) / 2).backward()
        (F.cross_entropy((net or model)(images[1::2]), labels[1::2]) / 2).backward()
        optimizer.step()
    return {"model": state(model), "mask": sparse.mask, "changes": sparse.learner.num_rounds}


# --- processes begin alike -------------------------------------------------------------------------------------------


def other_seeds(ranks: ProcessGroup, loop: str, order: str) -> dict[str, Any]:
    """Processes with different weights; after a first step, of learning rate zero, all have those of process 0."""
    model = network("batch", seed=ranks.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    net = data_parallel(model) if order == "before" else None
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS)
    before = sparse.state_dict()["model"]
    net = net or data_parallel(model)
    images, labels = batches(ranks)[0]
    if loop == "step":
        sparse.step(cross_entropy, images, labels)
    else:
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    kept = {name: {k: v for k, v in one.items() if "running" not in k and "num_batches" not in k}
            for name, one in {"before": before, "after": sparse.state_dict()["model"]}.items()}  # fmt: skip
    return kept | {"narrow": {k: v for k, v in state(model).items() if k in dict(model.named_parameters())}}


def per_rank_batch_norm(ranks: ProcessGroup) -> dict[str, Any]:
    """Statistics of each process's own examples: what is kept of them is alike on all processes."""
    model = network("batch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(1.0), policy=Paper(sampling="bernoulli"))
    parallel = data_parallel(model)
    images, labels = batches(ranks)[0]
    stem = model.stem(images).detach()
    sparse.step(cross_entropy, images, labels)
    every = ranks.gather(stem)
    del parallel
    return {"mean": model.norm1.running_mean.clone(), "stems": every, "state": state(model)}


def batch_norm_layer(ranks: ProcessGroup) -> dict[str, Any]:
    """Layers of other kinds than the networks have, alone; the loss is a sum, so that no weights are needed."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    slopes = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    own = slice(5 * ranks.rank // ranks.size, 5 * (ranks.rank + 1) // ranks.size)
    found = {}
    for name, settings in {
        "plain average": {"momentum": None},
        "not affine": {"affine": False},
        "no statistics": {"track_running_stats": False},
    }.items():
        layer = synchronise_batch_norm(nn.BatchNorm1d(3, dtype=torch.float64, **settings))
        inputs = values[own].clone().requires_grad_()
        for _ in range(2):
            out = layer(inputs)
        (out * slopes[own]).sum().backward()
        parameters = [ranks.total(parameter.grad) for parameter in layer.parameters()]
        whole = [torch.cat(ranks.gather(part)) for part in (out.detach(), inputs.grad)]
        found[name] = [*whole, *parameters, *layer.buffers()]
    return found


def too_little(ranks: ProcessGroup) -> str:
    layer = synchronise_batch_norm(nn.BatchNorm1d(3))
    try:
        layer(torch.zeros(1 - ranks.rank, 3))  # one value, on one of the processes
    except ValueError as error:
        return str(error)
    return ""


# --- the structure's gradient, enumerated ----------------------------------------------------------------------------


def enumerated(ranks: ProcessGroup) -> Tensor:
    """The mean over all draws of the estimator of two processes, whose masks have any losses, and counts 3 and 5."""
    s, num_units = torch.tensor([0.3, 0.6], dtype=torch.float64), 2
    masks = torch.tensor(list(itertools.product([False, True], repeat=num_units)))
    losses = torch.rand(ranks.size, len(masks), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chances = torch.where(masks, s, 1 - s).prod(1)
    total = torch.zeros(num_units, dtype=torch.float64)
    for draw in itertools.product(range(len(masks)), repeat=2):
        found = ranks.average([losses[ranks.rank, k] for k in draw], (3, 5)[ranks.rank]).losses
        gradient = vr_pge(torch.stack(list(found)), masks[list(draw)], s, 1.0)
        total += chances[list(draw)].prod() * gradient
    return total


# --- what can go wrong -----------------------------------------------------------------------------------------------


@contextmanager
def prepare_fails() -> Iterator[None]:
    original = Networks.prepare

    def prepare(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for the next structure")

    Networks.prepare = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        Networks.prepare = original  # type: ignore[method-assign]


def one_cannot_change(ranks: ProcessGroup, policy: str) -> dict[str, Any]:
    """On process 1 a change cannot be prepared; afterwards both continue."""
    model = synchronise_batch_norm(network("batch"))
    optimizer = sgd(model)
    chosen = WIDTHS if policy == "equal_worth" else Paper()
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=chosen, total_steps=60)
    net = data_parallel(model)

    def step(images: Tensor, labels: Tensor) -> None:
        if policy == "paper":
            sparse.step(cross_entropy, images, labels)
        else:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()

    def known() -> dict[str, Any]:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        found = {"mask": sparse.mask, "s": sparse.keep_probs, "steps": sparse.num_steps, "shapes": shapes}
        observed = {} if policy == "paper" else {"rounds": sparse.learner.num_rounds}
        return found | observed | {"flops": sparse.executed_flops}

    data = batches(ranks, 12, even=True)
    for batch in data[:3]:
        step(*batch)
    before, error = known(), None
    try:
        if ranks.rank == 1:
            with prepare_fails():
                step(*data[3])
        else:
            step(*data[3])
    except (MemoryError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    after, weights = known(), state(model)
    for batch in data[4:]:
        step(*batch)
    return {"before": before, "after": after, "error": error, "weights": weights} | {
        "end": known(), "dense": sparse.state_dict()["model"]
    }  # fmt: skip


def one_cannot_load(ranks: ProcessGroup) -> dict[str, Any]:
    """Both go back to a checkpoint in mid-training; that of process 1 is damaged, and both continue."""
    model = network("none")
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    net = data_parallel(model)
    data, early = batches(ranks, 12, even=True), sparse.state_dict()

    def train(some: Sequence[Any]) -> None:
        for images, labels in some:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()

    train(data[:6])
    before, error = sparse.state_dict(), None
    try:
        sparse.load_state_dict({**early, "masks": None} if ranks.rank == 1 else early)
    except (CheckpointError, ProcessGroupError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    after = sparse.state_dict()
    train(data[6:])
    found = {"before": before, "after": after, "end": sparse.state_dict()}
    return {"error": error} | {name: {"model": one["model"], "masks": one["masks"]} for name, one in found.items()}


def out_of_step(ranks: ProcessGroup, what: str, **settings: Any) -> str:
    """Processes that differ: in their seeds, in how far they are, or in a weight that only one of them has changed."""
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Paper(seed=ranks.rank if what == "seed" else 0, resample_every=1 if what != "steps" else 100)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=policy, **settings)
    if what == "steps" and ranks.rank == 1:
        sparse.num_steps = 7
    parallel = DistributedDataParallel(model, init_sync=False)
    for number, batch in enumerate(batches(ranks, 3)):
        if number == 1 and ranks.rank == 1:
            model.head.bias.data.add_(1)
        if number == 1:  # unseen without
            dist.set_debug_level(dist.DebugLevel.INFO)
        sparse.step(cross_entropy, *batch)
    del parallel
    return "unseen"


def out_of_step_on_the_host(ranks: ProcessGroup) -> str:
    return out_of_step(ranks, "weight", full_model_device="cpu")


def out_of_reach(ranks: ProcessGroup) -> str:
    """A group that exchanges tensors on GPUs alone, and a dense model on the host."""
    model = synchronise_batch_norm(network("batch"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), full_model_device="cpu", policy="paper")
    parallel = data_parallel(model, init_sync=False)
    sparse.step(cross_entropy, *batches(ranks)[0])
    del parallel
    return "reached"


def wrapped_late(ranks: ProcessGroup) -> dict[str, Any]:
    """A wrapper made after the first steps is found at the next change; one around another module is refused."""
    model = network("none")
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    whole = batches(ProcessGroup(), 6)
    sparse.step(cross_entropy, *whole[0])
    alone = sparse.process_group.size
    net = wrapped(model)
    for images, labels in batches(ranks, 6, even=True):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    found = {"sizes": (alone, sparse.process_group.size), "dense": sparse.state_dict()["model"]}
    model = network("none")
    outer = wrapped(nn.Sequential(model))
    sparse = SparseTraining(model, sgd(model), EXAMPLE, Flops(0.4), policy=WIDTHS, total_steps=60)
    try:
        sparse.step(cross_entropy, *whole[0])
    except RuntimeError as error:
        found["error"] = str(error)
    del outer
    return found


def first_fails(ranks: ProcessGroup) -> tuple[str, float]:
    assert ranks.first(lambda: ranks.rank) == 0
    assert ranks.any(ranks.rank == 1, False) == (True, False)
    try:
        ranks.first(lambda: 1 // 0)
    except ZeroDivisionError as error:
        return str(error), ranks.rank
    return "", -1


def lost(ranks: ProcessGroup, how: int, loop: str) -> tuple[str, float]:
    """The last process is killed, or stops answering; the others train on, and must find out."""
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = WIDTHS if loop == "own loop" else Paper()
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=policy, total_steps=600)
    net = data_parallel(model)
    began = time.monotonic()
    for number, (images, labels) in enumerate(batches(ranks, even=True) * 10):
        doomed = number == 3 and ranks.rank == ranks.size - 1
        if doomed and loop == "step":
            os.kill(os.getpid(), how)
        began = time.monotonic() if number == 2 else began
        if loop == "own loop":
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
        if doomed:  # the structure is about to change, in the other processes
            os.kill(os.getpid(), how)
        try:
            optimizer.step() if loop == "own loop" else sparse.step(cross_entropy, images, labels)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


# --- the program -----------------------------------------------------------------------------------------------------


def program(ranks: ProcessGroup, folder: Path, recipe: Recipe, checkpoint_seconds: float = 1e9) -> Any:
    run = Run(folder)
    place = Place(device="cpu", checkpoint_seconds=checkpoint_seconds)
    trained = Program(recipe, run, place, ranks=ranks)
    if not run.exists:
        ranks.barrier()
        ranks.first(functools.partial(run.create, recipe))
    return trained.train()


def killed_program(ranks: ProcessGroup, folder: Path, recipe: Recipe) -> Any:
    """The same, with a network that ends process 1 after four steps."""
    os.environ.update(killing(folder), RANK=str(ranks.rank), TORCHELASTIC_RESTART_COUNT="0")
    return program(ranks, folder, recipe, checkpoint_seconds=0)


def killed_at(ranks: ProcessGroup, folder: Path, recipe: Recipe, rank: int, line: int) -> Any:
    """The same; a process is killed at the given line of slimstart that it runs, or counts its lines if that is 0."""
    lines = AtLine(line, functools.partial(os.kill, os.getpid(), signal.SIGKILL))
    if ranks.rank == rank:
        sys.settrace(lines)
    try:
        record = program(ranks, folder, recipe, checkpoint_seconds=0)
        return record if line else lines.count
    finally:
        sys.settrace(None)


def killing(folder: Path) -> dict[str, str]:
    return {"SLIMSTART_TEST_KILL": "1", "SLIMSTART_TEST_FOLDER": str(folder)}


def without_dropout(num_classes: int, in_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=4, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def mortal(num_classes: int, in_channels: int) -> nn.Module:
    """A network that kills its process after the fourth step, once, on the rank that SLIMSTART_TEST_KILL names."""
    model = without_dropout(num_classes, in_channels).insert(5, nn.Dropout(0.2))
    doomed = os.environ.get("SLIMSTART_TEST_KILL") == os.environ.get("RANK", "none")
    if doomed and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        fourth = Path(os.environ["SLIMSTART_TEST_FOLDER"]) / "checkpoints" / "step-000000004.pt"

        def look(*_: Any) -> None:
            if fourth.exists():
                os.kill(os.getpid(), signal.SIGKILL)

        model.register_forward_pre_hook(look)
    return model
