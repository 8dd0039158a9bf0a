"""The best and the worst sample of a step, for a person."""

import math

import numpy as np

from offbeat.controller.samples import best_and_worst, sample_table
from offbeat.data.pieces import Pieces
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory

TOKENIZER = character_tokenizer()


def sample(prompt: str, answer: str, reward: float, *, reason: str = "stop", episode: int | None = None) -> Trajectory:
    given, wrote = TOKENIZER.encode(prompt), TOKENIZER.encode(answer)
    mask = np.array([False] * len(given) + [True] * len(wrote))
    return Trajectory(
        np.array(given + wrote, np.int32), mask, np.where(mask, -0.5, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32),
        reward, reason, episode=episode)


def test_the_largest_and_the_smallest_reward_are_shown_with_what_was_given_and_written():
    groups = [
        Group("0:7", 0, (sample("31>", "13", 1.0), sample("31>", "31", 0.25))),
        Group("0:8", 0, (sample("20>", "22", 0.5, reason="length"), sample("20>", "2", 0.0, reason="reward failed: x"))),
        Group("0:9", 0, rejected="the engine said no")]
    assert best_and_worst(12, groups, TOKENIZER).splitlines() == [
        "best of 3 samples of step 12: reward 1, prompt 0:7, 5 tokens, ended by stop", "  given │ 31>", "  wrote │ 13",
        "worst of 3 samples of step 12: reward 0.25, prompt 0:7, 5 tokens, ended by stop", "  given │ 31>", "  wrote │ 31"]


def test_equal_rewards_have_one_sample_and_a_step_without_samples_says_so():
    assert "worst" not in best_and_worst(1, [Group("0:0", 0, (sample("1>", "1", 0.5), sample("1>", "2", 0.5)))], TOKENIZER)
    assert best_and_worst(1, [Group("0:0", 0, rejected="no")], TOKENIZER) == "step 1 had no samples that can be trained on"


def test_long_texts_are_cut_and_each_line_is_indented():
    lines = best_and_worst(1, [Group("0:0", 0, (sample("12\n" * 1000, "3\n4" * 900, 1.0),))], TOKENIZER).splitlines()
    assert lines[1].startswith("  given │ … ") and lines[-1].endswith(" …") and all(line[8] == "│" for line in lines[1:])
    assert 3000 < len("".join(lines)) < 20_000


def test_a_table_has_samples_from_the_largest_reward_to_the_smallest_whichever_prompts_they_answer() -> None:
    groups = [Group("0:0", 0, tuple(sample("31>", "13", i / 64) for i in range(40))), Group("0:1", 0, (sample("2>", "2", 0.75),))]
    rows = [Row(prompt="31>", answer="13"), Row(prompt="2>", answer="2")]
    table = sample_table(groups, rows, Pieces(TOKENIZER)).rows
    assert len(table) == 16 and table[0] == (0.75, "2>", "2", "2", "stop", 1, "0:1")
    rewards = [row[0] for row in table]
    assert rewards == sorted(rewards, reverse=True) and (rewards[1], rewards[-1]) == (37 / 64, 0.0)


def test_a_table_of_few_samples_has_them_all_and_those_without_a_reward_last() -> None:
    failed = sample("31>", "4" * 5000, math.nan, reason="reward failed: x")
    table = sample_table([Group("0:0", 0, (failed, sample("31>", "", -1.0)))], [Row(prompt="31>", answer="13")], Pieces(TOKENIZER)).rows
    assert [(row[0], row[4]) for row in table] == [(-1.0, "stop"), (None, "reward failed: x")] and len(table[1][2]) == 4000
    assert sample_table([], [], Pieces(TOKENIZER)).rows == []


def test_what_would_act_on_a_terminal_is_replaced(monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "decode", lambda *_, **__: "a\x1b[31m\rb\tc\u202e\nd")
    text = best_and_worst(1, [Group("0:0", 0, (sample("1", "2", 1.0),))], TOKENIZER)
    assert "a\ufffd[31m\ufffdb c\ufffd" in text and not set(text) & set("\x1b\r\t\u202e")
