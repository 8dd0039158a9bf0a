"""The simplest workflow: one prompt, G continuations, one reward each."""

import numpy as np

from offbeat.data.trajectory import Trajectory
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.episode import Episode


async def single_turn(episode: Episode) -> list[Trajectory]:
    """Sample G continuations in one request, so that they share the prompt's prefill, and score them."""
    samples = await episode.generate(episode.prompt, episode.sampling, n=episode.group_size)
    rewards = await episode.score([sample.text for sample in samples], episode.row)
    prompt = np.array(episode.prompt)
    return [TrajectoryBuilder(prompt).generated(sample).finish(reward) for sample, reward in zip(samples, rewards, strict=True)]
