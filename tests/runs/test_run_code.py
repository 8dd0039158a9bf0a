"""Rewards and workflows of a run are opened with their processes, and tried before any episode."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.controller.inputs import read_inputs
from offbeat.errors import CodeError
from offbeat.runs.run_code import open_rewards
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord
from offbeat.workers.local import LocalLauncher
from small_run import small_config


def test_a_reward_that_cannot_be_called_is_found_before_the_run(tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def reward(completion, row):\n    raise ValueError('no answer')\n")
    config = small_config(tmp_path, rollout__reward=f"{reward}:reward")

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            launcher = LocalLauncher.from_config(config.for_launcher)
            await open_rewards(stack, read_inputs(config).train.row(0), config, record, launcher=launcher)

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        with pytest.raises(CodeError, match="no answer"):
            asyncio.run(main(record))
