"""`Run.replay` trains the steps of a run again; what is compared is tested where the command is."""

import asyncio
import shutil
from pathlib import Path

import pytest

import offbeat
from offbeat.api.replayed import Replayed
from offbeat.errors import ConfigError
from small_run import SmallRun


@pytest.mark.whole_run
def test_a_run_is_replayed_also_where_an_event_loop_runs(finished_run: SmallRun) -> None:
    async def notebook() -> Replayed:
        return offbeat.Run(finished_run.folder).replay(to_step=1)

    replayed = asyncio.run(notebook())
    assert replayed.is_equal and [step.global_step for step in replayed.steps] == [1] and not replayed.remarks


def test_a_run_without_a_journal_is_refused(finished_run: SmallRun, tmp_path: Path) -> None:
    shutil.copytree(finished_run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "journal")
    with pytest.raises(ConfigError, match="has no journal with steps in it, so there is nothing to replay"):
        offbeat.Run(tmp_path / "run").replay()
