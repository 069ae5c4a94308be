"""The optimizers that a recipe may name: the settings that each has, with their defaults.

SGD has the paper's defaults; the others have PyTorch's, and a learning rate of 1e-3.
"""

from __future__ import annotations

from typing import Any

_ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "nesterov": False},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "rmsprop": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0, "beta2": 0.99, "eps": 1e-8},
}
SETTINGS = tuple(dict.fromkeys(name for settings in OPTIMIZERS.values() for name in settings))
