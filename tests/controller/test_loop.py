"""What the loop does, read from the records of real runs."""

import asyncio
import io
import json
from html import unescape
from pathlib import Path

import pytest

from faults.workshop import Workshop
from offbeat.checkpoint.recover import CheckpointIndex
from offbeat.controller.evaluate import Evaluator
from offbeat.controller.state import SavedState
from offbeat.dashboard.report import write_report
from offbeat.data.batch import Batch
from offbeat.data.stored_rollouts import read_rollouts
from offbeat.data.trajectory import Group
from offbeat.data.wire import decode_json
from offbeat.errors import PublishError, RolloutError
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.ranks.trainers import Trainers
from offbeat.rollout.executor import RolloutExecutor
from offbeat.runs.run import run_training
from offbeat.telemetry.console import Console
from offbeat.telemetry.trace import read_trace
from offbeat.weights.proof import Outcome, ProofJudge, Verdict
from offbeat.weights.protocol import Manifest, Proof
from small_run import REWARDS, SmallRun, small_config


def test_every_step_trains_on_full_groups_within_the_bound_and_publishes_the_next_version(finished_run: SmallRun) -> None:
    for step in (1, 2):
        groups = finished_run.groups(step)
        assert [len(group["trajectories"]) for group in groups] == [2, 2]
        for trajectory in (t for group in groups for t in group["trajectories"]):
            generated = [version for version in trajectory["versions"] if version >= 0]
            assert generated
            assert all(0 <= step - 1 - version <= 1 for version in generated)
    assert [event["version"] for event in finished_run.events("publish")] == [0, 1, 2]
    assert all(event["canary_gap"] < 1e-3 and not event["quarantined"] for event in finished_run.events("publish"))
    assert [event["global_step"] for event in finished_run.events("evaluation")] == [0, 2]
    assert [event["global_step"] for event in finished_run.events("checkpoint")] == [2]


def test_rollouts_are_kept_from_the_first_step_on_with_their_texts_and_advantages(finished_run: SmallRun) -> None:
    groups = list(read_rollouts(finished_run.folder))
    assert [group.step for group in groups] == [1, 1, 2, 2]
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.text.startswith(next(group.prompt for group in groups if trajectory in group.trajectories))
        assert "".join(trajectory.pieces) == trajectory.text and len(trajectory.pieces) == len(trajectory.tokens)
    for group in groups:
        rewards = {t.reward for t in group.trajectories}
        assert all(t.trained == (len(rewards) > 1) for t in group.trajectories)
    (better, worse), = [sorted(group.trajectories, key=lambda t: -(t.reward or 0)) for group in groups if group.trajectories[0].trained][:1]
    assert better.advantage is not None and worse.advantage is not None and better.advantage > 0 > worse.advantage


def test_a_checkpoint_remembers_what_was_chosen_where_the_configuration_leaves_it_open(finished_run: SmallRun) -> None:
    newest = CheckpointIndex(finished_run.folder / "checkpoints").newest()
    assert newest is not None
    identity = decode_json(SavedState, newest.payload).identity
    assert identity is not None and identity.settings["train.precision"] == "float32"


def test_staleness_stays_within_the_bound_over_many_steps(stopped_run: SmallRun) -> None:
    rows = stopped_run.metrics()
    assert len(rows) > 2
    assert all(row["rollout/staleness_max_versions"] <= 1 for row in rows)
    trained = [group["prompt_id"] for row in rows for group in stopped_run.groups(row["global_step"])]
    assert len(set(trained)) == len(trained) == 2 * len(rows)


def test_the_time_line_shows_trainer_and_engine_beside_the_controller(finished_run: SmallRun) -> None:
    spans = read_trace(finished_run.folder / "trace.json")
    assert {"controller", "rank 0", "engine 0"} <= {span.track for span in spans}
    own = [span.name for span in spans if span.track == "controller" and span.name in ("rollout", "advantage", "train", "publish")]
    assert own == ["rollout", "advantage", "train", "publish"] * 2


def test_a_run_is_told_of_equal_rewards_and_a_slow_first_step_on_the_console_in_its_events_and_in_its_report(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.controller.step_record.LATE_S", 0.0)
    printed = io.StringIO()
    shop.run(small_config(tmp_path, model_dir, run__total_steps="5", rollout__reward=f"{REWARDS}:right"), Console("plain", stream=printed))
    run = SmallRun(tmp_path, model_dir)
    slow, told = [
        event["text"] for event in run.events("advice") if not ("publishing" in event["text"] or "chat template" in event["text"])]
    assert slow.startswith("the first step takes more than 30 s on CPUs: it has 2 prompts of 2 samples") and slow in printed.getvalue()
    assert told.startswith("all groups of the last 5 steps had equal rewards (1 in each), so there was nothing to learn from: every")
    assert printed.getvalue().count(told) == 1
    assert told in unescape(write_report(run.folder).read_text())


@pytest.mark.drill
def test_a_publish_that_fails_beside_the_loop_ends_the_run_with_the_engines_reason(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = ProofJudge.judge

    def refuse_from_2(self: ProofJudge, engine: str, wanted: Manifest, proof: Proof) -> Verdict:
        return judge(self, engine, wanted, proof) if wanted.version < 2 else Verdict(Outcome.REFUSED, 0.0, "it is not to my taste")

    monkeypatch.setattr(ProofJudge, "judge", refuse_from_2)
    config = small_config(
        tmp_path, model_dir, run__total_steps="9", inference__heal_timeout_s="0.2", rollout__max_failures_in_a_row="10000",
        rollout__max_retries="10000")
    with pytest.raises(PublishError, match="version 2 is served by 0 engines, fewer than the 1 needed: engine 0: it is not to my taste"):
        run_training(config, Console("quiet"))
    assert [event["version"] for event in SmallRun(tmp_path, model_dir).events("publish")] == [0, 1]


def test_batches_are_made_while_the_step_before_trains(stopped_run: SmallRun) -> None:
    spans = read_trace(stopped_run.folder / "trace.json")
    ahead = {span.args["step"]: span for span in spans if span.name == "make_ahead"}
    trains = {span.args["step"]: span for span in spans if span.track == "controller" and span.name == "train"}
    assert ahead, "engines are ahead of the trainer in some step"
    for step, span in ahead.items():
        assert span.start_s >= trains[step - 1].start_s
        assert step not in trains or span.end_s <= trains[step].start_s


def test_a_batch_that_is_being_made_ahead_is_given_up_before_rollouts_end_when_the_wait_for_them_fails(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    begun = asyncio.Event()
    train_step, leave, prepare_batch = Trainers.train_step, RolloutExecutor.__aexit__, RolloutExecutor.prepare_batch

    async def prepare(_self: Trainers, _batch: Batch, *, num_minibatches: int) -> None:
        assert num_minibatches == 1
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("made ahead")

    async def train_after(self: Trainers, batch: Batch, *, num_minibatches: int = 1) -> dict[str, float]:
        await begun.wait()
        return await train_step(self, batch, num_minibatches=num_minibatches)

    async def fail_if_ahead(self: RolloutExecutor) -> list[Group]:
        if self.has_ahead:
            raise RolloutError("engines keep failing")
        return await prepare_batch(self)

    async def note(self: RolloutExecutor, *exc: object) -> None:
        ended.append("rollouts")
        await leave(self, *exc)

    monkeypatch.setattr(Trainers, "spread_ahead", prepare)
    monkeypatch.setattr(Trainers, "train_step", train_after)
    monkeypatch.setattr(RolloutExecutor, "prepare_batch", fail_if_ahead)
    monkeypatch.setattr(RolloutExecutor, "__aexit__", note)
    with pytest.raises(RolloutError, match="engines keep failing"):
        shop.run(small_config(tmp_path, model_dir))
    assert ended == ["made ahead", "rollouts"]


def test_a_checkpoint_that_is_due_precedes_the_evaluation_which_a_run_that_goes_on_makes_up_for(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[int | None] = []
    play = Evaluator.play
    settings = {"evaluate__every_steps": "1", "checkpoint__every_steps": "1"}
    run = SmallRun(tmp_path, model_dir)

    async def look(self: Evaluator) -> EvaluatedSet:
        newest = CheckpointIndex(run.folder / "checkpoints").newest()
        saved.append(newest and newest.step)
        if saved == [None, 1] or saved[-2:] == [1, 2]:
            raise RolloutError("an evaluation that fails")
        return await play(self)

    monkeypatch.setattr(Evaluator, "play", look)
    for step in (1, 2):
        with pytest.raises(RolloutError, match="an evaluation that fails"):
            shop.run(small_config(tmp_path, model_dir, **settings))
        assert [row["global_step"] for row in run.metrics()] == [*range(1, step + 1)]
        assert "eval/accuracy" not in run.metrics()[-1]
    again = shop.train(run, **settings)
    assert again.code == 0, again.error
    assert saved == [None, 1, 1, 2, 2]
    assert [row["global_step"] for row in run.metrics()] == [1, 2] and all("eval/accuracy" in row for row in run.metrics())
    assert all(row["step/total_s"] > row["step/evaluate_s"] > 0 for row in run.metrics())
    assert (run.folder / "export" / "model.safetensors").exists()
    result = json.loads((run.folder / "result.json").read_text())
    assert result["steps"] == 2 and result["heldout_after"] is not None
    assert "is already complete" in shop.train(run, **settings).error
