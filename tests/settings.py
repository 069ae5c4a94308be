"""Settings of a training in one flat dict."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimstart.policies import get_policy


def arguments(**settings: Any) -> dict[str, Any]:
    """The keyword arguments of `SparseTraining`: settings of the policy, by default the paper's, go into its object."""
    policy: Any = get_policy(settings.pop("policy", "paper"))
    own = {field.name for field in dataclasses.fields(policy)} & settings.keys()
    return {"policy": dataclasses.replace(policy, **{name: settings.pop(name) for name in own}), **settings}
