"""build: a network by its name, from here or from timm. Names may come from files, so no name runs a user's code.

`from_factory` makes a network by code that the user has named.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable

from torch import nn

from slimstart.errors import ConfigError
from slimstart.lab.models.feed_forward import mobilenet_v1, small, vgg16, vgg19
from slimstart.lab.models.residual import resnet20, resnet32, resnet50, wrn28_10
from slimstart.lab.models.siblings import parse_stages
from slimstart.lab.own_code import brief, call, find_factory, is_factory, parameters_of

# Each takes `num_classes`, `in_channels` and `width`.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "wrn28_10": wrn28_10,
    "resnet50": resnet50,
    "mobilenet_v1": mobilenet_v1,
    "small": small,
}
TIMM = "timm:"


def build(
    name: str, *, num_classes: int, in_channels: int = 3, width: float = 1.0, stages: str | None = None
) -> nn.Module:
    """A fresh dense network.

    Args:
        name: one of `MODELS`, or `timm:NAME` for a network of timm, where that is installed.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.
        width: multiplies the channels of every layer, to the nearest whole number; 1 for networks of timm.
        stages: of a sibling of the network, see `siblings`; its own if not given.

    Raises:
        ConfigError: no such network, or none of these sizes.
    """
    for argument, value in (("num_classes", num_classes), ("in_channels", in_channels)):
        if value < 1:
            raise ConfigError(f"`{argument}` is {value}; it must be at least 1")
    if stages is not None:
        sibling = parse_stages(name, stages)
        return MODELS[name](num_classes=num_classes, in_channels=in_channels, width=width, stages=sibling)
    if name.startswith(TIMM):
        return _from_timm(name, num_classes, in_channels, width)
    if name in MODELS:
        return MODELS[name](num_classes=num_classes, in_channels=in_channels, width=width)
    if is_factory(name):
        raise ConfigError(
            f"`name` is {name!r}, a factory of your own; `build` runs only code that is installed as a library. "
            "Call `slimstart.lab.models.from_factory`"
        )
    raise ConfigError(
        f"`name` is {name!r}; the networks are {', '.join(MODELS)}, and timm:NAME{_did_you_mean(name, MODELS)}"
    )


def from_factory(spec: str, *, num_classes: int, in_channels: int) -> nn.Module:
    """The network that a function or class of the user's makes.

    The factory is called with `num_classes` and `in_channels`, if its signature has them. A signature with `**kwargs`
    is given `num_classes`, and `in_channels` only where it is not 3, since few of the functions that such keywords are
    passed on to know it.

    Args:
        spec: as for `find_factory`.

    Raises:
        ConfigError: there is no such factory, it fails, or what it makes is no network; the cause is kept.
    """
    factory = find_factory(spec, "a network")
    offered = {"num_classes": num_classes, "in_channels": in_channels}
    named, takes_any = parameters_of(factory)
    if takes_any:
        named |= {"num_classes"} if in_channels == 3 else offered.keys()
    network = call(factory, spec, {name: value for name, value in offered.items() if name in named})
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{spec!r} returns a {type(network).__name__}; a factory must return an nn.Module")
    return network


def _from_timm(name: str, num_classes: int, in_channels: int, width: float) -> nn.Module:
    if width != 1:
        raise ConfigError(f"`width` is {width}, but networks of timm have the width of their name: {name!r} takes 1")
    try:
        timm = importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch is a RuntimeError
        raise ConfigError(
            f"`name` is {name!r}, but timm cannot be imported: {brief(error)}. "
            "Install timm, and the torchvision that goes with this torch"
        ) from error
    known = timm.list_models()
    wanted = name.removeprefix(TIMM)
    if wanted not in known:  # timm itself would also take an address and fetch what is there
        raise ConfigError(f"`name` is {name!r}; timm has no such network{_did_you_mean(wanted, known)}")
    try:
        network: nn.Module = timm.create_model(wanted, pretrained=False, num_classes=num_classes, in_chans=in_channels)
    except Exception as error:
        raise ConfigError(
            f"timm cannot build {wanted!r} for {num_classes} classes and {in_channels} channels: {brief(error)}"
        ) from error
    return network


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
