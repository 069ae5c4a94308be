"""Accelerate: train an image classifier at a quarter of its FLOPs, and resume from `save_state`.

    pip install 'slimstart[lab,accelerate]'
    python examples/accelerate_training.py --out out
    python examples/accelerate_training.py --out out --resume

About one minute on two CPU cores with the embedded data; in several processes with `accelerate launch`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import slimstart
from slimstart.integrations.accelerate import register
from slimstart.lab import data, models


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    settings = parser.parse_args(arguments)

    found = data.load("fashion", batch_size=settings.batch_size)
    train = TensorDataset(*(torch.cat(parts) for parts in zip(*found.train.epoch(0), strict=True)))
    accelerator = Accelerator(cpu=True)
    model = models.build("small", num_classes=10, in_channels=1, width=settings.width)
    image = torch.zeros(2, *found.image_shape)
    dense_flops = slimstart.flops(model, image)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=settings.batch_size, shuffle=True)
    )
    steps, folder = settings.epochs * len(loader), Path(settings.out) / "state"
    budget = slimstart.Flops(settings.budget)
    sparse = slimstart.SparseTraining(model, optimizer, image, budget, total_steps=steps)
    register(accelerator, sparse)
    if settings.resume:
        accelerator.load_state(str(folder))

    for epoch in range(sparse.num_steps // len(loader), settings.epochs):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(folder))
        accelerator.print(f"epoch {epoch + 1}: {slimstart.flops(sparse.model, image) / dense_flops:.2%} of the FLOPs")

    sparse.finish()
    small = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        correct = [small(images).argmax(1) == labels for images, labels in found.test.epoch(0)]
    share = slimstart.flops(small, image) / dense_flops
    accelerator.print(f"finished: {100 * float(torch.cat(correct).float().mean()):.2f} % at {share:.2%} of the FLOPs")
    accelerator.end_training()


if __name__ == "__main__":
    main()
