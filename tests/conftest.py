"""Settings of all tests: a seeded generator, hypothesis without deadlines, one thread per worker."""

import gc
import os
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import pytest
import torch

import tests.torchvision_operators  # noqa: F401  # before anything imports torchvision

# No deadline: shared machines stall now and then. The same examples in every run, so that a failure is due to the
# change under test; EXPLORE=1 tries others.
hypothesis.settings.register_profile("slimstart", deadline=None, derandomize="EXPLORE" not in os.environ)
hypothesis.settings.load_profile("slimstart")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # torch's own threads would fight the workers for the cores


def pytest_collection_finish() -> None:
    gc.freeze()  # collections look at what tests have made only


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _differences(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        return [found for key in a for found in _differences(a[key], b[key], f"{path}[{key!r}]")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: lengths {len(a)} and {len(b)}"]
        return [
            found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in _differences(x, y, f"{path}[{i}]")
        ]
    return [] if type(a) is type(b) and a == b else [path]


@pytest.fixture
def differences() -> Callable[[Any, Any], list[str]]:
    """The places where two nested structures of tensors and numbers are not bit-equal; empty if they are equal."""
    return lambda a, b: _differences(a, b, "")
