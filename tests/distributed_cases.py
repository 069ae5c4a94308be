"""What the ranks of the distributed tests do; the tests compare what they return."""

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DistributedDataParallel imports: here, once for all processes
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slimstart import Flops, Paper, SparseTraining
from slimstart.integrations import data_parallel, synchronise_batch_norm
from slimstart.policies.estimators import leave_one_out, leave_one_out_of, vr_pge
from slimstart.ranks import Ranks
from slimstart.recipes.program import Program
from slimstart.recipes.recipe import Recipe
from slimstart.recipes.runs import Run
from slimstart.recipes.surroundings import Place
from slimstart.steps import PlainTraining
from slimstart.steps.together import Together
from tests.settings import arguments

EXAMPLE = torch.zeros(1, 1, 8, 8, dtype=torch.float64)


class Residual(nn.Module):
    """Two layers that write into one stream, so that narrow networks have ports."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 8, 3, stride=2, padding=1), norm(8)
        self.inner, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), norm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(x + self.norm2(self.inner(x)))
        return self.head(x.mean((2, 3)))


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    model = Residual(nn.BatchNorm2d if norm == "batch" else lambda _: nn.Identity())
    return model.double()


def cross_entropy(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def batches(ranks: Ranks, num: int = 9) -> list[tuple[Tensor, Tensor]]:
    """Every third batch is short, and no rank has as much of it as another; these are one rank's shares."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(num):
        n = 5 if number % 3 == 2 else 8
        images = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (n,), generator=generator)
        own = slice(n * ranks.rank // ranks.size, n * (ranks.rank + 1) // ranks.size)
        found.append((images[own], labels[own]))
    return found


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def sparse_training(ranks: Ranks, norm: str, **settings: Any) -> dict[str, Any]:
    """A search, settled, trained on, finished."""
    model = network(norm)
    if ranks.size > 1:
        model = synchronise_batch_norm(model)
        if ranks.rank > 0:  # all begin with the weights of rank 0
            model.head.weight.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrap = data_parallel if ranks.size > 1 else None
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), wrap=wrap, **arguments(**settings))
    found: dict[str, Any] = {"losses": [], "masks": []}
    for batch in batches(ranks):
        found["masks"].append(sparse.mask)
        found["losses"].append(sparse.step(cross_entropy, *batch))
    found["keep_probs"], found["searched"] = sparse.keep_probs, state(model)
    found["snapshot"] = state(sparse.snapshot(batches(ranks, 2), cross_entropy))
    sparse.settle(batches(ranks, 2), cross_entropy, num_samples=3)
    found["settled"] = sparse.mask
    found["losses"] += [sparse.step(cross_entropy, *batch) for batch in batches(ranks, 3)]
    found["momentum"] = {str(k): v["momentum_buffer"] for k, v in optimizer.state_dict()["state"].items()}
    found["finished"] = state(sparse.finish(batches(ranks, 2), cross_entropy))
    found["count"] = sparse.num_examples
    found["reason"] = sparse.reason
    return found


def plain_training(ranks: Ranks, norm: str) -> dict[str, Any]:
    model = network(norm)
    runs = data_parallel(synchronise_batch_norm(model)) if ranks.size > 1 else model
    training = PlainTraining(runs, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [training.step(cross_entropy, *batch) for batch in batches(ranks)]
    return {"losses": losses, "model": state(model), "count": training.num_examples}


def own_loop(ranks: Ranks) -> dict[str, Any]:
    """A user's own loop around PyTorch's own wrapper; only even batches, whose gradients need no weights."""
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrap = DistributedDataParallel if ranks.size > 1 else None
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), wrap=wrap, policy=Paper(resample_every=2))
    wrappers = []
    for images, labels in [batch for number, batch in enumerate(batches(ranks)) if number % 3 < 2]:
        net = sparse.net
        wrappers.append(net)
        assert isinstance(net, DistributedDataParallel) == (ranks.size > 1)
        loss = cross_entropy(net, images, labels)
        losses = [cross_entropy(one, images, labels) for one in sparse.references()]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sparse.update(loss, losses)
    return {"model": state(model), "keep_probs": sparse.keep_probs, "kept": wrappers[0] is wrappers[1]}


CASES: dict[str, Callable[[Ranks], dict[str, Any]]] = {
    "no norm": lambda ranks: sparse_training(ranks, "none"),
    "batch norm, padded": lambda ranks: sparse_training(ranks, "batch", align=4),
    "equal worth": lambda ranks: sparse_training(
        ranks, "batch", policy="equal_worth", resample_every=1, total_steps=25
    ),
    "held, clipped": lambda ranks: sparse_training(ranks, "batch", resample_every=3, max_grad_norm=0.5),
    "dense model at home": lambda ranks: sparse_training(ranks, "batch", resample_every=2, full_model_device="cpu"),
    "symmetric, one mask per stream": lambda ranks: sparse_training(
        ranks, "none", estimator="vr_pge_symmetric", coupling="stream"
    ),
    "plain": lambda ranks: plain_training(ranks, "batch"),
    "own loop": lambda ranks: own_loop(ranks),
}


def several(ranks: Ranks, names: Sequence[str]) -> dict[str, Any]:
    """One set of processes for many cases."""
    return {name: CASES[name](ranks) for name in names}


def per_rank_batch_norm(ranks: Ranks) -> dict[str, Any]:
    """Statistics of each rank's own examples: what is kept of them is alike on all ranks."""
    model = network("batch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(
        model, optimizer, EXAMPLE, Flops(1.0), wrap=data_parallel, policy=Paper(sampling="bernoulli")
    )
    images, labels = batches(ranks)[0]
    stem = model.stem(images).detach()
    sparse.step(cross_entropy, images, labels)
    every = ranks.gather(stem)
    return {"mean": model.norm1.running_mean.clone(), "stems": every, "state": state(model)}


def batch_norm_layer(ranks: Ranks) -> dict[str, Any]:
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


def too_little(ranks: Ranks) -> str:
    layer = synchronise_batch_norm(nn.BatchNorm1d(3))
    try:
        layer(torch.zeros(1 - ranks.rank, 3))  # one value, on one of the ranks
    except ValueError as error:
        return str(error)
    return ""


# --- the structure's gradient, enumerated ----------------------------------------------------------------------------


def enumerated(ranks: Ranks, spread: bool) -> Tensor:
    """The mean over all draws of an estimator of two ranks, whose masks have any losses, and counts 3 and 5."""
    s, num_units = torch.tensor([0.3, 0.6], dtype=torch.float64), 2
    masks = torch.tensor(list(itertools.product([False, True], repeat=num_units)))
    losses = torch.rand(ranks.size, len(masks), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    chances = torch.where(masks, s, 1 - s).prod(1)
    num_masks = 3 if spread else 2
    together = Together(ranks, num_masks, spread)
    total = torch.zeros(num_units, dtype=torch.float64)
    for draw in itertools.product(range(len(masks)), repeat=num_masks):
        own = [losses[ranks.rank, k] for k in (draw[0], *draw[together.own])]
        found = torch.stack(list(together.average(own, (3, 5)[ranks.rank], nn.Identity()).losses))
        gradient = (leave_one_out if spread else vr_pge)(found, masks[list(draw)], s, 1.0)
        total += chances[list(draw)].prod() * gradient
    return total


# --- what can go wrong -----------------------------------------------------------------------------------------------


def spread_references(ranks: Ranks) -> dict[str, Any]:
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"wrap": data_parallel, "spread_references": True}
    estimator = leave_one_out_of(1 + 2 * ranks.size)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy=Paper(estimator), **settings)
    num_references = len(list(sparse.references()))
    losses = [sparse.step(cross_entropy, *batch) for batch in batches(ranks)]
    try:
        model = network("none")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), policy="paper", **settings)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"losses": losses, "keep_probs": sparse.keep_probs, "num_references": num_references, "refused": refused}


def traffic(ranks: Ranks) -> dict[str, Any]:
    """Bytes that the wrapper exchanges, counted in its buckets, beside what the training says."""
    sent: list[int] = []

    def counted(net: nn.Module) -> nn.Module:
        wrapped = data_parallel(net)

        def count(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / 2)

        wrapped.register_comm_hook(None, count)
        return wrapped

    model = network("batch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.3), wrap=counted, policy="paper")
    said, counts = [], []
    for batch in batches(ranks, 4):
        said.append(sparse.gradient_bytes)
        sent.clear()
        sparse.step(cross_entropy, *batch)
        counts.append(sum(sent))
    return {"said": said, "counts": counts, "dense": sparse.dense_gradient_bytes}


def out_of_step(ranks: Ranks, what: str, **settings: Any) -> str:
    """Ranks that differ: in their seeds, or in a weight that only one of them has changed."""
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed = ranks.rank if what == "seed" else 0
    sparse = SparseTraining(
        model, optimizer, EXAMPLE, Flops(0.4), wrap=data_parallel, policy=Paper(seed=seed), **settings
    )
    for number, batch in enumerate(batches(ranks, 3)):
        if number == 1 and ranks.rank == 1:
            sparse.net.module.head.bias.data.add_(1)
        if number == 1:  # unseen without
            dist.set_debug_level(dist.DebugLevel.INFO)
        sparse.step(cross_entropy, *batch)
    return "unseen"


def out_of_step_at_home(ranks: Ranks) -> str:
    return out_of_step(ranks, "weight", full_model_device="cpu")


def out_of_reach(ranks: Ranks) -> str:
    """A group that exchanges tensors on GPUs alone, and a dense model on the host."""
    model = synchronise_batch_norm(network("batch"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), wrap=data_parallel, full_model_device="cpu", policy="paper")
    return "reached"


def first_fails(ranks: Ranks) -> tuple[str, float]:
    assert ranks.first(lambda: ranks.rank) == 0
    assert ranks.any(ranks.rank == 1, False) == (True, False)
    try:
        ranks.first(lambda: 1 // 0)
    except ZeroDivisionError as error:
        return str(error), ranks.rank
    return "", -1


def lost(ranks: Ranks, how: int) -> tuple[str, float]:
    """The last rank is killed, or stops answering; the others train on, and must find out."""
    model = network("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseTraining(model, optimizer, EXAMPLE, Flops(0.4), wrap=data_parallel, policy="paper")
    began = time.monotonic()
    for number, batch in enumerate(batches(ranks) * 10):
        if number == 3 and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), how)
        began = time.monotonic() if number == 2 else began
        try:
            sparse.step(cross_entropy, *batch)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


# --- the program -----------------------------------------------------------------------------------------------------


def program(ranks: Ranks, folder: Path, recipe: Recipe, checkpoint_seconds: float = 1e9) -> Any:
    run = Run(folder)
    place = Place(device="cpu", timing_rounds=0, checkpoint_seconds=checkpoint_seconds)
    trained = Program(recipe, run, place, ranks=ranks)
    if not run.exists:
        ranks.barrier()
        ranks.first(functools.partial(run.create, recipe))
    return trained.train()


def killed_program(ranks: Ranks, folder: Path, recipe: Recipe) -> Any:
    """The same, with a network that ends rank 1 after four steps."""
    os.environ.update(killing(folder), RANK=str(ranks.rank), TORCHELASTIC_RESTART_COUNT="0")
    return program(ranks, folder, recipe, checkpoint_seconds=0)


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
