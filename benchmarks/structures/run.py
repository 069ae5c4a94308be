"""Train the queue of structures on one device, several processes in parallel, and write one record for each run.

    PYTHONPATH=src python benchmarks/structures/run.py --workers 10 --hours 0.16 --data-dir data --out FOLDER \\
        --records RECORDS

Runs that have a record are not repeated, so the same command continues after an interruption (`../training_queue.py`).
No run is started that would not end in the time that is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from training_queue import work_off

from slimstart.errors import NonFiniteLossError
from slimstart.flop_counter import flops
from slimstart.io import atomic
from slimstart.lab.data import ArraySet, cifar, tiny_imagenet
from slimstart.lab.data.batches import Loading
from slimstart.lab.recipes.recipe import Recipe
from slimstart.lab.recipes.schedules import learning_rate
from slimstart.lab.run import environment
from slimstart.lab.run.evaluation import evaluate
from slimstart.lab.run.method import Loss, make_optimizer
from slimstart.policies import EqualWorth, Flops
from slimstart.steps import PlainTraining
from slimstart.training import SparseTraining

HELD_OUT = 10  # one training image of so many is held out, for the choice of structures
DATA = ("cifar100", "cifar10", "tiny_imagenet16")
OPTIONS = "Options of each training: --data-dir, --device, --precision (bfloat16 on a GPU), --batch-size (256)."


@dataclass(frozen=True)
class Run:
    """A training of one structure."""

    family: str
    structure: str
    data: str
    budget: float
    epochs: int = 40
    seed: int = 0
    tilt: float | None = None  # of a search for widths, which starts from the family's own ratio; None: no search

    @property
    def name(self) -> str:
        search = "" if self.tilt is None else f"_learned{self.tilt:g}"
        return f"{self.family}_{self.data}_{self.budget:g}_{self.epochs}_{self.structure}{search}_{self.seed}"

    @classmethod
    def named(cls, name: str) -> Run:
        """The run of a name, of which only the first four parts and the structure are needed."""
        data = next(data for data in DATA if f"_{data}_" in name)
        family, _, rest = name.partition(f"_{data}_")
        budget, epochs, structure, *more = rest.split("_")
        tilt = next((float(part.removeprefix("learned")) for part in more if part.startswith("learned")), None)
        seed = int(more[-1]) if more and more[-1].isdigit() else 0
        return cls(family, structure, data, float(budget), int(epochs), seed, tilt)

    @property
    def lost(self) -> int:
        """There are no checkpoints."""
        return self.epochs

    def command(self, out: Path, more: Sequence[str]) -> list[str]:
        return [sys.executable, __file__, "--one", self.name, "--out", str(out), *more]


def queue() -> list[list[Run]]:
    """All runs, by priority; the README says what each part is for."""
    both, cifars = ("vgg", "residual"), ("cifar100", "cifar10")

    def runs(family: str, data: str, structures: Sequence[str]) -> list[Run]:
        return [Run(family, name, data, budget) for budget in families.FAMILIES[family].budgets for name in structures]

    def part(names: Sequence[str], sets: Sequence[str]) -> list[Run]:
        return [run for data in sets for name in names for run in runs(name, data, families.FAMILIES[name].structures)]

    first = [run for run in part(both, cifars) if run.structure.endswith(("-own", "-late"))]
    second = [run for run in part((*both, "inverted"), cifars) if run not in first]
    third = part(tuple(families.FAMILIES), ("tiny_imagenet16",))
    lengths = [
        Run(name, structure, data, 0.1, epochs)
        for epochs in (10, 160)
        for data in cifars
        for name in both
        for structure in families.FAMILIES[name].candidates
    ]
    return [first, second, third, lengths, [dataclasses.replace(run, seed=1) for run in first]]


def load(name: str, folder: Path) -> ArraySet:
    """A data set of the lab, as arrays."""
    return tiny_imagenet.read(folder) if name == "tiny_imagenet16" else cifar.read(cifar.FORMATS[name], folder)


def train(run: Run, arrays: ArraySet, device: torch.device, precision: str, batch_size: int = 256) -> dict[str, Any]:
    """Train one network, and return its record.

    Raises:
        NonFiniteLossError: the training diverged.
    """
    recipe = Recipe(epochs=run.epochs, batch_size=batch_size, seed=run.seed, precision=precision)
    environment.set_precision(precision)
    torch.manual_seed(run.seed)
    channels, height, width = arrays.train[0].shape[1:]
    shape = (channels, height, width)
    if run.tilt is None:
        widths = families.solve(run.family, run.structure, run.budget, arrays.num_classes, shape)
    else:
        widths = list(families.FAMILIES[run.family].reference.channels)
    model = families.network(run.family, run.structure, widths, arrays.num_classes, channels)
    model = environment.suited(model, device, device)
    loading = Loading(batch_size, run.seed, device, validation=len(arrays.train[0]) // HELD_OUT)
    data = arrays.batches(loading)
    optimizer, loss_fn = make_optimizer(recipe, model), Loss(recipe)
    steps, losses, validation = len(data.train), list[float](), list[float]()
    if run.tilt is None:
        training: PlainTraining | SparseTraining = PlainTraining(model, optimizer)
    else:
        share = families.share(run.family, run.structure, run.budget, arrays.num_classes, shape)
        policy = EqualWorth(tilt=run.tilt, depth=0)
        example = next(iter(data.test.epoch(0)))[0][:2]
        training = SparseTraining(
            model, optimizer, example, Flops(share), total_steps=run.epochs * steps, policy=policy
        )
    parts = min(4, steps)  # of an epoch, whose losses are recorded
    began = time.perf_counter()
    for epoch in range(run.epochs):
        sums, counts = torch.zeros(parts, device=device), [0] * parts
        for number, (images, labels) in enumerate(data.train.epoch(epoch)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, epoch * steps + number, steps)
            sums[parts * number // steps] += training.step(loss_fn, images, labels)
            counts[parts * number // steps] += 1
        losses += [total / count for total, count in zip(sums.tolist(), counts, strict=True)]
        if not all(map(math.isfinite, losses)):
            raise NonFiniteLossError(f"{run.name}: the loss is not finite in epoch {epoch + 1}")
        validation.append(evaluate(model, data, precision)[1])
    if isinstance(training, SparseTraining):
        widths = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
        training.finish()
    seconds = time.perf_counter() - began
    # Once, after the last step, and with no part in any choice.
    test = evaluate(model, arrays.batches(dataclasses.replace(loading, validation=0)), precision)[1]
    return {
        "benchmark": "structures",
        **dataclasses.asdict(run),
        "widths": widths,
        "layers": sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()),
        "flops": flops(model, torch.zeros(1, channels, height, width, device=device)),
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "batch_size": batch_size,
        "precision": precision,
        "held_out_images": data.test.num_images,
        "losses": [round(loss, 5) for loss in losses],
        "losses_per_epoch": parts,
        "train_loss": [round(sum(losses[i : i + parts]) / parts, 5) for i in range(0, len(losses), parts)],
        "validation": validation,
        "validation_accuracy": validation[-1],
        "test_accuracy": test,
        "seconds": round(seconds, 2),
        "engine": training.engine,
        "finished": environment.now(),
        **environment.facts(device),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--one", help="train the run of this name alone")
    args, rest = parser.parse_known_args(arguments)
    if args.one is None:
        return work_off([run for part in queue() for run in part], f"{__doc__}\n{OPTIONS}", rest)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--batch-size", type=int, default=256)
    args, run = parser.parse_args(arguments), Run.named(args.one)
    torch.set_num_threads(1)
    device = environment.find_device(args.device)
    precision = args.precision or ("bfloat16" if device.type == "cuda" else "float32")
    record = train(run, load(run.data, args.data_dir), device, precision, args.batch_size)
    (args.out / run.name).mkdir(parents=True, exist_ok=True)
    atomic.write(args.out / run.name / "record.json", (json.dumps(record) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
