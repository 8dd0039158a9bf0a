"""What is kept of a step's rollouts."""

import json
from dataclasses import replace

import numpy as np

from offbeat.algorithms.distillation import TeacherScores, with_teacher
from offbeat.algorithms.experience import make_batch
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data import wire
from offbeat.data.pieces import Pieces
from offbeat.data.reward import FailedReward
from offbeat.data.rollout_records import keep, keep_lines, keep_rejected_line, trained_columns
from offbeat.data.row import Row
from offbeat.data.stored_rollouts import KeptGroup, KeptTurn
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory, TurnEnd

TOKENIZER = character_tokenizer()
PIECES = Pieces(TOKENIZER)
ROW = Row("31>", "13")


def trajectory(answer: str, reward: float, *, reason: str = "stop", logprob: float = -0.25) -> Trajectory:
    prompt, generated = TOKENIZER.encode("31>"), [*TOKENIZER.encode(answer), 0]
    mask = np.array([False] * len(prompt) + [True] * len(generated))
    return Trajectory(
        np.array(prompt + generated), mask, np.where(mask, logprob, 0.0), np.where(mask, 4, -1), reward=reward, reason=reason)


def columns(groups: list[Group], **settings: object):
    batch = make_batch(groups, config=AlgorithmConfig(**settings), max_new_tokens=8)
    return trained_columns(groups, batch)


def test_each_trajectory_has_its_own_advantages_and_those_left_out_have_none() -> None:
    mixed = Group("0:0", 4, (
        trajectory("13", 1.0), trajectory("31", 0.0), trajectory("9", 0.0, reason="too long: 9 tokens"), trajectory("13", 1.0)))
    flat = Group("0:1", 4, (trajectory("13", 1.0), trajectory("1", 1.0)))
    found = columns([mixed, flat])
    assert sorted(found) == [(0, 0), (0, 1), (0, 3)]
    advantages = {place: set(np.round(values["advantages"].astype(float), 4).tolist()) for place, values in found.items()}
    assert advantages[0, 0] == advantages[0, 3] == {0.5773} and advantages[0, 1] == {-1.1547}
    assert len(found[0, 0]["advantages"]) == 3
    assert sorted(columns([mixed, flat], drop_zero_advantage=False)) == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1)]


def test_equal_texts_are_told_apart_by_their_log_probabilities() -> None:
    group = Group("0:0", 0, (trajectory("13", 0.5, logprob=-1.0), trajectory("13", 0.0), trajectory("13", 1.0, logprob=-2.0)))
    found = columns([group])
    assert sorted(found) == [(0, 1), (0, 2)], "the one with the mean reward has no advantage"


def test_trajectories_are_found_in_a_batch_of_a_teachers_tokens_which_has_nothing_to_keep_of_theirs() -> None:
    group = Group("0:0", 4, (trajectory("13", 1.0), trajectory("9", 0.0, reason="too long: 9 tokens"), trajectory("31", 0.0)))
    config = AlgorithmConfig(preset="opd", objective="forward_kl", filters=[])
    batch = make_batch([group], config=config, max_new_tokens=8)
    tops = np.stack([batch.targets, batch.targets + 1], axis=1)
    logs = np.log(np.full(tops.shape, 0.5, np.float32))
    scores = TeacherScores(logs[:, 0], np.zeros(2, bool), tops, logs)
    taught = with_teacher(batch, scores, config)
    assert taught.num_targets == 2 * batch.num_targets
    assert trained_columns([group], taught) == {(0, 0): {}, (0, 2): {}}


def test_a_line_has_the_text_the_rewards_and_what_the_step_computed() -> None:
    group = Group("2:7", 3, (trajectory("13", 1.0), trajectory("1", 0.0), trajectory("", float("nan"))))
    batch = make_batch([group], config=AlgorithmConfig(), max_new_tokens=8)
    batch = batch.with_columns(prox_logprobs=np.full(batch.num_targets, -0.123456789))
    (line,) = keep_lines([group], [ROW], batch, PIECES, step=12)
    assert b"\n" not in line and json.loads(line)["step"] == 12
    kept = wire.decode_json(KeptGroup, line)
    assert (kept.prompt_id, kept.prompt, kept.answer, kept.rejected, kept.admitted_version) == ("2:7", "31>", "13", None, 3)
    first, second, failed = kept.trajectories
    assert (first.text, first.lengths, first.reward, first.trained) == ("31>13<eos>", [1, 1, 1, 1, 1, 5], 1.0, True)
    assert first.pieces == ["3", "1", ">", "1", "3", "<eos>"] and first.completion == "13<eos>"
    assert first.rollout_logprobs == [0, 0, 0, -0.25, -0.25, -0.25] and first.versions == [-1, -1, -1, 4, 4, 4]
    assert first.prox_logprobs == [0, 0, 0, -0.12346, -0.12346, -0.12346] and first.ref_logprobs == []
    assert first.advantages[:3] == [0, 0, 0] and first.advantages[3] > 0 > second.advantages[3]
    assert (failed.reward, failed.trained, failed.advantages) == (None, False, [])
    assert failed.reason.startswith("reward failed")


def test_a_rejected_group_has_its_samples_and_the_reason() -> None:
    group = Group("0:3", 1, (trajectory("13", 1.0, logprob=float("nan")), trajectory("13", 1.0)))
    line = keep_rejected_line(9, group, ROW, PIECES, reason="all rewards are 1", why="equal rewards", drawn_again=False)
    kept = wire.decode_json(KeptGroup, line)
    assert (kept.rejected, kept.why, kept.step, kept.drawn_again) == ("all rewards are 1", "equal rewards", 9, False)
    assert kept.trajectories[0].rollout_logprobs == [0, 0, 0, None, None, None]
    assert not any(t.trained for t in kept.trajectories)


def test_a_turn_whose_reward_failed_is_kept_without_one_and_the_line_can_be_read() -> None:
    turns = (TurnEnd(4, 0.5, "start"), TurnEnd(6, FailedReward("the judge was away"), order=1))
    group = Group("0:3", 1, (replace(trajectory("13", 1.0), turns=turns), trajectory("13", 1.0)))
    assert group.trajectories[0].unusable is not None
    line = keep_rejected_line(1, group, ROW, PIECES, reason="one sample is left", why="reward failed", drawn_again=True)
    first, _ = wire.decode_json(KeptGroup, line).trajectories
    assert first.turns == (KeptTurn(4, 0.5, "start"), KeptTurn(6, None, order=1)) and "the judge was away" in first.reason


def test_half_a_surrogate_pair_of_user_code_is_kept_as_its_escape() -> None:
    half = "x\ud800"
    played = replace(trajectory("13", 1.0), agent=half, turns=(TurnEnd(6, 0.0, half),))
    line = keep_rejected_line(1, Group("0:3", 1, (played,)), Row(half, half), PIECES, reason="no", why="not accepted", drawn_again=False)
    kept = wire.decode_json(KeptGroup, line)
    assert kept.prompt == kept.answer == kept.trajectories[0].agent == kept.trajectories[0].turns[0].state == "x\\ud800"


def test_a_chat_is_kept_as_text() -> None:
    row = Row(({"role": "system", "content": "be brief"}, {"role": "user", "content": "3+4"}), "7")
    assert keep(Group("0:0", 0), row, PIECES, step=1, columns={}).prompt == "system: be brief\nuser: 3+4"
