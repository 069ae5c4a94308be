"""Adam's bias correction for channels that are first trained late.

Adam's `step` is one number per parameter, so the bias correction of an entry that is first trained at step 1000 is used
up: its second moment starts at 0, is hardly corrected, and its first updates are several times too long. Three
variants, on CIFAR-10, at equal learning rates:

- shared:    PyTorch's AdamW unchanged (what SparseTraining does with it);
- fill:      an entry that was never trained starts from the mean second moment of its parameter;
- entrywise: an AdamW of our own whose step count is a tensor, so that every entry has its own correction.

    python benchmarks/late_waking.py --data cifar10.npz --seeds 3 --out results/late_waking.json

The .npz holds `train_images`, `test_images` (uint8, N x 32 x 32 x 3), `train_labels` and `test_labels`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import benchmark_record
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.lab.models.feed_forward import VGG
from slimstart.policies import Paper

STAGES = ((64, 64), (128, 128), (256, 256))


class EntrywiseAdamW(torch.optim.Optimizer):
    """AdamW in which every entry counts its own steps. The count has the parameter's shape, so it follows channels."""

    def __init__(self, params, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update({k: torch.zeros_like(p) for k in ("steps", "exp_avg", "exp_avg_sq")})
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["steps"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                first = state["exp_avg"] / (1 - 0.9 ** state["steps"])
                second = state["exp_avg_sq"] / (1 - 0.999 ** state["steps"])
                p.sub_(group["lr"] * first / (second.sqrt() + 1e-8))


@torch.no_grad()
def fill_untrained(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        second = state["exp_avg_sq"]
        untrained = second == 0
        second.masked_fill_(untrained, 0.0).add_(untrained * (second.sum() / (~untrained).sum().clamp(min=1)))


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def run(variant: str, lr: float, seed: int, data: dict[str, Tensor], args: argparse.Namespace) -> float:
    """Accuracy in percent of the finished network."""
    torch.manual_seed(seed)
    model = VGG(STAGES, num_classes=10, in_channels=3, width=1.0).to(args.device)
    kind = EntrywiseAdamW if variant == "entrywise" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=lr, weight_decay=0.05)
    images, labels = data["train_images"], data["train_labels"]
    steps = args.epochs * (len(images) // args.batch_size)
    sparse = slimstart.SparseTraining(
        model, optimizer, images[:1], slimstart.Flops(args.flops), total_steps=steps, policy=Paper(seed=seed)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = []
    for _ in range(args.epochs):
        order = torch.randperm(len(images)).to(args.device)
        batches = [
            (images[part], labels[part]) for part in order.split(args.batch_size) if len(part) == args.batch_size
        ]
        for batch in batches:
            sparse.step(loss_fn, *batch)
            if variant == "fill":
                fill_untrained(optimizer)
            scheduler.step()
    small = sparse.finish(batches, loss_fn).eval()
    with torch.no_grad():
        outputs = torch.cat([small(part) for part in data["test_images"].split(1000)])
    return 100 * float((outputs.argmax(1) == data["test_labels"]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train-images", type=int, default=20000)
    parser.add_argument("--variants", nargs="+", default=["shared", "fill", "entrywise"])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 4e-3])
    parser.add_argument("--flops", type=float, default=0.10)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with np.load(args.data) as arrays:
        data = {name: torch.from_numpy(arrays[name]).to(args.device) for name in arrays.files}
    for part in ("train", "test"):
        data[f"{part}_images"] = (data[f"{part}_images"].permute(0, 3, 1, 2).float() / 255 - 0.47) / 0.25
    data["train_images"], data["train_labels"] = (data[f"train_{k}"][: args.train_images] for k in ("images", "labels"))
    rows = []
    for lr in args.lr:
        for variant in args.variants:
            accuracies = [run(variant, lr, seed, data, args) for seed in args.seeds]
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            rows.append({"variant": variant, "lr": lr, "accuracies": accuracies, "spread": spread})
            print(f"lr {lr}: {variant:10} {statistics.mean(accuracies):.2f} +- {spread:.2f}", flush=True)
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "data", "device")}
        benchmark_record.write(args.out, "late_waking", rows, args.device, settings=settings)


if __name__ == "__main__":
    main()
