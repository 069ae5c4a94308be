"""Code of the user's own, named as `module:factory`: a network, or a data set.

Finding a factory imports its module, so the name has to come from the user, not from a file that somebody sent.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from slimstart.errors import ConfigError


def is_factory(spec: str) -> bool:
    """Whether a name is meant as `module:factory`, and not as one of ours or of timm."""
    return ":" in spec and not spec.startswith("timm:")


def find_factory(spec: str, makes: str) -> Callable[..., Any]:
    """The function or class that a user's module has under this name.

    The module is looked for in the current folder too, as `python -m` does.

    Args:
        spec: "package.module:factory"; a factory inside a class is "module:Class.factory".
        makes: noun for the result, for messages.

    Raises:
        ConfigError: there is no such factory; the cause is kept.
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
        raise ConfigError(f"{spec!r} is a {type(factory).__name__}; a factory must be callable and return {makes}")
    found: Callable[..., Any] = factory
    return found


def call(factory: Callable[..., Any], spec: str, arguments: Mapping[str, Any]) -> Any:
    """The result of a factory.

    Raises:
        ConfigError: it fails; the cause is kept.
    """
    try:
        return factory(**arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{spec!r} fails: {brief(error)}") from error


def parameters_of(factory: Callable[..., Any]) -> tuple[set[str], bool]:
    """The names that a factory takes as keywords, and whether it takes any others too."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return set(), False
    named = {p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def brief(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
