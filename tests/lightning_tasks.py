"""A LightningModule for the tests of the callback; as a script, a training in two processes."""

import sys
from pathlib import Path
from typing import Any

import tests.torchvision_operators  # noqa: F401  # before Lightning, which imports torchvision

# isort: split

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from slimstart import EqualWorth, Flops
from slimstart.integrations.lightning import Slimming

SEARCHING = EqualWorth(align=1, search_steps=24, rounds=12, rate=1.0, pull=0.0)  # changes up to step 24
STEPS = 10  # in an epoch


class Task(lightning.LightningModule):
    def __init__(self, width: int = 16, norm: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        norms = [nn.BatchNorm2d(n) if norm else nn.Identity() for n in (width, 2 * width)]
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), norms[0], nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), norms[1], nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 4),
        )  # fmt: skip

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step


def loader(shuffle: bool = False, ranks: tuple[int, int] = (0, 1)) -> DataLoader[Any]:
    """Batches of 8, or of as many as there are for one rank: (its number, how many there are)."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (STEPS * 8,), generator=generator)
    images = torch.randn(STEPS * 8, 3, 8, 8, generator=generator)
    images[:, 0] += labels[:, None, None]
    share = slice(ranks[0], None, ranks[1])
    return DataLoader(TensorDataset(images[share], labels[share]), batch_size=8 // ranks[1], shuffle=shuffle)


def trainer(folder: Path, *callbacks: Any, slimming: Slimming | None = None, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 4}
    slimming = slimming or Slimming(Flops(0.25), SEARCHING)
    own = {**quiet, "enable_checkpointing": bool(callbacks), "accelerator": "cpu", "default_root_dir": folder}
    return lightning.Trainer(callbacks=[slimming, *callbacks], **{**own, **options})


if __name__ == "__main__":
    torch.manual_seed(0)
    task = Task(norm=False)
    run = trainer(
        Path(sys.argv[1]), strategy="ddp", devices=2, precision="64-true", use_distributed_sampler=False
    )  # Lightning's own sampler would shuffle
    run.fit(task, loader(ranks=(run.global_rank, 2)))
    torch.save(task.state_dict(), Path(sys.argv[1]) / f"rank{run.global_rank}.pt")
