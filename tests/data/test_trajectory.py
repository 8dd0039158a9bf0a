"""Trajectories and groups."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.data import wire
from offbeat.data.reward import FailedReward
from offbeat.data.trajectory import Group, Trajectory, TurnEnd, failed_trajectory, named_rewards, parts_of

ONE = Trajectory(
    np.array([3, 1, 9, 1, 3, 0]), np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 0, -0.1, -0.2, -0.1]), np.array([-1, -1, -1, 4, 4, 5]), 1.0)
EMPTY = Trajectory(np.array([3]), np.array([0]), np.zeros(1), np.array([-1]), 0.0, "length")


def test_a_trajectory_knows_its_prompt_and_its_oldest_version() -> None:
    assert (len(ONE), ONE.prompt_len, ONE.head_version) == (6, 3, 4)
    assert (len(EMPTY), EMPTY.prompt_len, EMPTY.head_version) == (1, 1, -1)
    assert [getattr(ONE, name).dtype for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")] == [
        np.int32, np.bool_, np.float32, np.int32]


ARRAYS = {"tokens": [3, 1], "loss_mask": [False, True], "rollout_logprobs": [0, -0.5], "versions": [-1, 4]}


@pytest.mark.parametrize(("changes", "why"), [
    ({"versions": [-1, 4, 4]}, "Trajectory.versions must have shape (2,) like tokens, got (3,)"),
    ({"tokens": 3}, "Trajectory.tokens must have one dimension, got 3 (int)"),
    ({"tokens": [[3], [1]]}, "Trajectory.tokens must have one dimension, got (2, 1)"),
    ({"tokens": [[3], [1, 2]]}, "Trajectory.tokens cannot be read: ValueError"),
    ({"tokens": "31"}, "Trajectory.tokens must have one dimension, got '31' (str)"),
    ({"tokens": ["3", "1"]}, "Trajectory.tokens must hold numbers, got '3' (str)"),
    ({"tokens": None}, "Trajectory.tokens must have one dimension, got None (NoneType)"),
    ({"tokens": [3, 2**32 + 1]}, "Trajectory.tokens must hold numbers of type int32, got 4294967297"),
    ({"tokens": [3, 1.5]}, "Trajectory.tokens must hold numbers of type int32, got 1.5"),
    ({"loss_mask": [0, 2]}, "Trajectory.loss_mask must hold numbers of type bool, got 2"),
    ({"rollout_logprobs": [0, None]}, "Trajectory.rollout_logprobs must hold numbers, got None (NoneType)"),
    ({"reason": None}, "Trajectory.reason must be text, got None (NoneType)"),
    ({"num_retries": "none"}, "Trajectory.num_retries must be an integer, got 'none' (str)"),
    ({"episode": "one"}, "Trajectory.episode must be an integer or None, got 'one' (str)"),
    ({"episode": True}, "Trajectory.episode must be an integer or None, got True (bool)"),
    ({"agent": 3}, "Trajectory.agent must be text, got 3 (int)"),
    ({"malformed_calls": -1}, "Trajectory.malformed_calls must be an integer of at least 0, got -1 (int)"),
    ({"malformed_calls": 0.5}, "Trajectory.malformed_calls must be an integer of at least 0, got 0.5 (float)"),
    ({"turns": 3}, "Trajectory.turns must hold TurnEnds, got 3 (int)"),
    ({"turns": [(2, 1.0)]}, "Trajectory.turns must hold TurnEnds, got [(2, 1.0)]"),
    ({"turns": [TurnEnd(1.5)]}, "a TurnEnd must have integers for end and order, and text for state, got TurnEnd(end=1.5"),
    ({"turns": [TurnEnd(2, state=7)]}, "a TurnEnd must have integers for end and order, and text for state, got TurnEnd(end=2"),
    ({"turns": [TurnEnd(3)]}, "the ends of Trajectory.turns must rise from 1 to the 2 tokens, got 3 after 0"),
    ({"turns": [TurnEnd(0)]}, "the ends of Trajectory.turns must rise from 1 to the 2 tokens, got 0 after 0"),
    ({"turns": [TurnEnd(2), TurnEnd(1)]}, "the ends of Trajectory.turns must rise from 1 to the 2 tokens, got 1 after 2"),
    ({"turns": [TurnEnd(1)]}, "the last of Trajectory.turns ends after 1 tokens, but token 1 was generated"),
])
def test_what_does_not_fit_together_is_a_trajectory_without_tokens_that_says_why(changes: dict, why: str) -> None:
    malformed = Trajectory(**{**ARRAYS, "reward": 1.0, **changes})
    assert malformed.reason.startswith(f"malformed: {why}"), malformed.reason
    assert (malformed.unusable, len(malformed), malformed.prompt_len, malformed.row_tokens, malformed.head_version) == (
        "malformed", 0, 0, 0, -1)
    assert Group("0:7", 3, (malformed, ONE)).usable == (ONE,)


def test_arrays_are_copies_that_nobody_writes_to() -> None:
    tokens = np.array([3, 1], np.int32)
    trajectory = Trajectory(**{**ARRAYS, "tokens": tokens}, reward=1.0)
    tokens[:] = 9  # a workflow that uses its buffer again
    assert trajectory.tokens.tolist() == [3, 1]
    with pytest.raises(ValueError, match="read-only"):
        trajectory.tokens[0] = 9


def test_a_reason_is_text_that_any_file_takes() -> None:
    assert replace(ONE, reason="stop\ud800" + "x" * 2000).reason == "stop\\ud800" + "x" * 995


def test_a_group_adds_up_its_trajectories() -> None:
    group = Group("0:7", 3, (ONE, EMPTY))
    assert (group.num_tokens, group.head_version, group.rewards.tolist()) == (7, 4, [1.0, 0.0])
    assert Group("0:7", 3, (EMPTY,)).head_version == 3
    assert Group("0:7", 3, rejected="late").head_version == 3


@pytest.mark.parametrize(("reward", "why"), [
    (FailedReward("it raised KeyError"), "it raised KeyError"), (None, "None (NoneType) is not a number"),
    (float("inf"), "inf is not a number"),
])
def test_a_trajectory_without_a_reward_says_why_and_is_not_usable(reward, why: str) -> None:
    failed = replace(ONE, reward=reward)
    assert np.isnan(failed.reward)
    assert failed.reason.startswith(f"reward failed: {why}")
    assert failed.unusable == "reward failed"
    long = replace(failed, reason="too long: 6 tokens")
    assert (long.reason, long.unusable, ONE.unusable, EMPTY.unusable) == ("too long: 6 tokens", "too long", None, None)
    group = Group("0:7", 3, (failed, ONE, long))
    assert (group.usable, group.rewards.tolist()) == ((ONE,), [1.0])


@pytest.mark.parametrize(("rewards", "of_sums", "of_parts"), [
    ((1.0, 1.0), 0.0, 0.0), ((0.5, -1.0, 0.0), 1.5, 1.5), ((1.0, float("nan"), 1.0), 0.0, 0.0), ((float("nan"),), 0.0, 0.0), ((), 0.0, 0.0),
    (({"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}), 0.0, 1.0), (({"right": 1.0, "form": 0.5}, {"right": 1.0}), 0.5, 0.0),
])
def test_the_range_of_a_groups_rewards_is_over_usable_samples_of_sums_or_of_parts(rewards, of_sums: float, of_parts: float) -> None:
    group = Group("0:0", 0, tuple(replace(ONE, reward=reward) for reward in rewards))
    assert (group.reward_range(separate=False), group.reward_range(separate=True)) == (of_sums, of_parts)


def test_a_trajectory_needs_a_row_up_to_its_last_generated_token() -> None:
    assert (ONE.row_tokens, EMPTY.row_tokens) == (5, 0)
    assert replace(ONE, loss_mask=np.array([0, 0, 0, 1, 0, 0])).row_tokens == 3


@pytest.mark.parametrize(("encode", "decode"), [(wire.encode, wire.decode), (wire.encode_json, wire.decode_json)])
def test_a_group_survives_bytes_and_json(encode, decode) -> None:
    group = Group("0:7", 3, (ONE, EMPTY), metrics={"turns": 2.0})
    back = decode(Group, encode(group))
    assert (back.prompt_id, back.admitted_version, back.rejected, back.metrics) == ("0:7", 3, None, {"turns": 2.0})
    for sent, got in zip(group.trajectories, back.trajectories, strict=True):
        assert (got.reward, got.reason) == (sent.reward, sent.reason)
        for name in ("tokens", "loss_mask", "rollout_logprobs", "versions"):
            assert getattr(got, name).dtype == getattr(sent, name).dtype
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))


def test_rewards_by_name_stay_with_their_trajectory_as_long_as_they_are_its_reward() -> None:
    named = replace(ONE, reward={"right": 1.0, "form": 0.1, "length": 0.2})
    assert type(named.reward) is float and named.reward == pytest.approx(1.3)
    assert replace(named, reason="length").named_rewards == {"right": 1.0, "form": 0.1, "length": 0.2}
    assert replace(named, reward=0.5 * named.reward).named_rewards == {}
    assert (ONE.named_rewards, replace(ONE, named_rewards="none").named_rewards) == ({}, {})
    for encode, decode in ((wire.encode, wire.decode), (wire.encode_json, wire.decode_json)):
        [back] = decode(Group, encode(Group("0:7", 3, (named,)))).trajectories
        assert (back.reward, back.named_rewards) == (named.reward, named.named_rewards)


CHAIN = replace(ONE, episode=7, turns=[TurnEnd(4, 0.25), TurnEnd(np.int64(6), True, "shop", 3)], malformed_calls=1)


@pytest.mark.parametrize(("encode", "decode"), [(wire.encode, wire.decode), (wire.encode_json, wire.decode_json)])
def test_turns_episodes_and_agents_survive_bytes_and_json(encode, decode) -> None:
    sent = replace(CHAIN, agent="white")
    assert sent.turns == (TurnEnd(4, 0.25), TurnEnd(6, 1.0, "shop", 3))
    [back] = decode(Group, encode(Group("0:7", 3, (sent,)))).trajectories
    assert (back.episode, back.agent, back.turns, back.malformed_calls) == (7, "white", sent.turns, 1)
    assert all(type(turn.end) is int and type(turn.reward) is float for turn in back.turns)


def test_where_no_turns_are_given_each_run_of_generated_tokens_is_one() -> None:
    assert CHAIN.calls == CHAIN.turns
    assert ONE.calls == (TurnEnd(6),) and EMPTY.calls == ()
    assert replace(ONE, loss_mask=[False, True, True, False, True, False]).calls == (TurnEnd(3), TurnEnd(5))


@pytest.mark.parametrize("reward", [None, float("nan"), "much", {"a": 1, "b": "much"}, {"a": None}])
def test_a_turn_without_a_reward_that_is_a_number_costs_the_trajectory(reward) -> None:
    failed = replace(CHAIN, turns=[TurnEnd(4), TurnEnd(6, reward)])
    assert failed.unusable == "reward failed" and failed.reason.startswith("reward failed: turn 1: "), failed.reason
    assert failed.reward == 1.0 and np.isnan(failed.turns[1].reward)


def test_a_malformed_chain_stays_with_its_episode() -> None:
    wrong = replace(CHAIN, tokens=[3], agent="white")
    assert (wrong.unusable, wrong.episode, wrong.agent, wrong.turns, wrong.malformed_calls) == ("malformed", 7, "white", (), 0)


def test_an_episode_counts_once_and_is_left_out_as_a_whole() -> None:
    other = replace(ONE, reward=0.0, episode=2)
    group = Group("0:7", 3, (CHAIN, ONE, other, replace(CHAIN, turns=(), reason="length"), EMPTY))
    assert [len(chains) for chains in group.episodes] == [2, 1, 1, 1]
    assert group.episodes[0] == (group.trajectories[0], group.trajectories[3])
    assert group.rewards.tolist() == [2.25, 1.0, 0.0, 0.0]
    assert group.usable == (*group.episodes[0], ONE, other, EMPTY)
    long = replace(group.trajectories[3], reason="too long: 9 tokens")
    less = replace(group, trajectories=(CHAIN, ONE, other, long, EMPTY))
    assert less.usable == (ONE, other, EMPTY) and less.rewards.tolist() == [1.0, 0.0, 0.0]
    assert [verdict.unusable for verdict in less.verdicts] == ["too long", None, None, None] and less.verdicts[0] is long


def test_agents_of_one_episode_have_rewards_of_their_own() -> None:
    white, black = replace(CHAIN, agent="white"), replace(ONE, reward=-1.0, episode=7, agent="black")
    chains = (white, black, replace(white, turns=[TurnEnd(6, 0.5)]))
    assert [(part.agent, part.reward, part.turn_reward, len(part.chains)) for part in parts_of(chains)] == [
        ("white", 2.75, 1.75, 2), ("black", -1.0, 0.0, 1)]
    later = (replace(white, episode=8), replace(black, episode=8, reward=-0.5))
    group = Group("0:7", 3, (*chains, *later))
    assert group.rewards.tolist() == [(2.75 - 1.0) / 2, (2.25 - 0.5) / 2]
    assert group.reward_range(separate=False) == 3.75
    assert group.reward_range(separate=False, by_agent=True) == 0.5


def test_rewards_of_turns_stand_beside_those_that_have_names() -> None:
    named = replace(CHAIN, reward={"right": 1.0, "form": 0.5})
    plain = replace(named, turns=(), reward={"right": 0.0})
    assert named_rewards(parts_of((named,))) == [{"right": 1.0, "form": 0.5, "turns": 1.25}] and parts_of((named,))[0].reward == 2.75
    assert named_rewards([*parts_of((CHAIN,)), *parts_of((plain,))]) == [{"": 2.25}, {"right": 0.0}]
    assert named_rewards([*parts_of((named,)), *parts_of((plain,))])[1] == {"right": 0.0, "turns": 0.0}
    assert Group("0:7", 3, (named, replace(named, episode=8, turns=[TurnEnd(6, 1.0)]))).reward_range(separate=True) == 0.25


def test_an_episode_that_failed_has_no_tokens_and_says_why() -> None:
    failed = failed_trajectory("the agent hung", episode=3, agent="white")
    assert (failed.reason, failed.unusable, len(failed), failed.episode) == ("episode failed: the agent hung", "episode failed", 0, 3)
    assert Group("0:7", 3, (failed, ONE)).usable == (ONE,)
