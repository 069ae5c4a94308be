"""Train a network whose dense weights and optimizer state do not fit on the device, on a part of Fashion-MNIST.

    python examples/larger_than_the_card.py --width 24 --limit 1.0

The dense weights and their optimizer state are stored in the host's memory; the device holds the narrow network. Three
things differ from any other training: the model is made on the host, the example is on the device, and
`full_model_device` is given. `--limit` (GiB) restricts the process to a part of a GPU, to show that the dense network
is not there; without a GPU the same code runs on the CPU.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart.lab import data, models
from slimstart.steps import host_memory as memory


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a network that is larger than the device.")
    parser.add_argument("--model", default="vgg19")
    parser.add_argument("--width", type=float, default=8.0, help="multiplies all widths of the dense network")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--budget", type=float, default=0.05, help="FLOPs, as a fraction of the dense network's")
    parser.add_argument("--print-every", type=int, default=50, help="steps")
    parser.add_argument("--limit", type=float, help="GiB of the GPU to use; the rest is left alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    device, budget = torch.device(args.device), slimstart.Flops(args.budget)
    if args.limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit * memory.GIB / total, torch.cuda.current_device())

    torch.manual_seed(0)
    images = data.load("fashion", batch_size=args.batch_size, device=device)
    example = torch.zeros(1, *images.image_shape, device=device)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = models.build(args.model, num_classes=images.num_classes, in_channels=1, width=args.width)
        return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    with torch.device("meta"):  # shapes alone
        print(f"needs {memory.estimate(*make(), budget)}")
    model, optimizer = make()  # on the host; the narrow network will be where the example is
    sparse = slimstart.SparseTraining(
        model,
        optimizer,
        example,  # on the device
        budget,
        total_steps=args.steps,
        max_grad_norm=5.0,
        full_model_device="cpu",
    )
    epoch = 0
    while sparse.num_steps < args.steps:
        for batch in images.train.epoch(epoch):
            loss = sparse.step(loss_fn, *batch)
            if sparse.num_steps % args.print_every == 0:
                share = sparse.gradient_bytes / sparse.dense_gradient_bytes
                print(f"step {sparse.num_steps}  loss {float(loss):.3f}  {share:.1%} of the weights on the device")
            if sparse.num_steps == args.steps:
                break
        epoch += 1

    model = sparse.finish(images.train.epoch(epoch), loss_fn).eval()  # on the device, with statistics measured again
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in images.test.epoch(0))
    num_weights = sum(p.numel() for p in model.parameters())
    print(f"finished: {100 * correct / images.test.num_images:.2f} % with {num_weights} weights")
    if device.type == "cuda":
        print(f"peak memory on the device: {torch.cuda.max_memory_allocated(device) / memory.GIB:.2f} GiB")


if __name__ == "__main__":
    main()
