"""The benchmark of the default training loop, on small networks."""

import front_door
import pytest


@pytest.mark.slow
def test_both_sides_are_measured() -> None:
    found = front_door.settled_step("resnet20", 0.3, batch=4, rounds=3)
    assert found["ratio"] == found["slimstart"] / found["plain"]
    assert 0.2 < found["ratio"] < 5  # noise of a few steps


def test_a_change_is_timed_and_weights_are_stored_once() -> None:
    found = front_door.change("resnet20", 0.3)
    assert 0 < found["seconds"] < 5
    assert 0.9 < found["stored_weights"] <= 1
