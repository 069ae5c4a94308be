"""A network larger than the device: what it costs to keep the dense model on the host.

    python benchmarks/resident.py --out results/resident_h200.json
    python benchmarks/resident.py --tiny --out resident.json

A VGG-19, so wide that its dense weights and SGD state take four times the GPU memory that the process may use, is
trained at 5 % of its FLOPs, on random images, by each policy. Then the same without the limit, with the dense model on
the GPU. One row each: peak memory of the device and the part that is known beforehand (`inventory`), seconds per step
and per change of structure. A row that runs out of memory says so, and the others go on.

With "paper", steps are timed over whole windows, changes of structure included, and a change also by itself (the device
is synchronised before and after it). With "equal_worth", where a step is captured again after every change, steps are
timed within windows, and a change is the time of a window beyond its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import os
import time
from pathlib import Path
from typing import Any

import benchmark_record
import torch
import torch.nn.functional as F
from inventory import WORKSPACE, inventory
from torch import Tensor, nn

import slimstart
from slimstart.lab import models
from slimstart.policies import EqualWorth, Policy, get_policy

POLICIES = ("paper", "equal_worth")


def settings_of(policy: str) -> Policy:
    """The settings of a policy. All layers are kept: with few and wide ones the networks would be larger."""
    return EqualWorth(depth=0, tilt=0) if policy == "equal_worth" else get_policy(policy)


PARAMETERS = 20.03e6  # of VGG-19; they grow with the square of its width
WARMING = 2  # windows


def loss_fn(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(images), labels)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def width_of(size: float) -> float:
    """The width of a network whose dense weights and SGD state have this many bytes, or a little more."""
    return math.ceil(100 * math.sqrt(size / 8 / PARAMETERS)) / 100 + 0.01


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


def measure(
    policy: str, home: str | None, known: dict[str, int], width: float, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train for some windows; the first are not timed."""
    torch.manual_seed(0)
    began = time.perf_counter()
    model = build(width, home or device)
    parameters = sum(p.numel() for p in model.parameters())
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
        policy=dataclasses.replace(settings_of(policy), resample_every=args.resample_every),
        max_grad_norm=1.0,
        engine=args.engine,
        full_model_device=home,
    )
    constructed = time.perf_counter()
    synchronise(device)
    if device.type == "cuda":  # of the training alone: the dense model on the GPU is traced there, with copies
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def run(steps: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(steps):
            sparse.step(loss_fn, images, labels)
        synchronise(device)
        return time.perf_counter() - start

    def draw() -> float:
        synchronise(device)
        start = time.perf_counter()
        sparse.resample()
        synchronise(device)
        return time.perf_counter() - start

    every = args.resample_every
    warming = run(WARMING * every)
    building = sparse.building_seconds
    if get_policy(policy).learns_from == "losses":
        seconds = run(args.windows * every)
        rebuilding = sparse.building_seconds - building
        step_s = (seconds - rebuilding) / (args.windows * every)
        draw_s = min(draw() for _ in range(5))
    else:
        windows = [(run(1), run(every - 2), run(1)) for _ in range(args.windows)]  # captured, held, drawn
        step_s = sum(held for _, held, _ in windows) / (args.windows * (every - 2))
        beyond = [captured + drawn - 2 * step_s for captured, _, drawn in windows]
        rebuilding, draw_s = sum(beyond), min(beyond)
    return {
        "policy": policy,
        "full_model_device": home or str(device),
        "engine": sparse.engine,
        "reason": sparse.reason,
        "width": width,
        "parameters": parameters,
        "dense_bytes": 8 * parameters,
        "narrow_parameters": sum(p.numel() for p in model.parameters()),
        "known_bytes": known,
        **taken(device),
        "step_s": step_s,
        "rebuilding_s": rebuilding,
        "draw_s": draw_s,
        "draw_share": draw_s / (draw_s + every * step_s),
        "making_s": made - began,
        "construction_s": constructed - made,
        "warming_s": warming,
    }


def row_of(
    policy: str, home: str | None, known: dict[str, int], width: float, args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """A row of the record: measurements, or the memory that was in use when it ran out."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        row = measure(policy, home, known, width, args, device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        row = {
            "policy": policy,
            "full_model_device": home or str(device),
            "width": width,
            "known_bytes": known,
            **taken(device),
            "out_of_memory": str(error),
        }
    print(row, flush=True)
    return row


def taken(device: torch.device) -> dict[str, Any]:
    """Bytes of tensors on the device, their peak, and the peak that PyTorch had reserved."""
    if device.type != "cuda":
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def slowdown(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By policy: the relative increase of step time with the dense model on the host, where both were measured."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if "step_s" in row:
            times.setdefault(row["policy"], []).append(row["step_s"])
    return {policy: both[0] / both[1] - 1 for policy, both in times.items() if len(both) == 2}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=5.0, help="GiB of the GPU that the process may use")
    parser.add_argument("--times", type=float, default=4.0, help="dense weights and state, in limits")
    parser.add_argument("--width", type=float, help="instead of what follows from the two")
    parser.add_argument("--policy", choices=POLICIES, help="instead of one after the other")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--resample-every", type=int, default=50)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="steps are faster, and changes of structure slower: kept entries are not contiguous",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small network and short windows, for the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.tiny:
        args.width, args.batch_size, args.resample_every, args.windows = 0.125, 4, 3, 2
    policies = POLICIES if args.policy is None else (args.policy,)
    rounds = EqualWorth().rounds
    most = rounds - 1 - WARMING
    if "equal_worth" in policies and not (args.windows <= most and args.resample_every >= 3):
        parser.error(
            f"--windows is {args.windows} and --resample-every {args.resample_every}; equal_worth settles after "
            f"{rounds} draws, and its steps are timed between a first and a last one: at most {most}, and at least 3"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)  # read when the GPU is first used
    device = torch.device(args.device)
    limit = args.limit * 2**30
    width = args.width or width_of(args.times * limit)
    with torch.device("meta"):
        shapes = models.build("vgg19", num_classes=10, width=width)
        images = torch.zeros(args.batch_size, 3, 32, 32)
    known = {policy: inventory(shapes, images, args.budget, settings_of(policy)) for policy in policies}
    for policy, kinds in known.items():
        print(f"{policy}, known beforehand: {kinds}, {sum(kinds.values()) / 2**30:.2f} GiB", flush=True)
    rows = []
    for home in ("cpu", None):
        if device.type == "cuda":
            index = torch.cuda.current_device()
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if home is None else limit / total, index)
        for policy in policies:
            rows.append(row_of(policy, home, known[policy], width, args, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    slower = slowdown(rows)
    print(f"with the dense model on the host, a step takes longer by {slower}", flush=True)
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key not in ("out", "device")}
        benchmark_record.write(args.out, "resident", rows, device=args.device, **settings, slower=slower)


if __name__ == "__main__":
    main()
