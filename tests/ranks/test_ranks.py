"""Ranks that are started together meet, whatever they train; `test_trainers.py` trains with them."""

import asyncio
import os
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.ranks.ranks import start_ranks
from offbeat.workers.local import LocalLauncher
from small_run import small_config


def test_a_rank_that_cannot_load_the_model_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(stop_timeout_s=5) as launcher:
            with pytest.raises(OffbeatError, match="nothing"):
                await start_ranks(
                    launcher, small_config(tmp_path).for_ranks, model=str(tmp_path / "nothing"), build=None, log_dir=tmp_path)
            (rank,) = launcher._children
            with pytest.raises(ProcessLookupError):  # it is gone, though its launcher is not
                os.kill(rank.pid, 0)

    asyncio.run(main())
