"""from_factory: a network from the user's own code, named as `module:factory`."""

from __future__ import annotations

from torch import nn

from slimstart.errors import ConfigError
from slimstart.lab.own_code import call, find_factory, is_factory, parameters_of

__all__ = ["from_factory", "is_factory"]


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
