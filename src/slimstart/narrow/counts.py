"""Attributes of modules that count channels, by name.

A name is "heads", "splits[1]" for an entry of a list or tuple, or "config.heads" for an attribute of a configuration.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

_ENTRY = re.compile(r"(.+)\[(\d{1,4})\]")


def read_count(module: nn.Module, name: str) -> Any:
    """The value of an attribute, or of an entry of one; None if there is no such."""
    attribute, index, inner = _parsed(name)
    value = vars(module).get(attribute)
    if inner:
        return getattr(value, "__dict__", {}).get(inner)
    if index is None:
        return value
    return value[index] if isinstance(value, list | tuple) and index < len(value) else None


def write_count(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, or an entry of one: then in a new object, since the old one may be another module's too."""
    attribute, index, inner = _parsed(name)
    if inner:
        configuration = copy.copy(getattr(module, attribute))
        vars(configuration)[inner] = value
        value = configuration
    elif index is not None:
        entries = getattr(module, attribute)
        value = type(entries)([*entries[:index], value, *entries[index + 1 :]])
    setattr(module, attribute, value)


def _parsed(name: str) -> tuple[str, int | None, str]:
    """The attribute of the module, and in it the index of an entry or the name of an attribute."""
    attribute, _, inner = name.partition(".")
    found = _ENTRY.fullmatch(name)
    return (attribute, None, inner) if found is None or inner else (found[1], int(found[2]), "")
