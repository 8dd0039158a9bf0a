"""Rewards of an arena. Whole arenas run in the tests of the controller and of SPMD mode."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from offbeat.cluster.arena import open_rewards
from offbeat.cluster.material import read_material
from offbeat.errors import CodeError
from offbeat.telemetry.console import Console
from offbeat.telemetry.record import RunRecord
from small_run import small_config


def test_a_reward_that_cannot_be_called_is_found_before_the_run(tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def reward(completion, row):\n    raise ValueError('no answer')\n")
    config = small_config(tmp_path, rollout__reward=f"{reward}:reward")

    async def main(record: RunRecord) -> None:
        async with AsyncExitStack() as stack:
            await open_rewards(stack, read_material(config), config, record)

    with RunRecord(tmp_path / "run", trace=False, console=Console("quiet")) as record:
        with pytest.raises(CodeError, match="no answer"):
            asyncio.run(main(record))
