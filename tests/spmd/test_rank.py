"""Whole runs in SPMD mode, under the real torchrun."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import RefusedError
from offbeat.telemetry.jsonl import read_json_lines
from small_run import REWARDS, SmallRun, start_torchrun, torchrun
from waiting import wait_until

LORA = {"model__lora__rank": "4", "rollout__max_head_offpolicyness": "0", "checkpoint__every_steps": "2"}
HEADS = {"rollout__single_rank_load": "false", "rollout__balance_batch": "false"}
WORKFLOWS = Path(__file__).parents[1] / "support" / "workflows.py"


@pytest.fixture
def engine(model_dir: str) -> Iterator[tuple[EngineServer, str]]:
    """An engine in this process, and its URL."""
    server = EngineServer(EngineOptions(model=model_dir))
    try:
        yield server, server.start()
    finally:
        server.stop()


def processes_of(run: SmallRun) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if str(run.root) in " ".join(process.info["cmdline"] or ())]


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="one rank loads", marks=pytest.mark.drill), pytest.param(HEADS, id="heads load", marks=pytest.mark.whole_run)])
def test_ranks_under_torchrun_train_save_and_go_on(changes: dict[str, str], tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    changes = changes | {"evaluate__sets__right__rollout__reward": f"{REWARDS}:right"}
    done = torchrun("train", *run.arguments(checkpoint__every_steps="1", evaluate__every_steps="1", **changes), "--json", world=2)
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2]
    assert all(row["train/tokens"] > 0 and row["rollout/staleness_max_versions"] <= 1 for row in run.metrics())
    assert [event["version"] for event in run.events("publish")] == [0, 1, 2]
    assert all(event["canary_gap"] < 1e-3 for event in run.events("publish"))
    assert len(run.events("evaluation")) == 6 and [row["eval/right/accuracy"] for row in run.metrics()] == [1, 1]
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert next(kind for kind in events if kind != "note") == "start" and events[-1] == "finish", "one rank speaks for all"
    assert events.count("start") == events.count("finish") == 1
    assert (run.folder / "export" / "model.safetensors").exists()
    assert not processes_of(run)
    again = torchrun("train", *run.arguments(run__total_steps="3", **changes), "--json", world=2)
    assert again.returncode == 0, again.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]
    (resumed,) = run.events("resumed")
    assert (resumed["global_step"], resumed["version"]) == (2, 2)


@pytest.mark.drill
def test_sigterm_to_torchrun_and_all_its_processes_saves_and_leaves_nothing(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    arguments = run.arguments(run__total_steps="100000", rollout__reward=f"{REWARDS}:slow")
    with start_torchrun("train", *arguments, "--json", world=2) as agent:
        try:
            wait_until(lambda: len(run.metrics()) > 2 or agent.poll() is not None, timeout_s=120)
            tree = [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]
            assert len(tree) >= 5, "torchrun, two ranks, an engine and a reward process"
            for process in tree:  # and torchrun passes its own on to the ranks
                process.terminate()
            _, stderr = agent.communicate(timeout=90)
        finally:
            agent.kill()
    wait_until(lambda: not processes_of(run), timeout_s=30)
    last = run.metrics()[-1]["global_step"]
    assert run.events("checkpoint")[-1]["global_step"] == last, stderr
    assert json.loads((run.folder / "result.json").read_text())["stopped_early"] and not run.events("failed")
    again = torchrun("train", *run.arguments(run__total_steps=str(last + 1)), "--json", world=2)
    assert again.returncode == 0, again.stderr
    assert run.events("resumed")[-1]["global_step"] == last


def skewed(run: SmallRun, engine: str, **changes: str) -> list[str]:
    """Every second row, which is every row of the second head, takes ten times as long; `engine` is the URL of the engine that plays."""
    rows = [{"prompt": f"{i % 10}>", "answer": "slow" if i % 2 else "fast"} for i in range(64)]
    data = run.root / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run.arguments(
        data__task="", data__path=str(data), data__heldout_size="0", data__shuffle="false", rollout__consumer_batch_size="4",
        rollout__max_concurrent_rollouts="64", rollout__max_head_offpolicyness="4", rollout__workflow=f"{WORKFLOWS}:slow_by_answer",
        dist__sync_timeout_s="5", inference__urls=json.dumps([engine]), **changes)


@pytest.mark.drill
def test_heads_whose_rollouts_differ_by_more_than_the_deadline_of_a_sync_point_wait_for_each_other(
    engine: tuple[EngineServer, str], tmp_path: Path, model_dir: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *skewed(run, engine[1], **HEADS), "--json", world=2)
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in read_json_lines(run.folder / "metrics.jsonl")] == [1, 2]
    assert max(row["step/rollout_wait_s"] for row in run.metrics()) > 5, "no wait was longer than the deadline, so this shows nothing"


@pytest.mark.drill
@pytest.mark.parametrize("heads", [{}, HEADS], ids=["one rank loads", "heads load"])
def test_ranks_save_the_last_whole_step_together_when_user_code_fails_on_one(
    heads: dict[str, str], tmp_path: Path, model_dir: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    given = {"rollout__reward": f"{REWARDS}:breaks_later", "rollout__max_failures_in_a_row": "2", "data__heldout_size": "0",
             "checkpoint__every_steps": "0", "run__total_steps": "30"} | heads
    failed = torchrun("train", *run.arguments(**given), "--json", world=2)
    assert failed.returncode == 1 and "it broke" in failed.stderr
    [saved] = run.events("checkpoint")
    done = saved["global_step"]
    assert done == len(run.metrics()) > 0 and f"the run ends after step {done}, of which a checkpoint is saved" in failed.stdout
    assert not processes_of(run)
    again = torchrun("train", *run.arguments(**given | {"run__total_steps": str(done + 1)}), "--json", world=2, env={"STAYS_WELL": "1"})
    assert again.returncode == 0, again.stderr
    assert [row["global_step"] for row in run.metrics()] == [*range(1, done + 2)]


@pytest.mark.drill
@pytest.mark.parametrize("heads", [{}, HEADS], ids=["one rank loads", "heads load"])
def test_ranks_make_up_for_the_evaluation_before_which_a_rank_died(heads: dict[str, str], tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    given = {"evaluate__every_steps": "1", "checkpoint__every_steps": "1"} | heads
    dies = {"OFFBEAT_FAULT": "rank=1,point=evaluate_fn,kind=kill,nth=2"}  # the first evaluation precedes the first step
    failed = torchrun("train", *run.arguments(**given), "--json", world=2, env=dies)
    assert failed.returncode != 0 and "rank 1" in failed.stderr
    saved = json.loads((run.folder / "checkpoints" / "step-00000001" / "complete.json").read_text())
    assert saved["unevaluated"]["train/tokens"] > 0 and not any("eval/accuracy" in row for row in run.metrics() if row["global_step"])
    again = torchrun("train", *run.arguments(**given), "--json", world=2)
    assert again.returncode == 0, again.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2] and all("eval/accuracy" in row for row in run.metrics())
    assert run.metrics()[0]["train/tokens"] == saved["unevaluated"]["train/tokens"]
    assert [event["global_step"] for event in run.events("resumed")] == [1]
    assert [event["global_step"] for event in run.events("evaluation")] == [0, 1, 2], "each evaluation is done once"
    newest = json.loads((run.folder / "checkpoints" / "step-00000002" / "complete.json").read_text())
    assert newest["unevaluated"] is None and len(newest["heads"]) == (2 if heads else 1)
    taken = [group["prompt_id"] for step in (1, 2) for group in run.groups(step)]
    assert len(taken) == len(set(taken)) == (2 if heads else 4), "what the leader drew before the kill is not drawn anew"
    result = json.loads((run.folder / "result.json").read_text())
    assert result["steps"] == 2 and result["heldout_before"] is not None and result["heldout_after_step"] == 2


@pytest.mark.drill
def test_one_rank_that_loads_carries_the_same_work_through(
    engine: tuple[EngineServer, str], tmp_path: Path, model_dir: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *skewed(run, engine[1], rollout__single_rank_load="true", rollout__balance_batch="true"), "--json", world=2)
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in read_json_lines(run.folder / "metrics.jsonl")] == [1, 2]
    assert max(row["step/rollout_wait_s"] for row in run.metrics()) > 5, "no wait was longer than the deadline, so this shows nothing"


@pytest.mark.drill
def test_ranks_go_on_while_an_adapter_is_fanned_out_and_one_that_no_engine_takes_ends_the_run(
    engine: tuple[EngineServer, str], tmp_path: Path, model_dir: str,
) -> None:
    run, (server, url), load = SmallRun(tmp_path, model_dir), engine, engine[0]._loop.hold_adapter
    bad = 3

    def load_late(name: str, folder: str) -> None:
        """Not before all ranks have passed the points behind the step that published the version."""
        version = int(name.rpartition("@")[2])
        if version == bad:
            raise RefusedError("this adapter is not to my taste")
        wait_until(lambda: not version or len(run.metrics()) >= version, timeout_s=90)
        load(name, folder)

    server._loop.hold_adapter = load_late
    done = torchrun("train", *run.arguments(**LORA, run__total_steps="5", inference__urls=json.dumps([url])), world=2)
    assert done.returncode == 1
    last_words = [line for line in done.stderr.splitlines() if line.startswith("offbeat: ")]
    assert len(last_words) == 2 and all(line.endswith("400: this adapter is not to my taste") for line in last_words), done.stderr
    assert any(re.match(r"offbeat: the adapter policy\.[0-9a-f]{6}@3 is bad: no engine takes it; engine 0: ", line) for line in last_words)
    assert any(line.startswith("offbeat: rank 0 failed: PublishError: the adapter policy") for line in last_words)
    assert [event["version"] for event in run.events("publish")] == [0, 1, 2]
    assert [row["global_step"] for row in run.metrics()] == [1, 2, 3]
    for row, event in zip(run.metrics(), run.events("publish")[1:], strict=False):
        assert row["time_s"] < event["time_s"], "the loop waited for the fan-out"
    for step in (1, 2, 3):
        versions = {v for group in run.groups(step) for t in group["trajectories"] for v in t["versions"] if v >= 0}
        assert versions == {step - 1}, "the bound is 0"
    assert [event["global_step"] for event in run.events("checkpoint")] == [2, 3]
    assert not processes_of(run)
