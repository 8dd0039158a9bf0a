"""Groups of episodes: which failures cost what."""

import asyncio

import pytest

from chats import CHATML, words
from offbeat.agents.group import play_group, seed_of
from offbeat.agents.pool import LostError
from offbeat.config.root import Config
from offbeat.data.row import Row
from offbeat.data.trajectory import Trajectory
from offbeat.errors import EngineError
from offbeat.rollout.builder import TrajectoryBuilder
from scripted_model import ScriptedModel


def group(outcomes: list[list[object]]) -> tuple[list[Trajectory], list[int]]:
    """Play episodes that end, try by try, with the given rewards or errors; returns also how often each was tried."""
    tries = [0] * len(outcomes)
    model = ScriptedModel(words(CHATML), lambda _: "x")

    async def play(index: int) -> list[Trajectory]:
        await asyncio.sleep(0)
        outcome = outcomes[index][tries[index]]
        tries[index] += 1
        if isinstance(outcome, Exception):
            raise outcome
        [sample] = await model.generate((1,), model.episode(Config(), Row("", "")).sampling, n=1)
        return [TrajectoryBuilder((1,)).generated(sample).finish(outcome, episode=index)]

    episode = model.episode(Config(), Row("p", "a"), group_size=len(outcomes))
    return asyncio.run(play_group(episode, play)), tries


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


def test_seeds_are_those_of_the_row() -> None:
    assert seed_of(Row("p", "", {"seed": "17"})) == 17 and seed_of(Row("p", "a")) == seed_of(Row("p", "a")) != seed_of(Row("p", "b"))
