"""A plain training loop on several processes, each with its part of every batch. On one machine with two:

    torchrun --nproc-per-node 2 examples/distributed_training.py

All processes have the same structure and the same weights. What they exchange in a step is the gradient of the narrow
network. Without torchrun the same script trains in one process, to the same result but for rounding.
"""

import argparse

import torch
import torch.nn.functional as F

import slimstart
from slimstart.distributed import data_parallel, joined, synchronise_batch_norm
from slimstart.distributed.launch import own_device
from slimstart.lab import data, models


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--budget", type=float, default=0.1, help="share of the dense network's FLOPs")
    parser.add_argument("--save", help="file for checkpoints")
    options = parser.parse_args(arguments)

    with joined() as group:
        torch.manual_seed(0)
        device = torch.device(own_device())
        share = data.Share(group.rank, group.size)
        images = data.load("fashion", batch_size=options.batch_size, device=device, share=share)
        model = models.build("small", num_classes=10, in_channels=1, width=options.width).to(device)
        model = synchronise_batch_norm(model)  # leave it out, and each process normalises its own part
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        sparse = slimstart.SparseTraining(
            model,
            optimizer,
            example_inputs=torch.zeros(1, 1, 28, 28, device=device),
            budget=slimstart.Flops(options.budget),
            total_steps=options.epochs * len(images.train),
        )
        net = data_parallel(model) if group.size > 1 else model  # or any DistributedDataParallel, before or after
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(images.train))
        for epoch in range(options.epochs):
            for inputs, labels in images.train.epoch(epoch):
                loss = F.cross_entropy(net(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()  # the structure is learned, and changed, in here: in all processes alike
                schedule.step()
            loss = group.total(loss) / group.size
            if group.rank == 0:
                sent = sparse.gradient_bytes / sparse.dense_gradient_bytes
                print(f"epoch {epoch + 1}: loss {loss:.3f}, gradients are {100 * sent:.0f}% of the dense ones")
                if options.save:
                    sparse.save(options.save)  # by one process alone

        model = sparse.finish().eval()  # by all of them
        with torch.inference_mode():
            hits = sum((model(x).argmax(1) == y).sum() for x, y in images.test.epoch(0) if len(y))
        accuracy = 100 * float(group.total(torch.as_tensor(hits))) / images.test.num_images
        if group.rank == 0:
            print(f"finished: {accuracy:.2f} %")


if __name__ == "__main__":
    main()
