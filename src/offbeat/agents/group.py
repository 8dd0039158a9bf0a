"""Plays the episodes of one prompt at the same time; one that fails is lost alone. Called by the workflows of this folder."""

import asyncio
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from offbeat.agents.pool import LostError
from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory, failed_trajectory
from offbeat.errors import describe
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.calls import key_of
from offbeat.rollout.episode import Episode, accounted
from offbeat.rollout.randomness import of_sample
from offbeat.user_code.boundary import Caught

_TRIES = 2
"""An episode whose process ended is played once more, since another one may have ended it."""


class PlaysEpisodes(Protocol):
    """A workflow that plays one episode after the other, not a group as a whole."""

    async def play_episode(self, episode: Episode, index: int) -> Sequence[Trajectory]:
        """Play the episode with this index in the group; `episode` keeps account of its time alone."""
        ...


async def play_group(episode: Episode, workflow: PlaysEpisodes) -> list[Trajectory]:
    """Return the trajectories of all episodes; a failed episode has one that holds the reason.

    An episode that is played once more gets the answers that it had, as long as it makes the same calls. If all failed, the first one's
    error is raised.
    """
    failures: list[BaseException] = []

    async def play_safely(index: int) -> Sequence[Trajectory]:
        with episode.account(index) as account:
            own, answers = accounted(episode, account), _Answers()
            for _ in range(_TRIES):
                with Caught() as caught:
                    return await workflow.play_episode(of_sample(answers.given_again(own), index), index)
                if not isinstance(caught.error, LostError):
                    break
        error = caught.take()
        failures.append(error)
        return [failed_trajectory(describe(error), episode=index)]

    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(play_safely(index), name=f"episode {index}") for index in range(episode.group_size)]
    if len(failures) == episode.group_size:
        raise failures[0]
    return [trajectory for task in playing for trajectory in task.result()]


class _Answers:
    """Answers of engines to the calls of one episode."""

    def __init__(self) -> None:
        self._given: list[tuple[bytes, list[Sample]]] = []

    def given_again(self, episode: Episode) -> Episode:
        """Return an episode for another try, which gets the answers of those before it to the same calls, each once."""
        before: defaultdict[bytes, deque[list[Sample]]] = defaultdict(deque)
        for key, samples in self._given:
            before[key].append(samples)
        self._given = []

        async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
            key = key_of(prompt, sampling, n=n)
            samples = before[key].popleft() if before[key] else await episode.generate(prompt, sampling, n=n, session=session)
            self._given.append((key, samples))
            return samples

        return replace(episode, generate=generate)


def seed_of(row: Row) -> int:
    """Return the seed of a row's episodes: its field `seed`, or one that depends on its text."""
    given = row.extra.get("seed", "")
    return int(given) if given.removeprefix("-").isdigit() else zlib.crc32(repr((row.prompt, row.answer)).encode(errors="replace"))
