"""Hugging Face Trainer: train a small vision transformer at 60 % of its FLOPs, save it, and read it again.

    pip install 'slimstart[lab,transformers]'
    python examples/transformers_training.py --out out

About one minute on two CPU cores with the embedded data.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import slimstart
from slimstart.integrations.transformers import SlimmingCallback, from_pretrained, save_pretrained
from slimstart.lab import data


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": 100 * float((found.predictions.argmax(1) == found.label_ids).mean())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--out", default="out")
    settings = parser.parse_args(arguments)

    size = {"hidden_size": settings.width, "intermediate_size": 4 * settings.width}
    size |= {"num_hidden_layers": 3, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=28, patch_size=7, num_channels=1, num_labels=10, **size))
    example = torch.zeros(1, 1, 28, 28)
    dense_flops = slimstart.flops(model, example)
    found = data.load("fashion", batch_size=settings.batch_size)
    train, test = (
        [
            {"pixel_values": image, "labels": int(label)}
            for images, labels in split.epoch(0)
            for image, label in zip(images, labels, strict=True)
        ]
        for split in (found.train, found.test)
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            settings.out,
            num_train_epochs=settings.epochs,
            per_device_train_batch_size=settings.batch_size,
            per_device_eval_batch_size=500,
            learning_rate=2e-3,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        callbacks=[SlimmingCallback(slimstart.Flops(settings.budget))],
    )
    trainer.train()
    save_pretrained(model, Path(settings.out) / "small")
    small = from_pretrained(Path(settings.out) / "small")
    found_accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"finished: {found_accuracy:.2f} % at {slimstart.flops(small, example) / dense_flops:.2%} of the FLOPs")


if __name__ == "__main__":
    main()
