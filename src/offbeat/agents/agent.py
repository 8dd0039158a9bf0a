"""The workflow "agent": programs that call the model over HTTP, as they would any other, while the proxy records the answers.

A program is given a base URL, such as "http://127.0.0.1:40123/v1", a key of its episode alone, and a row. Its calls and their answers
become the episode's trajectories; its return value is the reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.agents.group import play_group, seed_of
from offbeat.agents.pool import PlayPool
from offbeat.agents.proxy import Proxy
from offbeat.agents.recorder import EpisodeLimits
from offbeat.agents.task import AgentTask, Played
from offbeat.agents.worker import RunRequest
from offbeat.config.agent import AgentConfig
from offbeat.data.tokenizer import Tokenizer
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError, DeadlineError
from offbeat.rollout.clock import AgentClock, EpisodeClock, requests_off
from offbeat.rollout.episode import Episode
from offbeat.user_code.places import Waiting

_HARD_TIMEOUT_S = 7 * 86_400.0
"""Seconds for a call. The deadline of its episode or of its group ends it before, even if much of its time does not count on them."""


class Player(Protocol):
    """Runs an agent for one episode."""

    async def play(self, task: AgentTask, off_the_clock: Waiting, clock: EpisodeClock) -> Played:
        """Wait for a place through `off_the_clock`, and run the agent to its end under `clock`. Cancelling this ends the agent.

        Raises DeadlineError if it took longer than the clock allows, once it had begun.
        """
        ...


@dataclass(frozen=True)
class ProgramPlayer:
    """Runs the agent's function in a pool."""

    pool: PlayPool

    async def play(self, task: AgentTask, off_the_clock: Waiting, clock: EpisodeClock) -> Played:
        async with self.pool.seat(off_the_clock) as seat, clock:
            return await seat.call("run", RunRequest(seat.number, task), Played, timeout_s=_HARD_TIMEOUT_S)


@dataclass(frozen=True)
class AgentWorkflow:
    """Plays agents; a workflow. `max_tokens` is the longest sequence that can be trained on."""

    proxy: Proxy
    player: Player
    config: AgentConfig
    max_tokens: int

    async def __call__(self, episode: Episode) -> list[Trajectory]:
        return await play_group(episode, self)

    async def play_episode(self, episode: Episode, index: int) -> list[Trajectory]:
        config = self.config
        limits = EpisodeLimits(config.max_turns, min(episode.context, self.max_tokens))
        clock = AgentClock(config.timeout_s, episode)
        generate = requests_off(clock, episode).generate
        session = self.proxy.open(generate, episode.sampling, limits=limits, keep_reasoning=config.keep_reasoning)
        # The key is in the path as well, for libraries that take no key for each episode.
        url = self.proxy.path_url(session)
        task = AgentTask(episode.row, f"{url}/v1", url, session.key, config.model, seed_of(episode.row), config.timeout_s)
        try:
            result = await self.player.play(task, episode.off_the_clock, clock)
        except DeadlineError as exc:
            raise DeadlineError(f"{exc}{session.failures}") from exc
        finally:
            self.proxy.close(session)
        episode.measured(result.metrics)
        reward = result.outcome
        if reward is None:
            [reward] = await episode.score([last_answer(session.chains(0.0, episode=index), episode.tokenizer)], episode.row)
        chains = session.chains(reward, episode=index)
        if not chains:
            raise CodeError("the agent ended without calling the model; it must call the base URL that it is given")
        return chains


def last_answer(chains: Sequence[Trajectory], tokenizer: Tokenizer) -> str:
    """Return the text of the last call of an episode; empty if there was none."""
    last = max((chain for chain in chains if chain.turns), key=lambda chain: chain.turns[-1].order, default=None)
    if last is None:
        return ""
    mask = last.loss_mask.copy()
    mask[: last.turns[-2].end if len(last.turns) > 1 else 0] = False
    return tokenizer.decode_continuation(last.tokens[np.flatnonzero(mask)].tolist())
