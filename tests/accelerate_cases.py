"""A loop with Accelerate for the tests; as a script, in two processes."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from slimstart import EqualWorth, Flops, SparseTraining
from slimstart.integrations.accelerate import register

SEARCHING = EqualWorth(align=1, search_steps=24, rounds=12, rate=1.0, pull=0.0)  # changes up to step 24
STEPS = 40


def batches(ranks: tuple[int, int] = (0, 1)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        labels = torch.randint(4, (8,), generator=generator)
        images = torch.randn(8, 3, 8, 8, generator=generator).double()
        images[:, 0] += labels[:, None, None]
        found.append((images[ranks[0] :: ranks[1]], labels[ranks[0] :: ranks[1]]))
    return found


def prepared(before: bool = False, seed: int = 0, **options: Any) -> tuple[Any, Any, Any, SparseTraining]:
    """An accelerator, and what it has prepared; with the `SparseTraining` made before or after `prepare`."""
    torch.manual_seed(seed)
    AcceleratorState._reset_state(reset_partial_state=False)  # of an accelerator with other options
    accelerator = Accelerator(cpu=True, **options)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    ).double()  # fmt: skip
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {"total_steps": STEPS, "policy": SEARCHING}
    example = batches()[0][0][:2]
    if before:
        sparse = SparseTraining(model, optimizer, example, Flops(0.25), **settings)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not before:
        sparse = SparseTraining(model, optimizer, example, Flops(0.25), **settings)
    register(accelerator, sparse)
    return accelerator, model, optimizer, sparse


def train(accelerator: Any, model: Any, optimizer: Any, data: Any, clip: float = 10.0) -> None:
    for images, labels in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    accelerator, model, optimizer, sparse = prepared(before=sys.argv[2] == "before")
    train(accelerator, model, optimizer, batches((accelerator.process_index, 2)))
    assert accelerator.num_processes == 2
    folder = Path(sys.argv[1])
    sparse.finish()
    torch.save(accelerator.unwrap_model(model).state_dict(), folder / f"rank{accelerator.process_index}.pt")
    accelerator.end_training()  # otherwise threads of gloo may abort the process at its exit
