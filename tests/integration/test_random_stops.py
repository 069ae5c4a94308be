"""The program, stopped at random points.

SLIMSTART_STOPS is the number of runs that are stopped, 16 by default; releases are tested with 200, by
`benchmarks/stopped_runs.py`, which writes a record.
"""

import os
from pathlib import Path

import pytest

from tests.stopped_runs import POLICIES, Outcome, stopped_runs

STOPS = int(os.environ.get("SLIMSTART_STOPS", "16"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_stopped_runs_end_like_others(policy: str, tmp_path: Path) -> None:
    outcomes: list[Outcome] = []
    for outcome in stopped_runs(policy, STOPS // len(POLICIES), tmp_path):
        outcomes.append(outcome)
        assert outcome.faults == []
    assert sum(one.is_stopped for one in outcomes) >= len(outcomes) // 2 > 0
