"""The peers of a controller."""

import asyncio
from typing import Any

import pytest

from offbeat.controller.parts import SingleProcess


def test_a_controller_leads_itself_and_waits_for_nobody() -> None:
    async def work() -> int:
        return 5

    async def fail() -> Any:
        raise LookupError("no")

    async def body() -> None:
        peers = SingleProcess()
        assert await peers.lead("evaluate", work, int) == 5
        assert await peers.gather("heads", "mine") == ["mine"]
        await peers.meet("commit_stats")
        with pytest.raises(LookupError):
            await peers.lead("evaluate", fail, int)
        assert await peers.all_ready("rollouts", work) == 5
        with pytest.raises(LookupError) as found:
            await peers.all_ready("rollouts", fail)
        assert peers.have_heard(found.value)

    asyncio.run(body())
