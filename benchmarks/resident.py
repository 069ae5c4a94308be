"""A network larger than the device: what it costs to keep the dense model on the host.

    python benchmarks/resident.py --out results/resident_h200.json
    python benchmarks/resident.py --tiny --out resident.json

A VGG-19, as wide as makes its dense weights and SGD state four times the memory that the process may use of the GPU, is
trained at 5 % of its FLOPs, on random images. Then the same without the limit, with the dense model on the GPU. A row
each: peak memory of the device and what of it is known beforehand (`inventory`), seconds per step over whole windows
(nothing waits in between), seconds of a draw alone (the device waits before and behind it, and nothing was fetched
ahead), and bytes that crossed the bus per draw.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from pathlib import Path
from typing import Any

import records
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimstart
from slimstart import models
from slimstart.engine.assembly import ALIGN
from slimstart.structure import BernoulliUnits
from slimstart.subnet.page_locked import num_bytes
from slimstart.subnet.resident_slots import shared_out
from slimstart.subnet.seating import Seating
from slimstart.subnet.slots import Slots

PARAMETERS = 20.03e6  # of VGG-19; they grow with the square of its width


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(width: float, place: str | torch.device) -> nn.Module:
    """A VGG-19; its weights repeat after a million random numbers, since a host takes minutes for billions of them."""
    with torch.device("meta"):
        model = models.build("vgg19", num_classes=10, width=width)
    model.to_empty(device=place)
    numbers = torch.randn(2**20, device=place)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() > 1:
                flat = tensor.view(-1)
                for part in flat.split(numbers.numel()):
                    part.copy_(numbers[: part.numel()])
                tensor.mul_(math.sqrt(2 * tensor.shape[0] / tensor.numel()))  # as He et al. do
            else:
                tensor.fill_(1.0 if name.endswith("running_var") or _is_scale(model, name) else 0.0)
    return model


def _is_scale(model: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key == "weight" and isinstance(model.get_submodule(owner), nn.BatchNorm2d)


def inventory(model: nn.Module, example: Tensor, budget: float) -> dict[str, int]:
    """Bytes on the device by kind, without activations and workspaces: in static slots, by SGD with momentum.

    Args:
        model: dense; on the meta device will do.
    """
    graph = slimstart.trace(model, example)
    policy = BernoulliUnits(graph.costs, slimstart.Flops(budget), sampling="capped")
    slots = Slots(graph, ALIGN, policy.spread)
    slots.adjust(graph.costs.at_least_one(policy.draw()), policy.keep_probs)
    seating = Seating(graph, slots.room, torch.device("cpu"))

    def narrow(name: str, dense: Tensor) -> tuple[str, Tensor, Tensor]:
        shape = list(dense.shape)
        for piece in graph.tensors.get(name, ()):
            shape[piece.dim] = seating.count[piece.axis]
        return name, dense, torch.empty(shape, dtype=dense.dtype, device="meta")

    parameters = [narrow(*one) for one in model.named_parameters()]
    buffers = [narrow(*one) for one in model.named_buffers()]
    cut = [one for one in (*parameters, *buffers, *parameters) if one[0] in graph.tensors]  # the last are momentum
    ahead, _ = shared_out(cut)
    whole = [one for one in parameters if one[0] not in graph.tensors]

    def size(tensors: Any) -> int:
        return sum(one.numel() * one.element_size() for _, _, one in tensors)

    return {
        "weights": size(parameters) + size(buffers),
        "gradients": size(parameters),
        "momentum": size(parameters),
        "reference": size(parameters) + size(buffers) - size(whole),  # which are shared
        "occupied": sum(one.numel() for _, _, one in parameters),
        "ahead": size(ahead),
        "scratch": max(num_bytes(one) for _, _, one in cut),
    }


def measure(home: str | None, width: float, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train for some windows; the first two are not timed."""
    known = None
    if home is not None:
        with torch.device("meta"):
            shapes = models.build("vgg19", num_classes=10, width=width)
        known = inventory(shapes, torch.zeros(1, 3, 32, 32, device="meta"), args.budget)
        print(f"known beforehand: {known}, {sum(known.values()) / 2**30:.2f} GiB", flush=True)
    torch.manual_seed(0)
    began = time.perf_counter()
    model = build(width, home or device)
    order = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(memory_format=order)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images = torch.randn(args.batch_size, 3, 32, 32, device=device).contiguous(memory_format=order)
    labels = torch.randint(10, (args.batch_size,), device=device)
    made = time.perf_counter()
    sparse = slimstart.SparseTraining(
        model,
        optimizer,
        images[:1],
        slimstart.Flops(args.budget),
        resample_every=args.resample_every,
        max_grad_norm=1.0,
        engine=args.engine,
        full_model_device=home,
    )
    constructed = time.perf_counter()
    synchronise(device)
    if device.type == "cuda":  # of the training alone: the dense model on the GPU is traced there, with copies
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def window(number: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(number * args.resample_every):
            sparse.step(loss_fn, images, labels)
        synchronise(device)
        return time.perf_counter() - start

    warming = window(2)
    before, building = sparse.traffic, sparse.building_seconds
    seconds = window(args.windows)
    rebuilding, after = sparse.building_seconds - building, sparse.traffic
    draws = []
    for _ in range(5):
        synchronise(device)
        start = time.perf_counter()
        sparse.resample()
        synchronise(device)
        draws.append(time.perf_counter() - start)
    steps = args.windows * args.resample_every
    parameters = sum(p.numel() for p in model.parameters())
    row = {
        "full_model_device": home or str(device),
        "engine": sparse.engine,
        "reason": sparse.reason,
        "width": width,
        "parameters": parameters,
        "dense_bytes": 8 * parameters,
        "narrow_parameters": sum(p.numel() for p in sparse.net.parameters()),
        "known_bytes": known,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "step_s": (seconds - rebuilding) / steps,
        "rebuilding_s": rebuilding,
        "draw_s": min(draws),
        "draw_share": min(draws) / (min(draws) + args.resample_every * (seconds - rebuilding) / steps),
        "up_bytes_per_draw": (after.up - before.up) / args.windows,
        "down_bytes_per_draw": (after.down - before.down) / args.windows,
        "making_s": made - began,
        "construction_s": constructed - made,
        "warming_s": warming,
    }
    print(row, flush=True)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.5, help="GiB of the GPU that the process may use")
    parser.add_argument("--times", type=float, default=4.0, help="dense weights and state, in limits")
    parser.add_argument("--width", type=float, help="instead of what follows from the two")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--resample-every", type=int, default=50)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="steps are faster, and the bus slower: entries that are kept lie scattered",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small network and short windows, for the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.tiny:
        args.width, args.batch_size, args.resample_every, args.windows = 0.125, 4, 2, 2
    device = torch.device(args.device)
    limit = args.limit * 2**30
    # Widths are whole numbers of channels: a little more, so that it is surely enough.
    width = args.width or math.ceil(100 * math.sqrt(args.times * limit / 8 / PARAMETERS)) / 100 + 0.01
    rows = []
    if device.type == "cuda":
        index = torch.cuda.current_device()
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total, index)
    rows.append(measure("cpu", width, args, device))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, index)
    rows.append(measure(None, width, args, device))
    slower = rows[0]["step_s"] / rows[1]["step_s"] - 1
    print(f"with the dense model on the host, a step takes {slower:.1%} longer", flush=True)
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key not in ("out", "device")}
        records.write(args.out, "resident", rows, device=args.device, **settings, slower=slower)


if __name__ == "__main__":
    main()
