"""A recipe: everything that decides what a run computes, as one flat frozen dataclass. Presets are recipes with a name.

Where a run computes (device, folders, worker processes) is no part of it: see `surroundings.Place`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimstart.errors import ConfigError
from slimstart.lab import records

if TYPE_CHECKING:  # PyTorch is loaded when a recipe is made, not when its fields are looked at for `--help`
    from torch import nn

    from slimstart.policies import Budget

logger = logging.getLogger(__name__)

METHODS = (
    *("slimstart", "dense", "uniform", "random"),
    *("l1", "soft", "thinet", "provable", "slimming"),  # which cut a trained network
    "grow-efficient",
)
PRECISIONS = ("float32", "tf32", "bfloat16")
OWN_SETTINGS = ("estimator", "sampling", "structure_lr")  # fields of a recipe that some policies lack


def _setting(default: Any, about: str) -> Any:
    """A field with a sentence about it, which the command line shows."""
    return dataclasses.field(default=default, metadata={"help": about})


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, and how. Of the training, the defaults are the paper's on CIFAR where it has some."""

    model: str = _setting(
        "small", "network: a name of ours (vgg16, resnet20, ...), timm:NAME or your own module:factory"
    )
    width: float = _setting(1.0, "multiplies all widths of the dense network; networks of ours only")
    data: str = _setting("fashion", "data set: fashion, cifar10, cifar100, tiny_imagenet16, image_folder")
    image_size: int | None = _setting(None, "side of the images of an image folder; 224 if not given")
    validation: int = _setting(0, "so many training images take the place of the test images")

    method: str = _setting("slimstart", f"way to train: {', '.join(METHODS)}")
    budget: str | None = _setting("flops=0.1", "channels=F, params=F or flops=F, a fraction of the dense network")
    policy: str = _setting(
        "equal_worth",
        "of the method slimstart: equal_worth (widths, from the gradients of weights), paper (Algorithm 1)",
    )
    coupling: str | None = _setting(
        None, "of filters that write into one stream: filter, stream; if not given stream, for the policy paper filter"
    )
    estimator: str | None = _setting(
        None,
        "of the gradient of s, for the policy paper: vr_pge (the paper; if not given), pge, vr_pge_symmetric, "
        "leave_one_out; on the dense network, by the chain rule: ste, sigmoid_ste, gumbel, hard_concrete, "
        "soft_threshold",
    )
    sampling: str | None = _setting(
        None,
        "of masks, for the policy paper: bernoulli (the paper), capped (less room for stragglers); capped if the "
        "estimator allows it",
    )
    structure_lr: float | None = _setting(
        None,
        "learning rate of what learns the structure; that of the method's authors if not given: of the policy paper "
        "12e-3",
    )
    resample_every: int | None = _setting(
        None,
        "steps for which a sub-network is held; if not given, such that the search is a fifth of the training; for the "
        "policy paper 1",
    )
    align: int | None = _setting(
        None,
        "widths of large groups are multiples of this; 8 if not given. For the policy paper, room for units, padded "
        "with zeros; 8 with CUDA graphs and 1 without if not given",
    )
    settle_at: float = _setting(1.0, "share of the epochs after which the structure is fixed")
    num_masks: int = _setting(10, "masks from which the policy paper chooses, by loss on training batches")
    protocol: str = _setting(
        "original",
        "of methods that cut a trained network: original, uniform (one share of every layer in one cut), or, of soft "
        "alone, folded (filters with their batch norm); of uniform: original, front_heavy (shares that fall to a "
        "quarter)",
    )
    rounds: int = _setting(1, "cuts of such a method, spread over the epochs of fine-tuning")
    penalty: float = _setting(1e-4, "of network slimming, on the scales of batch norm")

    epochs: int = _setting(300, "epochs, without those of fine-tuning")
    batch_size: int = _setting(256, "images per step")
    lr: float = _setting(0.1, "learning rate of the weights")
    schedule: str = _setting(
        "cosine", "of the learning rate: cosine (to zero), constant, or steps:0.5,0.75x0.1, a tenth after a half, ..."
    )
    momentum: float = _setting(0.9, "of SGD")
    weight_decay: float = _setting(5e-4, "of SGD")
    warmup_epochs: float = _setting(0.0, "epochs in which the learning rate rises")
    label_smoothing: float = _setting(0.0, "of the cross-entropy")
    finetune_epochs: int = _setting(0, "more epochs with the structure fixed, or, of one that is cut, behind the cut")
    finetune_lr: float = _setting(1e-3, "learning rate of fine-tuning")
    finetune_schedule: str = _setting("constant", "of that learning rate; as `schedule`")

    precision: str = _setting("float32", f"of products: {', '.join(PRECISIONS)}")
    full_model_device: str | None = _setting(
        None,
        "cpu: dense weights and optimizer state stay in the host's memory, for networks larger than the GPU; method "
        "slimstart only. With the network if not given",
    )
    eval_every: int = _setting(1, "epochs between two evaluations")
    seed: int = _setting(0, "of weights, batches and masks")

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", present_name(self.method))
        if self.estimator is None:  # one hash for one run
            object.__setattr__(self, "estimator", _own_settings(self.policy).get("estimator"))
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
        if problems := list(_problems(self)):
            raise ConfigError("; ".join(problems))

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.finetune_epochs

    @property
    def search_epochs(self) -> int:
        """Epochs with a changing structure."""
        return round(self.settle_at * self.epochs) if self.method in ("slimstart", "grow-efficient") else 0

    @property
    def hash(self) -> str:
        """The same for runs that differ in the seed alone."""
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
    """`channels=0.4`, `params=0.05` or `flops=0.10`."""
    from slimstart.policies import Channels, Flops, Params

    kind, _, number = text.partition("=")
    try:
        kinds: dict[str, Callable[[float], Budget]] = {"channels": Channels, "params": Params, "flops": Flops}
        return kinds[kind.strip()](float(number))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"`budget` is {text!r}; it must be channels=F, params=F or flops=F with a fraction F in (0, 1]"
        ) from error


def _problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with the fields, all of it."""
    from slimstart.graph import COUPLINGS
    from slimstart.lab import data, models
    from slimstart.lab.methods import OWN_PROTOCOLS, PROTOCOLS, RELAXATIONS
    from slimstart.lab.recipes.schedules import parse_schedule
    from slimstart.policies import ESTIMATORS, POLICIES, SAMPLINGS

    choices: dict[str, tuple[str | None, ...]] = {
        "data": data.NAMES,
        "method": METHODS,
        "policy": tuple(POLICIES),
        "coupling": (None, *COUPLINGS),
        "estimator": (None, *ESTIMATORS, *RELAXATIONS),
        "sampling": (None, *SAMPLINGS),
        "protocol": PROTOCOLS,
        "precision": PRECISIONS,
    }
    for name, known in choices.items():
        if getattr(recipe, name) not in known:
            yield f"`{name}` is {getattr(recipe, name)!r}; it must be one of {', '.join(filter(None, known))}"
    if recipe.method == "slimstart" and recipe.policy in POLICIES:
        if POLICIES[recipe.policy].learns_from == "gradients" and recipe.coupling not in (None, "stream"):
            yield (
                f"`coupling` is {recipe.coupling!r}, but the policy {recipe.policy} needs stream; take that, or leave "
                "it out"
            )
        for name in OWN_SETTINGS:
            if (value := getattr(recipe, name)) is not None and name not in _own_settings(recipe.policy):
                owners = ", ".join(policy for policy in POLICIES if name in _own_settings(policy))
                yield f"`{name}` is {value!r}, but only the policy {owners} has it; take that, or leave it out"
    for name in ("schedule", "finetune_schedule"):
        try:
            parse_schedule(getattr(recipe, name))
        except ValueError as error:
            yield f"`{name}` is {getattr(recipe, name)!r}; {error}"
    for name in ("epochs", "batch_size", "resample_every", "align", "num_masks", "eval_every", "rounds"):
        if getattr(recipe, name) is not None and getattr(recipe, name) < 1:
            yield f"`{name}` is {getattr(recipe, name)}; it must be at least 1"
    for name in ("width", "structure_lr", "lr", "finetune_lr"):
        if getattr(recipe, name) is not None and not 0 < getattr(recipe, name) < float("inf"):
            yield f"`{name}` is {getattr(recipe, name)}; it must be positive"
    for name in ("penalty", "weight_decay", "warmup_epochs", "finetune_epochs", "validation", "seed"):
        if not 0 <= getattr(recipe, name) < float("inf"):
            yield f"`{name}` is {getattr(recipe, name)}; it must not be negative"
    for name in ("settle_at", "label_smoothing", "momentum"):
        if not 0 <= getattr(recipe, name) <= 1:
            yield f"`{name}` is {getattr(recipe, name)}; it must be in [0, 1]"
    if recipe.warmup_epochs >= recipe.epochs:
        yield f"`warmup_epochs` is {recipe.warmup_epochs}; it must be less than `epochs`, {recipe.epochs}"
    if recipe.method != OWN_PROTOCOLS.get(recipe.protocol, recipe.method):
        has = [name for name in PROTOCOLS if OWN_PROTOCOLS.get(name, recipe.method) == recipe.method]
        yield (
            f"`protocol` is {recipe.protocol!r}, which only the method {OWN_PROTOCOLS[recipe.protocol]} has; "
            f"{recipe.method} has {', '.join(has)}"
        )
    if recipe.rounds > max(1, recipe.finetune_epochs):
        yield (
            f"`rounds` is {recipe.rounds}; each needs an epoch of fine-tuning, and `finetune_epochs` is "
            f"{recipe.finetune_epochs}"
        )
    if recipe.method == "dense" and recipe.budget is not None:
        yield f"`budget` is {recipe.budget!r}, but the method dense has none; leave it out"
    if recipe.method != "dense" and recipe.budget is None:
        yield f"`budget` is missing; the method {recipe.method} needs one, such as flops=0.10"
    if recipe.full_model_device not in (None, "cpu"):
        yield (
            f"`full_model_device` is {recipe.full_model_device!r}; it must be cpu, or left out for a dense network on "
            "the device that trains"
        )
    elif recipe.full_model_device is not None and recipe.method != "slimstart":
        yield (
            f"`full_model_device` is 'cpu', but the method {recipe.method} has no dense network beside the one that it "
            "trains; leave it out, or take the method slimstart"
        )
    elif recipe.full_model_device is not None and recipe.estimator in RELAXATIONS:
        yield (
            f"`full_model_device` is 'cpu', but the estimator {recipe.estimator} trains the dense network; leave it "
            f"out, or take one of {', '.join(ESTIMATORS)}"
        )
    if recipe.seed >= 2**63:
        yield f"`seed` is {recipe.seed}; it must be less than 2**63"
    if recipe.width != 1 and (models.is_factory(recipe.model) or recipe.model.startswith("timm:")):
        yield f"`width` is {recipe.width}, but {recipe.model} is no network of ours; build it as wide as you want it"
    if recipe.budget is not None:
        try:
            parse_budget(recipe.budget)
        except ValueError as error:
            yield str(error)


def _own_settings(policy: str) -> dict[str, Any]:
    """Of `OWN_SETTINGS`, those of a policy, with its defaults; none where there is no such policy."""
    from slimstart.policies import POLICIES

    found = POLICIES.get(policy)
    return {name: getattr(found, name) for name in OWN_SETTINGS if hasattr(found, name)}


def make_model(name: str, *, num_classes: int, in_channels: int, width: float = 1.0) -> nn.Module:
    """The dense network that a recipe's `model` names, freshly initialised."""
    from slimstart.lab import models

    if models.is_factory(name):
        return models.from_factory(name, num_classes=num_classes, in_channels=in_channels)
    return models.build(name, num_classes=num_classes, in_channels=in_channels, width=width)


def merged(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed.

    The method dense drops a budget that it came with; another policy drops the settings that it does not have, and
    with them `coupling` and `resample_every`.
    """
    if changes.get("method") == "dense" and "budget" not in changes:
        changes = {**changes, "budget": None}
    lost = _own_settings(recipe.policy).keys() - _own_settings(changes.get("policy", recipe.policy)).keys()
    if lost:
        changes = {**dict.fromkeys(("coupling", "resample_every", *lost)), **changes}
    return dataclasses.replace(recipe, **changes)


def read(path: str | Path, own_model: str | None = None) -> Recipe:
    """Read a TOML file: fields of a recipe, on top of the preset that `extends` names, if it does.

    Args:
        own_model: the `module:factory` that the user has given. A file alone never makes us import code.

    Raises:
        ConfigError: a field is unknown or of another type, or names code that the user has not named.
    """
    from slimstart.lab.recipes.presets import preset  # which imports this module

    try:
        content = tomllib.loads(Path(path).read_text())
        base = preset(content.pop("extends")) if "extends" in content else Recipe()
        return merged(base, _typed(content, own_model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the recipe {path} cannot be used: {error}") from error


def _typed(content: Mapping[str, Any], own_model: str | None) -> dict[str, Any]:
    from slimstart.lab import models

    hints = typing.get_type_hints(Recipe)
    fields = {}
    for name, value in content.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            raise ConfigError(f"`{name}` is no field of a recipe" + (f"; do you mean `{close[0]}`?" if close else ""))
        fields[name] = records.from_plain(hints[name], value, name)
    model = fields.get("model", "")
    if models.is_factory(model) and model != own_model:
        raise ConfigError(f"`model` is {model!r}, code that is never run on the word of a file: give --model {model}")
    return fields


def as_toml(recipe: Recipe) -> str:
    """The recipe as `read` reads it; what is None is left out."""
    fields = dataclasses.asdict(recipe)
    lines = [f"{name} = {json.dumps(v, ensure_ascii=False)}" for name, v in fields.items() if v is not None]
    return "\n".join(lines) + "\n"
