"""Whole runs in real processes: what they leave behind, how they go on, and what they never touch."""

import asyncio
import io
import json
import shutil
from collections.abc import Mapping
from contextvars import ContextVar, copy_context
from pathlib import Path

import pytest
import torch

import offbeat.runs.run as run_module
from faults.workshop import Workshop
from offbeat.aio import PRESSED, End, listener
from offbeat.config.load import load_config
from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.evaluate import Evaluator, Keep
from offbeat.data.tokenizer import load_tokenizer
from offbeat.data.trajectory import Group
from offbeat.errors import CodeError, DeadlineError, PublishError, StorageError
from offbeat.evaluation.scores import Evaluation
from offbeat.fleet.publishers import OnServed, WeightsPublisher
from offbeat.journal.run_journal import RunJournal, folder_of
from offbeat.model.load import load_causal_lm
from offbeat.rollout.executor import RolloutExecutor
from offbeat.runs.run import RunResult, SupervisedResult, execute, run_kind, run_training
from offbeat.telemetry.console import Console
from offbeat.types import Version
from small_run import REWARDS, SmallRun, small_config

ASKED = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]


def test_a_run_leaves_its_result_and_its_controller_stays_small_and_free_of_torch(finished_run: SmallRun) -> None:
    result = json.loads((finished_run.folder / "result.json").read_text())
    assert (result["steps"], result["warm_up_steps"], result["seed"], result["stopped_early"]) == (2, 0, 0, False)
    assert 0 <= result["heldout_before"] <= 1 and 0 <= result["heldout_after"] <= 1 and result["heldout_after_step"] == 2
    assert result["train_wall_s"] > 0 and result["startup_wall_s"] > 0
    assert 0 <= result["max_staleness_seen"] <= 1
    assert 0 <= result["max_logprob_gap"] < 1e-3
    assert result["torch_in_controller"] is False
    assert result["controller_memory_bytes"] < 200e6


def test_a_run_leaves_a_row_per_step_and_its_resolved_configuration(finished_run: SmallRun, model_dir: str) -> None:
    rows = finished_run.metrics()
    assert [row["global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert {"train/loss", "train/grad_norm", "reward/mean", "step/total_s", "policy/logprob_gap_mean", "policy/canary_gap"} <= set(row)
        assert row["rollout/drawn_again_prompts"] == 0
        assert row["policy/canary_gap"] < 1e-3
        assert 0 < row["rollout/generated_tokens"] <= 2 * 2 * 5
    assert rows[0]["rollout/rejected_share"] == rows[0]["rollout/rejected_timed_out_share"] == 0
    assert rows[0]["policy/logprob_gap_max"] < 1e-3, "the first step trains on its own policy's tokens"
    chosen = small_config(
        finished_run.root, model_dir, train__precision="float32", train__gradient_checkpointing="off", data__chat_template="false",
        checkpoint__journal_keep="all", weights__whole_every_versions="1")
    assert load_config(str(finished_run.folder / "config.toml")) == chosen


def test_a_run_leaves_a_model_that_loads(finished_run: SmallRun, model_dir: str) -> None:
    folder = finished_run.folder / "export"
    tokens = torch.tensor([load_tokenizer(folder).encode("321>")])
    with torch.inference_mode():
        new, old = (load_causal_lm(str(f), attention="sdpa")(input_ids=tokens, use_cache=False).logits for f in (folder, model_dir))
    assert new.shape == old.shape
    assert not torch.equal(new, old), "two steps with rewards left the weights as they were"


def test_a_stopped_run_saves_and_says_so(stopped_run: SmallRun) -> None:
    assert stopped_run.done is not None and stopped_run.done.returncode == 130, stopped_run.done
    result = json.loads((stopped_run.folder / "result.json").read_text())
    assert result["stopped_early"] is True
    assert result["steps"] == stopped_run.metrics()[-1]["global_step"] == stopped_run.events("checkpoint")[-1]["global_step"]


def saved_state(run: SmallRun, step: int) -> dict:
    return json.loads((run.folder / "checkpoints" / f"step-{step:08d}" / "complete.json").read_text())


def test_a_run_that_is_started_again_goes_on_and_loses_no_prompt(
    stopped_run: SmallRun, shop: Workshop, tmp_path: Path, model_dir: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    shutil.copytree(stopped_run.folder, run.folder)
    done = stopped_run.metrics()[-1]["global_step"]
    (saved,) = saved_state(run, done)["heads"]
    assert saved["in_flight"], "nothing was in flight at the checkpoint, so this test shows nothing"
    result = shop.run(small_config(tmp_path, model_dir, run__total_steps=str(done + 2)))
    assert (result.steps, result.stopped_early) == (done + 2, False)
    assert [row["global_step"] for row in run.metrics()] == list(range(1, done + 3))
    (resumed,) = run.events("resumed")
    assert (resumed["global_step"], resumed["version"], resumed["prompts_in_flight"]) == (done, done, len(saved["in_flight"]))
    assert run.events("publish")[-1]["version"] == done + 2
    # Every prompt that was ever drawn was trained on once: those in flight at the checkpoint come first.
    trained = [group["prompt_id"] for step in range(1, done + 3) for group in run.groups(step)]
    drawn = saved_state(run, done + 2)["heads"][0]["stream"]["position"]
    assert sorted(trained) == sorted(f"0:{index}" for index in range(drawn))
    assert run.events("rejected") == []
    assert set(saved["in_flight"][:2]) <= set(trained[2 * done :])


def test_a_run_saves_by_time_as_well_and_goes_on_from_there(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    settings = {"checkpoint__every_steps": "0", "checkpoint__every_minutes": "1e-9"}
    run = SmallRun(tmp_path, model_dir)
    shop.run(small_config(tmp_path, model_dir, **settings))
    assert [event["global_step"] for event in run.events("checkpoint")] == [1, 2], "the last step is saved anyway"
    whole = [run.groups(step) for step in (1, 2)]
    shutil.rmtree(run.folder / "checkpoints" / "step-00000002")  # as if it had been killed in its second step
    result = shop.run(small_config(tmp_path, model_dir, **settings))
    assert result is not None and (result.steps, [event["global_step"] for event in run.events("resumed")]) == (2, [1])
    assert [group["prompt_id"] for group in run.groups(1)] == [group["prompt_id"] for group in whole[0]]


def test_no_log_of_a_run_is_empty_and_its_time_line_is_valid_json(finished_run: SmallRun) -> None:
    assert all(log.stat().st_size for log in (finished_run.folder / "logs").rglob("*"))
    assert json.loads((finished_run.folder / "trace.json").read_text())[-1]["args"] == {"name": "offbeat"}


def test_a_reward_that_breaks_later_leaves_a_checkpoint_to_go_on_from(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    given = {"rollout__reward": f"{REWARDS}:breaks_later", "rollout__max_failures_in_a_row": "2", "data__heldout_size": "0"}
    failed = shop.train(run, **given, run__total_steps="30")
    [line] = failed.error.splitlines()
    assert failed.code == 2 and line.startswith("offbeat: ") and f"the reward {REWARDS}:breaks_later raised ValueError: it broke" in line
    [saved] = run.events("checkpoint")
    done = saved["global_step"]
    assert 0 < done < 10 and done == len(run.metrics())
    assert f"the run ends after step {done}, of which a checkpoint is saved" in failed.said
    monkeypatch.setenv("STAYS_WELL", "1")
    result = shop.run(small_config(tmp_path, model_dir, **given, run__total_steps=str(done + 1)))
    assert result is not None and result.steps == done + 1
    assert [row["global_step"] for row in run.metrics()] == [*range(1, done + 2)]


def test_a_stop_while_the_run_waits_for_rollouts_ends_it_after_the_step_before_with_its_prompts(
    shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = RolloutExecutor._take_batch
    waits = asyncio.Event()

    async def take_two(self: RolloutExecutor) -> list[Group]:
        if self._gate.version < 2:
            return await take(self)
        waits.set()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def press(end: End) -> None:
        await waits.wait()
        end("pressed")

    pressing: list[asyncio.Task[None]] = []
    monkeypatch.setattr(RolloutExecutor, "_take_batch", take_two)
    monkeypatch.setattr(run_module, "listener", ContextVar(
        "listener", default=lambda loop, end: pressing.append(loop.create_task(press(end)))))
    run = SmallRun(tmp_path, model_dir)
    result = shop.run(small_config(tmp_path, model_dir, run__total_steps="9", checkpoint__every_steps="0"))
    assert isinstance(result, RunResult) and (result.steps, result.stopped_early) == (2, True)
    assert [event["global_step"] for event in run.events("checkpoint")] == [2] and (run.folder / "export").exists()
    monkeypatch.undo()
    result = shop.run(small_config(tmp_path, model_dir, run__total_steps="4"))
    assert isinstance(result, RunResult) and (result.steps, result.stopped_early) == (4, False)
    trained = [group["prompt_id"] for step in range(1, 5) for group in run.groups(step)]
    drawn = saved_state(run, 4)["heads"][0]["stream"]["position"]
    in_flight = saved_state(run, 4)["heads"][0]["in_flight"]
    assert sorted([*trained, *in_flight]) == sorted(f"0:{index}" for index in range(drawn))


WHOLE_RUN = pytest.mark.whole_run
REPEATED = [
    pytest.param({}, marks=pytest.mark.drill, id="grpo"),
    pytest.param({"model__lora__rank": "4"}, marks=pytest.mark.drill, id="grpo of an adapter"),
    *(pytest.param({"algorithm__preset": name}, marks=WHOLE_RUN, id=name) for name in (
        "dr_grpo", "rloo", "reinforce_pp", "dapo", "ppo", "gspo", "cispo", "sapo", "gmpo", "mis", "m2po", "dppo", "deepseek_v32"))]
OF_TIMES = ("_s", "_per_s", "_per_s_per_device", "_bytes", "_share", "balance/gap")
"""Ends of the names of metrics that time or the machine decides."""


@pytest.mark.parametrize("changes", REPEATED)
def test_a_synchronous_run_repeats_bit_for_bit(changes: dict[str, str], tmp_path: Path, model_dir: str) -> None:
    runs = []
    for name in ("one", "two"):
        config = small_config(
            tmp_path / name, model_dir, run__total_steps="4", rollout__max_head_offpolicyness="0", rollout__group_size="4",
            rollout__consumer_batch_size="4", rollout__max_concurrent_rollouts="4", train__optimizer__lr="1e-2", evaluate__every_steps="2",
            data__task_size="6", rollout__max_new_tokens="10", data__heldout_size="16", **changes)
        run_training(config, Console("quiet", stream=io.StringIO()))
        run = SmallRun(tmp_path / name, model_dir)
        metrics = [{key: value for key, value in row.items() if not key.endswith(OF_TIMES)} for row in run.metrics()]
        assert any(row["train/loss"] for row in metrics[1:])
        exported = {path.name: path.read_bytes() for path in (run.folder / "export").glob("*.safetensors")}
        runs.append((exported, [run.groups(step) for step in range(1, 5)], metrics))
    (exported, groups, metrics), (again, same_groups, same_metrics) = runs
    assert exported == again and exported
    for group, same in zip([g for step in groups for g in step], [g for step in same_groups for g in step], strict=True):
        assert group["prompt_id"] == same["prompt_id"]
        for field in ("tokens", "rollout_logprobs"):
            assert [t[field] for t in group["trajectories"]] == [t[field] for t in same["trajectories"]]
    differ = {key for row, same in zip(metrics, same_metrics, strict=True) for key in row if row[key] != same[key]}
    assert not differ


@pytest.mark.parametrize("fails", ["settle", "evaluate", "publish"])
def test_whatever_ends_a_run_its_last_whole_step_is_saved_with_its_rollouts_and_its_row(
    fails: str, shop: Workshop, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle, measure, publish = WeightsPublisher.settle, Evaluator._measure, WeightsPublisher.publish

    async def settle_twice(self: WeightsPublisher, *, behind: int = 0) -> None:
        if run.metrics()[1:]:
            raise PublishError("version 3 is served by 0 engines")
        await settle(self, behind=behind)

    async def measure_once(self: Evaluator, keep: Keep | None) -> Evaluation:
        if run.metrics()[1:]:
            raise DeadlineError("waiting for evaluation passed its deadline")
        return await measure(self, keep)

    async def publish_twice(self: WeightsPublisher, version: Version, *, on_served: OnServed) -> None:
        if run.metrics()[1:]:
            raise PublishError("version 3 cannot be written")
        await publish(self, version, on_served=on_served)

    if fails == "settle":
        monkeypatch.setattr(WeightsPublisher, "settle", settle_twice)
    elif fails == "publish":
        monkeypatch.setattr(WeightsPublisher, "publish", publish_twice)
    else:
        monkeypatch.setattr(Evaluator, "_measure", measure_once)
    run = SmallRun(tmp_path, model_dir)
    given = {"run__total_steps": "5", "evaluate__every_steps": "3", "checkpoint__every_steps": "0"}
    failed = shop.train(run, **given)
    done = 2 if fails == "settle" else 3  # the step whose evaluation or publish fails is done itself
    assert failed.code == 1 and f"the run ends after step {done}, of which a checkpoint is saved" in failed.said
    monkeypatch.undo()
    result = shop.run(small_config(tmp_path, model_dir, **given))
    assert isinstance(result, RunResult) and result.steps == 5
    assert [event["global_step"] for event in run.events("resumed")] == [done]
    trained = [group["prompt_id"] for step in range(1, 6) for group in run.groups(step)]
    assert len(set(trained)) == len(trained) == 10
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3, 4, 5]


def test_a_journal_goes_on_after_an_error_between_the_training_of_a_step_and_its_record(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish = WeightsPublisher.publish

    async def publish_twice(self: WeightsPublisher, version: Version, *, on_served: OnServed) -> None:
        if version == 3:
            raise PublishError("version 3 cannot be written")
        await publish(self, version, on_served=on_served)

    monkeypatch.setattr(WeightsPublisher, "publish", publish_twice)
    run = SmallRun(tmp_path, model_dir)
    given = {"run__total_steps": "5", "checkpoint__every_steps": "0", "checkpoint__journal_keep": "all"}
    config = small_config(tmp_path, model_dir, **given)
    with pytest.raises(PublishError, match="version 3 cannot be written"):
        run_training(config, Console("quiet", stream=io.StringIO()))
    with RunJournal(folder_of(run.folder), identity=b"", tell=print) as journal:
        found = journal.read(0)
    assert found is not None and found[1] == "" and [step.global_step for step in found[0].steps] == [1, 2, 3]
    assert [each["global_step"] for each in run.events("checkpoint")] == [3]


def test_answers_that_the_model_can_never_write_are_advice_where_an_own_reward_gets_them(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr("offbeat.runs.run._with_parts", start_nothing)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1>", "answer": "Yes"}\n' * 3)
    own = {"data__task": "", "data__path": str(rows), "data__heldout_size": "0"}
    execute(small_config(tmp_path, model_dir, **own), Console("quiet"), lambda _parts, _state: start_nothing())
    advice = SmallRun(tmp_path, model_dir).events("advice")[0]
    assert advice["text"].startswith("3 of the first 3 rows have an answer that the model can never write; ")


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ '>' if m.role == 'assistant' else '' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}")


@pytest.mark.parametrize(("kind", "row"), [
    ("train", {"prompt": ASKED, "answer": "1"}), ("sft", {"prompt": ASKED, "answer": "1"}),
    ("dpo", {"prompt": ASKED, "chosen": "1", "rejected": "2"}), ("reward-model", {"prompt": ASKED, "chosen": "1", "rejected": "2"})])
def test_what_a_chat_template_does_not_write_is_advice_at_the_start_of_each_kind_of_run(
    tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch, kind: str, row: dict,
) -> None:
    async def start_nothing(*_: object) -> None:
        pass

    monkeypatch.setattr("offbeat.runs.run._with_parts", start_nothing)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 3)
    own = {"data__task": "", "data__path": str(rows), "data__heldout_size": "0", "data__chat_template": NO_SYSTEM}
    execute(small_config(tmp_path, model_dir, **own), Console("quiet"), lambda _parts, _state: start_nothing(), kind=TRAINING_KINDS[kind])
    told = [event["text"] for event in SmallRun(tmp_path, model_dir).events("advice")]
    [advice] = [text for text in told if "chat template" in text]
    assert advice.startswith(f"the chat template of tokenizer {model_dir!r} does not write system messages, which are put before")


def test_a_run_that_fails_says_why_in_its_events(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    config = small_config(tmp_path, model_dir, rollout__reward=f"{REWARDS}:gives_text")
    with pytest.raises(CodeError, match="gives_text returned what cannot be trained on: 'good'"):
        run_training(config, Console("quiet", stream=io.StringIO()))
    (failed,) = run.events("failed")
    assert failed["error"].startswith("CodeError: the reward")
    assert "the run failed" in (run.folder / "logs" / "controller.log").read_text()
    assert not (run.folder / "result.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_result_that_a_full_disk_does_not_take_is_shown_all_the_same(tmp_path: Path) -> None:
    config, shown = small_config(tmp_path), io.StringIO()
    config.run_dir.mkdir()
    (config.run_dir / ".result.json.part").symlink_to("/dev/full")
    result = SupervisedResult(
        steps=2, trained_tokens=99, final_loss=0.5, accuracy=None, accuracy_step=None, train_wall_s=1, startup_wall_s=1, seed=0,
        torch_in_controller=False, controller_memory_bytes=1, stopped_early=False)
    with pytest.raises(StorageError, match="cannot be written: No space left on device; free space there; what was saved before is intact"):
        run_module._finish(result, config, Console("json", stream=shown))
    assert json.loads(shown.getvalue())["trained_tokens"] == 99


class PressedAtTheEnd(Console):
    """A console whose user asks the run to end when the last step is shown."""

    def __init__(self) -> None:
        super().__init__("quiet", stream=io.StringIO())
        self.ends: list[End] = []
        self.notes: list[str] = []

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        super().update(step, metrics)
        if step == 2:
            self.ends[-1](PRESSED)

    def note(self, text: str) -> None:
        super().note(text)
        self.notes.append(text)


@pytest.mark.parametrize("kind", ["train", pytest.param("sft", marks=pytest.mark.drill)])
def test_an_interrupt_after_the_last_step_is_told_that_none_is_left(kind: str, tmp_path: Path, model_dir: str) -> None:
    console = PressedAtTheEnd()

    def run() -> RunResult | SupervisedResult | None:
        listener.set(lambda _loop, end: console.ends.append(end))
        return run_kind(TRAINING_KINDS[kind], small_config(tmp_path, model_dir, sft__total_steps="2", sft__batch_size="4"), console)

    result = copy_context().run(run)
    assert result is not None and (result.steps, result.stopped_early) == (2, False)
    told = [text for text in console.notes if "Ctrl-C" in text]
    assert told == ["all steps are done, and the run ends once what follows the last one is done; press Ctrl-C again to stop at once"]
