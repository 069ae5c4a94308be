"""Digests of eight short trainings, to show that a change of the code leaves every result bit-identical.

Each configuration trains a tiny network on the CPU with fixed seeds through at least three changes of structure. The
result is brought into one form that does not depend on how the library stores it: dense weights and
normalisation statistics by their name in the dense `state_dict`, optimizer state by dense parameter name, the mask, the
keep-probabilities, the number of steps, and the losses, masks and keep-probabilities of every step.

    PYTHONPATH=before/src python benchmarks/golden_digests.py --out before.json --dump before.pt
    PYTHONPATH=after/src python benchmarks/golden_digests.py --compare before.json --compare-tensors before.pt

Run both on one machine with one version of PyTorch: floating-point results differ between processors. The
whole script takes some ten seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # read by MKL when it loads: sums do not depend on memory alignment

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import slimstart
from slimstart.distributed import data_parallel

Batch = tuple[Tensor, Tensor]
Canonical = dict[str, dict[str, Tensor]]  # part -> name -> tensor

PARTS = ("weights", "statistics", "moments", "mask", "s", "num_steps", "history")
MIN_CHANGES = 3
NUM_CLASSES, BATCH_SIZE, IMAGE_SIZE = 4, 8, 8
POLICY_SEED = 3


@dataclass(frozen=True)
class Configuration:
    """One training.

    Attributes:
        total_steps: length of the training for the policy, at least `num_steps`.
        by_hand: write the loop with backward and `optimizer.step`; otherwise call `sparse.step`.
        save_after: number of steps after which the training is saved, and loaded into a fresh one that goes on.
    """

    name: str
    policy: str
    network: str
    optimizer: str
    budget: slimstart.Flops | slimstart.Params | slimstart.Channels
    resample_every: int
    num_steps: int
    total_steps: int | None = None
    coupling: str | None = None
    structure_lr: float = 0.05  # of the paper's policy
    dtype: torch.dtype = torch.float64
    by_hand: bool = False
    num_ranks: int = 1
    save_after: int | None = None
    full_model_device: str | None = None


CONFIGURATIONS = (
    Configuration(
        "1 equal_worth, SGD, step", "equal_worth", "vgg", "sgd", slimstart.Flops(0.3), 8, 90, 400, dtype=torch.float32
    ),
    Configuration(
        "2 equal_worth, Adam, by hand", "equal_worth", "residual", "adam", slimstart.Flops(0.3), 3, 40, 120,
        by_hand=True,
    ),
    Configuration(
        "3 paper, filter, SGD, step", "paper", "residual", "sgd", slimstart.Flops(0.4), 1, 16, 40,
        coupling="filter", dtype=torch.float32,
    ),
    Configuration(
        "4 paper, stream, Adam, by hand", "paper", "residual", "adam", slimstart.Params(0.4), 2, 16,
        coupling="stream", by_hand=True,
    ),
    Configuration(
        "5 equal_worth, two ranks, step", "equal_worth", "vgg", "sgd", slimstart.Flops(0.3), 3, 40, 150, num_ranks=2
    ),
    Configuration(
        "6 paper, resumed in mid-window", "paper", "residual", "adam", slimstart.Channels(0.5), 3, 17, save_after=8
    ),
    Configuration(
        "7 equal_worth, resumed in mid-search", "equal_worth", "vgg", "sgd", slimstart.Params(0.3), 9, 60, 225,
        by_hand=True, save_after=22,
    ),
    Configuration(
        "8 paper, host memory", "paper", "residual", "sgd", slimstart.Flops(0.4), 2, 16, 40,
        full_model_device="cpu", dtype=torch.float32,
    ),
)  # fmt: skip


# --- all that depends on the API -------------------------------------------------------------------------------------


class Training:
    """A training, as the present API makes it."""

    def __init__(self, settings: Configuration, model: nn.Module, optimizer: Optimizer, example: Tensor) -> None:
        self._compares_losses = settings.policy == "paper"
        if self._compares_losses:
            policy = slimstart.Paper(
                structure_lr=settings.structure_lr,
                resample_every=settings.resample_every,
                seed=POLICY_SEED,
                search_steps=settings.total_steps,
            )
        else:
            # All layers and equal fractions at the start, as in versions without these settings.
            known = {field.name for field in dataclasses.fields(slimstart.EqualWorth)}
            uniform = {name: 0 for name in ("depth", "tilt") if name in known}
            policy = slimstart.EqualWorth(resample_every=settings.resample_every, **uniform)
        self.optimizer = optimizer
        self.sparse = slimstart.SparseTraining(
            model,
            optimizer,
            example,
            settings.budget,
            total_steps=settings.total_steps,
            policy=policy,
            coupling=settings.coupling,
            full_model_device=settings.full_model_device,
        )
        self.model = model
        if settings.num_ranks > 1:
            self.model = data_parallel(model)

    def step_by_hand(self, batch: Batch) -> Tensor:
        loss, reference_loss = loss_fn(self.model, *batch), None
        if self.sparse.needs_reference:
            with torch.no_grad():
                reference_loss = loss_fn(self.sparse.reference, *batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self._compares_losses:
            self.sparse.update(loss, reference_loss)
        return loss.detach()

    def optimizer_state(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """{index of a parameter in the optimizer: its dense state}, from the `state_dict` of the training."""
        return state["optimizers"][0]["state"]


# --- networks and data -----------------------------------------------------------------------------------------------


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class VGG(nn.Module):
    """Convolutions in a chain, with batch norm and max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv_bn(3, 24), conv_bn(24, 32)
        self.c, self.d = conv_bn(32, 48), conv_bn(48, 48)
        self.head = nn.Linear(48, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.b(F.relu(self.a(x)))), 2)
        x = F.relu(self.d(F.relu(self.c(x))))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """Basic residual block; the shortcut is a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(inputs, outputs, stride=stride), conv_bn(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class Residual(nn.Module):
    """Two stages of residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 24, 2), Block(24, 24, 1))
        self.head = nn.Linear(24, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


NETWORKS = {"vgg": VGG, "residual": Residual}


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """An optimizer with two groups, as in many trainings: vectors do not decay, and their order is not the model's."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 1e-3}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.Adam(groups, lr=5e-3)


def make_batches(settings: Configuration, rank: int) -> list[Batch]:
    """Random images and labels; each rank has its own."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE)
    return [
        (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(settings.dtype),
            torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(settings.num_steps)
    ]


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


# --- training --------------------------------------------------------------------------------------------------------


class Run:
    """A training of one configuration, with the names of its dense tensors and what is recorded after every step."""

    def __init__(self, settings: Configuration, seed: int) -> None:
        torch.manual_seed(seed)
        model = NETWORKS[settings.network]().to(settings.dtype)
        optimizer = make_optimizer(settings.optimizer, model)
        # Now, while everything is dense: later on parameters may be others.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._optimizer_names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        self._weight_names = sorted(names.values())
        self._statistic_names = sorted(model.state_dict().keys() - names.values())
        example = torch.zeros(2, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=settings.dtype)
        self._by_hand = settings.by_hand
        self.training = Training(settings, model, optimizer, example)
        self.losses: list[float] = []
        self.masks = [self.training.sparse.mask.clone()]
        self.keep_probs = [self.training.sparse.keep_probs.clone()]

    def train(self, batches: Iterable[Batch]) -> None:
        sparse = self.training.sparse
        for batch in batches:
            loss = self.training.step_by_hand(batch) if self._by_hand else sparse.step(loss_fn, *batch)
            self.losses.append(float(loss))
            self.masks.append(sparse.mask.clone())
            self.keep_probs.append(sparse.keep_probs.clone())

    def resumed(self, settings: Configuration, seed: int) -> Run:
        """A fresh training that continues this one from a file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "training.pt"
            self.training.sparse.save(path)
            other = Run(settings, seed)
            other.training.sparse.load(path)
        for now, before in (
            (other.training.sparse.mask, self.masks[-1]),
            (other.training.sparse.keep_probs, self.keep_probs[-1]),
        ):
            if not torch.equal(now, before):
                raise AssertionError("a loaded training has another structure than the one that was saved")
        other.losses, other.masks, other.keep_probs = self.losses, self.masks, self.keep_probs
        return other

    def canonical(self) -> Canonical:
        """The present state and the history, in the form that all versions share."""
        sparse = self.training.sparse
        state = sparse.state_dict()
        optimizer_state = self.training.optimizer_state(state)
        moments = {
            f"{name}: {key}": torch.as_tensor(value)
            for index, name in enumerate(self._optimizer_names)
            for key, value in optimizer_state.get(index, {}).items()
            if value is not None
        }
        found = {
            "weights": {name: state["model"][name] for name in self._weight_names},
            "statistics": {name: state["model"][name] for name in self._statistic_names},
            "moments": moments,
            "mask": {"mask": sparse.mask},
            "s": {"s": sparse.keep_probs},
            "num_steps": {"num_steps": torch.tensor(sparse.num_steps)},
            "history": {
                "loss": torch.tensor(self.losses, dtype=torch.float64),
                "mask": torch.stack(self.masks),
                "s": torch.stack(self.keep_probs),
            },
        }
        assert tuple(found) == PARTS
        return {
            part: {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            for part, tensors in found.items()
        }


def train(settings: Configuration, rank: int = 0) -> Canonical:
    """Run a configuration in this process."""
    batches, run = make_batches(settings, rank), Run(settings, seed=0)
    if settings.save_after is None:
        run.train(batches)
    else:
        run.train(batches[: settings.save_after])
        run = run.resumed(settings, seed=1)
        run.train(batches[settings.save_after :])
    result = run.canonical()
    if (changes := num_changes(result)) < MIN_CHANGES:
        raise AssertionError(f"{settings.name}: {changes} changes of structure; a configuration needs {MIN_CHANGES}")
    return result


def num_changes(result: Canonical) -> int:
    """Distinct masks after the first one."""
    return len(result["history"]["mask"].unique(dim=0)) - 1


def train_on_ranks(settings: Configuration) -> Canonical:
    """Run a configuration in several processes, which must all arrive at the same result."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train_as_rank, (settings, folder), nprocs=settings.num_ranks)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(settings.num_ranks)]
    if any(digests(result) != digests(results[0]) for result in results):
        raise AssertionError(f"{settings.name}: processes have different results")
    return results[0]


def _train_as_rank(rank: int, settings: Configuration, folder: str) -> None:
    prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.num_ranks)
    torch.save(train(settings, rank), Path(folder) / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at once: threads of a process group can bring down a process that ends in the usual way


def prepare() -> None:
    """Make this process deterministic."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


# --- digests and comparisons -----------------------------------------------------------------------------------------


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in sorted order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def digests(result: Canonical) -> dict[str, Any]:
    """One digest of everything, and one for each part."""
    everything = {f"{part}/{name}": tensor for part, tensors in result.items() for name, tensor in tensors.items()}
    return {"digest": digest(everything), "parts": {part: digest(tensors) for part, tensors in result.items()}}


def compare(expected: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Print which parts of which configurations differ; return whether none does."""
    for key in ("torch", "cpu", "num_configurations"):
        if expected[key] != record[key]:
            print(f"note: {key} was {expected[key]}, and is {record[key]}")
    same = True
    for name, found in record["configurations"].items():
        if "error" in found:
            verdict = f"failed: {found['error']}"
        elif "digest" not in expected["configurations"].get(name, {}):
            verdict = "not in the record that this is compared with"
        elif found["digest"] == expected["configurations"][name]["digest"]:
            verdict = "same"
        else:
            before = expected["configurations"][name]["parts"]
            verdict = "differs in " + ", ".join(part for part in PARTS if found["parts"][part] != before[part])
        print(f"{name}: {verdict}")
        same = same and verdict == "same"
    return same


def compare_tensors(expected: Mapping[str, Canonical], results: Mapping[str, Canonical]) -> None:
    """Print the largest difference of every part that differs, with the tensor that has it."""
    for name, result in results.items():
        for part in PARTS:
            try:
                torch.testing.assert_close(
                    result[part], expected.get(name, {}).get(part, {}), rtol=0, atol=0, equal_nan=True
                )
            except AssertionError as error:
                print(f"{name}, {part}: {error}")


# --- program ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests to this JSON file")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="compare with digests that --out wrote")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the canonical tensors to this file")
    parser.add_argument("--compare-tensors", type=Path, metavar="FILE", help="compare with tensors that --dump wrote")
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER", help="run these configurations, from 1")
    given = parser.parse_args(arguments)
    chosen = CONFIGURATIONS
    if given.only:
        if not set(given.only) <= set(range(1, len(CONFIGURATIONS) + 1)):
            parser.error(f"`--only` is {given.only}; configurations are numbered from 1 to {len(CONFIGURATIONS)}")
        chosen = tuple(CONFIGURATIONS[number - 1] for number in given.only)

    prepare()
    print(f"slimstart in {Path(slimstart.__file__).parent}")
    results: dict[str, Canonical] = {}
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "num_configurations": len(CONFIGURATIONS),
        "configurations": {},
    }
    for settings in chosen:
        began = time.perf_counter()
        try:
            result = train(settings) if settings.num_ranks == 1 else train_on_ranks(settings)
        except Exception as error:  # the others still tell something
            traceback.print_exc()
            record["configurations"][settings.name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        results[settings.name] = result
        found = digests(result)
        found |= {"num_steps": int(result["num_steps"]["num_steps"]), "num_changes": num_changes(result)}
        record["configurations"][settings.name] = found
        seconds = time.perf_counter() - began
        print(f"{settings.name}: {found['digest'][:16]}, {found['num_changes']} changes, {seconds:.1f} s")
        for part, one in found["parts"].items():
            print(f"  {part:10s} {one[:16]}")

    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    if given.dump:
        torch.save(results, given.dump)
    failed = len(results) < len(chosen)
    if given.compare_tensors:
        compare_tensors(torch.load(given.compare_tensors), results)
    if given.compare:
        failed = not compare(json.loads(given.compare.read_text()), record) or failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
