"""The rules by operation, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slimstart.graph.tracer import Call, Tracer

Rule = Callable[[Tracer, Call], None]
RULES: dict[str, Rule] = {}


def register_rule(*operations: str) -> Callable[[Rule], Rule]:
    """Decorate a rule: what operations do to the channels of their inputs.

    A rule is called as `rule(tracer, call)` after the operation has run. `tracer.activation(tensor)` is what is known
    of an input, constraints are added to `tracer.constraints`, and `tracer.set(tensor, nodes)` says which channels the
    result has. A rule that is registered later replaces an earlier one.

    For an operation that treats every channel separately and keeps zeros:

        @slimstart.register_rule("mylib::doubled")
        def doubled(tracer, call):
            value = tracer.activation(call["x"])  # by the name in the operation's schema; None for constants
            if value is not None:
                tracer.set(call.result, value.nodes)  # the same channels

    Args:
        operations: ATen names without overload and without the underscore of the in-place form, as "relu"; operations
            of other libraries with their namespace, as "mylib::op".
    """

    def register(function: Rule) -> Rule:
        for name in operations:
            RULES[name] = function
        return function

    return register


def operation_name(func: Any) -> str:
    """`aten::add_` -> `add`: the in-place form follows the same rule."""
    name: str = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def rule_for(func: Any) -> Rule | None:
    """The rule of an operation; pointwise operations, which PyTorch tags as such, have one in common."""
    found = RULES.get(operation_name(func))
    if found is None and torch.Tag.pointwise in func.tags:
        return RULES["pointwise"]
    return found
