"""timm: train one of its models on a folder of images at 40 % of its FLOPs, with its optimizer, schedule and average.

    pip install 'slimstart[lab,timm]'
    python examples/timm_training.py --data your/images     # its folders train and test have one folder for each class

About one minute on two CPU cores; without `--data`, the folder is made of the embedded images. torchvision must be the
build that goes with your PyTorch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from timm.data import Mixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torchvision.transforms.functional import to_pil_image

import slimstart
from slimstart.lab import data


def make_folder(folder: Path, count: int) -> None:
    found = data.load("fashion", batch_size=count)
    for part, split, size in (("train", found.train, count), ("test", found.test, count // 2)):
        images, labels = next(iter(split.epoch(0)))
        for number, (image, label) in enumerate(zip(images[:size], labels[:size].tolist(), strict=True)):
            path = folder / part / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image((image - image.min()) / (image.max() - image.min())).save(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=2000)  # of the embedded ones
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="out")
    settings = parser.parse_args(arguments)
    folder = settings.data or Path(settings.out) / "images"
    if settings.data is None:
        make_folder(folder, settings.images)
    shape, parts = (3, 32, 32), [create_dataset("", root=folder / part) for part in ("train", "test")]
    options = {"input_size": shape, "batch_size": 50, "use_prefetcher": False, "num_workers": 0}
    train = create_loader(parts[0], is_training=True, persistent_workers=False, **options)
    test = create_loader(parts[1], crop_pct=1.0, persistent_workers=False, **options)

    classes, steps = len(parts[0].reader.class_to_idx), settings.epochs * len(train)
    model = timm.create_model(settings.model, num_classes=classes)
    optimizer = create_optimizer_v2(model, "adamw", lr=3e-3, weight_decay=0.05, layer_decay=0.8)
    example = torch.zeros(2, *shape)
    dense_flops = slimstart.flops(model, example)
    sparse = slimstart.SparseTraining(model, optimizer, example, slimstart.Flops(0.4), total_steps=steps)
    average = ModelEmaV3(model, decay=0.9)
    sparse.follow(average)
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, t_in_epochs=False)
    mixup, criterion = Mixup(mixup_alpha=0.2, num_classes=classes), SoftTargetCrossEntropy()
    for _ in range(settings.epochs):
        for images, labels in train:
            mixed, targets = mixup(images, labels)
            optimizer.zero_grad()
            criterion(model(mixed), targets).backward()
            optimizer.step()
            scheduler.step_update(sparse.num_steps)
            average.update(model, step=sparse.num_steps)
    sparse.finish()
    small = average.module.eval()
    with torch.no_grad():
        correct = torch.cat([small(images).argmax(1) == labels for images, labels in test])
    share = slimstart.flops(small, example) / dense_flops
    print(f"finished: {100 * float(correct.float().mean()):.2f} % at {share:.2%} of the FLOPs")


if __name__ == "__main__":
    main()
