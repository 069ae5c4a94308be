"""The table of rules and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slimstart.graph.tracer import Call, Tracer

Rule = Callable[[Tracer, Call], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, by ATen name."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def operation_name(func: Any) -> str:
    """`aten::add_` -> `add`: the in-place form follows the same rule."""
    name: str = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def rule_for(func: Any) -> Rule | None:
    """The rule of an operation; pointwise operations share one, told by the tag that PyTorch gives them."""
    found = RULES.get(operation_name(func))
    if found is None and torch.Tag.pointwise in func.tags:
        return RULES["pointwise"]
    return found
