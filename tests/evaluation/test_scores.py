"""Scores of a set, against counting by hand."""

import itertools

import numpy as np
import pytest

from episode_samples import rewarded
from evaluation.played import played
from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group
from offbeat.evaluation.intervals import mean_interval, share_interval
from offbeat.evaluation.samples import read_group
from offbeat.evaluation.scores import Evaluation, accuracy_by_agent, pass_at_k, score_set


def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_right_one() -> None:
    for n, right in itertools.product(range(1, 8), range(8)):
        for k in range(1, n + 1) if right <= n else ():
            choices = list(itertools.combinations(range(n), k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(min(choice) < right for choice in choices) / len(choices)), (n, right, k)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)


def test_every_score_has_an_interval_over_prompts_and_missing_answers_are_wrong() -> None:
    answered = played([[1.0, 0.0, 1.0, 0.5], [None, 1.0, None, 0.0], [], [0.0] * 4], name="hard", num_samples=4, pass_at=(1, 4))
    evaluation = score_set(answered)
    assert (evaluation.num_prompts, evaluation.num_failed) == (4, 1)
    assert (evaluation.accuracy, evaluation.reward_mean) == (3 / 16, 3.5 / 16)
    assert evaluation.pass_at == {1: 3 / 16, 4: 2 / 4}
    assert evaluation.intervals == {
        "accuracy": share_interval(np.array([0.5, 0.25, 0, 0]), num_samples=4),
        "reward_mean": mean_interval(np.array([2.5, 1, 0, 0]) / 4),
        "pass_at_1": share_interval(np.array([0.5, 0.25, 0, 0]), num_samples=4),
        "pass_at_4": share_interval(np.array([1.0, 1, 0, 0]), num_samples=4)}
    assert evaluation.metrics()["eval/hard/pass_at_4_low"] == evaluation.intervals["pass_at_4"][0]
    assert wire.decode(Evaluation, wire.encode(evaluation)) == evaluation


def test_what_an_own_metric_finds_stands_beside_the_others() -> None:
    evaluation = score_set(played([[1.0], [0.0]])).with_own({"f1": 0.25})
    assert evaluation.metrics()["eval/f1"] == 0.25 and evaluation.shares_text == ", f1 0.250"


def test_agents_that_play_together_have_an_accuracy_each_and_failed_episodes_count_as_wrong() -> None:
    nan = float("nan")
    groups = [rewarded({"x": 1.0, "o": -1.0}, {"x": 1.0, "o": 1.0}), rewarded({"x": 0.0, "o": 1.0}, {"x": nan, "o": 1.0})]

    def accuracies(groups: list[Group]) -> dict[str, float]:
        return accuracy_by_agent([read_group(Row("?", ""), group, character_tokenizer()) for group in groups], num_samples=2)

    assert accuracies(groups) == {"o": 2 / 4, "x": 2 / 4}
    assert accuracies([*groups, Group("batch:2", 0, rejected="timed out")]) == {"o": 2 / 6, "x": 2 / 6}
    assert accuracies([rewarded({"x": 1.0}, {"o": 1.0})]) == {}, "no two of them play an episode"
