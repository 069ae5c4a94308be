"""A training loop of your own around SparseTraining, on the embedded part of Fashion-MNIST.

    python examples/training_loop.py

Six epochs on the CPU, narrow from the first step: during a fifth of them the widths of the layers are learned, then
they stay. Everything but the lines with `sparse` is what you would write for any network.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import data, models


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Takes the network, because it becomes another one while widths are learned."""
    return F.cross_entropy(net(images), labels)


@torch.no_grad()
def accuracy(net: nn.Module, batches: data.Batches) -> float:
    """Percent of the images that are told right."""
    net.eval()
    correct = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in batches.epoch(0))
    return 100 * correct / batches.num_images


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small network narrow from step one.")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies all widths of the dense network")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--budget", type=float, default=0.2, help="FLOPs, as a fraction of the dense network's")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the finished network here (.safetensors)")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    images = data.load("fashion", batch_size=args.batch_size, seed=args.seed)
    example = torch.zeros(1, *images.image_shape)
    num_steps = args.epochs * len(images.train)

    model = models.build("small", num_classes=images.num_classes, in_channels=1, width=args.width)
    dense_flops = slimstart.flops(model, example)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    sparse = slimstart.SparseTraining(
        model,
        optimizer,
        example,
        slimstart.Flops(args.budget),
        total_steps=num_steps,
    )

    def calibration() -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches that belong to no epoch, to measure statistics with."""
        return images.train.epoch(args.epochs)

    for epoch in range(args.epochs):
        total = 0.0
        for batch in images.train.epoch(epoch):
            total += float(sparse.step(loss_fn, *batch))
            scheduler.step()
        now = sparse.snapshot(calibration(), loss_fn)  # a finished copy; training goes on
        print(
            f"epoch {epoch + 1}/{args.epochs}  loss {total / len(images.train):.3f}  "
            f"accuracy {accuracy(now, images.test):.2f} %  FLOPs {slimstart.flops(now, example) / dense_flops:.1%}"
        )

    small = sparse.finish(calibration(), loss_fn)
    ratio = slimstart.flops(small, example) / dense_flops
    print(f"finished: {accuracy(small, images.test):.2f} % at {ratio:.2%} of the FLOPs")
    print(small)
    if args.out:
        slimstart.save(small, args.out)


if __name__ == "__main__":
    main()
