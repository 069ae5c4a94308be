"""Named recipes: one for each row of the paper's tables, with the paper's numbers; one with the paper's settings for
any network; and one for the embedded data.

The methods that the paper compares with are in `originals`. Where each setting of the others comes from:

- **Appendix of the paper**: batch 256; SGD with learning rate 0.1 and momentum 0.9 (ImageNet 0.256 and 0.875, warm-up,
  label smoothing 0.1); Adam with 12e-3 on s.
- **The authors' release**: cosine for both learning rates, weight decay 5e-4, 300 epochs, the best of 10 masks on
  training data, 40 epochs of fine-tuning at 1e-3.
- **Ours**, because neither says: rho of each row, such that the search starts at the FLOPs that the paper reports;
  a constant learning rate in fine-tuning; for ImageNet 100 epochs, 5 of them warm-up, no fine-tuning, weight decay
  3.05e-5; FLOPs of networks that the paper shows in figures only.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from slimstart.errors import ConfigError
from slimstart.lab.recipes.originals import Paper, compared_with, originals
from slimstart.lab.recipes.recipe import Recipe, merged

CIFAR = Recipe(
    data="cifar10",
    policy="paper",
    coupling="filter",
    resample_every=1,
    epochs=300,
    batch_size=256,
    lr=0.1,
    momentum=0.9,
    weight_decay=5e-4,
    sampling="bernoulli",
    num_masks=10,
    finetune_epochs=40,
    finetune_lr=1e-3,
)
IMAGENET = Recipe(
    data="image_folder",
    policy="paper",
    coupling="filter",
    resample_every=1,
    epochs=100,
    batch_size=256,
    lr=0.256,
    momentum=0.875,
    weight_decay=3.05e-5,
    warmup_epochs=5,
    label_smoothing=0.1,
    sampling="bernoulli",
    num_masks=10,
)
FASHION = Recipe(model="small", data="fashion", budget="flops=0.2", epochs=12, batch_size=64)


@dataclass(frozen=True)
class Preset:
    """A recipe, what it is for, and the row of the paper that it repeats, if it has one."""

    recipe: Recipe
    about: str
    paper: Paper | None = None


def _row(base: Recipe, model: str, data: str, keep_ratio: float, about: str, paper: Paper | None = None) -> Preset:
    return Preset(merged(base, {"model": model, "data": data, "budget": f"channels={keep_ratio}"}), about, paper)


PRESETS: dict[str, Preset] = {
    "fashion": Preset(FASHION, "embedded data, a minute on two CPU cores"),
    "paper": Preset(CIFAR, "Algorithm 1 with the paper's settings on CIFAR; name a --model and a --budget"),
    # Table 1
    "vgg16-cifar10": _row(CIFAR, "vgg16", "cifar10", 0.293, "table 1", Paper(92.5, 4.4, 8.7, 8.69)),
    "resnet20-cifar10": _row(CIFAR, "resnet20", "cifar10", 0.536, "table 1", Paper(90.93, 35.1, 36.1, 2.09)),
    "wrn28_10-cifar10": _row(CIFAR, "wrn28_10", "cifar10", 0.218, "table 1", Paper(95.6, 8.4, 7.9, 9.39)),
    # The table of training times, and the figure of dynamics
    "vgg19-cifar10-28.6": _row(CIFAR, "vgg19", "cifar10", 0.533, "training times", Paper(93.46, 23.71, 28.57, 2.64)),
    "vgg19-cifar10-19.3": _row(CIFAR, "vgg19", "cifar10", 0.438, "training times", Paper(93.11, 12.75, 19.33, 3.89)),
    "vgg19-cifar10-14.3": _row(
        CIFAR, "vgg19", "cifar10", 0.377, "train-cost dynamics", Paper(92.73, 16.68, 14.28, 5.28)
    ),
    "vgg19-cifar10-10.3": _row(CIFAR, "vgg19", "cifar10", 0.319, "training times", Paper(92.23, 6.69, 10.27, 7.30)),
    "vgg19-cifar10-4.9": _row(CIFAR, "vgg19", "cifar10", 0.221, "training times", Paper(90.82, 3.06, 4.94, 15.28)),
    "vgg19-cifar10-1.7": _row(CIFAR, "vgg19", "cifar10", 0.128, "training times", Paper(87.97, 0.80, 1.70, 44.68)),
    # Figures without numbers: FLOPs of 10 % and 50 % are ours, 1.56 % is in the text
    "vgg19-cifar100": _row(CIFAR, "vgg19", "cifar100", 0.315, "figure of sparsities, 10 % FLOPs"),
    "resnet32-cifar10": _row(CIFAR, "resnet32", "cifar10", 0.242, "figure of sparsities, 10 % FLOPs"),
    "resnet32-cifar100": _row(CIFAR, "resnet32", "cifar100", 0.087, "figure of sparsities, 1.56 % FLOPs"),
    "mobilenet_v1-imagenet": _row(IMAGENET, "mobilenet_v1", "image_folder", 0.699, "figure of ImageNet, 50 % FLOPs"),
    # The table of ImageNet-1K
    "resnet50-imagenet-46.8": _row(
        IMAGENET, "resnet50", "image_folder", 0.631, "table of ImageNet", Paper(76.0, 48.2, 46.8, 1.60)
    ),
    "resnet50-imagenet-24.7": _row(
        IMAGENET, "resnet50", "image_folder", 0.427, "table of ImageNet", Paper(73.5, 27.0, 24.7, 3.02)
    ),
    "resnet50-imagenet-10.1": _row(
        IMAGENET, "resnet50", "image_folder", 0.251, "table of ImageNet", Paper(69.3, 10.8, 10.1, 7.36)
    ),
}
PRESETS |= {
    name: Preset(recipe, about, compared_with(recipe.model, recipe.data, recipe.method, recipe.protocol))
    for name, about, recipe in originals()
}


def preset(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4) or list(PRESETS)
        raise ConfigError(f"there is no recipe {name!r}; do you mean {', '.join(close)}? `slimstart recipes` lists all")
    return PRESETS[name].recipe
