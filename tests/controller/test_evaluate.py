"""Held-out accuracy: what counts as right, and when it is measured. `tests/cli/test_evaluate.py` evaluates a real model."""

import asyncio
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from offbeat.config.controller import EvaluateConfig
from offbeat.controller.evaluate import Evaluation, Evaluator, pass_at_k
from offbeat.controller.parts import SingleProcess
from offbeat.data import wire
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import DeadlineError, RolloutError
from offbeat.inference.sampling import Sampling

ROWS = ListDataset(tuple(Row(f"{i}>", str(i)) for i in range(5)))


class Rollouts:
    """Gives each row the reward that the test says; None could not be scored."""

    def __init__(self, rewards: list[float | list[float] | None], delay_s: float = 0.0) -> None:
        self.rewards, self.delay_s = rewards, delay_s
        self.asked: tuple[list[Row], int, Sampling] | None = None
        self.sampling = Sampling(6, temperature=1.0, top_p=0.9, stop=("\n",))

    async def rollout_batch(self, rows: Iterable[Row], *, group_size: int, sampling: Sampling) -> list[Group]:
        self.asked = (list(rows), group_size, sampling)
        await asyncio.sleep(self.delay_s)
        return [self._group(i, self.rewards[i]) for i in range(len(self.asked[0]))]

    def _group(self, index: int, reward: float | list[float] | None) -> Group:
        if reward is None:
            return Group(f"batch:{index}", 0, rejected="CodeError: no number")
        one = np.ones(1)
        rewards = reward if isinstance(reward, list) else [reward]
        return Group(f"batch:{index}", 0, tuple(Trajectory(one, one, one, one, each) for each in rewards))


def evaluator(rollouts: Rollouts, **changes: object) -> Evaluator:
    return Evaluator(rollouts, ROWS, EvaluateConfig(**changes), SingleProcess())


def test_accuracy_is_the_share_of_full_rewards_and_failures_count_as_wrong() -> None:
    rollouts = Rollouts([1.0, 0.5, None, 2.0, 0.0])
    evaluation = asyncio.run(evaluator(rollouts).run())
    assert evaluation == Evaluation(accuracy=0.4, reward_mean=0.7, num_prompts=5, num_failed=1)
    named = {"eval/accuracy": 0.4, "eval/reward_mean": 0.7, "eval/failed_prompts": 1.0}
    assert evaluation.metrics() == named | {"eval/accuracy_low": evaluation.interval[0], "eval/accuracy_high": evaluation.interval[1]}
    assert rollouts.asked == ([ROWS.row(i) for i in range(5)], 1, Sampling(6, 0.0, top_p=0.9, stop=("\n",)))


def test_a_reward_that_is_no_number_is_a_failure_and_leaves_the_mean_a_number() -> None:
    evaluation = asyncio.run(evaluator(Rollouts([1.0, float("nan"), 0.5, float("inf"), 0.0])).run())
    assert evaluation == Evaluation(accuracy=0.2, reward_mean=0.3, num_prompts=5, num_failed=2)


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.278), (5, 0.237, 0.763), (10, 0.722, 1.0)])
def test_the_interval_is_wilsons(right: int, low: float, high: float) -> None:
    # Of 10 prompts, from the formula solved by hand as a quadratic in the share.
    assert Evaluation(right / 10, 0.0, 10, 0).interval == pytest.approx((low, high), abs=5e-4)


def test_fewer_prompts_can_be_asked_for() -> None:
    assert asyncio.run(evaluator(Rollouts([1.0, 1.0]), num_prompts=2).run()).num_prompts == 2


def test_when_nothing_can_be_scored_the_first_reason_is_told() -> None:
    with pytest.raises(RolloutError, match="none of 5 held-out prompts could be evaluated; the first because of CodeError: no number"):
        asyncio.run(evaluator(Rollouts([None] * 5)).run())


def test_an_evaluation_has_a_deadline() -> None:
    with pytest.raises(DeadlineError, match="waiting for evaluation passed its deadline"):
        asyncio.run(evaluator(Rollouts([1.0] * 5, delay_s=60), timeout_s=0.05).run())


def test_evaluations_are_due_every_few_steps_and_at_the_end() -> None:
    every = evaluator(Rollouts([]), every_steps=2)
    assert [step for step in range(1, 6) if every.due(step, last=step == 5)] == [2, 4, 5]
    ends = evaluator(Rollouts([]), every_steps=0)
    assert [step for step in range(1, 6) if ends.due(step, last=step == 5)] == [5]
    assert not Evaluator(Rollouts([]), ListDataset(()), EvaluateConfig(), SingleProcess()).due(0, last=True)


def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_right_one() -> None:
    for n, right in itertools.product(range(1, 8), range(8)):
        for k in range(1, n + 1) if right <= n else ():
            choices = list(itertools.combinations(range(n), k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(min(choice) < right for choice in choices) / len(choices)), (n, right, k)
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)


def test_several_samples_per_prompt_make_the_accuracy_a_mean_and_failed_ones_count_as_wrong() -> None:
    nan = float("nan")
    rollouts = Rollouts([[1.0, 0.0, 0.0, 2.0], [nan, 1.0, nan, 0.5], None, [0.0] * 4, [nan] * 4])
    evaluation = asyncio.run(evaluator(rollouts, samples_per_prompt=4, pass_at=(1, 2, 4), temperature=0.5).run())
    assert (evaluation.num_prompts, evaluation.num_failed) == (5, 2)
    assert (evaluation.accuracy, evaluation.reward_mean) == pytest.approx((3 / 20, 4.5 / 20))
    assert evaluation.pass_at == pytest.approx({1: 3 / 20, 2: (5 / 6 + 1 / 2) / 5, 4: 2 / 5})
    assert evaluation.metrics()["eval/pass_at_2"] == evaluation.pass_at[2]
    assert str(evaluation).endswith("with 95 % confidence), pass@1 0.150, pass@2 0.267, pass@4 0.400")
    assert rollouts.asked is not None and rollouts.asked[1] == 4
    assert wire.decode(Evaluation, wire.encode(evaluation)) == evaluation
