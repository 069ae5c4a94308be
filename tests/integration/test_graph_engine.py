"""The graph engine's decisions, on a GPU that is pretended: the same numbers as eager steps."""

import pytest

from tests.engine_cases import *  # noqa: F403
from tests.pretended_gpu import pretend


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    pretend(monkeypatch)
    return "cpu"
