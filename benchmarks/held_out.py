"""Networks and data that had no part in fitting the rule for depth: short trainings on a CPU, at equal FLOPs.

    PYTHONPATH=src python benchmarks/held_out.py --data-dir FOLDER --out results/held_out.jsonl [--jobs 2]

Every network is trained for the same number of steps by each contender. *uniform* has all layers and equal fractions of
all widths. *shallow-g* is uniform without the layers that the rule removes with the exponent g, so a sibling of fewer
layers. The default of the library removes layers, starts with wider late layers and learns widths; *widths not learned*
keeps the start. The folder needs `cifar10.npz`, `cifar100.npz` and `tinyimagenet16.npz`, with arrays of images. Runs
that the file has are not run again, so that a queue can be stopped and continued. Photographs are flipped at random,
which is the only augmentation.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.lab import models
from slimstart.lab.data import fashion
from slimstart.lab.models.feed_forward import VGG
from slimstart.lab.models.layers import initialised
from slimstart.lab.run.environment import facts

sys.path.append(str(Path(__file__).parent / "structures"))
from families import FAMILIES
from train_transformers import HEAD, Transformer, standard_library

NUM_TEST, NUM_HELD_OUT = 5000, 2000
LENGTH = 64  # bytes of an example


class PlainMLP(nn.Sequential):
    """Eight wide linear layers on the pixels."""

    def __init__(self, num_classes: int, pixels: int, norm: bool) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for position in range(8):
            layers.append(nn.Linear(256 if position else pixels, 256))
            if norm:
                layers.append(nn.BatchNorm1d(256))
            layers.append(nn.ReLU())
        super().__init__(*layers, nn.Linear(256, num_classes))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7, LayerNorm over channels, and an expansion by four (Liu et al., 2022)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(inner))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 2, 2), nn.GroupNorm(1, 32)]
        for dim, depth in ((32, 3), (64, 6), (128, 3)):
            if dim > 32:
                layers += [nn.GroupNorm(1, dim // 2), nn.Conv2d(dim // 2, dim, 2, 2)]
            layers += [ConvNeXtBlock(dim) for _ in range(depth)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


def transformer(task: str, inputs: int, outputs: int) -> Transformer:
    return Transformer(task, 96, [96 // HEAD] * 8, [4 * 96] * 8, inputs, LENGTH, outputs)


@dataclass(frozen=True)
class Setting:
    """A network, data, a fraction of the FLOPs, and how it is trained."""

    make: Callable[[], nn.Module]
    data: str
    budget: float
    optimizer: str = "sgd"
    steps: int = 1500
    batch: int = 32


SETTINGS = {
    "vgg": Setting(lambda: initialised(VGG(((32,) * 4, (64,) * 4, (128,) * 4), 10, 1, 1.0)), "fashion", 0.1),
    "vgg_cifar10": Setting(lambda: initialised(VGG(((32,) * 4, (64,) * 4, (128,) * 4), 10, 3, 1.0)), "cifar10", 0.1),
    "wide_resnet": Setting(lambda: models.build("wrn28_10", num_classes=10, width=0.1), "cifar10", 0.15),
    "bottlenecks": Setting(lambda: models.build("resnet50", num_classes=16, width=0.25), "tiny", 0.25),
    "mobilenet_v1": Setting(lambda: models.build("mobilenet_v1", num_classes=10, in_channels=1), "fashion", 0.25),
    "mobilenet_v2": Setting(lambda: FAMILIES["inverted"].make(10, 3, 0.5), "cifar10", 0.25),
    "mobilenet_v2, longer": Setting(lambda: FAMILIES["inverted"].make(100, 3, 0.5), "cifar100", 0.25, steps=4500),
    "mlp": Setting(lambda: PlainMLP(10, 784, norm=False), "fashion", 0.1, "adamw", 3000),
    "mlp_bn": Setting(lambda: PlainMLP(10, 784, norm=True), "fashion", 0.1, "adamw", 3000),
    "convnext": Setting(lambda: ConvNeXt(10), "cifar10", 0.25, "adamw"),
    "vit": Setting(lambda: transformer("vit", 48, 100), "cifar10", 0.15, "adamw"),
    "gpt": Setting(lambda: transformer("gpt", 256, 256), "text", 0.25, "adamw", 1500, 16),
}

CONTENDERS: dict[str, dict[str, Any]] = {
    "uniform": {"depth": 0, "tilt": 0, "rounds": 0},
    "shallow-0.3": {"depth": 0.3, "tilt": 0, "rounds": 0},
    "shallow-0.1": {"depth": 0.1, "tilt": 0, "rounds": 0},
    "shallow-0.4": {"depth": 0.4, "tilt": 0, "rounds": 0},
    "shallow-0.6": {"depth": 0.6, "tilt": 0, "rounds": 0},
    "shallow-1.0": {"depth": 1.0, "tilt": 0, "rounds": 0},
    "slimstart": {},
    "slimstart, widths not learned": {"rounds": 0},
}

Part = tuple[Tensor, Tensor]


def load(name: str, folder: Path) -> tuple[Part, Part, Part]:
    """Inputs and targets to train on, to choose on, and to report; text is cut into examples."""
    if name == "text":
        train, held_out = standard_library(10 * 2**20)

        def cut(part: Tensor) -> Part:
            rows = part[: len(part) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1).long()
            return rows[:, :-1], rows[:, 1:]

        (x, y), (u, v) = cut(train), cut(held_out)
        some = torch.randperm(len(u), generator=torch.Generator().manual_seed(0))
        validation, test = some[:NUM_HELD_OUT], some[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TEST]
        return (x, y), (u[validation], v[validation]), (u[test], v[test])
    if name == "fashion":
        arrays = fashion.read()
        (x, y), (u, v) = arrays.train, arrays.test
    else:
        file = {"cifar10": "cifar10.npz", "cifar100": "cifar100.npz", "tiny": "tinyimagenet16.npz"}[name]
        with np.load(folder / file) as found:
            test_name = "val" if name == "tiny" else "test"
            x, y, u, v = (
                torch.from_numpy(found[f"{part}_{what}"])
                for part in ("train", test_name)
                for what in ("images", "labels")
            )
        x, u = x.permute(0, 3, 1, 2).contiguous(), u.permute(0, 3, 1, 2).contiguous()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    num_held_out = min(NUM_HELD_OUT, len(x) // 6)
    held_out, rest = order[:num_held_out], order[num_held_out:]
    return (x[rest], y[rest]), (x[held_out], y[held_out]), (u[:NUM_TEST], v[:NUM_TEST])


def as_input(x: Tensor) -> Tensor:
    if x.dtype == torch.int64:
        return x
    return ((x.float() - 127.5) / 64).contiguous(memory_format=torch.channels_last)


def batches(part: Part, size: int, seed: int) -> Iterator[Part]:
    """Batches without end, photographs flipped at random."""
    (x, y), random = part, torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(x), generator=random).split(size)[: len(x) // size]:
            images = x[chosen]
            if images.dim() == 4:
                flip = torch.rand(len(images), generator=random) < 0.5
                images = torch.where(flip[:, None, None, None], images.flip(3), images)
            yield as_input(images), y[chosen]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(x).flatten(0, -2)
    return F.cross_entropy(scores, y.flatten()), scores


@torch.no_grad()
def evaluate(model: nn.Module, part: Part) -> tuple[float, float]:
    """Mean loss, and accuracy in percent."""
    model.eval()
    losses, right = [], 0
    for x, y in zip(part[0].split(250), part[1].split(250), strict=True):
        loss, scores = loss_of(model, as_input(x), y)
        losses.append(float(loss))
        right += int((scores.argmax(-1) == y.flatten()).sum())
    model.train()
    return float(np.mean(losses)), 100 * right / part[1].numel()


def train(name: str, contender: str, seed: int, folder: Path) -> dict[str, Any]:
    """One training; a row of the record."""
    torch.set_num_threads(1)
    setting = SETTINGS[name]
    part, validation, test = load(setting.data, folder)
    torch.manual_seed(seed)
    model = setting.make().to(memory_format=torch.channels_last)
    if setting.optimizer == "sgd":
        rate = 0.1
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
    else:
        rate = 2e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    feed = batches(part, setting.batch, seed)
    example = next(feed)[0][:2]
    policy = slimstart.EqualWorth(**CONTENDERS[contender])
    dense = slimstart.flops(model, example)
    sparse = slimstart.SparseTraining(
        model, optimizer, example, slimstart.Flops(setting.budget), total_steps=setting.steps, policy=policy
    )
    warm, losses, began = setting.steps // 20, [], time.perf_counter()
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / setting.steps))
        loss, _ = loss_of(model, *next(feed))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - began
    graph = sparse.dense_graph
    num_left = len(graph.layers) - len(sparse.learner.removed)
    model = sparse.finish()
    chunk = max(1, setting.steps // 20)
    (held_out_loss, held_out), (test_loss, accuracy) = evaluate(model, validation), evaluate(model, test)
    return {
        "network": name, "contender": contender, "seed": seed, "data": setting.data, "budget": setting.budget,
        "steps": setting.steps, "batch": setting.batch, "optimizer": setting.optimizer,
        "flops_ratio": slimstart.flops(model, example) / dense,
        "num_layers": len(graph.layers), "num_left": num_left,
        "train_loss": [round(float(np.mean(losses[i : i + chunk])), 4) for i in range(0, setting.steps, chunk)],
        "validation_loss": held_out_loss, "validation_accuracy": held_out,
        "test_loss": test_loss, "test_accuracy": accuracy, "seconds": seconds, **facts(torch.device("cpu")),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("results/held_out.jsonl"))
    parser.add_argument("--networks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at the same time, of one thread each")
    parser.add_argument("--one", action="store_true", help="train here, and print the row")
    args = parser.parse_args(arguments)
    queue = [(n, c, s) for s in args.seeds for n in args.networks for c in args.contenders]
    if args.one:
        for name, contender, seed in queue:
            print(json.dumps(train(name, contender, seed, args.data_dir)))
        return
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["network"], row["contender"], row["seed"]) for row in rows}

    def run(job: tuple[str, str, int]) -> None:
        name, contender, seed = job
        own = ["--one", "--networks", name, "--contenders", contender, "--seeds", str(seed)]
        command = [sys.executable, __file__, "--data-dir", str(args.data_dir), *own]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            print(f"{job}: {ended.stderr[-500:]}", flush=True)
            return
        with args.out.open("a") as file:
            file.write(ended.stdout.splitlines()[-1] + "\n")
        row = json.loads(ended.stdout.splitlines()[-1])
        keys = ("flops_ratio", "num_left", "num_layers", "validation_accuracy", "test_accuracy", "test_loss", "seconds")
        print(*job, {key: round(row[key], 3) for key in keys}, flush=True)

    with ThreadPoolExecutor(args.jobs) as executor:
        list(executor.map(run, (job for job in queue if job not in done)))


if __name__ == "__main__":
    main()
