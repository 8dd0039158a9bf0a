"""Accuracy: what counts as right, and when and on what it is measured. `tests/cli/test_evaluate.py` evaluates a real model."""

import asyncio
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from episode_samples import rewarded
from faults.workshop import Workshop
from offbeat.config.evaluate import EvaluateConfig
from offbeat.controller.best_model import check_known
from offbeat.controller.evaluate import Evaluator
from offbeat.controller.parts import SingleProcess
from offbeat.data import wire
from offbeat.data.dataset import ListDataset
from offbeat.data.row import Row
from offbeat.data.tokenizer import character_tokenizer
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import CodeError, DeadlineError, RolloutError
from offbeat.evaluation.files import newest_evaluation, read_samples
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.evaluation.scores import Evaluation
from offbeat.inference.sampling import Sampling
from offbeat.rollout.metric import Metric
from offbeat.rollout.outcomes import GroupListener
from small_run import REWARDS, SmallRun

METRICS = Path(__file__).parents[1] / "support" / "metrics.py"
ROWS = ListDataset(tuple(Row(f"{i}>", str(i)) for i in range(5)))
TOKENIZER = character_tokenizer()


class Rollouts:
    """Gives each row the reward that the test says; None could not be scored."""

    def __init__(self, rewards: list[float | list[float] | None], delay_s: float = 0.0) -> None:
        self.rewards, self.delay_s = rewards, delay_s
        self.asked: tuple[list[Row], int, Sampling] | None = None
        self.sampling = Sampling(6, temperature=1.0, top_p=0.9, stop=("\n",))

    async def rollout_batch(
        self, rows: Iterable[Row], *, group_size: int, sampling: Sampling, listener: GroupListener,
    ) -> list[Group]:
        self.asked = (list(rows), group_size, sampling)
        await asyncio.sleep(self.delay_s)
        groups = [self._group(i, self.rewards[i]) for i in range(len(self.asked[0]))]
        for group in groups:
            listener.on_played(group)
        return groups

    def _group(self, index: int, reward: float | list[float] | None) -> Group:
        if reward is None:
            return Group(f"batch:{index}", 0, rejected="CodeError: no number")
        one = np.ones(1)
        rewards = reward if isinstance(reward, list) else [reward]
        return Group(f"batch:{index}", 0, tuple(Trajectory(one, one, one, one, each) for each in rewards))


def evaluator(rollouts: Rollouts, **changes: object) -> Evaluator:
    return Evaluator(rollouts, ROWS, EvaluateConfig(**changes), SingleProcess(), tokenizer=TOKENIZER)


def without_intervals(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, intervals={})


def test_accuracy_is_the_share_of_full_rewards_and_failures_count_as_wrong() -> None:
    rollouts = Rollouts([1.0, 0.5, None, 2.0, 0.0])
    evaluation = asyncio.run(evaluator(rollouts).run())
    assert without_intervals(evaluation) == Evaluation(accuracy=0.4, reward_mean=0.7, num_prompts=5, num_failed=1)
    named = {"eval/accuracy": 0.4, "eval/reward_mean": 0.7, "eval/failed_prompts": 1.0}
    ends = {f"eval/{name}_{end}" for name in ("accuracy", "reward_mean") for end in ("low", "high")}
    assert evaluation.metrics().items() >= named.items() and evaluation.metrics().keys() == named.keys() | ends
    assert rollouts.asked == ([ROWS.row(i) for i in range(5)], 1, Sampling(6, 0.0, top_p=0.9, stop=("\n",)))


def test_a_reward_that_is_no_number_is_a_failure_and_leaves_the_mean_a_number() -> None:
    evaluation = asyncio.run(evaluator(Rollouts([1.0, float("nan"), 0.5, float("inf"), 0.0])).run())
    assert without_intervals(evaluation) == Evaluation(accuracy=0.2, reward_mean=0.3, num_prompts=5, num_failed=2)


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
    assert not Evaluator(Rollouts([]), ListDataset(()), EvaluateConfig(), SingleProcess(), tokenizer=TOKENIZER).due(0, last=True)


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


def test_a_set_with_a_name_has_metrics_of_its_own() -> None:
    rollouts = Rollouts([[1.0, 0.0]] * 5)
    config = EvaluateConfig(samples_per_prompt=2, temperature=1.0, pass_at=(2,))
    evaluation = asyncio.run(Evaluator(rollouts, ROWS, config, SingleProcess(), tokenizer=TOKENIZER, name="hard").run())
    metrics = evaluation.metrics()
    assert {name: metrics[f"eval/hard/{name}"] for name in ("accuracy", "reward_mean", "failed_prompts", "pass_at_2")} == {
        "accuracy": 0.5, "reward_mean": 0.5, "failed_prompts": 0.0, "pass_at_2": 1.0}
    assert metrics["eval/hard/pass_at_2_low"] < 1 and metrics["eval/hard/pass_at_2_high"] == pytest.approx(1) and len(metrics) == 10
    assert str(evaluation).startswith("accuracy on hard 0.500 (")


def test_each_group_is_told_of_and_all_answers_can_be_kept() -> None:
    kept: list[EvaluatedSet] = []
    told: list[tuple[int, int]] = []

    async def keep(played: EvaluatedSet) -> None:
        kept.append(played)

    rollouts = Rollouts([1.0, None, 0.5, 1.0, 0.0])
    asyncio.run(evaluator(rollouts).run(keep))
    assert asyncio.run(evaluator(rollouts).play(lambda *counts: told.append(counts))) == kept[0]
    assert told == [(1, 1), (0, 0), (0, 1), (1, 1), (0, 1)]
    [played] = kept
    assert [[sample.reward for sample in prompt.samples] for prompt in played.prompts] == [[1.0], [], [0.5], [1.0], [0.0]]
    assert played.prompts[1].failure == "CodeError: no number" and played.prompts[2].row == ROWS.row(2)


def test_what_goes_wrong_on_a_set_names_it() -> None:
    with pytest.raises(RolloutError, match="none of 5 prompts of the evaluation set 'hard' could be evaluated"):
        asyncio.run(Evaluator(Rollouts([None] * 5), ROWS, EvaluateConfig(), SingleProcess(), tokenizer=TOKENIZER, name="hard").run())
    with pytest.raises(DeadlineError, match="waiting for evaluation of hard passed its deadline"):
        asyncio.run(Evaluator(
            Rollouts([1.0] * 5, delay_s=60), ROWS, EvaluateConfig(timeout_s=0.05), SingleProcess(), tokenizer=TOKENIZER, name="hard").run())


def test_an_evaluation_says_how_each_agent_did() -> None:
    class Played(Rollouts):
        def _group(self, index: int, reward: float | list[float] | None) -> Group:
            return rewarded({"x": 1.0, "o": 0.0}) if index else rewarded({"x": 1.0, "o": 1.0})

    evaluation = asyncio.run(Evaluator(Played([0.0] * 5), ROWS, EvaluateConfig(), SingleProcess(), tokenizer=TOKENIZER, name="games").run())
    assert evaluation.by_agent == {"o": 0.2, "x": 1.0} and evaluation.accuracy == 0.2
    assert evaluation.metrics()["eval/games/accuracy/x"] == 1.0
    assert evaluation.shares_text == ", o 0.200, x 1.000"
    assert wire.decode(Evaluation, wire.encode(evaluation)) == evaluation


def test_what_a_sets_own_metric_finds_is_beside_its_scores_and_its_failure_costs_itself() -> None:
    class Own:
        async def measure(self, answered: EvaluatedSet) -> dict[str, float]:
            if answered.rewards.mean() == 1:
                raise CodeError("no")
            return {"f1": 0.25}

    def evaluated(rewards: list[float]) -> Evaluation:
        rollouts = Rollouts([*rewards])
        return asyncio.run(Evaluator(
            rollouts, ROWS, EvaluateConfig(), SingleProcess(), tokenizer=TOKENIZER, name="own", metric=cast(Metric, Own())).run())

    found, failed = evaluated([1.0, 0.0, 0.0, 0.0, 1.0]), evaluated([1.0] * 5)
    assert found.metrics()["eval/own/f1"] == 0.25 and not found.own_failure
    assert (failed.own, failed.own_failure, failed.accuracy) == ({}, "no", 1.0)
    check_known(found, "eval/own/f1")
    check_known(found, "eval/f1")
    check_known(failed, "eval/own/f2")


@pytest.mark.drill
def test_a_run_evaluates_each_set_as_it_asks_and_goes_on_with_them(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": f"{i}"}) + "\n" for i in range(3)))
    sets = {
        "evaluate__sets__file__data__path": str(rows), "evaluate__sets__file__every_steps": "1",
        "evaluate__sets__many__samples_per_prompt": "2", "evaluate__sets__many__pass_at": "[1, 2]",
        "evaluate__sets__many__temperature": "1.0", "evaluate__sets__many__rollout__reward": f"{REWARDS}:right",
        "evaluate__sets__file__metric": f"{METRICS}:mean_length", "evaluate__sets__many__metric": f"{METRICS}:raises"}
    run = SmallRun(tmp_path, model_dir)
    done = shop.train(run, **sets)
    assert done.code == 0, done.error
    evaluated = [(event["global_step"], next(iter(event.keys() - {"time_s", "kind", "global_step"}))) for event in run.events("evaluation")]
    assert [step for step, _ in evaluated] == [0, 0, 0, 1, 2, 2, 2]
    last = run.metrics()[-1]
    assert 0 <= last["eval/accuracy"] <= 1 and 0 <= last["eval/file/accuracy"] <= 1
    # The set's own reward finds every sample right, and the run's does not see its prompts.
    assert last["eval/many/accuracy"] == last["eval/many/pass_at_2"] == last["eval/many/reward_mean"] == 1
    assert "eval/file/accuracy" in run.metrics()[0] and "eval/many/accuracy" not in run.metrics()[0]
    assert last["eval/many/pass_at_2_low"] < 0.9 and last["eval/many/pass_at_2_high"] == pytest.approx(1)
    assert last["eval/file/mean_length"] > 0
    assert len(run.events("metric_failed")) == 2 and "accuracy on many: evaluate.metric failed: the metric" in "\n".join(done.said)
    files = newest_evaluation(run.folder)
    assert {name: path.name for name, path in files.items()} == {
        "": "step-000002.jsonl.zst", "file": "step-000002-file.jsonl.zst", "many": "step-000002-many.jsonl.zst"}
    many = read_samples(files["many"])[""]["many"]
    assert many.accuracies.mean() == 1 and many.num_samples == 2 and all(prompt.samples[0].num_tokens for prompt in many.prompts)
    assert "accuracy on many 1.000 after step 2 (4 prompts), pass@1 1.000, pass@2 1.000" in done.said
    result = json.loads((run.folder / "result.json").read_text())
    assert result["sets"]["many"] == {"before": 1, "after": 1, "after_step": 2} and result["sets"].keys() == {"file", "many"}
    assert "accuracy on many" in (run.folder / "report.html").read_text()
    again = shop.train(run, run__total_steps="3", **sets | {"evaluate__sets__file__every_steps": "2"})
    assert again.code == 0, again.error
    assert any(line.startswith("continues with ") and "every_steps = 2" in line for line in again.said), again.said
    result = json.loads((run.folder / "result.json").read_text())
    assert result["sets"]["many"] == {"before": 1, "after": 1, "after_step": 3}


def test_the_best_model_is_kept_and_a_run_ends_when_nothing_is_gained_any_more(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    settings = {
        "run__total_steps": "9", "evaluate__every_steps": "1", "evaluate__sets__rising__rollout__reward": f"{REWARDS}:rises",
        "evaluate__keep_best": "eval/rising/accuracy", "evaluate__stop_after_no_gain": "2", "checkpoint__every_steps": "0"}
    done = shop.train(run, **settings)
    assert done.code == 0, done.error
    # Of four answers each: none right before the first step, three after it, then all.
    assert [row["eval/rising/accuracy"] for row in run.metrics()] == [0.75, 1, 1, 1]
    assert (
        "eval/rising/accuracy has not risen above 1.000, of step 2, in 2 evaluations, so step 4 is the last" in done.said), done.said
    result = json.loads((run.folder / "result.json").read_text())
    assert (result["steps"], result["stopped_early"]) == (4, False)
    assert result["best"] == {"metric": "eval/rising/accuracy", "value": 1, "global_step": 2, "num_since": 2}
    assert [event["global_step"] for event in run.events("checkpoint")] == [1, 2, 4], "a checkpoint with each that is the best so far"
    assert (run.folder / "best" / "model.safetensors").exists()
    again = shop.train(run, **settings)
    assert again.code == 2 and "ended after 4 steps, as eval/rising/accuracy had not risen in 2 evaluations; raise" in again.error
    # As if the run had ended between the checkpoint of its best step and the export.
    for folder in ("best", "checkpoints/step-00000004"):
        shutil.rmtree(run.folder / folder)
    on = shop.train(run, **settings | {"run__total_steps": "3"})
    assert on.code == 0 and run.metrics()[-1]["eval/rising/accuracy"] < 1, on.error
    assert (run.folder / "best" / "model.safetensors").exists()
