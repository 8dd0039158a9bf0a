"""Agents that call the model over HTTP: functions in processes of their own, and the proxy in front of a scripted model."""

from pathlib import Path

import pytest

from offbeat.data.row import Row
from offbeat.errors import CodeError
from scripted_model import play_agent

CODE = Path(__file__).parents[1] / "support" / "playing.py"


def test_a_function_is_given_a_url_and_a_key_and_returns_the_reward() -> None:
    trajectories, model = play_agent(Row("hi", "", {"seed": "3"}), program=f"{CODE}:answer", group_size=4)
    assert [t.named_rewards for t in trajectories] == [{"asked": 1.0, "seed": 1.0}] * 4
    assert sorted(tuple(t.tokens[t.loss_mask]) for t in trajectories) == sorted(sample.token_ids for _, sample in model.calls)
    assert sorted(t.versions.max() for t in trajectories) == [0, 1, 2, 3]
    spent = model.accounts.take().values()
    assert spent["rollout/model_share"] > 0 and spent["rollout/tool_share"] > spent["rollout/queue_share"]


def test_what_a_program_measures_beside_its_reward_becomes_a_mean() -> None:
    trajectories, model = play_agent(Row("hi", ""), program=f"{CODE}:measuring", group_size=2)
    assert [t.reward for t in trajectories] == [0.5, 0.5]
    means = model.accounts.take().means
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


def test_the_deadline_of_an_agent_does_not_count_its_requests_to_a_busy_engine() -> None:
    trajectories, model = play_agent(Row("hi", ""), program=f"{CODE}:blocking_agent", latency_s=1.5, timeout_s=2.0)
    assert len(model.calls) == 4 and [len(t.turns) for t in trajectories] == [2, 2]
    with pytest.raises(Exception, match=r"an episode \(agent.timeout_s\) passed its deadline of 1 s"):
        play_agent(Row("wait after that", ""), program=f"{CODE}:asks_and_waits", latency_s=0.5, timeout_s=1.0)
