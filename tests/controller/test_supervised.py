"""Fine-tuning that is cut off anywhere continues with the very losses of one that was not; with real ranks, and in real runs."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from crashing import CrashError, rows_of
from faults.workshop import Workshop
from offbeat.aio import SideThread
from offbeat.algorithms.experience import sft_batch
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.train import SftConfig
from offbeat.controller.evaluate import Evaluator
from offbeat.controller.inputs import read_inputs
from offbeat.controller.parts import RunParts
from offbeat.controller.state import RunState
from offbeat.controller.supervised import Imitation, SftResult, teach
from offbeat.data.tokenizer import Tokenizer, load_tokenizer
from offbeat.errors import ConfigError, RolloutError
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.ranks.sharding import Sharder
from offbeat.ranks.trainers import Trainers
from offbeat.runs.run import run_training
from offbeat.runs.run_dir import prepare_run_dir
from offbeat.spmd.peers import RankPeers
from offbeat.spmd.ranks import OneRankLoads, OwnRank
from offbeat.spmd.rollouts import NoRolloutSource
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord, SilentRecord
from offbeat.trainer.worker import build_trainers
from ranks import run_alone, run_ranks
from small_run import SmallRun, offbeat, small_config, start_offbeat
from waiting import wait_until

SUPERVISED = {
    "sft__total_steps": "7", "sft__batch_size": "6", "sft__optimizer__lr": "2e-3",
    "sft__optimizer__warmup_steps": "3", "sft__optimizer__schedule": "linear",
    "data__heldout_size": "0", "checkpoint__every_steps": "2", "rollout__balance_batch": "false"}
OWN_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
Trouble = Callable[[int, RunState], None]
"""Called with each step that has been trained, before it is recorded."""


class Published:
    """Engines that serve whatever they are given."""

    async def publish(self, version: int, *, on_served: Callable) -> None:
        pass

    async def settle(self) -> None:
        pass


class Troubled(Trainers):
    """Real trainers, with trouble after a step."""

    trouble: Callable[[], None]

    async def train_step(self, batch, *, num_minibatches=1):
        stats = await super().train_step(batch, num_minibatches=num_minibatches)
        self.trouble()
        return stats


class Loader(NoRolloutSource):
    """A source without engines that draws data."""

    def sft_batch(self, stream, count):
        return sft_batch(self.inputs.supervision.draw(stream, count))


async def nothing() -> None:
    await asyncio.Event().wait()


def play(groups, config: Config, trouble: Trouble = lambda _step, _state: None, *, standalone: bool = True) -> SftResult:
    """One process's part of a fine-tuning, with everything real but the engines, which nothing is asked of."""
    inputs, state = read_inputs(config, supervised=True), RunState(total_steps=1)
    thread = SideThread("rank")
    own = build_trainers(config.model.path, config.for_ranks, groups)
    loading = OneRankLoads(groups.sync, Sharder.of(config.for_ranks, model=config.model.path, num_ranks=groups.world))
    trainers = Troubled(OwnRank(own, loading, thread), config.for_ranks)
    trainers.trouble = lambda: trouble(own[""].step, state)
    leads = groups.rank == 0
    source = (Loader if leads else NoRolloutSource)(inputs)
    record = RunRecord(config.run_dir, trace=False, console=Console("quiet")) if leads else SilentRecord(config.run_dir)
    with record:
        parts = RunParts(config, record, inputs, trainers, Published(), source, RankPeers(groups.sync, thread), nothing)
        try:
            return asyncio.run(teach(parts, state, Imitation(parts, state, standalone=standalone)))
        finally:
            thread.close()


def crash_at(step: int) -> Trouble:
    def trouble(done: int, _state: RunState) -> None:
        if done == step:
            raise CrashError

    return trouble


def cut_off_and_whole(groups, argument: dict) -> list[dict] | None:
    """Fine-tune once without a break, and once cut off twice; what both recorded, on rank 0."""
    model, root = argument["model"], Path(argument["root"])
    whole, cut = (small_config(root / name, model, **SUPERVISED, **argument["changes"]) for name in ("whole", "cut"))
    play(groups, whole)
    for step in (4, 5):  # the first crash leaves the checkpoint of step 2, the second that of step 4
        with pytest.raises(CrashError):
            play(groups, cut, crash_at(step))
    result = play(groups, cut)
    assert (result.steps, result.accuracy, result.stopped_early) == (7, None, False)
    rows = read_json_lines(cut.run_dir / "metrics.jsonl")
    assert groups.rank or (result.trained_tokens, result.final_loss) == (sum(row["train/tokens"] for row in rows), rows[-1]["train/loss"])
    return [rows_of(whole), rows_of(cut)] if groups.rank == 0 else None


@pytest.mark.parametrize(("world", "changes"), [
    (1, {}), (1, {"data__chat_template": "true"}), (2, {"model__lora__rank": "4", "model__lora__dropout": "0.3"}),
])
def test_a_fine_tuning_that_crashes_goes_on_with_the_losses_of_one_that_did_not(
    world: int, changes: dict[str, str], tmp_path: Path, model_dir: str,
) -> None:
    argument = {"model": model_dir, "root": str(tmp_path), "changes": changes}
    [whole, cut], *_ = [run_alone(cut_off_and_whole, argument=argument)] if world == 1 else run_ranks(
        cut_off_and_whole, world=world, argument=argument)
    assert [row["global_step"] for row in whole] == list(range(1, 8))
    assert len({row["train/loss"] for row in whole}) == 7 and whole[0]["train/lr"] < whole[2]["train/lr"] > whole[6]["train/lr"]
    assert cut == whole, "resumed losses, gradient norms and learning rates are the same to the last bit"


def test_a_stop_saves_and_the_same_command_goes_on(tmp_path: Path, model_dir: str) -> None:
    whole, cut = (small_config(tmp_path / name, model_dir, **SUPERVISED) for name in ("whole", "cut"))

    def stop(done: int, state: RunState) -> None:
        if done == 3:
            state.asked.set()

    def both(groups, _) -> None:
        play(groups, whole)
        result = play(groups, cut, stop)
        assert (result.steps, result.accuracy, result.stopped_early) == (3, None, True)
        assert (cut.run_dir / "export" / "config.json").exists()
        assert play(groups, cut).stopped_early is False

    run_alone(both)
    assert rows_of(cut) == rows_of(whole)
    events = read_json_lines(cut.run_dir / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "sft_checkpoint"] == [2, 3, 4, 6, 7]
    assert [event["step"] for event in events if event["kind"] == "sft_resumed"] == [3]


def test_exports_come_every_few_steps_as_asked_and_none_is_left_out_by_a_crash(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, **SUPERVISED, checkpoint__export_every_steps="3", checkpoint__export="false")

    def body(groups, _) -> None:
        with pytest.raises(CrashError):
            play(groups, config, crash_at(5))
        play(groups, config)

    run_alone(body)
    assert sorted(path.name for path in (config.run_dir / "exports").iterdir()) == ["step-00000003", "step-00000006"]
    assert (config.run_dir / "exports" / "step-00000006" / "tokenizer.json").exists()
    assert not (config.run_dir / "export").exists()


def test_a_warm_up_goes_on_by_itself_and_leaves_the_rows_to_reinforcement_learning(tmp_path: Path, model_dir: str) -> None:
    config = small_config(tmp_path, model_dir, **SUPERVISED)

    def body(groups, _) -> tuple[SftResult, SftResult]:
        with pytest.raises(CrashError):
            play(groups, config, crash_at(6), standalone=False)
        (config.run_dir / "metrics.jsonl").write_text('{"global_step": 0}\n{"global_step": 1}\n')  # of training that left no checkpoint
        return play(groups, config, standalone=False), play(groups, config, crash_at(1), standalone=False)

    assert [result.steps for result in run_alone(body)] == [7, 7], "one that is done is not done again"
    assert [row["global_step"] for row in rows_of(config)] == [0, 1]
    assert sorted(path.name for path in (config.run_dir / "checkpoints").iterdir()) == ["warm-up-00000006", "warm-up-00000007"]
    assert not (config.run_dir / "export").exists()


def test_an_evaluation_of_a_fine_tuning_that_fails_costs_no_step_and_is_made_up_for(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    given = {"sft__total_steps": "3", "sft__batch_size": "2", "sft__evaluate_every_steps": "2", "checkpoint__every_steps": "0"}
    saved: list[list[str]] = []
    play = Evaluator.play

    async def fail(_self: Evaluator) -> EvaluatedSet:
        saved.append(sorted(path.name for path in run.folder.glob("checkpoints/*")))
        raise RolloutError("an evaluation that fails")

    monkeypatch.setattr(Evaluator, "play", fail)
    failed = shop.train(run, "sft", **given)
    assert failed.code == 1 and "the run ends after step 2, of which a checkpoint is saved" in failed.said
    monkeypatch.setattr(Evaluator, "play", play)
    done = shop.train(run, "sft", **given)
    assert done.code == 0, done.error
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]
    assert ["eval/accuracy" in row for row in run.metrics()] == [False, True, True]
    monkeypatch.setattr(Evaluator, "play", fail)
    assert shop.train(run, "sft", **given | {"sft__total_steps": "4"}).code == 1
    assert saved == [[], ["sft-00000003", "sft-00000004"]], "that of the last step precedes its evaluation"
    monkeypatch.setattr(Evaluator, "play", play)
    assert shop.train(run, "sft", **given | {"sft__total_steps": "4"}).code == 0
    assert run.metrics()[-1]["global_step"] == 4 and "eval/accuracy" in run.metrics()[-1]


@pytest.mark.parametrize(("steps", "accuracy", "finished"), [(9, None, False), (10, None, True), (3, 0.5, True), (3, 0.4, False)])
def test_a_fine_tuning_is_finished_by_its_steps_or_its_accuracy(steps: int, accuracy: float | None, finished: bool) -> None:
    config = Config(sft=SftConfig(total_steps=10, stop_at_accuracy=0.5))
    assert (Imitation.completed(config, steps=steps, accuracy=accuracy) is not None) is finished


@pytest.mark.whole_run
def test_a_run_killed_while_it_fine_tunes_goes_on_and_then_says_that_it_is_finished(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = SUPERVISED | {"sft__total_steps": "30"}
    reference = small_config(tmp_path / "reference", model_dir, **changes)
    run_alone(lambda groups, _: play(groups, reference) and None)
    run = SmallRun(tmp_path, model_dir)
    with monkeypatch.context() as patch:
        patch.setenv("OFFBEAT_FAULT", "rank=0,point=train_step,kind=slow,nth=9")  # so that it does not end before
        process = start_offbeat("sft", *run.arguments(**changes))
    with process:
        wait_until(lambda: len(run.metrics()) > 4 or process.poll() is not None, timeout_s=120)
        process.kill()
    rows = len(run.metrics())
    assert rows < 30, "it ended before it was killed, so this test shows nothing"
    done = offbeat("sft", *run.arguments(**changes), "--json")
    assert done.returncode == 0, done.stderr
    config = small_config(tmp_path, model_dir, **changes)
    assert rows_of(config) == rows_of(reference)
    [resumed] = run.events("sft_resumed")
    assert resumed["step"] >= rows - 3
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 30
    with pytest.raises(ConfigError, match=r"is already complete \(30 supervised steps\); raise sft.total_steps to continue, or"):
        prepare_run_dir(config, kind=TRAINING_KINDS["sft"])
    prepare_run_dir(small_config(tmp_path, model_dir, **changes | {"sft__total_steps": "31"}), kind=TRAINING_KINDS["sft"])
    assert run.folder.exists(), "a run with more to do goes on in its folder"
    prepare_run_dir(config)
    assert not run.folder.exists(), "reinforcement learning does not go on from fine-tuning, which is moved aside"


@pytest.mark.drill
def test_a_warm_up_learns_publishes_and_hands_over(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    config = small_config(
        tmp_path, model_dir, run__warm_up="true", run__total_steps="1", sft__total_steps="12", sft__batch_size="16",
        sft__evaluate_every_steps="5", sft__optimizer__lr="1e-2", sft__optimizer__warmup_steps="0")
    result = run_training(config, Console("quiet", stream=io.StringIO()))
    assert result is not None and (result.warm_up_steps, result.steps) == (12, 1)
    steps = run.events("sft_step")
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[-1]["train/loss"] < 0.8 * steps[0]["train/loss"]
    # Evaluated after 5, 10 and 12 supervised steps, then handed over, then trained once.
    assert [event["version"] for event in run.events("publish")] == [4, 5]
    assert [row["global_step"] for row in run.metrics()] == [1]
    assert [event["step"] for event in run.events("sft_checkpoint")] == [12]
    folders = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert folders == ["step-00000001"], "the warm-up's checkpoints are of no use any more"


def exports_of(groups, argument: dict) -> tuple[list[str], str]:
    """What this rank writes of the tokenizer in a run with a chat template of its own, and the template of the export."""
    saved: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        save = Tokenizer.save
        patch.setattr(Tokenizer, "save", lambda self, folder: saved.append(Path(folder).name) or save(self, folder))
        config = small_config(Path(argument["root"]), argument["model"], **SUPERVISED, data__chat_template=OWN_TEMPLATE)
        play(groups, config)
    return saved, str(load_tokenizer(config.run_dir / "export").hf.chat_template)


@pytest.mark.drill
def test_the_tokenizer_with_a_template_of_ones_own_is_written_by_the_rank_that_exports_alone(tmp_path: Path, model_dir: str) -> None:
    first, second = run_ranks(exports_of, world=2, argument={"model": model_dir, "root": str(tmp_path)})
    assert first == [["tokenizer"], OWN_TEMPLATE] and second == [[], OWN_TEMPLATE]
