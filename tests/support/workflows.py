"""Workflows for tests."""

import asyncio

from offbeat.rollout.workflows.single_turn import single_turn

SLOW_S, FAST_S = 7.0, 0.7


async def slow_by_answer(episode):
    """Ten times as slow for rows that say so."""
    await asyncio.sleep(SLOW_S if episode.row.answer == "slow" else FAST_S)
    return await single_turn(episode)
