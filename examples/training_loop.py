"""A training script of your own with SparseTraining, on the embedded part of Fashion-MNIST.

    python examples/training_loop.py

Six epochs on the CPU, narrow from the first step: widths are learned in the first fifth of them, inside
`optimizer.step()`. Everything but the lines with `sparse` is what you would write for any network.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import slimstart
from slimstart.lab import data, models


@torch.no_grad()
def accuracy(net: nn.Module, batches: data.Batches) -> float:
    """Percent of correctly classified images."""
    net.eval()
    correct = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in batches.epoch(0))
    net.train()
    return 100 * correct / batches.num_images


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small network at a budget from the first step.")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies all widths of the dense network")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--budget", type=float, default=0.2, help="FLOPs, as a fraction of the dense network's")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the finished network here (.safetensors)")
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    fashion = data.load("fashion", batch_size=args.batch_size, seed=args.seed)
    example = torch.zeros(1, *fashion.image_shape)
    num_steps = args.epochs * len(fashion.train)

    model = models.build("small", num_classes=fashion.num_classes, in_channels=1, width=args.width)
    dense_flops = slimstart.flops(model, example)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    sparse = slimstart.SparseTraining(
        model, optimizer, example, slimstart.Flops(args.budget), total_steps=num_steps
    )  # from here on, `model` is narrow

    for epoch in range(args.epochs):
        total = 0.0
        for images, labels in fashion.train.epoch(epoch):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += float(loss.detach())
        print(
            f"epoch {epoch + 1}/{args.epochs}  loss {total / len(fashion.train):.3f}  "
            f"accuracy {accuracy(model, fashion.test):.2f} %  FLOPs {slimstart.flops(model, example) / dense_flops:.1%}"
        )

    model = sparse.finish()  # the same object, a plain module
    ratio = slimstart.flops(model, example) / dense_flops
    print(f"finished: {accuracy(model, fashion.test):.2f} % at {ratio:.2%} of the FLOPs")
    print(model)
    if args.out:
        slimstart.save(model, args.out)


if __name__ == "__main__":
    main()
