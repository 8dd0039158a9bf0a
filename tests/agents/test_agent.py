"""Agents that call the model over HTTP: functions in processes of their own, and the proxy in front of a scripted model."""

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from chats import CHATML, words
from offbeat.agents.opening import open_workflow
from offbeat.config.root import Config
from offbeat.data.row import Row
from offbeat.data.trajectory import Group
from offbeat.errors import CodeError, RolloutError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.episode import Episode
from offbeat.rollout.idle import IdleMeter, NoListener
from offbeat.rollout.outcomes import RolloutListener
from offbeat.rollout.player import GroupPlayer, RolloutParts
from offbeat.rollout.staleness import Gate
from offbeat.types import NoNotes
from scripted_model import ScriptedModel, play_agent

CODE = Path(__file__).parents[1] / "support" / "playing.py"


def test_a_function_is_given_a_url_and_a_key_and_returns_the_reward() -> None:
    trajectories, model = play_agent(Row("hi", "", {"seed": "3"}), program=f"{CODE}:answer", group_size=4)
    assert [t.named_rewards for t in trajectories] == [{"asked": 1.0, "seed": 1.0}] * 4
    assert sorted(tuple(t.tokens[t.loss_mask]) for t in trajectories) == sorted(sample.token_ids for _, sample in model.calls)
    assert sorted(t.versions.max() for t in trajectories) == [0, 1, 2, 3]
    spent = model.accounts.take_stats().values()
    assert spent["rollout/model_share"] > 0 and spent["rollout/tool_share"] > spent["rollout/queue_share"]


def test_what_a_program_measures_beside_its_reward_becomes_a_mean() -> None:
    trajectories, model = play_agent(Row("hi", ""), program=f"{CODE}:measuring", group_size=2)
    assert [t.reward for t in trajectories] == [0.5, 0.5]
    means = model.accounts.take_stats().means
    assert {name: mean for name, mean in means.items() if "metrics/" in name} == {
        "rollout/metrics/words": (6.0, 2.0), "rollout/metrics/found": (2.0, 2.0)}


def test_a_plain_function_runs_in_a_thread_and_may_leave_the_reward_to_the_run() -> None:
    trajectories, model = play_agent(
        Row("hi", ""), program=f"{CODE}:blocking_agent", say=lambda text: "you too" if "again" in text else "hello")
    assert len(model.calls) == 4 and [t.reward for t in trajectories] == [float(len("you too"))] * 2
    assert [len(t.turns) for t in trajectories] == [2, 2]


def test_a_call_past_the_limit_of_turns_is_refused() -> None:
    with pytest.raises(CodeError, match="blocking_agent raised HTTPError: HTTP Error 400"):
        play_agent(Row("hi", ""), program=f"{CODE}:blocking_agent", max_turns=1)


def test_an_episode_whose_process_ends_is_played_once_more_and_then_fails() -> None:
    with pytest.raises(Exception, match="exited with code 3"):
        play_agent(Row("hi", "exit"), program=f"{CODE}:misbehave", group_size=1)


def test_an_agent_that_asks_nothing_or_gives_no_reward_is_told() -> None:
    with pytest.raises(CodeError, match="ended without calling the model"):
        play_agent(Row("hi", "nothing"), program=f"{CODE}:misbehave")


def test_a_late_agent_fails_alone_and_by_itself() -> None:
    with pytest.raises(Exception, match=r"an episode \(agent.timeout_s\) passed its deadline of 1 s"):
        play_agent(Row("hi", "wait"), program=f"{CODE}:misbehave", timeout_s=1.0)


def test_an_agent_whose_requests_fail_and_that_asks_for_ever_gives_up_its_place_and_the_reason_names_the_requests() -> None:
    """The second episode waits for the place of the first, so the group's own deadline stands still."""
    tokenizer = words(CHATML)
    config = Config.model_validate({
        "rollout": {"workflow": "agent", "episode_timeout_s": 3.0, "reward_timeout_s": 1.0},
        "agent": {"program": f"{CODE}:asks_for_ever", "timeout_s": 2.0, "episodes_per_process": 1}})
    model = ScriptedModel(tokenizer, lambda _: "hello")

    async def fails(*_request: object, **_named: object) -> list[Sample]:
        await asyncio.sleep(0.2)  # a request that is under way does not count towards agent.timeout_s
        raise RolloutError("no engine is healthy")

    def episode(row: Row, group_size: int, _sampling: Sampling) -> Episode:
        return replace(model.episode(config, row, group_size=group_size), generate=fails)

    async def play() -> Group:
        gate = Gate(batch_size=1, max_running=1, eta=0, version=0, last_version=1, on_stale="wait")
        async with AsyncExitStack() as stack:
            plays = await open_workflow(stack, config, tokenizer=tokenizer, log_dir=None, notes=NoNotes())
            player = GroupPlayer(
                RolloutParts(plays, episode, has_places=True), config=config.rollout, idle=IdleMeter(gate, NoListener()),
                listener=RolloutListener())
            async with asyncio.timeout(40):
                group, _ = await player.play("0:0", Row("hi", ""), 2, Sampling(8), version=0, accounts=Accounts())
            return group

    reason = asyncio.run(play()).rejected
    assert reason is not None and re.fullmatch(
        r"DeadlineError: waiting for an episode with its requests \(0.9 of rollout.episode_timeout_s\) passed its deadline of 2.7 s; \d+"
        r" of its requests failed, the last with RolloutError: no engine is healthy", reason), reason


def test_the_deadline_of_an_agent_does_not_count_its_requests_to_a_busy_engine() -> None:
    trajectories, model = play_agent(Row("hi", ""), program=f"{CODE}:blocking_agent", latency_s=1.5, timeout_s=2.0)
    assert len(model.calls) == 4 and [len(t.turns) for t in trajectories] == [2, 2]
    with pytest.raises(Exception, match=r"an episode \(agent.timeout_s\) passed its deadline of 1 s"):
        play_agent(Row("wait after that", ""), program=f"{CODE}:asks_and_waits", latency_s=0.5, timeout_s=1.0)
