"""Workflows for tests."""

import asyncio

from offbeat.data.trajectory import failed_trajectory
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.workflows.single_turn import single_turn

SLOW_S, FAST_S = 7.0, 0.7


async def slow_by_answer(episode):
    """Ten times as slow for rows that say so."""
    await asyncio.sleep(SLOW_S if episode.row.answer == "slow" else FAST_S)
    return await single_turn(episode)


async def two_pieces(episode):
    """Two turns in one trajectory, and a third in another that begins anew; the last of several episodes fails."""
    short = tuple(episode.prompt[-2:])
    trajectories = []
    for number in range(episode.group_size):
        if number and number == episode.group_size - 1:
            trajectories.append(failed_trajectory("it was the last", episode=number))
            continue
        main, other = TrajectoryBuilder(episode.prompt), TrajectoryBuilder(short)
        for order, builder in enumerate((main, other, main)):
            [sample] = await episode.generate(builder.tokens, episode.sampling, n=1)
            earned = 0.1 * len(sample.token_ids) + 0.05 * number
            builder.state("later" if order else "first").generated(sample, order=order).reward(earned).given(short)
        [reward] = await episode.score([sample.text], episode.row)
        trajectories += [builder.finish(reward, episode=number, malformed_calls=int(builder is other)) for builder in (main, other)]
    return trajectories
