"""Lightning: train an image classifier at a quarter of its FLOPs, with one callback.

    pip install 'slimstart[lab,lightning]'
    python examples/lightning_training.py --out out

About one minute on two CPU cores with the embedded data.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import slimstart
from slimstart.integrations.lightning import Slimming, load_from_checkpoint
from slimstart.lab import data, models


class Classifier(lightning.LightningModule):
    def __init__(self, width: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = models.build("small", num_classes=10, in_channels=1, width=width)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        correct = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", 100 * correct.float().mean(), prog_bar=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--out", default="out")
    settings = parser.parse_args(arguments)

    found = data.load("fashion", batch_size=settings.batch_size)
    train, test = (
        TensorDataset(*(torch.cat(parts) for parts in zip(*split.epoch(0), strict=True)))
        for split in (found.train, found.test)
    )
    best = ModelCheckpoint(settings.out, monitor="accuracy", mode="max", save_top_k=1, filename="best")
    trainer = lightning.Trainer(
        max_epochs=settings.epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        default_root_dir=settings.out,
        callbacks=[Slimming(slimstart.Flops(settings.budget)), best],
    )
    trainer.fit(
        Classifier(settings.width),
        DataLoader(train, batch_size=settings.batch_size, shuffle=True),
        DataLoader(test, batch_size=500),
    )
    small = load_from_checkpoint(Classifier, best.best_model_path)
    image = torch.zeros(1, *train[0][0].shape)
    share = slimstart.flops(small.net, image) / slimstart.flops(Classifier(settings.width).net, image)
    print(f"best: {float(best.best_model_score or 0):.2f} % at {share:.2%} of the FLOPs, in {best.best_model_path}")


if __name__ == "__main__":
    main()
