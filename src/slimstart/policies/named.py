"""The policies that have a name, and checks of a policy that the user passes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from slimstart.policies.base import LearnsFrom, Policy
from slimstart.policies.equal_worth import EqualWorth
from slimstart.policies.paper import Paper

POLICIES: Mapping[str, Policy] = MappingProxyType({"equal_worth": EqualWorth(), "paper": Paper()})


def get_policy(policy: str | Policy) -> Policy:
    """The policy of that name (a key of `POLICIES`), or the given object.

    Raises:
        ValueError: no policy has this name, or `learns_from` of the object is unknown.
        TypeError: the object is not a `Policy`.
    """
    names = ", ".join(map(repr, POLICIES))
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"`policy` is {policy!r}; it must be one of {names}, or an object such as Paper(seed=1)")
        return POLICIES[policy]
    if inspect.isclass(policy):
        raise TypeError(f"`policy` is the class {policy.__name__}; it must be an object, such as {policy.__name__}()")
    if missing := [name for name in ("coupling", "learns_from", "start") if not hasattr(policy, name)]:
        raise TypeError(
            f"`policy` is {policy!r}, without {', '.join(missing)}; it must be one of {names}, or an object with "
            "`coupling`, `learns_from` and `start` (slimstart.policies.Policy)"
        )
    if policy.learns_from not in get_args(LearnsFrom):
        known = " or ".join(map(repr, get_args(LearnsFrom)))
        raise ValueError(f"`learns_from` of {policy!r} is {policy.learns_from!r}; it must be {known}")
    return policy
