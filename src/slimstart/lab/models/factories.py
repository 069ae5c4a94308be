"""from_factory: a network from the user's own code, named as `module:factory`.

This imports and runs that code, so the name has to come from the user himself, not from a file that someone sent.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from operator import attrgetter
from typing import Any

from torch import nn

from slimstart.errors import ConfigError


def is_factory(spec: str) -> bool:
    """Whether `spec` is meant as `module:factory` for `from_factory`, and not as a name for `build`."""
    return ":" in spec and not spec.startswith("timm:")


def from_factory(spec: str, *, num_classes: int, in_channels: int) -> nn.Module:
    """The network that a function or class of the user's makes.

    The module is looked for in the current folder too, as `python -m` does. The factory is called with `num_classes`
    and `in_channels`, if its signature has them. A signature with `**kwargs` is given `num_classes`, and `in_channels`
    only where it is not 3, since few of the functions that such keywords are passed on to know it.

    Args:
        spec: "package.module:factory"; a factory inside a class is "module:Class.factory".

    Raises:
        ConfigError: there is no such factory, it fails, or what it makes is no network; the cause is kept.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path or ":" in path:
        raise ConfigError(f"`spec` is {spec!r}; it must be 'module:factory', the module as `import` takes it")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigError(f"{spec!r}: the module {module_name!r} cannot be imported: {brief(error)}") from error
    try:
        factory = attrgetter(path)(module)
    except AttributeError as error:
        raise ConfigError(f"{spec!r}: {brief(error)}") from error
    if not callable(factory):
        raise ConfigError(f"{spec!r} is a {type(factory).__name__}; a factory must be callable and return a network")
    try:
        network = factory(**_accepted(factory, num_classes, in_channels))
    except Exception as error:
        raise ConfigError(f"{spec!r} fails: {brief(error)}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{spec!r} returns a {type(network).__name__}; a factory must return an nn.Module")
    return network


def _accepted(factory: Any, num_classes: int, in_channels: int) -> dict[str, int]:
    """Those of the two arguments that the factory takes."""
    offered = {"num_classes": num_classes, "in_channels": in_channels}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return {}
    named = {p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        named |= {"num_classes"} if in_channels == 3 else offered.keys()
    return {name: value for name, value in offered.items() if name in named}


def brief(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
