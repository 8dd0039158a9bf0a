"""What tests of the rollouts' index and of its filters share."""

from pathlib import Path

import pytest

from offbeat.dashboard.rollout_index import RolloutIndex
from rollout_samples import write_small_run


@pytest.fixture
def index(tmp_path: Path) -> RolloutIndex:
    """The index of a small run."""
    write_small_run(tmp_path / "run")
    made = RolloutIndex(tmp_path / "run")
    made.update()
    return made
