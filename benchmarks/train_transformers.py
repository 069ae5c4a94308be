"""A GPT on bytes of Python's standard library, or a ViT on CIFAR-100, at a budget from the first step on.

    python benchmarks/train_transformers.py --task gpt --budget 0.25 --out results/gpt/slimstart-25.json
    python benchmarks/train_transformers.py --task gpt --budget 0.25 --method uniform --layers 4    # shallower
    python benchmarks/train_transformers.py --task vit --method dense --data-dir FOLDER

The budget is a fraction of the FLOPs of the network with the default number of `--layers`, so that a shallower network
with uniform widths is compared at equal FLOPs. Trained with AdamW, a cosine schedule with warm-up, clipping, and
bfloat16 on a GPU. At the end, a step of the finished network is timed against one of the dense network, and against one
of a network of the same sizes that is built directly. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import benchmark_record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.lab import data

LAYERS = {"gpt": 8, "vit": 8}
HEAD = 32  # width of a head


class Block(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, dim: int, heads: int, hidden: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * heads * HEAD), nn.Linear(heads * HEAD, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks between an embedding of bytes or patches, with learned positions, and a linear layer.

    Args:
        heads, hidden: of each block.
        inputs: number of different bytes, or of values in a patch.
    """

    def __init__(
        self, task: str, dim: int, heads: Sequence[int], hidden: Sequence[int], inputs: int, length: int, outputs: int
    ) -> None:
        super().__init__()
        self.task = task
        self.embed: nn.Module = nn.Embedding(inputs, dim) if task == "gpt" else nn.Linear(inputs, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(length, dim))
        blocks = zip(heads, hidden, strict=True)
        self.blocks = nn.ModuleList(Block(dim, own, width, causal=task == "gpt") for own, width in blocks)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.task == "vit":  # patches of 4 x 4
            x = F.unfold(x, 4, stride=4).transpose(1, 2)
        x = self.embed(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x if self.task == "gpt" else x.mean(1))


def built_directly(narrow: Transformer) -> Transformer:
    """A network of the sizes that another one has, with new weights; its blocks may be fewer."""
    blocks = [block for block in narrow.blocks if isinstance(block, Block)]
    heads = [block.proj.in_features // HEAD for block in blocks]
    hidden = [block.up.out_features for block in blocks]
    inputs = narrow.embed.num_embeddings if isinstance(narrow.embed, nn.Embedding) else narrow.embed.in_features
    length, dim = narrow.positions.shape
    made = Transformer(narrow.task, dim, heads, hidden, int(inputs), length, narrow.head.out_features)
    assert sum(p.numel() for p in made.parameters()) == sum(p.numel() for p in narrow.parameters())
    return made.to(narrow.positions.device)


# --- data -------------------------------------------------------------------------------------------------------------


def standard_library(limit: int) -> tuple[Tensor, Tensor]:
    """Bytes of the sources of Python's standard library, in the order of their names; every twentieth file is held out.

    Returns:
        Bytes to train on, and to validate on.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    places = (place for place in sorted(folder.iterdir()) if place.name != "site-packages")
    files = (file for place in places for file in ([place] if place.suffix == ".py" else sorted(place.rglob("*.py"))))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, file in enumerate(files):
        parts[number % 20 == 0].append(file.read_bytes())
        size += len(parts[0][-1]) if number % 20 else 0
        if size >= limit:
            break
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


Batches = Iterator[tuple[Tensor, Tensor]]


def text(settings: argparse.Namespace, device: torch.device) -> tuple[Batches, Callable[[], Batches]]:
    """Training batches without end, and the batches to validate on."""
    train, validation = (part.to(device) for part in standard_library(settings.megabytes * 2**20))
    generator = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.length + 1, device=device)

    def cut(part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = part[starts.to(device)[:, None] + offsets].long()
        return rows[:, :-1], rows[:, 1:]

    def training() -> Batches:
        while True:
            yield cut(train, torch.randint(len(train) - settings.length, (settings.batch,), generator=generator))

    def validating() -> Batches:
        starts = torch.arange(0, len(validation) - settings.length, settings.length)
        yield from (cut(validation, part) for part in starts[: 50 * settings.batch].split(settings.batch))

    return training(), validating


def images(settings: argparse.Namespace, device: torch.device) -> tuple[Batches, Callable[[], Batches]]:
    """The same for images and their classes."""
    found = data.load(
        settings.data, data_dir=settings.data_dir, batch_size=settings.batch, seed=settings.seed, device=device,
        download=False,
    )  # fmt: skip

    def training() -> Batches:
        epoch = 0
        while True:
            yield from found.train.epoch(epoch)
            epoch += 1

    return training(), lambda: iter(found.test.epoch(0))


# --- training ---------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        scores = model(x)
    scores = scores.float().flatten(0, -2)
    return F.cross_entropy(scores, y.flatten()), scores


@torch.no_grad()
def validate(model: nn.Module, batches: Batches, device: torch.device) -> dict[str, float]:
    """Loss per byte or image, and how often the first guess is right, in percent."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for x, y in batches:
        mean, scores = loss_of(model, x, y, device)
        loss, right = loss + float(mean) * y.numel(), right + int((scores.argmax(-1) == y.flatten()).sum())
        count += y.numel()
    model.train()
    return {"loss": loss / count, "accuracy": 100 * right / count}


def milliseconds(model: nn.Module, x: Tensor, y: Tensor, device: torch.device, rounds: int, compiled: bool) -> float:
    """The fastest of several training steps of a network as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    run = torch.compile(model) if compiled else model
    times = []
    for _ in range(rounds + 5):
        began = time.perf_counter()
        loss_of(run, x, y, device)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1000 * min(times[5:])


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(LAYERS), required=True)
    parser.add_argument("--method", choices=["dense", "uniform", "slimstart"], default="slimstart")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--layers", type=int, help="blocks of the network; the budget is that of the default number")
    parser.add_argument("--depth", type=float, help="of slimstart.EqualWorth; by default its own")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--length", type=int, default=256, help="bytes of an example")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=20, help="of text")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=50, help="steps that are timed at the end")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(arguments)
    device, task = torch.device(settings.device), settings.task
    torch.manual_seed(settings.seed)
    batches, validation = (text if task == "gpt" else images)(settings, device)
    x, y = next(batches)
    inputs, length = (256, settings.length) if task == "gpt" else (x.shape[1] * 16, x[0, 0].numel() // 16)

    def make(layers: int) -> Transformer:
        heads, hidden = [settings.dim // HEAD] * layers, [4 * settings.dim] * layers
        outputs = 256 if task == "gpt" else 100
        return Transformer(task, settings.dim, heads, hidden, inputs, length, outputs).to(device)

    full = slimstart.flops(make(LAYERS[task]), x[:2])
    dense = make(settings.layers or LAYERS[task])
    model = make(settings.layers or LAYERS[task])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    sparse = None
    if settings.method != "dense":
        budget = slimstart.Flops(settings.budget * full / slimstart.flops(model, x[:2]))
        own = {} if settings.depth is None else {"depth": settings.depth}
        if settings.method == "uniform":  # all layers, equal fractions, and no structure update
            own = {"depth": 0, "tilt": 0, "rounds": 0}
        policy = slimstart.EqualWorth(**own)
        sparse = slimstart.SparseTraining(model, optimizer, x[:2], budget, total_steps=settings.steps, policy=policy)
    warm = max(1, settings.steps // 50)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / settings.steps))),
    )
    run = torch.compile(model) if settings.compile else model
    history: list[dict[str, float]] = []
    seconds, began = 0.0, time.perf_counter()
    for step in range(1, settings.steps + 1):
        loss, _ = loss_of(run, *next(batches), device)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % max(1, settings.steps // 10) == 0:
            train_loss = loss.item()  # waits for the GPU
            seconds += time.perf_counter() - began
            history.append({"step": step, "train_loss": train_loss, **validate(model, validation(), device)})
            print(f"step {step}: {history[-1]}", flush=True)
            began = time.perf_counter()
    seconds += time.perf_counter() - began
    if sparse is not None:
        sparse.finish()
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    row = {
        **{key: value for key, value in vars(settings).items() if key not in ("out", "device", "data_dir")},
        "flops": slimstart.flops(model, x[:2]) / full,
        "params": sum(p.numel() for p in model.parameters()),
        "dim": model.positions.shape[1],
        "heads": [block.proj.in_features // HEAD for block in blocks],
        "hidden": [block.up.out_features for block in blocks],
        "history": history,
        **validate(model, validation(), device),
        "train_seconds": seconds,
        "per_second": settings.steps * y.numel() / seconds,
    }
    networks = {"dense": dense, "finished": model, "built_directly": built_directly(model)}
    for name, network in networks.items():
        row[f"{name}_ms"] = milliseconds(network, x, y, device, settings.rounds, settings.compile)
    print({key: value for key, value in row.items() if key != "history"})
    if settings.out:
        benchmark_record.write(settings.out, "train_transformers", [row], settings.device)
    return row


if __name__ == "__main__":
    main()
