"""A recipe: everything that decides what a run computes, as one flat frozen dataclass. Presets are recipes with a name.

Where a run computes (device, folders, worker processes) is not part of it: see `run.place.Place`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimstart.errors import ConfigError
from slimstart.io.files import read_bytes
from slimstart.lab import records
from slimstart.lab.own_code import is_factory

if TYPE_CHECKING:  # PyTorch is loaded when a recipe is made, not when its fields are looked at for `--help`
    from torch import nn

    from slimstart.policies import Budget

logger = logging.getLogger(__name__)
MAX_BYTES = 1 << 15  # of a file; the time of `tomllib` can grow with the square

METHODS = (
    *("slimstart", "dense", "uniform", "shallow", "random"),
    *("l1", "soft", "thinet", "provable", "slimming"),  # which cut a trained network
    "grow-efficient",
)
PRECISIONS = ("float32", "tf32", "bfloat16")
# The settings of each optimizer, with their defaults: SGD has the paper's, the others have PyTorch's and lr 1e-3.
_ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": False},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "rmsprop": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0, "beta2": 0.99, "eps": 1e-8},
}
SETTINGS = tuple(dict.fromkeys(name for settings in OPTIMIZERS.values() for name in settings))
OWN_SETTINGS = ("estimator", "sampling", "structure_lr", "depth")  # fields of a recipe that some policies lack


def setting(default: Any, about: str) -> Any:
    """A field with the sentence that the command line and the documentation show about it."""
    return dataclasses.field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Recipe:
    """Network, data, method and schedule of a run; the defaults are the paper's on CIFAR, where it has some."""

    model: str = setting(
        "small", "Network to train: one of ours (vgg16, resnet20, ...), timm:NAME, or your own code as module:factory."
    )
    width: float = setting(
        1.0, "Multiply the channels of every layer of the dense network by this factor; only for networks of ours."
    )
    data: str = setting(
        "fashion",
        "Data set: fashion, cifar10, cifar100, tiny_imagenet16, image_folder, or your own code as module:factory.",
    )
    image_size: int | None = setting(None, "Height and width of the images of an image_folder; 224 by default.")
    validation: int = setting(0, "Evaluate on this many held-out training images instead of the test set.")

    method: str = setting("slimstart", f"Training method: {', '.join(METHODS)}.")
    budget: str | None = setting(
        "flops=0.1",
        "Limit on the network, as a fraction of the dense one: flops=F, params=F or channels=F, or several as in "
        "flops=0.1+params=0.05.",
    )
    policy: str = setting(
        "equal_worth",
        "How the method slimstart learns the structure: equal_worth (widths, from gradients) or paper (masks, by the "
        "paper's Algorithm 1).",
    )
    coupling: str | None = setting(
        None,
        "Whether layers that write into the same residual stream share one mask (stream) or have one each (filter). By "
        "default stream; with the policy paper, filter.",
    )
    estimator: str | None = setting(
        None,
        "How the policy paper estimates the gradient of the keep-probabilities: vr_pge (the default), pge, "
        "vr_pge_symmetric, leave_one_out. Or train the dense network, with gates that learn by backpropagation: ste, "
        "sigmoid_ste, gumbel, hard_concrete, soft_threshold.",
    )
    sampling: str | None = setting(
        None,
        "How the policy paper draws masks: bernoulli (every unit by itself, as in the paper) or capped (masks with far "
        "more units than expected are drawn again). By default capped, where the estimator allows it.",
    )
    structure_lr: float | None = setting(
        None,
        "Learning rate of the structure. By default 12e-3 with the policy paper, and with other methods the value of "
        "their authors.",
    )
    depth: float | None = setting(
        None,
        "Keep about a fraction budget ** depth of the layers that can be removed, and fewer in short trainings; only "
        "with the policy equal_worth. 0.6 by default; 0 keeps all layers.",
    )
    resample_every: int | None = setting(
        None,
        "Number of steps between two updates of the structure. By default 1 with the policy paper; with equal_worth "
        "such that the search takes a fifth of the training.",
    )
    align: int | None = setting(
        None,
        "Round the widths of large groups to multiples of this number; 8 by default. The policy paper pads the network "
        "with zeros to such multiples instead: 8 by default with CUDA graphs, and 1 without.",
    )
    settle_at: float = setting(1.0, "Fix the structure after this fraction of the epochs.")
    num_masks: int = setting(
        10,
        "Number of masks that the policy paper draws at the end of its search; the one with the least training loss is "
        "kept.",
    )
    protocol: str = setting(
        "original",
        "Variant of the method: original (of every method), uniform (of l1, soft, thinet, provable and slimming: one "
        "cut that leaves the same share of every layer), folded (of soft: filters are judged together with their batch "
        "norm), or front_heavy (of uniform: shares that fall by a factor of four from the first layer to the last).",
    )
    stages: str | None = setting(
        None,
        "Number of layers or blocks in each stage of the network of the method shallow, such as 2,2,2,2,2; with :late "
        "at the end, late stages are wider. By default the best of a few, chosen on held-out training images.",
    )
    trial_epochs: int | None = setting(
        None, "Number of epochs of each network that the method shallow tries; by default as many as epochs."
    )
    rounds: int = setting(1, "Cut a trained network in this number of rounds, spread over the fine-tuning.")
    penalty: float = setting(1e-4, "Weight of the L1 penalty on the scales of batch norm, in the method slimming.")

    epochs: int = setting(300, "Number of epochs, without those of fine-tuning.")
    batch_size: int = setting(256, "Number of images per step, over all processes.")
    optimizer: str = setting("sgd", f"Optimizer of the weights: {', '.join(OPTIMIZERS)}.")
    lr: float = setting(None, "Learning rate of the weights. By default 0.1 with sgd, and 1e-3 with the others.")
    schedule: str = setting(
        "cosine",
        "Schedule of the learning rate: cosine (falls to zero), constant, or steps such as steps:0.5,0.75x0.1 (times "
        "0.1 after half of the steps, and again after three quarters).",
    )
    momentum: float | None = setting(None, "Momentum of sgd (0.9 by default) and rmsprop (0 by default).")
    nesterov: bool | None = setting(None, "Use Nesterov momentum with sgd.")
    beta1: float | None = setting(None, "Decay of the mean gradient in adam and adamw; 0.9 by default.")
    beta2: float | None = setting(
        None, "Decay of the mean squared gradient; by default 0.999 in adam and adamw, and 0.99 in rmsprop."
    )
    eps: float | None = setting(None, "Number added to the denominator of adam, adamw and rmsprop; 1e-8 by default.")
    weight_decay: float = setting(
        None, "Weight decay. By default 5e-4 with sgd, 0.01 with adamw, and 0 with adam and rmsprop."
    )
    ema_decay: float | None = setting(
        None,
        "Evaluate and save an exponential moving average of the weights, with this decay per step; no average by "
        "default. The decay starts low, and rises to this value.",
    )
    warmup_epochs: float = setting(0.0, "Raise the learning rate linearly in this number of epochs at the start.")
    label_smoothing: float = setting(0.0, "Label smoothing of the cross-entropy loss, from 0 to 1.")
    mixup: float = setting(0.0, "Alpha of mixup; 0 for no mixup. With mixup and cutmix, each batch gets one of them.")
    cutmix: float = setting(0.0, "Alpha of CutMix; 0 for no CutMix.")
    rand_augment: int = setting(0, "Number of RandAugment's operations on each training image; 0 for none.")
    rand_augment_magnitude: float | None = setting(
        None, "Strength of RandAugment's operations, from 0 to 30; 9 by default."
    )
    finetune_epochs: int = setting(
        0,
        "Number of further epochs with a fixed structure; for methods that cut a trained network, those after the cut.",
    )
    finetune_lr: float = setting(1e-3, "Learning rate of fine-tuning.")
    finetune_schedule: str = setting("constant", "Schedule of the learning rate of fine-tuning, as for schedule.")

    precision: str = setting("float32", f"Compute precision: {', '.join(PRECISIONS)}.")
    full_model_device: str | None = setting(
        None,
        "Set to cpu to keep the dense weights and their optimizer state in the host's memory, for networks larger than "
        "the GPU; only for the method slimstart. By default they are on the device that trains.",
    )
    eval_every: int = setting(1, "Number of epochs between two evaluations.")
    seed: int = setting(0, "Random seed of the weights, the batches and the masks.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", present_name(self.method))
        if self.estimator is None:  # one hash for one run
            object.__setattr__(self, "estimator", own_settings(self.policy).get("estimator"))
        if self.rand_augment and self.rand_augment_magnitude is None:
            object.__setattr__(self, "rand_augment_magnitude", 9.0)
        for name, value in OPTIMIZERS.get(self.optimizer, OPTIMIZERS["sgd"]).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            left_out = field.default is None and getattr(self, field.name) is None
            # lr=1 is 1.0, here and in a file, so that both have one hash.
            if str(field.type).startswith("float") and not left_out:
                try:
                    object.__setattr__(self, field.name, float(getattr(self, field.name)))
                except (TypeError, ValueError, OverflowError) as error:
                    raise ConfigError(
                        f"`{field.name}` is {getattr(self, field.name)!r}; it must be a number"
                    ) from error
        from slimstart.lab.recipes.contradictions import problems  # which imports this module

        if found := list(problems(self)):
            raise ConfigError("; ".join(found))

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.finetune_epochs

    @property
    def search_epochs(self) -> int:
        """Epochs with a changing structure."""
        return round(self.settle_at * self.epochs) if self.method in ("slimstart", "grow-efficient") else 0

    @property
    def hash(self) -> str:
        """Hash of the settings; equal for runs that differ only in the seed."""
        fields = dataclasses.asdict(self)
        del fields["seed"]
        return records.digest(fields)

    @property
    def parsed_budget(self) -> Budget | None:
        return None if self.budget is None else parse_budget(self.budget)


def present_name(method: str) -> str:
    """The name of a method, where a former name is accepted with a note that it is deprecated."""
    name = records.FORMER_METHODS.get(method)
    if name is not None:
        logger.warning("the method %s is called %s now; the old name is deprecated", method, name)
    return name or method


def parse_budget(text: str) -> Budget:
    """`channels=0.4`, `params=0.05` or `flops=0.10`, or several that must all hold: `flops=0.1+params=0.05`."""
    from slimstart.policies import Channels, Flops, Params, joined

    kinds: dict[str, Callable[[float], Budget]] = {"channels": Channels, "params": Params, "flops": Flops}
    try:
        return joined([kinds[kind](float(number)) for kind, number in records.budget_parts(text)])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"`budget` is {text!r}; it must be channels=F, params=F or flops=F with a fraction F in (0, 1], or several "
            "kinds as in flops=0.1+params=0.05"
        ) from error


def own_settings(policy: str) -> dict[str, Any]:
    """Of `OWN_SETTINGS`, those of a policy, with its defaults; none where there is no such policy."""
    from slimstart.policies import POLICIES

    found = POLICIES.get(policy)
    return {name: getattr(found, name) for name in OWN_SETTINGS if hasattr(found, name)}


def make_model(
    name: str, *, num_classes: int, in_channels: int, width: float = 1.0, stages: str | None = None
) -> nn.Module:
    """The dense network that a recipe's `model` names, or a sibling of it, freshly initialised."""
    from slimstart.lab import models

    if is_factory(name):
        return models.from_factory(name, num_classes=num_classes, in_channels=in_channels)
    return models.build(name, num_classes=num_classes, in_channels=in_channels, width=width, stages=stages)


def merged(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed.

    The method dense drops a budget that it came with, and methods other than shallow drop the settings of shallow.
    Another policy drops the settings that it does not have, and with them `coupling` and `resample_every`. Another
    optimizer drops all settings of the former one.
    """
    if changes.get("method", "shallow") != "shallow":
        changes = {"stages": None, "trial_epochs": None, **changes}
    if changes.get("method") == "dense" and "budget" not in changes:
        changes = {**changes, "budget": None}
    lost = own_settings(recipe.policy).keys() - own_settings(changes.get("policy", recipe.policy)).keys()
    if lost:
        changes = {**dict.fromkeys(("coupling", "resample_every", *lost)), **changes}
    if changes.get("optimizer", recipe.optimizer) != recipe.optimizer:
        changes = {**dict.fromkeys(SETTINGS), **changes}
    if changes.get("rand_augment") == 0:
        changes = {"rand_augment_magnitude": None, **changes}
    return dataclasses.replace(recipe, **changes)


def read(path: str | Path, own_model: str | None = None, own_data: str | None = None) -> Recipe:
    """Read a TOML file: fields of a recipe, on top of the preset that `extends` names, if it does.

    Args:
        own_model, own_data: the `module:factory` that the user has given for the model and for the data. A file alone
            never makes us import code.

    Raises:
        ConfigError: a field is unknown or of another type, or names code that the user has not named.
    """
    from slimstart.lab.recipes.presets import preset  # which imports this module

    try:
        content = tomllib.loads(read_bytes(path, MAX_BYTES).decode())
        base = preset(content.pop("extends")) if "extends" in content else Recipe()
        return merged(base, _typed(content, {"model": own_model, "data": own_data}))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the recipe {path} cannot be used: {error}") from error


def _typed(content: Mapping[str, Any], own: Mapping[str, str | None]) -> dict[str, Any]:
    hints = typing.get_type_hints(Recipe)
    fields = {}
    for name, value in content.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            raise ConfigError(f"`{name}` is no field of a recipe" + (f"; do you mean `{close[0]}`?" if close else ""))
        fields[name] = records.from_plain(hints[name], value, name)
    for name, given in own.items():
        if is_factory(spec := fields.get(name, "")) and spec != given:
            raise ConfigError(
                f"`{name}` is {spec!r}, code that is never run on the word of a file: give --{name} {spec}"
            )
    return fields


def as_toml(recipe: Recipe) -> str:
    """The recipe in the format of `read`, without settings that are None."""
    fields = dataclasses.asdict(recipe)
    lines = [f"{name} = {json.dumps(v, ensure_ascii=False)}" for name, v in fields.items() if v is not None]
    return "\n".join(lines) + "\n"
