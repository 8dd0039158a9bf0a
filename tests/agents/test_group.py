"""Groups of episodes: which failures cost what."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from chats import CHATML, words
from offbeat.agents.group import play_group, seed_of
from offbeat.agents.pool import LostError
from offbeat.config.root import Config
from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory
from offbeat.errors import EngineError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.builder import TrajectoryBuilder
from offbeat.rollout.episode import Episode
from scripted_model import ScriptedModel


def group(outcomes: list[list[object]]) -> tuple[list[Trajectory], list[int]]:
    """Play episodes that end, try by try, with the given rewards or errors; returns also how often each was tried."""
    tries = [0] * len(outcomes)
    model = ScriptedModel(words(CHATML), lambda _: "x")

    async def play(_episode: Episode, index: int) -> list[Trajectory]:
        await asyncio.sleep(0)
        outcome = outcomes[index][tries[index]]
        tries[index] += 1
        if isinstance(outcome, Exception):
            raise outcome
        [sample] = await model.generate((1,), model.episode(Config(), Row("", "")).sampling, n=1)
        return [TrajectoryBuilder((1,)).generated(sample).finish(outcome, episode=index)]

    episode = model.episode(Config(), Row("p", "a"), group_size=len(outcomes))
    return asyncio.run(play_group(episode, SimpleNamespace(play_episode=play))), tries


def test_failures_cost_their_own_episodes_unless_all_fail() -> None:
    trajectories, _ = group([[1.0], [ValueError("x")], [0.0], [EngineError("gone")]])
    assert [t.reason for t in trajectories] == ["stop", "episode failed: ValueError: x", "stop", "episode failed: EngineError: gone"]
    assert [t.episode for t in trajectories] == [0, 1, 2, 3]
    with pytest.raises(EngineError):
        group([[EngineError("gone")], [ValueError("x")]])
    trajectories, _ = group([[1.0], [EngineError("gone")]])  # enough for an evaluation
    assert [t.unusable for t in trajectories] == [None, "episode failed"]


def test_an_episode_of_a_lost_process_is_played_once_more() -> None:
    trajectories, tries = group([[LostError("x"), 1.0], [0.0], [LostError("x"), LostError("y")]])
    assert tries == [2, 1, 2] and [t.unusable for t in trajectories] == [None, None, "episode failed"]


def test_an_episode_that_is_played_once_more_gets_the_answers_that_it_had_to_the_same_calls() -> None:
    model = ScriptedModel(words(CHATML), lambda _: "x")
    seeds: list[int | None] = []
    tries: list[list[list[Sample]]] = []

    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        seeds.append(sampling.seed)
        return await model.generate(prompt, sampling, n=n, session=session)

    async def play(episode: Episode, index: int) -> list[Trajectory]:
        prompts = [(1,), (1,), (2,)] if not tries else [(1,), (1,), (1,), (3,)]
        tries.append([await episode.generate(prompt, episode.sampling, n=1) for prompt in prompts])
        if len(tries) == 1:
            raise LostError("x")
        return [TrajectoryBuilder((1,)).generated(tries[1][3][0]).finish(1.0, episode=index)]

    episode = replace(model.episode(Config(), Row("p", "a"), group_size=1), generate=generate, seed=7)
    asyncio.run(play_group(episode, SimpleNamespace(play_episode=play)))
    assert tries[1][0] is tries[0][0] and tries[1][1] is tries[0][1]
    assert len(seeds) == 3 + 2 and len(set(seeds)) == 5  # a third equal call has random numbers of its own


def test_an_account_is_kept_of_the_time_of_each_episode() -> None:
    model = ScriptedModel(words(CHATML), lambda _: "x", latency_s=0.02)

    async def play(episode: Episode, index: int) -> list[Trajectory]:
        await episode.off_the_clock(asyncio.sleep(0.02 * index))
        [sample] = await episode.generate((1,), episode.sampling, n=1, session="one")
        await asyncio.sleep(0.04)
        [reward] = await episode.score(["x"], episode.row)
        if index == 2:
            raise ValueError("it counts, too")
        return [TrajectoryBuilder((1,)).generated(sample).finish(reward, episode=index)]

    asyncio.run(play_group(model.episode(Config(), Row("p", "a"), group_size=3), SimpleNamespace(play_episode=play)))
    metrics = model.accounts.take_stats().values()
    assert 0.05 < metrics["rollout/episode_mean_s"] < metrics["rollout/episode_max_s"] < 5
    assert metrics["rollout/tool_share"] > metrics["rollout/model_share"] > 0.01 < metrics["rollout/queue_share"]
    assert model.accounts.take_stats().values() == {}, "each counts in one step"


def test_seeds_are_those_of_the_row() -> None:
    assert seed_of(Row("p", "", {"seed": "17"})) == 17 and seed_of(Row("p", "a")) == seed_of(Row("p", "a")) != seed_of(Row("p", "b"))
