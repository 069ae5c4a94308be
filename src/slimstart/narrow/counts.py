"""Attributes of modules that count channels, by name: "heads", or "splits[1]" for an entry of a list or tuple."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_ENTRY = re.compile(r"(.+)\[(\d{1,4})\]")


def read_count(module: nn.Module, name: str) -> Any:
    """The value of an attribute, or of an entry of one; None if there is no such."""
    attribute, index = _parsed(name)
    value = vars(module).get(attribute)
    if index is None:
        return value
    return value[index] if isinstance(value, list | tuple) and index < len(value) else None


def write_count(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, or an entry of one: then in a new list, since the old one may be another module's too."""
    attribute, index = _parsed(name)
    if index is not None:
        entries = getattr(module, attribute)
        value = type(entries)([*entries[:index], value, *entries[index + 1 :]])
    setattr(module, attribute, value)


def _parsed(name: str) -> tuple[str, int | None]:
    found = _ENTRY.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))
