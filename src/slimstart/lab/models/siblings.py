"""Shallower siblings of the networks here: the same family, with fewer layers or blocks in each stage.

A sibling is named by its depths, such as `1,1,2,2,2`, and has the family's ratio of widths between stages; with `:late`
after the depths, late stages are wider: every ratio to the first stage is raised to the power 1.3, so that 1 : 2 : 4
becomes 1 : 2.5 : 6. Only the ratios matter where a budget scales the widths.
"""

from __future__ import annotations

from slimstart.errors import ConfigError
from slimstart.lab.models.feed_forward import MOBILENET_V1, VGG16, VGG19
from slimstart.lab.models.layers import Stages
from slimstart.lab.models.residual import RESNET20, RESNET32, RESNET50, WRN28_10

LATE = 1.3

STAGES: dict[str, Stages] = {
    "vgg16": VGG16,
    "vgg19": VGG19,
    "resnet20": RESNET20,
    "resnet32": RESNET32,
    "wrn28_10": WRN28_10,
    "resnet50": RESNET50,
    "mobilenet_v1": MOBILENET_V1,
}

_VGG = ("1,1,1,1,1", "1,1,2,2,2", "2,2,2,2,2")
_RESIDUAL = ("1,1,2", "1,2,3", "2,2,2")
# The depths that are compared, from few layers to many; the network itself is one of them.
DEPTHS: dict[str, tuple[str, ...]] = {
    "vgg16": (*_VGG, "2,2,3,3,3"),
    "vgg19": (*_VGG, "2,2,4,4,4"),
    "resnet20": (*_RESIDUAL, "3,3,3"),
    "resnet32": (*_RESIDUAL, "3,3,3", "5,5,5"),
    "wrn28_10": (*_RESIDUAL, "4,4,4"),
    "resnet50": ("1,1,1,1", "1,1,2,2", "2,2,2,2", "3,4,6,3"),
    "mobilenet_v1": ("1,1,1,1,1", "1,1,1,2,1", "1,2,2,2,2", "1,2,2,6,2"),
}


def siblings(model: str) -> tuple[str, ...]:
    """The siblings of a network that are compared: all depths, with both ratios of widths.

    Raises:
        ConfigError: the network has none.
    """
    if model not in STAGES:
        raise ConfigError(f"`model` is {model!r}, which has no siblings; choose one of {', '.join(STAGES)}")
    return tuple(depths + ratio for depths in DEPTHS[model] for ratio in ("", ":late"))


def parse_stages(model: str, text: str) -> Stages:
    """The stages of a sibling, such as `1,1,2,2,2` or `1,1,2,2,2:late`.

    Raises:
        ConfigError: the network has no siblings, or these depths are not those of its stages.
    """
    siblings(model)
    own, (depths_text, _, ratio) = STAGES[model], text.partition(":")
    try:
        depths = tuple(int(part) for part in depths_text.split(","))
    except ValueError:
        depths = ()
    if len(depths) != len(own.depths) or min(depths) < 1 or ratio not in ("", "late"):
        raise ConfigError(
            f"`stages` is {text!r}; it must be {len(own.depths)} numbers of layers, such as {DEPTHS[model][0]}, or "
            f"{DEPTHS[model][0]}:late for wide late stages"
        )
    first = own.channels[0]
    channels = tuple(round(first * (c / first) ** LATE) for c in own.channels) if ratio else own.channels
    return Stages(depths, channels)
